"Rounds that are played while the method learns, and by two processes: no attempt is lost, and the numbers are those of one process."
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from chaos import wait_for
import practice_ranks
from practice_ranks import learn
from ranks_serve import pair
from test_practice import SMALL, TOKEN, Crash, config, crash_after
from clvla.core.config import config_json
from clvla.core.files import sha256
from clvla.core.state import load_state, save_state
from clvla.policies.all import load_policy
from clvla.rl.config import PracticeConfig
from clvla.rl.episodes import Recorder, load_episodes
from clvla.rl import learner
from clvla.rl.learner import Practice, practise
from clvla.run.checkpoint import checkpoints
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint
from clvla.run.stop import Stopped

AHEAD = dict(overlap=True, episodes=9)
FLOW = dict(algo="flow_ppo", algo_kw=dict(minibatch=7, epochs=2, trains="all"))


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


@pytest.fixture(scope="module")
def done(data, tmp_path_factory): return practise(config(data, tmp_path_factory.mktemp("ahead")/"run", **AHEAD), say=len)


@pytest.fixture(scope="module")
def one(data, tmp_path_factory): return practise(config(data, tmp_path_factory.mktemp("one")/"run"), say=len)


def rounds(run): return [sha256(p) for p in sorted((run.path/"practice").glob("round-*.safetensors"))]


def test_a_round_ahead_is_played_by_older_weights(data, tmp_path, done):
    "The first two rounds are played by the base and by the base's copy: the second one differs from the default's, and every attempt is there."
    plain = practise(config(data, tmp_path/"run", episodes=9), say=len)
    ours, theirs = rounds(done), rounds(plain)
    assert len(ours) == 3 and ours[0] == theirs[0] and ours[1] != theirs[1]
    starts = lambda run: [(e.task_id, e.trial, e.seed) for p in sorted((run.path/"practice").glob("*")) for e in load_episodes(p)]
    assert starts(done) == starts(plain) and len(starts(done)) == 18


@pytest.mark.parametrize("n, save_every", [(1, 0), (3, 2), (4, 0), (6, 1), (12, 3)])
def test_a_crash_while_a_round_is_ahead(data, tmp_path, done, n, save_every):
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, n)
        with pytest.raises(Crash): practise(config(data, tmp_path/"run", save_every=save_every, **AHEAD), say=len)
    assert fingerprint(practise(config(data, tmp_path/"run", save_every=save_every, **AHEAD), say=len).path) == fingerprint(done.path)


def test_a_stop_while_a_round_is_ahead(data, tmp_path, done):
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Stopped): practise(config(data, tmp_path/"run", **AHEAD), say=len)
    assert fingerprint(practise(config(data, tmp_path/"run", **AHEAD), say=len).path) == fingerprint(done.path)


def test_an_error_in_the_thread_ends_the_run(data, tmp_path):
    real, heard = Recorder.hear, iter(range(10_000))

    def hear(self, row, result):
        if next(heard) == 200: raise OSError("the simulator's disk is full")
        real(self, row, result)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(Recorder, "hear", hear)
        with pytest.raises(OSError, match="disk is full"): practise(config(data, tmp_path/"run", overlap=True, episodes=60, round_episodes=30), say=len)
    assert RunFolder(tmp_path/"run").status == "failed"


@pytest.mark.parametrize("moment", ["practice/round-000.safetensors", "practice/round-001.safetensors"])
def test_killed_with_a_round_ahead(data, tmp_path, done, moment):
    cfg = config(data, tmp_path/"run", save_every=1, **AHEAD)
    RunFolder(cfg.run_dir).begin(cfg)
    child = subprocess.Popen([sys.executable, "-m", "clvla.run", cfg.run_dir], env=os.environ | dict(OMP_NUM_THREADS="1"))
    try:
        wait_for(lambda: (tmp_path/"run"/moment).exists() or child.poll() is not None)
        time.sleep(random.random()*.3)
        child.send_signal(signal.SIGKILL)
    finally: child.wait()
    assert fingerprint(practise(cfg, say=len).path) == fingerprint(done.path)


def test_off_policy_with_a_frozen_policy(data, tmp_path):
    "An actor beside a frozen policy: the copy shares the frozen weights, and a crash changes nothing."
    kw = dict(algo="token_td3", algo_kw=TOKEN["token_td3"], **AHEAD)
    run = practise(config(data, tmp_path/"run", **kw), say=len)
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, 5, algo="token_td3")
        with pytest.raises(Crash): practise(config(data, tmp_path/"crash", save_every=1, **kw), say=len)
    assert fingerprint(practise(config(data, tmp_path/"crash", save_every=1, **kw), say=len).path) == fingerprint(run.path)


def test_a_round_ahead_that_goes_on_explores_in_all_processes(monkeypatch):
    "A process that does not learn knows only from the first one whether the method explores; a checkpoint's weights do not say it."
    class Plays(torch.nn.Linear):
        frozen, left, explore = (), (), False

    class Acts:
        fitted = False
        @property
        def acting(self):
            policy = Plays(2, 2)
            policy.explore = self.fitted
            return policy
    monkeypatch.setattr(learner, "send_acting", lambda acc, method: setattr(method, "fitted", True))
    seen, weights = [], Plays(2, 2).state_dict()
    parts = {"acc": None, "method": Acts(), "shell": None}
    run = SimpleNamespace(**parts, evaluator=SimpleNamespace(player_for=seen.append), play=lambda stage, r, policy, check: [])
    Practice.play_ahead(run, None, 1, weights)
    assert run.ahead.result() == [] and seen[0].explore and torch.equal(seen[0].weight, weights["weight"])


