"""Published weights: folders that transformers wrote are read through the lines of a full size, and everything that can be wrong with
them is named. Nothing goes to the network."""
import json
import os
import shutil
import socket
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file
from test_policies import LONG, SHORT, make_batch
from test_resume import Crash, config, crash_at
from clvla.core.batch import torch_rng
from clvla.core.names import IMAGE, PROMPT, STATE
from clvla.policies.all import build_policy, check_policy, load_policy, make_policy, policies
from clvla.policies.lora import merge_lora
from clvla.policies.vlm import command, pretrained
from clvla.policies.vlm.llamaoft import LLAMA_TINY, make_mllama, tiny_llama_tokenizer
from clvla.policies.vlm.paligemmaoft import PALIGEMMA_TINY, make_paligemma, tiny_gemma_tokenizer
from clvla.policies.vlm.pretrained import choose_attention, find_folder, open_folder, quiet
from clvla.policies.vlm.qwen import QWEN_TINY, make_trunk, tiny_tokenizer
from clvla.policies.weights import init_weights, read_policy, read_weights, save_base, save_policy
from clvla.run.checkpoint import checkpoints
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint
from clvla.train.learner import train_cl

torch.set_num_threads(1)
FAMILIES = {"qwenoft": "qwen", "qwengr00t": "qwen", "neurovla": "qwen", "paligemmaoft": "paligemma", "llamaoft": "llama"}   # -> trunk
EYE = {"qwen": "visual", "paligemma": "vision_tower", "llama": "vision_model"}
MEAN, STD = [.1, .2, .3], [.4, .5, .6]


def stock(trunk, seed=0):
    "The stock class with its layer that predicts words, its tokenizer and its image processor."
    import transformers as t
    torch.manual_seed(seed)
    base, whole, tokenizer, look = {
        "qwen": lambda: (make_trunk(QWEN_TINY), t.Qwen2_5_VLForConditionalGeneration, tiny_tokenizer(),
                         t.Qwen2VLImageProcessor(patch_size=8, min_pixels=256, image_mean=MEAN, image_std=STD)),
        "paligemma": lambda: (make_paligemma(PALIGEMMA_TINY, 32), t.PaliGemmaForConditionalGeneration, tiny_gemma_tokenizer(),
                              t.SiglipImageProcessor(size=dict(height=32, width=32), image_mean=MEAN, image_std=STD)),
        "llama": lambda: (make_mllama(LLAMA_TINY, 32), t.MllamaForConditionalGeneration, tiny_llama_tokenizer(),
                          t.MllamaImageProcessor(size=dict(height=32, width=32), max_image_tiles=1, image_mean=MEAN, image_std=STD))}[trunk]()
    model = whole(base.config)
    model.model = base   # the gates of the tiny Llama are open
    return model, tokenizer, look


def publish(path, trunk="qwen", seed=0, dtype=torch.float32):
    "A folder as the hub has it, in several files and under the published names."
    model, tokenizer, look = stock(trunk, seed)
    with quiet(): model.to(dtype).save_pretrained(path, max_shard_size="800KB")
    tokenizer.save_pretrained(path)
    look.save_pretrained(path)
    return model.model


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    "CLVLA_MODELS with a folder for each trunk; a connection is an error."
    path = tmp_path_factory.mktemp("models")

    def no_network(self, *a): raise AssertionError("this goes to the network")
    with pytest.MonkeyPatch.context() as m:
        m.setenv("CLVLA_MODELS", str(path))
        m.setenv("HF_HUB_CACHE", str(path/"no-cache"))   # this machine's own has no say
        m.setattr(socket.socket, "connect", no_network)
        for name, size in (("qwengr00t", "dit"), ("neurovla", "sizes")):   # heads of a laptop; the trunks are read
            m.setattr(policies[name], size, getattr(policies[f"{name}-tiny"], size))
        yield path


@pytest.fixture(scope="module")
def saved(home): return {trunk: publish(home/"lab"/trunk, trunk) for trunk in EYE}


def make(name, size=32, **kw): return make_policy(name, size, **(dict(weights=f"lab/{FAMILIES[name]}") | kw))
def data(B=4): return make_batch(B) | {PROMPT: [(SHORT, LONG)[i%2] for i in range(B)]}
def chunk(policy, obs): return policy.predict_chunk(obs, generator=torch_rng(1, "chunk"))
def equal(a, b): return [k for (k, x), y in zip(a.items(), b.values()) if not torch.equal(x, y)] == [] and list(a) == list(b)


