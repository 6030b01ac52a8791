"Advantage-conditioned practice: it begins as its base, with all positive it is cloning of everything, a crash changes nothing, logs of other runs are learnt from."
from dataclasses import replace

import numpy as np
import pytest
import torch

from test_practice import SMALL, Crash, crash_after
from clvla.core.names import ACTION, IMAGE, PAD, PROMPT, STATE
from clvla.core.records import read_jsonl
from clvla.core.state import load_state
from clvla.policies.all import load_policy, make_policy
from clvla.rl.all import methods
from clvla.rl.cloning import Cloning, PracticeData
from clvla.rl.config import PracticeConfig, resolve_practice
from clvla.rl.episodes import load_episodes, save_episodes
from clvla.rl.learner import practise
from clvla.rl.recap import INDICATOR, Attempts, Recap, RecapPolicy
from clvla.rl.token_policy import sizes_of
from clvla.run.checkpoint import checkpoints
from clvla.run.resume import fingerprint
from clvla.train.checkpoint_eval import eval_cl
from clvla.train.eval_config import EvalConfig

SOME = SMALL | dict(steps_per_task=40, algo="recap")   # a base that succeeds now and then
FEW = dict(updates=4, value_updates=3, sample=8, folds=2)
ARMS = dict(recap=dict(guidance=2.), expert=dict(late=8, lookahead=2, reads="context", positive=.5, trains="lora", rank=2), stream=dict(shuffled=True))
ALONG = dict(stream=dict(stream=True, cl="er+ewc", episodes=3))


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


def config(data, path, algo_kw={}, **kw):
    return resolve_practice(PracticeConfig(data_dir=str(data), run_dir=str(path), **(SOME | dict(algo_kw=FEW | algo_kw) | kw)))


@pytest.fixture(scope="module")
def done(data, tmp_path_factory): return practise(config(data, tmp_path_factory.mktemp("done")/"run", evaluate="none"), say=len)


def losses(run): return [r["train/loss"] for r in read_jsonl(run.path/"log.jsonl") if "train/loss" in r]


def rounds(run): return sum([load_episodes(path) for path in sorted((run.path/"practice").glob("round-*"))], [])


@pytest.mark.parametrize("arm, n", [("recap", 6), ("expert", 1), ("stream", 6)])
def test_a_crash_changes_nothing(data, tmp_path, monkeypatch, arm, n):
    "What was said of samples, too: of each task's a share, and all of what an expert did is positive."
    said, real = [], Recap.judge

    def judge(self):
        real(self)
        own, expert = self.data.own, np.concatenate([a["expert"] for a in self.looked])
        assert len(own) == len(expert) and own.indicator[expert].all() and expert.any() == (arm == "expert")
        said.extend(own.indicator[rows].mean() for task in self.task_ids if (rows := (np.array(own.task_ids) == task) & ~expert).any())
    monkeypatch.setattr(Recap, "judge", judge)
    run = practise(config(data, tmp_path/"run", ARMS[arm], save_every=1, **ALONG.get(arm, {})), say=len)
    assert len(said) >= 3 and all(.25 < share < .6 for share in said)
    policy = load_policy(checkpoints(run.path/"checkpoints", ends=True)[-1])
    assert isinstance(policy, RecapPolicy) and policy.indicator.weight.abs().max() > 0   # it was zero
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, n, algo="recap")
        with pytest.raises(Crash): practise(config(data, tmp_path/"crash", ARMS[arm], save_every=1, **ALONG.get(arm, {})), say=len)
    assert fingerprint(practise(config(data, tmp_path/"crash", ARMS[arm], save_every=1, **ALONG.get(arm, {})), say=len).path) == fingerprint(run.path)
    if arm != "recap": return
    out = eval_cl(EvalConfig(run_dir=str(run.path), n_trials=2, n_workers=1), say=len)
    facts = lambda run: {(e["task"], e["trial"]): (e["success"], e["steps"]) for e in run.episodes() if e["stage"] == 0}
    assert facts(out) == facts(run)


class Everything(Cloning):
    "Cloning of all attempts, told nothing."
    def __init__(self, seed=0, updates=4): super().__init__(seed, updates, tau=0.)

    def prepare(self, ctx):
        super().prepare(ctx)
        own = Attempts(ctx.policy.H, ctx.data.cameras, {t.id: t.prompt for t in ctx.tasks})
        own.gather = lambda idx: {k: v for k, v in Attempts.gather(own, idx).items() if k != INDICATOR}
        self.data = PracticeData(ctx.data, own)


