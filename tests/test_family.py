"Numbers that avalanche-lib 0.6.0 gives on scikit-learn's digits 0 and 1 (digits01.npz: its training split), and each method's own promises."
from pathlib import Path
import numpy as np, pytest, torch
from torch import nn
from clvla.cl import agem, gem
from clvla.cl.all import make_algo
from clvla.cl.base import CLContext, call_hook, flat, unflat
from clvla.cl.compose import Compose
from clvla.cl.der import DER
from clvla.cl.derpp import DERpp, softened
from clvla.cl.engine import Engine, Loop, cl_step
from clvla.cl.ewc import fisher
from clvla.cl.from_scratch import FromScratch
from clvla.cl.gdumb import GDumb
from clvla.cl.l2 import L2, weights_now
from clvla.cl.mas import MAS, sensitivity
from clvla.cl.quick import quick_loop, quick_run, quick_stream, quick_task
from clvla.cl.rwalk import RWalk, unit_max
from clvla.cl.si import SI, per_distance
from clvla.core.batch import take
from clvla.core.names import INDEX, TASK_ID
from clvla.policies.ema import EMA
from avalanche_reference import tasks

torch.set_num_threads(1)
STREAM = quick_stream(0)
DIGITS = np.load(Path(__file__).parent/"digits01.npz", allow_pickle=False)
DIGITS = dict(x=torch.tensor(DIGITS["x"]/16, dtype=torch.float32), y=torch.tensor(DIGITS["y"].astype("int64")))


class Digits(nn.Module):
    "A classifier as a policy: weights from RandomState(0), cross-entropy, logits as its answer."
    def __init__(self):
        super().__init__()
        self.net,rng = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10)),np.random.RandomState(0)
        for p in self.parameters(): p.data = torch.tensor((rng.standard_normal(tuple(p.shape))*.2).astype("float32"))
    def draw(self, B, generator): return None, None
    def forward(self, batch, *, noise=None, time=None, reduction="mean"):
        logits = self.net(batch["x"])
        return nn.functional.cross_entropy(logits, batch["y"], reduction=reduction), {"pred": logits}

def digits(B): return [take(DIGITS, range(k, min(k+B, 251))) for k in range(0, 251, B)]
def first_layer(ctx, vec): return unflat(vec, ctx.params().values())[0]
def close(x, golden, rel=1e-4): assert abs(float(x)-golden) <= rel*abs(golden), (float(x), golden)

@pytest.mark.parametrize("B,total,norm", [(1, .966038, .0800809), (8, .418315, .0406502), (32, .358759, .0367683)])
def test_fisher_of_batches_is_avalanches(B, total, norm):
    ctx = CLContext(policy=Digits())
    F = fisher(ctx, digits(B), "batch")
    close(first_layer(ctx, F).sum(), total), close(first_layer(ctx, F).norm(), norm)
    if B == 1: assert torch.allclose(F, fisher(ctx, digits(32), "sample"), rtol=1e-4, atol=1e-9)   # the form that does not depend on B
    if B == 32:
        last = unflat(F, ctx.params().values())[4]
        close(last.sum(), .822788), close(last.norm(), .299892)


# --- LwF
@pytest.mark.parametrize("T,golden", [(1., .00700908), (2., .00182713)])
def test_lwfs_divergence_is_avalanches(T, golden):
    "The classes 0 to 3, 16 samples of the second task, a student whose weights are the teacher's and .01."
    teacher,student,x = Digits(),Digits(),tasks("cil")[1][0][0][:16]
    with torch.no_grad(): [p.add_(.01) for p in student.parameters()]
    now,then = (net.net(x)[:, None, :4] for net in (student, teacher))
    close(softened(now, then, torch.zeros(16, 1, dtype=torch.bool), T).mean().detach(), golden)

