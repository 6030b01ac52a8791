"Filtered cloning of adapters or of the head alone: what is frozen stays the base's, is stored once, and goes on after a crash."
import pytest
import torch

from test_practice import SMALL, Crash, crash_after
from clvla.core.files import read_json
from clvla.policies.all import load_policy
from clvla.rl.config import PracticeConfig, base_config, resolve_practice
from clvla.rl.learner import practise
from clvla.run.checkpoint import checkpoints
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint
from clvla.train.checkpoint_eval import eval_cl
from clvla.train.eval_config import EvalConfig


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


def config(data, path, trains, **kw):
    return resolve_practice(PracticeConfig(data_dir=str(data), run_dir=str(path), **(SMALL | dict(algo_kw=dict(updates=4, trains=trains, rank=4)) | kw)))


@pytest.mark.parametrize("trains, more", [("lora", {}), ("head", dict(stream=True))])
def test_a_part_learns(data, tmp_path, trains, more):
    kw = dict(save_every=3) | more
    run = practise(config(data, tmp_path/"run", trains, **kw), say=len)
    point = checkpoints(run.path/"checkpoints", ends=True)[-1]
    base = load_policy(checkpoints(RunFolder(base_config(run.cfg).run_dir).path/"checkpoints", ends=True)[-1]).state_dict()
    after = {k.replace(".base_layer", ""): v for k, v in load_policy(point).state_dict().items()}
    changed = {k for k, v in base.items() if not torch.equal(v, after[k])}
    assert any(k.startswith("head.") for k in changed)
    if trains == "head": assert all(k.startswith("head.") for k in changed)
    else: assert any(".lora_B" in k and v.abs().max() > 0 for k, v in after.items())
    about = read_json(point/"policy.json")
    assert ("lora" in about) == (trains == "lora") and "base" in (about["lora"] if trains == "lora" else about)
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, 5)
        with pytest.raises(Crash): practise(config(data, tmp_path/"crash", trains, **kw), say=len)
    assert fingerprint(practise(config(data, tmp_path/"crash", trains, **kw), say=len).path) == fingerprint(run.path)
    out = eval_cl(EvalConfig(run_dir=str(run.path), n_trials=2, n_workers=1), say=len)
    facts = lambda r: {(e["stage"], e["task"], e["trial"]): (e["success"], e["steps"]) for e in r.episodes() if e["stage"] >= 0}
    assert facts(out) == facts(run)


def test_frozen_weights_are_the_bases(data, tmp_path):
    "Every weight outside head and adapters, to the bit."
    run = practise(config(data, tmp_path/"run", "lora", evaluate="none"), say=len)
    base = load_policy(checkpoints(RunFolder(base_config(run.cfg).run_dir).path/"checkpoints", ends=True)[-1])
    policy = load_policy(checkpoints(run.path/"checkpoints", ends=True)[-1])
    frozen = {k: v for k, v in policy.state_dict().items() if k in policy.frozen}
    assert frozen and all(torch.equal(v, base.state_dict()[k.replace(".base_layer", "")]) for k, v in frozen.items())


@pytest.mark.parametrize("kw, says", [(dict(algo_kw=dict(trains="heads")), "'head'"), (dict(algo_kw=dict(trains="lora"), lora_rank=2), "set trains to 'all'"),
                                      (dict(algo_kw=dict(trains="lora", rank=0)), "rank"), (dict(algo_kw=dict(trains="lora", rank=4096)), "larger than every layer")])
def test_what_cannot_learn_is_refused(data, tmp_path, kw, says):
    with pytest.raises(ValueError, match=says): practise(PracticeConfig(data_dir=str(data), run_dir=str(tmp_path/"run"), **(SMALL | kw)), say=len)
    assert not (tmp_path/"run/practice").exists()


def test_adapters_of_the_base_go_on_learning(data, tmp_path):
    "A base that was trained with adapters: practice trains them and no others."
    run = practise(config(data, tmp_path/"run", "all", lora_rank=4, evaluate="none"), say=len)
    policy = load_policy(checkpoints(run.path/"checkpoints", ends=True)[-1])
    assert policy.lora["rank"] == 4
    with pytest.raises(ValueError, match="has adapters"):
        practise(config(data, tmp_path/"more", "lora", init_from=str(checkpoints(run.path/"checkpoints", ends=True)[-1])), say=len)
