# Everything runs in .venv; no other set-up is needed than Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

VARIANT ?= cuda
BUILDER ?= docker

.PHONY: demo plan image test test-all handover skypilot mutants golden docs lint clean

demo: $(VENV)/demo.stamp
	$(BIN)/kumi train examples/quickstart.toml

plan: $(VENV)/demo.stamp
	$(BIN)/kumi plan examples/plan/llama-3-8b.toml

# kumi from its wheel as the image kumi:cuda, or kumi:cpu with VARIANT=cpu TORCH_INDEX=...; BUILDER=podman (docs/containers.md).
image:
	rm -f dist/kumi-*.whl
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(BUILDER) build $(if $(filter podman buildah,$(BUILDER)),--format docker) --build-arg VARIANT=$(VARIANT) \
		$(TORCH_INDEX:%=--build-arg TORCH_INDEX=%) --tag kumi:$(VARIANT) .

# KERNELS=other: with float32 products as another kind of CPU computes them.
test:
	.ci/run $(KERNELS:%=--kernels=%)

test-all:
	.ci/run --all $(KERNELS:%=--kernels=%)

# llama.cpp for the tests of exports to GGUF, in build/handover: 77 MB to fetch, three minutes of a core to build.
handover: $(VENV)/test.stamp
	$(BIN)/python tests/handover/provide.py

# SkyPilot for the tests of `kumi launch skypilot`, in build/skypilot: 520 MB, a minute or more.
skypilot: $(VENV)/test.stamp
	$(BIN)/python tests/launch/provide_skypilot.py

# Whether the tests notice mistakes that are made in a copy of the source.
mutants: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo HF_HUB_OFFLINE=1 $(BIN)/python tests/mutants/apply_mutants.py

# Whether plans, runs, conversions and --json are as at another commit: make golden AGAINST=HEAD~1.
AGAINST ?= HEAD
golden: $(VENV)/test.stamp
	$(BIN)/python tests/golden/golden.py against $(AGAINST)

# The documentation as a site, in build/site: open build/site/index.html.
docs: $(VENV)/test.stamp
	$(BIN)/python docs/site.py

lint: $(VENV)/test.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# torch is asked for by version first: on a machine without a GPU, where pip knows a CPU build of it, that one is taken.
$(VENV)/demo.stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[test,export-check,launch-check]"
	touch $@

clean:
	rm -rf $(VENV) build runs
