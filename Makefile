# Everything a newcomer needs: `make demo` runs the library, `make quick` checks a change in a few
# minutes, `make test` runs the tests (about 12 minutes); `make test-all` also runs more formats and
# sizes in Triton's interpreter and compiles every GPU kernel, with the newest Triton and the oldest
# (about 40 minutes in all). `make compile-all` compiles every configuration with both.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The development environment has one torch; the package itself accepts 2.10 and newer.
TORCH := torch==2.13.0
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.docs-installed
# The other end of the range of Triton versions; everything else comes from the environment above.
OLDEST := .venv-oldest
OLDEST_TRITON := triton==3.6.0
OLDEST_INSTALLED := $(OLDEST)/.installed
# The other end of the range of torch versions, in an environment of its own: gigabytes on x86
OLDEST_TORCH := torch==2.10.0
OLDEST_TORCH_VENV := .venv-oldest-torch
OLDEST_TORCH_INSTALLED := $(OLDEST_TORCH_VENV)/.installed
# vLLM's wheel without CUDA, in an environment of its own: 3.6 GB
VLLM := vllm==0.32.0
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
# SGLang's wheel, likewise; torchvision is the one for TORCH
SGLANG := sglang==0.5.23
TORCHVISION := torchvision==0.28.0
SGLANG_VENV := .venv-sglang
SGLANG_INSTALLED := $(SGLANG_VENV)/.installed
# The library that loads kernels from the Hugging Face Hub, in an environment of its own: where it is
# installed, transformers uses it
KERNELS := kernels==0.16.2
HUB_VENV := .venv-hub
HUB_INSTALLED := $(HUB_VENV)/.installed
DIST_VENV := .venv-dist
ENGINE_REQUIREMENTS := tests/integrations/engine_requirements.py
# Both ends of the range of transformers versions, each in an environment like the oldest Triton's;
# the tests of $(VENV) have the version in between that pyproject.toml names
TRANSFORMERS := 5.15.0 5.23.0
TRANSFORMERS_VENV := .venv-transformers-
# tests differ in length by a factor of 1000: a worker that is done takes some of another's
PYTEST_JOBS := -n auto --dist worksteal
# The GPU tests: the machine's own Python, and as many parts as fit 6 minutes each on 14 workers
GPU_PYTHON ?= $(PYTHON)
GPU_WORKERS ?= 14
GPU_PARTS ?= 2
PART ?= $(foreach number,$(shell seq $(GPU_PARTS)),$(number)/$(GPU_PARTS))
RECORD ?= .gpu-record
FROM ?= .gpu-record

.PHONY: demo quick test test-all venv lint types unit thorough emulate emulate-all compile compile-all oldest oldest-torch docs
.PHONY: test-gpu gpu-commit gpu-record house figures reference release-check
.PHONY: mutants transformers-versions slow-tests format clean test-vllm test-sglang test-hub
.DEFAULT_GOAL := test

demo: $(INSTALLED)
	$(BIN)/mlakit demo
	$(BIN)/python examples/documented_function.py

# while working on a change: all checks of `make test` but the slow tests, a few minutes on 2 cores
quick: lint types
	$(BIN)/pytest $(PYTEST_JOBS) -m "not slow"

# measures which tests are slow, and names those whose marker says otherwise
slow-tests: $(INSTALLED)
	$(BIN)/pytest $(PYTEST_JOBS) --measure-slow --thorough

test: lint types unit

# what takes longest comes last
test-all: test thorough emulate transformers-versions compile oldest

venv: $(INSTALLED)

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy --num-workers auto

unit: $(INSTALLED)
	$(BIN)/pytest $(PYTEST_JOBS)

# what `unit` leaves out: more formats and sizes of kernels in Triton's interpreter
thorough: $(INSTALLED)
	$(BIN)/pytest $(PYTEST_JOBS) --thorough -m thorough

# Gluon kernels in the emulator: Hopper's configurations with two seeds, Blackwell's with one and
# with many lengths, the cases of their mutants, and some mutants; with the oldest Triton a sample.
# Under 7 minutes on 2 cores
emulate: $(INSTALLED) $(OLDEST_INSTALLED)
	$(BIN)/pytest $(PYTEST_JOBS) --emulate -m emulated -k "fault or sample or not (mutant or mistake)" \
	  tests/tools/emulator
	$(OLDEST)/bin/python -m pytest $(PYTEST_JOBS) -k has_no_fault tests/tools/emulator

# every configuration of every Gluon kernel with five seeds: half an hour on 2 cores. Those of
# Blackwell are recorded
emulate-all: $(INSTALLED)
	$(BIN)/mlakit emulate hopper --seeds 5
	$(BIN)/mlakit emulate blackwell --seeds 5 --json docs/data/emulated.json

