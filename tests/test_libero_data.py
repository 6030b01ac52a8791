"LIBERO's names against its own package; published data sets in every known layout, converted exactly or refused; the protocol file."
import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from clvla.core.names import ACTION, IMAGE, IMAGES, PROMPT, STATE
from clvla.core.files import read_json, write_json
from clvla.envs.libero import data as L
from clvla.data.layouts import GRIPPERS, PICTURES, axis_angle, check_layout, convert
from clvla.data.lerobot import fingerprint, import_task, read_lerobot
from clvla.data.lerobot_write import write_lerobot
from clvla.envs.libero.tasks import (LIMITS, MAX_STEPS, ORDERS, SUITE_OF, SUITES, libero_id, libero_order,
    libero_prompt, libero_task)
from clvla.data.streams import stream_from, stream_json
from clvla.envs.all import kind_of, make_stream
from clvla.train.config import TrainConfig, resolve
from clvla.train.demos import demo_dir
from clvla.train.prepare import check, prepare
from libero_help import libero_root

ROOT = Path(__file__).parents[1]
WRIST = IMAGES+"wrist"


# names

def test_names_are_liberos_own():
    "Its list of names is a plain file of its package; it is run alone, so that nothing of the package is imported."
    found = importlib.util.find_spec("libero")
    if found is None: libero_root()   # says what to do, and fails where LIBERO is expected to be
    place = Path(found.submodule_search_locations[0])/"libero/benchmark"
    spec = importlib.util.spec_from_file_location("names", place/"libero_suite_task_map.py")
    names = importlib.util.module_from_spec(spec); spec.loader.exec_module(names)
    assert {k: tuple(v) for k, v in names.libero_task_map.items()} == {k: v for k, v in SUITES.items()}
    text = (place/"__init__.py").read_text()
    orders = re.findall(r"^    \[([\d, ]+)\],$", text, re.M)
    assert [tuple(map(int, o.split(", "))) for o in orders] == [libero_order(i) for i in range(len(ORDERS))]
    for suite, names in SUITES.items():   # each has its description under this name
        assert all((place.parent/f"bddl_files/{suite}/{o}.bddl").exists() for o in names)


def test_prompts_are_made_as_libero_makes_them():
    for name in SUITE_OF:
        x = name+".bddl"   # the function of LIBERO's benchmark page, in its own steps
        skip = x.find("SCENE")+(8 if "SCENE10" in x else 7) if x[0].isupper() else 0
        assert libero_prompt(name) == " ".join(x[skip:].split("_"))[:-5]


def test_ids_and_limits():
    ids = [libero_id(o) for o in SUITE_OF]
    assert len(set(ids)) == 130 and all(re.fullmatch(r"[a-z0-9-]+", o) for o in ids) and max(map(len, ids)) < 80
    for suite, names in SUITES.items():
        t = libero_task(suite, names[0])
        assert t.env == dict(kind="libero", suite=suite, name=names[0], max_steps=MAX_STEPS[suite]) and t.source == dict(kind="demos")
        assert libero_task(suite, names[0], "libero").env["max_steps"] == 600
    assert LIMITS["openvla"]["libero_spatial"] == 220 and {k: v for k, v in LIMITS["openvla"].items() if k != "libero_spatial"} == {
        k: v for k, v in MAX_STEPS.items() if k != "libero_spatial"}


def test_streams_across_suites():
    names = [SUITES[k][-1] for k in SUITES]
    s = make_stream(dict(base="libero", tasks=names, env=dict(protocol="published", cameras=["front", "wrist"])), task_order=[4, 3, 2, 1, 0])
    assert [o.name for o in s.tasks] == names and [o.env["suite"] for o in s.tasks] == list(SUITES)
    assert all(o.env["protocol"] == "published" and o.env["cameras"] == ["front", "wrist"] for o in s.tasks)
    assert stream_from(json.loads(json.dumps(stream_json(s)))) == s
    goal = make_stream("libero_goal", task_order=list(libero_order(3)))
    assert [o.name for o in goal.tasks] == list(SUITES["libero_goal"])
    assert [SUITES["libero_goal"].index(goal[i].name) for i in goal.ids] == list(libero_order(3))


