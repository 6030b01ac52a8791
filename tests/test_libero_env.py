"LIBERO as an environment: the same start whatever happened before, parity with the published protocol, bad input, faults."
import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from clvla.core.names import IMAGE, IMAGES, STATE
from libero_help import libero_root, without_full

libero_root()   # skips, or says what is wrong

from clvla.envs.libero.tasks import SUITES, libero_prompt
from clvla.envs.all import make_env
from clvla.envs.libero.env import LiberoEnv
from clvla.envs.libero.assets import bootstrap, init_states
from clvla.data.layouts import axis_angle
from clvla.envs.libero.sim import LiberoSim
from clvla.envs.pool import EnvPool

# one task per kind of scene; the ones that begin with something open are where stock LIBERO leaks
TASKS = [("libero_goal", "put_the_bowl_on_the_plate"),
         ("libero_spatial", "pick_up_the_black_bowl_in_the_top_drawer_of_the_wooden_cabinet_and_place_it_on_the_plate"),
         ("libero_object", "pick_up_the_milk_and_place_it_in_the_basket"),
         ("libero_10", "KITCHEN_SCENE4_put_the_black_bowl_in_the_bottom_drawer_of_the_cabinet_and_close_it"),
         ("libero_90", "KITCHEN_SCENE8_turn_off_the_stove"),
         ("libero_90", "STUDY_SCENE1_pick_up_the_book_and_place_it_in_the_front_compartment_of_the_caddy")]


def spec(suite, name, **kw): return dict(kind="libero", suite=suite, name=name, max_steps=300, **kw)


def full_state(sim): return np.concatenate([sim.data.qpos, sim.data.qvel, sim.model.body_pos.ravel(), sim.model.body_quat.ravel(), sim.model.site_rgba.ravel()])


def rollout(sim, trial, n=20):
    "States after the reset and along `n` fixed actions."
    sim.reset(trial); out = [full_state(sim)]
    rng = np.random.default_rng(trial)
    for _ in range(n):
        sim.step(np.clip(rng.normal(0, .5, 7), -1, 1)); out.append(full_state(sim))
    return np.stack(out)


@pytest.mark.parametrize("suite,name", TASKS, ids=[n[:24] for _,n in TASKS])
def test_a_start_does_not_depend_on_what_was_before(suite, name):
    fresh,used = (LiberoSim(suite, name, visuals="none") for _ in range(2))
    for trial in (100_003, 17, 0): rollout(used, trial, 15)        # drawn and own trials, gripper closed or open
    np.random.seed(1); before = np.random.get_state()[1].copy()
    for trial in (5, 100_007):
        a,b = rollout(LiberoSim(suite, name, visuals="none"), trial),rollout(used, trial)
        np.testing.assert_array_equal(a, b)
    assert (np.random.get_state()[1] == before).all()               # the caller's generator is its own
    assert not np.array_equal(rollout(fresh, 5, 0), rollout(fresh, 6, 0))


def test_nor_does_it_under_the_published_protocol():
    "In a task that begins with its stove on: LIBERO's list of such things would grow with each hard reset."
    suite,name = TASKS[4]; used = LiberoSim(suite, name, protocol="published"); soft = LiberoSim(suite, name, visuals="none")
    for trial in (100_003, 17): used.reset(trial)
    for trial in (5, 100_007):
        a = rollout(LiberoSim(suite, name, protocol="published"), trial, 3)
        np.testing.assert_array_equal(a, rollout(used, trial, 3))
        soft.reset(trial); np.testing.assert_array_equal(a[0][:soft.model.nq], soft.data.qpos)


def test_what_a_drawn_start_puts_inside_a_drawer_is_inside_it():
    "The sampler places the bowl where the cabinet stands, not where it stood."
    suite,name = TASKS[1]; sim = LiberoSim(suite, name, visuals="none"); site = sim.domain.sim.data
    for trial in (100_000, 100_001, 100_002):
        sim.reset(trial)
        bowl,drawer = site.get_body_xpos("akita_black_bowl_1_main"),site.get_site_xpos("wooden_cabinet_1_top_region")
        assert np.abs(bowl-drawer).max() < .04, (bowl, drawer)
    sim.close()


