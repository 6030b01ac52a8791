"""How much one update asks of a GPU: kernels, and how often the CPU waits, on the pretended device of tests/far.py.

The bounds stand a little above what was counted when they were written; the comment says what a slower form counts.
"""
import pytest
import torch

import far
from clvla.cl.base import CLContext
from clvla.cl.engine import Engine, Loop, cl_step
from clvla.cl.er import ER
from clvla.cl.mir import MIR
from clvla.core.batch import to_device, torch_rng
from clvla.core.names import ACTION, IMAGE, INDEX, PAD, PROMPT, STATE, TASK_ID
from clvla.policies.base import param_groups
from clvla.policies.tiny import Tiny

pytestmark = pytest.mark.skipif(bool(far.unfit()), reason=far.unfit() or "the pretended device is there")


class Frames:
    "Frames whose numbers follow from their place."
    def n_frames(self, task_id): return 60
    def fetch(self, task_id, idx):
        n, g = len(idx), torch_rng(0, task_id, *map(int, idx))
        return {IMAGE: torch.randint(0, 255, (n, 3, 32, 32), dtype=torch.uint8, generator=g), STATE: torch.randn(n, 4, generator=g),
                ACTION: torch.randn(n, 4, 4, generator=g), PAD: torch.zeros(n, 4, dtype=torch.bool), PROMPT: ["push the button"]*n,
                TASK_ID: [task_id]*n, INDEX: torch.as_tensor([*map(int, idx)])}
    def fetch_refs(self, refs): return self.fetch(refs[0][0], [i for _, i in refs])
    def next(self, n): return self.fetch("new", range(n))


def loop(head, device):
    torch.manual_seed(0)
    policy, data = Tiny(image_size=32, state_dim=4, action_dim=4, H=4, head=head).to(device), Frames()
    ctx = CLContext(policy=policy, data=data, loader=data, seed=0, task_id="new", n_steps=9, t=1)
    optimizer = torch.optim.AdamW(param_groups(policy, 1e-3, .01), fused=True)
    return Loop(ctx, Engine(policy, optimizer, None, 1.), torch_rng(0, "noise"), guard=lambda loss: bool(loss.isfinite()))


def losses(make, head, device, n=3):
    "Losses of updates, and what the last one asked of the device."
    algo, steps = make(), loop(head, device)
    algo.buf.add_task("old", steps.ctx.data)
    found = []
    for _ in range(n):
        with far.counts() as seen: found.append(float(cl_step(algo, steps, 16)))
    return found, seen


SCORED = lambda: MIR(candidates=8, top_k=4, n_draws=4)

@pytest.mark.parametrize("head,kernels", [("flow", 900), ("l1", 820)])   # counted: 875 and 798; a tensor at a time 1432 and 1326
def test_a_scored_update_asks_once_for_the_counts_of_a_group(head, kernels):
    with far.device() as there:
        found, seen = losses(SCORED, head, there)
    assert seen.waits.total() <= 10, seen     # counted: 8; when each tensor's count is asked for, 73 to 88
    assert sum(n for line, n in seen.by_line().items() if line.startswith("cl/probe.py")) <= 2, seen   # groups: with decay, without
    assert seen.kernels.total() <= kernels, seen
    assert found == pytest.approx(losses(SCORED, head, "cpu")[0], abs=1e-5)

def test_an_update_of_replay_waits_for_its_guard_and_the_words():
    with far.device() as there:
        _, seen = losses(ER, "flow", there)
    assert seen.waits.total() <= 3 and seen.kernels.total() <= 380, seen   # counted: 2 and 364


# The trunk of Qwen2.5-VL, as deep as the published one and very narrow

def deep():
    "QwenOFT with 32 layers of vision and 36 of text."
    pytest.importorskip("transformers")
    from dataclasses import replace
    from clvla.policies.vlm.qwen import QWEN_TINY
    from clvla.policies.vlm.qwenoft import TinyQwenOFT
    text = dict(num_hidden_layers=36, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
                rope_parameters=dict(rope_type="default", rope_theta=100., mrope_section=[1, 1, 2]))
    vision = dict(depth=32, hidden_size=16, intermediate_size=32, num_heads=2, out_hidden_size=16, patch_size=14, window_size=112,
                  fullatt_block_indexes=[7, 15, 23, 31])

    class Deep(TinyQwenOFT):
        shape = replace(QWEN_TINY, image_sizes=(224, 280), text=QWEN_TINY.text | text, vision=QWEN_TINY.vision | vision)
        image_sizes = 224, 280
    torch.manual_seed(0)
    return lambda cameras: Deep(image_size=cameras, state_dim=4, action_dim=4, H=4)