@pytest.mark.parametrize("spec,said", [
    (dict(base="libero_goal", without=["turn_on_stove"]), "no task 'turn_on_stove'"), ("libero_100", "libero_90 and libero_10 together"), ("libero_long", "own name for it is 'libero_10'"), ("libero_gaol", "mean 'libero_goal'"),
    (dict(base="libero_goal", tasks=["turn_on_stove"]), "no task 'turn_on_stove'"), (dict(base="libero_goal", tasks=[SUITES["libero_10"][0]]), "no task"),
    (dict(base="libero_goal", env=dict(suite="libero_10")), "choose another task"), (dict(base="libero_goal", env=[1]), "'env' is"),
    (dict(base="libero_goal", libero="no"), "'libero' is 'no'")])
def test_streams_that_are_none(spec, said):
    with pytest.raises(ValueError, match=said): make_stream(spec)


def test_demonstrations_do_not_mix():
    cfg = TrainConfig(data_dir="/d", n_demos=25, image_size=48); spec = lambda **env: make_stream(dict(base="libero_goal", num_tasks=1, env=env)).tasks[0]
    dirs = [demo_dir(t, c) for t in (spec(), spec(cameras=["front", "wrist"]), spec(protocol="published"), spec(max_steps=600),
                                     spec(visuals="full"), *(libero_task(k, SUITES[k][0]) for k in SUITES if k != "libero_goal"))
            for c in (cfg, replace(cfg, image_size=64), replace(cfg, n_demos=3))]
    assert len(set(dirs)) == len(dirs) and str(dirs[0]) == "/d/libero/goal-open-middle-drawer-of-cabinet-n25-48px"
    assert all(d.parent == Path("/d/libero") for d in [demo_dir(spec(protocol="../../x"), cfg)])


# drawn data sets

