"One time limit for a task, whoever plays it; ends of episodes as in plain loops over the simulators, at every limit around the end."
import numpy as np
import pytest

pytest.importorskip("envpool", reason="the extra envpool is not installed")
GOAL = 2, 2, 1, 2, 2   # from MiniGrid-Empty-5x5's start to its goal


def plain(make, actions, limit, ends):
    "Rewards, and how each episode ended, of the actions played over and over: reset, step, count. `ends` reads a step."
    env, rows, n = make(), [], 0
    env.reset()
    for action in actions:
        reward, terminated, success = ends(env, action)
        n += 1
        rows.append((round(float(reward), 6), bool(terminated), n >= limit and not terminated, bool(success)))
        if rows[-1][1] or rows[-1][2]: n = env.reset() and 0
    return rows


class Walk:
    "An agent that plays given actions."
    def __init__(self, actions, n=1): self.actions, self.n_envs, self.t, self.n = list(actions), n, 0, n
    def on_starts(self, obs, evaluation=False): pass
    def predict(self, obs, draws): return self.act(obs, draws)
    def act(self, obs, draws):
        import torch
        self.t += 1
        return dict(action=torch.full((len(obs["state"]),), self.actions[(self.t-1) % len(self.actions)]))


def rollouts(spec, actions, limit, n=2):
    "What each runner's environments make of the actions: name -> rollout, finished episodes, what they stand in now."
    import torch
    from clvla.crl.crew import begin_lanes, first_start
    from clvla.crl.engine import EngineLanes
    from clvla.crl.runner import Lanes
    spec = spec | dict(max_steps=limit)
    actor = lambda engine: (dict(E=n, seed=0, number=0, engine=engine, spaces=dict(image_size=0)), dict(t=0, spec=spec, mark=()))
    lanes = dict(sync=Lanes(spec, n, 0), batched=EngineLanes(spec, n), **{
        f"actors, engine={engine}": begin_lanes(*actor(engine), first_start(n)) for engine in (False, True)})
    for name, of in lanes.items():
        played = of.play(Walk(actions, n), len(actions), torch.Generator())
        yield name, played, of.take_finished()
        of.close()


def same(wanted, played, finished, n=2):
    "Rewards, both sorts of end, where a value is asked for behind the rollout's rows, and episodes."
    for e in range(n):
        got = list(zip(played["reward"][:, e].tolist(), played["terminated"][:, e].tolist(), played["truncated"][:, e].tolist()))
        assert [(round(r, 6), t, c) for r, t, c in got] == [row[:3] for row in wanted]
    last = len(wanted)-1
    assert sorted(played["cut_at"].tolist()) == [[t, e] for t, row in enumerate(wanted) for e in range(n) if row[2] or t == last and not row[1]]
    ends, total, steps = [], 0., 0
    for reward, terminated, truncated, success in wanted:
        total, steps = total+reward, steps+1
        if terminated or truncated:
            ends.append((round(total, 4), steps, success))
            total, steps = 0., 0
    assert sorted((round(f["reward"], 4), f["steps"], f["success"]) for f in finished) == sorted(ends*n)


@pytest.mark.parametrize("limit", range(1, 7))
def test_a_goal_at_every_limit(limit):
    "MiniGrid itself (Python, with its own reward) against every runner; the goal is five steps away."
    import gymnasium, minigrid  # noqa: F401
    def ends(env, action):
        _, reward, terminated, _, _ = env.step(action)
        return reward, terminated, terminated and reward > 0
    make = lambda: gymnasium.make("MiniGrid-Empty-5x5-v0", max_steps=limit)
    wanted = plain(make, GOAL*3, limit, ends)
    assert any(row[3] for row in wanted) == (limit >= 5) and any(row[2] for row in wanted) == (limit < 5)
    for name, played, finished in rollouts(dict(kind="grids", name="MiniGrid-Empty-5x5-v0", success="rewarded"), GOAL*3, limit):
        same(wanted, played, finished)


