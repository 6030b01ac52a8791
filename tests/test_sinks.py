"Sinks get each step of a run once, whatever happens to the run; they change none of its numbers, and end it never."
import importlib.util
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace as NS

import pytest

from clvla.core.files import read_json
from clvla.run import feed as feeding
from clvla.run.config import RunConfig
from clvla.run.feed import Feed, hand_on
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint
from clvla.run.sinks import Sink, Trackio, check_sink, sinks
from clvla.train.config import TrainConfig, resolve
from clvla.train.learner import train_cl
from clvla.train.trainer import Trainer

OWN = """from clvla.run.sinks import Sink, sinks
class Lines(Sink):
    def write(self, step, numbers):
        with open(self.path/"mine.txt", "a") as f: f.writelines(f"{step} {name} {value!r}\\n" for name, value in numbers.items())
sinks["lines"] = Lines
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory): return tmp_path_factory.mktemp("data")


def config(data, run_dir, **kw):
    small = dict(suite="dot_2", n_demos=2, steps_per_task=6, warmup=1, batch_size=8, threads=1, n_trials=2, n_workers=1, rows_per_task=1, image_size=32, chunk=4,
                 model_kw=dict(D=32, n_blocks=1), algo="er", save_every=4, run_dir=str(run_dir), data_dir=str(data))
    return resolve(TrainConfig(**small | kw))


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory): return train_cl(config(data, tmp_path_factory.mktemp("runs")/"plain"), say=len)


@pytest.fixture
def added():
    "Sinks of a test are taken out again."
    before = set(sinks)
    yield sinks
    for name in set(sinks)-before: sinks.pop(name)


def wanted(run):
    "What a sink has to get of a whole run, in its order, as (step, name, value)."
    rows = [r for r in run.logs() if "step" in r]
    lines = [(k, name, value) for k, r in enumerate(rows) for name, value in r.items() if name not in ("stage", "step", "task") and not isinstance(value, dict)]
    for t in (0, 1):
        of = {task: [e["success"] for e in run.episodes() if (e["stage"], e["task"]) == (t, task)] for task in ("left", "right")}
        means = {task: sum(s)/len(s) for task, s in of.items() if s}
        lines += [(6*(t+1), f"eval/success/{task}", m) for task, m in means.items()] + [(6*(t+1), "eval/success", sum(means.values())/len(means))]
    return sorted(lines)


def mine(run):
    rows = (line.split() for line in (run.path/"mine.txt").read_text().splitlines())
    return sorted((int(step), name, float(value)) for step, name, value in rows)


def without_time(rows): return [r for r in rows if not r[1].startswith("time/")]


def test_a_users_own_file_gets_all_once_and_changes_no_number(data, tmp_path, plain):
    (tmp_path/"lines.py").write_text(OWN)
    run = train_cl(config(data, tmp_path/"run", plugins=[str(tmp_path/"lines.py")], sink="lines"), say=len)
    assert mine(run) == wanted(run) and len({step for step, *_ in mine(run)}) == 13
    assert without_time(mine(run)) == without_time(wanted(plain)) and fingerprint(run.path) == fingerprint(plain.path)
    assert not [t for t in threading.enumerate() if "_follow" in t.name]


@pytest.mark.parametrize("at", [(0, 3), (0, 6), (1, 2), (1, 5)])
def test_a_run_that_was_lost_and_continued_writes_no_step_twice(data, tmp_path, plain, monkeypatch, at):
    "The lines after the checkpoint, which is of update 4 or of the stage's end, are written again into the log, and not into the sink."
    (tmp_path/"lines.py").write_text(OWN)
    report = Trainer.report
    def lost(self, ctx, *args):
        report(self, ctx, *args)
        if (ctx.t, ctx.step) == at: raise RuntimeError("lost")
    cfg = config(data, tmp_path/"run", plugins=[str(tmp_path/"lines.py")], sink="lines")
    monkeypatch.setattr(Trainer, "report", lost)
    with pytest.raises(RuntimeError, match="lost"): train_cl(cfg, say=len)
    monkeypatch.setattr(Trainer, "report", report)
    had = len(mine(RunFolder(cfg.run_dir)))
    run = train_cl(cfg, say=len)
    assert without_time(mine(run)) == without_time(wanted(run)) == without_time(wanted(plain)) and 0 < had < len(mine(run))
    assert fingerprint(run.path) == fingerprint(plain.path)


def test_another_sink_may_follow_and_gets_the_run_from_its_beginning(data, tmp_path, plain, added):
    class Keeps(Sink):
        def write(self, step, numbers): got.append(step)
    got, added["keeps"] = [], Keeps
    cfg = config(data, tmp_path/"run")
    train_cl(cfg, say=len)
    RunFolder(cfg.run_dir).check(replace(cfg, sink="keeps"))   # no other run
    hand_on(cfg.run_dir, "keeps")
    hand_on(cfg.run_dir, "keeps")
    assert got == [*range(12), 6, 12]


def test_tensorboard_has_each_step_once(data, tmp_path, plain):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    run = train_cl(config(data, tmp_path/"run", sink="tensorboard"), say=len)
    events = EventAccumulator(str(run.path/"sinks/tensorboard")).Reload()
    got = sorted((e.step, name, e.value) for name in events.Tags()["scalars"] for e in events.Scalars(name))
    assert [(s, n) for s, n, _ in got] == [(s, n) for s, n, _ in wanted(run)]
    assert [v for *_, v in got] == pytest.approx([v for *_, v in wanted(run)], rel=1e-6)


@pytest.mark.parametrize("where", ["begin", "write", "flush", "close", "exit"])
def test_a_sink_that_fails_is_said_once_and_ends_nothing(data, tmp_path, plain, added, where):
    class Fails(Sink):
        def fail(self, *_): raise (SystemExit if where == "exit" else OSError)("no room")
        write = fail if where in ("write", "exit") else lambda self, step, numbers: None
        if where == "begin": __init__ = fail
        if where == "flush": flush = fail
        if where == "close": close = fail
    added["fails"], said = Fails, []
    run = train_cl(config(data, tmp_path/"run", sink="fails"), say=said.append)
    about = [line for line in said if "sink 'fails'" in line]
    assert len(about) == 1 and "no room" in about[0] and "The run goes on" in about[0]
    assert run.done and fingerprint(run.path) == fingerprint(plain.path)


def test_a_sink_that_hangs_does_not_hold_the_run(tmp_path, added):
    class Hangs(Sink):
        def write(self, step, numbers): time.sleep(3600)
    added["hangs"], said = Hangs, []
    run = RunFolder(tmp_path/"run")
    run.begin(RunConfig(run_dir=str(run.path)))
    start = time.monotonic()
    with Feed(run, "hangs", said.append, every=.01, patience=.2): run.log(stage=0, step=0, lr=.1)
    assert time.monotonic()-start < 30 and "had not ended" in said[0]


def test_only_rank_0_feeds(tmp_path, added):
    class Never(Sink):
        def __init__(self, path): raise AssertionError
    added["never"] = Never
    with Feed(RunFolder(tmp_path, rank=1), "never") as feed: assert not feed.sinks


@pytest.mark.parametrize("sink, error, says", [("tensorbord", ValueError, "unknown sink 'tensorbord'; did you mean 'tensorboard'"),
    ("trackio+trackio", ValueError, "names one twice"), ("plainly", ValueError, "expected a subclass"), ("needy", ImportError, r"pip install 'clvla\[nowhere\]'")])
def test_what_cannot_be_a_sink_is_refused_before_anything_runs(data, tmp_path, added, sink, error, says):
    added["plainly"], added["needy"] = len, type("Needy", (Sink,), dict(needs=("no_such_package", "nowhere")))
    with pytest.raises(error, match=says): config(data, tmp_path/"run", sink=sink)
    assert not (tmp_path/"run").exists()


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_missing_package_names_its_extra(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ImportError, match=rf"pip install 'clvla\[{name}\]'"): check_sink(NS(sink=name))


def test_trackio_is_asked_to_stay_on_this_machine(tmp_path, monkeypatch):
    "A module in its place notes how it is called."
    calls = []
    run = NS(log=lambda numbers, step: calls.append((step, numbers)), finish=lambda: calls.append("end"))
    monkeypatch.setitem(sys.modules, "trackio", NS(init=lambda **kw: (calls.append(kw), run)[1]))
    sink = Trackio(tmp_path/"mine")
    sink.write(3, {"lr": .1})
    sink.close()
    assert calls[0]["resume"] == "allow" and not {"space_id", "server_url", "dataset_id"} & set(calls[0]) and calls[1:] == [(3, {"lr": .1}), "end"]
    assert calls[0]["name"].startswith("mine-") and Trackio(tmp_path/"other/mine") and calls[-1]["name"] != calls[0]["name"]


def test_the_note_is_there_before_the_sink_gets_the_lines(tmp_path, added):
    "A process that is killed inside a sink has not handed these lines on, and nobody does it twice."
    class Looks(Sink):
        def write(self, step, numbers): seen.append(read_json(self.path/"sinks/looks.json")["lines"])
    seen, added["looks"] = [], Looks
    run = RunFolder(tmp_path/"run")
    run.begin(RunConfig(run_dir=str(run.path)))
    for k in range(3): run.log(stage=0, step=k, lr=.1)
    hand_on(run.path, "looks")
    assert seen == [3, 3, 3]


def test_a_line_that_is_being_written_waits(tmp_path, added):
    class Keeps(Sink):
        def write(self, step, numbers): got.append((step, numbers))
    got, added["keeps"] = [], Keeps
    run = RunFolder(tmp_path/"run")
    run.begin(RunConfig(run_dir=str(run.path)))
    feed = feeding.Feed(run, "keeps")
    (run.path/"log.jsonl").write_text('{"stage": 0, "step": 0, "lr": 1.0}\n{"stage": 0, "st')
    feed.feed()
    with open(run.path/"log.jsonl", "a") as f: f.write('ep": 1, "lr": 2.0}\n')
    feed.feed()
    assert got == [(0, dict(lr=1.)), (1, dict(lr=2.))]
