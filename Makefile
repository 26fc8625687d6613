# Needs only Python (3.11 or newer) and make. `make setup` builds .venv; everything else runs inside it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One BLAS thread: the kernels are compared and tested one thread at a time, and runs repeat to the byte.
include deploy/worker.env
export

.PHONY: setup demo screenshot quick test lint types check benchmarks paper clean cluster-test deploy-setup deploy-test s3-test slurm-test systemd-test image-test mixed-test watch-setup watch-test ecosystem-test lock lock-test audit oldest-test

setup: $(VENV)/.installed

# What runs; `make demo` does without the tools of developers.
$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "toffee_dist needs Python 3.11 or newer; try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(VENV)/.ready
	$(BIN)/python jobs/demo.py

# The pictures of the README; needs Chromium and its driver.
screenshot: setup
	$(BIN)/python -m tests.harness.browser docs/report.png docs/report.gif

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

check: lint types

# Tests wait for processes they have started half of their time: more of them at a time than two cores take.
TESTS_AT_ONCE ?= 3

test: check
	$(BIN)/python -m pytest --numprocesses $(TESTS_AT_ONCE) --dist worksteal --durations=25

# What a change has most likely broken, in about a minute: no cluster, no whole job, few examples of a property.
quick: lint
	HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest --quiet --numprocesses $(TESTS_AT_ONCE) --dist worksteal \
	  -m "not (slow or cluster or job or data or deploy or daemons or ecosystem)"

# Several hosts with TLS on this machine, storage on S3, one of them cut off: see deploy/hosts.py.
cluster-test: setup
	$(BIN)/python -m pytest tests/deploy/test_hosts.py tests/cluster/test_retire.py

# The tests that `make test` leaves out: they need the packages that carry the schemas of Kubernetes and the Dask
# operator.
deploy-setup: $(VENV)/.deploy

deploy-test: deploy-setup
	$(BIN)/python -m pytest -m deploy tests/deploy

# What a user copies from deploy/, really run. Each of these ends by itself and leaves nothing running; what it needs
# beside Python comes from Debian's packages, whose installation is the only thing here that asks for root.
debian = dpkg -s $(1) >/dev/null 2>&1 || { [ "$$(id -u)" = 0 ] || { echo "as root: apt-get install $(1)"; exit 2; }; \
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
  apt-get install -y -qq --no-install-recommends $(1) >/dev/null; }

# The tests of object stores on two S3 servers: moto, as in `make test`, and Ceph's gateway.
s3-test: setup
	@$(call debian,ceph-mon ceph-osd radosgw)
	TOFFEE_S3_SERVERS=moto,ceph $(BIN)/python -m pytest --durations=5 tests/storage/test_s3.py

# The recipes of deploy/slurm/ on Slurm itself: a controller and two nodes on this machine.
slurm-test: deploy-setup
	@$(call debian,munge slurm-wlm)
	$(BIN)/python -m pytest -m daemons --durations=8 tests/deploy/test_slurm.py

# The service and timer of deploy/systemd/ under a booted systemd, in a container; as root.
systemd-test: setup
	@$(call debian,debootstrap systemd-container)
	$(BIN)/python -m pytest -m daemons --durations=8 tests/deploy/test_systemd.py

# The image and the services of Compose, built and run without Docker or a registry; as root.
image-test: deploy-setup
	@$(call debian,aardvark-dns buildah debootstrap iptables netavark podman podman-compose runc)
	$(BIN)/python -m pytest -m daemons --durations=8 tests/deploy/test_image.py

# Dask's figures behind TLS, a Prometheus that fetches them, the alarms and the dashboard.
watch-setup:
	@$(call debian,prometheus)

watch-test: setup watch-setup
	$(BIN)/python -m pytest -m "daemons or not daemons" --durations=5 tests/deploy/test_watching.py

# Clusters of two Pythons and of two Dasks, which a job must refuse: environments of their own, as they would be.
# The first Python that runs and is another than ours; pyenv has names of some that do not.
OTHER_PYTHON ?= $(shell for other in python3.12 python3.13 python3.11 $(wildcard $(HOME)/.pyenv/versions/3.1[123]*/bin/python3); do \
  of=$$($$other -c 'import sys; print(sys.version_info[1])' 2>/dev/null) \
  && [ "$$of" != "$$($(PYTHON) -c 'import sys; print(sys.version_info[1])')" ] && echo $$other && break; done)
