"Checkpoints under faults: files cut, flipped and missing, no space, no permission, a process killed at each step."
import errno
import json
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from clvla.core.batch import global_rng_state, set_global_rng_state, torch_rng
from clvla.core.state import load_state, read_tensors, save_state, write_tensors
from clvla.core.files import clean_temporary, fsync, json_text, os_error, read_json, sha256, write_atomic, write_json
from clvla.policies.all import load_policy, make_policy
from clvla.policies.weights import save_policy
from clvla.run.checkpoint import (check_checkpoint, checkpoints, clean, is_inside, latest_checkpoint, latest_name,
    load_checkpoint, prune, read_manifest, save_checkpoint)

torch.set_num_threads(1)
NAMES = ("000-handle-press", "001+000120-window-close", "001-window-close")
DOCS = {"config.json": dict(algo="er", seed=0), "position.json": dict(t=1, name="window-close"), "empty.json": {}}


def small(t=0, n=1000):
    "A state with everything that a state may hold."
    return dict(t=t, w=torch.randn(n, generator=torch_rng(t, "w")), opt={0: dict(step=torch.tensor(3.)), "0": torch.ones(2)},
                at=(1, None, "x", [2., float("inf")]), mask=torch.ones(3, dtype=torch.bool), n=np.arange(3), half=torch.ones(2).bfloat16())


def save(root, name, t=0, **kw):
    return save_checkpoint(root, name, small(t), DOCS, **kw)


def same(a, b):
    "Whether two states are equal to the bit, types included."
    if isinstance(a, np.ndarray): a = torch.from_numpy(a)
    if torch.is_tensor(a): return torch.is_tensor(b) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b): return False
    if isinstance(a, dict): return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)): return len(a) == len(b) and all(map(same, a, b))
    return a == b


def hidden(root):
    "Temporary things in a folder and the folders in it."
    return sorted(p.name for p in Path(root).rglob(".*"))


# what is written is what is read

def test_a_checkpoint_comes_back(tmp_path):
    policy = make_policy("tiny", seed=3)
    path = save(tmp_path, NAMES[1], 7, policy=lambda d: save_policy(policy, "tiny", d), extra=lambda d: write_json(d/"more.json", 1))
    assert {p.name for p in path.iterdir()} >= {*DOCS, "state.safetensors", "weights.safetensors", "policy.json", "more.json"}
    assert not check_checkpoint(path) and same(small(7), load_checkpoint(path)) and not hidden(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(policy.state_dict().values(), load_policy(path).state_dict().values()))
    assert latest_name(tmp_path) == path.name == latest_checkpoint(tmp_path).name and read_json(path/"config.json") == DOCS["config.json"]
    assert read_manifest(path)["config.json"] == dict(sha256=sha256(path/"config.json"), bytes=(path/"config.json").stat().st_size)


def test_names_sort_in_time_and_ends_are_known(tmp_path):
    names = ["000+000005-a+b", "000-a+b", "001+000009-c", "001+000120-c", "001-c", "002-joint"]
    for n in random.Random(0).sample(names, len(names)): save(tmp_path, n)
    (tmp_path/".hidden").mkdir(); (tmp_path/"file").touch()
    assert [p.name for p in checkpoints(tmp_path)] == names and checkpoints(tmp_path/"none") == []
    assert [p.name for p in checkpoints(tmp_path, ends=True)] == ["000-a+b", "001-c", "002-joint"]
    assert [is_inside(tmp_path/n) for n in names] == [True, False, True, True, False, False]


