"Early stopping: the rule against its definition, looks that change no update, the best weights at a task's end, a lost or stopped run that goes on, refusals."
from itertools import product

import pytest
import torch

from clvla.core.state import load_state, read_tensors
from clvla.core.trials import use_of
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint
from clvla.run.stop import Stopped
from clvla.train.checkpoint_eval import eval_cl
from clvla.train.config import TrainConfig, resolve
from clvla.train.eval_config import EvalConfig
from clvla.train.learner import Imitation, train_cl
from clvla.train.prepare import check
from clvla.train.stopping import Stopping, looks_of
from clvla.train.trainer import Trainer


@pytest.fixture(scope="module")
def data(tmp_path_factory): return tmp_path_factory.mktemp("data")


def config(data, run_dir, **kw):
    small = dict(suite="dot_2", n_demos=3, steps_per_task=9, warmup=1, batch_size=8, threads=1, n_trials=2, n_workers=1, rows_per_task=1, image_size=32,
                 chunk=4, look_trials=2, model_kw=dict(D=32, n_blocks=1), run_dir=str(run_dir), data_dir=str(data))
    return resolve(TrainConfig(**small | kw))


# --- the rule
def end_by_definition(scores, patience):
    "Eq. 1 and 2 of the page, look by look: number of the last look, of the best one or None."
    for k in range(1, len(scores)+1):
        top = max(scores[:k])
        best = scores.index(top)+1 if top > 0 else None
        if best and (k-best >= patience or scores[k-1] == 1): break
    return k, best


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_the_rule_is_its_definition_on_all_short_sequences(patience):
    for scores in product((0, .3, .6, 1), repeat=6):
        stopping, kept = Stopping(patience, every=5), None
        for k, score in enumerate(scores, 1):
            if stopping.take(5*k, score): kept = k
            if stopping.over: break
        assert (k, kept) == end_by_definition(scores, patience), scores
        assert stopping.best_at == (kept and 5*kept)