def test_lwfs_divergence_leaves_out_padding_and_actions_that_do_not_exist():
    now,then = torch.tensor([[[1., 2., 0.], [3., 1., 9.]]]),torch.tensor([[[0., 1., 0.], [2., 2., 2.]]])
    pad,gone = torch.tensor([[False, True]]),torch.full((1, 2, 1), -torch.inf)
    p,q = then[0, 0].softmax(0),now[0, 0].softmax(0)
    close(softened(now, then, pad, 1.), (p*(p/q).log()).sum())
    close(softened(torch.cat([now, gone], -1), torch.cat([then, gone], -1), pad, 1.), (p*(p/q).log()).sum())
    student = torch.cat([now, gone], -1).requires_grad_()
    softened(student, torch.cat([then, gone], -1), pad, 1.).sum().backward()
    assert student.grad.isfinite().all() and student.grad[0, 0, :3].abs().min() > 0


# --- L2 and its relatives
def digit_run(algo, steps, lr=.1, B=32):
    "Plain gradient steps on the batches in their order, with the algorithm's hooks."
    class Loader:
        "The batches in their order."
        def __init__(self): self.batches = iter(digits(B))
        def next(self, n): return next(self.batches)
    policy = Digits()
    loop = Loop(CLContext(policy=policy, loader=Loader(), task_id="a"), Engine(policy, torch.optim.SGD(policy.parameters(), lr)))
    call_hook(algo, "on_task_start", loop.ctx)
    for _ in range(steps): cl_step(algo, loop, B)
    call_hook(algo, "on_task_end", loop.ctx)
    return loop.ctx

def pushed(algo, ctx, by=.01):
    "The penalty with every weight moved."
    with torch.no_grad(): [p.add_(by) for p in ctx.params().values()]
    return algo.compute_penalty(ctx).item()

def test_l2_is_the_squared_distance_to_the_newest_weights():
    l2,loop = L2(3.),quick_loop(STREAM)
    for t in range(2):
        quick_task(l2, loop, t, steps=3)
        assert l2.compute_penalty(loop.ctx).item() == 0. and torch.equal(l2.star, flat(loop.ctx.params().values()).detach())
    assert pushed(l2, loop.ctx) == pytest.approx(3*len(l2.star)*1e-4, rel=1e-3)

def test_si_is_avalanches_where_weights_are_compared_with_their_past():
    "Its signed form and its cap; it multiplies with lambda/2, and counts the path integral with the other sign."
    si = SI(c=5., xi=1e-7, cap=1e-3)
    ctx = digit_run(si, 5)
    signed = -per_distance(si.w, si.star-si.start, 1e-7)
    close(first_layer(ctx, signed).sum(), -7223.506, 1e-3), close(first_layer(ctx, signed).norm(), 1837.074, 1e-3)
    close(first_layer(ctx, si.omega).sum(), .572644, 1e-3)
    close(pushed(si, ctx), 4.448218e-4)

class Shipped(SI):
    "avalanche's on the CPU: its old weights are views of the new ones, so no weight has moved."
    def after_step(self, ctx):
        self.before = weights_now(ctx)
        super().after_step(ctx)

def test_si_as_avalanche_ships_it_has_no_importance():
    si = Shipped(c=5., xi=1e-7, cap=1e-3)
    ctx = digit_run(si, 5)
    assert not si.omega.any() and pushed(si, ctx) == 0.

def test_si_counts_the_fall_of_the_tasks_loss_and_not_the_penaltys():
    si,loop = SI(c=20.),quick_loop(STREAM, lr=1e-3)
    quick_task(si, loop, 0, steps=30)
    loss = lambda: loop.ctx.forward(STREAM.train.fetch("task1", range(400)))[0].item()
    before = loss()
    quick_task(si, loop, 1, steps=60, B=400)
    fall = before-loss()
    assert fall > .05 and float(si.last) > .01
    assert float(si.w.sum()) == pytest.approx(fall, rel=.1)      # equation 3: the shares add up to the fall of the task's own loss

def test_si_adds_up_over_tasks_and_forgets_no_weight():
    si,loop = SI(),quick_loop(STREAM)
    quick_task(si, loop, 0, steps=10)
    first = si.omega.clone()
    quick_task(si, loop, 1, steps=10)
    assert (si.omega >= first).all() and (si.omega > first).any() and (first >= 0).all()
    capped,loop = SI(xi=1e-7, cap=1e-3),quick_loop(STREAM)
    for t in range(2): quick_task(capped, loop, t, steps=5)
    assert capped.omega.max() == pytest.approx(1e-3)