# GPU kernels for every architecture, without a GPU: samples of a list of configurations, and all
# that models reach, since launchers pick more variants than the list has
compile: $(INSTALLED)
	$(BIN)/mlakit support --compile --sample hopper
	$(BIN)/mlakit warmup deepseek-v3 --for all --arch sm_90

oldest: $(OLDEST_INSTALLED)
	$(OLDEST)/bin/python -m pytest $(PYTEST_JOBS) --thorough -k triton tests/kernels/triton/test_interpreter.py \
	  tests/kernels/triton/test_decode_plan.py tests/ops/test_*.py
	$(OLDEST)/bin/python -m pytest -k keys_of_kernels tests/precompile
	$(OLDEST)/bin/python -m mlakit support --compile --sample portable
	$(OLDEST)/bin/python -m mlakit warmup deepseek-v3.2 --for steps --format fp8_block128 --arch sm_90

# all configurations with both, after a change of a kernel or of allowed spills: an hour on 2 cores
compile-all: $(INSTALLED) $(OLDEST_INSTALLED)
	$(BIN)/mlakit support --compile
	$(OLDEST)/bin/python -m mlakit support --compile

# patched models with the oldest and the newest transformers
transformers-versions: $(TRANSFORMERS:%=$(TRANSFORMERS_VENV)%/.installed)
	set -e; for version in $(TRANSFORMERS); do \
	  echo "transformers $$version"; \
	  $(TRANSFORMERS_VENV)$$version/bin/python -m pytest $(PYTEST_JOBS) --thorough tests/integrations/test_*.py; \
	done

# all tests with the oldest torch that pyproject.toml allows
oldest-torch: $(OLDEST_TORCH_INSTALLED)
	$(OLDEST_TORCH_VENV)/bin/python -m pytest $(PYTEST_JOBS) --thorough

# the vLLM plugin in vLLM's engine, on CPUs; one engine at a time, since each uses all cores
test-vllm: $(VLLM_INSTALLED)
	VLLM_TARGET_DEVICE=cpu $(VLLM_VENV)/bin/python -m pytest tests/integrations/vllm

# the SGLang plugin in SGLang's engine, likewise
test-sglang: $(SGLANG_INSTALLED)
	$(SGLANG_VENV)/bin/python -m pytest tests/integrations/sglang

# the folder for the Hub (scripts/hub.py), loaded by the library `kernels` and by transformers
test-hub: $(HUB_INSTALLED)
	$(HUB_VENV)/bin/python -m pytest tests/integrations/hub

# One part of the GPU tests, such as PART=1/2, or all of them in turn. Nothing is installed. Only
# with worksteal or load is a worker replaced that a test has crashed. COMMIT is for copies without
# git; RECORD is a folder for the results besides docs/data/gpu-tests.json; RESUME=1 runs only tests
# without a result there; LIMIT=540 begins no test after 540 seconds; THOROUGH=1 runs exhaustive ones
test-gpu:
	status=0; for part in $(PART); do \
	  $(GPU_PYTHON) -m pytest -m gpu --part=$$part -n $(GPU_WORKERS) --dist worksteal \
	    --max-worker-restart 60 --tb short --record=$(RECORD) $(if $(COMMIT),--commit=$(COMMIT)) \
	    $(if $(RESUME),--resume) $(if $(LIMIT),--stop-after=$(LIMIT)) $(if $(THOROUGH),--thorough) \
	    || status=1; \
	done; exit $$status

# names the commit in a file, for a copy of this tree without git on a machine with a GPU
gpu-commit:
	$(PYTHON) -m tests.gpu_record commit

# adds what `make test-gpu` left in folders to docs/data: results, and times by which parts are dealt
gpu-record:
	$(PYTHON) -m tests.gpu_record merge $(FROM)