@pytest.mark.parametrize("name", ["", ".x", "../x", "a/b", "LATEST", "a b", "/x"])
def test_names_that_cannot_be(tmp_path, name):
    with pytest.raises(ValueError, match="cannot name a checkpoint"): save(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_the_same_name_again_replaces(tmp_path):
    save(tmp_path, NAMES[0], 1); save(tmp_path, NAMES[0], 2)
    assert load_checkpoint(tmp_path/NAMES[0])["t"] == 2 and sorted(p.name for p in tmp_path.iterdir()) == [NAMES[0], "LATEST"]


def test_files_in_folders_belong_to_it(tmp_path):
    def adapter(d): (d/"adapter/deep").mkdir(parents=True); (d/"adapter/deep/a.bin").write_bytes(b"abc")
    path = save(tmp_path, NAMES[0], extra=adapter)
    assert not check_checkpoint(path) and "adapter/deep/a.bin" in read_manifest(path)
    (path/"adapter/deep/a.bin").write_bytes(b"abd"); assert "adapter/deep/a.bin was changed" in check_checkpoint(path)[0]


def test_files_are_as_readable_as_their_folder(tmp_path):
    old = os.umask(0o027)
    try: path = save(tmp_path, NAMES[0])
    finally: os.umask(old)
    assert {oct(p.stat().st_mode & 0o777) for p in path.iterdir()} == {"0o640"}


# damage

@pytest.fixture(scope="module")
def two(tmp_path_factory):
    "Two whole checkpoints with the tiny policy's weights; whoever damages one mends it."
    root = tmp_path_factory.mktemp("two"); policy = make_policy("tiny")
    for t, n in enumerate(NAMES[:2]): save(root, n, t, policy=lambda d: save_policy(policy, "tiny", d))
    return root


def seen(root, file):
    "The damage of the newer checkpoint is found and named, and the older one is used; all of it is said."
    path, said = root/NAMES[1], []
    bad = check_checkpoint(path)
    assert any(file in b for b in bad), f"{file}: {bad}"
    with pytest.raises(ValueError, match="is not whole"): load_checkpoint(path)
    assert latest_checkpoint(root, said.append).name == NAMES[0]
    assert len(said) == 1 and NAMES[1] in said[0] and file in said[0]


def cuts(n):
    return sorted({0, 1, n//2, n-1, *(k for k in (4096, 8192, n//4096*4096) if k < n)})


def flips(n, file):
    "(byte, bit): the first, the middle, the last, and in a tensor file the header's length, beginning and end."
    places = {0: 0, n//2: 3, n-1: 7, n//3: 1, 2*n//3: 6}
    return list((places | ({7: 2, 8: 0, 9: 4, 40: 5} if file.endswith(".safetensors") else {1: 1})).items())


def test_every_file_cut_flipped_and_missing(two):
    path = two/NAMES[1]; files = sorted(p.name for p in path.iterdir()); tried = 0
    assert len(files) == 7
    for file in files:
        p = path/file; data = p.read_bytes()
        wrong = [data[:k] for k in cuts(len(data))]+[data+b"\n", bytes(len(data))]
        for at, bit in flips(len(data), file): b = bytearray(data); b[at] ^= 1 << bit; wrong.append(bytes(b))
        for w in wrong: p.write_bytes(w); seen(two, file); tried += 1
        p.unlink(); seen(two, file)
        p.mkdir(); seen(two, file); p.rmdir()
        p.write_bytes(data); assert not check_checkpoint(path)
    assert tried > 70


def test_every_bit_of_a_manifest_counts(tmp_path):
    path = save_checkpoint(tmp_path, NAMES[0], dict(t=0), {}); m = path/"manifest.json"; data = m.read_bytes()
    for at in range(8*len(data)):
        b = bytearray(data); b[at//8] ^= 1 << at % 8; m.write_bytes(b)
        assert check_checkpoint(path), (at, bytes(b))
    for k in range(len(data)): m.write_bytes(data[:k]); assert check_checkpoint(path), k
    m.write_bytes(data); assert not check_checkpoint(path)


@pytest.mark.parametrize("text,says", [
    ("", "not valid JSON"), ("{", "not valid JSON"), ("null", "no manifest"), ("[]", "no manifest"), ("3", "no manifest"), ('"x"', "no manifest"),
    ("{}", "no manifest"), ('{"format": 1}', "no manifest"), ('{"format": 2, "files": {}}', "format 2, this version reads 1"),
    ('{"format": true, "files": {}}', "format True"), ('{"format": "1", "files": {}}', "format '1'"), ('{"format": 1, "files": []}', "no manifest"),
    ('{"format": 1, "files": {"a": 3}}', "no manifest"), ('{"format": 1, "files": {"a": {"sha256": "x", "bytes": "3"}}}', "no manifest"),
    ('{"format": 1, "files": {}, "more": 1}', "no manifest"), ('{"format": 1, "files": {}}', "changed after it was written"), ("["*100_000, "not valid JSON"),
])
def test_manifests_that_are_none(two, text, says):
    m = two/NAMES[1]/"manifest.json"; data = m.read_bytes()
    try:
        m.write_text(text); assert says in check_checkpoint(two/NAMES[1])[0]; seen(two, "manifest.json")
        m.write_bytes(b"\xff\xfe"+data); seen(two, "manifest.json")
    finally: m.write_bytes(data)


@pytest.mark.parametrize("edit,file,says", [
    (lambda f: f.pop("config.json"), "config.json", "unexpected"), (lambda f: f.pop("state.safetensors"), "state.safetensors", "does not name"),
    (lambda f: f["config.json"].update(bytes=1), "config.json", "bytes, not 1"), (lambda f: f["config.json"].update(sha256="0"*64), "config.json", "was changed"),
    (lambda f: f.update({"new.json": f["config.json"]}), "new.json", "is missing"), (lambda f: f.update({"../x": f["config.json"]}), "../x", "elsewhere"),
    (lambda f: f.update({"/etc/passwd": f["config.json"]}), "/etc/passwd", "elsewhere"),
])
def test_manifests_that_were_edited(two, edit, file, says):
    "The edited manifest is written exactly as save_checkpoint would: what it says is still not what lies there."
    m = two/NAMES[1]/"manifest.json"; data = m.read_bytes(); doc = json.loads(data)
    try:
        edit(doc["files"]); m.write_text(json_text(doc)); seen(two, file); assert any(says in b for b in check_checkpoint(two/NAMES[1]))
    finally: m.write_bytes(data)


def test_documents_are_json_even_if_their_hash_is_right(tmp_path):
    save(tmp_path, NAMES[0]); path = save(tmp_path, NAMES[1], extra=lambda d: (d/"note.json").write_text('{"a": '))
    seen(tmp_path, "note.json"); assert "no JSON" in check_checkpoint(path)[0]


def test_files_that_nobody_named(two):
    p = two/NAMES[1]
    (p/"weights.pkl").touch(); seen(two, "weights.pkl is unexpected"); (p/"weights.pkl").unlink()
    (p/"more").mkdir(); assert not check_checkpoint(p); (p/"more/x").touch(); seen(two, "more/x"); shutil.rmtree(p/"more")
    (p/".nfs0001").touch(); assert not check_checkpoint(p); (p/".nfs0001").unlink()


def test_a_file_that_cannot_be_read(two, monkeypatch):
    import clvla.run.checkpoint as c
    def bad(p):
        if Path(p).parent.name == NAMES[1] and Path(p).name == "config.json": raise OSError(errno.EIO, "Input/output error")
        return sha256(p)
    monkeypatch.setattr(c, "sha256", bad); seen(two, "config.json cannot be read (Input/output error)")


def test_latest_is_only_a_hint(tmp_path):
    assert latest_checkpoint(tmp_path/"none") is None and latest_checkpoint(tmp_path) is None
    for n in NAMES: save(tmp_path, n)
    for content in ("", "{", "3", '"../.."', '"'+NAMES[0]+'"'):
        (tmp_path/"LATEST").write_text(content); assert latest_checkpoint(tmp_path, pytest.fail).name == NAMES[2]
    write_json(tmp_path/"LATEST", NAMES[2]); shutil.rmtree(tmp_path/NAMES[2]); said = []
    assert latest_checkpoint(tmp_path, said.append).name == NAMES[1] and "names 001-window-close, which is missing" in said[0]
    for n in NAMES[:2]: (tmp_path/n/"state.safetensors").unlink()
    assert latest_checkpoint(tmp_path, said.append) is None and len(said) == 4


@pytest.mark.parametrize("path", ["nowhere", "file"])
def test_no_checkpoint_at_all(tmp_path, path):
    (tmp_path/"file").touch()
    assert check_checkpoint(tmp_path/path) == ["there is no such folder"]
    with pytest.raises(ValueError, match="no such folder"): load_checkpoint(tmp_path/path)


# state files

def test_states_come_back(tmp_path):
    s = small() | {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}, 1: torch.zeros(2), "1": torch.ones(2), 2.5: "x", None: False}
    save_state(tmp_path/"s", s); assert same(s, load_state(tmp_path/"s"))


def test_every_bit_of_a_header(tmp_path):
    "A damaged header gives ValueError with the file's name, or (a digit of a number, a letter of a key) another state: hashes are for that."
    p = tmp_path/"s.safetensors"; save_state(p, dict(a=torch.ones(2), b=[1, dict(c=torch.zeros(1, dtype=torch.int64))])); data = p.read_bytes(); n = 0
    for at in range(8*(8+int.from_bytes(data[:8], "little"))):
        b = bytearray(data); b[at//8] ^= 1 << at % 8; p.write_bytes(b)
        try: load_state(p)
        except ValueError as e: n += str(p) in str(e); assert str(p) in str(e)
    assert n > 1000
    for k in range(len(data)):
        p.write_bytes(data[:k])
        with pytest.raises(ValueError, match="s.safetensors is damaged"): load_state(p)


@pytest.mark.parametrize("skeleton,says", [
    ("", "Expecting"), ("{", "Expecting"), ('{"object": "os.system"}', "unknown kind 'object'"), ('{"tensor": "a", "dict": []}', "no kind"), ("{}", "no kind"),
    ("[1]", "no kind"), ('{"tensor": 3}', "unknown kind"), ('{"tensor": "z"}', "missing"), ('{"list": [{"tensor": "a"}, {"tensor": "a"}]}', "used twice"),
    ('{"dict": {"a": 1}}', "unknown kind"), ('{"dict": [["a"]]}', "pairs"), ('{"dict": [[["a"], 1]]}', "pairs"), ('{"dict": ["ab"]}', "pairs"), ("1", "not mention: a"),
    ('{"list": ['*5000+"]}"*5000, "recursion"),
])
def test_foreign_skeletons(tmp_path, skeleton, says):
    write_tensors(tmp_path/"s.st", dict(a=torch.ones(1)), dict(skeleton=skeleton))
    with pytest.raises(ValueError, match=says) as e: load_state(tmp_path/"s.st")
    assert "s.st" in str(e.value)


def test_state_files_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="there is no file"): load_state(tmp_path/"none")
    with pytest.raises(ValueError, match="there is no file"): load_state(tmp_path)
    (tmp_path/"x").write_text("hello, this is no tensor file at all"); write_tensors(tmp_path/"w", dict(a=torch.ones(1)))
    with pytest.raises(ValueError, match="damaged or no safetensors"): load_state(tmp_path/"x")
    with pytest.raises(ValueError, match="was it written by save_state"): load_state(tmp_path/"w")
    assert same(read_tensors(tmp_path/"w")[0], dict(a=torch.ones(1)))


@pytest.mark.parametrize("bad,says", [(dict(a=print), "found builtin_function_or_method at /a"), ({(1, 2): 3}, "keys of a state"), (dict(a={object: 1}), "at /a"),
                                      (dict(a={1}), "found set at /a"), ({np.int64(3): 1}, "keys of a state")])
def test_what_a_state_cannot_hold(tmp_path, bad, says):
    with pytest.raises(TypeError, match=says): save_state(tmp_path/"s", bad)
    assert not list(tmp_path.iterdir())


def test_a_header_that_could_not_be_read_again_is_not_written(tmp_path, monkeypatch):
    import clvla.core.state as b
    monkeypatch.setattr(b, "HEADER", 2000)
    with pytest.raises(ValueError, match="turn long lists of the state into arrays or tensors"): save_state(tmp_path/"s", dict(a=list(range(1000))))
    save_state(tmp_path/"s", dict(a=np.arange(1000))); assert load_state(tmp_path/"s")["a"].tolist() == list(range(1000))


def test_global_generators_go_on(tmp_path):
    def draw(): return [random.random() for _ in range(5)], np.random.normal(size=5).tolist(), torch.randn(5).tolist(), random.gauss(0, 1), np.random.normal()
    before = global_rng_state()
    try:
        for _ in range(3):
            draw(); save_state(tmp_path/"g", global_rng_state()); a = draw(); draw()
            set_global_rng_state(load_state(tmp_path/"g")); assert draw() == a
    finally: set_global_rng_state(before)
    with pytest.raises(ValueError, match="are needed"): set_global_rng_state(before | dict(jax=1))


def test_generators_of_gpus_that_are_there(tmp_path, monkeypatch):
    "Two generators stand in for two GPUs: both go on; with one GPU less, the first goes on; CUDA is not started for the question."
    assert global_rng_state()["cuda"] == [] or torch.cuda.is_initialized()
    gpus = [torch_rng(k, "gpu") for k in range(2)]; draw = lambda: [torch.rand(3, generator=g).tolist() for g in gpus]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True); monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [g.get_state() for g in gpus])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda s, i: gpus[i].set_state(s))
    save_state(tmp_path/"g", global_rng_state()); a = draw(); set_global_rng_state(load_state(tmp_path/"g")); assert draw() == a
    gpus.pop(); set_global_rng_state(load_state(tmp_path/"g")); assert draw() == a[:1]


@pytest.mark.parametrize("device", ["cpu", *["cuda"]*torch.cuda.is_available()])
def test_the_generator_of_a_device_goes_on(tmp_path, device):
    torch.randn(3, device=device); save_state(tmp_path/"g", global_rng_state()); a = torch.randn(9, device=device); torch.randn(3, device=device)
    set_global_rng_state(load_state(tmp_path/"g")); assert torch.equal(torch.randn(9, device=device), a)


# temporary files

def test_only_leftovers_of_the_dead_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""]); dead.wait()
    left = lambda pid, host=platform.node(): f".a.json.{pid}@{host}.0123abcd.tmp"
    names = dict(dead=left(dead.pid), mine=left(os.getpid()), living=left(os.getppid()), init=left(1), elsewhere=left(5, "other.host"), old=left(6, "other.host"))
    for n in names.values(): (tmp_path/"deep"/n).mkdir(parents=True)
    os.utime(tmp_path/"deep"/names["old"], (time.time()-90_000,)*2)
    others = [".a.tmp", ".vimrc.tmp", f".x.{dead.pid}@{platform.node()}.tmp", "a.json", f".f.{dead.pid}@{platform.node()}.0123abcd.tmp"]
    for n in others: (tmp_path/"deep"/n).touch()
    assert clean_temporary(tmp_path) == [] and clean_temporary(tmp_path/"none") == []
    gone = {p.name for p in clean_temporary(tmp_path, deep=True)}
    assert gone == {names[k] for k in ("dead", "mine", "old")}   # mine: a process before this one had the same number
    assert {p.name for p in (tmp_path/"deep").iterdir()} == {*others, names["living"], names["init"], names["elsewhere"]}


