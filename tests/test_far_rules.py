"The pretended device refuses what a GPU refuses, takes what a GPU takes, and computes what the CPU computes."
import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import far


@pytest.fixture
def pair(device):
    "The same numbers, (4,3), on the device and on the CPU."
    here = torch.linspace(-1, 1, 12).view(4, 3)
    return here.to(device),here


zero = lambda x: torch.zeros((), dtype=torch.long, device=x.device)
REFUSED = {
    "add": lambda x, c: x+c,
    "add in place to the CPU": lambda x, c: torch.zeros(()).add_(x.sum()),
    "product of matrices": lambda x, c: x@c.T,
    "join": lambda x, c: torch.cat([x, c]),
    "join with a number of the CPU": lambda x, c: torch.stack([x.sum(), torch.zeros(())]),
    "choice by a condition of the CPU": lambda x, c: torch.where(c > 0, x, 0.),
    "masked by the CPU": lambda x, c: x.masked_fill(c > 0, 0.),
    "layer": lambda x, c: nn.Linear(3, 2).to(x.device)(c),
    "loss": lambda x, c: nn.functional.mse_loss(x, c),
    "embedding": lambda x, c: nn.functional.embedding(torch.tensor([0]), x),
    "rows by index_select": lambda x, c: x.index_select(0, torch.tensor([0])),
    "gather": lambda x, c: x.gather(0, torch.zeros(1, 3, dtype=torch.long)),
    "scatter": lambda x, c: x.scatter(0, torch.zeros(1, 3, dtype=torch.long, device=x.device), c[:1]),
    "rows of the CPU by indices of the device": lambda x, c: c[zero(x)[None]],
    "rows written from the CPU": lambda x, c: x.index_put_((zero(x)[None],), c[:1]),
    "average of lists": lambda x, c: torch._foreach_lerp_([x], [c], .5),
    "numpy": lambda x, c: x.numpy(),
    "array": lambda x, c: np.asarray(x),
    "a draw by the CPU's generator": lambda x, c: torch.randn(3, device=x.device, generator=torch.Generator()),
    "a draw in place by the CPU's generator": lambda x, c: x.normal_(generator=torch.Generator()),
    "pinning": lambda x, c: x.pin_memory(),
}
ALLOWED = {
    "times a number of the CPU": (lambda x, c: x*torch.tensor(2.), lambda c: c*2),
    "choice with a number of the CPU": (lambda x, c: torch.where(x > 0, x, torch.tensor(1.)), lambda c: c.where(c > 0, 1.)),
    "masked with a number of the CPU": (lambda x, c: x.masked_fill(x > 0, torch.tensor(1.)), lambda c: c.masked_fill(c > 0, 1.)),
    "rows by the CPU's indices": (lambda x, c: x[torch.tensor([1, 0])], lambda c: c[[1, 0]]),
    "rows by the CPU's mask": (lambda x, c: x[c[:,0] > 0], lambda c: c[c[:,0] > 0]),
    "rows by the device's mask": (lambda x, c: x[x[:,0] > 0], lambda c: c[c[:,0] > 0]),
    "rows by numpy": (lambda x, c: x[np.array([0, 2])], lambda c: c[[0, 2]]),
    "cells by indices of both": (lambda x, c: x[torch.arange(4), zero(x).expand(4)], lambda c: c[:,0]),
    "rows written from the CPU": (lambda x, c: x.index_copy(0, zero(x)[None], x[1:2]), lambda c: torch.cat([c[1:2], c[1:]])),
    "a slice set from the CPU": (lambda x, c: (x.__setitem__(slice(0, 2), c[2:]), x)[1], lambda c: torch.cat([c[2:], c[2:]])),
    "copied in lists": (lambda x, c: (torch._foreach_copy_([x], [c+1]), x)[1], lambda c: c+1),
    "a view set to zero": (lambda x, c: (x[1:3].zero_(), x)[1], lambda c: torch.cat([c[:1], 0*c[1:3], c[3:]])),
    "an axis added in place": (lambda x, c: x.unsqueeze_(1)+0, lambda c: c[:,None]),
    "numbers from a list": (lambda x, c: torch.tensor([1., 2.], device=x.device), lambda c: torch.tensor([1., 2.])),
    "numbers in a row": (lambda x, c: torch.arange(5, device=x.device), lambda c: torch.arange(5)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(pair, what):
    with pytest.raises((RuntimeError, TypeError)) as found: REFUSED[what](*pair)
    assert "INTERNAL ASSERT" not in str(found.value)


@pytest.mark.parametrize("what", ALLOWED)
def test_allowed(pair, device, what):
    there,here = ALLOWED[what]
    result = there(*pair)
    assert result.device == device and torch.equal(result.cpu(), here(pair[1]))


def test_an_update_needs_its_counts_on_the_device(device):
    p = nn.Parameter(torch.ones(3, device=device))
    opt = torch.optim.AdamW([p], fused=True)
    p.sum().backward()
    opt.step()
    assert opt.state[p]["step"].device == device
    opt.state[p]["step"] = opt.state[p]["step"].cpu()
    with pytest.raises(RuntimeError, match="device"): opt.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.bool])
