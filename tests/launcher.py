"""A process that prepares, and then forks for each script of the tests: most of a short run is its imports.

`python launcher.py CODE` runs the code once. A request is a line of JSON on stdin: a script, its arguments, what it
reads from stdin, the folder, the environment, and the seconds after which it is killed. The reply, on stdout, is its
exit status, as subprocess has it, and what it wrote to stdout and stderr. Variables that libraries read when they are
loaded, such as OMP_NUM_THREADS, are those of this process.
"""

import gc
import json
import os
import signal
import sys
import tempfile

requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
exec(sys.argv[1])
gc.collect()
gc.freeze()  # a fork that ends would search, and so copy, all that the imports made: twice the time of a short run
while True:
    line = requests.readline()
    if not line:
        raise SystemExit
    script, arguments, stdin, folder, environment, timeout = json.loads(line)
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        given.write(stdin)
        given.seek(0)
        child = os.fork()
        if child == 0:
            for stream, file in enumerate((given, out, err)):
                os.dup2(file.fileno(), stream)
            break
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        print(json.dumps([status, out.read(), err.read()]), file=replies, flush=True)

requests.close()
replies.close()
signal.alarm(timeout)
os.environ.clear()
os.environ.update(environment)
os.chdir(folder)
sys.path[:1] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
sys.argv = ["-c", *arguments]
exec(compile(script, "<string>", "exec"))
