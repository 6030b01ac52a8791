"""Build the wheel and try it in environments of their own: the library alone, then with each extra.

    python tools/release_check.py                       # core alone: about 4 minutes and 6 GB, most of it torch
    python tools/release_check.py core gym peft ...     # these, one after another; `all` stands for every extra
    python tools/release_check.py --python PATH core    # another interpreter

In each environment every module of the wheel is imported (an ImportError has to name an extra), a run of seconds goes from `clvla run` to its
report in an empty folder, what an extra brings is imported, and a few words of `USES` put it to use. An environment is deleted when it has been
tried. CI has one environment with every extra: tests/test_release.py hides from each trial what its extra does not bring (`strangers`).
"""
import argparse
import importlib.metadata as metadata
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import zipfile
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# imported in an environment with the extra: what its code asks for
TRIES = dict(core="torch, pandas, plotly", metaworld="metaworld, mujoco", libero="libero, robosuite, bddl", gym="gymnasium, minigrid", envpool="envpool", minihack="minihack",
             sb3="stable_baselines3", ray="ray", lerobot="lerobot, diffusers, num2words", peft="peft", vlm="transformers, torchvision", deepspeed="deepspeed", search="optuna", served="aiohttp, msgpack",
             tensorboard="tensorboard", trackio="trackio", dev="nbdev, playwright, jupyterlab", docs="sphinx, myst_nb, furo")
LEROBOT = """import numpy as np
from clvla.core.names import ACTION, IMAGE, PROMPT, STATE
from clvla.data.lerobot import read_lerobot
from clvla.data.lerobot_write import write_lerobot
x = np.linspace(0, 1, 9, dtype=np.float32)[:, None]
episode = {IMAGE: np.zeros((9, 64, 64, 3), np.uint8)+128, STATE: x, ACTION: x, PROMPT: "Push"}
back, = read_lerobot(write_lerobot("films", [episode], codec="h264"))
assert (back[ACTION] == x).all() and abs(back[IMAGE]-128.).max() < 4
"""
SB3 = """from stable_baselines3 import PPO
PPO("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=32, device="cpu").learn(32)
"""
SMOKE = "--suite dot_2 --smoke --n_workers 1 --run_dir used"
# what an extra is for, as commands in its environment; SOURCE is a copy of this project's tracked files
USES = dict(tensorboard=[f"clvla run {SMOKE} --sink tensorboard"], trackio=[f"clvla run {SMOKE} --sink trackio"], peft=[f"clvla run {SMOKE} --lora_rank 2"],
            vlm=[f"clvla run {SMOKE} --model qwenoft-tiny"], deepspeed=[f"clvla run {SMOKE} --strategy zero2 --num_processes 2"],
            lerobot=[f"python -c {shlex.quote(LEROBOT)}", f"clvla run {SMOKE} --model lerobot-act-tiny"], sb3=[f"python -c {shlex.quote(SB3)}"],
            ray=["""clvla sweep --grid seed=0..1 --folder s --suite dot_2 --smoke --n_workers 1 --engine ray --engine_kw "{'cpus': 1}" """],
            gym=["clvla agents --suite minigrid_reach_3 --smoke --run_dir used"], minihack=["clvla agents --suite minihack_nav_15 --smoke --run_dir used"],
            dev=["python -m pytest -q -p no:cacheprovider SOURCE/tests/test_layers.py -k circles"], docs=["python SOURCE/docs/make_site.py --out site SOURCE/nbs/cl/08_er.ipynb"])
IMPORT_ALL = """import importlib, pkgutil, clvla
names = [m.name for m in pkgutil.walk_packages(clvla.__path__, "clvla.") if not m.name.endswith("__main__")]
lacking = {}
for name in names:
    try: importlib.import_module(name)
    except ImportError as e: lacking[name] = str(e)
wrong = {k: v for k, v in lacking.items() if "clvla[" not in v}
assert not wrong, f"modules that need a package and name no extra: {wrong}"
print(f"{len(names)} modules, {len(lacking)} of them ask for an extra")
"""


def extras():
    "The names of settings.ini, and core."
    c = ConfigParser(delimiters=["="])
    c.read(ROOT/"settings.ini", encoding="utf-8")
    return ["core", *(k.removesuffix("_requirements") for k in c["DEFAULT"] if k.endswith("_requirements"))]