def test_what_is_being_written_is_not_removed(tmp_path):
    def write(tmp): assert clean_temporary(tmp_path) == []; Path(tmp).write_text("x")
    assert write_atomic(tmp_path/"a", write).read_text() == "x" and not hidden(tmp_path)


@pytest.mark.parametrize("no,says", [(errno.ENOSPC, "free some space"), (errno.EDQUOT, "free some space"), (errno.EACCES, "this user may write to"),
                                     (errno.EROFS, "this user may write to"), (errno.EIO, "look at the disk")])
def test_the_error_says_what_helps_and_keeps_its_number(no, says):
    e = os_error("no", OSError(no, os.strerror(no)))
    assert says in str(e) and e.errno == no and type(e) is type(OSError(no, "")) and "again" in str(e)


def test_a_file_in_place_is_not_called_untouched(tmp_path, monkeypatch):
    "When the last step fails, the new file is there, and the message must not deny it."
    import clvla.core.files as c
    def bad(p):
        if Path(p) == tmp_path: raise OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(c, "fsync", bad); (tmp_path/"a").write_text("old")
    with pytest.raises(OSError, match="is written, but not surely on the disk: Input/output error"): write_json(tmp_path/"a", 1)
    assert read_json(tmp_path/"a") == 1 and not hidden(tmp_path)


