"Every way to practise under methods against forgetting: each network's hooks, what is drawn and remembered, the same bits after a crash, refusals."
from types import SimpleNamespace

import pytest
import torch

from test_practice import SMALL, Crash, crash_after
from clvla.cl.all import algos, make_algo
from clvla.cl.base import CLAlgorithm
from clvla.cl.buffer import TaskBuffer, bytes_of
from clvla.core.batch import first_weights, torch_rng
from clvla.rl.actor import Actor, TwinCritic
from clvla.rl.all import methods
from clvla.rl.along import why_not
from clvla.rl.chunk_critic import ChunkCritic, CriticLearner
from clvla.rl.config import PracticeConfig, resolve_practice
from clvla.rl.held import HeldNet, TransitionSource
from clvla.rl.learner import practise
from clvla.rl.noise_actor import halved
from clvla.rl.replay import Replay
from clvla.rl.td3 import TD3
from clvla.rl.token_method import TokenMethod
from clvla.run.report import matrix_of
from clvla.run.resume import fingerprint

OFF = dict(best_of_n=dict(updates=6, sample=16), token_td3=dict(updates=6, token_updates=4, sample=16), dsrl=dict(updates=6, sample=16),
           distilled=dict(updates=6, sample=16, N=4, actor_every=2))
ON = dict(token_ppo=dict(token_updates=4, minibatch=8), token_grpo=dict(token_updates=4, minibatch=8, group_size=3),
          choice_ppo=dict(minibatch=8), choice_grpo=dict(minibatch=8, group_size=3),
          flow_ppo=dict(minibatch=8), flow_grpo=dict(minibatch=8, group_size=3))
MENU = tuple(algos)   # as it was before other tests added to it
NETS = dict(best_of_n=["critic"], token_td3=["critic", "actor"], dsrl=["critic", "score", "noise"], distilled=["critic", "actor"], token_ppo=["actor"], token_grpo=["actor"],
            choice_ppo=["actor"], choice_grpo=["actor"], flow_ppo=["actor"], flow_grpo=["actor"])
KW = dict(mir=dict(candidates=4, top_k=2), gss=dict(buffer_size=5), phaser=dict(buffer_size=8, n_phases=2), ewc=dict(n_batches=2), mas=dict(n_batches=2), lwf=dict(prompts="current"))


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


def config(data, path, algo, **kw):
    own = dict(stream=True, evaluate="none", save_every=1, algo=algo, algo_kw=(OFF | ON)[algo])
    return resolve_practice(PracticeConfig(data_dir=str(data), run_dir=str(path), **(SMALL | own | kw)))


def held(data, path, algo, cl, **kw): return practise(config(data, path, algo, cl=cl, cl_kw=KW.get(cl, {}), **kw), say=len)


@pytest.mark.parametrize("algo, cl", [("best_of_n", "mir"), ("best_of_n", "gem"), ("best_of_n", "derpp"), ("token_td3", "er+ewc"), ("token_td3", "mir"), ("token_td3", "lwf"),
                                      ("dsrl", "der"), ("dsrl", "mas"), ("distilled", "er+ewc"), ("token_ppo", "ewc"), ("choice_ppo", "mas"), ("token_grpo", "l2"), ("choice_grpo", "retain"), ("flow_ppo", "ewc"), ("choice_ppo", "gpm")])
def test_a_crash_in_the_second_task_changes_nothing(data, tmp_path, algo, cl):
    run = held(data, tmp_path/"whole", algo, cl)
    n = 15 if algo in OFF else 3   # of 24 updates, or of 4
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, n, algo=algo)
        with pytest.raises(Crash): held(data, tmp_path/"run", algo, cl)
    assert fingerprint(held(data, tmp_path/"run", algo, cl).path) == fingerprint(run.path)


class Noted(CLAlgorithm):
    "Notes the hooks that are called, and for which task."
    def __init__(self, seen): self.seen = seen
    def on_task_start(self, ctx): self.seen.append(("start", ctx.task_id))
    def after_step(self, ctx): self.seen.append(("step", ctx.task_id))
    def on_task_end(self, ctx): self.seen.append(("end", ctx.task_id))


