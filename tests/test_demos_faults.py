"Demonstrations survive: whoever is killed while they are made, the next start makes the very same ones and leaves nothing else."
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clvla.core.files import sha256
from clvla.core.plugins import load_plugins
from clvla.data.streams import Stream, Task
from clvla.train import prepare as P
from clvla.train.config import TrainConfig, resolve

HERE = str(Path(__file__).parent)
FAULTS = str(Path(HERE)/"faults.py")   # registers the kind `faulty`, here and in every process that records
load_plugins([FAULTS])
pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")


def tasks(n=2, **kw):
    return [Task(k, k, f"go {k}", dict(kind="faulty", name=k, max_steps=30, **kw), dict(kind="demos")) for k in ("left", "right", "up")[:n]]


def config(path, **kw): return TrainConfig(**(dict(data_dir=str(path), n_demos=8, image_size=16, n_workers=2) | kw))


def make(path, n=2, say=print, on_wait=None, spec=None, **kw):
    return P.make_all_demos(tasks(n, **(spec or {})), config(path, **kw), say, on_wait)


def hashes(path):
    "Every file of the data folder; the locks, which are empty, stay."
    files = {str(f.relative_to(path)): sha256(f) for f in sorted(Path(path).rglob("*")) if f.is_file()}
    assert not [f for f in files if ".writing" in f]
    return {f: h for f, h in files.items() if not f.endswith(".lock")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "What is made when nothing goes wrong."
    sys.path.insert(0, HERE)
    path = tmp_path_factory.mktemp("whole"); make(path); sys.path.remove(HERE)
    return path, hashes(path)


@pytest.fixture
def mine(whole, tmp_path):
    "A copy of it, to be damaged."
    return shutil.copytree(whole[0], tmp_path/"mine")


def children(pid):
    "Processes that a process has started, by their ids."
    out = []
    for f in Path("/proc").glob("[0-9]*/stat"):
        try: fields = f.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError): continue
        if int(fields[1]) == pid and fields[0] != "Z": out.append(int(f.parent.name))
    return out


def gone(pid, within=5):
    until = time.time()+within
    while time.time() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z": return True
        except (FileNotFoundError, ProcessLookupError): return True
        time.sleep(.02)
    return False


SCRIPT = """import sys; sys.path.insert(0, {here!r})
import test_demos_faults as T
T.make({path!r})
"""


def start(path):
    return subprocess.Popen([sys.executable, "-c", SCRIPT.format(here=HERE, path=str(path))], stdout=subprocess.PIPE, text=True,
                            env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)), PYTHONUNBUFFERED="1"))


MOMENTS = ["faulty/.left-n8-16px.writing/.lerobot.*", "faulty/.*.writing/frames", "faulty/left-n8-16px/frames"]


def test_parent_killed_at_several_moments(whole, tmp_path):
    "Each start is killed as soon as something has appeared, and the next one, at once, goes on from there."
    said, kids = "", []
    for k, moment in enumerate(MOMENTS):
        p, until = start(tmp_path), time.time()+60
        while p.poll() is None and time.time() < until and not list(tmp_path.glob(moment)): time.sleep(.0005)
        kids += children(p.pid)
        p.kill(); said += p.communicate(timeout=10)[0]
        if k < 1: assert not (tmp_path/"faulty/left-n8-16px").exists()   # nothing unfinished bears the name
    lines = []
    make(tmp_path, say=lines.append)
    assert hashes(tmp_path) == whole[1] and kids and all(gone(c) for c in kids)
    assert "was left by an earlier recording that was interrupted" in said+"\n".join(lines)
    assert sorted(f.name for f in (tmp_path/"faulty").iterdir()) == sorted(f for n in ("left", "right") for f in (f"{n}-n8-16px", f".{n}-n8-16px.lock"))


def test_killed_process_is_replaced(whole, tmp_path):
    said, killed = [], []

    def on_wait():
        if not killed and list(tmp_path.glob(MOMENTS[0])): killed.append(children(os.getpid())[0]); os.kill(killed[0], signal.SIGKILL)
        time.sleep(.001)
    before = len(os.listdir("/proc/self/fd"))
    make(tmp_path, say=said.append, on_wait=on_wait, n_workers=1)
    assert hashes(tmp_path) == whole[1] and not children(os.getpid()) and len(os.listdir("/proc/self/fd")) <= before
    assert killed and any("made again (killed by SIGKILL" in line for line in said)


def test_killed_again_and_again_ends_the_run(tmp_path):
    with pytest.raises(RuntimeError, match="makes left was lost 3 times; the last time: killed by SIGKILL - memory may have run out"):
        make(tmp_path, 1, on_wait=lambda: [os.kill(c, signal.SIGKILL) for c in children(os.getpid())])
    assert not children(os.getpid()) and not list(tmp_path.rglob("*.json"))


def test_crash_in_native_code_shows_where(tmp_path):
    "Once: made again. Always: the crash and the line."
    said = []
    make(tmp_path/"a", 1, say=said.append, spec=dict(fault="segv", at=2, once=str(tmp_path/"once")))
    assert any("killed by SIGSEGV - native code crashed" in line for line in said) and (tmp_path/"once").exists()


def test_hung_process_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(P, "PATIENCE", 2); said = []
    made = make(tmp_path, 1, say=said.append, spec=dict(fault="sleep", at=2, once=str(tmp_path/"once")))
    assert made["left"].n_episodes == 8 and any("no sign of life for 2 s" in line for line in said)


