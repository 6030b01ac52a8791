"What the context, the step and Compose promise to an algorithm: the forward's own noise, dealt-out memory, new parameters."
import subprocess
import sys
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch

from clvla.cl.compose import Compose
from clvla.cl.base import CLAlgorithm, Process, flat, prepare_stages, unflat
from clvla.cl.engine import cl_step
from clvla.cl.er import ER
from clvla.cl.ewc import EWC
from clvla.cl.mir import MIR
from clvla.cl.probe import sample_grads
from clvla.cl.quick import QuickLoader, kept_run, quick_losses, quick_loop, quick_stream, quick_task, run_key
from clvla.cl.sequential import Sequential
from clvla.core.batch import torch_rng
from clvla.core.names import INDEX, TASK_ID

torch.set_num_threads(1)
STREAM = quick_stream(0)


def test_the_menu_imports_an_algorithm_when_it_is_asked_for():
    code = "import sys, clvla.cl.all as a; n = 'clvla.cl.ewc'; before = n in sys.modules; a.algos['ewc']; print(before, n in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["False", "True"]


# --- noise and time
class Teacher(CLAlgorithm):
    "Distils from a frozen copy on the training forward's own batch, noise and time."
    def __init__(self): self.penalties = []
    def on_task_start(self, ctx): self.teacher = deepcopy(ctx.policy).requires_grad_(False)
    def compute_penalty(self, ctx):
        with torch.no_grad(): _, out = self.teacher(ctx.batch, noise=ctx.noise, time=ctx.time)
        penalty = (ctx.out["pred"]-out["pred"]).square().mean()
        self.penalties.append(penalty.item())
        return penalty


@pytest.mark.parametrize("n_micro", [1, 2])
def test_noise_and_time_in_the_context_are_those_of_the_forward(n_micro):
    algo, loop = Compose(ER(replay_ratio=.5), Teacher()), quick_loop(STREAM, head="flow")
    quick_task(algo, loop, 0, steps=2, B=8)
    ctx, penalties = loop.ctx, algo.algos[1].penalties
    algo.on_task_start(ctx)
    penalties.clear()
    ctx.loader = QuickLoader(ctx.data, ["task1"])
    cl_step(algo, loop, 8, n_micro)
    assert penalties == [0.]*n_micro                                  # student and teacher are equal: same noise, same output
    assert ctx.noise.shape == (8, 4, 2, 2) and ctx.time.shape == (8, 4) and ctx.n_mixed == 4
    cl_step(algo, loop, 8, n_micro)
    assert len(penalties) == 2*n_micro and all(p > 0 for p in penalties[n_micro:])   # the student has moved
    pred = lambda noise: algo.algos[1].teacher(ctx.batch, noise=noise, time=ctx.time)[1]["pred"]
    assert (pred(ctx.noise)-pred(ctx.noise.flip(0))).square().mean() > .01                # other noise is another output


def test_heads_without_noise_have_none_in_the_context():
    loop = quick_loop(STREAM)
    quick_task(None, loop, 0, steps=1)
    assert loop.ctx.noise is None and loop.ctx.time is None


