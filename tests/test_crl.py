"Continual reinforcement learning: curves and their metrics, experiments, agents, and runs that go on exactly."
import numpy as np
import pytest

from clvla.crl.curves import Curves, boundary_values, final_performance, forgetting, from_episodes, measures, on_grid, per_cycle, performance, scales, smooth, transfer, transfer_per_cycle, zero_shot


def curves(K=3, cycles=2, runs=4, seed=0, lengths=None):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(30, 90, K*cycles) if lengths is None else lengths
    ends = np.cumsum(lengths)
    steps = np.unique(np.concatenate([[0], ends, rng.choice(np.arange(1, ends[-1]), 40, replace=False)]))
    return Curves(tuple("abcd"[:K]), cycles, steps, rng.normal(size=(runs, K, len(steps))), ends)


@pytest.mark.parametrize("seed", range(5))
def test_stages_of_any_length_against_plain_loops(seed):
    c = curves(seed=seed)
    F, Z, since, cycle = forgetting(c), transfer(c), transfer(c, isolated=False), per_cycle(c)
    for s, i in np.ndindex(4, 3):
        m = max(abs(x) for run in c.returns for x in run[i])
        at = lambda k: [y for x, y in zip(c.steps, c.returns[s, i]) if x <= (c.ends[k] if k >= 0 else c.steps[0])][-1]
        for k in range(c.L):
            if k > i: assert F[s, i, k] == pytest.approx((at(k-1)-at(k))/m, abs=1e-12)
            else: assert np.isnan(F[s, i, k])
        for j in range(i): assert (Z[s, i, j], since[s, i, j]) == pytest.approx(((at(j)-at(j-1))/m, (at(j)-at(-1))/m), abs=1e-12)
    for s, n in np.ndindex(4, 2):
        values = [F[s, i, k] for i in range(3) for k in range(3*n, 3*n+3) if k > i and k % 3 != i]
        assert cycle[s, n] == pytest.approx(np.mean(values), abs=1e-12)
        later = [-F[s, i, k] if n else Z[s, i, k] for i in range(3) for k in range(3*n, 3*n+i)]   # trained before in later cycles
        assert transfer_per_cycle(c)[s, n] == pytest.approx(np.mean(later), abs=1e-12)
        assert performance(c)[s, n] == pytest.approx(np.mean([c.returns[s, i, np.flatnonzero(c.steps <= c.ends[3*n+2])[-1]] for i in range(3)]), abs=1e-12)
    assert zero_shot(c) == pytest.approx([np.mean([since[s, i, j] for i in range(3) for j in range(i)]) for s in range(4)], abs=1e-12)


def test_a_task_that_never_earned_has_no_scale():
    c = Curves(("a", "b"), 1, [0, 1, 2], [[0, 1, .5], [0, 0, 0]], [1, 2])
    assert np.isnan(scales(c)[1]) and np.isnan(transfer(c)[1, 0]) and forgetting(c)[0, 1] == .5 and final_performance(c) == .25


@pytest.mark.parametrize("kw, says", [
    (dict(steps=[0, 2, 2]), "steps must increase"), (dict(ends=[2, 1]), "ends must increase"), (dict(ends=[2]), "2 tasks x 1 cycles are 2 stages"),
    (dict(returns=np.zeros((2, 2))), "each of the 3 evaluations")])
def test_impossible_curves_are_refused(kw, says):
    with pytest.raises(ValueError, match=says): Curves(**(dict(task_ids=("a", "b"), cycles=1, steps=[0, 1, 2], returns=np.zeros((2, 3)), ends=[1, 2]) | kw))


def test_a_stage_without_an_evaluation_is_refused():
    with pytest.raises(ValueError, match="stage 1 has no evaluation"): boundary_values(Curves(("a", "b"), 1, [0, 1, 9], np.ones((2, 3)), [2, 4]))
    with pytest.raises(ValueError, match="window"): smooth(curves(), 0)


def test_what_was_not_measured_stays_unknown():
    records = [{"task": t, "frames": f, "reward": 1.} for t, f in (("a", 0), ("b", 0), ("a", 1), ("b", 2), ("a", 2))]
    c = from_episodes(records, ["a", "b"], 1, [1, 2])
    assert np.isnan(c.returns[1, 1]) and np.isnan(measures(c)["zero-shot transfer"]) and measures(c)["isolated forgetting, cycle 0"] == 0


