"""Environments: repeatable starts, physics untouched by fast drawing, honest chunks, clear answers to a missing GL library."""
import os, subprocess, sys, time
import numpy as np
import pytest
from clvla.core.names import IMAGE, STATE
from clvla.envs.all import kinds, make_env
from clvla.envs.metaworld.env import MetaWorldEnv, reset_sim
from clvla.envs.render import FastRenderer, check_gl, decimate, use_gl

def spec(name="drawer-close-v3", **kw): return {"kind": "metaworld", "name": name, **kw}

def loaded(name, **kw):
    env = make_env(spec(name), **kw)
    env._load()
    return env

def physics(sim):
    d,m = sim.data,sim.model
    return [x.copy() for x in (d.qpos, d.qvel, d.mocap_pos, d.xpos, d.site_xpos, d.qacc_warmstart, m.body_pos, m.site_pos)]

def same(a, b): return all(map(np.array_equal, a, b))

@pytest.mark.parametrize("name", ["window-close-v3", "pick-place-v3", "hammer-v3"])
def test_physics_is_bit_equal_with_and_without_decimation(name):
    plain,fast = loaded(name),loaded(name)
    for e in (plain, fast): e._begin(3)
    draw = FastRenderer(fast.sim.model, fast.sim.data, 48)
    assert draw.up.faces[1] < draw.up.faces[0]/5
    for u in np.random.default_rng(0).uniform(-1, 1, (100, 4)):
        assert plain._act(u) == fast._act(u)
        draw()
    assert same(physics(plain.sim), physics(fast.sim)) and np.array_equal(plain.full, fast.full)
    draw.close()

def test_decimation_leaves_vertices_and_small_meshes_alone():
    m = loaded("drawer-close-v3").sim.model
    vert,num,face = m.mesh_vert.copy(),m.mesh_facenum.copy(),m.mesh_face.copy()
    assert decimate(m, 0) == (num.sum(), num.sum())
    before,after = decimate(m)
    assert np.array_equal(m.mesh_vert, vert) and after < before
    for i in np.flatnonzero(num < 400): assert m.mesh_facenum[i] == num[i]
    for i in range(m.nmesh):
        f = m.mesh_face[m.mesh_faceadr[i]:m.mesh_faceadr[i]+m.mesh_facenum[i]]
        assert f.max() < m.mesh_vertnum[i]
        if num[i] >= 400: assert all(len(set(t)) == 3 for t in f.tolist())

@pytest.mark.parametrize("name", ["drawer-close-v3", "push-v3", "faucet-open-v3"])
def test_start_is_a_function_of_task_trial_and_seed(name):
    played,fresh = make_env(spec(name)),make_env(spec(name))
    for trial in (0, 9): played.reset(trial); [played.step(np.ones(4)) for _ in range(30)]
    a,b = played.reset(4),fresh.reset(4)
    assert np.array_equal(a[IMAGE], b[IMAGE]) and np.array_equal(a[STATE], b[STATE])
    assert same(physics(played.sim), physics(fresh.sim)) and np.array_equal(played.full, fresh.full)
    other,third = make_env(spec(name), seed=1),played.full.copy()
    other.reset(4); fresh.reset(5)
    assert not np.array_equal(other.full, third) and not np.array_equal(fresh.full, third)
    for e in (played, fresh, other): e.close()

@pytest.mark.parametrize("name", ["window-close-v3", "push-v3", "assembly-v3"])
def test_reset_equals_the_stock_reset(name):
    ours,stock = loaded(name),loaded(name)
    for seed in (1, 2):
        obs = reset_sim(ours.sim, seed)
        stock.sim.seed(seed); want,_ = stock.sim.reset()
        assert np.array_equal(obs, want) and np.array_equal(ours.sim.data.qpos, stock.sim.data.qpos)
        for u in np.random.default_rng(seed).uniform(-1, 1, (20, 4)):
            a,b = ours.sim.step(u),stock.sim.step(u)
            assert np.array_equal(a[0], b[0]) and a[1] == b[1]

