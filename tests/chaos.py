"""Kill runs at random moments, start them again, and compare what they computed with an undisturbed run.

    python tests/chaos.py --kills 100 --parallel 2 --out chaos.json
    python tests/chaos.py --kills 20 --agents --out chaos_agents.json

Each run gets one SIGKILL at a random moment: of the training process, or of one of the processes that it started
(simulators, or makers of demonstrations). For half of the runs the moment is uniform over the whole time, most of which
such a short run spends with imports; for the other half, over the time after its first checkpoint. A kill that came too
late, after the end, is repeated earlier. The run is started again until it has finished. Then its fingerprint (weights,
optimizer, generators, algorithm state, every log line, every episode) is compared with the undisturbed run of the same
algorithm, and the machine is searched for processes and temporary files that were left behind. The exit code is 0 when
nothing differs. With `--agents` the runs are those of agents that learn by reward, which have no other process.
"""
import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clvla.crl.config import AgentConfig, resolve_agent
from clvla.train.config import TrainConfig, resolve
from clvla.run.resume import fingerprint
from clvla.run.folder import RunFolder

SMALL = dict(suite=dict(base="mw5_narrow", num_tasks=2), n_demos=2, steps_per_task=30, n_trials=3, rows_per_task=1, warmup=1, batch_size=8, threads=1,
             save_every=5, n_workers=2, image_size=32)
ALGOS = {"er": {}, "mir": dict(algo_kw=dict(refresh=2)), "ewc": {}}
DOTS = dict(suite=dict(base="dot_2", env=dict(discrete=True), name="dots"), cycles=2, steps_per_task=960, eval_every=320, n_trials=3, image_size=8,
            threads=1, save_every=3, device="cpu")
NET = dict(n_envs=4, horizon=20, hidden=8, channels=2)
AGENTS = {**{algo: dict(algo_kw=NET) for algo in ("ppo", "impala", "clear", "progress_compress", "sane")},
          **{cl: dict(algo="impala", algo_kw=NET, cl=cl) for cl in ("ewc", "online_ewc")}}
MARK = "CLVLA_CHAOS_RUN"


def policy_run(name, **folders):
    "Settings of a run of a policy, with one of `ALGOS`."
    return resolve(TrainConfig(algo=name, **SMALL, **ALGOS[name], **folders))


def agent_run(name, **folders):
    "Settings of a run of an agent, one of `AGENTS`."
    return resolve_agent(AgentConfig(**dict(algo=name) | DOTS | AGENTS[name], **folders))


def wait_for(condition, seconds=150):
    "Wait until a run has come so far; AssertionError when it does not."
    until = time.monotonic()+seconds
    while not condition():
        assert time.monotonic() < until, "it did not come so far"
        time.sleep(.02)


def alive(pid):
    "Whether a process is there and not dead."
    try: return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError: return False


def environment(pid):
    "What a process has in its environment, as bytes; empty when it has just ended."
    try: return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError: return []


def marked(name):
    "Processes that carry the mark of a run in their environment, orphans too, without those that are dead."
    pids = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]
    return [p for p in pids if p != os.getpid() and f"{MARK}={name}".encode() in environment(p) and alive(p)]


def begin(cfg, name, console=None):
    "Start the training process of a run; what it prints goes to console.txt in its folder, or to another file."
    console = open(console or Path(cfg.run_dir)/"console.txt", "a")
    with console:
        return subprocess.Popen([sys.executable, "-m", "clvla.run", cfg.run_dir], stdout=console, stderr=subprocess.STDOUT,
                                start_new_session=True, env=os.environ | {MARK: name, "OMP_NUM_THREADS": "1"})


def left_behind(cfg, name):
    "What a finished run must not leave: processes and temporary files."
    until = time.monotonic()+10
    while (left := marked(name)) and time.monotonic() < until: time.sleep(.1)
    hidden = [str(p.relative_to(cfg.run_dir)) for p in Path(cfg.run_dir).rglob(".*")]
    temporary = [p.name for p in Path(cfg.data_dir).rglob("*") if p.name.endswith((".writing", ".old", ".tmp"))]
    return [f"process {p}" for p in left] + hidden + temporary


def role(pid):
    "What a process of a run does, by its command line."
    try: line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError: return "worker"  # it has just ended
    return "demonstration maker" if b"demo_worker" in line else "simulator" if b"pool" in line else "worker"


