"Streams, frame stores, statistics, loaders, LeRobot data sets and demonstrations: matrices of cases and faults."
import json, subprocess, sys
from pathlib import Path
import numpy as np
import pytest
import torch
from clvla.core.names import ACTION, IMAGE, INDEX, PAD, PROMPT, STATE, TASK_ID
from clvla.core.files import read_json, write_json
from clvla.data.demos import FIRST_TRIAL, make_demos, noise_of, record, record_one
from clvla.data.frames import FrameStore, check_episode, check_files, chunk_index, reuse_store, write_store
from clvla.data.lerobot import camera_map, episode_list, fingerprint, import_lerobot, import_task, read_lerobot
from clvla.data.lerobot_write import decode_image, encode_png, features, lerobot_ready, write_lerobot
from clvla.envs.libero.tasks import SUITE_OF, libero_id, libero_prompt
from clvla.data.loader import TaskData, TaskLoader
from clvla.data.stats import (Processor, array_stats, check_stats, compute_stats, modes, read_stats,
    recompute_stats, write_stats)
from clvla.data.partition import partitions
from clvla.data.streams import Stream, Task, stream_from, stream_json
from clvla.envs.all import defaults_of, kind_of, kinds, make_stream, stream_names
from clvla.envs.kind import Kind
from clvla.envs.metaworld.tasks import BUTTONS, HALFWAY, MT50, metaworld_task

torch.set_num_threads(1)
KEYS = (IMAGE, STATE, ACTION)

def episode(T, seed=0, prompt="Push the block", size=12, S=2, A=3):
    "A drawn episode of T frames."
    g = np.random.default_rng(seed)
    return {IMAGE: g.integers(0, 255, (T,size,size,3), np.uint8), STATE: g.normal(size=(T,S)).astype(np.float32),
            ACTION: g.normal(size=(T,A)).astype(np.float32), PROMPT: prompt}

@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    "Three LeRobot data sets: two tasks, one of the same tasks again, one of its own; episode numbers collide."
    root = tmp_path_factory.mktemp("sets")
    two = write_lerobot(root/"two", [episode(7, 0), episode(5, 1, "Pull the block"), episode(6, 2)])
    again = write_lerobot(root/"again", [episode(4, 3, "Pull the block")])
    own = write_lerobot(root/"own", [episode(9, 4, "Wave")])
    return dict(two=two, again=again, own=own)

@pytest.fixture
def data(tmp_path):
    stores = {f"t{k}": write_store(tmp_path/f"t{k}", [episode(10+3*k+j, 10*k+j, f"Do {k}") for j in range(3)])
              for k in range(3)}
    return TaskData(stores, Processor(compute_stats(stores)), H=4)

# streams

@pytest.mark.parametrize("name", stream_names())
def test_registered_streams(name):
    s = make_stream(name)
    assert len(s.stages) == len(s) == len(s.tasks)*s.cycles
    assert [g.t for g in s.stages] == list(range(len(s)))
    assert all(s[g.task.id] is g.task for g in s.stages)
    assert stream_from(json.loads(json.dumps(stream_json(s)))) == s

@pytest.mark.parametrize("name", [name for kind in ("metaworld", "libero") for name in kinds[kind].streams()])
def test_prompts_and_limits_of_robots(name):
    prompts = {k: text for k,(_,text) in MT50.items()} | BUTTONS | {k: MT50[stock][1] for k,stock in HALFWAY.items()} | {libero_id(o): libero_prompt(o) for o in SUITE_OF}
    for task in make_stream(name).tasks: assert task.prompt == prompts[task.id] and task.env["max_steps"] >= (120 if name in ("mw5", "mw10") else 150)

@pytest.mark.parametrize("order", [[0,1,2], [2,1,0], [1,2,0], ["faucet-open","handle-press","window-close"]])
@pytest.mark.parametrize("cycles", [1,3])
def test_order_and_cycles(order, cycles):
    base = make_stream(dict(base="mw5_narrow", num_tasks=3))
    s = make_stream(dict(base="mw5_narrow", num_tasks=3, task_order=order), cycles=cycles)
    want = [o if isinstance(o, str) else base.ids[o] for o in order]
    assert s.ids == want and [g.task.id for g in s.stages] == want*cycles
    assert {o.id for o in s.tasks} == set(base.ids) and make_stream(base, task_order=order).ids == want

@pytest.mark.parametrize("spec,kw,said", [
    ("mw55", {}, "did you mean 'mw5'?"), ("/no/such/folder", {}, "neither a registered stream nor an existing folder"),
    (dict(base="mw5_narrow", num_tasks=9), {}, "1..5"), (dict(base="mw5_narrow", num_tasks=0), {}, "1..5"),
    (dict(base="mw5_narrow", tasks=["window-clos"]), {}, "did you mean 'window-close'?"), (dict(num_tasks=2), {},
                                                                                    "needs 'base'"),
    (dict(base="mw5_narrow", orders=[0]), {}, "did you mean 'task_order'?"), ("mw5", dict(task_order=[0,1]),
                                                                       "each of the 5 tasks once"),
    ("mw5", dict(task_order=[0,1,2,3,3]), "each of the 5 tasks once"), ("mw5", dict(cycles=0), "at least 1"),
    ("mw5", dict(partition="by_taskindex"), "did you mean 'by_task_index'?")])
