"One queue over many tasks: the same records for any schedule, after any crash, and from any number of machines."
import json, subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace as NS
import numpy as np, pytest, torch
import dot_env  # registers the kind in this process
from clvla.core.names import ACTION, IMAGE, STATE
from clvla.core.seeds import np_rng
from clvla.data.stats import Processor
from clvla.eval.metrics import record_key
from clvla.eval.parts import Book, merge, plan_of
from clvla.eval.queue import CLOCK, PARTS, Arena, Queue, batch_gap, longest, part_of, play, queue_pool
from clvla.policies.all import make_policy

INFO,N = dict(stage=0, after="d", step=None),5
PROMPTS = dict(a="go", b="go there", c="go to the place in the middle of it", d="go now", e="stand still")

def flat(n): return dict(mean=[0.]*n, std=[1.]*n, min=[-1.]*n, max=[1.]*n, q01=[-1.]*n, q99=[1.]*n, count=10, constant=[False]*n, binary=[False]*n)
PROC = Processor({STATE: flat(2), ACTION: flat(2)})

def tasks(die=None, **kw):
    return [NS(id=i, prompt=p, env=dict(kind="dot", name=i, max_steps=12+4*k, **kw, **({"die": die} if die and i == "b" else {})))
            for k,(i,p) in enumerate(PROMPTS.items())]

class Guided(torch.nn.Module):
    "The tiny policy, untrained, and half of the way to the origin: some episodes succeed, and every bit of the policy counts."
    def __init__(self, **kw): super().__init__(); self.net,self.shapes,self.n = make_policy("tiny", 32, 2, 2, H=4, head="flow", seed=0, **kw),set(),0
    def chunk_noise(self, generator=None): return self.net.chunk_noise(generator)
    def predict_chunk(self, obs, *, noise=None, generator=None):
        assert not self.training and torch.is_inference_mode_enabled()
        self.shapes.add((len(obs[STATE]), max(len(p.split()) for p in obs["task"]))); self.n += 1
        return .6*self.net.predict_chunk(obs, noise=noise)-.8*obs[STATE][:,None]

def run(rows=4, n_workers=2, die=None, policy=None, n=N, env=None, pool_kw={}, **kw):
    torch.set_num_threads(1); ts = tasks(die, **(env or {}))
    with queue_pool(ts, rows, n_workers, image_size=32, H=4, setup="dot_env", timeout=20, **pool_kw) as pool:
        recs = play(policy or Guided(), PROC, pool, ts, range(n), 7, INFO, **{"batch": 4, **kw})
        return recs,pool.restarts

def bare(recs, but=("seconds",)): return [{k: v for k,v in r.items() if k not in but and not k.startswith("time/")} for r in recs]

@pytest.fixture(scope="module")
def reference(): return run()[0]

def test_records_are_complete(reference):
    assert [(r["task"], r["trial"]) for r in reference] == [(t, i) for t in PROMPTS for i in range(N)]
    good = [r["success"] for r in reference]; assert any(good) and not all(good)
    assert {f"time/{p}" for p in PARTS} < set(reference[0]) and all(r["time/act"] > 0 and r["time/draw"] > 0 and r["time/begin"] > 0 for r in reference)
    assert all(abs(sum(r[f"time/{p}"] for p in PARTS)-r["seconds"]) < .02 for r in reference)

@pytest.mark.parametrize("rows,n_workers", [(4, 1), (4, 3), (1, 1), (2, 2), (9, 3), (13, 2)])
def test_rows_and_workers_change_nothing(reference, rows, n_workers):
    p = Guided(); assert bare(run(rows, n_workers, policy=p)[0]) == bare(reference) and p.shapes == {(5, 9)}   # one shape, one length

