"Nothing that is read can run code: watched while files are loaded, read off the source, and tried with what no loader knows."
import ast
import json
import os
import pickle  # to show that the watch below sees one; nothing else here uses it
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from clvla.core.state import load_state, save_state, write_tensors
from clvla.core.names import ACTION, IMAGE, PROMPT, STATE
from clvla.core.files import read_json, write_json
from clvla.data.frames import FrameStore, write_store
from clvla.data.lerobot import import_lerobot
from clvla.data.lerobot_write import write_lerobot
from clvla.data.stats import Processor, compute_stats, read_stats, write_stats
from clvla.data.streams import stream_from, stream_json
from clvla.envs.all import make_stream
from clvla.policies.all import load_policy, make_policy
from clvla.policies.weights import load_weights, read_policy, save_policy
from clvla.run.checkpoint import check_checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from clvla.run.config import read_config
from clvla.train.config import TrainConfig, resolve
from clvla.run.folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]


# 1. what happens while files are loaded

def episode(T, seed=0, prompt="Push the block", size=12):
    g = np.random.default_rng(seed)
    return {IMAGE: g.integers(0, 255, (T, size, size, 3), np.uint8), STATE: g.normal(size=(T, 4)).astype(np.float32),
            ACTION: g.normal(size=(T, 4)).astype(np.float32), PROMPT: prompt}


def write_everything(home):
    "One file of each kind that the library reads."
    store = write_store(home/"store", [episode(20), episode(15, 1)]); processor = Processor(compute_stats(store))
    write_stats(home/"dataset_statistics.json", processor.stats)
    write_lerobot(home/"lerobot", [episode(7), episode(5, 1, "Pull the block")])
    run = RunFolder(home/"run"); run.begin(resolve(TrainConfig(run_dir=str(home/"run"), data_dir=str(home/"data"))))
    run.log(stage=0, step=1, loss=.5); run.episode(dict(stage=0, step=None, after="x", task="x", trial=0, success=True))
    policy = make_policy("tiny"); opt = torch.optim.AdamW(policy.parameters())
    for p in policy.parameters(): p.grad = torch.zeros_like(p)
    opt.step()
    docs = {"config.json": read_json(home/"run/config.json"), "processor.json": processor.to_json(), "stream.json": stream_json(make_stream("mw5_narrow"))}
    save_checkpoint(home/"run/checkpoints", "000-x", dict(opt=opt.state_dict(), rng=np.random.default_rng(0).bit_generator.state), docs,
                    lambda d: save_policy(policy, "tiny", d))
    save_state(home/"state.safetensors", dict(a=torch.ones(3), b=(1, None)))


def load_everything(home):
    "Every way in, once."
    assert load_state(home/"state.safetensors")["b"] == (1, None)
    path = latest_checkpoint(home/"run/checkpoints", pytest.fail); state = load_checkpoint(path)
    policy = load_policy(path); load_weights(policy, path); opt = torch.optim.AdamW(policy.parameters()); opt.load_state_dict(state["opt"])
    assert len(FrameStore.open(home/"store").gather([0, 5, 34], 4)[PROMPT]) == 3
    assert Processor.from_json(read_json(path/"processor.json")).stats == read_stats(home/"dataset_statistics.json")
    assert stream_from(read_json(path/"stream.json")) == make_stream("mw5_narrow")
    assert sorted(map(len, import_lerobot(home/"lerobot", home/"imported").values())) == [5, 7]
    run = RunFolder(home/"run"); assert read_config(home/"run") == run.cfg and len(run.logs()) == len(run.episodes()) == 1 and not run.done


class Evil:
    def __reduce__(self): return print, ("this ran while a file was loaded",)


def watch(home):
    """Load everything while every attempt of a pickle to name a class or function is noted and stopped.

    Python raises the audit event `pickle.find_class` before a pickle gets hold of anything that it could call; a pickle of
    plain numbers raises none, and does no harm. The hook is armed late: libraries may do to their own files, while they
    are imported, what they like, and some imports happen inside the functions that need them. `marshal.loads` is not
    watched, because Python reads its own compiled modules with it.
    """
    import PIL.PngImagePlugin  # noqa: F401
    import pandas  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    events, armed = [], [False]

    def hook(event, args):
        if event == "pickle.find_class" and armed[0]:
            events.append(args); raise RuntimeError(f"a pickle asked for {args}")
    sys.addaudithook(hook)
    data = pickle.dumps(Evil()); armed[0] = True
    try: pickle.loads(data)
    except RuntimeError: pass
    assert events == [("builtins", "print")], "the watch does not see what it is there to see"
    events.clear(); load_everything(home); armed[0] = False
    print(json.dumps(dict(events=events)))


