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
