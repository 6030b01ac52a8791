"Evaluations under a perturbation: names and strengths, who can change what, records and folders of their own, parts, and a scene that is put back."
import json, shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
import numpy as np, pytest
from clvla.api import Measured
from clvla.command.main import main
from clvla.command.runs import evaluated
from clvla.core.files import read_json
from clvla.core.names import IMAGE, STATE
from clvla.core.seeds import np_rng
from clvla.data.streams import stream_from, stream_json
from clvla.envs.all import kinds, make_env, make_stream, perturbed
from clvla.envs.libero.tasks import SUITES, libero_prompt
from clvla.envs.metaworld.tasks import MT50, metaworld_task
from clvla.envs.kind import PERTURBATIONS, Kind
from clvla.envs.perturb import SYNONYMS, label_of, perturb_of, perturbs_of, reworded, told
from clvla.eval.audit import paragraph
from clvla.eval.compare import group, read_run
from clvla.eval.metrics import from_records
from clvla.eval.player import Player
from clvla.eval.results import read_results
from clvla.run.folder import RunFolder
from clvla.run.stop import Stopped
from clvla.train.checkpoint_eval import eval_cl, parts_of
from clvla.train.config import TrainConfig, resolve
from clvla.train.eval_config import EvalConfig, check_eval, each_of, read_eval_config
from clvla.train.kept_evals import kept_evals
from clvla.train.learner import train_cl
from libero_help import libero_root

# ---------------------------------------------------------------------- names and strengths

@pytest.mark.parametrize("said,found", [("", {}), ("plain", {}), ("light", dict(light=1.)), ("words+camera", dict(camera=1., words=1.)),
    ("start: 2 + light:.5", dict(light=.5, start=2.)), (dict(light=.25), dict(light=.25)), ({}, {})])
def test_what_is_asked_for(said, found):
    assert perturb_of(said) == found and perturb_of(label_of(found)) == found and list(perturb_of(said)) == [n for n in PERTURBATIONS if n in found]

@pytest.mark.parametrize("said,says", [("lihgt", "did you mean 'light'"), ("light:0", "above 0, at most 4"), ("light:-1", "above 0"), ("light:5", "at most 4"), ("light:", "expected a number, as in light:0.5"),
    ("light:nan", "expected a number above 0"), (dict(light=True), "has strength True"), (dict(light="1"), "has strength '1'"), ("camera+light+", None), ("light:much", "expected a number")])
def test_what_cannot_be_meant(said, says):
    if says is None: assert perturb_of(said) == dict(camera=1., light=1.); return
    with pytest.raises(ValueError, match=says): perturb_of(said)

def test_several_evaluations():
    assert perturbs_of("") == perturbs_of("plain") == perturbs_of({}) == perturbs_of([]) == [""]
    assert perturbs_of("plain,light,plain,light:1,light+words") == ["", "light", "light+words"] == perturbs_of(["", "light", dict(words=1, light=1)])
    each = each_of(EvalConfig(perturb="plain,light:.5")); assert [one.name for one in each] == ["lower-0+50-s0", "lower-0+50-s0-under-light0.5"]
    assert EvalConfig(perturb=dict(light=.5)).name == each[1].name
    with pytest.raises(ValueError, match="names 2 evaluations, light, words; take them one after the other"): EvalConfig(perturb="light,words").name

# ---------------------------------------------------------------------- words

def test_other_words_keep_tasks_apart():
    "No sentence of a suite becomes another one's, at no strength; nearly every sentence can change."
    for prompts in ({text for _,text in MT50.values()} | {metaworld_task(i).prompt for i in make_stream("mw10").ids}, {libero_prompt(n) for names in SUITES.values() for n in names}):
        own = {p: {reworded(p, s, np_rng(k)).lower() for k in range(40) for s in (1., 4.)} for p in prompts}
        plain = {p.lower() for p in prompts}
        for p,said in own.items():
            assert not (said & plain)-{p.lower()} and len(said) > 3 and all(not (said & other) for q,other in own.items() if q.lower() != p.lower())

