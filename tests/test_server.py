"The server of policy calls: bounded waits, batches, errors that reach every caller, a clean end; and a player that uses it."
import threading
import time
from types import SimpleNamespace as NS

import pytest
import torch

from test_practice import config
from clvla.core.names import STATE, TASK_ID
from clvla.envs.dot import dot
from clvla.eval.parts import merge
from clvla.eval.player import Player
from clvla.eval.server import ServedPlayer, Server, ServerClosed, _Served
from clvla.rl.learner import practise
from clvla.rl.placement import resolve_placement
from clvla.run.resume import fingerprint
from clvla.train.checkpoint_eval import eval_cl
from clvla.train.eval_config import EvalConfig


class Slow:
    "Answers x with -x; waits for `go` before its first batch, so that others can come meanwhile."
    def __init__(self): self.go, self.begun, self.batches = threading.Event(), threading.Event(), []
    def __call__(self, xs):
        self.batches.append(list(xs))
        self.begun.set()
        assert self.go.wait(10)
        return [-x for x in xs]


def test_a_lone_request_waits_no_longer_than_max_wait():
    with Server(lambda xs: xs, max_batch=8, max_wait=.2) as server:
        start = time.monotonic()
        assert server.ask(1).result(timeout=5) == 1
        assert .19 < time.monotonic()-start < 1.5


def test_a_full_batch_does_not_wait():
    with Server(lambda xs: xs, max_batch=3, max_wait=60.) as server:
        assert [f.result(timeout=5) for f in [server.ask(x) for x in range(3)]] == [0, 1, 2]


def test_those_that_are_expected_are_enough():
    with Server(lambda xs: xs, max_batch=8, max_wait=60., expected=lambda: 2) as server:
        assert [f.result(timeout=5) for f in [server.ask(x) for x in range(2)]] == [0, 1]


def test_batches_are_in_order_and_no_larger_than_max_batch():
    slow = Slow()
    with Server(slow, max_batch=3, max_wait=.01) as server:
        first = server.ask(0)
        assert slow.begun.wait(5)
        others = [server.ask(x) for x in range(1, 9)]   # all come while the first is answered
        slow.go.set()
        assert [f.result(timeout=5) for f in [first, *others]] == [-x for x in range(9)]
    assert slow.batches == [[0], [1, 2, 3], [4, 5, 6], [7, 8]] and server.sizes == [1, 3, 3, 2]


def test_callers_in_threads_get_their_own_answers():
    with Server(lambda xs: [10*x for x in xs], max_batch=4, max_wait=.002) as server:
        found = {}
        def call(n):
            for i in range(40): found[n, i] = server.ask(100*n+i).result(timeout=5)
        threads = [threading.Thread(target=call, args=(n,)) for n in range(6)]
        for t in threads: t.start()
        for t in threads: t.join(30)
    assert found == {(n, i): 10*(100*n+i) for n in range(6) for i in range(40)} and sum(server.sizes) == 240


@pytest.mark.parametrize("answer, error", [(lambda xs: 1/0, ZeroDivisionError), (lambda xs: xs[:-1], ValueError), (lambda xs: [*xs, 0], ValueError)])
def test_an_error_reaches_every_caller_and_the_server_goes_on(answer, error):
    bad = threading.Event()
    bad.set()
    with Server(lambda xs: answer(xs) if bad.is_set() else xs, max_batch=3, max_wait=60.) as server:
        futures = [server.ask(x) for x in range(3)]
        assert all(isinstance(f.exception(timeout=5), error) for f in futures)
        bad.clear()
        assert [f.result(timeout=5) for f in [server.ask(x) for x in range(3)]] == [0, 1, 2]


def test_an_end_with_waiting_callers():
    "The batch under way is answered, those that wait are told, and so is who comes later; nobody hangs."
    slow = Slow()
    server = Server(slow, max_batch=1, max_wait=0.)
    under_way = server.ask(1)
    assert slow.begun.wait(5)
    waiting = [server.ask(x) for x in (2, 3)]
    end = threading.Thread(target=server.close)
    end.start()
    assert all(isinstance(f.exception(timeout=5), ServerClosed) for f in waiting)
    slow.go.set()
    end.join(5)
    assert not end.is_alive() and not server.thread.is_alive() and under_way.result(timeout=1) == -1 and slow.batches == [[1]]
    with pytest.raises(ServerClosed): server.ask(4)
    server.close()   # again: nothing happens


