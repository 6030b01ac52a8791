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

SMALL = dict(suite="dot_2", n_demos=2, steps_per_task=8, episodes=6, round_episodes=3, n_trials=2, rows_per_task=2, n_workers=1, threads=1, warmup=1,
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


def finish(cfg):
    "Wait for a process that goes on with a run."
    code = os.waitstatus_to_exitcode(os.waitpid(start(cfg), 0)[1])
    assert code == 0, f"the run that goes on ended with code {code}"
    return fingerprint(cfg.run_dir)


def killed(cfg, seconds):
    "Start a run and kill it after some seconds; False when it had ended."
    pid = start(cfg)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)   # one that has ended waits for its parent, and takes the signal
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def one(k, kind, config, whole, seconds, rng):
    "A run that is killed once; what there is to say about it."
    for attempt in range(20):
        cfg = config(f"{k}-{attempt}", **KINDS[kind])
        share = rng.uniform(0, .95)
        if killed(cfg, share*seconds): break
        seconds *= .8
    folder = Path(cfg.run_dir)
    points = sorted(checkpoints(folder/"checkpoints"), key=lambda p: p.stat().st_mtime) if (folder/"checkpoints").exists() else []
    rounds = len(list((folder/"practice").glob("*.safetensors")))
    found = finish(cfg)
    return dict(run=k, kind=kind, share=round(share, 3), rounds=rounds, went_on_from=points[-1].name if points else "", same=found == whole, fingerprint=found[:16])


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
        whole[kind] = finish(config(f"whole-{kind}", **KINDS[kind]))
        seconds[kind] = time.monotonic()-began
    for k in range(args.kills):
        kind = list(KINDS)[k%len(KINDS)]
        append_jsonl(args.out, one(k, kind, config, whole[kind], seconds[kind], rng))


if __name__ == "__main__": sys.exit(main())
