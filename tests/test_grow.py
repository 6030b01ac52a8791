"Methods that add weights for each task: what was learnt answers to the bit as before, in every family, and nothing frozen is optimised."
import pytest, torch
from test_algos import STREAM, robot_batch, run, same, start, tiny, weights
from clvla.core.batch import torch_rng
from clvla.cl.dwe import DWE, Grown, Units, grow, layers_of
from clvla.cl.progressive import Progressive
from clvla.cl.quick import quick_loop, quick_losses
from clvla.cl.base import Process
from clvla.cl.router import LDA, Router, covered, features
from clvla.cl.task_lora import TaskLoRA, trained_set, write_set
from clvla.core.batch import cat, take
from clvla.core.names import ACTION, IMAGE, PAD, PROMPT, STATE
from clvla.policies.all import make_policy

torch.set_num_threads(1)


# --- units beside every layer
@pytest.mark.parametrize("trunk", ["first", "pretrained"])
@pytest.mark.parametrize("make,of_a_stage", [(DWE, ".units."), (Progressive, ".columns.")])
def test_no_weight_of_an_earlier_stage_moves(make, of_a_stage, trunk):
    algo,loop,rows,before = make(4, trunk=trunk),quick_loop(STREAM),[],{}
    for t in range(3):
        run(algo, loop, t, 12, .9)
        rows.append(quick_losses(loop, algo))
        now = weights(loop.ctx.policy)
        named = lambda n: n if n in now else n.replace(".weight", ".base.weight").replace(".bias", ".base.bias")
        assert all(torch.equal(w, now[named(n)]) for n,w in before.items())
        optimised = {id(p) for group in loop.engine.raw.param_groups for p in group["params"]}
        assert optimised == {id(p) for p in loop.ctx.params().values()}
        assert t == 0 or {n.split(of_a_stage)[1][0] for n in loop.ctx.params()} == {str(t)}
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

@pytest.mark.parametrize("name", ["dwe", "task_lora", "router", "progressive"])
def test_adapters_of_the_run_are_refused(name):
    from clvla.cl.all import make_algo
    pytest.importorskip("peft")
    from clvla.policies.lora import add_lora
    with pytest.raises(ValueError, match="lora_rank 4.*set lora_rank to 0"): make_algo(name).prepare(add_lora(tiny("l1"), 4), 0, STREAM)


# --- the router
def test_statistics_do_not_depend_on_how_the_samples_come():
    g = torch_rng(0, "lda")
    z = {k: torch.randn(40, 5, generator=g).double() + 3*torch.eye(5).double()[i] for i,k in enumerate("abc")}
    whole,parts = LDA(.1),LDA(.1)
    for k,x in z.items(): whole.add(k, x)
    for part in (range(0, 3), range(3, 39), range(39, 40)):
        for k in "cab": parts.add(k, z[k][list(part)])
    assert torch.allclose(whole.scatter, parts.scatter) and all(torch.allclose(whole.means[k], parts.means[k]) for k in z)
    assert [route == k for k,x in z.items() for route in whole(x)] == [route == k for k,x in z.items() for route in parts(x)]
    cov = sum((x-x.mean(0)).T@(x-x.mean(0)) for x in z.values())/120
    every = torch.cat(list(z.values()))
    s = every.var(0, unbiased=False).mean()
    W = torch.linalg.inv(.9*cov + .1*s*torch.eye(5).double())@torch.stack([x.mean(0) for x in z.values()]).T
    assert torch.allclose(whole.solve()[0], W.T)

def test_one_class_and_features_without_variance_are_no_error():
    lda = LDA()
    lda.add("a", torch.ones(4, 3).double())
    assert lda(torch.zeros(2, 3).double()) == ["a", "a"]
    lda.add("b", torch.zeros(4, 3).double())
    assert lda(torch.tensor([[.9]*3, [.1]*3]).double()) == ["a", "b"]

