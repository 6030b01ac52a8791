"Somebody's file brings an algorithm, a policy, a kind of environment, a stream and a metric: every process of a run has them."
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clvla.core.files import read_json
from clvla.core.names import Registry
from clvla.eval.compare import CompareConfig, group, read_runs, summary, wide
from clvla.run.checkpoint import checkpoints
from clvla.run.config import fitted, make_config
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint
from clvla.train.config import TrainConfig

ROOT = Path(__file__).resolve().parents[1]
MINE = '''
import json, os, sys
from clvla.cl.all import algos
from clvla.cl.er import ER
from clvla.data.streams import Stream, Task
from clvla.envs.all import kinds, streams
from clvla.envs.dot import Dot
from clvla.envs.kind import Kind
from clvla.eval.metrics import metrics
from clvla.policies.all import policies
from clvla.policies.tiny import Tiny

class Mine(ER):
    def __init__(self, shake:float=.1, buffer_size:int|None=None, seed:int=0):
        super().__init__(buffer_size=buffer_size, replay_ratio=.5, seed=seed)
        self.shake = shake

class Small(Tiny): pass

algos["mine"] = Mine
policies["small"] = Small
kinds["spot"] = Kind(label="the spot", env=Dot, defaults=dict(image_size=32, n_demos=3, steps_per_task=8))
task = lambda name: Task(name, name, f"go {name}", dict(kind="spot", name=name, max_steps=20), dict(kind="demos"))
streams["spots"] = Stream("spots", [task("left"), task("up")])
metrics["steps"] = lambda records, stages, ids: sum(r["steps"] for r in records)/100/len(records)

note = dict(pid=os.getpid(), rank=os.environ.get("RANK"), argv=sys.argv, file=__file__,
            names=["mine" in algos, "small" in policies, "spot" in kinds, "spots" in streams, "steps" in metrics])
if "PLUGIN_NOTES" in os.environ:
    with open(os.environ["PLUGIN_NOTES"], "a") as f: f.write(json.dumps(note)+"\\n")
'''
SETTINGS = dict(algo="mine", model="small", suite="spots", shake=.2, D=32, steps_per_task=12, n_demos=3, n_trials=2, warmup=2, batch_size=8,
                chunk=4, device="cpu", rows_per_task=1, n_workers=1)


@pytest.fixture
def lab(tmp_path):
    "A folder with the plugin, and the environment of its runs."
    (tmp_path/"mine.py").write_text(MINE)
    return tmp_path, os.environ | dict(PLUGIN_NOTES=str(tmp_path/"notes.jsonl"), CLVLA_DATA=str(tmp_path/"data"))


def papermill(page, out, env, **settings):
    "Execute a page as a user does."
    given = [word for k, v in settings.items() for word in ("-p", k, str(v))]
    return subprocess.run([sys.executable, "-m", "papermill", "--no-progress-bar", f"nbs/{page}.ipynb", str(out), *given], cwd=ROOT, env=env,
                          capture_output=True, text=True, timeout=300)


def role(note):
    "Which process of a run wrote a note."
    words = " ".join(note["argv"])
    for word, name in {"ipykernel": "page", "demo_worker": "demonstrations", "envs.worker": "simulator", "clvla/run/__main__": "rank"}.items():
        if word in words: return name+(f" {note['rank']}" if name == "rank" and note["rank"] else "")
    return words


@pytest.fixture
def registries():
    "Takes what a plugin registered in this process out again, so that no other file's tests meet it."
    before = len(Registry.added)
    yield
    for _, registry, name in Registry.added[before:]: registry.pop(name, None)
    del Registry.added[before:]


def test_one_file_reaches_every_process_and_compare_shows_its_metric(lab, registries):
    tmp, env = lab
    run_dir, plugins = tmp/"run", f"['{tmp/'mine.py'}']"
    out = papermill("run_cl", tmp/"page.ipynb", env, run_dir=run_dir, plugins=plugins, num_processes=2, **SETTINGS)
    assert out.returncode == 0, out.stderr[-3000:]
    cfg = read_json(run_dir/"config.json")
    assert cfg["cl_kw"] == {"shake": .2} and cfg["model_kw"] == {"D": 32} and cfg["image_size"] == 32
    notes = [json.loads(line) for line in (tmp/"notes.jsonl").read_text().splitlines()]
    assert {role(n) for n in notes} >= {"page", "rank", "rank 0", "rank 1", "demonstrations", "simulator"}, {role(n) for n in notes}
    assert all(all(n["names"]) for n in notes) and len({n["pid"] for n in notes}) >= 6
    copy = str(run_dir/"plugins/mine.py")
    assert {n["file"] for n in notes if role(n) != "page"} == {copy}
    entry, = read_json(run_dir/"plugins.json")
    assert entry["kind"] == "file" and len(entry["id"]) == 64
    compare = make_config(CompareConfig, dict(runs=str(run_dir), baseline="mine", plugins=plugins))
    assert "steps" in wide(summary(group(read_runs(compare.runs)), n_boot=20)).columns