def test_a_file_system_that_cannot_sync_folders(tmp_path, monkeypatch):
    real = os.fsync
    def f(fd):
        if os.path.isdir(f"/proc/self/fd/{fd}"): raise OSError(errno.EINVAL, "Invalid argument")
        real(fd)
    monkeypatch.setattr(os, "fsync", f); write_json(tmp_path/"a", 1); fsync(tmp_path); assert not check_checkpoint(save(tmp_path, NAMES[0]))


# no permission, no space: the k-th call of the system fails

CALLS = ("fsync", "replace", "mkdir", "open", "chmod")


def fail_at(monkeypatch, k, no, stays):
    "From now on the k-th call fails (and, if it stays, all later ones that need space); returns the count."
    count = [0]
    def wrap(name, real):
        def f(*a, **kw):
            count[0] += 1
            if count[0] == k or stays and count[0] > k and name != "open": raise OSError(no, os.strerror(no))
            return None if name == "fsync" else real(*a, **kw)   # nobody pulls the plug here: what is synced does not matter
        return f
    for name in CALLS: monkeypatch.setattr(os, name, wrap(name, getattr(os, name)))
    return count


@pytest.mark.parametrize("no,stays", [(errno.EACCES, False), (errno.ENOSPC, True)])
@pytest.mark.parametrize("name", [NAMES[1], NAMES[2]], ids=["again", "new"])
def test_a_call_fails_at_each_step(tmp_path, monkeypatch, no, stays, name):
    base = tmp_path/"base"
    for t, n in enumerate(NAMES[:2]): save(base, n, t)
    failed = 0
    for k in range(1, 500):
        root = shutil.copytree(base, tmp_path/f"{k}")
        with monkeypatch.context() as m:
            count = fail_at(m, k, no, stays)
            try: save(root, name, 5)
            except OSError as e: error = e; failed += 1
            else: error = None
        said = []; last = latest_checkpoint(root, said.append); new = load_checkpoint(last)["t"] == 5
        aside = not (root/latest_name(root)).exists()   # the rename failed, and so did the one that should undo the one before
        if aside: assert stays and last.name == NAMES[0] and "which is missing" in said.pop()
        else: assert last.name in (name, NAMES[1]) and not check_checkpoint(root/latest_name(root))
        assert not said and not check_checkpoint(root/NAMES[0])
        if error:
            assert error.errno == no and "start the same command again" in str(error) and str(root/name) in str(error)
            assert ("is in place" in str(error)) == new and new or f"go on from {last.name}, which is whole" in str(error)
        else: assert new
        clean(root); assert not hidden(root) and not check_checkpoint(latest_checkpoint(root, pytest.fail))
        assert not check_checkpoint(save(root, name, 6)) and load_checkpoint(latest_checkpoint(root, pytest.fail))["t"] == 6
        shutil.rmtree(root)
        if count[0] < k: break
    assert k > 30 and failed > 20, (k, failed)


