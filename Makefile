# Every target sets up what it needs in .venv with plain pip; a second run finds the stamps and starts at once.
# Another interpreter:  make clean && make test PYTHON=python3.12

PYTHON ?= python3
SPEC ?= megatron:world=16,tp=2,cp=2,pp=2,ep=2
ARGS ?=
# The torch of `make test-torch`: the newest that the tests pass on.
TORCH ?= 2.15.0
# The oldest, which CI runs beside it.
OLD_TORCH := 2.8.0
# How wide `make test-sweeps` is: 1, or all.
SWEEP ?= 1
# Of others' releases: all, or few.
PEERS ?= all
# The Pythons that `make dist` installs the wheel in; torch of one that is not the tests' own is downloaded.
PYTHONS ?= python3.10 python3.13
# The programs that `make test-hangs` runs: all, or some by name.
HANGS ?= all
# Tests run side by side in this many processes; one that has nothing left takes half of what another has. JOBS=0: no xdist.
# More than there are cores: ranks wait for each other about as long as they compute.
JOBS ?= 3
# Tests start many interpreters: what they import is compiled once, whatever the caller's shell says.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
# The kernel on torch: how ranks start, agree, and get their groups.
KERNEL_TESTS := tests/groups tests/launch tests/rendezvous
# What depends on torch's insides: live groups, ranks that are threads, and what stands on both.
LIVE_TESTS := tests/groups tests/sim tests/check tests/testing tests/dialects
# The distribution of how engines shard their weights.
ENGINES := packages/rankmesh-engines
# Live groups once more, over torch's public API alone: what a torch that is not known gets.
PUBLIC_TESTS := $(addprefix tests/groups/test_,$(addsuffix .py,agree complete connect device_mesh discover faults lifecycle measure verify))
BIN := $(VENV)/bin
# What fails is run again, alone, once; what passes then is listed as unstable, and more than two fail.
PYTEST := $(BIN)/python -m pytest -p tests.again
# Of what is installed a tenth is imported, and compiled then.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# The exact requirement that constraints.txt holds for a package: $(call pin,torch) is torch==x.y.z
pin = $(shell grep -m 1 '^$(1)==' constraints.txt)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-all test-nightly test-torch test-kernel test-browser screenshots test-gpu test-hangs test-sweeps test-cluster test-launchers test-system test-wheel \
	dist test-peers install downloads lint lint-page page bench bench-transfers bench-cluster docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+: .*## ' $(firstword $(MAKEFILE_LIST)) | awk -F ':.*## ' '{ printf "make %-15s %s\n", $$1, $$2 }'

demo: $(VENV)/.installed  ## show a 16-rank layout (SPEC=...), then create and verify its groups on this machine
	$(BIN)/rankmesh show '$(SPEC)'
	$(BIN)/rankmesh check '$(SPEC)'

test: $(VENV)/.installed-test  ## run the tests and the docstring examples, but for the long ones (ARGS='-k mesh', JOBS=0, PART=kernel)
	@$(if $(PART),$(BIN)/python -m tests.parts $(PART),$(PYTEST) -m 'not long') -n $(JOBS) --dist worksteal $(ARGS)

test-all: $(VENV)/.installed-notebook  ## the same with the long and the nightly ones (ARGS="-m 'not nightly'")
	@$(PYTEST) -n $(JOBS) --dist worksteal --durations 20 --durations-min 5 $(ARGS)

test-torch: $(VENV)/torch-$(TORCH)/.installed  ## run the tests of live and simulated ranks on another torch (TORCH=2.15.0: downloads up to 3 GB)
	@$(VENV)/torch-$(TORCH)/bin/python -m pytest -p tests.again -n $(JOBS) --dist worksteal $(LIVE_TESTS) $(ARGS)
	@$(if $(PUBLIC_TESTS),RANKMESH_TEST_PUBLIC=1 $(VENV)/torch-$(TORCH)/bin/python -m pytest -p tests.again -n $(JOBS) --dist worksteal -m 'not long' $(PUBLIC_TESTS))

