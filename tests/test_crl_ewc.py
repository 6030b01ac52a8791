"Springs of agents: the same bits after a crash with PPO and in the online form, what they hold, and runs without them that stay what they were."
import pytest
import torch

from test_crl import Crash, crash_after, small

KW = dict(fisher_steps=50)


def test_ppo_with_springs_goes_on_with_the_same_bits(tmp_path):
    "Power is lost in the third stage: one fading spring, and the observations of a task that is under way, come from the checkpoint."
    from clvla.core.state import load_state
    from clvla.crl.learner import learn_tasks
    from clvla.run.resume import fingerprint
    run = lambda name: learn_tasks(small(tmp_path/name, cl="online_ewc", cl_kw=KW, save_every=1), say=len)
    whole = run("whole")
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, 11)
        with pytest.raises(Crash): run("cut")
    assert fingerprint(run("cut").path) == fingerprint(whole.path)
    penalties = [r["train/penalty"] for r in whole.logs()]
    assert penalties[:4] == [0]*4 and all(0 < p < float("inf") for p in penalties[4:])
    last = sorted(p for p in (whole.path/"checkpoints").iterdir() if p.is_dir())[-1]
    state = load_state(last/"state.safetensors")["cl"]
    assert state["algo"]["n_tasks"] == 4 and state["algo"]["seen"] == {} and "source" not in state


@pytest.mark.parametrize("algo", ["ppo", "impala", "clear"])
def test_the_penalty_reaches_every_agent_s_gradient(algo):
    "With a spring that outweighs the task, an update moves the stiff weights less."
    from clvla.cl.base import flat
    from clvla.core.batch import torch_rng
    from clvla.crl.all import make_agent, make_cl
    from clvla.crl.experiment import Spaces, Stage, make_experiment
    from clvla.crl.runner import Lanes
    task = make_experiment(dict(base="dot_2", env=dict(discrete=True))).stream["left"]
    moved = {}
    for lam in (0., 1e4):
        agent, cl = make_agent(algo, n_envs=2, horizon=20, hidden=8, channels=2), make_cl("ewc", 0, ewc_lam=lam)
        cl.bind(agent)
        agent.build(None, Spaces(8, 2, dict(left=5)))
        start = flat(agent.net.parameters()).detach().clone()
        cl.begin(Stage(1, 0, "left", 120), 12, None)
        cl.algo.put("before", torch.ones_like(start), start, list(cl.ctx.params()))
        lanes = Lanes(task.env, 2, 8)
        for _ in range(3): metrics = agent.learn(lanes.play(agent, 20, torch_rng(0, "draws")))
        metrics = cl.metrics() | metrics
        moved[lam] = float((flat(agent.net.parameters()).detach()-start).norm())
        assert (metrics["penalty"] > 0) == (lam > 0)
    assert moved[1e4] < .7*moved[0.], moved


def test_a_task_that_comes_again_has_one_spring(tmp_path):
    from clvla.core.state import load_state
    from clvla.crl.learner import learn_tasks
    run = learn_tasks(small(tmp_path/"run", cl="ewc", cl_kw=KW), say=len)
    ends = [load_state(p/"state.safetensors")["cl"]["algo"]["springs"] for p in sorted((run.path/"checkpoints").iterdir()) if p.is_dir()]
    assert [list(e) for e in ends[-3:]] == [["left", "right"]]*3
    assert not ends[-3]["left"]["F"].equal(ends[-2]["left"]["F"]) and ends[-2]["left"]["F"].equal(ends[-1]["left"]["F"])


