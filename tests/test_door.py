"What meets a run at its door and on its way: paths that cannot be, damaged files, full disks, killed processes, no network."
import errno
import json
import mmap
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import torch
from numpy.lib.format import open_memmap

import clvla.run.machine as run_machine
from clvla.core.files import bus_error, os_error, reserve, system_message, write_json
from clvla.core.state import load_state, save_state
from clvla.data.frames import _new_array
from clvla.eval.plots import Table, figure_html, metrics_table, page_html, plotly_script
from clvla.run.checkpoint import load_checkpoint, remedy, save_checkpoint
from clvla.core.records import append_jsonl, read_jsonl
from clvla.envs.child import Child, recv
from clvla.run.config import read_config
from clvla.run.folder import Cost, RunFolder
from clvla.run.launch import launch
from clvla.run.report import finish
from clvla.run.stop import exit_text, kill_cause, oom_kills
from clvla.run.sweep import sweep
from clvla.run.watch import Run
from clvla.train.config import TrainConfig, resolve
from clvla.train.prepare import check

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
EPISODE = dict(stage=0, step=None, task="push", after="push", trial=0, success=True, steps=50, restarts=0, seed=0)


def config(path, **kw): return resolve(TrainConfig(run_dir=str(path), batch_size=32, device="cpu", **kw))


def begun(path, **kw):
    run = RunFolder(path)
    run.begin(config(path, **kw), pytest.fail)
    return run


# settings that cannot work

def test_data_dir_that_is_a_file_is_named(tmp_path):
    (tmp_path/"file").write_text("mine")
    for data in ("file", "file/data"):
        with pytest.raises(ValueError, match="data_dir .* is a file; choose another data_dir"):
            check(config(tmp_path/"run", algo="er", suite="dot_2", data_dir=str(tmp_path/data)))


def test_a_number_that_is_not_finite_is_named(tmp_path):
    for value in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match="'weight_decay': found (inf|nan), expected a finite float"): TrainConfig.of(weight_decay=value)


def test_more_processes_than_the_machine_bears_are_refused_for_that(tmp_path, monkeypatch):
    "Not for the batch, which could not be dealt out either."
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(ValueError, match="num_processes is 64 on each machine, and this one has 2 cores; use at most 8"):
        config(tmp_path/"run", num_processes=64)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(run_machine, "memory_gb", lambda: 2.)
    with pytest.raises(ValueError, match=r"each needs at least [\d.]+ GB, together \d+ GB, and this machine has 2 GB; use at most"):
        config(tmp_path/"run", num_processes=64)
    run_machine.check_machine(config(tmp_path/"run"))


# paths that cannot be a run's folder

@pytest.mark.parametrize("path, says", [("file", "file is a file; choose another run_dir"), ("file/run", "file is a file"), ("file/a/b", "file is a file"),
                                        ("a\0b", "cannot be a folder .*null byte"), ("x"*300, "cannot be a folder .File name too long"),
                                        ("loop/run", "cannot be a folder .Too many levels"), ("foreign", "is not empty and no run folder")])
def test_a_path_that_cannot_be(tmp_path, path, says):
    (tmp_path/"file").write_text("mine")
    (tmp_path/"foreign").mkdir()
    (tmp_path/"foreign/x").write_text("mine")
    (tmp_path/"loop").symlink_to("loop")
    with pytest.raises(ValueError, match=says): RunFolder(tmp_path/path).begin(config(tmp_path/"run"))
    assert (tmp_path/"file").read_text() == "mine" and not (tmp_path/"run").exists()


@pytest.mark.parametrize("text", [b"{", b"", b"\xff\xfe", b"[1]", b"3", b'{"sede": 3}', b'{"seed": "x"}'])
def test_settings_that_cannot_be_read(tmp_path, text):
    run = begun(tmp_path/"run")
    (run.path/"config.json").write_bytes(text)
    append_jsonl(run.path/"log.jsonl", dict(stage=0))
    with pytest.raises(ValueError, match=r"config\.json|belongs to another run"): run.begin(config(run.path))
    with pytest.raises(ValueError, match=r"config\.json"): Run.open(run.path)