def test_exception_is_raised_here_with_its_traceback(tmp_path):
    with pytest.raises(RuntimeError, match="ZeroDivisionError in a worker: the robot fell over") as e: make(tmp_path, spec=dict(fault="raise"))
    assert "faults.py" in e.value.__notes__[0] and not children(os.getpid())
    with pytest.raises(ValueError, match="cannot be built"): make(tmp_path, 1, spec=dict(fault="start"))
    assert not [f for f in (tmp_path/"faulty").iterdir() if not f.name.endswith(".lock")]


def test_stop_while_demonstrations_are_made(whole, tmp_path):
    "`on_wait` is asked several times a second, and when it raises nobody goes on working."
    class Stopped(KeyboardInterrupt): pass
    asked = []

    def on_wait():
        asked.append(time.monotonic())
        if len(asked) == 4: raise Stopped
    with pytest.raises(Stopped): make(tmp_path, on_wait=on_wait)
    assert max(b-a for a, b in zip(asked, asked[1:])) < .4 and not children(os.getpid())
    assert not list((tmp_path/"faulty").glob("*-16px")) if (tmp_path/"faulty").exists() else True
    make(tmp_path)
    assert hashes(tmp_path) == whole[1]


def test_finished_ones_need_no_process_and_changed_ones_are_refused(mine, monkeypatch):
    first = make(mine, 1)
    monkeypatch.setattr(P, "Child", lambda *a, **kw: pytest.fail("a process was started"))
    assert make(mine, 1)["left"].meta == first["left"].meta
    with pytest.raises(ValueError, match="other settings .*env: "): make(mine, 1, spec=dict(at=1))
    f = mine/"faulty/left-n8-16px/frames/action.npy"; f.write_bytes(f.read_bytes()[:-1]+b"x")
    with pytest.raises(ValueError, match="action.npy was changed after it was written"): make(mine, 1)
    f = next((mine/"faulty/left-n8-16px/lerobot").rglob("*.parquet")); f.write_bytes(f.read_bytes()+b"x")
    with pytest.raises(ValueError, match="parquet changed after the recording"): make(mine, 1)


def test_lost_frame_store_is_decoded_again(whole, mine):
    for f in (mine/"faulty/left-n8-16px/frames").iterdir(): f.unlink()
    said = []; make(mine, say=said.append)
    assert hashes(mine) == whole[1] and any("half-written" in line for line in said)


def test_data_sets_on_disk_are_read_by_processes_too(whole, tmp_path):
    src = whole[0]/"faulty/left-n8-16px/lerobot"
    task = Task("disk", "disk", "go left", None, dict(kind="lerobot", parts=[dict(path=str(src), task_index=None)]))
    cfg, said = config(tmp_path/"b"), []
    store = P.prepare(Stream("mine", (task,)), cfg, said.append)["disk"]
    assert store.n_episodes == 8 and said == [f"disk: 8 demonstrations, {len(store)} frames"]
    assert P.prepare(Stream("mine", (task,)), cfg)["disk"].meta == store.meta
    assert sorted(f.name for f in (tmp_path/"b/lerobot/mine").iterdir()) == [".disk.lock", "disk"]


TOP = """from pathlib import Path
with open({log!r}, "a") as f: f.write("imported\\n")
from clvla.data.streams import Stream, Task
from clvla.train.config import TrainConfig
from clvla.train.prepare import prepare
from clvla.core.plugins import load_plugins
load_plugins([{plugin!r}])
task = Task("left", "left", "go left", dict(kind="faulty", name="left", max_steps=30), dict(kind="demos"))
prepare(Stream("mine", (task,)), TrainConfig(n_demos=1, image_size=16, data_dir={data!r}))
"""


def test_at_the_top_of_a_script(tmp_path):
    "No `if __name__ == '__main__'` is needed: nothing imports the script a second time."
    script = tmp_path/"train.py"; log = tmp_path/"log"
    script.write_text(TOP.format(plugin=FAULTS, log=str(log), data=str(tmp_path/"data")))
    out = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                         env=dict(os.environ, PYTHONPATH=os.pathsep.join([HERE, *filter(None, sys.path)])))
    assert out.returncode == 0, out.stderr
    assert log.read_text() == "imported\n" and list(tmp_path.glob("data/faulty/left-n1-16px/frames/meta.json"))


def test_what_processes_cannot_share_is_refused():
    from types import SimpleNamespace as NS
    many = dict(algo="er", num_processes=2)
    assert P.check(resolve(TrainConfig(accumulation=4, algo_kw=dict(replay_ratio=.1), **many))).ids   # .8 of a sample in all, .4 in each process: one is replayed
    for kw, words in ((dict(strategy="zero1"), "this run has one; set num_processes to 2 or more"), (dict(strategy="zero3", **many), "set ema to 0"),
                      (dict(init_from="/nowhere/at/all"), "init_from '/nowhere/at/all' does not exist"),
                      (dict(accumulation=8, algo_kw=dict(replay_ratio=.1)), "micro-batch of 4 samples .* rounds to none")):
        with pytest.raises(ValueError, match=words): P.check(resolve(TrainConfig(**(dict(algo="er") | kw))))
    with pytest.raises(ValueError, match="cl 'mir' reads whole ones; set strategy to 'zero2'"):
        P.check_strategy(NS(zero3=False), TrainConfig(cl="mir", strategy="zero3", num_processes=2))
    P.check_strategy(NS(), TrainConfig(strategy="zero3", num_processes=2, ema=0.)); P.check_strategy(NS(), TrainConfig(strategy="zero2", machines="a,b"))
