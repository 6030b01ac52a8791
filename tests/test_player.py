"One player of episodes: the same records for lists of their own and for a queue, on any schedule, after any crash, from any number of processes."
import importlib.util, subprocess, sys, time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace as NS
import numpy as np, pytest, torch
from PIL import Image
from clvla.core.names import ACTION, IMAGE, N_ACTIONS, STATE, TASK_ID
from clvla.core.plugins import load_plugins
from clvla.core.seeds import np_rng
from clvla.data.stats import Processor
from clvla.data.streams import Task
from clvla.envs.all import make_env
from clvla.eval.call import batch_gap, idle_row
from clvla.eval.films import film, film_firsts
from clvla.eval.metrics import record_key
from clvla.eval.neighbours import doubt
from clvla.run.folder import RunFolder
from clvla.eval.parts import merge, part_of, plan_of, write_plan
from clvla.eval.player import CLOCK, PARTS, Player
from clvla.eval.rows import OwnTrials, Queue, Row, own_rows, workers_of
from clvla.policies.all import make_policy

HERE = Path(__file__).resolve().parent
load_plugins([str(HERE/"dot_env.py"), str(HERE/"faults.py")])

INFO,N,BATCH = dict(stage=0, after="d", step=None),5,9       # with two rows for each of five tasks, lists of their own have 10 places
PROMPTS = dict(a="go", b="go there", c="go to the place in the middle of it", d="go now", e="stand still")
TIMES = ("seconds", *(f"time/{p}" for p in PARTS))

def flat(n): return dict(mean=[0.]*n, std=[1.]*n, min=[-1.]*n, max=[1.]*n, q01=[-1.]*n, q99=[1.]*n, count=10, constant=[False]*n, binary=[False]*n)
PROC = Processor({STATE: flat(2), ACTION: flat(2)})

def tasks(die=None, **kw):
    return [Task(i, i, p, dict(kind="dying", name=i, max_steps=12+4*k, **kw, **({"die": die} if die and i == "b" else {})))
            for k,(i,p) in enumerate(PROMPTS.items())]

class Guided(torch.nn.Module):
    "The tiny policy, untrained, and half of the way to the origin: some episodes succeed, and every bit of the policy counts."
    def __init__(self, **kw): super().__init__(); self.net,self.shapes,self.pull = make_policy("tiny", 32, 2, 2, H=4, head="flow", seed=0, **kw),set(),torch.nn.Parameter(torch.tensor(.8))
    def chunk_noise(self, generator=None): return self.net.chunk_noise(generator)
    def prompt_length(self, text): return self.net.prompt_length(text)
    def predict_chunk(self, obs, *, noise=None, generator=None):
        assert not self.training and torch.is_inference_mode_enabled()
        self.shapes.add((len(obs[STATE]), max(len(p.split()) for p in obs["task"])))
        return .6*self.net.predict_chunk(obs, noise=noise)-self.pull*obs[STATE][:,None]

class Mixed(Guided):
    "A policy that looks at its neighbours."
    by = .01
    def predict_chunk(self, obs, **kw): return super().predict_chunk(obs, **kw)+self.by*obs[STATE].mean()

def player_of(rule, n_workers=2, rows=0, die=None, env=None, batch=BATCH, **kw):
    torch.set_num_threads(1)
    return Player(tasks(die, **(env or {})), 2, n_workers, **{**dict(image_size=32, H=4, timeout=20, rows=rows, batch=batch if rule == "queue" else 0), **kw})

def evaluate(player, policy=None, n=N, **kw): return player.evaluate(policy or Guided(), PROC, range(n), 7, INFO, **kw)

def run(rule, n_workers=2, rows=0, die=None, env=None, policy=None, pool_kw={}, **kw):
    with player_of(rule, n_workers, rows, die, env, **pool_kw) as player: return evaluate(player, policy, **kw)

def bare(recs, but=TIMES): return [{k: v for k,v in r.items() if k not in but} for r in recs]
def uncounted(recs): return bare(recs, (*TIMES, "restarts"))
def in_order(recs): return sorted(recs, key=lambda r: (r["task"], r["trial"]))

RULES = pytest.mark.parametrize("rule", ["own", "queue"])

@pytest.fixture(scope="module")
def reference(): return run("own", 1)

