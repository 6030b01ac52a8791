"The losses of page cl/relatives: avalanche-lib's number on the digits, and equation 2 term by term."
import math
from pathlib import Path
import numpy as np, pytest, torch
from torch import nn
from clvla.cl.relatives import ace_loss, icarl_loss
from clvla.core.batch import torch_rng

torch.set_num_threads(1)
DIGITS = np.load(Path(__file__).parent/"digits.npz", allow_pickle=False)


def classifier():
    "The network of test_family: weights from RandomState(0)."
    net,rng = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10)),np.random.RandomState(0)
    for p in net.parameters(): p.data = torch.tensor((rng.standard_normal(tuple(p.shape))*.2).astype("float32"))
    return net

def first(n, task):
    "The first training digits of a task of two classes."
    rows = DIGITS["train"].astype(int)
    rows = rows[DIGITS["y"][rows]//2 == task][:n]
    return torch.tensor(DIGITS["x"][rows]/16, dtype=torch.float32), torch.tensor(DIGITS["y"][rows].astype("int64"))

def test_ace_loss_is_avalanches():
    net,(x,y),(x_old,y_old) = classifier(),first(16, 1),first(16, 0)
    assert abs(float(ace_loss(net(x), y, net(x_old), y_old).detach())-1.548633) < 1e-5

@pytest.mark.parametrize("n_old", [0, 2, 5])
def test_icarl_loss_term_by_term(n_old):
    g = torch_rng(0, "icarl")
    z,before,y,old = torch.randn(7, 5, generator=g),torch.randn(7, 5, generator=g),torch.arange(7)%5,list(range(5))[5-n_old:]
    terms = []
    for i in range(7):
        for c in range(5):
            p = 1/(1+math.exp(-z[i, c]))
            q = 1/(1+math.exp(-before[i, c])) if c in old else float(y[i] == c)
            terms.append(-q*math.log(p) - (1-q)*math.log(1-p))
    assert abs(float(icarl_loss(z, y, before, old))-np.mean(terms)) < 1e-6
    assert torch.equal(icarl_loss(z, y, None, old), icarl_loss(z, y, before, []))
