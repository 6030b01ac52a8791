"Practice along a stream: stages and their starts, what hooks see, the same bits after any interruption, and what later pages read of it."
import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from chaos import wait_for
from test_practice import SMALL, Crash, crash_after
from clvla.cl.all import algos
from clvla.cl.er import ER
from clvla.core.files import read_json
from clvla.core.state import load_state, save_state
from clvla.core.trials import use_of
from clvla.data.loader import TaskData
from clvla.data.streams import Stream, Task
from clvla.eval.compare import group, read_runs, summary
from clvla.eval.metrics import from_records
from clvla.policies.all import load_policy
from clvla.rl.along import make_cl, stages_of, why_not
from clvla.rl.cloning import Cloning
from clvla.rl.config import PracticeConfig, base_config, resolve_practice
from clvla.rl.episodes import load_episodes
from clvla.rl.gains import gains
from clvla.rl.learner import Practice, practise
from clvla.rl.method import PracticeContext
from clvla.run.checkpoint import checkpoints
from clvla.run.folder import RunFolder
from clvla.run.report import matrix_of
from clvla.run.resume import fingerprint
from clvla.train.checkpoint_eval import eval_cl
from clvla.train.eval_config import EvalConfig, processor_of
from clvla.train.config import stream_for
from clvla.train.prepare import prepare

STREAM = SMALL | dict(stream=True)
TINY = STREAM | dict(episodes=4, round_episodes=2, evaluate="none", algo_kw=dict(updates=3), save_every=1)
# what is admitted, each with settings that suit runs of few samples
MENU = tuple(algos)   # as it was before other files' tests added to it
ADMITTED = dict(none={}, sequential={}, cumulative={}, er={}, mir=dict(candidates=4, top_k=2), gss=dict(buffer_size=5), ewc=dict(n_batches=2), l2={}, si={}, rwalk={}, mas=dict(n_batches=2), agem={},
                gem={}, derpp={}, der={}, lwf={}, lfl=dict(freeze_head=False), retain={},
                gpm=dict(n_batches=2), phaser=dict(buffer_size=8, n_phases=2))


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


def config(data, path, **kw): return resolve_practice(PracticeConfig(data_dir=str(data), run_dir=str(path), **(STREAM | kw)))


@pytest.fixture(scope="module")
def done(data, tmp_path_factory): return practise(config(data, tmp_path_factory.mktemp("stream")/"run", cl="er"), say=len)


def test_the_matrix_and_who_reads_it(data, done, tmp_path):
    assert [p.name for p in checkpoints(done.path/"checkpoints", ends=True)] == ["000-left", "001-right"]
    m = matrix_of(done.path)
    assert m.R.shape == (2, 2) and np.isnan(m.R[0, 1]) and not np.isnan([*m.b, m.R[0, 0], *m.R[1]]).any()
    assert read_json(done.path/"done.json")["stages"] == 2
    table = summary(group(read_runs([done.path])), ("ASR", "BWT"), n_boot=20)
    assert len(table) == 2 and len(gains(done.path).values) == 2
    out = eval_cl(EvalConfig(run_dir=str(done.path), n_trials=2, n_workers=1), say=len)
    facts = lambda run: {(r["stage"], r["task"], r["trial"]): (r["success"], r["steps"]) for r in run.episodes() if r["stage"] >= 0}
    assert facts(out) == facts(done)


def test_rounds_belong_to_their_stage(done):
    "Each stage plays its own task, the same starts as the other one, and no start for anything else."
    rounds = [load_episodes(done.path/f"practice/round-{r:03d}.safetensors") for r in range(4)]
    assert [{e.task_id for e in of} for of in rounds] == [{"left"}, {"left"}, {"right"}, {"right"}]
    starts = [[e.trial for e in of] for of in rounds]
    assert starts[:2] == starts[2:] and {use_of(t)[0] for of in starts for t in of} == {"practice"}
    assert {r["stage"] for r in done.logs()} == {0, 1} and len([r for r in done.logs() if "train/loss" in r]) == 16


def test_a_task_that_comes_again_goes_on_to_other_starts(data, tmp_path):
    run = practise(config(data, tmp_path/"run", **TINY | dict(cycles=2)), say=len)
    starts = [{e.trial for e in load_episodes(run.path/f"practice/round-{r:03d}.safetensors")} for r in range(8)]
    assert len(run.logs()) and not (starts[0] | starts[1]) & (starts[4] | starts[5]) and starts[0] == starts[2] and starts[4] == starts[6]