def test_mas_is_avalanches_in_the_batch_form():
    ctx = CLContext(policy=Digits())
    omega = first_layer(ctx, sensitivity(ctx, digits(32), "batch"))
    close(omega.sum(), 38.72601), close(omega.norm(), 2.548751)
    each = sensitivity(ctx, digits(251), "sample")
    assert torch.allclose(each, sensitivity(ctx, digits(32), "sample"), rtol=1e-4, atol=1e-6) and first_layer(ctx, each).sum() > omega.sum()

def test_mas_measures_answers_and_not_labels():
    ctx,wrong = CLContext(policy=Digits()),[b | dict(y=9-b["y"]) for b in digits(50)[:2]]
    assert torch.equal(sensitivity(ctx, digits(50)[:2]), sensitivity(ctx, wrong))
    assert not torch.equal(fisher(ctx, digits(50)[:2]), fisher(ctx, wrong))

@pytest.mark.parametrize("alpha,share", [(None, (1, 1)), (.25, (.25, .75))])
def test_mas_adds_up_or_averages(alpha, share):
    mas,loop,measured = MAS(alpha=alpha, n_batches=1, B=4),quick_loop(STREAM, "flow"),[]
    for t in range(2):
        quick_task(mas, loop, t, steps=3)
        measured.append(mas.omega.clone())
    second = (measured[1]-share[0]*measured[0])/share[1]
    assert float(second.mean()) == pytest.approx(float(measured[0].mean()), rel=.2) and (second >= -1e-5).all() and not torch.equal(second, measured[0])

def test_rwalk_is_the_papers_arithmetic():
    "Equations 6 to 8 once more, parameter by parameter in float64 on seven plain steps: intervals of three, three and one."
    rwalk = RWalk(lam=2., alpha=.6, interval=3, xi=.5)
    ctx = digit_run(rwalk, 7)
    policy = Digits().double()
    ps = list(policy.parameters())
    zeros = lambda: [torch.zeros_like(p) for p in ps]
    fall,moved,squares,score,F,n = zeros(),zeros(),zeros(),zeros(),None,0
    for k,batch in enumerate(digits(32)[:7]):
        gs = torch.autograd.grad(nn.functional.cross_entropy(policy.net(batch["x"].double()), batch["y"]), ps)
        n += 1
        with torch.no_grad():
            for i,(p,g) in enumerate(zip(ps, gs)):
                p -= .1*g
                fall[i] += .1*g*g
                moved[i] -= .1*g
                squares[i] += g*g
        if n < 3 and k < 6: continue
        F = [q/n for q in squares] if F is None else [.6*q/n + .4*f for q,f in zip(squares, F)]
        distance = [f*m**2/2 for f,m in zip(F, moved)]
        mean = sum(d.sum() for d in distance)/sum(d.numel() for d in distance)
        score = [s + a/(d+.5*mean) for s,a,d in zip(score, fall, distance)]
        fall,moved,squares,n = zeros(),zeros(),zeros(),0
    omega = flat(F)/flat(F).max() + flat(score)/flat(score).max()
    assert torch.allclose(rwalk.omega.double(), omega, rtol=1e-3, atol=1e-7)
    close(pushed(rwalk, ctx), 2*1e-4*float(omega.sum()), 1e-3)

def test_rwalk_averages_scores_over_tasks_and_bounds_both_parts():
    class Kept(RWalk):
        def importance(self, ctx, theta):
            omega = super().importance(ctx, theta)
            kept.append((self.score, self.scores))
            return omega
    kept,rwalk,loop = [],Kept(interval=4),quick_loop(STREAM)
    for t in range(2): quick_task(rwalk, loop, t, steps=10)
    (first,_),(second,both) = kept
    assert torch.equal(both, (first+second)/2) and not torch.equal(first, second)
    assert torch.equal(rwalk.omega, unit_max(rwalk.F)+unit_max(both)) and 1 <= rwalk.omega.max() <= 2 and (rwalk.omega >= 0).all()

