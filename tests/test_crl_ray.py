"Actors on the nodes of a Ray cluster: one node gets SIGKILL in the middle, and no counted step is lost."
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ray_nodes import CLUSTER

pytest.importorskip("ray", reason="needs the extra: pip install 'clvla[ray]'")

CODE = CLUSTER + """
from clvla.crl.all import runners
from clvla.crl.config import AgentConfig
from clvla.crl.learner import learn_tasks
from clvla.crl.ray import RayActors

class Fatal(RayActors):
    "The second node, which has one of two actors, gets SIGKILL behind the third update; a third node comes."
    def note(self, chosen):
        super().note(chosen)
        if self.version != 2: return
        lose()
        while any(n["Alive"] for n in ray.nodes() if n["NodeManagerAddress"] == "127.0.0.3"): time.sleep(.1)
        time.sleep(1)   # until its actor's answers are known to be lost

runners["fatal"] = Fatal
learn_tasks(AgentConfig(suite=dict(base="dot_2", env=dict(discrete=True), num_tasks=1, name="dot"), cycles=1, steps_per_task=400, eval_every=400,
    n_trials=1, image_size=8, threads=1, run_dir=sys.argv[1], data_dir=sys.argv[1]+"-data", algo="impala",
    algo_kw=dict(n_envs=2, horizon=20, hidden=8, channels=2), runner="fatal", runner_kw=dict(n_actors=2, ahead=2)), len)

from dataclasses import asdict
from clvla.crl.all import make_agent
from clvla.crl.crew import Seat, first_start
from clvla.crl.experiment import Spaces
from clvla.crl.ray import RayCrew
sizes = dict(n_envs=1, horizon=5, hidden=4, channels=2)
agent = make_agent("impala", 0, **sizes)
agent.build(None, Spaces(8, 2, dict(left=5)))
crew = RayCrew(agent, dict(algo="impala", algo_kw=sizes, seed=0, home=None, spaces=asdict(agent.spaces), E=1, engine=False), 1)
crew.publish(agent.acting(), 0)
crew.begin(dict(t=0, key=1, spec=dict(kind="dot", name="lfet"), mark=[]), [Seat(first_start(1), first_start(1))])
crew.order(0, 0, 5)
try: crew.wait()
except ValueError as e: print(e, *e.__notes__, crew.restarts)
crew.close()
"""


def test_a_killed_node_loses_no_counted_step(tmp_path):
    env = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]))
    p = subprocess.run([sys.executable, "-c", CODE, str(tmp_path/"run")], capture_output=True, text=True, timeout=170, env=env)
    assert p.returncode == 0, p.stderr[-3000:]
    assert "did you mean 'left'" in p.stdout and "dot.py" in p.stdout and p.stdout.strip().endswith(" 0")   # an actor's error: its class, its traceback, no new actor
    logs = [json.loads(line) for line in (tmp_path/"run"/"log.jsonl").read_text().splitlines()]
    assert logs[-1]["restarts"] >= 1 and logs[0]["restarts"] == 0   # the node had an actor, and it was replaced
    assert [line["frames"] for line in logs] == [40*(k+1) for k in range(10)]
    for number in range(2):
        learnt = [r for line in logs for n, r in line["rollouts"] if n == number]
        assert learnt == list(range(len(learnt)))   # each once, in order, whatever was lost
    assert all(lag >= 0 for line in logs for lag in line["lags"])