def kill_one(cfg, algo, victim, clock, after, name, rng, limit=300):
    "Run, kill once `after` seconds, run again until it is done; one row of the table."
    t0 = time.monotonic()
    RunFolder(cfg.run_dir).begin(cfg)
    p, killed, starts, since = begin(cfg, name), None, 1, t0 if clock == "start" else None
    while not RunFolder(cfg.run_dir).done:
        if time.monotonic()-t0 > limit: raise RuntimeError(f"{name} did not finish within {limit} s; see {cfg.run_dir}/console.txt")
        if since is None and (Path(cfg.run_dir)/"checkpoints/LATEST").exists(): since = time.monotonic()
        if killed is None and since is not None and time.monotonic()-since >= after:
            others = [q for q in marked(name) if q != p.pid]
            target = p.pid if victim == "trainer" or not others else rng.choice(others)
            what = "trainer" if target == p.pid else role(target)
            try: os.kill(target, signal.SIGKILL); killed = what
            except ProcessLookupError: continue  # it ended by itself in this moment
        code = p.poll()
        if code is not None and not RunFolder(cfg.run_dir).done:
            if killed != "trainer": raise RuntimeError(f"{name} ended with exit code {code}; see {cfg.run_dir}/console.txt")
            p, starts = begin(cfg, name), starts+1
        time.sleep(.01)
    p.wait()
    last = (Path(cfg.run_dir)/"console.txt").read_text()
    point = next((l.split()[-1] for l in last.splitlines() if l.startswith("continued after")), "")
    again = sum(r["restarts"] for r in RunFolder(cfg.run_dir).episodes())
    return dict(name=name, algo=algo, victim=killed or "none", clock=clock, after=round(after, 2), starts=starts, episodes_again=again, continued_from=point,
                hash=fingerprint(cfg.run_dir), left=left_behind(cfg, name), seconds=round(time.monotonic()-t0, 1))


def copy_demos(src, dst):
    "Copy the finished demonstrations of a data folder, without locks and what is being written."
    return shutil.copytree(src, dst, ignore=shutil.ignore_patterns(".*", "weights"))


def chaos(folder, kills, seed=0, parallel=1, say=print, demos=None, algos=tuple(ALGOS), config=policy_run):
    "Kill `kills` runs, `algos` in turn; returns (references, rows). `demos` is a data folder whose demonstrations are copied."
    folder, rng = Path(folder), random.Random(seed)
    make = lambda name, algo, data: config(algo, run_dir=str(folder/name), data_dir=str(folder/data))
    references, took = {}, {}

    def reference(name, algo):
        cfg, t0 = make(name, algo, "data"), time.monotonic()
        RunFolder(cfg.run_dir).begin(cfg)
        p, first = begin(cfg, cfg.run_dir), None
        while p.poll() is None:
            if first is None and (Path(cfg.run_dir)/"checkpoints/LATEST").exists(): first = time.monotonic()
            time.sleep(.01)
        if p.returncode: raise RuntimeError(f"the undisturbed run failed; see {cfg.run_dir}/console.txt")
        references[algo], took[algo] = fingerprint(cfg.run_dir), dict(start=time.monotonic()-t0, checkpoint=time.monotonic()-first)
        say(f"{name}, {algo}: undisturbed {references[algo][:12]}, {took[algo]['start']:.1f} s, {took[algo]['checkpoint']:.1f} s after the first checkpoint")

    if demos: copy_demos(demos, folder/"data")
    elif config is policy_run: reference("first", "er")  # makes the demonstrations

    def one(k):
        algo, r = algos[k%len(algos)], random.Random(f"{seed}-{k}")
        fresh, victim, share = k%5 == 4, r.choice(["trainer", "trainer", "worker"]), r.uniform(.05, .95)
        clock = "start" if k%2 else "checkpoint"
        for again in range(8):  # a run that was over before its kill does not count
            cfg = make(f"kill-{k:03d}-{again}", algo, f"data-{k:03d}-{again}" if fresh else "data")  # fresh: it may come while demonstrations are made
            row = kill_one(cfg, algo, victim, clock, share*.8**again*took[algo][clock], f"{folder.name}-{k:03d}-{again}", r)
            if row["victim"] != "none": break
        row["same"] = row["hash"] == references[algo]
        say("  ".join(f"{row[c]!s:<24}" if c == "continued_from" else f"{row[c]!s:<8}" for c in ("name", "algo", "victim", "clock", "after",
            "starts", "continued_from", "episodes_again", "same", "seconds")) + ("" if not row["left"] else f"  left: {row['left']}"))
        return row
    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(lambda a: reference(f"reference-{a}", a), algos))  # as many at a time as are killed later: equal load, equal times
        return references, list(pool.map(one, range(kills)))


def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument("--kills", type=int, default=100); a.add_argument("--seed", type=int, default=0)
    a.add_argument("--parallel", type=int, default=2); a.add_argument("--out", default="")
    a.add_argument("--agents", action="store_true")
    a = a.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        which = dict(algos=tuple(AGENTS), config=agent_run) if a.agents else {}
        references, rows = chaos(tmp, a.kills, a.seed, a.parallel, lambda line: print(line, flush=True), **which)
    good = [r for r in rows if r["same"] and not r["left"] and r["victim"] != "none"]
    print(f"{len(rows)} kills, {len(good)} runs with the fingerprint of the undisturbed one and nothing left behind")
    if a.out: Path(a.out).write_text(json.dumps(dict(references=references, rows=rows), indent=1))
    return len(good) != len(rows)


if __name__ == "__main__": sys.exit(main())
