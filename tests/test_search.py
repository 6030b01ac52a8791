"Searches: what they may be told, proposals that follow from the scores alone, starts that no table reports, and one that is stopped and goes on."
import importlib.util
import json
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from clvla.command import search as searches
from clvla.command.main import main
from clvla.command.search import best_of, key_of, propose, search_from, trials_of
from clvla.core.records import read_jsonl
from clvla.data.streams import Stream, Task
from clvla.run.queue import Queue

pytest.importorskip("optuna", reason="needs the extra: pip install 'clvla[search]'")
CLVLA = [sys.executable, "-c", "import sys; from clvla.command.main import main; sys.exit(main())"]
RANGES = dict(lr=dict(low=1e-4, high=1e-2, log=True), replay_ratio=dict(low=.1, high=.9))
TINY = dict(suite="dot_2", n_demos=2, steps_per_task=12, n_trials=2, threads=1, n_workers=1, cl="er")


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("after", [0, 1, 4, 7])
def test_an_interrupted_search_proposes_the_same(at_once, after):
    "Scores are known one after another; from any point on, the trials are those of a search that was not interrupted."
    search = search_from(dict(ranges=RANGES | dict(cl=["er", "mir"], n=dict(low=1, high=5)), trials=8, at_once=at_once))
    score = lambda p: round(p["replay_ratio"]*(p["cl"] == "er")/p["n"], 3)
    def go_on(scores, most=99):
        while (found := trials_of(search, scores))[1] and len(scores) < most: scores |= {key_of(p): score(p) for p in found[1][:most-len(scores)]}
        return found[0]
    whole = go_on({})
    begun = {}
    go_on(begun, after)
    assert len(begun) == after
    assert go_on(json.loads(json.dumps(begun))) == whole and len(whole) == 8 and len({key_of(p) for p,_ in whole}) > 5
    assert best_of(whole)[1] == max(s for _,s in whole)
    assert propose(search_from(dict(ranges=RANGES, seed=1)), []) != propose(search_from(dict(ranges=RANGES)), [])


def test_it_finds_what_a_peak_is():
    "Twenty trials on a smooth score come nearer to its peak than the random ones do."
    search = search_from(dict(ranges=dict(x=dict(low=0., high=1.)), trials=20))
    score = lambda p: 1-abs(p["x"]-.3)
    scores = {}
    while todo := trials_of(search, scores)[1]: scores |= {key_of(p): score(p) for p in todo}
    known = trials_of(search, scores)[0]
    assert best_of(known)[1] > .97 and sum(s for _,s in known[10:])/10 > sum(s for _,s in known[:5])/5


