"A sweep on the nodes of a Ray cluster: one gets SIGKILL in the middle of a run, and every run is as it is alone."
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ray_nodes import CLUSTER
from clvla.core.records import read_jsonl
from clvla.run.queue import Queue
from clvla.run.resume import fingerprint
from clvla.train.checkpoint_eval import eval_cl
from clvla.train.eval_config import EvalConfig

pytest.importorskip("ray", reason="needs the extra: pip install 'clvla[ray]'")
CLVLA = [sys.executable, "-c", "import sys; from clvla.command.main import main; sys.exit(main())"]
SHARED = dict(suite="dot_2", n_demos=2, steps_per_task=32, n_trials=1, threads=1, n_workers=1, cl="er")

CODE = CLUSTER + """
def lose_later():
    saved = lambda k: any(Path(f"runs/s/00{k}-s{k}/checkpoints").glob("*"))
    while not (saved(0) and saved(1)): time.sleep(.1)
    lose()
threading.Thread(target=lose_later, daemon=True).start()
from clvla.command.main import main
sys.exit(main(["sweep", "s.yaml", "--engine", "ray", "--engine_kw", "{'cpus': 1}", "--json"]))
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory, shared_data):
    folder = tmp_path_factory.mktemp("ray")
    (folder/"s.yaml").write_text(json.dumps(dict(shared=SHARED | dict(data_dir=str(shared_data), save_every=4), grid=dict(seed="0..2"))))
    env = os.environ | dict(PYTHONPATH=os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]))
    return folder, subprocess.run([sys.executable, "-c", CODE], cwd=folder, env=env, capture_output=True, text=True, timeout=400)


def test_all_are_done_and_nothing_ran_twice_to_its_end(swept):
    "The entry of the lost node has a claim without an end, and one that is done."
    folder, done = swept
    assert done.returncode == 0, done.stdout[-2000:]+done.stderr[-3000:]
    assert [r["state"] for r in json.loads(done.stdout.strip().splitlines()[-1])["entries"]] == ["done"]*3
    queue = Queue.open(folder/"runs/s")
    ends = [[(queue.claims(e).end(n) or {}).get("state") for n in range(1, queue.claims(e).newest+1)] for e in queue.entries]
    assert sorted(ends, key=str) == [["done"], ["done"], [None, "done"]], ends


def test_the_lost_one_is_its_twin_alone(swept, shared_data):
    folder, _ = swept
    queue = Queue.open(folder/"runs/s")
    lost = next(e.number for e in queue.entries if queue.claims(e).newest == 2)
    words = [w for k,v in (SHARED | dict(data_dir=str(shared_data))).items() for w in (f"--{k}", str(v))]
    done = subprocess.run([*CLVLA, "run", *words, "--seed", str(lost), "--run_dir", str(folder/"twin")], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert fingerprint(folder/"twin") == fingerprint(queue.run_dir(queue.entries[lost]))


def test_parts_on_two_nodes_are_the_evaluation_of_one_process(swept, shared_data):
    "One command: parts are tasks of Ray, and whoever ends last puts them together."
    run = Queue.open(swept[0]/"runs/s").run_dir(Queue.open(swept[0]/"runs/s").entries[0])
    words = [str(w) for k,v in dict(run_dir=run, n_trials=2, n_workers=1, last_only=True).items() for w in ("-p", k, v)]
    words = ["sweep", "--experiment", "eval_cl", "--parts", "2", "--engine", "ray", "--engine_kw", "{'cpus': 1}", "--folder", "runs/parts", "--json", *words]
    env = os.environ | dict(PYTHONPATH=os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, "-c", CLUSTER+f"from clvla.command.main import main\nsys.exit(main({words!r}))\n"], cwd=swept[0], env=env,
                          capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout+done.stderr
    assert [r["state"] for r in json.loads(done.stdout.strip().splitlines()[-1])["entries"]] == ["done"]*3
    whole = run/"evals/lower-0+2-s0-last"
    merged = read_jsonl(whole/"episodes.jsonl")
    whole.rename(run/"evals/merged")
    for k in range(2): whole.with_name(f"{whole.name}-part{k}of2").rename(swept[0]/f"part{k}")
    alone = eval_cl(EvalConfig(run_dir=str(run), n_trials=2, n_workers=1, last_only=True, batch=8), len).episodes()
    bare = lambda records: sorted(json.dumps({k: v for k,v in r.items() if k not in ("seconds", "restarts") and "time/" not in k}, sort_keys=True) for r in records)
    assert bare(merged) == bare(alone) and len(alone) == 4
