# Everything that Plimsoll needs beyond Rust, a C++17 compiler and python3 with pip is fetched here.

.PHONY: demo policies gpu-policies test fuzz libraries lint libtorch tools stand-in gpu-bundle gpu-rehearsal paced

# A LIBTORCH that is set but empty would hide ours from cargo.
ifeq ($(strip $(LIBTORCH)),)
unexport LIBTORCH
endif

PLIMSOLL := target/debug/plimsoll
USED_LIBTORCH := $(or $(strip $(LIBTORCH)),$(CURDIR)/.libtorch/torch)

# What puts a device of the pace of MACHINE, and of so much memory, before a command.
MACHINE ?= h200
MEMORY_BYTES ?= 141000000000
PACED = LD_PRELOAD=$(CURDIR)/target/stand-in/paced/libcudart.so.13 LD_LIBRARY_PATH=$(CURDIR)/target/stand-in \
    STAND_IN_MACHINE=configs/hardware/$(MACHINE).toml STAND_IN_BYTES=$(MEMORY_BYTES) \
    PYTHONPATH=$(CURDIR)/tests/stand_in/python:$(USED_LIBTORCH)/..:$(CURDIR)/.tools/python

# For two model families: records loops, trains a policy, and compares it with the baselines on the real loops.
# Everything it makes stands in demo/; `tensorboard --logdir demo/runs` shows the comparison.
demo: libtorch
	cargo build
	@mkdir -p demo
	@for family in gpt resnet; do \
	    $(PLIMSOLL) train --config configs/$$family.toml --out demo/$$family.policy --logdir demo/runs/$$family && \
	    $(PLIMSOLL) inspect demo/$$family.policy && \
	    $(PLIMSOLL) evaluate --config configs/$$family.toml --policy demo/$$family.policy --real \
	        --logdir demo/runs/$$family --json demo/$$family.json || exit 1; \
	done
	$(PLIMSOLL) record --config configs/gpt.toml --workload gpt-small --out demo/gpt-small.plimsoll
	$(PLIMSOLL) plan --trace demo/gpt-small.plimsoll --policy demo/gpt.policy --budget 50% --link 500MB/s
	$(PLIMSOLL) run --config configs/gpt.toml --workload gpt-small --policy demo/gpt.policy --budget 50% \
	    --iterations 10 --link 500MB/s --interleave --verify

# The policies in configs/policies/, one per family: draws, records, trains and judges on held-out members, whose figures
# go into each policy's file and, point by point, into experiments/results/held-out/. Minutes per family on two cores.
# FAMILIES names others than all, SEED another seed, TRAIN and JUDGE flags of the two commands.
FAMILIES ?= gpt bert lstm vit resnet vgg densenet mobilenet inception unet autoencoder
SEED ?= 0
TRAIN ?=
JUDGE ?= --points-max 24 --reference-seconds 8
policies: libtorch
	cargo build
	@mkdir -p target/policies configs/policies experiments/results/held-out
	@for family in $(FAMILIES); do \
	    policy=target/policies/$$family.policy && \
	    $(PLIMSOLL) train --config configs/$$family.toml --out $$policy --seed $(SEED) \
	        --logdir target/policies/runs $(TRAIN) && \
	    $(PLIMSOLL) evaluate --config configs/$$family.toml --policy $$policy --held-out --sign \
	        --json experiments/results/held-out/$$family.json $(JUDGE) && \
	    cp $$policy configs/policies/ || exit 1; \
	done

# The same for models of published sizes, whose configurations are for a GPU: each starts from its family's policy, and is
# judged on the models that have a name beside drawn ones. There need be no GPU: loops run on the device of gpu-rehearsal, unless
# `PACED=` takes it away.
GPU_CONFIGS ?= gpt2 resnet224
gpu-policies: $(GPU_CONFIGS:%=gpu-policy-%)

gpu-policy-gpt2: FAMILY := gpt
gpu-policy-gpt2: NAMED := gpt2-small gpt2-medium gpt2-large
gpu-policy-resnet224: FAMILY := resnet
gpu-policy-resnet224: NAMED := resnet50 resnet152
gpu-policy-%: libtorch stand-in
	cargo build
	@mkdir -p target/policies configs/policies experiments/results/published-sizes
	$(PACED) $(PLIMSOLL) train --config configs/$*.toml --device cuda --out target/policies/$*.policy --seed $(SEED) \
	    --from configs/policies/$(FAMILY).policy --logdir target/policies/runs $(TRAIN)
	$(PACED) $(PLIMSOLL) evaluate --config configs/$*.toml --device cuda --policy target/policies/$*.policy --held-out --sign \
	    $(NAMED:%=--workload %) --hardware $(MACHINE) --links 25,50 --search-ms 1000 \
	    --json experiments/results/published-sizes/$*.json $(JUDGE)
	cp target/policies/$*.policy configs/policies/