def line_at(x, steps, values):
    "The straight line between the evaluations around `x`, as CORA's numpy.interp."
    u = max(k for k, s in enumerate(steps) if s <= x)
    if steps[u] == x: return values[u]
    return values[u]+(x-steps[u])/(steps[u+1]-steps[u])*(values[u+1]-values[u])


@pytest.mark.parametrize("seed", range(5))
def test_runs_with_other_steps_are_drawn_on_coras_grid(seed):
    "`combine_experiment_data` of CORA, written as loops: a grid within all runs, twice as many steps as the longest has."
    rng = np.random.default_rng(seed)
    runs = []
    for n in rng.integers(8, 30, 3):
        steps = np.sort(rng.choice(np.arange(200), n, replace=False)).astype(float)
        runs.append(Curves(("a", "b"), 1, steps, rng.normal(size=(2, n)), [90+seed, 190]))
    c = on_grid(runs)
    low, high = max(r.steps[0] for r in runs), min(r.steps[-1] for r in runs)
    N = 2*max(len(r.steps) for r in runs)
    assert c.steps.tolist() == pytest.approx([low+k*(high-low)/(N-1) for k in range(N)], abs=1e-9)
    for s, i in np.ndindex(3, 2):
        wanted = [line_at(min(x, high), runs[s].steps, runs[s].returns[i]) for x in c.steps]
        assert c.returns[s, i].tolist() == pytest.approx(wanted, abs=1e-9)
    late = Curves(("a", "b"), 1, [500., 600.], np.ones((2, 2)), [90, 190])
    with pytest.raises(ValueError, match="no steps in common"): on_grid([runs[0], late])


def small(path, data=None, **kw):
    from clvla.crl.config import AgentConfig
    base = dict(suite=dict(base="dot_2", env=dict(discrete=True), name="dots"), cycles=2, steps_per_task=160, eval_every=80, n_trials=2, image_size=8,
                threads=1, run_dir=str(path), data_dir=str(path)+"-data", algo_kw=dict(n_envs=2, horizon=20, hidden=8, channels=2, minibatch=20, epochs=2))
    return AgentConfig(**base | kw)


class Crash(BaseException): "A power cut: nothing is written."


def crash_after(monkeypatch, n):
    "The agent's `learn` number `n` never returns."
    from clvla.crl.ppo import PPO
    count, real = [0], PPO.learn

    def learn(self, rollout):
        count[0] += 1
        if count[0] == n: raise Crash
        return real(self, rollout)
    monkeypatch.setattr(PPO, "learn", learn)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    from clvla.crl.learner import learn_tasks
    return learn_tasks(small(tmp_path_factory.mktemp("crl")/"run"), say=len)


@pytest.mark.parametrize("n, kw", [(1, {}), (3, {}), (4, dict(save_every=1)), (7, dict(save_every=3)), (12, dict(save_every=2)), (16, dict(save_every=1))])
def test_a_run_that_lost_power_ends_with_the_same_bits(tmp_path, done, n, kw):
    from clvla.crl.learner import learn_tasks
    from clvla.run.resume import fingerprint
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, n)
        with pytest.raises(Crash): learn_tasks(small(tmp_path/"run", **kw), say=len)
    assert fingerprint(learn_tasks(small(tmp_path/"run", **kw), say=len).path) == fingerprint(done.path)


def test_a_signal_stops_between_two_updates_and_the_run_goes_on(tmp_path, done):
    import os
    import signal
    from clvla.crl.learner import learn_tasks
    from clvla.crl.ppo import PPO
    from clvla.run.resume import fingerprint
    from clvla.run.stop import Stopped
    count, real = [0], PPO.learn

    def learn(self, rollout):
        count[0] += 1
        if count[0] == 6: os.kill(os.getpid(), signal.SIGTERM)
        return real(self, rollout)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(PPO, "learn", learn)
        with pytest.raises(Stopped): learn_tasks(small(tmp_path/"run"), say=len)
    lines = []
    assert fingerprint(learn_tasks(small(tmp_path/"run"), lines.append).path) == fingerprint(done.path)
    assert lines[0] == "continued after 001+000002-right"


