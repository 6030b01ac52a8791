"Policy gradients through a flow head: chains are those that were played, exact ratios, another head is noticed. Base and crashes: test_draws.py. And through trunk or adapters."
import os
import signal

import pytest
import torch

from test_draws import FEW, alone, config, data, facts  # noqa: F401  (`alone`, `data`: fixtures)
from test_practice import SMALL, Crash, crash_after
from clvla.cl.base import CLAlgorithm
from clvla.core.files import read_json, sha256
from clvla.policies.all import load_policy
from clvla.rl.all import methods
from clvla.rl.config import PracticeConfig, base_config
from clvla.rl.flow_gradient import FlowPPO
from clvla.rl.learner import practise
from clvla.run.checkpoint import checkpoints
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint
from clvla.run.stop import Stopped
from clvla.train.checkpoint_eval import eval_cl
from clvla.train.eval_config import EvalConfig


@pytest.mark.parametrize("trains", ["head", "all"])
def test_chains_are_those_that_were_played(data, tmp_path, monkeypatch, trains):  # noqa: F811
    "The chunks at the chains' ends were executed, in both rounds; the ratio is 1; the head moved in between, the base did not."
    gaps, ratios, heads, refs, real = [], [], [], [], FlowPPO.take

    def take(self, attempts):
        for a in attempts:
            action = self.ctx.processor.unnormalise(a["chain"][:, -1].flatten(0, 1))[:a["episode"].n_steps]
            gaps.append((action-torch.from_numpy(a["episode"].action)).abs().max().item())
        real(self, attempts)
        r, actor = self.rollout, self.actor
        with torch.no_grad():
            ratios.append((actor.log_prob(r["x"], r["ref"], r["action"])-r["logp_old"]).abs().max().item())
            refs.append((actor.means(r["x"], r["action"][:, :-1])-r["ref"]).abs().max().item())
        heads.append(torch.cat([p.detach().flatten().clone() for p in actor.parameters()]))
    monkeypatch.setattr(FlowPPO, "take", take)
    practise(config(data, tmp_path/"run", "flow_ppo", algo_kw=dict(minibatch=8, actor_lr=1e-3, kl_stop=1e9, trains=trains)), say=len)
    assert max(gaps) < 1e-3 and max(ratios) < 1e-3
    assert refs[0] < 1e-5 < refs[1] and not torch.equal(*heads)


@pytest.mark.parametrize("lr, told", [(.1, True), (1e-4, False)])
def test_a_step_far_beyond_kl_stop_is_told(data, tmp_path, lr, told):  # noqa: F811
    said = []
    practise(config(data, tmp_path/"run", "flow_ppo", evaluate="none", algo_kw=FEW["flow_ppo"] | dict(actor_lr=lr)), say=said.append)
    assert any(line.startswith(f"a step at learning rate {lr:g} moved the actor by a divergence of") for line in said) == told


def test_another_head_than_the_one_that_played_is_noticed(data, tmp_path, monkeypatch):
    real = FlowPPO.begin

    def begin(self):
        with torch.no_grad(): self.policy.actor.head.net[-1].bias.add_(1.)
        real(self)
    monkeypatch.setattr(FlowPPO, "begin", begin)
    with pytest.raises(ValueError, match="differs from all draws"): practise(config(data, tmp_path/"run", "flow_ppo"), say=len)


@pytest.mark.parametrize("algo, kw, says", [
    ("flow_ppo", dict(head="l1"), "flow_ppo needs draws, and head 'l1'"), ("flow_ppo", dict(algo_kw=dict(std=0)), "std must be"),
    ("flow_ppo", dict(algo_kw=dict(group_size=3)), "group_size"), ("flow_grpo", dict(algo_kw=dict(group_size=4)), "multiple of group_size 4"),
    ("flow_grpo", dict(algo_kw=dict(kl_weight=-1.)), "kl_weight"), ("flow_grpo", dict(algo_kw=dict(lam=.9, group_size=3)), "compares attempts|no setting 'lam'"),
    ("flow_ppo", dict(algo_kw=dict(trains="trunk")), "'lora', 'head'"), ("flow_ppo", dict(algo_kw=dict(trunk_lr=0)), "trunk_lr must be"),
    ("flow_ppo", dict(algo_kw=dict(trains="lora", rank=4096)), "larger than every layer"),
    ("flow_grpo", dict(algo_kw=dict(trains="all", group_size=3), lora_rank=2), "trains to 'lora' for new ones"),
    ("flow_ppo", dict(lora_rank=2), "lora_rank"), ("flow_ppo", dict(overlap=True), "present weights")])
