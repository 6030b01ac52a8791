"""A stranger's run folder is data: whatever it brings or names, no door runs it, until its user says trust.

To add a door, add a line to DOORS; to add something that a folder can bring, add a function to BRINGS.
"""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clvla.core.files import json_text, read_json, sha256
from clvla.core.trust import APPROVED, code_of
from clvla.data.streams import Stream, Task, stream_from, stream_json
from clvla.envs.all import make_env
from clvla.eval.compare import read_run
from clvla.policies.all import load_policy, make_policy
from clvla.policies.weights import init_weights
from clvla.rl.config import PracticeConfig, resolve_practice
from clvla.rl.token_file import read_token
from clvla.run.__main__ import main
from clvla.run.config import read_config
from clvla.run.folder import RunFolder
from clvla.run.kept import pack
from clvla.run.plugins import check_code
from clvla.run.report import finish
from clvla.run.resume import fingerprint
from clvla.run.shell import run_learner
from clvla.run.watch import Run
from clvla.train.checkpoint_eval import eval_cl, eval_named
from clvla.train.config import TrainConfig, resolve
from clvla.train.eval_config import EvalConfig, begin_eval, check_eval

BEGIN = '''
import sys
from pathlib import Path
import numpy as np
from clvla.core.files import write_json
from clvla.core.names import ACTION, IMAGE, PROMPT, STATE
from clvla.data.frames import write_store
from clvla.data.stats import Processor, compute_stats
from clvla.data.streams import stream_json
from clvla.policies.all import make_policy
from clvla.policies.weights import save_policy
from clvla.run.checkpoint import save_checkpoint
from clvla.run.folder import RunFolder
from clvla.run.plugins import keep_plugins
from clvla.train.config import TrainConfig, resolve, stream_for
from clvla.core.config import config_json

home = Path(sys.argv[1])
cfg = resolve(TrainConfig.of(run_dir=str(home/"run"), data_dir=str(home/"data"), suite="dot_2", algo="er", device="cpu", n_trials=1,
                             n_workers=1, plugins=[str(home/"mine.py")]))
run,stream = RunFolder(cfg.run_dir),stream_for(cfg)
run.begin(cfg)
keep_plugins(cfg)
frame = {IMAGE: np.zeros((9, 48, 48, 3), np.uint8), STATE: np.linspace(0, 1, 18, dtype=np.float32).reshape(9, 2),
         ACTION: np.linspace(-1, 1, 18, dtype=np.float32).reshape(9, 2), PROMPT: stream.tasks[0].prompt}
processor = Processor(compute_stats(write_store(home/"store", [frame])))
first,stored = stream.ids[0],stream_json(stream)
stages = dict(stages=[stage.task.id for stage in stream.stages])
record = dict(stage=0, step=None, after=first, task=first, trial=0, success=True, steps=3, seed=0, restarts=0)
documents = {"config.json": config_json(cfg), "position.json": dict(t=0, name=first, step=None), "episodes.json": [record],
             "versions.json": {}, "processor.json": processor.to_json(), "stream.json": stored}
policy = make_policy("tiny", state_dim=2, action_dim=2, D=32)
save_checkpoint(run.path/"checkpoints", f"000-{first}", dict(algo={}), documents, lambda d: save_policy(policy, "tiny", d))
write_json(run.path/"stream.json", stored|stages)
write_json(run.path/"cost.json", dict(seconds=dict(training=1.), peak_memory_gb=1.))
run.log(stage=0, task=first, step=1, **{"train/loss": .5}, lr=.1)
run.episode(record)
write_json(run.path/"done.json", {})
'''


def put(path, value):
    "Write JSON as anybody can; `write_json` would wait for the disk each time."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(json_text(value))


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    "The owner's home, with a run that has a plugin, begun in a process of its own."
    home = tmp_path_factory.mktemp("owner")
    (home/"mine.py").write_text("size = 1\n")
    p = subprocess.run([sys.executable, "-c", BEGIN, str(home)], env=environment(home), capture_output=True, text=True)
    assert p.returncode == 0, p.stderr[-3000:]
    return home