@RULES
def test_records_are_complete(reference, rule):
    recs = run(rule)
    assert bare(recs) == bare(reference) and [(r["task"], r["trial"]) for r in recs] == [(t, i) for t in PROMPTS for i in range(N)]
    assert set(recs[0]) == {"stage", "after", "task", "trial", "success", "steps", "reward", "seed", "restarts", "step", *TIMES}
    good = [r["success"] for r in recs]; assert any(good) and not all(good) and {r["restarts"] for r in recs} == {0}
    assert all(r["success"] or r["steps"] == 12+4*list(PROMPTS).index(r["task"]) for r in recs)
    assert all(r["time/act"] > 0 and r["time/draw"] > 0 and r["time/begin"] > 0 for r in recs)
    assert all(abs(sum(r[f"time/{p}"] for p in PARTS)-r["seconds"]) < .02 for r in recs)

@pytest.mark.parametrize("rule,rows,n_workers", [("own", 0, 2), ("own", 0, 3), ("queue", 4, 1), ("queue", 1, 1), ("queue", 12, 3), ("queue", 17, 2)])
def test_rows_and_workers_change_nothing(reference, rule, rows, n_workers):
    p = Guided(); assert bare(run(rule, n_workers, rows, policy=p)) == bare(reference) and p.shapes == {(BATCH+1, 9)}   # one shape, one length

@RULES
def test_slow_simulators_change_nothing(reference, rule):
    "Arrivals in another order: every environment sleeps in each step, those of one task much longer."
    player = player_of(rule, 3, 6)
    player.close(); player.tasks[0].env["slow"],player.tasks[3].env["slow"] = .004,.001
    with Player(player.tasks, 2, 3, 32, H=4, batch=BATCH*(rule == "queue"), rows=6) as player: assert bare(evaluate(player)) == bare(reference)

@pytest.mark.parametrize("rule,rows,n_workers,t", [("own", 0, 1, 5), ("own", 0, 2, 0), ("own", 0, 2, 9), ("queue", 4, 2, 5), ("queue", 4, 2, 0), ("queue", 13, 2, 9)])
def test_a_dead_worker_changes_nothing_but_the_count(reference, rule, rows, n_workers, t, tmp_path):
    with player_of(rule, n_workers, rows, dict(trial=2, t=t, flag=str(tmp_path/"died"))) as player:
        recs = evaluate(player)
        assert player.pool.restarts == 1 and sum(r["restarts"] for r in recs) >= 1 and uncounted(recs) == uncounted(reference)

def test_a_worker_is_lost_while_another_of_its_rows_has_just_finished(tmp_path):
    "The simulator would go on after a success, so the pool begins the recorded episode again; it is not recorded twice."
    def played(trials, die=None):
        ts,moves = [Task(i, i, "go", dict(kind="dying", name=i, max_steps=40, goes_on=True, **kw)) for i,kw in (("a", {}), ("b", die or {}))],{}
        with Player(ts, 1, 1, 32, H=4, timeout=20) as player: return player.evaluate(Guided(), PROC, trials, 7, INFO, actions=moves),moves,player.pool.restarts
    every = played(range(6))[0]
    trial,t = next((a["trial"], a["steps"]-1) for a,b in zip(every, every[6:]) if a["success"] and a["steps"] < b["steps"])
    (want,moves,_),(recs,again,restarts) = played([trial]),played([trial], dict(die=dict(trial=trial, t=t, flag=str(tmp_path/"died"))))
    assert restarts == 1 and uncounted(recs) == uncounted(want) and [r["restarts"] for r in recs] == [0, 1]   # the success and the death share a round
    assert moves.keys() == again.keys() and all(np.array_equal(moves[k], again[k]) for k in moves)

@pytest.mark.parametrize("rule,world,n_workers", [("own", 2, 3), ("own", 3, 2), ("own", 4, 1), ("queue", 2, 2), ("queue", 3, 2)])
def test_number_of_processes_changes_nothing(reference, rule, world, n_workers):
    parts,shapes = [],set()
    for rank in range(world):
        p = Guided(); parts.append(bare(run(rule, n_workers, policy=p, pool_kw=dict(rank=rank, world=world)))); shapes |= p.shapes
    assert all(parts) and in_order(sum(parts, [])) == bare(reference) and shapes == {(BATCH+1, 9)}

