"Whole runs, small: the page and its child, the same seed twice, a stop and a new start, refusals, and what a run leaves behind."
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace as NS

import nbformat
import pytest

from clvla.core.config import config_json
from clvla.core.files import read_json, sha256, write_json
from clvla.core.state import load_state, save_state
from clvla.run.checkpoint import check_checkpoint, checkpoints
from clvla.train.config import TrainConfig, resolve
from clvla.run.config import from_page
from clvla.run.resume import fingerprint
from clvla.train.learner import train_cl
from clvla.run.folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
SMALL = dict(n_demos=2, steps_per_task=4, n_trials=1, rows_per_task=1, warmup=1, batch_size=8, threads=1, n_workers=2, suite="dot_2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    "Demonstrations are made once for all tests here, by the first run that needs them."
    return tmp_path_factory.mktemp("data")


def config(data, path, **kw):
    return resolve(TrainConfig(data_dir=str(data), run_dir=str(path), **(SMALL | kw)))


def facts(run):
    "What must be equal in two equal runs, and that no simulator had to be started again for it."
    return fingerprint(run.path), sum(r["restarts"] for r in run.episodes())


def page(name, out, *args, env=None):
    "Execute an experiment page with papermill, as a user does."
    cmd = [sys.executable, "-m", "papermill", "--no-progress-bar", f"nbs/{name}.ipynb", str(out), *args]
    return subprocess.run(cmd, cwd=ROOT, capture_output=True, text=True, env=os.environ | (env or {}), timeout=600)


@pytest.fixture(scope="module")
def done(data, tmp_path_factory):
    "A finished ER run."
    return train_cl(config(data, tmp_path_factory.mktemp("runs")/"er", algo="er"))


def test_a_run_leaves_everything_in_its_folder(done):
    names = {p.name for p in done.path.iterdir()}
    assert names >= {"config.json", "versions.json", "stream.json", "dataset_statistics.json", "log.jsonl", "episodes.jsonl", "cost.json",
                     "checkpoints", "done.json"}
    assert sorted((r["stage"], r["task"]) for r in done.episodes()) == [(0, "left"), (1, "left"), (1, "right")]
    points = checkpoints(done.path/"checkpoints")
    assert [p.name for p in points] == ["000-left", "001-right"] and not any(map(check_checkpoint, points))
    assert not list(done.path.rglob("*.pkl")) and not list(done.path.rglob("*.pt"))


def test_steps_count_optimizer_updates(data, tmp_path, done):
    "With accumulation, an update is the sum of its micro-batches: as many updates as without."
    other = train_cl(config(data, tmp_path/"acc", algo="er", accumulation=2, evaluate="none"))
    count = lambda run: [sum("train/loss" in r and r["stage"] == t for r in run.logs()) for t in (0, 1)]
    assert count(other) == count(done) == [4, 4]
    drawn = lambda run: [sum(r["drawn"].values()) for r in run.logs() if "drawn" in r]
    assert drawn(other) == drawn(done) == [32, 32]


def test_same_seed_twice_is_the_same_run(data, tmp_path, done):
    assert facts(train_cl(config(data, tmp_path/"er", algo="er", n_workers=1))) == facts(done)
    mir = [train_cl(config(data, tmp_path/f"mir-{k}", algo="mir", algo_kw=dict(refresh=2), evaluate="none")) for k in (1, 2)]
    assert facts(mir[0]) == facts(mir[1])


def test_a_damaged_checkpoint_is_passed_over(data, tmp_path, capsys):
    cfg = config(data, tmp_path/"run", algo="er", evaluate="none")
    run = train_cl(cfg)
    before = facts(run)
    last = checkpoints(run.path/"checkpoints")[-1]
    (run.path/"done.json").unlink()
    (last/"weights.safetensors").write_bytes((last/"weights.safetensors").read_bytes()[:-7])
    again = train_cl(cfg)
    assert "001-right is passed over: weights.safetensors has" in capsys.readouterr().out
    assert facts(again) == before


def test_joint_has_one_stage_and_as_many_updates(data, tmp_path):
    run = train_cl(config(data, tmp_path/"joint", algo="joint"))
    assert sum("train/loss" in r for r in run.logs()) == 8
    assert {(r["stage"], r["after"], r["task"]) for r in run.episodes()} == {(0, "joint", "left"), (0, "joint", "right")}


def test_first_success_and_failure_are_filmed(data, tmp_path):
    run = train_cl(config(data, tmp_path/"film", algo="joint", videos=True))
    films = list((run.path/"videos/000-joint").glob("*.gif"))
    assert len(films) == 2 and all(f.stat().st_size > 1000 for f in films)


@pytest.mark.parametrize("algo,kw", [("er", {}), ("mir", {}), ("ewc", dict(n_batches=2, B=8))])
def test_a_stream_that_comes_twice(data, tmp_path, algo, kw):
    run = train_cl(config(data, tmp_path/"twice", algo=algo, algo_kw=kw, cycles=2, steps_per_task=2, evaluate="none"))
    assert [p.name for p in checkpoints(run.path/"checkpoints")] == [
        "000-left", "001-right", "002-left", "003-right"]


def test_lerobot_data_sets_on_disk_are_a_stream(data, tmp_path, done):
    "Data sets from elsewhere have no environment: they can be trained on, and evaluation is refused with the reason."
    paths = [str(data/"dot"/f"{t}-n2-32px"/"lerobot") for t in ("left", "right")]
    with pytest.raises(ValueError, match="set evaluate to 'none'"): train_cl(config(data, tmp_path/"no", suite=paths, algo="er"))
    run = train_cl(config(data, tmp_path/"yes", suite=paths, algo="er", evaluate="none"))
    assert read_json(run.path/"stream.json")["stages"] == ["move-the-dot-to-the-left", "move-the-dot-to-the-right"]
    ours, theirs = (read_json(r.path/"dataset_statistics.json")["action"]["mean"] for r in (done, run))
    assert ours == theirs


def test_no_process_more_after_many_tasks(data, tmp_path):
    "Ten stages leave as many children as one."
    cfg, seen = config(data, tmp_path/"many", algo="er", cycles=5, steps_per_task=1), []
    from clvla.run.shell import Shell
    real = Shell.save

    def count(self): seen.append(len(children(os.getpid()))); return real(self)
    Shell.save = count
    try: train_cl(cfg)
    finally: Shell.save = real
    assert len(seen) == 10 and len(set(seen[1:])) == 1


def test_full_matrix_and_learning_curve(data, tmp_path):
    run = train_cl(config(data, tmp_path/"full", algo="sequential", evaluate="full", curve_points=2))
    at = {(r["stage"], r["task"], r["step"]) for r in run.episodes()}
    a, b = "left", "right"
    assert at == {(-1, a, None), (-1, b, None), (0, a, 0), (0, a, 2), (0, a, None), (0, b, None), (1, b, 0), (1, b, 2), (1, a, None), (1, b, None)}


def test_statistics_of_the_first_task_only(data, tmp_path, done):
    run = train_cl(config(data, tmp_path/"first", algo="er", stats="first", evaluate="none"))
    first, pooled = (read_json(r.path/"dataset_statistics.json")["action"]["count"] for r in (run, done))
    assert first < pooled


def test_another_config_in_the_same_folder_is_refused(data, done):
    with pytest.raises(ValueError, match="seed: 0 -> 1"): train_cl(replace(done.cfg, seed=1))
    assert train_cl(replace(done.cfg, n_workers=1)).done


def test_not_a_number_stops_the_run_at_once(data, tmp_path):
    with pytest.raises(FloatingPointError, match="task 'left'"):
        train_cl(config(data, tmp_path/"nan", algo="sequential", lr=1e30, clip=0., warmup=0, steps_per_task=30, evaluate="none"))


def test_a_full_disk_leaves_the_previous_checkpoint(data, tmp_path, monkeypatch):
    cfg = config(data, tmp_path/"full", algo="er", evaluate="none")
    import clvla.run.checkpoint as c
    real = c.save_state

    def full(path, state):
        if state["t"] == 2: raise OSError(28, "No space left on device")
        return real(path, state)
    with monkeypatch.context() as m:
        m.setattr(c, "save_state", full)
        with pytest.raises(OSError, match="No space left"): train_cl(cfg)
    points = checkpoints(Path(cfg.run_dir)/"checkpoints")
    assert [p.name for p in points] == ["000-left"] and not check_checkpoint(points[0])
    assert train_cl(cfg).done


@pytest.mark.parametrize("given,says", [
    (["-p", "sede", "3"], "did you mean 'seed'?"), (["-p", "seed", "1", "-p", "seed", "2"], "given twice: seed in -p"),
    (["-p", "algo", "mir", "-p", "refrsh", "50"], "did you mean 'refresh'?"),
])
def test_the_page_refuses_what_it_does_not_know(tmp_path, given, says):
    out = page("run_cl", tmp_path/"page.ipynb", *given, "-p", "run_dir", str(tmp_path/"run"))
    assert out.returncode and says in out.stderr and not (tmp_path/"run").exists()


@pytest.mark.parametrize("given,says", [
    (dict(algo="mirr"), "did you mean 'mir'?"), (dict(suite="mw55"), "did you mean 'mw5'?"), (dict(model="tinny"), "did you mean 'tiny'?"),
    (dict(n_demos="-1"), "n_demos must not be negative")])
def test_so_does_the_library_s_own_door(tmp_path, given, says):
    "The function that the page calls with its parameters."
    with pytest.raises(ValueError, match=re.escape(says)): resolve(from_page(TrainConfig, given | dict(run_dir=str(tmp_path/"run")), set()))
    assert not (tmp_path/"run").exists()


@pytest.mark.parametrize("kw,says", [
    (dict(algo_kw=dict(replay_ratio=1.)), r"\[0,1\)"), (dict(algo_kw=dict(replay_ratio=-.1)), r"\[0,1\)"), (dict(batch_size=-1), "not be negative"),
    (dict(algo_kw=dict(buffer_size=-1)), "buffer_size"), (dict(seed=-1), "seed must not be negative"), (dict(weight_decay=-1.), "weight_decay must not"),
    (dict(weight_decay=float("inf")), "infinite"), (dict(precision="fp16", device="cpu"), "float32 without a word"), (dict(suite=""), "suite is ''"),
    (dict(num_processes=64, batch_size=64), "cores; use at most"), (dict(model_kw=dict(D=7)), "D is 7"), (dict(model_kw=dict(n_blocks=-1)), "n_blocks"),
    (dict(model_kw=dict(D="big")), "D"), (dict(model_kw=dict(DD=7)), "did you mean 'D'?"), (dict(algo_kw=dict(seed=5)), "no setting 'seed'"),
    (dict(algo="ewc", algo_kw=dict(buffer_size=5)), "no setting 'buffer_size'"), (dict(algo="er", algo_kw=dict(sampel="x")), "no setting 'sampel'"),
    (dict(suite=dict(base="mw5_narrow", env=dict(max_stepz=5))), "did you mean 'max_steps'?"), (dict(init_from="/nowhere"), "does not exist"),
    (dict(suite="/no/folder"), "neither a registered stream nor an existing folder"), (dict(num_processes=3), "cannot be split into 3"), (dict(num_processes=2, algo="er", algo_kw=dict(form="append", replay_ratio=.4)), "2 processes cannot share equally"), (dict(strategy="zero2"), "num_processes"),
    (dict(suite=dict(base="mw5_narrow", tasks=["window-clos"])), "did you mean 'window-close'"), (dict(task_order=[0, 0]), "task_order"),
    (dict(accumulation=3), "micro-batches"), (dict(head="l2"), "did you mean 'l1'"), (dict(image_size=50), "image"),
])
def test_bad_settings_end_before_anything_is_made(data, tmp_path, kw, says):
    t0 = time.time()
    with pytest.raises(ValueError, match=says): train_cl(config(data, tmp_path/"run", **kw))
    assert time.time()-t0 < 20 and not list((tmp_path/"run").glob("checkpoints/*"))


def test_the_page_lists_every_parameter_where_papermill_looks_for_it():
    "`python tools/parameters.py` writes the list."
    from papermill.inspection import inspect_notebook
    from clvla.cl.all import algos
    from clvla.policies.all import policies
    from clvla.run.config import settings_of
    from clvla.train.config import FILLED
    listed = set(inspect_notebook(ROOT/"nbs/run_cl.ipynb"))
    fields_ = {f.name for f in fields(TrainConfig)}
    settings = {k for given, menu in ((("seed",), algos), (FILLED, policies)) for name in menu for k in settings_of(menu[name], given)}
    assert not (fields_ | settings) - listed


def test_an_older_run_goes_on(data, tmp_path, done):
    "Its config had ER's settings as fields and no learner, its checkpoint the algorithm's state beside the optimizer's."
    cfg = config(data, tmp_path/"old", algo="er", algo_kw=dict(replay_ratio=.5), evaluate="none")
    run = train_cl(cfg)
    before = facts(run)
    path = checkpoints(run.path/"checkpoints")[-1]
    shutil.rmtree(path)
    first = checkpoints(run.path/"checkpoints")[-1]
    state, algo = load_state(first/"state.safetensors"), load_state(first/"algo.safetensors")
    (first/"algo.safetensors").unlink()
    save_state(first/"state.safetensors", state | dict(algo=algo))
    files = {p.name: dict(sha256=sha256(p), bytes=p.stat().st_size) for p in sorted(first.iterdir()) if p.name != "manifest.json"}
    write_json(first/"manifest.json", read_json(first/"manifest.json") | dict(files=files))
    stored = {k: v for k, v in read_json(run.path/"config.json").items() if k not in ("learner", "plugins", "algo_kw", "lr_of", "prefetch", "cl", "cl_kw")}
    write_json(run.path/"config.json", stored | dict(algo="er", replay_ratio=.5, buffer_size=None, algo_kw={}))
    (run.path/"done.json").unlink()
    again = train_cl(cfg)
    weights = lambda r: sha256(checkpoints(r.path/"checkpoints")[-1]/"weights.safetensors")
    assert again.done and again.logs() and [r["train/loss"] for r in again.logs() if "train/loss" in r] and before[1] == 0
    assert weights(again) == weights(train_cl(replace(cfg, run_dir=str(tmp_path/"new"))))


def test_init_from_is_verified_before_anything_is_made(data, tmp_path, done):
    point = checkpoints(done.path/"checkpoints")[-1]
    copy = tmp_path/"copy"
    shutil.copytree(point, copy)
    bits = bytearray((copy/"weights.safetensors").read_bytes()); bits[-9] ^= 4; (copy/"weights.safetensors").write_bytes(bits)
    for kw, says in ((dict(init_from=str(copy)), "is not whole: weights.safetensors was changed"), (dict(init_from=str(done.path)), "folder of a run"),
                     (dict(init_from=str(point), image_size=48), "image_size 32 there and 48 in this run")):
        with pytest.raises(ValueError, match=says): train_cl(config(data, tmp_path/"run", algo="er", **kw))
    assert not (tmp_path/"run").exists()


@pytest.fixture(scope="module")
def smoke(data, tmp_path_factory):
    "The smoke run through its page, as a user starts it."
    tmp = tmp_path_factory.mktemp("smoke")
    out = page("run_cl", tmp/"page.ipynb", "-p", "smoke", "True", "-p", "algo", "mir", "-p", "run_dir", str(tmp/"run"), env={"CLVLA_DATA": str(data)})
    assert out.returncode == 0, out.stderr[-3000:]
    return tmp


def test_smoke_page_shows_its_results(smoke):
    cells = nbformat.read(smoke/"page.ipynb", 4).cells
    kinds = [k for c in cells for o in c.get("outputs", []) for k in o.get("data", {})]
    assert kinds.count("application/vnd.plotly.v1+json") >= 5
    assert (smoke/"run/report.html").stat().st_size > 1e6 and read_json(smoke/"run/matrix.json")["tasks"] == ["press-left", "open-faucet"]


def test_a_finished_run_is_shown_not_repeated(smoke, data):
    t0 = (smoke/"run/episodes.jsonl").stat().st_mtime
    args = ["-p", "smoke", "True", "-p", "algo", "mir", "-p", "run_dir", str(smoke/"run")]
    out = page("run_cl", smoke/"again.ipynb", *args, env={"CLVLA_DATA": str(data)})
    assert out.returncode == 0 and (smoke/"run/episodes.jsonl").stat().st_mtime == t0
    assert "this run is finished" in (smoke/"again.ipynb").read_text()


def test_checkpoints_are_evaluated_afterwards(smoke):
    "Self-contained: checkpoints, config.json and stream.json are all that there is, in another place; the run's data are out of reach."
    home = smoke/"elsewhere"; home.mkdir(); shutil.copytree(smoke/"run/checkpoints", home/"checkpoints")
    cfg = read_json(smoke/"run/config.json") | dict(data_dir=str(smoke/"nowhere"), run_dir=str(smoke/"nowhere"))
    write_json(home/"config.json", cfg); shutil.copy(smoke/"run/stream.json", home)   # the page's figures read the order
    out = page("eval_cl", smoke/"eval.ipynb", "-p", "run_dir", str(home), "-p", "n_trials", "1", "-p", "first_trial", "500",
               env={"CLVLA_DATA": str(smoke/"nowhere")})
    assert out.returncode == 0, out.stderr[-3000:]
    assert not (smoke/"nowhere").exists() and {p.name for p in home.iterdir()} <= {"checkpoints", "config.json", "stream.json", "evals"}
    records = RunFolder(home/"evals/lower-500+1-s0").episodes()
    assert {(r["stage"], r["task"], r["trial"]) for r in records} == {(0, "press-left", 500), (1, "press-left", 500), (1, "open-faucet", 500)}


def test_compare_page(data, tmp_path, done):
    other = train_cl(config(data, tmp_path/"run", algo="sequential"))
    out = page("compare", tmp_path/"compare.ipynb", "-p", "runs", f"{tmp_path/'ru?'},{done.path}", "-p", "baseline", "er", "-p", "report", str(tmp_path/"c.html"))
    assert other.done and out.returncode == 0, out.stderr[-3000:]
    assert (tmp_path/"c.html").stat().st_size > 1e6
    out = page("compare", tmp_path/"bad.ipynb", "-p", "runs", str(done.path), "-p", "baseline", "rr")
    assert out.returncode and "did you mean 'er'?" in out.stderr


def children(pid):
    out = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(p) for p in out] + [g for p in out for g in children(int(p))]


