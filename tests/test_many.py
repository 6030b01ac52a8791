"Several processes on one machine: the same mathematics as one, the same matrix, kill and go on, and an end to every wait."
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from chaos import alive, environment, wait_for
from clvla.core.files import read_json
from clvla.run.checkpoint import checkpoints
from clvla.train.config import RunConfig, resolve
from clvla.run.shell import fingerprint
from clvla.run.folder import RunFolder, descendants
from clvla.run.stop import EXIT_STOPPED

SMALL = dict(n_demos=2, steps_per_task=6, n_trials=2, rows_per_task=1, warmup=1, batch_size=16, n_workers=2, image_size=32,
             suite=dict(base="mw5", num_tasks=2))
ALGOS = {"sequential": {}, "er": {}, "mir": dict(algo_kw=dict(refresh=2)), "ewc": dict(algo_kw=dict(n_batches=2, B=8))}


@pytest.fixture(scope="module")
def home(tmp_path_factory): return tmp_path_factory.mktemp("many")


def config(home, name, **kw): return resolve(RunConfig(data_dir=str(home/"data"), run_dir=str(home/name), **(SMALL | kw)))


def start(cfg, **env):
    RunFolder(cfg.run_dir).begin(cfg)
    with open(Path(cfg.run_dir)/"console.txt", "a") as f:
        return subprocess.Popen([sys.executable, "-m", "clvla.run", cfg.run_dir], stdout=f, stderr=subprocess.STDOUT, start_new_session=True,
                                env=os.environ | {"OMP_NUM_THREADS": "1"} | env)


def run(home, name, **kw):
    "A finished run of that name, made when it is first asked for."
    cfg = config(home, name, **kw)
    if not (Path(cfg.run_dir)/"done.json").exists():
        assert start(cfg).wait(400) == 0, (Path(cfg.run_dir)/"console.txt").read_text()[-4000:]
    return RunFolder(cfg.run_dir)


def losses(r): return np.array([l["train/loss"] for l in r.logs() if "train/loss" in l])
def episodes(r): return sorted(json.dumps({k: v for k, v in e.items() if k != "seconds"}) for e in r.episodes())
def drawn(r): return [l["drawn"] for l in r.logs() if "drawn" in l]


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
@pytest.mark.parametrize("algo", list(ALGOS))
def test_two_processes_are_one(home, algo, strategy):
    "Loss curves agree to rounding, what was drawn is the same, every cell is measured once."
    kw = dict(algo=algo, evaluate="lower" if algo == "er" else "none", **ALGOS[algo])
    one, two = run(home, f"{algo}-1", **kw), run(home, f"{algo}-{strategy}", num_processes=2, strategy=strategy, **kw)
    assert len(losses(one)) == 12 and np.abs(losses(one)-losses(two)).max() < 2e-5
    assert drawn(one) == drawn(two) and sum(drawn(two)[1].values()) == 6*16
    key = lambda r: sorted((e["stage"], e["task"], e["trial"]) for e in r.episodes())
    assert key(one) == key(two) and len(key(two)) == (6 if algo == "er" else 0) and not list(two.path.glob("episodes-*.jsonl"))


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_other_stages_of_zero(home, strategy):
    kw = dict(algo="er", ema=0.)
    one, two = run(home, "er-1-plain", **kw), run(home, f"er-{strategy}", num_processes=2, strategy=strategy, **kw)
    assert np.abs(losses(one)-losses(two)).max() < 2e-5 and len(two.episodes()) == 6


