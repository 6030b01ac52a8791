"The command `clvla`: light, the same run as its page, JSON for scripts, stopped and gone on with; doctor on machines that lack something."
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clvla.command import runs
from clvla.command.main import COMMANDS, HAS, installed, main, page_command, parser_of
from clvla.command.words import PAGES, defaults_of, page_file, parameters_of, read_words
from clvla.core.files import write_json
from clvla.crl.config import AgentConfig
from clvla.envs.all import make_stream
from clvla.eval.audit import AuditConfig
from clvla.cl.all import algos
from clvla.run.config import make_config, resolve
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint
from clvla.run.watch import Run

ROOT = Path(__file__).resolve().parents[1]
CLVLA = [sys.executable, "-c", "import sys; from clvla.command.main import main; sys.exit(main())"]   # what the console script does
DOT = "--suite dot_2 --threads 1 --n_workers 1 --steps_per_task 10 --n_trials 2".split()


def clvla(*words, **kw):
    return subprocess.run([*CLVLA, *map(str, words)], capture_output=True, text=True, timeout=300, **kw)


@pytest.fixture(scope="module")
def home(tmp_path_factory): return tmp_path_factory.mktemp("command")


@pytest.fixture(scope="module")
def er(home):
    "A run by the command, with what it said."
    done = clvla("run", "--cl", "er", *DOT, "--data_dir", home/"data", "--run_dir", home/"er", "--json", cwd=home)
    assert done.returncode == 0, done.stderr
    return home/"er", done


def test_help_loads_nothing_heavy():
    code = "import sys; from clvla.command.main import main; main([]); print([m for m in ('numpy', 'torch', 'pandas', 'plotly', 'papermill', 'IPython') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", PAGES)
def test_help_lists_every_parameter_with_its_default(command):
    text = clvla(command, "--help").stdout
    known = parameters_of(page_file(command))
    assert len(known) >= 3
    for name,(default,_) in known.items(): assert f"  --{name} {default}" in text, name
    assert all(f"--{option}" in text for option in HAS[command])


def test_help_names_every_method_and_has_whole_sentences():
    text = clvla("run", "--help").stdout
    line = next(line for line in text.splitlines() if line.startswith("  --cl "))
    assert set(algos)-set(re.findall(r"\w+", line)) == set()
    assert "h is w" not in text+clvla("agents", "--help").stdout


def test_list_says_default_range_and_meaning_of_every_setting(capsys):
    "Of the algorithms and of the agents; JSON has the same."
    assert main(["list", "mas", "clear"]) == 0
    said = capsys.readouterr().out
    assert "mas: Memory aware synapses. (against forgetting, --cl NAME)" in said and "clear: IMPALA with replay and cloning. (agents, clvla agents --algo NAME)" in said
    assert "  --lam 0.1         strength of the penalty, eq. 4 [a number at least 0]" in said and "[a number in [0,1], or None]" in said and "--seed" not in said
    assert main(["list", "mir", "--json"]) == 0
    rows = {s["name"]: s for s in json.loads(capsys.readouterr().out)["mir"]["methods"]["settings"]}
    assert rows["refresh"] == dict(name="refresh", default=1, allowed="a whole number of at least 1", meaning="score candidates every so many steps; 1 = the paper, 50 costs next to nothing")
    assert rows["store"]["meaning"].startswith('"refs": samples by number'), "of ER, whose argument it is"
    assert main(["list", "mirr"]) == 1 and "did you mean 'mir'?" in capsys.readouterr().err


def test_every_command_is_in_the_help_and_has_its_own():
    said = clvla("--help").stdout
    assert all(f"\n  {name} " in said for name in COMMANDS)
    for name in COMMANDS: assert parser_of(name).format_help().startswith(f"usage: clvla {name}")


