"""Kill runs of practice once each, finish them, and compare what they computed; the page benchmarks/practice_kills shows it.

    python tests/practice_kills.py --kills 20 --out rows.jsonl

Each run is a fork of this process, so that it begins at once; a SIGKILL at a random moment ends it, and another fork finishes it.
"""
import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np

from clvla.core.records import append_jsonl
from clvla.rl.config import PracticeConfig, resolve_practice
from clvla.rl.learner import practise
from clvla.run.checkpoint import checkpoints
from clvla.run.resume import fingerprint

SMALL = dict(suite="dot_2", algo="cloning", n_demos=2, steps_per_task=8, episodes=6, round_episodes=3, n_trials=2, rows_per_task=2, n_workers=1, threads=1, warmup=1,
             batch_size=8, image_size=32, stride=2, save_every=3, algo_kw=dict(updates=5))
KINDS = dict(together={}, stream_er=dict(stream=True, cl="er"), stream_ewc=dict(stream=True, cl="ewc", cl_kw=dict(n_batches=2)),
             token_td3=dict(algo="token_td3", algo_kw=dict(updates=5, token_updates=4, sample=8)))


def start(cfg):
    "A process that practises; its number."
    pid = os.fork()
    if pid: return pid
    try: practise(cfg, say=len)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ended(pid):
    "Exit code of a process, None while it runs."
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def finish(cfg):
    "Wait for a process that goes on with a run; its fingerprint, and the seconds after its first checkpoint."
    pid, first = start(cfg), None
    while (code := ended(pid)) is None:
        if first is None and points(cfg): first = time.monotonic()
        time.sleep(.01)
    assert code == 0, f"the run that goes on ended with code {code}"
    return fingerprint(cfg.run_dir), time.monotonic()-(first or time.monotonic())


def points(cfg):
    "Checkpoints of a run, the newest last."
    folder = Path(cfg.run_dir)/"checkpoints"
    return sorted(checkpoints(folder), key=lambda p: p.stat().st_mtime) if folder.exists() else []


def killed(cfg, seconds, late):
    "Start a run and kill it after some seconds, of a late one after its first checkpoint; False when it had ended."
    pid = start(cfg)
    while late and not points(cfg): time.sleep(.005)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)   # one that has ended waits for its parent, and takes the signal
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def one(k, kind, config, whole, seconds, rng):
    "A run that is killed once; what there is to say about it. Four of eight are killed late."
    late = k%8 >= 4
    longest = seconds[late]
    for attempt in range(20):
        cfg = config(f"{k}-{attempt}", **KINDS[kind])
        share = rng.uniform(0, .95)
        if killed(cfg, share*longest, late): break
        longest *= .8
    newest, rounds = points(cfg), len(list((Path(cfg.run_dir)/"practice").glob("*.safetensors")))
    found, _ = finish(cfg)
    return dict(run=k, kind=kind, late=late, rounds=rounds, went_on_from=newest[-1].name if newest else "", same=found == whole, fingerprint=found[:16])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--kills", type=int, default=20)
    p.add_argument("--out", required=True)
    args, home, rng = p.parse_args(), Path(tempfile.mkdtemp()), np.random.default_rng(0)

    def config(name, **kw): return resolve_practice(PracticeConfig(data_dir=str(home/"data"), run_dir=str(home/name), **(SMALL | kw)))
    for kind in KINDS: finish(config(f"first-{kind}", **KINDS[kind]))   # bases and demonstrations
    whole, seconds = {}, {}
    for kind in KINDS:
        began = time.monotonic()
        whole[kind], after = finish(config(f"whole-{kind}", **KINDS[kind]))
        seconds[kind] = (time.monotonic()-began, after)   # of the whole run; after its first checkpoint
    for k in range(args.kills):
        kind = list(KINDS)[k%len(KINDS)]
        append_jsonl(args.out, one(k, kind, config, whole[kind], seconds[kind], rng))


if __name__ == "__main__": sys.exit(main())
