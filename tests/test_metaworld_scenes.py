"""Meta-World scenes that need eyes and ears: starts and pictures that tell nothing of the task, wrong buttons, refusals, experts."""
import numpy as np
import pytest
from clvla.core.names import IMAGE, STATE
from clvla.core.seeds import seed_of
from clvla.envs.all import kinds, make_env, make_stream, with_env
from clvla.envs.metaworld.buttons import APART
from clvla.envs.metaworld.env import MetaWorldEnv
from clvla.envs.metaworld.tasks import BUTTONS, HALFWAY, MT50, STREAMS, metaworld_task
from clvla.envs.metaworld.variations import CROWDED, PAIRS, VARIATIONS, VariedEnv, check_variation
from clvla.train.config import TrainConfig
from clvla.train.demos import demo_dir

pytestmark = pytest.mark.filterwarnings("ignore:Constant.s. may be too high")   # of the stock experts; they are clipped

def spec(name, **kw): return dict(kind="metaworld", name=name, **kw)
def halfway(name, **kw): return spec(name, **(dict(spread=.2, places=3, start="middle") | kw))
def of(task_id): return metaworld_task(task_id).env

def played(env, trial):
    env.reset(trial); success = False
    while not env.ended: _,success,_,_ = env.step(env.expert())
    return success

@pytest.fixture(scope="module")
def envs():
    "One environment of each spec for all tests of this file: loading is the slow part."
    made = {}
    def get(d): return made.setdefault(str(sorted(d.items())), make_env(d))
    yield get
    for env in made.values(): env.close()

GROUPS = {f"{verb}-row": [of(i) for i in BUTTONS if i.startswith(verb)] for verb in ("press", "push")}
GROUPS |= {p: [halfway(f"{p}-{way}-v3") for way in ("open", "close")] for p in PAIRS}

@pytest.mark.parametrize("scene", GROUPS)
def test_tasks_of_one_scene_begin_with_the_same_picture_and_state(scene, envs):
    group = [envs(d) for d in GROUPS[scene]]
    seen = []
    for trial in (0, 1, 2, 7):
        first,*others = [env.reset(trial) for env in group]
        for other in others: assert np.array_equal(first[IMAGE], other[IMAGE]) and np.array_equal(first[STATE], other[STATE])
        for env in group[1:]: assert np.array_equal(env.sim.data.qpos, group[0].sim.data.qpos) and env.scene == scene
        seen.append(first)
    assert not any(np.array_equal(seen[0][IMAGE], other[IMAGE]) for other in seen[1:])
    assert all(np.array_equal(seen[0][STATE], other[STATE]) for other in seen[1:])   # the state tells nothing of the place

@pytest.mark.parametrize("d", [of("press-left"), of("push-right"), halfway("drawer-open-v3"), spec("window-close-v3", places=2), spec("push-v3", spread=.5)],
                         ids=lambda d: d["name"])
def test_start_is_a_function_of_task_trial_and_seed(d, envs):
    old,fresh = envs(d),make_env(d)
    for trial in (0, 9):
        old.reset(trial)
        for _ in range(20): old.step(np.ones(4))
    a,b = old.reset(4),fresh.reset(4)
    assert np.array_equal(a[IMAGE], b[IMAGE]) and np.array_equal(old.full, fresh.full) and np.array_equal(old.sim.data.qpos, fresh.sim.data.qpos)
    for u in np.random.default_rng(0).uniform(-1, 1, (20, 4)): assert old.step(u) == fresh.step(u)
    assert np.array_equal(old.full, fresh.full)
    assert not np.array_equal(fresh.reset(5)[IMAGE], a[IMAGE])
    other = make_env(d, seed=1); assert not np.array_equal(other.reset(4)[IMAGE], a[IMAGE])
    other.close(); fresh.close()

def test_first_picture_is_true(envs):
    "With a variation the start's poses are computed: a second forward pass changes neither picture nor observation."
    envs(of("press-middle"))
    import mujoco   # after an environment has chosen how it draws
    for d in (of("press-middle"), halfway("faucet-close-v3"), spec("drawer-close-v3", spread=2)):
        env = envs(d); picture = env.reset(3)[IMAGE]; full = env.full.copy()
        mujoco.mj_forward(env.sim.model, env.sim.data)
        assert np.array_equal(env.render(), picture) and np.array_equal(env.sim._get_obs(), full)

