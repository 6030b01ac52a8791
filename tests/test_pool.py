"""The pool of environments: same results for any number of workers, faults, and nothing left behind."""
import gc, os, signal, socket, subprocess, sys, time
from pathlib import Path
import numpy as np
import pytest
from clvla.core.names import IMAGE, IMAGES, N_ACTIONS, STATE
from clvla.core import plugins
from clvla.core.plugins import load_plugins
from clvla.envs.child import recv, send
from clvla.envs.pool import EnvPool

FAULTS_FILE = str(Path(__file__).parent/"faults.py")   # registers the kind `faulty`, here and in every worker
load_plugins([FAULTS_FILE])

def specs(n, **kw): return [{"kind": "faulty", "name": f"task-{i%2}", "max_steps": 20, **kw} for i in range(n)]

def light(n=6, n_workers=2, sp=None, **kw):
    return EnvPool(sp or specs(n), n_workers, **{**dict(image_size=8, H=4, timeout=20), **kw})

def all_of(pool, slots=None):
    want,got = set(range(len(pool)) if slots is None else slots),{}
    while not want <= set(got):
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

def pids(pool): return [w.proc.pid for w in pool.workers]
def shm_of(pids):
    "Named shared memory that the processes have mapped, and whether they have mapped ours, which has no name."
    maps = "".join(Path(f"/proc/{p}/maps").read_text() for p in pids)
    return [l.split()[-1] for l in maps.splitlines() if "/dev/shm/" in l],"/memfd:clvla-envs (deleted)" in maps

def pictures(r): return [r.obs[k].tobytes() for k in sorted(r.obs) if k != STATE]

def play(pool, n_trials=2):
    "Each slot plays trials 0, 1, ... to their ends; every number that came back. An episode that began again counts from there."
    log,trial = {},{i: 0 for i in range(len(pool))}
    for i in trial: pool.reset(i, 0)
    while trial:
        for r in pool.wait(30):
            k = (r.slot, r.trial)
            if r.restarted: log[k] = []
            log.setdefault(k, []).append((r.n_steps, r.reward, r.success, r.truncated, r.obs[STATE].tobytes(), *pictures(r)))
            if not (r.terminated or r.truncated): pool.step(r.slot, np.random.default_rng([*k, len(log[k])]).uniform(-.2, 1, (4, 2))); continue
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
        assert [w.slots for w in pool.workers] == [[2],[0,1,3]]
        assert pool.task_ids == ["task-0","task-1"]*2 and pool.prompts[0] == "task 0" and (pool.state_dim, pool.action_dim) == (3, 2)
    with pytest.raises(ValueError, match="one worker for each of 4 slots"): light(4, 2, assign=[0])
    with pytest.raises(ValueError, match=r"numbers of workers, 0..1; got \[2, -1\]"): light(4, 2, assign=[0, 2, 1, -1])
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
    assert "before trial 0 of task-0" in str(e.value) and "make_env(" in str(e.value) and pool.restarts == 2

FAULTS = dict(**{"raise": "the robot fell over"}, exit="sys.exit was called with status 7", segv="killed by SIGSEGV - native code crashed", sleep="in do", render="in render")

@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_noticed_and_the_trial_run_again(fault, tmp_path):
    "One fault in the middle of slot 0's trial: the same numbers as without, a reason that says where, and the others untouched."
    sp = specs(4); sp[0] |= dict(fault=fault, at=5, once=str(tmp_path/"once"))
    with light(4, 2) as pool: want = play(pool, 1)
    with light(4, 2, sp=sp, timeout=1.5) as pool: got = play(pool, 1); restarts,why = pool.restarts,pool.supervisor.reasons[0]
    assert restarts == 1 and (tmp_path/"once").exists() and got == want
    assert why.startswith("slots [0, 2]: ") and FAULTS[fault] in why and ("faults.py" in why or fault == "exit"), why
    if fault == "segv": assert "the last thing I did" in why
    if fault in ("sleep", "render"): assert "raise the timeout" in why

def test_last_words_are_heard_although_commands_were_left_unread():
    ours,theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        for i in range(3): send(ours, slot=i)
        assert recv(theirs) == dict(slot=0); send(theirs, error="why"); theirs.close()
        assert recv(ours) == dict(error="why") and recv(ours) is None

