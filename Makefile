# Every target sets up what it needs in .venv first; repeated calls do not reinstall.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
READY := $(VENV)/.ready
SEED ?= 0
SECONDS ?= 1200
PINS ?=

.PHONY: demo test test-minimum test-export test-browser test-swap fuzz soak check docs format clean

demo: $(READY)
	$(BIN)/tokamix demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadgroup --durations=15
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 $(wildcard tests/ops/*_kernels.py)  # kernels, on the CPU

test-minimum:  # `make test` with the oldest versions that pyproject.toml allows, in .venv-minimum; not part of `make test`
	$(MAKE) test VENV=.venv-minimum PINS='torch==2.11.* timm==1.0.29'

test-export: $(READY)  # every family and task to every runtime; minutes, not part of `make test`
	$(BIN)/python -m pytest -n 2 tests/export/matrix.py

test-browser: $(READY)  # the studio in Chromium (apt-get install chromium); minutes, not part of `make test`
	$(BIN)/python -m pytest tests/browser

test-swap: $(READY)  # swapped models of all files of timm: sizes, torch.compile, torch.export; not part of `make test`
	$(BIN)/python -m pytest -n 2 tests/swap/every_model.py

fuzz: $(READY)  # random inputs of operators and damaged files; not part of `make test`
	$(BIN)/python -m tests.fuzz.operators --count 10000 --seed $(SEED)
	$(BIN)/python -m tests.fuzz.loaders --count 1000 --seed $(SEED)

soak: $(READY)  # training runs that are killed again and again; not part of `make test`
	$(BIN)/python -m tests.train.soak --seconds $(SECONDS) --seed $(SEED)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # broken links and anchors are errors; the site is in site/

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-minimum

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]' $(PINS)
	touch $@
