"Settings of agents at the edges of what they may be: refused at the door, or an update with finite weights."
import numpy as np
import pytest
import torch

pytest.importorskip("envpool", reason="the extra envpool is not installed")
SMALL = dict(n_envs=2, horizon=8, hidden=8)
EDGES = dict(
    ppo=[dict(gamma=0.), dict(gamma=1.), dict(gamma=0), dict(lam=0.), dict(lam=1.), dict(gamma=0., lam=0.), dict(gamma=1., lam=1.), dict(clip=0.),
         dict(clip=1e-9), dict(clip=1e9), dict(value_weight=0.), dict(entropy_weight=0.), dict(epochs=1), dict(minibatch=1), dict(minibatch=10**6),
         dict(n_envs=1, horizon=1), dict(kl_stop=0.), dict(kl_stop=1e-12), dict(lr=0.), dict(grad_clip=0.), dict(reward_scale=0.), dict(gamma=-.1),
         dict(gamma=1.1), dict(gamma=float("nan")), dict(lam=float("nan")), dict(lr=float("inf")), dict(gamma=True), dict(gamma="0"), dict(gamma=None)],
    impala=[dict(gamma=0.), dict(gamma=1.), dict(gamma=0.,correct=False), dict(value_weight=0.), dict(entropy_weight=0.), dict(epochs=1), dict(lag=0),
            dict(lag=3), dict(n_envs=1, horizon=1), dict(grad_clip=0.), dict(lr=0.), dict(gamma=float("nan")), dict(gamma=2)],
    clear=[dict(gamma=0.), dict(gamma=1.), dict(replay=0.), dict(replay=.5), dict(replay=5.), dict(policy_cloning=0., value_cloning=0.), dict(frames=8),
           dict(frames=7), dict(frames=0), dict(frames=16), dict(frames=1.5), dict(n_envs=1, horizon=1, frames=1), dict(replay=float("nan"))],
    progress_compress=[dict(gamma=0.), dict(gamma=1.), dict(progress=0.), dict(progress=1.), dict(progress=.5), dict(lateral=0.), dict(ewc_lam=0.),
                       dict(ewc_decay=0.), dict(ewc_decay=1.)],
    sane=[dict(gamma=0.), dict(gamma=1.), dict(max_nodes=1), dict(hold=1), dict(mergeable=0.), dict(mergeable=1.), dict(rise=0.), dict(fall=0.),
          dict(frames=8), dict(frames=7), dict(replay=0.)])


@pytest.fixture(scope="module")
def room():
    from clvla.crl.experiment import make_experiment
    return make_experiment(dict(base="minigrid_engine_3", tasks=["empty"]))


def tensors(state):
    "Numbers of a nested state."
    if torch.is_tensor(state): return [state] if state.is_floating_point() else []
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [x for part in parts for x in tensors(part)]


@pytest.mark.parametrize("algo, kw", [(a, kw) for a, kws in EDGES.items() for kw in kws], ids=str)
def test_an_edge_is_refused_at_the_door_or_learnt_with(algo, kw, room, tmp_path):
    from clvla.core.batch import torch_rng
    from clvla.crl.all import make_agent
    from clvla.crl.engine import EngineLanes
    from clvla.crl.experiment import Spaces
    spaces = Spaces(0, 151, dict(empty=7))
    try:
        agent = make_agent(algo, 0, **(SMALL | kw))
        agent.check(room, spaces)
    except ValueError as e:
        assert next(iter(kw)).split("_")[0] in str(e) or any(k in str(e) for k in kw), e
        return
    agent.home = tmp_path/"replay"
    agent.build(room, spaces)
    lanes, stage, draws = EngineLanes(room.stream["empty"].env, agent.n_envs), room.stages[0], torch_rng(0, "draws")
    agent.on_cycle_start(0)
    agent.on_task_start(stage)
    for _ in range(4):
        numbers = agent.learn(lanes.play(agent, agent.horizon, draws))
        assert all(np.isfinite(float(v)) for v in numbers.values()), numbers
    assert all(torch.isfinite(x).all() for x in tensors(agent.state_dict()))
    lanes.close()


def test_a_missing_evaluation_is_missing_only_while_its_window_holds_it():
    "A plain loop: the mean of the last evaluations, NaN where one of them was not measured; behind the window all is as if it had been."
    from clvla.crl.curves import Curves, smooth
    x = np.random.default_rng(0).random((2, 3, 12))
    x[1, 2, 4] = np.nan
    c = Curves(("a", "b", "c"), 1, np.arange(12), x, np.array([3, 7, 11]))
    for window in (1, 3, 20):
        wanted = np.stack([x[..., max(0, e+1-window):e+1].mean(-1) for e in range(12)], -1)
        np.testing.assert_allclose(smooth(c, window).returns, wanted, atol=1e-12)
        assert np.isnan(wanted).sum() == min(window, 8)


def test_a_discount_of_zero_learns_the_next_reward_alone():
    "The targets of a rollout are its rewards, whatever the values are, for both kinds of agents."
    from clvla.crl.agent import ends_of
    from clvla.train.on_policy import check_ends, gae
    from clvla.crl.vtrace import vtrace
    rng = torch.Generator().manual_seed(0)
    reward, v, next_v, logp = torch.rand(4, 6, 2, generator=rng)
    over = torch.rand(6, 2, generator=rng) < .3
    mask, done = ends_of(dict(terminated=over, truncated=torch.zeros_like(over)), 0.)
    target, _ = vtrace(logp, logp, reward, mask, v, next_v, done)
    assert torch.allclose(target, reward)
    check_ends(mask[:, 0], done[:, 0])
    assert torch.allclose(gae(reward[:, 0], mask[:, 0], v[:, 0], next_v[:, 0], done[:, 0], .95), reward[:, 0]-v[:, 0])
    mask, done = ends_of(dict(terminated=over, truncated=torch.zeros_like(over)), .9)
    with pytest.raises(ValueError, match="done says that it goes on"): check_ends(mask[:, 0], torch.zeros_like(done[:, 0]))
