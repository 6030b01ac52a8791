"Stored features behind a frozen trunk: the loss of replayed frames, over processes too; who is refused; adapters."
import pytest, torch
from test_algos import STREAM, Frames, Rank, robot_batch, run, same, start, tiny, weights
from clvla.cl.all import make_algo
from clvla.cl.base import CLContext
from clvla.cl.buffer import bytes_of
from clvla.cl.compose import Compose
from clvla.cl.latent import POOLED, Latent, check_features, latents
from clvla.cl.quick import quick_loop
from clvla.cl.task_lora import TaskLoRA
from clvla.core.batch import cat, take, torch_rng
from clvla.core.names import ACTION, IMAGE, N_ACTIONS, PAD, STATE
from clvla.policies.all import make_policy

torch.set_num_threads(1)
REFS = [("a", k) for k in (3, 0, 5, 1)]


def at_stage_1(head, algo=None):
    "A policy whose trunk is frozen, six frames of task a in memory, and a context in task b."
    algo,policy = algo or Latent(replay_ratio=4/6, seed=2),tiny(head)
    ctx = CLContext(policy=policy, data=Frames(robot_batch(head)), task_id="a", batch_size=6)
    algo.prepare(policy, 0, STREAM)
    algo.on_task_end(ctx)
    algo.prepare(policy, 1, STREAM)
    ctx.t,ctx.task_id = 1,"b"
    algo.on_task_start(ctx)
    algo.choose = lambda n, ctx: REFS[:n]
    return algo,ctx

def part(batch, noise, time, rank, world):
    "One process's rows."
    rows = range(rank, 6, world)
    return take(batch, rows),*(x if x is None else x[list(rows)] for x in (noise, time))

@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("head", ["flow", "l1", "discrete"])
def test_the_loss_of_stored_features_is_that_of_their_frames(head, world):
    algo,ctx = at_stage_1(head)
    policy,new,ps = ctx.policy,robot_batch(head),list(ctx.params().values())
    noise,time = policy.draw(6, torch_rng(0, "new"))
    old = policy.draw(4, torch_rng(2, "latent", "noise"))   # the algorithm's own first draw
    both = [None if x is None else torch.cat([x, y]) for x,y in zip((noise, time), old)]
    positions = [int(algo.buf.frames["a"][k]) for _,k in REFS]
    frames = policy(cat(new, take(robot_batch(head), positions)), noise=both[0], time=both[1])[0]
    total,state = 0.,algo.state_dict()
    for rank in range(world):
        algo.load_state_dict(state)
        ctx.bind(Totals(rank, world))
        ctx.batch,n,t = part(new, noise, time, rank, world)
        ctx.loss = policy(ctx.batch, noise=n, time=t)[0]
        total = total + (ctx.loss + algo.compute_penalty(ctx))/world
    assert abs(total-frames).item() < 1e-6
    for a,b in zip(torch.autograd.grad(total, ps), torch.autograd.grad(frames, ps)): assert torch.allclose(a, b, atol=1e-6)

class Totals(Rank):
    "One of several processes that have equally many rows."
    def reduce(self, x): return x*self.world

def test_old_samples_for_each_new_one_are_replayed_on_top_of_the_batch():
    algo = Latent(replay_ratio=3.)
    assert (algo.n_drawn(8), algo.n_task_samples(8), algo.n_replayed(8), algo.n_appended(8)) == (0, 8, 0, 0)
    loop = quick_loop(STREAM)
    run(algo, loop, 0, 2)
    run(algo, loop, 1, 2)
    assert algo.n_drawn(8) == 24 and algo.metrics()["replayed/task0"] == 2*96 and len(loop.ctx.batch[STATE]) == 32 and not loop.ctx.n_mixed

def test_features_stay_beside_their_frames_when_the_memory_shrinks():
    algo,loop = Latent(None, total_size=60, selection="herding"),quick_loop(STREAM)
    for t in range(3): run(algo, loop, t, 2)
    for k in STREAM.ids:
        frames = loop.ctx.data.fetch(k, algo.buf.frames[k])
        assert len(frames[STATE]) == 20 and torch.equal(algo.stored[k][POOLED], frames[STATE]) and torch.equal(algo.stored[k][ACTION], frames[ACTION])

