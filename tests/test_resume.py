"A run that was stopped or killed at any point goes on as the run that was never disturbed."
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chaos import chaos, copy_demos, wait_for
from clvla.policies.weights import read_base
from clvla.core.state import load_state
from clvla.core.files import read_json
from clvla.envs.all import kinds
from clvla.run.checkpoint import checkpoints
from clvla.train.config import TrainConfig, resolve
from clvla.run.resume import fingerprint
from clvla.run.shell import run_learner
from clvla.train.learner import train_cl
from clvla.run.folder import RunFolder
from clvla.run.stop import EXIT_STOPPED, Stopped

SMALL = dict(n_demos=2, steps_per_task=4, n_trials=1, rows_per_task=1, warmup=1, batch_size=8, threads=1, n_workers=1, image_size=32,
             suite="dot_2")
job = sys.modules["clvla.train.learner"]


class Crash(BaseException): "A power cut: no `except` of the run sees it, nothing is written."


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


def config(data, path, **kw): return resolve(TrainConfig(data_dir=str(data), run_dir=str(path), **(SMALL | kw)))


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    "Fingerprints of undisturbed runs, each made once."
    home, known = tmp_path_factory.mktemp("undisturbed"), {}

    def get(**kw):
        key = json.dumps(kw, sort_keys=True)
        if key not in known: known[key] = fingerprint(train_cl(config(data, home/str(len(known)), **kw), say=len).path)
        return known[key]
    return get


def crash_at(monkeypatch, stage, step, what=Crash):
    "Make the trainer fall over right after an update."
    real = job.Trainer.report

    def report(self, ctx, *a):
        real(self, ctx, *a)
        if (ctx.t, ctx.step) == (stage, step): raise what("the power is cut")
    monkeypatch.setattr(job.Trainer, "report", report)


FEW = dict(n_batches=2, B=8)   # of the Fisher information, each sample of which needs a backward pass of its own
CASES = {"sequential": {}, "joint": {}, "cumulative": {}, "er": {}, "mir": dict(algo_kw=dict(refresh=2)), "ewc": dict(algo_kw=FEW)}
MORE = {"er-deltas": dict(algo="er", algo_kw=dict(store="deltas 16", sampling="rotating", form="append")), "ewc-online": dict(algo="ewc", algo_kw=dict(mode="online", **FEW)),
        "er-kept-optimizer": dict(algo="er", reset_optimizer=False), "er-no-average": dict(algo="er", ema=0., accumulation=2),
        "mir-lora": dict(algo="mir", lora_rank=4), "er-lora": dict(algo="er", lora_rank=4), "ewc-lora": dict(algo="ewc", lora_rank=4, algo_kw=FEW),
        "sequential-lora": dict(algo="sequential", lora_rank=4), "er-curve": dict(algo="er", curve_points=2, evaluate="lower"),
        "mir-l1": dict(algo="mir", head="l1")}


@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_a_crash_inside_a_task(data, tmp_path, undisturbed, monkeypatch, name):
    "Inside the second stage (the first of joint), after a checkpoint inside the task and one update more."
    kw = dict(evaluate="none") | (MORE[name] if name in MORE else dict(algo=name, **CASES[name]))
    cfg = config(data, tmp_path/"run", save_every=2, **kw)
    with monkeypatch.context() as m:
        crash_at(m, *((0, 5) if name == "joint" else (1, 3)))
        with pytest.raises(Crash): train_cl(cfg, say=len)
    last = checkpoints(Path(cfg.run_dir)/"checkpoints")[-1]
    assert read_json(last/"position.json")["step"] == (4 if name == "joint" else 2) and RunFolder(cfg.run_dir).status == "interrupted"
    train_cl(cfg, say=len)
    assert fingerprint(cfg.run_dir) == undisturbed(**kw)


def test_a_crash_at_every_update(data, tmp_path, undisturbed, monkeypatch):
    "One run that falls over after each of its updates, with a checkpoint after each."
    cfg, n = config(data, tmp_path/"run", algo="mir", save_every=1, evaluate="none"), 0
    for stage in (0, 1):
        for step in (1, 2, 3, 4):
            with monkeypatch.context() as m:
                crash_at(m, stage, step)
                with pytest.raises(Crash): train_cl(cfg, say=len)
            n += 1
    train_cl(cfg, say=len)
    assert n == 8 and fingerprint(cfg.run_dir) == undisturbed(algo="mir", evaluate="none")