def test_looks_come_at_multiples_and_at_the_end_each_once():
    for n, every in product(range(1, 40), range(0, 12)):
        stopping, steps = Stopping(1, every), []
        for step in range(n+1):
            if stopping.due(step, n):
                steps.append(step)
                stopping.take(step, 0)
            assert not stopping.due(step, n)
        gap = every or max(1, n//10)
        assert steps == sorted({*range(gap, n+1, gap), n})


# --- runs whose looks are played, and then say what the test wants
SCORES = [{2: .2, 4: .6, 6: .6, 8: .5}, {2: .5, 4: .4, 6: .7, 8: .1, 9: .2}]   # ends after 8 updates, keeps 4; ends after 9, keeps 6
SETTINGS = dict(algo="er+l2", patience=2, look_every=2, reset_optimizer=False)


def script(monkeypatch):
    "Looks play, and say what stands in SCORES; (stage, update) -> weights at the look."
    real, weights = Imitation.play_look, {}
    def play_look(self, t, step):
        real(self, t, step)
        weights[t, step] = {n: p.detach().clone() for n, p in self.trainer.policy.named_parameters()}
        return SCORES[t][step]
    monkeypatch.setattr(Imitation, "play_look", play_look)
    return weights


@pytest.fixture(scope="module")
def made(data, tmp_path_factory):
    "A run that nobody interrupted, its weights at the looks, and what it said."
    said = []
    with pytest.MonkeyPatch.context() as patch:
        weights = script(patch)
        return train_cl(config(data, tmp_path_factory.mktemp("runs")/"whole", **SETTINGS), say=said.append), weights, said


def same(a, b): return fingerprint(a.path) == fingerprint(b.path) and facts(a.path/"looks") == facts(b.path/"looks")
def facts(path): return sorted((r["stage"], r["step"], r["task"], r["trial"], r["success"], r["steps"], r["reward"]) for r in RunFolder(path).episodes())


def test_a_task_ends_with_its_best_weights_and_a_run_that_was_cut_off_goes_on_bit_for_bit(data, tmp_path, monkeypatch, made):
    whole, weights, said = made
    ends = [{k: r[k] for k in ("stage", "updates", "planned", "kept", "looks")} for r in whole.logs() if "kept" in r]
    assert ends == [dict(stage=0, updates=8, planned=9, kept=4, looks=.6), dict(stage=1, updates=9, planned=9, kept=6, looks=.7)]
    assert [max(r["step"] for r in whole.logs() if "step" in r and r["stage"] == t) for t in (0, 1)] == [7, 8]
    assert any("left ended after 8 of 9 updates; the weights of update 4 are kept (60 % success there)" in line for line in said)
    assert [(x["stage"], x["step"]) for x in looks_of(whole.path)] == [(t, s) for t in (0, 1) for s in SCORES[t]]
    episodes = RunFolder(whole.path/"looks").episodes()
    assert {use_of(r["trial"])[0] for r in episodes} == {"stopping"} and {r["task"] for r in episodes if r["stage"]} == {"right"}

    for t, kept in ((0, 4), (1, 6)):   # the checkpoint has the weights that played, and L2's springs are fixed there
        folder = next((whole.path/"checkpoints").glob(f"{t:03d}-*"))
        stored, _ = read_tensors(folder/"weights.safetensors")
        assert all(torch.equal(stored[n], x) for n, x in weights[t, kept].items())
        star = load_state(folder/"algo.safetensors")["1"]["star"]
        assert torch.equal(star, torch.cat([x.flatten() for x in weights[t, kept].values()]))

    script(monkeypatch)
    report = Trainer.report
    def lost(self, ctx, *args):   # between the looks of updates 4 and 6, after a checkpoint at 5, which has to hold the best weights
        report(self, ctx, *args)
        if (ctx.t, ctx.step) == (0, 6): raise RuntimeError("lost")
    monkeypatch.setattr(Trainer, "report", lost)
    with pytest.raises(RuntimeError, match="lost"): train_cl(config(data, tmp_path/"lost", save_every=5, **SETTINGS), say=len)
    monkeypatch.setattr(Trainer, "report", report)
    said = []
    rest = train_cl(config(data, tmp_path/"lost", save_every=5, **SETTINGS), say=said.append)
    assert any("continued after 000+000005" in line for line in said) and same(rest, whole)

    evaluated = eval_cl(EvalConfig(run_dir=str(whole.path), n_trials=2, n_workers=1), len)
    key = lambda path: {(x[0], *x[2:]) for x in facts(path)}
    assert key(evaluated.path) == key(whole.path) and len(key(whole.path)) == 6


def test_a_signal_inside_a_look_is_no_look(data, tmp_path, monkeypatch, made):
    script(monkeypatch)
    episode, asked = RunFolder.episode, []
    def ask(self, record):   # after the first of the two episodes of a look
        episode(self, record)
        if self.path.name == "looks" and (record["stage"], record["step"]) == (1, 4) and not asked:
            asked.append(shells[-1].stop)
            asked[0].requested = True
    shells, build = [], Imitation.build
    monkeypatch.setattr(Imitation, "build", lambda self, shell, checkpoint=None: (shells.append(shell), build(self, shell, checkpoint))[1])
    monkeypatch.setattr(RunFolder, "episode", ask)
    with pytest.raises(Stopped): train_cl(config(data, tmp_path/"cut", **SETTINGS), say=len)
    assert len([r for r in RunFolder(tmp_path/"cut/looks").episodes() if (r["stage"], r["step"]) == (1, 4)]) == 1
    said = []
    rest = train_cl(config(data, tmp_path/"cut", **SETTINGS), say=said.append)
    assert any("continued after 001+000004" in line for line in said) and same(rest, made[0])


def test_looks_change_no_update_and_off_leaves_no_trace(data, tmp_path, monkeypatch):
    "Looks without success end nothing and keep nothing: weights, losses and episodes are those of a run without looks."
    monkeypatch.setattr(Imitation, "play_look", lambda self, t, step, real=Imitation.play_look: 0*real(self, t, step))
    off = train_cl(config(data, tmp_path/"off", algo="er", look_trials=10, save_every=4), say=len)
    on = train_cl(config(data, tmp_path/"on", algo="er", patience=1, look_every=3, save_every=4), say=len)
    assert not (off.path/"looks").exists() and len(looks_of(on.path)) == 6
    numbers = lambda run: [(r["stage"], r["step"], r["lr"], r["train/loss"], r["train/grad_norm"]) for r in run.logs() if "train/loss" in r]
    assert numbers(on) == numbers(off) and facts(on.path) == facts(off.path)
    for folder in sorted((off.path/"checkpoints").glob("*-*")):
        a, b = (read_tensors(path/"checkpoints"/folder.name/"weights.safetensors")[0] for path in (off.path, on.path))
        assert all(torch.equal(a[n], b[n]) for n in a)
        state = load_state(folder/"state.safetensors")
        assert set(state) == {"t", "at", "skipped", "overflows", "noise", "opt", "scaler"} and set(state["at"] or ()) <= {"step", "loader", "drawn", "aside", "ema"}
    assert all(set(r) == {"stage", "task", "drawn"} for r in off.logs() if "drawn" in r)
    assert [r["kept"] for r in on.logs() if "kept" in r] == [9, 9]


# --- at the door
@pytest.mark.parametrize("kw,says", [(dict(patience=2, evaluate="none"), "evaluate is 'none'"), (dict(patience=2, curve_points=2), "curve_points 2"),
    (dict(patience=2, algo="packnet"), "cl 'packnet' plans"), (dict(patience=2, algo="er+packnet"), "cl 'er[+]packnet' plans"),
    (dict(patience=2, look_every=9), "more than 9 updates"), (dict(look_every=3), "look_every is 3, and patience 0"), (dict(look_trials=5), "look_trials is 5"),
    (dict(patience=-1), "patience must not be negative"), (dict(patience=1, look_trials=0), "look_trials must be above 0")])
def test_what_cannot_end_early_is_refused(data, tmp_path, kw, says):
    with pytest.raises(ValueError, match=says): check(config(data, tmp_path/"run", **dict(algo="er", look_trials=10) | kw))
    assert not (tmp_path/"run").exists()


def test_tasks_without_an_environment_zero3_and_practice_are_refused(data, tmp_path):
    from types import SimpleNamespace as NS
    from clvla.cl.er import ER
    from clvla.rl.config import PracticeConfig, resolve_practice
    from clvla.rl.learner import check_practice
    from clvla.train.stopping import check_stopping
    lone = NS(tasks=[NS(id="disk", env=None)])
    with pytest.raises(ValueError, match="no environment belongs to disk"): check_stopping(config(data, tmp_path, patience=1, algo="er"), ER(), lone)
    from dataclasses import replace
    zero3 = replace(config(data, tmp_path, patience=1, algo="er"), strategy="zero3")
    with pytest.raises(ValueError, match="zero3.*zero2"): check_stopping(zero3, ER(), NS(tasks=[]))
    with pytest.raises(ValueError, match="practice has rounds"):
        check_practice(resolve_practice(PracticeConfig(suite="dot_2", patience=1, run_dir=str(tmp_path/"p"), data_dir=str(data))))


def test_joint_training_looks_at_all_its_tasks_and_a_smoke_run_at_little(data, tmp_path):
    run = train_cl(config(data, tmp_path/"joint", algo="joint", patience=1, look_every=6, steps_per_task=4), say=len)
    assert {(r["after"], r["task"]) for r in RunFolder(run.path/"looks").episodes()} == {("joint", "left"), ("joint", "right")}
    smoke = config(data, tmp_path/"s", algo="er", smoke=True, patience=3, look_every=50, look_trials=10, steps_per_task=300)
    assert (smoke.look_every, smoke.look_trials, smoke.steps_per_task) == (4, 2, 12) and check(smoke)