@pytest.mark.parametrize("limit", range(1, 7))
def test_evaluations_end_alike(limit):
    from clvla.core.trials import trial_number
    from clvla.crl.engine import EngineExaminer
    from clvla.crl.runner import Examiner
    spec = dict(kind="grids", name="MiniGrid-Empty-5x5-v0", success="rewarded", max_steps=limit)
    reward = 1-.9*5/limit if limit >= 5 else 0
    for records in (Examiner(dict(room=(spec, ())), 2, 0).play(Walk(GOAL)), EngineExaminer(dict(room=(spec, ())), 2).play(Walk(GOAL))):
        assert [r["trial"] for r in records] == [trial_number("report", k) for k in range(2)]
        assert {(round(r["reward"], 5), r["steps"], r["success"]) for r in records} == {(round(reward, 5), min(5, limit), limit >= 5)}


@pytest.mark.parametrize("limit", range(1, 7))
def test_gymnasiums_own_environments_end_as_in_a_plain_loop(limit):
    "The kind `gym`, one step at a time and in chunks; MiniGrid says both ends at once where a goal is on its own last step."
    import gymnasium, minigrid  # noqa: F401
    from clvla.crl.runner import Lanes
    from clvla.envs.all import make_env
    import torch
    def ends(env, action):
        _, reward, terminated, _, _ = env.step(action)
        return reward, terminated, terminated and reward > 0
    wanted = plain(lambda: gymnasium.make("MiniGrid-Empty-5x5-v0", max_steps=limit), GOAL*3, limit, ends)
    spec = dict(kind="gym", name="MiniGrid-Empty-5x5-v0", make=dict(max_steps=limit), picture="none", state=["direction"], max_steps=limit)
    lanes = Lanes(spec, 2, 1)
    same(wanted, lanes.play(Walk(GOAL*3, 2), 15, torch.Generator()), lanes.take_finished())
    env = make_env(spec, image_size=1)
    env.reset(0)
    *_, rewards, success, terminated, truncated, n = env.step_chunk(np.array(GOAL)[:, None])
    assert (success, terminated, truncated, n) == (limit >= 5, limit >= 5, limit < 5, min(5, limit))
    lanes.close(), env.close()


def through(name, seed, actions, **options):
    "EnvPool alone, without a limit: what is seen, and entries of each step, up to the first end."
    import envpool
    sim = envpool.make_gymnasium(name, num_envs=1, seed=[seed], max_episode_steps=10**6, **options)
    rows = [sim.reset()[0]]
    for action in actions:
        seen, reward, terminated, truncated, info = sim.step(np.array([action]))
        rows.append((seen, float(reward[0]), bool(terminated[0] | truncated[0]), info))
        if rows[-1][2]: break
    sim.close()
    return rows


@pytest.mark.parametrize("name, seed, action, make", [
    ("CartPole-v1", 0, 1, {}), ("MiniGrid-LavaCrossingS9N3-v0", 3, 2, {}), ("FruitbotEasy-v0", 5, 0, dict(num_levels=1, start_level=1))],
    ids=["pole", "lava", "fruitbot"])
def test_an_end_without_a_reward_is_the_tasks_own(name, seed, action, make):
    "A fall, lava and a wall at step n: with a limit of n or more the episode has ended by its own rule, with less by time."
    from clvla.envs.gym.engine import Engine
    actions = [action]*400
    if "Lava" in name:   # random steps until the lava
        actions = np.random.default_rng(1).integers(3, size=400).tolist()
    n = len(through(name, seed, actions, **make))-1
    assert 1 < n < 400
    for limit in (n-1, n, n+1):
        engine = Engine(dict(name=name, max_steps=limit, make=make), [seed])
        engine.reset()
        for t, action in enumerate(actions[:min(n, limit)], 1):
            *_, outcome = engine.step(np.array([action]))
            ended = bool(outcome["terminated"][0]), bool(outcome["truncated"][0])
            assert ended == ((t == n), t == limit and t < n), (t, n, limit)
        engine.close()