@pytest.mark.parametrize("algo", ["er", "mir"])
def test_a_crash_between_task_and_evaluation_and_inside_evaluation(data, tmp_path, undisturbed, monkeypatch, algo):
    cfg = config(data, tmp_path/"run", algo=algo, n_trials=2)
    with monkeypatch.context() as m:
        m.setattr(job.Imitation, "evaluate", lambda self, t, step=None: 1 if t < 0 else (_ for _ in ()).throw(Crash()))
        with pytest.raises(Crash): train_cl(cfg, say=len)
    real = RunFolder.episode

    def episode(self, r):
        real(self, r)
        if len(self.episodes()) == 3: raise Crash
    with monkeypatch.context() as m:
        m.setattr(RunFolder, "episode", episode)
        with pytest.raises(Crash): train_cl(cfg, say=len)
    assert len(RunFolder(cfg.run_dir).episodes()) == 3
    train_cl(cfg, say=len)
    assert fingerprint(cfg.run_dir) == undisturbed(algo=algo, n_trials=2)


def test_a_flipped_digit_of_the_log_is_named_and_the_line_comes_back(data, tmp_path, undisturbed, monkeypatch):
    "It is JSON as before; the person takes the line out as the message says, and the checkpoint has it still."
    cfg, said = config(data, tmp_path/"run", algo="er", save_every=2, evaluate="none"), []
    with monkeypatch.context() as m:
        crash_at(m, 1, 3)
        with pytest.raises(Crash): train_cl(cfg, say=len)
    log = Path(cfg.run_dir)/"log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    lines[1] = lines[1].replace('"step": 1', '"step": 0')
    log.write_text("".join(lines))
    with pytest.raises(ValueError, match=r"line 2 of .*log\.jsonl.*was changed after it was written.*sed -i 2d"): train_cl(cfg, say=len)
    log.write_text("".join(lines[:1]+lines[2:]))
    train_cl(cfg, say=said.append)
    assert any("log.jsonl is not what checkpoint" in line for line in said) and fingerprint(cfg.run_dir) == undisturbed(algo="er", evaluate="none")


@pytest.mark.parametrize("step", [2, 3])
def test_a_folder_that_is_moved_under_its_process_is_not_made_again(data, tmp_path, undisturbed, monkeypatch, step):
    cfg, real = config(data, tmp_path/"run", algo="er", save_every=2, evaluate="none"), job.Trainer.report

    def report(self, ctx, *a):
        real(self, ctx, *a)
        if (ctx.t, ctx.step) == (1, step) and (tmp_path/"run").exists(): (tmp_path/"run").rename(tmp_path/"elsewhere")
    with monkeypatch.context() as m:
        m.setattr(job.Trainer, "report", report)
        with pytest.raises(FileNotFoundError, match="run is gone: it was moved"): train_cl(cfg, say=len)
    assert not (tmp_path/"run").exists()
    with pytest.raises(FileNotFoundError, match="is gone"): run_learner(cfg, len, begun=True)
    assert not (tmp_path/"run").exists()
    train_cl(replace(cfg, run_dir=str(tmp_path/"elsewhere")), say=len)
    assert fingerprint(tmp_path/"elsewhere") == undisturbed(algo="er", evaluate="none")


def in_a_queue(monkeypatch): monkeypatch.setattr(kinds["dot"], "heavy", True)


@pytest.fixture(scope="module")
def queued(data, tmp_path_factory):
    "An undisturbed run whose own evaluation is the queue, and what it said; its policy is said to mind its place in a batch."
    said, asked = [], []
    with pytest.MonkeyPatch.context() as m:
        in_a_queue(m); m.setattr("clvla.eval.neighbours.batch_gap", lambda *a, **kw: asked.append(a) or 2.4e-7)
        run = train_cl(config(data, tmp_path_factory.mktemp("queued")/"run", algo="er", n_trials=4, n_workers=2), said.append)
    return run, said, asked


def test_the_queue_of_a_run_says_once_that_its_schedule_counts(queued):
    run, said, asked = queued
    assert len(asked) == 1 and sum("the place in a policy call moves this policy's actions by up to 2e-07" in s for s in said) == 1
    assert len(run.episodes()) == 12 and all("time/policy" in r for r in run.episodes())  # a queue's records