@pytest.mark.parametrize("verb", ["press", "push"])
def test_a_wrong_button_ends_the_episode(verb, envs):
    "The expert of the right button, acting in the task of the left one."
    env,named = envs(of(f"{verb}-left")),envs(of(f"{verb}-right"))
    env.reset(1); named.reset(1); ended = False
    while not named.ended and not env.ended:
        action = named.expert()
        _,success,terminated,truncated = env.step(action); _,right,_,_ = named.step(action)
    assert right and named.ended and env.ended and terminated and not success and not truncated and env.t < env.max_steps
    with pytest.raises(ValueError, match="the episode has ended"): env.step_chunk(np.zeros((1, 4)))

@pytest.mark.parametrize("task_id", STREAMS["mw10"].ids)
def test_stock_experts_succeed(task_id, envs):
    task = STREAMS["mw10"][task_id]
    assert [played(envs(task.env), trial) for trial in (0, 1)] == [True, True] and task.env["max_steps"] == 120

def test_places_and_spread(envs):
    "Positions of the object: three places 27 cm apart; the range about each is the stock range times `spread`."
    env = envs(halfway("faucet-open-v3")); env._load()
    xs = np.array([np.mean(env.drawn_from(seed), 0) for seed in range(60)])
    assert np.allclose(np.unique(xs[:,0].round(6)), [-.27, 0, .27]) and np.ptp(xs[:,1:], 0).max() == 0
    low,high = env.drawn_from(0); assert np.allclose(high-low, .2*np.array([.1, .05, 0]))
    wide = envs(spec("push-v3", spread=.5)); wide.reset(0); stock = make_env(spec("push-v3")); stock._load()
    assert np.allclose(wide.high-wide.low, stock.sim._random_reset_space.high-stock.sim._random_reset_space.low)
    low,high = wide.drawn_from(0); assert np.allclose(high-low, (wide.high-wide.low)/2) and np.allclose(high+low, wide.high+wide.low)
    for pair,(joint,low,high) in PAIRS.items():
        stock = make_env(spec(f"{pair}-open-v3")); stock._load(); space = stock.sim._random_reset_space
        assert np.array_equal(space.low, low) and np.array_equal(space.high, high)

@pytest.mark.parametrize("name", ["faucet-open-v3", "drawer-close-v3", "button-press-topdown-v3"])
def test_without_a_variation_the_environment_is_the_stock_one(name, envs):
    "Bit for bit Meta-World's own class, seeded by the trial, at the start and after 30 steps."
    env = envs(spec(name)); obs = env.reset(3)
    assert type(env) is MetaWorldEnv and env.scene == name and isinstance(make_env(spec(name, spread=1)), VariedEnv)
    sim = env.cls()
    sim._partially_observable,sim._freeze_rand_vec,sim._set_task_called,sim.seeded_rand_vec = False,False,True,True
    sim.__dict__.pop("sawyer_observation_space", None)
    sim.seed(seed_of(0, "metaworld", name, 3)); full,_ = sim.reset()
    assert np.array_equal(env.full, full) and np.array_equal(obs[STATE], full[:4].astype(np.float32))
    for u in np.random.default_rng(0).uniform(-1, 1, (30, 4)): env.step(u); full = sim.step(u)[0]
    assert np.array_equal(env.full, full) and np.array_equal(env.sim.data.qpos, sim.data.qpos) and np.array_equal(env.sim.model.site_rgba, sim.model.site_rgba)

REFUSED = [(dict(spread=.05), "spread is 0.05, expected a number from .1 to 4"), (dict(spread=5), "spread is 5"), (dict(spread=float("nan")), "spread is nan"),
    (dict(spread="1"), "'spread' is '1', expected int or float"), (dict(spread=True), "expected int or float"), (dict(places=0), "places is 0, expected a whole number from 1 to 5"),
    (dict(places=6), "places is 6"), (dict(places=2.), "'places' is 2.0, expected int"), (dict(places=True), "expected int"), (dict(start="end"), "start is 'end'; it can be 'middle'"),
    (dict(start=None), "'start' is None, expected str"), (dict(spraed=1), "did you mean 'spread'")]

