"The batched runner over worker processes: Gymnasium's environments equal those in this process, a lost worker changes nothing, runs come back."
import os
import signal
from functools import partial

import pytest

pytest.importorskip("gymnasium", reason="the extra gym is not installed")
GYM = dict(kind="gym", picture="none", state="obs")
ROOMS = {
    "CartPole": (GYM | dict(name="CartPole-v1", success="survived", max_steps=25), 8),
    "MountainCar": (GYM | dict(name="MountainCar-v0", max_steps=17), 8),
    "Pendulum": (GYM | dict(name="Pendulum-v1", max_steps=17), 8),
    "MiniGrid": (dict(kind="gym", name="minigrid:MiniGrid-Empty-Random-5x5-v0", state=["direction"], success="terminated_with_reward", max_steps=20), 16),
    "dot": (dict(kind="dot", name="left", discrete=True, max_steps=12), 8)}


def agent_of(lanes, n):
    from clvla.crl.agent import Random
    from clvla.crl.experiment import Spaces
    agent, obs = Random(n_envs=n), lanes.obs()
    agent.build(None, Spaces(obs["image"].shape[1], obs["state"].shape[1], dict(task=int(obs["n_actions"][0])), box=lanes.view.box))
    return agent


def equal(a, b):
    assert list(a) == list(b)
    for k in a:
        if k != "cut": assert a[k].dtype == b[k].dtype and a[k].equal(b[k]), k
        else: equal(a[k], b[k])


@pytest.mark.parametrize("room", ROOMS)
def test_lanes_in_workers_equal_the_same_lanes_in_this_process(room):
    "To the bit (these boxes' conversions round nothing): rollouts, finished episodes, state; and both come back to the very step. Evaluations equal the synchronous examiner's."
    import torch
    from clvla.core.batch import torch_rng
    from clvla.crl.engine import WorkerExaminer, Workers
    from clvla.crl.runner import Examiner, Lanes, Turns
    spec, size = ROOMS[room]
    there = Lanes(spec, 3, size, 1, (2,), [0, 1], partial(Workers, n_workers=2))
    here = Lanes(spec, 3, size, 1, (2,), [0, 1], Turns)
    agent, found = agent_of(here, 3), []
    for lanes in (there, here):
        draws = torch_rng(0, "draws")
        first = lanes.play(agent, 30, draws)
        kept, at = lanes.state_dict(), draws.get_state()
        rest = lanes.play(agent, 20, draws)
        lanes.load_state_dict(kept)
        equal(lanes.play(agent, 20, torch.Generator().set_state(at)), rest)
        found.append((first, rest, kept, lanes.take_finished()))
    equal(found[0][0], found[1][0]), equal(found[0][1], found[1][1])
    assert found[0][2:] == found[1][2:] and found[0][3]
    kept["seen"][1] += 1
    with pytest.raises(ValueError, match="came to another place"): there.load_state_dict(kept)
    there.close(), here.close()
    tasks = dict(one=(spec, ()), two=(spec | dict(max_steps=5), ()))
    examiners = [of(tasks, 18, size, 3) for of in (WorkerExaminer, Examiner)]
    agent = agent_of(Lanes(spec, 1, size), 1)
    assert examiners[0].play(agent) == examiners[1].play(agent) == examiners[0].play(agent)
    for examiner in examiners: examiner.close()


def test_a_box_reaches_workers_as_float32():
    "The same starts and actions; states differ by a rounding, and not at all where the simulator of this process is given float32."
    from clvla.core.batch import torch_rng
    from clvla.crl.engine import Workers
    from clvla.crl.runner import Lanes, Turns

    class Rounded(Turns):
        def step(self, actions, ids=None): return super().step(Listed(actions), ids)

    class Listed:
        def __init__(self, actions): self.actions = actions
        def tolist(self): return list(self.actions)
    spec, played = dict(kind="dot", name="left", max_steps=12), []
    for engine in (partial(Workers, n_workers=1), Rounded, Turns):
        lanes = Lanes(spec, 2, 8, engine=engine)
        played.append(lanes.play(agent_of(lanes, 2), 11, torch_rng(0, "draws")))
        lanes.close()
    there, rounded, here = played
    equal(there, rounded)
    assert there["action"].equal(here["action"]) and there["state"][0].equal(here["state"][0])
    assert 0 < (there["state"]-here["state"]).abs().max() < 1e-5


