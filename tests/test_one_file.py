"A method against forgetting from one file, unchanged in imitation, in practice and in an agent: killed in the second task, and resumed to the same bits."
import os
import signal
import subprocess
import sys

import pytest

from test_practice import SMALL

from clvla.core.batch import rng_state, torch_rng
from clvla.core.names import Registry
from clvla.core.state import load_state
from clvla.run.all import configs
from clvla.run.checkpoint import checkpoints
from clvla.run.config import from_page, resolve_here
from clvla.run.folder import RunFolder
from clvla.run.plugins import keep_plugins
from clvla.run.resume import fingerprint
from clvla.run.shell import run_learner

MINE = '''
import os, signal, torch
from clvla.cl.all import algos
from clvla.cl.base import CLAlgorithm, flat
from clvla.core.batch import rng_state, set_rng_state, torch_rng

class Pulled(CLAlgorithm):
    "A pull of random strength to the mean of all weights that earlier tasks went through."
    same_params = True
    def __init__(self, pull:float=.1, seed:int=0):
        self.pull, self.generator, self.total, self.rest, self.n = pull, torch_rng(seed, "pulls"), None, None, 0

    def weights(self, ctx): return flat(ctx.params().values())

    def compute_penalty(self, ctx):
        if self.rest is None: return None
        return self.pull*torch.rand((), generator=self.generator)*(self.weights(ctx)-self.rest).square().sum()

    def after_step(self, ctx):
        theta = self.weights(ctx).detach().clone()
        self.total, self.n = theta if self.total is None else self.total+theta, self.n+1
        if os.environ.get("DIES_AT") == f"{ctx.t} {ctx.step}": os.kill(os.getpid(), signal.SIGKILL)

    def on_task_end(self, ctx): self.rest = self.total/self.n
    def state_dict(self): return dict(total=self.total, rest=self.rest, n=self.n, generator=rng_state(self.generator))
    def load_state_dict(self, state):
        self.total, self.rest, self.n = state["total"], state["rest"], state["n"]
        set_rng_state(self.generator, state["generator"])

algos["pulled"] = Pulled
'''
SHORT = dict(cl="pulled", pull=.5, save_every=1, threads=1, device="cpu")
PAGES = dict(   # what each page is given
    imitation=dict(SHORT, suite="dot_2", n_demos=2, steps_per_task=6, batch_size=8, warmup=1, image_size=32, n_workers=1, evaluate="none"),
    practice=dict(SMALL, **SHORT | dict(algo="best_of_n", algo_kw=dict(updates=3, sample=16), stream=True, evaluate="none", episodes=4, round_episodes=2)),
    agent=dict(SHORT, algo="ppo", suite=dict(base="dot_2", env=dict(discrete=True), name="two"), cycles=1, steps_per_task=128, eval_every=128, n_trials=1,
               image_size=8, algo_kw=dict(n_envs=2, horizon=16, hidden=8, channels=2)))


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    "The file; what it registers is taken out again, so that no other file's tests meet it."
    path, before = tmp_path_factory.mktemp("mine")/"pulled.py", len(Registry.added)
    path.write_text(MINE)
    yield path
    for _, registry, name in Registry.added[before:]: registry.pop(name, None)
    del Registry.added[before:]


def kept_by(state):
    "What the method wrote, wherever a learner puts it."
    return state if "rest" in state else next((found for v in state.values() if isinstance(v, dict) and (found := kept_by(v))), {})


@pytest.mark.parametrize("learner", PAGES)
def test_one_file_runs_killed_and_resumed_in_every_learner(shared_data, tmp_path, plugin, learner):
    def config(name):
        given = dict(PAGES[learner], plugins=[str(plugin)], run_dir=str(tmp_path/name), data_dir=str(shared_data))
        return resolve_here(from_page(configs[learner], given, set()))[0]
    whole = run_learner(config("whole"), say=len)
    killed = config("killed")
    RunFolder(killed.run_dir).begin(killed)   # as a page starts its run
    keep_plugins(killed)
    env = os.environ | dict(DIES_AT="1 2")
    assert subprocess.run([sys.executable, "-m", "clvla.run", killed.run_dir], env=env, capture_output=True, timeout=120).returncode == -signal.SIGKILL
    points = checkpoints(tmp_path/"killed/checkpoints")
    assert points and not (tmp_path/"killed/done.json").exists()
    assert fingerprint(run_learner(killed, say=len).path) == fingerprint(whole.path)
    last = checkpoints(whole.path/"checkpoints", ends=True)[-1]
    own = kept_by(load_state(last/f"{'state' if learner == 'agent' else 'algo'}.safetensors"))
    assert own["n"] > 2 and not own["generator"].equal(rng_state(torch_rng(whole.cfg.seed, "pulls")))   # it has pulled
