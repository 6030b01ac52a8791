"""On a real SLURM of two nodes: an array of runs, runs over both nodes, and evaluations in parts. A node is lost in the middle, a task is asked to
end, and every run is as it is alone."""
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from importlib.util import find_spec

import pytest
import slurm_nodes

from clvla.core.processes import descendants
from clvla.core.records import read_jsonl
from clvla.run.queue import Queue
from clvla.run.resume import fingerprint
from clvla.train.checkpoint_eval import eval_cl
from clvla.train.eval_config import EvalConfig

pytestmark = pytest.mark.slurm
CLVLA = [sys.executable, "-c", "import sys; from clvla.command.main import main; sys.exit(main())"]
SHARED = dict(suite="dot_2", n_demos=2, steps_per_task=32, n_trials=1, threads=1, n_workers=1, cl="er")


def until(true, seconds=240., said=lambda: ""):
    deadline = time.monotonic()+seconds
    while not true():
        assert time.monotonic() < deadline, said()
        time.sleep(.1)


def shown(words, env): return subprocess.run(words, env=env, capture_output=True, text=True).stdout.split()


def ends_of(queue): return [[(queue.claims(e).end(n) or {}).get("state") for n in range(1, queue.claims(e).newest+1)] for e in queue.entries]


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    "Environment, and functions that take a node away and bring it back."
    if why := slurm_nodes.why_not(): pytest.skip(why)
    with ExitStack() as stack:
        try: found = stack.enter_context(slurm_nodes.nodes(tmp_path_factory.mktemp("slurm")/"nodes"))
        except slurm_nodes.DoesNotStart as e: pytest.skip(str(e))
        yield found


@pytest.fixture(scope="module")
def swept(tmp_path_factory, two_nodes, shared_data):
    "Folder of the sweep, what was said, and which entries were on the lost node or were asked to end."
    folder, (env, lose, back) = tmp_path_factory.mktemp("swept"), two_nodes
    (folder/"s.yaml").write_text(json.dumps(dict(shared=SHARED | dict(data_dir=str(shared_data), save_every=4), grid=dict(seed="0..3"))))
    sweep = subprocess.Popen([*CLVLA, "sweep", "s.yaml", "--engine", "slurm", "--json"], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=open(folder/"said.txt", "w"), text=True)
    saved = lambda k: any((folder/f"runs/s/00{k}-s{k}/checkpoints").glob("*"))
    log = lambda: (folder/"said.txt").read_text()+"\n".join(p.read_text() for p in (folder/"runs/s/slurm").glob("*.txt"))
    until(lambda: saved(0) and saved(1), said=log)
    on = {int(k): node for k, node in (line.split(":") for line in shown(["squeue", "-h", "-t", "R", "-o", "%K:%N"], env))}
    lost, = [k for k, node in on.items() if node == "n1"]
    lose("n1")
    asked, = [k for k, node in on.items() if node == "n0"]
    shell, = [p for step in slurm_nodes.steps_of("n0", env) for p in descendants(step, deep=False)]
    os.kill(shell, signal.SIGTERM)   # to the batch shell alone, as SLURM does before a task's time is over
    again = subprocess.run([*CLVLA, "sweep", "s.yaml", "--engine", "slurm", "--dry_run", "--json"], cwd=folder, env=env, capture_output=True, text=True)
    out = sweep.communicate(timeout=400)[0]
    jobs = json.loads((folder/"runs/s/slurm/job.json").read_text())
    back("n1")
    return folder, sweep.returncode, out, lost, asked, again, jobs, log()


def test_all_are_done(swept):
    folder, code, out, *_, log = swept
    assert code == 0, out+log
    found = json.loads(out)
    assert [r["state"] for r in found["entries"]] == ["done"]*4 and found["comparisons"]


def test_two_went_on_and_nothing_ran_twice_to_its_end(swept):
    "The entry of the lost node has a claim without an end, the one that was asked to end stopped itself, each is done once."
    folder, _, _, lost, asked, *_ = swept
    queue = Queue.open(folder/"runs/s")
    ends = ends_of(queue)
    assert all(found.count("done") == 1 and found[-1] == "done" for found in ends), ends
    assert ends[lost] == [None, "done"] and ends[asked] == ["stopped", "done"], ends
    assert sum(map(len, ends)) == 6, "the two others ran once"