def test_process_without_a_row(reference):
    with player_of("own", rank=10, world=11) as player: assert player.pool is None and evaluate(player) == [] and doubt(player, Guided(), PROC) == ""
    first = bare(run("own", pool_kw=dict(rank=0, world=11))); assert first == bare([r for r in reference if r["task"] == "a" and r["trial"]%2 == 0])

def test_a_dead_worker_of_one_process_changes_nothing_but_the_count(reference, tmp_path):
    die,parts,restarts = dict(trial=2, t=5, flag=str(tmp_path/"died")),[],[]
    for rank in range(2):
        with player_of("own", die=die, rank=rank, world=2) as player: parts += evaluate(player); restarts.append(player.pool.restarts)
    assert restarts == [1, 0] and uncounted(in_order(parts)) == uncounted(reference)     # trial 2 of "b" is row 2's, which is the first process's

class Enough(KeyboardInterrupt): pass

@pytest.mark.parametrize("rule,stop,world", [("own", 1, 1), ("own", 4, 1), ("own", 3, 2), ("queue", 1, 1), ("queue", 5, 1), ("queue", 12, 1)])
def test_stopped_anywhere_and_continued(reference, rule, stop, world):
    "Stopped by `on_round` twice in one player, which is left with episodes under way, and continued in it or in a new one."
    parts = []
    for rank in range(world):
        have,calls,p = [],[],Guided(); p.train()
        def on_round():
            calls.append(0)
            if len(calls)%stop == 0 and len(calls) <= 2*stop: raise Enough
        with player_of(rule, 2, 4, rank=rank, world=world) as player:
            for _ in range(2):
                with pytest.raises(Enough): evaluate(player, p, done=map(record_key, have), on_record=have.append, on_round=on_round)
                assert p.training
            n = len(have); assert n < len(reference)/world
            if rule == "queue": rest = evaluate(player, done=map(record_key, have), on_record=have.append)
        if rule == "own": rest = run(rule, pool_kw=dict(rank=rank, world=world), done=map(record_key, have), on_record=have.append)
        assert len(have) == n+len(rest) and rest == in_order(rest); parts += have
    assert bare(in_order(parts)) == bare(reference)

def test_a_stop_is_heard_while_a_simulator_hangs():
    slow,calls = [Task("a", "a", "a", dict(kind="faulty", name="a", fault="sleep"))],[]
    def on_round():
        calls.append(time.monotonic())
        if len(calls) == 3: raise Enough
    one = NS(obs=lambda raw: {**PROC.obs({**raw, STATE: raw[STATE][:,:2]})}, unnormalise=PROC.unnormalise)
    with Player(slow, 1, 1, 32, H=4) as player, pytest.raises(Enough): player.evaluate(Guided(), one, [0], 0, INFO, on_round=on_round)
    assert .8 < calls[2]-calls[1] < 5

@RULES
def test_only_what_is_missing_or_asked_for(reference, rule):
    seen = []; done = [record_key(r) for r in reference if r["trial"] != 3]
    with player_of(rule) as player:
        recs = evaluate(player, done=done, on_record=seen.append)
        assert bare(recs) == bare([r for r in reference if r["trial"] == 3]) and bare(in_order(seen)) == bare(recs)
        assert evaluate(player, done=map(record_key, reference)) == []
        assert bare(evaluate(player, ids=["c", "a"])) == bare([r for r in reference if r["task"] in "ac"])
        more = bare(evaluate(player, n=7)); assert [r for r in more if r["trial"] < N] == bare(reference)   # more trials leave the first ones alone
        with pytest.raises(ValueError, match="no task 'f'; there are: a, b"): evaluate(player, ids=["f"])

@RULES
def test_one_shape_and_the_mode_is_restored(rule):
    class Broken(Guided):
        def predict_chunk(self, *a, **k): raise RuntimeError("no idea")
    with player_of(rule) as player:
        p = Guided(); p.train(); evaluate(player, p, ids=["a"]); assert p.shapes == {(BATCH+1, 9)} and p.training
        p.eval(); evaluate(player, p, n=1); assert not p.training
        broken = Broken()
        with pytest.raises(RuntimeError, match="no idea"): evaluate(player, broken)
        assert broken.training