def test_the_present_rates_are_those_of_the_step_after_a_crash(data, tmp_path, monkeypatch):
    "MIR pretends steps by the groups that the engine knows; torch makes new ones of a state that it takes in."
    rates, real = [], Cloning.update

    def update(self):
        numbers, p = real(self), next(iter(self.stage.params().values()))
        rates.append((self.loop.engine.group(p)["lr"], numbers["lr"]))
        return numbers
    monkeypatch.setattr(Cloning, "update", update)
    kw = TINY | dict(episodes=2, round_episodes=2)
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, 5)
        with pytest.raises(Crash): practise(config(data, tmp_path/"run", **kw), say=len)
    n = len(rates)
    practise(config(data, tmp_path/"run", **kw), say=len)
    assert len(rates) > n and all(known == stepped for known, stepped in rates)


@pytest.mark.parametrize("scope, seen", [("current", [["left"], ["right"], ["left"], ["right"]]),
                                         ("seen", [["left"], ["left", "right"], ["left", "right"], ["left", "right"]])])
def test_the_current_tasks_are_those_of_the_stages(scope, seen):
    "Also where a task comes again, and where a task that is only evaluated stands between two that are practised."
    task = lambda name, **kw: Task(name, name, name, **kw)
    tasks = [task("left"), task("probe", trained=False), task("right")]
    ctx = PracticeContext(cfg=PracticeConfig(stream=True), tasks=tasks, policy=None, processor=None, data=None, stream=Stream("two", tasks, cycles=2),
                          cl=SimpleNamespace(scope=scope))
    assert [ctx.current(stage) for stage in stages_of(ctx.cfg, ctx.stream, 1)] == seen


def test_cloning_evaluates_a_probe_and_does_not_practise_it(data, tmp_path):
    "It has no demonstrations, either."
    kw = dict(algo="cloning", algo_kw=dict(updates=2), episodes=2, round_episodes=2)
    run = practise(config(data, tmp_path/"run", stream=False, suite=dict(base="dot_3", probes=["right"]), **kw), say=len)
    assert {e.task_id for e in load_episodes(run.path/"practice/round-000.safetensors")} == {"left", "up"}
    assert {r["task"] for r in run.episodes() if r["stage"] == 0} == {"left", "right", "up"}


def test_a_smoke_run_keeps_two_tasks_that_are_practised(data, tmp_path):
    cfg = config(data, tmp_path/"run", suite=dict(base="dot_3", probes=["right"]), smoke=True)
    assert [stage.name for stage in stages_of(cfg, stream_for(cfg), 1)] == ["left", "up"]


def test_together_and_along_have_one_base_and_equal_first_rounds(data, tmp_path, done):
    joint = practise(config(data, tmp_path/"run", stream=False), say=len)
    assert base_config(joint.cfg) == base_config(done.cfg)
    of = lambda run, stage: sorted((r["task"], r["trial"], r["success"], r["steps"]) for r in run.episodes() if r["stage"] == stage)
    assert of(joint, -1) == of(done, -1)
    first = lambda run: [e for e in load_episodes(run.path/"practice/round-000.safetensors") if e.task_id == "left"]
    assert all(np.array_equal(a.action, b.action) for a, b in zip(first(joint), first(done), strict=True))


def test_hooks_see_own_successes_of_the_right_tasks(data, tmp_path, monkeypatch):
    "Current samples are of the present task, remembered ones of the finished one; both demonstrations and attempts are remembered."
    seen, memory = [], {}
    real, end = Cloning.update, ER.on_task_end

    def update(self):
        numbers = real(self)
        batch = self.stage.batch
        seen.append((self.stage.task_id, batch["task_id"][:len(batch["task_id"])-self.stage.n_mixed], [t for t, _ in self.stage.mixed]))
        return numbers

    def on_task_end(self, ctx):
        end(self, ctx)
        n = ctx.data.demos.n_frames(ctx.task_id)
        memory[ctx.task_id] = (ctx.data.n_frames(ctx.task_id), {bool(f >= n) for f in self.buf.frames[ctx.task_id]}, n)
    monkeypatch.setattr(Cloning, "update", update)
    monkeypatch.setattr(ER, "on_task_end", on_task_end)
    # every attempt counts as a success, so that there are some
    monkeypatch.setattr("clvla.rl.episodes.Episode.__setattr__", lambda self, k, v: object.__setattr__(self, k, True if k == "success" else v), raising=False)
    practise(config(data, tmp_path/"run", **TINY | dict(cl="er", cl_kw=dict(replay_ratio=.5))), say=len)
    assert all(set(current) == {task} for task, current, _ in seen)
    assert [len(old) for _, _, old in seen] == [0]*6+[4]*6 and {t for *_, old in seen for t in old} == {"left"}
    assert all(total > n and kinds == {True, False} for total, kinds, n in memory.values())