@pytest.mark.parametrize("algo", NETS)
def test_each_network_hears_its_own_hooks(data, tmp_path, monkeypatch, algo):
    seen, made = {}, []

    def make(cfg):
        made.append([])
        return Noted(made[-1])
    monkeypatch.setattr("clvla.rl.learner.make_cl", make)
    real = TokenMethod.enter

    def enter(self, stage):
        real(self, stage)
        seen.update({name: a.seen for name, a in self.algos.items()})
    monkeypatch.setattr(TokenMethod, "enter", enter)
    practise(config(data, tmp_path/"run", algo, cl="sequential"), say=len)
    assert list(seen) == NETS[algo]
    for name, of in seen.items():
        ends = [e for e in of if e[0] != "step"]
        assert ends == [("start", "left"), ("end", "left"), ("start", "right"), ("end", "right")], name
        where = {k: of.index(k) for k in ends}
        steps = [k for k, e in enumerate(of) if e == ("step", "right")]
        assert steps and where["start", "right"] < min(steps) and max(steps) < where["end", "right"], name
    if algo in OFF: assert [of.count(("step", "left")) for of in seen.values()] == dict(best_of_n=[12], token_td3=[12, 6], dsrl=[12]*3, distilled=[12, 6])[algo]


@pytest.mark.parametrize("cl, kw, shares", [("none", {}, [0, 0]), ("er", dict(replay_ratio=.25), [0, .25]), ("cumulative", {}, [0, .5])])
@pytest.mark.parametrize("algo", OFF)
def test_what_is_learnt_from_is_of_the_right_tasks(data, tmp_path, monkeypatch, algo, cl, kw, shares):
    "Of the present task alone; with replay a share of the finished one; with all tasks so far, half each."
    found, real = {0: [], 1: []}, HeldNet.step

    def step(self, rows):
        out = real(self, rows)
        if "task" in self.ctx.batch: found[self.ctx.t].append((self.ctx.batch["task"] != self.ctx.t).float().mean().item())
        return out
    monkeypatch.setattr(HeldNet, "step", step)
    practise(config(data, tmp_path/"run", algo, cl=cl, cl_kw=kw), say=len)
    assert [{round(x, 3) for x in of} for of in found.values()] == [{shares[0]}, {shares[1]}]


def test_a_method_that_holds_nothing_changes_no_bit(data, tmp_path):
    run = held(data, tmp_path/"none", "best_of_n", "none")
    other = held(data, tmp_path/"sequential", "best_of_n", "sequential")
    assert [r | dict(time=0) for r in run.logs()] == [r | dict(time=0) for r in other.logs()]


def test_the_matrix_of_a_critic_under_replay(data, tmp_path):
    m = matrix_of(held(data, tmp_path/"run", "best_of_n", "er", evaluate="full").path)
    assert m.R.shape == (2, 2) and not torch.tensor(m.R).isnan().any()


def test_how_many_algorithms_fit():
    fit = {name: {a for a in MENU if not why_not(make_algo(a, **KW.get(a, {})), methods[name].lacks)} for name in methods}
    assert all(len(fit[name]) == 17 for name in OFF) and all(len(fit[name]) == 9 for name in ON)
    assert {"er", "mir", "ewc", "derpp", "cumulative"} <= fit["best_of_n"] and {"ewc", "l2", "si", "mas", "lwf"} <= fit["choice_ppo"]


@pytest.mark.parametrize("algo, kw, says", [
    ("token_ppo", dict(cl="er"), "learns from attempts of its present weights alone"), ("choice_ppo", dict(cl="cumulative"), "present weights alone"),
    ("best_of_n", dict(cl="packnet"), "for each task"), ("best_of_n", dict(cl="joint"), "practised together"), ("dsrl", dict(cl="lwf"), "hear no instruction"),
    ("token_td3", dict(cl="er", algo_kw=dict(encoder_lr=1e-4)), "no algorithm holds"), ("best_of_n", dict(cl="er", algo_kw=dict(sample=1)), "nothing would be replayed")])