def test_only_rows_under_way_are_computed():
    with player_of("own") as player:
        calls,real = [],player.pool.step
        player.pool.step = lambda slot, a, watch=(): (calls.append(slot), real(slot, a, watch))
        p,n = Guided(),[]
        chunk = p.predict_chunk; p.predict_chunk = lambda obs, **kw: (n.append(sum(t != "idle" for t in obs[TASK_ID])), chunk(obs, **kw))[1]
        evaluate(player, p, ids=["d"])
    assert set(calls) == {6, 7} and sum(n) == len(calls) and max(n) == 2

def test_other_batches_differ_in_rounding_only(reference):
    other = run("queue", 2, 4, pool_kw=dict(batch=7))
    assert [record_key(r) for r in other] == [record_key(r) for r in reference] and sum(a["success"] != b["success"] for a,b in zip(other, reference)) <= 1

# ---------------------------------------------------------------------- what an algorithm changes

class Pull:
    "An algorithm whose policy pulls more on some tasks, and notes when it was changed."
    def __init__(self, strong="ab"): self.strong,self.log = strong,[]
    def eval_key(self, task_id): return task_id in self.strong
    @contextmanager
    def eval_policy(self, policy, task_id):
        before = policy.pull.item(); policy.pull.fill_(1.2 if task_id in self.strong else before); self.log.append(task_id)
        try: yield
        finally: policy.pull.fill_(before)

class OneKey(Guided):
    "Refuses a call with rows of two keys, or one that is dressed for the other."
    strong = "ab"
    def predict_chunk(self, obs, **kw):
        keys = {i in self.strong for i in obs[TASK_ID] if i != "idle"}
        assert len(keys) == 1 and (self.pull.item() > 1) == keys.pop()
        return super().predict_chunk(obs, **kw)

@pytest.mark.parametrize("rule,rows,n_workers", [("own", 0, 2), ("queue", 4, 1), ("queue", 13, 3)])
def test_rows_are_grouped_by_what_an_algorithm_changes(reference, rule, rows, n_workers):
    algo,p = Pull(),OneKey(); recs = bare(run(rule, n_workers, rows, policy=p, algo=algo))
    strong = Guided(); strong.pull.data.fill_(1.2); want = bare(run("own", policy=strong))
    assert [r for r in recs if r["task"] in "ab"] == [r for r in want if r["task"] in "ab"] != bare(reference)[:2*N]
    assert [r for r in recs if r["task"] not in "ab"] == bare(reference)[2*N:]
    assert p.pull.item() == pytest.approx(.8) and p.shapes == {(BATCH+1, 9)} and len(algo.log) > 1

def test_one_key_is_dressed_once_and_an_error_undresses():
    algo,p = Pull("abcde"),Guided(); run("own", policy=p, algo=algo); assert len(algo.log) == 1
    class Broken(Guided):
        def predict_chunk(self, obs, **kw): raise RuntimeError("no idea")
    p = Broken()
    with pytest.raises(RuntimeError, match="no idea"): run("own", policy=p, algo=algo)
    assert p.pull.item() == pytest.approx(.8)

# ---------------------------------------------------------------------- discrete actions, cameras, environments

def test_discrete_actions(reference):
    ts = [Task(i, i, i, dict(kind="dot", name=i, discrete=True, max_steps=20)) for i in ("left", "up")]
    policy = make_policy("tiny", 32, 2, 1, H=4, head="discrete", n_actions=7, seed=0)
    real,seen = policy.predict_chunk,[]
    policy.predict_chunk = lambda obs, **kw: (seen.append(obs[N_ACTIONS].tolist()), real(obs, **kw))[1]
    proc,logs = Processor({STATE: flat(2), ACTION: flat(1)}, action_norm="identity"),[]
    for n_workers in (1, 2):
        moves = {}
        with Player(ts, 2, n_workers, 32, H=4) as player: recs = player.evaluate(policy, proc, range(3), 0, INFO, actions=moves)
        logs.append(bare(recs)); assert {a for m in moves.values() for a in m.ravel()} <= set(range(5)) and all(m.shape[1] == 1 for m in moves.values())
    assert logs[0] == logs[1] and len(recs) == 6 and {n for call in seen for n in call} == {1, 5}      # five actions; an idle row has one

