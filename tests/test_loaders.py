"Every loader refuses what it does not know: with a ValueError that names the file, whatever lies there in its place."
import errno
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from safetensors import SafetensorError

from clvla.core.names import ACTION, IMAGE, PROMPT, STATE
from clvla.core.config import config_json
from clvla.core.files import read_json, sha256, write_json
from clvla.data.controls import make_controls
from clvla.data.frames import FrameStore, write_store
from clvla.data.contents import file_at
from clvla.data.lerobot import camera_map, fingerprint, import_lerobot, read_lerobot
from clvla.data.lerobot_write import decode_image, write_lerobot
from clvla.data.stats import Processor, compute_stats, read_stats, recompute_stats, write_stats
from clvla.data.streams import Task, stream_from, stream_json
from clvla.envs.all import make_stream
from clvla.policies.all import load_policy, make_policy
from clvla.policies.weights import load_weights, read_policy, save_base, save_policy
from clvla.policies.lora import add_lora
from clvla.run.config import differences, from_page, read_config
from clvla.train.config import TrainConfig, resolve

SMALL = dict(image_size=32, D=16, n_blocks=1, n_rows=16)


def episode(T, seed=0, prompt="Push the block", size=12):
    g = np.random.default_rng(seed)
    return {IMAGE: g.integers(0, 255, (T, size, size, 3), np.uint8), STATE: g.normal(size=(T, 4)).astype(np.float32),
            ACTION: g.normal(size=(T, 4)).astype(np.float32), PROMPT: prompt}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("kinds"); store = write_store(home/"store", [episode(6), episode(5, 1)])
    processor = Processor(compute_stats(store)); write_stats(home/"dataset_statistics.json", processor.stats)
    write_json(home/"processor.json", processor.to_json())
    write_json(home/"controls.json", replace(processor, controls=make_controls([store], True, True)).to_json())
    write_json(home/"stream.json", stream_json(make_stream(dict(base="mw5_narrow", num_tasks=2))) | dict(stages=["handle-press", "window-close"]))
    write_lerobot(home/"lerobot", [episode(7), episode(5, 1, "Pull the block")])
    write_json(home/"run/config.json", config_json(resolve(TrainConfig(run_dir=str(home/"run"), data_dir=str(home)))))
    save_policy(make_policy("tiny", **SMALL), "tiny", home/"plain")
    policy = add_lora(make_policy("tiny", **SMALL), 2, 4.); save_base(policy, home/"weights"); save_policy(policy, "tiny", home/"lora")
    return home


LOADERS = {  # file, how it is read, dicts in it that belong to others
    "config": ("run/config.json", lambda f: read_config(f.parent), ("algo_kw", "cl_kw", "model_kw", "lr_of")),
    "policy": ("plain/policy.json", lambda f: load_policy(f.parent), ()),
    "lora": ("lora/policy.json", lambda f: load_policy(f.parent), ()),
    "stream": ("stream.json", lambda f: stream_from(read_json(f), f), ("env", "source")),
    "processor": ("processor.json", lambda f: Processor.from_json(read_json(f), f), ()),
    "controls": ("controls.json", lambda f: Processor.from_json(read_json(f), f), ()),
    "statistics": ("dataset_statistics.json", read_stats, ()),
    "frames": ("store/meta.json", lambda f: FrameStore.open(f.parent), ("source",)),
    "LeRobot": ("lerobot/meta/info.json", lambda f: list(read_lerobot(f.parents[1])), None),
}
FOREIGN = [None, True, 3, -1, 1e300, 10**400, "x", "../x", [], [None], {}, {"x": 1}]


def changes(d, own, path=()):
    "Edits of a document, one at a time: path of the dict, edit of that dict, does it have to be refused?"
    if isinstance(d, list) and d: yield from changes(d[0], own, (*path, 0))   # the first stands for all
    if not isinstance(d, dict): return
    yield path, lambda at: at.update(unheard_of=1), own is not None and not set(own) & set(path)
    for k in d:
        yield path, lambda at, k=k: at.pop(k), False
        for x in FOREIGN:
            yield path, lambda at, k=k, x=x: at.update({k: x}), False
        yield from changes(d[k], own, (*path, k))