# --- what is read is what was saved
@pytest.mark.parametrize("name", FAMILIES)
def test_a_full_size_reads_what_was_saved_to_the_bit(name, saved):
    "Its outputs are those of a tiny policy whose trunk is the model that was saved."
    p, twin = make(name), make_policy(f"{name}-tiny", 32)
    trunk = saved[FAMILIES[name]]
    assert equal(p.vlm.state_dict(), trunk.state_dict()) and type(p.vlm) is type(trunk) and p.vlm.training
    twin.load_state_dict(p.state_dict())
    twin.colours = p.colours
    b = data()
    assert torch.equal(p.encode(b).tokens, twin.encode(b).tokens) and torch.equal(chunk(p, b), chunk(twin, b))
    assert p.prompt_length(LONG) == twin.prompt_length(LONG) and p.longest_prompt == twin.longest_prompt
    assert p.pretrained() == ["vlm."] and p.image_sizes == policies[name].image_sizes
    assert equal(make(name).state_dict(), p.state_dict())   # a function of folder and seed


@pytest.mark.parametrize("trunk", EYE)
def test_pictures_and_words_are_those_of_the_folder(trunk, home, saved):
    from transformers import AutoImageProcessor, AutoTokenizer
    p = make(next(k for k, v in FAMILIES.items() if v == trunk))
    images = data(2)[IMAGE]
    with quiet(): look = AutoImageProcessor.from_pretrained(home/"lab"/trunk)(list(images) if trunk != "llama" else [[x] for x in images], return_tensors="pt")
    x = look["pixel_values"]
    if trunk == "qwen": x = x.view(2, 16, 3, 2, 8, 8)[:, :, :, 0]
    if trunk == "llama": x = x[:, 0, 0]
    assert torch.allclose(p.picture(images), x, atol=1e-5)
    t = AutoTokenizer.from_pretrained(home/"lab"/trunk)
    assert p.chat.words(LONG) == t.encode(LONG, add_special_tokens=False)


@pytest.mark.parametrize("name", ["qwengr00t", "paligemmaoft", "llamaoft"])
def test_a_short_trunk_has_a_long_head(name, saved):
    p, whole, b = make(name, dtype="bfloat16"), make(name), data()
    assert {k.split(".")[0]: q.dtype for k, q in p.named_parameters()}["vlm"] == torch.bfloat16
    assert {q.dtype for k, q in p.named_parameters() if not k.startswith("vlm.")} == {torch.float32}
    short = {k: v.bfloat16() for k, v in whole.vlm.state_dict().items()}
    assert equal(p.vlm.state_dict(), short)
    noise, time = p.draw(4, torch_rng(0, "noise"))
    loss = [x(b, noise=noise, time=time)[0] for x in (p, whole)]
    assert loss[0].dtype == p.encode(b).tokens.dtype == torch.float32 and abs(loss[0]-loss[1]) < .1*loss[1]
    loss[0].backward()
    assert all(q.grad.isfinite().all() for q in p.head.parameters())


def test_tied_words_and_one_file_and_weights_stored_short(tmp_path, home):
    "The layer that predicts words is the table itself, so no file holds it."
    model, tokenizer, look = stock("qwen")
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = True
    model.tie_weights()
    with quiet(): model.bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path), look.save_pretrained(tmp_path)
    assert (tmp_path/"model.safetensors").is_file() and "lm_head.weight" not in load_file(tmp_path/"model.safetensors")
    p = make("qwenoft", weights=str(tmp_path), dtype="bfloat16")
    assert equal(p.vlm.state_dict(), model.model.state_dict())
    assert {q.dtype for q in make("qwenoft", weights=str(tmp_path)).parameters()} == {torch.float32}
    assert p.config["weights"] == str(tmp_path.resolve())


def test_what_is_asked_of_attention_is_what_the_model_has(saved):
    b, usual = data(), make("qwenoft")
    other = make("qwenoft", attention="eager")
    assert (usual.vlm.config._attn_implementation, other.vlm.config._attn_implementation) == ("sdpa", "eager")
    assert torch.allclose(chunk(usual, b), chunk(other, b), atol=1e-5)
    tiny = make_policy("llamaoft-tiny", 32, attention="eager")
    assert tiny.vlm.language_model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="attention is 'flash_attention_2', expected one of '', 'sdpa', 'eager'$"): make("paligemmaoft", attention="flash_attention_2")
    with pytest.raises(ValueError, match="flash_attention_2' cannot be used"): make("qwenoft", attention="flash_attention_2", dtype="bfloat16")