def test_the_folder_is_a_file(tmp_path):
    (tmp_path/"runs").write_text("mine")
    with pytest.raises(OSError, match="no whole one before it; a part of the path is a file"): save(tmp_path/"runs/checkpoints", NAMES[0])
    assert (tmp_path/"runs").read_text() == "mine"


@pytest.mark.parametrize("error", [KeyboardInterrupt, TypeError("a state may not"), MemoryError])
def test_other_errors_pass_and_leave_nothing(tmp_path, error):
    def stop(d): raise error
    save(tmp_path, NAMES[0], 1)
    with pytest.raises(error if isinstance(error, type) else type(error)): save(tmp_path, NAMES[0], 2, policy=stop)
    assert not hidden(tmp_path) and load_checkpoint(tmp_path/NAMES[0])["t"] == 1


def test_everything_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    "Files and their folder are synced before the rename, the folder above after it, LATEST last."
    did, fsync_, replace_ = [], os.fsync, os.replace
    def sync(fd): did.append(("sync", os.readlink(f"/proc/self/fd/{fd}"))); fsync_(fd)
    def move(a, b): did.append(("move", str(b))); replace_(a, b)
    monkeypatch.setattr(os, "fsync", sync); monkeypatch.setattr(os, "replace", move)
    path = save(tmp_path, NAMES[0], extra=lambda d: (d/"plain.txt").write_text("x")); at = did.index(("move", str(path)))
    tmp = tmp_path/f".{NAMES[0]}.writing"; synced = {p for k, p in did[:at] if k == "sync"}
    for p in path.iterdir(): assert any(q.endswith("/"+p.name) for q in synced), p
    assert str(tmp/"plain.txt") in synced and did[at-1] == ("sync", str(tmp)) and did[at+1] == ("sync", str(tmp_path))
    assert did[-2:] == [("move", str(tmp_path/"LATEST")), ("sync", str(tmp_path))]


