# `make demo` and `make test` install everything into .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REQUIREMENTS := requirements/runtime.txt requirements/onedl.txt requirements/test.txt
OPENCV := requirements/opencv.txt
JOBS ?= 2

.PHONY: help install test test-fast lint demo

help:
	@echo "make install    create $(VENV) and install everything"
	@echo "make demo       train and test on handwritten digits, about 12 minutes on 2 CPU cores"
	@echo "make test       lint and all tests, about 12 minutes on 2 CPU cores"
	@echo "make test-fast  the same without the slow ones, 4 minutes"
	@echo "make lint       ruff alone"

install: $(STAMP)

# Two packages that are needed bring one OpenCV each, into one folder; the ordinary one wants libGL, which
# servers lack. The package comes last and without its dependencies: they are pinned.
$(STAMP): setup.py $(REQUIREMENTS) $(OPENCV)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 12) else \
	  "mmunorm needs Python 3.10 to 3.12, and $(PYTHON) is %d.%d: make PYTHON=python3.11 ..." % v)'
	@echo 'Installing into $(VENV), 6 GB: a few minutes.'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix -r ,$(REQUIREMENTS))
	$(BIN)/python -m pip uninstall --quiet --yes opencv-python opencv-python-headless
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(OPENCV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .

test-fast: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadscope -m "not slow"

test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadscope

demo: $(STAMP)
	$(BIN)/python tools/demo.py
