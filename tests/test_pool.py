"""The pool of environments: same results for any number of workers, faults, and nothing left behind."""
import os, signal, subprocess, sys, time
from pathlib import Path
import numpy as np
import pytest
from clvla.core import IMAGE, STATE
from clvla.envs.pool import EnvPool

HERE = str(Path(__file__).parent)

@pytest.fixture(autouse=True)
def importable(monkeypatch): monkeypatch.syspath_prepend(HERE)

def specs(n, **kw): return [{"kind": "light", "name": f"task-{i%2}", "max_steps": 20, **kw} for i in range(n)]

def light(n=6, n_workers=2, sp=None, **kw):
    return EnvPool(sp or specs(n), n_workers, **{**dict(image_size=8, H=4, setup="light_env", timeout=20), **kw})

def all_of(pool, slots=None):
    want,got = set(range(len(pool)) if slots is None else slots),{}
    while set(got) != want:
        for r in pool.wait(30): got[r.slot] = r
    return got

def gone(pid, within=5):
    until = time.time()+within
    while time.time() < until:
        try: state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError: return True
        if state == "Z": return True
        time.sleep(.02)
    return False

def pids(pool): return [w.proc.pid for w in pool._workers]
def shm_of(pids):
    "Named shared memory that the processes have mapped, and whether they have mapped ours, which has no name."
    maps = "".join(Path(f"/proc/{p}/maps").read_text() for p in pids)
    return [l.split()[-1] for l in maps.splitlines() if "/dev/shm/" in l],"/memfd:clvla-envs (deleted)" in maps

def play(pool, n_trials=2):
    "Each slot plays trials 0, 1, ... to their ends; every number that came back."
    rng = {i: np.random.default_rng(i) for i in range(len(pool))}
    log,trial = {},{i: 0 for i in range(len(pool))}
    for i in trial: pool.reset(i, 0)
    while trial:
        for r in pool.wait(30):
            k = (r.slot, r.trial)
            log.setdefault(k, []).append((r.n_steps, r.reward, r.success, r.truncated, r.obs[STATE].tobytes(), r.obs[IMAGE].tobytes()))
            if not (r.terminated or r.truncated): pool.step(r.slot, rng[r.slot].uniform(-.2, 1, (4, 2))); continue
            trial[r.slot] += 1
            if trial[r.slot] == n_trials: del trial[r.slot]
            else: pool.reset(r.slot, trial[r.slot])
    return log

def test_results_do_not_depend_on_the_number_of_workers():
    logs = []
    for n in (1, 2, 3):
        with light(5, n) as pool: logs.append(play(pool))
    assert logs[0] == logs[1] == logs[2] and len(logs[0]) == 10
    assert any(e[-1][2] for e in logs[0].values()) and all(e[-1][2] or e[-1][3] for e in logs[0].values())

def test_assign_and_task_names():
    with light(4, 2, assign=[1,1,0,1]) as pool:
        assert [w.slots for w in pool._workers] == [[2],[0,1,3]]
        assert pool.task_ids == ["task-0","task-1"]*2 and pool.prompts[0] == "task 0" and (pool.state_dim, pool.action_dim) == (3, 2)
    with pytest.raises(ValueError, match="one worker for each of 4 slots"): light(4, 2, assign=[0])
    with pytest.raises(ValueError, match="at least one slot and one worker"): light(4, 0)

def test_chunk_stops_at_success_and_pads_nothing():
    with light(2, 1) as pool:
        pool.reset(0, 0); start = all_of(pool, [0])[0].obs[STATE].copy()
        n,total = 0,0
        while True:
            pool.step(0, np.ones((4, 2), np.float32)); r = all_of(pool, [0])[0]
            n,total = n+r.n_steps,total+r.reward
            if r.terminated: break
        need = int(np.floor(3-start[0]))+1
        assert (n, r.success, total) == (need, True, need)
        assert abs(r.obs[STATE][2]-start[2]-.01*need) < 1e-5
        with pytest.raises(ValueError, match="no episode is under way"): pool.step(0, np.ones((4, 2)))

def test_wrong_commands():
    with light(2, 1) as pool:
        with pytest.raises(ValueError, match="nothing to wait for"): pool.wait()
        pool.reset(0, 0); all_of(pool, [0])
        with pytest.raises(ValueError, match=r"shape \(n,2\)"): pool.step(0, np.ones((4, 3)))
        with pytest.raises(ValueError, match="not finite"): pool.step(0, np.full((4, 2), np.nan))
        pool.step(0, np.zeros((4, 2)))
        with pytest.raises(ValueError, match="still owes"): pool.step(0, np.zeros((4, 2)))

def test_reset_overtakes_a_step():
    with light(1, 1) as pool:
        pool.reset(0, 0); pool.reset(0, 3); pool.reset(0, 5)
        r = all_of(pool)[0]
        fresh = r.obs[STATE].copy()
        assert r.trial == 5
        pool.step(0, np.zeros((4, 2))); pool.reset(0, 5)
        r = all_of(pool)[0]
        assert r.n_steps == 0 and np.array_equal(r.obs[STATE], fresh)