def test_stopped_worker_says_where_it_stood():
    with light(1, 1, timeout=1) as pool:
        pool.reset(0, 0); all_of(pool); time.sleep(.2)                  # until it waits again
        os.kill(pids(pool)[0], signal.SIGSTOP); pool.step(0, np.zeros((2, 2)))
        assert all_of(pool)[0].restarted and "is stopped" in pool.supervisor.reasons[0] and "in recv" in pool.supervisor.reasons[0], pool.supervisor.reasons[0]

def test_a_hang_that_comes_back_ends_the_run_with_its_place():
    with light(1, 1, sp=specs(1, fault="render"), timeout=.7, max_restarts=1) as pool:
        pool.reset(0, 4); pool.wait(30); pool.step(0, np.zeros((2, 2)))
        with pytest.raises(RuntimeError, match="before trial 4 of task-0 was over, more than max_restarts=1") as e:
            while True: [pool.step(r.slot, np.zeros((2, 2))) for r in pool.wait(30)]
    assert "in render" in str(e.value) and "set MUJOCO_GL" in str(e.value)

def test_failures_count_until_an_episode_is_over():
    "A worker that is lost in every episode goes on for ever; one that never finishes an episode does not."
    with light(2, 1, max_restarts=1) as pool:
        for trial in range(4):
            for i in range(2): pool.reset(i, trial)
            all_of(pool); os.kill(pids(pool)[0], signal.SIGKILL)
            for n in range(6):
                for i in range(2): pool.step(i, np.zeros((4, 2)))
                got = all_of(pool)
            assert all(r.truncated for r in got.values())
        assert pool.restarts == 4
        for i in range(2): pool.reset(i, 0)
        all_of(pool)
        with pytest.raises(RuntimeError, match="killed by SIGKILL - memory may have run out"):
            for n in range(3): os.kill(pids(pool)[0], signal.SIGKILL); pool.step(0, np.zeros((1, 2))); all_of(pool)
        assert pool.restarts == 5
    with pytest.raises(ValueError, match="closed; make a new one"): pool.reset(0, 0)

def test_an_abandoned_episode_leaves_no_failure_behind():
    with light(1, 1, max_restarts=1) as pool:
        for trial in range(3):
            pool.reset(0, trial); all_of(pool)
            os.kill(pids(pool)[0], signal.SIGKILL); pool.step(0, np.zeros((1, 2)))
            assert all_of(pool)[0].restarted     # once, and the next reset abandons the episode
        assert pool.restarts == 3

def test_a_view_is_overwritten_when_its_worker_is_replaced():
    "Slot 0 has been given no command since its result."
    with light(2, 1) as pool:
        for i in range(2): pool.reset(i, 3)
        start = all_of(pool)[0].obs[STATE].copy()
        pool.step(0, np.zeros((4, 2))); view = all_of(pool, [0])[0].obs[STATE]
        assert not np.array_equal(view, start)
        os.kill(pids(pool)[0], signal.SIGKILL); pool.step(1, np.zeros((1, 2))); all_of(pool)
        assert np.array_equal(view, start)

def test_a_worker_that_is_lost_while_it_restarts_is_replaced_again():
    with light(4, 2) as pool:
        for i in range(4): pool.reset(i, 3)
        start = all_of(pool)[0].obs[STATE].copy()
        os.kill(pids(pool)[0], signal.SIGKILL); pool.step(0, np.zeros((1, 2)))
        while pool.restarts < 1: pool.wait(.01)
        os.kill(pids(pool)[0], signal.SIGKILL)
        got = all_of(pool, [0, 2])
        assert pool.restarts == 2 and got[0].restarted and np.array_equal(got[0].obs[STATE], start)

def test_a_fault_while_others_work_does_not_hold_them_up():
    with light(2, 2) as pool:
        for i in range(2): pool.reset(i, 0)
        all_of(pool); os.kill(pids(pool)[0], signal.SIGKILL); pool.step(0, np.zeros((1, 2)))
        while pool.restarts < 1: pool.wait(.01)
        t = time.time(); pool.step(1, np.zeros((1, 2))); first = pool.wait(30)
        assert [r.slot for r in first] == [1] and time.time()-t < .2