def test_bad_streams(spec, kw, said):
    with pytest.raises(ValueError, match=said.replace("?", r"\?").replace("..", r"\.\.")): make_stream(spec, **kw)

@pytest.mark.parametrize("spec,said", [
    (dict(base="mw5_narrow", env=dict(max_stepz=9)), "did you mean 'max_steps'"), (dict(base="mw5_narrow", eval_env=dict(max_stepz=9)), "did you mean 'max_steps'"),
    (dict(base="mw5_narrow", env=dict(max_steps="9")), "'max_steps' is '9', expected int"), (dict(base="mw5_narrow", env=dict(max_steps=True)), "expected int"),
    (dict(base="mw5_narrow", env=dict(max_steps=0)), "found 0"), (dict(base="libero_goal", env=dict(protokol="fast")), "did you mean 'protocol'"),
    (dict(base="mw5_narrow", env=dict(cell=.1)), "has no entry 'cell'"), (dict(base="mw5_narrow", probes=["pull"]), "no task 'pull'"),
    (dict(base="mw5_narrow", budget={"pull": 9}), "no task 'pull'"), (dict(base="mw5_narrow", budget=0), "above 0, found 0"), (dict(base="mw5_narrow", budget={"faucet-open": "9"}), "found '9'"),
    (dict(base="mw5_narrow", metaword={}), "did you mean 'metaworld'"), ("", "name is empty"), ([], "name is empty"), ([""], "name is empty")])
def test_nested_entries_are_checked_at_the_door(spec, said):
    with pytest.raises(ValueError, match=said): make_stream(spec)

def test_a_registered_task_with_an_unknown_entry_is_refused():
    task = metaworld_task("push"); wrong = Task("x", "x", "x", task.env|dict(max_stepz=9))
    with pytest.raises(ValueError, match="env of task 'x' has no entry 'max_stepz'"): make_stream(Stream("mine", (task, wrong)))

def test_probes_budgets_and_environments_of_evaluation():
    s = make_stream(dict(base="mw5_narrow", num_tasks=3, probes=["faucet-open-v3"], budget=70, eval_env=dict(max_steps=200), task_order=[2,1,0]), cycles=2)
    assert s.ids == ["faucet-open", "window-close", "handle-press"] and [g.task.id for g in s.stages] == ["window-close", "handle-press"]*2
    assert {t.budget for t in s.tasks} == {70} and {t.eval_env["max_steps"] for t in s.tasks} == {200} and len(s) == 4
    assert stream_from(json.loads(json.dumps(stream_json(s)))) == s

def test_streams_that_were_stored_before_the_newer_entries_are_read():
    d = stream_json(make_stream("mw5_narrow"))
    older = d | dict(tasks=[{k: t[k] for k in ("id", "name", "prompt", "env", "source")} for t in d["tasks"]])
    assert stream_from(older) == make_stream("mw5_narrow")

def test_defaults_follow_from_the_stream_that_was_made(sets, tmp_path):
    folder = tmp_path/"libero_goal"; sets["own"].rename(folder)   # a folder whose name says nothing of what is in it
    try: assert defaults_of(make_stream(folder))["n_demos"] == 25
    finally: folder.rename(sets["own"])
    mixed = [kinds[k].streams()[name].tasks[0] for k, name in (("libero", "libero_goal"), ("metaworld", "mw5"))]
    assert [defaults_of(Stream("x", order))["n_demos"] for order in (mixed, mixed[::-1])] == [50, 25]

def test_kinds_of_somebody_else():
    class Mine: entries = ("speed",)
    kinds["mine"] = Kind(label="Mine", env=Mine, defaults=dict(n_demos=3))
    try:
        task = Task("a", "a", "Go", dict(kind="mine", name="a", speed=2))
        s = make_stream(Stream("mine", (task,)))
        assert defaults_of(s) == Kind.defaults | dict(n_demos=3) and kind_of(task).recipe == Kind.recipe
        with pytest.raises(ValueError, match="did you mean 'speed'"): make_stream(dict(base=s, env=dict(spede=3)))
    finally: kinds.pop("mine")
    kinds["bare"] = Mine
    try:
        with pytest.raises(ValueError, match="expected a Kind; register Kind"): kind_of(dict(kind="bare", name="a"))
    finally: kinds.pop("bare")

def test_empty_or_doubled_streams():
    with pytest.raises(ValueError, match="no tasks"): Stream("x", ())
    with pytest.raises(ValueError, match="task ids twice"): Stream("x", (metaworld_task("push"),)*2)
    with pytest.raises(ValueError, match="did you mean 'push'"): metaworld_task("pusch")

