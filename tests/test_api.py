"The names of `import clvla`: light to import, the pages' own settings and run folders, and refusals."
import subprocess
import sys
from pathlib import Path

import pytest

import clvla
from clvla.api import Result, agents, compare, evaluate, load_policy, open_run, practice, train
from clvla.core.files import read_json

NAMES = ["train", "practice", "agents", "evaluate", "compare", "open_run", "load_policy"]


def python(code, **kw):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **kw)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    home = tmp_path_factory.mktemp("api")
    return lambda name, **kw: dict(run_dir=str(home/name), data_dir=str(home/"data"), threads=1) | kw


@pytest.fixture(scope="module")
def runs(settings):
    small = dict(suite="dot_2", steps_per_task=10, n_trials=2, n_workers=1)
    return {cl: train(cl, **settings(cl, **small)) for cl in ("er", "sequential")}


def test_importing_is_light():
    said = python("import sys, clvla; print([m for m in ('torch', 'numpy', 'pandas', 'plotly') if m in sys.modules])")
    assert said.stdout.strip() == "[]", said


def test_the_names_are_there_and_no_others():
    assert clvla.__all__ == NAMES and set(NAMES) <= set(dir(clvla))
    assert all(callable(getattr(clvla, name)) for name in NAMES)
    with pytest.raises(AttributeError, match="has no attribute 'trian'; it has train, practice"): clvla.trian


@pytest.mark.parametrize("first", ["import clvla", "import clvla.train.config", "from clvla.train import config", "from clvla.api import train", "from clvla import train"])
def test_train_is_called_whatever_was_imported_before(first):
    "The function shares its name with a package."
    code = f"{first}\nimport clvla\ntry: clvla.train('err', suite='dot_2')\nexcept ValueError as e: print(e)\nimport clvla.train.config as c; print(c.TrainConfig.__name__)"
    said = python(code)
    assert "did you mean 'er'?" in said.stdout and said.stdout.endswith("TrainConfig\n"), said


def test_a_run_that_is_done_is_opened(runs, settings):
    er = runs["er"]
    before = (er.path/"episodes.jsonl").stat().st_mtime_ns
    again = train("er", **settings("er", suite="dot_2", steps_per_task=10, n_trials=2, n_workers=1))
    assert repr(again) == repr(er) and repr(er).endswith(": done")
    assert (er.path/"episodes.jsonl").stat().st_mtime_ns == before
    assert open_run(er.path).matrix.k.tolist() == er.matrix.k.tolist()


def test_a_run_is_that_of_the_page(runs):
    config = read_json(runs["er"].path/"config.json")
    assert (config["learner"], config["algo"], config["cl"]) == ("imitation", "imitation", "er")
    assert runs["er"].report.exists() and "Success matrix" in runs["er"].figures()
    assert list(runs["er"].metrics.metric[:2]) == ["ASR", "AAA"]


def test_a_script_sees_lines_while_it_waits(settings):
    "A run that prints nothing for minutes looks like one that hangs."
    given = settings("a-script", suite="dot_2", steps_per_task=5, n_trials=1, n_workers=1)
    said = python(f"import clvla; print(clvla.train('er', **{given!r}))")
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    assert any("demonstrations" in line for line in lines) and any(line.startswith("after ") for line in lines) and lines[-1].endswith(": done")


def test_evaluate_and_compare(runs):
    later = evaluate(runs["er"], n_trials=3, n_workers=1)
    assert later.matrix.n.tolist() == [[3, 0], [3, 3]] and later.heatmap().data
    both = compare(*runs.values())
    assert (both.baseline, list(both.groups)) == ("sequential", ["er", "sequential"])
    assert both.paired.says.tolist() == ["cannot be told from 1 seed"]
    assert "er" in both._repr_html_()
    assert [list(trace.x) for trace in both.figure().data] == [(100*both.paired.difference).tolist()]*2
    assert list(compare(str(runs["er"].path.parent/"[es]*")).groups) == ["er", "sequential"]


def test_a_run_that_is_named_twice_counts_once(runs, monkeypatch):
    "By its absolute and its relative path, by a pattern, with a slash behind it; in a list, too."
    er, other = runs["er"], runs["sequential"]
    monkeypatch.chdir(er.path.parent)
    one = compare(er, other, n_boot=20)
    for named in ((er, other, "e?", "seq*"), ([er, other],), ("er/", "er", other.path), (er.path, "sequential", "./er")):
        assert {k: len(rs) for k, rs in compare(*named, n_boot=20).groups.items()} == {k: len(rs) for k, rs in one.groups.items()} == dict(er=1, sequential=1)


def test_a_path_is_a_path(runs, settings):
    "Where a config stores text: the run is the same, and is gone on with."
    given = settings("er", suite="dot_2", steps_per_task=10, n_trials=2, n_workers=1)
    again = train("er", **given | dict(run_dir=Path(given["run_dir"]), data_dir=Path(given["data_dir"])))
    assert repr(again) == repr(runs["er"])
    with pytest.raises(ValueError, match="neither a registered stream nor an existing folder"): train("er", suite=Path("nowhere"))


@pytest.mark.parametrize("call, says", [
    (lambda er: compare(), "found no run, expected some of them"), (lambda er: compare([]), "found no run"),
    (lambda er: compare(3), "expected what train, evaluate or open_run returned, or a folder, found 3"),
    (lambda er: compare(er, baseline="err"), "there is no group 'err'; did you mean 'er'"),
    (lambda er: load_policy(er), "no single task .*its tasks are left, right")])
def test_what_is_no_run_or_no_task_is_refused(runs, call, says):
    with pytest.raises(ValueError, match=says): call(runs["er"])


def test_practice_and_agents(settings):
    run = practice("dot_2", **settings("practice", smoke=True, n_workers=1))
    assert isinstance(run, Result) and read_json(run.path/"config.json")["learner"] == "practice"
    agent = agents(dict(base="dot_2", env=dict(discrete=True), name="dots"), **settings("agents", smoke=True))
    assert read_json(agent.path/"config.json")["learner"] == "agent" and len(agent.heatmap().data) == 2


@pytest.mark.parametrize("call, says", [
    (lambda kw: train("er", bufer_size=3, **kw), "did you mean 'buffer_size'?"),
    (lambda kw: train("mirr", **kw), "did you mean 'mir'?"),
    (lambda kw: practice("dot_2", "clonning", **kw), "did you mean 'cloning'?"),
    (lambda kw: agents("dot_2", "ppoo", **kw), "did you mean 'ppo'?"),
    (lambda kw: practice("dot_2", held_out=.2, **kw), "held_out"),
    (lambda kw: train("er", suite="dot_2", strategy="zero2", **kw), "set num_processes to 2 or more"),
    (lambda kw: evaluate("nowhere"), "no run folder"), (lambda kw: open_run("nowhere"), "no run folder"),
    (lambda kw: load_policy("nowhere"), "no run folder"), (lambda kw: compare("nowhere-*"), "no folder matches")])
def test_what_cannot_be_meant_is_refused(settings, call, says):
    with pytest.raises((ValueError, FileNotFoundError)) as e: call(settings("refused"))
    assert says in str(e.value)


def test_a_policy_answers(runs):
    policy = load_policy(runs["er"], "left", say=len)
    import numpy as np
    seen = {"observation.images.front": np.zeros((32, 32, 3), np.uint8), "observation.state": np.zeros(2)}
    assert policy(seen).shape == (policy.policy.H, 2)
