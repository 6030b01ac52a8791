"Results at their edges: names, lists, tables and runs that a command had refused, passed over or answered with a traceback."
import json

from clvla.command.main import main


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