def test_nothing_is_left_when_the_page_is_killed(data, tmp_path):
    "The child and its simulators, Meta-World's, end with the process that started them."
    cfg = config(data, tmp_path/"run", algo="er", steps_per_task=2000, suite=dict(base="mw5_narrow", num_tasks=2))
    RunFolder(cfg.run_dir).begin(cfg)
    code = f"from clvla.run.launch import launch; launch('clvla.run', {cfg.run_dir!r})"
    p = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    log = Path(cfg.run_dir)/"log.jsonl"
    until = time.time()+120
    while not log.exists() and time.time() < until: time.sleep(.2)
    left = children(p.pid)
    assert log.exists() and left
    p.send_signal(signal.SIGKILL)
    p.wait()
    until = time.time()+30
    alive = lambda: [q for q in left if Path(f"/proc/{q}").exists() and Path(f"/proc/{q}/stat").read_text().split(") ")[1][0] != "Z"]
    while alive() and time.time() < until: time.sleep(.2)
    assert not alive()
    assert all(json.loads(l) for l in log.read_text().splitlines()[:-1])

def test_versions_name_the_libraries_of_a_simulator_that_is_installed(tmp_path, monkeypatch):
    from clvla.run.versions import versions
    versions()   # has imported what it needs

    def there(*names):
        home = tmp_path/names[-1]
        for n in names:
            (home/f"{n}-1.dist-info").mkdir(parents=True)
            (home/f"{n}-1.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {n}\nVersion: 1\n")
        monkeypatch.setattr(sys, "path", [str(home)])
    there("torch", "hf_libero", "robosuite", "bddl", "numba"); got = versions()
    assert [got[k] for k in ("torch", "hf-libero", "robosuite", "bddl", "numba", "peft")] == ["1"]*5+["not installed"]
    there("torch"); assert not {"hf-libero", "robosuite", "bddl", "numba"} & set(versions())