def test_each_is_its_twin_alone(swept, shared_data):
    folder, _, _, lost, asked, *_ = swept
    words = [w for k,v in (SHARED | dict(data_dir=str(shared_data))).items() for w in (f"--{k}", str(v))]
    for seed in (lost, asked):
        done = subprocess.run([*CLVLA, "run", *words, "--seed", str(seed), "--run_dir", str(folder/f"twin{seed}")], capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        assert fingerprint(folder/f"twin{seed}") == fingerprint(folder/f"runs/s/00{seed}-s{seed}")


def test_one_job_was_submitted_and_its_script_is_plain(swept):
    folder, *_, again, jobs, _ = swept
    assert jobs["entries"] == [0, 1, 2, 3] and json.loads(again.stdout)["entries"]
    script = (folder/"runs/s/slurm/job.sh").read_text()
    assert "#SBATCH --array=0-3\n" in script and "#SBATCH --requeue" in script and "#SBATCH --signal=B:TERM@120" in script
    assert f"sweep {folder}/runs/s" in script.replace("'", "")


# one run over both nodes

BOTH = SHARED | dict(steps_per_task=12, machines=2, timeout=3.)
STRATEGIES = ["ddp"]+["zero2"]*(find_spec("deepspeed") is not None)


@pytest.fixture(scope="module")
def over_both(tmp_path_factory, two_nodes, shared_data):
    "A sweep of runs with a process on each node; the first one loses the second node."
    folder, (env, lose, back) = tmp_path_factory.mktemp("both"), two_nodes
    lines = [dict(name=name, strategy=name) for name in STRATEGIES]
    (folder/"s.yaml").write_text(json.dumps(dict(shared=BOTH | dict(data_dir=str(shared_data), save_every=4), list=lines)))
    sweep = subprocess.Popen([*CLVLA, "sweep", "s.yaml", "--engine", "slurm", "--json"], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=open(folder/"said.txt", "w"), text=True)
    log = lambda: "\n".join(p.read_text() for p in [folder/"said.txt", *(folder/"runs/s").glob("slurm/*.txt"), *(folder/"runs/s").glob("*/console.txt")])
    until(lambda: any((folder/"runs/s/000-ddp/checkpoints").glob("0*")), said=log)
    lose("n1", noticed=True)
    until(lambda: shown(["squeue", "-h", "-t", "R", "-o", "%K"], env) != ["0"], said=log)   # SLURM has taken the job from the other node, too
    back("n1")
    return folder, sweep.communicate(timeout=400)[0], sweep.returncode, log()


def test_a_run_over_two_nodes_goes_on_after_one_was_lost(over_both):
    folder, out, code, log = over_both
    assert code == 0, out+log
    ends = ends_of(Queue.open(folder/"runs/s"))
    assert ends[0][-1] == "done" and len(ends[0]) == 2 and ends[0][0] in (None, "stopped") and ends[1:] == [["done"]]*(len(ends)-1), ends
    script = (folder/"runs/s/slurm/job.sh").read_text()
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in script


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_nodes_compute_what_two_processes_do(over_both, shared_data, strategy):
    "The twin has both processes on one machine, and nobody disturbs it."
    folder = over_both[0]
    words = [w for k,v in (BOTH | dict(data_dir=str(shared_data), machines="", num_processes=2, strategy=strategy)).items() for w in (f"--{k}", str(v))]
    done = subprocess.run([*CLVLA, "run", *words, "--run_dir", str(folder/f"twin-{strategy}")], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert fingerprint(folder/f"twin-{strategy}") == fingerprint(folder/f"runs/s/00{STRATEGIES.index(strategy)}-{strategy}")


# an evaluation in parts

def test_parts_on_two_nodes_are_the_evaluation_of_one_process(over_both, two_nodes):
    "One command: a part for each node, and whoever ends last puts them together."
    folder, env = over_both[0], two_nodes[0]
    run = folder/"runs/s/000-ddp"
    words = dict(run_dir=run, n_trials=2, n_workers=1, last_only=True)
    words = [str(w) for k,v in words.items() for w in ("-p", k, v)]
    done = subprocess.run([*CLVLA, "sweep", "--experiment", "eval_cl", "--parts", "2", "--engine", "slurm", "--folder", "runs/parts", "--json", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout+done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert [r["state"] for r in found["entries"]] == ["done"]*3 and found["evaluations"][0]["trials"]
    whole = run/"evals/lower-0+2-s0-last"
    merged = read_jsonl(whole/"episodes.jsonl")
    whole.rename(run/"evals/merged")
    for k in range(2): whole.with_name(f"{whole.name}-part{k}of2").rename(folder/f"part{k}")
    alone = eval_cl(EvalConfig(run_dir=str(run), n_trials=2, n_workers=1, last_only=True, batch=8), len).episodes()
    bare = lambda records: sorted(json.dumps({k: v for k,v in r.items() if k not in ("seconds", "restarts") and "time/" not in k}, sort_keys=True) for r in records)
    assert bare(merged) == bare(alone) and len(alone) == 4
