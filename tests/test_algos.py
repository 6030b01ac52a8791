"The family of algorithms beside ER, MIR and EWC: limit cases bit for bit, penalties of equal networks, weights that nothing may move, exact resume."
from copy import deepcopy
import pytest, torch
from clvla.core.batch import rng_state, set_rng_state, take, torch_rng
from clvla.core.names import ACTION, IMAGE, N_ACTIONS, PAD, PROMPT, STATE
from clvla.core.state import load_state, read_tensors, save_state
from clvla.cl.agem import AGEM, dot, project
from clvla.cl.all import algos, make_algo
from clvla.cl.compose import Compose
from clvla.cl.base import CLContext, Process, call_hook, flat, prepare_stages
from clvla.cl.der import DER
from clvla.cl.derpp import DERpp, output_error
from clvla.cl.dwe import DWE
from clvla.cl.engine import Loop, cl_step
from clvla.cl.er import ER
from clvla.cl.from_scratch import FromScratch
from clvla.cl.gdumb import GDumb
from clvla.cl.gem import GEM
from clvla.cl.gpm import GPM, directions, second_moments
from clvla.cl.gss import GSS
from clvla.cl.keeplora import KeepLoRA, down_projection
from clvla.cl.l2 import L2
from clvla.cl.latent import Latent
from clvla.cl.lfl import LFL
from clvla.cl.lwf import LwF, weights_of
from clvla.cl.mas import MAS
from clvla.cl.mlr import MLR
from clvla.cl.olora import Adapters, OLoRA
from clvla.cl.packnet import PackNet, largest, matrices
from clvla.cl.progressive import Progressive
from clvla.cl.quick import QuickLoader, quick_engine, quick_loop, quick_losses, quick_prepare, quick_run, quick_stream
from clvla.cl.router import Router
from clvla.cl.retain import Retain
from clvla.cl.rwalk import RWalk
from clvla.cl.si import SI
from clvla.cl.sequential import Sequential
from clvla.cl.task_lora import Adapted, TaskLoRA, add_adapters
from clvla.policies.all import make_policy
from clvla.policies.ema import EMA
from clvla.train.stopping import Stopping

torch.set_num_threads(1)
STREAM,ONE = quick_stream(0),quick_stream(0, n_tasks=1)
FAMILY = dict(agem=dict(buffer_size=50, n_ref=20), derpp=dict(buffer_size=50), lwf={}, lfl={}, packnet={}, task_lora=dict(rank=4), l2={}, si={},
              mas=dict(n_batches=1), from_scratch={}, gdumb=dict(total_size=90), der=dict(buffer_size=50),
              gem=dict(buffer_size=50, n_ref=8), rwalk=dict(interval=5), gss=dict(buffer_size=50))
FAMILY |= dict(dwe=dict(units=4), router=dict(rank=4), retain={}, latent=dict(buffer_size=50), progressive=dict(rank=4), gpm=dict(n_batches=2), olora=dict(rank=4), phaser=dict(buffer_size=50),
               keeplora=dict(rank=4, n_batches=2), mlr=dict(buffer_size=50))


def start(algo, loop, t, steps):
    "What comes before the first update of a task."
    ctx = loop.ctx
    ctx.t,ctx.task_id,ctx.step,ctx.n_steps = t,ctx.stream.ids[t],0,steps
    quick_prepare(algo, loop)
    ctx.loader = QuickLoader(ctx.data, [ctx.task_id], ctx.seed, f"stage {t}")

def run(algo, loop, t, steps=12, ema=0., look=None):
    "One task as the trainer runs it, with an average of the weights where `ema` is not 0."
    start(algo, loop, t, steps)
    average = EMA(loop.ctx.policy, ema) if ema else None
    call_hook(algo, "on_task_start", loop.ctx)
    for _ in range(steps):
        cl_step(algo, loop, 32)
        if average: average.update(loop.ctx.policy)
        if look: look(loop)
    if average: average.copy_to(loop.ctx.policy)
    call_hook(algo, "on_task_end", loop.ctx)

def weights(policy): return {n: x.detach().clone() for n,x in policy.state_dict().items()}

def same(a, b): return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# --- limit cases
class Agreeing(AGEM):
    "A reference that never disagrees: the gradient of the current batch."
    def reference(self, ctx): return ctx.grads_of(ctx.batch, ctx.noise, ctx.time)

@pytest.mark.parametrize("head", ["mse", "flow"])
@pytest.mark.parametrize("make", [lambda: DERpp(50, alpha=0., beta=0.), lambda: DER(50, alpha=0.), lambda: LwF(0.), lambda: LwF(0., "current"), lambda: LFL(0.), Agreeing, lambda: L2(0.), lambda: SI(0.), lambda: MAS(0., n_batches=1), lambda: RWalk(0.), lambda: Retain(1.), lambda: Latent(replay_ratio=0.), lambda: MLR(replay_ratio=0., lam=0.), lambda: GPM(0., rest="train"),
                                  lambda: Compose(DERpp(50, alpha=0., beta=0.), LwF(0.))])
def test_limit_is_plain_fine_tuning_bit_for_bit(make, head):
    assert (quick_run(make(), STREAM, head, steps=12) == quick_run(Sequential(), STREAM, head, steps=12)).all()

@pytest.mark.parametrize("head", ["mse", "flow"])
def test_one_task_that_keeps_all_weights_is_plain_fine_tuning(head):
    plain = quick_run(Sequential(), ONE, head, steps=12)
    for packnet in (PackNet(share=1.), PackNet()): assert (quick_run(packnet, ONE, head, steps=12) == plain).all()

@pytest.mark.parametrize("make", [lambda: AGEM(50), lambda: DERpp(50), LwF, LFL, PackNet, lambda: TaskLoRA(4), L2, SI, lambda: MAS(n_batches=1), FromScratch,
                                  lambda: GDumb(90), lambda: DER(50), lambda: GEM(50, n_ref=8), RWalk, DWE, lambda: Router(4), lambda: GSS(50), Retain, lambda: Latent(50), lambda: Progressive(4), GPM, lambda: OLoRA(4), lambda: KeepLoRA(4), lambda: MLR(50)])
def test_away_from_the_limit_something_changes(make):
    assert (quick_run(make(), STREAM, steps=12) != quick_run(Sequential(), STREAM, steps=12)).any()