def test_the_inference_server_propagates_exceptions_and_shuts_down_cleanly():
    "An error of the policy is raised in every thread that waits for its batch, with where it came from; afterwards no thread and no process is left."
    def answer(xs): raise FloatingPointError(f"chunk of {len(xs)} is not finite")
    before, caught = threading.active_count(), {}
    with Server(answer, max_batch=3, max_wait=60.) as server:
        def call(n):
            try: server.ask(n).result(timeout=10)
            except FloatingPointError as e: caught[n] = (str(e), e.__traceback__ is not None)
        threads = [threading.Thread(target=call, args=(n,)) for n in range(3)]
        for t in threads: t.start()
        for t in threads: t.join(10)
    assert caught == dict.fromkeys(range(3), ("chunk of 3 is not finite", True)) and threading.active_count() == before
    class Fails(Walk):
        def predict_chunk(self, obs, **kw): raise FloatingPointError("not finite")
    player = ServedPlayer(TASKS, 2, 2, image_size=8, H=4, max_wait=.001)
    workers = [w.proc for w in player.pool.workers]
    assert all(proc.poll() is None for proc in workers)
    with pytest.raises(FloatingPointError, match="not finite"), player: player.evaluate(Fails(), AS_IS, range(6), 0, INFO)
    assert all(proc.wait(10) is not None for proc in workers) and threading.active_count() == before


def test_cancelled_requests_are_left_out():
    slow = Slow()
    with Server(slow, max_batch=2, max_wait=.01) as server:
        first = server.ask(0)
        assert slow.begun.wait(5)
        lost, kept = server.ask(1), server.ask(2)
        assert lost.cancel()
        slow.go.set()
        assert kept.result(timeout=5) == -2 and first.result(timeout=5) == 0
    assert slow.batches == [[0], [2]]


@pytest.mark.parametrize("kw", [dict(max_batch=0), dict(max_batch=1.5), dict(max_wait=-1.), dict(max_wait=float("nan"))])
def test_bad_numbers(kw):
    with pytest.raises(ValueError, match="max_"): Server(list, **dict(max_batch=1, max_wait=0.) | kw)


class Walk(torch.nn.Module):
    goals = dict(left=(-.8, 0.), right=(.8, 0.), up=(0., .8), idle=(0., 0.))
    def __init__(self): super().__init__(); self.gain, self.calls = torch.nn.Parameter(torch.tensor(1.)), 0
    def chunk_noise(self, generator=None): return torch.randn(4, 2, generator=generator)
    def prompt_length(self, text): return len(text.split())
    def predict_chunk(self, obs, *, noise=None, generator=None):
        self.calls += 1
        return (self.gain*(torch.tensor([self.goals[task] for task in obs[TASK_ID]])-obs[STATE]))[:, None] + 1.5*noise


TASKS, INFO = dot.streams()["dot_3"].tasks, dict(stage=0, after="up", step=None)
AS_IS = NS(obs=lambda raw: {**raw, STATE: torch.tensor(raw[STATE])}, unnormalise=lambda a: a)


def played(make, policy=None, **kw):
    evaluate = {k: kw.pop(k) for k in ("on_round", "algo", "on_record") if k in kw}
    with make(TASKS, 2, 2, image_size=8, H=4, **kw) as player:
        recs = player.evaluate(policy or Walk(), AS_IS, range(6), 0, INFO, **evaluate)
    return [{k: v for k, v in r.items() if k not in ("seconds", "restarts") and "time/" not in k} for r in recs]


@pytest.fixture(scope="module")
def lockstep(): return played(Player)


@pytest.mark.parametrize("kw", [dict(max_wait=0.), dict(max_wait=.01), dict(max_wait=0., max_batch=1), dict(max_wait=.002, batch=3, rows=8), dict(max_wait=.002, batch=4, part=(0, 1))])
def test_the_records_of_lockstep(lockstep, kw): assert played(ServedPlayer, **kw) == lockstep


