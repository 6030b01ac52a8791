"""Continual learning: sampling laws, the order of hooks, MIR's score and its traces, EWC against known answers, exact state."""
from copy import deepcopy
from dataclasses import replace
import numpy as np, pytest, torch
from clvla.core.state import load_state, save_state
from clvla.core.batch import take, torch_rng
from clvla.cl.agem import AGEM
from clvla.cl.all import algo_settings, algos, make_algo
from clvla.cl.compose import Compose
from clvla.cl.base import (CLAlgorithm, CLContext, call_hook, check_choice, check_count, check_flag,
    check_number, flat, unflat)
from clvla.cl.buffer import Reservoir, TaskBuffer, bytes_of, draw_positions, n_trained, quotas, slots
from clvla.cl.der import DER
from clvla.cl.derpp import DERpp
from clvla.cl.engine import Engine, Loop, cl_step, unwrap_optimizer
from clvla.cl.er import ER, n_replay
from clvla.cl.ewc import EWC, check_finite, fisher
from clvla.cl.gdumb import GDumb
from clvla.cl.gem import GEM
from clvla.cl.gss import GSS
from clvla.cl.mir import MIR, interference, rank_correlation, true_change
from clvla.cl.phaser import PhaseBuffer
from clvla.cl.probe import by_updates, portions, virtual_step
from clvla.cl.quick import QuickLoader, quick_loop, quick_run, quick_stream, quick_task
from clvla.cl.sequential import Sequential
from clvla.cl.si import SI
from clvla.core.names import INDEX, STATE, TASK_ID
from clvla.data.streams import Stream, Task

torch.set_num_threads(1)
STREAM = quick_stream(0)


def filled(n=50, **kw):
    "A buffer with the tasks of the stream."
    buf = TaskBuffer(n, **kw)
    for t in STREAM.ids: buf.add_task(t, STREAM.train)
    return buf


# --- replay
@pytest.mark.parametrize("sampling", ["balanced", "rotating"])
@pytest.mark.parametrize("n", range(1, 9))
def test_every_task_equally_often_at_any_number_of_slots(sampling, n):
    steps = 1500 if sampling == "balanced" else 100
    for T in range(1, 21):
        rng,turn,total = np.random.default_rng(1000*n+T),0,np.zeros(T)
        for _ in range(steps):
            k = slots(n, T, sampling, rng, turn); turn = (turn+n)%T
            assert k.sum() == n and k.max()-k.min() <= 1
            total += k
        p = (n%T)/T
        chi2 = ((total-steps*n/T)**2).sum()/(steps*p*(1-p))*(T-1)/T if p and T > 1 else 0.
        if sampling == "rotating": assert total.max()-total.min() <= 1
        else:
            assert chi2 < (T-1) + 5*np.sqrt(2*(T-1)) + 6
            assert np.abs(total-steps*n/T).max() <= 4*np.sqrt(steps*p*(1-p)) + 1e-9

def test_a_task_with_one_frame_keeps_its_share_and_none_is_an_error():
    class Data:
        def n_frames(self, t): return {"a": 100, "b": 1, "c": 0}[t]
    buf = TaskBuffer(10)
    buf.add_task("a", Data()); buf.add_task("b", Data())
    drawn = [t for _ in range(200) for t,_ in buf.draw(3)]
    assert abs(drawn.count("b")/600 - .5) < .06
    with pytest.raises(ValueError, match="no frames to remember"): buf.add_task("c", Data())

def test_uniform_is_proportional_and_without_replacement():
    class Data:
        def n_frames(self, t): return {"a": 30, "b": 10}[t]
    buf = TaskBuffer(None, "uniform")
    for t in "ab": buf.add_task(t, Data())
    assert len(set(buf.draw(40))) == 40 and len(set(buf.draw(7))) == 7
    count = sum(t == "a" for _ in range(2000) for t,_ in buf.draw(4))
    assert abs(count/8000 - .75) < 3*np.sqrt(.75*.25/8000)
    assert np.bincount(draw_positions(5, 13, np.random.default_rng(0))).tolist().count(3) == 3

@pytest.mark.parametrize("B", range(1, 20))
@pytest.mark.parametrize("ratio", [0, .1, .3, .5, .99])
def test_count_of_replayed_samples(B, ratio):
    n = n_replay(B, ratio)
    assert n == min(round(B*ratio), B-1) and 0 <= n < B
    er = ER(replay_ratio=ratio)
    assert er.n_task_samples(B) == B                      # nothing to replay yet
    er.buf = filled()
    assert er.n_task_samples(B) == B-n

def test_replay_goes_behind_the_current_samples_and_leaves_them_alone():
    er,ctx = ER(replay_ratio=.3),quick_loop(STREAM).ctx
    er.buf.add_task("task0", STREAM.train)
    ctx.batch_size = 10; ctx.begin_batch(7)
    batch = STREAM.train.fetch("task1", range(7)); before = deepcopy(batch)
    out = er.modify_batch(batch, ctx)
    assert out[INDEX][:7].tolist() == list(range(7)) and out[TASK_ID] == ["task1"]*7 + ["task0"]*3
    assert torch.equal(batch[STATE], before[STATE]) and len(batch[TASK_ID]) == 7
    assert ctx.n_mixed == 3 and [int(er.buf.frames[t][p]) for t,p in ctx.mixed] == out[INDEX][7:].tolist()

