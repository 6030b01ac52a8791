"The probe of what is dormant, along a stream that has cycles, a task that is only played, and a budget."
from pathlib import Path

from clvla.train import recovery
from clvla.train.config import TrainConfig, resolve
from clvla.train.learner import train_cl


def test_cycles_probes_and_budgets(tmp_path, monkeypatch):
    "Old success is read after a task's last stage, of the tasks that were trained; each probe has as many updates."
    suite = dict(base="dot_3", cycles=2, probes=["up"], budget=dict(left=1))
    run = train_cl(resolve(TrainConfig(algo="sequential", suite=suite, n_demos=2, steps_per_task=2, batch_size=4, threads=1, n_workers=1, evaluate="none",
                                       device="cpu", save_every=1, keep=9, run_dir=str(tmp_path/"run"), data_dir=str(tmp_path/"data"))), len)
    loaded,load = [],recovery.load_point
    monkeypatch.setattr(recovery, "load_point", lambda path, *args: loaded.append(Path(path).name) or load(path, *args))
    monkeypatch.setattr(recovery, "on_selected", lambda *args: lambda policy: .5)
    curves = {}
    probes = recovery.probe_run(run.path, n=1, every=2, most=4, curves=curves)
    assert [p["task"] for p in probes] == ["left"] and loaded == ["002-left"]
    assert [step for step,_ in curves["left"]] == [0, 2, 4]


def test_held_out_demonstrations_bring_nothing_back(tmp_path, monkeypatch):
    "A probe trains on the demonstrations that the run trained on, and on no others."
    run = train_cl(resolve(TrainConfig(algo="sequential", suite="dot_2", n_demos=5, held_out=.4, steps_per_task=2, batch_size=4, threads=1, n_workers=1, evaluate="none",
                                       device="cpu", run_dir=str(tmp_path/"run"), data_dir=str(tmp_path/"data"))), len)
    read,made = recovery.TaskData,[]
    monkeypatch.setattr(recovery, "TaskData", lambda stores, *args: made.append(stores) or read(stores, *args))
    monkeypatch.setattr(recovery, "on_selected", lambda *args: lambda policy: .5)
    recovery.probe_run(run.path, n=1, every=2, most=2)
    assert {k: store.n_episodes for k,store in made[0].items()} == dict(left=3, right=3)
