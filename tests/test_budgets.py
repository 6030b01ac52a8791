"What a run stores of bytes, samples and core seconds, old folders, and comparisons at equal budgets."
import json
from dataclasses import replace
from pathlib import Path

import pytest

from clvla.api import compared
from clvla.cl.all import make_algo
from clvla.cl.quick import quick_loop, quick_stream, quick_task
from clvla.core.config import read_cost
from clvla.core.files import write_json
from clvla.core.records import read_jsonl
from clvla.eval.budgets import budget_table, spent_of
from clvla.eval.compare import CompareConfig, Run, read_run
from clvla.run import kept
from clvla.run.config import resolve
from clvla.run.folder import Cost, RunFolder
from clvla.run.kept import pack, unpack
from clvla.train.config import TrainConfig
from clvla.train.learner import train_cl

SMALL = dict(suite="dot_2", n_demos=3, steps_per_task=4, batch_size=8, n_trials=2, n_workers=1, threads=1, last_only=True, model_kw=dict(D=32, n_blocks=1))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    "Runs of a few methods, two tasks of four updates of eight samples."
    root = tmp_path_factory.mktemp("budgets")
    made = dict(er=dict(cl="er"), small=dict(cl="er", cl_kw=dict(total_size=4)), values=dict(cl="er", cl_kw=dict(store="values")), derpp=dict(cl="derpp"),
                joint=dict(cl="joint"), grown=dict(cl="progressive", cl_kw=dict(rank=2)), two=dict(cl="er+ewc", cl_kw={"er": dict(buffer_size=5)}))
    return {name: train_cl(TrainConfig(**SMALL, run_dir=str(root/name), **kw), lambda line: None).path for name,kw in made.items()}


@pytest.mark.parametrize("name, samples", [("er", 64), ("derpp", 64+4*8), ("joint", 64), ("small", 64)])
def test_samples_are_those_of_gradients(runs, name, samples):
    "DER++ asks its own of as many remembered samples, in the second task."
    assert spent_of(read_run(runs[name]), "samples") == samples


@pytest.mark.parametrize("cl, kw, aside", [("ewc", dict(n_batches=2, B=8), [16, 16]), ("mas", dict(n_batches=2, B=8), [16, 16]), ("gss", dict(buffer_size=10), [40, 40]),
                                           ("er", dict(selection="gradient"), [40, 40]), ("agem", dict(n_ref=8), [0, 24]), ("latent", dict(buffer_size=10), [0, 24])])
def test_what_a_method_asks_gradients_of_is_counted(cl, kw, aside):
    "Also gradients of many samples from one pass, those of a look at the answers, and those of the head alone."
    algo, loop, counts = make_algo(cl, 0, **kw), quick_loop(quick_stream(n_frames=40)), []
    for t in (0, 1):
        loop.ctx.n_aside = 0
        quick_task(algo, loop, t, steps=3, B=8)
        counts.append(loop.ctx.n_aside)
    assert counts == aside


def test_bytes_are_frames_state_and_new_weights(runs):
    of = {name: read_cost(path/"cost.json")["bytes"] for name,path in runs.items()}
    assert of["joint"]["frames"] == of["er"]["frames"] > of["small"]["frames"] > 0 == of["values"]["frames"] == of["er"]["weights"]
    assert of["values"]["state"] > of["er"]["frames"] and of["derpp"]["state"] > of["er"]["state"] and of["grown"]["weights"] > 0
    frame = of["small"]["frames"]/4
    assert of["two"]["frames"] == 10*frame and of["two"]["state"] > of["er"]["state"]   # and Fisher information


def test_core_seconds_are_those_of_the_phases(runs):
    cost = read_cost(runs["er"]/"cost.json")
    assert set(cost["core_seconds"]) == set(cost["seconds"]) and 0 < cost["core_seconds"]["training"] < 2*cost["seconds"]["training"]+1


def test_a_line_keeps_the_budgets(runs):
    run, line = read_run(runs["derpp"]), json.loads(json.dumps(pack(runs["derpp"])))
    assert unpack("derpp", line).spent == run.spent and run.spent["samples"]
    old = {k: v for k,v in line.items() if k != "spent"}
    assert [spent_of(unpack("old", old), kind) is None for kind in ("bytes", "samples", "core_seconds", "seconds")] == [True, True, True, False]


