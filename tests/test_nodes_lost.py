"A launcher that lost its connection, beside an srun that says nothing: `scontrol requeue` puts the job back, once, and only then."
import os
import subprocess
import time
from threading import Timer

import pytest

from clvla.run.nodes import after_loss
from clvla.run.stop import EXIT_STOPPED, StopFlag


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    "A command in the place of SLURM's that writes down what it is asked, and the code that it ends with."
    def put(code=0):
        path = tmp_path/"scontrol"
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n[ {code} = 0 ] || echo "Job has already finished" >&2\nexit {code}\n')
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("SLURM_JOB_ID", "4711")
        return lambda: (tmp_path/"asked").read_text().splitlines() if (tmp_path/"asked").exists() else []
    return put


@pytest.fixture
def srun():
    "Processes that stand for the steps of other nodes; they are gone at the end."
    started = []
    def start(text): started.append(subprocess.Popen(["sh", "-c", "exec "+text])); return started[-1]
    yield start
    for p in started: p.kill(); p.wait()


def test_a_silent_node_puts_the_job_back_once(scontrol, srun, capsys):
    asked, flag = scontrol(), StopFlag()
    began = time.monotonic()
    assert after_loss([srun("sleep 60")], flag, 1.) == EXIT_STOPPED
    assert asked() == ["requeue 4711"] and "goes back into SLURM's queue" in capsys.readouterr().out
    assert 1.9 < time.monotonic()-began < 20, "it waits for the node, and then for SLURM to end this process"


def test_slurm_that_asks_it_to_stop_is_not_asked_again(scontrol, srun):
    "SLURM has noticed by itself, and its own signal has come: nothing is put back by hand."
    asked, flag = scontrol(), StopFlag()
    Timer(.3, lambda: setattr(flag, "requested", True)).start()
    assert after_loss([srun("sleep 60")], flag, 30.) == EXIT_STOPPED and asked() == []


def test_launchers_that_failed_by_themselves_put_nothing_back(scontrol, srun):
    asked = scontrol()
    assert after_loss([srun("false"), srun("sh -c 'exit 3'")], StopFlag(), 5.) == 1 and asked() == []


def test_one_silent_node_beside_one_that_failed_is_a_loss(scontrol, srun):
    asked = scontrol()
    assert after_loss([srun("false"), srun("sleep 60")], StopFlag(), .5) == EXIT_STOPPED and asked() == ["requeue 4711"]


def test_a_refusal_of_slurm_is_said_in_its_words(scontrol, srun):
    scontrol(code=1)
    with pytest.raises(RuntimeError, match="scontrol refuses: Job has already finished"): after_loss([srun("sleep 60")], StopFlag(), .3)
