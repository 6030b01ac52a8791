"""The families on stock vision-language models: what every policy promises, equality with the stock processor and positions, the
published sizes without their memory, adapters, and runs that go on after a crash."""
import json
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
from test_eyes import H as SQUARES_H, SIZE, batch as squares
from test_policies import LONG, SHORT, WRIST, loss_of, make_batch
from test_resume import FEW, Crash, config, crash_at
from clvla.cl.all import algos
from clvla.core import names
from clvla.core.batch import cat, take, torch_rng
from clvla.core.names import ACTION, IMAGE, PAD, PROMPT, STATE
from clvla.core.seeds import np_rng
from clvla.data.streams import Task
from clvla.eval.call import idle_row, predict_groups
from clvla.eval.rows import Row
from clvla.policies.all import build_policy, check_policy, head_for, load_policy, make_policy, policies
from clvla.policies.base import Context, n_params, param_groups
from clvla.policies.lora import add_lora, merge_lora
from clvla.policies.vlm.llamaoft import LLAMA_TINY, open_gates, tiny_llama_tokenizer
from clvla.policies.vlm.neurovla import NeuroHead, StateContext
from clvla.policies.vlm.oft import OFTHead
from clvla.policies.vlm.paligemmaoft import HALF, PALIGEMMA_TINY, tiny_gemma_tokenizer
from clvla.policies.vlm.qwen import QWEN_TINY, Chat, make_trunk, patches, tiny_tokenizer
from clvla.policies.vlm.qwengr00t import DiTHead
from clvla.policies.vlm.trunk import CLIP_MEAN, CLIP_STD, PATCHES, SPACE, camera_keys, join_pairs, normalise, word_merges
from clvla.policies.weights import save_base, save_policy
from clvla.run.checkpoint import checkpoints
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint
from clvla.train.config import TrainConfig, resolve
from clvla.train.learner import train_cl

torch.set_num_threads(1)
FAMILIES = {"qwenoft": "l1", "qwengr00t": "flow", "paligemmaoft": "l1", "llamaoft": "l1", "neurovla": "l1"}   # family -> its head
TINY = [f"{name}-tiny" for name in FAMILIES]
PICTURE = 3, 2   # tokens in a row of two pictures
MARK = {"qwen": "<|image_pad|>", "paligemma": "<image>", "llama": "<|image|>"}   # trunk -> a mark of its text


def trunk(name): return next((k for k in MARK if name.startswith(k)), "qwen")   # neurovla is on Qwen2.5-VL
def name_of(policy): return next(k for k in TINY if type(policy) is policies[k])


@pytest.fixture(params=TINY, scope="module")
def policy(request): return make_policy(request.param, 32)


def data(**kw): return make_batch(**kw) | {PROMPT: [(SHORT, LONG)[i%2] for i in range(kw.get("B", 5))]}
def chunk(policy, obs, seed=1): return policy.predict_chunk(obs, generator=torch_rng(seed, "vlm"))
def rows(x, i): return None if x is None else x[i]


# --- the contract
def test_shapes_losses_and_repeatability(policy):
    b = data()
    noise, time = policy.draw(5, torch_rng(0, "vlm"))
    loss, out = policy(b, noise=noise, time=time)
    each, _ = policy(b, noise=noise, time=time, reduction="none")
    assert loss.ndim == 0 and loss.dtype == torch.float32 and out["pred"].shape[-2:] == (8, 4)
    assert each.shape == (5,) and torch.allclose(each.mean(), loss)
    assert torch.equal(each, policy(b, noise=noise, time=time, reduction="none")[0])
    assert policy.needs_noise == (noise is not None) and chunk(policy, b).shape == (5, 8, 4)
    assert torch.equal(chunk(policy, b), chunk(policy, b))


def test_gradient_reaches_every_trained_leaf(policy):
    p = deepcopy(policy)
    loss_of(p, data(), torch_rng(0, "vlm"))[0].backward()
    assert [k for k, q in p.named_parameters() if q.grad is None or not q.grad.any()] == []


def test_a_sample_alone_equals_the_sample_in_a_padded_batch(policy):
    b = data()
    noise, time = policy.draw(5, torch_rng(0, "vlm"))
    each, _ = policy(b, noise=noise, time=time, reduction="none")
    full = policy.encode(b)
    for i in (0, 1, 4):
        one = take(b, [i])
        assert torch.allclose(policy(one, noise=rows(noise, [i]), time=rows(time, [i]), reduction="none")[0][0], each[i], atol=1e-5)
        seen = policy.encode(one)
        n = policy.prompt_length(b[PROMPT][i])
        for name, part in full.spans.items():
            there, here = full.tokens[i, part], seen.tokens[0, seen.spans[name]]
            assert torch.allclose(here[:n] if name == "words" else here, there[:n] if name == "words" else there, atol=1e-5), name
    assert torch.allclose(chunk(policy, b)[0], chunk(policy, take(b, [0]))[0], atol=1e-5)


def test_padding_is_never_looked_at(policy):
    "Whatever stands in the padded places."
    b = data(B=2)
    before, pad, table = chunk(policy, b), policy.chat.pad, policy.vlm.get_input_embeddings().weight
    kept = table[pad].clone()
    with torch.no_grad(): table[pad] = 50.
    try: after = chunk(policy, b)
    finally:
        with torch.no_grad(): table[pad] = kept
    assert torch.allclose(before, after, atol=1e-5)