# the pages in docs/ as a site in site/; a warning is an error. The variable keeps the theme from
# announcing its successor at every build
docs: $(DOCS_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

# the mutation tests alone: every named change to a kernel or an oracle must fail a check, and
# every Gluon kernel without one of its waits, fences or arrivals: 20 minutes on 2 cores
mutants: $(INSTALLED)
	$(BIN)/pytest $(PYTEST_JOBS) -k mutant
	$(BIN)/pytest $(PYTEST_JOBS) --emulate -m emulated -k "mutant or mistake" tests/tools/emulator

# the tables of docs/measured.md, docs/vllm.md and README.md, and the chart of the first pages, from
# the reports in docs/data
figures: $(INSTALLED)
	$(BIN)/python scripts/docs/figures.py
	$(BIN)/python scripts/docs/landing_chart.py

# the wheel and the source release in dist/: their files, and the wheel in an environment where only
# the packages of torch are not absent
release-check: $(INSTALLED)
	rm -rf dist $(DIST_VENV)
	$(PYTHON) -m venv $(DIST_VENV)
	$(DIST_VENV)/bin/python -m pip install build
	$(DIST_VENV)/bin/python -m build
	$(DIST_VENV)/bin/python -m pip install --no-deps dist/*.whl
	$(DIST_VENV)/bin/python -c "import sysconfig, pathlib; \
	  own = pathlib.Path(sysconfig.get_path('purelib')); \
	  (own / 'torch.pth').write_text(own.as_posix().replace('$(DIST_VENV)', '$(VENV)'))"
	$(DIST_VENV)/bin/python scripts/check_release.py dist --import

# the signatures, arguments and members in docs/api, from the code
reference: $(INSTALLED)
	$(BIN)/python scripts/docs/reference.py

# counts of what keeps the code base small: lines, arguments of kernels, fragments, long sentences
house: $(INSTALLED)
	$(BIN)/python scripts/house.py

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(OLDEST) $(OLDEST_TORCH_VENV) $(VLLM_VENV) $(SGLANG_VENV) $(HUB_VENV) $(DIST_VENV) \
	  $(TRANSFORMERS_VENV)* \
	  .mypy_cache .pytest_cache .ruff_cache dist site

# torch goes first so that no later requirement may choose another build of it
$(INSTALLED): pyproject.toml Makefile mlakit/_version.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install --editable ".[dev]"
	touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --editable ".[docs]"
	touch $@

# in the environment $(1) its own site-packages come first, then those of $(VENV)
define share
	$(1)/bin/python -c "import sysconfig, pathlib; \
	  own = pathlib.Path(sysconfig.get_path('purelib')); \
	  shared = own.as_posix().replace('$(1)', '$(VENV)'); \
	  (own / 'shared.pth').write_text(shared + '\n$(CURDIR)\n')"
endef

$(OLDEST_INSTALLED): $(INSTALLED)
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --no-deps "$(OLDEST_TRITON)"
	$(call share,$(OLDEST))
	touch $@

# pip sees the packages of $(VENV), and adds those that this version needs in another version
$(TRANSFORMERS_VENV)%/.installed: $(INSTALLED)
	$(PYTHON) -m venv $(TRANSFORMERS_VENV)$*
	$(call share,$(TRANSFORMERS_VENV)$*)
	$(TRANSFORMERS_VENV)$*/bin/python -m pip install "transformers==$*"
	touch $@

# pip sees the packages of $(VENV), so transformers and its huggingface_hub stay as they are
$(HUB_INSTALLED): $(INSTALLED)
	$(PYTHON) -m venv $(HUB_VENV)
	$(call share,$(HUB_VENV))
	$(HUB_VENV)/bin/python -m pip install "$(KERNELS)"
	touch $@

$(OLDEST_TORCH_INSTALLED): pyproject.toml Makefile mlakit/_version.py
	$(PYTHON) -m venv $(OLDEST_TORCH_VENV)
	$(OLDEST_TORCH_VENV)/bin/python -m pip install --upgrade pip
	$(OLDEST_TORCH_VENV)/bin/python -m pip install "$(OLDEST_TORCH)"
	$(OLDEST_TORCH_VENV)/bin/python -m pip install --editable ".[test]"
	touch $@

$(VLLM_INSTALLED): pyproject.toml Makefile mlakit/_version.py $(ENGINE_REQUIREMENTS)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install "$(TORCH)"
	$(VLLM_VENV)/bin/python -m pip install --no-deps "$(VLLM)"
	$(VLLM_VENV)/bin/python $(ENGINE_REQUIREMENTS) vllm > $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --requirement $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --editable ".[test]"
	touch $@

$(SGLANG_INSTALLED): pyproject.toml Makefile mlakit/_version.py $(ENGINE_REQUIREMENTS)
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --upgrade pip
	$(SGLANG_VENV)/bin/python -m pip install "$(TORCH)"
	$(SGLANG_VENV)/bin/python -m pip install --no-deps "$(SGLANG)" "$(TORCHVISION)"
	$(SGLANG_VENV)/bin/python $(ENGINE_REQUIREMENTS) sglang > $(SGLANG_VENV)/requirements.txt
	$(SGLANG_VENV)/bin/python -m pip install --requirement $(SGLANG_VENV)/requirements.txt
	$(SGLANG_VENV)/bin/python -m pip install --editable ".[test]"
	touch $@