test-kernel:  ## run the tests of the kernel on another torch, but for the long ones
	@$(MAKE) --no-print-directory test-torch TORCH=$(TORCH) LIVE_TESTS='$(KERNEL_TESTS)' PUBLIC_TESTS= ARGS="-m 'not long' $(ARGS)"

test-browser: $(VENV)/.installed-browser  ## open the explorer in a real browser (root: it installs chromium)
	@RANKMESH_BROWSER=1 $(PYTEST) -n 0 --timeout 300 tests/browser $(ARGS)

screenshots: $(VENV)/.installed-browser  ## make the explorer's pictures of docs/images anew (root: it installs chromium)
	@$(BIN)/python -m tests.browser.screenshots

test-hangs: $(VENV)/.installed-test  ## run every program that hangs, the doctor on what it leaves, the watch (root)
	@HANGS=$(HANGS) $(PYTEST) -n $(JOBS) --dist worksteal tests/hangs tests/watch tests/check/test_outcomes.py $(ARGS)

# The system's Python, on what readers of files depend on; it takes the packages of .venv, so it has to be of the same minor version.
SYSTEM_PYTHON ?= /usr/bin/python3
SYSTEM_TESTS := tests/transfer/test_files.py tests/transfer/test_convert.py tests/cli/test_checkpoint.py tests/readers/test_hostile.py tests/doctor/test_reading.py
VERSION = import sys; print(sys.version_info[:2])
test-system: $(VENV)/.installed-test  ## run the tests of the readers of files on the system's Python (SYSTEM_PYTHON=...)
	@test "$$($(SYSTEM_PYTHON) -c '$(VERSION)')" = "$$($(BIN)/python -c '$(VERSION)')" \
		|| { echo "error: $(SYSTEM_PYTHON) is of another version than .venv; make clean && make test PYTHON=$(SYSTEM_PYTHON)"; exit 1; }
	@PYTHONPATH=src:$(ENGINES)/src:$$(echo $(VENV)/lib/python3.*/site-packages) $(SYSTEM_PYTHON) -m pytest -p tests.again -n $(JOBS) --dist worksteal -m 'not long' $(SYSTEM_TESTS) $(ARGS)

test-wheel: $(VENV)/.installed-test  ## build the wheel, install it in an empty environment, run its command and the four lines
	@RANKMESH_WHEEL=1 $(PYTEST) -n 0 tests/test_wheel.py $(ARGS)

