"Evaluation gives the same records for any number of workers, after crashes, and on resume."
import importlib.util, time
from types import SimpleNamespace as NS
import numpy as np, pytest, torch
from PIL import Image
import dot_env  # registers the kind in this process
from clvla.core.names import ACTION, STATE
from clvla.data.stats import Processor
from clvla.envs.all import make_env
from clvla.eval.metrics import record_key
from clvla.eval.rollout import Row, eval_slots, evaluate, film, film_firsts, make_eval_pool, plan
from clvla.policies.all import make_policy

INFO = dict(stage=0, after="left", step=None)
AS_IS = NS(obs=lambda raw: {**raw, STATE: torch.tensor(raw[STATE])}, unnormalise=lambda a: a)

def tasks(die=None): return [NS(id=i, prompt=f"go {i}", env=dict(kind="dot", name=i, max_steps=24, **({"die": die} if die and i == "right" else {})))
                             for i in ("left", "right", "up")]

class Walk(torch.nn.Module):
    "Walks to the origin with a matrix product over the whole batch, so that its shape matters."
    def __init__(self, noise=1.6): super().__init__(); g = torch.Generator().manual_seed(0); self.w = torch.nn.Parameter(torch.randn(2, 64, generator=g)); self.noise,self.shapes = noise,set()
    def chunk_noise(self, generator=None): return torch.randn(4, 2, generator=generator)
    def predict_chunk(self, obs, *, noise=None, generator=None):
        assert not self.training and torch.is_inference_mode_enabled()
        self.shapes.add(tuple(obs[STATE].shape)); h = obs[STATE]@self.w@self.w.T
        return -h[:,None]/h.norm(dim=-1).clamp(min=1e-3)[:,None,None]*.5+self.noise*noise

def run(n_workers, die=None, policy=None, n=5, **kw):
    torch.set_num_threads(1)
    pool,rows,mine = make_eval_pool(tasks(die), 2, n_workers, image_size=8, H=4, setup="dot_env", timeout=20)
    with pool: recs = evaluate(policy or Walk(), AS_IS, pool, rows, range(n), 7, INFO, **kw); restarts = pool.restarts
    assert mine == list(range(6))
    return recs,restarts

def share(rank, world, n_workers=2, die=None, policy=None, n=5, **kw):
    "What one of several processes does; None instead of its number of restarts when no row is its own."
    torch.set_num_threads(1)
    pool,rows,mine = make_eval_pool(tasks(die), 2, n_workers, image_size=8, H=4, rank=rank, world=world, setup="dot_env", timeout=20)
    try: return evaluate(policy or Walk(), AS_IS, pool, rows, range(n), 7, INFO, mine=mine, **kw),pool and pool.restarts
    finally: pool and pool.close()

def union(parts, reference): return sorted(sum(parts, []), key=lambda r: [(x["task"], x["trial"]) for x in reference].index((r["task"], r["trial"])))

def bare(recs, but=("seconds",)): return [{k: v for k,v in r.items() if k not in but} for r in recs]

@pytest.fixture(scope="module")
def reference(): return run(1)[0]

def test_records_are_complete(reference):
    assert [(r["task"], r["trial"]) for r in reference] == [(t, i) for t in ("left", "right", "up") for i in range(5)]
    assert set(reference[0]) == {"stage", "after", "task", "trial", "success", "steps", "reward", "seed", "restarts", "step", "seconds"}
    good = [r["success"] for r in reference]; assert any(good) and not all(good)
    assert all(r["success"] or r["steps"] == 24 for r in reference) and {r["restarts"] for r in reference} == {0}

@pytest.mark.parametrize("n_workers", [2, 3])
def test_number_of_workers_changes_nothing(reference, n_workers): assert bare(run(n_workers)[0]) == bare(reference)

@pytest.mark.parametrize("n_workers,t", [(1, 5), (2, 0), (2, 9)])
def test_a_dead_worker_changes_nothing_but_the_count(reference, n_workers, t, tmp_path):
    recs,restarts = run(n_workers, dict(trial=2, t=t, flag=str(tmp_path/"died")))
    assert restarts == 1 and sum(r["restarts"] for r in recs) >= 1
    assert bare(recs, ("seconds", "restarts")) == bare(reference, ("seconds", "restarts"))

