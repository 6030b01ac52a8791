"""Ranks that train several runs one after another: `python -m torch.distributed.run ... ranks_serve.py CONFIGS.json`.

Starting a launcher, two interpreters, torch and DeepSpeed takes longer than a small run. The runs of a list share them here;
each of them is a call of `train_cl` in every rank, as in a run of its own. A run that fails ends the list, unless its entry
says `lost_at`, a stage and an update after which every rank fails: the next entry of the same folder continues it.
"""
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from clvla.train.config import TrainConfig
from clvla.train.learner import train_cl
from clvla.train.trainer import Trainer


class Lost(Exception): pass


def train(lost_at=None, **settings):
    report = Trainer.report
    def fail(self, ctx, *args):
        report(self, ctx, *args)
        if [ctx.t, ctx.step] == lost_at: raise Lost
    Trainer.report = fail
    try: train_cl(TrainConfig(**settings), say=len)
    except Lost: torch.distributed.barrier()
    finally: Trainer.report = report


def pair(entries, folder, seconds=400, script=__file__):
    "Let two fresh processes do the `entries` of a script, one dict each, one after another; here: make or continue those runs."
    path = Path(folder)/"configs.json"
    path.write_text(json.dumps(entries))
    cmd = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script), str(path)]
    p = subprocess.Popen(cmd, env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try: out = p.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(p.pid, signal.SIGKILL)
        raise AssertionError("two processes hang:\n"+p.communicate()[0][-4000:]) from None
    assert p.returncode == 0, out[-6000:]


def main(path):
    leave = torch.distributed.destroy_process_group
    torch.distributed.destroy_process_group = torch.distributed.barrier   # the next run uses the same processes
    for settings in json.loads(Path(path).read_text()): train(**settings)
    leave()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed keeps gloo's threads alive, and on a busy machine they abort an interpreter that ends


if __name__ == "__main__": main(sys.argv[1])