def test_slow_simulators_change_nothing(reference):
    "Arrivals in another order: every environment sleeps in each step, those of one task much longer."
    ts = tasks(); ts[0].env["slow"],ts[3].env["slow"] = .004,.001
    with queue_pool(ts, 6, 3, image_size=32, H=4, setup="dot_env") as pool:
        assert bare(play(Guided(), PROC, pool, ts, range(N), 7, INFO, batch=4)) == bare(reference)

@pytest.mark.parametrize("rows,t", [(4, 5), (4, 0), (9, 9)])
def test_a_dead_worker_changes_nothing_but_the_count(reference, rows, t, tmp_path):
    recs,restarts = run(rows, 2, dict(trial=2, t=t, flag=str(tmp_path/"died")))
    assert restarts == 1 and sum(r["restarts"] for r in recs) >= 1 and bare(recs, ("seconds", "restarts")) == bare(reference, ("seconds", "restarts"))

def test_other_batches_differ_in_rounding_only(reference):
    other = run(batch=7)[0]
    assert [record_key(r) for r in other] == [record_key(r) for r in reference] and sum(a["success"] != b["success"] for a,b in zip(other, reference)) <= 1

class Enough(KeyboardInterrupt): pass

@pytest.mark.parametrize("stop", [1, 5, 12])
def test_stopped_anywhere_and_continued(reference, stop):
    have,calls,p = [],[],Guided(); p.train()
    def on_round():
        calls.append(0)
        if len(calls)%stop == 0 and len(calls) <= 2*stop: raise Enough
    with queue_pool(tasks(), 4, 2, image_size=32, H=4, setup="dot_env") as pool:   # twice in one pool, which is left with episodes under way
        for _ in range(2):
            with pytest.raises(Enough): play(p, PROC, pool, tasks(), range(N), 7, INFO, batch=4, done=map(record_key, have), on_record=have.append, on_round=on_round)
            assert p.training
        rest = play(p, PROC, pool, tasks(), range(N), 7, INFO, batch=4, done=map(record_key, have), on_record=have.append)
    assert len(have) == len(reference) and rest == sorted(rest, key=lambda r: (r["task"], r["trial"]))
    assert sorted(bare(have), key=record_key) == bare(reference)

def test_some_tasks_only_and_nothing_to_do(reference):
    assert bare(run(ids=["c", "a"])[0]) == bare([r for r in reference if r["task"] in "ac"])
    assert run(done=map(record_key, reference))[0] == []
    with pytest.raises(ValueError, match="no task 'f'; there are: a, b"): run(ids=["f"])

def test_executed_actions_are_kept(reference):
    moves = {}; run(6, actions=moves)
    assert {k: len(v) for k,v in moves.items()} == {(r["task"], r["trial"]): r["steps"] for r in reference}

def test_two_cameras_reach_the_policy():
    p,keys = Guided(cameras=(IMAGE, "observation.images.wrist")),set()
    old = p.net.predict_chunk; p.net.predict_chunk = lambda obs, **kw: (keys.update(obs), old(obs, **kw))[1]
    logs = [bare(run(rows, 2, policy=p, pool_kw=dict(cameras=("front", "wrist")), cameras=("front", "wrist"), n=2)[0]) for rows in (4, 7)]
    assert logs[0] == logs[1] and {IMAGE, "observation.images.wrist"} < keys

def test_few_environments_are_built():
    clock = {}; run(4, clock=clock)
    assert 4 <= clock["n_opens"] <= 10 and clock["n_opens"]+clock["n_begins"] == clock["episodes"] == 5*N and set(clock) == set(CLOCK)
    assert clock["wall"] > clock["policy"] > 0 and clock["pictures"] > clock["episodes"]

