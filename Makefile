# Everything a developer or CI runs. `make demo` and `make test` set up what they need.

PYTHON ?= python3
# Which torch: a version (TORCH=2.6.0), and an index for those who want another build than PyPI's.
TORCH ?=
# Each version of it, and each Python that is named, has an environment of its own.
VENV ?= .venv$(if $(TORCH),-$(TORCH))$(if $(filter-out python python3,$(PYTHON)),-$(notdir $(PYTHON)))
TORCH_INDEX ?=

# For the benchmark's loader that needs a newer Python.
THREADS_PYTHON ?= python3.13
THREADS_VENV ?= .venv-threads
# For a framework whose packages are older than those of the others.
APART_VENV ?= $(VENV)-apart

BIN := $(VENV)/bin
TORCH_SPEC := torch$(if $(TORCH),==$(TORCH))
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
THREADS_PIP := $(THREADS_VENV)/bin/python -m pip --disable-pip-version-check -q
APART_PIP := $(APART_VENV)/bin/python -m pip --disable-pip-version-check -q
RUST_SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock pyproject.toml DESCRIPTION.md
PYTHON_SOURCES := $(shell find python/ringloader -name '*.py' -o -name '*.pyi' -o -name '*.toml' -o -name py.typed)
WHEEL_STAMP := $(VENV)/.wheel
RELEASE_STAMP := $(VENV)/.wheel-release

# What builds and checks what is published; the versions of CPython that run it.
TOOLS_VENV ?= .venv-tools
TOOLS_PIP := $(TOOLS_VENV)/bin/python -m pip --disable-pip-version-check -q
# Another machine that a wheel is for: TARGET=aarch64.
TARGET ?=
WHEEL_PYTHONS ?= python3.11 python3.12 python3.13
# A free-threaded CPython, which needs a wheel of its own: FREE_THREADED=python3.14t.
FREE_THREADED ?=
DIST_STAMP := build/dist.checked

# Builds the site. It reads the sources and needs no torch.
DOCS_VENV ?= .venv-docs
DOCS_PIP := $(DOCS_VENV)/bin/python -m pip --disable-pip-version-check -q
export TORCH_INDEX

.PHONY: help generate asan deny test test-long test-fast demo frameworks frameworks-apart frameworks-docs bench bench-threads bench-scaling bench-sweep bench-padding bench-profile bench-smoke bench-threads-env bench-rust bench-instructions bench-accelerator gpu lint rust-test python-test python-test-slow python-test-fast newer-python cluster cluster-fast parity parity-all accelerator accelerator-slow stubs docs chaos soak loom loom-fast tsan tsan-fast storm storm-fast miri portable systems aarch64 wheel wheel-pythons workflows free-threaded clean

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

# torchvision's binary belongs to torch's. transformers imports torchaudio if it is there, and fails if that refuses
# torch's CUDA.
$(VENV)/.frameworks: $(VENV)/.test pyproject.toml
	$(PIP) install -c $(VENV)/constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torchvision
	$(PIP) install -c $(VENV)/constraints.txt --group frameworks
	$(BIN)/python -c "import torchaudio" 2>/dev/null || $(PIP) uninstall -y torchaudio
	touch $@

