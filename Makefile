# `make demo` and `make test` install everything into .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REQUIREMENTS := $(patsubst %,requirements/%.txt,runtime onedl deploy enhance translate test)
WITHOUT_DEPENDENCIES := $(patsubst %,requirements/%.txt,opencv edge)
JOBS ?= 2
PYTEST := -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder

# The last releases of OpenMMLab's own packages, beside a torch of their time.
TORCH ?= 2.1
TORCH_PACKAGES_2.1 := torch==2.1.2 torchvision==0.16.2
TORCH_PACKAGES_2.4 := torch==2.4.1 torchvision==0.19.1
OPENMMLAB := .venv-openmmlab-$(TORCH)

# Sophgo's compiler has packages for this Python alone.
PYTHON310 ?= python3.10
COMPILERS := .venv-sophgo/.installed .venv-rknn/.installed .venv-qnn/.installed

.PHONY: help install test test-fast test-projects test-grid coverage test-openmmlab test-openmmlab-fast mutants lint demo demo-detector docs zoo gpu chips

help:
	@echo "make install    create $(VENV) and install everything"
	@echo "make demo       UN in OpenMMLab, then a pretrained ViT-S folded exactly, in INT8: 4.5 minutes on 2 CPU cores"
	@echo "make demo-detector"
	@echo "                from a trained Mask R-CNN with LayerNorm to a tested INT8 file, on handwritten digits"
	@echo "make zoo        the small models on digits with scores, logs, weights and checksums, in work_dirs/zoo"
	@echo "make test       lint and all tests of the core, 12 minutes on 2 cores of an AMD EPYC"
	@echo "make test-fast  lint and the fast tests of core and projects"
	@echo "make test-projects"
	@echo "                all tests of projects/ and docs/, and the tables of benchmarks/"
	@echo "make test-grid  the cases that make test takes only a sample of, and all tests of benchmarks/"
	@echo "make coverage   all tests, and the lines of mmunorm that none of them runs"
	@echo "make test-openmmlab [TORCH=2.4]"
	@echo "                all tests with mmcv, mmdet and mmpretrain of OpenMMLab and torch 2.1 or 2.4"
	@echo "make test-openmmlab-fast [TORCH=2.4]"
	@echo "                the fast ones of the core, 4 minutes after the installation"
	@echo "make mutants    takes out guards of the code one by one, each of which a test has to miss, 5 minutes"
	@echo "make gpu        what never ran on a GPU, in 12 minutes of one: docs/results/training.md"
	@echo "make chips      accuracy and estimates of compilers of chips, 12 GB, Python 3.10 and 3.11: docs/how_to/chips.md"
	@echo "make lint       ruff, and mypy over the public names"
	@echo "make docs       the site in site/, seconds after the installation; warnings are errors"

install: $(STAMP)

# Two packages that are needed bring one OpenCV each, into one folder; the ordinary one wants libGL, which
# servers lack. The package comes last and without its dependencies: they are pinned. pip compiles on one core; all cores
# do it afterwards, and what does not compile in other packages is never imported.
$(STAMP): pyproject.toml $(REQUIREMENTS) $(WITHOUT_DEPENDENCIES)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 12) else \
	  "mmunorm needs Python 3.10 to 3.12, and $(PYTHON) is %d.%d: make PYTHON=python3.11 ..." % v)'
	@echo 'Installing into $(VENV), 7.5 GB: a few minutes.'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(addprefix -r ,$(REQUIREMENTS))
	$(BIN)/python -m pip uninstall --quiet --yes opencv-python opencv-python-headless
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps $(addprefix -r ,$(WITHOUT_DEPENDENCIES))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@$(BIN)/python -m compileall -q -j 0 -x '/tests?/' $(VENV)/lib > /dev/null 2>&1 || true
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

test-fast: lint
	$(BIN)/python $(PYTEST) -m "not slow and not grid"

test: lint
	$(BIN)/python $(PYTEST) -m "not grid" tests

test-projects: $(STAMP)
	$(BIN)/python $(PYTEST) -m "not grid" projects docs/tests benchmarks/tests/test_scores.py

# Coverage costs 40 to 50 % more CPU time in tests of folding.
coverage: $(STAMP)
	$(BIN)/python $(PYTEST) -m "not grid" --cov --cov-report=term-missing

test-grid: lint
	$(BIN)/python $(PYTEST) -m grid
	$(BIN)/python $(PYTEST) -m "not grid" benchmarks/tests

# mmcv-lite is mmcv without compiled operators; its setup.py needs torch and the older setuptools. OpenCV: see above.
$(OPENMMLAB)/.installed: pyproject.toml $(addprefix requirements/,openmmlab.txt enhance.txt translate.txt test.txt)
	@test -n "$(TORCH_PACKAGES_$(TORCH))" || { echo "TORCH must be 2.1 or 2.4, not $(TORCH)"; exit 2; }
	$(PYTHON) -m venv $(OPENMMLAB)
	$(OPENMMLAB)/bin/python -m pip install --quiet 'setuptools<70' wheel $(TORCH_PACKAGES_$(TORCH)) 'numpy<2'
	MMCV_WITH_OPS=0 $(OPENMMLAB)/bin/python -m pip install --quiet --no-build-isolation -r requirements/openmmlab.txt \
	  -r requirements/enhance.txt -r requirements/translate.txt -r requirements/test.txt
	$(OPENMMLAB)/bin/python -m pip uninstall --quiet --yes opencv-python opencv-python-headless
	$(OPENMMLAB)/bin/python -m pip install --quiet --no-deps $$(grep opencv requirements/openmmlab.txt)
	$(OPENMMLAB)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

test-openmmlab: $(OPENMMLAB)/.installed
	$(OPENMMLAB)/bin/python $(PYTEST) -m "not grid"

test-openmmlab-fast: $(OPENMMLAB)/.installed
	$(OPENMMLAB)/bin/python $(PYTEST) -m "not slow and not grid" tests

mutants: $(STAMP)
	$(BIN)/python tests/mutants/run.py

demo: $(STAMP)
	@$(BIN)/python tools/demo.py

demo-detector: $(STAMP)
	$(BIN)/python projects/digits/tools/demo_detector.py

zoo: $(STAMP)
	$(BIN)/python projects/digits/tools/zoo.py

gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu.py

# Qualcomm's provider for ONNX Runtime needs Python 3.11.
.venv-qnn/.installed: requirements/qnn.txt
	$(PYTHON) -m venv .venv-qnn
	.venv-qnn/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

chips: $(STAMP) $(COMPILERS)
	$(BIN)/python benchmarks/chips.py $(ARGS)
	$(BIN)/python benchmarks/chips_time.py

.venv-%/.installed: requirements/%.txt
	@$(PYTHON310) -c 'import sys; sys.exit(0 if sys.version_info[:2] == (3, 10) else \
	  "the compilers of chips need Python 3.10: make chips PYTHON310=...")'
	$(PYTHON310) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@# Sophgo's package has libraries of an older system, with which its own programs do not start.
	@cd .venv-$*/lib/python3.10/site-packages/tpu_mlir/lib/third_party 2> /dev/null || exit 0; mkdir -p ../off; \
	  mv libc.so.6 libm.so.6 libpthread.so.0 libstdc++.so.6 libgcc_s.so.1 ../off/
	@touch $@

# The API pages are read from the sources: no torch here.
.venv-docs/.installed: requirements/docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	@touch $@

docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