def test_no_pickle_is_opened_while_loading(tmp_path):
    write_everything(tmp_path)
    p = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, env=os.environ | dict(OMP_NUM_THREADS="1"))
    assert p.returncode == 0, p.stdout+p.stderr
    assert json.loads(p.stdout) == dict(events=[]) and "this ran" not in p.stdout+p.stderr


@pytest.mark.parametrize("file", ["state.safetensors", "weights.safetensors", "policy.json", "config.json"])
def test_a_pickle_in_a_files_place_is_refused_unopened(tmp_path, capfd, file):
    policy = make_policy("tiny")
    path = save_checkpoint(tmp_path, "000-x", {}, {"config.json": {}}, lambda d: save_policy(policy, "tiny", d))
    loads = {"state.safetensors": load_state, "weights.safetensors": lambda p: load_weights(policy, p), "policy.json": lambda p: load_policy(p.parent),
             "config.json": lambda p: read_config(p.parent)}
    for data in (pickle.dumps(Evil()), pickle.dumps(Evil(), 0)):
        (path/file).write_bytes(data)
        with pytest.raises(ValueError): loads[file](path/file)
        assert check_checkpoint(path)
    (tmp_path/"store").mkdir(); np.save(tmp_path/"a.npy", np.array([Evil()], object), allow_pickle=True)
    store = write_store(tmp_path/"s", [episode(5)]); (store.path/"action.npy").write_bytes((tmp_path/"a.npy").read_bytes())
    with pytest.raises(ValueError): FrameStore.open(store.path)
    with pytest.raises(ValueError): FrameStore(store.path, store.meta)   # past the check of sizes and hashes, too
    assert "this ran" not in "".join(capfd.readouterr())


# 2. what the source says

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "pickletools"}
CALLS = {"eval", "exec", "compile", "builtins.eval", "builtins.exec", "builtins.compile", "torch.load", "torch.jit.load", "torch.package.PackageImporter",
         "pandas.read_pickle", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen", "subprocess.getoutput",
         "subprocess.getstatusoutput", "multiprocessing.Queue", "multiprocessing.SimpleQueue", "multiprocessing.JoinableQueue", "multiprocessing.Manager",
         "torch.multiprocessing.Queue", "torch.multiprocessing.SimpleQueue", "numpy.lib.format.read_array"}
OBJECTS = {"gather_object", "all_gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list", "broadcast_object"}
ON = {"shell", "trust_remote_code", "allow_pickle"}  # arguments that may only be False


class Reader(ast.NodeVisitor):
    "Finds what could run somebody's data, under whatever name it was imported."
    def __init__(self): self.names, self.found = {}, []
    def note(self, node, what): self.found.append((node.lineno, what))

    def dotted(self, node):
        "The full name of `np.load` or `load`, as it was imported; None for what has no name."
        if isinstance(node, ast.Name): return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            left = self.dotted(node.value); return f"{left}.{node.attr}" if left else None
        if isinstance(node, ast.Call) and self.dotted(node.func) in ("getattr", "__import__", "importlib.import_module"):
            text = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            return f"{self.dotted(node.args[0])}.{text[0]}" if self.dotted(node.func) == "getattr" and text else text[0] if text else None

    def look(self, node, name):
        if name is None: return
        if name.split(".")[0] in MODULES: self.note(node, name)
        elif name in CALLS: self.note(node, name)
        elif name.split(".")[-1] in OBJECTS: self.note(node, name)

    def visit_Import(self, node):
        for a in node.names:
            self.look(node, a.name); self.names[a.asname or a.name.split(".")[0]] = a.name if a.asname else a.name.split(".")[0]

    def visit_ImportFrom(self, node):
        for a in node.names:
            full = a.name if node.level else f"{node.module}.{a.name}"
            self.look(node, full); self.names[a.asname or a.name] = full

    def visit_Name(self, node):
        if isinstance(node.ctx, ast.Load): self.look(node, self.dotted(node))

    def visit_Attribute(self, node):
        self.look(node, self.dotted(node)); self.visit(node.value)

    def visit_Call(self, node):
        name = self.dotted(node.func)
        self.visit(node.func)
        self.look(node, self.dotted(node))   # getattr(torch, "load")
        off = {k.arg for k in node.keywords if isinstance(k.value, ast.Constant) and k.value.value is False}
        for k in node.keywords:
            if k.arg in ON and k.arg not in off: self.note(node, f"{k.arg} is not False")
        if name == "numpy.load" and "allow_pickle" not in off: self.note(node, "numpy.load without allow_pickle=False")
        for x in (*node.args, *(k.value for k in node.keywords)): self.visit(x)


