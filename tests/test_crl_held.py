"Methods of `cl` hold agents: which ones, the same bits after a crash, plugins, evaluation with each task's own weights, refusals."
from pathlib import Path

import pytest
import torch

from test_crl import Crash

from clvla.cl.all import algos, make_algo
from clvla.crl.all import agents, make_agent, make_cl
from clvla.crl.config import AgentConfig
from clvla.crl.experiment import Spaces
from clvla.crl.learner import AgentLearner, learn_tasks
from clvla.run.config import make_config
from clvla.run.resume import fingerprint

SHIPPED = tuple(algos)   # before the plugins of other tests
TWO = dict(base="dot_2", env=dict(discrete=True), name="two")
SETTINGS = dict(lwf=dict(prompts="current"), task_lora=dict(rank=2), progressive=dict(rank=2), olora=dict(rank=2), gss=dict(buffer_size=5), derpp=dict(distance="kl"))
REPLAY, TOO_MUCH = {"er", "gss", "agem", "gem", "derpp", "der"}, {"joint", "cumulative", "from_scratch", "gdumb", "mir", "phaser", "latent", "lfl", "router", "keeplora", "mlr"}


def config(path, algo="impala", cl="none", **kw):
    given = dict(suite=TWO, cycles=1, algo=algo, cl=cl, cl_kw=SETTINGS.get(cl, {}), steps_per_task=400, eval_every=400, n_trials=2, image_size=8,
                 threads=1, device="cpu", algo_kw=dict(n_envs=4) | (dict(horizon=16) if algo == "ppo" else {}), run_dir=str(path), data_dir=str(path.parent/"data"))
    return make_config(AgentConfig, given | kw)


def held(name, agent):
    "Whether a method binds to an agent."
    try: make_cl(name, 0, **SETTINGS.get(name, {})).bind(make_agent(agent))
    except ValueError: return False
    return True


@pytest.mark.parametrize("agent", agents)
def test_which_methods_hold_which_agent(agent):
    expected = dict(ppo=set(SHIPPED)-REPLAY-TOO_MUCH, impala=set(SHIPPED)-TOO_MUCH, clear=set(SHIPPED)-TOO_MUCH).get(agent, set())
    assert {name for name in SHIPPED if held(name, agent)} == expected


CASES = [("impala", "er"), ("impala", "gem"), ("impala", "derpp"), ("impala", "task_lora"), ("impala", "er+l2"), ("ppo", "packnet"), ("ppo", "lwf"),
         ("ppo", "progressive"), ("clear", "der"), ("ppo", "gpm"), ("impala", "gpm"), ("impala", "olora")]


@pytest.mark.parametrize("algo, cl", CASES, ids=lambda x: x)
def test_the_same_bits_after_a_crash(tmp_path, monkeypatch, algo, cl):
    "Power is lost inside the second task, whose network may have another shape than the first one's."
    cfg = lambda name: config(tmp_path/name, algo, cl, save_every=1)
    whole,update = learn_tasks(cfg("whole"), say=len),AgentLearner.update
    def fails(self, stage):
        if (stage.t, self.step) == (1, 2): raise Crash("no power")
        update(self, stage)
    with monkeypatch.context() as m:
        m.setattr(AgentLearner, "update", fails)
        with pytest.raises(Crash): learn_tasks(cfg("cut"), say=len)
    assert fingerprint(learn_tasks(cfg("cut"), say=len).path) == fingerprint(whole.path)


@pytest.mark.parametrize("agent", ["ppo", "impala"])
@pytest.mark.parametrize("cl, kw", [("olora", dict(rank=2)), ("olora", dict(rank=2, head_rank=0)), ("dwe", dict(units=2)), ("progressive", dict(rank=2)), ("task_lora", dict(rank=2))])
def test_an_agent_s_last_layers_learn_in_every_task(agent, cl, kw):
    "Each of them is one linear layer, which is a whole part of the head."
    agent, algo = make_agent(agent), make_algo(cl, 0, **kw)
    agent.build(None, Spaces(8, 2, dict(left=4)))
    model = agent.learner.model if hasattr(agent, "learner") else agent.model
    for t in (0, 1, 2):
        algo.prepare(model, t, None)
        trained = [n for n, p in model.named_parameters() if p.requires_grad]
        assert all(any(n.startswith(f"{part}.") for n in trained) for part in [n for n, _ in model.named_modules() if n.endswith((".logits", ".value"))])


def test_hooks_are_called_once_for_each_optimizer_step(tmp_path, monkeypatch):
    "And `n_steps` says how many there will be, also where the last rollout of a stage is shorter."
    from clvla.cl.sequential import Sequential
    odd = dict(steps_per_task=33, algo_kw=dict(n_envs=8, horizon=4, minibatch=4, epochs=2))   # the last step is made in all environments
    for algo,name,kw in (("impala", "impala", {}), ("ppo", "ppo", {}), ("ppo", "odd", odd)):
        seen = []
        monkeypatch.setattr(Sequential, "after_step", lambda self, ctx: seen.append((ctx.t, ctx.step, ctx.n_steps)), raising=False)
        learn_tasks(config(tmp_path/name, algo, "sequential", **kw), say=len)
        for t in (0, 1):
            steps = [step for stage,step,_ in seen if stage == t]
            assert steps == list(range(len(steps))) and {n for stage,_,n in seen if stage == t} == {len(steps)}, name


