"LeRobot's diffusion families and X-VLA in the adapter: the contract, LeRobot's own loss, chunks, words and files, CLIP from a folder, and a run that is killed."
from copy import deepcopy

import pytest
import torch

pytest.importorskip("lerobot")
pytest.importorskip("diffusers")
from test_policies import LONG, SHORT, WRIST, make_batch
from test_resume import Crash, config, crash_at
from clvla.core.batch import take, torch_rng
from clvla.core.names import ACTION, IMAGE, PAD, PROMPT, STATE, at_place
from clvla.policies.all import build_policy, check_policy, load_policy, make_policy, policies
from clvla.policies.lerobot.adapter import load_lerobot, save_lerobot
from clvla.policies.lerobot.denoising import Phrase, tiny_clip_tokenizer, write_clip
from clvla.policies.lora import add_lora
from clvla.policies.weights import save_policy, stored_weights
from clvla.policies.vlm.pretrained import quiet
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint
from clvla.train.learner import train_cl

torch.set_num_threads(1)
NAMES = "lerobot-diffusion-tiny", "lerobot-multi-task-dit-tiny", "lerobot-xvla-tiny"
ALL = (*NAMES, "lerobot-smolvla-tiny")


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


@pytest.fixture(scope="module")
def made():
    "Each policy once. The transformer of a new multi-task policy is the identity and reads nothing, so its gates are opened."
    known = {}

    def get(name):
        if name not in known:
            known[name] = make_policy(name, 32)
            for k, p in known[name].named_parameters():
                if "adaLN" in k: torch.nn.init.normal_(p.data, std=.1, generator=torch_rng(0, k))
        return known[name]
    return get


def say(p, obs, **kw): return p.predict_chunk(obs, generator=torch_rng(1, "chunk"), **kw)
def draw(p, B=5, seed=0): return dict(zip(("noise", "time"), p.draw(B, torch_rng(seed, "draw"))))
def lengths(b): return b | {PROMPT: [SHORT, LONG, SHORT, LONG, "go"]}


