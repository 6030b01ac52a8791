"Which frames a memory keeps: Avalanche's orders, rules against brute force, looks that leave no trace, several processes, and GSS's replacements."
import warnings
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
import numpy as np, pytest, torch
from clvla.cl.all import make_algo
from clvla.cl.base import CLContext, Process, flat
from clvla.cl.buffer import TaskBuffer
from clvla.cl.er import ER
from clvla.cl.gss import GSS, gss_greedy
from clvla.cl.phaser import Phaser, segments
from clvla.cl.probe import one_by_one, sample_grads
from clvla.cl.quick import QuickData, quick_loop, quick_run, quick_stream, quick_task
from clvla.cl.selection import BLIND, TaskFrames, center, herding, k_center, select, selections, sketch
from clvla.core.batch import take, torch_rng
from clvla.core.names import ACTION, IMAGE, INDEX, PAD, PROMPT, STATE
from clvla.core.seeds import np_rng
from clvla.core.state import load_state, save_state
from clvla.policies.tiny import Tiny
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

def tiny_frames(head, n=10):
    "Frames with pictures for a fresh `Tiny`; some have another instruction, some end before their chunk."
    g = torch_rng(0, "pictures")
    action = torch.randint(0, 3, (n, 8, 1), generator=g).float() if head == "discrete" else torch.randn(n, 8, 4, generator=g)
    batch = {IMAGE: torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=g), INDEX: torch.arange(n), STATE: torch.randn(n, 4, generator=g),
             ACTION: action, PAD: torch.arange(8) >= torch.arange(n)[:, None]+2, PROMPT: [("open it", "push and close the drawer")[k%4 == 1] for k in range(n)]}
    data = QuickData({"task0": batch})
    torch.manual_seed(0)
    policy = Tiny(32, action_dim=action.shape[2], head=head, D=16, n_actions=3 if head == "discrete" else None)
    return TaskFrames("task0", data, CLContext(policy=policy, data=data))

@pytest.mark.parametrize("head", ["flow", "l1"])
def test_gradients_together_are_those_of_each_frame(head):
    frames = tiny_frames(head)
    P = sum(p.numel() for p in frames.ctx.params().values())
    apart = frames.directions(at_once=1)
    for n in (2, 3, 10, 64): assert np.linalg.norm(frames.directions(at_once=n*P)-apart, axis=1).max() < 1e-5
    assert frames.ctx.policy not in one_by_one

def test_a_policy_that_vmap_refuses_is_asked_one_by_one_with_a_warning():
    frames = tiny_frames("discrete")   # this head looks at the values of its labels
    with pytest.warns(UserWarning, match="gradients of Tiny are computed one by one.*vmap"): together = frames.directions()
    with warnings.catch_warnings(action="error"): assert (frames.directions() == together).all()   # said once
    assert (frames.directions(at_once=1) == together).all()
    wrong = tiny_frames("discrete")
    wrong.data.tasks["task0"][ACTION][3] = 7.
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="expected whole numbers"): wrong.directions()   # the error of the one sample

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


# --- GSS
def unit(x): return x/np.linalg.norm(x, axis=1, keepdims=True)

@pytest.mark.parametrize("n", [3, None])
def test_replacements_of_gss_have_the_papers_probabilities(n):
    "Two stored directions and a newcomer: which slot is drawn, and whether it is taken, counted over many draws."
    x = unit(np.array([[1., 0, 0], [.6, .8, 0], [-.5, -.5, .7]]))
    C,c = np.array([1., 1.6]),1+max(x[2]@x[0], x[2]@x[1])
    p = C/C.sum()*C/(C+c)                                   # eq. 2, by slot
    rng,gone = np.random.default_rng(0),np.zeros(3)
    for _ in range(4000):
        kept = gss_greedy(x, [0, 1, 2], 2, n, 0., rng)
        gone[next(iter({0, 1, 2}-set(kept.tolist())))] += 1
    expected = 4000*np.array([*p, 1-p.sum()])
    assert c < 1 and ((gone-expected)**2/expected).sum() < 13.8   # p > .001 at 2 degrees of freedom

def test_gss_never_takes_what_is_too_close_and_orders_by_score():
    x = unit(np.array([[1., 0], [0, 1.], [.6, .8], [.8, .6]]))
    for s in range(20):
        assert sorted(gss_greedy(x, range(4), 2, None, .5, np.random.default_rng(s))) == [0, 1]
        assert gss_greedy(x, range(4), 4, None, .5, np.random.default_rng(s)).tolist() == [0, 1, 2, 3]   # scores 1, 1, 1.8, 1.96
    zeros = np.zeros((9, 3))
    assert len({*gss_greedy(zeros, range(9), 4, 2, .5, np.random.default_rng(0)).tolist()}) == 4

def test_gss_remembers_less_alike_than_chance_where_frames_repeat():
    rows = [k if k%5 == 0 else 5*(k%4) for k in range(60)]
    loop = loop_after(stream=type(STREAM)(STREAM.ids, QuickData({i: take(b, rows) | {INDEX: torch.arange(60)} for i,b in STREAM.train.tasks.items()}), STREAM.test))
    x = frames_of(loop).directions()
    def alike(buf):
        buf.add_task("task0", loop.ctx.data, loop.ctx)
        k = buf.frames["task0"]
        return (x[k]@x[k].T).mean(),len({rows[i] for i in k})
    for s in range(5):
        (a,few),(b,many) = alike(TaskBuffer(8, seed=s)),alike(GSS(8, seed=s).buf)
        assert b < a and many > few