@pytest.mark.parametrize("cl, n", [("ewc", 2), ("online_ewc", 1)])
def test_a_state_from_before_springs_were_those_of_cl_gives_the_penalty_of_their_sum(tmp_path, cl, n):
    "Springs by task, and observations, as they were stored; through a file."
    from clvla.cl.base import flat
    from clvla.core.batch import torch_rng
    from clvla.core.state import load_state, save_state
    from clvla.crl.all import make_agent, make_cl
    from clvla.crl.experiment import Spaces, Stage
    agent, held, g = make_agent("impala", hidden=8, channels=2), make_cl(cl, 0, ewc_lam=3.), torch_rng(0, "springs")
    held.bind(agent)
    agent.build(None, Spaces(8, 2, dict(left=5)))
    theta = flat(agent.net.parameters())
    springs = {k: dict(F=torch.rand(len(theta), generator=g), rest=torch.randn(len(theta), generator=g)) for k in ("left", "right")[:n]}
    save_state(tmp_path/"old", dict(springs=springs if n == 2 else {"all tasks": springs["left"]}, seen=dict(state=torch.ones(3, 2))))
    held.reshape(Stage(2, 1, "left", 160), 8, None)
    held.load_state_dict(load_state(tmp_path/"old"))
    whole = 1.5*sum((s["F"]*(theta-s["rest"]).square()).sum() for s in springs.values())
    got = held.algo.compute_penalty(held.ctx)
    assert torch.allclose(got, whole, rtol=1e-5) and held.algo.n_tasks == n and held.algo.seen["state"].equal(torch.ones(3, 2))
    assert torch.allclose(*(flat(torch.autograd.grad(x, list(agent.net.parameters()), retain_graph=True)) for x in (got, whole)), atol=1e-4)


def test_a_run_with_such_a_checkpoint_goes_on(tmp_path, monkeypatch):
    "Cut in the third stage; what is stored until then has the older form."
    from clvla.core.state import load_state
    from clvla.crl.held import Held
    from clvla.crl.learner import learn_tasks
    run = lambda name: learn_tasks(small(tmp_path/name, cl="ewc", cl_kw=KW, save_every=1), say=len)
    whole = run("whole")
    with monkeypatch.context() as m:
        m.setattr(Held, "state_dict", lambda self: {k: v for k, v in self.algo.state_dict().items() if k in ("springs", "seen")})
        crash_after(m, 11)
        with pytest.raises(Crash): run("cut")
    cut = run("cut")
    assert [r["train/penalty"] for r in cut.logs()] == [r["train/penalty"] for r in whole.logs()]
    ends = [load_state(sorted(p for p in (r.path/"checkpoints").iterdir() if p.is_dir())[-1]/"state.safetensors")["cl"]["algo"] for r in (cut, whole)]
    assert list(ends[0]["springs"]) == ["left", "right"] and all(ends[0][k].equal(ends[1][k]) for k in ("F", "anchor"))


def test_runs_without_a_method_are_what_they_were(tmp_path):
    "The identity of a run has no new setting at its default; an older folder's config, which lacks it, agrees with the new one."
    from clvla.core.config import config_json
    from clvla.crl.config import resolve_agent
    from clvla.run.config import differences, identity
    cfg, other = resolve_agent(small(tmp_path/"run")), resolve_agent(small(tmp_path/"run", cl="ewc"))
    old = {k: v for k, v in config_json(cfg).items() if k not in ("cl", "cl_kw")}
    assert not {"cl", "cl_kw"} & set(identity(cfg)) and differences(old, cfg) == [] and identity(other)["cl"] == "ewc"
    assert differences(old, other) == ["cl: 'none' -> 'ewc'"]


@pytest.mark.parametrize("kw, says", [
    (dict(algo="random", algo_kw={}, cl="ewc"), "choose ppo, impala or clear"), (dict(cl="ewc", cl_kw=dict(ewc_lam=-1.)), "ewc_lam must be a number at least 0"),
    (dict(cl="ewc", cl_kw=dict(ewc_decay=.5)), "no setting 'ewc_decay'"), (dict(cl="online_ewc", cl_kw=dict(ewc_decay=2.)), r"in \[0,1\]"),
    (dict(cl="ewc", cl_kw=dict(fisher_steps=0)), "fisher_steps must be"), (dict(cl="ewc", cl_kw=dict(f_max=0.)), "f_max must be")])
def test_bad_settings_are_refused_before_anything_is_made(tmp_path, kw, says):
    from clvla.crl.learner import learn_tasks
    with pytest.raises(ValueError, match=says): learn_tasks(small(tmp_path/"run", **kw), say=len)
    assert not (tmp_path/"run").exists()