@pytest.mark.parametrize("ratio,n", [(.25, 2), (1, 8), (2.5, 20)])
def test_remembered_samples_behind_a_whole_batch(ratio, n):
    er,loop,asked = ER(replay_ratio=ratio, form="append"),quick_loop(STREAM),[]; ctx = loop.ctx
    assert er.n_appended(8) == n and er.n_replayed(8) == 0 and Compose(er, SI()).n_appended(8) == n
    er.buf.add_task("task0", STREAM.train)
    ctx.loader = QuickLoader(ctx.data, ["task1"]); real = ctx.loader.next
    ctx.loader.next = lambda n: asked.append(n) or real(n)
    loss = cl_step(er, loop, B=8)
    assert asked == [8] and ctx.batch[TASK_ID] == ["task1"]*8 + ["task0"]*n
    assert torch.equal(loss, ctx.loss.detach()) and er.metrics()["replayed/task0"] == n

def test_a_memory_behind_the_batch_is_told_what_does_not_fit():
    with pytest.raises(ValueError, match="rounds to none"): ER(replay_ratio=.1, form="append").check(4)
    with pytest.raises(ValueError, match="'replace', 'append', found 'apend'"): ER(form="apend")
    with pytest.raises(ValueError, match="at least 0"): ER(replay_ratio=-1, form="append")

def test_only_the_samples_that_are_used_are_loaded():
    er,loop,asked = ER(replay_ratio=.5),quick_loop(STREAM),[]; ctx = loop.ctx
    er.buf.add_task("task0", STREAM.train)
    ctx.loader = QuickLoader(ctx.data, ["task1"]); real = ctx.loader.next
    ctx.loader.next = lambda n: asked.append(n) or real(n)
    for _ in range(3): cl_step(er, loop, B=8)
    assert asked == [4]*3 and len(ctx.batch[INDEX]) == 8

@pytest.mark.parametrize("ratio", [1, 1., -.1, 2, float("nan")])
def test_ratio_outside_its_range(ratio):
    with pytest.raises(ValueError, match=r"replay_ratio must be a number in \[0,1\)"): ER(replay_ratio=ratio)

def test_er_says_why_nothing_would_be_replayed():
    for ratio in (0, .1, .9): ER(replay_ratio=ratio).check(8)
    with pytest.raises(ValueError, match="rounds to none.*raise the ratio or the micro-batch"): ER(replay_ratio=.1).check(4)
    for ratio in (.1, .9):
        with pytest.raises(ValueError, match="has room for a new one only.*raise the micro-batch$"): ER(replay_ratio=ratio).check(1)

@pytest.mark.parametrize("kw", [dict(buffer_size=-3), dict(total_size=0), dict(sampling="balance"), dict(store="ref")])
def test_bad_memory_settings(kw):
    with pytest.raises(ValueError): ER(**kw)

@pytest.mark.parametrize("size", [2, "2 frames"])
@pytest.mark.parametrize("make", [ER, MIR, GSS, AGEM, GEM, DER, DERpp, GDumb])
def test_memory_too_small_for_one_sample_a_task_is_told_at_the_start(make, size):
    "And no update is made."
    one = bytes_of(STREAM.train.fetch("task0", [0])) + (4 if issubclass(make, DERpp) else 0)   # a chunk of one number beside the frame
    algo,loop = make(total_size=size if size == 2 else f"{2*one} B"),quick_loop(STREAM)
    before = [p.clone() for p in loop.ctx.params().values()]
    with pytest.raises(ValueError, match="too small for 3 tasks"): quick_task(algo, loop, 0, steps=1)
    assert all(map(torch.equal, before, loop.ctx.params().values()))

@pytest.mark.parametrize("memory", [TaskBuffer(None, total_size=4), PhaseBuffer(None, "refs", 8, 4, 0)], ids=["any", "phases"])
def test_probes_need_no_room_in_a_memory(memory):
    "Nor do tasks that come again."
    tasks = [Task(i, i, i, trained=i in "ab") for i in "apbqr"]
    room = lambda *tasks: memory.check_room(CLContext(policy=None, stream=Stream("some", tasks, cycles=3)))
    room(*tasks)
    with pytest.raises(ValueError, match="too small for 5 tasks|no room for 4 phases"): room(*(replace(task, trained=True) for task in tasks))

def test_a_stream_whose_stages_cannot_be_told_is_not_counted_by_its_ids():
    "Its probes would have been counted without a word."
    class Broken:
        ids = ["a", "probe"]
        @property
        def stages(self): return self.nothing
    with pytest.raises(AttributeError, match="nothing"): n_trained(Broken())

@pytest.mark.parametrize("make", [MIR, GSS])
def test_what_chooses_its_memory_can_stand_behind_a_whole_batch(make):
    "In the second task: eight new samples and four old ones, or four and four."
    for form,new in (("append", 8), ("replace", 4)):
        algo,loop = make(replay_ratio=.5, form=form),quick_loop(STREAM)
        for t in range(2): quick_task(algo, loop, t, steps=2, B=8)
        assert loop.ctx.batch[TASK_ID] == ["task1"]*new + ["task0"]*4