@pytest.mark.parametrize("which,partition,ids", [
    (["two"], "auto", ["push-the-block","pull-the-block"]), (["two"], "by_task_index",
                                                             ["push-the-block","pull-the-block"]),
    (["two"], "by_dataset", ["two"]), (["own"], "auto", ["own"]), (["own","again"], "auto", ["wave","pull-the-block"]),
    (["two","again"], "by_dataset", ["two","again"]), (["two","again"], "by_task_index",
                                                       ["push-the-block","pull-the-block"])])
def test_partitions(sets, tmp_path, which, partition, ids):
    paths = [sets[k] for k in which]
    assert make_stream(paths, partition=partition).ids == ids
    stores = import_lerobot(paths, tmp_path, partition)
    assert list(stores) == ids and sum(map(len, stores.values())) == sum(n for p in paths for _,n,_ in episode_list(p))

def test_partition_names(): assert set(partitions) == {"auto","by_task_index","by_dataset"}

def test_inline_stream_over_data_sets(sets):
    s = make_stream(dict(base=[str(sets["two"]), str(sets["own"])], tasks=["wave","push-the-block"], task_order=[1,0],
                         cycles=2))
    assert s.ids == ["push-the-block","wave"] and len(s) == 4

def test_a_data_set_counts_once(sets, tmp_path):
    (tmp_path/"link").symlink_to(sets["two"])
    for paths in ([sets["two"]]*2, [sets["two"], sets["own"], tmp_path/"link"]):
        for partition in ("auto", "by_task_index", "by_dataset"):
            with pytest.raises(ValueError, match="named twice .*frames would count twice"): make_stream(paths, partition=partition)
        with pytest.raises(ValueError, match="named twice"): make_stream(dict(tasks=[dict(data=[str(p) for p in paths])]))

def test_colliding_episode_numbers(sets, tmp_path):
    s = import_lerobot([sets["two"], sets["again"]], tmp_path, "by_task_index")["pull-the-block"]
    assert s.episode_lengths.tolist() == [5,4] and (s.images[IMAGE][5:] == episode(4, 3)[IMAGE]).all()

def test_same_sentence_different_case_stays_apart(tmp_path):
    p = write_lerobot(tmp_path/"d", [episode(3, 0, "Go!"), episode(3, 1, "go")])
    assert make_stream(p).ids == ["go","go-2"]

# frame stores

@pytest.mark.parametrize("key", [IMAGE, STATE, ACTION, PROMPT])
def test_missing_keys(key):
    with pytest.raises(ValueError,
                       match=f"lacks '{key}'"): check_episode({k: v for k,v in episode(3).items() if k != key})

@pytest.mark.parametrize("change,said", [
    ({IMAGE: np.zeros((3,4,4,3), np.float32)}, "uint8"), ({IMAGE: np.zeros((3,3,4,4), np.uint8)},
                                                          "uint8"), ({STATE: np.zeros((2,2))}, "2 frames"),
    ({ACTION: np.full((3,3), np.nan)}, "finite"), ({STATE: np.zeros(3)}, "finite and of shape")])
def test_bad_episodes(change, said):
    with pytest.raises(ValueError, match=said): check_episode({**episode(3), **change})

def test_write_refuses_and_leaves_no_whole_store(tmp_path):
    with pytest.raises(ValueError, match="shape"): write_store(tmp_path/"a", [episode(3), episode(3, size=8)])
    with pytest.raises(ValueError, match="half-written"): FrameStore.open(tmp_path/"a")
    with pytest.raises(ValueError, match="announced"): write_store(tmp_path/"b", [episode(3)], n_frames=4)
    with pytest.raises(ValueError, match="more than"): write_store(tmp_path/"c", [episode(3)], n_frames=2)
    assert len(write_store(tmp_path/"a", [episode(3)])) == 3

@pytest.mark.parametrize("harm,said", [
    (lambda p: (p/"meta.json").unlink(), "half-written"), (lambda p: (p/"images.front.npy").unlink(),
                                                           "images.front.npy is missing"),
    (lambda p: (p/"state.npy").write_bytes((p/"state.npy").read_bytes()[:-4]),
     "bytes"), (lambda p: np.save(p/"action.npy", np.ones((12,3), np.float32)), "changed"),
    (lambda p: (p/"meta.json").write_text("{"),
     "not valid JSON"),
     (lambda p: write_json(p/"meta.json", {**read_json(p/"meta.json"), "version": 0}), "layout version 0")])
def test_damaged_stores_are_named(tmp_path, harm, said):
    write_store(tmp_path/"s", [episode(5), episode(7)]); harm(tmp_path/"s")
    with pytest.raises(ValueError, match=said): FrameStore.open(tmp_path/"s")

