"Batches that are prepared ahead: the same weights, exact resume, errors where the batch is asked for, no thread left behind."
import threading
import numpy as np
import pytest, torch
from types import SimpleNamespace
from clvla.cl.er import ER
from clvla.cl.mir import MIR
from clvla.core.names import ACTION, IMAGE, PROMPT, STATE
from clvla.data.frames import write_store
from clvla.data.loader import TaskData, TaskLoader
from clvla.data.stats import Processor, compute_stats
from clvla.policies.all import make_policy
from clvla.train.config import TrainConfig
from clvla.train.trainer import Trainer, make_optimizer

torch.set_num_threads(1)
NAMES = ("push", "pull")


def episode(T, seed, prompt):
    g = np.random.default_rng(seed)
    return {IMAGE: g.integers(0, 255, (T, 32, 32, 3), np.uint8), STATE: g.normal(size=(T, 4)).astype(np.float32),
            ACTION: g.normal(size=(T, 4)).astype(np.float32), PROMPT: prompt}

@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    root = tmp_path_factory.mktemp("frames")
    return {n: write_store(root/n, [episode(20, i, f"{n} it")]) for i,n in enumerate(NAMES)}

def trainer(stores, prefetch, prepare=None, log=None):
    data = TaskData(stores, Processor(compute_stats(stores)), 8, prepare=prepare)
    tasks = [SimpleNamespace(id=n, budget=None) for n in NAMES]
    stream = SimpleNamespace(stages=[SimpleNamespace(task=t) for t in tasks], ids=list(NAMES), tasks=tasks)
    cfg = TrainConfig(steps_per_task=6, batch_size=8, warmup=1, threads=1, prefetch=prefetch, device="cpu")
    return Trainer(cfg, stream, data, make_policy("tiny", 32, D=32, seed=1), ER(seed=0), log)

def fit(t):
    for stage in t.stages[t.t:]: t.fit(*stage)
    return t

def weights(t): return {k: v.clone() for k,v in t.policy.state_dict().items()}
def same(a, b): return all(torch.equal(a[k], b[k]) for k in a)
def threads(): return [t for t in threading.enumerate() if t.name.startswith("clvla-loader")]


def test_the_same_weights_and_samples_with_and_without(stores):
    logs = [[], []]
    runs = [fit(trainer(stores, k, log=lambda l=l, **r: l.append(r))) for k,l in zip((0, 3), logs)]
    assert same(*map(weights, runs)) and not threads()
    drawn = [[(r["task"], r["drawn"]) for r in l if "drawn" in r] for l in logs]
    assert drawn[0] == drawn[1] and len(drawn[0]) == 2
    runs[0].close(); runs[1].close()

@pytest.mark.parametrize("stop", [2, 9])      # inside the first stage, inside the second
def test_a_run_that_is_stopped_with_batches_ahead_goes_on_exactly(stores, stop):
    whole = weights(fit(trainer(stores, 0)))
    class Stop(Exception): pass
    first = trainer(stores, 3); n = [0]; kept = {}
    def between():
        n[0] += 1
        if n[0] == stop: kept.update(weights=weights(first), state=first.state_dict()); raise Stop
    first.save_if_due = between
    with pytest.raises(Stop): fit(first)
    assert len(threads()) == 1 and first.ctx.loader._ahead                # batches lie ready that nobody will train on
    assert kept["state"]["at"]["loader"]["position"] == first.ctx.loader.position
    first.ctx.loader.close(); assert not threads()
    second = trainer(stores, 2); second.prepare(kept["state"]["t"])
    second.policy.load_state_dict(kept["weights"]); second.load_state_dict(kept["state"])
    assert same(weights(fit(second)), whole) and not threads()

def test_an_error_in_the_thread_is_the_trainers(stores):
    def prepare(batch):
        if threading.current_thread().name.startswith("clvla-loader") and 7 in batch["index"]: raise OSError("the disk is gone")
        return batch
    t = trainer(stores, 4, prepare)
    with pytest.raises(OSError, match="the disk is gone"): fit(t)
    t.ctx.loader.close(); assert not threads()

def test_prepare_sees_every_batch_and_runs_in_the_thread(stores):
    seen = []
    def prepare(batch): seen.append(threading.current_thread().name); return batch | {"length": torch.ones(len(batch["index"]))}
    data = TaskData(stores, Processor(compute_stats(stores)), 8, prepare=prepare)
    loader = TaskLoader(data, list(NAMES), 0, prefetch=2); b = loader.next(8)
    loader.close()   # the thread reads ahead until then
    assert b["length"].shape == (8,) and all(s.startswith("clvla-loader") for s in seen)
    assert "length" in data.fetch_refs([("push", 0), ("pull", 1)]) and seen[-1] == "MainThread"   # replayed samples

def test_a_family_gives_its_parts_rates_of_their_own():
    p = make_policy("tiny", 32, D=32); p.lr_of = lambda lr: {"eyes.": lr/10}
    rates = {g["name"]: g["peak"] for g in make_optimizer(p, TrainConfig(lr=1e-3, lr_of={"head.": 5e-4})).param_groups}
    assert rates == {"all/decay": 1e-3, "all/plain": 1e-3, "eyes./decay": 1e-4, "eyes./plain": 1e-4, "head./decay": 5e-4, "head./plain": 5e-4}


# --- remembered frames

def trained(stores, prefetch, make):
    t = trainer(stores, prefetch)
    t.algo = make()
    return t

@pytest.mark.parametrize("make", [lambda: ER(seed=0), lambda: ER(seed=0, sampling="rotating"), lambda: MIR(seed=0, candidates=6, top_k=2),
                                  lambda: MIR(seed=0, candidates=6, top_k=2, refresh=2), lambda: ER(seed=0, store="values")])
def test_remembered_frames_that_are_read_ahead_are_the_same(stores, make, monkeypatch):
    whole = weights(fit(trained(stores, 0, make)))
    now, main = [], threading.main_thread()
    plain = TaskData.read_refs
    monkeypatch.setattr(TaskData, "read_refs", lambda self, refs: now.append(threading.current_thread() is main) or plain(self, refs))
    t = fit(trained(stores, 2, make))
    assert same(weights(t), whole) and t.data._reader is None
    assert sum(now) <= 2   # candidates and remembered samples of the second task's first step

def test_what_is_read_ahead_changes_no_draw_and_no_state(stores):
    a, b = (trained(stores, k, lambda: MIR(seed=0, candidates=6, top_k=2)) for k in (0, 2))
    states = [[], []]
    for t, kept in zip((a, b), states):
        t.save_if_due = lambda t=t, kept=kept: kept.append(t.algo.state_dict())
        fit(t)
    assert repr(states[0]) == repr(states[1])

def test_an_error_of_the_reading_thread_is_the_steps(stores):
    data = TaskData(stores, Processor(compute_stats(stores)), 8)
    refs = [("push", 3), ("pull", 4)]
    data.prepare = lambda batch: (_ for _ in ()).throw(OSError("the disk is gone"))
    data.expect([refs])
    with pytest.raises(OSError, match="the disk is gone"): data.fetch_refs(refs)
    data.forget(end=True)