def test_settings_that_were_lost_have_a_copy(tmp_path):
    run = begun(tmp_path/"run")
    save_checkpoint(run.path/"checkpoints", "000-push", {}, {"config.json": json.loads((run.path/"config.json").read_text())})
    (run.path/"config.json").write_text("{")
    with pytest.raises(ValueError, match=r"(\S+000-push/config\.json) is a copy, put it in its place") as e: run.begin(config(run.path))
    copy = re.search(r"(\S+config\.json) is a copy", str(e.value))[1]
    (run.path/"config.json").write_bytes(Path(copy).read_bytes())
    assert run.begin(config(run.path)) == "continued"


@pytest.mark.parametrize("number, says", [(errno.ENOSPC, "free some space"), (errno.EROFS, "may write to"), (errno.ENOTDIR, "is a file"),
                                          (errno.ENAMETOOLONG, "shorter path"), (errno.EMFILE, "ulimit"), (errno.EIO, "look at the disk")])
def test_each_refusal_of_the_system_has_a_remedy(number, says):
    e = OSError(number, os.strerror(number))
    error = os_error(f"could not write x: {system_message(e)}", e)
    assert says in str(error) and os.strerror(number) in str(error) and type(error) is type(e) and error.errno == number


# whose a folder is

def test_a_run_without_results_gives_its_folder_up(tmp_path):
    run = begun(tmp_path/"run", init_from=str(tmp_path/"wrong"))
    write_json(run.path/"stream.json", dict(stages=[]))
    write_json(run.path/"failed.json", {})
    (run.path/"log.jsonl").touch()
    (run.path/"checkpoints/.000-push.writing").mkdir(parents=True)
    lines = []
    assert run.begin(config(run.path), lines.append) == "new" and run.cfg.init_from == ""
    assert len(lines) == 1 and "no result yet" in lines[0] and "init_from" in lines[0]
    assert not (run.path/"stream.json").exists() and not (run.path/"failed.json").exists()
    assert run.begin(config(run.path), pytest.fail) == "continued"


@pytest.mark.parametrize("result", ["record", "episode", "rank", "checkpoint", "evaluation", "end"])
def test_a_run_with_results_keeps_its_folder(tmp_path, result):
    run = begun(tmp_path/"run")
    if result == "record": run.log(stage=0, step=0)
    elif result == "episode": run.episode(EPISODE)
    elif result == "rank": RunFolder(run.path, 1).episode(EPISODE)
    elif result == "checkpoint": save_checkpoint(run.path/"checkpoints", "000-push", {}, {})
    elif result == "evaluation": (run.path/"evals/lower").mkdir(parents=True)
    else: write_json(run.path/"done.json", {})
    with pytest.raises(ValueError, match="belongs to another run.*lr: 0.001 -> 0.1"): run.begin(config(run.path, lr=.1))
    with pytest.raises(ValueError, match="holds the results"): run.clear()
    assert run.cfg.lr == .001 and run.begin(config(run.path, timeout=5.)) == ("done" if result == "end" else "continued")


def test_a_run_that_prepares_keeps_its_folder(tmp_path):
    "While another process holds the lock, other settings are refused, though there is no result yet."
    run = begun(tmp_path/"run")
    code = f"from clvla.run.folder import RunFolder as R\nwith R({str(run.path)!r}).lock(): print(flush=True); input()"
    p = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    p.stdout.readline()
    with pytest.raises(ValueError, match=f"being written by process {p.pid}"): run.begin(config(run.path, lr=.1))
    p.communicate(b"\n")
    assert run.begin(config(run.path, lr=.1)) == "new"


# damaged records

DAMAGE = {"half": lambda line: line[:30], "empty": lambda line: b"", "number": lambda line: b"3", "binary": lambda line: b"\xff\xfe"+line,
          "two": lambda line: line+line, "other": lambda line: b'{"a": 1}', "nan": lambda line: b"\0"*40}