def test_metaworld_is_cut_at_its_limit_and_goes_on_from_a_start():
    from clvla.envs.gym.engine import Engine
    spec = dict(name="MetaWorld/Reach-v3", success="told", make=dict(partially_observable=False))
    rows = through(spec["name"], 4, [np.full(4, .5, np.float32)]*6, partially_observable=False)
    for limit in range(1, 7):
        engine = Engine(spec | dict(max_steps=limit), [4])
        engine.reset()
        for t in range(1, limit+1):
            _, state, outcome = engine.step(np.full((1, 4), .5, np.float32))
            assert np.array_equal(state, rows[t][0].astype(np.float32)) and outcome["reward"][0] == np.float32(rows[t][1])
            assert (outcome["truncated"][0], outcome["terminated"][0]) == (t == limit, False)
        first = engine.begin([0])[1]
        *_, outcome = engine.step(np.zeros((1, 4), np.float32))
        assert np.abs(first[0, :3]-rows[0][0, :3]).max() < .01 and outcome["truncated"][0] == (limit == 1)
        engine.close()


def every_spec():
    from clvla.envs.all import make_stream
    for name in ("procgen_6", "procgen_few_6", "climber_4", "fruitbot_5", "miner_4", "minigrid_engine_3", "mw_state_10", "atari_6"):
        for task in make_stream(name).tasks: yield from (env for env in (task.env, task.eval_env) if env)


def test_every_stream_says_its_limit_and_all_runners_keep_it():
    from clvla.envs.gym.engine import Engine
    from clvla.envs.all import make_env
    seen = {}
    for spec in every_spec():
        assert "max_steps" in spec, spec
        seen.setdefault(spec["name"], spec)
        assert seen[spec["name"]]["max_steps"] == spec["max_steps"]
    for spec in seen.values():
        engine, env = Engine(spec, [0]), make_env(spec, image_size=84)
        assert engine.limit == env.max_steps == spec["max_steps"]
        engine.close()
    without = dict(kind="procgen", name="BigfishEasy-v0")
    assert Engine(without, [0]).limit == make_env(without, image_size=64).max_steps == 6000


@pytest.mark.parametrize("limit, spec", [(40, dict(max_steps=40)), (1000, {})], ids=["short", "its own"])
def test_a_climber_who_stands_still_is_cut_at_the_same_step_everywhere(limit, spec):
    "Trained and evaluated, exact and batched; the value is asked of the level's own last picture."
    import torch
    from clvla.crl.engine import EngineExaminer, EngineLanes
    from clvla.crl.runner import Examiner, Lanes
    from clvla.envs.all import make_stream
    spec, still = make_stream("climber_4").tasks[0].env | spec, Walk([4])
    for lanes in (Lanes(spec, 1, 64), EngineLanes(spec, 1)):
        played = lanes.play(still, limit+1, torch.Generator())
        assert lanes.take_finished() == [dict(reward=0., steps=limit, success=False)]
        assert played["truncated"][:, 0].nonzero()[:, 0].tolist() == [limit-1] and not played["terminated"].any()
        last, before, after = played["cut"]["image"][0].int(), played["image"][limit-1, 0].int(), played["image"][limit, 0].int()
        assert (last-before).abs().float().mean() < 1   # the same place; enemies may move
        if limit == 1000: assert last.equal(before)     # Procgen shows the next level's start here
        lanes.close()
    for examiner in (Examiner(dict(c=(spec, ())), 1, 64), EngineExaminer(dict(c=(spec, ())), 1)):
        assert [r["steps"] for r in examiner.play(still)] == [limit]
        examiner.close()