def test_spans_tile_the_row_and_only_words_are_padded(policy):
    seen = policy.encode(data())
    assert [i for s in seen.spans.values() for i in range(s.start, s.stop)] == list(range(seen.tokens.shape[1]))
    words = seen.mask[:, seen.spans["words"]]
    assert words.sum(1).tolist() == [policy.prompt_length(p) for p in data()[PROMPT]]
    assert (~seen.mask).sum() == (~words).sum() > 0 and seen.pooled.shape == (5, 96)
    assert {"state", "words", "image.front"} <= seen.spans.keys()
    assert torch.equal(policy.encode(data(), tokens=True).pooled, seen.pooled)


@pytest.mark.parametrize("what", ["words", "state", "picture"])
def test_every_input_reaches_the_chunk(policy, what):
    b = data()
    other = b | {"words": {PROMPT: ["close a drawer"]*5}, "state": {STATE: b[STATE]+1}, "picture": {IMAGE: 255-b[IMAGE]}}[what]
    assert (chunk(policy, b)-chunk(policy, other)).abs().amax((1, 2)).min() > 1e-4


def test_padded_steps_do_not_count(policy):
    b = data()
    noise, time = policy.draw(5, torch_rng(0, "vlm"))
    far = b | {ACTION: b[ACTION].clone()}
    far[ACTION][-1, 3:] = 7.
    a, c = [policy(x, noise=noise, time=time, reduction="none")[0] for x in (b, far)]
    assert torch.equal(a[:4], c[:4]) and torch.allclose(a[4], c[4]) == (noise is None)   # a flow head sees padded steps


def test_bf16_autocast_is_finite(policy):
    p = deepcopy(policy)
    with torch.autocast("cpu", torch.bfloat16): loss, actions = loss_of(p, data())[0], chunk(p, data())
    loss.backward()
    assert loss.isfinite() and loss.dtype == actions.dtype == torch.float32
    assert all(q.grad.isfinite().all() for q in p.parameters())


def test_several_chunks_of_one_encoding():
    p, b, g = make_policy("qwengr00t-tiny", 32), data(B=3), torch_rng(0, "chunks")
    noise = torch.randn(3, 5, 8, 4, generator=g)
    each = torch.stack([p.predict_chunk(b, noise=noise[:, k]) for k in range(5)], 1)
    assert torch.allclose(p.predict_chunk(b, n=5, noise=noise), each, atol=1e-5)
    with pytest.raises(ValueError, match="one answer"): make_policy("qwenoft-tiny", 32).predict_chunk(b, n=2)


@pytest.mark.parametrize("change,match", [
    (lambda b: b | {IMAGE: torch.zeros(5, 3, 48, 48, dtype=torch.uint8)}, r"\(B,3,32,32\)"), (lambda b: b | {IMAGE: b[IMAGE].float()}, "uint8"),
    (lambda b: b | {STATE: torch.zeros(5, 39)}, r"built for \(B,4\)"), (lambda b: b | {ACTION: torch.zeros(5, 8, 7)}, r"built for \(B,8,4\)"),
    (lambda b: {k: v for k, v in b.items() if k != IMAGE}, "lacks")],
    ids=["image size", "image type", "state size", "action size", "no image"])
def test_a_batch_that_does_not_fit_is_named(policy, change, match):
    with pytest.raises(ValueError, match=match): policy(change(data()), **dict(zip(("noise", "time"), policy.draw(5))))


def test_a_mark_in_an_instruction_is_refused(policy):
    with pytest.raises(ValueError, match="a mark of the chat"): chunk(policy, data() | {PROMPT: ["a "+MARK[trunk(name_of(policy))]]*5})


def test_weights_are_a_function_of_the_seed():
    torch.manual_seed(1); a, x = make_policy("qwenoft-tiny", 32, seed=2), torch.rand(3)
    torch.manual_seed(1); y, b = torch.rand(3), make_policy("qwenoft-tiny", 32, seed=2)
    assert torch.equal(x, y) and all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.queries, make_policy("qwenoft-tiny", 32, seed=3).queries)


# trunk -> sizes of two cameras, and tokens of their pictures
CAMERAS = {"qwen": ({IMAGE: 48, WRIST: 32}, [9, 4]), "paligemma": ({IMAGE: 32, WRIST: 32}, [4, 4]), "llama": ({IMAGE: 32, WRIST: 32}, [1, 1])}


def test_two_cameras(policy):
    "Each sample's pictures are put together before the next one's; they differ in size where the model reads several sizes."
    name = name_of(policy)
    pixels, tokens = CAMERAS[trunk(name)]
    p = make_policy(name, pixels)
    b = make_batch(3, pixels[IMAGE]) | {WRIST: make_batch(3, pixels[WRIST], seed=1)[IMAGE]}
    assert camera_keys(pixels) == [IMAGE, WRIST] == list(p.pixels)
    sizes = {k: s.stop-s.start for k, s in p.encode(b).spans.items() if k.startswith("image")}
    assert sizes == {"image.front": tokens[0], "image.wrist": tokens[1]}
    assert torch.allclose(chunk(p, take(b, [0]))[0], chunk(p, b)[0], atol=1e-5)
    other = b | {WRIST: b[WRIST].clone()}
    other[WRIST][1] = 0
    moved = (chunk(p, b)-chunk(p, other)).abs().amax((1, 2))
    assert moved[1] > 1e-4 and moved[[0, 2]].max() < 1e-5


# --- equal to the stock model
def test_positions_are_those_of_get_rope_index():
    trunk, chat = make_trunk(QWEN_TINY), Chat(tiny_tokenizer(), dict(front=3, wrist=2), n_own=9)
    ids, mask, places = chat.rows([SHORT, LONG, "", "go"])
    grid = torch.tensor([[1, 2*n, 2*n] for n in PICTURE]*4)
    assert torch.equal(places, trunk.get_rope_index(ids, (ids == 5).int(), image_grid_thw=grid, attention_mask=mask)[0])


