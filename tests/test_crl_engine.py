"Every agent plays in the engine, from pictures and from numbers; killed runs come back."
import pytest

pytest.importorskip("envpool", reason="the extra envpool is not installed")
AGENTS = ["random", "ppo", "impala", "clear", "progress_compress", "sane"]


def config(folder, suite, **kw):
    from clvla.crl.config import AgentConfig
    return AgentConfig.of(**dict(suite=suite, run_dir=str(folder/"run"), data_dir=str(folder/"data"), runner="batched", threads=1, cycles=1,
                                 steps_per_task=64, eval_every=64, n_trials=1, n_envs=4, horizon=8) | kw)


@pytest.mark.parametrize("algo", AGENTS)
@pytest.mark.parametrize("suite", [dict(base="procgen_6", tasks=["starpilot"]), dict(base="minigrid_engine_3", tasks=["empty", "key"])], ids=["pictures", "numbers"])
def test_every_agent_plays_in_an_engine(tmp_path, suite, algo):
    from clvla.crl.learner import learn_tasks
    run = learn_tasks(config(tmp_path, suite, algo=algo), say=len)
    assert {r["task"] for r in run.episodes()} in ({"starpilot", "starpilot-test"}, {"empty", "key"})


def test_the_engine_is_stored_with_its_version(tmp_path):
    "Also where lanes or actors step it."
    from importlib.metadata import version
    from clvla.core.files import read_json
    from clvla.crl.all import make_runner
    from clvla.crl.experiment import make_experiment
    from clvla.crl.learner import learn_tasks
    suite, envpool = dict(base="minigrid_engine_3", tasks=["empty"], name="room"), f"envpool {version('envpool')}"
    run = learn_tasks(config(tmp_path, suite), say=len)
    stored = read_json(run.path/"versions.json")
    assert stored["engine"] == envpool and "assets" not in stored
    exp = make_experiment("minigrid_engine_3")
    for name, kw, says in (("sync", {}, f"lanes: {envpool}"), ("parallel", {}, f"lanes: {envpool}"), ("parallel", dict(engine=True), envpool)):
        assert make_runner(name, None, exp, **kw).versions() == dict(engine=says)


def test_atari_is_played(tmp_path):
    from clvla.crl.learner import learn_tasks
    suite = dict(base="atari_6", tasks=["SpaceInvaders"], env=dict(max_steps=30))
    run = learn_tasks(config(tmp_path, suite, channels=2, hidden=16), say=len)
    assert {r["steps"] <= 30 for r in run.episodes()} == {True}


def test_continuous_actions_are_learnt_and_resumed(tmp_path):
    "A run of a box that was loaded in the middle of a stage equals one without a break."
    import torch
    from clvla.core.batch import torch_rng
    from clvla.core.state import load_state, save_state
    from clvla.crl.engine import EngineLanes
    from clvla.crl.experiment import make_experiment
    from clvla.crl.all import make_agent
    from clvla.crl.experiment import Spaces
    spec = make_experiment("mw_state_10").stream["Reach"].env

    def play(broken):
        agent, lanes, draws = make_agent("ppo", n_envs=2, horizon=8, minibatch=8), EngineLanes(spec, 2), torch_rng(0, "draws")
        agent.build(None, Spaces(0, 39, dict(Reach=4), box=True))
        agent.learn(lanes.play(agent, 8, draws))
        if broken:
            state = load_state(save_state(tmp_path/"lanes.safetensors", lanes.state_dict()))
            lanes = EngineLanes(spec, 2)
            lanes.load_state_dict(state)
        agent.learn(lanes.play(agent, 8, draws))
        return torch.cat([p.detach().flatten() for p in agent.net.parameters()])
    assert play(True).equal(play(False))


def actors_config(folder, **kw):
    suite = dict(base="minigrid_engine_3", tasks=["empty"])
    return config(folder, suite, algo="impala", runner="parallel", n_envs=4, horizon=8, steps_per_task=320, eval_every=320,
                  runner_kw=dict(n_actors=2, engine=True), hidden=8, **kw)


