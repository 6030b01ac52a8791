"A run that is watched while it goes on: what a terminal and a file get, the time left, and figures that are drawn again soon and cheaply."
import inspect
import io
import json
import math
import os
import pty
import re
import subprocess
import sys
import threading
import time

import pytest

from clvla.command.watch import has_blocks, watch
from clvla.core.files import write_json
from clvla.run import watch as live
from clvla.run.folder import RunFolder
from clvla.run.terminal import Pace, blocks, loss_line, seconds_left
from clvla.run.watch import Board, Drawing, Run
from clvla.data.streams import stream_json
from clvla.train.config import TrainConfig, resolve, stream_for

# a run without a learner: two stages of ten updates, each with an evaluation; it waits for a line before each of its steps
RUN = """import sys
from clvla.run.folder import Cost, RunFolder
run = RunFolder(sys.argv[1])
wait = lambda: sys.stdin.readline()
with run.lock():
    print("ready", flush=True)
    for t, task in enumerate(("push", "pull")):
        for step in range(10):
            wait()
            run.log(stage=t, task=task, step=step, lr=1e-3, **{"train/loss": 2.*.8**(step+10*t)})
        wait()
        for j in range(t+1):
            for i in range(4): run.episode(dict(stage=t, after=task, task=("push", "pull")[j], trial=i, success=i < 3, steps=5, restarts=0, step=None, reward=0.))
        Cost(run.path).add("evaluation", 2.)
    (run.path/"done.json").write_text("{}")
"""


