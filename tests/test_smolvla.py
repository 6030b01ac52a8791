"SmolVLA in LeRobot's adapter: the contract, LeRobot's own loss, actions and words, files, published weights, refusals, and a run that is killed."
import importlib.util
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lerobot")
pytest.importorskip("transformers")
from test_policies import LONG, SHORT, WRIST, make_batch
from test_resume import Crash, config, crash_at
from clvla.cl.task_lora import TaskLoRA
from clvla.core.batch import take, torch_rng
from clvla.core.names import ACTION, IMAGE, PAD, PROMPT, STATE
from clvla.policies.all import build_policy, check_policy, load_policy, make_policy, policies
from clvla.policies.lerobot.adapter import load_lerobot, save_lerobot
from clvla.policies.lerobot.smolvla import SMOLVLM_TINY, Line, tiny_smol_tokenizer, write_vlm
from clvla.policies.lora import add_lora
from clvla.policies.weights import save_base, save_policy, stored_weights
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint
from clvla.train.learner import train_cl

torch.set_num_threads(1)
NAME = "lerobot-smolvla-tiny"


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


@pytest.fixture(scope="module")
def smol(): return make_policy(NAME, 32)


def say(p, obs, **kw): return p.predict_chunk(obs, generator=torch_rng(1, "chunk"), **kw)
def draw(p, B=5, seed=0): return dict(zip(("noise", "time"), p.draw(B, torch_rng(seed, "draw"))))


# --- the contract
def test_losses_are_per_sample_repeatable_and_blind_to_padding(smol):
    b, drawn = make_batch(), draw(smol)
    each, out = smol(b, **drawn, reduction="none")
    assert torch.equal(each, smol(b, **drawn, reduction="none")[0]) and torch.allclose(each.mean(), smol(b, **drawn)[0])
    assert out["pred"].shape == (5, 1, 8, 4) and torch.allclose(out["pooled"], smol.encode(b).pooled, atol=1e-5)
    other = b[ACTION].clone()
    other[b[PAD]] = 9.
    assert torch.equal(smol(b | {ACTION: other}, **drawn, reduction="none")[0], each)
    state = torch.get_rng_state()
    assert torch.equal(smol.eval()(b, **drawn)[0], smol.train()(b, **drawn)[0]) and torch.equal(torch.get_rng_state(), state)


def test_a_sample_alone_is_the_same_as_in_a_padded_batch(smol):
    b, drawn = make_batch() | {PROMPT: [SHORT, LONG, SHORT, LONG, "go"]}, draw(smol)
    each, _ = smol(b, **drawn, reduction="none")
    all_, noise = smol.encode(b), torch.stack([smol.chunk_noise(torch_rng(i, "one")) for i in range(5)])
    chunk = smol.predict_chunk(b, noise=noise)
    for i in (0, 4):
        one = take(b, [i])
        ctx = smol.encode(one)
        assert torch.allclose(smol(one, **{k: v[[i]] for k, v in drawn.items()}, reduction="none")[0], each[[i]], atol=1e-5)
        assert torch.allclose(ctx.tokens[0][ctx.mask[0]], all_.tokens[i][all_.mask[i]], atol=1e-5)
        assert torch.allclose(smol.predict_chunk(one, noise=noise[[i]]), chunk[[i]], atol=1e-5)


def test_chunks_are_repeatable_keep_nothing_and_leave_the_mode(smol):
    b, before = make_batch(2), deepcopy(smol.state_dict())
    smol.train()
    first = say(smol, b)
    three = say(smol, b, n=3)
    assert torch.equal(say(smol, b), first) and three.shape == (2, 3, 8, 4)
    noise = torch.stack([smol.chunk_noise(g) for g in [torch_rng(1, "chunk")] for _ in range(6)]).view(2, 3, 8, 16)
    for i in range(3): assert torch.allclose(smol.predict_chunk(b, noise=noise[:, i]), three[:, i], atol=1e-5)
    assert smol.training and smol.net.training and all(torch.equal(v, before[k]) for k, v in smol.state_dict().items())


def test_it_reads_words_state_and_both_pictures():
    p, b = make_policy(NAME, {IMAGE: 32, WRIST: 48}), make_batch(2)
    b[WRIST] = make_batch(2, size=48, seed=1)[IMAGE]
    chunk, ctx = say(p, b), p.encode(b)
    changes = {PROMPT: ["pull it"]*2, STATE: b[STATE]+1, IMAGE: 255-b[IMAGE], WRIST: 255-b[WRIST]}
    for k, v in changes.items(): assert (say(p, b | {k: v})-chunk).abs().max() > 1e-4, k
    assert list(ctx.spans) == ["image.front", "image.wrist", "words", "state"] and ctx.spans["image.wrist"] == slice(9, 18)
    assert ctx.spans["state"].stop == ctx.tokens.shape[1] == ctx.mask.shape[1] and ctx.mask[:, ctx.spans["state"]].all()
    assert torch.equal(ctx.tokens[:, -1], ctx.pooled)