def test_sizes_are_compared_and_contents_on_request(tmp_path):
    s = write_store(tmp_path/"s", [episode(5)]); np.save(tmp_path/"s/state.npy", s.state+1)
    check_files(tmp_path/"s", s.meta, deep=False)
    with pytest.raises(ValueError, match="changed"): check_files(tmp_path/"s", s.meta)

def test_no_store_there(tmp_path):
    with pytest.raises(ValueError, match="no frame store"): FrameStore.open(tmp_path/"none")

def test_reuse(tmp_path, capsys):
    assert reuse_store(tmp_path/"s", {}) is None
    write_store(tmp_path/"s", [episode(5)], source=dict(a=1))
    assert len(reuse_store(tmp_path/"s", dict(a=1))) == 5
    with pytest.raises(ValueError, match="a: 1 -> 2"): reuse_store(tmp_path/"s", dict(a=2))
    (tmp_path/"s/meta.json").unlink()
    assert reuse_store(tmp_path/"s", dict(a=1)) is None and "half-written" in capsys.readouterr().out

@pytest.mark.parametrize("H", [1,4,20])
def test_chunks_never_leave_their_episode(tmp_path, H):
    eps = [episode(5, 0), episode(8, 1)]; s = write_store(tmp_path/"s", eps); b = s.gather(np.arange(13), H)
    for i,(e,f) in enumerate([(e, f) for e in range(2) for f in range(len(eps[e][ACTION]))]):
        n = len(eps[e][ACTION])
        want = eps[e][ACTION][np.minimum(f+np.arange(H), n-1)]
        assert (b[ACTION][i].numpy() == want).all() and b[PAD][i].tolist() == [f+h >= n for h in range(H)]
    assert chunk_index(np.array([4]), s.end, 3)[0].tolist() == [[4,4,4]]
    assert b[IMAGE].shape == (13,3,12,12) and (b[IMAGE].permute(0, 2, 3,
                                                                1).numpy() == np.concatenate([e[IMAGE]
                                                                                              for e in eps])).all()

def test_several_cameras_and_instructions(tmp_path):
    wrist = "observation.images.wrist"; eps = [{**episode(4, k, f"Say {k}"), wrist: episode(4, 9+k)[IMAGE]}
                                               for k in range(2)]
    b = write_store(tmp_path/"s", eps).gather([0,4,1], 2)
    assert b[PROMPT] == ["Say 0","Say 1","Say 0"] and (b[wrist][1].permute(1, 2, 0).numpy() == eps[1][wrist][0]).all()

# statistics

def test_stats_are_pooled_numpy(data):
    stats = compute_stats(data.stores)
    for key,name in ((STATE,"state"), (ACTION,"action")):
        x = np.concatenate([{"state": s.state, "action": s.action}[name]
                            for s in data.stores.values()]).astype(np.float64)
        want = dict(mean=x.mean(0), std=x.std(0), min=x.min(0), max=x.max(0), q01=np.quantile(x, .01, axis=0),
                    q99=np.quantile(x, .99, axis=0))
        for k,v in want.items(): np.testing.assert_allclose(stats[key][k], v, rtol=0, atol=1e-12)
        assert stats[key]["count"] == len(x)
    first = compute_stats(data.stores["t0"])
    assert first[STATE]["count"] == len(data.stores["t0"]) and first != stats

def axes(T=400):
    "Free, constant, binary, mostly constant (quantiles coincide), and far from zero."
    g = np.random.default_rng(0); rare = np.full(T, .25); rare[:2] = [-1,.9]
    return np.stack([g.normal(size=T), np.full(T, .3), g.choice([0.,1.], T), rare, 50+g.normal(size=T)],
                    1).astype(np.float32)

@pytest.mark.parametrize("mode", list(modes))
@pytest.mark.parametrize("kind", ["numpy","torch"])
def test_round_trip(mode, kind):
    x = axes(); s = array_stats(x); p = Processor({STATE: s, ACTION: s}, mode, mode)
    assert s["constant"] == [False,True,False,False,False] and s["binary"] == [False,False,True,False,False]
    y = p({ACTION: torch.from_numpy(x).reshape(100, 4, 5)})[ACTION]; back = p.unnormalise(y if kind == "torch"
                                                                                          else y.numpy())
    assert isinstance(back, torch.Tensor if kind == "torch" else np.ndarray) and back.shape == (100,4,5)
    np.testing.assert_allclose(np.asarray(back).reshape(-1, 5)[:,:4], x[:,:4], rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.asarray(back).reshape(-1, 5)[:,4], x[:,4], rtol=1e-6)
    assert torch.isfinite(y).all() and y[...,:4].abs().max() < 100
    if mode != "identity": assert (y[...,1] == 0).all() and set(y[...,2].unique().tolist()) == {-1.,1.}

def test_binary_snaps_at_the_middle_and_constants_stay():
    s = array_stats(axes()); p = Processor({STATE: s, ACTION: s})
    out = p.unnormalise(np.array([[0,9,.01,0,0], [0,-9,-.01,0,0]], np.float32))
    assert out[:,2].tolist() == [1,0] and np.allclose(out[:,1], .3)