@pytest.mark.parametrize("n", [3, 7])
def test_a_crash_inside_the_queue_of_a_run(data, tmp_path, queued, monkeypatch, n):
    "With another number of workers afterwards; nothing is said of schedules, for this policy does not mind them."
    in_a_queue(monkeypatch)
    cfg, real, said = config(data, tmp_path/"run", algo="er", n_trials=4, n_workers=2), RunFolder.episode, []

    def episode(self, r):
        real(self, r)
        if len(self.episodes()) == n: raise Crash
    with monkeypatch.context() as m:
        m.setattr(RunFolder, "episode", episode)
        with pytest.raises(Crash): train_cl(cfg, say=len)
    before = RunFolder(cfg.run_dir).episodes(); assert len(before) == n
    run = train_cl(replace(cfg, n_workers=1), said.append)
    assert run.episodes()[:n] == before and fingerprint(run.path) == fingerprint(queued[0].path) and not any("batch" in s for s in said)


def test_an_older_checkpoint_will_do(data, tmp_path, undisturbed, monkeypatch):
    "Newer ones are damaged: records that are newer than the whole one are taken out and made again."
    cfg = config(data, tmp_path/"run", algo="er", save_every=1)
    with monkeypatch.context() as m:
        crash_at(m, 1, 4)
        with pytest.raises(Crash): train_cl(cfg, say=len)
    points, said = checkpoints(Path(cfg.run_dir)/"checkpoints"), []
    assert [p.name for p in points] == ["000-left", "001+000001-right", "001+000002-right", "001+000003-right"]
    for p, f in zip(points[1:], ("weights.safetensors", "state.safetensors", "generators-0.safetensors")):
        (p/f).write_bytes((p/f).read_bytes()[:-1])
    train_cl(cfg, said.append)
    assert sum("is passed over" in s for s in said) == 3 and any("continued after 000-left" in s for s in said)
    assert fingerprint(cfg.run_dir) == undisturbed(algo="er")


def test_lost_records_come_back_from_the_checkpoint(data, tmp_path, undisturbed, monkeypatch):
    cfg = config(data, tmp_path/"run", algo="er", save_every=2)
    with monkeypatch.context() as m:
        crash_at(m, 1, 3)
        with pytest.raises(Crash): train_cl(cfg, say=len)
    (Path(cfg.run_dir)/"episodes.jsonl").unlink()
    train_cl(cfg, say=len)
    assert fingerprint(cfg.run_dir) == undisturbed(algo="er")


def test_global_generators_are_part_of_the_state(data, tmp_path, monkeypatch):
    "A policy that draws from Python's, numpy's and torch's global generators (dropout does) continues exactly, too."
    import random
    import numpy as np
    real = job.Trainer.update

    def shaken(self, ctx):
        with torch.no_grad():
            for p in ctx.params().values(): p.add_(1e-3*(random.random()+np.random.rand())*torch.randn(p.shape))
        real(self, ctx)
    monkeypatch.setattr(job.Trainer, "update", shaken)
    whole, cfg = (config(data, tmp_path/n, algo="er", evaluate="none", save_every=2) for n in ("whole", "broken"))
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    train_cl(whole, say=len)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    with monkeypatch.context() as m:
        crash_at(m, 1, 3)
        with pytest.raises(Crash): train_cl(cfg, say=len)
    train_cl(cfg, say=len)
    assert fingerprint(cfg.run_dir) == fingerprint(whole.run_dir)


def test_saving_changes_nothing(data, tmp_path, undisturbed):
    cfg = config(data, tmp_path/"run", algo="mir", evaluate="none", save_every=1, keep=1)
    assert fingerprint(train_cl(cfg, say=len).path) == undisturbed(algo="mir", evaluate="none")
    assert [p.name for p in checkpoints(Path(cfg.run_dir)/"checkpoints")] == ["000-left", "001-right"]


def test_minutes_save_too(data, tmp_path):
    cfg = config(data, tmp_path/"run", algo="sequential", evaluate="none", save_minutes=1e-6, keep=20)
    train_cl(cfg, say=len)
    assert len(checkpoints(Path(cfg.run_dir)/"checkpoints")) >= 2+2*2


def test_a_checkpoint_holds_everything(data, tmp_path):
    run = train_cl(config(data, tmp_path/"run", algo="ewc"), say=len)
    last = checkpoints(run.path/"checkpoints")[-1]
    assert {p.name for p in last.iterdir()} == {
        "weights.safetensors", "policy.json", "state.safetensors", "generators-0.safetensors", "config.json", "processor.json", "stream.json",
        "dataset_statistics.json", "position.json", "episodes.json", "log.jsonl", "matrix.json", "versions.json", "manifest.json", "algo.safetensors"}
    state = load_state(last/"state.safetensors")
    assert set(state) == {"t", "at", "skipped", "noise", "opt", "scaler", "overflows"}
    assert set(load_state(last/"algo.safetensors")) >= {"F", "anchor"}
    assert (run.path/"checkpoints/LATEST").read_text().strip() == '"001-right"'


