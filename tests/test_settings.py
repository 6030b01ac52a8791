"Settings that say their own range: what the signature says is what is checked, kept, shown and read from a command line."
import copy
import inspect

import pytest
import torch

from clvla.cl.all import algos, make_algo
from clvla.cl.base import CLAlgorithm
from clvla.command.lists import entry
from clvla.core.config import arguments_of
from clvla.core.settings import Choice, Count, Flag, Number, Setting, settled
from clvla.crl.all import agents, cl_methods, runners
from clvla.rl.all import methods
from clvla.run.config import settings_of
from clvla.train.config import TrainConfig

MENUS = dict(algos=algos, agents=agents, cl_methods=cl_methods, runners=runners, practice=methods)
SAID = [(menu, name, k) for menu, registry in MENUS.items() for name in registry
        for k, p in arguments_of(registry[name]).items() if isinstance(p.annotation, Setting)]


class Base:
    @settled
    def __init__(self, lam:Number(0)=1., n:Count(none=True)=None): self.seen = lam, n


def test_every_check_of_the_rooms_is_in_a_signature():
    "By far most settings; those that are left depend on one another."
    assert len(SAID) > 400 and {name for menu, name, _ in SAID if menu == "agents"} >= {"ppo", "impala", "clear", "sane", "progress_compress"}
    assert {name for menu, name, _ in SAID if menu == "practice"} == {*methods}


@pytest.mark.parametrize("name", methods)
def test_a_practice_method_says_type_range_and_meaning_of_every_setting(name):
    "What is left is text and a dict, whose contents other things decide."
    shown = {s["name"]: s for s in entry(name)["practice"]["settings"]}
    assert {k for k in shown if not isinstance(arguments_of(methods[name])[k].annotation, Setting)} <= {"token", "token_kw", "logs"}
    assert all(s["meaning"] and "default" in s for s in shown.values())


@pytest.mark.parametrize("menu, name", sorted({pair[:2] for pair in SAID}))
def test_what_a_signature_says_is_refused_and_kept(menu, name):
    cls = MENUS[menu][name]
    given = {k: None for k in ("cfg", "exp") if k in arguments_of(cls)}
    refused = {"choice_grpo": {"lam", "value_weight"}, "flow_grpo": {"lam", "value_weight"}}.get(name, set())   # of a value, which they have not
    kinds = {k: p.annotation for k, p in arguments_of(cls).items() if isinstance(p.annotation, Setting) and k not in refused}
    for k, kind in kinds.items():
        with pytest.raises(ValueError) as e: cls(**given, **{k: []})
        assert str(e.value) == f"{k} must be {kind}, found []"
    made = cls(**given)
    changed = {"head_rank"}   # None stands for another setting
    assert {k: getattr(made, k) for k in kinds if k not in changed} == {k: arguments_of(cls)[k].default for k in kinds if k not in changed}


@pytest.mark.parametrize("args, kw", [((2,), {}), ((2, 3), {}), ((), dict(n=3, lam=2)), ((2,), dict(n=3)), ((2, None), {})])
def test_by_position_and_by_name(args, kw):
    made = Base(*args, **kw)
    assert (made.lam, made.n) == made.seen and made.lam == 2 and vars(copy.deepcopy(made)) == vars(made)


@pytest.mark.parametrize("args, kw, says", [((1, 2, 3), {}, "positional"), ((1,), dict(lam=2), "multiple values"), ((), dict(mu=2), "unexpected keyword")])
def test_wrong_arguments_are_python_s_own_error(args, kw, says):
    with pytest.raises(TypeError, match=says): Base(*args, **kw)


def test_needed_keyword_only_and_further_arguments():
    class Needed:
        @settled
        def __init__(self, size:Count(), *more, share:Number(0, 1)=.5, **kw): self.more, self.kw = more, kw
    assert vars(Needed(3, 4, 5, share=.1, x=1)) == dict(size=3, share=.1, more=(4, 5), kw=dict(x=1))
    with pytest.raises(ValueError, match=r"share must be a number in \[0,1\], found 2"): Needed(3, 4, share=2)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'size'"): Needed()


def test_parents_children_modules_and_plain_constructors():
    class Child(Base):
        @settled
        def __init__(self, mode:Choice(("a", "b"))="a", lam:Number(0)=3.): super().__init__(lam)
    class Plain(Child):
        def __init__(self, lam=4.): super().__init__(lam=lam)
    class Net(torch.nn.Module):
        @settled
        def __init__(self, width:Count()=2):
            super().__init__()
            self.layer = torch.nn.Linear(width, width)
    assert (Child().mode, Child().lam, Plain().lam, Plain(5.).seen) == ("a", 3., 4., (5., None))
    with pytest.raises(ValueError, match="lam must be"): Plain(-1)
    class Other(Base):
        @settled
        def __init__(self, n:Count()=2): super().__init__(lam=n/2)   # an n of its own, which the parent's None must not replace
    class Below(Other):
        def __init__(self, **kw): super().__init__(**kw)
    assert [(made.lam, made.n) for made in (Other(), Other(4), Below(n=6))] == [(1., 2), (2., 4), (3., 6)] and Other().seen == (1., None)
    assert Net(3).width == 3 and list(Net(3).state_dict()) == ["layer.weight", "layer.bias"]


def test_annotations_that_are_text_are_no_silent_absence():
    "As `from __future__ import annotations` makes them."
    def late(self, lam:"Number(0)"=1.): pass
    with pytest.raises(TypeError, match="late has a Setting as its annotation"): settled(late)


def test_a_choice_of_a_registry_knows_what_is_added():
    menu = dict(a=1)
    kind = Choice(menu)
    with pytest.raises(ValueError, match="must be one of 'a', found 'b'"): kind.check("x", "b")
    menu["b"] = 2
    kind.check("x", "b")
    assert repr(kind) == "one of 'a', 'b'" and not kind.allows(["a"])


def test_a_plugin_with_a_constructor_of_its_own_is_made(monkeypatch):
    class Old(CLAlgorithm):
        def __init__(self, lam:float=1.): self.lam = lam
    class New(CLAlgorithm):
        @settled
        def __init__(self, lam:Number(0)=1., on:Flag()=True): pass
    for name, cls in dict(old=Old, new=New).items(): monkeypatch.setitem(algos, name, cls)
    assert make_algo("old", lam=2).lam == 2 and vars(make_algo("new", lam=2)) == dict(lam=2, on=True)
    assert settings_of(New) == dict(lam=float, on=bool) and settings_of(Old) == dict(lam=float)
    with pytest.raises(ValueError, match="on must be True or False, found 1"): make_algo("new", on=1)


def test_a_command_s_text_is_stored_as_what_the_signature_says():
    cfg = TrainConfig.of(suite="dot_2", cl="mir", buffer_size="50", total_size="50 MB", refresh="3", sampling="uniform")
    assert cfg.cl_kw == dict(buffer_size=50, total_size="50 MB", refresh=3, sampling="uniform")
    assert TrainConfig.of(suite="dot_2", cl="mas", alpha="None", normalise="false", lam="3").cl_kw == dict(alpha=None, normalise=False, lam=3.)
    with pytest.raises(ValueError, match="'refresh': 'often' is not a value"): TrainConfig.of(suite="dot_2", cl="mir", refresh="often")


def test_the_signature_is_read_once(monkeypatch):
    monkeypatch.setattr(inspect, "signature", None)   # a call of it would fail
    assert Base(2.).lam == 2.
