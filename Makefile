# `make test`: lint, types and the quick tests (under ten minutes on two cores). `make test-all` adds the
# tests marked `slow`. Every target creates .venv and installs what it needs first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test test-slow test-all train lint format bench docs clean

$(VENV): $(VENV)/.installed

# One file marks a finished installation: a second call reinstalls only when pyproject.toml changed.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"agalite needs Python 3.11 or newer; this is {sys.version.split()[0]}: make PYTHON=python3.11"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[envs,craftax,memory-maze,train,video,export,wandb,ray,flax,memax,docs,dev]"
	# A C compiler for the custom kernels, where the system has none.
	@{ command -v gcc || command -v clang || command -v cc; } >/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[native]"
	# What Mystery Path is compared with; its own pins collide with everything (--no-deps).
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "memory-gym==1.0.2"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "pygame>=2.6.1,<3"
	touch $@

# A third worker computes while another waits for processes it has started.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist worksteal

test: lint $(VENV)/.installed
	$(PYTEST) -m "not slow"

# With XLA's own way to generate code, which the quick tests leave out to save time.
test-slow: $(VENV)/.installed
	XLA_FLAGS=--xla_backend_optimization_level=0 $(PYTEST) -m slow

test-all: test test-slow

# Trains an agent that learns to remember beside one without memory: minutes on two cores.
train: $(VENV)/.installed
	$(BIN)/agalite demo --out runs/demo

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed
	$(BIN)/agalite bench throughput --models
	$(BIN)/agalite bench throughput --envs
	$(BIN)/agalite bench throughput --training

# The documentation site, into site/; a dead link is an error.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "written to site/index.html"

clean:
	rm -rf $(VENV) build dist site
