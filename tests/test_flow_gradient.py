"Policy gradients through a flow head: chains are those that were played, exact ratios, another head is noticed. Base and crashes: test_draws.py."
import pytest
import torch

from test_draws import config, data  # noqa: F401  (`data`: a fixture)
from test_practice import SMALL
from clvla.rl.all import methods
from clvla.rl.config import PracticeConfig
from clvla.rl.flow_gradient import FlowPPO
from clvla.rl.learner import practise


def test_chains_are_those_that_were_played(data, tmp_path, monkeypatch):
    "The chunks at the chains' ends were executed, in both rounds; the ratio is 1; the head moved in between, the base did not."
    gaps, ratios, heads, refs, real = [], [], [], [], FlowPPO.take

    def take(self, attempts):
        for a in attempts:
            action = self.ctx.processor.unnormalise(a["chain"][:, -1].flatten(0, 1))[:a["episode"].n_steps]
            gaps.append((action-torch.from_numpy(a["episode"].action)).abs().max().item())
        real(self, attempts)
        r, actor = self.rollout, self.policy.actor
        with torch.no_grad():
            ratios.append((actor.log_prob(r["x"], r["ref"], r["action"])-r["logp_old"]).abs().max().item())
            refs.append((actor.means(r["x"], r["action"][:, :-1])-r["ref"]).abs().max().item())
        heads.append(torch.cat([p.detach().flatten().clone() for p in actor.parameters()]))
    monkeypatch.setattr(FlowPPO, "take", take)
    practise(config(data, tmp_path/"run", "flow_ppo", algo_kw=dict(minibatch=8, actor_lr=1e-3, kl_stop=1e9)), say=len)
    assert max(gaps) < 1e-3 and max(ratios) < 1e-3
    assert refs[0] < 1e-5 < refs[1] and not torch.equal(*heads)


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