def test_a_flash_attn_that_does_not_import_is_named(tmp_path, monkeypatch):
    (tmp_path/"flash_attn.py").write_text("raise ImportError('undefined symbol: x')")
    monkeypatch.syspath_prepend(tmp_path)
    heard, known = [], policies["qwenoft"].stock
    assert choose_attention("", known, "bfloat16", True, heard.append) == "sdpa" and "ImportError: undefined symbol" in heard[0]
    with pytest.raises(ValueError, match="installed and does not import"): choose_attention("flash_attention_2", known, "bfloat16", True)
    assert choose_attention("", policies["llamaoft"].stock, "bfloat16", True, heard.append) == "sdpa" and len(heard) == 1
    (tmp_path/"flash_attn.py").write_text("")
    monkeypatch.delitem(pretrained.importlib.import_module("sys").modules, "flash_attn", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_gpu = lambda dtype: choose_attention("", known, dtype, True, device="cuda:1")
    assert (on_gpu("bfloat16"), on_gpu("float32"), choose_attention("", known, "bfloat16", True)) == ("flash_attention_2", "sdpa", "sdpa")


# --- the published names and shapes
PUBLISHED = {   # trunk -> config.json of the hub, as far as it decides names and shapes
    "qwen": dict(
        model_type="qwen2_5_vl", hidden_size=2048, intermediate_size=11008, max_position_embeddings=128000, num_attention_heads=16,
        num_hidden_layers=36, num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True, vocab_size=151936,
        image_token_id=151655, video_token_id=151656, vision_start_token_id=151652, torch_dtype="bfloat16",
        rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]),
        vision_config=dict(depth=32, hidden_act="silu", hidden_size=1280, intermediate_size=3420, num_heads=16, in_chans=3, out_hidden_size=2048,
                           patch_size=14, spatial_merge_size=2, spatial_patch_size=14, window_size=112, fullatt_block_indexes=[7, 15, 23, 31],
                           tokens_per_second=2, temporal_patch_size=2)),
    "paligemma": dict(
        model_type="paligemma", hidden_size=2048, image_token_index=257152, projection_dim=2048, pad_token_id=0, bos_token_id=2, eos_token_id=1,
        text_config=dict(model_type="gemma", hidden_size=2048, intermediate_size=16384, num_attention_heads=8, num_hidden_layers=18,
                         num_image_tokens=256, num_key_value_heads=1, torch_dtype="float32", vocab_size=257216),
        vision_config=dict(model_type="siglip_vision_model", hidden_size=1152, intermediate_size=4304, num_attention_heads=16, num_hidden_layers=27,
                           num_image_tokens=256, patch_size=14, projection_dim=2048, vision_use_head=False)),
    "llama": dict(
        model_type="mllama", image_token_index=128256,
        text_config=dict(model_type="mllama_text_model", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=40,
                         num_attention_heads=32, num_key_value_heads=8, cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38], rms_norm_eps=1e-5,
                         max_position_embeddings=131072, pad_token_id=128004, rope_theta=5e5,
                         rope_scaling=dict(rope_type="llama3", factor=8., low_freq_factor=1., high_freq_factor=4., original_max_position_embeddings=8192)),
        vision_config=dict(model_type="mllama_vision_model", hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_global_layers=8,
                           attention_heads=16, image_size=448, patch_size=14, max_num_tiles=4, vision_output_dim=7680,
                           intermediate_layers_indices=[3, 7, 15, 23, 30]))}
NAMES = {   # trunk -> how the hub's files write a name of today's class, and tensors that only they have
    "qwen": (lambda k: k.replace("language_model.", "model."), {}),
    "paligemma": (lambda k: k.replace("language_model.", "language_model.model.").replace("vision_tower.", "vision_tower.vision_model."), {}),
    "llama": (lambda k: k.replace("language_model.", "language_model.model."), {"language_model.lm_head.weight": (128256, 4096)})}
SOME = {   # trunk -> names and shapes that the hub's files are known to have
    "qwen": {"model.embed_tokens.weight": (151936, 2048), "visual.merger.ln_q.weight": (1280,), "model.layers.35.self_attn.k_proj.bias": (256,)},
    "paligemma": {"vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight": (1152, 1152), "multi_modal_projector.linear.bias": (2048,),
                  "language_model.model.layers.17.mlp.down_proj.weight": (2048, 16384)},
    "llama": {"language_model.model.layers.13.cross_attn_attn_gate": (1,), "language_model.model.layers.38.cross_attn.q_proj.weight": (4096, 4096),
              "vision_model.gated_positional_embedding.tile_embedding.weight": (9, 4*1025*1280)}}


