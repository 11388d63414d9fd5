"""Fixtures that build the C++ and run programs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import polycast

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("POLYCAST_") and name != "RANK"},
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="session")
def fast_dtypes(profile_of, tmp_path_factory):
    """Return the file of a profile in which no dtype is slow: summaries do not depend on the machine."""
    path = tmp_path_factory.mktemp("profile") / "fast.json"
    profile_of(bfloat16=0.5, float16=0.5).save(path)
    return str(path)


@pytest.fixture(scope="session")
def _build():
    """Build the C++ once: building at first use prints a line, and tests read the output of programs."""
    subprocess.run([sys.executable, "-m", "polycast", "build"], capture_output=True, check=False)


@pytest.fixture(autouse=True)
def _built_for_programs(request):
    """Build the C++ before tests that run programs."""
    if request.node.get_closest_marker("slow"):
        request.getfixturevalue("_build")


@pytest.fixture
def patched():
    with polycast.patch_torch() as it:
        yield it


@pytest.fixture(scope="session")
def _launcher():
    """The process that is forked for each run, and its pipes."""
    for_requests, requests = os.pipe()
    replies, for_replies = os.pipe()
    command = [sys.executable, str(Path(__file__).with_name("launcher.py")), str(for_requests), str(for_replies)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(for_requests, for_replies), env=ENVIRONMENT)
    os.close(for_requests)
    os.close(for_replies)
    with process, os.fdopen(replies) as reader, os.fdopen(requests, "w") as writer:
        yield reader, writer
        writer.close()


@pytest.fixture
def polycast_run(_launcher, fast_dtypes, tmp_path_factory):
    """Return a function that runs ``polycast run`` in a folder, and returns what subprocess.run() would."""
    reader, writer = _launcher

    def run(*arguments, folder, stdin="", **environment):
        streams = [tmp_path_factory.mktemp("streams") / name for name in ("stdin", "stdout", "stderr")]
        streams[0].write_text(stdin)
        request = {
            "arguments": ["run", *map(str, arguments)],
            "folder": str(folder),
            "environment": {**ENVIRONMENT, "POLYCAST_PROFILE": fast_dtypes, **environment},
            "streams": [str(path) for path in streams],
        }
        writer.write(json.dumps(request) + "\n")
        writer.flush()
        status = int(reader.readline())
        return subprocess.CompletedProcess(arguments, status, *(path.read_text() for path in streams[1:]))

    return run