def test_a_policy_that_meets_the_full_disk_inside_safetensors(tmp_path):
    from safetensors import SafetensorError
    def full(d): raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(OSError, match="No space left on device; there is no whole one before it; free some space") as e: save(tmp_path, NAMES[0], policy=full)
    assert e.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


# pruning and cleaning

def test_pruning(tmp_path):
    for t in range(3):
        for k in (10, 20, 30): save(tmp_path, f"{t:03d}+{k:06d}-a")
        save(tmp_path, f"{t:03d}-a")
    (tmp_path/"mine").mkdir()
    assert len(prune(tmp_path, 100)) == 0
    gone = prune(tmp_path, 3); assert len(gone) == 7 and not hidden(tmp_path)
    assert [p.name for p in checkpoints(tmp_path)] == ["mine", "000-a", "001-a", "002+000020-a", "002+000030-a", "002-a"]
    assert len(prune(tmp_path, 1)) == 2 and len(checkpoints(tmp_path, ends=True)) == 4 and prune(tmp_path, 1) == []
    with pytest.raises(ValueError, match="keep must be at least 1"): prune(tmp_path, 0)


def test_a_damaged_one_does_not_push_out_a_whole_one(tmp_path):
    for k in (10, 20, 30): save(tmp_path, f"000+{k:06d}-a")
    os.truncate(tmp_path/"000+000030-a/state.safetensors", 10); save(tmp_path, "000+000020-a")
    assert prune(tmp_path, 1) == ["000+000010-a"] and latest_checkpoint(tmp_path, str).name == "000+000020-a"