def test_noise_of_a_worker_fills_nothing(capfd):
    "Half a megabyte of warnings in each step: no pipe that could fill, nothing on our own streams, and memory stays small."
    with light(1, 1, sp=[dict(kind="faulty", name="a", max_steps=9, fault="noise", at=k) for k in (1,)]) as pool:
        size = []
        for trial in range(5):
            pool.reset(0, trial); r = all_of(pool)[0]
            while not r.truncated: pool.step(0, np.zeros((3, 2))); r = all_of(pool)[0]
            size.append(os.fstat(pool.workers[0].child.output).st_size)
        assert pool.restarts == 0 and 0 < max(size) < 2**21 and len(set(size)) > 1
    assert capfd.readouterr() == ("", "")

def n_fds(): return len(os.listdir("/proc/self/fd"))

def test_no_file_descriptor_is_left():
    with light(2, 1) as pool: pass                                    # whatever a first pool imports
    gc.collect(); before = n_fds()
    pool = light(2, 2, max_restarts=20); running = n_fds()
    for i in range(2): pool.reset(i, 0)
    all_of(pool)
    for k in range(6):
        os.kill(pids(pool)[k%2], signal.SIGKILL)
        for i in range(2): pool.step(i, np.zeros((1, 2)))
        all_of(pool)
    assert pool.restarts == 6 and n_fds() == running
    pool.close(); gc.collect(); assert n_fds() == before
    with pytest.raises(ValueError): light(2, 2, sp=[*specs(1), *specs(1, fault="start")])
    gc.collect(); assert n_fds() == before

def test_errors_at_start_come_at_once():
    t = time.time()
    with pytest.raises(ValueError, match="cannot be built") as e: light(1, 1, sp=specs(1, fault="start"))
    assert "faults.py" in e.value.__notes__[0]
    with pytest.raises(ValueError, match="did you mean 'faulty'"): light(1, 1, sp=[{"kind": "fautly", "name": "a"}])
    with pytest.raises(RuntimeError, match="KeyError in a worker: .no such joint .in faults.py: Faulty.__init__ of task 'task-0'.*without a worker"): light(1, 1, sp=specs(1, fault="start-type"))
    assert time.time()-t < 20

def test_a_worker_that_dies_or_hangs_at_start(tmp_path):
    with light(1, 1, sp=specs(1, fault="start-segv", once=str(tmp_path/"once"))) as pool: assert pool.restarts == 1 and play(pool, 1)
    with pytest.raises(RuntimeError, match="died while starting, 2 times; the last: killed by SIGSEGV - native code crashed") as e:
        light(1, 1, sp=specs(1, fault="start-segv"), max_restarts=1)
    assert "set MUJOCO_GL" in str(e.value) and "in do" in str(e.value)
    with pytest.raises(RuntimeError, match="raise start_timeout or use fewer workers") as e: light(1, 1, sp=specs(1, fault="start-hang"), start_timeout=2)
    assert "in do" in str(e.value)

def test_close_leaves_nothing():
    before = shm_of([os.getpid()])[0]   # of whoever shares this process: torch, another test
    pool = light(4, 2); ps = pids(pool)
    for i in range(4): pool.reset(i, 0)
    all_of(pool)
    assert shm_of(ps) == ([], True) and shm_of([os.getpid()]) == (before, True)
    pool.close(); pool.close()
    assert all(gone(p) for p in ps)

WRIST = IMAGES+"wrist"

def test_two_cameras():
    two = [s | {"cameras": ["front", "wrist"]} for s in specs(5)]
    with light(5, 1) as pool: one,keys = play(pool),list(pool.obs)
    logs = []
    for n in (1, 2):
        with light(5, n, sp=two) as pool: logs.append(play(pool)); assert list(pool.obs) == [IMAGE, WRIST, STATE] and pool.cameras == ("front", "wrist")
    assert keys == [IMAGE, STATE] and logs[0] == logs[1]
    assert [[e[:-1] for e in v] for v in logs[0].values()] == [list(v) for v in one.values()]      # the first camera's picture is the same
    assert any(e[-1] != e[-2] for v in logs[0].values() for e in v)                              # and the second another one
    with pytest.raises(ValueError, match="the same cameras; task-0 has .'front': 8., task-1 has .'front': 8, 'wrist': 8."): light(2, 2, sp=[specs(2)[0], two[1]])
    for bad in (["wrist"], ["front", "back"], ["front", "front"], []):
        with pytest.raises(ValueError, match="cameras are 'front', and then others"): light(1, 1, sp=[specs(1)[0] | {"cameras": bad}])

