"The referee of the speedrun: a true record holds, and what is altered is named."
import copy
import json

import pytest

from clvla.train import speedrun
from clvla.train.speedrun import Track, config_of, enter, faults, read_submission, record_of, success_of, verify

TRACK = Track(suite="dot_2", n_demos=3, n_starts=3, goal=0.)
TEXT = "author: a\nabout: b\nseed: {seed}\nsettings: {{cl: er, steps_per_task: 6, model_kw: {{D: 32, n_blocks: 1}}{more}}}\n"


def submission(folder, name="one", seed=0, more=""):
    (folder/f"{name}.yaml").write_text(TEXT.format(seed=seed, more=more))
    return read_submission(folder/f"{name}.yaml")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speedrun")
    (folder/"mine.py").write_text("from clvla.train.schedules import schedules\nschedules['mine'] = lambda step, n_steps: 1 - step/n_steps\n")
    sub = submission(folder, more=", plugins: [mine.py], budget: {right: 8}")
    return folder, sub, record_of(sub, TRACK)


def test_a_true_record_holds(made):
    folder, sub, record = made
    said = []
    assert verify(sub, json.loads(json.dumps(record)), TRACK, say=said.append) == [] and "seconds here" in said[0]
    assert [a["samples"] for a in record["attempts"]] == [14*32]*2 and record["attempts"][0]["fingerprint"] != record["attempts"][1]["fingerprint"]


@pytest.mark.parametrize("change, says", [(dict(seed=7), "seed: the attempts have"), (dict(won=dict(left="111", right="111")), "mean: the record says"), (dict(core_seconds=1e-3), "clock: the record says"),
                                          (dict(bytes=dict(frames=1)), None), (dict(won=dict(left="11", right="11")), "starts: the track has 3")])
def test_an_altered_attempt_is_named_without_a_run(made, monkeypatch, change, says):
    folder, sub, record = copy.deepcopy(made)
    record["attempts"][0] |= change
    monkeypatch.setattr(speedrun, "record_of", lambda *a: copy.deepcopy(made[2]))
    found = verify(sub, record, TRACK, say=len)
    assert found and any((says or "bytes") in line for line in found)


@pytest.mark.parametrize("key, value", [("fingerprint", "0"*64), ("samples", 3)])
def test_what_only_a_run_can_know_is_named(made, monkeypatch, key, value):
    folder, sub, record = copy.deepcopy(made)
    record["attempts"][1][key] = value
    monkeypatch.setattr(speedrun, "record_of", lambda *a: copy.deepcopy(made[2]))
    assert verify(sub, record, TRACK, say=len) == [f"{key} of seed 1: differs from the record's"]
    record["versions"]["torch"] = "0"
    lines = []
    found = verify(sub, record, TRACK, say=lines.append)
    if key == "samples": assert "torch 0 ->" in found[-1]   # they do not depend on versions
    else: assert found == [] and "torch 0 ->" in lines[-1] and "the bound holds" in lines[-1]
    monkeypatch.setattr(speedrun, "record_of", lambda *a: copy.deepcopy(made[2]) | dict(low=-.1))
    found = verify(sub, record, TRACK, say=len)
    assert found[1].startswith("goal: the lower bound is") and "torch 0 ->" in found[2]


def test_a_record_that_was_timed_in_turn_beats_that_clock(made, tmp_path):
    "And is refused where another record than the newest was timed, or one with other weights."
    folder, sub, record = made
    old = [dict(a, core_seconds=a["core_seconds"]) for a in record["attempts"]]
    enter(record, tmp_path/"r.jsonl", TRACK)
    slow = record | dict(name="later", clock=record["clock"]+5)
    def beside(**kw): return slow | dict(beside=dict(name=record["name"], clock=record["clock"]+9, attempts=old) | kw)
    with pytest.raises(ValueError, match="the newest record is"): enter(beside(name="other"), tmp_path/"r.jsonl", TRACK)
    changed = [dict(old[0], fingerprint="0"*64), old[1]]
    with pytest.raises(ValueError, match="weights with seed 0 are not those"): enter(beside(attempts=changed), tmp_path/"r.jsonl", TRACK)
    with pytest.raises(ValueError, match="seconds and"): enter(beside(clock=record["clock"]+5), tmp_path/"r.jsonl", TRACK)
    enter(beside(), tmp_path/"r.jsonl", TRACK)