@pytest.mark.parametrize("head", ["mse", "flow"])
def test_gss_leaves_the_training_step_alone(head):
    "Where nothing is replayed every update is plain ER's, gradient by gradient, also after a memory was filled."
    def gradients(algo):
        seen,loop = [],quick_loop(STREAM, head)
        algo.after_backward = lambda ctx: seen.append(torch.cat([g.flatten() for g in ctx.grads()]))
        for t in range(2): quick_task(algo, loop, t, steps=4)
        assert all(p.grad is None for p in loop.ctx.params().values())
        return torch.stack(seen)
    assert torch.equal(gradients(GSS(9, replay_ratio=0)), gradients(ER(9, replay_ratio=0)))
    with_memory = gradients(GSS(9)),gradients(ER(9))
    assert torch.equal(with_memory[0][:4], with_memory[1][:4]) and not torch.equal(with_memory[0][4:], with_memory[1][4:])

def test_gss_cuts_an_old_task_from_behind_and_keeps_its_order():
    algo,loop = GSS(None, total_size=30),quick_loop(STREAM)
    quick_task(algo, loop, 0, steps=3)
    first = algo.buf.frames["task0"]
    for t in (1, 2): quick_task(algo, loop, t, steps=3)
    assert len(first) == 30 and [len(f) for f in algo.buf.frames.values()] == [10]*3 and (algo.buf.frames["task0"] == first[:10]).all()


# --- phases
def all_cuts(x, K):
    "The smallest cost of any cut, by trying each."
    def cost(part): return np.square(part-part.mean(0)).sum()
    return min(sum(cost(x[a:b]) for a,b in zip((0, *at), (*at, len(x)))) for at in combinations(range(1, len(x)), K-1))

@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_segments_are_the_cheapest_of_all_cuts(K):
    for s in range(5):
        x = np.random.default_rng(s).normal(size=(9, 2))
        piece = segments(x, K)
        found = sum(np.square(x[piece == k]-x[piece == k].mean(0)).sum() for k in range(K))
        assert (np.diff(piece) >= 0).all() and piece.max() == K-1 and np.isclose(found, all_cuts(x, K))
    assert segments(x[:2], 5).tolist() == [0, 1]

WHOLE = quick_stream(0, n_frames=64)

class Episodes(QuickData):
    "Episodes of eight frames, each with a gripper that closes for the last one."
    def episodes(self, task_id): return np.arange(self.n_frames(task_id))//8
    def actions(self, task_id): return (np.arange(self.n_frames(task_id))%8 == 7)[:, None].astype(float)

def phased(**kw):
    loop = quick_loop(replace(WHOLE, train=Episodes(WHOLE.train.tasks)))
    algo = Phaser(seed=1, n_phases=2, **kw)
    for t in (0, 1): quick_task(algo, loop, t, steps=3)
    return algo,loop

@pytest.mark.parametrize("kw", [dict(buffer_size=12), dict(buffer_size=None, total_size=24), dict(buffer_size=12, store="values")])
def test_memory_and_draws_of_a_short_phase_have_their_share_also_after_a_load(kw, tmp_path):
    algo,loop = phased(**kw)
    for i,frames in algo.buf.frames.items():
        assert np.bincount(frames%8 == 7).tolist() == [6, 6] and (algo.buf.phase[i][:12] == (frames%8 == 7)).all()
    count = Counter((i, int(algo.buf.frames[i][p]%8 == 7)) for _ in range(500) for i,p in algo.buf.draw(6))
    assert len(count) == 4 and all(abs(n/3000-.25) < .03 for n in count.values())
    save_state(tmp_path/"s", algo.state_dict())
    other = Phaser(seed=1, n_phases=2, **kw)
    other.load_state_dict(load_state(tmp_path/"s"))
    assert [other.buf.draw(5) for _ in range(50)] == [algo.buf.draw(5) for _ in range(50)]
    quick_task(algo, loop, 2, steps=3)
    assert {len(f) for f in algo.buf.frames.values()} == {8 if "total_size" in kw else 12}

def test_one_phase_is_er_and_too_small_a_memory_is_refused():
    loops = [quick_loop(replace(WHOLE, train=Episodes(WHOLE.train.tasks))) for _ in range(2)]
    algos = ER(12, seed=1),Phaser(12, n_phases=1, seed=1)
    for t in (0, 1):
        for algo,loop in zip(algos, loops): quick_task(algo, loop, t, steps=3)
    assert all(torch.equal(a, b) for a,b in zip(*(loop.ctx.params().values() for loop in loops)))
    with pytest.raises(ValueError, match="no room for 9 phases"): Phaser(8, n_phases=9).on_task_start(loops[0].ctx)

@pytest.mark.parametrize("name", ["er", "mir", "derpp", "der", "agem", "gem", "gdumb", "latent"])
def test_a_selection_by_features_asks_for_them(name):
    "So that a learner without them refuses it before it learns, and not when the first task has ended."
    plain,featured = (make_algo(name, selection=s) for s in ("loss", "k_center"))
    assert {*featured.asks} == {*plain.asks, "features"} and ("features" in plain.asks) == (name == "latent")
    if name not in ("gdumb", "latent"): assert "features" in make_algo(f"l2+{name}", selection="herding").asks
