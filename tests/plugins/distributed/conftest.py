"""A fixture that runs a script in two ranks, and one of the tests of recipes."""

import os

import pytest
from tests.plugins.quantize.conftest import declined  # noqa: F401  # a fixture

RANKS = """
import os, runpy, signal, sys
import torch

torch.set_num_threads(1)
ranks, script = {}, sys.argv.pop(1)
sys.path.insert(0, os.path.dirname(script))
for rank in ("0", "1"):
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        signal.alarm(300)  # a fork inherits none
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.read(reading, 5).decode(), "RANK": rank, "LOCAL_RANK": rank}
        os.environ.update(at, WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
        runpy.run_path(script, run_name="__main__")
        raise SystemExit
    ranks[process] = writing
store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # forks have not its thread
for writing in ranks.values():
    os.write(writing, f"{store.port:05}".encode())
while ranks:
    process, status = os.wait()
    del ranks[process]
    if status:
        for other in ranks:  # it may wait forever
            os.kill(other, signal.SIGKILL)
        raise SystemExit(os.waitstatus_to_exitcode(status))
"""


@pytest.fixture(scope="session")
def run_in_two_ranks(launch):
    """Return a function that runs a script on an engine in two ranks, forks of a process that has imported torch.

    It returns what they print.
    """

    def run(script, *arguments, engine):
        environment = {**os.environ, "POLYCAST_ENGINE": engine}
        imports = "torch, torch.distributed.fsdp, torch.distributed.tensor, torch.nn.parallel"
        done = launch(RANKS, script, *arguments, imports=imports, environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
