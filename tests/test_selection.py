"Which frames a memory keeps: Avalanche's orders, rules against brute force, looks that leave no trace, several processes, and GSS's replacements."
from pathlib import Path
import numpy as np, pytest, torch
from clvla.cl.all import make_algo
from clvla.cl.base import Process, call_hook, flat
from clvla.cl.buffer import TaskBuffer
from clvla.cl.engine import cl_step
from clvla.cl.er import ER
from clvla.cl.probe import sample_grads
from clvla.cl.quick import QuickData, QuickLoader, quick_loop, quick_run, quick_stream, quick_task
from clvla.cl.selection import BLIND, TaskFrames, center, herding, k_center, select, selections, sketch
from clvla.core.batch import rng_state, take, torch_rng
from clvla.core.names import INDEX
from clvla.core.seeds import np_rng
from clvla.train.config import TrainConfig, resolve
from clvla.train.prepare import check

torch.set_num_threads(1)
STREAM = quick_stream(0, n_frames=61)
DIGITS = np.load(Path(__file__).parent/"digits01.npz", allow_pickle=False)["x"][:40].astype(float)
ASKING = [name for name in selections if name not in BLIND]


def loop_after(task=0, head="mse", stream=STREAM, steps=8):
    loop = quick_loop(stream, head)
    quick_task(None, loop, task, steps=steps)
    return loop

def frames_of(loop, task_id="task0"): return TaskFrames(task_id, loop.ctx.data, loop.ctx)


# --- orders
def test_orders_of_digits_are_avalanches():
    assert herding(DIGITS, 10).tolist() == [2, 18, 4, 35, 6, 7, 17, 14, 39, 15]
    assert center(DIGITS, 10).tolist() == [2, 37, 22, 26, 11, 35, 15, 3, 10, 17]

def test_greedy_rules_are_their_equations():
    x = np.random.RandomState(0).normal(size=(30, 4))
    mu,chosen,spread = x.mean(0),[],[int(((x-x.mean(0))**2).sum(1).argmin())]
    for k in range(1, 12):
        chosen.append(min((i for i in range(30) if i not in chosen), key=lambda i: np.linalg.norm(mu-x[[*chosen, i]].mean(0))))
        if k < 11: spread.append(max((i for i in range(30) if i not in spread), key=lambda i: min(np.linalg.norm(x[i]-x[j]) for j in spread)))
    assert herding(x, 11).tolist() == chosen and k_center(x, 11).tolist() == spread

@pytest.mark.parametrize("rule", [herding, center, k_center])
def test_an_order_of_copies_repeats_no_row_and_a_longer_one_begins_alike(rule):
    x = np.repeat(np.random.RandomState(1).normal(size=(4, 3)), 5, 0)
    order = rule(x, 20)
    assert sorted(order) == list(range(20)) and (rule(x, 7) == order[:7]).all()

def test_episodes_are_kept_whole():
    class Data(QuickData):
        def episodes(self, task_id): return np.repeat([0, 1, 2, 3], [10, 20, 11, 20])
    frames = TaskFrames("task0", Data(STREAM.train.tasks))
    first = []
    for s in range(40):
        order = select("episodes", frames, 61, np_rng(s, "e"))
        visits = frames.episodes()[order]
        assert sorted(order) == list(range(61)) and (np.diff(visits) != 0).sum() == 3   # one after the other
        first.append(int(visits[0]))
    assert set(first) == {0, 1, 2, 3}


# --- looks
@pytest.mark.parametrize("head", ["mse", "flow"])
@pytest.mark.parametrize("name", ASKING)
def test_a_look_leaves_no_trace(name, head):
    loop = loop_after(head=head)
    ctx = loop.ctx
    ctx.policy.register_buffer("seen", torch.zeros(1))
    ctx.policy.net[1].register_forward_hook(lambda m, x, y: torch.nn.functional.dropout(y, .5, m.training))   # draws from the global generator in training
    ctx.forward(ctx.batch, noise=ctx.noise, time=ctx.time)[0].backward()
    traces = lambda: [x.clone() for p in ctx.params().values() for x in (p, p.grad, *ctx.moments(p).values())] + [torch.get_rng_state(), loop.generator.get_state()]
    before = traces()
    a,b = (select(name, frames_of(loop), 9, np_rng(0, "x")) for _ in range(2))
    assert (a == b).all() and all(torch.equal(x, y) for x,y in zip(before, traces(), strict=True)) and all(m.training for m in ctx.policy.modules())