def environment(home, **more):
    "That of a user with another home."
    kept = {k: v for k, v in os.environ.items() if k not in (APPROVED, "CLVLA_STATE", "XDG_STATE_HOME")}
    return kept | dict(HOME=str(home)) | more


def again(folder):
    "Seal a checkpoint after its files were changed, as whoever sends it can."
    files = {k: dict(sha256=sha256(folder/k), bytes=(folder/k).stat().st_size) for k in read_json(folder/"manifest.json")["files"]}
    put(folder/"manifest.json", dict(format=1, files=files))


def streams(run):
    "Every file of a run that holds its stream."
    return [run/"stream.json", *run.glob("checkpoints/*/stream.json")]


def with_env(run, **entries):
    "Put entries into the environment of each task, wherever the run keeps its stream."
    for file in streams(run):
        doc = read_json(file)
        for task in doc["tasks"]: task["env"] |= entries
        put(file, doc)
    for folder in run.glob("checkpoints/*"):
        if folder.is_dir(): again(folder)


def plugin_file(run, evil):
    (run/"plugins/mine.py").write_text(evil.read_text())
    entry, = read_json(run/"plugins.json")
    put(run/"plugins.json", [entry | dict(id=sha256(evil))])


def plugins_json(run, entry): put(run/"plugins.json", [entry])
def config(run, **settings): put(run/"config.json", read_json(run/"config.json") | settings)


# what a stranger puts into the folder; the third word is the name of the module `evil`, which lies on the path
BRINGS = dict(
    plugin_file=plugin_file,
    plugin_module=lambda run, evil: plugins_json(run, dict(name=evil.stem, kind="module", id="0")),
    plugin_elsewhere=lambda run, evil: plugins_json(run, dict(name=str(evil), kind="module", id="0")),
    expert=lambda run, evil: with_env(run, kind="gym", name="CartPole-v1", expert=f"{evil.stem}:plan"),
    expert_module=lambda run, evil: with_env(run, kind="gym", name="CartPole-v1", expert=evil.stem),
    gym_name=lambda run, evil: with_env(run, kind="gym", name=f"{evil.stem}:Env-v0"),
    gym_option=lambda run, evil: with_env(run, kind="gym", name="CartPole-v1", make=dict(inside=[f"{evil.stem}:Env-v0"])),
    suite=lambda run, evil: config(run, suite=dict(base="minigrid_3", env=dict(expert=f"{evil.stem}:plan"))),
    env_of_data=lambda run, evil: config(run, suite=dict(base=dict(base=["/some/data"], gym={"go": f"{evil.stem}:Env-v0"}))),
    spec_of_data=lambda run, evil: config(run, suite=dict(base="/some/data", gym={"go": dict(name="CartPole-v1", expert=evil.stem)})),
    machines=lambda run, evil: config(run, machines="far.example.org,here", num_processes=1))


def settings(run): return dict(run_dir=str(run), suite="dot_2", algo="er", device="cpu", n_trials=1, n_workers=1)
def point(run): return next(p for p in (run/"checkpoints").iterdir() if p.is_dir())
def first_env(run):
    stream = stream_from(read_json(point(run)/"stream.json"), point(run)/"stream.json")
    env = make_env(stream.tasks[0].env)
    env.reset(0)
    env.close()


def evaluate_by_name(run):
    "The folder holds an evaluation that somebody began."
    put(run/"evals/lower-0+1-s0/config.json", dict(n_trials=1))
    main([str(run), "lower-0+1-s0"])


def evaluate_a_suite(run):
    "The evaluation that lies there names a stream of its own."
    put(run/"evals/x/config.json", dict(n_trials=1, suite=dict(base="minigrid_3", env=dict(expert="evil_of_a_stranger:plan"))))
    main([str(run), "x"])


def unfinished(run):
    "Without results, so that the config's own plugins would count."
    for name in ("done.json", "log.jsonl", "episodes.jsonl"): (run/name).unlink()
    shutil.rmtree(run/"checkpoints")
    config(run, plugins=["evil_of_a_stranger"])
    return run