@pytest.mark.parametrize("name", ["episodes.jsonl", "episodes-1.jsonl", "log.jsonl"])
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_damaged_line_has_its_number_and_a_remedy(tmp_path, name, damage, number):
    "The command of the message, typed as it stands, takes out that line and no other."
    path = tmp_path/"a run's"/name
    path.parent.mkdir()
    for trial in range(4): append_jsonl(path, EPISODE|dict(trial=trial))
    lines = path.read_bytes().splitlines()
    lines[number-1] = DAMAGE[damage](lines[number-1])
    path.write_bytes(b"\n".join(lines)+b"\n")
    with pytest.raises(ValueError, match=f"^line {number} of .*{name} is damaged: .*start the same command again") as e: read_jsonl(path)
    subprocess.run(shlex.split(re.search(r"\((sed .*)\) and start", str(e.value))[1]), check=True)
    assert [r["trial"] for r in read_jsonl(path, pytest.fail)] == [t for t in range(4) if t != number-1]


# a full disk

def test_a_record_that_does_not_fit(tmp_path):
    "Linux's limit of a file's size stands for a full disk: what was written before is whole, and there is no half line."
    code = f"""import resource, sys; from clvla.run.folder import RunFolder; run = RunFolder({str(tmp_path)!r})
for step in range(3): run.log(stage=0, step=step)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
for step in range(3, 99): run.log(stage=0, step=step)"""
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = p.stderr.splitlines()[-1]
    assert p.returncode == 1 and f"could not append to {tmp_path}/log.jsonl: File too large; the records before are whole; free some space" in last
    steps = [r["step"] for r in RunFolder(tmp_path).logs(pytest.fail)]
    assert steps == list(range(len(steps))) and 3 < len(steps) < 20
    RunFolder(tmp_path).log(stage=0, step=99)   # the disk has space again
    assert [r["step"] for r in RunFolder(tmp_path).logs(pytest.fail)] == [*steps, 99]


def test_a_full_device_is_named(tmp_path):
    (tmp_path/"log.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"log\.jsonl: No space left on device.*free some space") as e: RunFolder(tmp_path).log(stage=0)
    assert e.value.errno == errno.ENOSPC


def test_a_full_disk_is_written_down(tmp_path, monkeypatch):
    "What the lock has reserved makes room for failed.json, once."
    run = begun(tmp_path/"run")
    reserve = run.path/"reserve"
    def full(path, obj):
        if reserve.exists(): raise OSError(errno.ENOSPC, "No space left on device")
        return write_json(path, obj)
    with run.lock():
        assert reserve.stat().st_size == 1 << 16
        monkeypatch.setattr("clvla.run.folder.write_json", full)
        run.note_failed(OSError(errno.ENOSPC, "could not append to log.jsonl"))
        assert not reserve.exists() and "could not append" in json.loads((run.path/"failed.json").read_text())["message"]
    monkeypatch.undo()
    assert run.status == "failed" and run.begin(run.cfg) == "continued"
    with run.lock(): assert reserve.exists()
    assert not reserve.exists()


def test_a_disk_that_stays_full_hides_no_error(tmp_path, monkeypatch):
    run = begun(tmp_path/"run")
    def full(path, obj): raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("clvla.run.folder.write_json", full)
    with run.lock(): run.note_failed(ValueError("the error itself is raised by the caller"))
    assert not (run.path/"failed.json").exists() and run.status == "interrupted"


# machines, and settings that none can bear

def test_a_disk_that_has_no_room_for_a_frame_store_is_named_before_anything_is_mapped(tmp_path):
    "A write into a mapped file for which there are no blocks would end the process by SIGBUS. Linux's limit of a file's size stands for the full disk."
    code = f"""import resource; import numpy as np; from clvla.core.names import ACTION, IMAGE, PROMPT, STATE; from clvla.data.frames import write_store
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
T = 50
write_store({str(tmp_path/'store')!r}, [{{IMAGE: np.zeros((T, 48, 48, 3), np.uint8), STATE: np.zeros((T, 2), np.float32), ACTION: np.zeros((T, 2), np.float32), PROMPT: "go"}}])"""
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ|dict(PYTHONPATH=str(ROOT)))
    last = p.stderr.splitlines()[-1]
    assert p.returncode == 1 and re.search(r"could not reserve 0\.000346 GB for .*images\.front\.npy: File too large; [\d.]+ GB are free there; free some space", last), p.stderr[-2000:]
    assert not list((tmp_path/"store").glob("images*"))