@pytest.mark.parametrize("world,n_workers", [(2, 1), (2, 3), (3, 2), (4, 1)])
def test_number_of_processes_changes_nothing(reference, world, n_workers):
    parts,shapes = [],set()
    for rank in range(world):
        p = Walk(); recs,_ = share(rank, world, n_workers, policy=p); parts.append(bare(recs)); shapes |= p.shapes
    assert all(parts) and union(parts, reference) == bare(reference) and shapes == {(6, 2)}   # the whole batch, in every process

def test_process_without_a_row(reference):
    assert share(6, 7) == ([], None) and bare(share(0, 7)[0]) == bare([r for r in reference if r["task"] == "left" and r["trial"]%2 == 0])
    with pytest.raises(ValueError, match="0 environments for 6 of 6 rows"): evaluate(Walk(), AS_IS, None, [t for t in tasks() for _ in "12"], range(5), 7, INFO)

def test_a_dead_worker_of_one_process_changes_nothing_but_the_count(reference, tmp_path):
    die = dict(trial=2, t=5, flag=str(tmp_path/"died")); parts = [share(r, 2, 2, die) for r in range(2)]
    assert [p[1] for p in parts] == [1, 0]                       # trial 2 of "right" runs in row 2, which is the first process's
    assert bare(union([p[0] for p in parts], reference), ("seconds", "restarts")) == bare(reference, ("seconds", "restarts"))

class Enough(KeyboardInterrupt): pass

@pytest.mark.parametrize("stop,world", [(1, 1), (4, 1), (3, 2), (5, 2)])
def test_stopped_between_two_rounds_and_continued(reference, stop, world):
    "Stopped by `on_round`, once in the same pool and once in a new one: nothing is lost, nothing is tried twice."
    parts = []
    for rank in range(world):
        have,calls,p = [],[],Walk(); p.train()
        def on_round():
            calls.append(len(have))
            if len(calls) in (stop, 2*stop): raise Enough
        pool,rows,mine = make_eval_pool(tasks(), 2, 2, image_size=8, H=4, rank=rank, world=world, setup="dot_env")
        with pool:
            for _ in range(2):
                with pytest.raises(Enough): evaluate(p, AS_IS, pool, rows, range(5), 7, INFO, mine=mine, done=map(record_key, have), on_record=have.append, on_round=on_round)
                assert p.training
            n = len(have); assert n < len(reference)/world
        rest,_ = share(rank, world, done=map(record_key, have), on_record=have.append); assert len(have) == n+len(rest); parts.append(bare(have))
    assert union(parts, reference) == bare(reference)

def test_a_stop_is_heard_while_a_simulator_hangs():
    slow = [NS(id="a", prompt="a", env=dict(kind="light", name="a", fault="sleep"))]
    pool,rows,mine = make_eval_pool(slow, 1, 1, image_size=8, H=4, setup="light_env"); calls = []
    def on_round(): calls.append(time.monotonic()); (_ for _ in ()).throw(Enough()) if len(calls) == 3 else None
    one = NS(obs=lambda raw: {**raw, STATE: torch.tensor(raw[STATE][:,:2])}, unnormalise=lambda a: a)
    with pool, pytest.raises(Enough): evaluate(Walk(), one, pool, rows, [0], 0, INFO, mine=mine, on_round=on_round)
    assert .8 < calls[2]-calls[1] < 5

def test_resume_runs_only_what_is_missing(reference):
    seen = []; done = [record_key(r) for r in reference if r["trial"] != 3]
    recs,_ = run(2, done=done, on_record=seen.append)
    assert bare(recs) == bare([r for r in reference if r["trial"] == 3]) and sorted(map(record_key, seen), key=str) == sorted(map(record_key, recs), key=str)
    assert run(2, done=[record_key(r) for r in reference])[0] == []

def test_some_tasks_only(reference): assert bare(run(2, tasks=["up"])[0]) == bare([r for r in reference if r["task"] == "up"])

def test_one_batch_shape_and_mode_restored():
    p = Walk(); p.train(); run(2, policy=p, tasks=["left"]); assert p.shapes == {(6, 2)} and p.training
    p.eval(); run(2, policy=p, n=1); assert not p.training

def test_mode_is_restored_when_the_policy_fails():
    class Broken(Walk):
        def predict_chunk(self, *a, **k): raise RuntimeError("no idea")
    p = Broken()
    with pytest.raises(RuntimeError, match="no idea"): run(1, policy=p)
    assert p.training

