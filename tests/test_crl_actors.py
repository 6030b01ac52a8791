"Actors in processes of their own: SIGKILL at any time for an actor or the learner, and a memory of unrolls in a file that comes back exactly."
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from clvla.crl.all import runners
from clvla.crl.config import AgentConfig
from clvla.crl.learner import learn_tasks
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint

ROOT = Path(__file__).resolve().parents[1]
ONE = dict(base="dot_2", env=dict(discrete=True), num_tasks=1, name="dot")
SIZES = dict(n_envs=2, horizon=20, hidden=8, channels=2)


def small(path, **kw):
    return AgentConfig(**dict(suite=ONE, cycles=1, steps_per_task=480, eval_every=480, n_trials=1, image_size=8, threads=1, run_dir=str(path),
                              data_dir=str(path)+"-data", algo="impala", algo_kw=SIZES, runner="parallel", runner_kw=dict(n_actors=2)) | kw)


def check_books(logs, total, per_update, actors):
    "Every rollout was learnt from once, in its actor's order, and the steps add up."
    assert [line["frames"] for line in logs] == list(range(per_update, total+1, per_update))
    for number in range(actors):
        learnt = [r for line in logs for n, r in line["rollouts"] if n == number]
        assert learnt == list(range(len(learnt)))


def killer(runner, stop, seed):
    "Kills two actors at random times while the run goes on."
    draw = random.Random(seed)
    for number in draw.sample(range(2), 2):
        stop.wait(draw.uniform(0, .4))
        runner.crew.members[number].child.proc.kill()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "A run of waiting actors in which nothing happens."
    return learn_tasks(small(tmp_path_factory.mktemp("actors")/"whole"), len)


def test_actors_killed_at_random_times(whole, tmp_path, monkeypatch):
    from clvla.crl.actors import Parallel
    stop, base = threading.Event(), Parallel.note

    def note(self, chosen):
        base(self, chosen)
        if self.version == 0: threading.Thread(target=killer, args=(self, stop, 3), daemon=True).start()
        time.sleep(.05)   # of an update: the killer finds actors that play
    monkeypatch.setattr(Parallel, "note", note)
    try: run = learn_tasks(small(tmp_path/"run"), len)
    finally: stop.set()
    logs = run.logs()
    assert logs[-1]["restarts"] >= 2
    check_books(logs, 480, 40, 2)
    assert {lag for line in logs+whole.logs() for lag in line["lags"]} == {0}   # who waits has no lag, whatever was killed
    assert fingerprint(run.path) == fingerprint(whole.path)


LEARN = """
import json, os, signal, sys
from clvla.crl.config import AgentConfig
from clvla.crl.learner import learn_tasks
from clvla.crl.actors import Parallel
cfg, kill = json.loads(sys.argv[1]), int(sys.argv[2])
base = Parallel.note
def note(self, chosen):
    base(self, chosen)
    if self.version == kill: os.kill(os.getpid(), signal.SIGKILL)
Parallel.note = note
learn_tasks(AgentConfig(**cfg), len)
"""


@pytest.mark.parametrize("runner", ["parallel", "actors"])
def test_a_killed_learner_goes_on_from_what_was_counted(runner, whole, tmp_path):
    cfg = small(tmp_path/"run", runner=runner, save_every=4)
    env = os.environ | dict(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    code = subprocess.run([sys.executable, "-c", LEARN, json.dumps(asdict(cfg)), "10"], env=env).returncode
    assert code == -signal.SIGKILL and len(RunFolder(cfg.run_dir).logs()) == 10   # eight updates are counted, two learnt
    run = learn_tasks(cfg, len)
    check_books(run.logs(), 480, 40, 2)
    if runner == "parallel": assert fingerprint(run.path) == fingerprint(whole.path)


class Cut(BaseException): "A power cut."


@pytest.mark.parametrize("kill", [11])
def test_clear_with_its_file_comes_back_exactly(kill, tmp_path, monkeypatch):
    from clvla.crl.clear import CLEAR
    cfg = small(tmp_path/"whole", runner="sync", runner_kw={}, algo="clear", save_every=3, algo_kw=SIZES | dict(frames=200, file=True, epochs=1))
    whole = learn_tasks(cfg, len)
    memory = learn_tasks(replace(cfg, run_dir=str(tmp_path/"memory"), algo_kw=cfg.algo_kw | dict(file=False)), len)
    assert [line["train/loss"] for line in memory.logs()] == [line["train/loss"] for line in whole.logs()]
    count, real = [0], CLEAR.learn

    def learn(self, rollout):
        count[0] += 1
        if count[0] == kill: raise Cut
        return real(self, rollout)
    monkeypatch.setattr(CLEAR, "learn", learn)
    cut = replace(cfg, run_dir=str(tmp_path/"cut"))
    with pytest.raises(Cut): learn_tasks(cut, len)
    assert fingerprint(learn_tasks(cut, len).path) == fingerprint(whole.path)


def test_a_hung_or_broken_actor_ends_the_run_after_its_last_restart(tmp_path, monkeypatch):
    from clvla.crl.crew import Crew
    base = Crew.launch

    def launch(self, m):
        base(self, m)
        if m.number == 1: m.proc.kill()
    monkeypatch.setattr(Crew, "launch", launch)
    with pytest.raises(RuntimeError, match="actor 1 failed 2 times without a whole rollout; the last failure: killed by SIGKILL"):
        learn_tasks(small(tmp_path/"run", runner_kw=dict(n_actors=2, max_restarts=1)), len)


def test_continuous_actions_are_played_too(tmp_path):
    run = learn_tasks(small(tmp_path/"run", suite=dict(base="dot_2", num_tasks=1, name="box"), steps_per_task=120, algo="ppo"), len)
    assert run.logs()[-1]["frames"] == 120


def test_a_rollout_of_the_stage_before_is_no_answer():
    "A stage begins while the actor still plays for the one before; stages that are equal but for their key play alike."
    from clvla.crl.all import make_agent
    from clvla.crl.crew import Crew, Seat, first_start
    from clvla.crl.experiment import Spaces, make_experiment
    sizes = dict(n_envs=1, horizon=20, hidden=8, channels=2)
    agent = make_agent("impala", 0, **sizes)
    agent.build(None, Spaces(8, 2, dict(left=5)))
    spec = make_experiment(ONE).stream.tasks[0].env
    crew = Crew(agent, dict(algo="impala", algo_kw=sizes, seed=0, home=None, spaces=asdict(agent.spaces), E=1, engine=False), n=1, ahead=1)
    crew.publish(agent.acting(), version=0)

    def ask(key, t):
        crew.begin(dict(t=t, key=key, spec=spec, mark=[]), [Seat(first_start(1), first_start(1))])
        crew.order(number=0, r=0, T=20)

    def states(): return crew.wait()[0].arrays["state"].tolist()
    try:
        ask(1, 0)
        ask(2, 1)      # nobody waited for the first
        overtaking = states()
        ask(3, 1)
        alone = states()
        ask(4, 0)
        assert overtaking == alone != states() and crew.restarts == 0
    finally: crew.close()
