"The losses of page cl/relatives: avalanche-lib's number on the digits, and equation 2 term by term."
import math
import numpy as np, pytest, torch
from avalanche_reference import tasks
from test_family import Digits
from clvla.cl.relatives import ace_loss, icarl_loss
from clvla.core.batch import torch_rng

torch.set_num_threads(1)


def test_ace_loss_is_avalanches():
    net,((x_old,y_old),_),((x,y),_) = Digits().net,*tasks("cil")[:2]
    x,y,x_old,y_old = x[:16],y[:16],x_old[:16],y_old[:16]
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