@pytest.mark.parametrize("kw,says", REFUSED, ids=[str(kw) for kw,_ in REFUSED])
def test_unknown_and_unfitting_values_are_refused_at_the_door(kw, says):
    with pytest.raises(ValueError, match=says): make_env(spec("faucet-open-v3", **kw))
    with pytest.raises(ValueError, match=says): with_env(metaworld_task("faucet-open"), kw)
    with pytest.raises(ValueError, match=says): make_stream(dict(base="mw10", tasks=["open-faucet"], env=kw))

def test_variations_that_do_not_fit_the_task_are_refused_at_the_door():
    for kw in (dict(places=2), dict(start="middle")):
        with pytest.raises(ValueError, match="expected only for faucet-., window-., drawer-."): make_env(spec("push-v3", **kw))
    with pytest.raises(ValueError, match="a row of buttons has no variations"): make_stream(dict(base="mw5", env=dict(spread=.5)))
    for name in CROWDED:
        with pytest.raises(ValueError, match="expected 1 to 4: Meta-World keeps its object and its goal apart"): make_env(spec(name, spread=.5))
        make_env(spec(name, spread=1.5))
    with pytest.raises(ValueError, match="did you mean 'press-left'"): make_env(spec("press-leftt"))
    with pytest.raises(ValueError, match="did you mean 'open-faucet'"): metaworld_task("open-fauzet")
    assert check_variation(dict(max_steps=9)) == dict(max_steps=9)   # a part of a spec

def test_ids_and_folders_keep_demonstrations_apart():
    assert not ({*BUTTONS, *HALFWAY} & MT50.keys()) and {t.id for t in STREAMS["mw10"].tasks} <= {*BUTTONS, *HALFWAY}
    cfg,stock = TrainConfig(n_demos=25, image_size=48),metaworld_task("faucet-open")
    variants = [{}, dict(spread=.2), dict(spread=2), dict(places=2), dict(places=2, spread=.2), dict(start="middle"), dict(places=3, start="middle")]
    folders = {demo_dir(with_env(stock, kw), cfg) for kw in variants} | {demo_dir(metaworld_task(i), cfg) for i in (*HALFWAY, *BUTTONS)}
    assert len(folders) == len(variants)+len(HALFWAY)+len(BUTTONS) and demo_dir(stock, cfg).name == "faucet-open-n25-48px"
    assert set(kinds["metaworld"].entries) == set(VARIATIONS) == set(VariedEnv.entries)

def test_streams():
    five,ten = STREAMS["mw5"],STREAMS["mw10"]
    assert five.ids == ["press-left", "open-faucet", "press-middle", "close-faucet", "press-right"]
    assert ten.ids == five.ids+["push-left", "open-drawer", "push-middle", "close-drawer", "push-right"]
    for t in ten.tasks:
        assert t.prompt == (BUTTONS[t.id] if t.id in BUTTONS else MT50[HALFWAY[t.id]][1])
        assert {k: t.env[k] for k in VARIATIONS if k in t.env} == ({} if t.id in BUTTONS else dict(spread=.2, places=3, start="middle"))
    assert len({t.prompt for t in ten.tasks}) == 10

def test_row_of_buttons_is_made_of_stock_parts(envs):
    "As many meshes as the stock scene, equal buttons, and the middle one where the stock button stands."
    for row,stock in (("press-middle", "button-press-topdown-v3"), ("push-middle", "button-press-v3")):
        env,one = envs(of(row)),envs(spec(stock)); env.reset(0); one.reset(0)
        m,s,d = env.sim.model,one.sim.model,env.sim.data
        assert (m.nmesh, m.ntex, m.nmat) == (s.nmesh, s.ntex, s.nmat) and m.njnt == s.njnt+2
        left,middle,right = (d.body(f"{side}button").xpos for side in ("left-", "", "right-"))
        assert np.allclose([middle-left, right-middle], [APART, 0, 0], atol=1e-6)
        assert all(m.site_rgba[m.site(site).id,3] == 0 for site in ("buttonStart", "hole"))