def test_noise_belongs_to_task_and_trial(reference):
    other = bare(run(2, n=7)[0]); same = [r for r in other if r["trial"] < 5]    # more trials leave the first ones alone
    assert same == bare(reference)

def test_plan_is_static():
    rows = [NS(id=i, prompt="") for i in "aabb"]; free = lambda t,n: False
    assert [r.queue for r in plan(rows, range(5), "ab", free)] == [[0,2,4], [1,3], [0,2,4], [1,3]]
    assert isinstance(plan(rows, range(5), "ab", free)[0], Row)
    assert [r.queue for r in plan(rows, range(5), "b", free)] == [[], [], [0,2,4], [1,3]]
    assert [r.queue for r in plan(rows, range(5), "ab", lambda t,n: n < 3)] == [[4], [3], [4], [3]]
    with pytest.raises(ValueError, match="no row tries task"): plan(rows, range(5), "c", free)

def test_slots_spread_over_workers():
    rows,mine,specs,assign = eval_slots(tasks(), 2, 2); assert mine == [0, 1, 2, 3, 4, 5] and assign == [0, 1, 1, 0, 0, 1] and specs[2]["task_id"] == "right"
    assert [eval_slots(tasks(), 2, 2, r, 2)[1:4:2] for r in (0, 1)] == [([0, 2, 4], [0, 1, 0]), ([1, 3, 5], [0, 1, 0])]
    assert eval_slots(tasks(), 1, 2, 0, 2)[3] == [0, 1]          # tasks 0 and 2: not both in one worker
    with pytest.raises(ValueError, match="without an environment"): eval_slots([NS(id="x", prompt="", env=None)], 1, 1)

def test_films_replay_what_happened(tmp_path):
    moves = {}; recs,_ = run(2, actions=moves)
    paths = film_firsts(recs, moves, tasks(), tmp_path, 16); names = {p.name for p in paths}
    for r in recs:
        first = next(x["trial"] for x in recs if (x["task"], x["success"]) == (r["task"], r["success"]))
        assert f"{r['task']}-{'success' if r['success'] else 'failure'}-{first}.gif" in names
    with Image.open(paths[0]) as im: assert im.size == (16, 16) and im.n_frames > 1
    assert all(len(moves[r["task"], r["trial"]]) == r["steps"] for r in recs)
    with pytest.raises(ValueError, match="replay ended otherwise"): film_firsts([{**recs[0], "success": not recs[0]["success"]}], moves, tasks(), tmp_path, 16)

metaworld = pytest.mark.skipif(importlib.util.find_spec("metaworld") is None, reason="metaworld is not installed")

def stats(n): return dict(mean=[0.]*n, std=[1.]*n, min=[-1.]*n, max=[1.]*n, q01=[-1.]*n, q99=[1.]*n, count=10, constant=[False]*n, binary=[False]*n)

@metaworld
def test_metaworld_same_records_for_any_number_of_workers_and_processes():
    torch.set_num_threads(1); out = []
    two = [NS(id=i, prompt=i, env=dict(kind="metaworld", name=f"{i}-v3", max_steps=24)) for i in ("window-close", "faucet-open")]
    policy = make_policy("tiny", 48, 4, 4, head="flow", seed=0)
    for n,world in ((1, 1), (2, 1), (1, 2)):
        recs,moves = [],{}
        for rank in range(world):
            pool,rows,mine = make_eval_pool(two, 1, n, image_size=48, H=8, rank=rank, world=world)
            with pool: recs += bare(evaluate(policy, Processor({STATE: stats(4), ACTION: stats(4)}), pool, rows, range(2), 0, INFO, actions=moves, mine=mine))
        out.append((recs, moves))
    for recs,moves in out[1:]: assert recs == out[0][0] and moves.keys() == out[0][1].keys() and all(np.array_equal(out[0][1][k], moves[k]) for k in moves)

@metaworld
def test_metaworld_expert_is_filmed():
    env = make_env(dict(kind="metaworld", name="window-close-v3", max_steps=150), 32); env.reset(0); acts,ok = [],False
    while not env.ended: acts.append(env.expert()); _,ok,*_ = env.step(acts[-1])
    frames,again = film(env, 0, acts, 10); env.close()
    assert ok and again and frames[0].shape == (32, 32, 3) and not np.array_equal(frames[0], frames[-1])