@pytest.mark.parametrize("change,said", [
    (dict(mean=[0.]*2), "are for"), (dict(q01=[9.]*3), "contradict"), (dict(std=[-1.]*3),
                                                                       "contradict"),
                                                                       (dict(mean=[np.nan]*3), "not finite"),
    (dict(mask=[True]*3), "need the entries")])
def test_bad_stats(data, change, said):
    stats = compute_stats(data.stores)
    with pytest.raises(ValueError, match=said): check_stats({**stats, ACTION: {**stats[ACTION], **change}})
    with pytest.raises(ValueError, match=said): Processor({**stats, ACTION: {**stats[ACTION], **change}})

def test_stats_file(data, tmp_path):
    f = tmp_path/"dataset_statistics.json"; stats = compute_stats(data.stores); write_stats(f, stats)
    assert read_stats(f, 2, 3) == stats and recompute_stats(f, data.stores) == []
    with pytest.raises(ValueError, match="has 7"): read_stats(f, action_dim=7)
    with pytest.raises(ValueError, match="need the keys"): check_stats(dict(franka={}))
    write_json(f, {**stats, ACTION: {**stats[ACTION], "mean": [0.]*3}})
    assert recompute_stats(f, data.stores) == ["action.mean"] and read_stats(f) == stats

@pytest.mark.parametrize("norm", list(modes))
def test_training_and_evaluation_see_the_same(data, norm):
    p = Processor(compute_stats(data.stores), norm, norm); s = data.stores["t1"]
    train = p(s.gather(np.arange(len(s)), 4)); seen = p.obs({IMAGE: np.asarray(s.images[IMAGE]), STATE: s.state})
    again = Processor.from_json(json.loads(json.dumps(p.to_json()))).obs({IMAGE: s.gather(np.arange(len(s)),
                                                                                          1)[IMAGE], STATE: s.state})
    for k in (IMAGE, STATE): assert torch.equal(train[k], seen[k]) and torch.equal(train[k], again[k])

