"A sweep on a real SLURM of two nodes: an array of runs, a node lost in the middle, a task asked to end, and every run as it is alone."
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
import slurm_nodes

from clvla.core.processes import descendants
from clvla.run.queue import Queue
from clvla.run.resume import fingerprint

pytestmark = pytest.mark.slurm
CLVLA = [sys.executable, "-c", "import sys; from clvla.command.main import main; sys.exit(main())"]
SHARED = dict(suite="dot_2", n_demos=2, steps_per_task=32, n_trials=1, threads=1, n_workers=1, cl="er")


def until(true, seconds=240., said=lambda: ""):
    deadline = time.monotonic()+seconds
    while not true():
        assert time.monotonic() < deadline, said()
        time.sleep(.1)


def shown(words, env): return subprocess.run(words, env=env, capture_output=True, text=True).stdout.split()


@pytest.fixture(scope="module")
def swept(tmp_path_factory, shared_data):
    "Folder of the sweep, what was said, and which entries were on the lost node or were asked to end."
    if why := slurm_nodes.why_not(): pytest.skip(why)
    folder = tmp_path_factory.mktemp("slurm")
    (folder/"s.yaml").write_text(json.dumps(dict(shared=SHARED | dict(data_dir=str(shared_data), save_every=4), grid=dict(seed="0..3"))))
    with ExitStack() as stack:
        try: env, lose = stack.enter_context(slurm_nodes.nodes(folder/"nodes"))
        except slurm_nodes.DoesNotStart as e: pytest.skip(str(e))
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
    ends = [[(queue.claims(e).end(n) or {}).get("state") for n in range(1, queue.claims(e).newest+1)] for e in queue.entries]
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
