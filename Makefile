# Each target installs what it needs in $(VENV), and is safe to run twice.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
TESTS ?= tests

# Folders too, since removing a file updates its folder.
SOURCES := pyproject.toml MANIFEST.in README.md $(wildcard LICENSE) $(shell find $(wildcard core backends plugins) \
	\( -name __pycache__ -o -name '*.egg-info' \) -prune -o -print)

.PHONY: test test-all test-core matrix check demo compiled docs stress asan tsan bench wheels clean FORCE

# The tests run on the installed wheel, in a process for each processor with two OpenMP threads each. These are more threads
# than processors, so a thread that waits must not spin: it would take another thread's time, and the tests three times as
# long. `make test-all` includes the tests with the marker `slow`. pytest keeps the bytecode of the tests for the next run:
# to compile it takes half of the time of collecting them.
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)
pytest = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive $(VENV)/bin/pytest --installed -n $(WORKERS) --dist worksteal

test: $(VENV)/polycast.stamp
	$(pytest) -m "not slow" $(TESTS)
	@echo "The slow tests did not run: make test-all runs all tests."

test-all: $(VENV)/polycast.stamp
	$(pytest) $(TESTS)

# The tests of the core and the backends where plugins/ and its entry points are deleted, in an environment of their own.
test-core:
	rm -rf $(VENV)-core/tree
	$(PYTHON) tools/without_plugins.py $(VENV)-core/tree
	$(MAKE) -C $(VENV)-core/tree test-all VENV="$(abspath $(VENV)-core)"

# All tests on each Python and torch of the table in pyproject.toml, except interpreters that are not on the path.
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

# Installs only what examples/demo.py needs, compiles in parallel, and prints both times. Bytecode is written to $(VENV) in
# any case, since pip wrote none.
demo: export PYTHONDONTWRITEBYTECODE =
demo:
	@set -e; started=$$(date +%s); \
	$(MAKE) --no-print-directory -j2 $(VENV)/demo.stamp compiled; \
	installed=$$(date +%s); \
	$(VENV)/bin/python examples/demo.py; \
	ended=$$(date +%s); \
	echo "Installed in $$((installed - started)) s, and run in $$((ended - installed)) s."

# The native engine, from the source tree, while the rest is installed. The ops for int8 are compiled when the demo needs
# them. A failure is printed, and ignored.
compiled: $(VENV)/torch.stamp
	PYTHONPATH=core:backends:plugins $(VENV)/bin/python -B -c "from polycast.plugin import NativeLibrary; print(NativeLibrary.of_engine().build())" || true

# The site, from docs/, the docstrings and docs/figures. A wrong page or link is an error. Open site/index.html.
docs: $(VENV)/docs.stamp
	$(VENV)/bin/python -m docs
	$(VENV)/bin/python -m sphinx -W --keep-going --quiet docs site

# A stress test: threads, caches, weights that change and die, collected generators, and forks.
STEPS ?= 20000
stress: $(VENV)/polycast.stamp
	POLYCAST_ENGINE=native $(VENV)/bin/python tests/core/engine/stress.py $(STEPS)
	POLYCAST_ENGINE=reference $(VENV)/bin/python tests/core/engine/stress.py $(STEPS)

# The native engine's tests under AddressSanitizer and ThreadSanitizer, each with its own cache of builds, since a build by
# another compiler command would be used. Left out are tests that fork while threads run: the sanitizers do not hold their
# locks over a fork; tests of memory: AddressSanitizer does not return what is freed; and one that calls each op of torch
# with any arguments: some divide by zero. setarch turns off address randomization, which ThreadSanitizer does not support.
SANITIZED ?= tests/core/engine tests/plugins/observe tests/core/region
SANITIZED_OPS ?= $(addprefix tests/plugins/quantize/,test_matmuls.py test_few_rows.py) $(wildcard tests/plugins/quantize/test_int*.py) \
	tests/plugins/fastest/test_recorded_natively.py
RACE_STEPS ?= 1000
preloading = XDG_CACHE_HOME="$(abspath $(VENV))/$(1)" \
	LD_PRELOAD="$$($(CXX) -print-file-name=lib$(1).so) $$($(CXX) -print-file-name=libstdc++.so)"
