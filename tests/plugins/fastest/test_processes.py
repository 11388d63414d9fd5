"""Profiles and processes: several that measure at once, and children of a fork."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow

START = """
import json, os, sys, threading, time
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


def start(script, cache):
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "POLYCAST_PROFILE": ""}
    command = [sys.executable, "-c", START + textwrap.dedent(script)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer(process):
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return json.loads(printed)


def test_processes_that_start_at_once_measure_once(tmp_path):
    script = """
    may_end.set()
    found = polycast.profile("cpu")
    print(json.dumps([found.digest, len(measured)]))
    """
    answers = [answer(process) for process in [start(script, tmp_path) for _ in range(3)]]
    assert len({digest for digest, _ in answers}) == 1
    assert sum(count for _, count in answers) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_child_that_is_forked_while_a_thread_measures_can_measure(tmp_path):
    script = """
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
    """
    assert answer(start(script, tmp_path)) == ["1", 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_child_of_a_fork_has_the_profile(tmp_path):
    script = """
    may_end.set()
    digest = polycast.profile("cpu").digest
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps([polycast.profile("cpu").digest, profiles.find("cpu").digest]).encode())
        os._exit(0)
    print(json.dumps([digest, *json.loads(os.read(read, 1000)), len(measured)]))
    """
    digest, *others, count = answer(start(script, tmp_path))
    assert others == [digest, digest]
    assert count == 1


def test_killed_process_leaves_no_file_that_is_used(tmp_path):
    process = start(
        """
        threading.Thread(target=polycast.profile, args=("cpu",)).start()
        started.wait(60)
        print("measuring", flush=True)
        """,
        tmp_path,
    )
    assert process.stdout.readline() == "measuring\n"
    process.kill()
    process.communicate()
    assert [path.suffix for path in (tmp_path / "polycast" / "profiles").iterdir()] == [".lock"]
    script = """
    may_end.set()
    polycast.profile("cpu")
    print(json.dumps(len(measured)))
    """
    assert answer(start(script, tmp_path)) == 1