def test_state_holds_the_robot_and_not_the_objects():
    env = make_env(spec("drawer-close-v3"))
    starts = []
    for trial in range(4):
        obs = env.reset(trial)
        assert obs[STATE].shape == (4,) and env.state_dim == 4 and obs[STATE].dtype == np.float32
        assert np.array_equal(obs[STATE], env.full[:4].astype(np.float32)) and obs[IMAGE].shape == (48, 48, 3)
        starts.append((obs[STATE], env.full[4:7].copy()))
    assert max(abs(s-starts[0][0]).max() for s,_ in starts) < 2e-3 < .05 < max(abs(o-starts[0][1]).max() for _,o in starts)
    env.close()

def test_chunk_stops_at_success():
    env = make_env(spec("drawer-close-v3"))
    env.reset(0); n = 0
    while not env.ended:
        chunk = np.stack([env.expert()]*8)
        obs,reward,success,terminated,truncated,k = env.step_chunk(chunk); n += k
    assert success and terminated and not truncated and n == env.t < 150 and 1 <= k <= 8
    with pytest.raises(ValueError, match="call reset"): env.step_chunk(chunk)
    env.close()

def test_chunk_stops_at_max_steps_and_pads_nothing():
    env,twin = make_env(spec(max_steps=10)),make_env(spec(max_steps=10))
    env.reset(0); twin.reset(0)
    up = np.tile([0, 0, 1., 0], (8, 1))
    assert env.step_chunk(up)[-1] == 8
    obs,_,success,terminated,truncated,k = env.step_chunk(up)
    for u in up[:1].repeat(10, 0): twin.step(u)
    assert (success, terminated, truncated, k, env.t) == (False, False, True, 2, 10)
    assert np.array_equal(obs[STATE], twin.state) and np.array_equal(obs[IMAGE], twin.render())
    env.close(); twin.close()

def test_draws_into_the_array_that_it_is_given_and_shares_one_upload():
    a,b = make_env(spec()),make_env(spec())
    out = np.zeros((48, 48, 3), np.uint8)
    assert a.reset(1, out)[IMAGE] is out and out.std() > 10
    assert np.array_equal(b.reset(1)[IMAGE], out) and a.renderer.up is b.renderer.up
    a.close()
    assert np.array_equal(b.render(), out)
    b.close()

def test_expert_is_clipped_and_drawing_leaves_reward_alone():
    env = make_env(spec("window-close-v3"))
    env.reset(0); r = []
    for _ in range(20): a = env.expert(); assert a.shape == (4,) and abs(a).max() <= 1; r.append(env.step(a)[0])
    env.reset(0)
    for k in range(20):
        a = env.expert(); env.render()
        assert env.step(a)[0] == r[k]
    env.close()

def test_names_that_do_not_exist():
    with pytest.raises(ValueError, match="did you mean 'metaworld'"): make_env({"kind": "meta_world", "name": "reach-v3"})
    with pytest.raises(ValueError, match="did you mean 'window-open-v3'"): make_env(spec("window-opne-v3"))
    with pytest.raises(ValueError, match="needs 'kind'"): make_env({"name": "reach-v3"})
    with pytest.raises(ValueError, match="1 to 500"): make_env(spec(max_steps=501))
    assert kinds["metaworld"] and MetaWorldEnv.action_dim == 4

GL = "from clvla.envs.all import make_env; make_env({'kind': 'metaworld', 'name': 'reach-v3'}).reset(0)"