def test_killed_worker_is_replaced_and_its_trials_begin_again():
    with light(4, 2) as pool:
        for i in range(4): pool.reset(i, 10+i)
        starts = {i: (r.obs[STATE].copy(), r.obs[IMAGE].copy()) for i,r in all_of(pool).items()}
        for i in range(4): pool.step(i, np.zeros((2, 2)))
        all_of(pool)
        old = pids(pool)[0]
        os.kill(old, signal.SIGKILL)
        t = time.time()
        for i in range(4): pool.step(i, np.zeros((2, 2)))
        got = all_of(pool)
        assert time.time()-t < 15 and pool.restarts == 1 and gone(old)
        for i in (0, 2):
            assert got[i].restarted and got[i].trial == 10+i and got[i].n_steps == 0
            assert np.array_equal(got[i].obs[STATE], starts[i][0]) and np.array_equal(got[i].obs[IMAGE], starts[i][1])
        assert not got[1].restarted and got[3].n_steps == 2
        pool.step(0, np.zeros((2, 2)))
        assert not all_of(pool, [0])[0].restarted

def test_idle_slot_of_a_dead_worker_comes_back_too():
    with light(2, 1) as pool:
        for i in range(2): pool.reset(i, i)
        all_of(pool)
        os.kill(pids(pool)[0], signal.SIGKILL)
        pool.step(0, np.zeros((2, 2)))
        assert all(r.restarted for r in all_of(pool).values())

def test_stopped_worker_is_noticed_after_the_timeout():
    with light(2, 2, timeout=1.5) as pool:
        for i in range(2): pool.reset(i, 7)
        start = all_of(pool)[0].obs[STATE].copy()
        old = pids(pool)[0]
        os.kill(old, signal.SIGSTOP)
        t = time.time()
        for i in range(2): pool.step(i, np.zeros((2, 2)))
        got = all_of(pool)
        assert 1.4 < time.time()-t < 15 and pool.restarts == 1 and gone(old)
        assert got[0].restarted and not got[1].restarted and np.array_equal(got[0].obs[STATE], start)

def test_worker_that_raises_ends_the_run_with_its_traceback():
    with light(1, 1, sp=specs(1, fault="raise"), max_restarts=2) as pool:
        pool.reset(0, 0)
        with pytest.raises(RuntimeError) as e:
            while True: pool.step(0, np.zeros((2, 2))) if pool.wait(30) else None
    assert "the robot fell over" in str(e.value) and "_act" in str(e.value) and "max_restarts=2" in str(e.value)
    assert pool.restarts == 2

def test_errors_at_start_come_at_once():
    t = time.time()
    with pytest.raises(ValueError, match="cannot be built") as e: light(1, 1, sp=specs(1, fault="start"))
    assert "light_env.py" in e.value.__notes__[0]
    with pytest.raises(ValueError, match="did you mean 'light'"): light(1, 1, sp=[{"kind": "lihgt", "name": "a"}])
    with pytest.raises(ModuleNotFoundError, match="no_such_module"): light(1, 1, setup="no_such_module")
    assert time.time()-t < 20

def test_close_leaves_nothing():
    before = shm_of([os.getpid()])[0]   # of whoever shares this process: torch, another test
    pool = light(4, 2); ps = pids(pool)
    for i in range(4): pool.reset(i, 0)
    all_of(pool)
    assert shm_of(ps) == ([], True) and shm_of([os.getpid()]) == (before, True)
    pool.close(); pool.close()
    assert all(gone(p) for p in ps)

SCRIPT = """
import sys, time; sys.path.insert(0, {here!r})
from clvla.envs.pool import EnvPool
pool = EnvPool([dict(kind="light", name="a", fault={fault!r})]*3, 2, image_size=8, H=2, setup="light_env")
for i in range(3): pool.reset(i, 0)
n = 0
while n < 3: n += len(pool.wait())
print(*[w.proc.pid for w in pool._workers], flush=True)
{then}
"""

def child(then, fault=None):
    p = subprocess.Popen([sys.executable, "-c", SCRIPT.format(here=HERE, then=then, fault=fault)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                         text=True, env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))))
    return p,[int(x) for x in p.stdout.readline().split()]

def test_exception_in_the_caller_leaves_nothing():
    p,workers = child("raise KeyError('the caller made a mistake')")
    assert p.wait(20) == 1 and len(workers) == 2
    assert all(gone(w) for w in workers)

def test_sigkill_of_the_parent_leaves_nothing():
    p,workers = child("import numpy as np; [pool.step(i, np.zeros((2, 2))) for i in range(3)]; time.sleep(60)", fault="sleep")
    assert len(workers) == 2
    time.sleep(1)
    assert shm_of([p.pid, *workers])[0] == []
    p.kill(); p.wait(5)
    assert all(gone(w) for w in workers)

def test_workers_import_no_torch():
    code = "import sys, clvla.envs.pool, clvla.envs.metaworld, clvla.envs.render; print([m for m in ('torch','mujoco','metaworld','lerobot') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))))
    assert out.stdout.strip() == "[]", out