def test_what_is_covered_tells_nothing():
    batch = robot_batch("l1") | {"patches.front": torch.ones(6, 2)}
    other = robot_batch("l1") | {IMAGE: 255-batch[IMAGE], STATE: batch[STATE]+1, PROMPT: ["other"]*6}
    policy = tiny("l1")
    def z(b, reads): return features(policy, b, reads)
    assert torch.equal(z(batch, "picture"), z(batch | {PROMPT: other[PROMPT], STATE: other[STATE]}, "picture"))
    assert torch.equal(z(batch, "sentence"), z(batch | {IMAGE: other[IMAGE], STATE: other[STATE]}, "sentence"))
    for reads,key in (("picture", IMAGE), ("sentence", PROMPT), ("all", IMAGE), ("all", PROMPT), ("all", STATE)):
        assert not torch.equal(z(batch, reads), z(batch | {key: other[key]}, reads))
    assert all("patches.front" not in covered(batch, reads) for reads in ("all", "picture", "sentence"))   # made of the pictures

class Rank(Process):
    "One of two processes; a sum over them is this process's part."
    def __init__(self, rank): self.rank,self.world = rank,2

@pytest.mark.parametrize("n_frames", [1, 33, 400])
def test_features_of_two_processes_are_those_of_one(n_frames):
    algo,loop = Router(4, n_frames=n_frames),quick_loop(STREAM)
    start(algo, loop, 0, 1)
    whole = algo.look(loop.ctx)
    parts = []
    for rank in (0, 1):
        loop.ctx.bind(Rank(rank))
        parts.append(algo.look(loop.ctx))
    assert torch.equal(sum(parts), whole) and len(whole) == n_frames

@pytest.mark.parametrize("head", ["flow", "l1", "discrete"])
def test_every_row_of_a_call_has_its_own_adapter(head):
    algo,policy,batch = Router(4),tiny(head),robot_batch(head)
    algo.prepare(policy, 0, STREAM)
    algo.prepare(policy, 1, STREAM)
    before = weights(policy)
    for k,(task_id,row) in enumerate((("a", 0), ("b", 1), ("c", 2))):
        with torch.no_grad(): [p.add_(.05*k) for p in policy.parameters() if p.requires_grad]
        algo.sets[task_id] = trained_set(policy)
        write_set(policy, algo.start)
        with algo.on_trunk(policy): algo.lda.add(task_id, features(policy, take(batch, [row]), "all"))
    three = take(batch, [0, 1, 2, 1, 0, 2])
    noise,time = policy.draw(6, torch_rng(0, "noise"))
    start_noise = torch.randn(6, 4, 4, generator=torch_rng(0, "chunk")) if head == "flow" else None
    def answers(algo, task_id):
        with algo.eval_policy(policy, task_id), torch.inference_mode():
            return policy(three, noise=noise, time=time, reduction="none")[0],policy.predict_chunk(three, noise=start_noise)
    told = TaskLoRA(4)
    told.load_state_dict(algo.state_dict())
    own = {k: answers(told, k) for k in "abc"}
    for routed,i in zip(answers(algo, "a"), (0, 1)):
        assert torch.equal(routed, torch.stack([own[k][i][row] for row,k in enumerate("abcbac")]))
    assert same(before, weights(policy)) and "forward" not in vars(policy) and "predict_chunk" not in vars(policy)

def test_a_task_that_is_learnt_for_the_first_time_is_played_with_the_adapter_under_way():
    algo,loop = Router(4),quick_loop(STREAM)
    start(algo, loop, 0, 1)
    algo.on_task_start(loop.ctx)
    assert {algo.eval_key(k) for k in STREAM.ids} == {"live"}       # nothing has been learnt
    run(algo, loop, 0, 2)
    assert {algo.eval_key(k) for k in STREAM.ids} == {"routed"}
    start(algo, loop, 1, 1)
    algo.on_task_start(loop.ctx)
    assert [algo.eval_key(k) for k in STREAM.ids] == ["routed", "live", "routed"]
