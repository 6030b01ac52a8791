"Results at their edges: names, lists, tables and runs that a command had refused, passed over or answered with a traceback."
import json

from clvla.command.main import main
from clvla.data.streams import stream_json
from clvla.envs.all import make_stream


def test_list_takes_runs_among_other_names(tmp_path, monkeypatch, capsys):
    "It said: there is no list 'runs'; did you mean 'runs'?"
    monkeypatch.chdir(tmp_path)
    assert main(["list", "methods", "runs"]) == 0
    text = capsys.readouterr().out
    assert "methods: against forgetting" in text and "no runs here" in text
    assert main(["list", "runs", "suites", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == [] and "mw5" in found["suites"]


def test_write_beside_a_file_is_refused(tmp_path, capsys):
    "The option had no effect."
    (tmp_path/"m.csv").write_text(",a,b\na,90,\nb,80,100\n")
    assert main(["metrics", str(tmp_path/"m.csv"), "--write"]) == 1
    assert "--write writes into the folder of a run" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["m.csv"]


def a_run(path, won, trials=3, seed=0, **settings):
    "A folder as a run of two tasks leaves it."
    path.mkdir(parents=True)
    config = dict(seed=seed, algo="imitation", cl="er", n_trials=trials, suite="dot_2", run_dir=str(path)) | settings
    stream = stream_json(make_stream("dot_2"))
    ids = [t["id"] for t in stream["tasks"]]
    records = [dict(stage=s, after=ids[s], step=None, task=t, trial=i, success=won)
               for s in range(2) for t in ids[:s+1] for i in range(trials)]
    (path/"config.json").write_text(json.dumps(config))
    (path/"stream.json").write_text(json.dumps(stream | dict(stages=ids)))
    (path/"episodes.jsonl").write_text("".join(json.dumps(r)+"\n" for r in records))
    return path


def test_compare_needs_draws_for_its_intervals(tmp_path, capsys):
    "n_boot 0 ended with an IndexError; 1 gave [0.0, 0.0]."
    run = str(a_run(tmp_path/"r", False))
    for n in (0, -5, 1):
        assert main(["compare", run, "--n_boot", str(n)]) == 1
        assert f"n_boot is {n}, expected 20 draws or more" in capsys.readouterr().err
    assert main(["compare", run, "--n_boot", "20"]) == 0


def test_results_without_a_name_are_told_apart(tmp_path, monkeypatch, capsys):
    "Folders had lost what stands behind a dot, numbers what stands before the stroke, and tables were called 10."
    monkeypatch.chdir(tmp_path)
    for name,won in (("lr-0.1", True), ("lr-0.01", False), ("lr=1", True)): a_run(tmp_path/name, won)
    assert main(["audit", "lr-0.1", "lr-0.01", "lr=1", "185/200", "170/200", "--json"]) == 0
    names = [r["name"] for r in json.loads(capsys.readouterr().out)["results"]]
    assert names == ["lr-0.1", "lr-0.01", "lr=1", "185/200", "170/200"]
    for name in "xy": (tmp_path/f"{name}.csv").write_text(",a,b\na,90,10\nb,80,100\n")
    assert main(["audit", "x.csv/10", "y.csv/10", "--matrices", "--json"]) == 0
    assert [m["name"] for m in json.loads(capsys.readouterr().out)["matrices"]] == ["x", "y"]


def test_trials_that_are_numbers_here_and_words_there(tmp_path, monkeypatch, capsys):
    "It ended with: You are trying to merge on int64 and object columns."
    monkeypatch.chdir(tmp_path)
    write = lambda name, trials, seed: (tmp_path/f"{name}.csv").write_text(
        "task,trial,seed,success\n"+"".join(f"a,{i},{seed},{k%2}\n" for k,i in enumerate(trials)))
    write("numbers", [0, 1, 2, 3], 0)
    write("words", ["s0", "s1", "s2", "s3"], 0)
    write("some", ["0", "1", "2", "s3"], 0)
    write("seed", [0, 1, 2, 3], "first")
    assert main(["audit", *(f"{x}.csv" for x in ("numbers", "words", "some", "seed")), "--json"]) == 0
    tests = {(v["a"], v["b"]): (v["test"], v["n"]) for v in json.loads(capsys.readouterr().out)["verdicts"]}
    assert tests["numbers", "words"] == tests["numbers", "seed"] == ("Fisher", 4)
    assert tests["numbers", "some"] == ("McNemar", 3)


def test_a_matrix_without_a_cell_is_refused(tmp_path, monkeypatch, capsys):
    "No column ended with a TypeError of numpy, no number with an empty table."
    monkeypatch.chdir(tmp_path)
    for text in ("a\n", ",a,b\n", ",a,b\na,,\nb,,\n"):
        (tmp_path/"m.csv").write_text(text)
        assert main(["audit", "m.csv/10", "--matrices"]) == 1
        assert "m.csv has no cell" in capsys.readouterr().err


def test_audit_of_a_run_inside_its_first_stage(tmp_path, capsys):
    "It said: max() iterable argument is empty."
    path = a_run(tmp_path/"r", True)
    records = [dict(stage=0, after="a", step=0, task="a", trial=i, success=False) for i in range(3)]
    (path/"episodes.jsonl").write_text("".join(json.dumps(r)+"\n" for r in records))
    assert main(["audit", str(path), "b=1/4"]) == 1
    assert "its first stage is not at its end" in capsys.readouterr().err


def test_held_out_error_without_a_moving_action(tmp_path, monkeypatch):
    "A run ended with: Out of range float values are not JSON compliant."
    from contextlib import nullcontext
    from types import SimpleNamespace
    from clvla.run.report import held_out_table
    from clvla.train import held_out
    found = dict(a=float("nan"), b=.5)
    monkeypatch.setattr(held_out, "error_of", lambda *a: dict(error=0., constant=0., ratio=found[a[-1]]))
    policy = SimpleNamespace(training=False, eval=lambda: None, train=lambda mode: None)
    algo = SimpleNamespace(eval_policy=lambda policy, task: nullcontext())
    data = dict(a=None, b=None)
    rows = held_out.error_after(tmp_path, dict(stage=0, after="a"), ["a", "b"], policy, None, algo, data, data)
    assert [r["ratio"] for r in rows] == [r["ratio"] for r in json.loads((tmp_path/"held_out.json").read_text())] == [None, .5]
    assert held_out_table(tmp_path).values.tolist() == [["0: a", "none", "0.50"]]


def test_an_evaluation_is_told_from_a_run(tmp_path, capsys):
    "They said: unknown parameter 'first_trial'; did you mean 'n_trials'?"
    run = a_run(tmp_path/"r", True)
    path = run/"evals"/"lower-0+3-s0"
    path.mkdir(parents=True)
    (path/"config.json").write_text(json.dumps(dict(n_trials=3, first_trial=0)))
    (path/"episodes.jsonl").write_text((run/"episodes.jsonl").read_text())
    for words in (["watch", path, "--once"], ["stop", path], ["metrics", path, "--recovery"]):
        assert main([str(w) for w in words]) == 1
        assert f"{path} is an evaluation, expected the folder of a run, as {run}" in capsys.readouterr().err
    assert main(["metrics", str(path)]) == 0


def test_compare_of_one_group_has_no_pairs(tmp_path, capsys):
    "Below the metrics stood: Empty DataFrame, Columns, Index."
    assert main(["compare", str(a_run(tmp_path/"r", True)), "--n_boot", "20"]) == 0
    text = capsys.readouterr().out
    assert "ASR" in text and "100.0" in text and "Empty DataFrame" not in text and "paired" not in text


def test_a_folder_with_brackets_is_no_pattern(tmp_path, capsys):
    "It said: no folder matches."
    runs = [str(a_run(tmp_path/"[lab] 1"/f"s{seed}", seed > 0, seed=seed)) for seed in range(2)]
    assert main(["compare", *runs, "--n_boot", "20", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["runs"].values()) == [runs]


def test_a_metric_without_an_interval():
    "It stood beside [nan, nan]."
    import pandas as pd
    from clvla.command.runs import metrics_text
    nan = float("nan")
    rows = [dict(metric="ASR", percent=50., low=40., high=60., missing=0), dict(metric="own", percent=3., low=nan, high=nan, missing=0)]
    assert metrics_text(pd.DataFrame(rows)).splitlines() == ["ASR            50.0  [40.0, 60.0]", "own             3.0"]


def test_a_metric_that_is_not_measured_yet_is_named():
    "It was left out without a word; one that does not apply to this stream at all has no line."
    import pandas as pd
    from clvla.command.runs import metrics_text
    nan = float("nan")
    row = lambda metric, missing: dict(metric=metric, percent=nan, low=nan, high=nan, missing=missing)
    assert metrics_text(pd.DataFrame([row("BWT", 3), row("ASR", 1), row("own", 0)])).splitlines() == [
        "BWT               .  3 cells not measured", "ASR               .  1 cell not measured"]


def test_the_hint_to_watch_can_be_pasted(tmp_path):
    "A folder with a space had become two words."
    import shlex
    from clvla.run.watch import Run
    words = shlex.split(Run(tmp_path/"my runs"/"r").hint.split(", ")[1])
    assert words[:3] == ["clvla", "watch", str(tmp_path/"my runs"/"r")]


def test_a_plan_beside_episodes_without_tasks(tmp_path, monkeypatch, capsys):
    "clvla audit compared them, and its plan had no verdict: 0 shared episodes."
    monkeypatch.chdir(tmp_path)
    write = lambda name, task, won: (tmp_path/f"{name}.csv").write_text(
        ("task," if task else "")+"success\n"+"".join(f"{task+',' if task else ''}{int(i < won)}\n" for i in range(10)))
    write("new", "pick", 10)
    write("old", "", 1)
    plan = dict(endpoint="ASR", methods=["new"], baseline="old", seeds=[0], episodes=10, test="Fisher", smallest=5)
    (tmp_path/"plan.json").write_text(json.dumps(plan))
    assert main(["audit", "new.csv", "old.csv", "--plan", "plan.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [v["p"] for v in found["verdicts"]] == [t["p"] for t in found["planned"]["tests"]]
    assert found["planned"]["tests"][0]["says"] == "shown"


def test_a_file_s_metrics_that_lack_cells_are_named(tmp_path, capsys):
    "As those of a run: they were left out."
    from clvla.command.main import main
    (tmp_path/"m.csv").write_text(",a,b\na,90,\nb,50,80\n")
    assert main(["metrics", str(tmp_path/"m.csv")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "ASR            65.0" in said and "FWT               .  2 cells not measured" in said