def findings(source):
    "Lines and names of what must not be in a source text."
    r = Reader(); r.visit(ast.parse(source)); return sorted(set(r.found))


BAD = """import pickle
from pickle import loads
import cloudpickle as c
import dill, json
from joblib import load
import marshal
import shelve
def f(): import _pickle
import torch; torch.load(f)
import torch as t; t.load(f, weights_only=True)
from torch import load as tl; tl(f)
import numpy as np; np.load(f)
import numpy as np; np.load(f, allow_pickle=True)
import numpy as np; np.load(f, allow_pickle=flag)
from numpy import load; load(f)
import numpy; numpy.save(f, x, allow_pickle=1)
import yaml; yaml.load(f)
import yaml; yaml.unsafe_load(f)
import pandas as pd; pd.read_pickle(f)
eval("1")
exec(code)
compile(s, "x", "exec")
map(eval, lines)
run = exec
import builtins; builtins.eval(x)
import os; os.system("ls")
from os import popen
import subprocess; subprocess.run("ls", shell=True)
import subprocess; subprocess.run("ls", shell=flag)
import subprocess as s; s.getoutput("ls")
model.from_pretrained(x, trust_remote_code=True)
import torch.distributed as dist; dist.gather_object(x)
from torch.distributed import broadcast_object_list
import torch.distributed; torch.distributed.all_gather_object(a, b)
dist.scatter_object_list(x)
from accelerate.utils import gather_object
import importlib; importlib.import_module("pickle")
from importlib import import_module; import_module("pickle").loads(x)
__import__("pickle").loads(x)
import torch; getattr(torch, "load")(f)
import multiprocessing as mp; mp.Queue()
from multiprocessing import SimpleQueue
f(g(pickle.loads))
x = [torch.load for _ in y]
class A(metaclass=eval): pass
f = lambda g=exec: g""".splitlines()
GOOD = """import json; json.loads(x)
import re; re.compile("x")
import torch; torch.compile(model)
model.eval()
policy.load(x); dist.load(y)
import numpy as np; np.load(f, allow_pickle=False)
import numpy as np; np.load(f, mmap_mode="r", allow_pickle=False)
import yaml; yaml.safe_load(f)
import ast; ast.literal_eval(x)
import subprocess; subprocess.run(["ls"], shell=False)
import subprocess; subprocess.run(["ls"])
from clvla.policies.all import load_policy; load_policy(x)
import torch.distributed as dist; dist.all_reduce(x); dist.broadcast(x, 0)
"pickle.loads(eval)"
getattr(x, "load")(f)
trust_remote_code = False""".splitlines()


@pytest.mark.parametrize("source", BAD)
def test_the_reader_finds(source): assert findings("import torch\n"+source), source


@pytest.mark.parametrize("source", GOOD)
def test_the_reader_lets_pass(source): assert not findings(source), (source, findings(source))


def sources():
    "Everything that is run: the library, its pages, its tools, and the tests but this one, which needs a pickle to show one."
    py = [p for d in ("clvla", "tools", "tests") for p in sorted((ROOT/d).rglob("*.py"))]+[ROOT/"setup.py"]
    return [p for p in py if p != Path(__file__).resolve()]+[p for p in sorted((ROOT/"nbs").rglob("*.ipynb")) if ".ipynb_checkpoints" not in p.parts]


def text_of(path):
    if path.suffix == ".py": return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    return "\n".join("\n".join(l for l in s.splitlines() if not l.startswith(("%", "!"))) for s in code)


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_that_could_run_data(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning); bad = findings(text_of(path))
    assert not bad, f"{path}: {bad}"


