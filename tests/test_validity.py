"Four questions to a stream: who plays what, what a replay is, what a verdict follows from; and a file of statistics held against its frames."
import json
from dataclasses import replace

import numpy as np
import pytest

from clvla.command.main import main
from clvla.command.stats import look_at, told
from clvla.core.files import read_json
from clvla.core.names import ACTION, STATE
from clvla.core.trials import use_of
from clvla.data.frames import write_store
from clvla.data.stats import STATS_FILE
from clvla.envs.all import make_env, make_stream
from clvla.envs.dot import dot
from clvla.train import validity
from clvla.train.config import stream_for
from clvla.train.prepare import prepare
from clvla.train.validity import LACKING, Answer, audit_stream, misread, new_starts, plan_text, played, replayed, report, runs_of, verdicts

SMALL = dict(n_demos=3, steps_per_task=30, n_trials=4, n_workers=1, threads=1, image_size=32)


@pytest.fixture(scope="module")
def data(shared_data): return str(shared_data)


@pytest.fixture(scope="module")
def asked(data, tmp_path_factory):
    folder, lines = tmp_path_factory.mktemp("validity")/"audit", []
    return folder, audit_stream("dot_2", folder, parallel=2, say=lines.append, data_dir=data, **SMALL), lines


def test_the_runs_are_what_their_names_say(data, tmp_path):
    cfgs = runs_of("dot_2", tmp_path, 2, data_dir=data, **SMALL)
    assert len(cfgs) == 16 and len({c.run_dir for c in cfgs.values()}) == 16
    for name, c in cfgs.items():
        who, order, seed = name.split("-")
        assert (c.blind, c.deaf, c.cl, f"s{c.seed}") == (LACKING[who].get("blind", False), LACKING[who].get("deaf", False), order, seed)


def test_a_plan_writes_nothing(data, tmp_path):
    assert "8 runs" in plan_text(runs_of("dot_2", tmp_path/"audit", data_dir=data, **SMALL)) and not (tmp_path/"audit").exists()


def test_all_of_it_and_what_is_kept(asked):
    folder, found, lines = asked
    assert read_json(folder/"validity.json") == json.loads(json.dumps(found))
    who = [a["who"] for a in found["answers"]]
    assert len(who) == len(set(who)) == 12 and all(a["episodes"] in (6, 8) for a in found["answers"])
    assert set(found["verdicts"]) == {"eyes", "words", "feedback"} and found["text"] in report("dot_2", [Answer(a["question"], a["who"], a["tasks"]) for a in found["answers"]])
    assert "0 of them done" in lines[0]


def test_asked_again_it_plays_no_run_twice(asked, data, monkeypatch):
    folder, found, _ = asked
    lines = []
    monkeypatch.setattr(validity, "other_answers", lambda cfg, say: [Answer(a["question"], a["who"], a["tasks"]) for a in found["answers"][8:]])
    assert audit_stream("dot_2", folder, say=lines.append, data_dir=data, **SMALL)["answers"] == found["answers"]
    assert len(lines) == 1 and "8 of them done" in lines[0]


def test_the_misread_policy_hears_another_sentence_and_nothing_else():
    stream = dot.streams()["dot_3"]
    wrong = misread(stream)
    assert [t.id for t in wrong] == stream.ids and all(a.prompt != b.prompt and replace(b, prompt=a.prompt) == a for a, b in zip(wrong, stream.tasks))
    assert {t.prompt for t in wrong} == {t.prompt for t in stream.tasks}
    same = type(stream)("same", [replace(t, prompt="go") for t in stream.tasks])
    with pytest.raises(ValueError, match="none is wrong"): misread(same)