WRONG = {
    "reported starts": (dict(search=dict(ranges=RANGES, first_trial=0)), [], "starts 0 to 19 are not those for selection"),
    "starts of two uses": (dict(search=dict(ranges=RANGES, first_trial=10_999_990)), [], "are not those for selection"),
    "evaluation": (dict(shared=dict(evaluate="full"), search=dict(ranges=RANGES)), [], "evaluate is given, and a search gives it"),
    "evaluation said": (dict(search=dict(ranges=RANGES)), ["-p", "evaluate", "lower"], "evaluate is given, and a search gives it"),
    "a setting": (dict(search=dict(ranges=dict(learning_rat=[.1]))), [], "unknown parameter 'learning_rat'"),
    "a value": (dict(search=dict(ranges=dict(schedule=["cosine", "cosin"]))), [], "cosin"),
    "a range": (dict(search=dict(ranges=dict(lr=dict(low=1, high=.1)))), [], "expected choices"),
    "no ranges": (dict(search=dict(trials=3)), [], "expected ranges"),
    "trials": (dict(search=dict(ranges=RANGES, trials=0)), [], "trials is 0, expected a number, 1 or more"),
    "a key": (dict(search=dict(ranges=RANGES, trails=3)), [], "did you mean 'trials'?"),
    "with a grid": (dict(grid=dict(seed="0..1"), search=dict(ranges=RANGES)), [], "no grid, list or parts"),
    "given twice": (dict(search=dict(ranges=RANGES)), ["-p", "lr", ".1"], "'lr' is given twice"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_work_is_refused_before_anything_starts(name, tmp_path, capsys, monkeypatch):
    said, words, says = WRONG[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLVLA_DATA", str(tmp_path/"data"))
    (tmp_path/"x.json").write_text(json.dumps(dict(shared=TINY) | said | dict(shared=TINY | said.get("shared", {}))))
    assert main(["sweep", "x.json", *words]) == 1
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err, err
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_without_optuna_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/"x.json").write_text(json.dumps(dict(shared=TINY, search=dict(ranges=RANGES))))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "optuna" else real(name, *a))
    assert main(["sweep", "x.json"]) == 1 and "pip install 'clvla[search]'" in capsys.readouterr().err
    assert not (tmp_path/"runs").exists()


@pytest.fixture(scope="module")
def searched(tmp_path_factory, shared_data):
    "A search that is stopped after its first score, and goes on."
    folder = tmp_path_factory.mktemp("search")
    (folder/"s.json").write_text(json.dumps(dict(shared=TINY | dict(data_dir=str(shared_data)), search=dict(ranges=RANGES, trials=3, starts=3))))
    command = lambda: subprocess.Popen([*CLVLA, "sweep", "s.json", "--json"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    first, deadline = command(), time.monotonic()+240
    while not (folder/"runs/s/search.jsonl").exists() and time.monotonic() < deadline: time.sleep(.1)
    first.send_signal(signal.SIGTERM)
    stopped = first.communicate(timeout=120)[0], first.returncode
    second = command()
    out = second.communicate(timeout=400)[0]
    return folder, stopped, second.returncode, out


def scored(folder): return read_jsonl(folder/"runs/s/search.jsonl")


def test_a_search_goes_on_to_its_report(searched):
    folder, stopped, code, out = searched
    assert stopped[1] == 75 and code == 0, stopped[0]+out
    found = json.loads(out.strip().splitlines()[-1])
    lines = scored(folder)
    assert [t["params"] for t in found["trials"]] == [x["params"] for x in lines] and len(lines) == 3
    search = search_from(json.loads((folder/"s.json").read_text())["search"])
    assert trials_of(search, {key_of(x["params"]): x["success"] for x in lines}) == ([(x["params"], x["success"]) for x in lines], [])
    assert found["best"] == max(lines, key=lambda x: x["success"])["params"] and found["report"]["trials"]


def test_reported_starts_are_played_once_by_the_best_alone(searched):
    folder, *_, out = searched
    best = json.loads(out.strip().splitlines()[-1])["best"]
    queue = Queue.open(folder/"runs/s")
    for e in queue.entries:
        if e.experiment == "eval_cl": continue
        played = [r["trial"] for p in queue.run_dir(e).glob("evals/*/episodes.jsonl") for r in read_jsonl(p)]
        assert read_jsonl(queue.run_dir(e)/"episodes.jsonl") == [] if (queue.run_dir(e)/"episodes.jsonl").exists() else True
        assert sorted(t-10_000_000 for t in played if t >= 10_000_000) == [0, 0, 1, 1, 2, 2]
        assert sorted(t for t in played if t < 10_000_000) == ([0, 0, 1, 1] if e.own == best else [])


def test_a_task_that_is_never_trained_chooses_no_setting(tmp_path, monkeypatch):
    "The score is the success on the tasks that were trained; probes stay unseen by what is chosen."
    own = Stream("s", [Task(id=t, name=t, prompt=t, trained=t != "p") for t in "abp"])
    records = [dict(stage=1, after="b", step=None, task=t, trial=10_000_000+i, success=t == "p" or i < 1) for t in "abp" for i in range(2)]
    monkeypatch.setattr(searches, "config_of", lambda queue, entry: None)
    monkeypatch.setattr(searches, "check_eval", lambda cfg: SimpleNamespace(cfg=SimpleNamespace(folder=tmp_path), own=own))
    monkeypatch.setattr(searches, "Measured", lambda folder, home: SimpleNamespace(records=records))
    assert searches.score_of(None, None) == .5


def test_more_trials_after_the_report_are_another_search(searched, capsys, monkeypatch):
    folder = searched[0]
    monkeypatch.chdir(folder)
    said = json.loads((folder/"s.json").read_text())
    said["search"]["trials"] = 5
    (folder/"more.json").write_text(json.dumps(said))
    assert main(["sweep", "more.json", "--folder", "runs/s"]) == 1
    assert "belongs to another search" in capsys.readouterr().err
