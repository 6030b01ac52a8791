"LeRobot's policies in the adapter: the contract, LeRobot's own answers and files, refusals, and a run that is killed and goes on."
import importlib.util
from copy import deepcopy

import pytest
import torch

pytest.importorskip("lerobot")
from test_policies import LONG, SHORT, WRIST, make_batch
from test_resume import Crash, config, crash_at
from clvla.core.batch import take
from clvla.core.names import ACTION, IMAGE, PAD, PROMPT, STATE
from clvla.policies.all import check_policy, load_policy, make_policy
from clvla.policies.base import n_params
from clvla.policies.lerobot.adapter import load_lerobot, save_lerobot
from clvla.policies.lora import add_lora
from clvla.policies.weights import save_policy
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint
from clvla.train.learner import train_cl

torch.set_num_threads(1)
NAME = "lerobot-act-tiny"


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


@pytest.fixture(scope="module")
def act(): return make_policy(NAME, 32)


def test_losses_are_per_sample_repeatable_and_blind_to_padding(act):
    b = make_batch()
    each, out = act(b, reduction="none")
    assert torch.equal(each, act(b, reduction="none")[0]) and torch.allclose(each.mean(), act(b)[0])
    assert out["pred"].shape == (5, 8, 4) and torch.allclose(act(take(b, [4]), reduction="none")[0], each[4:], atol=1e-5)
    other = b[ACTION].clone()
    other[b[PAD]] = 9.
    assert torch.equal(act(b | {ACTION: other}, reduction="none")[0], each)
    assert torch.equal(act.eval()(b)[0], act.train()(b)[0])


def test_a_chunk_keeps_nothing_and_leaves_the_mode(act):
    b, before = make_batch(), deepcopy(act.state_dict())
    act.train()
    first = act.predict_chunk(b)
    act.predict_chunk(b | {STATE: b[STATE]+1})
    assert torch.equal(act.predict_chunk(b), first) and act.training and act.net.training
    assert all(torch.equal(v, before[k]) for k, v in act.state_dict().items())


def test_it_reads_state_and_both_pictures_and_no_word():
    p, b = make_policy(NAME, {IMAGE: 32, WRIST: 48}), make_batch()
    b[WRIST] = make_batch(size=48, seed=1)[IMAGE]
    moved = lambda **kw: (p.predict_chunk(b | kw.pop("change"))-p.predict_chunk(b)).abs().max()
    assert moved(change={PROMPT: [LONG, SHORT]*2+[SHORT]}) == 0
    for k in (IMAGE, WRIST): assert moved(change={k: 255-b[k]}) > 1e-4
    assert moved(change={STATE: b[STATE]+1}) > 1e-4
    spans = p.encode(b).spans
    assert list(spans) == ["latent", "state", "image.front", "image.wrist"] and spans["image.wrist"].stop == p.encode(b).tokens.shape[1]


def test_the_gradient_reaches_what_does_not_stand_behind_a_zero(act):
    "ACT's latent is zero without its variational encoder, and so is what its decoder begins with."
    p = deepcopy(act)
    p(make_batch())[0].backward()
    assert all(q.grad is not None for q in p.parameters())
    first = "net.model.decoder.layers.0."
    assert {k for k, q in p.named_parameters() if not q.grad.any()} <= {
        "net.model.encoder_latent_input_proj.weight", *(first+k for k in ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "norm1.weight"))}


def test_files_of_both_kinds_give_the_same_actions(act, tmp_path):
    from lerobot.policies.act.modeling_act import ACTPolicy
    b, said = make_batch(), act.predict_chunk(make_batch())
    assert torch.equal(load_policy(save_policy(act, NAME, tmp_path/"ours")).predict_chunk(b), said)
    theirs = ACTPolicy.from_pretrained(save_lerobot(act, tmp_path/"theirs"), strict=True)
    assert torch.equal(theirs.predict_action_chunk(act.inputs(b)), said)
    with torch.no_grad(): theirs.model.action_head.bias += 1
    theirs.save_pretrained(tmp_path/"back")
    back = load_lerobot(make_policy(NAME, 32, seed=5), tmp_path/"back")
    assert torch.equal(back.predict_chunk(b), theirs.predict_action_chunk(act.inputs(b))) and torch.allclose(back.predict_chunk(b), said+1)
    with pytest.raises(ValueError, match="does not fit"): load_lerobot(make_policy(NAME, 32, H=4), tmp_path/"back")
    with pytest.raises(ValueError, match="config.json is missing"): load_lerobot(back, tmp_path)


def test_adapters_and_their_refusal(act, tmp_path):
    p, b = deepcopy(act), make_batch()
    add_lora(p, 4, 16., True)
    assert torch.equal(p.predict_chunk(b), act.predict_chunk(b)) and n_params(p) < n_params(act)
    with pytest.raises(ValueError, match="merge_lora"): save_lerobot(p, tmp_path)


def test_without_the_extra_the_door_says_what_to_install(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "lerobot" else real(name, *a))
    with pytest.raises(ImportError, match=r"pip install 'clvla\[lerobot\]'"): make_policy(NAME, 32)


def test_a_killed_run_goes_on_to_the_bit(data, tmp_path, monkeypatch):
    "Replay on two tasks, cut off inside the second one and after a checkpoint; one trial is played."
    kw = dict(model=NAME, head="l1", algo="er", steps_per_task=2, lr=1e-4, evaluate="lower", save_every=1)
    whole = train_cl(config(data, tmp_path/"whole", **kw), say=len)
    cfg = config(data, tmp_path/"killed", **kw)
    check_policy(cfg)
    with monkeypatch.context() as m:
        crash_at(m, 1, 2)
        with pytest.raises(Crash): train_cl(cfg, say=len)
    assert RunFolder(cfg.run_dir).status == "interrupted"
    again = train_cl(cfg, say=len)
    assert fingerprint(again.path) == fingerprint(whole.path) and whole.episodes()