@pytest.mark.parametrize("n, save_every", [(1, 0), (6, 3), (8, 0), (9, 0), (16, 3)])
def test_a_crash_changes_nothing(data, tmp_path, done, n, save_every):
    kw = dict(cl="er", save_every=save_every)
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, n)
        with pytest.raises(Crash): practise(config(data, tmp_path/"run", **kw), say=len)
    assert fingerprint(practise(config(data, tmp_path/"run", **kw), say=len).path) == fingerprint(done.path)


def test_a_crash_between_two_stages_changes_nothing(data, tmp_path, done):
    "The optimizer of the stage that begins is made after its first attempts, and a checkpoint is written before them."
    real = Practice.evaluate

    def evaluate(self, t, step=None):
        if t == 0: raise Crash
        real(self, t, step)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(Practice, "evaluate", evaluate)
        with pytest.raises(Crash): practise(config(data, tmp_path/"run", cl="er"), say=len)
    assert fingerprint(practise(config(data, tmp_path/"run", cl="er"), say=len).path) == fingerprint(done.path)


def test_a_crash_between_last_update_and_checkpoint(data, tmp_path, done, monkeypatch):
    "While the algorithm ends its task: its hook is called again, on the same state."
    def power_cut(self, ctx): raise Crash
    with pytest.MonkeyPatch.context() as m:
        m.setattr(ER, "on_task_end", power_cut)
        with pytest.raises(Crash): practise(config(data, tmp_path/"run", cl="er"), say=len)
    assert fingerprint(practise(config(data, tmp_path/"run", cl="er"), say=len).path) == fingerprint(done.path)


@pytest.mark.parametrize("moment", ["practice/round-001.safetensors", "practice/round-002.safetensors"])
def test_killed_processes(data, tmp_path, done, moment):
    cfg = config(data, tmp_path/"run", cl="er")
    RunFolder(cfg.run_dir).begin(cfg)
    child = subprocess.Popen([sys.executable, "-m", "clvla.run", cfg.run_dir], env=os.environ | dict(OMP_NUM_THREADS="1"))
    try:
        wait_for(lambda: (tmp_path/"run"/moment).exists() or child.poll() is not None)
        child.send_signal(signal.SIGKILL)
    finally: child.wait()
    assert fingerprint(practise(cfg, say=len).path) == fingerprint(done.path)


def test_the_list_of_admitted_algorithms_is_whole():
    from clvla.cl.all import make_algo
    assert {name for name in MENU if not why_not(make_algo(name))} | {"none", "lfl"} == set(ADMITTED)


class Driven:
    "A method that is taken through the rounds of another run, as the learner does it."
    def __init__(self, done, cl):
        cfg = replace(done.cfg, cl=cl, cl_kw=ADMITTED[cl])
        self.run, self.stream, self.cl, self.method = done, stream_for(cfg), make_cl(cfg), Cloning(cfg.seed, updates=2)
        base = checkpoints(RunFolder(base_config(cfg).run_dir).path/"checkpoints", ends=True)[-1]
        policy, processor = load_policy(base), processor_of(base)
        data = TaskData(prepare(self.stream, base_config(cfg), len), processor, policy.H, policy.prepare)
        self.method.prepare(PracticeContext(cfg=cfg, tasks=self.stream.tasks, policy=policy, processor=processor, data=data, stream=self.stream, cl=self.cl))
        self.stages, self.rounds = stages_of(cfg, self.stream, 2), 0

    def play(self):
        self.method.add(load_episodes(self.run.path/f"practice/round-{self.rounds:03d}.safetensors"))
        self.rounds += 1

    def steps(self, stage):
        "What remains of a round is done between two yields."
        self.method.enter(stage)
        self.method.start()
        for _ in range(2):
            self.play()
            self.method.begin()
            yield from self.updates(2)
        self.method.finish()

    def updates(self, n):
        for _ in range(n):
            self.method.update()
            yield
        self.method.end()


