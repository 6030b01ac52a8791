"Methods that add weights for each task: what was learnt answers to the bit as before, in every family, and nothing frozen is optimised."
import pytest, torch
from test_algos import STREAM, robot_batch, run, same, start, tiny, weights
from clvla.core.batch import torch_rng
from clvla.cl.dwe import DWE, Grown, Units, grow, layers_of
from clvla.cl.quick import quick_loop, quick_losses
from clvla.policies.all import make_policy

torch.set_num_threads(1)


# --- units beside every layer
@pytest.mark.parametrize("trunk", ["first", "pretrained"])
def test_no_weight_of_an_earlier_stage_moves(trunk):
    algo,loop,rows,before = DWE(4, trunk),quick_loop(STREAM),[],{}
    for t in range(3):
        run(algo, loop, t, 12, .9)
        rows.append(quick_losses(loop, algo))
        now = weights(loop.ctx.policy)
        named = lambda n: n if n in now else n.replace(".weight", ".base.weight").replace(".bias", ".base.bias")
        assert all(torch.equal(w, now[named(n)]) for n,w in before.items())
        optimised = {id(p) for group in loop.engine.raw.param_groups for p in group["params"]}
        assert optimised == {id(p) for p in loop.ctx.params().values()}
        assert t == 0 or {n.split(".units.")[1][0] for n in loop.ctx.params()} == {str(t)}
        before = now
    assert rows[2][0] == rows[1][0] == rows[0][0] and rows[2][1] == rows[1][1]

@pytest.mark.parametrize("head", ["flow", "l1", "discrete"])
def test_a_policy_answers_to_the_bit_as_before_it_grew(head):
    algo,policy,batch = DWE(4),tiny(head),robot_batch(head)
    noise = torch.randn(6, 4, 4, generator=torch_rng(0, "chunk")) if head == "flow" else None
    def played(task_id):
        with algo.eval_policy(policy, task_id), torch.inference_mode(): return policy.predict_chunk(batch, noise=noise)
    answers = {}
    for t,task_id in enumerate("abc"):
        algo.prepare(policy, t, STREAM)
        algo.visits[task_id] = algo.t = t
        with torch.no_grad(): [p.add_(.02) for p in policy.parameters() if p.requires_grad]   # stands for training
        answers[task_id] = played(task_id)
        for earlier,answer in answers.items(): assert torch.equal(played(earlier), answer)
    if head != "discrete": assert not torch.equal(answers["a"], answers["b"]) and not torch.equal(answers["b"], answers["c"])

@pytest.mark.parametrize("name", ["tiny", "qwenoft-tiny", "qwengr00t-tiny", "paligemmaoft-tiny", "llamaoft-tiny", "neurovla-tiny"])
def test_every_family_grows(name):
    if name != "tiny": pytest.importorskip("transformers")
    from clvla.core.names import ACTION, IMAGE, PAD, PROMPT, STATE
    from clvla.policies.all import policies
    size = (policies[name].image_sizes or (48,))[0]
    policy = make_policy(name, size, 4, 4, H=4, seed=0)
    batch = robot_batch("l1")
    g = torch_rng(1, "pictures")
    batch = {k: batch[k] for k in (STATE, ACTION, PAD, PROMPT)} | {IMAGE: torch.randint(256, (6, 3, size, size), generator=g, dtype=torch.uint8)}
    batch = policy.prepare(batch)
    noise,time = policy.draw(6, torch_rng(1, "noise"))
    policy.train(False)
    with torch.no_grad(): before = policy(batch, noise=noise, time=time)[0]
    for t in (1, 2): grow(policy, t, 3)
    with torch.no_grad(): assert torch.allclose(policy(batch, noise=noise, time=time)[0], before, atol=1e-5)
    assert len(layers_of(policy)) == sum(isinstance(m, Grown) for m in policy.modules())
    policy(batch, noise=noise, time=time)[0].backward()
    writes = {n: p for n,p in policy.named_parameters() if ".units.2.write" in n}
    assert len(writes) == len(layers_of(policy)) and all(p.grad is None for n,p in policy.named_parameters() if ".units.2." not in n)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in writes.values())

def test_first_values_follow_from_the_seed_and_the_layer():
    def grown(seed):
        policy = tiny("l1")
        grow(policy, 1, 4, seed)
        return {n: p for n,p in policy.named_parameters() if ".read." in n}
    a,b,other = grown(0),grown(0),grown(1)
    assert same(a, b) and not any(torch.equal(a[n], other[n]) for n in a)
    assert not torch.equal(a["blocks.0.q.units.1.read.weight"], a["blocks.0.o.units.1.read.weight"])

def test_a_pretrained_head_is_trained_once_and_grows_then():
    algo,policy = DWE(4, "pretrained"),tiny("l1")
    algo.prepare(policy, 0, STREAM)
    assert all(p.requires_grad for p in policy.head.parameters()) and not any(isinstance(m, Grown) for m in policy.head.modules())
    algo.prepare(policy, 1, STREAM)
    assert {n.split(".units.")[1][0] for n,p in policy.named_parameters() if p.requires_grad} == {"1"}
    assert any(isinstance(m, Grown) for m in policy.head.modules())
    assert algo.metrics()["grown"] == sum(p.numel() for m in policy.modules() if isinstance(m, Units) for p in m.parameters())

@pytest.mark.parametrize("name", ["dwe"])
def test_adapters_of_the_run_are_refused(name):
    from clvla.cl.all import make_algo
    pytest.importorskip("peft")
    from clvla.policies.lora import add_lora
    with pytest.raises(ValueError, match=f"'{name}'.*lora_rank 4.*set lora_rank to 0"): make_algo(name).prepare(add_lora(tiny("l1"), 4), 0, STREAM)