QUEUE = """
import sys
from clvla.envs.all import kinds
from clvla.run.__main__ import main
from clvla.run.child import as_child
kinds["dot"].heavy = True; as_child(lambda: main(sys.argv[1:]))
"""


def child(cfg, start=("-m", "clvla.run"), **env):
    RunFolder(cfg.run_dir).begin(cfg)
    return subprocess.Popen([sys.executable, *start, cfg.run_dir], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=os.environ | env)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_inside_a_task(data, tmp_path, undisturbed, number):
    "Saved within ten seconds, exit code 75, and the same command goes on at that very update."
    kw = dict(algo="er", steps_per_task=60, evaluate="none")
    cfg = config(data, tmp_path/"run", **kw); log = Path(cfg.run_dir)/"log.jsonl"
    p = child(cfg)
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 70)
    t0 = time.monotonic(); p.send_signal(number); out, _ = p.communicate(timeout=60)
    assert p.returncode == EXIT_STOPPED and time.monotonic()-t0 < 10 and "Traceback" not in out, out
    run, at = RunFolder(cfg.run_dir), read_json(Path(cfg.run_dir)/"stopped.json")
    assert run.status == "stopped" and at["stage"] == 1 and 0 < at["step"] < 60
    assert f"001+{at['step']:06d}-right" in [c.name for c in checkpoints(run.path/"checkpoints")]
    assert train_cl(cfg, say=len).status == "done" and fingerprint(cfg.run_dir) == undisturbed(**kw)


def test_a_signal_during_evaluation(data, tmp_path, undisturbed):
    kw = dict(algo="sequential", n_trials=6)
    cfg = config(data, tmp_path/"run", **kw); records = Path(cfg.run_dir)/"episodes.jsonl"
    p = child(cfg)
    wait_for(lambda: records.exists() and len(records.read_text().splitlines()) >= 2)
    t0 = time.monotonic(); p.terminate()
    assert p.wait(60) == EXIT_STOPPED and time.monotonic()-t0 < 10
    n = len(RunFolder(cfg.run_dir).episodes())
    assert 2 <= n < 6+12
    assert train_cl(cfg, say=len).done and fingerprint(cfg.run_dir) == undisturbed(**kw)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_during_the_queue_of_a_run(data, tmp_path, queued, monkeypatch, number):
    cfg = config(data, tmp_path/"run", algo="er", n_trials=4, n_workers=2); records = Path(cfg.run_dir)/"episodes.jsonl"
    p = child(cfg, ("-c", QUEUE))
    wait_for(lambda: records.exists() and records.read_bytes().count(b"\n") >= 2)
    t0 = time.monotonic(); p.send_signal(number)
    assert p.wait(60) == (EXIT_STOPPED if number == signal.SIGTERM else -number) and time.monotonic()-t0 < 10
    n = len(RunFolder(cfg.run_dir).episodes(len)); assert 2 <= n < 12
    in_a_queue(monkeypatch)
    assert train_cl(cfg, say=len).done and fingerprint(cfg.run_dir) == fingerprint(queued[0].path)


def test_a_signal_while_demonstrations_are_made(tmp_path):
    cfg = config(tmp_path/"data", tmp_path/"run", algo="sequential", n_demos=20, evaluate="none")
    p = child(cfg)
    wait_for(lambda: (tmp_path/"data").exists() and any((tmp_path/"data").rglob("*")))
    t0 = time.monotonic(); p.terminate()
    assert p.wait(60) == EXIT_STOPPED and time.monotonic()-t0 < 10 and RunFolder(cfg.run_dir).status == "stopped"


@pytest.mark.parametrize("step", [2, 4])
def test_stopped_in_this_process_is_an_interrupt(data, tmp_path, undisturbed, monkeypatch, step):
    "In a notebook's kernel, the stop button ends a lesson's run in the same way; also after a stage's last update."
    cfg = config(data, tmp_path/"run", algo="er", evaluate="none")
    real = job.Trainer.report

    def press(self, ctx, *a):
        real(self, ctx, *a)
        if (ctx.t, ctx.step) == (1, step): os.kill(os.getpid(), signal.SIGINT)
    with monkeypatch.context() as m:
        m.setattr(job.Trainer, "report", press)
        with pytest.raises(Stopped): train_cl(cfg, say=len)
    assert RunFolder(cfg.run_dir).status == "stopped" and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert read_json(Path(cfg.run_dir)/"stopped.json")["step"] == step
    assert fingerprint(train_cl(cfg, say=len).path) == undisturbed(algo="er", evaluate="none")


