"A token that was learnt in another run: the right one, one of another policy, damaged ones, none; and a run that goes on with it."
import os
import random
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from chaos import wait_for
from clvla.core.files import read_json, write_json
from clvla.core.names import PROMPT, STATE
from clvla.policies.all import load_policy
from clvla.rl.config import PracticeConfig, resolve_practice
from clvla.rl.learner import Practice, practise
from clvla.rl.token_file import find_token, read_token, weights_hash
from clvla.run.checkpoint import checkpoints
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint
from test_practice import Crash, config, crash_after, done  # noqa: F401 -- a fixture: a run of cloning, which has no token

TD3 = dict(updates=3, token_updates=4, sample=8)


def last(run): return checkpoints(run.path/"checkpoints", ends=True)[-1]


def taking(data, home, token, **kw): return config(data, home, algo="token_td3", algo_kw=TD3 | dict(token=str(token)), **kw)


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


@pytest.fixture(scope="module")
def first(data, tmp_path_factory):
    return practise(config(data, tmp_path_factory.mktemp("first")/"run", algo="token_td3", algo_kw=TD3), say=len)


def test_it_is_used_and_recorded_and_resume_keeps_it(data, tmp_path, first):
    said = read_json(last(first)/"token.json")
    assert find_token(first.path) == last(first).resolve() and weights_hash(load_policy(last(first)).vla) == said["vla"]
    source = shutil.copytree(first.path, tmp_path/"first")
    run = practise(taking(data, tmp_path/"run", source), say=len)
    assert read_json(last(run)/"token.json") == read_json(run.path/"token/token.json") == said
    codecs = [load_policy(last(r)).codec.state_dict() for r in (first, run)]
    assert all(torch.equal(codecs[0][k], v) for k, v in codecs[1].items())
    for n in (1, 5):   # before there is a checkpoint, and behind one; the other run is gone by then
        with pytest.MonkeyPatch.context() as m:
            crash_after(m, n, algo="token_td3")
            with pytest.raises(Crash): practise(taking(data, tmp_path/f"crash{n}", source), say=len)
    cfgs = [taking(data, tmp_path/f"crash{n}", source) for n in (1, 5)]   # as the run's own config.json says
    shutil.rmtree(source)
    assert {fingerprint(practise(cfg, say=len).path) for cfg in cfgs} == {fingerprint(run.path)}
    codec = read_token(run.path)[1]["readout"]
    assert torch.equal(codec, codecs[0]["readout"])


def test_the_token_of_settings_that_were_replaced_is_not_taken(data, tmp_path, first, monkeypatch):
    "A run without results has a copy of its token; with another token in its settings it takes that one."
    other = practise(config(data, tmp_path/"other", algo="token_td3", algo_kw=TD3 | dict(token_updates=1), evaluate="none"), say=len)
    with monkeypatch.context() as m:
        m.setattr(Practice, "play_round", lambda self, stage: (_ for _ in ()).throw(Crash()))
        with pytest.raises(Crash): practise(taking(data, tmp_path/"run", first.path, evaluate="none"), say=len)
    assert (tmp_path/"run/token/token.json").is_file() and not RunFolder(tmp_path/"run").has_results
    run, sha = practise(taking(data, tmp_path/"run", other.path, evaluate="none"), say=len), lambda at: read_json(at/"token.json")["sha256"]
    assert sha(last(run)) == sha(last(other)) != sha(last(first)) and sha(run.path/"token") == sha(last(other))


def test_a_token_of_another_policy(data, tmp_path, first):
    with pytest.raises(ValueError) as e: practise(taking(data, tmp_path/"run", first.path, seed=1), say=len)
    own = weights_hash(load_policy(checkpoints(next((data/"bases").glob("dot_2-n2-u8-s1-*"))/"checkpoints", ends=True)[-1]))
    assert own[:12] in str(e.value) and read_json(last(first)/"token.json")["vla"][:12] in str(e.value)
    assert not (tmp_path/"run/practice").exists() and not (tmp_path/"run/token").exists()


@pytest.mark.parametrize("harm, says", [("cut", "cut off"), ("changed", "token.json says"), ("none", "no token.json"), ("nowhere", "no such folder"),
                                        ("config", "take the file that the run wrote")])
def test_a_token_that_cannot_be_taken(data, tmp_path, first, done, harm, says):  # noqa: F811
    source = tmp_path/"source"
    if harm != "nowhere": shutil.copytree(last(first), source)
    file = source/"weights.safetensors"
    if harm == "cut": file.write_bytes(file.read_bytes()[:-100])
    if harm == "changed": file.write_bytes(file.read_bytes()[:-100]+bytes(100))
    if harm == "none": source = done.path
    if harm == "config": write_json(source/"token.json", read_json(source/"token.json") | dict(config=dict(widht=4)))
    with pytest.raises(ValueError, match=says): practise(taking(data, tmp_path/"run", source), say=len)
    assert not (tmp_path/"run/practice").exists()


def test_a_token_that_nothing_reads(data, tmp_path, first):
    with pytest.raises(ValueError, match="set reads to 'token'"):
        practise(config(data, tmp_path/"run", algo="best_of_n", algo_kw=dict(updates=2, token=str(first.path))), say=len)


def test_best_of_n_takes_it_too(data, tmp_path, first):
    kw = dict(updates=2, token=str(first.path), reads="token", N=2, sample=8)
    run = practise(config(data, tmp_path/"run", algo="best_of_n", algo_kw=kw), say=len)
    assert read_json(last(run)/"token.json") == read_json(last(first)/"token.json")



def test_a_policy_with_action_queries(data, tmp_path):
    "The method is token_td3 and the token reads the queries and nothing else, without being told; killed in a round and in an update, the run ends the same."
    cfg = lambda home: resolve_practice(PracticeConfig(model="qwenoft-tiny", suite="dot_2", smoke=True, image_size=32, n_workers=1,
                                                       threads=1, data_dir=str(data), run_dir=str(home)))
    run = practise(cfg(tmp_path/"run"), say=len)
    policy = load_policy(last(run))
    assert run.cfg.algo == "token_td3" and policy.config["token"] == "query" and policy.vla.head.H == 8
    ctx = policy.vla.encode(policy.vla.prepare(observation(policy)), tokens=True)
    rows, mask = policy.codec.rows(ctx)
    assert rows.shape[1] == 8 < ctx.tokens.shape[1] and torch.equal(rows, ctx.tokens[:, ctx.spans["queries"]]) and mask.all()
    for moment in ("episodes.jsonl", "practice/round-000.safetensors"):
        home = tmp_path/moment[:5]
        RunFolder(str(home)).begin(cfg(home))
        child = subprocess.Popen([sys.executable, "-m", "clvla.run", str(home)], env=os.environ | dict(OMP_NUM_THREADS="1"))
        try:
            wait_for(lambda: (home/moment).exists() or child.poll() is not None)
            try: child.wait(random.random()*.3)
            except subprocess.TimeoutExpired: pass
            child.send_signal(signal.SIGKILL)
        finally: child.wait()
        assert fingerprint(practise(cfg(home), say=len).path) == fingerprint(run.path)


def observation(policy):
    pictures = {k: torch.zeros(1, 3, h, h, dtype=torch.uint8) for k, h in policy.pixels.items()}
    return pictures | {STATE: torch.zeros(1, policy.vla.config["state_dim"]), PROMPT: ["move the dot"]}