def test_actors_play_in_engines_and_a_killed_one_comes_back(tmp_path, monkeypatch):
    "What two actors play equals the same lanes in this process; a SIGKILL of one changes nothing."
    import os, signal
    from dataclasses import asdict
    from clvla.core.batch import torch_rng
    from clvla.crl.actors import Parallel
    from clvla.crl.engine import EngineLanes
    from clvla.crl.impala import IMPALA
    from clvla.crl.learner import learn_tasks
    from clvla.run.resume import fingerprint
    first, learn, note = [], IMPALA.learn, Parallel.note

    def seen(self, rollout):
        if not first:
            spec = self.exp.stream["empty"].env
            for k in range(2):
                alone = EngineLanes(spec, 2, 0, (0, k), [1.]).play(self, 8, torch_rng(0, "actor", 0, k, 0))
                for name in ("state", "action", "logp", "reward", "terminated"):
                    assert rollout[name][:, 2*k:2*k+2].equal(alone[name]), name
        first.append(True)
        return learn(self, rollout)

    def build(self, exp, *more):
        self.exp = exp
        return made(self, exp, *more)
    made = IMPALA.build
    monkeypatch.setattr(IMPALA, "build", build)
    monkeypatch.setattr(IMPALA, "learn", seen)
    whole = learn_tasks(actors_config(tmp_path/"whole"), len)
    assert len(first) == 10 and whole.logs()[-1]["frames"] == 320

    def kill(self, chosen):
        note(self, chosen)
        if self.version == 4: os.kill(self.crew.members[1].child.proc.pid, signal.SIGKILL)
    monkeypatch.setattr(Parallel, "note", kill)
    killed = learn_tasks(actors_config(tmp_path/"killed"), len)
    assert killed.logs()[-1]["restarts"] == 1
    assert fingerprint(killed.path) == fingerprint(whole.path)


def test_an_actors_environments_are_found_again_over_a_renewal(monkeypatch):
    "`advance` and `go_to` come to the place at which the lanes stand, before and behind the end of a part."
    import numpy as np
    import clvla.crl.engine as page
    from clvla.core.batch import torch_rng
    from clvla.crl.crew import advance, first_start
    from clvla.crl.all import make_agent
    from clvla.crl.experiment import Spaces, make_experiment
    from clvla.crl.slab import put_rollout, slot_fields, slot_rollout
    monkeypatch.setattr(page, "RENEW", 24)
    spec, agent = make_experiment("minigrid_engine_3").stream["lava"].env, make_agent("impala", n_envs=2, horizon=8, hidden=8)
    agent.build(None, Spaces(0, 151, dict(lava=7)))
    memory = {k: np.zeros((1, *shape), kind) for k, (shape, kind) in slot_fields(agent, 8, 2).items()}
    lanes, start, draws, parts = page.EngineLanes(spec, 2), first_start(2), torch_rng(0, "draws"), set()
    for _ in range(8):
        put_rollout(memory, 0, lanes.play(agent, 8, draws), lanes)
        start = advance(start, slot_rollout(memory, 0, 8), engine=True)
        again = page.EngineLanes(spec, 2)
        again.go_to(start)
        assert again.place() == lanes.place() and len(again.actions) == len(lanes.actions)
        lanes, parts = again, parts | {lanes.part}
    assert parts == {0, 1, 2}


