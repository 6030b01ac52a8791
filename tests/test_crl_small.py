"The small sizes of the games: presets resolve for their streams, rewards are scaled, and a stream runs to a whole matrix with each method."
import numpy as np
import pytest

from clvla.crl.config import AgentConfig, resolve_agent
from clvla.crl.presets import preset_of

AGENTS = {"ppo": {}, "impala": {}, "clear": {}, "progress_compress": {}, "sane": {}}
METHODS = [*((algo, "none") for algo in AGENTS), ("impala", "ewc"), ("impala", "online_ewc")]


@pytest.mark.parametrize("suite, preset", [("atari_6", "small_games"), ("mini_atari_3", "small_games"), ("procgen_few_6", "small_games"), ("mw_state_10", "small_arm")])
def test_the_small_preset_resolves_for_its_streams(suite, preset, tmp_path):
    cfg = resolve_agent(AgentConfig(suite=suite, preset=preset, runner="batched", run_dir=str(tmp_path/"run")))
    assert cfg.algo_kw == preset_of(preset, "ppo") and cfg.image_size == dict(atari_6=84, mini_atari_3=84, procgen_few_6=64, mw_state_10=0)[suite]


def test_rewards_are_scaled_and_first_weights_are_orthogonal():
    "Twice the rewards at half the scale is the same update; the hidden layer's rows are orthogonal."
    import torch
    from clvla.core.batch import torch_rng
    from clvla.crl.all import make_agent
    from clvla.crl.engine import EngineLanes
    from clvla.crl.experiment import Spaces
    pytest.importorskip("envpool", reason="the extra envpool is not installed")
    from clvla.crl.experiment import make_experiment
    spec = make_experiment("mw_state_10").stream["Reach"].env

    def weights(factor, scale):
        agent, lanes = make_agent("ppo", n_envs=2, horizon=8, minibatch=8, hidden=16, reward_scale=scale, orthogonal=True), EngineLanes(spec, 2)
        agent.build(None, Spaces(0, 39, dict(Reach=4), box=True))
        W = agent.net.think[0].weight.detach()
        assert torch.allclose(W@W.T, 2*torch.eye(16), atol=1e-4)
        rollout = lanes.play(agent, 8, torch_rng(0, "draws"))
        agent.learn(rollout | dict(reward=factor*rollout["reward"]))
        lanes.close()
        return torch.cat([p.detach().flatten() for p in agent.net.parameters()])
    assert weights(1., 1.).equal(weights(2., .5)) and not weights(1., 1.).equal(weights(2., 1.))
    with pytest.raises(ValueError, match="reward_scale"): make_agent("ppo", reward_scale=0.)


@pytest.mark.parametrize("algo, cl", METHODS, ids=["-".join(m) for m in METHODS])
def test_each_method_ends_with_a_whole_matrix(tmp_path, algo, cl):
    from clvla.crl.learner import curves_of, learn_tasks
    pytest.importorskip("envpool", reason="the extra envpool is not installed")
    suite = dict(base="procgen_few_6", tasks=["ninja", "fruitbot"], env=dict(max_steps=20), eval_env=dict(max_steps=20))
    cfg = AgentConfig.of(suite=suite, algo=algo, cl=cl, preset="small_games", runner="batched", cycles=1, steps_per_task=64, eval_every=64, n_trials=1,
                         threads=1, run_dir=str(tmp_path/"run"), n_envs=4, horizon=8, channels=2)
    curves = curves_of(learn_tasks(cfg, say=len).path)
    assert list(curves.task_ids) == ["ninja", "fruitbot"] and curves.returns.shape == (2, 3) and np.isfinite(curves.returns).all()


# CORA's configs/ and policy_config.py, AGI-Labs/continual_rl at f2754bb: unroll, batch, rate, entropy weight, value weight
THEIRS = [("cora", "impala", 80, 8, 4.8e-4, 6e-4, .5), ("cora", "clear", 80, 8, 4.8e-4, 6e-4, .5), ("cora", "progress_compress", 20, 20, 6e-4, .01, .5),
          ("cora", "sane", 80, 8, 4.8e-4, 6e-4, .5), ("cora_ewc", "impala", 20, 20, 6e-4, .01, .5), ("cora_procgen", "sane", 32, 2, 4e-4, .01, 5.),
          *((preset, algo, 20, 32, 4e-4, .01, .5) for preset in ("cora_atari", "cora_procgen") for algo in ("impala", "clear", "progress_compress")),
          *(("cora_minihack", algo, 20, 32, 4e-4, .01, .5) for algo in ("impala", "clear"))]


@pytest.mark.parametrize("preset, algo, unroll, batch, lr, entropy, value", THEIRS, ids=["-".join(t[:2]) for t in THEIRS])
def test_presets_have_coras_numbers(preset, algo, unroll, batch, lr, entropy, value):
    kw = preset_of(preset, algo)
    assert (kw["horizon"], kw["n_envs"], kw["lr"], kw["entropy_weight"], kw["value_weight"], kw["gamma"]) == (unroll, batch, lr, entropy, value, .99)
    assert kw["grad_clip"]*unroll*batch == pytest.approx(40) and kw["clip_reward"]


def test_values_are_held_from_both_sides():
    "CLEAR's cloning term on values is their squared distance: too low costs what too high costs, and none costs nothing."
    import torch
    from clvla.crl.clear import cloning_loss
    logps = torch.log_softmax(torch.arange(12.).view(2, 3, 2), -1)
    def loss(v): return float(cloning_loss(dict(logps=logps, v=torch.zeros(2, 3)), dict(logps=logps, v=torch.full((2, 3), v)), 1., 2.)[0])
    assert loss(0.) == pytest.approx(0, abs=1e-6) and loss(.5) == pytest.approx(loss(-.5)) == pytest.approx(.5)