def test_a_store_that_fits_has_its_blocks(tmp_path):
    "The file is the one that numpy would make, byte for byte."
    _new_array(tmp_path/"a.npy", np.dtype("u1"), (3, 400, 400, 3))
    open_memmap(tmp_path/"b.npy", "w+", "u1", (3, 400, 400, 3))
    size = (tmp_path/"a.npy").stat().st_size
    assert (tmp_path/"a.npy").stat().st_blocks*512 >= size > 1_440_000 and (tmp_path/"a.npy").read_bytes() == (tmp_path/"b.npy").read_bytes()
    (tmp_path/"c").touch()
    with pytest.raises(OSError, match="could not reserve 1e.09 GB for .*c: .* GB are free there"): reserve(tmp_path/"c", 10**18)
    assert not (tmp_path/"c").exists()


def bus(sock):
    "Read a mapped file behind its end."
    fd = os.memfd_create("short")
    os.ftruncate(fd, 4096)
    memory = mmap.mmap(fd, 4096)
    os.ftruncate(fd, 0)
    memory[0]


def test_a_bus_error_names_both_causes_and_the_space():
    child = Child("test_door:bus")
    assert recv(child.sock) is None
    for text in (child.obituary(), exit_text(child.proc.wait()), bus_error()):
        assert re.search(r"cut off or found no space.*free: .*GB in /dev/shm.*or native code crashed while drawing: set MUJOCO_GL", text), text
    assert "killed by SIGBUS - a file in its memory was cut off" in child.obituary()
    child.end()


def test_a_folder_that_may_not_be_written_to(tmp_path):
    "Asked by another user, since root may write everywhere."
    closed = tmp_path/"closed"
    closed.mkdir(mode=0o755)
    code = f"""import os; from clvla.run.folder import check_folder, RunFolder
if os.getuid() == 0: os.chmod({str(tmp_path)!r}, 0o755); os.setresuid(65534, 65534, 65534)
else: os.chmod({str(closed)!r}, 0o555)
for path, write in (({str(closed/'data')!r}, False), ({str(closed)!r}, True)):
    try: check_folder(path, "data_dir", write)
    except ValueError as e: print(e)
check_folder({str(closed)!r}, "data_dir")"""
    for parent in tmp_path.parents:   # temporary folders are their owner's alone
        if parent.stat().st_uid == os.getuid() and not parent.stat().st_mode & 1: parent.chmod(parent.stat().st_mode | 0o011)
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ|dict(PYTHONPATH=str(ROOT)))
    lines = p.stdout.splitlines()
    assert p.returncode == 0 and len(lines) == 2, p.stderr[-1000:]
    assert all(f"this user may not write into {closed}; choose another data_dir" in line for line in lines)


def test_demonstrations_have_a_place_before_a_run_begins(tmp_path, monkeypatch):
    "A folder of data that is there may be read only, once the demonstrations are in it."
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(tmp_path/"data")))
    (tmp_path/"data").mkdir()
    cfg = resolve(TrainConfig(suite="dot_2", run_dir=str(tmp_path/"run"), data_dir=str(tmp_path/"data"), n_demos=1, threads=1, n_workers=1))
    with pytest.raises(ValueError, match="data_dir .*may not write into .*data; choose another data_dir"): check(cfg)
    monkeypatch.setattr("clvla.train.prepare.unmade", lambda *a: [])
    check(cfg)