$(APART_VENV)/.frameworks: $(VENV)/.test pyproject.toml
	$(PYTHON) -m venv $(APART_VENV)
	$(APART_PIP) install -U pip
	$(APART_PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -r $(VENV)/constraints.txt torchvision
	$(APART_PIP) install -c $(VENV)/constraints.txt --group test --group frameworks-apart
	touch $@

# Of tests/cluster, which an environment without it skips.
$(VENV)/.ray: $(VENV)/.test pyproject.toml
	$(PIP) install -c $(VENV)/constraints.txt --group ray
	touch $@

$(VENV)/.bench: $(VENV)/.demo pyproject.toml
	$(PIP) install -c $(VENV)/constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torchvision
	$(PIP) install -c $(VENV)/constraints.txt --group bench --group programs
	touch $@

# The same torch again, for a Python that dataloader-rs has wheels for.
$(THREADS_VENV)/.bench: $(VENV)/.test
	@command -v $(THREADS_PYTHON) >/dev/null || { \
		echo "there is no $(THREADS_PYTHON); dataloader-rs needs CPython 3.13 or later: THREADS_PYTHON=<path>" >&2; exit 1; }
	$(THREADS_PYTHON) -m venv $(THREADS_VENV)
	$(THREADS_PIP) install -U pip
	$(THREADS_PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -r $(VENV)/constraints.txt
	$(THREADS_PIP) install -c $(VENV)/constraints.txt --group bench
	touch $@

# Optimised but for link-time optimisation; what is tested is the installed wheel.
$(WHEEL_STAMP): $(VENV)/.test $(RUST_SOURCES) $(PYTHON_SOURCES)
	rm -rf build/wheels
	$(BIN)/maturin build -q --profile dev-wheel --out build/wheels -i $(BIN)/python
	$(PIP) install --no-deps --force-reinstall build/wheels/*.whl
	rm -f $(RELEASE_STAMP)
	touch $@

# As it is published, but linked to this machine's C library, and with its symbols: what is measured.
$(RELEASE_STAMP): $(VENV)/.test $(RUST_SOURCES) $(PYTHON_SOURCES)
	rm -rf build/wheels
	$(BIN)/maturin build -q --release --out build/wheels -i $(BIN)/python
	$(PIP) install --no-deps --force-reinstall build/wheels/*.whl
	rm -f $(WHEEL_STAMP)
	touch $@

$(TOOLS_VENV)/.pip:
	$(PYTHON) -m venv $(TOOLS_VENV)
	$(TOOLS_PIP) install -U pip
	touch $@

$(TOOLS_VENV)/.wheel $(TOOLS_VENV)/.workflows: $(TOOLS_VENV)/.%: $(TOOLS_VENV)/.pip pyproject.toml
	$(TOOLS_PIP) install --group $*
	touch $@

$(DOCS_VENV)/.docs: pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_PIP) install -U pip
	$(DOCS_PIP) install --group docs
	touch $@

$(DIST_STAMP): $(TOOLS_VENV)/.wheel $(RUST_SOURCES) $(PYTHON_SOURCES) LICENSE ci/wheel.sh ci/check_dist.py ci/portable_wheel.py
	ci/wheel.sh build $(TOOLS_VENV)/bin
	ci/wheel.sh check $(TOOLS_VENV)/bin
	touch $@

test: $(WHEEL_STAMP) $(DOCS_VENV)/.docs $(TOOLS_VENV)/.workflows ## every gate that ends within minutes, the Python tests beside the others
	ci/gates.py python-test "lint rust-test stubs docs" "loom-fast tsan-fast portable free-threaded systems"

test-long: $(WHEEL_STAMP) $(TOOLS_VENV)/.wheel $(VENV)/.ray ## what takes longer, for CI and releases: slow tests, a newer Python, the wheels
	ci/gates.py "python-test-slow newer-python" "storm-fast wheel asan aarch64 cluster-fast"

test-fast: rust-test python-test-fast ## while working

rust-test: ## the crates' own tests
	cargo test -q --workspace

# More than there are cores: most tests wait for processes to start.
TEST_WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest -q -n $(TEST_WORKERS)
# pytest compiles the assertions of all files for some six seconds, and keeps them, if Python may. Test workers that start
# together would each do it.
COMPILED := build/compiled-tests
$(COMPILED) python-test python-test-slow newer-python: export PYTHONDONTWRITEBYTECODE :=

$(COMPILED): $(WHEEL_STAMP) $(shell find tests -name '*.py')
	$(BIN)/python -m pytest -qq --collect-only > $@.txt || { cat $@.txt; exit 1; }
	touch $@

python-test: $(COMPILED) ## the Python tests
	$(PYTEST) -m "not slow"

# Without those of `make accelerator-slow`, which take half an hour, and of clusters, which take all cores.
python-test-slow: $(COMPILED) ## the Python tests that take long
	$(PYTEST) -m "slow and not long" --ignore tests/cluster

# A file or two of each room: a Python differs in start methods, tracing, pickling, warnings and texts of errors.
NEWER_TESTS := $(addprefix tests/, \
	parity/test_start.py parity/test_kinds.py parity/test_thread_workers.py parity/test_notebooks.py \
	features/state/test_state.py features/pools/test_pool.py features/stats/test_stats.py core/test_plain.py core/test_cost_of_iter.py \
	core/test_fallback.py data/test_shared_list.py faults/test_death.py install/test_hook.py install/test_run.py)

newer-python: $(WHEEL_STAMP) ## a part of the Python tests, with the newest CPython at hand; NEWER_PYTHON=<path>
	ci/newer_python.sh $(VENV) -q -n $(TEST_WORKERS) -m "not slow" $(NEWER_TESTS)

cluster: $(WHEEL_STAMP) $(VENV)/.ray ## workers on the nodes of a simulated Ray cluster, beside torch's loader
	RINGLOADER_TEST_ALL=1 $(BIN)/python -m pytest -q tests/cluster

cluster-fast: $(WHEEL_STAMP) $(VENV)/.ray
	$(BIN)/python -m pytest -q tests/cluster

python-test-fast: $(WHEEL_STAMP)
	$(BIN)/python -m pytest -q -n 2 -m "not slow" tests/unit tests/core tests/features tests/data tests/tools

chaos: $(WHEEL_STAMP) ## programs that go wrong in every way, one line each; CASES="deaths ends/", AGAINST=torch
	PYTHONPATH=tests $(BIN)/python -m chaos $(CASES) $(if $(AGAINST),--against $(AGAINST)) --json build/chaos.json

soak: $(WHEEL_STAMP) ## what a process has stays flat, for a time: MINUTES=30; KINDS="storm batches", COUNT=1000 of each
	PYTHONPATH=tests $(BIN)/python -W ignore -m chaos.soak $(KINDS) --minutes $(or $(MINUTES),8) $(if $(COUNT),--count $(COUNT))

parity: $(WHEEL_STAMP) ## all generated cases beside torch; TORCH=2.6.0 for another version
	$(BIN)/python -m pytest -q tests/parity/generated/whole.py

parity-all: ## the oldest torch that is supported, one between, and the newest
	$(MAKE) parity TORCH=2.6.0
	$(MAKE) parity TORCH=2.10.0
	$(MAKE) parity TORCH=

accelerator: $(WHEEL_STAMP) ## pinning and devices, on a pretend accelerator that g++ builds; TORCH=2.6.0 for another version
	$(BIN)/python tests/accelerator/build.py
	$(BIN)/python -m pytest -rP -m "not slow" tests/accelerator

accelerator-slow: $(WHEEL_STAMP) ## its storms at full length, and more parity tests whose loaders pin
	$(BIN)/python tests/accelerator/build.py
	$(BIN)/python -m pytest -rP -m long tests/accelerator

# A process for each file: a test that spoils the device spoils no other file's.
gpu: $(VENV)/.bench $(RELEASE_STAMP) ## the same tests and the benchmark, on the accelerator of this machine
	$(BIN)/python -c 'import sys, torch; sys.exit(not torch.accelerator.is_available() and "torch finds no accelerator")'
	failed=0; for file in tests/accelerator/test_device*.py tests/accelerator/test_pinning*.py; do \
		$(BIN)/python -m pytest -q --hardware -m "not slow" $$file || failed=1; done; exit $$failed
	$(BIN)/python -m benches.python.accelerator

bench-accelerator: $(VENV)/.bench $(RELEASE_STAMP) ## the benchmark of make gpu, on the pretend accelerator
	$(BIN)/python -m benches.python.accelerator --pretend

generate: ## signatures, docstrings and docs/options.md, from the table of options and the rules
	$(PYTHON) ci/generate.py

lint: $(VENV)/.test workflows ## formatting, clippy, rustdoc, ruff, workflows, what is generated
	$(BIN)/python ci/generate.py --check
	cargo fmt --all --check
	cargo clippy -q --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc -q --no-deps -p ringloader-core
	$(BIN)/ruff check python tests benches ci examples extras
	$(BIN)/ruff format --check python tests benches ci examples extras

stubs: $(WHEEL_STAMP) ## mypy, of the package and of programs that have errors, which pyright checks too; the stub against the binary
	$(BIN)/mypy
	$(BIN)/mypy tests/typed/program.py tests/typed/ways_in.py tests/typed/attributes.py
	$(BIN)/basedpyright --pythonpath $(BIN)/python -p tests/typed/pyrightconfig.json
	$(BIN)/python -m mypy.stubtest --mypy-config-file ci/stubtest.ini ringloader._native

docs: $(DOCS_VENV)/.docs ## the site, into build/site, without torch; a dead link is an error, and a word that the search misses
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict
	$(DOCS_VENV)/bin/python ci/check_search.py build/site

loom: ## all models of the memory model, and their planted faults
	ci/loom.sh

loom-fast:
	ci/loom.sh --fast

tsan: ## ThreadSanitizer, and its planted faults
	ci/tsan.sh

tsan-fast:
	ci/tsan.sh --fast

asan: $(VENV)/.test ## AddressSanitizer over memory that goes, moves or is missing while it is read, and its planted faults; needs gcc
	ci/asan.sh $(abspath $(BIN))/python

storm: ## SIGKILL at random and at each named moment, with successors; every word of live memory overwritten, a million damaged tables
	ci/storm.sh
	RINGLOADER_TEST_ALL=1 RINGLOADER_TEST_INPUTS=1000000 \
		cargo test -q -p ringloader-core --profile loom --test corruption --test batch -- --nocapture

storm-fast:
	ci/storm.sh --fast

portable: ## the build for systems without memfd
	RUSTC_WORKSPACE_WRAPPER=$(CURDIR)/ci/rustc_portable.sh cargo check -q --workspace

# PyO3 reads there what it would ask the interpreter.
free-threaded: ## the build for free-threaded CPython, checked without one
	CARGO_TARGET_DIR=target/free-threaded PYO3_CONFIG_FILE=$(CURDIR)/ci/free_threaded.txt \
		cargo clippy -q -p ringloader-py -- -D warnings

systems: $(WHEEL_STAMP) ## the wheel for macOS and Windows, by a Python that lacks what theirs lacks
	$(BIN)/python ci/systems.py $(BIN)/python build/wheels

miri: ## the parts without system calls and threads, in an interpreter that finds undefined behaviour; needs nightly
	ci/miri.sh

deny: ## the crates: known vulnerabilities, licenses, sources; needs cargo-deny, and GitHub
	@cargo deny --version > /dev/null 2>&1 || { echo "deny: cargo-deny is not there: cargo install --locked cargo-deny" >&2; exit 1; }
	cargo deny --locked check

ifeq ($(TARGET),)
wheel: $(DIST_STAMP) $(VENV)/.test ## what is published, into build/dist: built, checked, and run by this Python beside the torch at hand; TARGET=aarch64: for that machine, into build/dist-aarch64, built and checked; FREE_THREADED=python3.14t: that one's too, into build/dist-free-threaded
	ci/wheel.sh run $(BIN)/python $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
ifeq ($(FREE_THREADED),)
	@echo "wheel: SKIPPED: the wheel of a free-threaded CPython: FREE_THREADED=<path>" >&2
else
	DIST=build/dist-free-threaded ci/wheel.sh build $(TOOLS_VENV)/bin --interpreter $(FREE_THREADED)
	DIST=build/dist-free-threaded ci/wheel.sh check $(TOOLS_VENV)/bin
	DIST=build/dist-free-threaded ci/wheel.sh run $(FREE_THREADED)
endif
else
wheel: $(TOOLS_VENV)/.wheel
	ci/$(TARGET).sh --require wheel $(TOOLS_VENV)/bin
endif

aarch64: $(TOOLS_VENV)/.wheel ## Linux on aarch64: the core's unit tests in qemu, the wheel, and a program with torch (AARCH64_ROOT); skips what lacks a tool
	ci/aarch64.sh core
	ci/aarch64.sh wheel $(TOOLS_VENV)/bin
	ci/aarch64.sh run

wheel-pythons: $(DIST_STAMP) ## the same wheel, run by each CPython of WHEEL_PYTHONS beside a torch of its own
	for python in $(WHEEL_PYTHONS); do ci/wheel.sh run $$python || exit 1; done

workflows: $(TOOLS_VENV)/.workflows ## the workflows of CI, against their schema, and for what they let others do
	$(TOOLS_VENV)/bin/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(TOOLS_VENV)/bin/check-jsonschema -q --builtin-schema vendor.dependabot .github/dependabot.yml
	$(TOOLS_VENV)/bin/check-jsonschema -q --builtin-schema vendor.github-actions .github/actions/*/action.yml
	$(TOOLS_VENV)/bin/zizmor -q --offline --min-severity medium .github

demo: $(VENV)/.demo $(WHEEL_STAMP) ## train on photographs through both loaders, and say what limits each
	$(BIN)/python examples/photographs/train.py

frameworks: $(VENV)/.frameworks $(WHEEL_STAMP) frameworks-apart ## the real frameworks, with torch's loader and with ours; the code blocks of their pages
	$(BIN)/python -m pytest tests/frameworks tests/docs

frameworks-apart: $(APART_VENV)/.frameworks $(WHEEL_STAMP)
	$(APART_PIP) install --no-deps --force-reinstall build/wheels/*.whl
	$(APART_VENV)/bin/python -m pytest tests/frameworks/test_streaming.py tests/docs -k streaming --frameworks streaming $(VERSIONS)

frameworks-docs: VERSIONS := --write-versions
frameworks-docs: $(VENV)/.frameworks $(WHEEL_STAMP) frameworks-apart ## the same, and writes the versions into docs/frameworks
	$(BIN)/python -m pytest tests/frameworks $(VERSIONS)

bench: $(VENV)/.bench $(RELEASE_STAMP) ## loaders side by side, programs, their starts, and what torch has not: build/bench*.md, bench.png
	$(BIN)/python -m benches.python --threads-python $(THREADS_VENV)/bin/python
	$(BIN)/python -m benches.python.programs
	$(BIN)/python -m benches.python.start
	$(BIN)/python -m benches.python.arrays
	$(BIN)/python -m benches.python.padding
	$(BIN)/python -m benches.python.pool
	$(BIN)/python -m benches.python.dispatching
	$(BIN)/python -m benches.python.shared_list
	$(BIN)/python -m benches.python.caching
	$(BIN)/python -m benches.python.resuming
	$(BIN)/python -m benches.python.epoch_gap
	$(BIN)/python -m benches.python.stats
	$(BIN)/python -m benches.python.threads --threads-python $(THREADS_VENV)/bin/python

bench-threads: $(VENV)/.bench $(RELEASE_STAMP) ## threads as workers, beside processes and other packages' threads
	$(BIN)/python -m benches.python.threads --threads-python $(THREADS_VENV)/bin/python

bench-scaling: $(VENV)/.bench $(RELEASE_STAMP) ## main-process CPU for 1 to 128 workers
	$(BIN)/python -m benches.python.scaling

bench-sweep: $(VENV)/.bench $(RELEASE_STAMP) ## whatever is slower than torch's loader, over numbers of workers
	$(BIN)/python -m benches.python.sweep

bench-padding: $(VENV)/.bench $(RELEASE_STAMP) ## ragged samples, padded natively and by others
	$(BIN)/python -m benches.python.padding

bench-profile: $(VENV)/.bench $(RELEASE_STAMP) ## where the time of the main process and of a worker goes; needs perf
	$(BIN)/python -m benches.python.profiling

bench-smoke: $(VENV)/.bench $(RELEASE_STAMP) ## checks every row of the benchmarks, times it once
	$(BIN)/python -m benches.python --quick --threads-python $(THREADS_VENV)/bin/python
	$(BIN)/python -m benches.python.programs --quick
	$(BIN)/python -m benches.python.start --quick
	$(BIN)/python -m benches.python.scaling --quick
	$(BIN)/python -m benches.python.sweep --quick
	$(BIN)/python -m benches.python.padding --quick
	$(BIN)/python -m benches.python.resuming --quick
	$(BIN)/python -m benches.python.epoch_gap --quick

bench-threads-env: $(THREADS_VENV)/.bench ## the environment of a loader that this Python cannot have

bench-rust: ## criterion
	cargo bench -p ringloader-core

bench-instructions: ## instructions of the core, counted by valgrind
	cargo bench -p ringloader-core --bench instructions

clean:
	rm -rf $(VENV) $(VENV)-newer $(APART_VENV) $(THREADS_VENV) $(TOOLS_VENV) $(DOCS_VENV) build target