@pytest.mark.parametrize("n, kw", [(0, {}), (7, dict(save_every=3)), (12, dict(save_every=2))])
def test_an_evaluation_in_the_background_computes_what_one_that_waits_does(tmp_path, done, n, kw):
    "Also after a loss of power, and no process is left."
    from clvla.core.processes import descendants
    from clvla.crl.learner import learn_tasks
    from clvla.run.resume import fingerprint
    import os
    before = set(descendants(os.getpid()))
    with pytest.MonkeyPatch.context() as m:
        if n:
            crash_after(m, n)
            with pytest.raises(Crash): learn_tasks(small(tmp_path/"run", background=True, **kw), say=len)
    run = learn_tasks(small(tmp_path/"run", background=True, **kw), say=len)
    assert fingerprint(run.path) == fingerprint(done.path) and set(descendants(os.getpid())) == before
    assert [r for r in run.episodes() if r["step"]] and len(run.episodes()) == len(done.episodes())


@pytest.mark.parametrize("algo", ["sane", "progress_compress"])
def test_agents_with_several_networks_are_evaluated_in_the_background_alike(tmp_path, algo):
    from clvla.crl.learner import learn_tasks
    from clvla.run.resume import fingerprint
    kw = dict(algo=algo, algo_kw=dict(n_envs=2, horizon=20, hidden=8, channels=2), steps_per_task=80, cycles=1)
    runs = [learn_tasks(small(tmp_path/str(flag), data=tmp_path, background=flag, **kw), say=len) for flag in (False, True)]
    assert fingerprint(runs[0].path) == fingerprint(runs[1].path)


def test_an_evaluation_that_was_killed_ends_the_run_and_the_same_command_goes_on(tmp_path, done):
    import os
    import signal
    from clvla.crl.background import Aside
    from clvla.crl.learner import learn_tasks
    from clvla.run.resume import fingerprint
    made, real = [], Aside.__init__

    def init(self, work):
        real(self, (lambda: __import__("time").sleep(60)) if len(made) == 3 else work)
        made.append(self)
        if len(made) == 4: os.kill(self.pid, signal.SIGKILL)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(Aside, "__init__", init)
        with pytest.raises(RuntimeError, match="the process of an evaluation was ended by SIGKILL"): learn_tasks(small(tmp_path/"run", background=True), say=len)
    assert fingerprint(learn_tasks(small(tmp_path/"run", background=True), say=len).path) == fingerprint(done.path)


def test_no_step_is_lost_and_every_task_is_evaluated_at_every_point(done):
    from clvla.crl.learner import curves_of
    from clvla.core.trials import use_of
    records, logs = done.episodes(), done.logs()
    assert [r["frames"] for r in logs] == [40*k for k in range(1, 17)] and {use_of(r["trial"])[0] for r in records} == {"report"}
    points = sorted({(r["stage"], r["step"] or 99, r["frames"]) for r in records})
    assert points == [(-1, 99, 0), *((t, s, 160*t+80*k) for t in range(4) for k, s in ((1, 2), (2, 99)))] and len(records) == 9*4
    c = curves_of(done.path)
    assert c.ends.tolist() == [160, 320, 480, 640] and c.returns.shape == (2, 9) and not np.isnan(c.returns).any()


def test_a_budget_that_is_no_multiple_of_a_rollout(tmp_path):
    "The last rollout is shorter; a task's own budget counts."
    from clvla.crl.learner import curves_of, learn_tasks
    suite = dict(base="dot_2", env=dict(discrete=True), name="dots", budget=dict(right=45))
    run = learn_tasks(small(tmp_path/"run", suite=suite, cycles=1, steps_per_task=90), say=len)
    assert curves_of(run.path).ends.tolist() == [90, 136]   # 45 steps of two environments