# as sitecustomize.py on a path: this process and all that it starts find none of the modules and packages in CLVLA_HIDDEN
HIDE = """import os, sys
modules, packages = map(lambda words: set(words.split()), os.environ["CLVLA_HIDDEN"].split(","))
class Without:
    def __init__(self, finder): self.finder = finder
    def __getattr__(self, name): return getattr(self.finder, name)
    def find_spec(self, name, *rest): return None if name.split(".")[0] in modules else self.finder.find_spec(name, *rest)
    def find_distributions(self, *context):
        return (d for d in self.finder.find_distributions(*context) if d._normalized_name not in packages)
sys.meta_path[:] = [Without(f) if hasattr(f, "find_distributions") else f for f in sys.meta_path]
"""


def brought(requires, extra):
    "Names of the installed distributions that these requirements ask for, with all that those ask for in turn."
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    found, todo = set(), [(requires, {extra})]
    while todo:
        requires, extras = todo.pop()
        for r in map(Requirement, requires):
            if r.marker and not any(r.marker.evaluate({"extra": e}) for e in extras | {""}): continue
            key = (canonicalize_name(r.name), *sorted(r.extras))
            if key in found: continue
            found.add(key)
            try: todo.append((metadata.requires(r.name) or [], r.extras))
            except metadata.PackageNotFoundError: pass   # a name of settings.ini is missed when it is imported
    return {name for name, *_ in found}


def strangers(requires, extra):
    "What neither the core nor this extra brings to this environment, as `HIDE` reads it: top-level modules, and packages."
    from packaging.utils import canonicalize_name
    mine = brought(requires, extra) | {"clvla"}
    named = {m: set(map(canonicalize_name, dists)) for m, dists in metadata.packages_distributions().items()}
    packages = {canonicalize_name(d.name) for d in metadata.distributions()}-mine
    modules = sorted(m for m, dists in named.items() if not mine & dists)
    return f"{' '.join(modules)},{' '.join(sorted(p.replace('-', '_') for p in packages))}"


def called(words, **kw):
    "Standard output of a command; SystemExit with what it said when it fails."
    done = subprocess.run([str(w) for w in words], text=True, capture_output=True, **kw)
    if done.returncode: raise SystemExit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def build(folder, *options):
    "The wheel, built by pip with these options from a copy of the files that git does not ignore; without options pip makes an environment for it."
    copy = folder/"source"
    for name in called(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT).split("\0"):
        if name and (ROOT/name).is_file():
            (copy/name).parent.mkdir(parents=True, exist_ok=True)
            (copy/name).write_bytes((ROOT/name).read_bytes())
    called([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *options, "-w", folder/"wheels", copy])
    wheel, = (folder/"wheels").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [n for n in names if n.startswith(("tests/", "tools/", "docs/"))] and any(n.endswith("pages/run_cl.ipynb") for n in names)
    return wheel


def attempt(wheel, extra, python):
    "Make an environment, install, import, run, use."
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as d:
        home = Path(d)
        called([python, "-m", "venv", home/"env"])
        own = home/"env/bin/python"
        need = f"{wheel}[{extra}]" if extra != "core" else str(wheel)
        called([own, "-m", "pip", "install", "-q", need])
        installed = time.monotonic()-start
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | dict(CLVLA_DATA=str(home/"data"), CLVLA_STATE=str(home/"state"))
        called([own, "-c", f"import {TRIES[extra]}"], env=env, cwd=home)
        said = called([own, "-c", IMPORT_ALL], env=env, cwd=home).strip().splitlines()[-1]
        called([home/"env/bin/clvla", "run", "--suite", "dot_2", "--smoke", "--n_workers", "1", "--run_dir", "run"], env=env, cwd=home)
        assert (home/"run/report.html").is_file()
        for line in USES.get(extra, ()):
            program, *words = shlex.split(line.replace("SOURCE", str(wheel.parents[1]/"source")))
            called([home/"env/bin"/program, *words], env=env, cwd=home)
        n = len(re.findall(r"^\S", called([own, "-m", "pip", "list", "--format=freeze"], env=env), re.M))
    return f"{extra}: installed in {installed:.0f} s ({n} packages), tried in {time.monotonic()-start-installed:.0f} s; {said}"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("extras", nargs="*", default=["core"], choices=[*extras(), "all"], metavar="EXTRA")
    p.add_argument("--python", default=sys.executable)
    o = p.parse_args()
    wanted = extras() if "all" in o.extras else o.extras
    with tempfile.TemporaryDirectory() as d:
        wheel = build(Path(d))
        for extra in wanted: print(attempt(wheel, extra, o.python), flush=True)


if __name__ == "__main__": main()
