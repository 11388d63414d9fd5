"""Fixtures that run programs in processes of their own, and one that has threads take turns."""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def start_launcher():
    """Return a function that starts a process, which prepares; it returns one that runs scripts in forks of that."""
    with contextlib.ExitStack() as started:

        def start(prepare, environment=os.environ):
            command, pipe = [sys.executable, str(Path(__file__).with_name("launcher.py")), prepare], subprocess.PIPE
            process = started.enter_context(
                subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
            )

            def run(script, *arguments, stdin="", folder=".", environment=environment, timeout=300):
                request = json.dumps([script, arguments, stdin, str(folder), dict(environment), timeout])
                print(request, file=process.stdin, flush=True)
                return subprocess.CompletedProcess(arguments, *json.loads(process.stdout.readline()))

            return run

        yield start


@pytest.fixture(scope="session")
def launch(start_launcher):
    """Return a function that runs a script in a fork of a process that has imported torch, or `imports`.

    Python warns of forks among threads, which tests do on purpose. A process is started for each `imports`, and lives
    until the tests end.
    """

    @functools.cache
    def launched(imports):
        return start_launcher(f"import warnings, {imports}; warnings.simplefilter('ignore', DeprecationWarning)")

    def launch(script, *arguments, imports="torch", **options):
        return launched(imports)(script, *map(str, arguments), **options)

    return launch


@pytest.fixture(scope="session")
def run_program(launch):
    """Return a function that runs a program on an engine, in a process as of `launch`.

    It returns the program's status, what it wrote, and its errors, save that something is compiled.
    """

    def run_program(program, engine, *arguments, **options):
        done = launch(program, *arguments, environment={**os.environ, "POLYCAST_ENGINE": engine}, **options)
        errors = [line for line in done.stderr.splitlines() if not line.startswith("polycast: building ")]
        return done.returncode, done.stdout, "\n".join(errors)

    return run_program


@pytest.fixture(scope="session")
def built(make_once):
    """Return the folder of polycast's sdist, and of the wheel built from it."""

    def build(folder):
        unwanted = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info")
        copy = shutil.copytree(Path(__file__).parent.parent, folder / "checkout", ignore=unwanted)
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(copy)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)
        assert done.returncode == 0, done.stdout

    return make_once("built", build)


@pytest.fixture
def switching_often():
    """Let threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
