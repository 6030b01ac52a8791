"Noise actor, PPO and GRPO over draws and through a flow head: the base stays and begins unchanged, a crash changes nothing, probabilities are those of the choices that were played."
import math
from dataclasses import replace

import pytest
import torch

from test_practice import SMALL, Crash, crash_after
from clvla.policies.all import load_policy
from clvla.rl.all import methods
from clvla.rl.choice import ChoiceActor, ChoicePPO, choose, kl_to_uniform
from clvla.rl.config import PracticeConfig, base_config, resolve_practice
from clvla.rl.learner import practise
from clvla.rl.noise_actor import DSRL, DrawScore, NoiseActor, NoiseLearner, kl_to_prior
from clvla.rl.ppo import PPO
from clvla.rl.actor import Value
from clvla.run.checkpoint import checkpoints
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint
from clvla.train.checkpoint_eval import eval_cl
from clvla.train.eval_config import EvalConfig

SOME = SMALL | dict(steps_per_task=40)   # a base that succeeds now and then
FEW = {"dsrl": dict(updates=4, sample=8, capacity=1000, noises=4, reads="context"),
       "distilled": dict(updates=4, sample=8, capacity=1000, N=4, reads="context", actor_every=2), "choice_ppo": dict(minibatch=8, N=4),
       "choice_grpo": dict(minibatch=8, N=4, group_size=3, reads="context"), "flow_ppo": dict(minibatch=8, epochs=2),
       "flow_grpo": dict(minibatch=8, epochs=2, group_size=3)}


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


def config(data, path, algo, **kw):
    return resolve_practice(PracticeConfig(data_dir=str(data), run_dir=str(path), **(SOME | dict(algo=algo, algo_kw=FEW[algo]) | kw)))


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    "Success and steps of the base by itself, start by start."
    run = practise(replace(config(data, tmp_path_factory.mktemp("alone")/"run", "dsrl"), algo="cloning", algo_kw=dict(updates=1)), say=len)
    return facts(run, -1)


def facts(run, stage): return {(e["task"], e["trial"]): (e["success"], e["steps"]) for e in run.episodes() if e["stage"] == stage}


@pytest.mark.parametrize("algo", FEW)
def test_the_base_stays_and_a_crash_changes_nothing(data, tmp_path, alone, algo):
    run = practise(config(data, tmp_path/"run", algo, save_every=1), say=len)
    assert facts(run, -1) == alone
    base = load_policy(checkpoints(RunFolder(base_config(run.cfg).run_dir).path/"checkpoints", ends=True)[-1]).state_dict()
    policy = load_policy(checkpoints(run.path/"checkpoints", ends=True)[-1])
    assert all(torch.equal(policy.vla.state_dict()[k], v) for k, v in base.items())
    if "flow" not in algo: assert max(p.abs().max() for p in policy.actor.net[-1].parameters()) > 0   # it was zero
    for n in (1, 6 if algo in ("dsrl", "distilled") else 2):
        with pytest.MonkeyPatch.context() as m:
            crash_after(m, n, algo=algo)
            with pytest.raises(Crash): practise(config(data, tmp_path/f"crash{n}", algo, save_every=1), say=len)
        assert fingerprint(practise(config(data, tmp_path/f"crash{n}", algo, save_every=1), say=len).path) == fingerprint(run.path)
    out = eval_cl(EvalConfig(run_dir=str(run.path), n_trials=2, n_workers=1), say=len)
    assert facts(out, 0) == facts(run, 0)


@pytest.mark.parametrize("algo, kw, says", [
    ("dsrl", dict(head="l1"), "dsrl needs draws, and head 'l1'"), ("dsrl", dict(algo_kw=dict(noises=1)), "noises must be"),
    ("dsrl", dict(algo_kw=dict(alpha=-1.)), "alpha must be"), ("dsrl", dict(algo_kw=dict(reads="token")), "learns no token"),
    ("dsrl", dict(algo_kw=dict(reads="al")), "reads must be one of"), ("dsrl", dict(lora_rank=2), "lora_rank"),
    ("distilled", dict(head="l1"), "distilled needs draws, and head 'l1'"), ("distilled", dict(algo_kw=dict(N=1)), "N must be"),
    ("distilled", dict(algo_kw=dict(actor_every=0)), "actor_every must be"), ("distilled", dict(algo_kw=dict(reads="token")), "learns no token"),
    ("choice_ppo", dict(head="l1"), "choice_ppo needs draws, and head 'l1'"), ("choice_ppo", dict(algo_kw=dict(N=1)), "N must be"),
    ("choice_ppo", dict(algo_kw=dict(group_size=3)), "group_size"), ("choice_grpo", dict(algo_kw=dict(group_size=4)), "multiple of group_size 4"),
    ("choice_grpo", dict(algo_kw=dict(kl_weight=-1.)), "kl_weight"), ("choice_grpo", dict(model="lerobot-act-tiny"), "Take a model of tiny")])
