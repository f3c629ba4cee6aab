# make demo       train the quickstart hybrid beside its attention twin: about two minutes after the install
# make test       every test but the slow ones
# make test-all   every test, and then `make test-versions`
# make test-versions  what `make test` runs, under the oldest torch and Triton that pyproject.toml takes and under the
#                 newest tried; gigabytes the first time, since torch comes built for CUDA
# make lint       ruff, mypy and the limits on lines of code
# make compile-matrix   every kernel for every GPU arch under three versions of Triton, into docs/results; no GPU
#                       needed, an hour or two the first time, later what has changed
# make docs       the site of docs/, in build/docs; a broken link is an error
# make clean      remove what was built; keeps .venv and runs
#
# The first of them makes .venv; later ones use it again until pyproject.toml or constraints.txt changes.
# Another Python (3.11 or newer): make PYTHON=python3.12 test

PYTHON ?= python3

# Folders such as kernels/ must not hide an installed package of the same name from `python -m`.
export PYTHONSAFEPATH = 1

# Threads of torch that wait for each other sleep instead of spinning. Beside one other busy process on two cores, training
# ran at 120 tokens/s without it and at 2,800 with it.
export OMP_WAIT_POLICY = passive

pip = -m pip install --quiet --quiet --disable-pip-version-check
pip_install = .venv/bin/python $(pip) --constraint constraints.txt

.PHONY: demo test test-all test-versions lint compile-matrix docs clean other-python
.DELETE_ON_ERROR:

demo: .venv/.installed-test
	.venv/bin/statemix train recipes/quickstart.yaml --compare recipes/quickstart-attention.yaml

test: .venv/.installed-test
	.venv/bin/pytest -n auto -m "not slow"

test-all: .venv/.installed-test
	.venv/bin/pytest -n auto
	$(MAKE) test-versions

versions = oldest newest

test-versions: $(versions:%=build/%/.installed)
	build/oldest/bin/pytest -n auto -m "not slow"
	build/newest/bin/pytest -n auto -m "not slow"

# Of two pins of a package the first is kept: that of the version's own file.
$(versions:%=build/%/.installed): build/%/.installed: constraints-%.txt constraints.txt pyproject.toml
	@echo "installing statemix[test] into build/$*; the first time takes minutes"
	$(PYTHON) -m venv --clear build/$*
	awk -F== '!seen[$$1]++' constraints-$*.txt constraints.txt > build/$*/constraints.txt
	build/$*/bin/python $(pip) --constraint build/$*/constraints.txt setuptools
	build/$*/bin/python $(pip) --constraint build/$*/constraints.txt --no-build-isolation --editable ".[test]"
	@touch $@

lint: .venv/.installed-dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/python tools/link_packages.py
	.venv/bin/mypy
	.venv/bin/python tools/code_lines.py

# A folder for each version goes before the packages of .venv, which has the newest of them and torch.
triton_versions = 3.4.0 3.6.0 3.7.1

compile-matrix: .venv/.installed-test $(triton_versions:%=build/triton-%/.installed)
	.venv/bin/python tools/compile_matrix.py $(triton_versions:%=build/triton-%)

build/triton-%/.installed: | .venv/.installed-test
	.venv/bin/python $(pip) --no-deps --target build/triton-$* triton==$*
	@touch $@

# --quiet would hide the warnings that --strict counts. The variable silences a notice about the future of MkDocs.
docs: .venv/.installed-docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict
	@echo "open build/docs/index.html, or run .venv/bin/mkdocs serve"

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name .venv -prune -o -name __pycache__ -prune -exec rm -rf {} +

# setuptools comes first because the package is built with the pinned one, not with one that pip picks.
.venv/.installed-%: pyproject.toml constraints.txt .venv/.created
	@echo "installing statemix[$*] into .venv; the first time takes minutes"
	$(pip_install) setuptools
	$(pip_install) --no-build-isolation --editable ".[$*]"
	@touch $@

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "statemix needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(venv_flags) .venv
	@touch $@

# A Python that the caller names is the one that runs: an environment of another one is made anew.
ifneq ($(origin PYTHON),file)
ifneq ($(wildcard .venv),)
ifneq ($(shell $(PYTHON) -V 2>&1),$(shell .venv/bin/python -V 2>&1))
venv_flags = --clear
.venv/.created: other-python
endif
endif
endif