def test_bad_settings_are_refused(data, tmp_path, algo, kw, says):
    with pytest.raises(ValueError, match=says): practise(PracticeConfig(data_dir=str(data), run_dir=str(tmp_path/"run"), **(SMALL | dict(algo=algo, algo_kw={}) | kw)), say=len)
    assert not (tmp_path/"run/practice").exists()


def test_the_control_deals_advantages_out(data, tmp_path, monkeypatch):
    "The same advantages, in another order, the same order again in a second try."
    from clvla.rl.ppo import PPO
    method = methods["flow_ppo"](shuffled=True)
    assert method.shuffled
    from clvla.rl.flow_gradient import FlowPPOLoss
    rows = dict(adv=torch.arange(20.), logp_old=torch.zeros(20))
    monkeypatch.setattr(PPO, "prepare", lambda self, rollout: (dict(rows), {}))
    net = torch.nn.Linear(1, 1)
    def dealt(deals):
        loss = FlowPPOLoss(net, torch.nn.Linear(1, 1), seed=3)
        loss.deals = deals
        return loss.prepare({})[0]["adv"]
    assert torch.equal(dealt(False), rows["adv"]) and torch.equal(dealt(True), dealt(True))
    assert not torch.equal(dealt(True), rows["adv"]) and torch.equal(dealt(True).sort()[0], rows["adv"])


def deep(data, path, algo, trains, **kw):
    return config(data, path, algo, **(dict(save_every=1, algo_kw=FEW[algo] | dict(trains=trains, rank=4)) | kw))


def base_of(run): return load_policy(checkpoints(RunFolder(base_config(run.cfg).run_dir).path/"checkpoints", ends=True)[-1])
def ended(run): return checkpoints(run.path/"checkpoints", ends=True)[-1]
def weights(run): return [sha256(p) for p in sorted(run.path.glob("checkpoints/*/weights.safetensors"))]
def power_cut(): raise Crash
def stop(): os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("algo, trains, happens, error", [("flow_ppo", "all", stop, Stopped), ("flow_grpo", "lora", power_cut, Crash)])
def test_the_trunk_learns_and_a_run_that_was_ended_goes_on(data, tmp_path, alone, algo, trains, happens, error):  # noqa: F811
    "The base is evaluated as it is; its frozen part is stored once; the checkpoint is one of the base's kind."
    run = practise(deep(data, tmp_path/"run", algo, trains), say=len)
    assert facts(run, -1) == alone
    before, policy = base_of(run).state_dict(), load_policy(ended(run))
    after = policy.state_dict()
    moved = {k for k, v in before.items() if not torch.equal(v, after[k if k in after else k.replace(".weight", ".base_layer.weight").replace(".bias", ".base_layer.bias")])}
    assert any(k.startswith("head.") for k in moved)
    if trains == "all": assert any(k.startswith("eyes.") for k in moved) and any(k.startswith("blocks.") for k in moved)
    else:
        assert all(k.startswith("head.") for k in moved) and any(".lora_B" in k and v.abs().max() > 0 for k, v in after.items())
        assert "base" in read_json(ended(run)/"policy.json")["lora"]
    assert read_json(ended(run)/"policy.json")["policy"] == "tiny"
    for n in (1, 2):
        with pytest.MonkeyPatch.context() as m:
            crash_after(m, n, happens, algo)
            with pytest.raises(error): practise(deep(data, tmp_path/f"end{n}", algo, trains), say=len)
        assert fingerprint(practise(deep(data, tmp_path/f"end{n}", algo, trains), say=len).path) == fingerprint(run.path)
    assert facts(eval_cl(EvalConfig(run_dir=str(run.path), n_trials=2, n_workers=1), say=len), 0) == facts(run, 0)


def test_head_is_the_default_and_what_it_was(data, tmp_path):  # noqa: F811
    "The same weights and numbers, whatever `rank` and `trunk_lr` say."
    runs = [practise(config(data, tmp_path/name, "flow_ppo", evaluate="none", algo_kw=FEW["flow_ppo"] | kw), say=len)
            for name, kw in dict(plain={}, head=dict(trains="head", rank=3, trunk_lr=.5)).items()]
    assert weights(runs[0]) == weights(runs[1])
    assert [r | dict(time=0) for r in runs[0].logs()] == [r | dict(time=0) for r in runs[1].logs()]
    policy = load_policy(ended(runs[0]))
    assert all(torch.equal(v, policy.vla.state_dict()[k]) for k, v in base_of(runs[0]).state_dict().items())