def to_lerobot(run):
    pytest.importorskip("lerobot")
    if run.name not in ("plugin_file", "expert"): return   # it takes a second each
    from clvla.run.lerobot.commands import lerobot_folder
    lerobot_folder(point(run), run.parent/"lerobot")


# (name, what a user does with a folder, whether it has to open also where the folder brings code)
DOORS = [
    ("resume by command", lambda run: main([str(run)]), False),
    ("resume from a page", lambda run: resolve(TrainConfig.of(**settings(run))), False),
    ("resume with the stored settings", lambda run: run_learner(read_config(run)), False),
    ("begin what has no results", lambda run: resolve(read_config(unfinished(run))), False),
    ("begin by command what has no results", lambda run: main([str(unfinished(run))]), False),
    ("practise there", lambda run: resolve_practice(PracticeConfig(run_dir=str(run), suite="dot_2")), False),
    ("check an evaluation", lambda run: check_eval(EvalConfig(run_dir=str(run), n_trials=1)), False),
    ("evaluate", lambda run: eval_cl(EvalConfig(run_dir=str(run), n_trials=1), len), False),
    ("evaluate by command", evaluate_by_name, False),
    ("evaluate a suite of the folder's", evaluate_a_suite, False),
    ("evaluate what was begun there", lambda run: [put(run/"evals/x/config.json", dict(n_trials=1)), eval_named(run, "x")], False),
    ("an environment of its stream", first_env, None),
    ("its status and table", lambda run: [Run.open(run).status, Run.open(run).table()], True),
    ("its figures", lambda run: Run.open(run).plots(), True),
    ("follow it", lambda run: Run.open(run).follow(), True),
    ("its report", finish, True),
    ("compare it", lambda run: read_run(run).scores, True),
    ("keep it", pack, True),
    ("its fingerprint", fingerprint, True),
    ("its policy", lambda run: load_policy(point(run)), True),
    ("its weights as a start", lambda run: init_weights(make_policy("tiny", state_dim=2, action_dim=2, D=32), point(run)), True),
    ("its token", lambda run: pytest.raises(ValueError, read_token, run), True),
    ("LeRobot's folder of it", to_lerobot, True)]


@pytest.fixture
def stranger(sent, tmp_path, monkeypatch):
    "A user with another home; `bring` makes the folder that somebody sent, `marker` is what its code writes."
    monkeypatch.setenv("HOME", str(tmp_path/"home"))
    for name in (APPROVED, "CLVLA_STATE", "XDG_STATE_HOME"): monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    evil, marker = tmp_path/"path/evil_of_a_stranger.py", tmp_path/"marker"
    evil.parent.mkdir()
    evil.write_text(f"# this is what the stranger wants\nfrom pathlib import Path\nPath({str(marker)!r}).write_text('it ran')\nplan = None\n")
    monkeypatch.syspath_prepend(evil.parent)

    def bring(how, name="run"):
        run = shutil.copytree(sent/"run", tmp_path/name)
        BRINGS[how](run, evil)
        return run
    return bring, marker, evil


@pytest.mark.parametrize("door,opens", [door[1:] for door in DOORS], ids=[door[0] for door in DOORS])
def test_no_door_runs_what_a_stranger_sent(stranger, door, opens, capfd):
    bring, marker, _ = stranger
    for how in BRINGS:
        run = bring(how, how)
        if opens: door(run)
        elif opens is None and not how.startswith(("expert", "gym")): door(run)
        else:
            with pytest.raises(ValueError, match="is data, not code.*-p trust True"): door(run)
        assert not marker.exists(), how
        assert "evil_of_a_stranger" not in sys.modules


@pytest.mark.parametrize("how", BRINGS)
def test_the_refusal_says_what_would_have_run_and_from_where(stranger, how):
    bring, _, evil = stranger
    run = bring(how)
    expected = dict(plugin_file=f"file plugins/mine.py sha256 {sha256(evil)}", machines="host far.example.org,here").get(how, evil.stem)
    with pytest.raises(ValueError) as e: check_code(run)
    assert expected in str(e.value) and str(run) in str(e.value) and "\n" not in str(e.value)