# OpenMP threads must not spin: tests run beside each other.
test: libtorch tools
	GOMP_SPINCOUNT=0 cargo test --workspace

# Random programs under random plans, and under random budgets, against their untouched selves.
fuzz: libtorch
	GOMP_SPINCOUNT=0 cargo run -p plimsoll-tests --bin fuzz -- --programs 10000

# Training jobs of other libraries, ON a device that may be "cuda": that of `make stand-in`, where the torch in use needs NVIDIA's
# libraries and finds none. JOBS names some of them. The folder is named site-packages, for datasets pickles modules of any other
# whole, as a program's own.
ON ?= cpu
JOBS ?=
libraries: libtorch tools stand-in
	cargo build
	@sh runtime/fetch.sh .tools/site-packages --no-deps $(shell cat tests/libraries/requirements.txt)
	@sh runtime/python/stage.sh $(dir $(PLIMSOLL))lib_plimsoll.so target/libraries
	GOMP_SPINCOUNT=0 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 \
	    LD_PRELOAD=$(CURDIR)/target/stand-in/late/libcudart.so.13 LD_LIBRARY_PATH=$(CURDIR)/target/stand-in \
	    PYTHONPATH=target/libraries:$(USED_LIBTORCH)/..:$(CURDIR)/.tools/site-packages:$(CURDIR)/.tools/python \
	    python3 tests/libraries --device $(ON) $(JOBS)

# What proves everything on a machine with a GPU that has python3 with torch 2.11, and neither Rust nor this repository:
# unpack it there and call plimsoll-gpu/gpu-check --out DIR.
gpu-bundle: libtorch
	cargo build --release -p plimsoll-experiments -p plimsoll-python
	sh experiments/gpu-bundle.sh target/release target/plimsoll-gpu.tar.xz

# The same check without a GPU, at full size: on a device that computes nothing and copies nothing, and takes as long for it as
# MACHINE would at four fifths of its data sheet's rates (tests/stand_in/). Bits say nothing there.
MINUTES ?= 30
gpu-rehearsal: libtorch tools stand-in
	cargo build
	@mkdir -p target/rehearsal
	sh runtime/python/stage.sh $(dir $(PLIMSOLL))lib_plimsoll.so target/rehearsal/python
	$(PACED) $(PLIMSOLL) gpu-check --out target/rehearsal \
	    --package target/rehearsal/python --minutes $(MINUTES) $(PARTS:%=--part %) \
	    $(patsubst %,--policy %,$(wildcard configs/policies/*.policy))

# Any call of the command on that device: make paced CALL="hold configs/gpt2.toml:gpt2-small --device cuda".
paced: libtorch stand-in
	cargo build
	$(PACED) $(PLIMSOLL) $(CALL)

# The device that stands in for a GPU, in target/stand-in/.
stand-in: libtorch
	$(MAKE) --no-print-directory -f tests/stand_in/Makefile LIBTORCH=$(USED_LIBTORCH) OUT=$(CURDIR)/target/stand-in

lint: libtorch
	cargo fmt --check
	cargo clippy --workspace --all-targets -- -D warnings

# libtorch, in .libtorch/ unless LIBTORCH names another.
libtorch:
	@sh runtime/libtorch.sh

# The TensorBoard that a test reads event files with, HiGHS, which the exact reference solves its programs with, and what
# torch imports in the Python jobs that are tested.
tools:
	@sh runtime/fetch.sh .tools/tensorboard tensorboard==2.21.0
	@sh runtime/fetch.sh .tools/highs --no-deps highsbox==1.15.1
	@sh runtime/fetch.sh .tools/python --no-deps filelock==3.20.0 fsspec==2025.9.0 jinja2==3.1.6 markupsafe==3.0.3 \
	    mpmath==1.3.0 networkx==3.4.2 sympy==1.14.0 typing-extensions==4.15.0