@pytest.mark.parametrize("name,trunk,n", [("qwenoft", "qwen", 824), ("paligemmaoft", "paligemma", 603), ("llamaoft", "llama", 905)])
def test_the_published_names_and_shapes_fit_the_stock_class(name, trunk, n, tmp_path, monkeypatch):
    "On the meta device; the published configuration gives the family's published shape."
    (tmp_path/"config.json").write_text(json.dumps(PUBLISHED[trunk]))
    for file in ("tokenizer.json", "preprocessor_config.json"): (tmp_path/file).write_text("{}")
    family = policies[name]
    with torch.device("meta"): here = family()
    published, more = NAMES[trunk]
    tensors = {published(k): tuple(v.shape) for k, v in here.vlm.state_dict().items()} | more
    assert len(tensors) == n+len(more) and {k: tensors.get(k) for k in SOME[trunk]} == SOME[trunk]
    monkeypatch.setattr(pretrained, "shards", lambda path: {"model.safetensors": None})
    monkeypatch.setattr(pretrained, "shapes", lambda file, indexed: tensors)
    folder = open_folder(family.stock, str(tmp_path))
    folder.check_keys()
    shape = family.shape_of(folder)
    for part in ("text", "vision"):
        ours, theirs = getattr(family.shape, part), getattr(shape, part)
        assert {k: v for k, v in ours.items() if k != "rope_parameters" and theirs.get(k, False) != v and k != "tie_word_embeddings"} == {}
        if "rope_parameters" in ours: assert {k: v for k, v in ours["rope_parameters"].items() if theirs["rope_parameters"][k] != v} == {}
    assert shape.image_sizes == family.image_sizes and folder.config.image_token_id == next(iter(family.shape.marks.values()))
    tensors[next(iter(SOME[trunk]))] = (3, 3)
    with pytest.raises(ValueError, match=r"\(1 differences\): .* is \(3, 3\), expected"): folder.check_keys()


# --- what can be wrong with a folder
def edit(file, old, new):
    def change(f):
        text = (f/file).read_text()
        assert old in text
        (f/file).write_text(text.replace(old, new))
    return change


def drop(*names): return lambda f: [p.unlink() for name in names for p in f.glob(name)]


def tensors(change, file="model-00002-of-00004.safetensors"):
    def rewrite(f):
        kept = load_file(f/file)
        change(kept)
        save_file(kept, f/file, metadata=dict(format="pt"))
    return rewrite


def unindexed(f):
    index = json.loads((f/"model.safetensors.index.json").read_text())
    name = next(k for k, v in index["weight_map"].items() if v == "model-00002-of-00004.safetensors")
    tensors(lambda t: t.pop(name))(f)


def renamed(f): tensors(lambda t: t.update({"visual.extra": t.pop(next(k for k in t if k.startswith("visual")))}), "model-00004-of-00004.safetensors")(f); \
    (f/"model.safetensors.index.json").write_text(json.dumps(dict(weight_map={k: p.name for p in f.glob("*.safetensors") for k in load_file(p)})))