def test_a_memory_of_bytes_is_never_larger_and_survives_a_checkpoint():
    one = bytes_of(STREAM.train.fetch("task0", [0]))
    a = filled(None, total_size=f"{100*one} B")
    assert len(a) == 100 and (a.frame_bytes, a.total_size) == (one, 100)
    assert len(filled(None, total_size=f"{100*one-1} B")) == 99 and len(filled(10, total_size="1 GB")) == 30
    b = TaskBuffer(None, total_size=f"{100*one} B")
    b.load_state_dict(a.state_dict())
    assert (b.frame_bytes, b.draw(9)) == (one, a.draw(9))
    with pytest.raises(ValueError, match=f"of {one-1} bytes holds no frame: one of task 'task0' takes {one}"): filled(None, total_size=f"{one-1} B")
    with pytest.raises(ValueError, match="too small for 3 tasks"): quick_run(ER(total_size=f"{2*one} B"), STREAM, steps=1)
    for text in ("50", "50MB", "0 MB", "-1 MB", "x MB", "5 TB"):
        with pytest.raises(ValueError, match="a text like '50 MB'"): ER(total_size=text)

def test_kept_samples_are_distinct_reproducible_bounded():
    a,b,c = filled(seed=1),filled(seed=1),filled(seed=2)
    for t in STREAM.ids:
        assert len(set(a.frames[t].tolist())) == 50 and a.frames[t].tolist() == b.frames[t].tolist() != c.frames[t].tolist()
    assert [len(v) for v in filled(None, total_size=200).frames.values()] == [67, 67, 66]
    assert quotas(7, 200, 28) == [28]*7 and len(filled(10**6)) == 3*400

def test_kept_samples_are_uniform():
    count = np.zeros(400)
    for s in range(800):
        buf = TaskBuffer(None, total_size=120, seed=s)
        for t in STREAM.ids: buf.add_task(t, STREAM.train)
        count[buf.frames["task0"]] += 1
    e = 800*40/400
    assert ((count-e)**2/e).sum()/(1-.1) < 399 + 4*np.sqrt(2*399)

def test_references_and_values_give_the_same_batches():
    refs,values = filled(sampling="uniform"),filled(sampling="uniform", store="values")
    for _ in range(20):
        a,b = refs.fetch(refs.draw(9), STREAM.train),values.fetch(values.draw(9), None)
        assert torch.equal(a[STATE], b[STATE]) and a[TASK_ID] == b[TASK_ID]

def test_processes_hold_one_memory_and_share_a_draw():
    bufs = [filled(seed=4) for _ in range(3)]
    got = [list(zip(b[TASK_ID], b[INDEX].tolist())) for r,buf in enumerate(bufs) for b in [buf.fetch(buf.draw(30)[r::3], STREAM.train)]]
    assert len({x for g in got for x in g}) == 30 and len({str(b.state_dict()["rng"]) for b in bufs}) == 1

def test_reservoir_keeps_each_item_with_the_same_probability():
    kept = np.zeros(20)
    for s in range(3000):
        r = Reservoir(5, seed=s)
        for i in range(20): r.add(i)
        assert len(set(r.items)) == 5
        kept[r.items] += 1
    assert ((kept-750)**2/750).sum()/(1-5/20) < 43.8      # p > .001 at 19 degrees of freedom


# --- state
@pytest.mark.parametrize("kw", [dict(sampling=s, store=v) for s in ("balanced", "rotating", "uniform") for v in ("refs", "values")])
def test_memory_state_gives_identical_next_100_batches(kw, tmp_path):
    a,b = filled(**kw),TaskBuffer(50, **kw, seed=9)
    for _ in range(7): a.draw(4)
    save_state(tmp_path/"s", a.state_dict()); b.load_state_dict(load_state(tmp_path/"s"))
    for _ in range(100):
        x,y = a.fetch(a.draw(4), STREAM.train),b.fetch(b.draw(4), STREAM.train)
        assert torch.equal(x[STATE], y[STATE]) and x[TASK_ID] == y[TASK_ID] and torch.equal(x[INDEX], y[INDEX])

RESUMED = {"er": {}, "mir": dict(refresh=7), "mir cache": dict(refresh=7, between="cache"), "ewc": dict(n_batches=1), "ewc online": dict(mode="online", n_batches=1),
           "sequential": {}, "joint": {}, "cumulative": {}}
@pytest.mark.parametrize("name", RESUMED)
def test_resume_in_the_middle_of_a_task_is_bit_exact(name, tmp_path):
    make = lambda: make_algo(name.split()[0], 3, **RESUMED[name])
    algo,loop = make(),quick_loop(STREAM, head="flow")
    quick_task(algo, loop, 0, steps=12, B=8)
    quick_task(algo, loop, 1, steps=10, B=8)
    save_state(tmp_path/"s", algo.state_dict())
    other,loop2 = make(),quick_loop(STREAM, head="flow"); ctx,copy = loop.ctx,loop2.ctx
    other.load_state_dict(load_state(tmp_path/"s"))
    copy.policy.load_state_dict(ctx.policy.state_dict()); loop2.engine.raw.load_state_dict(deepcopy(loop.engine.raw.state_dict()))
    loop2.generator.set_state(loop.generator.get_state()); copy.loader = QuickLoader(copy.data, ctx.loader.task_ids, 0, "stage 1")
    copy.loader.load_state_dict(ctx.loader.state_dict()); copy.task_id,copy.t,copy.step = ctx.task_id,ctx.t,ctx.step
    for _ in range(100):
        assert torch.equal(cl_step(algo, loop, 8), cl_step(other, loop2, 8))
        assert torch.equal(ctx.batch[INDEX], copy.batch[INDEX]) and ctx.batch[TASK_ID] == copy.batch[TASK_ID]
    assert torch.equal(flat(ctx.params().values()), flat(copy.params().values()))
    assert algo.metrics() == other.metrics()


