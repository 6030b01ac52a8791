"A probe is a task that is only played, never trained: it has a column in the matrix and no stage."
import os
import signal

import pytest

from clvla.core.files import read_json
from clvla.run.checkpoint import checkpoints
from clvla.run.folder import RunFolder
from clvla.run.report import matrix_of
from clvla.run.resume import fingerprint
from clvla.run.stop import Stopped
from clvla.train.checkpoint_eval import eval_cl
from clvla.train.config import TrainConfig, resolve
from clvla.train.eval_config import EvalConfig
from clvla.train.learner import train_cl
from clvla.train.trainer import Trainer


def test_a_run_with_a_probe_is_stopped_resumed_and_evaluated(tmp_path, monkeypatch):
    def config(name):
        return resolve(TrainConfig(algo="er", suite=dict(base="dot_2", probes=["right"]), n_demos=2, steps_per_task=4, n_trials=2, batch_size=8, threads=1,
                                   rows_per_task=1, n_workers=1, evaluate="full", curve_points=2, device="cpu", run_dir=str(tmp_path/name),
                                   data_dir=str(tmp_path/"data")))
    run = train_cl(config("run"), len)
    assert read_json(run.path/"stream.json")["stages"] == ["left"]
    assert [p.name for p in checkpoints(run.path/"checkpoints")] == ["000-left"]
    played = [(r["stage"], r["step"], r["task"]) for r in run.episodes()]
    lower = {(0, 0, "left"), (0, 2, "left"), (0, None, "left")}
    assert set(played) == lower | {(-1, None, "left"), (-1, None, "right"), (0, None, "right")} and len(played) == 12
    matrix = matrix_of(run.path, run.episodes())
    assert (*matrix.stages, *matrix.task_ids) == ("left", "left", "right") and matrix.n.tolist() == [[2, 2]] and matrix.n0.tolist() == [2, 2]
    assert [p.name for p in (tmp_path/"data/dot").glob("[!.]*")] == ["left-n2-32px"]   # no demonstrations of a probe

    update = Trainer.update
    def stop_in_update_2(self, ctx):
        update(self, ctx)
        if ctx.step == 3: os.kill(os.getpid(), signal.SIGTERM)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "update", stop_in_update_2)
        with pytest.raises(Stopped): train_cl(config("stopped"), len)
    assert RunFolder(tmp_path/"stopped").status == "stopped"
    assert fingerprint(train_cl(config("stopped"), len).path) == fingerprint(run.path)
    evaluated = eval_cl(EvalConfig(run_dir=str(run.path), n_trials=2, n_workers=1, rows_per_task=1), len)
    assert {(r["stage"], r["task"]) for r in evaluated.episodes()} == {(0, "left"), (0, "right")}
