"Axes that hardly move, statistics of a first task, data sets that mean different things, and environments for somebody's data sets."
from importlib.util import find_spec
import json
from pathlib import Path
import numpy as np
import pytest
from clvla.core.names import ACTION, IMAGE, PROMPT, STATE
from clvla.core.files import read_json
from clvla.core.seeds import np_rng
from clvla.data.demos import record_one
from clvla.data.frames import write_store
from clvla.data.lerobot_write import write_lerobot
from clvla.data.mixtures import check_mixture, reading_lines
from clvla.data.partition import lerobot_tasks, partitions
from clvla.data.stats import Processor, array_stats, centre_scale, check_stats, compute_stats, unreached
from clvla.data.streams import Stream
from clvla.envs.all import make_env, make_stream
from clvla.eval.metrics import bwt, from_records
from clvla.train.checks import check_tried, remarks
from clvla.train.config import TrainConfig, resolve
from clvla.train.eval_config import EvalConfig
from clvla.train.checkpoint_eval import eval_cl
from clvla.train.learner import train_cl
from clvla.train.prepare import check

MODES = ("mean_std", "min_max", "quantiles")


# axes that hardly move

def axes(**columns):
    "Statistics of named columns, as a frame store holds them."
    return array_stats(np.stack(list(columns.values()), 1).astype(np.float32))

def furthest(stats, mode, x):
    c,k = centre_scale(stats, mode)
    return [abs(float((v-a)/b)) if b else 0. for v,a,b in zip(x, c, k)]

@pytest.mark.parametrize("mode", MODES)
def test_rounding_is_no_unit(mode):
    g = np.random.default_rng(0)
    at = dict(joint=1.5696, far=1e4, negative=-.7, two=1.)
    noise = dict(joint=1e-7*g.normal(size=1000), far=1e-3*g.normal(size=1000), negative=5e-8*g.normal(size=1000), two=1e-7*(np.arange(1000) % 2))
    stats = axes(**{k: v+noise[k] for k,v in at.items()})
    assert max(furthest(stats, mode, [v+.1 for v in at.values()])) < 1e3
    assert centre_scale(stats, mode)[0] == pytest.approx(list(at.values()), rel=1e-6)

@pytest.mark.parametrize("mode", MODES)
def test_real_motion_keeps_its_numbers(mode):
    g = np.random.default_rng(0)
    x = dict(micro=1e-6*g.normal(size=1000), ticks=g.integers(0, 5, 1000), count=1e5+g.integers(0, 9, 1000), wide=1e6*g.normal(size=1000),
             constant=np.full(1000, 3.), binary=np.sign(g.normal(size=1000)), offset=10+1e-3*g.normal(size=1000))
    s = {k: np.asarray(v, np.float64) for k,v in axes(**x).items() if k not in ("constant", "binary")}
    plain = dict(mean_std=(s["mean"], s["std"]), min_max=((s["max"]+s["min"])/2, (s["max"]-s["min"])/2), quantiles=((s["q99"]+s["q01"])/2, (s["q99"]-s["q01"])/2))[mode]
    c,k = centre_scale(axes(**x), mode)
    for i,name in enumerate(x):
        if name == "constant": assert (c[i], k[i]) == (3., 0.)
        elif name == "binary": assert (c[i], k[i]) == (0., 1.)
        else: assert (c[i], k[i]) == (plain[0][i], plain[1][i]), name

@pytest.mark.parametrize("noise", [0., 1e-9, 1e-7, 1e-6, 1e-4])
@pytest.mark.parametrize("share", [1, 9])
def test_rare_moves_stay_in_sight_of_quantiles(noise, share):
    x = noise*np.random.default_rng(1).normal(size=1000)
    x[:share] = 1.
    stats = axes(spike=x)
    assert max(furthest(stats, "quantiles", [1.])+furthest(stats, "quantiles", [-1.])) < 1e3
    act = Processor({STATE: stats, ACTION: stats}, action_norm="quantiles")
    y = act({ACTION: x[:,None].astype(np.float32)})[ACTION]
    assert np.abs(act.unnormalise(y.numpy())[:,0]-x.astype(np.float32)).max() < 1e-4*(1+noise)

def test_statistics_that_are_no_numbers_are_named():
    bad = np.zeros((5, 2)); bad[3,1] = np.nan
    with pytest.raises(ValueError, match="found nan in frame 3, axis 1"): array_stats(bad)
    good = axes(a=np.arange(5.))
    with pytest.raises(ValueError, match="'q99' is"): check_stats({STATE: good, ACTION: good | dict(q99=[float("nan")])})


