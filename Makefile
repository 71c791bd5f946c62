# make demo: set-up, then the main job on the bundled model and text.  make test: set-up, then every check and test.
PYTHON ?= python3
VENV = .venv
BRIDGE_VENV = .venv-bridge
TORCH := $(shell grep '^torch==' constraints.txt)
# what does not depend on the backend is tested once, on 3.9.0
ON_BRIDGE = tests/models tests/analyzers tests/interventions tests/claims tests/test_main_job.py tests/test_cli.py \
	$(foreach name,coupling coupling_emergence slash band_ablation cone length emergence dummy_distance \
	perturbation substitution downstream plane_sufficiency,tests/experiments/test_$(name).py)
SOURCES = tl_posgen tests examples benchmarks

.PHONY: demo test test-bridge lint docs benchmark notebooks clean

demo: $(VENV)/installed
	$(VENV)/bin/tl-posgen analyze --out report

test: $(VENV)/installed-dev lint
	$(VENV)/bin/python -m pytest -q

test-bridge: $(BRIDGE_VENV)/installed-dev
	$(BRIDGE_VENV)/bin/python -m pytest -q $(ON_BRIDGE)

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

docs: $(VENV)/installed-dev
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(VENV)/bin/zensical build

notebooks: $(VENV)/installed-dev
	$(VENV)/bin/jupytext --to ipynb examples/*.py

# torch first: the pinned build is the small one
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet $(TORCH)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(BRIDGE_VENV)/installed-dev: pyproject.toml constraints.txt
	test -x $(BRIDGE_VENV)/bin/python || $(PYTHON) -m venv $(BRIDGE_VENV)
	$(BRIDGE_VENV)/bin/pip install --quiet $(TORCH)
	$(BRIDGE_VENV)/bin/pip install --quiet 'transformer-lens==4.3.0' --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) $(BRIDGE_VENV) build dist site report