def test_two_cameras_reach_the_policy():
    p,keys = Guided(cameras=(IMAGE, "observation.images.wrist")),set()
    real = p.net.predict_chunk; p.net.predict_chunk = lambda obs, **kw: (keys.update(obs), real(obs, **kw))[1]
    logs = [bare(run("queue", 2, rows, policy=p, pool_kw=dict(cameras=("front", "wrist")), n=2)) for rows in (4, 7)]
    assert logs[0] == logs[1] and {IMAGE, "observation.images.wrist"} < keys

def test_few_environments_are_built():
    with player_of("queue", 2, 4) as player: evaluate(player); clock = player.clock
    assert 4 <= clock["n_opens"] <= 10 and clock["n_opens"]+clock["n_begins"] == clock["episodes"] == 5*N and set(clock) == set(CLOCK)
    assert clock["wall"] > clock["policy"] > 0 and clock["pictures"] > clock["episodes"]

def test_who_shares_a_queue(monkeypatch):
    pools = []; monkeypatch.setattr("clvla.eval.player.EnvPool", lambda specs, *a, **kw: pools.append(specs))
    heavy = [Task("x", "x", "x", dict(kind="libero", suite="libero_goal", name="turn_on_the_stove"))]
    own,parts,asked,stove = Player(tasks()),Player(tasks(), part=(1, 2)),Player(tasks(), batch=3),Player(heavy)
    assert [(p.shared, p.places, len(s)) for p,s in zip((own, parts, asked, stove), pools)] == [(False, 10, 10), (True, 9, 4), (True, 4, 4), (True, 9, 4)]
    other = [Task("y", "y", "y", dict(kind="dying", name="y"), eval_env=dict(kind="dying", name="y", max_steps=9))]
    Player(other); assert {s["max_steps"] for s in pools[-1]} == {9}
    with pytest.raises(ValueError, match="without an environment"): Player([Task("z", "z", "z")])

# ---------------------------------------------------------------------- the two rules

def never(task, trial): return False

def test_lists_of_their_own_are_static():
    rows = own_rows([NS(id=i) for i in "ab"], 2); lists = lambda *a: [list(left) for left in OwnTrials(rows, range(5), *a, 2).left.values()]
    assert lists("ab", never) == [[0,2,4], [1,3], [0,2,4], [1,3]] and lists("b", never) == [[], [], [0,2,4], [1,3]]
    assert lists("ab", lambda t,n: n < 3) == [[4], [3], [4], [3]]
    assert [r.number for r in rows] == [0, 1, 2, 3] and [[r.number for r in own_rows([NS(id=i) for i in "ab"], 2, k, 3)] for k in range(3)] == [[0, 3], [1], [2]]

def test_rows_spread_over_workers():
    three = [NS(id=i) for i in "abc"]
    assert workers_of(own_rows(three, 2), 2) == [0, 1, 1, 0, 0, 1]
    assert [workers_of(own_rows(three, 2, r, 2), 2) for r in (0, 1)] == [[0, 1, 0], [0, 1, 0]]
    assert workers_of(own_rows(three, 1, 0, 2), 2) == [0, 1]          # tasks 0 and 2: not both in one worker

def test_the_queue_deals_every_episode_once():
    ts = {t.id: t for t in tasks()}
    for part in [(0, 1), (0, 3), (1, 3), (2, 3)]:
        q,dealt,row = Queue(list(ts.values()), range(7), lambda task,i: (task, i) == ("c", 3), part),[],Row(0, 0, ts["a"])
        while e := q.take(row): row.task = ts[e[0]]; dealt.append(e)
        want = [(t, i) for p,(t,i) in enumerate((t, i) for t in PROMPTS for i in range(7)) if p%part[1] == part[0] and (t, i) != ("c", 3)]
        assert sorted(dealt) == want and not any(q.left.values()) and sum(a[0] != b[0] for a,b in zip(dealt, dealt[1:])) == 4   # one task after the other
    for bad in ("1", "1/1", "2/1", "-1/2", "a/b", "0/0", "", "0/2/3", None, "1.0/2", "0/01", "1/02", "00/2", "0/\u0662"):
        with pytest.raises(ValueError, match="part is 'a/b'"): part_of(bad)
    assert part_of("3/12") == (3, 12)

