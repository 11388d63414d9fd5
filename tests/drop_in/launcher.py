"""A process that has imported polycast, and forks for each ``polycast run`` of the tests: most of a run is that import.

A request is a line of JSON: the arguments of ``polycast``, the folder, the environment, and the files of the three
streams. The reply is the exit status, as subprocess has it.
"""

import json
import os
import sys

from polycast.cli import main

requests, replies = (os.fdopen(int(number), mode) for number, mode in zip(sys.argv[1:], "rw", strict=True))
while True:
    line = requests.readline()
    if not line:
        raise SystemExit
    child = os.fork()
    if child == 0:
        break
    replies.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
    replies.flush()

request = json.loads(line)
requests.close()
replies.close()
os.environ.clear()
os.environ.update(request["environment"])
os.chdir(request["folder"])
for stream, path in enumerate(request["streams"]):
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.dup2(file, stream)
    os.close(file)
sys.argv = ["polycast", *request["arguments"]]
main()
