"Imports flow down only and never in a circle, light modules stay light, and nothing that loads somebody's data can run it."
import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT/"clvla"
MODULES = sorted(p for p in LIBRARY.rglob("*.py") if p.name not in ("__init__.py", "_modidx.py"))
NAMES = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in MODULES]

# room -> rooms that it may import besides itself and core
MAY = dict(core=set(), data=set(), envs={"data"}, cl=set(), policies=set(), eval={"envs", "data", "policies"},
           run={"eval", "envs", "data", "policies", "cl"},
           train={"run", "eval", "envs", "data", "policies", "cl"}, rl={"train", "run", "eval", "envs", "data", "policies", "cl"},   # a base policy comes from imitation
           crl={"rl", "train", "run", "eval", "envs", "data", "policies", "cl"},
           api={"crl", "rl", "train", "run", "eval", "envs", "data", "policies", "cl"},
           command={"api", "crl", "rl", "train", "run", "eval", "envs", "data", "policies", "cl"})   # agents share what they learn with, and the run

# (module, what a function in it imports): (the heavy library that importing it at the top would load, why it must not)
LAZY = {
    ("clvla.run.__main__", "clvla.run.shell"): ("torch", "the process that starts the ranks of a run needs no torch"),
    ("clvla.command.main", "clvla.command.watch"): ("torch", "a terminal answers --help and a wrong name at once"),
    ("clvla.command.main", "clvla.command.runs"): ("torch", "a terminal answers --help and a wrong name at once"),
    ("clvla.command.main", "clvla.command.search"): ("torch", "a terminal answers --help and a wrong name at once"),
    ("clvla.command.main", "clvla.command.stats"): ("torch", "a terminal answers --help and a wrong name at once"),
    ("clvla.command.main", "clvla.command.lists"): ("torch", "a terminal answers --help and a wrong name at once"),
    ("clvla.command.main", "clvla.command.doctor"): ("numpy", "a terminal answers --help and a wrong name at once"),
    ("clvla.rl.config", "clvla.cl.base"): ("torch", "a page reads and refuses settings in a second"),
    ("clvla.run.config", "clvla.cl.all"): ("torch", "a page reads and refuses settings in a second"),
    ("clvla.train.config", "clvla.cl.all"): ("torch", "a page reads and refuses settings in a second"),
    ("clvla.train.config", "clvla.policies.all"): ("torch", "a page reads and refuses settings in a second"),
    ("clvla.data.mixtures", "clvla.data.lerobot"): ("fastcore", "a simulator with an interpreter of its own has numpy only"),
}

SIMULATORS = ("libero", "metaworld", "meta-world", "gym", "minigrid")
# words of generic modules that are no simulator's: the metrics that LIBERO's paper defined
METRICS = ("LIBERO FWT", "LIBERO NBT", "LIBERO AUC", "libero_fwt", "LIBERO's FWT", "LIBERO's NBT", "LIBERO's AUC")


def room(name): return name.split(".")[1]


def target(name, node):
    "The clvla modules that an import statement names."
    if isinstance(node, ast.Import): found = [a.name for a in node.names]
    else:
        base = name.split(".")[:-node.level] if node.level else []
        stem = ".".join([*base, *filter(None, [node.module])])
        found = [f"{stem}.{a.name}" if f"{stem}.{a.name}" in NAMES else stem for a in node.names]
    return sorted({m for m in found if m.startswith("clvla.")})


def imports(path, name):
    "Every import of a clvla module: (module, line, whether it stands in a function)."
    tree = ast.parse(path.read_text())
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) for n in ast.walk(f)}
    for n in ast.walk(tree):
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            yield from ((m, n.lineno, id(n) in inside) for m in target(name, n))


GRAPH = {name: list(imports(path, name)) for path, name in zip(MODULES, NAMES)}


@pytest.mark.parametrize("name", NAMES)
def test_imports_flow_down(name):
    allowed = MAY[room(name)] | {room(name), "core"}
    wrong = [(m, line) for m, line, _ in GRAPH[name] if room(m) not in allowed]
    assert not wrong, f"{name} imports {wrong}; {room(name)} may import {sorted(allowed)}"


def circles(graph):
    "Groups of modules that import one another, directly or not (Tarjan's components of more than one module)."
    number, low, stack, found = {}, {}, [], []

    def visit(v):
        number[v] = low[v] = len(number)
        stack.append(v)
        for w in graph.get(v, ()):
            if w not in number: visit(w)
            if w in stack: low[v] = min(low[v], low[w])
        if low[v] == number[v]:
            group = []
            while not group or group[-1] != v: group.append(stack.pop())
            if len(group) > 1 or v in graph.get(v, ()): found.append(sorted(group))

    for v in graph:
        if v not in number: visit(v)
    return found


def test_no_circles():
    "Imports inside functions count: one that hides a circle is a circle."
    assert circles({name: {m for m, *_ in found} for name, found in GRAPH.items()}) == []


def test_circles_are_found():
    assert circles(dict(a={"b"}, b={"c"}, c={"b"}, d={"a"})) == [["b", "c"]]


def test_imports_in_functions_are_declared():
    inside = {(name, m) for name, found in GRAPH.items() for m, _, nested in found if nested}
    assert inside == set(LAZY), "an import of clvla inside a function hides what a module needs: move it to the top, or declare it in LAZY"


