"Experts: every kind of goal is reached, from LIBERO's starts and from drawn ones, with a shaking hand, twice the same."
import numpy as np
import pytest

from libero_help import libero_root

libero_root()
from clvla.envs.libero.sim import LiberoSim
from clvla.envs.libero.experts import play, solve

KINDS = [("libero_goal", "turn_on_the_stove", 300), ("libero_goal", "put_the_bowl_on_the_plate", 300),
         ("libero_goal", "open_the_top_drawer_and_put_the_bowl_inside", 300),
         ("libero_object", "pick_up_the_milk_and_place_it_in_the_basket", 280),
         ("libero_10", "KITCHEN_SCENE4_put_the_black_bowl_in_the_bottom_drawer_of_the_cabinet_and_close_it", 520)]


@pytest.fixture
def sim(request):
    sim = LiberoSim(*request.param, visuals="none")
    yield sim
    sim.close()


@pytest.mark.parametrize("sim,limit", [((s, n), k) for s,n,k in KINDS], indirect=["sim"])
def test_kinds(sim, limit):
    ok,n = play(sim, 0, limit)
    assert ok and 20 < n <= limit


@pytest.mark.parametrize("sim", [("libero_goal", "put_the_bowl_on_the_stove")], indirect=True)
def test_same_and_shaken(sim):
    assert play(sim, 2, 300) == play(sim, 2, 300)
    assert play(sim, 2, 300, shake=.1)[0]
    assert play(sim, 100_001, 300)[0]


@pytest.mark.parametrize("sim", [("libero_goal", "put_the_bowl_on_the_stove")], indirect=True)
def test_actions(sim):
    sim.reset(0)
    actions = []
    for a in solve(sim.domain, sim.suite, sim.name):
        actions.append(a)
        if sim.step(a): break
    actions = np.array(actions)
    assert actions.dtype == np.float32 and actions.shape[1:] == (7,) and np.abs(actions).max() <= 1
    assert set(actions[:, 6]) == {-1., 1.}          # a gripper that only opens and closes
    assert (np.diff(actions[:, 6]) != 0).sum() <= 2 # and does not dither


@pytest.mark.parametrize("sim", [("libero_goal", "put_the_bowl_on_the_plate")], indirect=True)
def test_finds_its_way_after_a_push(sim):
    sim.reset(0)
    for n,a in enumerate(solve(sim.domain, sim.suite, sim.name)):
        if sim.step(np.array([1., -1, 0, 0, 0, 0, -1]) if 10 <= n < 18 else a): break
        assert n < 300
    assert sim.domain._check_success()