class Noted(CLAlgorithm):
    "Notes what it may hold; keeps weights where they were, if it is stiff."
    def __init__(self, stiff): self.stiff, self.names, self.gap = stiff, set(), 0.
    def on_task_start(self, ctx): self.at = {n: p.detach().clone() for n, p in ctx.params().items()}
    def after_step(self, ctx):
        with torch.no_grad():
            for n, p in ctx.params().items():
                if self.stiff and ".trunk." in n: p.copy_(self.at[n])
                self.names |= {n} if not torch.equal(p, self.at[n]) else set()


@pytest.mark.parametrize("trains, stiff", [("all", False), ("all", True), ("lora", False)])
def test_an_algorithm_holds_the_trunk(data, tmp_path, monkeypatch, trains, stiff):  # noqa: F811
    made = []
    monkeypatch.setattr("clvla.rl.learner.make_cl", lambda cfg: made.append(Noted(stiff)) or made[-1])
    run = practise(deep(data, tmp_path/"run", "flow_ppo", trains, stream=True, cl="sequential", evaluate="none"), say=len)
    trunk = {n for n in made[0].names if ".trunk." in n}
    assert bool(trunk) == (not stiff) and any(".actor.head." in n for n in made[0].names)
    if trains == "lora": assert all(".lora_" in n for n in trunk)
    if stiff: assert all(torch.equal(v, load_policy(ended(run)).state_dict()[k]) for k, v in base_of(run).state_dict().items() if not k.startswith("head."))


def test_a_crash_under_ewc_changes_nothing(data, tmp_path):  # noqa: F811
    "Its moments and Fisher information are of the trunk, too; the last rows' pictures are read again."
    kw = dict(stream=True, cl="ewc", cl_kw=dict(n_batches=2), evaluate="none")
    run = practise(deep(data, tmp_path/"run", "flow_ppo", "all", **kw), say=len)
    assert any(r.get("rl/penalty", 0) > 0 for r in run.logs())
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, 3, algo="flow_ppo")
        with pytest.raises(Crash): practise(deep(data, tmp_path/"crash", "flow_ppo", "all", **kw), say=len)
    assert fingerprint(practise(deep(data, tmp_path/"crash", "flow_ppo", "all", **kw), say=len).path) == fingerprint(run.path)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_ratios_through_the_trunk_begin_at_one(data, tmp_path, monkeypatch, precision):  # noqa: F811
    "In both rounds; in float32 a trunk that moved between playing and learning is refused, before and after the chains were made."
    drifts, real = [], FlowPPO.update

    def update(self):
        numbers = real(self)
        drifts.append(numbers["rl/drift"])
        return numbers
    monkeypatch.setattr(FlowPPO, "update", update)
    practise(deep(data, tmp_path/"run", "flow_ppo", "all", precision=precision, evaluate="none"), say=len)
    assert len(drifts) == 2 and max(drifts) < (1e-3 if precision == "no" else .5), drifts
    if precision != "no": return

    def shifted(name, says):
        method = getattr(FlowPPO, name)

        def wrapped(self):
            with torch.no_grad(): self.policy.norm.bias.add_(.5)
            return method(self)
        with pytest.MonkeyPatch.context() as m:
            m.setattr(FlowPPO, name, wrapped)
            with pytest.raises(ValueError, match=says): practise(deep(data, tmp_path/name, "flow_ppo", "all", evaluate="none"), say=len)
    shifted("begin", "differs from all draws")
    shifted("update", "logp_old differs")


def test_the_learner_keeps_no_second_trunk(data, tmp_path):  # noqa: F811
    "Pictures and trunk are in no state: a checkpoint holds the policy once."
    run = practise(deep(data, tmp_path/"run", "flow_ppo", "all", evaluate="none"), say=len)
    from clvla.core.state import load_state
    state = load_state(ended(run)/"state.safetensors")["method"]
    assert set(state["learner"]["nets"]) == {"actor", "value"} and state["n_last"] == 6
    assert not any(v.dtype == torch.uint8 for v in state["rollout"].values()) and "at" not in state["rollout"]
