# make serve    install, fetch the default model once, serve on 127.0.0.1:30000
# make test     install, then every check and every test
# make check-native    the CPU kernels' tests under address and undefined-behaviour sanitizers
#
# PYTHON is the interpreter that .venv is made with. torch comes from your package index as it is
# set up; for its smaller, CPU-only build set
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu before the first `make`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed
SERVING := $(VENV)/.serving
BUILT_FROM := pyproject.toml constraints.txt $(wildcard srt/kernels/cpu/*.cpp srt/kernels/cpu/*.h)
TORCH = { test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); } && \
	$(PIP) install --constraint constraints.txt torch

.DELETE_ON_ERROR:
.PHONY: install serve test check check-native bench docs clean

install: $(INSTALLED)

$(INSTALLED): $(BUILT_FROM)
	$(TORCH)
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	$(PIP) install --no-deps --target $(VENV)/sglang/0.5.2 sglang==0.5.2
	$(PIP) install --no-deps --target $(VENV)/sglang/0.5.10 sglang==0.5.10
	touch $@

# What serving needs, which is a third of what the tests do.
$(SERVING): $(BUILT_FROM)
	$(TORCH)
	$(PIP) install --constraint constraints.txt --editable .
	touch $@

serve: $(if $(wildcard $(INSTALLED)),install,$(SERVING))
	$(BIN)/phloem serve $(ARGS)

# Two processes, since most tests keep one core busy, and each file in one, for what its tests share.
test: check
	$(BIN)/pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder $(ARGS)

# The copy in build/typed is the wheel's content under its real import names: type checks and
# import rules run on it, and it proves that the wheel builds, also where there is no compiler:
# `install` has built the kernels, and they take a minute.
check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	CC=false CXX=false $(PIP) install --quiet --no-deps --no-build-isolation --target build/typed .
	$(BIN)/mypy
	PYTHONPATH=build/typed $(BIN)/lint-imports
	MYPYPATH=benchmark:benchmark/programs $(BIN)/mypy --explicit-package-bases test benchmark

# A build of its own, loaded instead of the installed one. Checks that every load of a vector would
# pay for are off, and tests that only compare bits of what others compute are left out.
KERNELS := srt/kernels/cpu
SANITIZED := build/sanitized
SANITIZE := -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all
SANITIZE += -fno-sanitize=null,object-size,vptr,alignment,pointer-overflow
OBJECTS := $(patsubst $(KERNELS)/%.cpp,$(SANITIZED)/%.o,$(wildcard $(KERNELS)/*.cpp))
PRELOADED = $(foreach name,asan stdc++,$(shell $(CXX) -print-file-name=lib$(name).so))

$(SANITIZED)/%.o: $(KERNELS)/%.cpp $(wildcard $(KERNELS)/*.h)
	mkdir -p $(@D)
	$(CXX) -std=c++17 -O1 -g1 -fPIC -fvisibility=hidden -ffp-contract=off -pthread -w \
		$(SANITIZE) -c $< -o $@

$(SANITIZED)/libphloem.so: $(OBJECTS)
	$(CXX) -shared -pthread $(SANITIZE) $^ -o $@

check-native: install
	$(MAKE) --jobs=2 $(SANITIZED)/libphloem.so
	LD_PRELOAD="$(PRELOADED)" ASAN_OPTIONS=detect_leaks=0 \
		PHLOEM_NATIVE_LIBRARY=$(SANITIZED)/libphloem.so $(BIN)/pytest --capture=sys \
		test/contract/test_cpu_kernels.py test/contract/test_cpu_attention.py \
		test/contract/test_kv_access.py \
		test/srt/models/test_cpu_model.py -k "not depend and not bfloat16" $(ARGS)

bench: install
	$(BIN)/phloem bench $(ARGS)

docs: install
	$(BIN)/python -m phloem.srt.cli.docs > docs/cli.md
	$(BIN)/python -m phloem.lang.api_page > docs/dsl-api.md

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf .import_linter_cache .grimp_cache