def test_commands_of_single_rooms_are_commands_of_clvla(capsys):
    assert set(installed()) == {"data", "libero", "speedrun", "weights"}
    assert main(["data", "nowhere"]) == 1 and capsys.readouterr().err.startswith("clvla-data: refused: ")
    assert main(["wieghts"]) == 2 and "did you mean 'weights'?" in capsys.readouterr().err
    assert main(["--help"]) == 0 and "\n  weights " in capsys.readouterr().out


def test_json_stands_alone_on_the_standard_output(er):
    path, done = er
    found = json.loads(done.stdout)
    assert (found["status"], found["tasks"], found["path"]) == ("done", ["left", "right"], str(path))
    assert found["trials"] == [[2, 0], [2, 2]] and found["success"][0][1] is None and Path(found["report"]).exists()
    assert "demonstrations" in done.stderr and "after right" in done.stderr


def test_a_terminal_has_no_tab(er):
    "How a run is seen elsewhere: by a command, not by a line for a notebook."
    path,done = er
    assert f"in another terminal, clvla watch {path.resolve()} shows this run" in done.stderr and "tab" not in done.stderr


def test_command_and_page_are_the_same_run(er, home):
    "Weights, records and all else that the fingerprint of a run holds."
    path,_ = er
    done = clvla("run", "-p", "cl", "er", *DOT, "--data_dir", home/"data", "--run_dir", home/"page", "--page", home/"out/page.ipynb", cwd=home)
    assert done.returncode == 0, done.stderr
    assert fingerprint(home/"page") == fingerprint(path)
    assert any("png" in str(o) or "plotly" in str(o) for c in json.loads((home/"out/page.ipynb").read_text())["cells"] for o in c.get("outputs", []))


def test_agents_are_told_their_task_where_their_experiment_tells_it():
    "As on the page: CORA's agents are not told."
    told = lambda **kw: resolve(make_config(AgentConfig, defaults_of(page_file("agents")) | kw)).tell_task
    assert told() is True and told(suite="mini_atari_3_tasks_3_cycles") is False and told(suite="mini_atari_3_tasks_3_cycles", tell_task=True) is True


def test_a_file_gives_what_is_not_said(er, home, capsys):
    "What belongs to another method is said and left out; the same run is opened."
    (home/"plan.yaml").write_text(f"cl: mir\nrefresh: 5\nsuite: dot_2\nthreads: 1\nn_workers: 1\nsteps_per_task: 10\nn_trials: 2\ndata_dir: {home}/data\nrun_dir: {home}/er\n")
    assert main(["run", "-f", str(home/"plan.yaml"), "--cl", "er"]) == 0
    said = capsys.readouterr().out
    assert "refresh of the parameters file: of cl 'mir'" in said and "this run is finished" in said


@pytest.mark.parametrize("words, says", [
    ("run --cl mirr", "did you mean 'mir'?"), ("run --bufer_size 3 --cl er", "did you mean 'buffer_size'?"), ("run --n_trials many", "'many' is not a value"),
    ("practice --algo clonning --suite dot_2", "did you mean 'cloning'?"), ("agents --algo ppoo --suite dot_2", "did you mean 'ppo'?"),
    ("run -f nowhere.yaml", "protocols/libero_goal.yaml"), ("run mw5", "write --suite mw5"), ("eval", "expected one folder"), ("watch nowhere", "no run folder: there is no such folder; clvla list runs"),
    ("stop nowhere", "no run folder"), ("metrics nowhere", "no run folder"), ("compare nowhere-*", "no folder matches"), ("list suits", "did you mean 'suites'?"),
    ("cache --delete nothing", "keeps no 'nothing'"), ("completion fish", "expected bash or zsh"), ("compare --bye algo", "did you mean 'by'?"),
    ("metrics nowhere --fast", "no parameter 'fast'"), ("watch nowhere --ever 3", "no parameter 'ever'"), ("stop nowhere --now", "no parameter 'now'"), ("list suites --lng", "no parameter 'lng'"),
    ("run --lr high", "'high' is not a value of type float\n"), ("run --plugins stay.py", """not a value of type list; write "['stay.py']\""""), ("run --smoke maybe", "type bool, as in true"),
    ("practice --tasks drawer-open --suite mt50", """write "['drawer-open']\""""), ("run --seed --cl er", "found True (bool), expected int; --seed without a value means True"),
    ("doctor please", "no further word"), ("cache all", "no further word"), ("demo now", "found 'now'"), ("eval a b", "found 'b'"), ("eval a --run_dir b", "given twice")])