# --- hooks
class Recorder(CLAlgorithm):
    "Writes down each hook, and the weights at that moment."
    def __init__(self): self.log = []
    def note(self, hook, ctx): self.log.append((hook, ctx.t, ctx.step, flat(ctx.params().values()).detach().clone(), float(flat(ctx.grads()).norm())))
    def on_task_start(self, ctx): self.note("on_task_start", ctx)
    def observe(self, batch, ctx): self.note("observe", ctx)
    def modify_batch(self, batch, ctx): self.note("modify_batch", ctx); return batch
    def compute_penalty(self, ctx): self.note("compute_penalty", ctx); assert ctx.out is not None and ctx.batch is not None
    def after_backward(self, ctx): self.note("after_backward", ctx)
    def after_step(self, ctx): self.note("after_step", ctx)
    def on_task_end(self, ctx): self.note("on_task_end", ctx)

@pytest.mark.parametrize("n_micro", [1, 3])
@pytest.mark.parametrize("accelerated", [False, True])
def test_hook_order_for_two_tasks_of_three_steps(n_micro, accelerated):
    rec,loop = Recorder(),quick_loop(STREAM, lr=3e-3, max_norm=1e-3)
    ctx = loop.ctx
    if accelerated:
        from accelerate import Accelerator
        acc = Accelerator(cpu=True); model,opt = acc.prepare(ctx.policy, loop.engine.raw)
        ctx = CLContext(policy=acc.unwrap_model(model), stream=STREAM, data=STREAM.train)
        loop = Loop(ctx, Engine(model, opt, acc, 1e-3), loop.generator)
        assert isinstance(loop.engine.raw, torch.optim.AdamW) and (ctx.rank, ctx.world) == (0, 1)
    for t in range(2):
        ctx.t,ctx.task_id,ctx.step,ctx.loader = t,STREAM.ids[t],0,QuickLoader(ctx.data, [STREAM.ids[t]])
        rec.on_task_start(ctx)
        for _ in range(3): cl_step(rec, loop, B=4, n_micro=n_micro)
        rec.on_task_end(ctx)
    step = ["observe", "modify_batch", "compute_penalty"]*n_micro + ["after_backward", "after_step"]
    assert [x[0] for x in rec.log] == (["on_task_start"] + step*3 + ["on_task_end"])*2
    by = lambda hook: [x for x in rec.log if x[0] == hook]
    for back,step in zip(by("after_backward"), by("after_step")):
        assert back[4] > 1e-2 and abs(step[4]-1e-3) < 1e-5            # complete and unclipped before, clipped after
        assert not torch.equal(back[3], step[3])                      # the update lies between the two
    assert torch.equal(by("observe")[0][3], by("after_backward")[0][3])

def test_accumulation_is_the_gradient_of_the_whole_batch():
    ends = []
    for n_micro,B in ((1, 12), (3, 4)):
        loop = quick_loop(STREAM, lr=3e-3); ctx = loop.ctx; ctx.loader = QuickLoader(ctx.data, ["task0"])
        for _ in range(5): cl_step(None, loop, B, n_micro)
        ends.append(flat(ctx.params().values()).detach())
    assert torch.allclose(*ends, atol=1e-5)

@pytest.mark.parametrize("algo", [lambda: CLAlgorithm(), lambda: Sequential(), lambda: Compose(), lambda: Compose(Sequential(), Sequential()),
                                  lambda: ER(replay_ratio=0), lambda: EWC(lam=0, n_batches=1), lambda: MIR(replay_ratio=0)])
def test_no_op_algorithms_equal_none_bit_for_bit(algo):
    assert (quick_run(None, STREAM, "flow", steps=8) == quick_run(algo(), STREAM, "flow", steps=8)).all()

def test_same_seed_same_metrics():
    runs = []
    for _ in range(2):
        algo = MIR(refresh=5, seed=2); runs.append((quick_run(algo, STREAM, "flow", steps=12).tolist(), algo.metrics()))
    assert runs[0] == runs[1]

def test_compose_adds_slots_and_penalties():
    both,loop = Compose(ER(replay_ratio=.25), EWC(n_batches=1)),quick_loop(STREAM); ctx = loop.ctx
    for t in range(2): quick_task(both, loop, t, steps=5, B=8)
    assert both.n_task_samples(8) == 6 and float(ctx.penalty.detach()) > 0 and {"0/er/buffer", "1/ewc/penalty"} <= set(both.metrics())
    with pytest.raises(ValueError, match="lower their replay_ratio"):
        er = ER(replay_ratio=.6); er.buf = filled(); Compose(er, er).n_task_samples(10)
    with pytest.raises(ValueError, match="nothing to forget"): Compose(make_algo("joint"), make_algo("cumulative"))

