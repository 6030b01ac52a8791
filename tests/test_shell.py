"The shell around a learner: what it says when it is stopped, ranks that save together or not at all, and the lock before the first write."
import errno
import threading
from contextlib import nullcontext
from types import SimpleNamespace as NS

import pytest

import clvla.run.shell as shell_page
from clvla.core.files import read_json
from clvla.run.all import learners
from clvla.data.streams import Stream, Task
from clvla.run.config import RunConfig, with_folders
from clvla.run.folder import RunFolder
from clvla.run.shell import Shell, run_learner
from clvla.run.stop import Stopped
from clvla.train.config import TrainConfig
from clvla.train.evaluate import tasks_due
from clvla.train.learner import Imitation, Stage


class Counter:
    "Two stages of three updates; asked to stop at `stop_at`: 'build', (stage, updates) or ('evaluate', stage)."
    files, stop_at, gather_weights = ("state",), None, nullcontext
    acc = NS(process_index=0, num_processes=1, wait_for_everyone=lambda: None, device="cpu")
    stages = [NS(t=t, name=name, n_steps=3) for t, name in enumerate(("there", "back"))]
    documents = versions = lambda self, *args: {}
    write = close = release = lambda self, *args: None

    def __init__(self, cfg): self.t, self.step = 0, None
    position = property(lambda self: (self.t, self.step))

    def ask(self, moment):
        if moment == self.stop_at:
            self.shell.stop.requested = True
            self.shell.check_stop()

    def build(self, shell, checkpoint): self.shell = shell; self.ask("build")
    def evaluate(self, t, step=None): self.ask(("evaluate", t))

    def fit(self, stage):
        for self.step in range(self.step or 0, 3): self.ask((stage.t, self.step)); self.shell.save_if_due()
        self.t, self.step = stage.t+1, None

    def state_dict(self): return dict(state=dict(t=self.t, step=self.step))
    def load_state_dict(self, states): self.t, self.step = states["state"].values()
    def summary(self): return {}


@pytest.fixture(autouse=True)
def counter(monkeypatch):
    monkeypatch.setattr(Counter, "stop_at", None)
    learners["counter"] = Counter


def config(path, **kw): return with_folders(RunConfig(**(dict(learner="counter", run_dir=str(path)) | kw)), "counter")


def stopped_at(monkeypatch, path, moment):
    "The last line and what stopped.json says of a run that is asked to stop at a moment."
    lines = []
    monkeypatch.setattr(Counter, "stop_at", moment)
    with pytest.raises(Stopped): run_learner(config(path), lines.append)
    stopped = read_json(path/"stopped.json")
    return lines[-1], [stopped[k] for k in ("checkpoint", "stage", "step")]


NOTHING = ("stopped before the first checkpoint; the same command begins again", [None, None, None])


def after(name, *position): return f"stopped; the same command goes on after {name}", [name, *position]


@pytest.mark.parametrize("moment", ["build", ("evaluate", -1), (0, 0)])
def test_stopped_with_nothing_learnt_it_says_that_nothing_is_saved(monkeypatch, tmp_path, moment):
    assert stopped_at(monkeypatch, tmp_path/"run", moment) == NOTHING and not (tmp_path/"run/checkpoints").exists()


def test_what_a_stopped_run_says_is_where_it_goes_on(monkeypatch, tmp_path):
    path = tmp_path/"run"
    for moment, said in [((0, 2), after("000+000002-there", 0, 2)), ("build", after("000+000002-there", 0, 2)),
                         (("evaluate", 0), after("000-there", 0, None)), ("build", after("000-there", 0, None)),
                         ((1, 0), after("000-there", 0, None)), (("evaluate", 1), after("001-back", 1, None)),
                         ("build", after("001-back", 1, None))]:
        assert stopped_at(monkeypatch, path, moment) == said
    lines = []
    monkeypatch.setattr(Counter, "stop_at", None)
    assert run_learner(config(path), lines.append).done and lines[0] == "continued after 001-back"


