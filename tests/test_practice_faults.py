"Practice notices what goes wrong without an error: each fault is made to happen, and is named."
import copy
import shutil

import pytest
import torch

from test_practice import SMALL, TOKEN, Crash, crash_after
from clvla.core.names import IMAGE
from clvla.rl import episodes as recording
from clvla.rl.all import methods
from clvla.rl.cloning import Cloning
from clvla.rl.config import PracticeConfig, base_config, resolve_practice
from clvla.rl.episodes import load_episodes
from clvla.rl.faults import stuck
from clvla.rl.learner import practise
from clvla.rl.token_td3 import TokenTD3
from clvla.run.checkpoint import checkpoints
from clvla.run.folder import RunFolder


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


def config(data, path, **kw): return resolve_practice(PracticeConfig(data_dir=str(data), run_dir=str(path), **(SMALL | dict(evaluate="none") | kw)))


def failed(path):
    "The run says that it failed, and has kept no round."
    return RunFolder(path).status == "failed" and not list((path/"practice").glob("*.safetensors"))


def hanging(monkeypatch, tasks):
    "The camera shows the first picture of the round in all attempts at some tasks."
    real, first = recording._Open.close, {}

    def close(self, result):
        e = real(self, result)
        if e.task_id in tasks: e.obs[IMAGE][:] = first.setdefault("picture", e.obs[IMAGE][0].copy())
        return e
    monkeypatch.setattr(recording._Open, "close", close)


def test_a_camera_that_hangs_ends_the_run(data, tmp_path, monkeypatch):
    hanging(monkeypatch, ("left", "right"))
    with pytest.raises(RuntimeError, match="observation.images.front hung in . of 6 attempts, first at task 'left', trial 1000000"):
        practise(config(data, tmp_path/"run"), say=len)
    assert failed(tmp_path/"run")


def test_a_camera_that_hangs_in_some_attempts_is_named(data, tmp_path, monkeypatch):
    hanging(monkeypatch, ("left",))
    lines = []
    run = practise(config(data, tmp_path/"run"), lines.append)
    print(lines)
    assert run.done and sum("hung in" in line and "'left'" in line for line in lines) == 2


def test_a_healthy_run_says_nothing(data, tmp_path):
    lines = []
    run = practise(config(data, tmp_path/"run"), lines.append)
    assert not any("hung" in line or "bounds" in line for line in lines)
    assert not any(stuck(load_episodes(p)) for p in (run.path/"practice").glob("*.safetensors"))


class Loud(Cloning):
    "Plays every chunk a hundred times too large."
    @property
    def acting(self):
        view = copy.copy(self.policy)
        view.predict_chunk = lambda obs, **kw: 100*self.policy.predict_chunk(obs, **kw)
        return view


def test_actions_at_their_bounds_are_named(data, tmp_path):
    lines = []
    methods["loud"] = Loud
    try: practise(config(data, tmp_path/"run", algo="loud"), lines.append)
    finally: del methods["loud"]
    said = [line for line in lines if "beyond their bounds" in line]
    assert len(said) >= 2 and {"left", "right"} == {task for line in said for task in ("left", "right") if repr(task) in line}


def test_a_frozen_policy_that_changes_ends_the_run(data, tmp_path, monkeypatch):
    real = TokenTD3.update

    def update(self):
        with torch.no_grad(): next(self.policy.vla.parameters()).add_(1e-6)
        return real(self)
    monkeypatch.setattr(TokenTD3, "update", update)
    cfg = config(data, tmp_path/"run", algo="token_td3", algo_kw=TOKEN["token_td3"])
    with pytest.raises(RuntimeError, match="frozen weights of the policy changed while it practised"): practise(cfg, say=len)
    rounds = list((tmp_path/"run/practice").glob("*.safetensors"))
    assert RunFolder(tmp_path/"run").status == "failed" and len(rounds) == 1   # the second one was not kept


def test_a_frozen_policy_that_was_exchanged_before_a_run_goes_on(data, tmp_path):
    "init_from names another policy by now."
    other = practise(config(data, tmp_path/"other"), say=len)
    base = checkpoints(RunFolder(base_config(other.cfg).run_dir).path/"checkpoints", ends=True)[-1]
    shutil.copytree(base, tmp_path/"base")
    cfg = config(data, tmp_path/"run", algo="token_td3", algo_kw=TOKEN["token_td3"], init_from=str(tmp_path/"base"))
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, 4, algo="token_td3")
        with pytest.raises(Crash): practise(cfg, say=len)
    shutil.rmtree(tmp_path/"base")
    shutil.copytree(checkpoints(other.path/"checkpoints", ends=True)[-1], tmp_path/"base")
    with pytest.raises(ValueError, match="are not those of the checkpoint"): practise(cfg, say=len)


def test_a_critic_that_diverges_ends_the_run(data, tmp_path, monkeypatch):
    "With a learning rate that no critic survives."
    real = TokenTD3.prepare

    def prepare(self, ctx):
        real(self, ctx)
        self.td3.check_every = 1
        for group in self.td3.opt_critic.param_groups: group["lr"] = 10.
    monkeypatch.setattr(TokenTD3, "prepare", prepare)
    cfg = config(data, tmp_path/"run", algo="token_td3", algo_kw=TOKEN["token_td3"] | dict(updates=20))
    with pytest.raises(FloatingPointError, match="the critic diverges: mean"): practise(cfg, say=len)
    assert RunFolder(tmp_path/"run").status == "failed"


def test_a_loss_that_is_not_finite_ends_the_run(data, tmp_path, monkeypatch):
    real = Cloning.begin

    def begin(self):
        real(self)
        for group in self.opt.param_groups: group["peak"] = 1e30
    monkeypatch.setattr(Cloning, "begin", begin)
    with pytest.raises(FloatingPointError, match="at update . of practice; lower lr"): practise(config(data, tmp_path/"run"), say=len)
    assert RunFolder(tmp_path/"run").status == "failed"