def test_a_sentence_is_a_function_of_task_trial_and_seed():
    task = metaworld_task("open-faucet"); say = lambda trial, seed=0, of=task: told(of, dict(words=1.), trial, seed)
    assert [say(i) for i in range(9)] == [say(i) for i in range(9)] and len({say(i) for i in range(30)}) > 4
    assert [say(i) for i in range(9)] != [say(i, 1) for i in range(9)] and told(task, dict(light=1.), 0) == task.prompt
    exchanged = [np.mean([reworded(task.prompt, s, np_rng(k)).lower() != task.prompt.lower() for k in range(200)]) for s in (.2, 1., 3.)]
    assert exchanged == sorted(exchanged) and exchanged[-1] == 1 and not set(SYNONYMS.values()) & {"push", "pull"}

# ---------------------------------------------------------------------- who can change what

@pytest.mark.parametrize("suite,perturb,says", [("dot_2", "camera", "task 'left': the dot cannot change its camera, only light, start, words, distractors; leave camera out"),
    ("mw5", "camera+words", None), ("libero_goal", "distractors", None), (dict(base="libero_goal", num_tasks=1, env=dict(protocol="published")), "distractors", "LIBERO cannot change its distractors, only camera"),
    ("minigrid_3", "words", "cannot change its words, only nothing")])
def test_who_cannot_is_named(suite, perturb, says):
    tasks = make_stream(suite).tasks
    if says is None: assert [t.eval_env["perturb"] for t in perturbed(tasks, perturb_of(perturb))] == [perturb_of(perturb)]*len(tasks); return
    with pytest.raises(ValueError, match=says): perturbed(tasks, perturb_of(perturb))
    with pytest.raises(ValueError, match=says.split(":")[-1].strip()): Player([replace(t, eval_env=t.env|dict(perturb=perturb_of(perturb))) for t in tasks], 1, 1)

def test_no_stream_has_it():
    "Neither training nor the evaluation of a run can be perturbed."
    for field in ("env", "eval_env"):
        with pytest.raises(ValueError, match="has no entry 'perturb'"): make_stream({"base": "dot_2", field: dict(perturb=dict(light=1.))})
    stored = stream_json(make_stream("dot_2")); stored["tasks"][0]["eval_env"] = stored["tasks"][0]["env"] | dict(perturb=dict(light=1.))
    with pytest.raises(ValueError, match="no entry 'perturb'"): make_stream(stream_from(stored))
    assert Kind().perturbs({}) == () and kinds["dot"].perturbs({}) == ("light", "start", "words", "distractors")

def first(name="left", trial=3, seed=0, **perturb):
    with closing(make_env(dict(kind="dot", name=name, perturb=perturb), 24, seed)) as env: return env.reset(trial)

def test_a_change_is_a_function_of_task_trial_and_seed():
    same = lambda a, b: np.array_equal(a[IMAGE], b[IMAGE]) and np.array_equal(a[STATE], b[STATE])
    for name in ("light", "start", "distractors"):
        kw = {name: 1.}; assert same(first(**kw), first(**kw)) and not same(first(**kw), first())
        assert len({first(trial=i, **kw)[IMAGE].tobytes() for i in range(8)}) > 4
    assert np.array_equal(first(light=1., start=1.)[STATE], first(start=1.)[STATE])   # each has a generator of its own
    with closing(make_env(dict(kind="dot", name="left", perturb=dict(light=2., distractors=1.)), 24)) as env:   # what was played before changes nothing
        one = env.reset(3); env.reset(4); assert same(one, env.reset(3))

# ---------------------------------------------------------------------- evaluations

@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    home = tmp_path_factory.mktemp("perturb")
    return train_cl(resolve(TrainConfig(algo="er", suite="dot_2", n_demos=6, steps_per_task=30, batch_size=16, threads=1, image_size=32, model_kw=dict(D=32, n_blocks=1),
                                      evaluate="none", run_dir=str(home/"run"), data_dir=str(home/"data"))), say=len).path

@pytest.fixture
def run(trained, tmp_path): return Path(shutil.copytree(trained, tmp_path/"run"))
def config(run, perturb="", **kw): return EvalConfig(run_dir=str(run), perturb=perturb, **(dict(n_trials=4, n_workers=1, rows_per_task=1, last_only=True) | kw))
def bare(records): return sorted((r["stage"], r["task"], r["trial"], r["success"], r["steps"], r["reward"], r.get("perturb")) for r in records)