@pytest.mark.parametrize("suite,name", TASKS[:4], ids=[s for s,_ in TASKS[:4]])
def test_pictures_do_not_change_the_physics(suite, name):
    drawn,blind = LiberoSim(suite, name),LiberoSim(suite, name, visuals="none")
    drawn.reset(3); drawn.draw("front", 32); drawn.draw("wrist", 32)
    np.testing.assert_array_equal(rollout(drawn, 3), rollout(blind, 3))
    drawn.close()


def test_full_meshes_are_those_of_the_published_protocol_and_light_ones_are_fewer():
    faces = {k: LiberoSim(*TASKS[0], **kw).model.nmeshface for k,kw in dict(lite={}, full=dict(visuals="full"), published=dict(protocol="published")).items()}
    assert faces["full"] == faces["published"] > 3*faces["lite"]


def test_the_start_is_libero_s_own_state():
    "Before settling, the state is the stored one, bit for bit."
    suite,name = TASKS[0]; sim = LiberoSim(suite, name, visuals="none"); seen = []
    import clvla.envs.libero.sim as m
    stock,m.SETTLE = m.SETTLE,0
    try:
        for t in (0, 49): sim.reset(t); seen.append(sim.domain.sim.get_state().flatten())
    finally: m.SETTLE = stock
    np.testing.assert_array_equal(np.stack(seen), init_states(suite, name)[[0, 49]])


def test_two_workers_with_different_pasts_begin_alike():
    with EnvPool([spec(*TASKS[1], task_id=f"t{i}") for i in range(2)], 2, image_size=32) as pool:
        pool.reset(0, 100_011); pool.wait(); pool.step(0, np.ones((8, 7), np.float32)); pool.wait()
        pool.reset(0, 8); pool.reset(1, 8); got = {}
        while len(got) < 2: got |= {r.slot: {k: v.copy() for k,v in r.obs.items()} for r in pool.wait()}
    for k in (IMAGE, STATE): np.testing.assert_array_equal(got[0][k], got[1][k])


def test_a_worker_that_is_killed_loses_no_episode():
    with EnvPool([spec(*TASKS[0])], 1, image_size=32) as pool:
        pool.reset(0, 2); first = pool.wait()[0].obs[STATE].copy()
        pool.step(0, np.zeros((8, 7), np.float32)); pool.workers[0].proc.kill()
        again = pool.wait()[0]
        assert again.restarted and pool.restarts == 1
        np.testing.assert_array_equal(again.obs[STATE], first)


@pytest.mark.parametrize("suite,i", [("libero_goal", 8), ("libero_object", 3)])
def test_parity_with_lerobot(suite, i, monkeypatch):
    "Same assets, furniture, start and actions: joints, state, reward, success and every pixel."
    bootstrap(which="full")
    theirs = importlib.import_module("lerobot.envs.libero")
    from libero.libero import benchmark
    monkeypatch.setattr(theirs, "get_task_init_states", lambda s, k, is_libero_plus=False: init_states(s.name, s.tasks[k].name))
    bench = benchmark.get_benchmark_dict()[suite]()
    e = theirs.LiberoEnv(bench, i, suite, obs_type="pixels_agent_pos", observation_width=48, observation_height=48, episode_index=7)
    ours = LiberoEnv(spec(suite, bench.tasks[i].name, cameras=["front", "wrist"], protocol="published"), 48)
    a,b = e.reset(seed=0)[0],ours.reset(7)
    rng = np.random.default_rng(i)
    for k in range(9):
        np.testing.assert_allclose(e._env.sim.data.qpos, ours.sim.data.qpos, atol=1e-9)
        np.testing.assert_allclose(a["robot_state"]["eef"]["pos"], b[STATE][:3], atol=1e-6)
        np.testing.assert_allclose(axis_angle(a["robot_state"]["eef"]["quat"][None])[0], b[STATE][3:6], atol=1e-6)
        np.testing.assert_allclose(a["robot_state"]["gripper"]["qpos"], b[STATE][6:], atol=1e-6)
        for c,key in (("image", IMAGE), ("image2", IMAGES+"wrist")):
            np.testing.assert_array_equal(a["pixels"][c][::-1,::-1], b[key])
        act = np.clip(rng.normal(0, .5, 7), -1, 1).astype(np.float32)
        a,reward,_,_,info = e.step(act); mine = ours.step(act); b = ours.obs()
        assert (reward, info["is_success"]) == mine[:2]
    if suite == "libero_goal":                                    # on to the goal, without pictures: the same instant
        ours.sim.views,success = [],False
        monkeypatch.setattr(e._env.env, "use_camera_obs", False)
        while not success: act = ours.expert(); success = ours.step(act)[1]; done = e._env.env.step(act)[2]; assert done == success
    e.close(); ours.close()