def loaded(module, libraries):
    "Which of the libraries are loaded by importing a module in a fresh interpreter."
    code = f"import sys, {module}; print(*[m for m in {list(libraries)!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 0, out.stderr
    return out.stdout.split()


@pytest.mark.parametrize("pair", LAZY, ids=lambda p: "->".join(p))
def test_imports_in_functions_are_needed(pair):
    "At the top of the module the import would load the library that the module is free of."
    module, imported = pair
    library, _ = LAZY[pair]
    assert loaded(module, [library]) == [] and loaded(imported, [library]) == [library]


@pytest.mark.parametrize("module,without", [
    ("clvla.core.names", ["numpy", "torch"]),
    ("clvla.cl.mir", ["lerobot", "mujoco", "metaworld", "transformers", "datasets", "pandas", "plotly"]),
    ("clvla.policies.tiny", ["lerobot", "mujoco", "metaworld", "transformers"]),
    ("clvla.policies.lerobot.adapter", ["lerobot", "transformers", "torchvision", "datasets"]),
    ("clvla.policies.lerobot.xvla", ["lerobot", "transformers", "torchvision", "datasets", "diffusers"]),   # imports its relatives
    ("clvla.train.learner", ["lerobot", "mujoco", "metaworld", "robosuite", "transformers", "datasets", "deepspeed", "pandas", "plotly"]),
    ("clvla.data.streams", ["numpy", "torch", "pyarrow"]),
    ("clvla.data.partition", ["torch", "pyarrow", "huggingface_hub"]),
    ("clvla.data.demos", ["torch", "lerobot", "datasets", "metaworld", "mujoco", "av", "transformers", "pandas"]),
    ("clvla.train.demos", ["torch", "lerobot", "datasets", "metaworld", "mujoco", "av", "transformers", "pandas"]),
    ("clvla.envs.kind", ["numpy", "torch", "mujoco"]),
    ("clvla.envs.all", ["torch", "mujoco", "metaworld", "robosuite", "lerobot"]),
    ("clvla.envs.pool", ["torch", "mujoco", "metaworld", "lerobot"]),
    ("clvla.envs.metaworld.kind", ["torch", "mujoco", "metaworld", "lerobot"]),
    ("clvla.envs.libero.kind", ["torch", "mujoco", "robosuite", "libero", "lerobot"]),
    ("clvla.eval.metrics", ["torch", "pandas", "plotly", "mujoco"]),
    ("clvla.eval.stats", ["torch", "plotly", "mujoco"]),
])
def test_importing_is_light(module, without):
    assert loaded(module, without) == []


def test_every_kind_is_light():
    "The menu imports a kind when it is asked for, and asking for all of them loads no simulator."
    code = ("import sys; from clvla.envs.all import kinds, stream_names; kinds.values(); stream_names(); "
            "print(*[m for m in ('torch', 'mujoco', 'metaworld', 'robosuite', 'libero', 'gymnasium', 'minigrid') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (out.returncode, out.stdout.split()) == (0, []), out.stderr


def spoken(path):
    "Names and strings of a module that hold a simulator's name, with their lines; import lines of the own folder aside."
    text = path.read_text()
    for t in tokenize.generate_tokens(io.StringIO(text).readline):
        if t.type not in (tokenize.NAME, tokenize.STRING, tokenize.FSTRING_MIDDLE): continue
        words = t.string
        for metric in METRICS: words = words.replace(metric, "")
        if any(s in words.lower() for s in SIMULATORS): yield t.start[0], t.string[:60]


GENERIC = [p for p in MODULES if p.relative_to(LIBRARY).parts[:2] not in (("envs", "libero"), ("envs", "metaworld"), ("envs", "gym"))
           and p != LIBRARY/"envs/all.py"
           and p != LIBRARY/"run/lerobot/stream.py"]   # LeRobot steps environments through gymnasium's classes


@pytest.mark.parametrize("path", GENERIC, ids=lambda p: str(p.relative_to(LIBRARY)))
def test_no_simulator_is_named_outside_its_folder(path):
    "In code and docstrings; what a generic page has to know of a simulator, it asks its Kind."
    assert list(spoken(path)) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(LIBRARY)))
def test_nothing_in_the_library_executes_data(path):
    "No pickle, eval, exec, os.system, shell=True, unsafe torch.load or trust_remote_code anywhere in the source tree."
    bad = []
    for n in ast.walk(ast.parse(path.read_text())):
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in n.names] + [getattr(n, "module", None) or ""]
            bad += [(n.lineno, m) for m in names if m.split(".")[0] in ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "joblib")]
        if isinstance(n, ast.Call):
            f = ast.unparse(n.func)
            if f in ("eval", "exec", "os.system", "os.popen", "torch.load", "pickle.load", "pickle.loads"): bad.append((n.lineno, f))
            if f.endswith("np.load") and any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in n.keywords): bad.append((n.lineno, f))
            bad += [(n.lineno, k.arg) for k in n.keywords if k.arg in ("shell", "trust_remote_code") and ast.unparse(k.value) != "False"]
    assert not bad, f"{path}: {bad}"