def test_pruning_keeps_what_the_run_goes_on_from(tmp_path):
    "The newest by name may be a ruin of the right size; LATEST was written just now."
    for k in (10, 30, 20): save(tmp_path, f"000+{k:06d}-a")
    assert prune(tmp_path, 1) == ["000+000010-a"] and {p.name for p in checkpoints(tmp_path)} == {"000+000020-a", "000+000030-a"}


def test_cleaning(tmp_path):
    assert clean(tmp_path/"none") == []
    save(tmp_path, NAMES[0], 1); shutil.copytree(tmp_path/NAMES[0], tmp_path/f".{NAMES[0]}.old"); save(tmp_path, NAMES[2], 2)
    (tmp_path/NAMES[2]).rename(tmp_path/f".{NAMES[2]}.old"); shutil.copytree(tmp_path/NAMES[0], tmp_path/f".{NAMES[1]}.removing")
    for n in (".x.writing", ".mine"): (tmp_path/n).mkdir()
    assert sorted(clean(tmp_path)) == sorted([f".{NAMES[0]}.old", f".{NAMES[2]}.old", f".{NAMES[1]}.removing", ".x.writing"])
    assert hidden(tmp_path) == [".mine"] and [p.name for p in checkpoints(tmp_path)] == [NAMES[0], NAMES[2]] and load_checkpoint(tmp_path/NAMES[2])["t"] == 2


# in processes of their own: this file is also the script that they run

def script(*args, before=()):
    p = subprocess.run([*before, sys.executable, __file__, *map(str, args)], capture_output=True, text=True, timeout=300,
                       env=os.environ | dict(OMP_NUM_THREADS="1"))
    return p.returncode, p.stdout+p.stderr


def in_child(f):
    "Run `f` in a fork; returns how it ended."
    if pid := os.fork(): return os.waitpid(pid, 0)[1]
    try: f(); os._exit(0)
    except BaseException as e: print(repr(e), flush=True); os._exit(1)


def kill_at(k):
    "This process ends by SIGKILL before its k-th change of the file system."
    count = [0]
    def wrap(name, real):
        def f(*a, **kw):
            count[0] += 1
            if count[0] == k: os.kill(os.getpid(), signal.SIGKILL)
            return None if name == "fsync" else real(*a, **kw)
        return f
    for name in (*CALLS, "unlink", "rmdir"): setattr(os, name, wrap(name, getattr(os, name)))


def whole_after_kill(root, name, old):
    "After a kill: the newest whole checkpoint is the old or the new one; after cleaning all is whole and nothing else is there."
    last = latest_checkpoint(root, str)
    assert last is not None and not check_checkpoint(root/NAMES[0]) and not check_checkpoint(last)
    clean(root); last = latest_checkpoint(root, print)
    assert not hidden(root), hidden(root)
    assert load_checkpoint(last)["t"] in (5, old) and last.name in (name, NAMES[1]) and not check_checkpoint(root/latest_name(root))
    assert not [c for p in checkpoints(root) for c in check_checkpoint(p)]