SHARD = "model-00002-of-00004.safetensors"
DOOR = {   # found by `check_policy`, before anything is built
    "another family": (edit("config.json", '"qwen2_5_vl"', '"paligemma"'), "model_type in config.json is 'paligemma', expected 'qwen2_5_vl'"),
    "no configuration": (drop("config.json"), "has no config.json, found"),
    "a configuration that is none": (lambda f: (f/"config.json").write_text("[1]"), "model_type in config.json is None|another family"),
    "a kernel of the hub's": (edit("config.json", '"model_type": "qwen2_5_vl",', '"model_type": "qwen2_5_vl", "_attn_implementation": "somebody/attention",'),
                              "names 'somebody/attention' as the way to compute attention"),
    "a kernel for a part": (edit("config.json", '"model_type": "qwen2_5_vl",', '"model_type": "qwen2_5_vl", "attn_implementation": {"vision_config": "a/b"},'),
                            "names 'a/b' as the way to compute attention"),
    "no tokenizer": (drop("tokenizer.json"), "no file for the tokenizer: none of tokenizer.json"),
    "no image processor": (drop("preprocessor_config.json", "processor_config.json"), "no file for the pictures: none of"),
    "cut off": (lambda f: os.truncate(f/SHARD, 500_000), "model-00002-of-00004.safetensors is cut off.*it has 500000 bytes, and its header says"),
    "cut off in the header": (lambda f: os.truncate(f/SHARD, 300), "cut off.*its header should have"),
    "empty": (lambda f: os.truncate(f/SHARD, 0), "cut off.*it has 0 bytes"),
    "a file is missing": (drop(SHARD), "lacks 1 of the 4 files that its index names: model-00002"),
    "pickle only": (lambda f: [p.rename(p.with_suffix(".bin")) for p in f.glob("*.safetensors")] and (f/"model.safetensors.index.json").unlink(),
                    "neither model.safetensors nor .*found .*00001-of-00004.bin.*a pickle file can run code"),
    "no weights": (drop("model*"), "found no weights"),
    "an index that leads out": (edit("model.safetensors.index.json", SHARD, "../"+SHARD), r"names '../model-00002-of-00004.safetensors', expected .* beside it"),
    "an absolute path": (edit("model.safetensors.index.json", SHARD, "/etc/x.safetensors"), "names '/etc/x.safetensors'"),
    "another system's path": (edit("model.safetensors.index.json", SHARD, "a\\\\\\\\b.safetensors"), "names 'a"),
    "an index of pickle files": (edit("model.safetensors.index.json", SHARD, "x.bin"), "names 'x.bin'"),
    "an index without a map": (lambda f: (f/"model.safetensors.index.json").write_text("{}"), "needs a 'weight_map'"),
    "an index that is none": (lambda f: (f/"model.safetensors.index.json").write_text("{"), "is not valid JSON"),
    "a tensor that the index promises": (unindexed, "lacks 1 tensors that the index promises"),
}
DEEP = {   # found when the weights are read
    "a wrong shape": (tensors(lambda t: t.update({next(iter(t)): torch.zeros(3)})), r"\(1 differences\): language_model.* is \(3,\), expected \("),
    "a new name": (renamed, r"\(2 differences\): missing visual.*; unexpected visual.extra"),
    "a tokenizer that is none": (lambda f: (f/"tokenizer.json").write_text("{}"), "tokenizer.json is damaged"),
    "another's tokenizer": (lambda f: [p.unlink() for p in f.glob("chat*")] and tiny_llama_tokenizer().save_pretrained(f), "is another model's: '<.image_pad.>' has id"),
    "no padding": (edit("tokenizer_config.json", '"pad_token": "<|endoftext|>"', '"pad_token": null'), "has no padding token"),
    "colours that are none": (edit("preprocessor_config.json", "0.1,", '"x",'), "expected three numbers each"),
    "another patch size": (edit("preprocessor_config.json", '"patch_size": 8', '"patch_size": 14'), "patch_size is 14, and this family prepares pictures with 8"),
    "another scale": (edit("preprocessor_config.json", "0.00392156862745098", "0.5"), "rescale_factor is 0.5"),
}


class Run(SimpleNamespace):
    def __init__(self, **kw):
        super().__init__(**(dict(model="qwenoft", image_size=32, chunk=8, head="l1", seed=0, lora_rank=0, lora_alpha=16., init_from="",
                                 model_kw=dict(weights="lab/qwen")) | kw))


@pytest.mark.parametrize("what", [*DOOR, *DEEP])
def test_a_folder_with_a_fault_is_named(what, home, saved, tmp_path):
    folder = shutil.copytree(home/"lab"/"qwen", tmp_path/"folder")
    change, match = (DOOR | DEEP)[what]
    change(folder)
    run = Run(model_kw=dict(weights=str(folder)))
    with pytest.raises(ValueError, match=match): check_policy(run) if what in DOOR else build_policy(run, 4, 4)
    if what in DEEP: check_policy(run)
    assert command.main([str(folder)]) == 1