def test_with_all_positive_it_is_cloning_of_everything(data, tmp_path):
    "Told nothing, in every update; told that all is positive, in the first one, before the words have learnt. The first round is played as by the base."
    methods["everything"] = Everything
    own = config(data, tmp_path/"plain", evaluate="none")
    try: plain = practise(resolve_practice(replace(own, algo="everything", algo_kw=dict(updates=4))), say=len)
    finally: del methods["everything"]
    untold, positive = (practise(config(data, tmp_path/name, kw, evaluate="none"), say=len)
                        for name, kw in dict(untold=dict(positive=1., drop=1.), positive=dict(positive=1., drop=0.)).items())
    for run in (untold, positive): assert all(np.array_equal(a.action, b.action) for a, b in zip(rounds(run)[:6], rounds(plain)[:6], strict=True))
    assert len(losses(plain)) == 8 and np.allclose(losses(untold), losses(plain), rtol=1e-4)
    assert losses(positive)[0] == losses(plain)[0] and not np.allclose(losses(positive), losses(plain), rtol=1e-5)


def test_logs_of_another_run_are_learnt_from(data, tmp_path, done):
    cfg = config(data, tmp_path/"run", dict(logs=str(done.path)), evaluate="none", episodes=3, save_every=1, seed=1)
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, 2, algo="recap")
        with pytest.raises(Crash): practise(cfg, say=len)
    state = load_state(checkpoints(tmp_path/"run/checkpoints")[-1]/"state.safetensors")
    assert len(state["method"]["logs"]) == 2
    path = done.path/"practice/round-001.safetensors"
    kept, episodes = path.read_bytes(), load_episodes(path)
    try:
        save_episodes(path, episodes[1:])
        with pytest.raises(ValueError, match="were changed since the checkpoint"): practise(cfg, say=len)
    finally: path.write_bytes(kept)
    assert practise(cfg, say=len).done


def test_logs_that_do_not_fit_are_refused(data, tmp_path, done):
    for kw, says in ((dict(tasks=["left"]), "this run practises"), (dict(algo_kw=FEW | dict(logs=str(tmp_path))), "folder of a run of practice")):
        with pytest.raises(ValueError, match=says): practise(config(data, tmp_path/"run", **(dict(algo_kw=FEW | dict(logs=str(done.path))) | kw)), say=len)
    here = config(data, tmp_path/"x", dict(logs=str(done.path)))
    assert resolve_practice(here).algo_kw["logs"] == str(done.path)


@pytest.mark.parametrize("kw, says", [
    (dict(algo_kw=dict(demo_share=1.)), "no place for attempts"), (dict(algo_kw=dict(positive=1.5)), "positive"), (dict(algo_kw=dict(drop=-1)), "drop"),
    (dict(algo_kw=dict(guidance=-1)), "guidance"), (dict(algo_kw=dict(reads="token")), "reads must be one of"), (dict(algo_kw=dict(folds=0)), "folds"),
    (dict(algo_kw=dict(gate=-1.)), "gate"), (dict(lora_rank=2), "set it to 0"), (dict(model="lerobot-act-tiny"), "Take a model of tiny"),
    (dict(algo_kw=dict(guidance=2.), head="l1"), "set guidance to 1")])
def test_bad_settings_are_refused(data, tmp_path, kw, says):
    with pytest.raises(ValueError, match=says): practise(PracticeConfig(data_dir=str(data), run_dir=str(tmp_path/"run"), **(SMALL | dict(algo="recap", algo_kw={}) | kw)), say=len)
    assert not (tmp_path/"run/practice").exists()


@pytest.mark.parametrize("model, head", [("tiny", "l1"), ("qwenoft-tiny", "l1"), ("qwengr00t-tiny", "flow")])
def test_the_word_reaches_every_head(model, head):
    "Also heads that read rows, not one vector."
    vla = make_policy(model, image_size=32, H=4, head=head).eval()
    g = torch.Generator().manual_seed(0)
    obs = {IMAGE: torch.randint(0, 256, (3, 3, 32, 32), generator=g, dtype=torch.uint8), STATE: torch.randn(3, 4, generator=g), PROMPT: ["push"]*3}
    batch = vla.prepare(obs) | {ACTION: torch.randn(3, 4, 4, generator=g), PAD: torch.zeros(3, 4, dtype=torch.bool), INDICATOR: torch.tensor([1, 0, -1])}
    with torch.no_grad(): D = vla.encode(batch).pooled.shape[1]
    policy = RecapPolicy(model, vla.config, D, **sizes_of(vla)).eval()
    policy.take_frozen(vla)
    noise, time = vla.draw(3, g)
    loss = lambda p: p(batch, noise=noise, time=time, reduction="none")[0]
    assert torch.equal(loss(policy), loss(vla))
    torch.nn.init.normal_(policy.indicator.weight)
    assert [a == b for a, b in zip(loss(policy).tolist(), loss(vla).tolist())] == [False, False, True]