@pytest.mark.parametrize("kw,skipped", [(dict(on_nan="stop"), 1), (dict(on_nan="skip", nan_limit=2), 2), (dict(on_nan="skip", nan_limit=1), 2)])
def test_a_number_that_is_none(data, tmp_path, monkeypatch, kw, skipped):
    "Bad pictures of one task: named on disk with their samples before any weight has moved; skipped up to the limit, by choice."
    cfg = config(data, tmp_path/"run", algo="sequential", evaluate="none", **kw)
    real, n = job.Trainer.update, iter(range(100))

    def update(self, ctx):
        if ctx.t == 1 and next(n) < 2:
            fetch = ctx.loader.next
            ctx.loader.next = lambda k: (b := fetch(k)) | {"observation.state": b["observation.state"]*float("nan")}
            try: real(self, ctx)
            finally: ctx.loader.next = fetch
        else: real(self, ctx)
    monkeypatch.setattr(job.Trainer, "update", update)
    path = Path(cfg.run_dir)
    if kw.get("nan_limit") == 2:
        run = train_cl(cfg, say=len)
        assert read_json(path/"done.json")["skipped_updates"] == 2 and all(p.isfinite().all() for p in load_state(
            checkpoints(path/"checkpoints")[-1]/"state.safetensors")["opt"]["query"].values())
        assert sum("train/loss" in r for r in run.logs()) == 8-2
    else:
        with pytest.raises(FloatingPointError, match="bad_updates.jsonl"): train_cl(cfg, say=len)
        assert RunFolder(path).status == "failed" and "FloatingPointError" in (path/"failed.json").read_text()
    seen = [json.loads(l) for l in (path/"bad_updates.jsonl").read_text().splitlines()]
    assert len(seen) == skipped and seen[0]["task"] == "right" and seen[0]["step"] == 0 and len(seen[0]["samples"]) == 8
    assert {t for t, _ in seen[0]["samples"]} == {"right"} and seen[0]["loss"] == "nan"


def test_out_of_memory_names_the_setting(data, tmp_path, monkeypatch):
    def full(*a): raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(sys.modules["clvla.train.trainer"], "cl_step", full)
    with pytest.raises(RuntimeError, match=r"8 samples at a time .* raise accumulation \(now 1"):
        train_cl(config(data, tmp_path/"run", algo="er", evaluate="none"), say=len)


def test_a_lost_device_ends_the_run_with_its_reason(data, tmp_path, undisturbed, monkeypatch):
    "Any error is written down; the same command goes on from the last checkpoint."
    cfg, real = config(data, tmp_path/"run", algo="er", evaluate="none", save_every=2), job.Trainer.update

    def lost(self, ctx):
        if (ctx.t, ctx.step) == (1, 3): raise RuntimeError("CUDA error: an illegal memory access was encountered")
        real(self, ctx)
    with monkeypatch.context() as m:
        m.setattr(job.Trainer, "update", lost)
        with pytest.raises(RuntimeError, match="illegal memory access"): train_cl(cfg, say=len)
    assert RunFolder(cfg.run_dir).status == "failed" and "illegal memory access" in (Path(cfg.run_dir)/"failed.json").read_text()
    run = train_cl(cfg, say=len)
    assert run.status == "done" and not (run.path/"failed.json").exists()
    assert fingerprint(run.path) == undisturbed(algo="er", evaluate="none")


def test_no_space_inside_a_task_is_said_and_training_goes_on(data, tmp_path, undisturbed, monkeypatch):
    import clvla.run.checkpoint as c
    real, said = c.save_state, []

    def full(path, state):
        if state["at"]: raise OSError(28, "No space left on device")
        return real(path, state)
    monkeypatch.setattr(c, "save_state", full)
    run = train_cl(config(data, tmp_path/"run", algo="er", evaluate="none", save_every=2), said.append)
    assert sum("No space left" in s and "Training goes on" in s for s in said) == 2 and fingerprint(run.path) == undisturbed(algo="er", evaluate="none")