def test_a_run_says_what_has_changed_and_not_what_it_never_noted(tmp_path, monkeypatch):
    "GL backend and LIBERO's assets among them; a folder from before they were noted notes them now."
    from clvla.envs.all import kinds
    from clvla.run.resume import say_versions
    from clvla.train.learner import Imitation
    run, said, now = RunFolder(tmp_path), [], dict(torch="2.9", gl="osmesa")
    monkeypatch.setattr("clvla.run.versions.versions", lambda: now); monkeypatch.setattr(kinds["libero"], "identity", lambda spec: {"assets": "12ab"})
    tasks = [NS(env=dict(kind="libero"), source=dict(kind="demos")), NS(env=None, source=None)]
    learner = NS(cfg=NS(evaluate="lower"), stream=NS(tasks=tasks))
    learner.versions = lambda: Imitation.versions(learner)
    begun = NS(run=run, learner=learner, say=said.append)
    write_json(tmp_path/"versions.json", dict(torch="2.9"))   # as written before
    say_versions(begun); assert not said and read_json(tmp_path/"versions.json") == dict(torch="2.9", gl="osmesa", assets="12ab")
    now = dict(torch="2.9", gl="egl"); monkeypatch.setattr(kinds["libero"], "identity", lambda spec: {"assets": "34cd"})
    say_versions(begun); assert "gl osmesa -> egl, assets 12ab -> 34cd" in said[0] and read_json(tmp_path/"versions.json")["gl"] == "osmesa"