def test_the_matrix_of_the_same_weights_does_not_depend_on_processes(home):
    "Without training in between, the policy is the same to the bit, and so is every episode."
    kw = dict(algo="sequential", lr=1e-30, weight_decay=0., ema=0., n_trials=3, rows_per_task=2)
    one, two = run(home, "frozen-1", **kw), run(home, "frozen-2", num_processes=2, **kw)
    assert episodes(one) == episodes(two) and len(episodes(one)) == 9


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_killed_and_started_again(home, strategy):
    "SIGKILL of one rank inside the second task; the other ends, too, and the run goes on to the same fingerprint."
    kw = dict(algo="mir", num_processes=2, strategy=strategy, save_every=2, steps_per_task=8, evaluate="none", **ALGOS["mir"])
    whole, cfg = run(home, f"whole-{strategy}", **kw), config(home, f"killed-{strategy}", **kw)
    log, p = Path(cfg.run_dir)/"log.jsonl", start(cfg)
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) >= 12)
    os.kill(ranks(p.pid)[1], signal.SIGKILL)
    assert p.wait(90) not in (0, EXIT_STOPPED)
    assert RunFolder(cfg.run_dir).status in ("failed", "interrupted") and checkpoints(Path(cfg.run_dir)/"checkpoints")
    assert start(cfg).wait(200) == 0 and fingerprint(cfg.run_dir) == fingerprint(whole.path)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_signal_stops_all_at_the_same_update(home, strategy):
    kw = dict(algo="er", num_processes=2, steps_per_task=150, evaluate="none", strategy=strategy)
    whole, cfg = run(home, f"whole-signal-{strategy}", **kw), config(home, f"signal-{strategy}", **kw)
    log, p = Path(cfg.run_dir)/"log.jsonl", start(cfg)
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) >= 200)
    t0 = time.monotonic(); p.terminate()
    assert p.wait(60) == EXIT_STOPPED and time.monotonic()-t0 < 15
    at = read_json(Path(cfg.run_dir)/"stopped.json")
    assert at["stage"] == 1 and 0 < at["step"] < 150 and not (Path(cfg.run_dir)/"failed.json").exists()
    assert start(cfg).wait(200) == 0 and fingerprint(cfg.run_dir) == fingerprint(whole.path)


def test_killed_during_evaluation(home):
    "Episodes of the other rank that were played before the kill are kept, and none is played twice."
    kw = dict(algo="er", num_processes=2, n_trials=8)
    whole, cfg = run(home, "whole-eval", **kw), config(home, "killed-eval", **kw)
    p, r = start(cfg), RunFolder(cfg.run_dir)
    wait_for(lambda: len([e for e in r.episodes(len) if e["stage"] == 1]) >= 3)
    os.kill(ranks(p.pid)[0], signal.SIGKILL)
    assert p.wait(90) not in (0, EXIT_STOPPED)
    assert start(cfg).wait(200) == 0 and fingerprint(cfg.run_dir) == fingerprint(whole.path) and len(r.episodes()) == 24


def test_adapters_and_accumulation_on_two_processes(home):
    kw = dict(algo="mir", lora_rank=4, accumulation=2, evaluate="none", **ALGOS["mir"])
    one, two = run(home, "lora-1", **kw), run(home, "lora-2", num_processes=2, **kw)
    assert np.abs(losses(one)-losses(two)).max() < 2e-5 and drawn(one) == drawn(two)


def test_a_process_that_stops_answering_ends_the_run(home):
    "SIGSTOP of one rank: the other one waits no longer than `timeout`, and a message says so."
    cfg = config(home, "hang", algo="sequential", num_processes=2, steps_per_task=5000, evaluate="none", timeout=.1)
    log, p = Path(cfg.run_dir)/"log.jsonl", start(cfg)
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) >= 3)
    held = ranks(p.pid)[1]; os.kill(held, signal.SIGSTOP)
    assert p.wait(90) not in (0, EXIT_STOPPED)
    text = (Path(cfg.run_dir)/"console.txt").read_text()
    assert "timeout" in text and RunFolder(cfg.run_dir).status == "failed", text[-3000:]
    assert not alive(held)


@pytest.mark.parametrize("kw,says", [
    (dict(strategy="zero2"), "num_processes"), (dict(num_processes=3), "batch_size 16 cannot be split into 3"),
    (dict(num_processes=2, strategy="zero3", algo="mir"), "zero3"), (dict(num_processes=2, strategy="zero3", algo="er"), "ema"),
    (dict(num_processes=2, strategy="zero9"), "did you mean"),
])
def test_what_cannot_work_is_refused_at_the_door(home, kw, says):
    from clvla.train.prepare import check
    with pytest.raises(ValueError, match=says): check(config(home, "never", **kw))


def ranks(pid):
    "Process ids of the ranks below a launcher, by rank."
    found = {int(e[5:]): p for p in descendants(pid, deep=False) for e in environment(p) if e.startswith(b"RANK=")}
    return [found[k] for k in sorted(found)]