dist: $(VENV)/.installed-dist  ## build a release from a clean tree into dist/, check it, install it in empty environments (PYTHONS=...)
	@test -z "$$(git status --porcelain)" || { echo 'error: the tree has changes; commit them, then make dist'; exit 1; }
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m build --outdir dist $(ENGINES)
	$(BIN)/twine check --strict dist/*
	@RANKMESH_WHEEL=1 RANKMESH_DIST=dist RANKMESH_PYTHONS='$(PYTHONS)' $(PYTEST) -n 0 --timeout 3000 tests/test_wheel.py $(ARGS)

test-gpu: $(VENV)/.installed-test  ## live groups, transfers and hangs on NCCL, by ranks that share the GPUs (torch 2.14 with CUDA)
	@$(PYTEST) -n 0 tests/gpu $(ARGS)

test-sweeps: $(VENV)/.installed-test  ## kill a rank at every operation of connect, the dialects, a check, a round; hostile files (SWEEP=all)
	@RANKMESH_TEST_SWEEP=$(SWEEP) RANKMESH_CLUSTER=$(if $(filter all,$(SWEEP)),1) $(PYTEST) -n $(JOBS) --dist load --maxschedchunk 1 --timeout 3000 \
		tests/check/test_blame.py tests/readers/test_hostile.py \
		tests/dialects/test_kill_sweep.py tests/rendezvous/test_schedules.py tests/survival/test_sweep.py \
		$(if $(filter all,$(SWEEP)),tests/rendezvous/test_contract.py::test_one_dies_at_each_operation \
		tests/survival/test_faults.py tests/guard/test_faults.py tests/survival/test_guarding.py tests/examples/test_survives.py \
		tests/survival/test_simulated.py tests/survival/test_strangers.py tests/survival/test_relayout.py::test_any_sequence_of_layouts_and_losses tests/survival/test_relayout.py::test_what_a_change_asks_of_the_store tests/transfer/test_sync_failures.py tests/compare/test_train_gpt.py tests/multihost/test_four_hosts.py) $(ARGS)

# In this order; one that fails does not keep the others from running. RANKMESH_TEST_SWEEP=all: all cases of each sweep.
NIGHTLY := lint 'test-all ARGS="--timeout 3000" RANKMESH_TEST_SWEEP=all' test-hangs test-launchers test-browser 'test-cluster RANKMESH_TEST_SWEEP=all' \
	'test-peers RANKMESH_ENGINES=1' test-wheel test-system 'test-torch TORCH=$(OLD_TORCH)' test-torch docs
test-nightly: install downloads  ## all that there is: repetitions, sweeps, all programs, launchers, peers and torches (root; hours)
	@failed=; for target in $(NIGHTLY); do eval "$(MAKE) --no-print-directory $$target" || failed="$$failed $${target%% *}"; done; \
		test -z "$$failed" || { echo "error: these failed:$$failed"; exit 1; }

test-cluster: $(VENV)/.installed-test  ## emulate clusters, and predict, measure and move on them (root)
	@RANKMESH_CLUSTER=1 $(PYTEST) -n $(JOBS) --dist loadfile tests/bench/test_cluster.py tests/multihost $(ARGS)

test-launchers: $(VENV)/.installed-launchers  ## run under a real Slurm, Open MPI, MPICH, Ray and torchrun (root: it installs them)
	@RANKMESH_LAUNCHERS=1 $(PYTEST) -n 0 --timeout 300 tests/launchers $(ARGS)

test-peers: $(VENV)/.installed-peers-$(PEERS)  ## compare with other systems' own code, each release of it (PEERS=few: the newest, no engines)
	@RANKMESH_PEERS=$(VENV)/peers $(PYTEST) -n $(JOBS) --dist load --timeout 400 $(if $(filter few,$(PEERS)),-m 'not nightly') tests/peers $(ENGINES)/tests \
		'tests/watch/test_switch.py::test_unmodified_programs[accelerate-late]' 'tests/watch/test_switch.py::test_unmodified_programs[deepspeed-absent]' $(ARGS)

install: launchers chromium packages  ## install what lint and tests need (root: Debian's programs too)

# All at once, which is quicker than extra by extra.
.PHONY: packages
packages: $(VENV)/.installed
	$(PIP) -e '.[lint,examples,testing,test,notebook,launchers,browser]'
	$(PIP) --no-deps $(BESIDE)
	@touch $(VENV)/.installed-test
	@touch $(addprefix $(VENV)/.installed-,lint notebook launchers browser)

downloads: $(VENV)/.installed-peers-all $(VENV)/torch-$(TORCH)/.installed $(VENV)/torch-$(OLD_TORCH)/.installed  ## what test-peers and test-torch need beside it (up to 7 GB)

lint: $(VENV)/.installed-lint  ## check style, formatting, types and layers
	@echo '== style: ruff check'
	@$(BIN)/ruff check
	@echo '== formatting: ruff format --check'
	@$(BIN)/ruff format --check
	@echo '== types, as the oldest Python: mypy'
	@$(BIN)/mypy
	@echo '== layers: lint-imports'
	@$(BIN)/lint-imports
	@$(BIN)/lint-imports --config $(ENGINES)/pyproject.toml
	@echo '== workflows: check-jsonschema'
	@if test -x $(BIN)/check-jsonschema; then \
		$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml && \
		$(BIN)/check-jsonschema --builtin-schema vendor.github-actions action.yml; \
		else echo 'not here: it needs Python 3.11'; fi
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory lint-page; else echo '== the explorer: no npm here, see make lint-page'; fi

lint-page: explorer/node_modules/.installed  ## check types and style of the explorer's sources (npm)
	@echo '== the explorer: tsc, eslint, prettier'
	@cd explorer && npm run --silent lint

page: explorer/node_modules/.installed  ## build the explorer's page, which the wheel holds, from its sources (npm)
	@cd explorer && npm run --silent build

bench: $(VENV)/.installed-test  ## measure against the peers; writes bench/results.json, docs/benchmarks.md (ARGS='--rounds 3')
	$(BIN)/python -m bench --json bench/results.json --markdown docs/benchmarks.md $(ARGS)

bench-transfers: $(VENV)/.installed-test  ## transfers beside what others do (root); bench/transfers.json, docs
	$(BIN)/python -m bench.transfers --peers $(VENV)/peers $(ARGS)

bench-cluster: $(VENV)/.installed-test  ## placement and transfers on emulated clusters (root); bench/cluster.json, docs
	$(BIN)/python -m bench.cluster $(ARGS)

docs: $(VENV)/.installed-docs  ## build the documentation into build/docs; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --nitpicky --keep-going --quiet docs build/docs

clean:  ## remove .venv, caches and build output
	rm -rf $(VENV) explorer/node_modules build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests packages -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# torch comes first and by its exact version, so that a wheel which pip finds on this machine is taken as it is.
$(VENV)/.installed: $(VENV)/.created pyproject.toml $(ENGINES)/pyproject.toml constraints.txt
	$(PIP) '$(call pin,torch)'
	$(PIP) -e '.[torch]' -e $(ENGINES)
	@touch $@

$(VENV)/.installed-dist: $(VENV)/.installed-test
	$(PIP) build twine
	@touch $@

# Others' code that tests run beside ours: what is asked of it, ranks and groups, needs none of its dependencies.
BESIDE = '$(call pin,megatron-core)' '$(call pin,fairscale)' '$(call pin,nanotron)'
$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) -e '.[test]'
	$(PIP) --no-deps $(BESIDE)
	@touch $@

$(VENV)/.installed-notebook: $(VENV)/.installed-test
	$(PIP) -e '.[notebook]'
	@touch $@

# The pins, but for torch's own; torch brings NVIDIA's libraries along where it is built for CUDA, and uses none of them here.
$(VENV)/torch-%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(@D)
	@grep -v '^torch==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt 'torch==$*' -e '.[test]'
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps '$(call pin,megatron-core)' '$(call pin,fairscale)'
	@touch $@

# The system's programs each time: a stamp in .venv knows nothing of them.
.PHONY: launchers
launchers:
	@tests/launchers/install.sh

$(VENV)/.installed-launchers: $(VENV)/.installed-test | launchers
	$(PIP) -e '.[launchers]'
	@touch $@

# Debian's own browser: Playwright drives it and downloads none.
.PHONY: chromium
chromium:
	@tests/browser/install.sh

$(VENV)/.installed-browser: $(VENV)/.installed-test | chromium
	$(PIP) -e '.[browser]'
	@touch $@

explorer/node_modules/.installed: explorer/package-lock.json
	cd explorer && npm ci --silent
	@touch $@

# Each release of another system lies in a folder of its own, without its dependencies.
$(VENV)/.installed-peers-%: $(VENV)/.installed-test tests/peers/fetch.py $(ENGINES)/pins.txt
	$(BIN)/python -m tests.peers.fetch $(VENV)/peers $*
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) -e '.[docs]'
	@touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(PIP) -e '.[lint,examples,testing]'
	@touch $@