# 3. what no loader knows

@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory):
    home = tmp_path_factory.mktemp("kinds"); write_everything(home); return home


POINT = "run/checkpoints/000-x/"
CASES = {  # file, edit, loader, what the message says
    "config": ("run/config.json", lambda d: d | dict(sede=1), lambda f: read_config(f.parent), "did you mean 'seed'"),
    "config that is none": ("run/config.json", lambda d: [d], lambda f: read_config(f.parent), "found list"),
    "config of a run": ("run/config.json", lambda d: d | dict(sede=1), lambda f: RunFolder(f.parent).cfg, "unknown parameter 'sede'"),
    "policy's argument": (POINT+"policy.json", lambda d: d | dict(config=d["config"] | dict(imagesize=48)), lambda f: load_policy(f.parent), "imagesize"),
    "policy's name": (POINT+"policy.json", lambda d: d | dict(policy="os.system"), lambda f: load_policy(f.parent), "unknown policy 'os.system'"),
    "processor": (POINT+"processor.json", lambda d: d | dict(clip=1), lambda f: Processor.from_json(read_json(f)), "no entry 'clip'"),
    "processor's mode": (POINT+"processor.json", lambda d: d | dict(state_norm="eval"), lambda f: Processor.from_json(read_json(f)), "eval"),
    "statistics": ("dataset_statistics.json", lambda d: d | dict(mask=[1]), read_stats, "statistics need the keys"),
    "manifest": (POINT+"manifest.json", lambda d: d | dict(format=2), lambda f: load_checkpoint(f.parent), "format 2, this version reads 1"),
    "manifest's entry": (POINT+"manifest.json", lambda d: d | dict(run="x"), lambda f: load_checkpoint(f.parent), "no manifest"),
    "frame store": ("store/meta.json", lambda d: d | dict(version=2), lambda f: FrameStore.open(f.parent), "layout version 2"),
    "LeRobot": ("lerobot/meta/info.json", lambda d: d | dict(codebase_version="v2.1"), lambda f: import_lerobot(f.parents[1], f.parents[2]/"other"), "needed is v3"),
}


@pytest.mark.parametrize("case", CASES)
def test_loaders_refuse_what_they_do_not_know(all_kinds, case):
    file, edit, load, says = CASES[case]; file = all_kinds/file; data = file.read_bytes()
    try:
        write_json(file, edit(json.loads(data)))
        with pytest.raises(ValueError, match=says): load(file)
    finally: file.write_bytes(data)


@pytest.mark.parametrize("data", [b"", b"{", b"\x00"*64, b"\xff\xfe{}", b"{}\n{}"])
@pytest.mark.parametrize("case", CASES)
def test_loaders_name_a_file_that_is_no_json(all_kinds, case, data):
    file, _, load, _ = CASES[case]; file = all_kinds/file; whole = file.read_bytes()
    try:
        file.write_bytes(data)
        with pytest.raises(ValueError, match=file.name): load(file)
    finally: file.write_bytes(whole)


@pytest.mark.parametrize("skeleton", ['{"object": ["os", "system"]}', '{"reduce": 1}', '[{"tensor": "a"}]', '{"tensor": "b"}', "null", "cos\nsystem\n"])
def test_a_foreign_state_is_refused(tmp_path, skeleton):
    write_tensors(tmp_path/"s.safetensors", dict(a=torch.ones(1)), dict(skeleton=skeleton))
    with pytest.raises(ValueError, match="s.safetensors"): load_state(tmp_path/"s.safetensors")


@pytest.mark.parametrize("change", [lambda w: w.pop(next(iter(w))), lambda w: w.update(more=torch.ones(1)), lambda w: w.update({next(iter(w)): torch.ones(7, 7)})])
def test_foreign_weights_are_refused(tmp_path, change):
    from safetensors.torch import load_file, save_file
    path = save_policy(make_policy("tiny"), "tiny", tmp_path/"p"); w = load_file(path/"weights.safetensors"); change(w)
    save_file(w, path/"weights.safetensors")
    with pytest.raises(ValueError, match="does not fit this policy"): load_policy(path)
    assert read_policy(path)["policy"] == "tiny"


if __name__ == "__main__": watch(Path(sys.argv[1]))