def test_what_cannot_be_meant_is_one_line(words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLVLA_DATA", str(tmp_path/"data"))
    assert main(words.split()) == 1
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said and said.startswith(f"clvla {words.split()[0]}: ")
    assert "clvla doctor says" not in said, "this machine lacks nothing"
    assert list(tmp_path.iterdir()) == [], "a refusal leaves nothing behind"


def test_a_file_that_is_no_list_of_settings(tmp_path, capsys):
    "What the page refuses, too: a name twice, another form, YAML that is none."
    for text,says in (("seed: 1\nseed: 2\n", "given twice: seed"), ("- seed\n", "expected lines NAME: VALUE"), ("a: [", "expected lines NAME: VALUE")):
        (tmp_path/"x.yaml").write_text(text)
        assert main(["run", "-f", str(tmp_path/"x.yaml")]) == 1 and says in capsys.readouterr().err


def test_a_page_gets_the_words_that_have_no_name():
    "As lists, which its config reads again."
    line = page_command("audit", read_words(["a=1/2", "b=2/2", "--margin", "3"]), "out.ipynb")
    given = dict(zip(line[line.index("-p")+1::3], line[line.index("-p")+2::3]))
    assert make_config(AuditConfig, given).results == ["a=1/2", "b=2/2"] and make_config(AuditConfig, given).margin == 3.


def test_a_wrong_command_has_its_own_exit_status(capsys):
    assert main(["rum"]) == 2 and "did you mean 'run'?" in capsys.readouterr().err


def test_a_reader_that_ends_early_is_no_error():
    done = subprocess.run(["bash", "-c", f"{sys.executable} -c 'from clvla.command.main import main; import sys; sys.exit(main([\"run\", \"--help\"]))' | head -1"], capture_output=True, text=True)
    assert done.stdout.startswith("usage: clvla run") and "Traceback" not in done.stderr


def test_eval_compare_and_metrics(er, home, capsys):
    path,_ = er
    assert main(["eval", str(path), "--n_trials", "3", "--n_workers", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trials"] == [[3, 0], [3, 3]]
    assert main(["metrics", found["path"], "--write"]) == 0
    assert (Path(found["path"])/"matrix.csv").read_text().startswith(",left,right\nleft,")
    capsys.readouterr()
    report = home/"both.html"
    assert main(["compare", str(path), found["path"], "--by", "n_trials", "--report", str(report), "--n_boot", "50", "--json"]) == 0
    assert all(heading in report.read_text() for heading in ("All metrics", "Paired with the baseline", "Matrix: ", "Cost, seconds"))
    both = json.loads(capsys.readouterr().out)
    assert both["runs"] == {"n_trials=2": [str(path)], "n_trials=3": [found["path"]]} and len(both["paired"]) == 1


def test_records_that_were_cut_off_are_named(er, tmp_path, capsys):
    "A run that is done and lacks episodes shows its metrics, and says that it lacks them; a whole run says nothing."
    path,_ = er
    assert main(["metrics", str(path)]) == 0 and "fewer than" not in capsys.readouterr().out
    for name,keep in (("torn", 130), ("empty", 0)):
        shutil.copytree(path, tmp_path/name, ignore=shutil.ignore_patterns("evals", "report.html"))
        lines = (path/"episodes.jsonl").read_bytes()
        (tmp_path/name/"episodes.jsonl").write_bytes(lines[:len(lines)-keep] if keep else b"")
    assert main(["metrics", str(tmp_path/"torn")]) == 0 and "has fewer than 2 episodes in 1 cell: 1 of right after right; were its records cut off?" in capsys.readouterr().out
    assert main(["metrics", str(tmp_path/"empty")]) == 0 and "empty has no episodes" in capsys.readouterr().out


def test_a_checkpoint_that_was_cut_off_is_refused_in_a_line(er, tmp_path, capfd):
    "At the door: no process is started, and no folder is made."
    path,_ = er
    shutil.copytree(path, tmp_path/"cut", ignore=shutil.ignore_patterns("evals"))
    os.truncate(tmp_path/"cut/checkpoints/001-right/state.safetensors", 100)
    assert main(["eval", str(tmp_path/"cut"), "--n_trials", "2", "--n_workers", "1"]) == 1
    said = "".join(capfd.readouterr())
    assert re.fullmatch(r"clvla eval: checkpoint .*001-right is not whole: state.safetensors has 100 bytes, not \d+; remove .*001-right, or take 000-left beside it, which is whole\n", said), said
    assert not (tmp_path/"cut/evals").exists()


def test_a_run_that_fails_shows_its_lines_once(home, capfd):
    "Its traceback stands where the child printed it; the command adds the last line."
    (home/"breaks.py").write_text("""from clvla.cl.all import algos
from clvla.cl.base import CLAlgorithm
class Breaks(CLAlgorithm):
    def on_task_start(self, ctx): raise RuntimeError("of its own making")
algos["breaks"] = Breaks
""")
    words = ["run", "--plugins", f"['{home/'breaks.py'}']", "--cl", "breaks", *DOT, "--data_dir", str(home/"data"), "--run_dir", str(home/"broken")]
    try: assert main(words) == 1
    finally: algos.pop("breaks", None)   # other tests list the menu
    said = "".join(capfd.readouterr())
    assert said.count("Traceback") == 1 and "clvla run: clvla.run ended with exit code 1: RuntimeError: of its own making" in said


def test_two_runs_of_one_seed_are_named(er, tmp_path, capsys):
    path,_ = er
    shutil.copytree(path, tmp_path/"again", ignore=shutil.ignore_patterns("evals"))
    assert main(["compare", str(path), str(tmp_path/"again")]) == 1
    assert f"several runs of one seed: {path}, {tmp_path/'again'}; leave all but one out" in capsys.readouterr().err


def test_a_killed_run_says_how_it_goes_on(er, tmp_path, capsys):
    path,_ = er
    shutil.copytree(path, tmp_path/"killed", ignore=shutil.ignore_patterns("done.json", "evals"))
    assert main(["watch", str(tmp_path/"killed"), "--once"]) == 0
    assert "killed: interrupted: process" in (said := capsys.readouterr().out) and "the same command goes on from the last checkpoint" in said


def test_a_difference_is_in_points_where_metrics_are_in_percent(er, tmp_path, capsys):
    "By 2 of 2 at the end against 0 of 2, on each task."
    path,_ = er
    for name,cl,success in (("all", "er", True), ("none", "sequential", False)):
        shutil.copytree(path, tmp_path/name, ignore=shutil.ignore_patterns("evals"))
        config = json.loads((tmp_path/name/"config.json").read_text()) | dict(cl=cl, cl_kw={})
        (tmp_path/name/"config.json").write_text(json.dumps(config))
        records = [json.loads(line) for line in (path/"episodes.jsonl").read_text().splitlines()]
        (tmp_path/name/"episodes.jsonl").write_text("".join(json.dumps({k: v for k,v in r.items() if k != "crc32"} | dict(success=success))+"\n" for r in records))
    assert main(["compare", str(tmp_path/"all"), str(tmp_path/"none")]) == 0
    said = capsys.readouterr().out
    assert "paired with sequential, difference of final success in points:" in said and "100.0" in said.rpartition("in points")[2]


def test_a_run_s_earlier_tasks_are_probed(er, tmp_path, capsys, monkeypatch):
    "A table and one number beside the metrics; a file of numbers has no checkpoint to probe."
    path,_ = er
    assert main(["metrics", str(path), "--recovery", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    probes = found["recovery"]
    assert [p["task"] for p in probes] == ["left"] and all(len(p["again"]["curve"]) > 0 for p in probes)
    monkeypatch.setattr(runs, "probe_run", lambda run: probes)   # which takes a training of each task
    assert main(["metrics", str(path), "--recovery"]) == 0
    said = capsys.readouterr().out
    assert ("savings: " if probes[0]["old"] else "no earlier task had any success") in said
    assert "savings" in found and (found["savings"] is None or f"savings: {found['savings']:.0f} percent" in said)   # JSON has what the text says
    (tmp_path/"m.csv").write_text(",a\na,100\n")
    assert main(["metrics", str(tmp_path/"m.csv"), "--recovery"]) == 1 and "needs the folder of a run" in capsys.readouterr().err


def test_anybodys_matrix(tmp_path, capsys):
    "Metrics that a person can compute: BWT is the mean of .5-1 and .75-.5."
    (tmp_path/"m.csv").write_text(",a,b,c\na,100,,\nb,60,50,\nc,50,75,90\n")
    assert main(["metrics", str(tmp_path/"m.csv"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]
    assert found["ASR"]["value"] == pytest.approx((50+75+90)/3) and found["BWT"]["value"] == pytest.approx((-50+25)/2)
    assert found["Forgetting"]["value"] == pytest.approx((50-25)/2)


def test_games_that_count_points_show_returns(tmp_path, capsys):
    "Of a run's own files: a game that knows no success has none, not 0 %."
    run = RunFolder(tmp_path/"run")
    run.begin(resolve(AgentConfig(suite="mini_atari_3", run_dir=str(tmp_path/"run"))))
    write_json(tmp_path/"run/stream.json", dict(stages=["SpaceInvaders"], order=[0], tasks=[dict(id="SpaceInvaders", env=make_stream("mini_atari_3").tasks[0].env)]))
    episode = dict(stage=0, after="SpaceInvaders", step=None, task="SpaceInvaders", success=False)
    (tmp_path/"run/episodes.jsonl").write_text("".join(json.dumps(episode | dict(trial=i, reward=r))+"\n" for i,r in enumerate([3., 4.])))
    assert main(["metrics", str(tmp_path/"run")]) == 0
    said = capsys.readouterr().out
    assert "mean return" in said and "3.50" in said and "success" not in said
    assert main(["metrics", str(tmp_path/"run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["returns"] == [[3.5]]
    assert main(["watch", str(tmp_path/"run"), "--once"]) == 0 and "3.50" in capsys.readouterr().out
    (tmp_path/"run/log.jsonl").write_text(json.dumps(dict(task="SpaceInvaders", stage=0, step=3, **{"train/loss": .5}))+"\n")   # an agent's has no rate
    assert Run.open(tmp_path/"run").position == dict(phase="training", task="SpaceInvaders", stage=0, n_stages=1, done=4, total=run.cfg.steps_per_task, loss=.5)


@pytest.mark.parametrize("text, says", [("", "no matrix"), (",a\nb,1\n", "trained 'b', and the tasks are a; expected a line with the tasks"), (",a,b\na,1\n", "has 1 cells"), (",a\na,x\n", "a share, a percentage"),
                                        (",a\na,-1\n", "from 0 to 1"), (",a\na,101\n", "from 0 to 1"), (",a,a\na,1,1\n", "each task id once")])
def test_a_matrix_that_is_none(tmp_path, text, says, capsys):
    (tmp_path/"m.csv").write_text(text)
    assert main(["metrics", str(tmp_path/"m.csv")]) == 1 and says in capsys.readouterr().err


def begun(words, path):
    "A run in a session of its own, once it has trained a little."
    def fresh():
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)   # as in a terminal
    before = (path/"log.jsonl").stat().st_size if (path/"log.jsonl").exists() else 0
    run = subprocess.Popen([*CLVLA, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=fresh)
    deadline = time.monotonic()+120
    while time.monotonic() < deadline and not ((path/"log.jsonl").exists() and (path/"log.jsonl").stat().st_size > before): time.sleep(.1)
    return run


def test_a_run_is_stopped_interrupted_and_gone_on_with(home, capsys):
    "Exit status 75 says that the same command goes on; a watcher ends with the run, and sees its matrix."
    path = home/"long"
    words = ["run", "--cl", "er", *DOT[:-4], "--steps_per_task", "200", "--n_trials", "2", "--data_dir", home/"data", "--run_dir", path]
    for end in (lambda run: main(["stop", str(path)]), lambda run: run.send_signal(signal.SIGINT)):
        run = begun(words, path)
        end(run)
        assert main(["watch", str(path)]) == 0
        said = run.communicate(timeout=120)[0]
        assert run.returncode == 75 and "the same command continues it" in said, said
        assert "stopped" in capsys.readouterr().out
    assert main(list(map(str, words))) == 0
    assert main(["watch", str(path)]) == 0
    assert f"{path}: done" in (shown := capsys.readouterr().out) and "after right" in shown


def test_lists(er, home, capsys, monkeypatch):
    monkeypatch.chdir(home)
    (home/"runs").mkdir()
    os.symlink(home/"er", home/"runs/er")
    (home/"none").mkdir()
    assert main(["list", "runs", "--json"]) == 0 and main(["list", "runs", "--runs", "none"]) == 0 and main(["list", "runs", "--runs", "nowhere"]) == 1
    said, none = (shown := capsys.readouterr()).out.splitlines()
    assert [(r["run"], r["cl"]) for r in json.loads(said)] == [("runs/er", "er")] and none.startswith("no runs here")
    assert "there is no folder nowhere; --runs names" in shown.err
    assert main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["suites"]["mw5"].startswith("5 tasks") and "replay" in found["methods"]["er"].lower() and set(found) == {"suites", "methods", "practice", "agents", "policies"}
    for name,menu in found.items(): assert [k for k,v in menu.items() if not v] == [], name
    assert set(found["methods"]) >= {*algos}


def test_list_knows_what_a_plugin_brings(tmp_path, capsys):
    mine = tmp_path/"mine_in_list.py"
    mine.write_text('from clvla.cl.all import algos\nfrom clvla.cl.base import CLAlgorithm\n\nclass Mine(CLAlgorithm):\n    "Does nothing else."\n'
                    '    def __init__(self, seed:int=0, strength:float=.5): self.strength = strength   # as is\nalgos["mine_in_list"] = Mine\n')
    try:
        assert main(["list", "mine_in_list"]) == 1 and "no menu has" in capsys.readouterr().err
        assert main(["list", "mine_in_list", "--plugins", str(mine)]) == 0 and "--strength 0.5" in capsys.readouterr().out
        assert main(["list", "methods", "--plugins", f"['{mine}']"]) == 0 and "Does nothing else." in capsys.readouterr().out
        assert main(["list", "--plugins", "nowhere.py"]) == 1 and "nowhere.py" in capsys.readouterr().err
    finally: algos.pop("mine_in_list", None)   # other tests list the menu


def test_cache_lists_and_removes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CLVLA_DATA", str(tmp_path/"data"))
    (tmp_path/"data/demos/a").mkdir(parents=True)
    (tmp_path/"data/demos/a/x").write_bytes(bytes(3_000_000))
    (tmp_path/"outside").write_text("stays")
    os.symlink(tmp_path/"outside", tmp_path/"data/demos/link")
    assert main(["cache", "--json"]) == 0
    assert {r["name"]: r["bytes"] for r in json.loads(capsys.readouterr().out)}["demos/a"] == 3_000_000
    assert [main(["cache", "--delete", name]) for name in ("demos/link", "demos/a", "../outside", "demos/..")] == [0, 0, 1, 1]
    assert (tmp_path/"outside").read_text() == "stays" and not (tmp_path/"data/demos/a").exists()


def test_a_shell_completes(tmp_path):
    script = tmp_path/"clvla"
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom clvla.command.main import main\nsys.exit(main())\n")
    script.chmod(0o755)
    def complete(*words):
        code = f'eval "$(clvla completion bash)"; COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words)-1}; _clvla; echo ${{COMPREPLY[@]}}'
        return subprocess.run(["bash", "-c", code], capture_output=True, text=True, env=os.environ | dict(PATH=f"{tmp_path}:{os.environ['PATH']}")).stdout.split()
    assert complete("clvla", "do") == ["doctor"] and complete("clvla", "run", "--refr") == ["--refresh"] and complete("clvla", "eval", "--first") == ["--first_trial"]


# doctor

def doctor(*words, **kw):
    "Exit status, and finding by name."
    done = clvla("doctor", "--json", *words, **kw)
    return done.returncode, {f["what"]: f for f in json.loads(done.stdout)}


def test_this_machine_is_well(tmp_path):
    status, found = doctor(cwd=tmp_path, env=os.environ | dict(CLVLA_DATA=str(tmp_path)))
    assert status == 0 and {f["state"] for f in found.values()} <= {"ok", "note"}
    assert found["drawing with osmesa"]["state"] == "ok" and found["libraries"]["state"] == "ok"


def test_a_machine_that_lacks_much(tmp_path):
    "GL libraries that a loader finds damaged, 64 open files, and a numpy that is too new for one extra, all of them real in the child."
    for lib in ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so", "libEGL.so.1", "libEGL.so"): (tmp_path/lib).write_text("no library")
    info = tmp_path/"numpy-2.9.0.dist-info"   # what an environment with it lists
    info.mkdir()
    (info/"METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 2.9.0\n")
    status, found = doctor(env=os.environ | dict(LD_LIBRARY_PATH=str(tmp_path), PYTHONPATH=f"{tmp_path}:{ROOT}"),
                           preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)))
    assert status == 1 and found["drawing"]["state"] == "problem" and "libosmesa6" in found["drawing"]["do"]
    assert found["open files"] == dict(what="open files", state="problem", found="64 files", do="256 files are needed: ulimit -n 4096")
    assert found["numpy"]["found"] == "2.9.0" and "the extra libero was tested with numpy" in found["numpy"]["do"]


def test_a_disk_that_is_full(tmp_path):
    "A file system of one megabyte, where this user may mount one."
    code = f"from clvla.command.doctor import check_machine; print([(f.what, f.state) for f in check_machine('{tmp_path}', '{tmp_path}') if 'disk' in f.what])"
    may = subprocess.run(["unshare", "-rm", "sh", "-c", f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec {sys.executable} -c \"$CODE\""], capture_output=True, text=True, env=os.environ | dict(CODE=code))
    said = may.stdout if may.returncode == 0 else subprocess.run([sys.executable, "-c", f"import shutil; shutil.disk_usage = lambda p: shutil._ntuple_diskusage(10**6, 0, 10**6); {code}"], capture_output=True, text=True).stdout
    assert said.count("problem") == 2 and "disk of the data" in said, may


def test_words_are_read_as_papermill_reads_them():
    same = ["-p seed 1 -p smoke True", "--seed 1 --smoke", "--seed=1 --smoke=True", "--parameters seed 1 -r smoke True"]
    assert all(read_words(line.split()).given == dict(seed="1", smoke="True") for line in same)