def test_the_queue_deals_every_episode_once():
    for part in [(0, 1), (0, 3), (1, 3), (2, 3)]:
        q,got,last = Queue(tasks(), range(7), lambda task,i: (task, i) == ("c", 3), part),[],None
        while e := q.take(last): last = e[0]; got.append(e)
        want = [(t, i) for p,(t,i) in enumerate((t, i) for t in PROMPTS for i in range(7)) if p%part[1] == part[0] and (t, i) != ("c", 3)]
        assert sorted(got) == want and len(q) == 0 and sum(a[0] != b[0] for a,b in zip(got, got[1:])) == 4   # one task after the other
    for bad in ("1", "1/1", "2/1", "-1/2", "a/b", "0/0", "", "0/2/3", None, "1.0/2", "0/01", "1/02", "00/2", "0/\u0662"):
        with pytest.raises(ValueError, match="part is 'a/b'"): part_of(bad)
    assert part_of("3/12") == (3, 12) and longest(tasks()) == PROMPTS["c"]

def test_a_hyphen_makes_two_words_and_the_batch_keeps_its_length():
    "The idle row's instruction is the longest as the tiny policy reads it, so that no neighbour changes the padding."
    from clvla.policies.tiny import hash_words
    ts = [NS(id="a", prompt="put it down now ok"), NS(id="b", prompt="pick-up the top-left-most cup"), NS(id="c", prompt="go - - - - - - there")]
    assert longest(ts) == ts[1].prompt and len(longest(ts).split()) < 5 and len({hash_words([longest(ts), t.prompt]).shape for t in ts}) == 1

def test_an_arena_has_doubts_only_where_place_matters():
    class Mixed(Guided):
        def predict_chunk(self, obs, **kw): return super().predict_chunk(obs, **kw)+.01*obs[STATE].mean()
    p = Mixed(); p.train()
    with Arena(tasks(), 2, 1, 32, H=4, batch=4, setup="dot_env") as arena:
        torch.set_num_threads(1); state = torch.get_rng_state()
        said = [arena.doubt(Guided(), PROC), arena.doubt(p, PROC)]
    assert said[0] == "" and "another number of workers" in said[1] and "threads 1" in said[1] and p.training and torch.equal(state, torch.get_rng_state())

def test_place_and_neighbours_of_a_policy_that_mixes_rows():
    "A policy that looks at its neighbours is found out."
    class Mixed(Guided):
        def predict_chunk(self, obs, **kw): return super().predict_chunk(obs, **kw)+.01*obs[STATE].mean()
    rng = np_rng(0, "gap"); obs = {IMAGE: rng.integers(0, 256, (5, 32, 32, 3), dtype="u1"), STATE: rng.normal(size=(5, 2)).astype("f4")}
    assert batch_gap(Guided().train(False), PROC, obs, tasks(), 6) == 0 and batch_gap(Mixed().train(False), PROC, obs, tasks(), 6) > 1e-4

def test_a_fixed_schedule_repeats_also_for_a_policy_that_mixes_rows():
    class Mixed(Guided):
        def predict_chunk(self, obs, **kw): return super().predict_chunk(obs, **kw)+obs[STATE].mean()
    logs = [bare(run(4, n, policy=Mixed(), env=dict(slow=s))[0]) for n,s in ((1, 0.), (2, .001), (4, 0.))]
    assert logs[0] == logs[1] == logs[2] != bare(run(2, policy=Mixed())[0])

@pytest.mark.parametrize("world", [2, 3])
def test_processes_of_a_run_share_an_arena(reference, world):
    recs = []
    for rank in range(world):
        with Arena(tasks(), 2, 2, 32, H=4, rank=rank, world=world, batch=4, setup="dot_env") as arena:
            recs += arena(Guided(), PROC, range(N), 7, INFO)
    assert sorted(bare(recs), key=record_key) == bare(reference)