def test_seconds_are_told():
    with light(1, 1) as pool:
        pool.reset(0, 0); r = all_of(pool)[0]; assert r.seconds[0] > 0 and r.seconds[1] == 0 and r.seconds[2] > 0 and r.opened
        pool.step(0, np.zeros((4, 2))); r = all_of(pool)[0]; assert r.seconds[0] == 0 and r.seconds[1] > 0 and 0 < sum(r.seconds) < 1 and not r.opened

def other(**kw): return {"kind": "faulty", "name": "other", "max_steps": 8, **kw}

def one_episode(pool, slot, seed=0):
    out = []
    while True:
        r = all_of(pool, [slot])[slot]
        if r.restarted: out = []
        out.append((r.n_steps, r.reward, r.obs[STATE].tobytes(), *pictures(r)))
        if r.terminated or r.truncated: return out
        pool.step(slot, np.random.default_rng([seed, len(out)]).uniform(-.2, .2, (4, 2)))

def test_a_slot_changes_its_environment():
    with light(1, 1, sp=[other()]) as pool: pool.reset(0, 3); want = one_episode(pool, 0)
    with light(1, 1, sp=specs(1)) as pool: pool.reset(0, 5); home = one_episode(pool, 0)
    with light(3, 2) as pool:
        pool.reset(0, 3, other()); assert one_episode(pool, 0) == want and pool.task_ids[0] == "other"
        pool.reset(0, 3); assert one_episode(pool, 0) == want                   # it stays
        pool.reset(2, 3, other()); assert one_episode(pool, 2) == want          # in the other slot of the same worker, too
        pool.reset(0, 5, specs(1)[0]); assert one_episode(pool, 0) == home      # and back
        pool.reset(1, 3, other()); pool.reset(1, 3); assert one_episode(pool, 1) == want  # overtaken while it is built

def test_a_changed_environment_reports_its_own_task_and_prompt(tmp_path):
    changed = specs(1)[0] | {"name": "the-other-task"}
    with light(1, 1, sp=[changed]) as pool: at_start = pool.task_ids,pool.prompts
    assert at_start == (["the-other-task"], ["the other task"])
    with light(1, 1) as pool:
        pool.reset(0, 0, changed); all_of(pool); assert (pool.task_ids, pool.prompts) == at_start
        pool.reset(0, 1, changed | {"prompt": "said"}); assert pool.prompts == ["said"]
        all_of(pool); assert pool.prompts == ["said"]
        pool.reset(0, 2, changed); pool.reset(0, 3); all_of(pool); assert pool.prompts == at_start[1]   # overtaken
        lost = changed | {"name": "lost-once", "fault": "start-segv", "once": str(tmp_path/"once")}
        pool.reset(0, 4, lost); all_of(pool); assert pool.restarts == 1 and pool.prompts == ["lost once"]

@pytest.mark.parametrize("fault", ["segv", "draw"])
def test_a_worker_that_dies_with_a_changed_environment_loses_no_episode(fault, tmp_path):
    with light(1, 1, sp=[other()]) as pool: pool.reset(0, 3); want = one_episode(pool, 0)
    with light(2, 1) as pool:
        pool.reset(1, 0); all_of(pool, [1])
        pool.reset(0, 3, other(fault=fault, at=5, once=str(tmp_path/"once")))
        got = one_episode(pool, 0)
        assert got == want and pool.restarts == 1 and pool.task_ids[0] == "other"
        pool.step(1, np.zeros((1, 2))); assert all_of(pool, [1])[1].n_steps == 1

def test_a_worker_that_dies_while_it_builds_an_environment(tmp_path):
    with light(1, 1, sp=[other()]) as pool: pool.reset(0, 3); want = one_episode(pool, 0)
    with light(1, 1) as pool:
        pool.reset(0, 3, other(fault="start-segv", once=str(tmp_path/"once"))); assert one_episode(pool, 0) == want and pool.restarts == 1
        pool.reset(0, 3, other()); os.kill(pids(pool)[0], signal.SIGKILL); assert one_episode(pool, 0) == want

def test_building_an_environment_has_the_time_of_a_start():
    with light(1, 1, timeout=.5) as pool:
        pool.reset(0, 3, other(open=1.5)); one_episode(pool, 0); assert pool.restarts == 0
    with light(1, 1, timeout=20, start_timeout=2, max_restarts=0) as pool:
        pool.reset(0, 3, other(open=30))
        with pytest.raises(RuntimeError, match="no answer for .* s"): all_of(pool)

