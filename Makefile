# Set-up, tests, checks, the demo and the benchmarks. Each target makes what it needs in $(VENV), and is safe to run
# twice.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
TESTS ?= tests

# Folders too: one is newer than the stamp when a file in it was removed.
SOURCES := pyproject.toml MANIFEST.in README.md $(wildcard LICENSE) $(shell find core backends \
	\( -name __pycache__ -o -name '*.egg-info' \) -prune -o -print)

.PHONY: test test-all matrix check demo compiled docs stress asan tsan bench wheels clean FORCE

# The tests run on the installed wheel, not on the source tree, in a process for each core. Two OpenMP threads in each of
# them keep the cores busy and still make teams. `make test-all` runs the slow tests too (see the marker in pyproject.toml).
WORKERS ?= auto
pytest = OMP_NUM_THREADS=2 $(VENV)/bin/pytest --installed -n $(WORKERS) --dist worksteal

test: $(VENV)/polycast.stamp
	$(pytest) -m "not slow" $(TESTS)
	@echo "The slow tests did not run: make test-all runs all tests."

test-all: $(VENV)/polycast.stamp
	$(pytest) $(TESTS)

# All tests on each Python and torch of the table in pyproject.toml; an interpreter that is not on the path is skipped.
# NOX takes options: make matrix NOX="-s 'tests(3.10, torch==2.11.*)'".
matrix: $(VENV)-nox/bin/nox
	$(VENV)-nox/bin/nox $(NOX)

$(VENV)-nox/bin/nox:
	$(PYTHON) -m venv $(VENV)-nox
	$(VENV)-nox/bin/python -m pip install --quiet nox