def pictures_of(cameras, B):
    g = torch_rng(0, "pictures")
    return {k: torch.randint(0, 255, (B, 3, h, h), dtype=torch.uint8, generator=g) for k, h in cameras.items()} | {
        STATE: torch.randn(B, 4, generator=g), ACTION: torch.randn(B, 4, 4, generator=g), PAD: torch.zeros(B, 4, dtype=torch.bool),
        PROMPT: ["push the red button"]*B}

def loss_and_gradients(policy, batch):
    policy.zero_grad()
    loss, _ = policy(batch)
    loss.backward()
    return loss.detach(), [p.grad for p in policy.parameters() if p.grad is not None]

@pytest.mark.parametrize("cameras,calls", [({IMAGE: 224}, 68), ({IMAGE: 224, IMAGE+"_wrist": 280}, 36+2*4+3*28)])
def test_the_windows_of_a_layer_are_one_call_with_the_same_bits(cameras, calls, monkeypatch):
    import torch.nn.functional as F
    import clvla.policies.vlm.qwen as qwen
    make, batch, n, plain = deep(), pictures_of(cameras, 3), [], F.scaled_dot_product_attention
    joined = make(cameras)
    monkeypatch.setattr(qwen, "join_windows", lambda tower: None)
    stock = make(cameras)
    stock.load_state_dict(joined.state_dict())
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **kw: n.append(1) or plain(*a, **kw))
    loss, gs = loss_and_gradients(joined, batch)
    assert len(n) == calls   # 36 layers of text; of vision one for each length of window: of 4 layers pictures, of 28 windows
    n.clear()
    other, theirs = loss_and_gradients(stock, batch)
    assert len(n) > 5*calls/2 and torch.equal(loss, other) and all(torch.equal(a, b) for a, b in zip(gs, theirs))

def test_a_deep_trunk_takes_bytes_and_waits_seldom():
    cameras = {IMAGE: 224}
    batch = pictures_of(cameras, 2)
    policy = deep()(cameras)
    loss = policy(policy.prepare(batch))[0].detach()
    with far.device() as there:
        policy.to(there)
        with far.counts() as seen: found = policy(to_device(policy.prepare(batch), there))[0].detach().cpu()
    assert torch.allclose(found, loss, atol=1e-5)
    assert seen.waits.total() <= 14, seen      # counted: 12; when each layer asks for its windows 117
    pictures = batch[IMAGE].nbytes
    assert seen.loads.total() < 1.1*pictures, seen   # as numbers of 32 bits four times as many, and the bytes beside them


# Agents and stored states

def test_ppo_copies_the_order_of_a_minibatch_once():
    from clvla.rl.actor import Actor, Value
    from clvla.rl.ppo import PPO
    n, g = 48, torch_rng(0, "rollout")
    with far.device() as there:
        torch.manual_seed(0)
        ppo = PPO(Actor(6, 2, 3, ref_dropout=0.).to(there), Value(6).to(there), epochs=2, minibatch=16, max_drift=None, kl_stop=None)
        rollout = dict(x=torch.randn(n, 6, generator=g), next_x=torch.randn(n, 6, generator=g), ref=torch.randn(n, 2, 3, generator=g),
                       action=torch.randn(n, 2, 3, generator=g), logp_old=torch.zeros(n), reward=torch.rand(n, generator=g),
                       mask=torch.full((n,), .9), done=torch.ones(n, dtype=torch.bool))
        rollout = to_device(rollout, there)
        with far.counts() as seen: ppo.update(rollout)
    copies = sum(k for (line, _), k in seen.loads.items() if line.startswith(("rl/ppo.py", "train/on_policy.py", "cl/engine.py")))
    assert copies <= 2*n*8 + 4*n, seen   # two epochs of n numbers of 8 bytes, and the n advantages; for each entry apart 7 times as many
    assert seen.waits.total() <= 28, seen   # counted: 26, before 68

def test_a_stored_tensor_is_copied_once():
    from clvla.core.state import own_copy
    x = torch.arange(24.).view(2, 3, 4).transpose(0, 2)
    with far.device() as there:
        y = own_copy(x.to(there))
    for copy in (y, own_copy(x)):
        assert torch.equal(copy, x) and copy.is_contiguous() and copy.device.type == "cpu" and copy.untyped_storage().nbytes() == 96
        assert copy.data_ptr() != x.data_ptr()
