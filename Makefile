# All tasks of this repository are targets; `make help` lists them. They need Python 3.11 or newer and
# a network. Each target installs its needs: effuse into .venv, and other tools into .tools (`.ci/tool`).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.ONESHELL:
.DEFAULT_GOAL := help
# Without it the folders here would shadow installed packages of the same name.
export PYTHONSAFEPATH := 1

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TOOLS := .tools

GRPC_TOOLS := grpcio-tools==1.81.1 mypy-protobuf==3.6.0
PROTOC := $(TOOLS)/protoc/bin/python -m grpc_tools.protoc
PROTO_FILES := $(wildcard protos/effuse/*/*.proto)
OVERLAYS := $(wildcard k8s/overlays/*) k8s/prometheus k8s/prometheus/small-pool
# The oldest Kubernetes that the manifests and the chart are for.
KUBERNETES := 1.30

# Files of tests that run at the same time: many wait for processes, so four keep two cores busy.
AT_ONCE ?= 4
# Files that need the machine to themselves.
ALONE := tests/chaos/test_chaos.py tests/chaos/test_network.py
# Of tests/clients, as .ci/tool names them. CLIENTS=guidellm adds that load generator, which takes 6 GB.
CLIENTS := buf grpcurl grpc-js go-client ghz langchain smg triton

# Settings of `make eval`.
SEED ?= 1
COUNT ?= 2000
# Settings of `make chaos`; SEED draws transfers, requests and faults.
TAMPERED ?= 10000
SIMULATIONS ?= 20000
CANCELS ?= 10000
LATE_WRITES ?= 1000
OTHERS ?= 5000
PROBLEMS ?= 500
PROBLEM_KILLS ?= 50
REQUESTS ?= 20000
KILLS ?= 1000
NETWORK_FAULTS ?= 200
CONNECTOR ?= nixl
# Of `make combinations`.
MINUTES ?= 30
# Number of inputs for `make fuzz`.
MESSAGES ?= 1000000
# Tests under compute-sanitizer: each operator in one small shape, and whole steps without graphs.
SMALL := (bfloat16 and ((mask and (ragged or split_context or page_64) and not released and not 64-torch) \
  or (test_rows and 192) or (test_rotary and 64) or heads_and_pages or store_then_load \
  or (sampling_equals and top_p_and_top_k))) or last_rows or 160-4 or (late_pages and cuda)
# For `make k8s-try`: a folder of k8s/overlays, or chart; BUILD="docker build -t" builds the images first, on the
# base image BASE. For `make k8s-faults`: what happens in turns, as ROLE:HOW.
OVERLAY ?= 1p1d
FAULTS ?= decode:delete decode:evict decode:kill
BUILD ?=
BASE ?=

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

# ---- targets for users and developers ----------------------------------------------------------------------

.PHONY: demo
demo: $(VENV)/.effuse ## Start a fleet, solve three fresh problems, show blocks being denoised
	$(BIN)/effuse demo

.PHONY: test
test: $(VENV)/.dev ## Run every test, AT_ONCE files at a time and chaos by itself; skips only tests that need a GPU, a missing client or tool, or root
	@unset PYTHONDONTWRITEBYTECODE # each of the hundreds of processes would compile every module again
	failed=
	trap 'exit 130' INT
	suite() {
	  echo "$(BIN)/python -m pytest $$*"
	  $(BIN)/python -m pytest "$$@" || failed="$$failed$${failed:+ and }$$name"
	}
	name="the tests at once" suite -n $(AT_ONCE) --dist loadfile --no-loadscope-reorder $(addprefix --ignore ,$(ALONE)) $(PYTEST_FLAGS)
	name="tests/chaos" suite $(ALONE) $(PYTEST_FLAGS)
	[ -z "$$failed" ] || { echo "failed: $$failed" >&2; exit 1; }

.PHONY: gpu
gpu: $(if $(filter file,$(origin PYTHON)),$(VENV)/.dev) ## Run the tests for a GPU, small ones under compute-sanitizer too (PYTHON=.. takes one as it is)
	@run="$(if $(filter file,$(origin PYTHON)),$(BIN)/python,$(PYTHON)) -m pytest -m gpu -p no:cacheprovider"
	export PYTHONPATH="$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}"
	$${run%% *} -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "PyTorch finds no GPU here")'
	$$run $$(grep -rl 'mark\.gpu' tests --include='test_*.py') $(PYTEST_FLAGS)
	PATH="$$PATH:/usr/local/cuda/bin"
	if ! command -v compute-sanitizer; then
	  echo "compute-sanitizer is not installed: nothing ran under it"
	  exit
	fi
	export PYTORCH_NO_CUDA_MEMORY_CACHING=1
	sanitize() { compute-sanitizer --tool "$$1" --error-exitcode 9 $$run -p no:xdist "$${@:2}" -k "$(SMALL)"; }
	sanitize memcheck tests/gpu tests/decode_worker/test_device_stepper.py
	sanitize racecheck tests/gpu/test_kernels.py tests/gpu/test_distinct.py

.PHONY: check
check: format lint types arrows words protos-same reference-same ## Check format, lint, types, imports, words and stubs; needs only Python

.PHONY: check-all
check-all: check protos-lint overlays chart docs ## The same, and the protos' lint, manifests, chart and site, which need npm, kubectl, helm and MkDocs

.PHONY: hooks
hooks: $(VENV)/.dev ## Make git run the quick half of check before each commit
	$(BIN)/pre-commit install

.PHONY: bench
bench: $(VENV)/.dev ## Measure each part against its limit; fails if one misses it
	$(BIN)/python -m effuse.benchmarks

.PHONY: eval
eval: $(VENV)/.effuse ## Print the model card's table (SEED=1 COUNT=2000)
	$(BIN)/effuse eval --seed $(SEED) --count $(COUNT)

.PHONY: train
train: $(VENV)/.effuse ## Train the bundled model again into .train (one GPU); continues an interrupted run
	$(BIN)/python -m effuse.training.train --out .train $(if $(wildcard .train/checkpoint),--resume) $(TRAIN_FLAGS)

.PHONY: load
load: $(VENV)/.dev ## Send unary and streaming load with ghz to a fleet that `effuse up` starts
	ghz="$$(.ci/tool ghz)"
	PYTHONPATH=tests $(BIN)/python -m load.run --ghz "$$ghz" $(LOAD_FLAGS)

.PHONY: load-large
load-large: LOAD_FLAGS := --prefill 2 --decode 2 --unary 10000 --stream 2000
load-large: load ## The same with 10,000 unary calls and 2,000 streams against 2P2D, back to the baseline

.PHONY: clients
clients: ## Install clients of other projects into .tools; make test uses the installed ones
	@missing=
	for client in $(CLIENTS); do .ci/tool "$$client" || missing="$$missing $$client"; done
	[ -z "$$missing" ] || { echo "could not be installed:$$missing" >&2; exit 1; }

.PHONY: test-clients
test-clients: $(VENV)/.dev clients ## Install these clients, and test a fleet with each
	$(BIN)/python -m pytest tests/clients $(PYTEST_FLAGS)

.PHONY: degrees
degrees: $(VENV)/.dev ## Hold the tokens of workers of 1, 2 and 4 devices, on CPUs, against the references; takes two hours (ONLY="nixl, 2 to 4")
	PYTHONPATH=tests $(BIN)/python -m e2e.degrees --only "$(ONLY)"

.PHONY: combinations
combinations: $(VENV)/.dev ## Hold the tokens of fleets that combine every two settings, on CPUs, against the references (SEED=1 MINUTES=30)
	PYTHONPATH=tests $(BIN)/python -m e2e.combinations --seed $(SEED) --seconds $$(($(MINUTES) * 60))

.PHONY: by-pool
by-pool: $(VENV)/.dev ## Time prompts at once by handoffs and through a real pool, on CPUs (POOL=lmcache)
	PYTHONPATH=tests $(BIN)/python -m e2e.by_pool --pool "$(or $(POOL),mooncake)"

.PHONY: upgrade
upgrade: $(VENV)/.dev ## Replace a fleet of the commit OTHER by one of this checkout under load, on CPUs, and go back
	for back in "" --back; do PYTHONPATH=tests $(BIN)/python -m e2e.upgrade --other "$(OTHER)" --connector $(CONNECTOR) $$back; done

.PHONY: chaos
chaos: $(VENV)/.dev ## Tamper, write late, poison, cancel, kill, stop and cut, and check every answer (SEED=1 CONNECTOR=nixl TAMPERED= LATE_WRITES= SIMULATIONS= OTHERS= CANCELS= PROBLEMS= REQUESTS= KILLS= NETWORK_FAULTS=)
	export PYTHONPATH=tests
	$(BIN)/python -m kvtransfer.tampering --seed $(SEED) --count $(TAMPERED)
	$(BIN)/python -m kvtransfer.late_writes --seed $(SEED) --count $(LATE_WRITES)
	$(BIN)/python -m simulation --count $(SIMULATIONS)
	$(BIN)/python -m simulation --cancels $(CANCELS)
	for by in crash killed hung; do $(BIN)/python -m e2e.poison --others $(OTHERS) --by $$by; done
	run="$(BIN)/python -m chaos.run --seed $(SEED) --connector $(CONNECTOR)"
	$$run --all-cancel --requests $(CANCELS) --kills 0
	$$run --bundled --requests $(PROBLEMS) --kills $(PROBLEM_KILLS)
	$(BIN)/python -m chaos.network --seed $(SEED) --connector $(CONNECTOR) --faults $(NETWORK_FAULTS)
	$$run --requests $(REQUESTS) --kills $(KILLS)

.PHONY: fuzz
fuzz: $(VENV)/.dev ## Send a million wrong inputs to every listening socket (SEED=1 MESSAGES=1000000)
	PYTHONPATH=tests $(BIN)/python -m fuzz.run --seed $(SEED) --count $(MESSAGES)

.PHONY: k8s-try
k8s-try: $(VENV)/.effuse ## Deploy OVERLAY (1p1d, or chart) on the cluster of KUBECONFIG, solve a problem, clean up
	kubectl="$$(.ci/tool kubectl)"
	$(BIN)/python k8s/attempt.py --kubectl "$$kubectl" --overlay "$(OVERLAY)" \
	  $(if $(filter chart,$(OVERLAY)),--helm "$$(.ci/tool helm)") \
	  $(if $(BUILD),--build "$(BUILD)") $(if $(BASE),--base "$(BASE)")

.PHONY: k8s-scale
k8s-scale: $(VENV)/.effuse ## Double and halve the load of a scaled pool on the cluster of KUBECONFIG, whose images are there
	kubectl="$$(.ci/tool kubectl)"
	PYTHONPATH=k8s $(BIN)/python k8s/scaling.py "$$kubectl"

.PHONY: k8s-faults
k8s-faults: $(VENV)/.effuse ## Send requests while FAULTS=decode:delete meet OVERLAY on the cluster of KUBECONFIG, whose images are there
	kubectl="$$(.ci/tool kubectl)"
	PYTHONPATH=k8s $(BIN)/python k8s/faults.py --kubectl "$$kubectl" --overlay "$(OVERLAY)" $(FAULTS)

.PHONY: wheel
wheel: $(VENV)/.dev ## Build the wheel and the source distribution into dist/
	$(BIN)/python -m build --outdir dist .

.PHONY: release-check
release-check: $(VENV)/.dev ## Check that the last commit can be tagged: version, metadata, and the demo from its wheel
	twine="$$(.ci/tool twine)"
	$(BIN)/python tests/release_check.py "$$twine/bin/twine"

.PHONY: protos
protos: $(TOOLS)/protoc/.installed ## Regenerate the stubs from the .proto files
	$(call generate,protos)

.PHONY: states
states: $(VENV)/.effuse ## Write docs/states.md from the state tables
	$(BIN)/python docs/states.py >docs/states.md

.PHONY: reference
reference: $(VENV)/.dev ## Write docs/reference from the code, and RESULTS.md's tables from JSON
	PYTHONPATH=tests $(BIN)/python docs/reference.py
	$(BIN)/python -m effuse.benchmarks.results

.PHONY: docs
docs: reference-same ## Build the site of the documents into build/site; a broken link fails
	mkdocs="$$(.ci/tool mkdocs)"
	# Not --quiet, which hides warnings from --strict. The variable hides the end of support in May 2027.
	NO_MKDOCS_2_WARNING=1 "$$mkdocs/bin/mkdocs" build --strict

.PHONY: pictures
pictures: $(VENV)/.effuse ## Draw the README's pictures: blocks of a real answer, goodput from figures
	$(BIN)/python docs/pictures.py

.PHONY: tidy
tidy: $(VENV)/.dev ## Format the code and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: clean
clean: ## Remove everything that was installed or built here
	rm -rf $(VENV) $(TOOLS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# ---- the parts of check ----------------------------------------------------------------------

.PHONY: format lint types arrows words protos-lint protos-same reference-same overlays chart
format: $(VENV)/.dev
	$(BIN)/ruff format --check .

lint: $(VENV)/.dev
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

arrows: $(VENV)/.dev
	$(BIN)/lint-imports --no-cache

words: $(VENV)/.dev
	$(BIN)/python tests/plain_english.py

protos-lint:
	buf="$$(.ci/tool buf)"
	"$$buf" lint

protos-same: $(TOOLS)/protoc/.installed
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT
	$(call generate,"$$fresh")
	for stub in "$$fresh"/effuse/*/*; do
	  git diff --no-index --exit-code "protos$${stub#"$$fresh"}" "$$stub" || { echo "stubs are stale: run 'make protos'" >&2; exit 1; }
	done
	echo "stubs are up to date"

reference-same: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python docs/reference.py --check
	$(BIN)/python -m effuse.benchmarks.results --check

overlays:
	@test -n "$(OVERLAYS)"
	kubectl="$$(.ci/tool kubectl)"
	validate="$$(.ci/tool kubernetes-validate)/bin/kubernetes-validate"
	made=$$(mktemp); trap 'rm -f "$$made"' EXIT
	for overlay in $(OVERLAYS); do
	  "$$kubectl" kustomize $$overlay >"$$made"
	  "$$validate" --strict --quiet --kubernetes-version $(KUBERNETES) "$$made"
	  echo "$$overlay is valid"
	done

chart: $(VENV)/.dev
	@for tool in helm kubectl kubernetes-validate; do .ci/tool $$tool; done
	$(BIN)/python -m pytest tests/k8s $(PYTEST_FLAGS)

# Flags of protoc: messages, their types, services, their types.
define generate
PATH="$(CURDIR)/$(TOOLS)/protoc/bin:$$PATH" $(PROTOC) -Iprotos --python_out=$(1) --pyi_out=$(1) \
	  --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(PROTO_FILES)
endef

# ---- installing ------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, %s is %s; name another with PYTHON=" % (sys.executable, sys.version.split()[0]))'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.effuse: pyproject.toml | $(BIN)/python
	@echo "installing effuse into $(VENV): 6 GB, some minutes the first time"
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[worker]'
	touch $@

$(VENV)/.dev: $(VENV)/.effuse
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[worker,dev]'
	touch $@

$(TOOLS)/protoc/.installed:
	@$(PYTHON) -m venv $(TOOLS)/protoc
	$(TOOLS)/protoc/bin/python -m pip install --disable-pip-version-check --quiet $(GRPC_TOOLS)
	touch $@
