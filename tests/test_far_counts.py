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
from clvla.core.batch import torch_rng
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