# statistics of the first task


def store(path, action, state=None):
    n = len(action)
    return write_store(path, [{IMAGE: np.zeros((n, 8, 8, 3), np.uint8), STATE: np.zeros((n, 1), np.float32) if state is None else state,
                               ACTION: np.asarray(action, np.float32).reshape(n, -1), PROMPT: "go"}])

ramp = np.linspace(-1, 1, 40)
@pytest.mark.parametrize("first,later,found", [
    (np.full(40, .5), ramp, True), (np.full(40, .5), np.full(40, .6), True), (.01*ramp, ramp, True), (np.sign(ramp), ramp, True),
    (np.full(40, .5), .5+1e-8*ramp, False), (ramp, np.full(40, .5), False), (.5*ramp, ramp, False), (np.sign(ramp), np.ones(40), False)])
def test_a_later_task_beyond_the_first_ones_statistics(tmp_path, first, later, found):
    a,b = store(tmp_path/"a", first),store(tmp_path/"b", later)
    for mode in MODES: assert bool(unreached(Processor(compute_stats(a), action_norm=mode), b)) == found, mode
    assert not unreached(Processor(compute_stats([a, b])), b) and not unreached(Processor(compute_stats(a), action_norm="identity"), b)

def test_a_state_that_stood_still_is_named(tmp_path):
    a,b = (store(tmp_path/n, ramp, s[:,None].astype(np.float32)) for n,s in (("a", 0*ramp+2), ("b", ramp)))
    assert [(key, axis, x) for key,axis,x,_ in unreached(Processor(compute_stats(a)), b)] == [(STATE, 0, [2., 2.])]


# data sets that mean different things

def data_set(path, prompt="open", fps=10, size=(16, 16), S=2, A=2, cams=("front",), columns=None, **info):
    "A data set of one episode; `columns`: other names of its columns, `info`: other entries of meta/info.json, `names_ACTION` those of a feature."
    ep = {f"observation.images.{c}": np.zeros((4, *size, 3), np.uint8) for c in cams}
    if IMAGE not in ep: ep = {IMAGE: ep[f"observation.images.{cams[0]}"]} | ep
    ep |= {STATE: np.zeros((4, S), np.float32), ACTION: np.zeros((4, A), np.float32)}
    path = write_lerobot(path, [{**ep, PROMPT: p} for p in ([prompt] if isinstance(prompt, str) else prompt)], fps, "png")
    file = path/"meta/info.json"
    d = read_json(file)
    if "front" not in cams: columns = {IMAGE: None} | (columns or {})
    for old,new in (columns or {}).items():
        f = d["features"].pop(old)
        if new: d["features"][new] = f
    for key in (STATE, ACTION):
        if key in info and key in d["features"]: d["features"][key]["names"] = info.pop(key)
    file.write_text(json.dumps(d | info))
    return str(path)

def stream_of(*paths, **d): return make_stream(dict(base=list(paths), **d))

@pytest.mark.parametrize("a,b,word,said", [
    (dict(fps=10), dict(fps=30), "fps", "frames a second: 10 and 30"), (dict(fps=10), dict(fps=9.99), "fps", "10 and 9.99"),
    (dict(cams=("top",)), dict(cams=("wrist",)), "", "front = observation.images.top and front = observation.images.wrist"),
    (dict(cams=("top", "wrist")), dict(cams=("wrist", "top")), "", "differ in cameras"), (dict(cams=("front", "wrist")), dict(), "", "differ in cameras"),
    (dict(), dict(columns={IMAGE: "observation.image"}), "", "front = observation.image"), (dict(size=(16, 16)), dict(size=(12, 16)), "shape", "pictures of front"),
    (dict(S=3), dict(S=4), "", "numbers in 'observation.state': 3 and 4"), (dict(A=3), dict(A=4), "", "numbers in 'action': 3 and 4"),
    (dict(robot_type="panda"), dict(robot_type="so101"), "robot", "panda and so101"),
    ({ACTION: ["x", "y"]}, {ACTION: {"motors": ["y", "x"]}}, "names", r"\['x', 'y'\] and \['y', 'x'\]"), ({STATE: ["x", "y"]}, {STATE: ["j1", "j2"]}, "names", "j1")])