def test_a_copy_that_nobody_waits_for_is_garbage(dtype):
    if why := far.unfit(): pytest.skip(why)
    with far.device() as there:
        right = torch.tensor([0, 1, 1, 0]).to(dtype)
        x = right.to(there)
        here = x.to("cpu", non_blocking=True)
        assert (here != right).all()
        assert torch.equal(x.to("cpu"), right) and torch.equal(here, right)
        mine = torch.zeros_like(right)
        mine.copy_(x, non_blocking=True)
        assert (mine != right).all()
        x.sum().item()
        assert torch.equal(mine, right)


def test_gradients_identity_and_copies(pair, device):
    x,c = pair
    net = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 1))
    twin,ids = copy.deepcopy(net),[id(p) for p in net.parameters()]
    net.to(device)
    assert ids == [id(p) for p in net.parameters()]   # an optimizer made before still holds the weights
    net(x).square().mean().backward()
    twin(c).square().mean().backward()
    grads = lambda m: torch.cat([p.grad.cpu().flatten() for p in m.parameters()])
    close = dict(rtol=1e-6, atol=1e-7) if device.type == "far" else dict(rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(grads(net), grads(twin), **close)
    again = copy.deepcopy(net)
    assert all(isinstance(p, nn.Parameter) and p.device == device for p in again.parameters())
    assert torch.equal(grads(again), grads(net))
    z = x.clone().requires_grad_()
    checkpoint(net, z, use_reentrant=False).sum().backward()
    assert z.grad.device == device
    weights = {n: p.detach() for n,p in net.named_parameters()}
    loss = lambda w, row: torch.func.functional_call(net, w, (row[None],)).sum()
    per_row = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    assert per_row["0.weight"].shape == (4, 8, 3) and per_row["0.weight"].device == device


def test_its_generator_is_its_own(device):
    before = torch.get_rng_state()
    torch.manual_seed(3)
    a,here = torch.randn(5, device=device),torch.get_rng_state()
    assert torch.equal(torch.get_rng_state(), here)
    torch.manual_seed(3)
    assert torch.equal(a, torch.randn(5, device=device)) and not torch.equal(a, torch.randn(5, device=device))
    assert not torch.equal(a.cpu(), torch.randn(5))
    torch.set_rng_state(before)


def test_what_is_counted():
    if why := far.unfit(): pytest.skip(why)
    from clvla.core.batch import to_device
    with far.device() as there:
        with far.counts() as seen:
            x = to_device(dict(x=torch.ones(4)), there)["x"]
            y = (x+1).view(2, 2)
            x[:2]
        assert seen.kernels.total() == 1 and not seen.waits and seen.loads.total() == 16
        assert list(seen.by_line("loads"))[0].startswith("core/batch.py:")
        for wait in (lambda: y.sum().item(), lambda: bool(y.any()), lambda: y.cpu(), lambda: y.nonzero(), lambda: y[y > 0],
                     lambda: y[torch.tensor([0])], lambda: torch.ones(2).to(there), lambda: torch.equal(y, y)):
            with far.counts() as seen: wait()
            assert seen.waits.total() == 1, seen
        with far.counts() as seen: torch.rand(3, device=there)
        assert seen.draws.total() == 1
    assert not far.machine.counting