def test_processor_refuses(data):
    p = data.processor
    for bad in (np.zeros((2,3,8,8), np.uint8), np.zeros((2,8,8,3), np.float32),
                torch.zeros(2, 8, 8, 3, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="must be uint8"): p.obs({IMAGE: bad})
    with pytest.raises(ValueError, match="9 numbers"): p({STATE: torch.zeros(2, 9)})
    with pytest.raises(ValueError, match="did you mean 'mean_std'"): Processor(p.stats, "meanstd")

# loader

@pytest.mark.parametrize("ids", [["t0"], ["t2","t0"], ["t0","t1","t2"]])
@pytest.mark.parametrize("B", [1,7,32,100])
def test_every_frame_once_an_epoch(data, ids, B):
    loader = TaskLoader(data, ids, seed=3); n = len(loader); refs = []
    while len(refs) < 3*n: refs += loader.refs(B)
    for e in range(3): assert sorted(refs[e*n:(e+1)*n]) == sorted(loader.all_refs())
    assert refs[:n] != refs[n:2*n] and TaskLoader(data, ids, seed=3).refs(3*n) == refs[:3*n]
    assert TaskLoader(data, ids, seed=4).refs(n) != refs[:n] != TaskLoader(data, ids, 3, "other").refs(n)

@pytest.mark.parametrize("stop", [0,5,33,70])
def test_loader_resumes(data, stop):
    a = TaskLoader(data, ["t0","t1"],
                   seed=0); a.refs(stop); state = json.loads(json.dumps(a.state_dict())); want = a.refs(90)
    b = TaskLoader(data, ["t0","t1"], seed=0); b.load_state_dict(state)
    assert b.refs(90) == want and b.state_dict() == a.state_dict()

def test_batches_are_what_their_references_name(data):
    b = TaskLoader(data, ["t0","t1","t2"], seed=0).next(20)
    assert b[PROMPT] == [f"Do {t[1:]}" for t in b[TASK_ID]]
    for i,(t,f) in enumerate(zip(b[TASK_ID], b[INDEX].tolist())):
        assert (b[IMAGE][i].permute(1, 2, 0).numpy() == data.store(t).images[IMAGE][f]).all()
        assert torch.equal(b[ACTION][i], data.fetch(t, [f])[ACTION][0])

def test_sample_batches_do_not_move_the_loader(data):
    l = TaskLoader(data, ["t0"], seed=0); l.refs(5); before = l.state_dict()
    one,two = ([b[INDEX].tolist() for b in l.sample_batches(3, 4, "fisher")] for _ in range(2))
    assert one == two and l.state_dict() == before and one != [b[INDEX].tolist()
                                                               for b in l.sample_batches(3, 4, "other")]

def test_loader_refuses(data, tmp_path):
    with pytest.raises(ValueError, match="did you mean"): TaskLoader(data, ["t9"], 0)
    with pytest.raises(ValueError, match="at least one task"): TaskLoader(data, [], 0)
    with pytest.raises(ValueError, match="-1 samples"): TaskLoader(data, ["t0"], 0).refs(-1)
    with pytest.raises(ValueError, match="this one reads"): TaskLoader(data, ["t0"],
                                                                       0).load_state_dict(dict(epoch=0, position=0,
                                                                                               task_ids=["t1"]))
    with pytest.raises(ValueError, match="did the data change"): TaskLoader(data, ["t0"],
                                                                            0).load_state_dict(dict(epoch=0,
                                                                                                    position=999,
                                                                                                    task_ids=["t0"]))
    with pytest.raises(ValueError, match="equal state, action and image"):
        TaskData({**data.stores, "x": write_store(tmp_path/"x", [episode(3, size=8)])}, data.processor, 4)
    assert data.fetch_refs([]) == {}

# LeRobot data sets

@pytest.mark.parametrize("codec", ["png","h264"])
def test_lerobots_own_class_opens_it(tmp_path, codec):
    y = np.linspace(30, 220, 48)[:,None,None]
    eps = [{**episode(12+k, k, f"Task {k%2}", 48),
            IMAGE: np.broadcast_to(y+5*k, (12+k,48,48,3)).astype(np.uint8).copy()} for k in range(3)]
    for e in eps: e[IMAGE][:,10:20,10:20] = [200,30,30]
    p = write_lerobot(tmp_path/"d", eps, fps=10, codec=codec); back = list(read_lerobot(p))
    assert [e[PROMPT] for e in back] == ["Task 0","Task 1","Task 0"]
    column = read_json(p/"meta/info.json")["features"][IMAGE]
    assert {k: column[k] for k in ("dtype","shape","names")} == features(eps[0], codec)[IMAGE]
    for a,b in zip(eps, back):
        assert (a[ACTION] == b[ACTION]).all() and (a[STATE] == b[STATE]).all() and a[IMAGE].shape == b[IMAGE].shape
        mse = ((a[IMAGE].astype(float)-b[IMAGE])**2).mean()
        assert mse == 0 if codec == "png" else 10*np.log10(255**2/mse) > 38
    with lerobot_ready() as LeRobotDataset:
        ds = LeRobotDataset("local/d", root=p, delta_timestamps={ACTION: [0,.1,.2]}, video_backend="pyav")
        assert ds.num_episodes == 3 and len(ds) == 39
        x = ds[13]
        assert x[PROMPT] == "Task 1" and x[ACTION].shape == (3,3) and np.allclose(x[ACTION][1], eps[1][ACTION][2])
        if codec == "png": assert torch.equal((x[IMAGE]*255).round().byte().permute(1, 2, 0),
                                              torch.from_numpy(eps[1][IMAGE][1]))
        np.testing.assert_allclose(ds.meta.stats[ACTION]["mean"], np.concatenate([e[ACTION] for e in eps]).mean(0),
                                   atol=1e-6)
        assert len(LeRobotDataset("local/d", root=p, episodes=[1])) == 13

def test_a_data_set_that_lerobot_wrote(tmp_path):
    eps = [episode(6, k, f"Task {k}", 16) for k in range(2)]
    with lerobot_ready() as LeRobotDataset:
        ds = LeRobotDataset.create("local/x", fps=5, root=tmp_path/"x", features=features(eps[0]), use_videos=False)
        for e in eps:
            for i in range(6): ds.add_frame({k: v if k == PROMPT else v[i] for k,v in e.items()})
            ds.save_episode()
        ds.finalize()
    for a,b in zip(eps, read_lerobot(tmp_path/"x")): assert all((a[k] == b[k]).all()
                                                                for k in KEYS) and a[PROMPT] == b[PROMPT]

def test_data_sets_that_are_none(tmp_path, sets):
    with pytest.raises(ValueError, match="info.json is missing"): list(read_lerobot(tmp_path))
    with pytest.raises(ValueError, match="exists already"): write_lerobot(sets["two"], [episode(3)])
    with pytest.raises(ValueError, match="at least one episode"): write_lerobot(tmp_path/"none", [])
    with pytest.raises(ValueError, match="did you mean 'h264'"): write_lerobot(tmp_path/"none", [episode(3)],
                                                                               codec="h265")
    with pytest.raises(ValueError, match="other columns"): write_lerobot(tmp_path/"none",
                                                                         [episode(3), episode(3, size=8)])
    assert not (tmp_path/"none").exists() and list(tmp_path.iterdir()) == []

@pytest.mark.parametrize("lost", [STATE, ACTION, IMAGE])
def test_missing_columns_are_named(sets, tmp_path, lost):
    info = read_json(sets["two"]/"meta/info.json"); info["features"].pop(lost)
    with pytest.raises(ValueError, match=r"lacks \['observation\.images\.<camera>'\]" if lost == IMAGE
                       else rf"lacks \['{lost}'\]"): camera_map(info)

def test_names_that_are_no_cameras_and_no_columns(tmp_path):
    "They were stored beside the frames, and nothing was learned from them."
    wrist,joints = "observation.images.wrist","observation.joints"
    ep = episode(4) | {wrist: episode(4)[IMAGE], joints: np.ones((4, 3), np.float32)}
    path = write_lerobot(tmp_path/"d", [ep])
    with pytest.raises(ValueError, match="names 'wrist', expected a key that begins with .*as in 'observation.images.wrist'"):
        import_lerobot(path, tmp_path/"s", cameras={IMAGE: IMAGE, "wrist": wrist})
    store, = import_lerobot(path, tmp_path/"s", cameras={IMAGE: IMAGE, wrist: wrist}).values()
    assert store.cameras == [IMAGE, wrist]
    for name in ("observation.states", "sate", IMAGE):
        with pytest.raises(ValueError, match=f"'columns' has no entry '{name}'"): make_stream(dict(base=str(path), layouts=dict(d=dict(columns={name: joints}))))
    task, = make_stream(dict(base=str(path), layouts=dict(d=dict(columns=dict(state=joints))))).tasks
    assert import_task(task, tmp_path/"t").state_dim == 3

def test_import_again_and_changed(sets, tmp_path):
    task = make_stream(sets["own"]).tasks[0]; s = import_task(task, tmp_path/"o", image_size=8)
    assert s.image_size == 8 and len(import_task(task, tmp_path/"o", image_size=8)) == 9
    with pytest.raises(ValueError, match="image_size: 8 -> 6"): import_task(task, tmp_path/"o", image_size=6)
    with pytest.raises(ValueError, match="does not come from"): fingerprint(metaworld_task("push"))

def test_picture_files():
    img = episode(1)[IMAGE][0]
    assert (decode_image(encode_png(img)) == img).all() and decode_image(encode_png(img), 5).shape == (5,5,3)

# demonstrations

class Line:
    "A point on a line with an expert that reaches the goal in every second trial."
    task_id,prompt,max_steps,cameras = "line","Go right",30,("front",)
    def __init__(self, spec=None, image_size=8, seed=0): self.h,self.trials = image_size,[]
    def reset(self, trial): self.x,self.lazy = 0.,trial%2; self.trials.append(trial)
    def expert(self): return np.array([0. if self.lazy else 2., 0, 0, .5])
    def step(self, a): self.x += .1*float(np.clip(a[0], -1, 1)); return 0.,self.x > .8,False,False
    def render(self, out=None, camera="front"): return np.full((self.h,self.h,3), int((100 if camera == "front" else 50)*abs(self.x))%255, np.uint8)
    def close(self): pass
    state = property(lambda self: np.array([self.x,0.]))

def test_record_keeps_successes_and_clean_actions():
    env = Line(); eps = record(env, 3, seed=0, tail=4); noisy = record(Line(), 3, seed=1)
    assert len(eps) == 3 and min(env.trials) >= FIRST_TRIAL and len(env.trials) == len(set(env.trials)) == 5
    assert all((e[ACTION] == [1,0,0,.5]).all() and (e[STATE][:-5,0] <= .9).all() for e in eps)
    assert all((a[STATE][:9] != b[STATE][:9]).any() for a,b in zip(eps, noisy))
    with pytest.raises(ValueError, match="at least 1"): record(env, 0, seed=0)

def test_a_success_after_the_last_step_is_none():
    "An attempt would have ended by then; the frames behind a success may come later."
    env = Line(); took = len(record_one(env, FIRST_TRIAL, np.random.default_rng(0), 0., 0)[ACTION])
    env.max_steps = took; assert len(record_one(env, FIRST_TRIAL, np.random.default_rng(0), 0., 4)[ACTION]) == took+4
    env.max_steps = took-1; assert record_one(env, FIRST_TRIAL, np.random.default_rng(0), 0., 4) is None

def test_every_camera_is_stored_and_every_axis_has_its_noise():
    env,wrist = Line(),f"{IMAGE[:-5]}wrist"; env.cameras = ("front","wrist"); done = []
    step = env.step; env.step = lambda a: (done.append(np.array(a)), step(a))[1]
    ep = record_one(env, FIRST_TRIAL, np.random.default_rng(0), (.1,.1,.1,.03), 2)
    assert list(ep) == [IMAGE, wrist, STATE, ACTION, PROMPT] and (ep[IMAGE][5] != ep[wrist][5]).any() and ep[wrist].shape == ep[IMAGE].shape
    eps = np.stack(done)-ep[ACTION]; want = np.random.default_rng(0).normal(0, 1, eps.shape)*[.1,.1,.1,.03]
    assert np.allclose(eps, want, atol=1e-6) and (ep[ACTION] == [1,0,0,.5]).all()
    plain = record_one(Line(), FIRST_TRIAL, np.random.default_rng(0), .15, 2)   # one number: the first three axes, as ever
    assert list(plain) == [IMAGE, STATE, ACTION, PROMPT] and noise_of(.15, 4).tolist() == [.15,.15,.15,0] and noise_of(.15, 2).tolist() == [.15,.15]
    with pytest.raises(ValueError, match="noise has 5 numbers, an action 4"): record_one(Line(), FIRST_TRIAL, np.random.default_rng(0), (.1,)*5)

TASK = Task("line", "line", "Go right", dict(kind="line", name="line"))

def test_demos_are_made_once(tmp_path, capsys):
    made = []
    def factory(spec, image_size, seed): made.append(spec); return Line(spec, image_size, seed)
    make = lambda **kw: make_demos(TASK, factory, tmp_path/"line", **(dict(n_demos=2, seed=0, image_size=8)|kinds["metaworld"].recipe|kw))
    s = make(); assert len(make()) == len(s) and len(made) == 1 and made[0]["prompt"] == "Go right"
    for kw in (dict(n_demos=3), dict(seed=1), dict(image_size=9), dict(noise=.2), dict(codec="h264")):
        with pytest.raises(ValueError, match=f"{next(iter(kw))}: "): make(**kw)
    (tmp_path/"line/frames/meta.json").unlink(); make()
    assert len(made) == 1 and "half-written" in capsys.readouterr().out
    (tmp_path/"line/demos.json").unlink(); make()
    assert len(made) == 2 and "recorded anew" in capsys.readouterr().out
    f = tmp_path/"line/lerobot/meta/stats.json"; f.write_text("{}")
    with pytest.raises(ValueError, match="stats.json changed after the recording"): make()
    with pytest.raises(ValueError, match="no environment"): make_demos(Task("x", "x", "x"), factory, tmp_path/"x", 1, 0, **kinds["metaworld"].recipe)
    with pytest.raises(TypeError, match="'nosie'"): make(nosie=.1)
    assert kinds["metaworld"].recipe == dict(noise=.15, tail=4, fps=10) and kinds["libero"].recipe["noise"][5] == .03

def test_metaworld_demonstrations(tmp_path):
    from clvla.envs.all import make_env
    task = metaworld_task("handle-press"); s = make_demos(task, make_env, tmp_path/task.id, n_demos=2, seed=0,
                                                          image_size=32, **kind_of(task).recipe)
    env = make_env(task.env, image_size=32, seed=0); obs = env.reset(FIRST_TRIAL); env.close()
    assert (s.images[IMAGE][0] == obs[IMAGE]).all() and (s.state[0] == obs[STATE]).all() and s.state_dim == 4
    assert np.abs(s.action).max() <= 1 and s.prompts == [task.prompt]

# layers

def test_importing_data_is_light():
    mods = "streams partition frames stats loader lerobot_write lerobot demos layouts".split()
    heavy = ("lerobot","datasets","metaworld","mujoco","av","transformers","pandas")
    code = "import sys\n" + "".join(f"import clvla.data.{m}\n" for m in mods)
    code += f"print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1],
                         check=True).stdout
    assert out.strip() == "[]"