def test_a_gem_never_projects_where_gradients_agree():
    agreeing = Agreeing()
    quick_run(agreeing, STREAM, steps=5)
    assert (agreeing.n_steps, agreeing.n_vetoed) == (10, 0)
    g = torch_rng(0, "project")
    for _ in range(50):
        a,b = ([torch.randn(3, 2, generator=g), torch.randn(4, generator=g)] for _ in range(2))
        p = project(a, b)
        assert (p is a) == (dot(a, b) >= 0) and dot(p, b) >= -1e-5
        if p is not a: assert abs(dot(p, p) + dot(a, b)**2/dot(b, b) - dot(a, a)) < 1e-4   # Pythagoras: the closest one


# --- outputs and teachers
def test_output_error_by_hand_with_padding_and_missing_actions():
    pad = torch.tensor([[False, True]])
    v = torch.zeros(1, 3, 2, 1)
    v[:, :, 0], v[:, :, 1] = 2., 9.
    assert output_error(v, torch.zeros_like(v), pad).tolist() == [4.]
    z = torch.tensor([[[1., -torch.inf], [0., 0.]]], requires_grad=True)
    error = output_error(z, torch.tensor([[[3., -torch.inf], [5., 5.]]]), pad)
    error.sum().backward()
    assert error.tolist() == [2.] and z.grad.isfinite().all()   # the mean over two logits, one of them equal

def tiny(head, seed=0):
    return make_policy("tiny", 48, 4, 1 if head == "discrete" else 4, H=4, head=head, seed=seed, D=32, n_blocks=1,
                       **(dict(n_actions=5) if head == "discrete" else {}))