def test_parity_with_vla_eval_s_own_benchmark():
    "What its LIBERO class gave for the first start and our expert's actions: numbers made by it, stored beside this file."
    golden = json.loads((Path(__file__).parent/"vla_eval_libero_080.json").read_text())
    env = LiberoEnv(spec("libero_goal", golden["task"], protocol="published"), 256)
    obs,at,success = env.reset(golden["episode_idx"]),golden["at"],False
    for k,(n,state,qpos) in enumerate(zip(at, golden["states"], golden["qpos"])):
        if k: obs,_,success,*_ = env.step_chunk(np.float32(golden["actions"][at[k-1]:n]))
        np.testing.assert_allclose(obs[STATE], state, atol=1e-6)
        np.testing.assert_allclose(env.sim.data.qpos, qpos, atol=1e-8)
        assert success == (n == golden["done"])
        if str(n) in golden["grey"]:
            np.testing.assert_allclose(obs[IMAGE].mean(2).reshape(8, 32, 8, 32).mean((1, 3)), golden["grey"][str(n)], atol=1)
    env.close()


def test_fast_pictures_are_turned_as_published_ones_are():
    fast,slow = LiberoEnv(spec(*TASKS[0], cameras=["front", "wrist"]), 64),LiberoEnv(spec(*TASKS[0], cameras=["front", "wrist"], protocol="published"), 64)
    a,b = fast.reset(4),slow.reset(4)
    far = lambda x, y: np.mean((x.astype(float)-y)**2)
    for k in (IMAGE, IMAGES+"wrist"):
        turned = [far(t(a[k]), b[k]) for t in (lambda x: x[::-1], lambda x: x[:,::-1], lambda x: x[::-1,::-1])]
        assert far(a[k], b[k]) < .5*min(turned), (k, far(a[k], b[k]), turned)
    fast.close(); slow.close()


def test_a_published_chunk_is_seen_as_its_last_step():
    env = LiberoEnv(spec(*TASKS[0], protocol="published"), 32); env.reset(1)
    a = np.tile([.2, 0, -.2, 0, 0, 0, 1], (8, 1))
    obs = env.step_chunk(a)[0]
    env.reset(1)
    for x in a: env.step(x)
    for k in obs: np.testing.assert_array_equal(obs[k], env.obs()[k])
    env.close()


