"""Settings that were kept for equal arguments, in a process that is forked."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import copy, os, sys
import torch
import polycast

torch.set_num_threads(1)
ARGUMENTS = [{}, {"dtype": torch.float16}, {"enabled": False, "cache_enabled": True}]


def construct(**arguments):
    names = set()
    sys.setprofile(lambda frame, event, _: names.add(frame.f_code.co_name))
    try:
        region = polycast.autocast("cpu", **arguments)
    finally:
        sys.setprofile(None)
    return region._settings, "resolve" in names


for _ in range(2):  # the first one chooses the engine
    for arguments in ARGUMENTS:
        with polycast.autocast("cpu", **arguments):
            pass
before = [construct(**arguments) for arguments in ARGUMENTS]
child = os.fork()
if not child:
    kept = [construct(**arguments) for arguments in ARGUMENTS] == before
    with polycast.autocast("cpu"):
        kept = kept and torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    backend = copy.copy(polycast.plugin.get_backend("cpu"))
    vars(backend)["default_dtype"] = torch.float16
    polycast.plugin.register_backend(backend)
    settings, is_resolved = construct()
    os._exit(0 if kept and is_resolved and settings.dtype is torch.float16 else 1)
print(os.waitpid(child, 0)[1], [is_resolved for _, is_resolved in before])
print([construct(**arguments) for arguments in ARGUMENTS] == before)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_they_serve_the_child_until_its_backend_is_another(engine):
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM],
        env={**os.environ, "POLYCAST_ENGINE": engine},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"0 {[engine == 'reference'] * 3}\nTrue\n"