def test_the_first_reset_has_the_time_of_a_start():
    "Of a slot's first environment, of a changed one, and of both after their worker was killed; the second reset has `timeout`."
    lazy = [other(lazy=1.2), other()]
    with light(2, 1, sp=lazy, timeout=.6) as pool:
        for i in range(2): pool.reset(i, 3)
        got = all_of(pool); assert [got[i].opened for i in range(2)] == [True]*2 and pool.restarts == 0
        pool.reset(1, 3, lazy[0]); all_of(pool, [1]); assert pool.restarts == 0 and not pool.workers[0].opening
        os.kill(pids(pool)[0], signal.SIGKILL)
        for i in range(2): pool.step(i, np.zeros((1, 2)))
        got = all_of(pool); assert all(r.restarted and r.opened for r in got.values()) and pool.restarts == 1 and not pool.workers[0].opening
    with light(1, 1, sp=[other(lazy=30)], timeout=20, start_timeout=1.5, max_restarts=0) as pool:
        pool.reset(0, 3)
        with pytest.raises(RuntimeError, match="no answer for .* s"): all_of(pool)

def test_what_cannot_be_built_or_does_not_fit_is_refused():
    with light(2, 1) as pool:
        for spec,text in ((other(fault="start"), "cannot be built"), (other(kind="fautly"), "did you mean 'faulty'"),
                          (other(state_dim=4), "cannot take slot 0: it has state_dim 4, the pool 3; make a pool"),
                          (other(cameras=["front", "wrist"]), "it has cameras .*front.*wrist.*, the pool .*front")):
            pool.reset(1, 0); all_of(pool, [1]); pool.reset(0, 0, spec)
            with pytest.raises(ValueError, match=text): all_of(pool, [0])
            with pytest.raises(ValueError, match="slot 0 has no environment"): pool.reset(0, 0)
            with pytest.raises(ValueError, match="no episode is under way"): pool.step(0, np.zeros((1, 2)))
            pool.step(1, np.zeros((1, 2))); assert all_of(pool, [1])[1].n_steps == 1 and pool.restarts == 0
        pool.reset(0, 0, other(fault="start"))
        with pytest.raises(ValueError): all_of(pool, [0])
        os.kill(pids(pool)[0], signal.SIGKILL); pool.step(1, np.zeros((1, 2))); assert all_of(pool, [1])[1].restarted   # the empty slot is left out
        pool.reset(0, 3, other()); assert one_episode(pool, 0)

SCRIPT = """
import sys, time
from clvla.core.plugins import load_plugins
from clvla.envs.pool import EnvPool
load_plugins([{plugin!r}])
pool = EnvPool([dict(kind="faulty", name="a", fault={fault!r})]*3, 2, image_size=8, H=2)
for i in range(3): pool.reset(i, 0)
n = 0
while n < 3: n += len(pool.wait())
print(*[w.proc.pid for w in pool.workers], flush=True)
{then}
"""