def test_hooks_come_once_and_in_order_also_over_a_restart(tmp_path):
    from clvla.crl.all import agents
    from clvla.crl.learner import learn_tasks
    heard = []

    class Listener(agents["random"]):
        n = 0
        def on_cycle_start(self, cycle): heard.append(("cycle", cycle))
        def on_cycle_end(self, cycle): heard.append(("end", cycle))
        def on_task_start(self, stage): heard.append((stage.task_id, stage.cycle))
        def on_task_end(self, stage): heard.append(("done", stage.t))
        def learn(self, rollout):
            Listener.n += 1
            if Listener.n == 6: raise Crash
            return {}
    agents["listener"] = Listener
    cfg = small(tmp_path/"run", algo="listener", algo_kw=dict(n_envs=2, horizon=20), save_every=1)
    try:
        with pytest.raises(Crash): learn_tasks(cfg, say=len)
        learn_tasks(cfg, say=len)
    finally: del agents["listener"]
    assert heard == [("cycle", 0), ("left", 0), ("done", 0), ("right", 0), ("done", 1), ("end", 0),
                     ("cycle", 1), ("left", 1), ("done", 2), ("right", 1), ("done", 3), ("end", 1)]


def test_tasks_with_different_numbers_of_actions(tmp_path):
    "The pole has two actions, the car three: no action is chosen that a task does not have."
    pytest.importorskip("gymnasium")
    from clvla.crl.learner import learn_tasks
    from clvla.data.streams import Stream, Task
    from clvla.envs.all import streams
    spec = lambda name: dict(kind="gym", name=name, picture="none", state="none", success="never", max_steps=10)
    tasks = [Task("pole", "CartPole-v1", "hold", spec("CartPole-v1")), Task("car", "MountainCar-v0", "climb", spec("MountainCar-v0"))]
    streams["two_sizes"] = Stream("two_sizes", tasks)
    try: run = learn_tasks(small(tmp_path/"run", suite="two_sizes", cycles=1, steps_per_task=40), say=len)   # the environment refuses others
    finally: del streams["two_sizes"]
    assert {r["task"] for r in run.episodes()} == {"pole", "car"}


def test_a_pair_is_evaluated_and_never_trained(tmp_path):
    from clvla.crl.learner import curves_of, learn_tasks
    suite = dict(base="dot_2", env=dict(discrete=True), eval_env=dict(discrete=True, max_steps=3), name="dots")
    run = learn_tasks(small(tmp_path/"run", suite=suite, cycles=1, steps_per_task=40), say=len)
    assert {r["task"] for r in run.logs()} == {"left", "right"}
    steps = [r["steps"] for r in run.episodes() if r["task"] == "left-test"]
    assert steps and max(steps) <= 3 and curves_of(run.path).task_ids == ("left", "right")


def test_the_engine_is_stored_with_a_run_and_another_one_is_named(tmp_path, done):
    from clvla.core.files import read_json, write_json
    from clvla.crl.learner import learn_tasks
    stored = read_json(done.path/"versions.json")
    assert stored["engine"] == "lanes: dot" and "assets" not in stored
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, 7)
        with pytest.raises(Crash): learn_tasks(small(tmp_path/"run", save_every=3), say=len)
    versions = tmp_path/"run/versions.json"
    assert read_json(versions)["engine"] == "lanes: dot"
    write_json(versions, read_json(versions) | dict(engine="envpool 1.2.7"))
    with pytest.raises(ValueError, match="runner"): learn_tasks(small(tmp_path/"run", save_every=3, runner="parallel", runner_kw=dict(n_actors=2)), say=len)
    lines = []
    learn_tasks(small(tmp_path/"run", save_every=3), lines.append)
    assert "since this run began, these have changed: engine envpool 1.2.7 -> lanes: dot;" in lines[1]


@pytest.mark.parametrize("name", ["sync", "parallel", "actors"])
def test_lanes_name_what_they_step(name):
    from importlib.metadata import version
    pytest.importorskip("minigrid")
    from clvla.crl.all import make_runner
    from clvla.crl.experiment import make_experiment
    said = make_runner(name, None, make_experiment("minigrid_3")).versions()["engine"]
    assert said == f"lanes: gymnasium {version('gymnasium')}, minigrid {version('minigrid')}"


@pytest.mark.parametrize("budget", [-5, "many", .5, True, dict(left=0), dict(left="9")])
def test_a_wrong_budget_speaks_of_environment_steps(tmp_path, budget):
    from clvla.crl.learner import learn_tasks
    suite = dict(base="dot_2", env=dict(discrete=True), name="dots", budget=budget)
    with pytest.raises(ValueError, match=r"budget is a number of environment steps \(frames\) above 0.*found"): learn_tasks(small(tmp_path/"run", suite=suite), say=len)