def kills(home):
    "SIGKILL before every change that saving and pruning make."
    base = home/"base"
    for t, n in enumerate((*NAMES[:1], "001+000040-window-close", NAMES[1])): save(base, n, t)
    for name in NAMES[1:]:
        for k in range(1, 1000):
            root = shutil.copytree(base, home/"now")
            def work(): kill_at(k); save(root, name, 5); prune(root, 1)
            how = in_child(work); whole_after_kill(root, name, 2)
            assert not check_checkpoint(save(root, name, 6)) and load_checkpoint(latest_checkpoint(root, print))["t"] == 6
            shutil.rmtree(root)
            if how == 0: break
            assert os.WTERMSIG(how) == signal.SIGKILL
        print(name, k)
        assert k > 50


def kills_at_any_time(home, rounds=12):
    "SIGKILL from outside, at random times, with the disk truly synced."
    root, g = home/"root", random.Random(0); save(root, NAMES[0], 0)
    for r in range(rounds):
        if not (pid := os.fork()):
            for k in range(10_000): save(root, f"001+{10_000*r+k:06d}-a", k); prune(root, 2)
        time.sleep(g.uniform(.02, .3)); os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)
        last = latest_checkpoint(root, print); assert last and not check_checkpoint(last)
        clean(root); assert not hidden(root) and not check_checkpoint(latest_checkpoint(root, print)) and not check_checkpoint(root/latest_name(root))
    print("rounds", rounds, latest_name(root))


def refused(root, name, no):
    "Saving fails for want of space, says so, and changes nothing."
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    try: save_checkpoint(root, name, small(5, 100_000), DOCS | {"long.json": list(range(20_000))})
    except OSError as e: assert e.errno == no and "free some space" in str(e) and f"go on from {NAMES[0]}, which is whole" in str(e), e
    else: raise AssertionError("it was written")
    assert before == {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} and not hidden(root)


def limits(home):
    "No file may be longer than so many bytes: the state, a document, the manifest, LATEST fail in turn."
    root = home/"root"; save(root, NAMES[0], 0)
    for n in (0, 1, 10, 4096, 100_000, 399_000):
        def work(): resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)); refused(root, NAMES[1], errno.EFBIG)
        assert in_child(work) == 0, n
    print("limits", load_checkpoint(latest_checkpoint(root, print))["t"])


def full_disk(home):
    "A file system of its own with less and less space; ends with 77 where none may be mounted."
    disk = home/"disk"; disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]).returncode: sys.exit(77)
    root = disk/"root"; save(root, NAMES[0], 0)
    for free in range(400_000, 20_000, -16_384):
        (disk/"ballast").unlink(missing_ok=True); (disk/"ballast").write_bytes(bytes(os.statvfs(disk).f_bavail*4096-free))
        refused(root, NAMES[1], errno.ENOSPC)
    (disk/"ballast").unlink(); assert not check_checkpoint(save(root, NAMES[1], 5))


def test_killed_before_each_change(tmp_path):
    rc, out = script("kills", tmp_path); assert rc == 0, out


def test_killed_at_any_time(tmp_path):
    rc, out = script("kills_at_any_time", tmp_path); assert rc == 0, out


def test_files_may_not_grow(tmp_path):
    rc, out = script("limits", tmp_path); assert rc == 0, out


def test_a_full_disk(tmp_path):
    "In a mount namespace of its own; where there is none, the limit on a file's length stands in."
    rc, out = script("full_disk", tmp_path, before=["unshare", "--map-root-user", "--mount"]) if shutil.which("unshare") else (77, "")
    if rc == 77 or "unshare failed" in out or "Operation not permitted" in out: rc, out = script("limits", tmp_path)
    assert rc == 0, out


if __name__ == "__main__":
    dict(kills=kills, kills_at_any_time=kills_at_any_time, limits=limits, full_disk=full_disk)[sys.argv[1]](Path(sys.argv[2]))


def test_entries_whose_paths_would_be_one(tmp_path):
    "A key may look like another one, a number like a word: none of three takes the place of another."
    s = {"1'": torch.ones(1), "1": torch.ones(2), 1: torch.ones(3)}
    save_state(tmp_path/"s", s)
    assert same(s, load_state(tmp_path/"s"))
