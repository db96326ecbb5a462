# Needed: Go 1.26 and make. PyTorch, for /usr/bin/python3, is installed from Debian's packages when it is missing and
# this is root on Debian or Ubuntu. TORCH_PYTHON names another Python with PyTorch for tests, demo and bench.
VERSION   ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
GOTAGS    := urfave_cli_no_docs,nethttpomithttp2
LDFLAGS   := -s -w -X dlrover-run/cmd/internal/version.Version=$(VERSION)
BINARIES  := dlrover-run dlrover-master checkpointd dlroverctl
FOLDERS   := cmd launcher rendezvous checkpointd
FUZZTIME  ?= 10s
CHAOS_ROUNDS ?= 500
SOAK_COUNT ?= 10
TORCH2    ?= $(HOME)/.cache/dlrover-run/torch2
IMAGE     ?= dlrover-run:$(VERSION)
TESTLOG   := go run ./cmd/internal/testlog

.PHONY: help build demo test race lint docs fuzz bench chaos soak e2e e2e-torch2 image clean torch

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{split($$1, t, ":"); printf "  make %-11s %s\n", t[1], $$2}'

build: ## every program, static, into bin/
	CGO_ENABLED=0 go build -trimpath -tags $(GOTAGS) -ldflags '$(LDFLAGS)' -o bin/ $(addprefix ./cmd/,$(BINARIES))

demo: build ## an elastic PyTorch job on this machine that loses a worker, loses a node and gains one
	CGO_ENABLED=0 go build -trimpath -o bin/demo ./cmd/internal/demo
	bin/demo $(DEMOFLAGS)

test: torch build lint race ## lint, and the tests under the race detector with real PyTorch: less than ten minutes

race: ## all tests under the race detector but those of more than ten seconds; says what was skipped
	go test -race -short -count=1 -timeout 20m -json ./cmd/dlrover-run ./... | $(TESTLOG) # the longest first

lint: ## gofmt and go vet
	@test -z "$$(gofmt -l $(FOLDERS))" || { gofmt -d $(FOLDERS); exit 1; }
	go vet ./...

docs: ## write docs/reference.md from the tables in the code
	go run ./cmd/internal/reference

fuzz: ## every fuzz target for FUZZTIME (10s)
	@go list ./... | while read p; do \
	  for f in $$(go test -list '^Fuzz' $$p | grep '^Fuzz'); do \
	    echo "$$p $$f"; go test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) $$p || exit 1; done; done

bench: torch build ## ours and torchrun, measured in one run
	go run ./cmd/internal/bench $(BENCHFLAGS)

chaos: ## CHAOS_ROUNDS (500) rounds of kill -9 at random on a job that saves checkpoints
	CHAOS_ROUNDS=$(CHAOS_ROUNDS) go test -count=1 -timeout 60m -v -run TestCheckpointChaos ./cmd/dlrover-run

soak: torch ## the tests that start the real programs SOAK_COUNT (10) times in a row
	go test -count=$(SOAK_COUNT) -timeout 5h -failfast -json ./cmd/dlrover-run | $(TESTLOG)

e2e: torch ## the tests that start the real programs, those of more than ten seconds and some chaos included
	go test -count=1 -timeout 30m -json ./cmd/... | $(TESTLOG)

e2e-torch2: $(TORCH2)/bin/python ## the same with the newest PyTorch 2.x, in a virtual environment at TORCH2
	TORCH_PYTHON=$(TORCH2)/bin/python go test -count=1 -timeout 30m -json -run 'Torch' ./cmd/... ./rendezvous/tcpstore ./launcher/... ./checkpointd/... | $(TESTLOG)
	TORCH_PYTHON=$(TORCH2)/bin/python $(MAKE) demo DEMOFLAGS=--fast

$(TORCH2)/bin/python:
	python3 -m venv $(TORCH2)
	$(TORCH2)/bin/pip install --progress-bar off torch numpy safetensors transformers accelerate || { rm -rf $(TORCH2); exit 1; }

torch: # PyTorch for /usr/bin/python3
	@{ /usr/bin/python3 -c 'import torch' 2>/dev/null && command -v ip >/dev/null; } || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null || { \
	    echo "PyTorch for /usr/bin/python3 is missing; as root: apt-get install python3-torch. Tests that need it will be skipped, loudly."; exit 0; }; \
	  echo "installing python3-torch and iproute2 from the distribution's packages"; \
	  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends python3-torch iproute2; }

image: ## a container image with the programs in /usr/local/bin
	docker build --build-arg VERSION=$(VERSION) -t $(IMAGE) .

clean: ## remove bin/
	rm -rf bin