def drawn(T=40, text="turn on the stove", seed=0, size=8):
    "An episode in the project's conventions: steps of a hand that points down, a gripper that shuts in the middle third."
    r = np.random.default_rng(seed); g = np.where(np.arange(T)//(T//3+1) == 1, 1., -1.)
    width = np.clip(np.convolve(np.r_[np.ones(8), -g], np.ones(8)/8, "valid")[:T], -1, 1)*.02+.02
    a = np.c_[r.uniform(-1, 1, (T, 6)), g].astype(np.float32); pos = np.cumsum(a[:, :3]*.01, 0)+[0, 0, 1.]
    s = np.c_[pos, np.full((T, 1), 3.1), r.normal(0, .02, (T, 2)), width, -width].astype(np.float32)
    pic = lambda: r.integers(0, 255, (T, size, size, 3), np.uint8)
    return {IMAGE: pic(), WRIST: pic(), STATE: s, ACTION: a, PROMPT: text}


def quaternion(r):
    "Axis-angles as x y z w, written independently of the conversion."
    th = np.linalg.norm(r, axis=1, keepdims=True); return np.c_[r/np.maximum(th, 1e-12)*np.sin(th/2), np.cos(th/2)]


def foreign(ep, pictures="rotated", state="axis_angle", gripper="-1..1"):
    "The same episode as others would have stored it."
    g = ep[ACTION][:, -1]; o, s = map(float, gripper.split("..")); a = ep[ACTION].copy(); a[:, -1] = np.where(g < 0, o, s)
    turn = dict(rotated=lambda v: v, opengl=lambda v: np.rot90(v, 2, (1, 2)), upright=lambda v: v[:, :, ::-1])[pictures]
    x = ep[STATE]; q = quaternion(x[:, 3:6].astype(float))
    hand = dict(axis_angle=x[:, 3:6], quat_xyzw=q, quat_wxyz=q[:, [3, 0, 1, 2]])[state]
    pics = {k: np.ascontiguousarray(turn(ep[k])) for k in (IMAGE, WRIST)}
    return {**ep, **pics, STATE: np.c_[x[:, :3], hand, x[:, 6:]].astype(np.float32), ACTION: a}


def write(path, eps, names=None, fps=10, info=None):
    "A data set whose columns have other names."
    write_lerobot(path, eps, fps); names = names or {}
    f = next((path/"data").rglob("*.parquet")); t = pq.read_table(f); pq.write_table(t.rename_columns([names.get(c, c) for c in t.column_names]), f)
    d = read_json(path/"meta/info.json"); write_json(path/"meta/info.json", d | dict(features={names.get(k, k): v for k, v in d["features"].items()}) | (info or {}))
    return path


GOAL = [libero_prompt(o) for o in SUITES["libero_goal"]]
KEYS = {"HuggingFaceVLA/libero": {IMAGE: IMAGES+"image", WRIST: IMAGES+"image2"}, "lerobot/libero_goal_image": {IMAGE: IMAGES+"image", WRIST: IMAGES+"wrist_image"},
        "physical-intelligence/libero": {IMAGE: "image", WRIST: "wrist_image", STATE: "state", ACTION: "actions"},
        "IPEC-COMMUNITY/libero_goal_no_noops_1.0.0_lerobot": {IMAGE: IMAGES+"image", WRIST: IMAGES+"wrist_image"}}


@pytest.mark.parametrize("name,gripper", list(zip(KEYS, ("-1..1", "-1..1", "-1..1", "1..0"))))
def test_published_names_train_as_they_are(name, gripper, tmp_path):
    "Under the names of the published data sets: columns, gripper and orientation are found, and the frames are the project's."
    eps = [drawn(seed=k, text=GOAL[k % 3]) for k in range(6)]
    path = write(tmp_path/name, [foreign(e, gripper=gripper) for e in eps], KEYS[name])
    s = make_stream(str(path))
    assert [o.id for o in s.tasks] == [libero_id(o) for o in SUITES["libero_goal"][:3]]
    assert all(o.env == dict(kind="libero", suite="libero_goal", name=o.name, max_steps=300, cameras=["front", "wrist"]) for o in s.tasks)
    layout = s.tasks[0].source["parts"][0]["layout"]
    assert layout["pictures"] == "rotated" and layout["gripper"] == gripper and layout["state"] == "axis_angle"
    assert layout["cameras"] == {k: KEYS[name].get(k, k) for k in (IMAGE, WRIST)}
    store = import_task(s.tasks[1], tmp_path/"frames")
    for k, x in ((STATE, store.state), (ACTION, store.action), *store.images.items()):
        assert (np.concatenate([e[k] for e in (eps[1], eps[4])]) == x).all(), k
    assert sorted(store.cameras) == [IMAGE, WRIST] and store.prompts == [GOAL[1]]
    assert stream_from(json.loads(json.dumps(stream_json(s)))).tasks[0].env == s.tasks[0].env
    assert layout == s.tasks[1].source["parts"][0]["layout"] and fingerprint(s.tasks[0])["parts"][0]["layout"] == layout
    if gripper == "-1..1": return   # processes are slow to start: one of them is enough
    said, cfg = [], resolve(TrainConfig(suite=str(path), smoke=True, data_dir=str(tmp_path/"d"), image_size=32, algo="er"))
    assert len(prepare(check(cfg), cfg, said.append)) == 2 and said[0].startswith(f"{path} is read in this layout: front = ")


@pytest.mark.parametrize("pictures", PICTURES)
@pytest.mark.parametrize("state,gripper", [("axis_angle", "1..-1"), ("quat_xyzw", "-1..1"), ("quat_wxyz", "0..1"), ("axis_angle", "1..0")])
def test_every_layout_is_measured_and_undone(pictures, state, gripper, tmp_path):
    eps = [drawn(seed=k, text=GOAL[0]) for k in range(2)]
    path = write(tmp_path/"me/goal", [foreign(e, pictures, state, gripper) for e in eps], {IMAGE: IMAGES+"image"})
    found = L.recognise(path, pictures=pictures)["layout"]
    assert (found["state"], found["gripper"], found["pictures"]) == (state, gripper, pictures)
    for got, ep in zip(read_lerobot(path, layout=found), eps):
        assert all((got[k] == ep[k]).all() for k in (IMAGE, WRIST, ACTION)) and np.allclose(got[STATE], ep[STATE], atol=1e-5)


def test_what_is_not_known_is_asked_for(tmp_path):
    path = write(tmp_path/"me/goal", [drawn(text=GOAL[0])])
    with pytest.raises(ValueError, match=r"'me/goal' is no data set that is known.*suite = \{'base': '.*', 'libero': \{'pictures': 'rotated'\}\}"):
        make_stream(str(path))
    assert make_stream(dict(base=str(path), libero=dict(pictures="opengl"))).tasks[0].env["name"] == SUITES["libero_goal"][0]
    front = make_stream(dict(base=str(path), libero=dict(pictures="opengl", cameras=["front"]))).tasks[0]
    assert "cameras" not in front.env and list(front.source["parts"][0]["layout"]["cameras"]) == [IMAGE]
    plain = make_stream(dict(base=str(path), libero=False)).tasks[0]
    assert plain.env is None and "layout" not in plain.source["parts"][0]
    for say, words in ((dict(pictures="turned"), "'pictures' is 'turned'"), (dict(picture="rotated"), "did you mean 'pictures'"), (dict(suite="libero_gaol"), "mean 'libero_goal'"),
                       (dict(pictures="rotated", cameras=["wrist"]), "'front' comes first"), (dict(suite="libero_10"), "no instruction of libero_10")):
        with pytest.raises(ValueError, match=words): make_stream(dict(base=str(path), libero=say))


def bad(ep, kind):
    "Numbers that cannot be used."
    s, a = ep[STATE].copy(), ep[ACTION].copy()
    if kind == "joints": s = np.c_[np.random.default_rng(0).uniform(-2, 2, (len(s), 7)), s[:, 6:7]]
    if kind == "euler": s[::2, 3] = -3.1
    if kind == "short": s = s[:, :7]
    if kind == "poses": a[:-1, :3] = s[1:, :3]
    if kind == "metres": a[:, :6] *= .05
    if kind == "unscaled": a[:, :3] *= 3
    if kind == "ten": a = np.c_[a, a[:, :3]]
    if kind == "still": s[:, 6:] = (.02, -.02)
    if kind == "percent": a[:, -1] = (a[:, -1]+1)*50
    if kind == "tilted": s = np.c_[s[:, :3], np.tile([.5, .5, .5, .5], (len(s), 1)), s[:, 6:]]
    if kind == "no-unit": s = np.c_[s[:, :3], np.tile([1., 1., 0, 0], (len(s), 1)), s[:, 6:]]
    return {**ep, STATE: s.astype(np.float32), ACTION: a.astype(np.float32)}


@pytest.mark.parametrize("kind,said", [("joints", "joint angles cannot be used"), ("euler", "as Euler angles do"), ("short", "has 7 numbers"), ("poses", "poses or unscaled"),
    ("metres", "divide them by .05"), ("unscaled", "poses or unscaled"), ("ten", "an action has 10"), ("still", "fingers do not show"), ("percent", "not within -1..1"),
    ("tilted", "order of the quaternion"), ("no-unit", "no unit quaternions")])
def test_numbers_that_mean_something_else_are_refused(kind, said, tmp_path):
    path = write(tmp_path/"HuggingFaceVLA/libero", [bad(drawn(seed=k, text=GOAL[k]), kind) for k in range(2)])
    with pytest.raises(ValueError, match=f"cannot be used as a LIBERO data set: .*{said}.*'libero': False"): make_stream(str(path))
    assert len(make_stream(dict(base=str(path), libero=False)).tasks) == 2


def test_older_versions_name_the_command(tmp_path):
    for v, more in (("v2.1", False), ("v2.0", True)):
        path = write(tmp_path/v, [drawn(text=GOAL[0])], info=dict(codebase_version=v))
        with pytest.raises(ValueError, match=r"version v2\.\d, needed is v3; .*convert_dataset_v21_to_v30 --repo-id=x/x --root=.* --push-to-hub=false") as e:
            make_stream(str(path))
        assert more == ("converts v2.0 to that" in str(e.value))


# which task

def test_suites_are_found_or_asked_for():
    forty = [libero_prompt(o) for k in L.SMALL for o in SUITES[k]]
    assert len(set(forty)) == 40 and set(L.match(forty).values()) == {(k, o) for k in L.SMALL for o in SUITES[k]}
    assert L.match(forty[:20]) and L.match(GOAL)[GOAL[7]] == ("libero_goal", "turn_on_the_stove")
    ninety = [libero_prompt(o) for o in SUITES["libero_90"]]; got = L.match(ninety)
    assert sum(v is None for v in got.values()) == 12 and all(v[0] == "libero_90" for v in got.values() if v)
    everything = L.match(forty+ninety)
    assert everything["turn on the stove"] is None and everything[GOAL[0]] == ("libero_goal", SUITES["libero_goal"][0])
    assert L.match(["turn on the stove"], name="x/libero_goal_no_noops")["turn on the stove"][0] == "libero_goal"
    assert L.match([GOAL[0]], name="x/libero_10") == L.match([GOAL[0]])   # a name that does not fit decides nothing
    with pytest.raises(ValueError, match="say which suite is meant"): L.match(["turn on the stove"])
    assert L.match(["pick the akita black bowl"]) is None


def test_tasks_of_several_scenes_are_trained_on_only(tmp_path):
    libero_root()   # what is evaluated needs the assets
    texts = ["turn on the stove", "close the microwave"]
    path = write(tmp_path/"IPEC-COMMUNITY/libero_90_no_noops_lerobot", [drawn(seed=k, text=t) for k, t in enumerate(texts)])
    s = make_stream(str(path)); assert [o.env is None for o in s.tasks] == [True, False] and s.tasks[1].id == "kitchen6-close-microwave"
    with pytest.raises(ValueError, match="no environment belongs to turn-on-the-stove.*leave them out"): check(resolve(TrainConfig(suite=str(path), algo="er")))
    ok = dict(base=str(path), tasks=["kitchen6-close-microwave"])
    assert check(resolve(TrainConfig(suite=ok, algo="er"))).ids == ["kitchen6-close-microwave"]
    assert check(resolve(TrainConfig(suite=str(path), algo="er", evaluate="none"))).ids == s.ids


def test_other_peoples_robots_are_left_alone(tmp_path):
    for k, text in enumerate(("Push the block", "turn on the stove")):
        write_lerobot(tmp_path/f"r{k}", [{k2: (v[:, :2] if k2 in (STATE, ACTION) else v) for k2, v in drawn(text=text).items()}])
    s = make_stream(str(tmp_path/"r0"))
    assert s.tasks[0].env is None and set(s.tasks[0].source["parts"][0]) == {"path", "task_index"}
    with pytest.raises(ValueError, match="say which suite is meant.*'libero': False"): make_stream([str(tmp_path/"r0"), str(tmp_path/"r1")])
    with pytest.raises(ValueError, match="other instructions than LIBERO's"): make_stream(dict(base=str(tmp_path/"r0"), libero=dict(pictures="rotated")))
    mixed = write(tmp_path/"mixed", [drawn(text=GOAL[0]), drawn(text="put the bowl on a plate")])
    with pytest.raises(ValueError, match="and others: 'put the bowl on a plate'; did you mean 'put the bowl on the plate'.*'libero': False"): make_stream(str(mixed))
    assert [o.env for o in make_stream(dict(base=str(mixed), libero=False)).tasks] == [None, None]


def test_two_data_sets_of_one_task(tmp_path):
    "Each part is read in its own layout, and a camera that only one of them has is left out."
    a = write(tmp_path/"HuggingFaceVLA/libero", [drawn(seed=0, text=GOAL[0]), drawn(seed=1, text=GOAL[1])], KEYS["HuggingFaceVLA/libero"])
    one = {k: v for k, v in foreign(drawn(seed=2, text=GOAL[0]), gripper="1..0").items() if k != WRIST}
    b = write(tmp_path/"libero_goal_no_noops_1.0.0_lerobot", [one], {IMAGE: IMAGES+"image"})
    s = make_stream([str(a), str(b)])
    parts = s.tasks[0].source["parts"]; assert [p["layout"]["gripper"] for p in parts] == ["-1..1", "1..0"] and "cameras" not in s.tasks[0].env
    store = import_task(s.tasks[0], tmp_path/"frames")
    assert store.cameras == [IMAGE] and (store.action == np.concatenate([drawn(seed=k)[ACTION] for k in (0, 2)])).all()
    c = write(tmp_path/"Upper/libero_goal_no_noops_x_lerobot", [drawn(text=GOAL[0].capitalize()+".")])
    with pytest.raises(ValueError, match="are one LIBERO task; write them alike"): make_stream([str(a), str(c)])


def test_a_suite_as_one_task_is_read_in_its_layout(tmp_path):
    "Under `by_dataset` a task has many instructions: frames are converted all the same, and there is no environment."
    eps = [drawn(seed=k, text=GOAL[k % 2]) for k in range(3)]
    path = write(tmp_path/"IPEC-COMMUNITY/libero_goal_no_noops_1.0.0_lerobot", [foreign(e, gripper="1..0") for e in eps], KEYS["HuggingFaceVLA/libero"])
    one = write(tmp_path/"HuggingFaceVLA/libero", [foreign(drawn(seed=7, text=GOAL[4]))], KEYS["HuggingFaceVLA/libero"])
    s = make_stream([str(path), str(one)], partition="by_dataset")
    assert [(o.env or {}).get("name") for o in s.tasks] == [None, SUITES["libero_goal"][4]]
    assert [o.source["parts"][0]["layout"]["gripper"] for o in s.tasks] == ["1..0", "-1..1"]
    store = import_task(s.tasks[0], tmp_path/"frames")
    assert (store.action == np.concatenate([e[ACTION] for e in eps])).all() and sorted(store.prompts) == sorted(GOAL[:2])


def test_cameras_of_data_and_environment_agree_or_are_refused_at_the_door(tmp_path):
    libero_root(); path = write(tmp_path/"HuggingFaceVLA/libero", [foreign(drawn(seed=k, text=GOAL[k])) for k in range(2)], KEYS["HuggingFaceVLA/libero"])
    good = make_stream(str(path)); cfg = lambda spec: resolve(TrainConfig(suite=spec, algo="er", data_dir=str(tmp_path)))
    assert good.tasks[0].env["cameras"] == ["front", "wrist"] and check(cfg(str(path))).ids == good.ids
    with pytest.raises(ValueError, match="has pictures of front, wrist, its environment lacks wrist: give the stream env="):
        check(cfg(dict(base=str(path), env=dict(cameras=["front"]))))
    assert check(cfg(dict(base=str(path), libero=dict(cameras=["front"])))).tasks[0].env.get("cameras") is None


def test_a_data_set_trains_where_there_is_no_simulator(tmp_path, monkeypatch):
    from clvla.train.learner import train_cl
    path = write(tmp_path/"HuggingFaceVLA/libero", [foreign(drawn(seed=k, text=GOAL[k % 2])) for k in range(4)], KEYS["HuggingFaceVLA/libero"])
    monkeypatch.delenv("CLVLA_LIBERO_ASSETS", raising=False); monkeypatch.setenv("CLVLA_DATA", str(tmp_path/"nothing"))
    cfg = resolve(TrainConfig(suite=str(path), algo="er", smoke=True, evaluate="none", image_size=32, data_dir=str(tmp_path/"d"), run_dir=str(tmp_path/"run")))
    run = train_cl(cfg, say=lambda line: None); assert run.done and not run.episodes()
    assert [r["stage"] for r in run.logs()][-1] == 1


def test_settings_of_a_stream_are_plain_whatever_they_were_written_as():
    a,b = (make_stream(dict(base="libero_five", env=dict(cameras=c))) for c in (("front", "wrist"), ["front", "wrist"]))
    assert a == b and stream_from(json.loads(json.dumps(stream_json(a)))) == a


def test_own_recordings_are_known_by_their_note(tmp_path):
    task = libero_task("libero_90", SUITES["libero_90"][20]); path = write_lerobot(tmp_path/"turn/lerobot", [drawn(text=task.prompt)])
    write_json(tmp_path/"turn/demos.json", dict(settings=dict(task=task.id, env=task.env), files={}))
    s = make_stream(str(path)); assert s.tasks[0].id == task.id == "kitchen3-turn-on-stove" and s.tasks[0].env == {**task.env, "cameras": ["front", "wrist"]}
    for note in ([], dict(settings=3), dict(settings=dict(env=3))):
        write_json(tmp_path/"turn/demos.json", note); assert L.own_note(path) is None


def test_own_recordings_are_tried_in_the_environment_that_they_were_recorded_in(tmp_path):
    "A recording with wide starts and full meshes had been evaluated at LIBERO's own starts, with light meshes."
    task = libero_task("libero_goal", "turn_on_the_stove"); path = write_lerobot(tmp_path/"turn/lerobot", [drawn(text=task.prompt)])
    env = task.env | dict(places="exchanged", sides="mirrored", visuals="full", max_steps=400)
    write_json(tmp_path/"turn/demos.json", dict(settings=dict(task=task.id, env=env), files={}))
    assert make_stream(str(path)).tasks[0].env == {**env, "cameras": ["front", "wrist"]}
    assert make_stream(dict(base=str(path), env=dict(max_steps=90))).tasks[0].env["max_steps"] == 90
    write_json(tmp_path/"turn/demos.json", dict(settings=dict(task=task.id, env=env | dict(planes=1)), files={}))
    with pytest.raises(ValueError, match="no entry 'planes'"): make_stream(str(path))


def test_recordings_with_other_starts_are_no_one_task(tmp_path):
    "Recordings of `libero_five` and of `libero_five_wide` had been trained on together, and tried at the usual starts alone."
    task = libero_task("libero_goal", "turn_on_the_stove"); wide = dict(places="exchanged", sides="mirrored")
    def recorded(folder, **more):
        write_json(tmp_path/folder/"demos.json", dict(settings=dict(task=task.id, env=task.env | more), files={}))
        return str(write_lerobot(tmp_path/folder/"lerobot", [drawn(text=task.prompt)]))
    near,far,later = recorded("near"),recorded("far", **wide),recorded("later", **wide, max_steps=400)
    with pytest.raises(ValueError, match="was recorded with the usual starts in .*near.* and with .*exchanged.* in .*far.*; make a stream of each kind"): make_stream([near, far], partition="by_task_index")
    with pytest.raises(ValueError, match="'turn on the stove', 'turn on the stove'.* are one LIBERO task.*by_task_index"): make_stream([far, later])
    (same,) = make_stream([far, later], partition="by_task_index").tasks
    assert len(same.source["parts"]) == 2 and wide.items() <= same.env.items()


# conversions

def test_axis_angle_against_rotation_matrices():
    r = np.random.default_rng(0).normal(size=(50, 3)); r *= (np.random.default_rng(1).uniform(.1, 6, 50)/np.linalg.norm(r, axis=1))[:, None]
    assert np.allclose(axis_angle(quaternion(r)), r, atol=1e-9)
    assert np.allclose(axis_angle([[0, 0, 0, 1.], [0, 0, 0, -1.]]), 0)


def test_layouts_are_plain_words(tmp_path):
    for d, said in (([], "of type list"), (dict(gripper="open"), "'gripper' is 'open'"), (dict(columns={"a": 1}), "'columns' is"), (dict(cameras=3), "'cameras' is"),
                    (dict(state=[1]), "'state' is"), (dict(x=1), "no entry 'x'")):
        with pytest.raises(ValueError, match=re.escape(said)): check_layout(d)
    with pytest.raises(ValueError, match="has 8 numbers"): convert(drawn(), dict(state="quat_xyzw"))
    with pytest.raises(ValueError, match="no column|lacks"): next(read_lerobot(write(tmp_path/"a", [drawn()]), layout=dict(columns={STATE: "x"})))
    for g in GRIPPERS: assert (convert(foreign(drawn(), gripper=g), dict(gripper=g))[ACTION] == drawn()[ACTION]).all()


# the hub

def test_fetching_needs_its_prefix_and_is_done_once(tmp_path, monkeypatch):
    import huggingface_hub
    calls = []

    def down(repo, **kw):
        calls.append((repo, kw)); Path(kw["local_dir"]).mkdir(parents=True, exist_ok=True)
        write(Path(kw["local_dir"])/"x", [drawn(text=GOAL[0])], KEYS["HuggingFaceVLA/libero"])
        for f in (Path(kw["local_dir"])/"x").iterdir(): f.rename(Path(kw["local_dir"])/f.name)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", down); monkeypatch.setenv("CLVLA_DATA", str(tmp_path))
    for _ in range(2): s = make_stream("hf:HuggingFaceVLA/libero@v3.0")
    assert len(calls) == 1 and calls[0][1]["repo_type"] == "dataset" and calls[0][1]["revision"] == "v3.0" and s.ids == [libero_id(SUITES["libero_goal"][0])]
    with pytest.raises(ValueError, match="neither a registered stream"): make_stream("HuggingFaceVLA/libero")
    for wrong in ("hf:libero", "hf:../x", "hf:a/..", "hf:a/b@../c"):
        with pytest.raises(ValueError, match="write hf:ORG/NAME"): make_stream(wrong)

    def offline(*a, **kw): raise OSError("no route")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConnectionError, match="a/b could not be fetched .OSError: no route.; try again"): make_stream("hf:a/b")
    assert len(calls) == 1