def test_data_sets_that_differ(tmp_path, a, b, word, said):
    stream = stream_of(data_set(tmp_path/"a", **a), data_set(tmp_path/"b", "close", **b))
    with pytest.raises(ValueError, match=said) as e: check_mixture(stream)
    assert str(tmp_path/"a") in str(e.value) and str(tmp_path/"b") in str(e.value)
    if word: assert [line.startswith(f"accepted ({word})") for line in check_mixture(stream, word)] == [True]
    same = stream_of(data_set(tmp_path/"c"), data_set(tmp_path/"d", "open"))   # two parts of one task
    with pytest.raises(ValueError, match="differ in"): check_mixture(Stream("parts", [same.tasks[0].__class__("x", "x", "open", None, dict(kind="lerobot", parts=[
        t.source["parts"][0] for t in stream.tasks]))]))

@pytest.mark.parametrize("a,b", [(dict(), dict()), (dict(fps=10), dict(fps=10.)), (dict(robot_type="panda"), dict()), ({STATE: ["x", "y"]}, {STATE: ["state"]}),
                                 ({STATE: ["x", "y"]}, {STATE: {"motors": ["x", "y"]}}), (dict(size=(16, 16)), dict(size=(32, 32))),
                                 (dict(cams=("front", "wrist")), dict(cams=("wrist", "front")))])
def test_data_sets_that_mean_the_same(tmp_path, a, b):
    assert check_mixture(stream_of(data_set(tmp_path/"a", **a), data_set(tmp_path/"b", "close", **b))) == []

def test_columns_are_mapped_and_said(tmp_path):
    a = data_set(tmp_path/"a", cams=("top",))
    b = data_set(tmp_path/"b", "close", cams=("wrist", "side"), columns={STATE: "observation.joints"})
    with pytest.raises(ValueError, match="'layouts'"): check_mixture(stream_of(a, b))
    layouts = {"a": dict(cameras=dict(front="observation.images.top")),
               b: dict(cameras=dict(front="observation.images.wrist"), columns=dict(state="observation.joints"))}
    stream = stream_of(a, b, layouts=layouts)
    assert check_mixture(stream) == [] and make_stream(stream) == stream
    assert [any(w in line for line in reading_lines(stream)) for w in ("front = observation.images.top", "observation.state = observation.joints")] == [True, True]
    assert stream.tasks[1].source["parts"][0]["layout"]["columns"] == {STATE: "observation.joints"}   # stored in stream.json
    for wrong,said in (({"c": {}}, "nothing is read"), ({"a": dict(camera={})}, "did you mean 'cameras'")):
        with pytest.raises(ValueError, match=said): stream_of(a, b, layouts=wrong)

def test_folders_of_one_name_are_named_whole(tmp_path):
    a,b = data_set(tmp_path/"x/a"),data_set(tmp_path/"y/a", "close")
    with pytest.raises(ValueError, match="by its whole path"): stream_of(a, b, layouts={"a": {}})
    assert stream_of(a, b, layouts={b: dict(cameras=dict(front=IMAGE))}).tasks[1].source["parts"][0]["layout"]


# environments for data sets

@pytest.fixture(scope="module")
def east(tmp_path_factory):
    "Data sets of the dot in words of their own: one with two instructions, and one with the dot's own words."
    root = tmp_path_factory.mktemp("east")
    def episodes(name, prompt, n):
        env = make_env(dict(kind="dot", name=name, prompt=prompt), 32)
        return [record_one(env, 10**6+i, np_rng(0, i), 0., 1) for i in range(n)]
    write_lerobot(root/"ways", episodes("right", "go east", 3)+episodes("left", "go west", 3), 10, "png")
    write_lerobot(root/"own", episodes("right", "Move the dot to the right.", 2)+episodes("left", "move the dot to the left", 2), 10, "png")
    return root

def task(path, **kw): return dict(data=str(path), **kw)
RIGHT,LEFT = dict(kind="dot", name="right", max_steps=20),dict(kind="dot", name="left", max_steps=20)

def config(root, path, suite, **kw):
    small = dict(algo="er", steps_per_task=3, n_trials=2, rows_per_task=1, n_workers=1, batch_size=8, warmup=1, image_size=32, device="cpu", chunk=4, threads=1)
    return resolve(TrainConfig(suite=suite, run_dir=str(path), data_dir=str(root/"data"), **(small | kw)))

