"The token's encoder and the policy learn on: gradients arrive, what is stored is made anew, the checkpoint holds it, and a crash changes nothing."
import pytest
import torch

from clvla.core.files import read_json
from clvla.policies.all import load_policy
from clvla.rl.config import base_config
from clvla.rl.learner import practise
from clvla.rl.token_file import weights_hash
from clvla.rl.token_td3 import TokenTD3
from clvla.run.checkpoint import checkpoints
from clvla.run.resume import fingerprint
from clvla.train.checkpoint_eval import eval_cl
from clvla.train.eval_config import EvalConfig
from test_practice import Crash, config, crash_after

FEW = dict(updates=3, token_updates=4, sample=8, tune_updates=3, tune_sample=8)
CASES = dict(encoder=dict(encoder_lr=1e-3), policy=dict(vla_lr=1e-3, recon=0.), both=dict(encoder_lr=1e-3, vla_lr=1e-3))


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


def tuned(data, home, kw, **more): return config(data, home, algo="token_td3", algo_kw=FEW | kw, **more)


@pytest.mark.parametrize("case", CASES)
def test_what_is_stored_is_of_the_network_that_is(data, tmp_path, monkeypatch, case):
    kept, finish = [], TokenTD3.finish
    monkeypatch.setattr(TokenTD3, "finish", lambda self: (kept.append(self), finish(self)))
    run = practise(tuned(data, tmp_path/"run", CASES[case]), say=len)
    method, = kept
    base, vla = (weights_hash(net) for net in (method.base, method.policy.vla))
    assert (vla != base) == ("vla_lr" in CASES[case])
    method.policy.codec.eval()
    first = [method.states(a["episode"])["x"] for a in method.attempts]
    assert torch.equal(torch.cat(first), method.replay.states["x"][:sum(map(len, first))]) and len(first) == 12
    point = checkpoints(run.path/"checkpoints", ends=True)[-1]
    stored = load_policy(point)
    assert weights_hash(stored.vla) == vla == read_json(point/"token.json")["vla"]
    assert stored.frozen == () if "vla_lr" in CASES[case] else stored.frozen
    tuning = [r for r in run.logs() if "tuning/td" in r]
    assert len(tuning) == 1 and tuning[0]["tuning/norm"] > 0 and (tuning[0]["tuning/vla"] > 0) == ("vla_lr" in CASES[case])
    facts = lambda records: {(r["task"], r["trial"]): (r["success"], r["steps"]) for r in records}
    out = eval_cl(EvalConfig(run_dir=str(run.path), n_trials=2, n_workers=1), say=len)
    assert facts(out.episodes()) == facts(r for r in run.episodes() if r["stage"] == 0)


@pytest.mark.parametrize("n", [3, 5])
def test_a_crash_changes_nothing(data, tmp_path, n):
    whole = practise(tuned(data, tmp_path/"run", CASES["both"]), say=len)
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, n, algo="token_td3")
        with pytest.raises(Crash): practise(tuned(data, tmp_path/"crash", CASES["both"], save_every=1), say=len)
    assert fingerprint(practise(tuned(data, tmp_path/"crash", CASES["both"], save_every=1), say=len).path) == fingerprint(whole.path)


def test_without_rates_nothing_else_learns(data, tmp_path):
    run = practise(tuned(data, tmp_path/"run", {}), say=len)
    policy = load_policy(checkpoints(run.path/"checkpoints", ends=True)[-1])
    base = load_policy(checkpoints(next((data/"bases").glob(base_config(run.cfg).run_dir.split("/")[-1]))/"checkpoints", ends=True)[-1])
    assert weights_hash(policy.vla) == weights_hash(base) and policy.frozen and not [r for r in run.logs() if "tuning/td" in r]