def test_an_old_folder_is_read_and_nothing_is_guessed(runs, tmp_path):
    "cost.json as it was written before; going on with it adds no part of a number."
    write_json(tmp_path/"cost.json", dict(seconds=dict(training=5., evaluation=1.), peak_memory_gb=1.))
    cost = Cost(tmp_path)
    cost.add("training", 2., 1.5)
    cost.note({"1": 64}, dict(frames=10))
    kept = read_cost(tmp_path/"cost.json")
    assert kept["seconds"]["training"] == 7. and kept["core_seconds"] == {}
    run = replace(read_run(runs["er"]), spent=kept)
    assert spent_of(run, "samples") is None and spent_of(run, "core_seconds") is None and spent_of(run, "bytes") == 10   # of stage 0 nothing is known
    Cost(tmp_path, world=2).add("practice", 1., 1.)
    assert "practice" not in read_cost(tmp_path/"cost.json")["core_seconds"]


def test_only_equal_budgets_are_paired(runs):
    c = compared(CompareConfig(runs=[str(runs[k]) for k in ("er", "derpp", "joint")], equal="samples"), n_boot=20)
    assert c.baseline == "er" and c.paired.group.tolist() == ["joint"]
    assert dict(zip(c.budgets.group, c.budgets.says)) == dict(derpp="left out: 50 % more", joint="agrees")
    assert {"Budgets", "Success over the budget", "Success over bytes", "Success over core seconds"} <= set(c.parts()) and "Success over samples" not in c.parts()
    c.equal = ""
    assert {"Success over bytes", "Success over core seconds", "Success over samples"} <= set(c.parts()) and "Budgets" not in c.parts()
    with pytest.raises(ValueError, match="did you mean 'samples'"): compared(CompareConfig(runs=[str(runs["er"])], equal="sample"))
    assert budget_table(c.groups, "er", "samples", .6).says.tolist() == ["agrees", "agrees"]


def test_the_command_says_it(runs, capsys):
    from clvla.command.main import main
    main(["compare", str(runs["er"]), str(runs["derpp"]), "--equal", "samples", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["equal"] == "samples" and said["budgets"][0]["says"] == "left out: 50 % more" and not said["paired"]


@pytest.mark.parametrize("name", ["ewc", "lwf", "gdumb", "latent", "agem"])
def test_every_memory_says_what_it_reads_again(name):
    assert make_algo(name, 0).frames_kept() == {}


def test_a_kept_line_has_the_core_seconds_of_its_own_run_alone(tmp_path, monkeypatch):
    "Neither those of the run that failed before it, nor less than all because an earlier call began it."
    cfgs = {name: resolve(TrainConfig(**SMALL, seed=seed, run_dir=str(tmp_path/name))) for seed,name in enumerate(("begun", "first", "fails", "after", "last"))}
    RunFolder(cfgs["begun"].run_dir).begin(cfgs["begun"])
    write_json(tmp_path/"begun/cost.json", dict(seconds=dict(training=100.), core_seconds=dict(training=100.), peak_memory_gb=.1))
    used = {"begun": 1., "first": 2., "fails": 50., "after": 3., "last": 4.}
    clock = [0.]
    monkeypatch.setattr(kept, "children_seconds", lambda: clock[0])
    monkeypatch.setattr(kept, "pack", lambda path: {})
    def sweep(paths, parallel, on_done):
        for path in map(Path, paths):
            clock[0] += used[path.name]
            if path.name == "fails": continue
            write_json(path/"done.json", {})
            on_done(path)
        raise RuntimeError("runs that failed: fails")
    monkeypatch.setattr(kept, "sweep", sweep)
    with pytest.raises(RuntimeError): kept.kept_runs(cfgs, tmp_path/"lines.jsonl", 1)
    assert {line["name"]: line.get("core_seconds") for line in read_jsonl(tmp_path/"lines.jsonl")} == dict(begun=None, first=2., after=None, last=4.)


def test_a_base_that_runs_share_is_nobodys_learning(tmp_path):
    "The first of several runs of practice trains it, and the others find it."
    def spent(base): return Run(tmp_path, dict(seed=0), ("a",), ("a",), [], {}, {}, dict(seconds=dict(base=base, practice=2., training=3.), core_seconds=dict(base=base, practice=1., training=3.)))
    first, other = spent(90.), spent(.001)
    assert [[spent_of(r, kind) for kind in ("seconds", "core_seconds")] for r in (first, other)] == [[5., 4.]]*2
    assert budget_table(dict(a=[first], b=[other]), "a", "seconds").says.tolist() == ["agrees"]