def test_a_lost_worker(lockstep):
    "Its episodes begin again; what the server answers to their earlier requests is dropped."
    with ServedPlayer(TASKS, 2, 2, image_size=8, H=4, max_wait=.001) as player:
        n, kills = iter(range(10_000)), []
        def kill():   # once from round 9 on, and its successor from round 25 on, which a busy machine may start later
            k = next(n)
            if len(kills) < 2 and k >= (9, 25)[len(kills)] and player.pool.restarts == len(kills):
                player.pool.workers[0].proc.kill()
                kills.append(k)
        recs = player.evaluate(Walk(), AS_IS, range(6), 0, INFO, on_round=kill)
        assert player.pool.restarts == 2
    assert [{k: v for k, v in r.items() if k not in ("seconds", "restarts") and "time/" not in k} for r in recs] == lockstep


@pytest.mark.parametrize("twice", ["late", "doubled"])
def test_answers_to_earlier_requests_are_dropped(lockstep, monkeypatch, twice):
    "Every request is handed in twice, as after a lost worker: the later one counts, whichever is answered last; or an answer is told twice."
    real_ask, real_tell = _Served._ask, _Served._tell

    def ask(self, row):
        state = row.rng.get_state()
        real_ask(self, row)
        row.rng = torch.Generator()
        row.rng.set_state(state)   # the first request has the generator of before
        real_ask(self, row)

    def tell(self, row, future):
        real_tell(self, row, future)
        real_tell(self, row, future)
    if twice == "late": monkeypatch.setattr(_Served, "_ask", ask)
    else: monkeypatch.setattr(_Served, "_tell", tell)
    assert played(ServedPlayer, max_wait=0.) == lockstep


def test_a_policy_that_fails_ends_the_evaluation():
    class Fails(Walk):
        def predict_chunk(self, obs, **kw):
            if self.calls == 5: raise FloatingPointError("not finite")
            return super().predict_chunk(obs, **kw)
    before = threading.active_count()
    with pytest.raises(FloatingPointError, match="not finite"): played(ServedPlayer, Fails())
    assert threading.active_count() == before


def test_a_stop_ends_the_evaluation():
    n, before = iter(range(1000)), threading.active_count()
    def stop():
        if next(n) == 7: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): played(ServedPlayer, on_round=stop)
    assert threading.active_count() == before


def test_rows_of_one_key_share_a_call(lockstep):
    "As PackNet needs it: no call mixes tasks of different keys, and the policy is changed for the key of the call."
    class Algo:
        now = None
        def eval_key(self, task_id): return task_id
        def eval_policy(self, policy, task_id):
            algo = self
            class Change:
                def __enter__(self): algo.now = task_id
                def __exit__(self, *exc): algo.now = None
            return Change()
    algo, seen = Algo(), []
    class Watched(Walk):
        def predict_chunk(self, obs, **kw):
            seen.append((algo.now, {t for t in obs[TASK_ID] if t != "idle"}))
            return super().predict_chunk(obs, **kw)
    assert played(ServedPlayer, Watched(), algo=algo) == lockstep
    assert seen and all(tasks == {now} for now, tasks in seen)


@pytest.fixture(scope="module")
def done(shared_data, tmp_path_factory): return practise(config(shared_data, tmp_path_factory.mktemp("lockstep")/"run"), say=len)


def test_practice_with_a_server(shared_data, tmp_path, done):
    "max_wait changes no number of a run, and may be changed when it goes on."
    run = practise(config(shared_data, tmp_path/"run", max_wait=.002), say=len)
    assert fingerprint(run.path) == fingerprint(done.path)


def test_shards_of_an_evaluation_of_practice(done):
    "Two parts of an evaluation, each of them played by itself, merged into one summary: the records of the whole."
    outs = [eval_cl(EvalConfig(run_dir=str(done.path), n_trials=3, n_workers=1, **kw), say=len) for kw in (dict(part="0/2"), dict(part="1/2"), {})]
    facts = lambda records: sorted((r["stage"], r["task"], r["trial"], r["success"], r["steps"]) for r in records)
    merged = merge([out.path for out in outs[:2]])
    assert not merged.missing and not merged.parts and facts(merged.records) == facts(outs[2].episodes()) and len(merged.records) == 6


def test_gpus_are_looked_at_at_the_door(shared_data, tmp_path):
    for kw in (dict(rollout_gpus="0"), dict(train_gpu=0)):
        with pytest.raises(ValueError, match="has no GPU"): practise(config(shared_data, tmp_path/"run", device="cpu", **kw), say=len)
    assert resolve_placement(0, "1,2", 3, rank=1, world=2).rollout == "cuda:2"