def test_records_and_folders_are_its_own(run):
    plain,other = eval_cl(config(run), len),eval_cl(config(run, "start:3+words"), len)
    assert other.path.name == "lower-0+4-s0-last-under-start3+words" and {r["perturb"] for r in other.episodes()} == {"start:3+words"}
    assert all("perturb" not in r for r in plain.episodes()) and [b[4:6] for b in bare(plain.episodes())] != [b[4:6] for b in bare(other.episodes())]
    tasks = read_json(other.path/"stream.json")["tasks"]; assert [t["eval_env"]["perturb"] for t in tasks] == [dict(start=3., words=1.)]*2 and not (plain.path/"stream.json").exists()
    assert len(eval_cl(config(run, dict(words=1, start=3)), len).episodes()) == 8 and len(list((run/"evals").iterdir())) == 2   # the same one, said otherwise
    assert read_eval_config(run, other.path.name).changed == "start:3+words" and read_json(run/"stream.json")["tasks"][0]["eval_env"] is None

def test_they_are_never_mixed(run):
    plain,other,third = (eval_cl(config(run, p), len) for p in ("", "light", "light:2"))
    assert [read_results(str(out.path)).form.partition("stage")[2] for out in (plain, third)] == ["", ", under light:2"]
    mixed,alike = paragraph([read_results(str(out.path)) for out in (plain, third)], []),paragraph([read_results(str(third.path))]*2, [])
    assert "as the tasks are" in mixed and "under light:2): a difference between two of them is one of scenes" in mixed and "one scene" not in alike
    with pytest.raises(ValueError, match="played light and plain; make a matrix of each"): from_records([*plain.episodes(), *other.episodes()], ["left", "right"], ["left", "right"])
    for a,b in ((plain, other), (other, third)):
        with pytest.raises(ValueError, match="differ in evaluation|simulate left in different ways: perturb"): group([read_run(a.path), read_run(b.path)])
        with pytest.raises(ValueError, match="simulate left in different ways: perturb"): group([read_run(a.path), read_run(b.path)], by=("evaluation",))

def test_any_schedule_gives_the_same(run):
    whole = bare(eval_cl(config(run, "words+light", batch=8), len).episodes()); assert len(whole) == 8
    shutil.rmtree(run/"evals"); assert bare(eval_cl(config(run, "words+light", batch=8, n_workers=2), len).episodes()) == whole
    shutil.rmtree(run/"evals"); eval_cl(config(run, "light"), len)   # another one's folder is no part of it
    for a in range(2): eval_cl(config(run, "words+light", part=f"{a}/2"), len)
    said = []; out = eval_cl(config(run, "words+light"), said.append)
    assert bare(out.episodes()) == whole and "8 episodes were played in parts" in said and read_json(out.path/"plan.json")["perturb"] == "light+words"
    assert parts_of(config(run)) == [] and len(parts_of(config(run, "words+light"))) == 2

def test_it_goes_on_after_a_stop(run, monkeypatch):
    whole = bare(eval_cl(config(run, "words"), len).episodes()); shutil.rmtree(run/"evals")
    real,left = RunFolder.episode,iter(range(2))
    def episode(self, r):
        real(self, r)
        if next(left, None) is None: raise Stopped("asked to stop")
    with monkeypatch.context() as m:
        m.setattr(RunFolder, "episode", episode)
        with pytest.raises(Stopped): eval_cl(config(run, "words"), len)
    assert len(RunFolder(config(run, "words").folder).episodes()) == 3 and bare(eval_cl(config(run, "words"), len).episodes()) == whole

@pytest.mark.parametrize("perturb,says", [("camera", "the dot cannot change its camera"), ("lihgt", "did you mean 'light'"), ("light,words", "names 2 evaluations")])
def test_refused_at_the_door(run, perturb, says):
    with pytest.raises(ValueError, match=says): check_eval(config(run, perturb))
    assert not (run/"evals").exists()

def test_on_another_stream_and_on_some_tasks(run):
    out = eval_cl(config(run, "light", suite="dot_3", tasks="up,left"), len)
    assert {r["task"] for r in out.episodes()} == {"up", "left"} and {r["perturb"] for r in out.episodes()} == {"light"} and "-under-light-on-dot_3-up+left" in out.path.name

def test_the_command_plays_one_after_the_other(run, capsys):
    words = ["eval", str(run), "--n_trials", "2", "--n_workers", "1", "--last_only", "True", "--perturb"]
    assert main([*words, "light,camera"]) != 0 and "cannot change its camera" in capsys.readouterr().err and not (run/"evals").exists()
    assert main([*words, "plain,light"]) == 0; text = capsys.readouterr().out; assert "of plain" in text and text.strip().endswith("-last-under-light")
    facts,_ = evaluated({one.changed: Measured(one.folder, one.folder if one.changed else run) for one in each_of(config(run, "plain,light", n_trials=2))})
    assert json.dumps(facts) and set(facts["evaluations"]) == {"plain", "light"} and facts["evaluations"]["light"]["trials"] == [[0, 0], [2, 2]]