def test_minihack_has_coras_numbers_and_says_what_installs_it(tmp_path, monkeypatch):
    "Without the simulator: it is not part of these tests' environment."
    import importlib.util
    from clvla.crl.experiment import make_experiment, specs
    from clvla.crl.learner import learn_tasks
    spec, exp = specs["minihack_nav_paired_2_cycles"], make_experiment("minihack_nav_paired_2_cycles")
    assert (spec.total, len(exp.pairs), exp.eval_every, exp.eval_episodes, len(exp.stages)) == (300_000_000, 15, 1_000_000, 10, 30)
    for a, b in zip(spec.tasks, spec.pairs):
        assert f"MiniHack-{a}-v0" in exp.stream[a].env["name"] and f"MiniHack-{b}-v0" in exp.stream[a+"-test"].env["name"]
    assert not [c for c in "".join(spec.pairs) if c in ":_"]   # the simulator's names stay on its page
    assert make_experiment("minihack_nav_15").ends[-1] == 30*100_000
    one = make_experiment(dict(base="minihack_nav_15", tasks=["KeyRoom-S5"]))
    assert one.stream.ids == ["KeyRoom-S5", "KeyRoom-S5-test"] and one.trained == ["KeyRoom-S5"]
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in ("nle", "minihack") else real(name, *a))
    with pytest.raises(ImportError, match=r"clvla\[minihack\]"): learn_tasks(small(tmp_path/"run", suite="minihack_nav_paired_2_cycles"), say=len)


class Room:
    "What MiniHack's simulator answers, as far as `RoomEnv` asks: chance comes from `seed`, and at the limit `truncated` comes too late."
    def __init__(self, limit=3): self.limit, self.seeds, self.t, self.unwrapped = limit, None, 0, self
    def seed(self, core, disp, reseed): self.seeds = (core, disp, reseed)
    def seen(self): return dict(pixel_crop=np.full((80, 80, 3), self.t+1, np.uint8))
    def reset(self, seed=None): self.t = 0; return self.seen(), {}
    def step(self, action):
        self.t += 1
        status = 2 if action == 7 else 1 if action == 6 else -1 if self.t >= self.limit else 0
        return self.seen(), float(status == 2), status != 0, False, dict(end_status=status)
    def close(self): pass


def test_a_minihack_room_is_seeded_before_its_reset_and_ends_as_it_should(monkeypatch):
    gymnasium = pytest.importorskip("gymnasium")
    from clvla.core.names import IMAGE
    from clvla.envs.gym import env as gym_env
    from clvla.envs.gym.minihack import RoomEnv, minihack
    sim = Room()
    sim.action_space, sim.observation_space = gymnasium.spaces.Discrete(8), None
    monkeypatch.setattr(gym_env, "make_sim", lambda name, options: sim)
    env = RoomEnv(minihack.room("Room-Random-5x5"), image_size=84)
    seeds, ends = [], []
    for trial, actions in ((0, [0, 0, 0]), (0, [7]), (1, [6])):
        image = env.reset(trial)[IMAGE]
        seeds.append(sim.seeds)
        assert image.shape == (84, 84, 3) and image[:2].max() == 0 and image[2:82, 2:82].min() == 1
        ends.append(env.step_chunk([[a] for a in actions])[1:5])
    assert seeds[0] == seeds[1] != seeds[2] and all(core == disp and reseed is False for core, disp, reseed in seeds)
    assert [(list(r), s, term, trunc) for r, s, term, trunc in ends] == [([0, 0, 0], False, False, True), ([1], True, True, False), ([0], False, True, False)]


@pytest.mark.parametrize("kw, says", [
    (dict(suite="dot_2", algo="impala", algo_kw={}), "continuous actions"), (dict(suite="dots"), "there is no experiment 'dots'"), 
    (dict(suite="chores_sequential_multi_traj"), "crl_alfred"), (dict(algo="pppo"), "did you mean 'ppo'"), (dict(cl="ewcc"), "did you mean 'ewc'"), (dict(cl_kw=dict(ewc_lam=1.)), "it takes no settings"), (dict(algo_kw=dict(gama=1.)), "did you mean 'gamma'"),
    (dict(algo_kw=dict(gamma=2.)), "gamma must be"), (dict(num_processes=2), "one process"), (dict(precision="bf16"), "float32"), (dict(background=True, runner="ray"), "Ray's connections have none"),
    (dict(cycles=-1), "cycles must not be negative"), (dict(algo_kw=dict(horizon=0)), "horizon must be"), (dict(image_size=2), "at least 4 pixels")])