def test_an_exception_says_where_it_was_raised():
    class Bad(CLAlgorithm):
        def after_step(self, ctx): raise KeyError("x")
    with pytest.raises(KeyError) as e: quick_task(Bad(), quick_loop(STREAM), 1, steps=1)
    assert e.value.__notes__ == ["in Bad.after_step, task 'task1', step 0"]

def test_small_checks():
    loop = quick_loop(STREAM); raw = loop.engine.raw
    assert unwrap_optimizer(raw) is raw and call_hook(Sequential(), "compute_penalty", loop.ctx) is None
    for bad in (-1, "3", None, float("nan"), float("inf"), True, [1]):
        with pytest.raises(ValueError, match="x must be a number at least 0"): check_number("x", bad, 0)
    with pytest.raises(ValueError, match="x must be True or False, found 1"): check_flag("x", 1)
    for bad in (0, 1.5, True, "3"):
        with pytest.raises(ValueError, match="n must be a whole number"): check_count("n", bad)
    with pytest.raises(ValueError, match="must be one of 'a', 'b', found 'c'"): check_choice("x", "c", "ab")
    with pytest.raises(RuntimeError, match="'w' is not finite"): check_finite(torch.tensor([1., float("inf")]), {"w": torch.zeros(2)})

def test_an_algorithm_that_tracks_no_parameter_says_so():
    for name in ("mir", "ewc"):
        loop = quick_loop(STREAM); loop.ctx.policy.requires_grad_(False)
        with pytest.raises(ValueError, match="no trained parameter"): quick_task(make_algo(name), loop, 0, steps=1)


# --- MIR
def second_task(head, seed=0, steps=15):
    "A context a little into the second task."
    loop = quick_loop(quick_stream(seed), head, seed)
    quick_task(None, loop, 0, steps=100); quick_task(None, loop, 1, steps=steps)
    return loop.ctx, loop.ctx.loader.next(22)

@pytest.mark.parametrize("head", ["l1", "mse", "flow"])
def test_score_ranks_like_the_true_change(head):
    r = []
    for seed in range(3):
        ctx,current = second_task(head, seed)
        old = ctx.data.fetch("task0", range(64))
        r.append(rank_correlation(interference(ctx, current, old, torch_rng(1, "a")), true_change(ctx, current, old, torch_rng(2, "b"))))
    assert np.mean(r) >= .8, r

class Lookup(torch.nn.Module):
    "One weight for each of 32 situations, shared by the conflicting half."
    def __init__(self): super().__init__(); self.w = torch.nn.Parameter(torch.zeros(32)); self.register_buffer("calls", torch.zeros(()))
    def draw(self, B, generator): return None, None
    def forward(self, batch, *, noise=None, time=None, reduction="mean"):
        self.calls += 1
        if self.training: torch.rand(1)
        loss = (self.w[batch["x"]] - batch["y"])**2
        if "bad" in batch: raise RuntimeError("boom")
        return (loss.mean() if reduction == "mean" else loss), {}

@pytest.mark.parametrize("opt", [lambda p: torch.optim.SGD(p, .1), lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.)])
def test_oracle_conflict_is_found(opt):
    model = Lookup(); ctx = Loop(CLContext(policy=model), Engine(model, opt(model.parameters()))).ctx
    current = dict(x=torch.arange(8).repeat(4), y=torch.ones(32))        # pulls weights 0..7 up
    x = torch.randperm(32, generator=torch_rng(0, "x")); old = dict(x=x, y=-torch.ones(32))
    top = interference(ctx, current, old, torch_rng(0, "n")).topk(8).indices
    assert (x[top] < 8).float().mean() >= .9

@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_scoring_leaves_no_trace(raises, training):
    model = Lookup().train(training); opt = torch.optim.AdamW(model.parameters(), 1e-2)
    model.w.grad = torch.ones(32); opt.step()
    ctx = Loop(CLContext(policy=model), Engine(model, opt, max_norm=1.)).ctx
    before = deepcopy((model.state_dict(), opt.state_dict())),torch.get_rng_state(),model.w.grad.clone()
    old = dict(x=torch.arange(4), y=torch.ones(4)) | (dict(bad=[1]*4) if raises else {})
    current = dict(x=torch.arange(4), y=torch.ones(4))
    if raises:
        with pytest.raises(RuntimeError, match="boom"): interference(ctx, current, old, torch_rng(0, "n"))
    else: interference(ctx, current, old, torch_rng(0, "n"))
    assert all(torch.equal(v, before[0][0][k]) for k,v in model.state_dict().items())
    assert torch.equal(opt.state_dict()["state"][0]["exp_avg"], before[0][1]["state"][0]["exp_avg"])
    assert torch.equal(torch.get_rng_state(), before[1]) and torch.equal(model.w.grad, before[2]) and model.training == training

def plain_step(p, g, group, state):
    "One AdamW step of one tensor, an operation at a time."
    (b1, b2), lr, t = group["betas"], group["lr"], float(state["step"])+1 if state else 1.
    m = state["exp_avg"].lerp(g, 1-b1) if state else (1-b1)*g
    v = (b2*state["exp_avg_sq"] if state else torch.zeros_like(g)).addcmul(g, g, value=1-b2)
    return (p*(1-lr*group["weight_decay"])).addcdiv(m, (v/(1-b2**t)).sqrt()+group["eps"], value=-lr/(1-b1**t))