# the simulator

def test_demonstrations_of_the_simulator_are_read_as_published_ones(tmp_path):
    "Two cameras are stored as the environment shows them, from a start that is not tested; layouts are measured on real numbers."
    from clvla.data.demos import FIRST_TRIAL, make_demos
    from clvla.envs.all import make_env
    libero_root()
    task = make_stream(dict(base="libero_five", tasks=["goal-turn-on-stove"], env=dict(cameras=["front", "wrist"]))).tasks[0]
    store = make_demos(task, make_env, tmp_path/task.id, n_demos=1, seed=0, image_size=32, **kind_of(task).recipe)
    assert store.source["settings"]["fps"] == 20 and store.source["settings"]["noise"] == [.1]*3+[.03]*3
    assert store.state_dim == 8 and store.action_dim == 7 and set(np.unique(store.action[:, 6])) <= {-1, 1}
    env = make_env({**task.env, "task_id": task.id, "prompt": task.prompt}, image_size=32, seed=0)
    obs, tested = env.reset(FIRST_TRIAL), [env.reset(k)[STATE] for k in range(2)]; env.close()
    assert all((store.images[k][0] == obs[k]).all() for k in (IMAGE, WRIST)) and (store.state[0] == obs[STATE]).all()
    assert not any((store.state[0] == x).all() for x in tested)
    own = make_stream(str(tmp_path/task.id/"lerobot")).tasks[0]
    assert own.env == task.env and own.source["parts"][0]["layout"]["gripper"] == "-1..1"
    ep = next(read_lerobot(tmp_path/task.id/"lerobot"))
    path = write(tmp_path/"me/goal", [foreign(ep, "opengl", "quat_wxyz", "1..0")], KEYS["HuggingFaceVLA/libero"])
    got = L.recognise(path, pictures="opengl")["layout"]; assert (got["state"], got["gripper"]) == ("quat_wxyz", "1..0")
    back = next(read_lerobot(path, layout=got))
    assert all((back[k] == ep[k]).all() for k in (IMAGE, WRIST, ACTION)) and np.allclose(back[STATE], ep[STATE], atol=1e-6)