def child(then, fault=None):
    p = subprocess.Popen([sys.executable, "-c", SCRIPT.format(plugin=FAULTS_FILE, then=then, fault=fault)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
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
    code = "import sys, clvla.envs.pool, clvla.envs.metaworld.env, clvla.envs.render; print([m for m in ('torch','mujoco','metaworld','lerobot') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))))
    assert out.stdout.strip() == "[]", out

def test_observations_inside_a_chunk():
    "They are what an environment shows that stops there, also with several cameras and after the episode's end."
    two = [s | {"cameras": {"front": 8, "wrist": 5}} for s in specs(1)]
    chunk = np.full((4, 2), .5, np.float32)
    with light(1, 1, sp=two) as pool:
        assert pool.sizes == {"front": 8, "wrist": 5} and pool.obs[WRIST].shape == (1, 5, 5, 3)
        alone = {}
        for n in (1, 3, 4):
            pool.reset(0, 3); all_of(pool); pool.step(0, chunk[:n]); r = all_of(pool)[0]
            alone[n] = {k: v.copy() for k,v in r.obs.items()}
        pool.reset(0, 3); all_of(pool); pool.step(0, chunk, watch=(3, 1, 4)); r = all_of(pool)[0]
        assert sorted(r.watched) == [1, 3, 4] and r.rewards.tolist() == [.5]*4 and r.reward == 2.
        for n,obs in r.watched.items():
            assert all(np.array_equal(obs[k], alone[n][k]) for k in obs) and list(obs) == list(r.obs)
        pool.reset(0, 3); all_of(pool); far = np.full((4, 2), 1., np.float32)
        n = 0
        while not n or not r.terminated: pool.step(0, far, watch=range(1, 5)); r = all_of(pool)[0]; n += 1
        assert sorted(r.watched) == list(range(1, r.n_steps+1))
        pool.reset(0, 3); assert not all_of(pool)[0].watched
        with pytest.raises(ValueError, match=r"`watch` names steps in 1..4"): pool.step(0, chunk, watch=(5,))

def test_a_worker_lost_with_watched_steps_gives_a_plain_start(tmp_path):
    sp = specs(1); sp[0] |= dict(fault="segv", at=1, once=str(tmp_path/"once"))
    with light(1, 1, sp=sp) as pool:
        pool.reset(0, 0); all_of(pool); pool.step(0, np.zeros((4, 2)), watch=(1, 2)); r = all_of(pool)[0]
        assert r.restarted and r.n_steps == 0 and not r.watched
        pool.step(0, np.zeros((4, 2)), watch=(1, 2)); assert sorted(all_of(pool)[0].watched) == [1, 2]

def test_discrete_actions_that_an_environment_lacks_never_reach_it():
    sp = [{"kind": "dot", "name": "left", "discrete": True}]
    with EnvPool(sp, 1, image_size=8, H=4) as pool:
        pool.reset(0, 0); assert int(all_of(pool)[0].obs[N_ACTIONS]) == 5 and (pool.action_dim, pool.discrete) == (1, True)
        for bad in (5., -1., .5):
            with pytest.raises(ValueError, match="whole numbers in 0..4"): pool.step(0, [[bad]])
        pool.step(0, [[1], [2]]); assert all_of(pool)[0].n_steps == 2 and pool.restarts == 0
        pool.reset(0, 0, {"kind": "dot", "name": "left"})
        with pytest.raises(ValueError, match="action_dim 2, the pool 1"): all_of(pool)

OLD = """
import sys
from clvla.envs.all import kinds
from clvla.envs.dot import Dot
from clvla.envs.kind import Kind
class Old(Dot):
    kind = "old"
    def __init__(self, spec, image_size=8, seed=0):
        loaded = sorted({"torch", "fastcore", "plotly"} & set(sys.modules))
        super().__init__({"goal": [0, 0], "prompt": f"{sys.executable} {loaded}", **spec}, image_size, seed)
kinds["old"] = Kind(label="an old simulator", env=Old, python=PYTHON)
"""

def test_a_kind_with_an_interpreter_of_its_own_needs_numpy_only(tmp_path, monkeypatch, request):
    import venv
    venv.create(tmp_path/"old", with_pip=False)
    site = next((tmp_path/"old/lib").glob("python*/site-packages"))
    for name in ("numpy", "numpy.libs"):
        if (source := Path(np.__file__).parents[1]/name).exists(): (site/name).symlink_to(source)
    python,plugin = str(tmp_path/"old/bin/python"),tmp_path/"old_plugin.py"
    plugin.write_text(f"PYTHON = {python!r}\n{OLD}")
    monkeypatch.setattr(plugins, "_loaded", mine := {})   # other tests' plugins may need torch
    request.addfinalizer(lambda: [plugins._forget(plugin.module) for plugin in mine.values()])   # and later tests need none of these
    (tmp_path/"torch_plugin.py").write_text("import torch\nfrom clvla.cl.all import algos\nalgos['torchy'] = 'clvla.cl.er:ER'\n")
    load_plugins([str(tmp_path/"torch_plugin.py"), str(plugin)])   # the first registers no kind, so the other interpreter leaves it out
    sp = [{"kind": k, "name": n} for k,n in (("old", "left"), ("dot", "left"), ("old", "up"))]
    with EnvPool(sp, 1, image_size=8, H=4) as pool:
        assert [w.slots for w in pool.workers] == [[1], [0, 2]] and [w.python for w in pool.workers] == [None, python]
        assert pool.prompts[0] == f"{python} []"
        for i in range(3): pool.reset(i, 0)
        all_of(pool)
        for i in range(3): pool.step(i, np.ones((2, 2)))
        assert {r.n_steps for r in all_of(pool).values()} == {2}
        with pytest.raises(ValueError, match="make a pool of its own"): pool.reset(1, 0, sp[0])
        os.kill(pool.workers[1].proc.pid, signal.SIGKILL); pool.step(0, np.ones((2, 2)))
        assert all_of(pool, [0, 2])[0].restarted