# --- several processes
class Ranked(Process):
    "One of several processes; the test adds up what they reduce."
    def __init__(self, rank, world): self.rank, self.world = rank, world


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("n_current,n_old", [(7, 3), (3, 7), (1, 1), (8, 0), (0, 5)])
def test_a_mixed_batch_of_several_processes_is_that_of_one(world, n_current, n_old):
    refs = [("task0", 10+i) for i in range(n_old)]

    def rows(rank, world):
        ctx = quick_loop(STREAM).ctx
        ctx.bind(Ranked(rank, world))
        ctx.begin_batch(n_current)
        mine = ctx.dealt(list(range(n_current)))
        batch = ctx.mix(STREAM.train.fetch("task1", mine) if mine else {}, refs)
        ids = batch.get(TASK_ID, [])
        assert ids[len(mine):] == ["task0"]*ctx.n_mixed and ctx.mixed == ctx.dealt(refs, n_current)
        return list(zip(ids, batch[INDEX].tolist())) if batch else []
    one, hands = rows(0, 1), [rows(r, world) for r in range(world)]
    assert len(one) == n_current+n_old and max(map(len, hands))-min(map(len, hands)) <= 1
    assert [hands[j%world][j//world] for j in range(len(one))] == one


def test_noise_and_numbers_of_several_processes_are_those_of_one():
    ctxs = [quick_loop(STREAM, head="flow").ctx for _ in range(2)]
    noise, time = ctxs[0].policy.draw(7, torch_rng(0, "n"))
    values, gathered, means = torch.arange(7.), [], []
    for r, ctx in enumerate(ctxs):
        ctx.bind(Ranked(r, 2))
        mine = ctx.draw(7, torch_rng(0, "n"))
        assert torch.equal(mine[0], noise[r::2]) and torch.equal(mine[1], time[r::2])
        gathered.append(ctx.gathered(values[r::2], 7))
        means.append(ctx.mean(values[r::2], 7))
    assert torch.equal(sum(gathered), values) and float(sum(means)/2) == pytest.approx(3)


def test_samples_added_without_mix_are_refused_among_several_processes():
    class Adds(CLAlgorithm):
        def modify_batch(self, batch, ctx):
            return {k: torch.cat([v, v]) if torch.is_tensor(v) else v+v for k, v in batch.items()}
    loop = quick_loop(STREAM, head="flow")
    loop.ctx.bind(Ranked(0, 2))
    with pytest.raises(ValueError, match=r"has 8 of 4 samples; add samples with ctx.mix"):
        quick_task(Adds(), loop, 0, steps=1, B=4)


# --- several algorithms
class Bias(CLAlgorithm):
    "A penalty whose gradient is `c` on the last bias; None: no penalty."
    def __init__(self, c): self.c = c
    def compute_penalty(self, ctx): return None if self.c is None else self.c*ctx.params()["net.4.bias"].sum()


@pytest.mark.parametrize("cs,c", [((2.,), 2.), ((None, 2., None, 3.), 5.), ((None,), 0.)])
def test_compose_keeps_every_penalty(cs, c):
    def gradient(algo):
        loop, seen = quick_loop(STREAM), []
        loop.ctx.loader = QuickLoader(STREAM.train, ["task0"])
        algo.after_backward = lambda ctx: seen.append(dict(zip(ctx.params(), [g.clone() for g in ctx.grads()])))
        cl_step(algo, loop, 8)
        return seen[0]["net.4.bias"]
    more = gradient(Compose(*map(Bias, cs))) - gradient(Sequential())
    assert torch.allclose(more, torch.full_like(more, c), atol=1e-5)


class Grows(CLAlgorithm):
    "Freezes what there is and adds two numbers for each task; a task is evaluated with another bias."
    def prepare(self, policy, t, stream):
        if not hasattr(policy, "extra"): policy.extra = torch.nn.ParameterList()
        policy.requires_grad_(False)
        policy.extra.append(torch.nn.Parameter(torch.zeros(2)))
        policy.net[4].bias.requires_grad_(True)
    def compute_penalty(self, ctx): return (ctx.policy.extra[-1]-1).square().sum()
    def eval_key(self, task_id): return task_id
    @contextmanager
    def eval_policy(self, policy, task_id):
        saved = policy.net[4].bias.detach().clone()
        policy.net[4].bias.data += 100
        try: yield
        finally: policy.net[4].bias.data.copy_(saved)


def test_prepare_makes_the_optimizer_of_what_is_trained_now():
    algo, loop = Grows(), quick_loop(STREAM)
    policy = loop.ctx.policy
    first = policy.net[0].weight.detach().clone()
    quick_task(algo, loop, 0, steps=3)
    engine, bias = loop.engine, policy.net[4].bias
    assert list(loop.ctx.params()) == ["net.4.bias", "extra.0"] and policy.extra[0].abs().min() > 0
    quick_task(algo, loop, 1, steps=2)
    assert loop.engine is not engine and list(loop.ctx.params()) == ["net.4.bias", "extra.1"]
    assert [float(loop.engine.moments(p)["step"]) for p in (bias, policy.extra[1])] == [5, 2]
    assert loop.engine.group(policy.extra[0]) is None and torch.equal(policy.net[0].weight, first)
    fresh = quick_loop(STREAM).ctx.policy
    prepare_stages(Grows(), fresh, 1, STREAM)
    fresh.load_state_dict(policy.state_dict())
    assert [p.requires_grad for p in fresh.parameters()] == [p.requires_grad for p in policy.parameters()]
    assert quick_losses(loop, algo).min() > 100 > quick_losses(loop).max()     # measured inside eval_policy


def test_compose_prepares_evaluates_and_checks_with_each():
    policy, both = quick_loop(STREAM).ctx.policy, Compose(Grows(), ER(), Grows())
    both.prepare(policy, 0, STREAM)
    assert len(policy.extra) == 2
    before = policy.net[4].bias.detach().clone()
    with both.eval_policy(policy, "task0"): assert torch.allclose(policy.net[4].bias, before+200)
    assert torch.equal(policy.net[4].bias, before)
    assert both.eval_key("task0") == ("task0", None, "task0") and Compose(ER(), EWC()).eval_key("task0") is None
    with pytest.raises(ValueError, match="rounds to none"): Compose(Sequential(), ER(replay_ratio=.1)).check(4)
    both.check(8)


# --- gradients
def test_gradients_aside_are_lists_and_repeatable():
    ctx = quick_loop(STREAM, head="flow").ctx
    b = STREAM.train.fetch("task0", range(6))
    g, again = ctx.grads_of(b), ctx.grads_of(b)
    assert all(torch.equal(x, y) for x, y in zip(g, again, strict=True))
    assert [x.shape for x in g] == [p.shape for p in ctx.params().values()]
    ctx.step += 1
    assert not torch.equal(g[0], ctx.grads_of(b)[0])                           # another step, other noise
    noise, time = ctx.draw(6, torch_rng(0, "n"))
    each = torch.stack([flat(x) for x in sample_grads(ctx, b, noise, time)])
    assert torch.allclose(each.mean(0), flat(ctx.grads_of(b, noise, time)), atol=1e-6)
    assert all(torch.equal(x, y) for x, y in zip(unflat(flat(g), g), g)) and flat(ctx.local_grads({})).abs().sum() == 0


def test_what_set_grads_writes_is_what_the_step_takes():
    class Ones(CLAlgorithm):
        def after_backward(self, ctx): ctx.set_grads([torch.ones_like(g) for g in ctx.grads()])
    loop = quick_loop(STREAM)
    quick_task(Ones(), loop, 0, steps=1)
    assert float(loop.grad_norm) == pytest.approx(sum(p.numel() for p in loop.ctx.params().values())**.5, rel=1e-5)


# --- results of the lesson stream
def test_results_are_kept_by_code_and_settings(tmp_path):
    R = kept_run(ER(seed=0), 0, tmp_path, steps=3)
    file, = tmp_path.glob("*.json")
    file.write_text("[[7.0]]")
    assert kept_run(ER(seed=0), 0, tmp_path, steps=3).tolist() == [[7.]]
    assert (kept_run(ER(seed=0), 0, tmp_path, steps=4) != R).any() and len(list(tmp_path.glob("*.json"))) == 2
    runs = [(ER(), 0, {}), (ER(), 1, {}), (ER(), 0, {"B": 8}), (ER(20), 0, {}), (MIR(), 0, {}), (None, 0, {}),
            (Compose(ER(), EWC()), 0, {}), (Compose(ER()), 0, {})]
    keys = [run_key(*run) for run in runs]
    assert len(set(keys)) == len(runs) and None not in keys and keys == [run_key(*run) for run in runs]
    assert run_key(Grows(), 0, {}) is None and run_key(Compose(Grows()), 0, {}) is None


@pytest.mark.parametrize("name", ["si+gpm", "gpm+si", "agem+si", "rwalk+gpm"])
def test_a_part_that_measures_an_update_sees_it_whole(monkeypatch, name):
    "Whatever the order: the gradient before another part changes it, and the movement that is left in the end."
    from clvla.cl.all import make_algo
    algo, loop, seen = make_algo(name, 0), quick_loop(STREAM), []
    si = next(a for a in algo.algos if "w" in vars(a) or "path" in vars(a))
    quick_task(algo, loop, 0, steps=12)
    weights = lambda ctx: flat(ctx.params().values()).detach().clone()
    back, step = Compose.after_backward, Compose.after_step
    def after_backward(self, ctx):
        seen[:] = [flat(ctx.grads()).clone(), weights(ctx)]
        back(self, ctx)
    def after_step(self, ctx):
        before = si.w if "w" in vars(si) else si.path[0]
        step(self, ctx)
        g, theta = seen
        fall = (si.w if "w" in vars(si) else si.path[0])-before
        g = g - 2*si.lam*si.omega*(theta-si.star)
        assert torch.allclose(fall, -g*(weights(ctx)-theta), atol=1e-7)
    monkeypatch.setattr(Compose, "after_backward", after_backward)
    monkeypatch.setattr(Compose, "after_step", after_step)
    quick_task(algo, loop, 1, steps=8)