def several(steps, max_norm=None, kind=torch.optim.AdamW, decay=.1):
    "Tensors of two groups; those of the second group begin one after another."
    model = torch.nn.ParameterDict({f"p{i}": torch.randn(n, generator=torch_rng(0, i)) for i, n in enumerate((50, 1, 7, 400, 33))})
    ps = list(model.values())
    opt = kind([dict(params=ps[:2], lr=1e-2, weight_decay=decay), dict(params=ps[2:], lr=3e-3, weight_decay=0.)], fused=True)
    for k in range(steps):
        for i, p in enumerate(ps): p.grad = torch.randn(len(p), generator=torch_rng(1, i, k)) if i < 3 or k >= i-2 else None
        opt.step()
    ctx = CLContext(policy=model); ctx.bind(Engine(model, opt, max_norm=max_norm))
    return ctx, ps, opt, [torch.randn(len(p), generator=torch_rng(2, i)) for i, p in enumerate(ps)]

@pytest.mark.parametrize("steps", [0, 2, 4])
@pytest.mark.parametrize("max_norm, kind, decay", [(None, torch.optim.AdamW, .1), (1., torch.optim.AdamW, .1), (1., torch.optim.Adam, 0.)])
def test_a_pretended_step_is_each_tensors_own_to_the_bit_and_torchs(steps, max_norm, kind, decay):
    ctx, ps, opt, gs = several(steps, max_norm, kind, decay); engine = ctx._engine
    counts = {float(engine.moments(p)["step"]) if engine.moments(p) else None for p in ps[2:]}
    assert len(counts) == {0: 1, 2: 3, 4: 3}[steps]   # of one group
    ahead = virtual_step(ctx, gs)
    scale = 1. if max_norm is None else (max_norm/(torch.nn.utils.get_total_norm(gs)+1e-6)).clamp(max=1)
    for (name, p), g in zip(ctx.params().items(), gs):
        assert torch.equal(ahead[name], plain_step(p.detach(), g*scale, engine.group(p), engine.moments(p)))
        p.grad = g.clone()
    if max_norm: engine.clip(ctx.params())
    opt.step()
    for name, p in ctx.params().items(): assert torch.allclose(ahead[name], p.detach(), atol=1e-6)

@pytest.mark.parametrize("kind, decay", [(torch.optim.Adam, .1), (torch.optim.Adagrad, 0.)])
def test_a_step_that_nobody_can_pretend_is_refused(kind, decay):
    ctx, _, _, gs = several(0, None, kind, decay)
    with pytest.raises(ValueError, match="use one of the two|are known"): virtual_step(ctx, gs)

def test_a_step_in_portions_is_the_same_step(monkeypatch):
    ctx, ps, _, gs = several(3)
    whole = virtual_step(ctx, gs)
    monkeypatch.setattr(portions, "__defaults__", (40,))
    assert [len(part) for part in portions([("", p, None) for p in ps])] == [1, 2, 1, 1]
    assert all(torch.equal(whole[k], x) for k, x in virtual_step(ctx, gs).items())

def test_moments_that_count_no_update_are_not_those_of_a_tensor_that_has_none():
    state = dict(step=torch.tensor(0.), exp_avg=torch.zeros(1), exp_avg_sq=torch.zeros(1))   # as fp16's scaler leaves it
    assert by_updates([{}, state, state | dict(step=torch.tensor(2.)), {}]) == {None: [0, 3], 0.: [1], 2.: [2]}

def test_refused_optimizers():
    model = Lookup(); batch = dict(x=torch.arange(4), y=torch.ones(4))
    for opt in (torch.optim.RMSprop(model.parameters(), 1e-2), torch.optim.AdamW(model.parameters(), 1e-2, amsgrad=True)):
        with pytest.raises(ValueError, match="AdamW .* and of SGD"):
            interference(Loop(CLContext(policy=model), Engine(model, opt)).ctx, batch, batch, torch_rng(0, "n"))

def test_frozen_parameters_stay_out_and_bf16_works():
    ctx,current = second_task("flow")
    ctx.policy.net[0].requires_grad_(False)
    assert len(interference(ctx, current, ctx.data.fetch("task0", range(5)), torch_rng(0, "n"))) == 5
    ctx.policy.requires_grad_(True).bfloat16()
    ctx.bind(Engine(ctx.policy, torch.optim.AdamW(ctx.policy.parameters(), 1e-2)))
    half = lambda b: {k: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v for k,v in b.items()}
    draw = ctx.policy.draw
    ctx.policy.draw = lambda *a: tuple(x.bfloat16() for x in draw(*a))
    s = interference(ctx, half(current), half(ctx.data.fetch("task0", range(5))), torch_rng(0, "n"))
    assert s.dtype == torch.float32 and s.isfinite().all() and (s != 0).any()

@pytest.mark.parametrize("steps,refresh", [(20, 1), (20, 7), (20, 20), (20, 21)])
@pytest.mark.parametrize("between", ["draw", "cache"])
def test_refresh_count(steps, refresh, between):
    mir,loop = MIR(refresh=refresh, between=between),quick_loop(STREAM)
    ctx = loop.ctx
    quick_task(mir, loop, 0, steps=3); assert mir.n_refresh == 0
    quick_task(mir, loop, 1, steps=steps); assert mir.n_refresh == steps//refresh

