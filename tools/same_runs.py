"""Does a change to the library change what a run computes? Makes a dozen short runs and writes a file of hashes.

    python tools/same_runs.py OUT.json            # with the library that is imported
    python tools/same_runs.py OLD.json NEW.json   # compare two such files; exit code 1 when they differ

Each run gets the hash of its weights after every task, of its losses, of its success matrix, and of what was trained on and
replayed. Both files have to be made on the same machine, with the same libraries.
"""
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMALL = dict(n_demos=3, steps_per_task=12, warmup=3, n_trials=2, rows_per_task=1, n_workers=2)
MW2, MW3 = ({"base": "mw5_narrow", "num_tasks": n} for n in (2, 3))
LIBERO2 = {"base": "libero_goal", "tasks": ["turn_on_the_stove", "put_the_bowl_on_the_plate"]}
RUNS = dict(
    sequential=dict(algo="sequential", suite=MW2, evaluate="full", curve_points=2),
    joint=dict(algo="joint", suite=MW2),
    cumulative=dict(algo="cumulative", suite=MW3, head="l1", evaluate="none"),
    er=dict(algo="er", suite=MW3, accumulation=2, batch_size=32),
    er_twice=dict(algo="er", suite={"base": "mw5_narrow", "num_tasks": 2, "cycles": 2}, algo_kw={"buffer_size": 40}, reset_optimizer=False),
    mir=dict(algo="mir", suite=MW3, algo_kw={"refresh": 3}),
    ewc=dict(algo="ewc", suite=MW3, algo_kw={"lam": 10., "n_batches": 2}),
    er_lora=dict(algo="er", suite=MW2, lora_rank=4, evaluate="none"),
    er_two=dict(algo="er", suite=MW2, num_processes=2),
    mir_zero2=dict(algo="mir", suite=MW2, num_processes=2, strategy="zero2", evaluate="none", algo_kw={"refresh": 4}),
    libero_er=dict(algo="er", suite=LIBERO2, n_demos=2, steps_per_task=8, n_trials=2, image_size=64),
    libero_mir=dict(algo="mir", suite=LIBERO2, n_demos=2, steps_per_task=8, evaluate="none", head="l1", image_size=64),
    killed=dict(algo="mir", suite=MW3, algo_kw={"refresh": 3}, save_every=4),
)


def begin(run_dir, settings):
    "Claim a run folder, and say which module continues it."
    from clvla.train.config import TrainConfig, resolve
    try: from clvla.run.folder import RunFolder; module = "clvla.run"
    except ImportError: from clvla.train.run import RunFolder; module = "clvla.train"
    cfg = resolve(TrainConfig(**settings, run_dir=str(run_dir)))
    RunFolder(cfg.run_dir).begin(cfg)
    return module


def child(module, run_dir):
    "Start a run in a process of its own."
    log = open(Path(run_dir)/"said.txt", "a")
    return subprocess.Popen([sys.executable, "-m", module, str(run_dir)], stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def kill_once(process, run_dir):
    "SIGKILL the run when it has written its first checkpoint inside the second task."
    while process.poll() is None:
        if list((Path(run_dir)/"checkpoints").glob("001+*")): process.send_signal(signal.SIGKILL); break
        time.sleep(.02)
    if process.wait() != -signal.SIGKILL: raise SystemExit(f"the run in {run_dir} ended before it could be killed")
    time.sleep(1)


def sha(value): return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def weights(path):
    "Hash of every tensor of a safetensors file, by name."
    from safetensors import safe_open
    with safe_open(path, "np") as f:
        return [[k, str(f.get_tensor(k).dtype), hashlib.sha256(f.get_tensor(k).tobytes()).hexdigest()] for k in sorted(f.keys())]


def lines(path): return [json.loads(l) for l in Path(path).read_text().splitlines()] if Path(path).exists() else []


def hashes(run_dir):
    "What a finished run computed."
    run_dir = Path(run_dir)
    log, episodes = lines(run_dir/"log.jsonl"), lines(run_dir/"episodes.jsonl")
    ends = [p for p in sorted((run_dir/"checkpoints").iterdir()) if p.is_dir() and "+" not in p.name]
    numbers = [[r["stage"], r["step"], r["lr"], r.get("train/loss"), r.get("train/penalty"), r.get("train/grad_norm")]
               for r in log if "step" in r]
    replay = [[r["stage"], r.get("drawn"), {k: v for k, v in r.items() if k.startswith("replayed/") or k == "buffer"}]
              for r in log if "drawn" in r or any(k.startswith("replayed/") for k in r)]
    cells = sorted([r["stage"], r["step"] if r["step"] is not None else -1, r["task"], r["trial"], r["success"], r["steps"], r["reward"]]
                   for r in episodes)
    return dict(weights=sha([[p.name, weights(p/"weights.safetensors")] for p in ends]), losses=sha(numbers),
                replay=sha(replay), episodes=sha(cells), n=[len(ends), len(numbers), len(cells)])


def main(out, names=()):
    work = Path(os.environ.get("SAME_RUNS_DIR") or tempfile.mkdtemp())
    found = json.loads(Path(out).read_text()) if Path(out).exists() else {}
    for name, settings in RUNS.items():
        if name in found or names and name not in names: continue
        t0, run_dir = time.time(), work/"runs"/name
        module = begin(run_dir, SMALL | settings | dict(data_dir=str(work/"data")))
        if name == "killed": kill_once(child(module, run_dir), run_dir)
        if child(module, run_dir).wait(): raise SystemExit(f"{name} failed:\n"+(run_dir/"said.txt").read_text()[-3000:])
        found[name] = hashes(run_dir)
        Path(out).write_text(json.dumps(found, indent=1)+"\n")
        print(f"{name}: {time.time()-t0:.0f} s, {found[name]}", flush=True)


def compare(old, new):
    old, new = (json.loads(Path(p).read_text()) for p in (old, new))
    bad = [f"{run}: {', '.join(k for k in old[run] if old[run][k] != new.get(run, {}).get(k))}"
           for run in old if old[run] != new.get(run)]
    print("\n".join(bad) or f"{len(old)} runs are equal")
    return bool(bad)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].endswith(".json"): sys.exit(compare(*sys.argv[1:]))
    if len(sys.argv) < 2: raise SystemExit(__doc__)
    main(sys.argv[1], sys.argv[2:])