# ---------------------------------------------------------------------- place and neighbours

def test_a_hyphen_makes_two_words_and_the_batch_keeps_its_length():
    "The idle row's instruction is the longest as the tiny policy reads it, so that no neighbour changes the padding."
    from clvla.policies.tiny import hash_words
    ts = [NS(id="a", prompt="put it down now ok"), NS(id="b", prompt="pick-up the top-left-most cup"), NS(id="c", prompt="go - - - - - - there")]
    text = idle_row(ts, Guided()).task.prompt; assert text == ts[1].prompt and len(text.split()) < 5 and idle_row(tasks(), Guided()).task.prompt == PROMPTS["c"]
    assert len({hash_words([text, t.prompt]).shape for t in ts}) == 1

@RULES
def test_doubts_only_where_place_or_neighbours_matter(rule):
    p = Mixed(); p.train()
    with player_of(rule, 1) as player:
        state = torch.get_rng_state(); said = [doubt(player, Guided(), PROC), doubt(player, p, PROC)]
    changed = dict(own="another number of processes or rows", queue="another number of workers, in parts")[rule]
    assert said[0] == "" and changed in said[1] and "threads 1" in said[1] and p.training and torch.equal(state, torch.get_rng_state())

@pytest.mark.parametrize("batch,doubtful", [(0, True), (1, False)])
def test_two_places_are_doubted_where_a_row_can_sit_in_each(batch, doubtful):
    "Two rows of one task are neighbours; a queue's only row sits beside the idle row."
    torch.set_num_threads(1)
    with Player(tasks()[:1], 2, 1, image_size=32, H=4, timeout=20, batch=batch) as player:
        assert player.places == 2 and doubt(player, Guided(), PROC) == "" and bool(doubt(player, Mixed(), PROC)) is doubtful

def test_a_policy_that_mixes_rows_is_found_out():
    rng = np_rng(0, "gap"); obs = {IMAGE: rng.integers(0, 256, (5, 32, 32, 3), dtype="u1"), STATE: rng.normal(size=(5, 2)).astype("f4")}
    assert batch_gap(Guided().train(False), PROC, obs, tasks(), 6) == 0 and batch_gap(Mixed().train(False), PROC, obs, tasks(), 6) > 1e-4

def test_a_fixed_schedule_repeats_also_for_a_policy_that_mixes_rows():
    class Much(Mixed): by = 1.
    logs = [bare(run("queue", n, 4, policy=Much(), env=dict(slow=s))) for n,s in ((1, 0.), (2, .001), (4, 0.))]
    assert logs[0] == logs[1] == logs[2] != bare(run("queue", 2, 2, policy=Much()))

def test_own_rows_keep_their_place_with_two_threads(reference):
    "Where the place in a batch matters, it is the same for any number of workers and processes."
    class Placed(Guided):
        def predict_chunk(self, obs, **kw): return super().predict_chunk(obs, **kw)+.1*torch.arange(len(obs[STATE]))[:,None,None]
    logs = [bare(run("own", n, policy=Placed())) for n in (1, 3)]
    parts = sum((bare(run("own", policy=Placed(), pool_kw=dict(rank=r, world=2))) for r in range(2)), [])
    assert logs[0] == logs[1] == in_order(parts) != bare(reference)

# ---------------------------------------------------------------------- films

def test_films_replay_what_happened(reference, tmp_path):
    moves = {}; recs = run("own", actions=moves); ts = tasks()
    assert {k: len(v) for k,v in moves.items()} == {(r["task"], r["trial"]): r["steps"] for r in reference}
    queued = {}; run("queue", 2, 6, actions=queued); assert all(np.array_equal(queued[k], moves[k]) for k in moves)
    paths = film_firsts(recs, moves, ts, tmp_path, 16); names = {p.name for p in paths}
    for r in recs:
        first = next(x["trial"] for x in recs if (x["task"], x["success"]) == (r["task"], r["success"]))
        assert f"{r['task']}-{'success' if r['success'] else 'failure'}-{first}.gif" in names
    with Image.open(paths[0]) as im: assert im.size == (16, 16) and im.n_frames > 1
    with pytest.raises(ValueError, match="the replay ended with"): film_firsts([{**recs[0], "success": not recs[0]["success"]}], moves, ts, tmp_path, 16)