# the reference protocol

PROTOCOLS = {"libero_goal": 300, "libero_goal_er": 300, "libero_10": 520}   # file -> steps of an episode
SMALL = dict(smoke=True, model="qwengr00t-tiny", image_size=48, lora_rank=2, precision="no")   # as their headers say


def protocol(name): return ROOT/f"nbs/protocols/{name}.yaml"
def suite_of(name): return name.removesuffix("_er")


def parameters(name="libero_goal"):
    from papermill.iorw import NoDatesSafeLoader, read_yaml_file
    import yaml
    assert issubclass(NoDatesSafeLoader, yaml.SafeLoader)   # papermill builds nothing but plain values from a file of parameters
    return read_yaml_file(str(protocol(name)))


@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocol_is_made_of_parameters_of_run_cl(name):
    from clvla.run.config import from_page
    names = parameters(name); cfg = from_page(TrainConfig, dict(names), set())
    given = {**vars(cfg), **cfg.cl_kw}   # a parameter that is no field goes to the algorithm that has it
    assert {k: given[k] for k in names if k != "cl_kw"}|{"cl_kw": {k: given[k] for k in names["cl_kw"]}} == names
    suite = suite_of(name); s = make_stream(cfg.suite); assert [o.name for o in s.tasks] == list(SUITES[suite]) and s.name == suite
    assert all(o.env == dict(kind="libero", suite=suite, name=o.name, max_steps=PROTOCOLS[name], cameras=["front", "wrist"], protocol="published") for o in s.tasks)
    assert (cfg.n_trials, given["buffer_size"], given["replay_ratio"], given["sampling"], cfg.steps_per_task) == (50, 1000, .5, "balanced", 10_000)
    assert (cfg.cl, cfg.cl_kw.get("refresh")) == (("er", None) if name.endswith("_er") else ("mir", 50))


