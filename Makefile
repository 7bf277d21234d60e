# `make demo` and `make test` do all set-up: a virtual environment, the package with what it needs, then the run.
# They need python3 (3.11 or later), make and g++. PYTHON chooses another interpreter; each gets its own environment.
PYTHON ?= python3
VENV ?= .venv/$(shell $(PYTHON) -c 'import sys; print("py%d%d" % sys.version_info[:2])')
BIN = $(VENV)/bin
SOURCES = pyproject.toml ffi/CMakeLists.txt $(wildcard ffi/*.cc ffi/*.h)

# A process for each core, of a few: each compiles for itself and imports jax. Each takes a contiguous part of the
# tests, so that a file's tests share what they have compiled; one that is done takes half of another's rest.
# Bytecode is kept even where PYTHONDONTWRITEBYTECODE is set: the tests start hundreds of processes of Python.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

.PHONY: demo demo-quantized test test-all installed docs notebooks package release lint bench clean python

demo: $(VENV)/demo
	@echo "== examples/digits.py: a network learns digits with jax_splitk's weight gradients"
	@$(BIN)/python examples/digits.py

demo-quantized: $(VENV)/demo
	@echo "== examples/quantized_digits.py: a network is quantized to int4, and adapters are trained on it"
	@$(BIN)/python examples/quantized_digits.py
	@echo "== examples/serve_checkpoint.py: checkpoints of seven 4- and 8-bit formats are read and generate text"
	@$(BIN)/python examples/serve_checkpoint.py

# Every promise, on the cases that differ the most. The other cases, more machine code and the benchmarks: test-all.
test: $(VENV)/installed
	$(PYTEST) -m "not exhaustive"

test-all: $(VENV)/installed
	$(PYTEST)

# What the tests need, without a run of them.
installed: $(VENV)/installed

# The documentation, as HTML in build/site; a warning is an error.
docs: $(VENV)/docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "== the documentation: open $(CURDIR)/build/site/index.html in a browser"
	@echo "== its search needs a server: $(PYTHON) -m http.server --directory build/site"

# The outputs that the notebooks store, and the documentation shows.
notebooks: $(VENV)/installed $(VENV)/docs
	JAX_PLATFORMS=cpu JAX_SPLITK_CACHE_DIR=$(CURDIR)/build/notebooks $(BIN)/python -m nbconvert --to notebook --execute \
	  --inplace --coalesce-streams --ExecutePreprocessor.record_timing=False docs/notebooks/*.ipynb

# The sdist and the wheel, in dist, each tried in an empty environment.
package: | python
	PYTHON=$(PYTHON) .ci/package dist

# Everything of a release that needs no host: checks, then the sdist and the wheels in dist, and what to do next.
release:
	@.ci/release

lint: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/clang-format --dry-run --Werror ffi/*.cc ffi/*.h jax_splitk/kernels/*/*.cu jax_splitk/kernels/*/*.cuh examples/*/*.cc examples/*/src/*/*.cu

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.wgrad

# Names a Python that is too old before an environment of it is made; any Python can run this.
python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:3]; v >= (3, 11) or sys.exit("jax_splitk needs Python 3.11 or later, this is %d.%d.%d: make PYTHON=python3.11 ..." % v)'

# What the examples need; less than what the tests need.
$(VENV)/demo: $(SOURCES) | python
	@echo "== 1 of 2: a virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== 2 of 2: jax_splitk and what it needs (jax, scikit-learn, a C++ build), in a minute or two the first time"
	@$(BIN)/python -m pip install --quiet --editable ".[demo]"
	@touch $@

$(VENV)/installed: $(SOURCES) | python
	@echo "== jax_splitk, the compiler of its kernels and what tests and plots need, in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet --editable ".[test,bench]"
	@touch $@ $(VENV)/demo

# The pages are made of the source: the package is not built for them.
$(VENV)/docs: pyproject.toml | python
	@echo "== what the documentation needs, in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet --group docs
	@touch $@

clean:
	rm -rf .venv build