def test_bad_settings_are_refused_before_anything_is_made(tmp_path, kw, says):
    from clvla.crl.learner import learn_tasks
    with pytest.raises(ValueError, match=says): learn_tasks(small(tmp_path/"run", **kw), say=len)
    assert not (tmp_path/"run").exists()


def evaluated(path, **kw):
    from clvla.crl.evaluate import eval_agent
    from clvla.train.eval_config import EvalConfig, begin_eval, check_eval
    return eval_agent(path, begin_eval(check_eval(EvalConfig(run_dir=str(path), **kw))).name, len).episodes()


def told(records): return sorted((r["stage"], r["task"], r["trial"], r["reward"], r["steps"], r["success"]) for r in records if r["step"] is None and r["stage"] >= 0)


@pytest.mark.parametrize("kw", [
    dict(cl="packnet"), dict(runner="batched"), dict(algo="sane", algo_kw=dict(n_envs=2, horizon=20, hidden=8, channels=2, frames=80)),
    dict(algo="clear", algo_kw=dict(n_envs=2, horizon=20, hidden=8, channels=2, frames=80, file=True), cycles=1),
    dict(algo="progress_compress", algo_kw=dict(n_envs=2, horizon=20, hidden=8, channels=2))], ids=lambda kw: kw.get("algo") or kw.get("cl") or "batched")
def test_a_checkpoint_plays_as_the_run_did(tmp_path, kw):
    "With the run's seed and number of episodes the records are the run's own; a memory that lies in a file is not touched."
    from clvla.crl.learner import learn_tasks
    run = learn_tasks(small(tmp_path/"run", seed=3, **kw), say=len)
    files = lambda: {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in (tmp_path/"run"/"replay").rglob("*")}
    before = files()
    assert told(evaluated(run.path, n_trials=2, seed=3, evaluate="full")) == told(run.episodes()) and files() == before


def test_an_evaluation_of_an_agent_goes_on_where_it_was_cut(done):
    from clvla.run.folder import RunFolder
    whole = evaluated(done.path, n_trials=3, first_trial=50, last_only=True)
    assert {r["trial"] for r in whole} == {50, 51, 52} and {r["stage"] for r in whole} == {3}
    out = RunFolder(done.path/"evals"/"lower-50+3-s0-last")
    lines = (out.path/"episodes.jsonl").read_text().splitlines()
    (out.path/"episodes.jsonl").write_text("\n".join(lines[:4])+"\n"+lines[4][:10])   # killed in the second task, a line is torn
    assert told(evaluated(done.path, n_trials=3, first_trial=50, last_only=True)) == told(whole)


def test_clvla_evaluates_an_agent(done, capsys):
    from clvla.command.main import main
    from clvla.run.folder import RunFolder
    assert main(["eval", str(done.path), "-p", "n_trials", "2", "-p", "last_only", "true"]) in (0, None)
    said = capsys.readouterr().out
    records = RunFolder(done.path/"evals"/"lower-0+2-s0-last").episodes()
    assert {(r["stage"], r["task"], r["trial"]) for r in records} == {(3, i, k) for i in ("left", "right") for k in (0, 1)}
    assert "left" in said and "evals" in said


def test_the_page(tmp_path):
    "The smoke run, as a user starts it, and the list of its parameters."
    from papermill.inspection import inspect_notebook
    from test_run import ROOT, page
    from clvla.core.files import read_json
    from clvla.crl.config import AgentConfig
    out = page("run_crl", tmp_path/"page.ipynb", "-p", "smoke", "True", "-p", "suite", "{'base': 'dot_2', 'env': {'discrete': True}}",
               "-p", "run_dir", str(tmp_path/"run"))
    assert out.returncode == 0, out.stderr[-3000:]
    assert read_json(tmp_path/"run/done.json") == dict(stages=4, frames=512)
    listed = set(inspect_notebook(ROOT/"nbs/run_crl.ipynb"))
    assert not set(AgentConfig.__dataclass_fields__) - listed and {"gamma", "entropy_weight", "horizon", "n_actors", "engine_threads"} <= listed