def test_data_sets_are_tried_and_tried_again_under_the_same_names(east, tmp_path):
    suite = dict(tasks=[task(east/"ways", prompt="go east", env=RIGHT), task(east/"ways", task_index=1, env=LEFT)])
    lines = []
    run = train_cl(config(east, tmp_path/"run", suite), say=lines.append)
    matrix = lambda folder: from_records(folder.episodes(), ["go-east", "go-west"], ["go-east", "go-west"])
    assert np.isfinite(matrix(run).R[np.tril_indices(2)]).all() and np.isfinite(bwt(matrix(run)).value)
    assert any("is told 'go east'" in line for line in lines)
    later = eval_cl(EvalConfig(run_dir=str(run.path), n_trials=3, n_workers=1), say=len)
    assert {r["task"] for r in later.episodes()} == {"go-east", "go-west"} and np.isfinite(bwt(matrix(later)).value)
    elsewhere = eval_cl(EvalConfig(run_dir=str(run.path), suite=suite | dict(eval_env=dict(max_steps=5)), n_trials=2, n_workers=1), say=len)
    assert {r["task"] for r in elsewhere.episodes()} == {"go-east", "go-west"} and max(r["steps"] for r in elsewhere.episodes()) <= 5

def test_a_kinds_name_says_where_data_sets_are_tried(east):
    s = stream_of(east/"own", dot=True)
    assert s.ids == ["right", "left"] and s.tasks[0].prompt == "Move the dot to the right." and s.tasks[0].source["kind"] == "lerobot"
    s = stream_of(east/"ways", dot={"go east": "right", "go-west": dict(name="left", max_steps=9)})
    assert [t.env["name"] for t in s.tasks] == ["right", "left"] and s.ids == ["go-east", "go-west"]
    for suite,said in ((dict(base=str(east/"ways"), metaworld=True), "is no instruction of Meta-World"), (dict(base="dot_2", metaworld=True), "is made of none"),
                       (dict(base=str(east/"ways"), dot={"go up": "up"}), "names a task 'go up'"), (dict(base=str(east/"ways"), gym=True), "no instruction of Gymnasium"),
                       (dict(base=str(east/"ways"), partition="by_dataset", dot=True), "several instructions"),
                       (dict(tasks=[task(east/"ways", env=RIGHT)]), "has 2 instructions"), (dict(tasks=[task(east/"ways", prompt="go eats", env=RIGHT)]), "did you mean 'go east'"),
                       (dict(tasks=[task(east/"ways", prompt="go east", env=RIGHT | dict(prompt="walk"))]), "has the prompt 'walk', its frames say 'go east'"),
                       (dict(tasks=[task(east/"ways", task_index=7)]), "has no task_index 7"), (dict(tasks=[task(east/"ways", env=dict(kind="dot"), prompt="go east")]), "lacks 'name'"),
                       (dict(tasks=[dict(prompt="go east")]), "needs 'data'"), (dict(tasks=[]), "needs 'base'")):
        with pytest.raises(ValueError, match=said): make_stream(suite)

def test_metaworlds_sentences_name_its_tasks(tmp_path):
    s = stream_of(data_set(tmp_path/"mw", ["Push and close a window", "press a button."], S=4, A=4), metaworld=True)
    assert s.ids == ["window-close", "button-press"] and [t.env["kind"] for t in s.tasks] == ["metaworld"]*2
    with pytest.raises(ValueError, match="'push-back', 'push'"): stream_of(data_set(tmp_path/"two", "Push the puck to a goal"), metaworld=True)

@pytest.mark.parametrize("data,env,accept,said", [
    (dict(S=3), {}, "", "3 numbers in 'observation.state', the environment 2"), (dict(A=3), {}, "", "3 numbers in 'action', the environment 2"),
    (dict(cams=("front", "wrist")), {}, "", "pictures of wrist, the environment draws front"), (dict(fps=30), {}, "fps", "has 30 frames a second"),
    (dict(), dict(discrete=True), "", "2 numbers in 'action', the environment 1")])
def test_data_that_do_not_fit_their_environment(tmp_path, data, env, accept, said):
    path = data_set(tmp_path/"a", "go east", **data)
    suite = dict(tasks=[task(path, env=RIGHT | env)])
    with pytest.raises(ValueError, match=said): check(config(tmp_path, tmp_path/"run", suite))
    if accept: assert any(line.startswith("accepted") for line in remarks(config(tmp_path, tmp_path/"run", suite, accept=accept), make_stream(suite)))
    assert check_tried(make_stream(dict(tasks=[task(data_set(tmp_path/"b", "go east", cams=("front", "wrist")), env=RIGHT | dict(cameras=["front", "wrist"]))])).tasks[0], 32)

