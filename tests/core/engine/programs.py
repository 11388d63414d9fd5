"""Programs that run in processes of their own."""

import os
import subprocess
import sys


def run(program, engine, *arguments, timeout=300):
    """Run a program; return its status, what it wrote, and its errors, save that something is compiled.

    Python warns of forks among threads, which is what is tested.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, *map(str, arguments)],
        env={**os.environ, "POLYCAST_ENGINE": engine},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    errors = [line for line in done.stderr.splitlines() if not line.startswith("polycast: building ")]
    return done.returncode, done.stdout, "\n".join(errors)