def test_kept_lines_are_not_played_again(trained, tmp_path, monkeypatch):
    cfg = RunFolder(shutil.copytree(trained, tmp_path/"run")).cfg; cfg = replace(cfg, run_dir=str(tmp_path/"run"))
    evals,file = each_of(EvalConfig(n_trials=2, last_only=True, perturb="plain,light")),tmp_path/"kept.jsonl"
    made = kept_evals({"a": cfg}, evals, file); assert list(made) == [("a", ""), ("a", "light")] and len(file.read_text().splitlines()) == 2
    shutil.rmtree(tmp_path/"run"); monkeypatch.setattr("clvla.train.kept_evals._made", None)
    again = kept_evals({"a": cfg}, evals, file)
    assert {k: r.matrix.k.tolist() for k,r in again.items()} == {k: r.matrix.k.tolist() for k,r in made.items()} and again["a", "light"].envs["left"]["perturb"] == dict(light=1.)
    for other in (replace(cfg, seed=5), replace(cfg, lr=.5)):
        with pytest.raises(TypeError): kept_evals({"a": other}, evals, file)
    with pytest.raises(TypeError): kept_evals({"a": cfg}, [replace(evals[0], n_trials=3)], file)
    with pytest.raises(ValueError, match="two evaluations are plain"): kept_evals({"a": cfg}, [evals[0], replace(evals[0], first_trial=10)], file)   # one would hide the other

# ---------------------------------------------------------------------- MuJoCo

@pytest.fixture(scope="module")
def scene():
    from clvla.envs.metaworld.kind import MetaWorldScene
    env = make_env(metaworld_task("press-left").env, 24); env.reset(0)
    yield MetaWorldScene(env)
    env.close()

@pytest.mark.parametrize("name", ["camera", "light", "distractors"])
def test_a_scene_is_put_back(scene, name):
    "To the bit, also after two changes on top of each other; the physics never changes."
    env,plain = scene.env,scene.env.reset(0)[IMAGE]; where = env.sim.data.qpos.copy()
    for k in range(2): getattr(scene, name)(1., np_rng(k, name))
    once = env.render(); assert (once != plain).any() and np.array_equal(env.sim.data.qpos, where)
    scene.plain(); assert np.array_equal(env.render(), plain) and not scene.undo
    weak,strong = [],[]
    for s,into in ((.3, weak), (1.5, strong)):
        for k in range(6): getattr(scene, name)(s, np_rng(k, name)); into.append(np.abs(env.render().astype(int)-plain).mean()); scene.plain()
    assert np.mean(weak) < np.mean(strong)

def test_an_arm_that_was_driven_plays_a_whole_episode(scene):
    env = scene.env; env.reset(1); before = env.state; scene.start(1., np_rng(0))
    assert .01 < np.linalg.norm((env.state-before)[:3]) < .1 and (env.t, env.ended, env.sim.curr_path_length) == (0, False, 0)
    while not env.ended: *_,success,terminated,truncated = env.step(env.expert())
    assert terminated and not truncated

@pytest.mark.parametrize("protocol,perturb", [("fast", dict(camera=1., light=1.)), ("fast", dict(start=1., distractors=1.)), ("published", dict(camera=1., light=1.))])
def test_libero(protocol, perturb):
    "What is drawn changes under both protocols, what the arm feels with `start` alone; a trial is the same one again."
    libero_root()
    def begun(*trials, **kw):
        spec = make_stream("libero_goal").tasks[0].env | dict(protocol=protocol, cameras=["front", "wrist"], **kw)
        with closing(make_env(spec, 48)) as env: return [env.reset(trial) for trial in trials][-1]
    plain,one,again = begun(1),begun(1, perturb=perturb),begun(1, 2, 1, perturb=perturb)
    assert np.abs(one[IMAGE].astype(int)-plain[IMAGE]).mean() > 1 and all(np.array_equal(one[k], again[k]) for k in one)
    assert np.array_equal(one[STATE], plain[STATE]) == ("start" not in perturb) and np.abs(one[STATE]-plain[STATE])[:3].max() < .1