@pytest.mark.parametrize("kind", LOADERS)
def test_no_edit_ends_in_anything_but_a_value_error(home, kind):
    name, load, own = LOADERS[kind]; file = home/name; data = file.read_bytes(); load(file); n = 0
    try:
        for path, edit, refused in changes(json.loads(data), own):
            d = json.loads(data); at = d
            for k in path: at = at[k]
            edit(at); file.write_text(json.dumps(d)); n += 1
            try: load(file)
            except ValueError as e: assert str(home) in str(e) or kind == "LeRobot", f"{path}: {e}"
            else: assert not refused, f"{path}: an unknown entry was passed over"
        for foreign in ([json.loads(data)], [], "x", 3, None, {}):
            if kind == "config" and foreign == {}: continue   # all settings had their defaults
            path = foreign; write_json(file, foreign)
            with pytest.raises(ValueError, match="store" if kind == "frames" else file.name if kind != "LeRobot" else "info.json|has version"): load(file)
    except Exception as e: raise AssertionError(f"{kind}, {path}: {file.read_text()[:2000]}") from e
    finally: file.write_bytes(data)
    assert n > 50; load(file)


@pytest.mark.parametrize("change,says", [
    (dict(seed=1), "no argument 'seed'"), (dict(name="tiny"), "no argument 'name'"), (dict(n_block=2), "did you mean 'n_blocks'"),
    (dict(D="wide"), "can be built: policy Tiny: D is 'wide'"), (dict(H=8.), "'H' is 8.0"), (dict(head="flwo"), "did you mean 'flow'"), (dict(D=32), "does not fit this policy")])
def test_arguments_of_a_stored_policy(home, tmp_path, change, says):
    d = read_json(home/"plain/policy.json"); write_json(tmp_path/"policy.json", d | dict(config=d["config"] | change))
    (tmp_path/"weights.safetensors").write_bytes((home/"plain/weights.safetensors").read_bytes())
    with pytest.raises(ValueError, match=says) as e: load_policy(tmp_path)
    assert str(tmp_path) in str(e.value)


def test_adapters_that_are_incomplete(home):
    f = home/"lora/policy.json"; data = f.read_bytes(); d = json.loads(data); assert read_policy(f.parent)["lora"]["rank"] == 2
    policy = load_policy(f.parent)
    try:
        for lora in (None, [], {}, dict(rank=2), d["lora"] | dict(base=None), d["lora"] | dict(base=dict(path="x")), d["lora"] | dict(rank=0),
                     d["lora"] | dict(alpha=0), d["lora"] | dict(base=d["lora"]["base"] | dict(sha256="x")), d["lora"] | dict(bias="all")):
            write_json(f, d | dict(lora=lora))
            for load in (read_policy, load_policy, lambda p: load_weights(policy, p)):
                with pytest.raises(ValueError, match="policy.json"): load(f.parent)
        write_json(f, d | dict(lora=d["lora"] | dict(base=d["lora"]["base"] | dict(path=".."))))
        with pytest.raises(ValueError, match="frozen weights"): load_policy(f.parent)
    finally: f.write_bytes(data)


def test_saving_a_policy_on_a_full_disk(home, tmp_path, monkeypatch):
    path = save_policy(make_policy("tiny", **SMALL), "tiny", tmp_path/"p"); before = sha256(path/"weights.safetensors")
    assert before == sha256(home/"plain/weights.safetensors")
    def full(*a, **kw): raise SafetensorError("I/O error: No space left on device (os error 28)")
    monkeypatch.setattr("clvla.core.state.save_file", full)
    with pytest.raises(OSError, match="No space left on device.*free some space") as e: save_policy(make_policy("tiny", **SMALL, seed=1), "tiny", path)
    assert e.value.errno == errno.ENOSPC and sha256(path/"weights.safetensors") == before and len(list(path.iterdir())) == 2