def test_the_newest_record_is_trained_in_turn(made, tmp_path):
    folder, sub, record = made
    both = record_of(submission(tmp_path, "two", more=", budget: {right: 8}"), TRACK, beat=sub)
    assert [a["fingerprint"] for a in both["beside"]["attempts"]] == [a["fingerprint"] for a in record["attempts"]]
    assert both["beside"]["name"] == "one" and not any("won" in a for a in both["beside"]["attempts"]) and both["clock"] > 0


def test_settings_and_files_belong_to_the_submission(made):
    folder, sub, record = made
    assert "settings: steps_per_task is 9" in faults(record | dict(settings=record["settings"] | dict(steps_per_task=9)), sub, TRACK)[0]
    assert faults(record | dict(files={"mine.py": "0"}), sub, TRACK) == ["plugin: mine.py is not the file of the record"]
    assert "goal" in faults(record, sub, Track(suite="dot_2", n_starts=3, goal=.99))[-1]


def test_a_track_is_reached_and_beaten(made, tmp_path):
    folder, sub, record = made
    with pytest.raises(ValueError, match="the goal is 0.99"): enter(record, tmp_path/"r.jsonl", Track(goal=.99))
    enter(record, tmp_path/"r.jsonl", TRACK)
    with pytest.raises(ValueError, match="seconds and"): enter(record | dict(name="slower", clock=record["clock"]+1), tmp_path/"r.jsonl", TRACK)
    enter(record | dict(name="smaller", bytes=record["bytes"]-1), tmp_path/"r.jsonl", TRACK)
    assert len((tmp_path/"r.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("more, says", [(", n_demos: 9", "n_demos is not free"), (", suite: mw5", "suite is not free"), (", init_from: x", "init_from is not free"), (", stepz_per_task: 9", "did you mean"),
                                        (", plugins: [gone.py]", "no plugin file"), (", evaluate: full", "evaluate is not free"), (", task_order: [1, 0]", "task_order is not free")])
def test_what_is_fixed_is_refused(tmp_path, more, says):
    with pytest.raises(ValueError, match=says): submission(tmp_path, more=more)


@pytest.mark.parametrize("more, says", [(", threads: 5", "2 cores"), (", budget: {up: 3}", "up")])
def test_what_no_run_can_be_is_refused(tmp_path, more, says):
    with pytest.raises(ValueError, match=says): config_of(submission(tmp_path, more=more), TRACK, 0, tmp_path/"x")


def test_an_attempt_begins_in_a_new_folder(made, tmp_path):
    with pytest.raises(ValueError, match="timed from its beginning"): speedrun.attempt(made[1], TRACK, 0, tmp_path)


def test_the_bound_keeps_a_start_together():
    "Two policies that fail from the same starts say less than two that fail from others."
    same = [dict(won=dict(a="10"*50, b="1"*100))]*2
    other = [same[0], dict(won=dict(a="01"*50, b="1"*100))]
    assert success_of(same)[0] == success_of(other)[0] == .75 and success_of(same)[1] < success_of(other)[1]


def test_a_terminal_says_what_is_wrong(made, tmp_path):
    (tmp_path/"submissions").mkdir()
    path = tmp_path/"submissions"/"one.yaml"
    path.write_text(TEXT.format(seed=0, more=""))
    for words, says in ((["verify", str(path)], "has no record 'one'"), (["run", str(tmp_path/"none.yaml")], "expected a submission"), ([], "clvla-speedrun verify FILE")):
        with pytest.raises(SystemExit, match=says): speedrun.main(words)


def test_the_newest_record_is_not_timed_beside_itself(made, tmp_path, monkeypatch):
    folder, sub, record = made
    (tmp_path/"submissions").mkdir()
    path = tmp_path/"submissions"/"one.yaml"
    path.write_text(TEXT.format(seed=0, more=""))
    enter(record, tmp_path/"records.jsonl", TRACK)
    monkeypatch.setattr(speedrun, "attempt", None)   # nothing is run
    with pytest.raises(SystemExit, match="one is the newest record itself; .*clvla-speedrun verify .*one.yaml"): speedrun.main(["run", str(path), "--again"])


def test_the_bound_pairs_tasks_by_name():
    "The order of the tasks in an attempt is that of their first episodes' ends, which a seed changes."
    won = {f"t{k}": "1"*(30-k)+"0"*k for k in range(6)}   # the same starts fail with both seeds
    assert success_of([dict(won=won), dict(won=dict(reversed(won.items())))]) == success_of([dict(won=won), dict(won=won)])


def test_attempts_on_other_tasks_are_named(made):
    folder, sub, record = copy.deepcopy(made)
    record["attempts"][1]["won"].pop("left")
    assert faults(record, sub, TRACK)[-1].startswith("tasks: ")
