"""Run scripts in children of a process that has imported torch and polycast.

A fresh interpreter takes seconds to import torch; a fork of this one takes milliseconds, and has looked up no backend.
Requests and replies are lines of JSON: ``{"script", "folders", "environment"}``, and ``{"answer"}`` or ``{"error"}``.
"""

import dataclasses
import json
import os
import signal
import sys
import traceback

import torch

import polycast

PATIENCE = 300
"""Seconds after which a script that hangs is killed; one may have to build the native engine."""


def error_of(function, *arguments):
    """Return the name and the text of the exception of a call, and those of its cause."""
    try:
        function(*arguments)
    except BaseException as error:
        chain = [error] if error.__cause__ is None else [error, error.__cause__]
        return [part for link in chain for part in (type(link).__name__, str(link))]
    return None


def run(script, folders, environment):
    """Run a script with folders at the front of the path; return its variable `answer`, as JSON."""
    os.environ.update(environment)
    sys.path[:0] = folders
    names = {"error_of": error_of, "polycast": polycast, "sys": sys, "torch": torch}
    exec(script, names)
    return json.dumps({"answer": names["answer"]}, default=_as_json)


def _as_json(value):
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)


def _child(request, writing):
    os.dup2(2, 1)  # replies are on stdout, so plugins print to stderr
    signal.alarm(PATIENCE)
    try:
        reply = run(**request)
    except BaseException:
        reply = json.dumps({"error": traceback.format_exc()})
    with os.fdopen(writing, "w") as pipe:
        pipe.write(reply)


def main():
    """Run the scripts from stdin."""
    for line in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _child(json.loads(line), writing)
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            reply = pipe.read()
        _, status = os.waitpid(child, 0)
        print(reply or json.dumps({"error": f"ended with status {status}, without a reply"}), flush=True)


if __name__ == "__main__":
    main()