def test_an_arena_of_light_tasks_is_the_old_one():
    from clvla.eval.rollout import evaluate, make_eval_pool
    pool,rows,mine = make_eval_pool(tasks(), 2, 2, image_size=32, H=4, setup="dot_env")
    with pool: want = evaluate(Guided(), PROC, pool, rows, range(3), 7, INFO, mine=mine)
    with Arena(tasks(), 2, 2, 32, H=4, setup="dot_env") as arena: assert arena.batch == 0 and bare(arena(Guided(), PROC, range(3), 7, INFO)) == bare(want)
    heavy = [NS(id="x", prompt="x", env=dict(kind="libero", suite="libero_goal", name="turn_on_the_stove"))]
    with pytest.MonkeyPatch.context() as m:
        m.setattr("clvla.eval.queue.queue_pool", lambda *a, **kw: None); assert Arena(heavy).batch == 8

PLAN = plan_of({"weights": "12ab"}, [(INFO, list(PROMPTS))], range(N), 7, 4)
SCRIPT = """
import sys; sys.path.insert(0, {here!r})
from test_queue import *
with Book({folder!r}, PLAN) as book: run(done=book.done, on_record=book.add, env=dict(slow=.002))
"""

def test_killed_again_and_again_and_merged(reference, tmp_path):
    "SIGKILL of the whole evaluation, at other times, until it is done; half lines included."
    folder,kills = tmp_path/"whole",0
    for k in range(30):
        p = subprocess.Popen([sys.executable, "-c", SCRIPT.format(here=str(Path(__file__).parent), folder=str(folder))], stderr=subprocess.PIPE, text=True)
        goal,f = 6+8*k,folder/"episodes.jsonl"
        while p.poll() is None and not (f.exists() and f.read_bytes().count(b"\n") >= goal): time.sleep(.02)
        if p.poll() is not None: assert p.returncode == 0, p.stderr.read(); break
        p.kill(); p.wait(); kills += 1
        with open(f, "ab") as half: half.write(b'{"stage": 0, "aft'[:3*k+1])
    got = merge([folder])
    assert kills >= 2 and not got.missing and bare(got.records) == bare(reference)

def test_parts_are_merged_and_wrong_ones_refused(reference, tmp_path):
    share = lambda r, a, b: [(t, i) for t in PROMPTS for i in range(N)].index((r["task"], r["trial"]))%b == a
    def book(name, recs, **kw):
        with Book(tmp_path/name, {**PLAN, **kw}) as b:
            for r in recs: b.add(r)
        return tmp_path/name
    parts = [book(f"{a}", run(2+2*a, done=[], part=(a, 3))[0], part=[a, 3]) for a in range(3)]
    got = merge(parts); assert bare(got.records) == bare(reference) and (got.missing, got.parts, got.plan["part"]) == ([], [], [0, 1])
    assert [len(merge([p]).records) for p in parts] == [sum(share(r, a, 3) for r in reference) for a in range(3)]
    two = merge(parts[1:]); assert two.parts == ["0/3"] and {k[2:] for k in two.missing} == {(r["task"], r["trial"]) for r in reference if share(r, 0, 3)}
    twice = book("twice", [r | {"seconds": 1., "restarts": 2, "time/act": 9.} for r in reference[:4]], part=[1, 3]); assert len(merge([*parts, twice]).records) == len(reference)
    for name,recs,kw,text in (("seed", [], dict(seed=8), "different evaluations: seed: 8 -> 7"), ("policy", [], dict(policy={"weights": "ff"}), "ff.* -> .*12ab"),
                              ("trials", [], dict(trials=[0, 1]), "trials"), ("batch", [], dict(batch=5), "batch: 5 -> 4"), ("b", [], dict(part=[0, 2]), "part: 2 -> 3"),
                              ("lie", [reference[0] | {"steps": 99}], {}, "different things of episode .*steps: .* -> 99"),
                              ("odd", [reference[0] | {"trial": 77}], {}, "does not know")):
        with pytest.raises(ValueError, match=text): merge([parts[0], book(name, recs, **{"part": [1, 3], **kw})])
    with pytest.raises(ValueError, match="nothing to merge"): merge([])
    with pytest.raises(FileNotFoundError): merge([tmp_path/"nowhere"])