def test_no_home_folder(tmp_path, monkeypatch):
    import pwd
    def unknown(*a): raise KeyError("uid not found")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "CLVLA_DATA"): monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="data_dir is '~/.cache/clvla'.*no home folder.*set HOME, or.*CLVLA_DATA or data_dir"): resolve(TrainConfig(suite="dot_2", run_dir=str(tmp_path/"run")))
    assert resolve(TrainConfig(suite="dot_2", run_dir=str(tmp_path/"run"), data_dir=str(tmp_path))).data_dir == str(tmp_path)


@pytest.mark.parametrize("given, says", [
    (dict(algo_kw=[1]), r"algo_kw is \[1\] .list., expected a dict"), (dict(algo_kw=None), "algo_kw is None"), (dict(model_kw=5), "model_kw is 5 .int., expected a dict"),
    (dict(algo="er+lwf", algo_kw=dict(er=5)), "settings of 'er' in 'er.lwf' are a dict, found 5"), (dict(algo="er+lwf", algo_kw="x"), "algo_kw is 'x'")])
def test_settings_that_are_no_dict(tmp_path, given, says):
    with pytest.raises(ValueError, match=says): resolve(TrainConfig(suite="dot_2", run_dir=str(tmp_path/"run"), **given))


@pytest.mark.parametrize("given, says", [(dict(cl_kw=[1]), r"cl_kw is \[1\]"), (dict(cl="ewc", cl_kw=None), "cl_kw is None"), (dict(runner_kw=3), "runner_kw is 3"), (dict(algo_kw="a"), "algo_kw is 'a'")])
def test_settings_of_an_agent_that_are_no_dict(tmp_path, given, says):
    from clvla.crl.config import AgentConfig, resolve_agent
    with pytest.raises(ValueError, match=says): resolve_agent(AgentConfig(run_dir=str(tmp_path/"run"), **given))


def test_settings_of_practice_that_are_no_dict(tmp_path):
    from clvla.rl.config import PracticeConfig, resolve_practice
    for cl_kw in (None, [1], "x", 5):
        with pytest.raises(ValueError, match="cl_kw is .*expected a dict"): resolve_practice(PracticeConfig(run_dir=str(tmp_path/"run"), cl="er", cl_kw=cl_kw))


@pytest.mark.parametrize("given, says", [
    (dict(threads=100_000), r"threads is 100000, and this machine has 2 cores; use at most 8"), (dict(n_workers=5_000), "n_workers is 5000, and this machine has 2 cores; use at most 64"),
    (dict(steps_per_task=10**15), "steps_per_task is 1000000000000000, expected at most 10000000000; at a thousand a second 1e.15 take 31,746 years"), (dict(cycles=10**9), "cycles is 1000000000, expected at most"),
    (dict(n_trials=10**7), "n_trials is 10000000, expected at most 100000"), (dict(n_demos=10**8), "n_demos is"), (dict(rows_per_task=10**6), "rows_per_task is"), (dict(timeout=1e200), "timeout is 1e.200"),
    (dict(batch_size=10**9), "batch_size is"), (dict(image_size=1_000_000), "image_size: a picture of 1000000 x 1000000 pixels, expected at most"),
    (dict(suite=dict(base="dot_2", budget=10**15)), "a budget of 1000000000000000 steps cannot end")])
def test_what_no_machine_bears_is_refused_at_once(tmp_path, monkeypatch, given, says):
    from clvla.train.prepare import check
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(ValueError, match=says) as e: check(resolve(TrainConfig(**dict(suite="dot_2", run_dir=str(tmp_path/"run"), data_dir=str(tmp_path)) | given)))
    assert "\n" not in str(e.value)


def test_more_actors_than_the_machine_bears(tmp_path, monkeypatch):
    from clvla.crl.actors import Actors
    from clvla.crl.config import AgentConfig, experiment_of, resolve_agent
    cfg = resolve_agent(AgentConfig(run_dir=str(tmp_path/"run"), data_dir=str(tmp_path)))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(ValueError, match="n_actors is 5000, and this machine has 2 cores; use at most 64"): Actors(cfg, experiment_of(cfg), n_actors=5_000).check(None)


