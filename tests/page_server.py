"""Runs notebooks one after another, each in a process of its own that is forked from this one.

Nearly every page imports torch, plotly, pandas, nbdev and nbformat (which plotly asks for), 5 seconds of one core. This process
imports them once, does nothing with them (no tensor, no CUDA, and no thread, which a fork would lose), and forks for each page;
what a page does, no other page can see.
What is imported here is frozen: otherwise each page's garbage collections go through all of it, 1 second a page. For the same reason
a page's process ends after its threads and its exit functions, without taking apart what it shares with this one, half a second a page.
A request is a line of JSON (page, log, limit in seconds, flags of cells that are left out), the answer is one too (code: the exit code, None after the limit).
"""
import atexit
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"   # pandas' allocator would start a thread

import accelerate  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import nbformat  # noqa: F401
import numpy  # noqa: F401
import pandas  # noqa: F401
import plotly.express  # noqa: F401
import plotly.graph_objects  # noqa: F401
import plotly.io  # noqa: F401
import safetensors.torch  # noqa: F401
import torch._dynamo  # noqa: F401
from execnb.shell import CaptureShell  # noqa: F401
from fastcore.test import test_eq  # noqa: F401
from matplotlib.backends.registry import backend_registry
from nbdev.config import get_config
from nbdev.test import test_nb


def run(page, log, tmp, flags):
    "Execute a page but for cells with one of these flags, with all that it prints in a file and its temporary files below `tmp`; the exit code."
    os.setsid()
    os.environ["TMPDIR"] = tempfile.tempdir = tmp
    for fd, path, how in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
        opened = os.open(path, how)
        os.dup2(opened, fd)
        os.close(opened)
    os.dup2(1, 2)
    ok, _ = test_nb(Path(page), skip_flags=flags, basepath=get_config().config_path)
    return int(not ok)


def end(code):
    "End a page's process as an interpreter does, but for its modules, which stay; those of a simulator are taken apart, which can fail."
    if "mujoco" in sys.modules: sys.exit(code)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait(pid, limit):
    "Exit code of a page's process; None when it had to be killed, with all in its session."
    until = time.monotonic()+limit
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done: return os.waitstatus_to_exitcode(status)
        time.sleep(.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def serve():
    assert threading.active_count() == 1 and len(list(Path("/proc/self/task").glob("*"))) < 2, "a fork would lose a thread"
    backend_registry.list_all()   # reads each package's entry points, which a page's shell would do
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        tmp = tempfile.mkdtemp(prefix="page-")
        pid = os.fork()
        if pid == 0: end(run(request["page"], request["log"], tmp, request["flags"]))
        code = wait(pid, request["limit"])
        shutil.rmtree(tmp, ignore_errors=True)   # pages leave runs there, up to 200 MB
        print(json.dumps(dict(code=code)), flush=True)
