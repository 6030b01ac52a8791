"A setting that would change nothing beside the others is refused."
import pytest

from clvla.cl.all import make_algo
from clvla.core.config import arguments_of

CASES = [("ewc", dict(gamma=.5), "gamma=0.5 has no effect where mode is 'separate'; leave it out, or set mode to 'online'"),
         ("mas", dict(normalise=False, o_max=3.), "o_max=3.0 has no effect where normalise is False; leave it out"),
         ("mlr", dict(lam=0., gamma=1.), "gamma=1.0 has no effect where lam is 0.0"), ("mlr", dict(lam=0, near=.2), "near=0.2 has no effect where lam is 0")]


@pytest.mark.parametrize("algo,kw,said", CASES)
def test_a_setting_without_effect_is_refused(algo, kw, said):
    with pytest.raises(ValueError) as e: make_algo(algo, 0, **kw)
    assert said in str(e.value)


@pytest.mark.parametrize("algo,kw", [("ewc", dict(mode="online", gamma=.5)), ("ewc", dict(mode="separate", gamma=.9)), ("mas", dict(o_max=3.)), ("mlr", dict(gamma=1., near=.2))])
def test_one_with_an_effect_or_its_default_is_taken(algo, kw):
    made = make_algo(algo, 0, **kw)
    assert all(getattr(made, k) == v for k,v in kw.items())


def test_help_says_what_it_needs():
    assert str(arguments_of(type(make_algo("ewc", 0)))["gamma"]).startswith("gamma: a number in [0,1], only with mode='online'")