def command(run, home, *words, **more):
    return subprocess.run([sys.executable, "-m", "clvla.run", *words, str(run)], env=environment(home, **more), capture_output=True, text=True)


def test_with_trust_it_runs_after_it_was_shown(stranger, tmp_path):
    bring, marker, evil = stranger
    run = bring("plugin_file")
    p = command(run, tmp_path/"home", "--trust")
    assert p.returncode == 0 and marker.exists(), p.stderr[-2000:]
    shown, ran = p.stdout.index(sha256(evil)), p.stdout.index("this run is finished")
    assert shown < ran and "# this is what the stranger wants" in p.stdout and str(run/"plugins/mine.py") in p.stdout
    marker.unlink()
    assert command(run, tmp_path/"home").returncode == 1 and not marker.exists()      # the word was for that start
    assert "trust" not in read_json(run/"config.json")


def test_a_page_with_trust_passes_the_word_to_its_processes(stranger, capsys, monkeypatch):
    bring, marker, evil = stranger
    run = bring("plugin_file")
    monkeypatch.setenv(APPROVED, "{}")
    assert resolve(TrainConfig.of(trust=True, **settings(run))).trust and marker.exists()
    assert sha256(evil) in capsys.readouterr().out
    marker.unlink()
    p = command(run, os.environ["HOME"], **{APPROVED: os.environ[APPROVED]})   # as a child of the page is started
    assert p.returncode == 0 and marker.exists() and sha256(evil) not in p.stdout, p.stderr[-2000:]
    other = bring("plugin_file", "other")
    with pytest.raises(ValueError, match="is data, not code"): check_code(other)


@pytest.mark.parametrize("file", ["config.json", "evals/x/config.json"])
def test_a_folder_cannot_bring_the_word_along(stranger, sent, tmp_path, file):
    run = shutil.copytree(sent/"run", tmp_path/"run")
    put(run/file, (read_json(run/file) if (run/file).exists() else {}) | dict(trust=True))
    with pytest.raises(ValueError, match="sets 'trust', which counts only where a run is started"):
        read_config(run) if file == "config.json" else eval_named(run, "x")


def test_the_owner_goes_on_and_a_moved_folder_asks_once(sent, tmp_path):
    p = command(sent/"run", sent)
    assert p.returncode == 0 and "this run is finished" in p.stdout, p.stderr[-2000:]
    moved = shutil.copytree(sent/"run", tmp_path/"moved")
    p = command(moved, sent)
    assert p.returncode == 1 and f"it was begun at {sent/'run'}" in p.stderr and not p.stderr.count("evil")
    assert "another user or machine began it" in command(sent/"run", tmp_path, CLVLA_STATE=str(other_key(tmp_path))).stderr


def other_key(tmp_path):
    "A folder with another user's key."
    (tmp_path/"state").mkdir()
    (tmp_path/"state/key").write_bytes(bytes(32))
    (tmp_path/"state/key").chmod(0o600)
    return tmp_path/"state"


def test_the_owners_folder_with_a_name_added_by_somebody_is_refused(sent, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(sent))
    for name in (APPROVED, "CLVLA_STATE", "XDG_STATE_HOME"): monkeypatch.delenv(name, raising=False)
    home = tmp_path/"kept"
    shutil.copytree(sent/"run", home)
    try:
        check_code(sent/"run")
        with_env(sent/"run", kind="gym", name="CartPole-v1", expert="evil_of_a_stranger:plan")
        with pytest.raises(ValueError, match="it names more than when this user began it.*evil_of_a_stranger:plan"): check_code(sent/"run")
        note = read_json(sent/"run/begun.json")
        put(sent/"run/begun.json", note | dict(code=[*note["code"], "module evil_of_a_stranger:plan"]))
        with pytest.raises(ValueError, match="another user or machine began it"): check_code(sent/"run")
    finally:
        shutil.rmtree(sent/"run")
        shutil.copytree(home, sent/"run")