def test_actions_beyond_the_motors(tmp_path):
    ep = {IMAGE: np.zeros((4, 16, 16, 3), np.uint8), STATE: np.zeros((4, 2), np.float32), ACTION: np.full((4, 2), 2.5, np.float32), PROMPT: "go east"}
    suite = dict(tasks=[task(write_lerobot(tmp_path/"a", [ep], 10, "png"), env=RIGHT)])
    with pytest.raises(ValueError, match="reach from 2.5 to 2.5, its environment takes -1 to 1"): check_tried(make_stream(suite).tasks[0], 32)
    assert check_tried(make_stream(suite).tasks[0], 32, "bounds")[-1].startswith("accepted (bounds)")

def test_discrete_actions_of_a_data_set(tmp_path):
    env = make_env(dict(kind="dot", name="right", discrete=True, prompt="go east"), 32)
    path = write_lerobot(tmp_path/"keys", [record_one(env, 10**6+i, np_rng(0, i), 0., 1) for i in range(2)], 10, "png")
    suite = dict(tasks=[task(path, env=RIGHT | dict(discrete=True))])
    run = train_cl(config(tmp_path, tmp_path/"run", suite, head="discrete", chunk=1, action_norm="identity"), say=len)
    assert len(run.episodes()) == 2

def test_the_first_tasks_statistics_are_held_against_later_tasks(tmp_path):
    ep = lambda prompt, grip: {IMAGE: np.zeros((8, 32, 32, 3), np.uint8), STATE: np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32),
                               ACTION: np.stack([np.linspace(-1, 1, 8), grip], 1).astype(np.float32), PROMPT: prompt}
    path = str(write_lerobot(tmp_path/"grip", [ep("reach it", np.ones(8)), ep("grasp it", np.linspace(1, -1, 8))], 10, "png"))
    kw = dict(evaluate="none", stats="first")
    with pytest.raises(ValueError, match="axis 1 of 'action' lies in 1..1 in task 'reach-it'.*-1..1 in task 'grasp-it'; take the statistics of all tasks"):
        train_cl(config(tmp_path, tmp_path/"run", path, **kw), say=len)
    lines = []
    train_cl(config(tmp_path, tmp_path/"run2", path, accept="range", **kw), say=lines.append)
    assert any(line.startswith("accepted (range): axis 1") for line in lines)
    train_cl(config(tmp_path, tmp_path/"run3", path, **(kw | dict(stats="global"))), say=len)

@pytest.mark.parametrize("env,data,fps,said", [
    (dict(kind="gym", name="Pendulum-v1", state="obs", success="never"), dict(S=3, A=1), 30, ""), (dict(kind="gym", name="Pendulum-v1", state="obs"), dict(S=3, A=1), 20, "20 frames a second"),
    (dict(kind="gym", name="Pendulum-v1"), dict(S=3, A=1), 30, ""), (dict(kind="gym", name="Pendulum-v1", state="none"), dict(S=3, A=1), 30, "3 numbers in 'observation.state', the environment 1"),
    (dict(kind="metaworld", name="window-close-v3"), dict(S=4, A=4), 80, ""), (dict(kind="metaworld", name="window-close-v3"), dict(S=39, A=4), 80, "39 numbers"),
    (dict(kind="metaworld", name="window-clos-v3"), dict(S=4, A=4), 80, "did you mean 'window-close-v3'")])
def test_any_kind_plays_a_data_sets_task(tmp_path, env, data, fps, said):
    needs = "gymnasium" if env["kind"] == "gym" else "metaworld"
    if find_spec(needs) is None: pytest.skip(f"{needs} is not installed")   # not imported here: MuJoCo would choose how to draw before the library does
    suite = dict(tasks=[task(data_set(tmp_path/"a", "shut it", fps=fps, **data), env=env)])
    if said:
        with pytest.raises(ValueError, match=said): check_tried(make_stream(suite).tasks[0], 32)
    else: check_tried(make_stream(suite).tasks[0], 32)


def test_a_first_data_set_that_says_little_hides_no_difference_of_the_others(tmp_path):
    "The first has no robot_type: the others had not been compared with one another."
    a, b, c = [data_set(tmp_path/name, name, robot_type=robot) for name, robot in (("a", None), ("b", "panda"), ("c", "ur5"))]
    with pytest.raises(ValueError, match="b and .*c differ in robot_type: panda and ur5"): check_mixture(stream_of(a, b, c))
    assert len(check_mixture(stream_of(a, b, c), "robot")) == 1
    d = data_set(tmp_path/"d", "d", robot_type="panda")
    assert check_mixture(stream_of(a, b, d)) == [] and len(check_mixture(stream_of(b, c, d), "robot")) == 1
