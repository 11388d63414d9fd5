"""``polycast devices`` and ``polycast doctor`` with plugins that print, hang, or end the process."""

import json
import os

import pytest

pytestmark = pytest.mark.slow
PRINTS = """
import atexit, ctypes, os
print("hello from Python")
os.system("echo hello from another process")
ctypes.CDLL(None).printf(b"hello from C\\n")
atexit.register(print, "hello at the end")
raise OSError("no driver")
"""


COMMAND = """
import os, polycast_plugins.cli, signal, sys
end = sys.argv.pop(1)
reads, writes = os.pipe()
child = os.fork()
if child:
    os.close(writes)
    for line in os.fdopen(reads, "rb"):  # until the process that says where the command ended has ended too
        os.write(2, line)
        if end and line.startswith(b"polycast: still "):
            os.kill(child, signal.Signals[end])
    os._exit(os.waitpid(child, 0)[0] != child)
signal.alarm(300)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs without
os.dup2(writes, 2)
os.close(reads), os.close(writes)
sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # it was a file, where one can seek
sys.argv[0] = "polycast"
polycast_plugins.cli.main()
"""


@pytest.fixture
def call(distribution, folder, launch):
    """Return a function that runs a command with a plugin for ``hpu`` of this source; it returns stdout and stderr.

    `end` is the signal that ends it once it says that it still waits.
    """

    def call(source, *arguments, end="", **variables):
        distribution("acme-hpu", {"hpu": "acme_hpu"}, {"acme_hpu.py": source}, "1.5")
        others = {name: value for name, value in os.environ.items() if not name.startswith("POLYCAST_")}
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**others, "POLYCAST_ENGINE": "reference", "PYTHONPATH": path, **variables}
        done = launch(COMMAND, end, *arguments, imports="polycast_plugins.cli.command_line", environment=environment)
        return done.stdout, done.stderr

    return call


@pytest.mark.parametrize("command", ["devices", "doctor"])
def test_json_is_all_of_stdout_whatever_a_plugin_prints(call, command):
    out, err = call(PRINTS, command, "--json")
    found = json.loads(out)
    devices = found if command == "devices" else found["backends"]
    assert {each["device_type"]: each["state"] for each in devices}["hpu"] == "broken"
    for who in ("from Python", "from another process", "from C", "at the end"):
        assert f"hello {who}\n" in err


@pytest.mark.parametrize("command", ["devices", "doctor"])
@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_plugin_that_ends_the_process_is_named_below_the_rows_before_it(call, command, end):
    out, err = call(f"import os, signal\n{end}", command)
    assert err == "polycast: the process ended in the plugin of 'hpu': acme-hpu 1.5 (acme_hpu)\n"
    assert [line.split()[0].strip(":") for line in out.splitlines()[-2:]] == ["cpu", "cuda"]


HANGS_WHEN_ASKED = """
import polycast, time, torch

class Acme(polycast.plugin.Backend):
    device_type, default_dtype, policies = "hpu", torch.bfloat16, polycast.plugin.STANDARD_POLICIES

    def availability(self):
        time.sleep(600)

    def supported_dtypes(self):
        return (torch.bfloat16,)

@polycast.plugin.hookimpl
def polycast_backend():
    return Acme()
"""


@pytest.mark.parametrize("end", ["SIGKILL", "SIGINT"])
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import time\ntime.sleep(600)", "importing the plugin of 'hpu', acme-hpu 1.5 (acme_hpu)"),
        (HANGS_WHEN_ASKED, "asking the plugin of 'hpu', acme-hpu 1.5 (acme_hpu) whether the device can be used"),
    ],
    ids=["import", "availability"],
)
@pytest.mark.parametrize("command", ["devices", "doctor"])
def test_a_plugin_that_hangs_is_named_below_the_rows_before_it(call, command, source, said, end):
    out, err = call(source, command, end=end)
    assert err.startswith(f"polycast: still {said}. POLYCAST_BLOCK=hpu leaves it out.\n")
    assert [line.split()[0].strip(":") for line in out.splitlines()[-2:]] == ["cpu", "cuda"]
    assert "polycast: the process ended in the plugin of 'hpu': acme-hpu 1.5 (acme_hpu)\n" in err
    assert end == "SIGINT" or len(err.splitlines()) == 2  # no word of typer's


@pytest.mark.parametrize(
    "command", [("devices",), ("doctor", "--json"), ("run", "--wrap", "cpu", "/dev/null")], ids=str
)
def test_a_warning_is_shown_without_the_code_of_the_command_line(call, command):
    said = call("raise OSError('no driver')", *command, POLYCAST_BLOCK="hpuu")[1].splitlines()
    text = "polycast: POLYCAST_BLOCK names 'hpuu', which no installed distribution offers a backend for: did you mean "
    assert said[0].startswith(text)
    assert len(said) == (2 if command[0] == "run" else 1)  # a summary