def test_parts_of_a_run_that_has_grown_meanwhile_are_merged(tmp_path):
    "One machine has seen both checkpoints, the other only the first: the rest is missing, not refused; so are keys that older plans lack."
    stages = [dict(stage=k, after="ab"[k], step=None, tasks=["a", "b"][:k+1]) for k in range(2)]
    plan = dict(policy=[{"w": "1"}, {"w": "2"}], stages=stages, trials=[0, 1], seed=7, batch=4, torch="2.9")
    early = {k: v[:1] if k in ("policy", "stages") else v for k,v in plan.items() if k != "torch"}
    rec = lambda t, task, i: dict(stage=t, after="ab"[t], task=task, trial=i, success=True, steps=3, reward=1., seed=7, step=None)
    with Book(tmp_path/"0", {**plan, "part": [0, 2]}) as b: b.add(rec(0, "a", 0)); b.add(rec(1, "a", 0))
    with Book(tmp_path/"1", {**early, "part": [1, 2]}) as b: b.add(rec(0, "a", 1))
    for folders in (["0", "1"], ["1", "0"]):
        got = merge([tmp_path/f for f in folders])
        assert (len(got.records), got.missing, got.parts) == (3, [(1, None, "a", 1), (1, None, "b", 0), (1, None, "b", 1)], [])
    with Book(tmp_path/"2", {**early, "policy": [{"w": "3"}], "part": [1, 2]}): pass
    with pytest.raises(ValueError, match="2 and .*0 are parts of different evaluations: policy"): merge([tmp_path/"0", tmp_path/"2"])

def test_parts_made_with_other_assets_are_not_merged(tmp_path, monkeypatch):
    "The plan of a queue over LIBERO's tasks names their assets; that of other kinds is as it was."
    from clvla.envs.all import kinds
    from clvla.train import checkpoint_eval as ce
    from clvla.run.folder import RunFolder
    for k,v in dict(weights_of=lambda p: {"weights": "12ab"}, cells_of=lambda *a: (INFO, ["x"]), load_policy=lambda p: Guided(),
                    processor_of=lambda p: PROC).items(): monkeypatch.setattr(ce, k, v)
    def begin(kind, assets, part="0/1"):
        monkeypatch.setattr(kinds["libero"], "identity", lambda spec: assets)
        cfg = ce.EvalConfig(run_dir=str(tmp_path/kind), n_trials=2, part=part); out = RunFolder(tmp_path/kind/"evals"/cfg.name)
        ts = [NS(id="x", prompt="x", env=dict(kind=kind)), NS(id="talk", prompt="talk", env=None)]
        ce.begin_queue(cfg, out, ["p"], NS(tasks=ts), NS(batch=8, doubt=lambda *a: ""), print)
        return json.loads((out.path/"plan.json").read_text())
    one,two = dict(assets="1"*12),dict(assets="2"*12)
    assert "assets" not in begin("dot", one) and begin("libero", one, "0/2")["assets"] == {"x": one}
    with pytest.raises(ValueError, match="differs from this evaluation in assets"): begin("libero", two)
    assert not (tmp_path/"libero/evals/lower-0+2-s0/plan.json").exists(); begin("libero", one)
    begin("libero", two, "1/2")
    with pytest.raises(ValueError, match="parts of different evaluations: assets"): begin("libero", one)

def test_own_and_drawn_starts_of_libero_are_not_mixed():
    from clvla.envs.libero.states import N_STATES
    from clvla.train.checkpoint_eval import EvalConfig, check_starts
    say = lambda first, n, kind="libero": check_starts(EvalConfig(first_trial=first, n_trials=n), [NS(env=None), NS(env=dict(kind=kind))])
    assert N_STATES == 50 and say(0, 50) == say(49, 1) == say(0, 51, "metaworld") == "" and "trials 50 to 69 are drawn" in say(50, 20)
    for first,n in ((0, 51), (49, 2), (1, 50)):
        with pytest.raises(ValueError, match=f"trials {first} to {first+n-1} mix .*set n_trials to {50-first} or less"): say(first, n)