def test_pictures_beyond_the_memory():
    from clvla.envs.all import make_env
    from clvla.envs.pool import EnvPool
    spec = dict(kind="dot", name="left")
    with pytest.raises(ValueError, match="left: camera 'front': a picture of 100000 x 100000 pixels"): make_env(spec, 100_000)
    with pytest.raises(ValueError, match=r"8 environments with pictures of {'front': 4000} pixels and chunks of 2000 steps need \d+ GB, and this machine has \d+ GB; take smaller pictures"):
        EnvPool([spec]*8, 1, 4000, H=2000)


@pytest.mark.parametrize("what", ["folder", "pipe"])
def test_a_config_that_is_no_file(tmp_path, what):
    run = tmp_path/"run"
    run.mkdir()
    (run/"config.json").mkdir() if what == "folder" else os.mkfifo(run/"config.json")
    for read in (read_config, lambda path: RunFolder(path).check(config(path))):
        with pytest.raises(ValueError, match=rf"config\.json is a (folder|device or pipe), expected a JSON file"): read(run)


def test_an_agents_run_that_has_learnt_nothing_is_not_evaluated(tmp_path):
    from clvla.crl.config import AgentConfig, resolve_agent
    from clvla.train.eval_config import EvalConfig, check_eval
    cfg = resolve_agent(AgentConfig(run_dir=str(tmp_path/"run"), data_dir=str(tmp_path)))
    RunFolder(cfg.run_dir).begin(cfg)
    with pytest.raises(ValueError, match="has no checkpoint yet; let its run finish a task first"): check_eval(EvalConfig(run_dir=cfg.run_dir))


def test_a_policy_that_lacks_a_setting(tmp_path):
    from clvla.policies.tiny import Tiny
    class Needs(Tiny):
        def __init__(self, generator, **kw): super().__init__(**kw)
    with pytest.raises(ValueError, match="policy Needs needs a setting 'generator'; give it in model_kw"): Needs.check(H=4, action_dim=2, state_dim=2)
    assert Needs.check(H=4, action_dim=2, state_dim=2, generator="small")["generator"] == "small"


@pytest.mark.parametrize("address, says", [("127.0.0.1:1", "nobody answers at address '127.0.0.1:1' .*ray start --head --port 1"), ("head", "address is 'head', expected host:port"), ("a:b", "expected host:port"), (":6379", "expected host:port")])
def test_a_cluster_at_which_nobody_answers(address, says):
    from clvla.crl.ray import check_address
    with pytest.raises(ValueError, match=says): check_address(address)
    for own in ("", "auto"): check_address(own)


# processes that the system has killed

@pytest.mark.parametrize("code, says", [(1, "ended with exit code 1"), (3, "ended with exit code 3"), (-9, "SIGKILL .exit code -9.: "), (137, "SIGKILL .exit code 137.: "),
                                        (-11, "SIGSEGV .*native library"), (-7, "SIGBUS .*/dev/shm"), (-15, "SIGTERM .*asked it to end"), (255, "ended with exit code 255")])
def test_exit_codes_in_words(code, says):
    assert re.search(says, exit_text(code)) and ("the same command goes on" in exit_text(code)) == ("SIG" in exit_text(code))


def test_the_count_of_the_system_decides():
    assert "the memory was full, the system has killed 2" in kill_cause(1, now=3) and "n_workers" in kill_cause(1, now=3)
    assert "a person or a scheduler" in kill_cause(3, now=3) and "most often the memory was full" in kill_cause(None)
    count = oom_kills()
    assert count is None or count >= 0


KILLED = """import os, sys, time; from clvla.run.folder import RunFolder
with RunFolder(sys.argv[1]).lock(): print("training", flush=True); os.kill(os.getpid(), 9)"""