def test_a_parameters_file_names_a_plugin_and_what_only_it_has(lab, registries):
    "`clvla run -f FILE` looks up what a file names before the config is made."
    (lab[0]/"other.py").write_text(MINE+"# a file of its own: one that was loaded here before is not run again\n")
    file = SETTINGS | dict(plugins=[str(lab[0]/"other.py")])
    assert fitted(TrainConfig, file, file) | dict(shake=.2) == fitted(TrainConfig, file, file)
    said = []
    assert "shake" not in fitted(TrainConfig, file | dict(algo="er"), file, {"algo"}, said.append) and "shake of the parameters file" in said[0]


def test_a_killed_run_goes_on_with_its_copy_and_a_changed_original_is_named(lab):
    tmp, env = lab
    code = f"""
import sys
from clvla.run.config import make_config
from clvla.run.folder import RunFolder
from clvla.run.plugins import keep_plugins
from clvla.train.config import TrainConfig, resolve
from clvla.train.prepare import check
cfg = resolve(TrainConfig.of(run_dir=sys.argv[1], plugins=[{str(tmp/'mine.py')!r}], evaluate="none", save_every=2, **{SETTINGS!r}))
check(cfg)
RunFolder(cfg.run_dir).begin(cfg)
keep_plugins(cfg)
"""
    begin = lambda run_dir: subprocess.run([sys.executable, "-c", code, str(run_dir)], env=env, capture_output=True, text=True)
    start = lambda run_dir: subprocess.Popen([sys.executable, "-m", "clvla.run", str(run_dir)], env=env, stdout=subprocess.PIPE, text=True)
    for name in ("whole", "killed"):
        out = begin(tmp/name)
        assert out.returncode == 0, out.stderr[-2000:]
    assert start(tmp/"whole").wait(200) == 0
    p = start(tmp/"killed")
    while p.poll() is None and not checkpoints(tmp/"killed/checkpoints"): time.sleep(.01)
    p.send_signal(signal.SIGKILL)
    assert p.wait() == -signal.SIGKILL
    (tmp/"mine.py").write_text(MINE.replace("replay_ratio=.5", "replay_ratio=.1"))
    out = begin(tmp/"killed")
    assert out.returncode and "mine.py has changed since this run began" in out.stderr and "choose another run_dir" in out.stderr
    p = start(tmp/"killed")
    said, _ = p.communicate(timeout=200)
    assert p.returncode == 0 and "the run goes on with its copy" in said
    assert RunFolder(tmp/"killed").done and fingerprint(tmp/"killed") == fingerprint(tmp/"whole")
    (tmp/"killed/plugins/mine.py").write_text("")
    assert "was changed after the run began" in subprocess.run([sys.executable, "-m", "clvla.run", str(tmp/"killed")], env=env,
                                                                capture_output=True, text=True).stderr


@pytest.mark.parametrize("text,says", [("import no_such_module", "ModuleNotFoundError"), ("1/0", "division by zero (line 1 of bad.py)"),
                                       ("from clvla.cl.all import algos\nalgos['er'] = int", "'er' is clvla.cl.er:ER already")])
def test_a_plugin_that_cannot_be_taken_is_named_at_the_door(tmp_path, text, says):
    from clvla.train.config import TrainConfig
    (tmp_path/"bad.py").write_text(text)
    with pytest.raises(ValueError) as e: TrainConfig.of(plugins=[str(tmp_path/"bad.py")])
    assert "plugin" in str(e.value) and "bad.py" in str(e.value) and says in str(e.value)


def test_one_plugin_never_takes_out_another(tmp_path):
    "my.py had been taken for a newer my_algo.py, and b/plug.py for a newer a/plug.py, whose entries went without a word."
    from clvla.core.plugins import load_plugins
    from clvla.policies.heads import heads
    def plugin(path, name):
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"from clvla.policies.heads import heads\nclass Head: pass\nheads['{name}'] = Head\n")
        return str(path)
    load_plugins([plugin(tmp_path/"taken_algo.py", "taken_one"), plugin(tmp_path/"taken.py", "taken_two")])
    try:
        assert {"taken_one", "taken_two"} <= {*heads}
        load_plugins([plugin(tmp_path/"taken.py", "taken_three")])   # a newer version of one file
        assert "taken_two" not in heads and {"taken_one", "taken_three"} <= {*heads}
        with pytest.raises(ValueError, match="have one name.*rename"):
            load_plugins([plugin(tmp_path/"a/plug.py", "taken_four"), plugin(tmp_path/"b/plug.py", "taken_five")])
    finally:
        for name in [name for name in heads if name.startswith("taken_")]: heads.pop(name)
