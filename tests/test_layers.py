"Imports flow down only, the light modules stay light, and nothing that loads somebody's data can run it."
import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(p for p in (ROOT/"clvla").rglob("*.py") if p.name not in ("__init__.py", "_modidx.py"))
MAY = dict(train={"eval", "cl", "policies", "envs", "data"}, eval={"cl", "policies", "envs", "data"}, cl=set(), policies=set(),
           envs=set(), data=set())


def room(path):
    "train of clvla/train/job.py, core of clvla/core.py"
    parts = path.relative_to(ROOT/"clvla").parts
    return parts[0] if len(parts) > 1 else "core"


def imported_rooms(path):
    "Rooms of clvla that a module imports anywhere in its source, with the line."
    depth = len(path.relative_to(ROOT/"clvla").parts)
    for n in ast.walk(ast.parse(path.read_text())):
        if isinstance(n, ast.ImportFrom) and n.level:
            mod = (n.module or "").split(".")
            yield (room(path) if n.level < depth else mod[0] if n.level == depth and depth > 1 or n.level == 1 else mod[0]), n.lineno
        elif isinstance(n, ast.ImportFrom) and (n.module or "").startswith("clvla."): yield n.module.split(".")[1], n.lineno
        elif isinstance(n, ast.Import):
            yield from ((a.name.split(".")[1], n.lineno) for a in n.names if a.name.startswith("clvla."))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT/"clvla")))
def test_imports_flow_down(path):
    own = room(path)
    if own == "core": allowed = {"core", "batch"}
    else: allowed = MAY[own] | {own, "core", "batch"}
    wrong = [(r, l) for r, l in imported_rooms(path) if r not in allowed]
    assert not wrong, f"{path} imports {wrong}; {own} may import {sorted(allowed)}"


@pytest.mark.parametrize("module,without", [
    ("clvla.cl.mir", ["lerobot", "mujoco", "metaworld", "transformers", "datasets", "pandas", "plotly"]),
    ("clvla.policies.tiny", ["lerobot", "mujoco", "metaworld", "transformers"]),
    ("clvla.train.learner", ["lerobot", "mujoco", "metaworld", "transformers", "datasets", "deepspeed"]),
    ("clvla.envs.pool", ["torch", "mujoco", "metaworld", "lerobot"]),
    ("clvla.envs.metaworld.env", ["torch", "mujoco", "lerobot"]),
    ("clvla.eval.metrics", ["torch", "pandas", "plotly", "mujoco"]),
    ("clvla.eval.stats", ["torch", "plotly", "mujoco"]),
])
def test_importing_is_light(module, without):
    code = f"import sys, {module}; print([m for m in {without!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.strip() == "[]", out.stdout+out.stderr


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT/"clvla")))
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
