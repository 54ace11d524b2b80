"""Processes that share the import of torch, which takes longer than most of what they do."""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

# Reads the lists of arguments that Python gets, and the files of what each program writes; without them, one after
# the other to the same place, with a zero byte behind each.
FORKS = """
import importlib, json, os, runpy, sys

def start(arguments):
    kind, what, *sys.argv = arguments
    sys.argv.insert(0, what)
    if kind == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)

for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
results = []
for arguments, files in json.loads(sys.argv[1]):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        status = 0
        try:
            start(arguments)
        except SystemExit as leave:
            status = leave.code if isinstance(leave.code, int) else leave.code is not None
            if status is True:
                print(leave.code, file=sys.stderr)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    results.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if not files:
        os.write(1, b"\\0")
print(json.dumps(results), file=sys.stderr)
"""


def command(*programs, files=None, imports=("torch",)):
    """The command that runs programs, each given as what follows ``python``, when what is imported is there."""
    files = files or [()] * len(programs)
    jobs = [[program, [*map(str, its)]] for program, its in zip(programs, files, strict=True)]
    return [sys.executable, "-c", FORKS, json.dumps(jobs), json.dumps(imports)]


def run_each(*programs, **options):
    """What `subprocess.run` with `capture_output` and `text` gives for each of them. They run one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder) / f"{n}.out", Path(folder) / f"{n}.err") for n in range(len(programs))]
        ran = subprocess.run(command(*programs, files=files), capture_output=True, text=True, check=True, **options)
        codes = json.loads(ran.stderr.splitlines()[-1])
        texts = [[file.read_text() for file in pair] for pair in files]
    return [subprocess.CompletedProcess(p, c, *t) for p, c, t in zip(programs, codes, texts, strict=True)]


def in_fork(function, *arguments):
    """What a function returns or raises in a copy of this process, which stays as it is."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            found = function(*arguments), None
        except Exception as error:
            found = None, error
        with os.fdopen(write, "wb") as file:
            pickle.dump(found, file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        result, error = pickle.load(file)
    os.waitpid(child, 0)
    if error is not None:
        raise error
    return result
