"""Does a change to the library change what a run computes? Makes many short runs and writes a file of hashes.

    python tools/same_runs.py OUT.json [RUN ...]  # with the library that is imported; all runs, or those that are named
    python tools/same_runs.py OLD.json NEW.json   # compare two such files; exit code 1 when a run computed something else

A run gives hashes of the tensors of its checkpoints after every stage (weights, moments of the optimizer, other numbers,
whole numbers such as generators), of each column of its log, of its success matrix, of what was replayed and of its own attempts.
Tensors are compared by content within their sort: one that has another name now is said and is no difference, and one that came
new is said. Both files have to be made on the same machine, with the same libraries. Folders of the runs lie under $SAME_RUNS_DIR.
"""
import hashlib
import json
import os
import re
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

# imitation: `algo` is the method against forgetting
SMALL = dict(n_demos=3, steps_per_task=12, warmup=3, n_trials=2, rows_per_task=1, n_workers=1, threads=1)
DOTS2, DOTS3 = "dot_2", "dot_3"
MW2, MW3 = ({"base": "mw5_narrow", "num_tasks": n} for n in (2, 3))
LIBERO2 = {"base": "libero_goal", "tasks": ["turn_on_the_stove", "put_the_bowl_on_the_plate"]}
IMITATION = dict(
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
# every further method of `cl.all.algos`, and two that are joined, on a stream that needs no simulator
DOTS = dict(suite=DOTS3, n_demos=2, steps_per_task=8, n_trials=1, batch_size=8, image_size=32)
MENU = ("from_scratch", "gss", "phaser", "latent", "gdumb", "l2", "si", "rwalk", "mas", "agem", "gem", "derpp", "der", "lwf", "lfl", "retain", "gpm", "packnet",
        "task_lora", "progressive", "dwe", "router", "olora", "keeplora", "mlr", "er+ewc")

ROUNDS = dict(suite=DOTS2, n_demos=2, steps_per_task=8, episodes=6, round_episodes=3, n_trials=2, rows_per_task=2, n_workers=1,
              threads=1, warmup=1, batch_size=8, image_size=32, stride=2)
TOKEN, FEW = dict(updates=5, token_updates=4, sample=8), dict(epochs=2, minibatch=8)
PRACTICE = dict(
    cloning=dict(algo="cloning", algo_kw=dict(updates=5)),
    best_of_n=dict(algo="best_of_n", algo_kw=dict(updates=5, N=4, sample=8)),
    token_td3=dict(algo="token_td3", algo_kw=TOKEN),
    token_td3_tuned=dict(algo="token_td3", algo_kw=TOKEN | dict(encoder_lr=1e-4, vla_lr=1e-5, tune_updates=3, tune_sample=4)),
    token_ppo=dict(algo="token_ppo", algo_kw=dict(token_updates=4) | FEW),
    token_grpo=dict(algo="token_grpo", algo_kw=dict(token_updates=4, group_size=3) | FEW),
    dsrl=dict(algo="dsrl", algo_kw=dict(updates=5, noises=4, sample=8)),
    distilled=dict(algo="distilled", algo_kw=dict(updates=5, N=4, sample=8, actor_every=2)),
    choice_ppo=dict(algo="choice_ppo", algo_kw=dict(N=4) | FEW),
    choice_grpo=dict(algo="choice_grpo", algo_kw=dict(N=4, group_size=3) | FEW),
    flow_ppo=dict(algo="flow_ppo", algo_kw=FEW),
    flow_grpo=dict(algo="flow_grpo", algo_kw=dict(group_size=3) | FEW),
    dagger=dict(algo="dagger", algo_kw=dict(updates=5)),
    hg_dagger=dict(algo="hg_dagger", algo_kw=dict(updates=5)),
    recap=dict(algo="recap", algo_kw=dict(updates=5, value_updates=4, sample=8)),
    token_pretrain=dict(algo="token_pretrain", algo_kw=dict(updates=5, sample=8)),
    cloning_two=dict(algo="cloning", algo_kw=dict(updates=5), num_processes=2),
    cloning_ahead=dict(algo="cloning", algo_kw=dict(updates=5), overlap=True),
    stream_none=dict(algo="cloning", algo_kw=dict(updates=5), stream=True),
    stream_er=dict(algo="cloning", algo_kw=dict(updates=5), stream=True, cl="er"),
    stream_ewc=dict(algo="cloning", algo_kw=dict(updates=5), stream=True, cl="ewc", cl_kw=dict(n_batches=2)),
    practice_killed=dict(algo="cloning", algo_kw=dict(updates=12), stream=True, cl="er", save_every=2),
    token_killed=dict(algo="token_td3", algo_kw=TOKEN | dict(updates=12), save_every=2),
)

STEPS = dict(cycles=1, steps_per_task=64, eval_every=64, n_trials=2, threads=1)
DISCRETE, GRIDS = (dict(base=base, **kw) for base, kw in ((DOTS2, dict(env=dict(discrete=True))), ("minigrid_engine_3", dict(tasks=["empty", "key"]))))
AGENTS = {name: dict(n_envs=4, horizon=8, channels=2, hidden=16) | kw for name, kw in dict(
    ppo=dict(minibatch=16, epochs=2), impala={}, clear=dict(frames=80), progress_compress={}, sane=dict(frames=80)).items()} | {"random": dict(n_envs=4, horizon=8)}
RUNNERS = dict(sync=dict(suite=DISCRETE, image_size=16), batched=dict(suite=GRIDS), parallel=dict(suite=DISCRETE, image_size=16, runner_kw=dict(n_actors=2)))
COPIED = "ppo", "impala", "clear"   # name a network that actors can copy
AGENT = {f"{algo}_{runner}": dict(algo=algo, algo_kw=AGENTS[algo], runner=runner) | RUNNERS[runner]
         for algo in AGENTS for runner in RUNNERS if runner != "parallel" or algo in COPIED}
AGENT |= {f"{algo}_{cl}": dict(algo=algo, algo_kw=AGENTS[algo], cl=cl, cl_kw=dict(fisher_steps=32)) | RUNNERS["sync"]
          for algo in ("ppo", "impala") for cl in ("ewc", "online_ewc")}
AGENT["agent_killed"] = dict(algo="ppo", algo_kw=AGENTS["ppo"], cl="ewc", cl_kw=dict(fisher_steps=32), steps_per_task=640, eval_every=640,
                             save_every=2) | RUNNERS["sync"]
AGENT["clear_killed"] = dict(algo="clear", algo_kw=AGENTS["clear"], steps_per_task=640, eval_every=640, save_every=2) | RUNNERS["sync"]
AGENT["parallel_killed"] = dict(algo="impala", algo_kw=AGENTS["impala"], steps_per_task=640, eval_every=640, save_every=2, runner="parallel") | RUNNERS["parallel"]

EVAL = dict(n_trials=1, first_trial=5, evaluate="full", n_workers=1)
EVALUATED = dict(eval_er="er", eval_packnet="dots_packnet", eval_cloning="cloning", eval_token="token_td3")   # of which run

RUNS = ({name: ("imitation", SMALL | kw) for name, kw in IMITATION.items()}
        | {f"dots_{name.replace('+', '_')}": ("imitation", SMALL | DOTS | dict(algo=name)) for name in MENU}
        | {name: ("practice", ROUNDS | kw) for name, kw in PRACTICE.items()}
        | {name: ("agent", STEPS | kw) for name, kw in AGENT.items()}
        | {name: ("eval", EVAL | dict(of=of)) for name, of in EVALUATED.items()})


def begin(learner, run_dir, settings):
    "Claim a run folder, and say which module continues it and with which arguments. What a run is spelt like stands here alone."
    if learner == "eval":
        from clvla.train.eval_config import EvalConfig, begin_eval, check_eval
        evaluation = check_eval(EvalConfig(**{k: v for k, v in settings.items() if k != "data_dir"}, run_dir=str(run_dir)))
        return "clvla.run", (str(run_dir), begin_eval(evaluation).name)
    if learner == "imitation": from clvla.train.config import TrainConfig as Config, resolve
    if learner == "practice": from clvla.rl.config import PracticeConfig as Config, resolve_practice as resolve
    if learner == "agent": from clvla.crl.config import AgentConfig as Config, resolve_agent as resolve
    from clvla.run.folder import RunFolder
    cfg = resolve(Config(**settings, run_dir=str(run_dir)))
    RunFolder(cfg.run_dir).begin(cfg)
    return "clvla.run", (cfg.run_dir,)


def child(module, args, said):
    "Do a run in a copy of this process, which has imported what it needs; its number."
    sys.stdout.flush()
    pid = os.fork()
    if pid: return pid
    code = 1
    try:
        os.setsid()
        log = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for fd in (1, 2): os.dup2(log, fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = [module, *args]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as e: code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException: traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(pid): return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_once(pid, run_dir, stage):
    "SIGKILL a run when it has written a checkpoint inside a stage; SystemExit when it ended before."
    while not list((Path(run_dir)/"checkpoints").glob(f"{stage:03d}+*")):
        if os.waitpid(pid, os.WNOHANG)[0]: raise SystemExit(f"the run in {run_dir} ended before it could be killed")
        time.sleep(.01)
    os.kill(pid, signal.SIGKILL)
    if ended(pid) != -signal.SIGKILL: raise SystemExit(f"the run in {run_dir} ended before it could be killed")
    time.sleep(1)   # its simulators and actors end by themselves


def sha(value): return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def sort_of(file, name, dtype):
    "Which sort of tensor it is: weight, moment (of an optimizer), number or whole (a generator, a picture, a count)."
    if re.search("exp_avg|momentum|square_avg", name): return "moment"
    if "F" not in dtype: return "whole"
    return "weight" if file == "weights" or re.search(r"weight|bias|log_std", name) else "number"


def tensors(folder):
    "sort/file/name -> hash of each tensor of the safetensors files of a folder."
    import torch
    from safetensors import safe_open
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as f:
            for name in f.keys():
                x = f.get_tensor(name)
                dtype = str(x.dtype).removeprefix("torch.")
                data = x.contiguous().flatten().view(torch.uint8).numpy().tobytes() if x.numel() else b""
                found[f"{sort_of(path.stem, name, dtype.upper())}/{path.stem}/{name.strip('/')}"] = hashlib.sha256(f"{dtype} {tuple(x.shape)}".encode()+data).hexdigest()[:12]
    return found


def lines(path): return [json.loads(l) for l in Path(path).read_text().splitlines()] if Path(path).exists() else []


def columns(log):
    "Column of a log -> hash of its numbers."
    found = {}
    for r in log:
        for k, v in r.items():
            if k in ("seconds", "restarts", "crc32") or "time/" in k or "second" in k: continue
            found.setdefault(k, []).append([r.get("stage"), r.get("step"), v])
    return {k: sha(v) for k, v in sorted(found.items())}


def cells(run_dir):
    rows = sorted([r["stage"], r["step"] if r["step"] is not None else -1, r["task"], r["trial"], r["success"], r["steps"], r["reward"]]
                  for r in lines(Path(run_dir)/"episodes.jsonl"))
    return sha(rows)+f" of {len(rows)}"


def hashes(run_dir):
    "What a finished run computed."
    run_dir = Path(run_dir)
    ends = [p for p in sorted((run_dir/"checkpoints").iterdir()) if p.is_dir() and "+" not in p.name and not p.name.startswith(".")]
    return dict(checkpoints={p.name: tensors(p) for p in ends}, log=columns(lines(run_dir/"log.jsonl")), episodes=cells(run_dir),
                attempts=tensors(run_dir/"practice"))


def one(name, work):
    "Do a run and give its hashes."
    learner, settings = RUNS[name]
    run_dir, settings = work/"runs"/name, dict(settings)
    if learner == "eval":
        run_dir = work/"runs"/settings.pop("of")
        if not (run_dir/"done.json").exists(): one(run_dir.name, work)
    else: run_dir.mkdir(parents=True)
    said = run_dir/"said.txt"
    module, args = begin(learner, run_dir, settings | dict(data_dir=str(work/"data")))
    if name.endswith("killed"): kill_once(child(module, args, said), run_dir, 0 if name == "token_killed" else 1)
    if code := ended(child(module, args, said)): raise SystemExit(f"{name} ended with code {code}:\n"+said.read_text()[-3000:])
    return dict(episodes=cells(run_dir/"evals"/args[1])) if learner == "eval" else hashes(run_dir)


def preload():
    "Import what the runs need, once."
    import clvla.run.__main__   # noqa: F401
    from clvla.run.all import learners
    for name in learners: learners[name]


def main(out, names=()):
    out, work = Path(out).resolve(), Path(os.environ.get("SAME_RUNS_DIR") or tempfile.mkdtemp()).resolve()
    if unknown := [name for name in names if name not in RUNS]: raise SystemExit(f"no runs {unknown}; there are {', '.join(RUNS)}")
    work.mkdir(parents=True, exist_ok=True)
    os.chdir(work)   # a process that a run starts would import what lies in the present folder
    preload()
    import clvla
    print(f"{clvla.__file__}, runs in {work}")
    found, failed = json.loads(out.read_text()) if out.exists() else {}, []
    for name in RUNS:
        if name in found or names and name not in names: continue
        t0 = time.time()
        try: found[name] = one(name, work)
        except (Exception, SystemExit) as e:
            failed.append(name)
            print(f"{name} FAILED: {e}", flush=True)
            continue
        out.write_text(json.dumps(found, indent=0)+"\n")
        print(f"{name}: {time.time()-t0:.0f} s, {found[name]['episodes']}", flush=True)
    print(f"{len(found)} runs are in {out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return bool(failed)


def moved(old, new):
    "Names of contents that went, of those that came, and of those that have another name now; all of one sort and checkpoint."
    gone, came = Counter(old.values())-Counter(new.values()), Counter(new.values())-Counter(old.values())
    names = lambda of, counter: sorted(k for k, v in of.items() if v in counter)
    renamed = [] if gone else sorted(k for k, v in old.items() if new.get(k) != v)
    return names(old, gone), names(new, came), renamed


def short(names): return ", ".join(names[:4])+f" and {len(names)-4} more"*(len(names) > 4)


def differences(old, new):
    "What one run computed otherwise, and what is only called otherwise or came new."
    bad, said = [], []
    parts = {part: (old[part], new[part]) for part in ("log", "attempts") if part in old}
    for name, own in old.get("checkpoints", {}).items():
        for sort in ("weight", "moment", "number", "whole"):
            pick = lambda d: {k.removeprefix(sort+"/"): v for k, v in d.items() if k.startswith(sort+"/")}
            parts[f"{name} {sort}"] = pick(own), pick(new["checkpoints"].get(name, {}))
    for part, (a, b) in parts.items():
        gone, came, renamed = moved(a, b)
        if gone: bad.append(f"{part}: {len(gone)} of {len(a)} differ or went ({short(gone)})")
        if came and not gone: said.append(f"{part}: {len(came)} came new ({short(came)})")
        if renamed: said.append(f"{part}: {len(renamed)} have other names ({short(renamed)})")
    if old["episodes"] != new["episodes"]: bad.append(f"episodes: {old['episodes']}, now {new['episodes']}")
    return bad, said


def compare(old, new):
    old, new = (json.loads(Path(p).read_text()) for p in (old, new))
    n_bad = 0
    for name in old:
        bad, said = differences(old[name], new[name]) if name in new else (["the run is missing"], [])
        n_bad += bool(bad)
        for line in bad: print(f"{name} DIFFERS: {line}")
        for line in said: print(f"{name}: {line}")
    print(f"{len(old)-n_bad} of {len(old)} runs computed the same")
    return bool(n_bad)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].endswith(".json"): sys.exit(compare(*sys.argv[1:]))
    if len(sys.argv) < 2: raise SystemExit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