def test_one_sample_of_each_suite_can_be_made_begun_moved_and_drawn():
    from clvla.envs.libero.tasks import SUITES
    for suite,names in SUITES.items():
        for name in (names[-1], names[len(names)//2]):
            env = LiberoEnv(spec(suite, name, cameras=["front", "wrist"]), 32); obs = env.reset(0)
            obs,rewards,success,*_ = env.step_chunk(np.zeros((3, 7)))
            assert rewards.tolist() == [0]*3 and not success and obs[STATE].shape == (8,) and np.isfinite(obs[STATE]).all()
            assert all(obs[k].std() > 5 for k in (IMAGE, IMAGES+"wrist")), (suite, name)
            env.close()


def test_several_environments_in_one_process_draw_what_they_draw_alone():
    "robosuite's own renderer gives silently wrong pictures here."
    make = lambda k: LiberoEnv(spec(*TASKS[k]), 32)
    alone = []
    for k in (0, 2): e = make(k); alone.append(e.reset(0)[IMAGE]); e.close()
    both = [make(0), make(2)]
    for e,x in zip(both, alone): np.testing.assert_array_equal(e.reset(0)[IMAGE], x)
    for e,x in zip(both[::-1], alone[::-1]): np.testing.assert_array_equal(e.render(), x)
    for e in both: e.close()


def test_published_and_fast_in_one_process_draw_what_they_draw_alone():
    "robosuite frees and draws in whichever context is bound; here each binds its own."
    make = lambda k, **kw: LiberoEnv(spec(*TASKS[k], **kw), 32)
    alone = []
    act = np.tile(np.float32([.5, 0, -.5, 0, 0, 0, 1]), (2, 1))
    for k in (0, 2): e = make(k, protocol="published"); alone.append((e.reset(0)[IMAGE], e.step_chunk(act)[0][IMAGE])); e.close()
    a,fast,b = make(0, protocol="published"),make(1),make(2, protocol="published")
    for e in (a, fast, b): e.reset(1)
    b.reset(0); fast.reset(0); a.reset(0); fast.reset(1)         # old contexts are thrown away between
    for e,(first,later) in ((b, alone[1]), (a, alone[0])):       # b draws although a's context is younger
        np.testing.assert_array_equal(e.render(), first)
        np.testing.assert_array_equal(e.step_chunk(act)[0][IMAGE], later)
    for e in (a, fast, b): e.close()


BAD = [(dict(suite="libero_goat"), "did you mean 'libero_goal'"), (dict(suite="libero_100"), "LIBERO has no suite 'libero_100'"),
       (dict(name="turn_on_the_stoves"), "did you mean 'turn_on_the_stove'"), (dict(protocol="publishd"), "did you mean 'published'"),
       (dict(cameras=["front", "back"]), "cameras are"), (dict(visual="lite"), "did you mean 'visuals'"), (dict(visuals="light"), "did you mean 'lite'"),
       (dict(protocol="published", visuals="none"), "leave visuals and cell out"), (dict(cell=3.), "edge of a grid"), (dict(cell="0.01"), "is '0.01', expected int or float"),
       (dict(visuals="none"), "an environment draws")]

@pytest.mark.parametrize("change,words", BAD, ids=[str(c) for c,_ in BAD])
def test_bad_input_is_refused_at_the_door(change, words):
    with pytest.raises(ValueError, match=words): make_env({**spec("libero_goal", "turn_on_the_stove"), **change}, 32)


def test_missing_assets_are_found_before_anything_starts(monkeypatch, tmp_path):
    from clvla.train.config import TrainConfig, resolve
    from clvla.train.prepare import check
    cfg = resolve(TrainConfig(suite="libero_five", data_dir=str(tmp_path), run_dir=str(tmp_path/"r")))
    assert len(check(cfg).tasks) == 5
    monkeypatch.setenv("CLVLA_LIBERO_ASSETS", str(tmp_path/"nowhere"))
    with pytest.raises(FileNotFoundError, match="nowhere.*clvla-libero"): check(cfg)
    with pytest.raises(FileNotFoundError, match="nowhere"): EnvPool([spec(*TASKS[0])], 1, image_size=32)


def test_the_reference_protocol_runs_from_end_to_end(tmp_path):
    "Two tasks, two cameras, full meshes, hard resets, MIR with its cache, the file as it stands but for what makes it small."
    from pathlib import Path
    from papermill.iorw import read_yaml_file
    from clvla.run.config import from_page; from clvla.train.config import TrainConfig
    from clvla.train.learner import train_cl
    file = Path(__file__).resolve().parents[1]/"nbs/protocols/libero_goal.yaml"
    d = read_yaml_file(str(file)); d["suite"] = d["suite"] | dict(tasks=["goal-turn-on-stove", "goal-put-cream-cheese-in-bowl"])
    d["suite"]["env"] = d["suite"]["env"] | dict(max_steps=100); d["suite"]["eval_env"] = dict(max_steps=16); d["cl_kw"] = d["cl_kw"] | dict(refresh=4)   # of 12 updates a task
    small = dict(smoke=True, n_demos=1, n_trials=1, model="qwengr00t-tiny", image_size=48, lora_rank=2, precision="no", evaluate="lower",
                 n_workers=1, run_dir=str(tmp_path/"run"), data_dir=str(tmp_path/"data"))
    run = train_cl(from_page(TrainConfig, d | small, set()), say=lambda line: None)
    assert run.done and len(run.episodes()) == 3
    assert [max(r.get("refreshes", 0) for r in run.logs() if r["stage"] == t) for t in (0, 1)] == [0, 3]   # scored with both cameras


def test_other_bad_input():
    with pytest.raises(ValueError, match="needs a 'suite'"): make_env(dict(kind="libero", name="turn_on_the_stove"))
    with pytest.raises(ValueError, match="needs a 'name'"): LiberoEnv(dict(kind="libero", suite="libero_goal"))
    sim = LiberoSim(*TASKS[0], visuals="none")
    with pytest.raises(ValueError, match="a trial is a number from 0 on"): sim.reset(-1)
    with pytest.raises(ValueError, match="visuals 'none'"): sim.draw()
    sim.close()


def test_instructions_are_those_of_the_data_sets():
    env = make_env(dict(kind="libero", suite="libero_10", name="KITCHEN_SCENE3_turn_on_the_stove_and_put_the_moka_pot_on_it"))
    assert env.prompt == "turn on the stove and put the moka pot on it"
    assert all(make_env(dict(kind="libero", suite=s, name=n)).prompt == libero_prompt(n) for s in SUITES for n in SUITES[s][-3:])


def test_assets_without_full_meshes_refuse_the_published_protocol_at_the_door(monkeypatch, tmp_path):
    part = without_full(tmp_path/"part")
    monkeypatch.setenv("CLVLA_DATA", str(tmp_path/"data")); monkeypatch.setenv("CLVLA_LIBERO_ASSETS", str(part))
    LiberoEnv(spec(*TASKS[0]))
    for how in (dict(protocol="published"), dict(visuals="full")):
        with pytest.raises(ValueError, match="has no `full` assets"): LiberoEnv(spec(*TASKS[0], **how))


def test_a_start_that_is_refused_is_told_at_once_not_tried_again(monkeypatch, tmp_path):
    "An environment whose simulator cannot be built, in a worker: the reason comes back as it is, and no worker is lost."
    setup = tmp_path/"breaks.py"
    setup.write_text("""
from clvla.envs.libero import env as libero
def refuse(self): raise ValueError("its states belong to another version")
libero.LiberoEnv._load = refuse
""")
    monkeypatch.setattr("clvla.envs.child.loaded", lambda what: [str(setup)])   # a plugin of the worker alone
    with EnvPool([spec(*TASKS[0]), spec(*TASKS[1])], 1, image_size=32) as pool:
        pids = [w.child.proc.pid for w in pool.workers]
        pool.reset(0, 0)
        with pytest.raises(ValueError, match="its states belong to another version"):
            while True: pool.wait()
        assert [w.child.proc.pid for w in pool.workers] == pids


def test_the_first_thing_that_a_user_does(tmp_path):
    "`papermill run_cl -p suite libero_five -p smoke True`, smaller: demonstrations, two tasks, short episodes, results."
    import subprocess
    import sys
    from pathlib import Path
    from clvla.run.folder import RunFolder
    root = Path(__file__).resolve().parents[1]
    p = subprocess.run([sys.executable, "-m", "papermill", "--no-progress-bar", str(root/"nbs/run_cl.ipynb"), str(tmp_path/"page.ipynb"),
                        "-p", "suite", "{'base': 'libero_five', 'eval_env': {'max_steps': 40}}", "-p", "smoke", "True", "-p", "n_trials", "1", "-p", "n_demos", "1",
                        "-p", "image_size", "48", "-p", "run_dir", str(tmp_path/"run"), "-p", "data_dir", str(tmp_path/"data")], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert p.returncode == 0, p.stderr[-3000:]
    run = RunFolder(tmp_path/"run")
    assert run.done and len(run.episodes()) == 3                  # 1 + 2 tasks, one trial each
    assert {r["task"] for r in run.episodes()} == {"goal-turn-on-stove", "goal-put-bowl-on-plate"}