def test_a_lost_worker_plays_its_episodes_again_and_changes_nothing():
    from clvla.core.batch import torch_rng
    from clvla.core.processes import descendants
    from clvla.crl.engine import Workers
    from clvla.crl.runner import Lanes, Turns
    spec, size = ROOMS["CartPole"]
    before = set(descendants(os.getpid()))
    there, here = Lanes(spec, 4, size, engine=partial(Workers, n_workers=2)), Lanes(spec, 4, size, engine=Turns)
    agent, step, count = agent_of(here, 4), there.engine.step, [0]

    def dying(actions, ids=None):
        count[0] += 1
        if count[0] in (7, 8, 20): os.kill(sorted(set(descendants(os.getpid()))-before)[-1], signal.SIGKILL)
        return step(actions, ids)
    there.engine.step = dying
    equal(there.play(agent, 40, torch_rng(0, "draws")), here.play(agent, 40, torch_rng(0, "draws")))
    assert there.engine.pool.restarts == 3 and there.take_finished() == here.take_finished()
    there.engine.image[:] = 1   # what was seen is no longer what the simulator shows
    there.engine.vector[:] = 1
    count[0] = 6
    with pytest.raises(ValueError, match="when a worker was lost"): there.play(agent, 30, torch_rng(0, "draws"))
    there.close(), here.close()


def config(folder, **kw):
    from clvla.crl.config import AgentConfig
    suite = dict(base="dot_2", env=dict(discrete=True), name="dots")
    return AgentConfig.of(**dict(suite=suite, image_size=8, run_dir=str(folder/"run"), data_dir=str(folder/"data"), runner="batched", threads=1, cycles=1,
                                 steps_per_task=96, eval_every=48, n_trials=3, n_envs=4, horizon=8, save_every=1, hidden=8) | kw)


def test_a_run_over_workers_comes_back_and_begins_its_evaluations_where_every_runner_does(tmp_path):
    from clvla.crl.learner import learn_tasks
    from clvla.crl.ppo import PPO
    from clvla.run.resume import fingerprint
    whole = learn_tasks(config(tmp_path/"whole"), say=len)
    sync = learn_tasks(config(tmp_path/"sync", runner="sync"), say=len)
    first = lambda run: [{k: v for k, v in r.items() if k != "seconds"} for r in run.episodes() if r["stage"] == -1]
    assert first(whole) == first(sync) and len(first(whole)) == 6

    class PowerCut(BaseException): pass
    learn, count = PPO.learn, [0]

    def cut(self, rollout):
        count[0] += 1
        if count[0] == 5: raise PowerCut
        return learn(self, rollout)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(PPO, "learn", cut)
        with pytest.raises(PowerCut): learn_tasks(config(tmp_path/"cut"), say=len)
    lines = []
    assert fingerprint(learn_tasks(config(tmp_path/"cut"), say=lines.append).path) == fingerprint(whole.path)
    assert any("continued after" in line for line in lines)


def test_settings_of_workers_are_checked_at_the_door(tmp_path):
    from clvla.crl.actors import Parallel
    from clvla.crl.engine import Batched
    from clvla.crl.experiment import make_experiment
    from clvla.crl.learner import learn_tasks
    with pytest.raises(ValueError, match="n_workers"): learn_tasks(config(tmp_path, runner_kw=dict(n_workers=-1)), say=len)
    with pytest.raises(ValueError, match="use at most"): learn_tasks(config(tmp_path, runner_kw=dict(n_workers=10**6)), say=len)
    with pytest.raises(ValueError, match="take runner='sync'"): learn_tasks(config(tmp_path, runner_kw=dict(n_workers=0)), say=len)
    assert not (tmp_path/"run").exists()
    exp = make_experiment(dict(base="dot_2", env=dict(discrete=True)))
    with pytest.raises(ValueError, match="take runner='sync'"): Parallel(config(tmp_path), exp, engine=True).spaces()
    assert Batched(None, exp).versions() == dict(engine="workers: dot")