def test_two_keys_never_lie_in_one_file(tmp_path):
    "`next.state` had overwritten `observation.state`."
    ep = episode(4) | {"next.state": np.full((4, 2), 99, np.float32)}
    with pytest.raises(ValueError, match="'observation.state' and 'next.state' would lie in one file"): write_store(tmp_path/"a", [ep])
    with pytest.raises(ValueError, match="'at.episode'|'episode'"): write_store(tmp_path/"b", [episode(4) | {"at.episode": np.zeros((4, 1), np.float32)}])
    assert np.allclose(write_store(tmp_path/"c", [episode(4) | {"next.velocity": np.ones((4, 2), np.float32)}]).state, episode(4)[STATE])

def test_fractions_of_a_later_episode_are_never_cut_off(tmp_path):
    "The first episode's actions are whole numbers: .5 of the second one had become 0."
    whole = episode(3) | {ACTION: np.ones((3, 3), np.int32)}
    with pytest.raises(ValueError, match="'action' is int32 in the first episode and float32"): write_store(tmp_path/"a", [whole, episode(3)])
    assert np.allclose(write_store(tmp_path/"b", [episode(3), whole]).action[-1], 1)


def test_two_revisions_never_share_a_folder(tmp_path):
    "exp/1 had been answered with what was fetched as exp-1."
    from clvla.data.partition import fetch
    there = tmp_path/"hub/lab/arm@exp-1"
    there.mkdir(parents=True); write_json(there/".fetched.json", dict(repository="lab/arm", revision="exp-1"))
    assert fetch("hf:lab/arm@exp-1", tmp_path) == there
    with pytest.raises(ValueError, match="holds revision 'exp-1' of lab/arm, and 'exp/1'"): fetch("hf:lab/arm@exp/1", tmp_path)