def test_protocols_differ_in_what_their_names_say():
    goal, er, ten = map(parameters, PROTOCOLS)
    assert {k for k in goal if goal[k] != er[k]} == {"cl", "cl_kw"} and {k for k in goal if goal[k] != ten[k]} == {"suite"}
    assert goal.keys() == er.keys() == ten.keys()


def test_rates_of_a_protocol_are_those_of_parts_that_the_model_has():
    from clvla.policies.all import make_policy
    from clvla.policies.base import param_groups
    p, d = make_policy("qwengr00t-tiny", 48), parameters()
    rates = {g["name"].split("/")[0]: g["lr"] for g in param_groups(p, d["lr"], lr_of=d["lr_of"])}
    assert rates == dict(vlm=1e-5, head=1e-4, all=2.5e-5)
    with pytest.raises(ValueError, match="'vlmm'; did you mean 'vlm"): param_groups(p, 1e-3, lr_of=dict(vlmm=1e-5))


@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocol_passes_every_check_at_a_small_scale(name, tmp_path):
    from clvla.run.config import from_page
    libero_root()
    suite, given = suite_of(name), parameters(name)
    cfg = resolve(from_page(TrainConfig, {**given, **SMALL, "suite": suite, "data_dir": str(tmp_path)}, set()))
    assert check(cfg).ids == [libero_id(o) for o in SUITES[suite][:2]] and (cfg.n_trials, cfg.n_demos) == (2, 3)
    both = check(resolve(from_page(TrainConfig, {**given, **SMALL}, set())))
    assert [o.env["protocol"] for o in both.tasks] == ["published"]*2
    words = " ".join(protocol(name).read_text().replace("\\\n#", "").split())
    assert f"-p suite {suite} -p smoke True -p model qwengr00t-tiny -p image_size 48 -p lora_rank 2 -p precision no" in words
    assert f"-f nbs/protocols/{name}.yaml" in words