@pytest.mark.parametrize("algo, kw, cl", [("impala", dict(lag=2), {}), ("clear", dict(frames=60), {}), ("impala", {}, dict(cl="ewc", cl_kw=dict(fisher_steps=50)))])
@pytest.mark.parametrize("n", [3, 10])
def test_actor_critics_that_lost_power_end_with_the_same_bits(tmp_path, algo, kw, cl, n):
    "Older weights, remembered rollouts and springs are part of a checkpoint, inside a stage, too."
    from clvla.crl.impala import IMPALA
    from clvla.crl.learner import learn_tasks
    from clvla.run.resume import fingerprint
    run = lambda name: learn_tasks(small(tmp_path/name, algo=algo, save_every=1, algo_kw=dict(n_envs=2, horizon=20, hidden=8, channels=2, epochs=2, **kw), **cl), say=len)
    whole, count, real = run("whole"), [0], IMPALA.publish

    def publish(self):   # at the end of each update, also of a held one
        count[0] += 1
        if count[0] == 2*n: raise Crash
        return real(self)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(IMPALA, "publish", publish)
        with pytest.raises(Crash): run("cut")
    assert fingerprint(run("cut").path) == fingerprint(whole.path)


def test_a_checkpoint_is_evaluated_beside_its_tasks_on_their_pairs():
    "By default the pairs of the tasks that were trained so far are played, too, as in the run itself."
    from types import SimpleNamespace as NS
    from clvla.crl.evaluate import cells_of
    from clvla.crl.experiment import PAIR, make_experiment
    exp = make_experiment("procgen_few_6", cycles=2)
    cells = lambda evaluate, t, ids=exp.stream.ids: cells_of(NS(cfg=NS(evaluate=evaluate), ids=tuple(ids)), NS(exp=exp), t)
    assert set(exp.pairs.values()) == {i+PAIR for i in exp.trained} and len(exp.trained) == 6
    for t in range(12):
        trained = exp.trained[:t+1]
        assert cells("lower", t) == [i for i in exp.stream.ids if i.removesuffix(PAIR) in trained]
    assert cells("full", 0) == list(exp.stream.ids) and cells("lower", 0, exp.trained[1:]) == []


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_the_acting_weights_are_lag_updates_behind(lag):
    "Also with a lag of one, and after a checkpoint."
    from clvla.crl.experiment import Spaces
    from clvla.crl.impala import IMPALA
    spaces, make = Spaces(8, 2, dict(a=3)), lambda: IMPALA(n_envs=2, horizon=3, lag=lag, channels=2, hidden=4)
    agent = make()
    agent.build(None, spaces)
    was = [agent.net.value.bias.item()]
    for k in range(1, 7):
        was.append(float(k))
        agent.net.value.bias.data.fill_(k)
        agent.publish()
        if k == 4:
            state, agent = agent.state_dict(), make()
            agent.build(None, spaces)
            agent.load_state_dict(state)
        assert agent.acting().value.bias.item() == was[max(0, k-lag)]


def test_an_evaluation_asks_the_weights_that_learn():
    "Also where older ones play: what a stage has learnt, or a method has merged at its end, is what its evaluation is of."
    import torch
    from clvla.crl.experiment import Spaces
    from clvla.crl.impala import IMPALA
    agent = IMPALA(n_envs=2, horizon=3, lag=2, channels=2, hidden=4)
    agent.build(None, Spaces(8, 2, dict(a=3)))
    obs = dict(image=torch.zeros(1, 8, 8, 3, dtype=torch.uint8), state=torch.zeros(1, 2), n_actions=torch.tensor([3]))
    before = agent.act(obs, torch.zeros(1))["logps"]
    agent.net.logits.bias.data += torch.tensor([1., 0., 0.])
    agent.publish()
    assert torch.equal(agent.act(obs, torch.zeros(1))["logps"], before)
    assert torch.allclose(agent.predict(obs, torch.zeros(1))["logps"], agent.net(obs)[0]) and not torch.allclose(agent.net(obs)[0], before)
