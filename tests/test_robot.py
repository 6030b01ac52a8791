"Demonstrations that are held out, and a trained policy as a robot's program calls it."
import numpy as np
import pytest
import torch
from clvla.core.files import read_json
from clvla.core.names import ACTION, IMAGE, IMAGES, PROMPT, STATE
from clvla.core.seeds import np_rng
from clvla.data.frames import write_store
from clvla.data.layouts import GRIPPERS
from clvla.data.lerobot_write import write_lerobot
from clvla.envs.all import make_stream
from clvla.crl.config import AgentConfig
from clvla.rl.config import PracticeConfig
from clvla.rl.learner import check_practice
from clvla.run.config import resolve
from clvla.run.folder import RunFolder
from clvla.run.stop import Stopped
from clvla.train.config import TrainConfig
from clvla.train.held_out import action_error, hold_out
from clvla.train.learner import Imitation, train_cl
from clvla.train.robot import RobotPolicy, columns_of, part_of


def episode(T, seed=0, h=20, w=30, A=3):
    g = np_rng(seed, "robot test")
    return {IMAGE: g.integers(0, 256, (T, h, w, 3), np.uint8), IMAGES+"hand": g.integers(0, 256, (T, h//2, w//2, 3), np.uint8),
            STATE: g.normal(size=(T, 9)).astype(np.float32), ACTION: np.clip(g.normal(size=(T, A)), -1, 1).astype(np.float32), PROMPT: f"task {seed%2}"}


def config(tmp_path, suite, **kw):
    settings = dict(cl="er", evaluate="none", n_demos=10, steps_per_task=8, image_size=32, threads=1, device="cpu", held_out=.25)
    return resolve(TrainConfig(suite=suite, data_dir=str(tmp_path/"data"), run_dir=str(tmp_path/"run"), **settings | kw))


@pytest.fixture(scope="module")
def robot(tmp_path_factory):
    "A run that was trained on a robot's recordings: cameras whose names mean others here, turned pictures, quaternions, a gripper from 0 (open) to 1."
    home = tmp_path_factory.mktemp("robot")
    eps = [episode(6, seed) for seed in range(8)]
    for ep in eps:
        ep[ACTION][:,-1] = ep[ACTION][:,-1] > 0
        ep[STATE][:,3:7] /= np.linalg.norm(ep[STATE][:,3:7], axis=1, keepdims=True)
    write_lerobot(home/"recorded", eps, fps=10)
    layout = dict(cameras=dict(front=IMAGES+"hand", wrist=IMAGE), pictures="upright", state="quat_xyzw", gripper="0..1")
    lines = []
    run = train_cl(config(home, dict(base=str(home/"recorded"), layouts=dict(recorded=layout))), say=lines.append)
    return run.path,eps,lines,layout


def test_the_run_says_what_became_which_camera_and_what_was_resized(robot):
    lines = " ".join(robot[2])
    assert f"front = {IMAGES}hand, wrist = {IMAGE}" in lines
    assert "pictures of front 10 x 15, wrist 20 x 30 (height x width) become squares of 32 pixels" in lines


def test_the_robots_observation_is_the_frame_that_was_trained_on(robot):
    path,eps,_,layout = robot
    policy = RobotPolicy(path, "task 0", say=len)
    source = make_stream(dict(base=str(path.parent/"recorded"), layouts=dict(recorded=layout))).tasks[0]
    from clvla.data.lerobot import import_task
    store = import_task(source, path.parent/"frames", 32)
    raw = store.gather([2], policy.policy.H)
    from clvla.train.robot import seen_of
    seen = {k: eps[0][k][2] for k in (IMAGE, IMAGES+"hand", STATE)}
    mine = seen_of(seen, policy.columns, policy.policy.pixels, policy.layout)
    assert np.array_equal(mine[IMAGE][0].transpose(2, 0, 1), raw[IMAGE][0].numpy())
    assert np.array_equal(mine[IMAGES+"wrist"][0].transpose(2, 0, 1), raw[IMAGES+"wrist"][0].numpy())
    assert np.allclose(mine[STATE], raw[STATE].numpy(), atol=1e-6)
    assert policy(seen).shape == (policy.policy.H, 3)


def test_the_gripper_is_turned_back(robot):
    path,eps,*_ = robot
    policy = RobotPolicy(path, "task 1", say=len)
    last = policy({k: eps[1][k][0] for k in (IMAGE, IMAGES+"hand", STATE)})[:,-1]
    a,b = GRIPPERS["0..1"]
    assert set(np.round(a*last+b, 5)) <= {-1., 1.} and set(np.round(last, 5)) <= {0., 1.}


def test_the_same_seed_gives_the_same_actions(robot):
    path,eps,*_ = robot
    seen = {k: eps[0][k][0] for k in (IMAGE, IMAGES+"hand", STATE)}
    first,again,other = (RobotPolicy(path, "task 0", seed=s, say=len) for s in (0, 0, 1))
    assert np.array_equal(first(seen), again(seen))
    assert not np.array_equal(first(seen), other(seen))


@pytest.mark.parametrize("change, says", [
    (lambda s: s.pop(STATE), "lacks ['observation.state']"),
    (lambda s: s.pop(IMAGES+"hand"), "lacks ['observation.images.hand']"),
    (lambda s: s.update({IMAGES+"hadn": s[IMAGE]}), "does not read 'observation.images.hadn'; did you mean"),
    (lambda s: s.update({STATE: [1., 2.]}), "the state has 2 numbers"),
    (lambda s: s.update({STATE: np.full(9, np.nan)}), "expected finite numbers"),
    (lambda s: s.update({IMAGE: np.zeros((4, 4), np.uint16)}), "may be depth"),
    (lambda s: s.update({IMAGE: np.full((9, 9, 3), 2.)}), "expected 0..1")])
def test_what_was_not_trained_on_is_refused(robot, change, says):
    path,eps,*_ = robot
    seen = {k: eps[0][k][0] for k in (IMAGE, IMAGES+"hand", STATE)}
    change(seen)
    with pytest.raises(ValueError) as e: RobotPolicy(path, "task 0", say=len)(seen)
    assert says in str(e.value)


def test_a_run_without_a_checkpoint_and_a_task_that_is_meant_by_nobody(robot, tmp_path):
    with pytest.raises(FileNotFoundError): RobotPolicy(tmp_path)
    with pytest.raises(ValueError, match="no single task ''"): RobotPolicy(robot[0], say=len)


def test_a_data_set_in_several_layouts_is_chosen_by_name():
    from clvla.data.streams import Task
    parts = [dict(path="/there/left", layout=dict(gripper="0..1")), dict(path="/there/right", layout={})]
    task = Task("pour", "pour the tea", 1, source=dict(parts=parts))
    with pytest.raises(ValueError, match="/there/left, /there/right in different layouts; say which"): part_of(task)
    assert part_of(task, "right") is part_of(task, "/there/right") is parts[1]
    with pytest.raises(ValueError, match="nothing from 'rigth'; did you mean"): part_of(task, "rigth")


def test_a_machine_without_the_data_set_is_told_the_cameras(robot, tmp_path):
    path,eps,_,layout = robot
    gone,wanted = dict(path=str(tmp_path/"gone"), layout={}),[IMAGE, IMAGES+"wrist"]
    with pytest.raises(ValueError, match="is not on this machine; say it by cameras="): columns_of(gone, wanted)
    assert columns_of(gone, wanted, layout["cameras"]) == {IMAGE: IMAGES+"hand", IMAGES+"wrist": IMAGE, STATE: STATE}
    with pytest.raises(ValueError, match="name no column for wrist"): columns_of(gone, wanted, dict(front=IMAGE))
    other = RobotPolicy(path, "task 0", say=len, cameras=dict(front="top", wrist="grip"))
    seen = dict(top=eps[0][IMAGES+"hand"][0], grip=eps[0][IMAGE][0]) | {STATE: eps[0][STATE][0]}
    same = {k: eps[0][k][0] for k in (IMAGE, IMAGES+"hand", STATE)}
    assert np.array_equal(other(seen), RobotPolicy(path, "task 0", say=len)(same))


def test_an_agent_is_no_policy_of_demonstrations(tmp_path):
    RunFolder(tmp_path/"agent").begin(resolve(AgentConfig(suite="dot_2", run_dir=str(tmp_path/"agent"))))
    with pytest.raises(ValueError, match="a run of learner 'agent', expected imitation or practice"): RobotPolicy(tmp_path/"agent")


def test_practice_holds_nothing_out(tmp_path):
    "Its rounds train on all demonstrations."
    cfg = resolve(PracticeConfig(suite="dot_2", held_out=.2, run_dir=str(tmp_path/"run")))
    with pytest.raises(ValueError, match="held_out 0.2 leaves demonstrations out"): check_practice(cfg)


# demonstrations that are held out

def test_nothing_that_is_held_out_is_trained_on_or_counted(tmp_path):
    stores = {k: write_store(tmp_path/k, [episode(4+i, i) | {IMAGE: np.zeros((4+i, 8, 8, 3), np.uint8)} for i in range(6)]) for k in ("a", "b")}
    trained,held = hold_out(stores, .4)
    for k,store in stores.items():
        assert (trained[k].n_episodes, held[k].n_episodes) == (4, 2)
        both = np.concatenate([trained[k].action, held[k].action])
        assert sorted(map(bytes, both)) == sorted(map(bytes, store.action))
    assert hold_out(stores, 0.) == (stores, {})


@pytest.mark.parametrize("cl", ["joint", "packnet", "cumulative"])
def test_every_way_of_learning_is_measured(tmp_path, cl):
    run = train_cl(config(tmp_path, "dot_2", cl=cl), say=len)
    rows = read_json(run.path/"held_out.json")
    tasks = [r["task"] for r in rows]
    assert tasks == (["left", "right"] if cl == "joint" else ["left", "left", "right"])
    assert all(np.isfinite(r["ratio"]) and r["frames"] > 0 for r in rows)


def test_discrete_actions_are_right_or_wrong(tmp_path):
    suite = dict(base="dot_2", env=dict(discrete=True))
    run = train_cl(config(tmp_path, suite, head="discrete", chunk=1, steps_per_task=60, cl="joint"), say=len)
    for r in read_json(run.path/"held_out.json"): assert 0 <= r["error"] <= 1 and r["error"] < r["constant"], r


def test_a_run_that_was_stopped_measures_the_same(tmp_path, monkeypatch):
    whole = read_json(train_cl(config(tmp_path/"a", "dot_2"), say=len).path/"held_out.json")
    cfg,measure,n = config(tmp_path/"b", "dot_2"),Imitation.measure_held_out,[]
    def stops(self, t):
        n.append(t)
        if len(n) == 2: raise Stopped("asked to stop")
        measure(self, t)
    monkeypatch.setattr(Imitation, "measure_held_out", stops)
    with pytest.raises(Stopped): train_cl(cfg, say=len)
    assert [r["stage"] for r in read_json(tmp_path/"b/run/held_out.json")] == [0]
    assert read_json(train_cl(cfg, say=len).path/"held_out.json") == whole


def test_weights_do_not_depend_on_measuring(tmp_path, monkeypatch):
    "The measure draws nothing from a run's own generators."
    load = lambda path: torch.cat([v.flatten() for v in RobotPolicy(path, "left", say=len).policy.state_dict().values() if v.is_floating_point()])
    a = load(train_cl(config(tmp_path/"a", "dot_2"), say=len).path)
    monkeypatch.setattr(Imitation, "measure_held_out", lambda self, t: None)
    assert torch.equal(a, load(train_cl(config(tmp_path/"b", "dot_2"), say=len).path))


@pytest.mark.parametrize("kw, says", [(dict(held_out=1.), "held_out lies in [0,1)"), (dict(held_out=-.1), "held_out lies in [0,1)"),
                                      (dict(n_demos=1), "it needs 2 or more")])
def test_a_share_that_cannot_be(tmp_path, kw, says):
    with pytest.raises(ValueError) as e: train_cl(config(tmp_path, "dot_2", **kw), say=len)
    assert says in str(e.value)


def test_a_config_of_before_is_the_same_run(tmp_path):
    cfg = config(tmp_path, "dot_2", held_out=0.)
    from clvla.run.config import identity
    assert "held_out" not in identity(cfg)
    assert identity(config(tmp_path, "dot_2"))["held_out"] == .25


def test_the_error_leaves_out_what_lies_behind_an_episodes_end():
    recorded = np.zeros((2, 3, 1), np.float32)
    recorded[:,0] = [[1], [-1]]
    said = recorded.copy()
    said[:,1:] = 99
    inside = np.array([[True, False, False]]*2)
    assert action_error(said, recorded, inside, [0])["ratio"] == 0
