# Every target makes the environment it needs: a fresh clone needs no step before it.
#   make reproduce ARGS="--only 02 -p budget=512"      make test ARGS="-k cache"

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup test reproduce lab data clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## create .venv with everything installed, nothing else

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' is missing or older than Python 3.11: install a newer one, or name it with make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' cannot create virtual environments: install its venv module (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV): some minutes the first time"
	@$(RUN) -m pip install $(if $(CI),--quiet) --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

test: $(STAMP) ## lint, type check and run the tests (ARGS go to pytest)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadgroup $(ARGS)

reproduce: $(STAMP) ## run the whole study: notebooks, figures, gallery (ARGS: see --help)
	$(RUN) -m anchormass reproduce $(ARGS)

lab: $(STAMP) ## open JupyterLab on the notebooks
	$(RUN) -m jupyterlab notebooks $(ARGS)

data: $(STAMP) ## fetch and build the training text
	$(RUN) -m anchormass data build $(ARGS)

clean: ## remove what was built (.venv and the download cache stay)
	rm -rf build figures/index.html figures/plotly.min.js .pytest_cache .ruff_cache .mypy_cache .hypothesis
	[ ! -d figures ] || find figures -name '*.json' ! -name manifest.json -delete