def test_weights_are_a_function_of_the_seed_and_almost_all_of_them_learn():
    a, b, c = (make_policy(NAME, 32, seed=s) for s in (3, 3, 4))
    assert all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())
    assert all(p.requires_grad for p in a.parameters()) and not torch.equal(a.net.model.state_proj.weight, c.net.model.state_proj.weight)
    loss, out = a(make_batch(), **draw(a))
    (loss+out["pooled"].mean()).backward()
    assert [k for k, p in a.named_parameters() if p.grad is None] == []
    assert not any("lm_head" in k for k, _ in a.named_parameters()) and any("lm_head" in k for k in a.state_dict())


# --- LeRobot's own answers, words and files
def test_losses_and_actions_are_lerobots_own(smol):
    b, drawn = make_batch(), draw(smol)
    theirs = deepcopy(smol.net)
    given = lambda: smol.inputs(b) | {ACTION: b[ACTION], PAD: b[PAD]}
    assert torch.allclose(theirs(given(), **{k: v[:, 0] for k, v in drawn.items()}, reduction="none")[0], smol(b, **drawn, reduction="none")[0], atol=1e-6)
    noise = torch.stack([smol.chunk_noise(torch_rng(i, "one")) for i in range(5)])
    assert torch.equal(theirs.predict_action_chunk(smol.inputs(b), noise=noise), smol.predict_chunk(b, noise=noise))
    t = smol.draw(4000, torch_rng(0, "time"))[1]
    torch.manual_seed(0)
    other = theirs.model.sample_time(4000, "cpu")
    for q in (.1, .5, .9): assert abs(t.quantile(q)-other.quantile(q)) < .03   # three standard errors and more


def test_words_are_lerobots_own():
    from lerobot.processor import NewLineTaskProcessorStep, TokenizerProcessorStep
    texts = [SHORT, LONG, "open\n"]
    lines = NewLineTaskProcessorStep().complementary_data(dict(task=list(texts)))["task"]
    step = TokenizerProcessorStep(tokenizer=tiny_smol_tokenizer(), max_length=48, padding="longest", padding_side="right")
    theirs = step._tokenize_text(lines)
    ids, mask = Line(tiny_smol_tokenizer()).fill(texts)
    assert torch.equal(theirs["input_ids"], ids) and torch.equal(theirs["attention_mask"].bool(), mask)


def test_files_of_both_kinds_give_the_same_actions(smol, tmp_path):
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
    b, said = make_batch(), say(smol, make_batch())
    assert torch.equal(say(load_policy(save_policy(smol, NAME, tmp_path/"ours")), b), said)
    theirs = SmolVLAPolicy.from_pretrained(save_lerobot(smol, tmp_path/"theirs"), strict=True)
    noise = torch.stack([smol.chunk_noise(g) for g in [torch_rng(1, "chunk")] for _ in range(5)])
    assert torch.equal(theirs.predict_action_chunk(smol.inputs(b), noise=noise), said)
    with torch.no_grad(): theirs.model.action_out_proj.bias += 1
    theirs.save_pretrained(tmp_path/"back")
    back = load_lerobot(make_policy(NAME, 48, seed=5, H=4), tmp_path/"back")   # no weight has the size of picture or chunk
    assert all(torch.equal(v, back.net.state_dict()[k]) for k, v in theirs.state_dict().items())
    with pytest.raises(ValueError, match="does not fit"): load_lerobot(make_policy(NAME, options=dict(max_state_dim=20)), tmp_path/"back")
    with pytest.raises(ValueError, match="type 'smolvla', this one is 'act'"): load_lerobot(make_policy("lerobot-act-tiny", 32), tmp_path/"back")


# --- adapters, published weights, refusals
def test_adapters_reach_the_language_model_and_the_expert_learns(smol, tmp_path):
    p, b = deepcopy(smol), make_batch()
    add_lora(p, 4, 16., True)
    assert torch.equal(say(p, b), say(smol, b))
    p(b, **draw(p))[0].backward()
    learns = {k for k, q in p.named_parameters() if q.requires_grad}
    assert any(".lm_expert." in k for k in learns) and not any(".lm_expert." in k and "lora" in k for k in learns)
    assert all(".lora_" in k or k.startswith(p.head_names) for k in learns)
    assert all(q.grad.any() for k, q in p.named_parameters() if ".lora_B." in k or k.startswith("net.model.action_"))
    with pytest.raises(ValueError, match="merge_lora"): save_lerobot(p, tmp_path)


def test_adapters_of_tasks_leave_the_expert_trained(smol):
    p = deepcopy(smol)
    TaskLoRA(4, trunk="pretrained").prepare(p, 0, SimpleNamespace(ids=["a", "b"]))
    learns = {k for k, q in p.named_parameters() if q.requires_grad}
    assert any(".A." in k for k in learns) and {k for k in learns if ".A." not in k and ".B." not in k} == {k for k, _ in smol.named_parameters() if k.startswith(p.head_names)}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    "A folder as the hub has it, at a tiny size and in bfloat16."
    from transformers import AutoConfig, SmolVLMForConditionalGeneration
    from clvla.policies.vlm.pretrained import quiet
    path = write_vlm(SMOLVLM_TINY, tmp_path_factory.mktemp("models")/"smol")
    with quiet():
        torch.manual_seed(0)
        model = SmolVLMForConditionalGeneration(AutoConfig.from_pretrained(path)).to(torch.bfloat16)
        model.save_pretrained(path)
    return path, model