def test_between_refreshes_draw_keeps_variety_and_cache_does_not():
    kinds = {}
    for between in ("draw", "cache"):
        mir,loop,seen = MIR(refresh=30, between=between, replay_ratio=.5),quick_loop(STREAM),set()
        ctx = loop.ctx
        quick_task(mir, loop, 0, steps=3); quick_task(mir, loop, 1, steps=30)
        for _ in range(25):
            cl_step(mir, loop, 8); seen |= {(t, i) for t,i in zip(ctx.batch[TASK_ID][4:], ctx.batch[INDEX][4:].tolist())}
        kinds[between] = len(seen)
    assert kinds["cache"] == 8 and kinds["draw"] > 80

def test_the_worst_candidates_are_replayed_at_a_refresh():
    mir,loop = MIR(refresh=1, top_k=8, replay_ratio=.5),quick_loop(STREAM)
    ctx = loop.ctx
    quick_task(mir, loop, 0, steps=3); quick_task(mir, loop, 1, steps=2, B=8)
    got = list(zip(ctx.batch[TASK_ID][4:], ctx.batch[INDEX][4:].tolist()))
    assert got == [(t, int(mir.buf.frames[t][p])) for t,p in mir.cache[:4]]

def test_cost_in_samples_is_bounded():
    def passes(algo):
        loop,seen = quick_loop(STREAM),[]; ctx = loop.ctx
        quick_task(algo, loop, 0, steps=2)
        ctx.policy.net[-1].register_forward_hook(lambda m, x, y: seen.append(len(y)))
        quick_task(algo, loop, 1, steps=200); return sum(seen)
    er = passes(ER())
    assert passes(MIR(refresh=50)) <= 1.05*er and passes(MIR(refresh=200)) <= 1.02*er


# --- EWC
class Model(torch.nn.Module):
    "Linear-Gaussian or logistic regression as a policy."
    def __init__(self, w, kind): super().__init__(); self.w,self.kind = torch.nn.Parameter(w.clone()),kind
    def draw(self, B, generator): return None, None
    def forward(self, batch, *, noise=None, time=None, reduction="mean"):
        z,y = batch["x"]@self.w,batch["y"]
        loss = .5*(z-y)**2 if self.kind == "gauss" else torch.nn.functional.binary_cross_entropy_with_logits(z, y, reduction="none")
        return (loss.mean() if reduction == "mean" else loss), {}

@pytest.mark.parametrize("kind", ["gauss", "logistic"])
def test_fisher_is_the_analytic_one(kind):
    g = torch_rng(0, "fisher"); w = torch.tensor([1., -.5, .3])
    x = torch.randn(2000, 3, generator=g)*torch.tensor([1., 2., .5]); p = torch.sigmoid(x@w)
    y = x@w + torch.randn(2000, generator=g) if kind == "gauss" else (torch.rand(2000, generator=g) < p).float()
    ctx = CLContext(policy=Model(w, kind))
    batches = [dict(x=a, y=b) for a,b in zip(x.split(10), y.split(10))]
    known = (x**2 if kind == "gauss" else (p*(1-p))[:, None]*x**2).mean(0)
    assert torch.allclose(fisher(ctx, batches, "sample")/known, torch.ones(3), atol=.2)
    assert torch.allclose(10*fisher(ctx, batches, "batch")/known, torch.ones(3), atol=.4)
    grads = (x@w-y if kind == "gauss" else p-y)[:, None]*x               # exact, sample by sample
    assert torch.allclose(fisher(ctx, batches, "sample"), (grads**2).mean(0), rtol=1e-4)
    assert torch.allclose(fisher(ctx, batches, "batch"), (grads.view(-1, 10, 3).mean(1)**2).mean(0), rtol=1e-4)

def test_estimation_changes_nothing():
    loop = quick_loop(STREAM, head="flow"); ctx,raw = loop.ctx,loop.engine.raw; quick_task(None, loop, 0, steps=5)
    for p in ctx.params().values(): p.grad = torch.full_like(p, 3.)
    before = deepcopy((ctx.policy.state_dict(), raw.state_dict())),torch.get_rng_state(),ctx.loader.state_dict()
    for form in ("sample", "batch"): fisher(ctx, ctx.loader.sample_batches(2, 4, "fisher"), form, torch_rng(0, "n"))
    assert all(torch.equal(v, before[0][0][k]) for k,v in ctx.policy.state_dict().items())
    for i,s in raw.state_dict()["state"].items():
        assert all(torch.equal(v, before[0][1]["state"][i][k]) for k,v in s.items())
    assert torch.equal(torch.get_rng_state(), before[1]) and ctx.loader.state_dict() == before[2]
    assert ctx.policy.training and (flat(ctx.grads()) == 3).all()

def test_same_generator_same_fisher():
    ctx = quick_loop(STREAM, head="flow").ctx; b = [STREAM.train.fetch("task0", range(6))]
    assert torch.equal(*[fisher(ctx, b, "sample", torch_rng(0, "n")) for _ in range(2)])