def test_a_memory_of_bytes_counts_features_and_goes_on_counting_them():
    "Also where a run was cut off inside a task: what a feature takes is a part of the memory's state."
    algo,loop = Latent(None, total_size="2 kB"),quick_loop(STREAM)
    run(algo, loop, 0)
    start(algo, loop, 1, 12)
    algo.on_task_start(loop.ctx)
    again = Latent(None, total_size="2 kB")
    again.load_state_dict(algo.state_dict())
    for a in (algo, again): a.on_task_end(loop.ctx)
    assert {k: x.tolist() for k,x in again.buf.frames.items()} == {k: x.tolist() for k,x in algo.buf.frames.items()}
    one = bytes_of({k: x for k,x in again.stored["task0"].items()})
    assert len(again.buf) == 2000//one and one < bytes_of(STREAM.train.fetch("task0", [0]))

def test_what_is_stored_is_what_a_head_reads_and_the_policy_stays_as_it_was():
    policy = tiny("discrete")
    before,ctx = weights(policy),CLContext(policy=policy, data=Frames(robot_batch("discrete")))
    few,many = (latents(ctx, [("a", k) for k in range(6)], B) for B in (2, 64))
    assert set(many) == {POOLED, ACTION, PAD, N_ACTIONS} and many[POOLED].shape == (6, 32) and torch.allclose(few[POOLED], many[POOLED], atol=1e-6)
    assert same(before, weights(policy)) and policy.training and not many[POOLED].requires_grad

# --- the trunk
@pytest.mark.parametrize("trunk,first", [("first", 1), ("pretrained", 0)])
def test_the_trunk_is_frozen_from_its_stage_on(trunk, first):
    algo,policy = Latent(trunk=trunk),tiny("l1")
    for t in range(3):
        algo.prepare(policy, t, STREAM)
        assert all(p.requires_grad == (n.startswith("head.") or t < first) for n,p in policy.named_parameters())

def test_a_trained_trunk_is_refused_by_the_names_of_its_parameters():
    _,ctx = at_stage_1("l1")
    ctx.policy.query.requires_grad_(True)
    ctx.policy.eyes[0].pos.requires_grad_(True)
    with pytest.raises(ValueError, match=r"2 parameters that are trained \(query, eyes.0.pos\).*freeze these"): Latent().on_task_start(ctx)
    ctx.t = 0
    Latent().on_task_start(ctx)   # the first task may train it
    with pytest.raises(ValueError, match="query"): Latent(trunk="pretrained").on_task_start(ctx)

def test_adapters_of_tasks_in_the_trunk_are_refused():
    algo,policy = Compose(Latent(trunk="pretrained"), TaskLoRA(4, trunk="pretrained")),tiny("l1")
    algo.prepare(policy, 0, STREAM)
    with pytest.raises(ValueError, match=r"\.A\.weight.*leave out what trains them"):
        algo.on_task_start(CLContext(policy=policy, data=Frames(robot_batch("l1")), task_id="a"))
    with pytest.raises(ValueError, match="each choose the parameters"): Compose(Latent(), TaskLoRA(4))
    with pytest.raises(ValueError, match="same trained parameters"): make_algo("latent+ewc")
    make_algo("latent+ewc", latent=dict(trunk="pretrained"))

def test_adapters_of_the_run_learn_in_the_first_task_or_are_refused():
    pytest.importorskip("peft")
    from clvla.policies.lora import add_lora
    with pytest.raises(ValueError, match="set lora_rank to 0"): Latent(trunk="pretrained").prepare(add_lora(tiny("l1"), 4), 0, STREAM)
    algo,policy = Latent(),add_lora(tiny("l1"), 4)
    algo.prepare(policy, 0, STREAM)
    assert any(".lora_" in n and p.requires_grad for n,p in policy.named_parameters())
    algo.prepare(policy, 1, STREAM)
    check_features(policy, robot_batch("l1"), True)
    assert {n.split(".")[0] for n,p in policy.named_parameters() if p.requires_grad} == {"head"}

@pytest.mark.parametrize("name", ["qwenoft-tiny", "qwengr00t-tiny", "neurovla-tiny"])
def test_heads_that_read_rows_are_refused(name):
    pytest.importorskip("transformers")
    from clvla.policies.all import policies
    size = (policies[name].image_sizes or (48,))[0]
    frame = robot_batch("l1") | {IMAGE: torch.zeros(6, 3, size, size, dtype=torch.uint8)}
    with pytest.raises(ValueError, match=r"reads all \d+ rows of its trunk.*use algo 'er'"):
        check_features(make_policy(name, size, 4, 4, H=4, seed=0), frame, False)

def test_a_policy_without_features_is_refused():
    with pytest.raises(ValueError, match="Linear lacks one of them"): check_features(torch.nn.Linear(2, 2), {}, False)
    with pytest.raises(ValueError, match="rounds to none"): Latent(replay_ratio=.05).check(8)
    Latent(replay_ratio=0.).check(8)
