"""Two processes that practise, or that learn together: `python -m torch.distributed.run ... practice_ranks.py JOBS.json`.

A job is the settings of a run of practice, or `learn` with a rollout's file, the method's name, and where its weights go.
"""
import json
import sys
from pathlib import Path

import torch

from clvla.core.batch import first_weights
from clvla.core.state import load_state, save_state
from clvla.rl.actor import Actor, Value
from clvla.rl.config import PracticeConfig
from clvla.rl.grpo import GRPO
from clvla.rl.learner import Practice, practise
from clvla.rl.ppo import PPO
from ranks_serve import Lost


def learner(name, **kw):
    with first_weights(3, "test"): actor, value = Actor(X=6, C=2, A=2, hidden=16, std=.3), Value(6, 16)
    return PPO(actor, value, minibatch=7, epochs=3, kl_stop=None, **kw) if name == "ppo" else GRPO(actor, minibatch=7, epochs=3, kl_stop=None, **kw)


def learn(name, rollout, to, part=(0, 1), accumulation=1):
    "Two updates on a stored rollout; weights and metrics are stored by the first process."
    method, rollout = learner(name, accumulation=accumulation, max_drift=None), load_state(rollout)
    method.part = part
    metrics = [method.update(rollout) for _ in range(2)]
    if part[0] == 0: save_state(to, dict(state=method.state_dict(), metrics=metrics))


def practise_job(lost_at=None, **settings):
    "A run; `lost_at`: every process fails in that update, as in a power cut."
    real, count = Practice.note, iter(range(1, 100))

    def note(self, *args):
        real(self, *args)
        if next(count) == lost_at: raise Lost
    Practice.note = note
    try: practise(PracticeConfig(**settings), say=len)
    except Lost: torch.distributed.barrier()
    finally: Practice.note = real


def main(path):
    jobs = json.loads(Path(path).read_text())
    leave = torch.distributed.destroy_process_group
    if not torch.distributed.is_initialized(): torch.distributed.init_process_group("gloo")
    torch.distributed.destroy_process_group = torch.distributed.barrier
    rank = torch.distributed.get_rank()
    for job in jobs:
        if "learn" in job: learn(job["learn"], job["rollout"], job["to"], (rank, 2), job.get("accumulation", 1))
        else: practise_job(**job)
    torch.distributed.barrier()
    leave()


if __name__ == "__main__": main(sys.argv[1])