def test_links_that_lead_out_are_not_written_through(stranger, sent, tmp_path):
    thesis = tmp_path/"thesis.tex"
    thesis.write_text("years of work")
    for name in ("reserve", "log.jsonl", "run.lock", "evals"):
        run = shutil.copytree(sent/"run", tmp_path/name)
        put(run/"plugins.json", [])
        (run/name).unlink(missing_ok=True)
        (run/name).symlink_to(thesis)
        with pytest.raises(ValueError, match=f"link {name} -> .*thesis.tex"): check_eval(EvalConfig(run_dir=str(run), n_trials=1))
        with pytest.raises(ValueError, match=f"link {name} -> .*thesis.tex"): main([str(run)])
    for name in ("reserve", "run.lock"):
        (tmp_path/f"empty-{name}").mkdir()
        (tmp_path/f"empty-{name}"/name).symlink_to(thesis)
        with pytest.raises(ValueError, match="is not empty"): RunFolder(tmp_path/f"empty-{name}").begin(read_config(sent/"run"))
    assert thesis.read_text() == "years of work"


def test_a_run_that_brings_nothing_needs_no_word(stranger, sent, tmp_path):
    run = shutil.copytree(sent/"run", tmp_path/"plain")
    put(run/"plugins.json", [])
    check_code(run)
    door = dict(kind="gym", name="clvla.envs.gym.doors:Door-v0", max_steps=9, expert="clvla.envs.gym.doors:plan")
    stream = Stream("doors", [Task("a", "a", "now: go", door), Task("b", "b", "b", dict(kind="minihack", name="minihack:MiniHack-Room-5x5-v0"))])
    assert stream_from(json.loads(json.dumps(stream_json(stream)))) == stream
    data = dict(base=["hf:lab/data", "/a:b"], gym={"go: now": "CartPole-v1"}, minihack={"go": "minihack:MiniHack-Room-5x5-v0"},
                libero=True, layouts={"/a:b": dict(cameras={"top": "observation.images.top"})})
    source = dict(kind="lerobot", parts=[dict(path="hf:lab/data", task_index=[0])])
    assert code_of(dict(suite=data, tasks=[dict(source=source, env=door)], init_from="/x:y", runner_kw={}, machines="")) == []


def test_a_message_keeps_to_its_line(stranger, sent, tmp_path):
    bring, _, evil = stranger
    run = bring("plugin_file")
    evil.write_text("# \x1b[2K\x1b[1A nothing to see\n")
    plugin_file(run, evil)
    said = []
    check_code(run, trust=True, say=said.append)
    assert "\x1b" not in said[0] and "\\x1b[2K" in said[0]
    run = shutil.copytree(sent/"run", tmp_path/"lines")
    with_env(run, kind="gym", expert="evil:\n all is well\x1b[1A")
    with pytest.raises(ValueError) as e: check_code(run)
    assert "\n" not in str(e.value) and "\x1b" not in str(e.value)


def test_what_the_user_names_later_is_the_users(sent, tmp_path, monkeypatch):
    "An evaluation that the owner begins, on a stream that names a module: its child may run that, and only that."
    from clvla.core.trust import claim, refused
    monkeypatch.setenv("HOME", str(sent))
    for name in (APPROVED, "CLVLA_STATE", "XDG_STATE_HOME"): monkeypatch.delenv(name, raising=False)
    begin_eval(check_eval(EvalConfig(run_dir=str(sent/"run"), n_trials=1)))
    check_code(sent/"run")
    suite = code_of(dict(suite=dict(base="minigrid_3", env=dict(expert="my_lab.arm:plan"))))
    assert suite == refused(sent/"run", suite) == ["module my_lab.arm:plan"]
    before = (sent/"run/begun.json").read_bytes()
    claim(sent/"run", suite)
    assert refused(sent/"run", [*suite, "module other:plan"]) == ["module other:plan"] and APPROVED not in os.environ
    (sent/"run/begun.json").write_bytes(before)
    other = shutil.copytree(sent/"run", tmp_path/"copy")   # not the user's: the word counts for this process and its children alone
    claim(other, suite)
    assert refused(other, suite) == [] and (other/"begun.json").read_bytes() == before