def test_looking_at_the_gl_backend_chooses_none(monkeypatch):
    from clvla.run.versions import gl_now
    for k in ("MUJOCO_GL", "LP_NUM_THREADS"): monkeypatch.delenv(k, raising=False)
    assert gl_now() in ("osmesa", "egl") and not {"MUJOCO_GL", "LP_NUM_THREADS"} & set(os.environ)
    monkeypatch.setenv("MUJOCO_GL", "crayons"); assert gl_now() == "none" and os.environ["MUJOCO_GL"] == "crayons"


def test_training_uses_the_threads_that_are_set_and_episodes_are_played_with_one(data, tmp_path, monkeypatch):
    import torch
    from clvla.eval.player import Player
    from clvla.train.trainer import Trainer
    seen, before = {"train": set(), "play": set()}, torch.get_num_threads()
    def noted(cls, name, what):
        real = getattr(cls, name)
        def call(*args, **kw):
            seen[what].add(torch.get_num_threads())
            return real(*args, **kw)
        monkeypatch.setattr(cls, name, call)
    noted(Trainer, "report", "train"), noted(Player, "evaluate", "play")
    try: assert train_cl(config(data, tmp_path/"run", algo="sequential", threads=2), say=len).done
    finally: torch.set_num_threads(before)
    assert seen == {"train": {2}, "play": {1}}


