"Columns of adapters: what was learnt answers to the bit as before, in every head and family; laterals at 0 are task_lora."
import pytest, torch
from test_algos import STREAM, robot_batch, run, tiny
from clvla.cl.progressive import Columns, Progressive, add_columns
from clvla.cl.quick import quick_loop
from clvla.cl.task_lora import TaskLoRA
from clvla.core.batch import torch_rng
from clvla.core.names import ACTION, IMAGE, PAD, PROMPT, STATE
from clvla.policies.all import make_policy

torch.set_num_threads(1)


@pytest.mark.parametrize("trunk,first", [("first", 1), ("pretrained", 0)])
def test_laterals_move_where_there_is_an_earlier_column(trunk, first):
    algo,loop = Progressive(4, trunk=trunk),quick_loop(STREAM)
    for t in range(3):
        run(algo, loop, t, 12, .9)
        assert (algo.metrics()["lateral"] > 0) == (t > first)
        assert t < first or {n.split(".columns.")[1][0] for n in loop.ctx.params()} == {str(t)}

@pytest.mark.parametrize("trunk,first", [("first", 1), ("pretrained", 0)])
@pytest.mark.parametrize("head", ["flow", "l1", "discrete"])
def test_a_task_answers_to_the_bit_as_when_it_had_been_learnt(head, trunk, first):
    algo,policy,batch = Progressive(4, trunk=trunk),tiny(head),robot_batch(head)
    noise = torch.randn(6, 4, 4, generator=torch_rng(0, "chunk")) if head == "flow" else None
    class Ctx: pass
    ctx = Ctx()
    ctx.policy = policy
    ctx.params = lambda: {n: p for n,p in policy.named_parameters() if p.requires_grad}
    def played(task_id):
        with algo.eval_policy(policy, task_id), torch.inference_mode(): return policy.predict_chunk(batch, noise=noise)
    answers = {"new": played("new")} if first == 0 else {}
    for ctx.t,ctx.task_id in enumerate("abc"):
        algo.prepare(policy, ctx.t, STREAM)
        algo.on_task_start(ctx)
        with torch.no_grad(): [p.add_(.02) for p in policy.parameters() if p.requires_grad]   # stands for training
        algo.on_task_end(ctx)
        answers[ctx.task_id] = played(ctx.task_id)
        for earlier,answer in answers.items(): assert torch.equal(played(earlier), answer)
        if first == 1: assert torch.equal(played("new"), answers["a"])   # the trunk
    if head != "discrete": assert not torch.equal(answers["b"], answers["c"])
    assert set(algo.heads) == {str(t) for t in range(first, 3)}

@pytest.mark.parametrize("name", ["qwenoft-tiny", "qwengr00t-tiny"])
def test_families_take_columns(name):
    pytest.importorskip("transformers")
    from clvla.policies.all import policies
    size = policies[name].image_sizes[0]
    policy,batch = make_policy(name, size, 4, 4, H=4, seed=0),robot_batch("l1")
    batch = {k: batch[k] for k in (STATE, ACTION, PAD, PROMPT)} | {IMAGE: torch.zeros(6, 3, size, size, dtype=torch.uint8)}
    batch,targets = policy.prepare(batch),policy.lora_targets()
    noise,time = policy.draw(6, torch_rng(1, "noise"))
    policy.train(False)
    with torch.no_grad(): before = policy(batch, noise=noise, time=time)[0]
    for t in (0, 1): add_columns(policy, t, 2, 16.)
    with torch.no_grad(): assert torch.allclose(policy(batch, noise=noise, time=time)[0], before, atol=1e-5)
    assert [n for n,m in policy.named_modules() if isinstance(m, Columns)] == [n for n,_ in policy.named_modules() if n in targets]
    with torch.no_grad(): [m.columns["0"].B.weight.add_(.01) for m in policy.modules() if isinstance(m, Columns)]
    policy(batch, noise=noise, time=time)[0].backward()
    laterals = [p for n,p in policy.named_parameters() if n.endswith("columns.1.lateral")]
    assert len(laterals) == len(targets) and all(p.grad.isfinite().all() for p in laterals) and any(p.grad.any() for p in laterals)
    assert all(p.grad is None for n,p in policy.named_parameters() if ".columns.0." in n or ".base." in n)

def test_a_task_that_comes_back_is_a_new_stage():
    algo,loop = Progressive(4),quick_loop(STREAM)
    for t in range(2): run(algo, loop, t, 6)
    ctx = loop.ctx
    ctx.t,ctx.task_id = 2,"task1"
    algo.prepare(ctx.policy, 2, STREAM)
    algo.on_task_start(ctx)
    assert [algo.eval_key(k) for k in STREAM.ids] == [0, 2, 0]

def test_first_values_are_those_of_task_lora():
    ours,theirs = tiny("l1"),tiny("l1")
    Progressive(4, trunk="pretrained", seed=3).prepare(ours, 0, STREAM)
    TaskLoRA(4, trunk="pretrained", seed=3).prepare(theirs, 0, STREAM)
    of = lambda policy: [p for n,p in policy.named_parameters() if p.requires_grad and not n.endswith("lateral")]
    assert len(of(ours)) == len(of(theirs)) and all(torch.equal(a, b) for a,b in zip(of(ours), of(theirs)))