def test_what_cannot_hold_is_refused_before_anything_is_made(data, tmp_path, algo, kw, says):
    with pytest.raises(ValueError, match=says): practise(config(data, tmp_path/"run", algo, **kw), say=len)
    assert not (tmp_path/"run/practice").exists()


def test_a_memory_whose_transitions_are_lost_ends_the_run(data, tmp_path):
    "The ring is smaller than what two tasks make; it is refused when a lost transition is asked for, and no other one is taken."
    long = dict(episodes=300, round_episodes=150, rows_per_task=8)
    with pytest.raises(ValueError, match="has lost the first .* raise capacity"):
        practise(config(data, tmp_path/"run", "token_td3", cl="er", algo_kw=OFF["token_td3"] | dict(capacity=1000), **long), say=len)


def test_half_of_each_tasks_rows():
    "A network that takes half a batch takes half of every task, the first of each."
    batch = dict(task=torch.tensor([0]*6+[1]*4), x=torch.arange(10))
    assert halved(batch)["x"].tolist() == [0, 1, 2, 6, 7]
    assert halved(dict(task=torch.zeros(4), x=torch.arange(4)))["x"].tolist() == [0, 1]


def rows_of(critic, B=24, seed=0):
    g = torch_rng(seed, "rows")
    draw = lambda *shape: torch.randn(B, *shape, generator=g)
    return dict(x=draw(critic.X), next_x=draw(critic.X), ref=draw(critic.C, critic.A), next_ref=draw(critic.C, critic.A), action=draw(critic.C, critic.A),
                next_action=draw(critic.C, critic.A), reward=torch.rand(B, generator=g), mask=torch.full((B,), .9), ret=torch.rand(B, generator=g))


@pytest.mark.parametrize("name", ["critic", "actor"])
def test_the_losses_of_rows_add_up_to_the_loss(name):
    with first_weights(0, "nets"): td3 = TD3(Actor(3, 2, 2), TwinCritic(3, 2, 2), seed=0)
    model, rows = td3.held[name].model, rows_of(td3.critic)
    noise, time = model.draw(24, torch_rng(0, "draws"))
    each, mean = (model(rows, noise=noise, time=time, reduction=r)[0] for r in ("none", "mean"))
    assert each.shape == (24,) and torch.allclose(each.mean(), mean, rtol=1e-5)
    twice = model(rows, noise=torch.cat([noise, noise], 1), time=None if time is None else torch.cat([time, time], 1))[0]
    assert torch.allclose(twice, mean, rtol=1e-5)   # several draws of a row are averaged


def test_the_actors_step_leaves_the_critic_and_its_gradients_alone():
    with first_weights(0, "nets"): td3 = TD3(Actor(3, 2, 2), TwinCritic(3, 2, 2), seed=0)
    before = [p.clone() for p in td3.critic.parameters()]
    td3.update_actor(rows_of(td3.critic))
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, td3.critic.parameters()))


def test_a_penalty_moves_a_held_critic():
    "A spring that is infinitely stiff keeps the critic where it is."
    class Stiff(CLAlgorithm):
        def on_task_start(self, ctx): self.at = [p.detach().clone() for p in ctx.policy.parameters()]
        def compute_penalty(self, ctx): return 1e9*sum((p-a).square().sum() for p, a in zip(ctx.policy.parameters(), self.at))
    ended = {}
    for name, algo in dict(free=None, stiff=Stiff()).items():
        with first_weights(0, "critic"): critic = ChunkCritic(3, 2, 2, hidden=8)
        learner = CriticLearner(critic, lr=1e-3)
        ctx = learner.held.ctx
        learner.held.hold(algo, ctx)
        if algo: algo.on_task_start(ctx)
        start = [p.detach().clone() for p in critic.parameters()]
        for k in range(20): learner.update(rows_of(critic, seed=k))
        ended[name] = sum((p-a).square().sum() for p, a in zip(critic.parameters(), start)).item()
    assert ended["stiff"] < ended["free"]/10