@pytest.mark.parametrize("given, says", [(dict(threads=-1), "threads"), (dict(threads=""), "threads"), (dict(threads=False), "threads"), (dict(num_processes=None), "num_processes")])
def test_threads_and_processes_that_cannot_be_are_refused(given, says, tmp_path):
    with pytest.raises(ValueError, match=says): resolve(TrainConfig.of(suite="dot_2", run_dir=str(tmp_path), **given))


@pytest.mark.parametrize("kw, here, n, words", [({}, 0, 1, ""), ({}, 1, 1, ""), ({}, 4, 4, ""), ({}, 3, 2, "2 of 3 GPUs"), (dict(gpus="0,2"), 3, 2, ""), (dict(device="cpu"), 4, 1, ""),
                                               (dict(num_processes=1), 4, 1, ""), (dict(strategy="zero2", ema=0.), 2, 2, "")])
def test_a_page_takes_all_gpus_where_nothing_is_said(tmp_path, monkeypatch, kw, here, n, words):
    from clvla.run.config import resolve, resolve_here
    for page in ("config", "machine"): monkeypatch.setattr(f"clvla.run.{page}.count_gpus", lambda: here)
    monkeypatch.setattr("clvla.run.config.checks", dict(imitation=lambda cfg: cfg.suite))
    cfg, said = TrainConfig(suite="dot_2", algo="er", run_dir=str(tmp_path/"run"), **kw), []
    found, about = resolve_here(cfg, said.append)
    assert (found.num_processes, about) == (n, "dot_2") and (words in said[0] if words else not said)
    if n == 1: assert found == resolve(cfg)   # as before
    (tmp_path/"run").mkdir()
    (tmp_path/"run/config.json").write_text(json.dumps(config_json(resolve(replace(cfg, num_processes=1)))))
    if not kw: assert resolve_here(cfg)[0].num_processes == 1   # a folder goes on with its own number


def test_agents_stay_in_one_process(tmp_path, monkeypatch):
    from clvla.crl.config import AgentConfig
    from clvla.run.config import resolve_here
    for page in ("config", "machine"): monkeypatch.setattr(f"clvla.run.{page}.count_gpus", lambda: 2)
    said = []
    assert resolve_here(AgentConfig(run_dir=str(tmp_path/"run")), said.append)[0].num_processes == 1 and "an agent learns in one process" in said[0]
