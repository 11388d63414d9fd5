"""Profiles and processes: several that measure at once, and children of a fork."""

import json
import os
import signal
import textwrap

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork a process"),
]

START = """
import json, os, signal, sys, threading, time
import polycast
from polycast_plugins.fastest import measure as measuring
from polycast_plugins.fastest import profile as profiles
from polycast_plugins.fastest.profile_file import Conditions
from polycast_plugins.fastest.measurement import Measurement

measured = []
started, may_end = threading.Event(), threading.Event()


def measure(backend):
    measured.append(os.getpid())
    started.set()
    may_end.wait(60)
    now = Conditions.now(backend)
    times = (Measurement("linear", 1, "float32", 1e-3 + os.getpid() * 1e-9),)
    conditions = now.device_type, now.device, now.threads, now.versions, now.details
    return polycast.DeviceProfile(*conditions, times, 1e10, other_load=0.5)  # noisy


measuring.measure = measure
"""


@pytest.fixture
def run(launch, tmp_path):
    """Return a function that runs a script after START, with a cache of the test, and returns what it prints."""

    def run(script):
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "POLYCAST_PROFILE": ""}
        imports = "polycast, polycast_plugins.fastest.measure, polycast_plugins.fastest.profile"
        done = launch(START + textwrap.dedent(script), imports=imports, environment=environment, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_processes_that_start_at_once_measure_once(run):
    answers = run("""
    pipes = [os.pipe() for _ in range(3)]
    for _, write in pipes:
        if os.fork() == 0:
            may_end.set()
            os.write(write, json.dumps([polycast.profile("cpu").digest, len(measured)]).encode())
            os._exit(0)
    print(json.dumps([json.loads(os.read(read, 1000)) for read, _ in pipes]))
    """)
    assert len({digest for digest, _ in answers}) == 1
    assert sum(count for _, count in answers) == 1


def test_child_that_is_forked_while_a_thread_measures_can_measure(run):
    answer = run("""
    asking = threading.Thread(target=polycast.profile, args=("cpu",))
    asking.start()
    started.wait(60)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.environ["XDG_CACHE_HOME"] += "/of_the_child"
        may_end.set()
        polycast.profile("cpu")
        os.write(write, str(measured.count(os.getpid())).encode())
        os._exit(0)
    os.waitpid(child, 0)
    may_end.set()
    asking.join()
    print(json.dumps([os.read(read, 10).decode(), measured.count(os.getpid())]))
    """)
    assert answer == ["1", 1]


def test_child_of_a_fork_has_the_profile(run):
    digest, *others, count = run("""
    may_end.set()
    digest = polycast.profile("cpu").digest
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps([polycast.profile("cpu").digest, profiles.find("cpu").digest]).encode())
        os._exit(0)
    print(json.dumps([digest, *json.loads(os.read(read, 1000)), len(measured)]))
    """)
    assert others == [digest, digest]
    assert count == 1


def test_killed_process_leaves_no_file_that_is_used(tmp_path, run):
    killed = run("""
    if os.fork() == 0:
        threading.Thread(target=polycast.profile, args=("cpu",)).start()
        started.wait(60)
        os.kill(os.getpid(), signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
    """)
    assert killed == -signal.SIGKILL
    assert [path.suffix for path in (tmp_path / "polycast" / "profiles").iterdir()] == [".lock"]
    measured = run("""
    may_end.set()
    polycast.profile("cpu")
    print(json.dumps(len(measured)))
    """)
    assert measured == 1