@pytest.mark.parametrize("cl", ADMITTED)
def test_each_algorithm_goes_on_inside_the_second_task(done, tmp_path, cl):
    "Stopped after the first update of the second task's second round, stored in a file, and restored in new objects."
    a, b = Driven(done, cl), Driven(done, cl)
    for _ in a.steps(a.stages[0]): pass
    second = a.steps(a.stages[1])
    for _ in range(3): next(second)
    save_state(tmp_path/"state", dict(method=a.method.state_dict(), cl=a.cl.state_dict(), weights=a.method.policy.state_dict()))
    for _ in second: pass
    state = load_state(tmp_path/"state")
    b.method.policy.load_state_dict(state["weights"])
    for _ in range(4): b.play()
    b.method.enter(b.stages[1])
    b.cl.load_state_dict(state["cl"])
    b.method.load_state_dict(state["method"])
    for _ in b.updates(1): pass
    b.method.finish()
    one, two = a.method.policy.state_dict(), b.method.policy.state_dict()
    assert all(torch.equal(v, two[k]) for k, v in one.items()) and any((v != state["weights"][k]).any() for k, v in one.items())


@pytest.mark.parametrize("kw, says", [
    (dict(cl="joint"), "all tasks are then practised together"), (dict(cl="packnet"), "for each task"), (dict(cl="gdumb"), "resets weights"),
    (dict(cl="er+joint"), "cannot go with practice"), (dict(cl="eer"), "did you mean 'er'"), (dict(cl="er", cl_kw=dict(lam=1)), "no setting 'lam'"),
    (dict(cl="er", batch_size=1), "nothing would be replayed"), (dict(cl="er", algo="token_ppo", algo_kw={}), "present weights alone"),
    (dict(stream=False, cl="er"), "set stream to True"), (dict(stream=False, cycles=2), "set stream to True"), (dict(tasks=["left"]), "two tasks or more"),
    (dict(cycles=30_000), "more than the 100000 starts"), (dict(cl_kw=dict(lam=1)), "takes no settings")])
def test_what_cannot_work_is_refused_before_anything_is_made(data, tmp_path, kw, says):
    with pytest.raises(ValueError, match=says): practise(PracticeConfig(data_dir=str(data), run_dir=str(tmp_path/"run"), **(STREAM | kw)), say=len)
    assert not (tmp_path/"run/practice").exists() and not (tmp_path/"run/episodes.jsonl").exists()


def test_settings_reach_the_algorithm():
    cfg = resolve_practice(PracticeConfig.of(suite="dot_2", algo="cloning", stream="True", cl="er+ewc", replay_ratio=".5", lam="10", updates="4"))
    assert cfg.cl_kw == dict(er=dict(replay_ratio=.5), ewc=dict(lam=10.)) and cfg.algo_kw == dict(updates=4)
    assert cfg.run_dir.endswith("dot_2-cloning-stream-er+ewc-tiny-s0")


def test_the_page(data, tmp_path):
    "The smoke run along a stream, as a user starts it."
    from test_run import page
    out = page("run_rl", tmp_path/"page.ipynb", "-p", "smoke", "True", "-p", "suite", "dot_2", "-p", "algo", "cloning", "-p", "stream", "True", "-p", "cl", "er", "-p", "replay_ratio", "0.5",
               "-p", "run_dir", str(tmp_path/"run"), env={"CLVLA_DATA": str(data)})
    assert out.returncode == 0, out.stderr[-3000:]
    assert "unknown parameter" not in out.stderr
    assert read_json(tmp_path/"run/done.json") | dict(base="") == dict(stages=2, rounds=4, base="")
    m = read_json(tmp_path/"run/matrix.json")
    assert m and matrix_of(tmp_path/"run").R.shape == (2, 2)


@pytest.mark.parametrize("stream", [False, True], ids=["together", "along"])
def test_a_task_that_is_only_played_is_not_practised(data, tmp_path, stream):
    "Together a method was given attempts at it, and beside a frozen policy asked for its demonstrations, of which there are none."
    suite = dict(base="dot_3", probes=["up"])
    run = practise(config(data, tmp_path/"run", suite=suite, stream=stream, algo="best_of_n", algo_kw=dict(updates=2, token_updates=2, sample=8), steps_per_task=4, episodes=2,
                          round_episodes=2, evaluate="full", n_trials=1), say=len)
    attempts = [e.task_id for path in sorted((run.path/"practice").glob("round-*.safetensors")) for e in load_episodes(path)]
    assert {*attempts} == {"left", "right"}
    assert {r["task"] for r in run.episodes()} == {"left", "right", "up"}