def test_a_replay_carries_out_one_demonstration_after_another(data, tmp_path, monkeypatch):
    cfg = runs_of("dot_2", tmp_path, data_dir=data, **SMALL)["seeing-joint-s0"]
    stream = stream_for(cfg)
    store, task, seen = prepare(stream, cfg, len)["left"], stream["left"], []

    def make(spec, *args):
        env = make_env(spec, *args)
        reset, step = env.reset, env.step_chunk
        env.reset = lambda trial: (seen.append([trial]), reset(trial))[1]
        env.step_chunk = lambda actions: (seen[-1].append(np.array(actions)), step(actions))[1]
        return env
    monkeypatch.setattr(validity, "make_env", make)
    won = replayed(task, store, range(4), 32)
    ends = np.cumsum(store.episode_lengths)
    assert [s[0] for s in seen] == [0, 1, 2, 3] and len(won) == 4
    for k, (_, actions) in enumerate(seen):
        e = k%len(ends)
        assert np.array_equal(actions, store.action[ends[e]-store.episode_lengths[e]:ends[e]])


def test_new_starts_are_nobodys_and_of_the_reporting_use():
    tasks = dot.streams()["dot_2"].tasks
    assert new_starts(tasks, 20) == list(range(20, 40)) and {use_of(t)[0] for t in new_starts(tasks, 20)} == {"report"}
    libero = make_stream("libero_goal").tasks
    assert new_starts(libero, 20) == list(range(50, 70))


def test_the_seeing_policy_is_the_runs_own(asked, data):
    "Played on the reported starts it gives the records that the run has."
    folder, _, _ = asked
    cfg = runs_of("dot_2", folder, data_dir=data, **SMALL)["seeing-joint-s0"]
    from clvla.run.folder import RunFolder
    records = [r for r in RunFolder(cfg.run_dir).episodes() if r["stage"] >= 0 and r["step"] is None]
    mine = played(cfg, list(stream_for(cfg).tasks), range(4))
    assert mine == {t: [r["success"] for r in sorted(records, key=lambda r: r["trial"]) if r["task"] == t] for t in mine}


def answers(seeing, blind, deaf, neither, replay):
    rate = {"seeing, joint": seeing, "blind, joint": blind, "deaf, joint": deaf, "neither, joint": neither, "a replay, from reported starts": replay}
    return [Answer("", who, dict(a=[k, 100])) for who, k in rate.items()]


@pytest.mark.parametrize("rates, says", [((90, 10, 90, 5, 0), ("needed", "not needed", "needed")), ((90, 50, 5, 5, 80), ("partly needed", "needed", "not needed")),
                                         ((20, 20, 20, 5, 0), ("cannot be told",)*3), ((40, 30, 30, 45, 0), ("cannot be told", "cannot be told", "needed"))])
def test_verdicts_follow_from_the_rates(rates, says): assert tuple(v["verdict"] for v in verdicts(answers(*rates)).values()) == says


@pytest.mark.parametrize("kw", [dict(cl="er"), dict(blind=True), dict(run_dir="x"), dict(seed=3)])
def test_what_the_audit_chooses_is_refused(tmp_path, kw):
    with pytest.raises(ValueError, match="chosen by the audit"): runs_of("dot_2", tmp_path, **kw)


def test_the_command(asked, data, capsys):
    folder, found, _ = asked
    words = ["audit-stream", "dot_2", "--folder", str(folder), "--data_dir", data, *(w for k, v in SMALL.items() for w in (f"--{k}", str(v)))]
    assert main([*words, "--dry", "--json"]) == 0 and "8 of them done" in json.loads(capsys.readouterr().out)["plan"]
    assert main(["audit-stream", "dot_2", "--cl", "er"]) == 1 and "chosen by the audit" in capsys.readouterr().err
    assert main(["audit-stream", "dto_2"]) == 1 and "did you mean 'dot_2'" in capsys.readouterr().err
    assert main(["audit-stream"]) == 1 and "expected one stream" in capsys.readouterr().err


def episode(rng, n):
    return {"observation.images.front": rng.integers(0, 255, (n, 8, 8, 3), np.uint8), STATE: np.float32(rng.normal(size=(n, 3))),
            ACTION: np.float32(rng.normal(size=(n, 2))), "task": "push"}