def test_code_in_a_folder_is_not_run(home, saved, tmp_path, monkeypatch):
    "Names of classes in a module that lies there (auto_map) are passed over by configuration, tokenizer and model."
    folder, marker = shutil.copytree(home/"lab"/"qwen", tmp_path/"folder"), tmp_path/"marker"
    (folder/"evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    names = ("AutoConfig", "AutoModel", "AutoProcessor", "AutoImageProcessor", "AutoModelForImageTextToText")
    for file in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        about = json.loads((folder/file).read_text())
        about["auto_map"] = dict.fromkeys(names, "evil.Evil") | dict(AutoTokenizer=["evil.Evil", "evil.Evil"])
        (folder/file).write_text(json.dumps(about))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    build_policy(Run(model_kw=dict(weights=str(folder))), 4, 4)
    assert not marker.exists()


@pytest.mark.parametrize("name", FAMILIES)
def test_without_the_folder_the_door_names_the_command(name, home):
    size = policies[name].image_sizes[-1]
    with pytest.raises(ValueError, match=rf"fetch them once with: clvla-weights {policies[name].stock.hub}.*add -tiny"): check_policy(Run(model=name, image_size=size, head=policies[name].heads[0], model_kw={}))
    with pytest.raises(ValueError, match="takes (56, 84|224|448)"): make_policy(name, 48)


@pytest.mark.parametrize("kw,match", [
    (dict(weights=3), "weights are 3"), (dict(dtype="fp16"), "dtype is 'fp16', expected one of 'float32', 'bfloat16'"), (dict(freeze="visual"), "expected a list"),
    (dict(freeze=["visul"]), "freeze names 'visul', which Qwen2_5_VLModel does not have; did you mean 'visual'"),
    (dict(freeze=["visual.block"]), "did you mean 'visual.blocks'"), (dict(freeze=["head"]), "there are: visual, language_model"),
    (dict(attention="xformers"), "attention is 'xformers'")], ids=str)
def test_settings_are_refused_at_the_door(kw, match, saved):
    with pytest.raises(ValueError, match=match): check_policy(Run(model_kw=dict(weights="lab/qwen") | kw))


def test_a_tiny_size_has_no_weights_to_read(saved):
    for kw in (dict(weights="lab/qwen"), dict(dtype="bfloat16")):
        with pytest.raises(ValueError, match="is a tiny size"): make_policy("qwenoft-tiny", 32, **kw)
    with pytest.raises(ValueError, match="did you mean 'vision_tower'"): make_policy("paligemmaoft-tiny", 32, freeze=["vision_towr"])
    with pytest.raises(ValueError, match="can never learn"): build_policy(Run(model="qwenoft-tiny", model_kw=dict(freeze=["visual"])), 4, 4)


def test_the_largest_rank_is_the_folders(saved):
    with pytest.raises(ValueError, match="at most 256"): check_policy(Run(lora_rank=300))
    with pytest.raises(ValueError, match="at most 96"): check_policy(Run(lora_rank=100, model_kw=dict(weights="lab/qwen", freeze=["visual"])))


def test_a_name_is_looked_for_at_home_then_as_a_folder_then_in_the_hubs_cache(home, saved, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repo, snapshot = tmp_path/"models--org--small", tmp_path/"models--org--small"/"snapshots"/"abc"
    (repo/"blobs").mkdir(parents=True), (repo/"refs").mkdir(), snapshot.mkdir(parents=True)
    (repo/"refs"/"main").write_text("abc")
    for p in (home/"lab"/"qwen").iterdir():   # the hub's cache is made of links
        shutil.copy(p, repo/"blobs"/p.name)
        (snapshot/p.name).symlink_to(f"../../blobs/{p.name}")
    assert find_folder("org/small") == snapshot
    there = make("qwenoft", weights="org/small")
    assert there.source["sha256"] == make("qwenoft").source["sha256"] and there.config["weights"] == "org/small"
    assert find_folder("lab/qwen") == (home/"lab"/"qwen").resolve() == find_folder(str(home/"lab"/"qwen")) and find_folder("org/none") is None
    monkeypatch.chdir(home)
    monkeypatch.setenv("CLVLA_MODELS", str(tmp_path/"elsewhere"))
    assert make("qwenoft", weights="lab/qwen").config["weights"] == str((home/"lab"/"qwen").resolve())


# --- frozen weights, adapters and checkpoints
@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_with_adapters_holds_no_published_weight(name, home, saved, tmp_path):
    eye = EYE[FAMILIES[name]]
    p = build_policy(Run(model=name, head=policies[name].heads[0], lora_rank=2, model_kw=dict(weights=f"lab/{FAMILIES[name]}", freeze=[eye], dtype="bfloat16")), 4, 4)
    trained = {k for k, q in p.named_parameters() if q.requires_grad}
    assert not any(k.startswith(f"vlm.{eye}.") for k in trained) and any("language_model" in k for k in trained)
    assert {q.dtype for q in p.parameters() if q.requires_grad} == {torch.float32}
    opt = torch.optim.AdamW([q for q in p.parameters() if q.requires_grad], 1e-2)
    b = data()
    noise, time = p.draw(4, torch_rng(0, "noise"))
    p(b, noise=noise, time=time)[0].backward()
    opt.step()
    trunk = {k.replace(".base_layer", ""): v for k, v in p.vlm.state_dict().items() if ".lora_" not in k}
    assert equal(trunk, {k: v.bfloat16() for k, v in saved[FAMILIES[name]].state_dict().items()})
    assert not p.frozen and all(q.requires_grad for k, q in p.named_parameters() if not k.startswith("vlm."))   # what began random learns whole
    folder = save_policy(p, name, tmp_path/"run")
    files = read_weights(folder)
    assert [k for k in files if k.startswith("vlm.") and ".lora_" not in k] == [] and set(files) <= set(p.state_dict())
    assert read_policy(folder)["published"] == p.source | dict(left=True) and p.source["path"] == str((home/"lab"/FAMILIES[name]).resolve())
    back = load_policy(folder)
    assert torch.equal(chunk(back, b), chunk(p, b)) and back.left == p.left


def test_parts_that_are_frozen_without_adapters_are_left_in_the_folder(saved, tmp_path):
    p = build_policy(Run(model_kw=dict(weights="lab/qwen", freeze=["visual", "language_model.layers.0"])), 4, 4)
    folder = save_policy(p, "qwenoft", tmp_path/"a")
    held = read_weights(folder)
    assert not any(k.startswith(("vlm.visual.", "vlm.language_model.layers.0.")) for k in held) and any("layers.1." in k for k in held)
    with torch.no_grad(): p.queries.add_(1)
    save_policy(p, "qwenoft", folder)
    b, back, start = data(), load_policy(folder), make("qwenoft")
    assert torch.equal(chunk(back, b), chunk(p, b)) and not back.vlm.visual.patch_embed.proj.weight.requires_grad
    init_weights(start, folder)   # another run starts from it, and trains all of it
    assert torch.equal(chunk(start, b), chunk(p, b)) and not start.left


def test_merged_adapters_and_starts_from_another_run_hold_all_weights(saved, tmp_path):
    "Their trunk is not the folder's."
    b, kw = data(), dict(weights="lab/qwen", freeze=["visual"])
    p = build_policy(Run(lora_rank=2, model_kw=kw), 4, 4)
    with torch.no_grad(): [q.add_(.01) for k, q in p.named_parameters() if ".lora_B." in k]
    merged = save_policy(merge_lora(p), "qwenoft", tmp_path/"merged")
    assert read_policy(merged)["published"]["left"] is False and torch.allclose(chunk(load_policy(merged), b), chunk(p, b), atol=1e-5)
    again = build_policy(Run(lora_rank=2, init_from=str(merged), model_kw=kw), 4, 4)
    assert not again.left and any(k.startswith("vlm.") for k in again.frozen)
    save_base(again, tmp_path/"weights")
    back = load_policy(save_policy(again, "qwenoft", tmp_path/"again"))
    assert torch.equal(chunk(back, b), chunk(again, b)) and torch.allclose(chunk(back, b), chunk(p, b), atol=1e-5)


def test_short_weights_are_not_trained(saved):
    with pytest.raises(ValueError, match="trained in bfloat16.*lora_rank 8"): build_policy(Run(model_kw=dict(weights="lab/qwen", dtype="bfloat16")), 4, 4)
    assert build_policy(Run(lora_rank=2, model_kw=dict(weights="lab/qwen", dtype="bfloat16")), 4, 4).lora


def test_entries_of_a_stored_policy_are_checked(saved, tmp_path):
    folder = save_policy(make("qwenoft"), "qwenoft", tmp_path)
    about = json.loads((folder/"policy.json").read_text())
    for change, match in ((dict(sha256="x"), "is no SHA-256"), (dict(left="yes"), "'left' is 'yes'"), (dict(more=1), "no entry 'more'")):
        (folder/"policy.json").write_text(json.dumps(about | dict(published=about["published"] | change)))
        with pytest.raises(ValueError, match=match): load_policy(folder)


def test_a_run_goes_on_to_the_bit_and_refuses_other_weights(home, shared_data, tmp_path, monkeypatch, capfd):
    "A crash and a start after it; then the folder holds other weights."
    publish(home/"lab"/"run")
    kw = dict(model="qwenoft", algo="er", lora_rank=2, steps_per_task=3, threads=1, evaluate="none", save_every=2, model_kw=dict(weights="lab/run", freeze=["visual"]))
    whole = train_cl(config(shared_data, tmp_path/"whole", **kw), say=len)
    cfg = config(shared_data, tmp_path/"run", **kw)
    with monkeypatch.context() as m:
        crash_at(m, 1, 1)
        with pytest.raises(Crash): train_cl(cfg, say=len)
    broken = shutil.copytree(tmp_path/"run", tmp_path/"other")
    train_cl(cfg, say=len)
    assert fingerprint(cfg.run_dir) == fingerprint(whole.path)
    sizes = [sum(p.stat().st_size for p in c.rglob("weights.safetensors")) for c in checkpoints(RunFolder(cfg.run_dir).path/"checkpoints")]
    assert max(sizes) < .5*sum(p.stat().st_size for p in (home/"lab"/"run").glob("*.safetensors"))
    shutil.rmtree(home/"lab"/"run")
    publish(home/"lab"/"run", seed=1)
    with pytest.raises(ValueError, match="trained on other published weights"): train_cl(config(shared_data, broken, **kw), say=len)


# --- the command
@pytest.fixture
def hub(home, saved, monkeypatch):
    "A hub that has the folder of a tiny Qwen2.5-VL, under any name, and what was asked of it."
    import huggingface_hub
    from fnmatch import fnmatch
    from clvla.core.files import sha256
    asked = []

    def info(self, name, **kw):
        lfs = lambda p: SimpleNamespace(sha256=sha256(p)) if p.suffix == ".safetensors" else None
        return SimpleNamespace(sha="f"*40, siblings=[SimpleNamespace(rfilename=p.name, size=p.stat().st_size, lfs=lfs(p)) for p in (home/"lab"/"qwen").iterdir()])

    def download(name, local_dir, allow_patterns, ignore_patterns, revision, **kw):
        asked.append((name, revision, kw))
        names = [p.name for p in (home/"lab"/"qwen").iterdir()] + ["modeling.py", "pytorch_model.bin", "original/consolidated.safetensors", "README.md"]
        local_dir.mkdir(parents=True, exist_ok=True)
        for n in names:
            if any(fnmatch(n, a) for a in allow_patterns) and not any(fnmatch(n, i) for i in ignore_patterns): shutil.copy(home/"lab"/"qwen"/n, local_dir/n)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    return asked


def test_the_command_fetches_once_and_names_what_a_run_needs(hub, home, capsys):
    there = home/"Qwen"/"Qwen2.5-VL-3B-Instruct"
    try:
        assert command.main(["qwengr00t"]) == 0 and command.main(["qwenoft"]) == 0 and len(hub) == 1
        said = capsys.readouterr().out
        assert "-p model neurovla -p image_size 224 -p lora_rank 8\n" in said and str(there) in said
        assert sorted(p.name for p in there.iterdir()) == sorted(p.name for p in (home/"lab"/"qwen").iterdir() if p.name != "generation_config.json")
        assert make_policy("qwenoft", 32).config["weights"] == ""   # the default name is found
        os.truncate(there/SHARD, 100)
        assert command.main(["qwenoft"]) == 0 and len(hub) == 2 and hub[1][2]["force_download"]
        assert "fetching it again" in capsys.readouterr().out
        folder, names = command.prepare(str(there))
        assert names == ["qwenoft", "qwengr00t", "neurovla"] and len(hub) == 2
    finally: shutil.rmtree(there, ignore_errors=True)


def test_the_command_compares_what_came_with_what_the_hub_has(hub, home, monkeypatch):
    import huggingface_hub
    real = huggingface_hub.snapshot_download

    def damaged(name, local_dir, **kw):
        real(name, local_dir, **kw)
        (local_dir/SHARD).write_bytes((local_dir/SHARD).read_bytes()[:-1]+b"x")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", damaged)
    with pytest.raises(ValueError, match=f"{SHARD} has another SHA-256"): command.prepare("lab/damaged")
    shutil.rmtree(home/"lab"/"damaged")


def test_the_command_says_why_it_could_not_fetch(hub, home, monkeypatch, capsys):
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError
    for error, says in ((OSError("no route to host"), "no route to host.*is there a network"),
                        (GatedRepoError.__new__(GatedRepoError), "accept it at https://huggingface.co/lab/none")):
        def fails(self, *a, **kw): raise error
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fails)
        with pytest.raises(ValueError, match=says): command.prepare("lab/none")
    assert command.main(["lab/none"]) == 1 and "clvla-weights:" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no model reads.*expected one of mllama, paligemma, qwen2_5_vl"):
        (home/"lab"/"gpt").mkdir()
        (home/"lab"/"gpt"/"config.json").write_text('{"model_type": "gpt2"}')
        command.prepare(str(home/"lab"/"gpt"))