def test_an_actor_of_a_cluster_plays_in_an_engine_too():
    "Without Ray: what a remote actor answers equals the same lanes in this process; the runner has the setting."
    from dataclasses import asdict
    from clvla.core.batch import torch_rng
    from clvla.crl.all import make_agent
    from clvla.crl.crew import first_start
    from clvla.crl.engine import EngineLanes
    from clvla.crl.experiment import Spaces, make_experiment
    from clvla.crl.ray import RayActors, RemoteActor
    from clvla.crl.slab import weight_bytes
    exp, kw = make_experiment("minigrid_engine_3"), dict(n_envs=2, horizon=8, hidden=8)
    agent, spec = make_agent("impala", 0, **kw), exp.stream["lava"].env
    agent.build(None, Spaces(0, 151, dict(lava=7)))
    cfg = dict(algo="impala", algo_kw=kw, seed=0, home=None, E=2, horizon=8, plugins=[], engine=True, spaces=asdict(agent.spaces))
    actor = RemoteActor(cfg, 0)
    actor.hear(stage=dict(t=0, key=1, spec=spec, mark=[]), start=first_start(2))
    played = actor.hear(r=0, T=8, weights=(0, weight_bytes(agent.acting())))["arrays"]
    alone = EngineLanes(spec, 2, 0, (0, 0)).play(agent, 8, torch_rng(0, "actor", 0, 0, 0))
    for name in ("state", "action", "logp", "reward", "terminated"): assert (played[name] == alone[name].numpy()).all(), name
    assert RayActors(None, exp, engine=True).engine and not RayActors(None, exp).engine


@pytest.mark.parametrize("spec", [
    dict(name="SpaceInvaders-v5", make=dict(reward_clip=True, frame_skip=4)), dict(name="SpaceInvaders-v5", max_steps=40),
    dict(name="StarpilotEasy-v0", make=dict(num_levels=200, start_level=0), success="level"),
    dict(name="MiniGrid-Empty-Random-6x6-v0", max_steps=20, success="rewarded"), dict(name="MetaWorld/Reach-v3", max_steps=20, success="told")],
    ids=["clipped", "atari", "procgen", "minigrid", "metaworld"])
def test_arrays_by_name_are_those_of_envpools_gymnasium_class(spec):
    "Over ends of episodes: what is seen, rewards (a clipped one beside the info's own), both sorts of end, success."
    import envpool
    import numpy as np
    from clvla.envs.gym.engine import Engine, successes, view_of
    limit = dict(max_episode_steps=spec["max_steps"]) if "max_steps" in spec else {}
    sim = envpool.make_gymnasium(spec["name"], num_envs=2, seed=[1, 2], **spec.get("make", {}), **limit)
    ours, rng, space, ended, rewards = Engine(spec, [1, 2]), np.random.default_rng(0), sim.action_space, 0, 0.
    pairs = list(zip(ours.reset(), view_of(sim.reset()[0])))
    for _ in range(150):
        actions = rng.integers(space.n, size=2) if hasattr(space, "n") else rng.uniform(-1, 1, (2, *space.shape)).astype(np.float32)
        *seen, outcome = ours.step(actions)
        theirs, reward, terminated, truncated, info = sim.step(actions)
        done = np.flatnonzero(terminated | truncated)
        if spec.get("success") == "rewarded":   # a goal on the very last step: EnvPool says that time was up
            terminated, truncated = terminated | (reward > 0), truncated & (reward <= 0)
        shown = np.delete(np.arange(2), done) if "prev_level_complete" in info else np.arange(2)   # Procgen shows the next level there
        pairs += [(a[shown], b[shown]) for a, b in zip(seen, view_of(theirs))]
        wanted = dict(reward=reward.astype(np.float32), terminated=terminated, truncated=truncated & ~terminated,
                      success=successes[spec.get("success", "never")](reward, terminated, info))
        assert outcome.keys() == wanted.keys() and all(np.array_equal(outcome[k], wanted[k]) for k in wanted), (outcome, wanted)
        rewards += np.abs(reward).sum()
        if done.size:
            ended += len(done)
            pairs += zip(ours.begin(done), view_of(sim.reset(done.astype(np.int32))[0]))
    assert all(np.array_equal(a, b) for a, b in pairs) and rewards > 0 and (ended or "max_steps" not in spec)
    ours.close(), sim.close()