check: $(VENV)/polycast.stamp
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema custom.github-workflows-require-timeout .github/workflows/*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(VENV)/bin/zizmor --offline --quiet .github

# It installs what the demo needs and no more, compiles meanwhile, and says how long that took and the demo. The bytecode of
# what it imports is kept in $(VENV) whatever the environment says, for pip made none.
demo: export PYTHONDONTWRITEBYTECODE =
demo:
	@set -e; started=$$(date +%s); \
	$(MAKE) --no-print-directory -j2 $(VENV)/demo.stamp compiled; \
	installed=$$(date +%s); \
	$(VENV)/bin/polycast demo; \
	ended=$$(date +%s); \
	echo "Installed in $$((installed - started)) s, and run in $$((ended - installed)) s."

# The C++, ahead of its first use. Where it cannot be compiled that is said, and again by whoever does without it.
compiled: $(VENV)/package.stamp
	$(VENV)/bin/polycast build || true

# The site, from docs/, the docstrings and docs/figures; what is wrong with a page or a link ends it. Open site/index.html.
docs: $(VENV)/docs.stamp
	$(VENV)/bin/python -m docs
	$(VENV)/bin/python -m sphinx -W --keep-going --quiet docs site

# Threads, caches, casts and packings of weights that change and die, generators that are collected, and forks, for longer
# than a test has.
STEPS ?= 20000
stress: $(VENV)/polycast.stamp
	POLYCAST_ENGINE=native $(VENV)/bin/python tests/engine/stress.py $(STEPS)
	POLYCAST_ENGINE=reference $(VENV)/bin/python tests/engine/stress.py $(STEPS)

# The native engine's tests on a build that finds errors of memory and, for what threads share, races. Another command of
# the compiler makes another build, so nothing needs to be cleaned before or after. Neither runs children that are forked
# while threads run: the sanitizers' own locks are not held over a fork. Nor does AddressSanitizer give back what is freed,
# which a test of memory takes for growth. ThreadSanitizer wants a program's memory where it
# expects it, so setarch.
SANITIZED ?= tests/engine tests/observe tests/region
RACE_STEPS ?= 1000
preloading = LD_PRELOAD="$$($(CXX) -print-file-name=lib$(1).so) $$($(CXX) -print-file-name=libstdc++.so)"
asan: $(VENV)/polycast.stamp
	CXX="$(CXX) -fsanitize=address -fno-omit-frame-pointer" ASAN_OPTIONS=detect_leaks=0 $(call preloading,asan) \
		$(VENV)/bin/pytest --installed -k "native and not fork and not memory_does_not_grow and not grow_memory" $(SANITIZED)
	CXX="$(CXX) -fsanitize=address -fno-omit-frame-pointer" ASAN_OPTIONS=detect_leaks=0 $(call preloading,asan) \
		POLYCAST_ENGINE=native $(VENV)/bin/python tests/engine/stress.py 300 0 0

tsan: $(VENV)/polycast.stamp
	CXX="$(CXX) -fsanitize=thread -fno-omit-frame-pointer -fno-inline" \
		TSAN_OPTIONS="suppressions=$(CURDIR)/tests/engine/races_of_torch.txt" $(call preloading,tsan) \
		POLYCAST_ENGINE=native setarch -R $(VENV)/bin/python tests/engine/stress.py $(RACE_STEPS) 0 0

# BENCH takes options: make bench BENCH="--quick --json figures.json". With --save the figures are kept in docs/figures, and
# the tables, the pictures and what the README says of them are made of them. This also makes again what a run and `polycast
# devices` say here.
bench: $(VENV)/bench.stamp
	$(VENV)/bin/python -m benchmarks $(BENCH)
	$(VENV)/bin/python -m docs.figures
	$(VENV)/bin/python -m docs

# A wheel with an engine for each torch of TORCHES, beside the pure one: where it is installed, no compiler is needed. Each is
# built under its torch, in an environment that is made for it and removed.
TORCHES ?= $(TORCH)
wheels: $(VENV)/polycast.stamp
	$(VENV)/bin/python -m pip install --quiet 'auditwheel>=6'
	rm -rf build/engines
	set -e; for torch in $(TORCHES); do \
		rm -rf $(VENV)-engine; \
		$(PYTHON) -m venv $(VENV)-engine; \
		$(VENV)-engine/bin/python -m pip install --quiet --no-compile "$$torch" "$$(echo dist/*-none-any.whl)"; \
		$(VENV)-engine/bin/python -m polycast.cli.prebuild build/engines polycast_cpu.native; \
		rm -rf $(VENV)-engine; \
	done
	$(VENV)/bin/python tools/platform_wheel.py dist/*-none-any.whl build/engines dist
	rm -rf build

clean:
	rm -rf $(VENV) $(VENV)-engine $(VENV)-nox .nox build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache

# torch first: what is installed satisfies polycast's requirement, and nothing takes another build of it. pip would compile
# to bytecode all of it, of which the demo imports a part: that is compiled as it is imported, and the rest with the tests.
# numpy is what torch looks for as it is imported, which it is while more is installed.
# The stamp holds the requirement, so that it is newer only when TORCH is another.
$(VENV)/torch.stamp: FORCE
	@test "$$(cat $@ 2>/dev/null)" = "$(TORCH)" || { \
		set -ex; \
		$(PYTHON) -m venv $(VENV); \
		$(VENV)/bin/python -m pip install --no-compile "$(TORCH)" numpy build 'setuptools>=77'; \
		echo "$(TORCH)" > $@; \
	}

# The wheel is built from the sdist, so that both are whole and nothing left in build/ gets in. The metadata that
# building leaves here would be found before that of the installed wheel by whatever runs in this folder.
$(VENV)/wheel.stamp: $(VENV)/torch.stamp $(SOURCES)
	rm -rf dist
	$(VENV)/bin/python -m build --no-isolation
	rm -rf build *.egg-info
	touch $@

$(VENV)/package.stamp: $(VENV)/wheel.stamp
	$(VENV)/bin/python -m pip uninstall --quiet --yes polycast
	$(VENV)/bin/python -m pip install --no-compile "$$(echo dist/*-none-any.whl)"
	touch $@

# The wheel once more, for what its extras ask for. What the demo imports, torch.optim's part of torch among it, is imported
# here, to be compiled beside the C++.
$(VENV)/demo.stamp: $(VENV)/package.stamp
	$(VENV)/bin/python -m pip install --no-compile "$$(echo dist/*-none-any.whl)[demo]"
	$(VENV)/bin/python -c "import sklearn.datasets, torch._dynamo"
	touch $@

# The tests start many processes, which may not write bytecode. What pip passes over, for it cannot be compiled, is
# passed over here too.
$(VENV)/polycast.stamp: $(VENV)/package.stamp
	$(VENV)/bin/python -m pip install "$$(echo dist/*-none-any.whl)[dev]"
	$(VENV)/bin/python -m compileall -qq -j0 $(VENV)/lib || true
	touch $@

$(VENV)/bench.stamp: $(VENV)/polycast.stamp
	$(VENV)/bin/python -m pip install "$$(echo dist/*-none-any.whl)[bench]"
	touch $@

# Likewise for `docs`.
$(VENV)/docs.stamp: $(VENV)/polycast.stamp
	$(VENV)/bin/python -m pip install "$$(echo dist/*-none-any.whl)[docs]"
	touch $@