def test_rwalk_counts_the_tasks_loss_and_not_the_penaltys():
    rwalk,loop = RWalk(lam=20., interval=1000),quick_loop(STREAM, lr=1e-3)
    quick_task(rwalk, loop, 0, steps=30)
    paths = []
    class Noted(RWalk):
        def close_interval(self):
            paths.append(self.path[0].sum().item())
            super().close_interval()
    rwalk.__class__ = Noted
    loss = lambda: loop.ctx.forward(STREAM.train.fetch("task1", range(400)))[0].item()
    before = loss()
    quick_task(rwalk, loop, 1, steps=60, B=400)
    assert before-loss() > .05 and paths == [pytest.approx(before-loss(), rel=.1)]

def test_rwalk_of_a_loss_without_gradient_is_refused():
    rwalk,loop = RWalk(),quick_loop(STREAM)
    rwalk.on_task_start(loop.ctx)
    with pytest.raises(RuntimeError, match="depend on the trained parameters"): rwalk.on_task_end(loop.ctx)



# --- references
def test_from_scratch_is_a_new_policy_for_each_task():
    "Weights, moments and their counts; the average begins anew."
    algo,loop = FromScratch(),quick_loop(STREAM)
    for t in range(3): quick_task(algo, loop, t, steps=6)
    alone = quick_loop(STREAM)
    quick_task(None, alone, 2, steps=6)
    for a,b in zip(loop.ctx.params().values(), alone.ctx.params().values()):
        assert torch.equal(a, b) and all(torch.equal(x, loop.ctx.moments(a)[k]) for k,x in alone.ctx.moments(b).items())
    loop.ctx.average,loop.ctx.t = EMA(loop.ctx.policy, .9),1
    loop.ctx.average.update(loop.ctx.policy)
    algo.on_task_start(loop.ctx)
    assert loop.ctx.average.s == 0 and all(torch.equal(x, algo.initial[n]) for n,x in loop.ctx.average.shadow.items())

def test_from_scratch_leaves_what_is_frozen_alone():
    algo,loop = FromScratch(),quick_loop(STREAM)
    loop.ctx.policy.net[0].requires_grad_(False)
    algo.prepare(loop.ctx.policy, 0, STREAM)
    assert [n for n in algo.initial if n.startswith("net.0")] == [] and len(algo.initial) == 4

def test_gdumb_is_training_a_new_policy_on_the_memory_alone():
    gdumb,loop = GDumb(90, seed=3),quick_loop(STREAM)
    for t in range(2): quick_task(gdumb, loop, t, steps=6)
    kept = {i: set(frames.tolist()) for i,frames in gdumb.buf.frames.items()}
    class Spy(GDumb):
        def modify_batch(self, batch, ctx):
            assert batch == {}
            batch = super().modify_batch(batch, ctx)
            seen.extend(zip(batch[TASK_ID], batch[INDEX].tolist()))
            return batch
    seen,spy,again = [],Spy(90, seed=3),quick_loop(STREAM)
    for t in range(2): quick_task(spy, again, t, steps=24)
    assert len(seen) == 2*24*32 and {i: {k for j,k in seen[24*32:] if j == i} for i in kept} == kept   # every kept frame, and none else
    other = quick_loop(STREAM)
    spy.load_state_dict(gdumb.state_dict())          # the memory's own draws go on, so its third task is that of a new policy
    gdumb.prepare(other.ctx.policy, 0, STREAM)
    quick_task(gdumb, loop, 2, steps=4)
    quick_task(spy, other, 2, steps=4)
    assert all(torch.equal(a, b) for a,b in zip(loop.ctx.params().values(), other.ctx.params().values()))

def test_gdumb_in_a_composition_is_refused():
    with pytest.raises(ValueError, match="from the initial weights"): Compose(GDumb(90), L2())


# --- replay of outputs
def test_der_is_der_plus_plus_without_labels():
    a,b = (quick_run(algo, STREAM, "flow", steps=12) for algo in (DER(50, alpha=.7), DERpp(50, alpha=.7, beta=0.)))
    assert (a == b).all() and (a != quick_run(None, STREAM, "flow", steps=12)).any()
    with pytest.raises(ValueError, match="has no setting 'beta'"): make_algo("der", beta=.5)


