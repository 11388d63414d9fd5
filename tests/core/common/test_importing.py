"""A fork waits for imports of other threads, but not for long."""

import os

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")]

PROGRAM = """
import os, sys, threading
from polycast.common import importing
from polycast.policy.manifests import InstalledPlugin, Plugin

importing.LONGEST_WAIT = {limit}
sys.started, sys.ends = threading.Event(), threading.Event()
thread = threading.Thread(target=InstalledPlugin("acme", "acme", "1.0", Plugin()).resolve, args=("acme:number",))
thread.start()
assert sys.started.wait(60)
if {ends}:
    os.register_at_fork(before=sys.ends.set)  # before polycast's
child = os.fork()
if not child:
    os._exit(getattr(sys.modules["acme"], "number", 0))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
sys.ends.set()
thread.join()
"""


@pytest.mark.parametrize(("ends", "limit", "number"), [(True, 60, 5), (False, 0.1, 0)], ids=["ends", "hangs"])
def test_a_fork_waits_for_an_import_of_another_thread_that_ends(launch, tmp_path, ends, limit, number):
    (tmp_path / "acme.py").write_text("import sys\nsys.started.set()\nsys.ends.wait()\nnumber = 5\n")
    program = PROGRAM.format(ends=ends, limit=limit)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = launch(program, environment=environment)
    assert (done.stdout, done.stderr) == (f"{number}\n", "")