def test_patches_are_those_of_the_stock_image_processor():
    from transformers import Qwen2VLImageProcessor
    for size, p in ((48, 8), (224, 14)):
        images = torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8, generator=torch_rng(0, "images"))
        stock = Qwen2VLImageProcessor(patch_size=p, min_pixels=4*p*p)(list(images), return_tensors="pt")
        x = patches(images, p, 2).unsqueeze(3).expand(-1, -1, -1, 2, -1, -1).flatten(2).flatten(0, 1)
        assert torch.allclose(x, stock["pixel_values"], atol=1e-5) and stock["image_grid_thw"].tolist() == [[1, size//p, size//p]]*2


def qwen_inputs(b):
    "What the stock template, tokenizer and image processor make of a batch, padded on the left."
    from transformers import Qwen2VLImageProcessor
    tokenizer = tiny_tokenizer()
    pictures = Qwen2VLImageProcessor(patch_size=8, min_pixels=256)(list(b[IMAGE]), return_tensors="pt")
    turn = lambda text: [dict(role="user", content=[dict(type="image"), dict(type="text", text=text)])]
    texts = [tokenizer.apply_chat_template(turn(t), tokenize=False, add_generation_prompt=True) for t in b[PROMPT]]
    texts = [t.replace("<|image_pad|>", "<|image_pad|>"*4) for t in texts]
    said = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt", add_special_tokens=False)
    return dict(**said, **pictures, mm_token_type_ids=(said["input_ids"] == 5).int())


def paligemma_inputs(b):
    "What the stock processor makes of a batch, padded on the left."
    from transformers import PaliGemmaProcessor, SiglipImageProcessor
    h = b[IMAGE].shape[-1]
    stock = PaliGemmaProcessor(SiglipImageProcessor(size=dict(height=h, width=h), image_seq_length=(h//16)**2), deepcopy(tiny_gemma_tokenizer()))
    said = stock(images=[[x] for x in b[IMAGE]], text=["<image>"+text for text in b[PROMPT]], padding=True, return_tensors="pt")
    return {k: v for k, v in said.items() if k != "labels"}


def llama_inputs(b, tiles=1):
    "What the stock processor makes of a batch, padded on the left."
    from transformers import MllamaImageProcessor, MllamaProcessor
    h = b[IMAGE].shape[-1]
    pictures = MllamaImageProcessor(size=dict(height=h, width=h), max_image_tiles=tiles, image_mean=CLIP_MEAN, image_std=CLIP_STD)
    stock = MllamaProcessor(pictures, tiny_llama_tokenizer())
    return dict(stock(images=[[x] for x in b[IMAGE]], text=["<|image|>"+text for text in b[PROMPT]], padding=True, return_tensors="pt"))


INPUTS = {"qwen": qwen_inputs, "paligemma": paligemma_inputs, "llama": llama_inputs}


def same_rows(policy, b, said):
    "The policy's rows up to the state are those that the stock model makes of the stock processor's inputs."
    stock = policy.vlm(**said, use_cache=False).last_hidden_state
    seen = policy.encode(b)
    assert said["attention_mask"].sum(1).unique().numel() == len(b[PROMPT])   # there is padding
    for i in range(len(b[PROMPT])):
        there, here = stock[i, said["attention_mask"][i].bool()], seen.tokens[i, seen.mask[i]]
        assert torch.allclose(here[:len(there)], there, atol=1e-5)
        assert len(here) == len(there)+policy.chat.n_own


def test_the_turn_has_the_rows_of_the_stock_model_with_left_padding(policy):
    "Stock processor, padding and positions: the same rows up to the state."
    b = data(B=2)
    same_rows(policy, b, INPUTS[trunk(name_of(policy))](b))


def test_a_tower_with_places_for_four_tiles_gets_one_and_three_empty_ones():
    "As the published one has them."
    vision = {k: v for k, v in LLAMA_TINY.vision.items() if k != "supported_aspect_ratios"} | dict(max_num_tiles=4)
    torch.manual_seed(0)
    p = type("Tiles", (policies["llamaoft-tiny"],), dict(shape=replace(LLAMA_TINY, vision=vision)))(32, state_dim=4, action_dim=4)
    b = data(B=2)
    same_rows(p, b, llama_inputs(b, tiles=4))
    assert p.tiles(b)["pixel_values"].shape == (2, 1, 4, 3, 32, 32) and not p.tiles(b)["pixel_values"][:, :, 1:].any()


def test_two_pictures_are_seen_from_their_marks_on():
    "By the stock processor's rule, and with it the same rows."
    from transformers import MllamaImageProcessor, MllamaProcessor
    p, b = make_policy("llamaoft-tiny", {IMAGE: 32, WRIST: 32}), data(B=2) | {WRIST: make_batch(2, 32, seed=1)[IMAGE]}
    stock = MllamaProcessor(MllamaImageProcessor(size=dict(height=32, width=32), max_image_tiles=1, image_mean=CLIP_MEAN, image_std=CLIP_STD),
                            tiny_llama_tokenizer())
    pairs, texts = [[b[IMAGE][i], b[WRIST][i]] for i in range(2)], ["<|image|>"*2+text for text in b[PROMPT]]
    same_rows(p, b, dict(stock(images=pairs, text=texts, padding=True, return_tensors="pt")))
    moved = (p.encode(b | {WRIST: 255-b[WRIST]}).tokens-p.encode(b).tokens).abs().amax((0, 2))
    assert moved[0] == 0 and moved[1:].min() > 1e-5


def test_closed_gates_are_blind():
    "Which the stock class begins with, so the tiny size opens them."
    p, b = deepcopy(make_policy("llamaoft-tiny", 32)), data()
    open_gates(p.vlm, 0.)
    assert torch.equal(chunk(p, b), chunk(p, b | {IMAGE: 255-b[IMAGE]}))


def test_the_prefix_attends_both_ways_and_the_suffix_from_left_to_right():
    p, b = make_policy("paligemmaoft-tiny", 32), data(B=2)
    change = lambda other: (p.encode(b | other).tokens-p.encode(b).tokens).abs().amax((0, 2))
    spans = p.encode(b).spans
    words, state = change({PROMPT: [text.replace("drawer", "window") for text in b[PROMPT]]}), change({STATE: b[STATE]+1})
    assert words[spans["image.front"]].min() > 1e-4 and words[spans["queries"]].min() > 1e-4
    assert state[:spans["state"].start].max() == 0 and state[spans["state"].start:].min() > 1e-4
    kept = p.queries.data[3].clone()
    before = p.encode(b).tokens
    with torch.no_grad(): p.queries[3] += 1
    moved = (p.encode(b).tokens-before).abs().amax((0, 2))[spans["queries"]]
    assert moved[:3].max() == 0 and moved[3:].min() > 1e-4 and not torch.equal(kept, p.queries[3])


def test_words_are_scaled_once_and_pictures_not_at_all():
    "The text model's input: rows of the table times the root of the width; the projector's rows; the state's row."
    p, b, seen = make_policy("paligemmaoft-tiny", 32), data(B=2), {}
    keep = p.vlm.language_model.register_forward_pre_hook(lambda m, args, kw: seen.update(x=kw["inputs_embeds"]), with_kwargs=True)
    spans, ids = p.encode(b).spans, p.chat.rows(b[PROMPT])[0]
    keep.remove()
    table, tower = p.vlm.get_input_embeddings().weight, p.vlm.vision_tower(normalise(b[IMAGE], HALF, HALF)).last_hidden_state
    assert torch.allclose(seen["x"][:, spans["words"]], table[ids[:, spans["words"]]]*96**.5, atol=1e-5)
    assert torch.allclose(seen["x"][:, spans["image.front"]], p.vlm.multi_modal_projector(tower), atol=1e-5)
    assert torch.allclose(seen["x"][:, spans["state"].start], p.state(b[STATE]), atol=1e-5)


def test_values_are_those_of_the_stock_image_processors():
    from transformers import MllamaImageProcessor, SiglipImageProcessor
    for size in (48, 224):
        images = torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8, generator=torch_rng(0, "images"))
        stock = SiglipImageProcessor(size=dict(height=size, width=size))(list(images), return_tensors="pt")
        assert torch.allclose(normalise(images, HALF, HALF), stock["pixel_values"], atol=1e-5)
        tiles = MllamaImageProcessor(size=dict(height=size, width=size), max_image_tiles=4, image_mean=CLIP_MEAN, image_std=CLIP_STD)
        stock = tiles([[x] for x in images], return_tensors="pt")
        assert torch.allclose(normalise(images, CLIP_MEAN, CLIP_STD), stock["pixel_values"][:, 0, 0], atol=1e-5)
        assert stock["aspect_ratio_mask"].tolist() == [[[1, 0, 0, 0]]]*2 and stock["aspect_ratio_ids"].tolist() == [[1]]*2


def test_each_instruction_is_tokenised_once(monkeypatch):
    p, said = make_policy("qwenoft-tiny", 32), []
    real = p.chat.encode
    monkeypatch.setattr(p.chat, "encode", lambda text: said.append(text) or real(text))
    for _ in range(3): chunk(p, data())
    assert said == [SHORT, LONG] and deepcopy(p).chat is p.chat


def test_prepared_batches_give_the_same_to_the_bit(policy):
    b = policy.prepare(data())
    assert b[PATCHES+IMAGE].shape[0] == 5 and b[PATCHES+IMAGE][0].numel() == 3*32*32 and torch.equal(chunk(policy, b), chunk(policy, data()))
    mixed = take(cat(take(b, [3, 4]), take(b, [0])), [2, 0, 1])   # as replay puts batches together
    assert torch.equal(chunk(policy, mixed), chunk(policy, take(data(), [0, 3, 4])))


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer, tiny_gemma_tokenizer, tiny_llama_tokenizer])
def test_any_text_is_tokenised_and_no_word_is_lost(tokenizer):
    t = tokenizer()
    assert len(t) <= 1024 and [len(t.encode(form)) for form in ("drawer", " drawer", "a", " a")] == [1]*4
    for text in ("open the drawer", "Ouvre le tiroir \u00e0 gauche!", "\u6253\u5f00\u62bd\u5c49 42", "a\n\tb"): assert t.decode(t.encode(text)) == text


def test_words_are_joined_from_their_letters():
    merges = word_merges(["to", "top", "stop"])
    assert [join_pairs(list(w), merges) for w in ("stop", "tops", "Xtop", SPACE+"top")] == [["stop"], ["top", "s"], ["X", "top"], [SPACE+"top"]]
    assert tiny_tokenizer().convert_tokens_to_ids("<|image_pad|>") == QWEN_TINY.marks["image_token_id"]
    assert tiny_gemma_tokenizer().image_token_id == PALIGEMMA_TINY.marks["image_token_index"]
    assert tiny_llama_tokenizer().convert_tokens_to_ids("<|image|>") == LLAMA_TINY.marks["image_token_index"]
    assert [tiny_llama_tokenizer().pad_token_id, tiny_llama_tokenizer().bos_token_id] == [LLAMA_TINY.text[k] for k in ("pad_token_id", "bos_token_id")]


# --- the published size
# trunk -> its numbers, its parameters, and the shapes of some
PUBLISHED = {
    "qwen": (3_754_622_976, 824, {
        "language_model.embed_tokens": (151936, 2048), "visual.patch_embed.proj": (1280, 3, 2, 14, 14),
        "visual.merger.mlp.2": (2048, 5120), "language_model.layers.35.self_attn.k_proj": (256, 2048)}),
    "paligemma": (2_923_466_480, 603, {
        "language_model.embed_tokens": (257216, 2048), "vision_tower.embeddings.patch_embedding": (1152, 3, 14, 14),
        "vision_tower.embeddings.position_embedding": (256, 1152), "multi_modal_projector.linear": (2048, 1152),
        "language_model.layers.17.self_attn.k_proj": (256, 2048), "vision_tower.encoder.layers.26.mlp.fc1": (4304, 1152)}),
    "llama": (10_642_941_475 - 128256*4096, 905, {   # without the rows that predict words
        "language_model.embed_tokens": (128264, 4096), "vision_model.patch_embedding": (1280, 3, 14, 14),
        "vision_model.gated_positional_embedding.tile_embedding": (9, 4*1025*1280), "multi_modal_projector": (4096, 7680),
        "language_model.layers.38.cross_attn.k_proj": (1024, 4096), "language_model.layers.39.self_attn.k_proj": (1024, 4096)})}
HEADS = dict(qwenoft=42_012_679, qwengr00t=153_609_735, paligemmaoft=42_012_679, llamaoft=167_911_431, neurovla=17_912_200)
RATES = dict(neurovla={"head.qformer": 5e-5, "head.edit": 5e-5})   # family -> beside the trunk's, of a run at 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_the_published_size_has_the_published_number_of_parameters(name):
    numbers, parameters, some = PUBLISHED[trunk(name)]
    with torch.device("meta"): p = policies[name]()
    assert (n_params(p.vlm), len(list(p.vlm.parameters()))) == (numbers, parameters) and n_params(p.head) == HEADS[name]
    assert not any("lm_head" in k for k, _ in p.named_modules()) and p.pretrained() == ["vlm."]
    assert p.lr_of(1e-4) == {"vlm": 1e-5} | RATES.get(name, {})
    shapes = {k: tuple(q.shape) for k, q in p.vlm.named_parameters()}
    assert {k: shapes[k+".weight"] for k in some} == some
    with torch.device("meta"): assert policies[name].largest_rank() == max(min(p.get_submodule(n).weight.shape) for n in p.lora_targets())


@pytest.mark.parametrize("name", TINY)
def test_recomputed_layers_give_the_same_gradients_and_keep_less(name):
    b, found = data(B=2), {}
    for on in (False, True):
        p, kept = make_policy(name, 32, checkpointing=on).train(), {}
        noise, time = p.draw(2, torch_rng(0, "recompute"))
        note = lambda x, kept=kept: kept.update({x.data_ptr(): x.nbytes}) or x
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x): loss, _ = p(b, noise=noise, time=time)
        loss.backward()
        found[on] = sum(kept.values()), [loss.detach(), *(q.grad for q in p.parameters() if q.grad is not None)]
    assert all(map(torch.equal, *(found[on][1] for on in (False, True)))) and len(found[True][1]) == len(found[False][1])
    assert found[True][0] < .8*found[False][0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_size_brings_settings_and_each_gives_way(name):
    keys = "image_size", "batch_size", "steps_per_task", "lr", "lora_rank", "head"
    made = lambda **kw: {k: getattr(resolve(TrainConfig(suite="libero_goal", **kw)), k) for k in keys}
    own = made(model=name)
    assert own["image_size"] in policies[name].image_sizes and (own["batch_size"], own["lora_rank"], own["head"]) == (16, 32, FAMILIES[name])
    given = dict(image_size=own["image_size"]//2, batch_size=8, steps_per_task=3, lr=.5, lora_rank=0)
    assert made(model=name, **given) == given | dict(head=FAMILIES[name])
    assert made(model=f"{name}-tiny") == made() | dict(head=FAMILIES[name])


# --- refused at the door
class Run(SimpleNamespace):
    def __init__(self, **kw):
        given = dict(model="qwenoft-tiny", image_size=32, chunk=8, seed=0, lora_rank=0, lora_alpha=16., init_from="", model_kw={}) | kw
        super().__init__(**(dict(head=FAMILIES[given["model"].removesuffix("-tiny")]) | given))


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("kw,match", [
    (dict(image_size=50), "takes 32, 48"), (dict(head="discrete"), "no head 'discrete'"), (dict(model_kw=dict(D=96)), "no argument 'D'"),
    (dict(lora_rank=300), "at most (256|96)"),
    (dict(model_kw=dict(cameras=["front"])), "begin with"),
    (dict(model_kw=dict(cameras=[IMAGE, WRIST]), image_size=112), "")], ids=str)
def test_settings_are_refused_without_building(name, kw, match, monkeypatch):
    made = []
    monkeypatch.setattr(torch.nn.Parameter, "__new__", lambda *a, **k: made.append(1))
    if not match: check_policy(Run(model=name, **kw))
    else:
        with pytest.raises(ValueError, match=match): check_policy(Run(model=name, **kw))
    assert not made


def test_wrong_heads_and_settings_are_named():
    for name, kw, match in [("qwenoft-tiny", dict(head="flow"), "no head 'flow'"), ("qwenoft-tiny", dict(H=500), "the model reads 512"),
                            ("qwengr00t-tiny", dict(head="l1"), "no head 'l1'"),
                            ("qwengr00t-tiny", dict(repeats=0), "repeats is 0"), ("qwengr00t-tiny", dict(euler_steps="4"), "euler_steps is '4'")]:
        with pytest.raises(ValueError, match=match): policies[name].check(**kw)
    three = {IMAGE: 224, WRIST: 224, WRIST+"2": 224}
    with pytest.raises(ValueError, match="3 pictures take 588 tokens.*the model reads 512"): policies["qwenoft-tiny"].check(image_size=three)


@pytest.mark.parametrize("name", ["paligemmaoft-tiny", "llamaoft-tiny"])
def test_cameras_of_two_sizes_are_refused_where_the_model_reads_one(name):
    with pytest.raises(ValueError, match="pictures of one size.*render all cameras"): policies[name].check(image_size={IMAGE: 48, WRIST: 32})


def test_an_instruction_longer_than_the_context_is_refused(policy):
    policy.check_prompts([SHORT, "go "*200])
    with pytest.raises(ValueError, match="takes 1201 positions.*shorten it"): policy.check_prompts(["go "*1200])


def test_a_run_that_names_no_head_gets_the_familys():
    head = lambda **kw: resolve(TrainConfig(suite="dot_2", **kw)).head
    assert [head(model=m) for m in ("tiny", *TINY)] == ["flow", *FAMILIES.values()] and head(model="tiny", head="l1") == "l1"
    assert head_for("qwenoft-tiny", "discrete") == "discrete"   # and is refused, instead of predicting numbers
    assert make_policy("qwenoft-tiny", 32).config["head"] == "l1" and make_policy("tiny", 32).config["head"] == "flow"


def test_a_missing_extra_names_the_command(monkeypatch):
    real = names.importlib.util.find_spec
    monkeypatch.setattr(names.importlib.util, "find_spec", lambda name: None if name == "transformers" else real(name))
    with pytest.raises(ImportError, match=r"pip install 'clvla\[vlm\]'"): policies["qwenoft-tiny"].check()


def test_storing_in_a_fresh_process_and_importing_nothing_early(tmp_path):
    "The families' modules load transformers when a trunk is built, not before."
    for name in TINY: save_policy(make_policy(name, 32, seed=4), name, tmp_path/name)
    code = f"""import sys; sys.path.insert(0, {str(__file__).rsplit('/', 1)[0]!r})
import json, clvla.train.learner, clvla.policies.vlm.qwenoft, clvla.policies.vlm.qwengr00t, clvla.policies.vlm.paligemmaoft, clvla.policies.vlm.llamaoft, clvla.policies.vlm.neurovla
from clvla.policies.all import policies
[policies[name].check(image_size=32) for name in {TINY!r}]
assert "transformers" not in sys.modules
from clvla.policies.all import load_policy
from clvla.core.batch import torch_rng
from test_policies import make_batch
both = [load_policy(p) for p in {[str(tmp_path/name) for name in TINY]!r}]
print(json.dumps([p.predict_chunk(make_batch(2), generator=torch_rng(1, "vlm")).tolist() for p in both]))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, there in zip(TINY, json.loads(done.stdout)):
        assert torch.equal(torch.tensor(there), chunk(load_policy(tmp_path/name), make_batch(2)))


def test_a_checkpoint_of_another_family_is_refused(tmp_path):
    from clvla.policies.weights import load_weights
    folder = save_policy(make_policy("qwenoft-tiny", 32), "qwenoft-tiny", tmp_path)
    with pytest.raises(ValueError, match="does not fit this policy .*missing head.pos"): load_weights(make_policy("qwengr00t-tiny", 32), folder)


# --- adapters and rates
@pytest.mark.parametrize("name", TINY)
def test_adapters_train_the_rest_stays_to_the_bit_and_merging_changes_no_chunk(name, tmp_path):
    p = build_policy(Run(model=name, lora_rank=2), 4, 4)
    frozen = {k: q.detach().clone() for k, q in p.named_parameters() if not q.requires_grad}
    assert {k.split(".")[1] for k in frozen if k.startswith("vlm")} == {k for k, _ in p.vlm.named_children()}
    assert (p.queries is None or p.queries.requires_grad) and all(q.requires_grad for q in p.head.parameters())
    save_base(p, tmp_path/"weights")
    opt = torch.optim.AdamW(param_groups(p, 1e-2, .1))
    for i in range(2):
        loss_of(p, data(), torch_rng(i, "vlm"))[0].backward()
        opt.step(), opt.zero_grad()
    now = dict(p.named_parameters())
    assert frozen and all(torch.equal(v, now[k]) for k, v in frozen.items())
    assert torch.allclose(chunk(merge_lora(p), data()), chunk(p, data()), atol=1e-4)
    back = load_policy(save_policy(p, name, tmp_path/"checkpoints"/"000"))
    assert torch.equal(chunk(back, data()), chunk(p, data()))
    largest = policies[name].largest_rank(image_size=32)
    assert largest == dict(qwen=256, paligemma=96, llama=96)[trunk(name)]
    with pytest.raises(ValueError, match=f"at most {largest}"): add_lora(make_policy(name, 32), largest+1)


def test_rates_of_parts(policy):
    eye = "vlm."+next(k for k, _ in policy.vlm.named_children() if k.startswith("vis"))
    groups = param_groups(policy, 1e-3, lr_of={eye: 1e-5, "head": 1e-4})
    assert {g["name"].split("/")[0]: g["lr"] for g in groups} == {"all": 1e-3, eye: 1e-5, "head": 1e-4}
    assert policy.lr_of(1e-3) == ({"head": 1e-3/8} if name_of(policy) == "neurovla-tiny" else {})
    assert sum(q.numel() for g in groups for q in g["params"]) == n_params(policy)
    with pytest.raises(ValueError, match="no parameter lies in 'vlm.visul'"): param_groups(policy, 1e-3, lr_of={"vlm.visul": 1e-5})


# --- heads
def known(B=5, L=7, D=16):
    g = torch_rng(0, "rows")
    return Context(pooled=torch.zeros(B, D), tokens=torch.randn(B, L, D, generator=g), mask=torch.arange(L).expand(B, -1) < 5,
                   spans=dict(queries=slice(2, 5)))


def test_the_transformer_head_masks_padding_and_keeps_draws_apart():
    g, head = torch_rng(0, "dit"), DiTHead(16, 8, 4, W=32, n_blocks=4, n_heads=4, n_future=3, n_freq=8, out=32)
    assert [b.cross for b in head.blocks] == [True, False, True, False]
    ctx, x, t = known(), torch.randn(5, 3, 8, 4, generator=g), torch.rand(5, 3, generator=g)
    far = replace(ctx, tokens=ctx.tokens.clone())
    far.tokens[:, 5:] = 99.
    v = head.velocity(head.read(ctx), x, t)
    assert torch.allclose(v, head.velocity(head.read(far), x, t), atol=1e-5)
    for k in range(3): assert torch.allclose(v[:, k:k+1], head.velocity(head.read(ctx), x[:, k:k+1], t[:, k:k+1]), atol=1e-5)
    assert (v[:, 0]-head.velocity(head.read(ctx), x[:, :1], t[:, 1:2])[:, 0]).abs().max() > 1e-5   # the time matters


def test_the_exact_velocity_has_no_loss_and_its_steps_land_on_the_data():
    class Exact(DiTHead):
        def read(self, ctx): return ctx.pooled
        def velocity(self, h, x, t): return (x-h.view(-1, 1, 8, 4))/t[..., None, None]
    g, head = torch_rng(0, "exact"), Exact(32, 8, 4, W=16, n_blocks=1, n_heads=2, out=16)
    action = torch.randn(6, 8, 4, generator=g)
    ctx = Context(pooled=action.flatten(1))
    assert head.loss(ctx, action, torch.zeros(6, 8, dtype=torch.bool), *head.draw(6, g))[0].max() < 1e-6
    assert torch.allclose(head.sample(ctx, torch.randn(6, 8, 4, generator=g)), action, atol=1e-5)


def test_the_regression_reads_each_query_by_itself():
    head, ctx = OFTHead(16, 3, 4), known()
    other = replace(ctx, tokens=ctx.tokens.clone())
    other.tokens[:, [0, 1, 4, 5, 6]] = 0
    moved = (head.sample(ctx)-head.sample(other)).abs().amax((0, 2))
    assert moved[:2].max() == 0 and moved[2] > 1e-3


def test_the_spiking_head_starts_from_rest_and_is_blind_to_padding_and_to_later_slots():
    head, ctx = NeuroHead(16, 3, 4, 2, W=32, n_heads=4, G=8, E=16, n=64), StateContext(**vars(known()), state=torch.ones(5, 2))
    before = head.sample(ctx)
    far = replace(ctx, tokens=ctx.tokens.clone())
    far.tokens[:, 5:] = 99.
    assert torch.allclose(head.sample(far), before, atol=1e-5) and torch.equal(head.sample(ctx), before)
    slots = head.qformer(ctx.tokens, ctx.mask)
    moved = (head.spiking(slots)-head.spiking(torch.cat([slots[:, :2], -slots[:, 2:]], 1))).abs().amax((0, 2))
    assert moved[:2].max() < 1e-5 and moved[2] > 1e-3


# --- it sees and hears
ONE_LAYER = {"qwen": dict(depth=1, fullatt_block_indexes=[0]), "paligemma": dict(num_hidden_layers=1),
             "llama": dict(num_hidden_layers=1, intermediate_layers_indices=[0])}


def smaller(name):
    "The family at a size at which the squares take seconds."
    shape = policies[name].shape
    return type("Smaller", (policies[name],), dict(shape=replace(shape, vision=shape.vision | ONE_LAYER[trunk(name)])))


@pytest.mark.parametrize("name,lr,steps", [("qwenoft-tiny", 1.5e-3, 600), ("qwengr00t-tiny", 2e-3, 500),
                                           ("paligemmaoft-tiny", 2e-3, 800), ("llamaoft-tiny", 3e-3, 500),
                                           ("neurovla-tiny", 2.5e-3, 800)])
def test_it_goes_to_the_square_that_the_sentence_names(name, lr, steps):
    "Where the squares are is in the picture only, and which one is meant in the sentence only."
    torch.manual_seed(0)
    p = smaller(name)(SIZE, 2, 2, SQUARES_H)
    parts = param_groups(p, lr, .01, p.lr_of(lr)) if p.lr_of(lr) else p.parameters()
    rng, noise, opt = np.random.default_rng(0), torch_rng(0, "squares"), torch.optim.AdamW(parts, lr, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, [part["lr"] for part in opt.param_groups], total_steps=steps)
    for _ in range(steps):
        loss_of(p, squares(32, rng)[0], noise)[0].backward()
        opt.step(), opt.zero_grad(), schedule.step()
    made, named, other = squares(200, np.random.default_rng(1))
    far = lambda to: float(np.abs(chunk(p.eval(), made)[:, 0].numpy()-to).mean())
    assert far(named) < .3 and far(other) > 2*far(named), (far(named), far(other))


# --- runs
@pytest.mark.parametrize("name,kw", [
    ("qwenoft-tiny", dict(lora_rank=4, prefetch=1)),
    ("qwengr00t-tiny", dict(blind=True, deaf=True, evaluate="none")),
    ("neurovla-tiny", dict(lora_rank=2, evaluate="none"))])
def test_a_run_that_crashed_goes_on_as_if_it_had_not(name, kw, shared_data, tmp_path, monkeypatch):
    "MIR on two small tasks: with adapters, batches ahead and evaluation, and as a blind and deaf control."
    kw = dict(model=name, algo="mir", algo_kw=dict(refresh=2, candidates=8), steps_per_task=3, threads=1, **kw)
    whole = train_cl(config(shared_data, tmp_path/"whole", **kw), say=len)
    assert len(whole.episodes()) == (0 if "evaluate" in kw else 3) and load_policy(checkpoints(whole.path/"checkpoints")[-1]).config["H"] == 8
    cfg = config(shared_data, tmp_path/"run", save_every=2, **kw)
    with monkeypatch.context() as m:
        crash_at(m, 1, 3)
        with pytest.raises(Crash): train_cl(cfg, say=len)
    assert RunFolder(cfg.run_dir).status == "interrupted"
    train_cl(cfg, say=len)
    assert fingerprint(cfg.run_dir) == fingerprint(whole.path)


@pytest.mark.parametrize("algo", algos)
def test_every_algorithm_runs_a_stream_with_a_transformer_head(algo, shared_data, tmp_path):
    "Two tasks, two updates each; latent replay names the reason why it does not, by vectors or by features."
    kw = dict(model="qwengr00t-tiny", algo=algo, algo_kw=FEW if algo in ("ewc", "mas") else {}, steps_per_task=2, batch_size=4, evaluate="none", ema=0.)
    begin = lambda: train_cl(config(shared_data, tmp_path/"run", **kw), say=len)
    if algo == "latent":
        with pytest.raises(ValueError, match="reads all 34 rows of its trunk.*use algo 'er'"): begin()
        return
    if algo == "mlr":
        with pytest.raises(ValueError, match="has no `parts`; use algo 'er'"): begin()
        return
    losses = [(r["stage"], r["train/loss"]) for r in begin().logs() if "train/loss" in r]
    assert {stage for stage, _ in losses} == ({0} if algo == "joint" else {0, 1}) and all(np.isfinite(x) for _, x in losses)


@pytest.mark.parametrize("name", TINY)
def test_beside_a_loaded_trunk_what_is_random_learns_whole(name):
    "Adapters stand in the trunk alone; the state's network and the queries are trained as they are."
    p = make_policy(name, 32)
    p.pretrained = lambda: ["vlm."]   # as of a published size
    add_lora(p, 2, pretrained=False)
    for k, q in p.named_parameters(): assert q.requires_grad == (not k.startswith("vlm.") or ".lora_" in k), k
    assert not any(".lora_" in k for k, _ in p.named_parameters() if not k.startswith("vlm."))


def inside(kind, policy):
    "The policy itself, or frozen inside one that practice made."
    if kind == "itself": return policy, policy
    from clvla.rl.best_of_n import BestOfN
    from clvla.rl.token_policy import TokenPolicy
    D, sizes = policy.shape.text["hidden_size"], dict(image_size=32, state_dim=4, action_dim=4, H=8, head=policy.config["head"])
    base, config = name_of(policy), policy.config
    if kind == "token": outer = TokenPolicy(base, config, "paper", dict(D=D), dict(X=D+4, C=8, A=4, std=.1), **sizes)
    else: outer = BestOfN(base, config, "context", "paper", {}, dict(X=D+4, C=8, A=4), 2, .5, **sizes)
    outer.vla.load_state_dict(policy.state_dict())
    return outer, outer.vla


def test_an_evaluation_computes_the_rows_that_are_under_way(policy, monkeypatch):
    "The policy itself, and frozen inside those of practice; a regression has one draw, and nothing to choose from."
    for kind in ["itself", "token"]+["best"]*policy.needs_noise:
        with monkeypatch.context() as m: computes_rows_under_way(*inside(kind, policy), m)


def computes_rows_under_way(policy, reads, monkeypatch):
    "Of twelve rows three have an episode: one call of `group` rows, and the bits that each gets beside eleven others."
    tasks = [Task(t, t, t, {}) for t in (SHORT, LONG)]
    obs = {IMAGE: np_rng(0, "rows").integers(0, 256, (12, 32, 32, 3), "u1"), STATE: np_rng(1, "rows").normal(size=(12, 4)).astype("f4")}
    as_is = SimpleNamespace(unnormalise=lambda x: x, obs=lambda raw: raw | {IMAGE: torch.tensor(raw[IMAGE]).movedim(-1, 1), STATE: torch.tensor(raw[STATE])})
    sizes,encode = [],reads.encode
    monkeypatch.setattr(reads, "encode", lambda seen, *a, **kw: sizes.append(len(seen[STATE])) or encode(seen, *a, **kw))
    def chunks(n):
        rows_ = [Row(i, i, tasks[i%2]) for i in range(12)]
        for row in rows_[:n]: row.begin(row.task, 0, 0)
        return predict_groups(policy.train(False), as_is, obs, rows_, idle_row(tasks, policy), policy.group)[:3]
    few = chunks(3)
    assert sizes == [policy.group] == [5]
    assert (few == chunks(12)).all() and sizes == [5]*4 and few.std() > 0