def test_bad_settings_are_refused(data, tmp_path, algo, kw, says):
    with pytest.raises(ValueError, match=says): practise(PracticeConfig(data_dir=str(data), run_dir=str(tmp_path/"run"), **(SMALL | dict(algo=algo, algo_kw={}) | kw)), say=len)
    assert not (tmp_path/"run/practice").exists()


def test_choices_are_those_that_were_played(data, tmp_path, monkeypatch):
    "Equal shares in the first round, which plays first draws; other draws and the actor's own probabilities in the second one."
    seen, real = [], ChoicePPO.take

    def take(self, attempts):
        seen.append([self.played(a) for a in attempts])
        for a, p in zip(attempts, seen[-1]):
            chunks = self.ctx.processor.unnormalise(p["ref"][torch.arange(len(p["x"])), p["action"]].flatten(0, 1))[:a["episode"].n_steps]
            assert (chunks-torch.from_numpy(a["episode"].action)).abs().max() < 1e-3
        real(self, attempts)
    monkeypatch.setattr(ChoicePPO, "take", take)
    practise(config(data, tmp_path/"run", "choice_ppo", algo_kw=FEW["choice_ppo"] | dict(actor_lr=3e-2, kl_stop=10.)), say=len)
    first, second = ({k: torch.cat([p[k] for p in of]) for k in ("action", "logp_old", "x")} for of in seen)
    assert (first["action"] == 0).all() and torch.allclose(first["logp_old"], torch.full_like(first["logp_old"], -math.log(4)))
    assert (second["action"] > 0).any() and second["logp_old"].std() > 1e-3
    assert abs(first["x"].mean()) < .05 and first["x"].abs().max() < 50   # standardised


def test_the_noise_that_was_played_is_stored(data, tmp_path, monkeypatch):
    "Plans are what was executed, also after the actor has moved; an actor that was changed in between is noticed."
    gaps, real = [], DSRL.take

    def take(self, attempts):
        for a in attempts:
            action = self.ctx.processor.unnormalise(a["plans"].flatten(0, 1))[:a["episode"].n_steps]
            gaps.append((action-torch.from_numpy(a["episode"].action)).abs().max().item())
        real(self, attempts)
        if len(gaps) > 6:
            torch.nn.init.normal_(self.policy.actor.net[-1].bias)
            with pytest.raises(ValueError, match="differs from all draws"): self.states(attempts[0]["episode"])
    monkeypatch.setattr(DSRL, "take", take)
    practise(config(data, tmp_path/"run", "dsrl"), say=len)
    assert len(gaps) == 12 and max(gaps) < 1e-3


def test_divergences():
    g = torch.Generator().manual_seed(0)
    mean, std = torch.randn(4, 3, 2, generator=g), torch.rand(4, 3, 2, generator=g)+.5
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(mean, std), normal(0., 1.)).sum((1, 2))
    assert torch.allclose(kl_to_prior(mean, std), expected, atol=1e-5)
    logp = torch.randn(5, 7, generator=g).log_softmax(1)
    expected = torch.distributions.kl_divergence(torch.distributions.Categorical(logits=logp), torch.distributions.Categorical(torch.ones(5, 7)))
    assert torch.allclose(kl_to_uniform(logp), expected, atol=1e-5) and abs(kl_to_uniform(torch.full((1, 7), -math.log(7)))) < 1e-6


def test_coins_at_the_ends():
    logp = torch.tensor([[.25, .25, .5]]*4).log()
    assert choose(logp, torch.tensor([0., .24, .26, 1.])).tolist() == [0, 0, 1, 2]


def test_a_critic_of_noises_ignores_what_a_state_adds():
    "The same differences in states of very different value teach the same."
    def taught(offset):
        torch.manual_seed(0)
        learner, g = NoiseLearner(NoiseActor(2, 1, 2, 16), DrawScore(2, 1, 2, 16), 1e-2), torch.Generator().manual_seed(0)
        for _ in range(30):
            x, w = torch.randn(32, 2, generator=g), torch.randn(32, 4, 1, 2, generator=g)
            numbers = learner.distil(x, w, w[..., 0, 0]+offset*x[:, :1])
        return numbers["noise_loss"].item()
    assert taught(0) < .5 and taught(0) == pytest.approx(taught(5.), rel=.05)


def test_ppo_of_choices_takes_ratios_from_stored_probabilities():
    "A first update begins at ratio 1; probabilities of another actor are refused."
    torch.manual_seed(0)
    actor = ChoiceActor(3, 2, 1, hidden=16, zero=True)
    x, draws = torch.randn(40, 3), torch.randn(40, 5, 2, 1)
    rollout = dict(x=x, ref=draws, action=torch.arange(40)%5, logp_old=torch.full((40,), -math.log(5)), reward=(torch.arange(40)%2).float(),
                   mask=torch.zeros(40), next_x=x, done=torch.ones(40, dtype=torch.bool))
    info = PPO(actor, Value(3, 16), epochs=1, minibatch=40).update(rollout)
    assert info["ratio"] == pytest.approx(1, abs=1e-5) and info["drift"] < 1e-5
    with pytest.raises(ValueError, match="logp_old differs"): PPO(actor, Value(3, 16)).update(rollout | dict(logp_old=rollout["logp_old"]-1))