asan: $(VENV)/polycast.stamp
	CXX="$(CXX) -fsanitize=address -fno-omit-frame-pointer" ASAN_OPTIONS=detect_leaks=0 $(call preloading,asan) \
		$(VENV)/bin/pytest --installed -k "native and not fork and not memory_does_not_grow and not grow_memory and not no_op_of_torchs and not inductor" $(SANITIZED)
	CXX="$(CXX) -fsanitize=address -fno-omit-frame-pointer" ASAN_OPTIONS=detect_leaks=0 $(call preloading,asan) \
		$(VENV)/bin/pytest --installed -m "not slow" $(SANITIZED_OPS)
	CXX="$(CXX) -fsanitize=address -fno-omit-frame-pointer" ASAN_OPTIONS=detect_leaks=0 $(call preloading,asan) \
		POLYCAST_ENGINE=native $(VENV)/bin/python tests/core/engine/stress.py 300 0 0

tsan: $(VENV)/polycast.stamp
	CXX="$(CXX) -fsanitize=thread -fno-omit-frame-pointer -fno-inline" \
		TSAN_OPTIONS="suppressions=$(CURDIR)/tests/core/engine/races_of_torch.txt" $(call preloading,tsan) \
		POLYCAST_ENGINE=native setarch -R $(VENV)/bin/python tests/core/engine/stress.py $(RACE_STEPS) 0 0

# BENCH takes options: make bench BENCH="--quick --json figures.json". --save writes the figures to docs/figures and updates
# the tables, the pictures and the README. This also updates the pictured outputs of a run and of `polycast devices`.
bench: $(VENV)/bench.stamp
	$(VENV)/bin/python -m benchmarks $(BENCH)
	$(VENV)/bin/python -m docs.figures
	$(VENV)/bin/python -m docs

# A wheel with an engine for each torch of TORCHES, beside the pure one: it needs no compiler. Each engine is built in a
# temporary environment with its torch, of some 5 GB. The default is each torch of the table in pyproject.toml; TORCHES
# takes fewer, separated by spaces: make wheels TORCHES=torch==2.13.0. PYTHON must have wheels of each.
TORCHES ?= $(shell sed -n "s/.*torch = \"\(torch[^\"]*\)\" }.*/'\1'/p" pyproject.toml | sort -u)
wheels: $(VENV)/package.stamp
	$(VENV)/bin/python -m pip install --quiet 'auditwheel>=6'
	rm -rf build/engines
	set -e; for torch in $(TORCHES); do \
		rm -rf $(VENV)-engine; \
		$(PYTHON) -m venv $(VENV)-engine; \
		$(VENV)-engine/bin/python -m pip install --quiet --no-compile "$$torch" numpy "$$(echo dist/*-none-any.whl)[cli]"; \
		$(VENV)-engine/bin/python tools/prebuild.py build/engines polycast_plugins.quantize.cpu.native; \
		rm -rf $(VENV)-engine; \
	done
	$(VENV)/bin/python tools/platform_wheel.py dist/*-none-any.whl build/engines dist
	rm -rf build

clean:
	rm -rf $(VENV) $(VENV)-core $(VENV)-engine $(VENV)-nox .nox build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache

# torch first, so that pip does not replace it with another build. Without bytecode: the demo imports only a part of torch,
# and the tests compile the rest. numpy, because torch looks for it when it is imported, and pluggy to compile the engine.
# The stamp contains the requirement, so that it is newer only if TORCH has changed.
$(VENV)/torch.stamp: FORCE
	@test "$$(cat $@ 2>/dev/null)" = "$(TORCH)" || { \
		set -ex; \
		$(PYTHON) -m venv $(VENV); \
		$(VENV)/bin/python -m pip install --no-compile "$(TORCH)" numpy pluggy build 'setuptools>=77'; \
		echo "$(TORCH)" > $@; \
	}

# The wheel is built from the sdist, so that both are complete and contain nothing left in build/. The *.egg-info that
# building leaves here would shadow the metadata of the installed wheel.
$(VENV)/wheel.stamp: $(VENV)/torch.stamp $(SOURCES)
	rm -rf dist
	$(VENV)/bin/python -m build --no-isolation
	rm -rf build *.egg-info
	touch $@

$(VENV)/package.stamp: $(VENV)/wheel.stamp
	$(VENV)/bin/python -m pip uninstall --quiet --yes polycast
	$(VENV)/bin/python -m pip install --no-compile "$$(echo dist/*-none-any.whl)[all]"
	touch $@

# Importing what the demo imports compiles its bytecode, in parallel with the C++.
$(VENV)/demo.stamp: $(VENV)/package.stamp
	$(VENV)/bin/python -m pip install --no-compile "$$(echo dist/*-none-any.whl)[demo]"
	$(VENV)/bin/python -c "import sklearn.datasets, torch._dynamo"
	touch $@

# Compile all bytecode, in parallel. Files that cannot be compiled are ignored.
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