@pytest.mark.parametrize("file", ["../state.npy", "/etc/hostname", "x/../state.npy", "./state.npy", "action.npy", ""])
def test_a_frame_store_reads_in_its_own_folder(tmp_path, file):
    store = write_store(tmp_path/"s", [episode(5)]); m = store.meta; (tmp_path/"state.npy").write_bytes((store.path/"state.npy").read_bytes())
    write_json(store.path/"meta.json", m | dict(files=m["files"] | {STATE: m["files"][STATE] | dict(file=file)}))
    with pytest.raises(ValueError, match="meta.json.*expected 'state.npy'"): FrameStore.open(store.path)
    with pytest.raises(ValueError, match="cannot be stored"): write_store(tmp_path/"t", [episode(5) | {"observation.images.a/../b": episode(5)[IMAGE]}])


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04"+b"\0"*60, b"\x93NUMPY\x01\x00\x04\x00{'a\n", None], ids=["empty", "zip", "header", "another"])
def test_an_array_that_is_none(tmp_path, data):
    "Even when meta.json was made to fit."
    store = write_store(tmp_path/"s", [episode(5)]); m = store.meta
    for k in (STATE, IMAGE):
        f = store.path/m["files"][k]["file"]; whole = f.read_bytes()
        if data is None: np.save(f, np.zeros((5, 9), np.float32))
        else: f.write_bytes(data)
        write_json(store.path/"meta.json", m | dict(files=m["files"] | {k: m["files"][k] | dict(bytes=f.stat().st_size, sha256=sha256(f))}))
        with pytest.raises(ValueError, match=f"{f.name} is damaged"): FrameStore.open(store.path)
        f.write_bytes(whole)


def test_statistics_are_set_right(home, tmp_path):
    store = FrameStore.open(home/"store"); good = read_json(home/"dataset_statistics.json"); f = tmp_path/"dataset_statistics.json"
    for d, wrong in [([1], None), (good | dict(mask=[1]), ["mask"]), (good | {ACTION: good[ACTION] | dict(mask=[1])}, ["action.mask"]), (good | {ACTION: 3}, None)]:
        write_json(f, d)
        with pytest.raises(ValueError, match=f.name): read_stats(f)
        assert (recompute_stats(f, store) == wrong if wrong else len(recompute_stats(f, store)) >= 9) and read_stats(f) == good
    with pytest.raises(ValueError, match="unknown normalisation"): Processor(good, state_norm=["x"])


@pytest.mark.parametrize("spec", [3, [3], [None], dict(base=3), dict(base="mw5_narrow", num_tasks="2"), dict(base="mw5_narrow", tasks=3), dict(base="mw5_narrow", cycles="x"),
                                  dict(base="mw5_narrow", task_order=[0, None, 1, 2, 3]), dict(base="mw5_narrow", task_order=[True, False, 2, 3, 4]),
                                  dict(base="mw5_narrow", partition=[]), {}])
def test_streams_that_are_none(spec):
    with pytest.raises(ValueError): make_stream(spec)


@pytest.mark.parametrize("change,says", [
    (dict(seed="3"), "'seed': found '3'"), (dict(seed=True), "expected int"), (dict(algo=3), "'algo'"), (dict(lr=float("inf")), "'lr'"),
    (dict(suite=3), "'suite'"), (dict(algo_kw=[]), "'algo_kw'"), (dict(smoke=0), "'smoke'"), (dict(seed=3.), "'seed'"), (dict(sede=3), "did you mean 'seed'")])
def test_stored_configs(home, tmp_path, change, says):
    d = read_json(home/"run/config.json") | change; (tmp_path/"config.json").write_text(json.dumps(d))
    with pytest.raises(ValueError, match=says) as e: read_config(tmp_path)
    assert str(tmp_path/"config.json") in str(e.value)
    for k in ("lora_rank", "keep"): d.pop(k)     # a run of before these settings
    write_json(tmp_path/"config.json", {k: v for k, v in d.items() if k not in change} | dict(lr=1)); assert read_config(tmp_path).lr == 1.
    with pytest.raises(ValueError, match="config.json"): differences([d], TrainConfig())
    for text in ("[1", "{[]: 1}", "["*3000): # as typed
        with pytest.raises(ValueError, match="'suite'"): from_page(TrainConfig, dict(suite=text), set())


# LeRobot's files have many entries that are not read here; those that are read must be right

@pytest.fixture
def films(tmp_path):
    "A data set whose pictures are said to lie in videos."
    path = write_lerobot(tmp_path/"set", [episode(7)]); info = read_json(path/"meta/info.json"); info["features"][IMAGE]["dtype"] = "video"
    write_json(path/"meta/info.json", info | dict(video_path="videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"))
    (tmp_path/"out.mp4").write_bytes(b"x"); rows(path); return path


def rows(path, drop=(), **change):
    "Give the table of episodes the columns of videos."
    f = path/"meta/episodes/chunk-000/file-000.parquet"; t = pq.read_table(f)
    for k, v in (dict(chunk_index=0, file_index=0, from_timestamp=0.) | change).items():
        name = f"videos/{IMAGE}/{k}"; t = t.drop_columns(name) if name in t.column_names else t
        if k not in drop: t = t.append_column(name, pa.array([v]))
    pq.write_table(t, f)


@pytest.mark.parametrize("template", ["../out.mp4", "videos/../../out.mp4", "{video_key.__class__}.mp4", "{video_key!r}", "{chunk_index:999999999d}", "{0}", "{",
                                      "{episode_index}", 3, None, ["x"], "/etc/hostname", "{video_key:>9999999999}"])
def test_templates_stay_inside(films, template):
    info = read_json(films/"meta/info.json")
    with pytest.raises(ValueError, match="there is no video"): list(read_lerobot(films))   # it got that far
    write_json(films/"meta/info.json", info | dict(video_path=template))
    with pytest.raises(ValueError, match="'video_path' of meta/info.json"): list(read_lerobot(films))
    write_json(films/"meta/info.json", info | dict(data_path=template))
    with pytest.raises(ValueError, match="'data_path' of meta/info.json"): list(read_lerobot(films))
    assert file_at("a/{chunk_index:03d}/{file_index}", "x", chunk_index=1, file_index=2) == "a/001/2"


@pytest.mark.parametrize("change,says", [(dict(chunk_index="../.."), "of episode 0"), (dict(from_timestamp=-1.), "of episode 0"), (dict(from_timestamp=float("nan")), "of episode 0"),
                                         (dict(file_index=None), "of episode 0"), (dict(drop=["file_index"]), "lacks columns")])
def test_tables_of_episodes(films, change, says):
    rows(films, **change)
    with pytest.raises(ValueError, match=says): list(read_lerobot(films))


@pytest.mark.parametrize("data", [b"", b"x"*99, b"#EXTM3U\n#EXTINF:1,\n../../../out.mp4\n", b"ffconcat version 1.0\nfile ../../../out.mp4\n"])
def test_a_video_that_is_none(films, data):
    f = films/f"videos/{IMAGE}/chunk-000/file-000.mp4"; f.parent.mkdir(parents=True); f.write_bytes(data)
    with pytest.raises(ValueError, match="file-000.mp4 is damaged"): list(read_lerobot(films))
    info = read_json(films/"meta/info.json")
    for fps in (None, 0, "10", [1]):
        write_json(films/"meta/info.json", info | dict(fps=fps))
        with pytest.raises(ValueError, match="'fps'"): list(read_lerobot(films))


def table(f, **change):
    t = pq.read_table(f)
    for k, v in change.items():
        t = t.drop_columns(k)
        if v is not None: t = t.append_column(k, pa.array(v))
    pq.write_table(t, f)


@pytest.mark.parametrize("file,change,says", [
    ("meta/tasks.parquet", dict(task_index=["0"]), "tasks.parquet must give"), ("meta/tasks.parquet", dict(task_index=None), "needs columns"),
    ("meta/tasks.parquet", dict(task_index=[7]), "frames of instruction 0"), ("data/chunk-000/file-000.parquet", dict(task_index=None), "lacks columns"),
    ("data/chunk-000/file-000.parquet", dict(episode_index=["a"]*7), "whole numbers"), ("data/chunk-000/file-000.parquet", {ACTION: None}, "lacks columns"),
    ("data/chunk-000/file-000.parquet", {ACTION: [["a"]]*7}, "column action"), ("data/chunk-000/file-000.parquet", {STATE: [[1.], [1., 2.], *[[1.]]*5]}, "column observation.state"),
    ("data/chunk-000/file-000.parquet", {IMAGE: [dict(bytes=None, path="/etc/hostname")]*7}, f"column {IMAGE}"),
    ("data/chunk-000/file-000.parquet", {IMAGE: [dict(bytes=b"%!PS-Adobe-3.0 EPSF-3.0\n", path="")]*7}, f"column {IMAGE}")])
def test_tables_of_a_data_set(tmp_path, file, change, says):
    path = write_lerobot(tmp_path/"set", [episode(7)]); table(path/file, **change)
    with pytest.raises(ValueError, match=says): list(read_lerobot(path))
    for data in (b"", b"x"*99, b"PAR1"+b"x"*50+b"\x10\0\0\0PAR1"):
        (path/file).write_bytes(data)
        with pytest.raises(ValueError, match=Path(file).name+" is damaged"): list(read_lerobot(path))


def test_columns_and_sources(home, tmp_path):
    info = read_json(home/"lerobot/meta/info.json"); path = home/"lerobot"
    for feats in (None, [], {"x": 3}, {IMAGE: dict(dtype="image")}, {IMAGE: dict(dtype=3, shape=[1])}):
        with pytest.raises(ValueError, match="dtype and shape"): camera_map(info | dict(features=feats), at=path)
    with pytest.raises(ValueError, match="holds no pictures"): camera_map(info, {IMAGE: ACTION}, path)
    with pytest.raises(OSError): decode_image(b"%!PS-Adobe-3.0 EPSF-3.0\n")
    for source in (dict(kind="lerobot"), dict(kind="lerobot", parts=[3]), dict(kind="lerobot", parts=[dict(path=3)]), dict(kind="lerobot", parts=[], x=1),
                   dict(kind="lerobot", parts=[dict(path=str(path), task_index=["0"])])):
        with pytest.raises(ValueError, match="the source of task 'a'"): fingerprint(Task("a", "a", "a", None, source))
    assert len(import_lerobot(path, tmp_path/"x")) == 2