@pytest.fixture
def store(tmp_path):
    from clvla.core.names import PROMPT
    rng = np.random.default_rng(0)
    episodes = [{(PROMPT if k == "task" else k): v for k, v in episode(rng, n).items()} for n in (20, 30)]
    write_store(tmp_path/"store", episodes, source={})
    return tmp_path/"store"


def test_statistics_of_a_store(store, capsys):
    assert main(["stats", str(store)]) == 1 and "is not there" in capsys.readouterr().out
    assert main(["stats", str(store), "--repair"]) == 0 and "was written" in capsys.readouterr().out
    assert main(["stats", str(store)]) == 0 and "says what the frames say" in capsys.readouterr().out
    said = read_json(store/STATS_FILE)
    said[ACTION]["q99"] = [9., 9.]
    (store/STATS_FILE).write_text(json.dumps(said))
    before = (store/STATS_FILE).read_bytes()
    assert main(["stats", str(store), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["wrong"] == ["action.q99"] and (store/STATS_FILE).read_bytes() == before   # looking changes nothing
    assert main(["stats", str(store), "--repair"]) == 0 and look_at(store)["state"] == "right"


def test_statistics_of_several_stores_and_of_a_lerobot_data_set(data, tmp_path):
    cfg = runs_of("dot_2", tmp_path, data_dir=data, **SMALL)["seeing-joint-s0"]
    stores = prepare(stream_for(cfg), cfg, len)
    home = next(p for p in __import__("pathlib").Path(data, "dot").iterdir() if p.name == "left-n3-32px")
    one, own = look_at(home/"frames"), look_at(home/"lerobot")
    assert one["frames"] == own["frames"] == len(stores["left"]) and one["stats"][ACTION]["q01"] == own["stats"][ACTION]["q01"] and own["lerobot"] == []
    import shutil
    copy = tmp_path/"edited"
    shutil.copytree(home/"lerobot", copy)
    stats = read_json(copy/"meta/stats.json")
    stats[ACTION]["std"] = [9., 9.]
    (copy/"meta/stats.json").write_text(json.dumps(stats))
    found = look_at(copy)
    assert found["lerobot"] == ["action.std"] and "meta/stats.json has other values in action.std" in told(found)


@pytest.mark.parametrize("path, says", [("nowhere", "is no folder"), (".", "has neither frames")])
def test_folders_without_statistics(tmp_path, path, says, capsys):
    assert main(["stats", str(tmp_path/path)]) == 1 and says in capsys.readouterr().err


def test_a_probe_is_no_answer(data, tmp_path):
    "A task that no run trained says nothing of what a stream needs to be learnt."
    from clvla.run.folder import RunFolder
    suite = dict(base="dot_3", probes=["up"])
    cfgs = runs_of(suite, tmp_path, data_dir=data, **SMALL)
    for cfg in cfgs.values():
        folder = RunFolder(cfg.run_dir)
        folder.path.mkdir(parents=True)
        for task in ("left", "right", "up"): folder.episode(dict(stage=0, after="joint", step=None, task=task, trial=0, success=task == "up"))
    answers = validity.trained_answers(cfgs)
    assert len(answers) == 8 and all(a.of == dict(left=[0, 1], right=[0, 1]) for a in answers)
    stream = stream_for(cfgs["seeing-joint-s0"])
    assert [(t.id, t.prompt) for t in misread(stream)] == [("left", stream["right"].prompt), ("right", stream["left"].prompt)]


def test_other_answers_are_of_trained_tasks(data, tmp_path, monkeypatch):
    cfg = runs_of(dict(base="dot_3", probes=["up"]), tmp_path, data_dir=data, **SMALL)["seeing-joint-s0"]
    monkeypatch.setattr(validity, "played", lambda cfg, tasks, trials: {t.id: [True] for t in tasks})
    assert [list(a.of) for a in validity.other_answers(cfg, len)] == [["left", "right"]]*4