@pytest.mark.parametrize("kw, says", [(dict(algo="token_ppo", algo_kw={}, overlap=True), "leave overlap out"),
                                      (dict(algo="dsrl", algo_kw=dict(updates=1), overlap=True), "leave overlap out"),
                                      (dict(num_processes=2, machines="a,b"), "one machine"), (dict(num_processes=2, strategy="zero2"), "one machine")])
def test_refusals(data, tmp_path, kw, says):
    with pytest.raises(ValueError, match=says): practise(PracticeConfig(data_dir=str(data), run_dir=str(tmp_path/"run"), **(SMALL | kw)), say=len)


@pytest.fixture(scope="module")
def two(data, tmp_path_factory):
    "What two processes made of several jobs, and what one process made of the same."
    home, made, jobs, gen = tmp_path_factory.mktemp("two"), {}, [], torch.Generator().manual_seed(0)
    n = 33   # not a multiple of the minibatch, nor of the processes: the last minibatch has rows of one process alone
    noise = lambda *shape: torch.randn(*shape, generator=gen)
    shared = dict(x=noise(n, 6), ref=noise(n, 2, 2), action=noise(n, 2, 2), logp_old=noise(n))
    rollouts = dict(ppo=shared | dict(reward=noise(n), mask=torch.full((n,), .9), next_x=noise(n, 6), done=torch.arange(n)%11 == 10),
                    grpo=shared | dict(episode=torch.arange(n)//11, ret=torch.tensor([0., 1., 1.]), group=torch.tensor([0, 0, 0])))
    rollouts["ppo"]["mask"][10::11] = 0
    for name, rollout in rollouts.items():
        path = save_state(home/f"{name}.safetensors", rollout)
        for accumulation in (1, 2):
            key = f"{name}-{accumulation}"
            learn(name, path, home/f"{key}-one.safetensors")
            jobs.append({"learn": name, "rollout": str(path), "to": str(home/f"{key}-two.safetensors"), "accumulation": accumulation})
            made[key] = [home/f"{key}-one.safetensors", home/f"{key}-two.safetensors"]
    runs = dict(cloning={}, ahead=dict(AHEAD), token_ppo=dict(algo="token_ppo", algo_kw=TOKEN["token_ppo"]), flow_ppo=FLOW, crash={})
    for name, kw in runs.items():
        cfg = config_json(config(data, home/name, num_processes=2, **kw))
        if name == "crash": jobs.append(cfg | dict(lost_at=2))
        jobs.append(cfg)
        made[name] = RunFolder(cfg["run_dir"])
    pair(jobs, home, script=practice_ranks.__file__)
    return made


@pytest.mark.parametrize("name", ["ppo-1", "ppo-2", "grpo-1", "grpo-2"])
def test_gradients_of_two_processes_are_those_of_one(two, name):
    one, both = (load_state(p) for p in two[name])
    gap = max((a-b).abs().max().item() for net in one["state"]["nets"] for a, b in
              zip(one["state"]["nets"][net].values(), both["state"]["nets"][net].values()))
    assert 0 <= gap < 1e-5, gap
    for a, b in zip(one["metrics"], both["metrics"]): assert a.keys() == b.keys() and all(abs(a[k]-b[k]) < 1e-3*(1+abs(a[k])) for k in a)


def facts(run): return sorted((e["stage"], e["task"], e["trial"], e["success"], e["steps"]) for e in run.episodes())


def test_two_processes_practise_as_one(two, one):
    "Each plays its half, one learns: the rounds' files, the weights and the evaluation are those of one process, to the bit."
    assert rounds(two["cloning"]) == rounds(one) and facts(two["cloning"]) == facts(one)
    assert not list(two["cloning"].path.glob("practice/part-*")) and not list(two["cloning"].path.glob("episodes-*"))
    weights = lambda run: [sha256(p) for p in sorted(run.path.glob("checkpoints/*/weights.safetensors"))]
    assert weights(two["cloning"]) == weights(one)


def test_two_processes_that_were_cut_off(two, one): assert fingerprint(two["crash"].path) == fingerprint(two["cloning"].path)
def test_two_processes_with_a_round_ahead(two, done): assert rounds(two["ahead"]) == rounds(done) and facts(two["ahead"]) == facts(done)


def test_ppo_in_two_processes(data, tmp_path, two):
    "Both learn: the rounds are those of one process up to rounding, which the first two rounds do not see."
    run = practise(config(data, tmp_path/"run", algo="token_ppo", algo_kw=TOKEN["token_ppo"]), say=len)
    assert rounds(run) == rounds(two["token_ppo"])
    logs = [[l for l in r.logs() if "rl/loss" in l] for r in (run, two["token_ppo"])]
    assert len(logs[0]) == len(logs[1]) > 0
    for a, b in zip(*logs): assert all(abs(a[k]-b[k]) < 1e-3*(1+abs(a[k])) for k in a if k.startswith("rl/"))


def test_a_trunk_learns_in_two_processes(data, tmp_path, two):
    "The first round and its update are those of one process up to rounding; the second round is played by a whole policy that moved."
    run, both = practise(config(data, tmp_path/"run", **FLOW), say=len), two["flow_ppo"]
    assert rounds(run)[0] == rounds(both)[0]
    a, b = ([l for l in r.logs() if "rl/loss" in l][0] for r in (run, both))
    assert all(abs(a[k]-b[k]) < 1e-3*(1+abs(a[k])) for k in a if k.startswith("rl/")) and a["rl/grad_norm/trunk"] > 0
    policies = [load_policy(checkpoints(r.path/"checkpoints")[0]).state_dict() for r in (run, both)]
    assert all((p-q).abs().max() < 1e-3 for p, q in zip(*(list(s.values()) for s in policies)))