class TwoRanks:
    "Stands in for accelerate on one of two threads; a rank that waits alone for 5 s raises BrokenBarrierError."
    def __init__(self):
        self.barrier, self.votes = threading.Barrier(2, timeout=5), [None, None]

    def acc(self, rank):
        def reduce(votes, how):
            self.votes[rank] = votes
            self.barrier.wait()
            total = self.votes[0]+self.votes[1]
            self.barrier.wait()
            return total
        return NS(process_index=rank, num_processes=2, wait_for_everyone=self.barrier.wait, device="cpu", reduce=reduce)


@pytest.mark.parametrize("what, full", [("save_state", 0), ("save_state", 1), ("write_checkpoint", 0)])   # rank 0 alone writes the latter
def test_ranks_give_a_checkpoint_up_together(monkeypatch, tmp_path, what, full):
    "Rank `full` has no space: both ranks train on, neither counts the checkpoint as written, and the next one is saved."
    real, two, lines, shells, errors = getattr(shell_page, what), TwoRanks(), [], {}, []
    no_space = threading.Event(); no_space.set()

    def write(*args):
        if no_space.is_set() and threading.current_thread().name == str(full): raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)
    monkeypatch.setattr(shell_page, what, write)
    for rank in (0, 1):
        learners[f"rank {rank} {what} {full}"] = lambda cfg, rank=rank: type("Ranked", (Counter,), dict(acc=two.acc(rank)))(cfg)
        shells[rank] = Shell(config(tmp_path/"run", learner=f"rank {rank} {what} {full}", save_every=2), lines.append)

    def work(shell):
        try:
            shell.begin()
            for step in (2, 4):
                shell.learner.step = step
                shell.learner.stages = [NS(t=0, name="there", n_steps=9)]
                shell.save_if_due()
                two.barrier.wait()
                errors.append((step, shell.saved_position))
                no_space.clear()
                two.barrier.wait()
        except Exception as e: errors.append(e)
    threads = [threading.Thread(target=work, args=(shells[rank],), name=str(rank)) for rank in (0, 1)]
    for t in threads: t.start()
    for t in threads: t.join(30)
    assert sorted(errors, key=str) == [(2, None)]*2+[(4, (0, 4))]*2
    assert ["Training goes on" in line for line in lines] == [True]
    assert [p.name for p in (tmp_path/"run/checkpoints").glob("0*")] == ["000+000004-there"]


def files(path): return {p.name: p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_making_a_shell_writes_nothing(tmp_path):
    Shell(config(tmp_path/"run"), len)
    assert not (tmp_path/"run").exists()


def test_a_second_copy_that_starts_in_the_same_moment_changes_nothing(monkeypatch, tmp_path):
    "It looked at the folder before the first one held the lock, so only the lock itself refuses it."
    cfg = config(tmp_path/"run")
    RunFolder(cfg.run_dir).begin(cfg)
    with RunFolder(cfg.run_dir).lock():
        before = files(tmp_path/"run")
        with pytest.raises(ValueError, match="is being written by this process"): run_learner(config(tmp_path/"run", seed=7), len)
        assert files(tmp_path/"run") == before


def test_a_refused_folder_stays_as_it_is(tmp_path):
    (tmp_path/"photo.jpg").write_text("")
    with pytest.raises(ValueError, match="no run folder"): run_learner(config(tmp_path), len)
    assert list(files(tmp_path)) == ["photo.jpg"]


def test_without_evaluation_nothing_is_played_and_no_simulator_is_asked_for_its_version():
    "Tasks that are read from files and have no environment; `kind_of` would raise for them."
    task = Task("disk", "disk", "go left", None, dict(kind="lerobot", parts=[dict(path="x", task_index=None)]))
    cfg, stream, stages = TrainConfig(evaluate="none", curve_points=2), Stream("mine", (task,)), [Stage(0, ["disk"], "disk", 4)]
    assert Imitation.versions(NS(cfg=cfg, stream=stream)) == {}
    assert [tasks_due(cfg, stream, stages, t, step) for t, step in ((-1, None), (0, 0), (0, 2), (0, None))] == [[]]*4
