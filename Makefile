# Everything a developer or CI runs. `make demo` and `make test` set up what they need.

PYTHON ?= python3
# Which torch: a version (TORCH=2.6.0), and an index for those who want another build than PyPI's.
TORCH ?=
# Each version has an environment of its own.
VENV ?= .venv$(if $(TORCH),-$(TORCH))
TORCH_INDEX ?=

BIN := $(VENV)/bin
TORCH_SPEC := torch$(if $(TORCH),==$(TORCH))
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
RUST_SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock pyproject.toml README.md
PYTHON_SOURCES := $(wildcard python/ringloader/*)
WHEEL_STAMP := $(VENV)/.wheel

.PHONY: help test test-fast demo frameworks frameworks-docs bench bench-smoke bench-rust lint rust-test python-test python-test-fast parity parity-all stubs loom loom-fast tsan tsan-fast storm storm-fast portable clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(VENV)/.test:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -U pip
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH_SPEC)"
	$(PIP) freeze | grep -iE '^torch==' > $(VENV)/constraints.txt
	$(PIP) install -c $(VENV)/constraints.txt "maturin>=1.9,<2" numpy --group test
	touch $@

$(VENV)/.demo: $(VENV)/.test
	$(PIP) install -c $(VENV)/constraints.txt --group demo
	touch $@

# torchvision's binary belongs to torch's.
$(VENV)/.frameworks: $(VENV)/.test pyproject.toml
	$(PIP) install -c $(VENV)/constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torchvision
	$(PIP) install -c $(VENV)/constraints.txt --group frameworks
	touch $@

# Optimised but for link-time optimisation; what is tested is the installed wheel.
$(WHEEL_STAMP): $(VENV)/.test $(RUST_SOURCES) $(PYTHON_SOURCES)
	rm -rf build/wheels
	$(BIN)/maturin build -q --profile dev-wheel --out build/wheels -i $(BIN)/python
	$(PIP) install --no-deps --force-reinstall build/wheels/*.whl
	touch $@

test: lint rust-test loom-fast tsan-fast storm-fast portable python-test stubs ## every gate that ends within minutes

test-fast: rust-test python-test-fast ## while working

rust-test: ## the crates' own tests
	cargo test -q --workspace

python-test: $(WHEEL_STAMP) ## all Python tests
	$(BIN)/python -m pytest

python-test-fast: $(WHEEL_STAMP)
	$(BIN)/python -m pytest -m "not slow" --path native

parity: $(WHEEL_STAMP) ## all generated cases beside torch; TORCH=2.6.0 for another version
	$(BIN)/python -m pytest -q tests/parity/generated/whole.py

parity-all: ## the oldest torch that is supported, one between, and the newest
	$(MAKE) parity TORCH=2.6.0
	$(MAKE) parity TORCH=2.10.0
	$(MAKE) parity TORCH=

lint: $(VENV)/.test ## formatting, clippy, rustdoc, ruff
	cargo fmt --all --check
	cargo clippy -q --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc -q --no-deps -p ringloader-core
	$(BIN)/ruff check python tests benches examples extras
	$(BIN)/ruff format --check python tests benches examples extras

stubs: $(WHEEL_STAMP) ## mypy, and the stub against the binary
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest ringloader._native

loom: ## all models of the memory model, and their planted faults
	ci/loom.sh

loom-fast:
	ci/loom.sh --fast

tsan: ## ThreadSanitizer, and its planted faults
	ci/tsan.sh

tsan-fast:
	ci/tsan.sh --fast

storm: ## SIGKILL at random and at each named moment, with successors
	ci/storm.sh

storm-fast:
	ci/storm.sh --fast

portable: ## the build for systems without memfd
	RUSTFLAGS="--cfg ringloader_portable" cargo check -q --workspace --target-dir target/portable

demo: $(VENV)/.demo $(WHEEL_STAMP) ## train on photographs through both loaders
	$(BIN)/python examples/photographs/train.py

frameworks: $(VENV)/.frameworks $(WHEEL_STAMP) ## the real frameworks, the same without us and with us
	$(BIN)/python -m pytest tests/frameworks

frameworks-docs: $(VENV)/.frameworks $(WHEEL_STAMP) ## the same, and writes the versions into docs/frameworks
	$(BIN)/python -m pytest tests/frameworks --write-versions

bench: $(VENV)/.demo $(WHEEL_STAMP) ## the table of ratios to torch's loader
	$(BIN)/python -m benches.python

bench-smoke: $(VENV)/.demo $(WHEEL_STAMP) ## checks every row of the benchmark, times it once
	$(BIN)/python -m benches.python --quick

bench-rust: ## criterion
	cargo bench -p ringloader-core

clean:
	rm -rf $(VENV) build target