@pytest.fixture
def made(tmp_path):
    "A run's folder, and a function that lets its process do a number of steps."
    path = tmp_path/"run"
    RunFolder(path).begin(resolve(TrainConfig(run_dir=str(path), steps_per_task=10)))
    write_json(path/"stream.json", dict(stages=["push", "pull"], tasks=[dict(id="push"), dict(id="pull")], order=[0, 1]))
    process = subprocess.Popen([sys.executable, "-c", RUN, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    def go(n):
        process.stdin.write("\n"*n)
        process.stdin.flush()
    yield path, go, process
    process.kill()
    process.wait()


def until(true, seconds=60):
    deadline = time.monotonic()+seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(.02)


def records(path, name="log.jsonl"): return (path/name).read_bytes().count(b"\n") if (path/name).exists() else 0


def follow(path, out):
    "A thread that watches a run, and a list of what it raised."
    raised = []
    def look():
        try: watch(path, every=.05, out=out)
        except Exception as e: raised.append(e)
    thread = threading.Thread(target=look)
    thread.start()
    return thread, raised


def test_a_terminal_is_redrawn_in_its_place(made):
    "Bars, time left, matrix and curves come while the run goes on."
    path, go, process = made
    main, side = pty.openpty()
    read = []
    def drain():
        while True:
            try: data = os.read(main, 1 << 16)
            except OSError: return
            if not data: return
            read.append(data)
    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    def last():
        "The newest picture that has come as far as its last line, the losses."
        pictures = b"".join(read).decode(errors="replace").split("\x1b[H\x1b[J")
        return next((p for p in reversed(pictures) if p.endswith("a part for each stage\r\n")), "")
    with open(side, "w", encoding="utf-8") as out:
        thread, raised = follow(path, out)
        go(3)
        until(lambda: "3/10" in last())
        assert "loss 2 [" in last() and "after push" not in last()
        go(4)
        until(lambda: "7/10" in last() and "time left: about" in last())
        assert ", and the evaluations" in last()
        go(4)
        until(lambda: re.search(r"after push +75 +\.", last()))
        assert "success 75 [" in last() and re.search(r"after pull +\. +\.", last())
        go(5)
        until(lambda: "5/10" in last() and "time left: about" in last() and ", and the" not in last())
        assert "|" in last().split("loss 2 [")[1].split("]")[0]
        go(6)
        thread.join(60)
        assert not raised and not thread.is_alive()
        until(lambda: last().startswith(f"{path}: done"))
    assert re.search(r"after pull +75 +75", last())
    assert b"".join(read).startswith(b"\x1b[H\x1b[J") and blocks([0., 1.])[1] in last()


def test_a_file_gets_a_line_for_each_tenth_and_the_matrix_once(made):
    path, go, process = made
    out = io.StringIO()
    thread, raised = follow(path, out)
    for k in range(1, 23):
        go(1)
        until(lambda: records(path)+records(path, "episodes.jsonl")//4 >= k)
        time.sleep(.12)
    thread.join(60)
    assert not raised and not thread.is_alive()
    said = out.getvalue()
    assert "\x1b" not in said and said.count("\nafter push") == 2, "once when training went on, once at the end"
    tenths = re.findall(r"^training (push|pull) (\d+) %", said, re.M)
    assert len(tenths) == len(set(tenths)) >= 15 and ("pull", "50") in tenths
    assert re.search(r"training pull 50 %, time left: about \d", said)


def test_signs_of_a_stream_without_blocks():
    assert not has_blocks(io.TextIOWrapper(io.BytesIO(), encoding="ascii")) and has_blocks(io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert set(blocks(range(50), digits=True)) == set("0123456789") and blocks([3., 3.], digits=True) == "00"


# --- time left
@pytest.mark.parametrize("t, done, grows", [(0, 0, True), (0, 7, True), (1, 10, True), (2, 3, False), (3, 10, True), (3, 4, False)])
def test_time_left_is_the_sum_of_what_is_left(t, done, grows):
    "Added up, update by update and episode by episode: 3 s each update, 5 s for a task's evaluation."
    left = sum(3 for stage in range(4) for step in range(10) if (stage, step) >= (t, done))
    tasks = lambda k: k+1 if grows else 1
    evaluations = sum(5*tasks(k) for k in range(t))
    if t: left += sum(5*tasks(k) for k in range(t, 4))
    assert math.isclose(seconds_left(dict(stage=t, n_stages=4, done=done, total=10), 3., evaluations, grows), left)


def test_the_pace_starts_again_with_a_stage_and_with_a_run_that_went_back():
    pace = Pace()
    look = lambda stage, done, now: pace.look(dict(phase="training", stage=stage, n_stages=3, done=done, total=10), now) or pace.seconds
    assert [look(0, 0, 0), look(0, 5, 10), look(0, 5, 14), look(1, 2, 20), look(1, 4, 21), look(1, 1, 30), look(1, 2, 34)] == [None, 2, 2, 2, .5, .5, 4]


def test_losses_that_have_no_logarithm_are_left_out():
    rows = [dict(step=k, loss=loss, task="0: a") for k, loss in enumerate((0., 1., -1., .1))]
    assert loss_line(rows, digits=True).startswith("loss 1 [90] 0.1") and loss_line(rows[:1]) == ""


# --- figures
class Shows(Board):
    "A board that keeps what is put on it."
    def __init__(self): super().__init__(); self.puts = []
    def put(self, name, obj, line=None): self.puts.append((name, obj)); self.handles[name] = obj


def test_figures_grow_with_the_run_and_are_drawn_for_records_alone(made, monkeypatch):
    path, go, process = made
    board, clock = Shows(), [0.]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(live.time, "thread_time", lambda: 0.)
    draw = Drawing(Run.open(path), board)
    n = lambda: [len(fig.data[-1].x) for name, fig in board.puts if name == "Training loss"]
    rows = lambda: [len(fig.data[0].y) for name, fig in board.puts if name == "Success matrix"]
    go(3); until(lambda: records(path) == 3); draw()
    go(2); until(lambda: records(path) == 5); draw()
    assert n() == [3], "not due"
    clock[0] = 2.; draw()
    assert n() == [3, 5] and rows() == []
    clock[0] = 4.; draw()
    assert n() == [3, 5], "nothing new"
    go(6); until(lambda: records(path, "episodes.jsonl") == 4); draw()
    assert n() == [3, 5, 10] and rows() == [2]
    assert [str(obj) for name, obj in board.puts if name == "time left"]
    draw.clear()
    assert {str(obj).split(": ")[1] for obj in board.handles.values()} == {"the final figure is below", "the run has ended"}


def test_a_drawing_that_takes_long_comes_less_often(made, monkeypatch):
    path, go, process = made
    used = iter((0., 5., 6.))   # the first also loads Plotly's parts, and does not count
    monkeypatch.setattr(live.time, "thread_time", lambda: next(used))
    draw = Drawing(Run.open(path), Shows())
    go(1); until(lambda: records(path) == 1); draw()
    assert draw.due-time.monotonic() < 2.1 and inspect.signature(Run.follow).parameters["plots_every"].default <= 2, "a reader sees it grow"
    draw(now=True)
    assert 45 < draw.due-time.monotonic() < 50.1


@pytest.mark.parametrize("cl, suite, record, at", [("joint", dict(base="dot_3", cycles=2, probes=["up"]), dict(task="joint", stage=0, step=7), (8, 8)),
                                                   ("er", dict(base="dot_2", budget=dict(left=5)), dict(task="left", stage=0, step=3), (4, 5))], ids=["joint", "budget"])
def test_a_stage_has_the_updates_of_its_stream(tmp_path, cl, suite, record, at):
    "Cycles count, probes do not, and a task may have a budget: no run is 8 of 6 updates far."
    cfg = resolve(TrainConfig(suite=suite, cl=cl, steps_per_task=2, run_dir=str(tmp_path/"run")))
    RunFolder(cfg.run_dir).begin(cfg)
    write_json(tmp_path/"run/stream.json", stream_json(stream := stream_for(cfg)) | dict(stages=["joint"] if cl == "joint" else [s.task.id for s in stream.stages]))
    (tmp_path/"run/log.jsonl").write_text(json.dumps(record)+"\n")
    position = Run.open(tmp_path/"run").position
    assert (position["done"], position["total"]) == at
