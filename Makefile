# make serve    install, fetch the default model once, serve on 127.0.0.1:30000
# make test     install, then every check and every test
#
# PYTHON is the interpreter that .venv is made with. torch comes from your package index as it is
# set up; for its smaller, CPU-only build set
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu before the first `make`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed

.DELETE_ON_ERROR:
.PHONY: install serve test check bench docs clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt torch
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	touch $@

serve: install
	$(BIN)/phloem serve $(ARGS)

test: check
	$(BIN)/pytest $(ARGS)

# The copy in build/typed is the wheel's content under its real import names: type checks and
# import rules run on it, and it proves that the wheel builds.
check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(PIP) install --quiet --no-deps --no-build-isolation --target build/typed .
	$(BIN)/mypy
	PYTHONPATH=build/typed $(BIN)/lint-imports
	MYPYPATH=benchmark $(BIN)/mypy --explicit-package-bases test benchmark

bench: install
	$(BIN)/phloem bench $(ARGS)

docs: install
	$(BIN)/python -m phloem.srt.cli.docs > docs/cli.md

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf .import_linter_cache .grimp_cache