def test_penalty_and_its_gradient():
    ewc,loop = EWC(lam=3., n_batches=1),quick_loop(STREAM)
    ctx = loop.ctx
    quick_task(ewc, loop, 0, steps=5)
    ps = ctx.params(); anchor = flat(ps.values()).detach().clone()
    assert ewc.compute_penalty(ctx).item() == 0
    d = torch.randn(len(anchor), generator=torch_rng(0, "d"))*.1
    with torch.no_grad(): [p.copy_(v) for p,v in zip(ps.values(), unflat(anchor+d, ps.values()))]
    pen = ewc.compute_penalty(ctx)
    assert torch.allclose(pen, 1.5*(ewc.F*d*d).sum(), rtol=1e-4)
    assert torch.allclose(flat(torch.autograd.grad(pen, list(ps.values()))), 3*ewc.F*d, rtol=1e-3, atol=1e-6)
    assert abs(float(ewc.F.mean())-1) < .05 and ewc.F.max() <= 100

def test_separate_springs_are_the_sum_and_online_ones_fade():
    g = torch_rng(0, "springs"); Fs,As = torch.rand(4, 30, generator=g),torch.randn(4, 30, generator=g)
    Fs[1, :5] = 0; w = torch.randn(30, generator=g)
    sep,on = EWC(mode="separate"),EWC(mode="online", gamma=.7)
    for F,a in zip(Fs, As): sep.add(F, a, ["w"]); on.add(F, a, ["w"])
    whole = (sep.F*(w-sep.anchor)**2).sum() + sep.rest
    assert torch.allclose(whole, sum((F*(w-a)**2).sum() for F,a in zip(Fs, As)), rtol=1e-4)
    assert torch.allclose(on.F, sum(.7**(3-k)*F for k,F in enumerate(Fs))) and torch.equal(on.anchor, As[3])

def test_resume_gives_the_same_penalty(tmp_path):
    ewc,loop = EWC(n_batches=1),quick_loop(STREAM)
    ctx = loop.ctx
    for t in range(2): quick_task(ewc, loop, t, steps=5)
    quick_task(None, loop, 2, steps=5)
    save_state(tmp_path/"s", ewc.state_dict()); other = EWC(n_batches=1); other.load_state_dict(load_state(tmp_path/"s"))
    a,b = ewc.compute_penalty(ctx).item(),other.compute_penalty(ctx).item()
    assert a > 0 and abs(a-b) <= 1e-6*a

def test_stiffness_to_its_limits():
    def moved(lam):
        ewc,loop = EWC(lam=lam, n_batches=1),quick_loop(STREAM)
        ctx = loop.ctx
        quick_task(ewc, loop, 0, steps=60); a = flat(ctx.params().values()).detach().clone()
        quick_task(ewc, loop, 1, steps=60); return float((ewc.F*(flat(ctx.params().values()).detach()-a)**2).mean())
    far = [moved(lam) for lam in (0., 1., 1e4)]
    assert far[0] > far[1] > far[2] and far[0] > 10*far[2], far

def test_nan_names_the_parameter():
    ctx = quick_loop(STREAM).ctx; ctx.policy.net[4].bias.data[0] = float("nan")
    with pytest.raises(RuntimeError, match="'net.0.weight' is not finite"): fisher(ctx, [STREAM.train.fetch("task0", range(3))])

def test_springs_of_other_parameters_are_refused():
    ewc,loop = EWC(n_batches=1),quick_loop(STREAM); ctx = loop.ctx; quick_task(ewc, loop, 0, steps=2)
    ctx.policy.net[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="net.0.weight"): quick_task(ewc, loop, 1, steps=1)


# --- all of them
@pytest.fixture(scope="module")
def plain(): return quick_run(None, STREAM, steps=60)

@pytest.mark.parametrize("name", [n for n in algos if n not in ("sequential", "from_scratch", "agem", "lwf", "lfl", "l2", "olora")])  # the last five: test_algos.py
def test_forgets_less_than_fine_tuning(name, plain):
    kw = dict(n_batches=2) if name == "ewc" else {}
    R = quick_run(make_algo(name, 0, **kw), STREAM, steps=60)
    assert R[2, 0] < .6*plain[2, 0]

def test_unknown_names():
    with pytest.raises(ValueError, match="did you mean 'mir'"): make_algo("mirr")
    with pytest.raises(ValueError, match="did you mean 'candidates'"): make_algo("mir", candidate=3)
    with pytest.raises(ValueError, match="top_k=20 is more than candidates=16"): make_algo("mir", top_k=20)
    with pytest.raises(ValueError, match="seed is the run's own"): make_algo("er", 0, **{"seed": 5})
    for kw in (dict(refresh=0), dict(candidates=-1), dict(n_draws=0), dict(between="never"), dict(refresh={"every": 3}),
               dict(between=["draw"])):
        with pytest.raises(ValueError): make_algo("mir", **kw)
    for kw in (dict(mode="offline"), dict(form="mean"), dict(gamma=2), dict(n_batches=0), dict(lam="big"), dict(lam=None),
               dict(normalise="yes"), dict(f_max=0)):
        with pytest.raises(ValueError): make_algo("ewc", **kw)
    for kw in (dict(replay_ratio="half"), dict(replay_ratio=[.5]), dict(buffer_size="all"), dict(buffer_size=2.5)):
        with pytest.raises(ValueError): make_algo("er", **kw)
    assert algo_settings("er")["replay_ratio"] == .3 and "seed" not in algo_settings("mir") and algo_settings("joint") == {}
