"Settings of agents and experiments that were accepted and did something else, or nothing."
from dataclasses import replace

import pytest

from clvla.crl.all import make_agent
from clvla.crl.config import AgentConfig, resolve_agent
from clvla.crl.experiment import Experiment, Spaces, joint, make_experiment
from clvla.data.streams import Stream
from clvla.envs.all import make_stream
from clvla.eval.compare import Run

DOTS = dict(base="dot_3", env=dict(discrete=True))
SIZE = dict(picture=(3, 8, 8), state=2, n_actions=None, action_dim=2)


@pytest.mark.parametrize("suite, cycles, expected", [(DOTS | dict(cycles=1), 0, 1), (dict(base=DOTS | dict(cycles=1), name="again"), 0, 1),
                                                     (DOTS | dict(cycles=4), 0, 4), (DOTS | dict(cycles=1), 3, 3), (DOTS, 0, 2)])
def test_one_cycle_that_is_asked_for_is_one(suite, cycles, expected):
    "A stream that says `cycles` 1 was given the cycles of its kind."
    assert make_experiment(suite, cycles).stream.cycles == expected


def named(*ids):
    tasks = make_stream(DOTS).tasks
    return Stream("named", [replace(task, id=i) for task, i in zip(tasks, ids)])


def test_a_trained_task_is_no_pair():
    "Its evaluations stood for another task's, and it was told to be that one."
    exp = Experiment(named("a", "a-test", "b"), 100, 100)
    assert exp.pairs == {} and exp.trained == ["a", "a-test", "b"]
    assert Experiment(Stream("probed", [replace(t, trained=t.id != "a-test") for t in exp.stream.tasks]), 100, 100).pairs == {"a": "a-test"}


def test_curves_of_a_trained_task_are_its_own():
    from clvla.crl.learner import curves_from
    ids = ["a", "a-test"]
    records = [dict(stage=t, step=None, frames=(t+1)*10, task=i, trial=0, reward=float(k+1), success=True, steps=1)
               for t in (-1, 0, 1) for k, i in enumerate(ids)]
    run = Run.__new__(Run)
    for k, v in dict(config=dict(learner="agent"), stages=ids, records=records, task_ids=ids, path="run").items(): object.__setattr__(run, k, v)
    assert curves_from(run).returns.tolist() == [[1.]*3, [2.]*3]


@pytest.mark.parametrize("sizes, says", [(dict(a=SIZE, b=SIZE | dict(action_dim=1)), "equally many"), (dict(a=SIZE | dict(picture=(3, 8, 10))), "takes squares")])
def test_boxes_of_other_lengths_and_oblong_pictures_are_refused(sizes, says):
    "One number of noise was shared by all actions of the longer box, or the first picture ended the run."
    with pytest.raises(ValueError, match=says): joint(sizes, 8)
    assert joint(dict(a=SIZE, b=SIZE), 8).largest == 2


@pytest.mark.parametrize("algo", ["clear", "sane"])
def test_a_replay_of_nothing_is_refused(algo):
    with pytest.raises(ValueError, match="rounds to none"): make_agent(algo, n_envs=8, replay=.05)
    for replay in (0., .1, 1.): make_agent(algo, n_envs=8, replay=replay)


@pytest.mark.parametrize("algo", ["clear", "sane"])
def test_a_memory_that_no_rollout_fits_is_refused(algo):
    "Rollouts shorter than the horizon are not remembered."
    agent, spaces = make_agent(algo, n_envs=8, horizon=20), Spaces(8, 2, dict(left=5))
    with pytest.raises(ValueError, match="takes 8 x 20"): agent.check(make_experiment(DOTS, steps=152), spaces)
    agent.check(make_experiment(DOTS, steps=153), spaces)
    make_agent(algo, n_envs=8, horizon=20, replay=0.).check(make_experiment(DOTS, steps=8), spaces)


def test_a_preset_of_other_agents_is_refused(tmp_path):
    "The agent learnt with its own defaults, under the preset's name."
    given = dict(suite=DOTS, run_dir=str(tmp_path/"run"))
    with pytest.raises(ValueError, match="says nothing of algo 'ppo'; it has settings of impala"): resolve_agent(AgentConfig(preset="cora_ewc", **given))
    assert resolve_agent(AgentConfig(preset="cora_ewc", algo="random", **given)).algo_kw == {}
    assert resolve_agent(AgentConfig(preset="cora_ewc", algo="impala", **given)).algo_kw["horizon"] == 20


@pytest.mark.parametrize("kw, n_envs, horizon", [(dict(runner="parallel", runner_kw=dict(n_actors=6), algo_kw=dict(n_envs=18)), 6, 16),
                                                 (dict(runner="actors", runner_kw=dict(n_actors=16), algo="clear", algo_kw=dict(n_envs=32)), 16, 8),
                                                 (dict(algo="clear", algo_kw=dict(n_envs=16, replay=.1)), 6, 16), (dict(), 4, 16)])
def test_a_smoke_run_of_what_a_run_takes_begins(tmp_path, kw, n_envs, horizon):
    "It had four environments, which six actors cannot share."
    from clvla.crl.learner import check_agent
    cfg = resolve_agent(AgentConfig(suite=DOTS, smoke=True, run_dir=str(tmp_path/"run"), **kw))
    assert (cfg.algo_kw["n_envs"], cfg.algo_kw["horizon"]) == (n_envs, horizon)
    check_agent(cfg)


@pytest.mark.parametrize("n_envs", [0, -2, 2.5, "x"])
def test_a_smoke_run_leaves_nonsense_to_the_agent(tmp_path, n_envs):
    "Its smaller numbers were computed with it, and ended in a division by zero."
    from clvla.crl.learner import check_agent
    given = dict(suite=DOTS, smoke=True, algo_kw=dict(n_envs=n_envs), run_dir=str(tmp_path/"run"))
    with pytest.raises(ValueError, match="n_envs must be"): check_agent(resolve_agent(AgentConfig(**given)))


def test_a_ray_of_ones_own_is_started_beside_others(monkeypatch):
    "Without a word for it Ray joins what RAY_ADDRESS or its folder names, and refuses the number of cores; for real in tests/test_release.py."
    ray = pytest.importorskip("ray", reason="needs the extra: pip install 'clvla[ray]'")
    from clvla.crl.ray import start_ray
    asked = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **kw: asked.append(kw))
    assert start_ray("", 3) and (asked[0]["address"], asked[0]["num_cpus"]) == ("local", 3)
