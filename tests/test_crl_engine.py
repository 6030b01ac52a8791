"Every agent plays in the engine, from pictures and from numbers; killed runs come back; what has no engine is refused."
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


def test_a_kind_without_an_engine_is_refused(tmp_path):
    from clvla.crl.learner import learn_tasks
    with pytest.raises(ValueError, match="take runner='sync'"): learn_tasks(config(tmp_path, dict(base="dot_2", env=dict(discrete=True))), say=len)
    assert not (tmp_path/"run").exists()