def test_transitions_by_number_survive_a_file_and_a_loss(tmp_path):
    from clvla.core.state import load_state, save_state
    spec = dict(x=((), torch.float32)), dict(y=((), torch.float32))
    replay, g = Replay(40, *spec), torch_rng(0, "pushes")
    came = {0: [], 1: []}
    for k in range(30):
        task, n = int(torch.randint(2, (), generator=g)), int(torch.randint(1, 5, (), generator=g))
        y = torch.arange(float(n))+100*k
        replay.push(dict(x=torch.zeros(n+1)), dict(start=list(range(n)), next=list(range(1, n+1)), y=y), task)
        came[task] += y.tolist()
    other = Replay(40, *spec)
    other.load_state_dict(load_state(save_state(tmp_path/"replay.safetensors", replay.state_dict())))
    for memory in replay, other:
        source = TransitionSource(lambda: memory, ["a", "b"], 0)
        for task, name in enumerate(source.ids):
            there = [i for i in range(source.n_frames(name)) if i >= memory.left[task]]
            assert source.n_frames(name) == len(came[task]) and there and memory.left[task] > 0
            assert source.fetch(name, there)["y"].tolist() == came[task][memory.left[task]:]
            with pytest.raises(ValueError, match="raise capacity"): source.fetch(name, [0])
            source.begin([name], 0)
            assert sorted(y for b in source.sample_batches(99, 4, "fisher") for y in b["y"].tolist()) == came[task][memory.left[task]:]


def test_a_memory_in_bytes_is_measured_before_a_task_has_been_attempted(tmp_path):
    replay = Replay(20, dict(x=((3,), torch.float16)), dict(y=((), torch.float32)))
    source = TransitionSource(lambda: replay, ["a", "b"], 0, view=lambda rows: {k: rows[k] for k in ("x", "y")})
    memory = TaskBuffer(total_size="64 B")
    for task, name in enumerate(source.ids):
        memory.check_room(SimpleNamespace(stream=SimpleNamespace(stages=source.ids), task_id=name, data=source))
        replay.push(dict(x=torch.ones(5, 3)), dict(start=[0, 1, 2, 3], next=[1, 2, 3, 4], y=torch.ones(4)), task)
        memory.add_task(name, source)
        assert memory.frame_bytes == bytes_of(source.fetch(name, [0])) == 16 and memory.total_size == 4
    assert [len(v) for v in memory.frames.values()] == [2, 2]


def test_a_memory_in_bytes_holds_a_critic(data, tmp_path):
    run = practise(config(data, tmp_path/"run", "best_of_n", cl="derpp", cl_kw=dict(total_size="100 kB"), save_every=0), say=len)
    assert {r["stage"] for r in run.logs()} == {0, 1}


def test_old_states_of_a_replay_are_read():
    replay = Replay(10, dict(x=((), torch.float32)), dict(y=((), torch.float32)))
    replay.push(dict(x=torch.zeros(3)), dict(start=[0, 1], next=[1, 2], y=torch.ones(2)), 0)
    old = {k: v for k, v in replay.state_dict().items() if k not in ("episode", "n_episodes", "left")}
    other = Replay(10, dict(x=((), torch.float32)), dict(y=((), torch.float32)))
    other.load_state_dict(old)
    assert other.counts() == {0: 2} and other.arrived(0) == 2


def test_a_method_of_ones_own_in_practice(data, tmp_path):
    "An algorithm from one file, in a run by a critic."
    plugin = tmp_path/"mine.py"
    plugin.write_text("from clvla.cl.all import algos\nfrom clvla.cl.er import ER\n\nclass Mine(ER): pass\n\nalgos['mine'] = Mine\n")
    run = held(data, tmp_path/"run", "best_of_n", "mine", plugins=[str(plugin)])
    assert run.cfg.cl == "mine" and len(run.logs())
