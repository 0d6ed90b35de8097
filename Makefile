# Two commands do all on a fresh machine:
#   make demo   the main job on a small Llama: its axes, the rewritten step, the check, a TPU compilation
#   make test   all tests, slow ones included; ARGS are pytest's: make test ARGS="-m 'not slow'"
# Both make .venv when there is none and install what they need; run again, they start at once.
# `make lint` runs ruff, and mypy against the built wheel.

VENV := .venv
PYTHON := $(VENV)/bin/python
XFORM := $(VENV)/bin/xform
ARGS ?=

LLAMA := xform.models.llama:train_step -s size=tiny

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-demo
	@echo
	@echo "make: 1 of 4: the axes of a plain Llama training step, found from its dataflow"
	$(XFORM) axes $(LLAMA)
	@echo
	@echo "make: 2 of 4: what sharding over 4 x 2 devices changes in the program"
	$(XFORM) dump $(LLAMA) --mesh fsdp=4,tensor=2 --diff
	@echo
	@echo "make: 3 of 4: the rewritten step on 8 virtual CPU devices against the original on one"
	$(XFORM) check $(LLAMA) --mesh fsdp=4,tensor=2 --devices 8
	@echo
	@echo "make: 4 of 4: the same step compiled for a TPU slice of 2 x 2 chips, without a TPU"
	$(XFORM) aot $(LLAMA) --mesh fsdp=2,tensor=2 --topology v5e:2x2

test: $(VENV)/.installed-test
	@echo "make: running all tests in two processes, slow ones included"
	$(PYTHON) -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(VENV)/.installed-test
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	@echo "make: mypy, on the package as it is built and installed"
	rm -rf build
	$(PYTHON) -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m pip install -qq --disable-pip-version-check --no-deps --target build/installed build/wheel/*.whl
	cd build/installed && ../../$(PYTHON) -m mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p xform

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Installed once; again when what is to be installed changes.
$(VENV)/.installed-demo: EXTRAS := aot,models
$(VENV)/.installed-test: EXTRAS := test
$(VENV)/.installed-test: COVERS := $(VENV)/.installed-demo
$(VENV)/.installed-%: setup.py | $(PYTHON)
	@echo "make: installing xform[$(EXTRAS)] and what it needs into $(VENV) (minutes, the first time)"
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m ensurepip
	$(PYTHON) -m pip install -qq --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@touch $@ $(COVERS)

$(PYTHON):
	@sh .ci/make_venv $(VENV)