def test_a_killed_run_says_so_everywhere(tmp_path, monkeypatch):
    (tmp_path/"killed.py").write_text(KILLED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    run = begun(tmp_path/"run")
    assert "no process has written" in run.interruption
    with pytest.raises(RuntimeError, match=r"(?s)killed was ended by SIGKILL \(exit code -9\).*the same command goes on from the last checkpoint.*its last lines:\ntraining"):
        launch("killed", run.path, show=len)
    says = r"process \d+ on .* since 20.* was killed or lost its machine, and left no message: .*; the same command goes on"
    assert run.status == "interrupted" and re.search(says, run.interruption)
    with pytest.raises(RuntimeError, match=f"(?s)is interrupted: {says}"): Run.open(run.path).check()
    assert re.search(says, Run.open(run.path).table().set_index("what")["value"]["interrupted"])
    monkeypatch.setattr("clvla.run.stop.oom_kills", lambda: 99)
    assert "the memory was full, the system has killed" in run.interruption or oom_kills() is None
    with run.lock(): pass
    assert run.begin(run.cfg) == "continued"


def test_a_sweep_names_the_signal(tmp_path, monkeypatch):
    run = begun(tmp_path/"run")
    def start(path): return subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    monkeypatch.setattr("clvla.run.sweep.start", start)
    with pytest.raises(RuntimeError, match=r"run was ended by SIGKILL.*console\.txt"): sweep([run.path])


# files that cannot be read

def long_header(path): path.write_bytes((2*10**9).to_bytes(8, "little")+path.read_bytes()[8:])


def test_a_header_of_two_gigabytes(tmp_path):
    for t, name in enumerate(("000-a", "001-b", "002-c")): save_checkpoint(tmp_path, name, dict(w=torch.zeros(2)), {})
    long_header(tmp_path/"001-b/state.safetensors")
    with pytest.raises(ValueError, match=r"state\.safetensors is damaged.*header should have 2000 MB, but the whole file has.*remove the checkpoint"):
        load_state(tmp_path/"001-b/state.safetensors")
    with pytest.raises(ValueError, match=r"001-b is not whole.*remove .*001-b, or take 000-a beside it"): load_checkpoint(tmp_path/"001-b")
    for name in ("000-a", "002-c"): long_header(tmp_path/name/"state.safetensors")
    assert "there is no whole one" in remedy(tmp_path/"001-b")


@pytest.mark.parametrize("size", [0, 3, 8, 100])
def test_a_file_that_is_cut_off(tmp_path, size):
    save_state(tmp_path/"s.safetensors", dict(w=torch.zeros(99)))
    (tmp_path/"s.safetensors").write_bytes((tmp_path/"s.safetensors").read_bytes()[:size])
    with pytest.raises(ValueError, match=r"s\.safetensors is damaged.*put a whole copy"): load_state(tmp_path/"s.safetensors")


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"seconds": 3}', "{"])
def test_costs_that_are_none(tmp_path, text):
    (tmp_path/"cost.json").write_text(text)
    with pytest.raises(ValueError, match=r"cost\.json.*remove it"): Cost(tmp_path)


def test_versions_that_are_none(tmp_path):
    run = begun(tmp_path/"run")
    (run.path/"versions.json").write_text("[]")
    with pytest.raises(ValueError, match=r"versions\.json is not what a run writes; remove it"): run.other_versions()


# pages and reports

PAGES = sorted(p for p in (ROOT/"nbs").rglob("*.ipynb") if not any(s[0] in "._" for s in p.relative_to(ROOT).parts))
SCRIPT = re.compile(r"<script[^>]*\bsrc=|import\(?\s*[\"']https?:|cdn\.plot\.ly|cdn\.jsdelivr|cdnjs\.cloudflare", re.I)


def shown(cell):
    "The HTML that a cell's outputs hold."
    return "".join(s for o in cell.get("outputs", []) for kind, s in ((k, "".join(v)) for k, v in o.get("data", {}).items() if "html" in k or "javascript" in k))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT/"nbs")))