def test_published_weights_are_read_left_where_they_are_and_frozen(published, tmp_path, monkeypatch):
    path, model = published
    monkeypatch.setenv("CLVLA_MODELS", str(path.parent))
    kw = dict(weights="smol", options=dict(num_vlm_layers=2, resize_imgs_with_padding=[32, 32]))
    p = make_policy("lerobot-smolvla", 48, **kw)
    vlm = p.net.model.vlm_with_expert.vlm
    kept = {k: v.float() for k, v in model.state_dict().items() if ".layers.2." not in k and ".layers.3." not in k or "vision" in k}
    assert set(vlm.state_dict()) == set(kept) and all(torch.equal(v, kept[k]) for k, v in vlm.state_dict().items())
    assert all(q.dtype == torch.float32 and q.requires_grad != k.startswith(p.vlm) for k, q in p.named_parameters())
    assert p.pretrained() == [p.vlm] and p.source["path"] == str(path) and p.shape.side == 16
    cfg = type("Cfg", (), dict(model="lerobot-smolvla", model_kw=kw, image_size=48, chunk=8, head="flow", seed=0, lora_rank=0, lora_alpha=16., init_from=""))
    run = build_policy(cfg, 4, 4)
    assert not any(k.startswith(run.vlm) for k in stored_weights(run)) and run.left
    again = load_policy(save_policy(run, "lerobot-smolvla", tmp_path/"run"))
    b = make_batch(2, size=48)
    assert torch.equal(say(again, b), say(run, b))
    cfg.lora_rank = 2
    small = build_policy(cfg, 4, 4)
    assert torch.equal(say(small, b), say(run, b)) and not any("vision_model" in k and ".lora_" in k for k in small.state_dict())


@pytest.mark.parametrize("kw,match", [
    (dict(head="l1"), "no head 'l1'"), (dict(image_size=16), "cannot take images of 16"), (dict(state_dim=17), "room for 16"),
    (dict(action_dim=17), "'max_action_dim': 17"), (dict(options=dict(num_step=3)), "did you mean 'num_steps'"),
    (dict(options="none"), "expected a dict"), (dict(options=dict(prefix_length=9)), "set by the adapter"),
    (dict(options=dict(resize_imgs_with_padding=[32, 48])), "multiple of 16 pixels twice"), (dict(weights="smol"), "leave out weights")])
def test_what_does_not_fit_is_refused_before_anything_is_built(kw, match):
    with pytest.raises(ValueError, match=match): policies[NAME].check(**kw)


def test_the_calls_refuse_what_does_not_fit(smol):
    b, drawn = make_batch(), draw(smol)
    with pytest.raises(ValueError, match="policy.draw"): smol(b)
    with pytest.raises(ValueError, match=r"policy.draw\(5\)"): smol(b, **draw(smol, 4))
    with pytest.raises(ValueError, match="'mean' or 'none'"): smol(b, **drawn, reduction="sum")
    with pytest.raises(ValueError, match=r"expected \(5, 8, 16\)"): smol.predict_chunk(b, noise=drawn["noise"])
    with pytest.raises(ValueError, match="reads 48"): smol.check_prompts([SHORT, "open a drawer "*30])
    with pytest.raises(ValueError, match="mark"): smol.prompt_length("open <image>")


@pytest.mark.parametrize("gone,says", [("num2words", "lerobot"), ("transformers", "vlm"), ("lerobot", "lerobot")])
def test_without_an_extra_the_door_says_what_to_install(gone, says, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == gone else real(name, *a))
    with pytest.raises(ImportError, match=rf"{gone} is not installed.*clvla\[{says}\]"): make_policy(NAME, 32)


def test_without_published_weights_the_door_says_how_to_fetch_them(tmp_path, monkeypatch):
    monkeypatch.setenv("CLVLA_MODELS", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path/"none"))
    with pytest.raises(ValueError, match="clvla-weights HuggingFaceTB/SmolVLM2-500M-Video-Instruct"): make_policy("lerobot-smolvla", 224)


# --- a run
def test_a_killed_run_goes_on_to_the_bit(data, tmp_path, monkeypatch):
    "Replay on two tasks, cut off inside the second one and after a checkpoint; one trial is played."
    kw = dict(model=NAME, head="flow", algo="er", steps_per_task=2, lr=1e-3, evaluate="lower", save_every=1)
    whole = train_cl(config(data, tmp_path/"whole", **kw), say=len)
    cfg = config(data, tmp_path/"killed", **kw)
    check_policy(cfg)
    with monkeypatch.context() as m:
        crash_at(m, 1, 2)
        with pytest.raises(Crash): train_cl(cfg, say=len)
    assert RunFolder(cfg.run_dir).status == "interrupted"
    again = train_cl(cfg, say=len)
    assert fingerprint(again.path) == fingerprint(whole.path) and whole.episodes()