def test_features_losses_and_directions_are_those_of_the_frames():
    loop = loop_after()
    frames,ctx = frames_of(loop),loop.ctx
    batch = STREAM.train.tasks["task0"]
    loss,out = ctx.policy(batch, reduction="none")
    g = torch.stack([flat(g) for g in sample_grads(ctx, batch)]).double()
    x = frames.directions()
    assert np.allclose(frames.features(), out["pooled"].detach().numpy(), atol=1e-6) and np.allclose(frames.losses(), loss.detach().numpy(), atol=1e-6)
    assert x.shape == (61, 1021) and np.allclose(np.linalg.norm(x, axis=1), 1)
    g = (g/g.norm(dim=1, keepdim=True)).numpy()
    assert abs(x@x.T - g@g.T).max() < .2 and (x@x.T - g@g.T).std() < .035

def test_a_sketch_is_linear_and_its_mean_keeps_inner_products():
    g = torch.randn(2, 5000, generator=torch_rng(0, "g"))
    products = []
    for s in range(200):
        signs = torch.randint(2, (5000,), generator=torch_rng(s, "signs"))*2-1
        a,b = (sketch(x, signs, 101) for x in g)
        assert torch.allclose(sketch(g[0]+2*g[1], signs, 101), a+2*b, atol=1e-3)
        products.append(float(a@a))
    assert abs(np.mean(products)/float(g[0]@g[0])-1) < 4*(2/101)**.5/200**.5

class Rank(Process):
    "One of several processes; `sum` collects what they reduce."
    def __init__(self, rank, world): self.rank,self.world,self.given,self.sums = rank,world,[],None
    def reduce(self, x):
        self.given.append(x.clone())
        return x if self.sums is None else self.sums[len(self.given)-1]

@pytest.mark.parametrize("head", ["mse", "flow"])
@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("world", [2, 3])
def test_processes_keep_the_frames_of_one(name, world, head):
    loop = loop_after(head=head)
    alone = select(name, frames_of(loop), 9, np_rng(0, "x"))
    ranks = [Rank(r, world) for r in range(world)]
    for rank in ranks:
        loop.ctx.bind(rank)
        select(name, frames_of(loop), 9, np_rng(0, "x"))
    sums = [sum(xs) for xs in zip(*(rank.given for rank in ranks), strict=True)]
    kept = []
    for r in range(world):
        rank = Rank(r, world)
        rank.sums = sums
        loop.ctx.bind(rank)
        kept.append(select(name, frames_of(loop), 9, np_rng(0, "x")).tolist())
    assert kept == [alone.tolist()]*world

def test_a_diverged_policy_is_refused():
    loop = loop_after()
    with torch.no_grad(): loop.ctx.policy.net[0].weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="frames of task 'task0'; has the loss diverged"): frames_of(loop).features()


# --- in the memory
def test_a_random_memory_is_what_it_was():
    buf = TaskBuffer(50, seed=3)
    buf.add_task("task0", STREAM.train)
    assert (buf.frames["task0"] == np_rng(3, "replay", "keep", "task0").permutation(61)[:50]).all()

@pytest.mark.parametrize("name,settings", [(n, {}) for n in ("er", "mir", "derpp", "der", "agem")] + [("gem", dict(n_ref=4)), ("gdumb", dict(total_size=36))])
def test_every_algorithm_with_a_memory_takes_a_selection(name, settings):
    algo,loop = make_algo(name, 3, **({"buffer_size": 12} | settings if name != "gdumb" else settings), selection="center"),quick_loop(STREAM)
    expected = {}
    class Noting(type(algo)):
        def on_task_end(self, ctx):
            super().on_task_end(ctx)
            expected.setdefault(ctx.task_id, center(TaskFrames(ctx.task_id, ctx.data, ctx).features(), 61))
        def on_task_start(self, ctx):
            super().on_task_start(ctx)
            if name == "gdumb": expected[ctx.task_id] = center(TaskFrames(ctx.task_id, ctx.data, ctx).features(), 61)
    algo.__class__ = Noting
    for t in range(3): quick_task(algo, loop, t, steps=3, B=8)
    assert [f.tolist() for f in algo.buf.frames.values()] == [expected[i][:12].tolist() for i in STREAM.ids]

@pytest.mark.parametrize("name", selections)
def test_values_are_those_of_the_references(name):
    a,b = (quick_run(ER(12, store=s, selection=name), STREAM, "flow", steps=5) for s in ("refs", "values"))
    assert (a == b).all()

def test_a_selection_under_zero3_is_refused_unless_it_is_blind(tmp_path):
    pytest.importorskip("deepspeed")
    config = lambda name: resolve(TrainConfig(algo="er", algo_kw=dict(selection=name), suite="dot_2", ema=0., num_processes=2, strategy="zero3", threads=1,
                                              n_workers=1, run_dir=str(tmp_path/name), data_dir=str(tmp_path/"data")))
    for name in BLIND: check(config(name))
    with pytest.raises(ValueError, match="zero3.*'er'.*zero2"): check(config("herding"))