def test_no_page_asks_a_network(page):
    cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
    code = "".join("".join(c["source"])+"\n" for c in cells if c["cell_type"] == "code")
    assert not re.search(r"_connected|include_plotlyjs=.?[\"']cdn|include_mathjax=[\"']cdn", code)
    assert not re.search(r"renderers\.default = [\"'](?!(plotly_mimetype|offline)[\"'])", code), "only the data of a figure, or show_offline()"
    assert not any(SCRIPT.search(shown(c)) for c in cells)
    if json.loads(page.read_text())["metadata"].get("clvla", {}).get("run") == "experiment": assert "show_offline()" in code or "settings_shown(" in code   # which calls it


def test_a_page_and_its_export_draw_offline(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    from nbconvert import HTMLExporter
    cells = ["from clvla.eval.plots import show_offline, small\nimport plotly.graph_objects as go\nshow_offline()",
             "fig = small(go.Figure(go.Scatter(y=[1, 2])), 'losses')\nfig", "from IPython.display import display\ndisplay(fig)"]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbclient.NotebookClient(nb, timeout=120, kernel_name="python3").execute()
    script = plotly_script()
    html = [shown(json.loads(json.dumps(c))) for c in nb.cells]
    assert html[0].strip() == script and all("Plotly.newPlot" in h and not SCRIPT.search(h) for h in html[1:])
    nbformat.write(nb, tmp_path/"page.ipynb")
    assert 4.5e6 < (tmp_path/"page.ipynb").stat().st_size < 5.5e6
    exported, _ = HTMLExporter().from_notebook_node(nb)
    own, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook())   # nbconvert's own scripts: formulas
    sources = lambda text: re.findall(r"<script[^>]*src=[^>]*>", text)
    assert exported.count(script) == 1 and exported.count("Plotly.newPlot(") >= 2 and sources(exported.replace(script, "")) == sources(own)
    page = page_html(tmp_path/"page.ipynb", tmp_path/"page.html").read_text()
    assert page.count(script) == 1 and not sources(page.replace(script, ""))


def test_a_stored_page_is_exported_with_its_figures(tmp_path):
    page = page_html(ROOT/"nbs/eval/07_plots.ipynb", tmp_path/"plots.html").read_text()
    assert page.count(plotly_script()) == 1 and page.count('class="plotly-graph-div"') >= 5
    assert not re.findall(r"<script[^>]*src=[^>]*>", page.replace(plotly_script(), ""))


def test_a_figure_names_no_script():
    assert "<script src" not in figure_html(go.Figure()) and "mathjax" not in figure_html(go.Figure()).lower()


def test_a_table_has_no_index_and_one_decimal():
    t = Table(dict(task=["a", "b"], percent=[12.345, float("nan")], n=[3, 4]))
    assert "<th></th>" not in t._repr_html_() and "12.3<" in t._repr_html_() and "NaN" not in t._repr_html_()
    assert isinstance(t.drop(columns="n"), Table) and isinstance(t.head(1), pd.DataFrame) and "12.3" in repr(t)


def test_metrics_are_percent():
    records = [EPISODE|dict(stage=t, after=("a", "b")[t], task=task, trial=i, success=i < n) for (t, task), n in {(0, "a"): 4, (1, "a"): 1, (1, "b"): 3}.items() for i in range(4)]
    table = metrics_table(records, ["a", "b"], ["a", "b"], n_boot=50)
    assert list(table.columns) == ["metric", "percent", "low", "high", "missing", "formula"] and table.percent[0] == 50 and table[table.metric == "BWT"].percent.item() == -75


def test_a_report_names_settings_and_versions(tmp_path):
    run = begun(tmp_path/"run", algo="er", seed=7)
    write_json(run.path/"stream.json", dict(stages=["push"], tasks=[dict(id="push")], order=[0]))
    run.episode(EPISODE)
    finish(run.path)
    page = (run.path/"report.html").read_text()
    for text in ("<td>seed</td>\n      <td>7</td>", "<td>algo</td>", "<td>torch</td>", f"<td>{sys.version.split()[0]}</td>", "<h2>Versions</h2>"): assert text in page
    assert not SCRIPT.search(page.replace(plotly_script(), ""))