@pytest.mark.parametrize("name", ALL)
def test_several_draws_are_one_loss(made, name):
    "MIR compares losses under several draws of the noise, joined."
    p, b = made(name), make_batch(3)
    draws = [draw(p, 3, seed) for seed in range(3)]
    joined = {k: torch.cat([d[k] for d in draws], 1) for k in draws[0]}
    with torch.no_grad():
        each, out = p(b, **joined, reduction="none")
        assert torch.allclose(each, torch.stack([p(b, **d, reduction="none")[0] for d in draws]).mean(0), atol=1e-5) and out["pred"].shape == (3, 3, 8, 4)


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_per_sample_and_blind_to_padding_and_neighbours(made, name):
    p, b = made(name), lengths(make_batch())
    drawn, state = draw(p), torch.get_rng_state()
    with torch.no_grad():
        each, out = p(b, **drawn, reduction="none")
        other = b[ACTION].masked_fill(b[PAD][..., None], 9.)
        assert torch.equal(p(b | {ACTION: other}, **drawn, reduction="none")[0], each) and torch.allclose(each.mean(), p(b, **drawn)[0])
        assert torch.equal(p.eval()(b, **drawn)[0], p.train()(b, **drawn)[0]) and torch.equal(torch.get_rng_state(), state)
        assert torch.allclose(out["pooled"], p.encode(b).pooled)
        noise = torch.stack([p.chunk_noise(torch_rng(i, "one")) for i in range(5)])
        chunk = p.predict_chunk(b, noise=noise)
        for i in (0, 4):
            one = take(b, [i])
            assert torch.allclose(p(one, **{k: v[[i]] for k, v in drawn.items()}, reduction="none")[0], each[[i]], atol=1e-5)
            assert torch.allclose(p.predict_chunk(one, noise=noise[[i]]), chunk[[i]], atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_are_repeatable_and_keep_nothing(made, name):
    p, b = made(name), make_batch(2)
    before = deepcopy(p.state_dict())
    p.train()
    first, three = say(p, b), say(p, b, n=3)
    torch.manual_seed(5)
    assert torch.equal(say(p, b), first) and three.shape == (2, 3, 8, 4) and p.training and p.net.training
    noise = torch.stack([p.chunk_noise(g) for g in [torch_rng(1, "chunk")] for _ in range(6)]).view(2, 3, 8, 4)
    for i in range(3): assert torch.allclose(p.predict_chunk(b, noise=noise[:, i]), three[:, i], atol=1e-4)
    assert all(torch.equal(v, before[k]) for k, v in p.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_it_reads_state_and_both_pictures_and_words_where_it_says_so(name):
    p, b = make_policy(name, {IMAGE: 32, WRIST: 32}), make_batch(2, cameras=(IMAGE, WRIST))
    for k, q in p.named_parameters():
        if "adaLN" in k: torch.nn.init.normal_(q.data, std=.1)
    changes = {STATE: b[STATE]+1, IMAGE: 255-b[IMAGE], WRIST: 255-b[WRIST]}
    moved = lambda k, v: (say(p, b | {k: v})-say(p, b)).abs().max()
    for k, v in changes.items(): assert moved(k, v) > 1e-4, k
    assert (moved(PROMPT, ["pull it"]*2) > 1e-4) == ("diffusion" not in name)


@pytest.mark.parametrize("name", NAMES)
def test_files_of_both_kinds_give_the_same_actions(made, name, tmp_path):
    p, b = made(name), make_batch()
    said = say(p, b)
    assert torch.equal(say(load_policy(save_policy(p, name, tmp_path/"ours")), b), said)
    with quiet(): theirs = at_place(p.policy_at).from_pretrained(save_lerobot(p, tmp_path/"theirs"), strict=True)
    torch.manual_seed(3)
    noise = torch.randn(5, 8, 4)
    torch.manual_seed(3)   # LeRobot's class draws the same
    assert torch.allclose(torch.stack([theirs.select_action(p.inputs(b)) for _ in range(8)], 1), p.predict_chunk(b, noise=noise), atol=1e-5)
    back = load_lerobot(make_policy(name, 32, seed=5), tmp_path/"theirs")
    assert torch.equal(say(back, b), said)


def test_words_are_lerobots_own():
    from lerobot.processor import TokenizerProcessorStep
    texts = [SHORT, LONG, "open"]
    step = TokenizerProcessorStep(tokenizer=tiny_clip_tokenizer(), max_length=77, padding="longest", padding_side="right")
    theirs, (ids, mask) = step._tokenize_text(texts), Phrase(tiny_clip_tokenizer()).fill(texts)
    assert torch.equal(theirs["input_ids"], ids) and torch.equal(theirs["attention_mask"].bool(), mask)
    with pytest.raises(ValueError, match="reads 75"): make_policy(NAMES[1], 32).check_prompts(["open a drawer "*30])


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_learns_and_adapters_leave_the_network_trained(made, name):
    p, b = deepcopy(made(name)), make_batch()
    loss, out = p(b, **draw(p))
    (loss+out["pooled"].mean()).backward()
    assert [k for k, q in p.named_parameters() if q.grad is None and "post_layernorm" not in k] == []   # CLIP's: behind what is read
    add_lora(p, 4, 16., True)
    assert torch.allclose(say(p, b), say(made(name), b), atol=1e-5)
    learns = {k for k, q in p.named_parameters() if q.requires_grad}
    assert any(".lora_" in k for k in learns) and all(".lora_" in k or k.startswith(p.head_names) for k in learns)
    with pytest.raises(ValueError, match="merge_lora"): save_lerobot(p, "nowhere")


def test_published_weights_are_read_left_where_they_are_and_the_text_encoder_is_frozen(tmp_path, monkeypatch):
    with quiet(): path = write_clip(tmp_path/"models/clip", 32)
    monkeypatch.setenv("CLVLA_MODELS", str(tmp_path/"models"))
    kw = dict(weights="clip", options=dict(hidden_dim=32, num_layers=1, num_heads=2))
    cfg = type("Cfg", (), dict(model="lerobot-multi-task-dit", model_kw=kw, image_size=48, chunk=8, head="diffusion", seed=0, lora_rank=0, lora_alpha=16., init_from=""))
    run, b = build_policy(cfg, 4, 4), make_batch(2, size=48)
    assert {k for k, q in run.named_parameters() if not q.requires_grad} == set(run.left) and all(k.startswith(run.words) for k in run.left) and run.left
    assert run.source["path"] == str(path) and not any(k in stored_weights(run) for k in run.left) and run.lr_of(1.) == {run.eye: .1}
    assert torch.equal(say(load_policy(save_policy(run, "lerobot-multi-task-dit", tmp_path/"run")), b), say(run, b))
    monkeypatch.setenv("CLVLA_MODELS", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path/"none"))
    with pytest.raises(ValueError, match="clvla-weights openai/clip-vit-base-patch16"): policies["lerobot-multi-task-dit"].check(image_size=48)


def test_a_killed_run_goes_on_to_the_bit(data, tmp_path, monkeypatch):
    "Replay on two tasks, cut off inside the second one and after a checkpoint."
    kw = dict(model=NAMES[1], head="diffusion", algo="er", steps_per_task=2, lr=1e-3, batch_size=4, evaluate="none", save_every=1)
    whole = train_cl(config(data, tmp_path/"whole", **kw), say=len)
    cfg = config(data, tmp_path/"killed", **kw)
    check_policy(cfg)
    with monkeypatch.context() as m:
        crash_at(m, 1, 2)
        with pytest.raises(Crash): train_cl(cfg, say=len)
    assert RunFolder(cfg.run_dir).status == "interrupted"
    assert fingerprint(train_cl(cfg, say=len).path) == fingerprint(whole.path)


@pytest.mark.parametrize("name", NAMES[:2])
def test_actions_that_the_sampler_would_cut_off_are_refused(name):
    "The sampler gives actions in [-1,1] alone: with mean_std a policy had never reached beyond one deviation."
    from types import SimpleNamespace
    run = lambda **kw: SimpleNamespace(**dict(model=name, model_kw={}, image_size=32, chunk=8, head="diffusion", action_norm="mean_std") | kw)
    policy, batch = make_policy(name, 32), make_batch(2)
    chunk = policy.predict_chunk(batch, noise=torch.full((2, policy.H, policy.noise_size), 50.))
    assert chunk.abs().max() <= 1
    with pytest.raises(ValueError, match="action_norm is 'mean_std'.*cut off.*'min_max'"): check_policy(run())
    check_policy(run(action_norm="min_max")); check_policy(run(action_norm=""))
    check_policy(run(model_kw=dict(options=dict(clip_sample=False))))
    assert policies[name].defaults["action_norm"] == "min_max"


def test_a_later_task_that_would_be_cut_off_is_named(tmp_path):
    "With stats='first' a later task's actions reach three times as far, and the sampler could not give them."
    import numpy as np
    from clvla.data.frames import write_store
    from clvla.data.streams import Stream, Task
    from clvla.train.config import TrainConfig
    from clvla.train.prepare import make_processor
    def store(name, a):
        action = np.linspace(-a, a, 30, dtype=np.float32).reshape(15, 2)
        return write_store(tmp_path/name, [{IMAGE: np.zeros((15, 8, 8, 3), np.uint8), STATE: action, ACTION: action, PROMPT: name}])
    stores, stream = dict(near=store("near", .3), wide=store("wide", 1.)), Stream("two", [Task("near", "near", "near"), Task("wide", "wide", "wide")])
    cfg = lambda **kw: TrainConfig(suite="x", run_dir=str(tmp_path/"run"), action_norm="min_max", state_norm="mean_std", **dict(stats="first", model=NAMES[0]) | kw)
    with pytest.raises(ValueError, match="'wide' reach 3.* times the range.*cut off.*stats='global'.*accept='range'"): make_processor(stream, stores, cfg())
    said = []
    make_processor(stream, stores, cfg(accept="range"), said.append)
    assert ["accepted (range)" in line for line in said] == [True]
    for kw in (dict(stats="global"), dict(model="tiny"), dict(model_kw=dict(options=dict(clip_sample=False)))): make_processor(stream, stores, cfg(**kw), said.append)
    assert len(said) == 1