OTHER_DASK ?= 2025.4.1
mixed-test: setup
	@test -n "$(OTHER_PYTHON)" || { echo "no second Python here: make mixed-test OTHER_PYTHON=..."; exit 2; }
	@test -x .venv-python/bin/toffee || { $(OTHER_PYTHON) -m venv .venv-python && \
	  .venv-python/bin/python -m pip install --quiet --disable-pip-version-check -e .; }
	@test -x .venv-dask/bin/toffee || { $(PYTHON) -m venv .venv-dask && \
	  .venv-dask/bin/python -m pip install --quiet --disable-pip-version-check -e . \
	  dask==$(OTHER_DASK) distributed==$(OTHER_DASK); }
	MIXED_PYTHON=$(CURDIR)/.venv-python/bin/python MIXED_DASK=$(CURDIR)/.venv-dask/bin/python \
	  $(BIN)/python -m pytest -m daemons --durations=5 tests/deploy/test_mixed.py

$(VENV)/.deploy: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,deploy]'
	@touch $@

# Programs of others that read our tables or run our jobs, each really installed and really asked: the extra
# `ecosystem`, and environments of their own for those that pin other versions than ours. `make test` runs the tests
# of those that are there.
FEAST := .venv-feast
AIRFLOW := .venv-airflow
ecosystem-test: setup $(VENV)/.ecosystem $(FEAST)/.installed $(AIRFLOW)/.installed
	TOFFEE_FEAST=$(CURDIR)/$(FEAST)/bin TOFFEE_AIRFLOW=$(CURDIR)/$(AIRFLOW)/bin \
	  $(BIN)/python -m pytest -m ecosystem --durations=10

$(VENV)/.ecosystem: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,ecosystem]'
	@touch $@

$(FEAST)/.installed:
	$(PYTHON) -m venv $(FEAST)
	$(FEAST)/bin/python -m pip install --quiet --disable-pip-version-check 'feast>=0.60'
	@touch $@

$(AIRFLOW)/.installed:
	$(PYTHON) -m venv $(AIRFLOW)
	$(AIRFLOW)/bin/python -m pip install --quiet --disable-pip-version-check 'apache-airflow>=3.0'
	@touch $@

# What the image installs, each file with its hash; where it comes from is for the one who installs.
lock: deploy-setup
	$(BIN)/pip-compile --quiet --upgrade --extra s3 --generate-hashes --allow-unsafe --all-build-deps --strip-extras \
	  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-header \
	  --output-file deploy/requirements.lock pyproject.toml

# What the image's build does, without the image: install the lock, then this checkout, fetching nothing more.
LOCKED := .venv-locked
lock-test:
	$(PYTHON) -m venv $(LOCKED)
	$(LOCKED)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
	  -r deploy/requirements.lock
	$(LOCKED)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index .
	$(LOCKED)/bin/python -m pip check
	$(LOCKED)/bin/toffee demo --out $(LOCKED)/demo

audit: deploy-setup
	.ci/audit $(BIN)

# The documentation as a site, in build/site: README, docs/, the docstrings, the notebook with its answers, a search.
# Warnings are errors, and every link is followed.
.PHONY: docs dist
docs: $(VENV)/.docs
	rm -rf build/site
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -d build/doctrees -E -c docs . build/site
	$(BIN)/python docs/check_site.py build/site

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

# What a user gets from a registry: sdist and wheel in dist/, checked, then the wheel alone in an empty environment, and
# the demonstration from an empty folder.
DIST := .venv-dist
dist: $(VENV)/.dist
	rm -rf dist $(DIST)
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	$(DIST)/bin/python -m pip check
	empty=$$(mktemp -d) && cd $$empty && $(CURDIR)/$(DIST)/bin/toffee demo --out demo && test -s demo/vectors/latest.json \
	  && rm -r $$empty

$(VENV)/.dist: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dist]'
	@touch $@

# The oldest versions that pyproject.toml allows, in an environment of their own; takes minutes, not part of CI.
OLDEST := .venv-oldest
oldest-test:
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c deploy/oldest.txt \
	  -e . pytest pytest-timeout hypothesis pandas
	$(OLDEST)/bin/python -m pytest -W default -o addopts="--strict-markers" \
	  tests/kernels/test_solvers.py tests/kernels/test_spectrum.py tests/test_tensor.py tests/ingest/test_edges.py \
	  tests/batch/test_pipeline.py tests/refresh/test_job.py tests/cluster/test_tls.py tests/cluster/test_stall.py

# The paper's Table 2 on ../shared/data: its eight systems, with the paper's numbers in brackets. What is done is kept in
# build/paper: after an interruption it goes on.
paper: setup
	$(BIN)/python benchmarks/paper.py --tuned --picture docs/quality-time.svg

benchmarks: setup
	$(BIN)/python benchmarks/solver.py
	$(BIN)/python benchmarks/quality.py
	$(BIN)/python benchmarks/rhythm.py
	$(BIN)/python benchmarks/ingest.py
	$(BIN)/python benchmarks/defaults.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/scaling.py --large
	$(BIN)/python benchmarks/rescal.py
	$(BIN)/python benchmarks/evaluate.py --best --cache --rescal
	$(BIN)/python benchmarks/future.py

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis
