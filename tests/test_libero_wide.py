"LIBERO's goal suite with wider starts: what is refused, that a start is a function of its trial, and that experts find their way."
import numpy as np
import pytest

from libero_help import libero_root

libero_root()   # skips, or says what is wrong

from clvla.core.trials import trial_number
from clvla.envs.all import kinds, make_env, make_stream
from clvla.envs.libero.env import LiberoEnv
from clvla.envs.libero.experts import play, solve
from clvla.envs.libero.skills import World
from clvla.envs.libero import wide
from clvla.envs.libero.wide import CLEARANCE, VARIATIONS, WIDE, WideEnv, WideSim, clearance
from clvla.train.config import TrainConfig, resolve
from clvla.train.demos import demo_dir
from clvla.train.prepare import check

BOWL = "put_the_bowl_on_the_plate"
BOTH = dict(spread=1.5, places="exchanged")   # without `sides`


def spec(name=BOWL, **kw): return dict(kind="libero", suite="libero_goal", name=name, max_steps=300, **kw)


@pytest.mark.parametrize("entries,says", [
    (dict(spread=0), "expected a number from .1 to 4"), (dict(spread=4.5), "expected a number from .1 to 4"),
    (dict(spread=True), "expected"), (dict(spread=float("nan")), "expected a number"), (dict(spread="2"), "expected"),
    (dict(places="swapped"), "it can be 'exchanged'"), (dict(places=3), "expected str"),
    (dict(sides="exchanged"), "it can be 'mirrored'"), (dict(sides=True), "expected str"),
    (dict(sprad=2), "did you mean 'spread'")])
def test_bad_values_are_refused_when_a_stream_is_made_and_when_an_environment_is(entries, says):
    with pytest.raises(ValueError, match=says.replace(".", r"\.")): make_env(spec(**entries))
    with pytest.raises(ValueError, match=says.replace(".", r"\.")): make_stream(dict(base="libero_five", env=entries))


@pytest.mark.parametrize("base", ["libero_object", "libero_10", dict(base="libero_goal", tasks=["goal-push-plate-to-front-of-stove"])])
def test_tasks_without_variations_refuse_them(base):
    with pytest.raises(ValueError, match="only in tasks of libero_goal other than push_the_plate"):
        make_stream(dict(base=base, env=dict(spread=2)) if isinstance(base, str) else base | dict(env=dict(spread=2)))


def test_the_stream_is_libero_five_with_the_variation():
    five,far = make_stream("libero_five"),make_stream("libero_five_wide")
    assert five.ids == far.ids and [t.prompt for t in five.tasks] == [t.prompt for t in far.tasks]
    assert [t.env | WIDE for t in five.tasks] == [t.env for t in far.tasks]
    assert not any(VARIATIONS.keys() & t.env.keys() for t in five.tasks)
    kind = kinds["libero"]
    classes = [type(kind.make(t.env, image_size=32)) for t in (five.tasks[0], far.tasks[0])]
    assert classes == [LiberoEnv, WideEnv]


def test_demonstrations_of_a_variation_have_a_folder_of_their_own():
    cfgs = [resolve(TrainConfig(suite=s, algo="joint")) for s in ("libero_five", "libero_five_wide")]
    dirs = {demo_dir(make_stream(c.suite).tasks[0], c).name for c in cfgs}
    dirs |= {demo_dir(make_stream(dict(base="libero_five", env=BOTH)).tasks[0], cfgs[0]).name}
    assert len(dirs) == 3
    check(cfgs[1])


def state(sim): return np.concatenate([sim.data.qpos, sim.data.qvel, sim.model.body_pos.ravel(), sim.model.body_quat.ravel()])


@pytest.mark.parametrize("how", [WIDE, BOTH], ids=["wide", "both"])
def test_a_start_is_a_function_of_its_trial(how):
    used,fresh = (WideSim("libero_goal", BOWL, **how, visuals="none") for _ in range(2))
    starts = []
    for trial in (trial_number("demos", 3), 60, 5, 0):
        used.reset(trial); starts.append(state(used))
        for _ in range(5): used.step(np.ones(7))
    np.random.seed(1); before = np.random.get_state()[1].copy()
    for trial,start in zip((trial_number("demos", 3), 60, 5, 0), starts):
        fresh.reset(trial); np.testing.assert_array_equal(state(fresh), start)
    assert (np.random.get_state()[1] == before).all()               # the caller's generator is its own
    assert len({s.tobytes() for s in starts}) == 4
    for sim in (used, fresh): sim.close()


def test_things_stand_in_their_ranges_apart_from_each_other_and_exchanged():
    sim = WideSim("libero_goal", BOWL, **BOTH, visuals="none")
    things = sorted(sim.domain.objects_dict); middles = {k: sim.ranges[k][0] for k in things}; orders = set()
    for trial in range(15):
        sim.reset(trial)
        at = sim.placed
        order = tuple(min(middles, key=lambda k: np.linalg.norm(at[thing]-middles[k])) for thing in things)
        assert sorted(order) == things                               # one at each place
        for thing,place in zip(things, order):
            assert (abs(at[thing]-middles[place]) <= BOTH["spread"]*sim.ranges[thing][1]+1e-9).all()
        orders.add(order)
        assert clearance(World(sim.domain)) > CLEARANCE-.01                    # nothing moved more than a little while it settled
        assert not sim.domain._check_success()
    assert len(orders) > 4
    sim.close()


def test_on_the_other_side_everything_is_mirrored():
    "The same draw with and without `sides`: y changes its sign, x does not, and the furniture faces the middle again."
    plain,sides = (WideSim("libero_goal", BOWL, places="exchanged", **how, visuals="none") for how in ({}, dict(sides="mirrored")))
    front = {True: [], False: []}                                     # y of the drawers seen from the cabinet
    for trial in range(8):
        sides.reset(trial)
        other_side = bool(sides.placed["flat_stove_1"][1] < 0)
        region = sides.data.site("wooden_cabinet_1_top_region").xpos[1]-sides.placed["wooden_cabinet_1"][1]
        front[other_side].append(float(region))
        for thing,(x,y) in sides.placed.items():
            if thing not in sides.domain.objects_dict:
                middle,half = next(v for k,v in sides.ranges.items() if k.startswith(thing))
                assert (abs(np.array([x, -y if other_side else y])-middle) <= half+1e-9).all()
    assert front[True] and front[False]
    np.testing.assert_allclose(front[True][0], -front[False][0], atol=1e-6)
    plain.reset(0); assert plain.placed["flat_stove_1"][1] > 0
    for sim in (plain, sides): sim.close()


def test_a_start_that_does_not_stand_still_is_drawn_again(monkeypatch):
    sim = WideSim("libero_goal", BOWL, **WIDE, visuals="none")
    def moved(): return max(abs(now-sim.placed[name]).max() for name,now in sim.positions().items())
    sim.reset(4); first = state(sim); limit = moved()
    assert sim.attempt == 0 and limit < wide.STILL
    monkeypatch.setattr(wide, "STILL", limit)                        # the first draw moves too much now
    sim.reset(4)
    assert sim.attempt > 0 and moved() < limit and not np.array_equal(state(sim), first)
    monkeypatch.setattr(wide, "STILL", 0)
    with pytest.raises(RuntimeError, match="trial 4: in 20 draws not everything stood still"): sim.reset(4)
    monkeypatch.undo(); sim.reset(4)
    np.testing.assert_array_equal(state(sim), first)
    sim.close()


def test_experts_solve_what_a_replay_does_not():
    sim = WideSim("libero_goal", "turn_on_the_stove", **WIDE, visuals="none")
    assert sum(play(sim, trial_number("demos", i), 300, shake=.1)[0] for i in range(6)) >= 5
    sim.close()
    sim = WideSim("libero_goal", BOWL, **WIDE, visuals="none")
    sim.reset(0); done = []
    for action in solve(sim.domain, sim.suite, sim.name):
        done.append(action)
        if sim.step(action): break
    def replayed(trial): sim.reset(trial); return any(sim.step(action) for action in done)
    assert replayed(0) and sum(map(replayed, range(1, 5))) <= 1
    sim.close()