# ---------------------------------------------------------------------- killed

def in_folder(path, plan, *args, **kw):
    "Play what a folder of that plan lacks."
    write_plan(path, plan)
    folder = RunFolder(path)
    with folder.lock():
        folder.clean()
        run(*args, done=[record_key(r) for r in folder.episodes()], on_record=folder.episode, **kw)

SCRIPT = """
import sys; sys.path.insert(0, {here!r})
from test_player import *
in_folder({folder!r}, PLAN, "queue", 2, 4, env=dict(slow=.002))
"""
PLAN = plan_of({"weights": "12ab"}, [(INFO, list(PROMPTS))], range(N), 7, BATCH)

def test_killed_again_and_again_and_merged(reference, tmp_path):
    "SIGKILL of the whole evaluation, at other times, until it is done; half lines included."
    folder,kills = tmp_path/"whole",0
    for k in range(30):
        p = subprocess.Popen([sys.executable, "-c", SCRIPT.format(here=str(HERE), folder=str(folder))], stderr=subprocess.PIPE, text=True)
        goal,f = 6+8*k,folder/"episodes.jsonl"
        while p.poll() is None and not (f.exists() and f.read_bytes().count(b"\n") >= goal): time.sleep(.02)
        if p.poll() is not None: assert p.returncode == 0, p.stderr.read(); break
        p.kill(); p.wait(); kills += 1
        with open(f, "ab") as half: half.write(b'{"stage": 0, "aft'[:3*k+1])
    merged = merge([folder])
    assert kills >= 2 and not merged.missing and bare(merged.records) == bare(reference)

def test_shares_are_merged(reference, tmp_path):
    folders = []
    for a in range(3):
        folders.append(tmp_path/f"{a}")
        in_folder(folders[-1], {**PLAN, "part": [a, 3]}, "queue", 1+a, 2+2*a, pool_kw=dict(part=(a, 3)))
    merged = merge(folders); assert bare(merged.records) == bare(reference) and (merged.missing, merged.parts, merged.plan["part"]) == ([], [], [0, 1])

# ---------------------------------------------------------------------- simulators

metaworld = pytest.mark.skipif(importlib.util.find_spec("metaworld") is None, reason="metaworld is not installed")

@metaworld
def test_metaworld_same_records_for_any_number_of_workers_and_processes():
    torch.set_num_threads(1); logs = []
    two = [Task(i, i, i, dict(kind="metaworld", name=f"{i}-v3", max_steps=24)) for i in ("window-close", "faucet-open")]
    policy = make_policy("tiny", 48, 4, 4, head="flow", seed=0)
    for n,world in ((1, 1), (2, 1), (1, 2)):
        recs,moves = [],{}
        for rank in range(world):
            with Player(two, 1, n, 48, rank=rank, world=world) as player:
                recs += bare(player.evaluate(policy, Processor({STATE: flat(4), ACTION: flat(4)}), range(2), 0, INFO, actions=moves))
        logs.append((recs, moves))
    for recs,moves in logs[1:]: assert recs == logs[0][0] and moves.keys() == logs[0][1].keys() and all(np.array_equal(logs[0][1][k], moves[k]) for k in moves)

@metaworld
def test_metaworld_expert_is_filmed():
    env = make_env(dict(kind="metaworld", name="window-close-v3", max_steps=150), 32); env.reset(0); acts,ok = [],False
    while not env.ended: acts.append(env.expert()); _,ok,*_ = env.step(acts[-1])
    frames,again = film(env, 0, acts, 10); env.close()
    assert ok and again and frames[0].shape == (32, 32, 3) and not np.array_equal(frames[0], frames[-1])

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
        with Player(ts, 1, n_workers, 64, rows=rows, batch=3, cameras=cams) as player:
            rounds,moves = [],{}
            def on_round():
                rounds.append(0)
                if kill and len(rounds) == 2: player.pool.workers[0].proc.kill()
            recs = player.evaluate(policy, proc, range(2), 0, INFO, on_round=on_round, actions=moves)
            logs.append((uncounted(recs), {k: v.tobytes() for k,v in moves.items()})); assert player.pool.restarts == int(kill)
    assert len(logs[0][0]) == 4 and logs[0] == logs[1]