def test_a_book_is_held_by_one_and_mended(tmp_path):
    with Book(tmp_path, PLAN) as book:
        book.add(dict(INFO, task="a", trial=0, success=True))
        with pytest.raises(ValueError, match="written by another process"): Book(tmp_path, PLAN)
        assert book.done == [(0, None, "a", 0)]
    path = tmp_path/"episodes.jsonl"; whole = path.read_bytes()
    for half in (b"{", b'{"stage": 0}', b"\xff\xfe"):
        path.write_bytes(whole+half)
        with Book(tmp_path, PLAN) as book: assert len(book.records) == 1
        assert path.read_bytes() == whole
    path.write_bytes(b"rubbish\n"+whole)
    with pytest.raises(ValueError, match="line 1 is not JSON"): Book(tmp_path, PLAN)
    with pytest.raises(ValueError, match="belongs to another evaluation, which differs in seed: 7 -> 3; remove that folder"): Book(tmp_path, {**PLAN, "seed": 3})

def test_a_plan_grows_by_later_stages_only(tmp_path):
    "And one that was begun before libraries were named goes on without naming them."
    from clvla.eval.parts import write_plan
    infos = [(dict(stage=k, after="abc"[k], step=None), list("abc"[:k+1])) for k in range(3)]
    plan = lambda n, names="xyz", stages=infos, **kw: plan_of(list(names[:n]), stages[:n], range(2), 7, 4, **kw)
    read = lambda: json.loads((tmp_path/"plan.json").read_text())
    for n in (1, 2): write_plan(tmp_path, plan(n)); assert read() == plan(n)
    for bad in (plan(1), plan(3, "qyz"), plan(3, stages=infos[::-1]), plan(2, "xq"), {**plan(3), "seed": 8}, {**plan(3), "part": [0, 2]}):
        with pytest.raises(ValueError, match="remove that folder"): write_plan(tmp_path, bad)
        assert read() == plan(2)
    write_plan(tmp_path, plan(3, torch="2.9", gl="osmesa")); assert read() == plan(3)
    write_plan(tmp_path/"new", plan(1, torch="2.9", gl="osmesa"))
    with pytest.raises(ValueError, match="gl: .osmesa. -> .egl.; torch: .2.9. -> .2.10."): write_plan(tmp_path/"new", plan(2, torch="2.10", gl="egl"))

def test_libero_tasks_share_a_slot_and_a_lost_worker_loses_nothing():
    "Two suites in one slot, two cameras; once the other way, with more rows and a worker that is killed: the same episodes."
    from libero_help import libero_root
    libero_root()
    from clvla.envs.libero.tasks import libero_task
    ts = [libero_task("libero_goal", "turn_on_the_stove"), libero_task("libero_object", "pick_up_the_butter_and_place_it_in_the_basket")]
    for t in ts: t.env["max_steps"] = 16
    proc,logs,cams = Processor({STATE: flat(8), ACTION: flat(7)}),[],("front", "wrist")
    policy = make_policy("tiny", 64, 8, 7, head="flow", seed=0, cameras=[f"observation.images.{c}" for c in cams])
    for rows,n_workers,kill in ((1, 1, False), (3, 2, True)):
        with queue_pool(ts, rows, n_workers, image_size=64, cameras=cams) as pool:
            rounds,moves = [],{}
            def on_round():
                rounds.append(0)
                if kill and len(rounds) == 2: pool._workers[0].proc.kill()
            recs = play(policy, proc, pool, ts, range(2), 0, INFO, batch=3, cameras=cams, on_round=on_round, actions=moves)
            logs.append((bare(recs, ("seconds", "restarts")), {k: v.tobytes() for k,v in moves.items()})); assert pool.restarts == int(kill)
    assert len(logs[0][0]) == 4 and logs[0] == logs[1]