@pytest.mark.parametrize("limit", [250, 320])
def test_ataris_limit_counts_a_game_over_its_lives(limit):
    "EnvPool in its own way (a step behind a lost life goes on with the game) with a count of our own, against the engine."
    import envpool
    from clvla.envs.gym.engine import Engine
    from clvla.envs.gym.games import atari
    screen, rng = atari.screen | dict(img_height=8, img_width=8), np.random.default_rng(0)
    sim = envpool.make_gymnasium("SpaceInvaders-v5", num_envs=2, seed=[1, 2], max_episode_steps=10**6, **screen)
    engine = Engine(dict(name="SpaceInvaders-v5", max_steps=limit, make=screen), [1, 2])
    assert np.array_equal(engine.reset()[0], sim.reset()[0])
    count, kinds = [0, 0], set()
    for _ in range(600):
        actions = rng.integers(18, size=2)
        seen, reward, died, _, info = sim.step(actions)
        image, _, outcome = engine.step(actions)
        assert np.array_equal(image, seen) and np.array_equal(outcome["reward"], reward)
        for e in range(2):
            count[e] += 1
            cut = count[e] >= limit and not died[e]
            assert (outcome["terminated"][e], outcome["truncated"][e]) == (died[e], cut)
            if not (died[e] or cut): continue
            over = cut or info["terminated"][e] or count[e] >= limit   # a new game begins
            kinds.add("cut" if cut else "over" if info["terminated"][e] else "life")
            first = (sim.reset(np.array([e], np.int32)) if over else sim.step(np.array([0]), np.array([e], np.int32)))[0]
            assert np.array_equal(engine.begin([e])[0], first)
            if over: count[e] = 0
    assert {"cut", "life"} <= kinds and (limit < 300 or "over" in kinds), kinds
    engine.close()


def test_lives_and_new_games_begin_side_by_side():
    "`begin` of several environments gives each row its own, whichever go on with a game."
    from clvla.envs.gym.engine import Engine
    from clvla.envs.gym.games import atari
    spec = dict(name="SpaceInvaders-v5", max_steps=10_000, make=atari.screen | dict(img_height=8, img_width=8))
    together, alone, rng = Engine(spec, [1, 2, 3]), [Engine(spec, [k]) for k in (1, 2, 3)], np.random.default_rng(0)
    together.reset(), [one.reset() for one in alone]
    waiting, mixed = set(), 0
    for _ in range(900):   # an environment that has ended waits for another one
        playing = np.array([e for e in range(3) if e not in waiting], np.int32)
        actions = rng.integers(18, size=len(playing))
        *_, outcome = together.step(actions, playing)
        for e, action in zip(playing, actions): alone[e].step(np.array([action]))
        waiting |= set(playing[outcome["terminated"]].tolist())
        if len(waiting) < 2: continue
        ids = sorted(waiting, reverse=True)
        mixed += len(set(together.goes_on[ids].tolist())) == 2
        image, _ = together.begin(ids)
        for row, e in enumerate(ids): assert np.array_equal(image[row], alone[e].begin([0])[0][0])
        waiting = set()
        if mixed: break
    assert mixed
    together.close(), [one.close() for one in alone]


def test_limits_that_contradict_or_do_not_exist_are_refused():
    from clvla.envs.gym.engine import Engine, limit_of
    two = dict(name="ClimberEasy-v0", max_steps=7, make=dict(max_episode_steps=9))
    with pytest.raises(ValueError, match="two time limits"): Engine(two, [0])
    with pytest.raises(ValueError, match="give its spec max_steps"): Engine(dict(name="BabyAI-GoToObj-v0"), [0])
    assert limit_of(dict(name="ClimberEasy-v0", make=dict(max_episode_steps=9))) == 9


@pytest.mark.parametrize("engine", [False, True])
def test_a_success_before_the_last_step_counts_for_the_episode(engine):
    "Meta-World's goes on behind a success: an episode that has had one is a success in training, as in evaluation."
    import torch
    from clvla.crl.engine import EngineLanes
    from clvla.crl.runner import Lanes
    from clvla.envs.gym.engine import Engine
    spec = dict(kind="arm", name="MetaWorld/Reach-v3", success="told", max_steps=5, make=dict(partially_observable=False))

    def once(self, actions, ids=None):
        *seen, outcome = step(self, actions, ids)
        count[0] += 1
        return *seen, outcome | dict(success=np.full(len(outcome["success"]), count[0] == 2))
    step, count = Engine.step, [0]
    with pytest.MonkeyPatch.context() as m:
        m.setattr(Engine, "step", once)
        lanes = EngineLanes(spec, 1) if engine else Lanes(spec, 1, 0)
        agent = Walk([0])
        agent.act = lambda obs, draws: dict(action=torch.zeros(1, 4))
        lanes.play(agent, 10, torch.Generator())
    assert [f["success"] for f in lanes.take_finished()] == [True, False]
    lanes.close()