# --- projections
QP = {(1, 2, 0.): [-.175871, -.309605, -1.943275, 1.121128, -1.749411, -1.306780, .670115, -1.249531, -1.362039, -.757177, .893523, 2.136766],
      (1, 2, .5): [.684634, -.896036, -1.894842, .085956, -1.580890, -2.166268, 1.050564, -1.532861, -1.792329, -.883934, 1.397680, 1.507053],
      (3, 4, 0.): [.236829, .541933, -.980753, .490325, -.454150, -1.624772, -.651087, .545417, .318161, -1.203925, .470168, -.010218],
      (3, 4, .5): [.873642, 1.216496, -.610021, -.520743, -1.214094, -2.650211, .174634, .722596, -.904244, -1.802119, .302928, -.736859]}

@pytest.mark.parametrize("case", QP)
def test_gems_projection_is_quadprogs(case):
    "The dual with a ridge of .001, as avalanche-lib gives it to quadprog; gradients from RandomState."
    G,g = (torch.tensor(np.random.RandomState(seed).normal(size=size)) for seed,size in zip(case, ((3, 12), 12)))
    assert torch.allclose(gem.project(G, g, case[2], ridge=1e-3), torch.tensor(QP[case], dtype=torch.float64), atol=1e-4)

def test_agems_projection_is_avalanches():
    g,ref = (torch.tensor(np.random.RandomState(seed).normal(size=12)) for seed in (2, 1))
    assert float(agem.dot([g], [ref])) == pytest.approx(-3.090435, abs=1e-5)
    assert agem.project([g], [ref])[0][:4].tolist() == pytest.approx([-.173764, -.147782, -2.215208, 1.479760], abs=1e-5)

@pytest.mark.parametrize("gamma", [0., .5])
def test_gems_solution_is_the_minimum_at_every_scale_and_size(gamma):
    "Karush, Kuhn and Tucker: v and the slope are not negative, and one of the two is zero for each task."
    for k in range(200):
        rng = np.random.RandomState(k)
        T,P = rng.randint(1, 12),rng.randint(2, 30)
        G,g = torch.tensor(rng.normal(size=(T, P))*10**rng.uniform(-9, 4)),torch.tensor(rng.normal(size=P)*10**rng.uniform(-9, 4))
        Q,q = G@G.T + 1e-3*(G@G.T).diagonal().mean()*torch.eye(T, dtype=G.dtype),G@g
        v = gem.nonnegative(Q, q+gamma*Q.sum(1))
        slope,most = Q@(v+gamma) + q,float((q+gamma*Q.sum(1)).abs().max())
        assert (v >= 0).all() and (slope >= -1e-9*most).all() and ((v*slope).abs() <= 1e-8*(1e-300+(v*most).abs().max())).all()
        if (q < 0).any(): assert (gem.project(G, g, gamma)-(g+(v+gamma)@G)).norm() <= 1e-9*(g.norm()+((v+gamma)@G).norm())
        else: assert gem.project(G, g, gamma) is g

def test_one_task_without_ridge_is_agem():
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        ref,g = torch.randn(9, generator=rng, dtype=torch.float64),torch.randn(9, generator=rng, dtype=torch.float64)
        assert torch.allclose(gem.project(ref[None], g, ridge=0.), agem.project([g], [ref])[0])

def test_gem_hands_gradients_that_are_no_numbers_to_the_guard():
    assert gem.project(torch.tensor([[1., torch.nan]]), torch.ones(2)).isnan().all()

def test_gem_asks_every_finished_task_alone():
    class Spy(gem.GEM):
        def reference(self, ctx, task_id): asked.append((ctx.t, task_id)); return super().reference(ctx, task_id)
    asked,spy = [],Spy(50, n_ref=4)
    quick_run(spy, STREAM, steps=2)
    assert asked == [(1, "task0")]*2 + [(2, "task0"), (2, "task1")]*2 and spy.n_steps == 4