def test_other_data_are_noticed(data, tmp_path, monkeypatch):
    "A continued run that finds other demonstrations says so, and does not train on."
    cfg = config(data, tmp_path/"run", algo="er", evaluate="none", save_every=2)
    with monkeypatch.context() as m:
        crash_at(m, 1, 3)
        with pytest.raises(Crash): train_cl(cfg, say=len)
    real = job.make_processor

    def other(*a):
        p = real(*a); p.stats["action"]["mean"][0] += 1e-6
        return p
    monkeypatch.setattr(job, "make_processor", other)
    with pytest.raises(ValueError, match="not those that 001\\+000002-right was trained on"): train_cl(cfg, say=len)


def test_a_damaged_base_is_named_and_made_again(data, tmp_path, undisturbed, monkeypatch):
    kw = dict(algo="er", lora_rank=4, evaluate="none")
    cfg, said = config(copy_demos(data, tmp_path/"data"), tmp_path/"run", save_every=2, **kw), []
    with monkeypatch.context() as m:
        crash_at(m, 1, 3)
        with pytest.raises(Crash): train_cl(cfg, say=len)
    last = sorted((Path(cfg.run_dir)/"checkpoints").glob("0*"))[-1]
    base = Path(read_base(last)["path"]); assert base.parent == Path(cfg.data_dir)/"weights"
    bits = bytearray(base.read_bytes()); bits[-9] ^= 4; base.write_bytes(bits)
    train_cl(cfg, said.append)
    assert any("was damaged" in s for s in said) and fingerprint(cfg.run_dir) == undisturbed(**kw)


def test_a_moved_folder_goes_on_where_it_is_and_free_settings_arrive(data, tmp_path, undisturbed, monkeypatch):
    cfg = config(data, tmp_path/"run", algo="er", evaluate="none", save_every=2)
    with monkeypatch.context() as m:
        crash_at(m, 1, 3)
        with pytest.raises(Crash): train_cl(cfg, say=len)
    moved = Path(cfg.run_dir).rename(tmp_path/"moved")
    run = RunFolder(moved)
    assert run.begin(replace(run.cfg, keep=7, n_workers=3)) == "continued" and (run.cfg.keep, run.cfg.n_workers) == (7, 3)
    assert subprocess.run([sys.executable, "-m", "clvla.run", str(moved)], timeout=120).returncode == 0
    assert run.done and not (tmp_path/"run").exists() and fingerprint(moved) == undisturbed(algo="er", evaluate="none")


def test_a_second_process_is_refused(data, tmp_path):
    cfg = config(data, tmp_path/"run", algo="er", steps_per_task=3000, evaluate="none")
    p = child(cfg)
    wait_for(lambda: (Path(cfg.run_dir)/"log.jsonl").exists())
    with pytest.raises(ValueError, match=f"process {p.pid} on "): train_cl(cfg, say=len)
    second = child_of(cfg)
    assert second.returncode and f"process {p.pid} on " in second.stdout
    p.kill(); p.wait()
    assert RunFolder(cfg.run_dir).status == "interrupted"


def child_of(cfg):
    return subprocess.run([sys.executable, "-m", "clvla.run", cfg.run_dir], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)


def test_kills_at_random_moments(data, tmp_path):
    "The short form of tests/chaos.py: one kill after the first checkpoint, one at any time."
    references, rows = chaos(tmp_path/"chaos", kills=2, seed=int.from_bytes(os.urandom(4), "big"), parallel=2, demos=data, algos=("mir",))
    assert len(rows) == 2 and all(r["same"] and not r["left"] and r["victim"] != "none" for r in rows), rows


def test_generators_that_are_missing_are_named(tmp_path):
    "Of a process whose folder is not the shared one, or beside a checkpoint of fewer processes."
    from types import SimpleNamespace as NS
    from clvla.core.batch import global_rng_state
    from clvla.core.files import write_json
    from clvla.core.state import save_state
    from clvla.run.resume import load_into, write_checkpoint
    run, learner = RunFolder(tmp_path/"run"), NS(position=(1, None), stages=[NS(name="left")], documents=lambda records: {}, write=lambda folder: None, files=("state",))
    run.path.mkdir()
    write_json(run.path/"versions.json", {})
    save_state(run.path/"generators-0.safetensors", global_rng_state())
    cfg = TrainConfig()
    with pytest.raises(OSError, match="000-left could not be written: .*run has no generators-1.safetensors, which process 1 writes there.*all its machines share"):
        write_checkpoint(run, learner, cfg, dict(state={}), world=2)
    point = write_checkpoint(run, learner, cfg, dict(state={}))
    with pytest.raises(FileNotFoundError, match="000-left has no generators-1.safetensors, .*the run had fewer processes"): load_into(learner, point, rank=1)
