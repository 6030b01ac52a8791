"Runs as processes: one writer, an honest status, signals that reach everyone, and nothing left behind."
import json
import logging
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError

from chaos import alive, wait_for
from clvla.core.files import write_json
from clvla.core.records import append_jsonl
from clvla.core.processes import descendants
from clvla.train.config import TrainConfig, resolve
from clvla.run.child import explain
from clvla.run.launch import RunStopped, launch
from clvla.run.ranks import _run_ranks, commands
from clvla.run.folder import RunFolder
from clvla.run.sweep import start, sweep
from clvla.run.watch import Run

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


@pytest.fixture(autouse=True)
def path_to_helper(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def begun(path, do=None, **kw):
    "A run folder whose processes do what `do` says."
    cfg = resolve(TrainConfig(run_dir=str(path), batch_size=32, device="cpu", **kw))
    run = RunFolder(path)
    run.begin(cfg)
    (run.path/"do.json").write_text(json.dumps(do or {}))
    return run


def pids(run, world):
    "Process ids of all ranks and their simulators, once they are at work."
    files = [run.path/f"pids-{r}" for r in range(world)]
    wait_for(lambda: all(f.exists() and f.read_text() for f in files))
    return [p for f in files for p in json.loads(f.read_text())]


def as_page(run, act="launch('ranks_work', PATH)"):
    "A page: a process that launches the run."
    code = f"from clvla.run.launch import launch; from clvla.run.sweep import start; PATH = {str(run.path)!r}; {act}"
    return subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


HOLD = "from clvla.run.folder import RunFolder as R\nwith R({!r}).lock(): print(flush=True); input()"


def test_one_writer(tmp_path):
    "A second process is refused with host and pid; the lock vanishes with its owner."
    run = begun(tmp_path/"run")
    p = subprocess.Popen([sys.executable, "-c", HOLD.format(str(run.path))], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    p.stdout.readline()
    says = rf"being written by process {p.pid} on {re.escape(socket.gethostname())} since 20.*Run\.open"
    assert run.status == "running" and run.holder["pid"] == p.pid
    with pytest.raises(ValueError, match=says): run.begin(run.cfg)
    with pytest.raises(ValueError, match=says), run.lock(): pass
    p.send_signal(signal.SIGKILL)
    p.wait()
    assert run.status == "interrupted"
    with run.lock():
        assert run.begin(run.cfg) == "continued"
        with pytest.raises(ValueError, match="by this process"), RunFolder(run.path).lock(): pass
        with RunFolder(run.path, rank=1).lock(): pass


def test_many_looks_do_not_keep_a_run_out(tmp_path):
    run = begun(tmp_path/"run")
    look = f"from clvla.run.folder import RunFolder as R; r = R({str(run.path)!r}); print(flush=True)\nwhile True: r.holder"
    p = subprocess.Popen([sys.executable, "-c", look], stdout=subprocess.PIPE)
    p.stdout.readline()
    try:
        for _ in range(20):
            with run.lock(): pass
    finally:
        p.kill()
        p.wait()


def test_status_tells_how_it_stands(tmp_path):
    run = RunFolder(tmp_path/"run")
    assert run.status == "new"
    begun(tmp_path/"run")
    assert run.status == "waiting"
    run.note_stopped(stage=0, step=3)
    assert run.status == "stopped"
    try: raise OSError("No space left")
    except OSError as e: run.note_failed(e)
    RunFolder(run.path, 1).note_failed(ValueError("second"))
    failed = json.loads((run.path/"failed.json").read_text())
    assert run.status == "failed" and (failed["type"], failed["message"]) == ("OSError", "No space left")
    with run.lock():
        assert run.status == "running"
        run.begin_again()
    assert run.status == "interrupted"
    write_json(run.path/"done.json", {})
    assert run.status == "done" == Run.open(run.path).status


def test_episodes_of_many_processes(tmp_path):
    "Torn ends are left out and cut off, duplicates are read once, and a kill while gathering loses nothing."
    run = begun(tmp_path/"run")
    one, two = RunFolder(run.path, 1), RunFolder(run.path, 2)
    rec = lambda n, **kw: dict(stage=0, task="push", step=None, trial=n, success=True) | kw
    for f, n in ((run, 0), (one, 1), (one, 2), (two, 3)): f.episode(rec(n))
    with open(run.path/"episodes-1.jsonl", "a") as f: f.write('{"stage": 0, "ta')
    with open(run.path/"episodes.jsonl", "a") as f: f.write(json.dumps(rec(1))[:20])
    append_jsonl(run.path/"episodes-2.jsonl", rec(0, success=False), sealed=True)
    said = []
    assert [r["trial"] for r in run.episodes(said.append)] == [0, 1, 2, 3] and len(said) == 2
    unlink, Path.unlink = Path.unlink, lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt)
    try:
        with pytest.raises(KeyboardInterrupt): run.merge_episodes()
    finally: Path.unlink = unlink
    left = run.path/f".config.json.{2**22+1}@{platform.node()}.00000000.tmp"  # of a process that cannot be: the numbers end before
    left.mkdir()
    with run.lock(): run.clean()
    assert not left.exists()
    run.merge_episodes()
    assert [r["trial"] for r in run.episodes()] == [0, 1, 2, 3] and run.episodes()[0]["success"]
    assert [p.name for p in run.path.glob("episodes*")] == ["episodes.jsonl"]
    assert len((run.path/"episodes.jsonl").read_text().splitlines()) == 4


def test_two_ranks_end_well(tmp_path, capfd):
    "Only rank 0 is heard."
    run = begun(tmp_path/"run", num_processes=2)
    lines = []
    launch("ranks_work", run.path, show=lines.append)
    assert [l for l in lines if "hello" in l] == ["hello from 0 of 2"] and run.status == "done"
    assert len(run.logs()) == 5


def test_a_rank_that_raises_is_quoted(tmp_path):
    run = begun(tmp_path/"run", dict({"raise": 1}, steps=1000), num_processes=2)
    with pytest.raises(RuntimeError, match=r"(?s)exit code 1.*process 1 of 2 failed.*in work.*ValueError: rank 1 has bad luck") as e:
        launch("ranks_work", run.path, show=len)
    assert str(e.value).count("Traceback") == 1 and "torch" not in str(e.value)
    assert json.loads((run.path/"failed.json").read_text())["rank"] == 1 and run.status == "failed"


def test_a_rank_that_is_killed_is_named(tmp_path):
    run = begun(tmp_path/"run", dict(kill=1, steps=1000), num_processes=2)
    with pytest.raises(RuntimeError, match="process 1 was ended by SIGKILL .exit code -9.*the same command goes on"): launch("ranks_work", run.path, show=len)


def test_sigterm_reaches_all_ranks(tmp_path):
    "Both save, though saving takes a while and says much; the launcher's exit code is 75 and the simulators lived until then."
    run = begun(tmp_path/"run", dict(steps=10_000), num_processes=2)
    env = os.environ | dict(CLVLA_PARENT=str(os.getpid()))
    p = subprocess.Popen([sys.executable, "-m", "ranks_work", str(run.path)], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    left = pids(run, 2)
    p.terminate()
    assert p.communicate(timeout=60) and p.returncode == 75 and run.status == "stopped"
    assert all((run.path/f"saved-{r}").exists() for r in (0, 1)) and not any(map(alive, left))


def test_interrupting_the_page_saves(tmp_path):
    "Ctrl-C on the page, and a stop from elsewhere: the page says that the same command continues."
    run = begun(tmp_path/"run", dict(steps=10_000))
    p = as_page(run)
    pids(run, 1)
    p.send_signal(signal.SIGINT)
    out = p.communicate(timeout=60)[0]
    assert "RunStopped" in out and "the same command continues" in out and "saving 1999" in out and run.status == "stopped"
    assert "starting" in out.splitlines() and "training" not in out   # outside a notebook: no bars
    p = as_page(run)
    wait_for(lambda: run.status == "running")
    Run.open(run.path).stop()
    assert "RunStopped" in p.communicate(timeout=60)[0]
    (run.path/"do.json").write_text("{}")
    launch("ranks_work", run.path, show=len)
    assert run.status == "done"


@pytest.mark.parametrize("who", ["page", "launcher"])
def test_sigkill_leaves_no_process(tmp_path, who):
    "The ranks notice, save, and end, though nobody reads what they print."
    run = begun(tmp_path/"run", dict(steps=10_000), num_processes=2)
    page = as_page(run)
    left = pids(run, 2)
    launcher, = descendants(page.pid, deep=False)
    os.kill(page.pid if who == "page" else launcher, signal.SIGKILL)
    wait_for(lambda: not any(map(alive, [*left, launcher])), 30)
    assert run.status == "stopped" and (run.path/"saved-1").exists()
    page.kill()
    page.communicate()


def test_detached_run_survives_its_page(tmp_path):
    "The process that started it is killed; the run is followed from here to its end."
    run = begun(tmp_path/"run", dict(steps=60, pause=.1))
    page = as_page(run, "from clvla.run.watch import Run; start(PATH, detached=True, module='ranks_work'); "
                        "print(Run.open(PATH).status); import time; time.sleep(99)")
    assert page.stdout.readline().strip() == "starting"
    child, _ = pids(run, 1)
    page.send_signal(signal.SIGKILL)
    page.communicate()
    view, lines = Run.open(run.path), []
    assert alive(child) and view.status == "running"
    assert view.follow(every=.2, show=lines.append) == "done" and view.check() is None
    assert any("running: training push" in l for l in lines) and lines[-1].startswith("done")
    assert view.position["done"] == 60
    wait_for(lambda: not alive(child))


THREAD = "import threading, time; t = threading.Thread(target=start, args=(PATH,), kwargs=dict(module='ranks_work')); t.start(); t.join(); time.sleep(99)"


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("end", ["killed", "done"])
def test_a_run_started_in_a_thread_outlives_the_thread_but_not_its_page(tmp_path, end, world):
    "Linux's PR_SET_PDEATHSIG would end it with the thread."
    run = begun(tmp_path/"run", dict(steps=10_000 if end == "killed" else 40), num_processes=world)
    page = as_page(run, THREAD)
    left = pids(run, world)
    if end == "done": wait_for(lambda: run.status == "done", 30)
    else:
        wait_for(lambda: len(run.logs()) > 10, 30)   # .5 s, and the thread has ended long ago
        assert run.status == "running"
    page.kill()
    page.communicate()
    wait_for(lambda: not any(map(alive, left)), 30)
    assert run.status == ("done" if end == "done" else "stopped")


def test_a_sweep_names_what_was_stopped(tmp_path):
    "A run that was stopped and can go on is no failure; the same sweep finishes it."
    runs = [begun(tmp_path/name, dict(steps=n)) for name, n in (("short", 1), ("long", 10_000))]
    stopper = threading.Thread(target=lambda: (pids(runs[1], 1), Run.open(runs[1].path).stop()))
    stopper.start()
    start_work = lambda path: start(path, module="ranks_work")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clvla.run.sweep.start", start_work)
        with pytest.raises(RunStopped, match="stopped, and have saved where they were: .*long; the same command goes on"): sweep([r.path for r in runs])
        stopper.join()
        assert [r.status for r in runs] == ["done", "stopped"]
        (runs[1].path/"do.json").write_text("{}")
        sweep([r.path for r in runs])
    assert [r.status for r in runs] == ["done", "done"]


def test_a_detached_run_that_fails_says_why(tmp_path):
    run = begun(tmp_path/"run", {"raise": 0})
    p = start(run.path, detached=True, module="ranks_work")
    view = Run.open(run.path)
    assert view.follow(every=.2, show=len) == "failed"
    p.wait()
    with pytest.raises(RuntimeError, match="(?s)is failed.*rank 0 has bad luck"): view.check()
    assert "rank 0 has bad luck" in view.table().set_index("what")["value"]["failed"]
    with pytest.raises(ValueError, match="is not running"): view.stop()


def free_port():
    with socket.socket() as s: s.bind(("127.0.0.1", 0)); return s.getsockname()[1]


def test_two_machines(tmp_path, monkeypatch):
    "A page starts the first machine's part, the second machine's command is copied: they find each other and finish one run."
    run = begun(tmp_path/"run", machines=f"127.0.0.1:{free_port()},127.0.0.1", timeout=.5)
    monkeypatch.chdir(tmp_path)
    both = commands(run.cfg)
    assert both == [f"CLVLA_NODE={k} python -m clvla.run {run.path}" for k in (0, 1)]
    assert commands(replace(run.cfg, run_dir="run")) == both   # a relative folder may be another one on another machine
    first = as_page(run)
    node, *words = both[1].replace("python -m clvla.run", f"{sys.executable} -m ranks_work").split()
    env = os.environ | dict([node.split("=")])
    second = subprocess.run(words, env=env, cwd=HERE, capture_output=True, text=True, timeout=60)
    assert second.returncode == 0, second.stderr
    assert "hello from 0 of 2" in first.communicate(timeout=60)[0] and first.returncode == 0 and run.status == "done"


def test_a_machine_that_never_comes(tmp_path):
    run = begun(tmp_path/"run", machines=f"127.0.0.1:{free_port()},127.0.0.1", timeout=.05)
    with pytest.raises(RuntimeError, match="did not find one another within 0.05 minutes"): launch("ranks_work", run.path, show=len)


def test_patience_is_the_configs(tmp_path):
    "A rank whose checkpoint takes longer than `timeout` is killed by its launcher, and one that saves within it is not."
    run = begun(tmp_path/"run", dict(steps=10_000, saving=60), num_processes=2, timeout=.05)   # 3 s
    p = subprocess.Popen([sys.executable, "-m", "ranks_work", str(run.path)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    left = pids(run, 2)
    p.terminate()
    assert "process 0 was ended by SIGKILL" in p.communicate(timeout=45)[0] and p.returncode == 1 and not any(map(alive, left))
    assert "run.path, patience=60*cfg.timeout" in (ROOT/"nbs/run/19_page.ipynb").read_text()


def test_only_machines_that_do_not_meet_are_said_not_to(tmp_path, monkeypatch):
    def fails(error):
        def torchrun(args): raise error
        monkeypatch.setattr("torch.distributed.run.main", torchrun)
        return pytest.raises(RuntimeError)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    one, two = (begun(tmp_path/name, machines=hosts).cfg for name, hosts in (("one", ""), ("two", "alpha,beta")))
    with fails(DistNetworkError("no port")) as alone: _run_ranks(one, "ranks_work")
    with fails(RuntimeError("a bug")) as bug: _run_ranks(two, "ranks_work")
    with fails(DistNetworkError("no answer")) as apart: _run_ranks(two, "ranks_work")
    assert (str(alone.value), str(bug.value)) == ("no port", "a bug")
    assert logging.root.manager.disable < logging.ERROR, "the launcher silences torchrun, and nothing after it"
    assert "did not find one another within 30 minutes (no answer)" in str(apart.value) and "reach alpha" in str(apart.value)


HANG = """import datetime, time, torch, torch.distributed as dist; from clvla.run.child import as_child
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2)); x = torch.ones(1); dist.all_reduce(x)
def work():
    if dist.get_rank() == 1: time.sleep(6)
    dist.all_reduce(x)
as_child(work)"""


def test_a_rank_that_hangs_is_one_sentence(tmp_path):
    (tmp_path/"hang.py").write_text(HANG)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "hang.py"]
    out = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert out.returncode and "process 0 waited 2 s for another process and gave up; see what" in out.stderr
    assert "process 0 of 2 failed" not in out.stderr
    assert explain(RuntimeError("a worker did not start")) is None