@pytest.mark.parametrize("gl,says", [("bogus", "MUJOCO_GL='bogus'"), ("glfw", "needs a display")])
def test_gl_that_cannot_work_is_answered_within_seconds(gl, says):
    env = {k: v for k,v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY", "PYOPENGL_PLATFORM")}
    t = time.time()
    p = subprocess.run([sys.executable, "-c", GL], capture_output=True, text=True, timeout=30,
                       env=dict(env, MUJOCO_GL=gl, PYTHONPATH=os.pathsep.join(filter(None, sys.path))))
    last = p.stderr.strip().splitlines()[-1]
    assert p.returncode == 1 and says in last and "unset" in last and time.time()-t < 10

def test_gl_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    with pytest.raises(ImportError, match="apt-get install libosmesa6"): use_gl(find=lambda lib: None)
    assert "MUJOCO_GL" not in os.environ
    assert use_gl(find=lambda lib: lib == "EGL" or None) == "egl"
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    with pytest.raises(ImportError, match="apt-get install libosmesa6"): use_gl(find=lambda lib: None)
    assert use_gl(find=lambda lib: lib) == "osmesa"

def test_a_backend_that_cannot_open_a_context_is_refused_before_a_run(monkeypatch):
    "`check_gl` opens a context in another process for egl and glfw; it changes nothing here, and asks once."
    asked = []
    monkeypatch.setattr("clvla.envs.render._open_context", lambda gl: asked.append(gl) or "no device")
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(ImportError, match="MUJOCO_GL=egl cannot open a GL context here .no device.: unset it"): check_gl(find=lambda lib: lib)
    assert check_gl(find=lambda lib: lib, draw=False) == "egl" and asked == ["egl"]
    monkeypatch.setenv("MUJOCO_GL", "osmesa"); assert check_gl(find=lambda lib: lib) == "osmesa" and asked == ["egl"]
    monkeypatch.delenv("MUJOCO_GL"); assert check_gl() and "MUJOCO_GL" not in os.environ

@pytest.mark.parametrize("driver,drawing,works,chosen", [(True, True, "", "egl"), (True, True, "no device", "osmesa"), (True, False, "", "osmesa"),
                                                       (False, True, "", "osmesa")])
def test_a_gpu_that_can_draw_is_drawn_on_and_the_users_word_wins(monkeypatch, tmp_path, driver, drawing, works, chosen):
    find = lambda lib: lib if drawing or lib != "EGL_nvidia" else None
    monkeypatch.setattr("clvla.envs.render.GPU", str(tmp_path if driver else tmp_path/"none"))
    monkeypatch.setattr("clvla.envs.render._open_context", lambda gl: works)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    assert check_gl(find) == chosen and "MUJOCO_GL" not in os.environ
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert check_gl(find) == "osmesa"

@pytest.mark.parametrize("index,environ,gpus", [(None, {}, ()), (1, {}, (1,)), (1, dict(CUDA_VISIBLE_DEVICES="4,6"), (6,)), (0, dict(CUDA_VISIBLE_DEVICES="GPU-8f2a"), ()),
                                                (1, dict(MUJOCO_EGL_DEVICE_ID="0"), ())])
def test_each_rank_draws_on_its_own_gpu(index, environ, gpus):
    from clvla.envs.render import own_gpu
    assert own_gpu(index, environ) == gpus

def test_cameras_of_different_sizes_and_entries_that_nobody_reads():
    env = make_env({"kind": "dot", "name": "up", "cameras": {"front": 20, "wrist": None}}, image_size=8)
    assert {k: v.shape for k,v in env.reset(0).items() if "images" in k} == {IMAGE: (20, 20, 3), "observation.images.wrist": (8, 8, 3)}
    for cameras in (["wrist"], ["front", "back"], ["front", "front"], [], {"front": 0}, {"front": 2.5}):
        with pytest.raises(ValueError, match="cameras are 'front'|whole number of pixels"): make_env({"kind": "dot", "name": "up", "cameras": cameras})
    with pytest.raises(ValueError, match="did you mean 'discrete'"): make_env({"kind": "dot", "name": "up", "discret": True})

def test_the_first_success_of_a_chunk_is_the_one_that_counts():
    "In an episode that goes on after a success, `success_at` is its first step, whatever comes later in the chunk."
    from clvla.envs.dot import Dot
    class GoesOn(Dot):
        def _act(self, action): return *super()._act(action)[:2],False
    env = GoesOn(dict(name="there", goal=[0, 0], max_steps=9), 8)
    env.reset(0)
    env.x[:] = 0
    _,success,terminated,_,n = env.step_chunk(np.zeros((3, env.action_dim), np.float32))[1:]
    assert (success, terminated, n, env.success_at) == (True, False, 3, 1)