def test_replayed_unrolls_are_of_finished_tasks(tmp_path, monkeypatch):
    from clvla.cl.er import ER
    drawn,choose = [],ER.choose
    def noted(self, n, ctx):
        refs = choose(self, n, ctx)
        drawn.extend((ctx.task_id, task_id) for task_id,_ in refs)
        return refs
    monkeypatch.setattr(ER, "choose", noted)
    learn_tasks(config(tmp_path/"run", "impala", "er"), say=len)
    assert set(drawn) == {("right", "left")}


def test_a_task_is_evaluated_with_its_own_weights(tmp_path):
    "PackNet freezes what a task has kept: its returns after its stage are those of every later evaluation, also in the background."
    for name,kw in dict(front={}, background=dict(background=True)).items():
        run = learn_tasks(config(tmp_path/name, "impala", "packnet", n_trials=5, steps_per_task=1200, eval_every=600, **kw), say=len)
        of_left = [[r["reward"] for r in run.episodes() if r["task"] == "left" and (r["stage"], r["step"]) == at] for at in ((0, None), (1, None))]
        assert of_left[0] == of_left[1] and len(of_left[0]) == 5
    strip = lambda path: sorted((r["stage"], r["step"] or -1, r["task"], r["trial"], r["reward"]) for r in path.episodes())
    from clvla.run.folder import RunFolder
    assert strip(RunFolder(tmp_path/"front")) == strip(RunFolder(tmp_path/"background"))


def test_a_pair_is_evaluated_with_the_weights_of_its_task(tmp_path):
    suite = dict(base="dot_2", env=dict(discrete=True), eval_env=dict(discrete=True), name="two")
    run = learn_tasks(config(tmp_path/"run", "impala", "dwe", cl_kw=dict(units=2), suite=suite, n_trials=5, steps_per_task=1200, eval_every=1200), say=len)
    of_pair = [[(r["reward"], r["steps"]) for r in run.episodes() if r["task"] == "left-test" and (r["stage"], r["step"]) == (t, None)] for t in (0, 1)]
    assert of_pair[0] == of_pair[1] and len(of_pair[0]) == 5


PLUGIN = '''
from clvla.cl.all import algos, make_algo
from clvla.cl.base import CLAlgorithm

class Freeze(CLAlgorithm):
    "Nothing moves behind the first task."
    def on_task_start(self, ctx): ctx.restart_optimizer()   # whose moments would go on moving the weights
    def after_backward(self, ctx):
        if ctx.t: ctx.set_grads([0*g for g in ctx.grads()])

algos["freeze"] = Freeze
'''


@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_a_plugin_s_algorithm_holds_an_agent_unchanged(tmp_path, algo):
    (tmp_path/"freeze_it.py").write_text(PLUGIN)
    run = learn_tasks(config(tmp_path/"run", algo, "freeze", plugins=[str(tmp_path/"freeze_it.py")]), say=len)
    from clvla.core.state import load_state
    def weights(folder):
        state = load_state(folder/"algo.safetensors")
        return state["nets"]["actor"] if algo == "ppo" else state["net"]
    first,last = (weights(p) for p in sorted(p for p in (run.path/"checkpoints").iterdir() if p.is_dir()))
    assert all(first[k].equal(last[k]) for k in first)


def test_the_log_has_the_penalty_and_what_a_method_says(tmp_path):
    rows = learn_tasks(config(tmp_path/"run", "impala", "er+l2"), say=len).logs()
    assert any("train/penalty" in r for r in rows if r["stage"] == 1) and not any("train/penalty" in r for r in rows if r["stage"] == 0)
    assert any(key.endswith("buffer") for r in rows for key in r)


@pytest.mark.parametrize("kw, says", [
    (dict(cl="mir"), "its optimizer is RMSProp"), (dict(algo="ppo", cl="er"), "of its present weights alone"), (dict(cl="joint"), "plays the task under way alone"),
    (dict(algo="sane", algo_kw={}, cl="er"), "merges networks"), (dict(algo="random", algo_kw={}, cl="l2"), "it has no steps"),
    (dict(algo="progress_compress", algo_kw={}, cl="l2"), "starts anew with each task"), (dict(cl="packnet", runner="parallel"), "take runner 'sync' or 'batched'"),
    (dict(cl="task_lora", algo_kw=dict(lag=2)), "set lag to 0"), (dict(algo="ppo", suite="dot_2", cl="lwf"), "actions are numbers"),
    (dict(algo="ppo", algo_kw=dict(kl_stop=.1), cl="packnet"), "leave kl_stop out"), (dict(cl="err"), "did you mean 'er'?"), (dict(cl="er+er"), "names 'er' twice"),
    (dict(cl="er", cl_kw=dict(refresh=3)), "no setting 'refresh'"), (dict(cl="lwf", cl_kw={}), "hears no instruction"),
    (dict(cl="er", cl_kw=dict(selection="herding")), "asked for probabilities and a value alone")])
def test_what_cannot_be_held_is_a_sentence(tmp_path, kw, says):
    with pytest.raises(ValueError) as e: learn_tasks(config(tmp_path/"run", **kw), say=len)
    assert says in str(e.value) and "\n" not in str(e.value)
    assert not Path(tmp_path/"run").exists()


def test_penalties_hold_agents_with_continuous_actions(tmp_path):
    run = learn_tasks(config(tmp_path/"run", "ppo", "l2", suite="dot_2", cl_kw=dict(lam=5.)), say=len)
    assert any(r.get("train/penalty", 0) > 0 for r in run.logs()) and torch.isfinite(torch.tensor([r["train/loss"] for r in run.logs()])).all()