def robot_batch(head, B=6):
    g = torch_rng(0, "batch")
    action = torch.randint(3, (B, 4, 1), generator=g).float() if head == "discrete" else torch.randn(B, 4, 4, generator=g)
    pad = torch.zeros(B, 4, dtype=torch.bool)
    pad[0, 2:] = True
    batch = {IMAGE: torch.randint(256, (B, 3, 48, 48), generator=g, dtype=torch.uint8), STATE: torch.randn(B, 4, generator=g),
             ACTION: action, PAD: pad, PROMPT: ["press a button", "close the drawer"]*(B//2), "index": torch.arange(B)}
    return batch | ({N_ACTIONS: torch.tensor([3, 5]*(B//2))} if head == "discrete" else {})

class Frames:
    "One batch as a task."
    def __init__(self, batch): self.batch = batch
    def n_frames(self, task_id): return len(self.batch[PROMPT])
    def fetch(self, task_id, idx): return take(self.batch, idx)
    def fetch_refs(self, refs): return take(self.batch, [frame for _,frame in refs])

def trained_on(algo, policy, head):
    "A context after a forward on the batch, and the algorithm after that task."
    ctx = CLContext(policy=policy, data=Frames(robot_batch(head)), task_id="a", batch_size=6)
    ctx.batch = ctx.task_batch = ctx.data.batch
    algo.observe(ctx.batch, ctx)
    algo.on_task_end(ctx)
    ctx.noise,ctx.time = policy.draw(6, torch_rng(1, "noise"))
    ctx.loss,ctx.out = policy(ctx.batch, noise=ctx.noise, time=ctx.time)
    return ctx

@pytest.mark.parametrize("head", ["flow", "l1", "discrete"])
@pytest.mark.parametrize("prompts", ["past", "current"])
def test_lwf_penalty_is_zero_for_equal_networks(head, prompts):
    policy,lwf = tiny(head),LwF(1., prompts)
    ctx = trained_on(lwf, policy, head)
    # attention without gradients is another kernel and rounds differently; without attention the zero is exact (below)
    assert lwf.compute_penalty(ctx).item() < 1e-12 and policy.training
    with torch.no_grad(): [p.add_(.01) for p in policy.parameters()]
    ctx.loss,ctx.out = policy(ctx.batch, noise=ctx.noise, time=ctx.time)
    penalty = lwf.compute_penalty(ctx)
    penalty.backward()
    assert penalty.item() > 0 and all(p.grad is None or p.grad.isfinite().all() for p in policy.parameters())

@pytest.mark.parametrize("head", ["flow", "mse"])
@pytest.mark.parametrize("prompts", ["past", "current"])
def test_lwf_penalty_is_exactly_zero_at_the_first_update(head, prompts):
    lwf,loop = LwF(1., prompts),quick_loop(STREAM, head)
    run(lwf, loop, 0)
    run(lwf, loop, 1, 1)
    assert float(lwf.last) == 0. and loop.ctx.penalty.item() == 0.
    run(lwf, loop, 2, 2)
    assert float(lwf.last) > 0

@pytest.mark.parametrize("other", ["olora", "keeplora", "dwe", "progressive"])
def test_lwf_beside_added_parameters_asks_the_policy_of_the_task_before(other):
    "What another algorithm adds in a task is no part of the teacher, which would be the student itself."
    from clvla.cl.all import make_algo
    from clvla.cl.lwf import answers
    algo,loop = make_algo(f"{other}+lwf", 0, **{other: dict(units=4) if other == "dwe" else dict(rank=2)}),quick_loop(STREAM)
    lwf,batch,seen = algo.algos[1],STREAM.test.fetch(STREAM.ids[2], range(8)),[]
    for t in range(2): run(algo, loop, t, 6)
    assert float(lwf.last) > 0
    with torch.no_grad(), algo.eval_policy(loop.ctx.policy, STREAM.ids[1]): before = loop.ctx.policy(batch)[1]["pred"]
    run(algo, loop, 2, 3, look=lambda loop: seen.append(answers(loop.ctx.policy, lwf.teacher, batch, {}, 1)["pred"]))
    assert float(lwf.last) > 0 and all(torch.allclose(x, before, atol=1e-5) for x in seen)

def test_lwf_sees_the_noise_of_the_training_forward():
    policy,lwf = tiny("flow"),LwF(1., "current")
    ctx = trained_on(lwf, policy, "flow")
    ctx.noise,ctx.time = policy.draw(6, torch_rng(2, "noise"))
    assert lwf.compute_penalty(ctx).item() > 1e-4

@pytest.mark.parametrize("freeze", [False, True])
def test_lfl_moves_the_head_unless_it_is_frozen(freeze):
    policy,lfl = tiny("l1"),LFL(freeze_head=freeze)
    for t in range(2): lfl.prepare(policy, t, STREAM)
    assert {p.requires_grad for p in policy.head.parameters()} == {not freeze}
    assert any(p.requires_grad for p in policy.parameters())

def test_lwf_asks_with_past_instructions_in_turn():
    lwf = LwF()
    lwf.past = dict(a="press", b="close")
    ctx = CLContext(policy=tiny("l1"))
    ctx.batch,ctx.step = {PROMPT: ["open"]*3},1
    assert lwf.asked(ctx)[PROMPT] == ["close", "press", "close"]

@pytest.mark.parametrize("head", ["flow", "l1", "discrete"])
def test_derpp_first_term_is_zero_for_the_policy_that_stored(head):
    policy,derpp = tiny(head),DERpp(None, alpha=1., beta=0.)
    ctx = trained_on(derpp, policy, head)
    assert derpp.compute_penalty(ctx).item() < 1e-10
    with torch.no_grad(): [p.add_(.01) for p in policy.parameters()]
    moved = derpp.compute_penalty(ctx).item()
    assert moved > 1e-6
    if head == "flow":
        with torch.no_grad(): [p.sub_(.01) for p in policy.parameters()]
        derpp.stored["a"]["noise"] = derpp.stored["a"]["noise"].flip(0)
        assert derpp.compute_penalty(ctx).item() > 1e-4

def test_cloning_of_discrete_actions_is_zero_for_the_policy_that_stored_and_refused_for_numbers():
    "What CLEAR does with what was played, on what was demonstrated; each row has 3 or 5 actions."
    policy,der = tiny("discrete"),DER(None, alpha=2., distance="kl")
    ctx = trained_on(der, policy, "discrete")
    der.on_task_start(ctx)
    assert der.compute_penalty(ctx).item() < 1e-7   # float32: 0 when this file runs alone, 6.6e-9 once in a run of the whole suite
    with torch.no_grad(): [p.add_(.01*torch.randn(p.shape, generator=torch_rng(0, "move"))) for p in policy.parameters()]
    drawn = der.buf.draw(6)
    der.buf.draw = lambda n: drawn
    batch,then = der.buf.fetch(drawn, ctx.data),der.outputs(drawn)["pred"]
    p,q = (torch.distributions.Categorical(logits=z) for z in (then, policy(batch)[1]["pred"]))
    kl = (p.probs*(p.logits-q.logits)).nan_to_num(0., 0., 0.).sum(-1)*~batch[PAD]
    penalty = der.compute_penalty(ctx)
    penalty.backward()
    assert torch.allclose(penalty, 2*(kl.sum(1)/(~batch[PAD]).sum(1)).mean(), rtol=1e-4) and penalty > 1e-6
    assert all(p.grad is None or p.grad.isfinite().all() for p in policy.parameters())
    with pytest.raises(ValueError, match="are numbers; use \"squares\""): DER(distance="kl").on_task_start(CLContext(policy=tiny("l1"), data=Frames(robot_batch("l1")), task_id="a"))
    with pytest.raises(ValueError, match="'squares', 'kl', found 'L2'"): DERpp(distance="L2")

def test_derpp_second_term_is_the_loss_on_the_memory():
    policy,derpp = tiny("l1"),DERpp(None, alpha=0., beta=1., n_mem=6)
    ctx = trained_on(derpp, policy, "l1")
    assert abs(derpp.compute_penalty(ctx).item() - policy(ctx.data.batch)[0].item()) < 1e-6

class Rank(Process):
    "One of several processes, as far as dealing goes."
    def __init__(self, rank, world): self.rank,self.world = rank,world

@pytest.mark.parametrize("world", [2, 3])
def test_derpp_over_processes_is_the_penalty_of_one(world):
    def penalty(rank, world):
        derpp,loop = DERpp(50, seed=3),quick_loop(STREAM, "flow")
        run(derpp, loop, 0, 3)
        loop.ctx.bind(Rank(rank, world))
        gs = torch.autograd.grad(derpp.compute_penalty(loop.ctx), list(loop.ctx.params().values()))
        return flat(gs)
    mean = torch.stack([penalty(r, world) for r in range(world)]).mean(0)
    assert torch.allclose(mean, penalty(0, 1), atol=1e-6)

def test_outputs_stay_beside_their_samples_when_the_memory_shrinks():
    derpp,loop = DERpp(None, total_size=60),quick_loop(STREAM, "flow")
    for t in range(3): run(derpp, loop, t, 2)
    assert [len(derpp.stored[i]["pred"]) for i in STREAM.ids] == [len(derpp.buf.frames[i]) for i in STREAM.ids] == [20]*3


# --- PackNet
def test_largest_takes_free_weights_only_and_exactly_its_share():
    g = torch_rng(0, "largest")
    w,free = torch.randn(7, 9, generator=g),torch.rand(7, 9, generator=g) < .7
    kept = largest(w, free, .4)
    assert not (kept & ~free).any() and int(kept.sum()) == round(.4*int(free.sum()))
    assert w[kept].abs().min() >= w[free & ~kept].abs().max()

@pytest.mark.parametrize("ema", [0., .9])
@pytest.mark.parametrize("share", [None, .5])
def test_weights_of_a_task_never_move_again(share, ema):
    packnet,loop = PackNet(share),quick_loop(STREAM)
    for g in loop.engine.raw.param_groups: g["weight_decay"] = .5
    kept,rows = {},[]
    for t in range(3):
        def look(loop):
            for k,values in kept.items():
                for n,w in values.items(): assert torch.equal(dict(loop.ctx.policy.named_parameters())[n][packnet.owner[n] == k], w)
            for n,p in matrices(loop.ctx.policy).items():
                moments = loop.engine.moments(p)
                frozen = (packnet.owner[n] > 0) & (packnet.owner[n] <= t)
                assert not moments["exp_avg"][frozen].any() and not moments["exp_avg_sq"][frozen].any()
        run(packnet, loop, t, 12, ema, look)
        rows.append(quick_losses(loop, packnet))
        params = dict(loop.ctx.policy.named_parameters())
        kept[t+1] = {n: params[n][owner == t+1].detach().clone() for n,owner in packnet.owner.items()}
        assert all(not params[n][owner == 0].any() for n,owner in packnet.owner.items())
    assert rows[1][0] == rows[0][0] == rows[2][0] and rows[1][1] == rows[2][1]

def test_what_is_no_matrix_is_frozen_after_the_first_task_and_leaves_the_optimizer():
    packnet,loop = PackNet(),quick_loop(STREAM)
    run(packnet, loop, 0)
    before = weights(loop.ctx.policy)
    run(packnet, loop, 1)
    biases = [n for n in before if n.endswith("bias")]
    after = weights(loop.ctx.policy)
    assert biases and all(torch.equal(before[n], after[n]) for n in biases) and not set(biases) & set(loop.ctx.params())
    optimised = {id(p) for g in loop.engine.raw.param_groups for p in g["params"]}
    assert optimised == {id(p) for p in loop.ctx.params().values()}

def test_shares_are_equal_and_a_full_network_is_refused():
    packnet,loop = PackNet(),quick_loop(STREAM)
    for t in range(3): run(packnet, loop, t, 6)
    for owner in packnet.owner.values():
        counts = [int((owner == k).sum()) for k in range(4)]
        assert counts[0] == 0 and max(counts[1:])-min(counts[1:]) <= 2
    assert packnet.metrics()["free"] == 0
    with pytest.raises(ValueError, match="'task1' finds no free weight"): quick_run(PackNet(1.), STREAM, steps=2)

@pytest.mark.parametrize("make", [PackNet, lambda: TaskLoRA(4), DWE, lambda: Router(4), lambda: Progressive(4)])
def test_an_evaluation_leaves_the_policy_as_it_was_also_after_an_error(make):
    algo,loop = make(),quick_loop(STREAM)
    for t in range(2): run(algo, loop, t, 6)
    before = weights(loop.ctx.policy)
    for i in STREAM.ids:
        with pytest.raises(ZeroDivisionError):
            with algo.eval_policy(loop.ctx.policy, i): 1/0
        assert same(before, weights(loop.ctx.policy))
    keys = [algo.eval_key(i) for i in STREAM.ids]
    assert keys in ([1, 2, None], ["trunk", "live", "trunk"], [0, 1, 1], ["routed"]*3, [0, 1, 0])   # the trunk is the first task's, and a new task's

def test_a_task_in_the_middle_is_played_as_it_stands():
    packnet,loop = PackNet(),quick_loop(STREAM)
    run(packnet, loop, 0, 6)
    start(packnet, loop, 1, 6)
    call_hook(packnet, "on_task_start", loop.ctx)
    assert packnet.eval_key("task1") is None and packnet.eval_key("task0") == 1
    for _ in range(5): cl_step(packnet, loop, 32)
    assert packnet.pruned and packnet.eval_key("task1") == 2


# --- adapters
@pytest.mark.parametrize("head", ["flow", "l1"])
def test_one_task_is_training_with_peft_adapters_bit_for_bit(head):
    pytest.importorskip("peft")
    from clvla.policies.lora import add_lora
    def losses(adapt):
        policy,batch = tiny(head),robot_batch(head)
        adapt(policy)
        engine = quick_engine(policy)
        ps = {n: p for n,p in policy.named_parameters() if p.requires_grad}
        out = []
        for k in range(4):
            noise,time = policy.draw(6, torch_rng(0, "step"))
            loss = policy(batch, noise=noise, time=time)[0]
            loss.backward()
            engine.clip(ps)
            engine.step()
            engine.zero()
            out.append(loss.item())
        return out
    peft = losses(lambda p: add_lora(p, 4, 16., True, 5))
    own = losses(lambda p: TaskLoRA(4, trunk="pretrained", seed=5).prepare(p, 0, ONE))
    assert own == peft and own[3] < own[0]

def test_trunk_and_earlier_sets_never_move():
    algo,loop,rows,sets = TaskLoRA(4),quick_loop(STREAM),[],{}
    for t in range(3):
        run(algo, loop, t, 12, .9)
        rows.append(quick_losses(loop, algo))
        if t == 0: trunk = weights(loop.ctx.policy)
        for i,values in sets.items(): assert same(values, algo.sets[i])
        sets = deepcopy(algo.sets)
    now = weights(loop.ctx.policy)
    assert all(torch.equal(v, now[n.replace("weight", "base.weight").replace("bias", "base.bias")]) for n,v in trunk.items())
    assert rows[2][0] == rows[1][0] == rows[0][0] and rows[2][1] == rows[1][1] and list(sets) == ["task1", "task2"]
    trained = sum(p.numel() for p in loop.ctx.params().values())
    assert all(sum(x.numel() for x in s.values()) == trained for s in sets.values())

def test_only_the_trunk_needs_no_set_and_each_task_begins_at_the_trunk():
    algo,loop = TaskLoRA(4, trunk="pretrained"),quick_loop(STREAM)
    run(algo, loop, 0)
    assert list(algo.sets) == ["task0"]
    start(algo, loop, 1, 5)
    assert all(torch.equal(p, algo.start[n]) for n,p in loop.ctx.params().items())
    with pytest.raises(ValueError, match="adapters already"): add_adapters(loop.ctx.policy, 4, 16.)
    assert sum(isinstance(m, Adapted) for m in loop.ctx.policy.modules()) == 3


# --- directions
@pytest.mark.parametrize("head", ["mse", "flow"])
@pytest.mark.parametrize("rest", ["freeze", "train"])
def test_what_every_direction_is_kept_of_never_moves_again(head, rest):
    gpm,loop = GPM(1., rest=rest, n_batches=1),quick_loop(STREAM, head)
    run(gpm, loop, 0)
    before = weights(loop.ctx.policy)
    run(gpm, loop, 1, ema=.9)
    after = weights(loop.ctx.policy)
    assert all(torch.equal(after[n], before[n]) == (n.endswith("weight") or rest == "freeze") for n in before)

@pytest.mark.parametrize("project,leak", [("update", 1e-5), ("gradient", None)])
def test_kept_directions_are_left_alone_in_every_layer(project, leak):
    gpm,loop = GPM(.9, project=project, n_batches=2),quick_loop(STREAM)
    run(gpm, loop, 0)
    before,bases = weights(loop.ctx.policy),dict(gpm.bases)
    run(gpm, loop, 1, ema=.9)
    moved = {n: float(((x-before[n])@bases[n]).abs().max()) for n,x in weights(loop.ctx.policy).items() if n in bases}
    assert max(moved.values()) < leak if leak else min(moved.values()) > 1e-3

def test_directions_are_those_of_the_inputs_singular_vectors():
    R = torch.randn(6, 40, dtype=torch.float64, generator=torch_rng(0, "inputs"))*torch.tensor([9., 4., 2., 1., .5, .1])[:, None]
    U,S,_ = torch.linalg.svd(R, full_matrices=False)
    none = torch.zeros(6, 0, dtype=torch.float64)
    for share in (.3, .9, .99, .9999):
        k = int((S.square().cumsum(0)/S.square().sum() < share).sum())+1   # the paper's criterion
        M = directions(R@R.T, none, share)
        assert M.shape == (6, k) and torch.allclose(M@M.T, U[:, :k]@U[:, :k].T, atol=1e-9)
    other = torch.randn(6, 3, dtype=torch.float64, generator=torch_rng(1, "inputs"))
    for C in (R@R.T, other@other.T): none = directions(C, none, .95)
    assert torch.allclose(none.T@none, torch.eye(none.shape[1], dtype=torch.float64)) and (none.T@other).square().sum() >= .95*other.square().sum()

def test_inputs_of_a_robot_policys_layers_and_of_one_that_is_never_called():
    policy = tiny("flow")
    policy.unused = torch.nn.Linear(3, 3)
    ctx = CLContext(policy=policy, data=Frames(robot_batch("flow")), task_id="a", t=1)
    sums = second_moments(ctx, [ctx.data.batch], torch_rng(0, "noise"))
    assert {n for n in ctx.params() if n.endswith("conv.0.weight") or n == "head.net.3.weight"} <= set(sums) and "unused.weight" not in sums and "words.weight" not in sums
    assert all(len(C) == ctx.params()[n][0].numel() for n,C in sums.items()) and not any(m._forward_pre_hooks for m in policy.modules())

@pytest.mark.parametrize("damage", [lambda b: {**b, "other": torch.eye(3)}, lambda b: {n: M[:-1] for n,M in b.items()}])
def test_directions_of_other_layers_are_refused(damage):
    gpm,loop = GPM(n_batches=1),quick_loop(STREAM)
    run(gpm, loop, 0)
    state,other = gpm.state_dict(),GPM(n_batches=1)
    other.load_state_dict(state | dict(bases=damage(state["bases"])))
    with pytest.raises(ValueError, match="GPM holds directions"): run(other, loop, 1)


@pytest.mark.parametrize("head_rank", [None, 0, 2])
def test_adapters_add_up_and_earlier_ones_never_move(head_rank):
    policy,algo = tiny("flow"),OLoRA(4, head_rank, trunk="pretrained")
    for t in range(3):
        algo.prepare(policy, t, STREAM)
        for m in policy.modules():
            if isinstance(m, Adapters): torch.nn.init.normal_(m.B[str(t)].weight)
        trained = {n for n,p in policy.named_parameters() if p.requires_grad}
        assert all(f".{t}.weight" in n or head_rank == 0 and n.startswith("head.") and ".A." not in n for n in trained) and trained
        assert any(n.startswith("head.") for n in trained)
    layers = {n: m for n,m in policy.named_modules() if isinstance(m, Adapters)}
    ranks = {n.startswith("head."): len(m.A["0"].weight) for n,m in layers.items()}
    assert ranks == {False: 4} | ({True: 4 if head_rank is None else head_rank} if head_rank != 0 else {})
    m = next(iter(layers.values()))
    x = torch.randn(5, m.base.in_features, generator=torch_rng(0, "x"))
    whole = m.base.weight + sum(m.B[k].weight@m.A[k].weight for k in m.A)*4
    assert torch.allclose(m(x), x@whole.T + m.base.bias, atol=1e-4)
    assert algo.metrics()["adapter_bytes"] == sum(p.nbytes for n,p in policy.named_parameters() if ".A." in n or ".B." in n)

def test_the_penalty_is_the_overlap_with_frozen_adapters_alone():
    algo,loop = OLoRA(4, lam=2., trunk="pretrained"),quick_loop(STREAM)
    for t in range(2): algo.prepare(loop.ctx.policy, t, STREAM)
    penalty = algo.compute_penalty(loop.ctx)
    A = [(m.A["0"].weight, m.A["1"].weight) for m in loop.ctx.policy.modules() if isinstance(m, Adapters)]
    assert torch.allclose(penalty, 2*sum((a@b.T).square().sum() for a,b in A)) and penalty > 0
    penalty.backward()
    assert all(a.grad is None and b.grad is not None for a,b in A)
    before = [a.clone() for a,_ in A]
    run(algo, loop, 2)
    assert all(torch.equal(a, b) for (a,_),b in zip(A, before))


@pytest.mark.parametrize("head", ["flow", "l1", "discrete"])
def test_an_adapter_outside_kept_directions_leaves_their_answers_alone(head):
    "Of a robot policy, over three tasks: inputs in the directions kept before a stage have the answers of before it, in each layer."
    algo,policy = KeepLoRA(4, threshold=.9, n_batches=2, B=4),tiny(head)
    ctx = CLContext(policy=policy, stream=STREAM, data=Frames(robot_batch(head)))
    Loop(ctx, quick_engine(policy), torch_rng(0, "noise"))
    class Loader:
        def next(self, n): return robot_batch(head)
        def sample_batches(self, n, B, purpose): return [robot_batch(head) for _ in range(n)]
    ctx.loader,moved = Loader(),[]
    for t in range(3):
        ctx.t,ctx.task_id = t,STREAM.ids[t]
        algo.prepare(policy, t, STREAM)
        loop = Loop(ctx, quick_engine(policy), torch_rng(t, "noise"))
        kept = {n: M.clone() for n,M in algo.bases.items()}
        call_hook(algo, "on_task_start", ctx)
        for _ in range(3): cl_step(algo, loop, 6)
        for n,M in kept.items():
            m = policy.get_submodule(n)
            A,B = m.A[str(t)].weight.detach(),m.B[str(t)].weight.detach()
            assert (A@M).abs().max() < 1e-5 and (B@A@M).abs().max() < 1e-5
            used = A[A.abs().sum(1) > 0]
            assert torch.allclose(used@used.T, torch.eye(len(used)), atol=1e-4)   # orthonormal rows, or zeros
            moved.append(float((B@A).abs().max()))
        call_hook(algo, "on_task_end", ctx)
        for n,M in kept.items(): assert torch.allclose(algo.bases[n][:, :M.shape[1]].abs(), M.abs(), atol=1e-4) or len(algo.bases[n]) == algo.bases[n].shape[1]
    assert max(moved) > 1e-3 and algo.metrics()["adapters"] == 2

def test_no_direction_left_or_no_gradient_gives_a_silent_adapter():
    g = torch_rng(0, "down")
    G,M = torch.randn(6, 5, generator=g),torch.linalg.qr(torch.randn(5, 3, generator=g))[0]
    A = down_projection(G, M, 4)
    assert (A[2:] == 0).all() and (A[:2]@M.double()).abs().max() < 1e-6 and torch.allclose(A[:2]@A[:2].T, torch.eye(2, dtype=A.dtype), atol=1e-6)
    assert (down_projection(G, torch.eye(5), 4) == 0).all() and (down_projection(0*G, M, 4) == 0).all()

def test_directions_of_other_layers_are_refused_by_keeplora():
    algo,loop = KeepLoRA(4, n_batches=1),quick_loop(STREAM)
    run(algo, loop, 0)
    state,other = algo.state_dict(),KeepLoRA(4, n_batches=1)
    other.load_state_dict(state | dict(bases={n: M for n,M in state["bases"].items() if n != "net.2"}))
    with pytest.raises(ValueError, match=r"\['net.2'\] are not among them"): run(other, loop, 1)

@pytest.mark.parametrize("head", ["mse", "flow"])
def test_without_a_margin_mlr_is_latent_replay_bit_for_bit(head):
    assert (quick_run(MLR(50, lam=0.), STREAM, head, steps=12) == quick_run(Latent(50), STREAM, head, steps=12)).all()


# --- state
@pytest.mark.parametrize("head", ["mse", "flow"])
@pytest.mark.parametrize("name", FAMILY)
def test_a_run_stopped_inside_a_task_goes_on_bit_for_bit(name, head, tmp_path):
    def finish(algo, loop, steps):
        for _ in range(steps): cl_step(algo, loop, 32)
        call_hook(algo, "on_task_end", loop.ctx)
        run(algo, loop, 2)
        return weights(loop.ctx.policy),quick_losses(loop, algo),torch.tensor([*algo.metrics().values()], dtype=torch.float64)

    def before(algo, loop):
        run(algo, loop, 0)
        start(algo, loop, 1, 12)
        call_hook(algo, "on_task_start", loop.ctx)
        for _ in range(9): cl_step(algo, loop, 32)

    algo,loop = make_algo(name, 3, **FAMILY[name]),quick_loop(STREAM, head)
    before(algo, loop)
    ctx = loop.ctx
    save_state(tmp_path/"s", dict(policy=weights(ctx.policy), opt=loop.engine.state_dict(ctx.params()), algo=algo.state_dict(),
                                  noise=rng_state(loop.generator), loader=ctx.loader.state_dict()))
    expected = finish(algo, loop, 3)

    state = load_state(tmp_path/"s")
    algo,loop = make_algo(name, 3, **FAMILY[name]),quick_loop(STREAM, head)
    ctx = loop.ctx
    prepare_stages(algo, ctx.policy, 1, STREAM)
    ctx.policy.load_state_dict(state["policy"])
    algo.load_state_dict(state["algo"])
    loop.engine = quick_engine(ctx.policy)
    loop.engine.load_state_dict(ctx.params(), state["opt"])
    ctx.bind(loop.engine)
    set_rng_state(loop.generator, state["noise"])
    ctx.t,ctx.task_id,ctx.step,ctx.n_steps = 1,"task1",9,12
    ctx.loader = QuickLoader(ctx.data, ["task1"], ctx.seed, "stage 1")
    ctx.loader.load_state_dict(state["loader"])
    w,losses,metrics = finish(algo, loop, 3)
    assert same(w, expected[0]) and (losses == expected[1]).all() and torch.equal(metrics, expected[2])

@pytest.mark.parametrize("name", ["packnet", "task_lora", "dwe", "router", "progressive", "olora", "keeplora"])
def test_an_evaluation_from_stored_state_gives_the_runs_own_losses(name, tmp_path):
    algo,loop = make_algo(name, **FAMILY[name]),quick_loop(STREAM)
    for t in range(2): run(algo, loop, t)
    own = quick_losses(loop, algo)
    save_state(tmp_path/"s", dict(policy=weights(loop.ctx.policy), algo=algo.state_dict()))
    state,other,fresh = load_state(tmp_path/"s"),make_algo(name, **FAMILY[name]),quick_loop(STREAM)
    prepare_stages(other, fresh.ctx.policy, 1, STREAM)
    fresh.ctx.policy.load_state_dict(state["policy"])
    other.load_state_dict(state["algo"])
    assert (quick_losses(fresh, other) == own).all()


# --- doors
@pytest.mark.parametrize("name,settings,message", [("agem", dict(n_ref=0), "n_ref"), ("derpp", dict(alpha=-1), "alpha"),
    ("derpp", dict(n_mem=0), "n_mem"), ("lwf", dict(lam=float("inf")), "lam"), ("lwf", dict(prompts="all"), "prompts"),
    ("packnet", dict(share=0), "share"), ("packnet", dict(retrain=2), "retrain"), ("task_lora", dict(rank=0), "rank"),
    ("task_lora", dict(alpha=0), "alpha"), ("task_lora", dict(trunk="none"), "trunk"), ("l2", dict(lam=-1), "lam"), ("si", dict(c=-1), "c must"),
    ("si", dict(xi=0), "xi"), ("si", dict(cap=0), "cap"), ("mas", dict(alpha=2), "alpha"), ("mas", dict(form="sum"), "form"), ("mas", dict(n_batches=0), "n_batches"),
    ("gdumb", dict(total_size=0), "total_size"), ("der", dict(alpha=-1), "alpha"), ("gem", dict(gamma=-1), "gamma"), ("gem", dict(n_ref=0), "n_ref"),
    ("rwalk", dict(alpha=0), "alpha"), ("rwalk", dict(interval=0), "interval"), ("rwalk", dict(xi=0), "xi"), ("rwalk", dict(lam=-1), "lam"),
    ("progressive", dict(rank=0), "rank"), ("progressive", dict(trunk="none"), "trunk"), ("dwe", dict(units=0), "units"), ("dwe", dict(trunk="none"), "trunk"),
    ("router", dict(reads="words"), "reads"), ("router", dict(shrink=0), "shrink"), ("router", dict(n_frames=0), "n_frames"),
    ("latent", dict(trunk="none"), "trunk"), ("latent", dict(replay_ratio=-1), "replay_ratio"), ("gss", dict(below=2), "below"), ("gss", dict(n_compare=0), "n_compare"), ("phaser", dict(n_phases=0), "n_phases"), ("retain", dict(mean=1), "mean"), ("er", dict(selection="best"), "selection"),
    ("gpm", dict(threshold=1.5), "threshold"), ("gpm", dict(growth=-1), "growth"), ("gpm", dict(rest="some"), "rest"), ("gpm", dict(project="weights"), "project"), ("gpm", dict(n_batches=0), "n_batches"), ("olora", dict(rank=0), "rank"), ("olora", dict(head_rank=-1), "head_rank"),
    ("olora", dict(lam=-1), "lam"), ("olora", dict(trunk="none"), "trunk"),
    ("keeplora", dict(threshold=2), "threshold"), ("keeplora", dict(weight_threshold=-1), "weight_threshold"), ("keeplora", dict(rank=0), "rank"), ("keeplora", dict(n_batches=0), "n_batches"),
    ("mlr", dict(lam=-1), "lam"), ("mlr", dict(gamma=-1), "gamma"), ("mlr", dict(near=2), "near"), ("mlr", dict(learns="eyes"), "learns"), ("mlr", dict(trunk="none"), "trunk")])
def test_settings_that_cannot_work_are_named(name, settings, message):
    with pytest.raises(ValueError, match=message): make_algo(name, **settings)

@pytest.mark.parametrize("trunk", ["first", "pretrained"])
def test_a_rank_larger_than_every_layer_is_refused_before_the_first_task(trunk):
    loop = quick_loop(STREAM)
    with pytest.raises(ValueError, match="rank 65 .* at most 64"): start(TaskLoRA(65, trunk=trunk), loop, 0, 1)
    start(TaskLoRA(64, trunk=trunk), loop, 0, 1)

@pytest.mark.parametrize("share", [None, .5])
def test_the_average_begins_anew_when_packnet_prunes(share):
    packnet,loop,free = PackNet(share),quick_loop(STREAM),[]
    start(packnet, loop, 0, 12)
    loop.ctx.average = average = EMA(loop.ctx.policy, .9)
    call_hook(packnet, "on_task_start", loop.ctx)
    for _ in range(12):
        was = packnet.pruned
        cl_step(packnet, loop, 32)
        now = {n: p.detach() for n,p in loop.ctx.params().items()}
        if packnet.pruned and not was: assert average.s == 0 and same(average.shadow, now)
        average.update(loop.ctx.policy)
        free.append(sum(float(average.shadow[n][o == 0].abs().sum()) for n,o in packnet.owner.items()))
    assert average.s == 5 and free[6] > 0 and free[7:] == [0.]*5    # pruned after the eighth of twelve updates

@pytest.mark.parametrize("name", [n for n in FAMILY if n not in ("from_scratch", "olora")])   # page cl/olora: it forgets more
def test_the_family_forgets_less_than_fine_tuning(name):
    plain,algo = (quick_run(a, STREAM, steps=40) for a in (Sequential(), make_algo(name)))
    assert algo[2, 0] < plain[2, 0] and name in algos

@pytest.fixture(scope="module")
def dot_data(tmp_path_factory): return tmp_path_factory.mktemp("data")

@pytest.mark.parametrize("name", ["packnet", "task_lora", "from_scratch", "si", "gdumb", "dwe", "router", "latent", "progressive", "gpm", "olora", "phaser", "keeplora", "mlr"])
def test_a_run_its_resume_and_eval_cl_give_the_same_episodes(name, tmp_path, dot_data, monkeypatch):
    "Two tasks of the dot through the whole house: trainer with its average, checkpoints, player, evaluation of checkpoints."
    from clvla.run.folder import RunFolder
    from clvla.train.checkpoint_eval import EvalConfig, eval_cl
    from clvla.train.config import TrainConfig, resolve
    from clvla.train.learner import train_cl
    from clvla.train.trainer import Trainer
    def config(run_dir): return resolve(TrainConfig(algo=name, suite="dot_2", n_demos=3, steps_per_task=9, warmup=1, batch_size=8, threads=1, n_trials=2, n_workers=1,
        image_size=32, chunk=4, save_every=4, model_kw=dict(D=32, n_blocks=1), run_dir=str(tmp_path/run_dir), data_dir=str(dot_data)))
    def episodes(folder): return {(r["stage"], r["task"], r["trial"]): (r["success"], r["steps"], r["reward"]) for r in folder.episodes()}
    whole = train_cl(config("whole"), say=len)
    own = episodes(RunFolder(whole.path))
    assert len(own) == 6
    if name in ("packnet", "task_lora", "dwe", "progressive"): assert all(own[0, i, n] == own[1, i, n] for _,i,n in own if (0, i, n) in own)
    real = Trainer.report
    def lost(self, ctx, *args):
        real(self, ctx, *args)
        if (ctx.t, ctx.step) == (1, 6): raise RuntimeError("lost")
    monkeypatch.setattr(Trainer, "report", lost)
    with pytest.raises(RuntimeError, match="lost"): train_cl(config("stopped"), say=len)
    monkeypatch.setattr(Trainer, "report", real)
    said = []
    stopped = train_cl(config("stopped"), say=said.append)
    assert any("continued after 001+000004" in line for line in said) and episodes(RunFolder(stopped.path)) == own
    last = [sorted((folder.path/"checkpoints").glob("001-*"))[-1]/"weights.safetensors" for folder in (whole, stopped)]
    assert same(*(read_tensors(path)[0] for path in last))
    again = episodes(RunFolder(eval_cl(EvalConfig(run_dir=str(whole.path), n_trials=2, n_workers=1), len).path))
    assert again == own

def test_the_trunk_rounds_alike_before_and_after_it_is_frozen():
    algo,policy,batch = TaskLoRA(4),tiny("flow"),robot_batch("flow")
    noise = torch.randn(6, 4, 4, generator=torch_rng(0, "chunk"))
    def played():
        with algo.eval_policy(policy, "a"): return policy.predict_chunk(batch, noise=noise)
    algo.prepare(policy, 0, STREAM)
    algo.live = "a"
    first = played()
    algo.prepare(policy, 1, STREAM)
    algo.live = "b"
    assert torch.equal(played(), first) and all(p.requires_grad for p in policy.head.parameters())


# --- merging
def merged(algo, n=3):
    "Weights when each task's training ends, and after its merge."
    loop,ended,after = quick_loop(STREAM),[],[]
    end = algo.on_task_end
    algo.on_task_end = lambda ctx: (ended.append(flat(ctx.params().values()).detach().clone()), end(ctx))
    for t in range(n):
        run(algo, loop, t)
        after.append(flat(loop.ctx.params().values()).detach().clone())
    return ended,after

def test_merging_beside_replay_has_er_and_the_first_task_as_its_ends():
    plain = merged(ER(50))[1]
    assert all(torch.equal(a, b) for a,b in zip(merged(Compose(ER(50), Retain(1.)))[1], plain))
    assert all(torch.equal(w, plain[0]) for w in merged(Compose(ER(50), Retain(0.)))[1])

@pytest.mark.parametrize("first", [False, True])
def test_equal_parts_are_the_mean_of_all_ends(first):
    begin = flat(quick_loop(STREAM).ctx.params().values()).detach()
    ended,after = merged(Compose(ER(50), Retain(mean=True, first=first)))
    for t,w in enumerate(after):
        parts = [begin]*first + ended[:t+1]
        assert torch.allclose(w, sum(parts)/len(parts), atol=1e-6) and torch.equal(w, ended[t]) == (t == 0 and not first)


def test_si_divides_by_the_way_that_the_trained_weights_went():
    "Beside an average of the weights, which ends nearer; where a run stands is stored."
    def end_of_task(average):
        si,loop = SI(xi=1e-3),quick_loop(STREAM)
        start(si, loop, 0, 12)
        ctx = loop.ctx
        ctx.average = EMA(ctx.policy, .9) if average else None
        call_hook(si, "on_task_start", ctx)
        for _ in range(12):
            cl_step(si, loop, 32)
            if average: ctx.average.update(ctx.policy)
        end,state = flat(ctx.params().values()).detach().clone(),si.state_dict()
        if average: ctx.average.copy_to(ctx.policy)
        resumed = SI(xi=1e-3)
        resumed.load_state_dict(state)
        for algo in (si, resumed): call_hook(algo, "on_task_end", ctx)
        assert torch.equal(si.omega, resumed.omega) and torch.equal(si.star, flat(ctx.params().values()))
        assert torch.equal(si.omega, (si.w/((end-si.start).square()+1e-3)).clamp(min=0)) and "end" in state
        return si
    plain,averaged = map(end_of_task, (False, True))
    assert torch.equal(plain.omega, averaged.omega) and not torch.equal(plain.star, averaged.star)


@pytest.mark.parametrize("ends", ["at an earlier look", "at merged weights"])
def test_the_importance_of_si_goes_by_where_its_updates_led(ends):
    "Also where the task ends at other weights: with `patience` at the best look, beside `retain` between the first ones and the last."
    def importance(elsewhere):
        si,loop = SI(xi=1e-3),quick_loop(STREAM)
        algo = Compose(si, Retain(first=True)) if elsewhere and "merged" in ends else si
        looks,ctx = Stopping(3),loop.ctx
        start(algo, loop, 0, 12)
        call_hook(algo, "on_task_start", ctx)
        for k in range(12):
            cl_step(algo, loop, 32)
            if k == 3: looks.keep(ctx.policy)
        if elsewhere and "look" in ends: looks.restore(ctx.policy)
        call_hook(algo, "on_task_end", ctx)
        assert "end" not in si.state_dict()
        return si
    last,other = map(importance, (False, True))
    assert torch.equal(last.omega, other.omega) and not torch.equal(last.star, other.star)


@pytest.mark.parametrize("reads", ["picture", "sentence"])
def test_a_router_that_reads_pictures_is_refused_before_it_learns_where_there_are_none(reads):
    router,loop = Router(reads=reads),quick_loop(STREAM)
    start(router, loop, 0, 5)
    with pytest.raises(ValueError, match=f"reads '{reads}' is for observations with pictures"): router.on_task_start(loop.ctx)


def test_lwf_beside_cumulative_notes_each_task_s_own_instruction():
    for seed in range(4):
        algo = make_algo("cumulative+lwf", seed)
        quick_run(algo, quick_stream(seed, n_frames=60), seed=seed, steps=5, B=8)
        assert algo.algos[1].past == {i: f"do {i}" for i in STREAM.ids}


@pytest.mark.parametrize("make", [SI, lambda: RWalk(interval=5)])
def test_an_update_that_the_scaler_of_fp16_leaves_out_has_no_importance(make):
    "Its gradient is not finite, its loss is: the trainer's guard lets it pass, and the scaler moves nothing."
    def importance(guarded):
        algo,loop = make(),quick_loop(STREAM)
        engine,ctx = loop.engine,loop.ctx
        complete,step = engine.complete,engine.step
        def overflows():
            complete()
            if ctx.step == 3: next(iter(ctx.params().values())).grad[0, 0] = torch.inf
        engine.complete,engine.step = overflows,lambda: ctx.step == 3 or step()
        if guarded: loop.guard = lambda loss: ctx.step != 3
        run(algo, loop, 0)
        return algo.omega
    left_out,refused = map(importance, (False, True))
    assert left_out.isfinite().all() and torch.equal(left_out, refused)


def test_packnet_that_leaves_no_weight_is_refused_before_the_first_task():
    for stream,refused in ((STREAM, True), (ONE, False)):
        algo,loop = PackNet(1.),quick_loop(stream)
        start(algo, loop, 0, 5)
        if not refused: algo.on_task_start(loop.ctx)
        else:
            with pytest.raises(ValueError, match="'task1' finds no free weight; share 1 gives all"): algo.on_task_start(loop.ctx)