def test_without_a_home_a_run_begins_and_asks_later(sent, tmp_path):
    "A container whose user has no home: begun and gone on with in one start; later it needs the word."
    home = tmp_path/"nowhere"
    home.write_text("a file")   # nothing can be kept below it
    shutil.copy(sent/"mine.py", tmp_path)
    code = BEGIN.replace("write_json(run.path/\"done.json\", {})", """write_json(run.path/"done.json", {})
import subprocess
print(subprocess.run([sys.executable, "-m", "clvla.run", str(run.path)], capture_output=True, text=True))""")
    p = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment(home), capture_output=True, text=True)
    assert p.returncode == 0 and "cannot be marked as begun here" in p.stdout and "this run is finished" in p.stdout, p.stdout+p.stderr
    p = command(tmp_path/"run", home)
    assert p.returncode == 1 and "-p trust True" in p.stderr


@pytest.mark.parametrize("change", [dict(mode=0o644), dict(size=31)])
def test_a_key_that_others_can_read_signs_nothing(tmp_path, monkeypatch, change):
    from clvla.core.trust import foreign, note_code
    monkeypatch.setenv("CLVLA_STATE", str(tmp_path/"state"))
    assert note_code(tmp_path/"run", [], new=True) == "" and foreign(tmp_path/"run") == ""
    key = tmp_path/"state/key"
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(change.get("mode", 0o600))
    if "size" in change: key.write_bytes(bytes(change["size"]))
    assert "remove it, and a new one is drawn" in foreign(tmp_path/"run") and "remove it" in note_code(tmp_path/"new", [], new=True)


def test_stop_ends_no_process_that_a_folder_only_names(sent, tmp_path, stranger):
    "console.txt of a stranger's may name any process of the user's."
    import platform
    run = shutil.copytree(sent/"run", tmp_path/"run")
    (run/"done.json").unlink()
    p = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        started = dict(phase="started", pid=p.pid, host=platform.node(), module="python", time=9e9, since="now")
        (run/"console.txt").write_text("@"+json.dumps(started)+"\n")
        with pytest.raises(ValueError, match="was left alone"): Run.open(run).stop()
        assert p.poll() is None
    finally:
        p.kill()
        p.wait()


@pytest.mark.parametrize("name", ["../../out", "/out", "a/../../b", "..\\out"])
def test_names_do_not_lead_out_of_folders(name):
    with pytest.raises(ValueError, match="leads out"): Stream("s", [Task(name, "a", "a")])
    with pytest.raises(ValueError, match="leads out"): Stream(name, [Task("a", "a", "a")])


STEPS = [dict(**{"class": "evil_of_a_stranger.Step"}), dict(**{"class": "subprocess.Popen"}, config=dict(args=["true"])),
         dict(**{"class": "lerobot.processor.pipeline.Path"}), dict(registry_name="action_tokenizer_processor", config={})]

@pytest.mark.parametrize("step", STEPS, ids=lambda step: next(iter(step.values())))
def test_stored_steps_of_lerobot_name_no_code(stranger, tmp_path, step):
    pytest.importorskip("lerobot")
    import clvla.run.lerobot.commands  # noqa: F401
    from lerobot.processor import DataProcessorPipeline
    put(tmp_path/"steps/policy_preprocessor.json", dict(name="policy_preprocessor", steps=[dict(config={}) | step]))
    with pytest.raises(ValueError, match="registered|register it|no processor step|trust_remote_code"):
        DataProcessorPipeline.from_pretrained(tmp_path/"steps", config_filename="policy_preprocessor.json")
    assert not stranger[1].exists()


def test_names_in_a_report_are_text(tmp_path):
    from clvla.eval.plots import Table, heatmap, report_html
    from clvla.eval.metrics import from_records
    name = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    record = dict(stage=0, step=None, after=name, task=name, trial=0, success=True, steps=3)
    figure = heatmap(from_records([record], [name], [name]))
    report_html(tmp_path/"r.html", {name: figure, "table": Table([(name, name)], columns=["a", name])}, name)
    text = (tmp_path/"r.html").read_text()
    assert "<script>alert" not in text and "<img src=x" not in text
