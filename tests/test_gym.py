"Gymnasium environments, the rooms with four doors, and what every kind of environment has to keep."
import importlib.util

import numpy as np
import pytest
from clvla.core.names import ACTION, IMAGE, N_ACTIONS, STATE
from clvla.core.trials import TRIALS, trial_number, use_of
from clvla.data.demos import make_demos
from clvla.data.frames import FrameStore
from clvla.envs.all import kind_of, kinds, make_env, make_stream
from clvla.envs.pool import EnvPool

gym = pytest.mark.skipif(importlib.util.find_spec("minigrid") is None, reason="needs the extra gym")
SMALL = dict(metaworld="mw5", gym="minigrid_3", dot="dot_3")
HERE = [k for k in SMALL if all(importlib.util.find_spec(m) for m in kinds[k].modules)]


def task(kind, **env): return make_stream(dict(base=SMALL[kind], env=env) if env else SMALL[kind]).tasks[0]


def chunk(env, seed, n=4):
    rng = np.random.default_rng(seed)
    if env.n_actions is None: return rng.uniform(-1, 1, (n, env.action_dim))
    return rng.integers(min(3, env.n_actions), size=(n, 1)).astype("f4")   # of MiniGrid's, those that end no episode


def same(a, b): return list(a) == list(b) and all(np.array_equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("kind", HERE)
def test_every_kind_keeps_the_contract_of_an_environment(kind):
    played, fresh = (make_env(task(kind).env, image_size=32, seed=3) for _ in range(2))
    for trial in (0, 5):
        played.reset(trial); played.step_chunk(chunk(played, trial))
    a, b = played.reset(7), fresh.reset(7)
    assert same(a, b) and a[IMAGE].shape == (32, 32, 3) and a[IMAGE].dtype == np.uint8 and a[IMAGE].std() > 0
    assert a[STATE].shape == (played.state_dim,) and a[STATE].dtype == np.float32
    assert not same(a, fresh.reset(8)) and (N_ACTIONS in a) == (played.n_actions is not None)
    acts = chunk(played, 1)
    played.reset(7); fresh.reset(7)
    obs, rewards, success, terminated, truncated, n = played.step_chunk(acts, watch=(2, n_last := 4))
    steps = [fresh.step(x) for x in acts[:n]]
    assert rewards.tolist() == [s[0] for s in steps] and (terminated, truncated) == steps[-1][2:] and n == 4
    assert same(obs, fresh.obs()) and same(played.watched[n_last], obs) and sorted(played.watched) == [2, 4]
    fresh.reset(7); assert same(fresh.step_chunk(acts[:2])[0], {k: v for k, v in played.watched[2].items()})
    with pytest.raises(ValueError, match="did you mean 'max_steps'"): make_env(task(kind).env | dict(max_stepz=3))
    for env in (played, fresh): env.close()


@pytest.mark.parametrize("kind", HERE)
def test_every_kind_plays_in_a_pool_and_has_an_expert(kind):
    t = task(kind)
    env = make_env({**t.env, "task_id": t.id, "prompt": t.prompt}, image_size=32)
    env.reset(trial_number("demos", 1))
    while not env.ended: *_, success, terminated, truncated, _ = env.step_chunk([env.expert()])
    assert success and terminated and not truncated and env.prompt == t.prompt
    acts = chunk(env, 2).astype("f4")   # as the pool hands them on
    env.reset(0); want = env.step_chunk(acts, watch=(1,)); inside = env.watched[1]; env.close()
    with EnvPool([t.env], 1, image_size=32, H=4) as pool:
        pool.reset(0, 0); pool.wait(); pool.step(0, acts, watch=(1,)); r = pool.wait()[0]
        assert same(r.obs, want[0]) and r.rewards.tolist() == want[1].tolist() and (r.success, r.terminated, r.truncated) == want[2:5]
        assert all(np.array_equal(v, inside[k]) for k, v in r.watched[1].items())


@gym
def test_demonstrations_of_discrete_actions_are_stored_with_their_number(tmp_path):
    t = task("gym"); store = make_demos(t, make_env, tmp_path/t.id, n_demos=3, seed=0, **kind_of(t).recipe)
    assert store.n_actions == 7 and store.action.dtype == np.float32 and store.action.shape[1] == 1 and set(store.action.ravel()) <= {0., 1., 2., 6.}
    batch = store.gather([0, len(store)-1], H=2)
    assert batch[N_ACTIONS].tolist() == [7, 7] and batch[ACTION].shape == (2, 2, 1) and batch[ACTION][1, 0, 0] == 6
    again = make_demos(t, make_env, tmp_path/t.id, n_demos=3, seed=0, **kind_of(t).recipe)
    assert again.n_actions == 7 and FrameStore.open(tmp_path/t.id/"frames").sizes == {"front": 48}
    env = make_env(t.env); start = env.reset(trial_number("demos", 0)); env.close()
    assert np.array_equal(start[IMAGE], store.images[IMAGE][0])


def test_noise_of_discrete_demonstrations_is_another_action_and_the_expert_s_is_stored(tmp_path):
    t = make_stream(dict(base="dot_2", env=dict(discrete=True))).tasks[0]
    calm = make_demos(t, make_env, tmp_path/"calm", 4, 0, 16, noise=0., tail=0, fps=10)
    wild = make_demos(t, make_env, tmp_path/"wild", 4, 0, 16, noise=.5, tail=0, fps=10)
    assert len(wild) > len(calm) and set(calm.action.ravel()) <= set(range(5)) and calm.n_actions == 5
    env = make_env(t.env, image_size=16)
    for x, a in zip(wild.state, wild.action): env.reset(0); env.x = x; assert env.expert()[0] == a[0]


@gym
def test_pictures_of_the_three_tasks_begin_alike():
    envs = [make_env(t.env) for t in make_stream("minigrid_3").tasks]
    for seed in range(10):
        frames = []
        for e in envs: e._begin(seed); frames.append(e.render())
        assert all(np.array_equal(f, frames[0]) for f in frames)
    assert len({e.sim.unwrapped.mission for e in envs}) == 3
    for e in envs: e.close()


@gym
def test_wrong_gym_specs_are_refused():
    spec = task("gym").env
    for more, says in ((dict(name="MiniGrid-Nothing-v0"), "gymnasium cannot make"), (dict(success="done"), "unknown success rule"),
                       (dict(make=dict(color="pink")), "there is no 'pink' door"), (dict(make=[]), "expected dict")):
        with pytest.raises(ValueError, match=says): make_env(spec | more)
    env = make_env({k: v for k, v in spec.items() if k != "expert"}); env.reset(0)
    with pytest.raises(ValueError, match="has no expert"): env.expert()
    for bad in ([7.], [-1.], [1.5], [1., 2.]):
        with pytest.raises(ValueError, match="a whole number in 0..6"): env.step(bad)
    env.close()


def test_a_limit_of_the_simulator_itself_is_a_truncation():
    class Cut(type(make_env({"kind": "dot", "name": "left"}))):
        def _act(self, action): self.cut = self.t == 2; return 0., False, False
    env = Cut({"kind": "dot", "name": "left", "max_steps": 9}); env.reset(0)
    *_, success, terminated, truncated, n = env.step_chunk(np.zeros((8, 2)))
    assert (success, terminated, truncated, n) == (False, False, True, 3)
    env.reset(0); assert not env.cut


def test_trials_of_different_uses_never_meet():
    ranges = sorted(TRIALS.values())
    assert all(a[1] <= b[0] for a, b in zip(ranges, ranges[1:])) and ranges[0][0] == 0 and TRIALS["demos"][0] == 100_000
    for use in TRIALS: assert use_of(trial_number(use, 7)) == (use, 7)
    for bad in (-1, ranges[-1][1]):
        with pytest.raises(ValueError, match="belongs to no use"): use_of(bad)


@pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="needs the extra gym")
def test_actions_of_whole_numbers_reach_the_ends_of_their_box():
    from gymnasium.spaces import Box
    from clvla.envs.gym.env import action_space
    at = lambda box: [action_space(box)[2](np.array([a], np.float32)).tolist()[0] for a in (-1, -.9, 0, .9, 1)]
    assert at(Box(100, 255, (1,), np.uint8)) == [100, 108, 178, 247, 255] and at(Box(-100, 100, (1,), np.int8)) == [-100, -90, 0, 90, 100]
    assert at(Box(-1, 1, (1,), np.int64)) == [-1, -1, 0, 1, 1]   # rounded, not cut off
