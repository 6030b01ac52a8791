"Data as other people have it: folders that hold something else, numbers of other types and sizes, torn lines, masks in the place of positions."
import json, sys
import numpy as np, pytest, torch
from clvla.core.batch import take
from clvla.core.contract import author
from clvla.core.files import json_text
from clvla.core.names import ACTION, IMAGE, IMAGES, PROMPT, STATE
from clvla.core.plugins import load_plugins
from clvla.core.records import append_jsonl, keep_records, kept_record, read_jsonl
from clvla.core.seeds import seed_of
from clvla.data.check import main
from clvla.data.demos import noise_of, recorded
from clvla.data.frames import check_episode, reuse_store, write_store
from clvla.data.lerobot import import_lerobot
from clvla.data.lerobot_read import read_lerobot
from clvla.data.lerobot_write import write_lerobot
from clvla.data.loader import TaskData, TaskLoader
from clvla.data.partition import lerobot_info, partitions
from clvla.data.stats import Processor, compute_stats
from clvla.data.streams import Stream, Task, stream_from, stream_json
from clvla.envs.all import make_stream
from clvla.train.robot import columns_of

def episode(T=5, w=8, **more):
    rng = np.random.default_rng(T)
    return {IMAGE: rng.integers(0, 255, (T,8,w,3), dtype=np.uint8), STATE: rng.normal(size=(T,3)).astype(np.float32),
            ACTION: rng.normal(size=(T,2)).astype(np.float32), PROMPT: "push", **more}

def files(path): return sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file())

def test_an_import_into_the_data_sets_own_folder_leaves_the_data_set(tmp_path):
    write_lerobot(tmp_path/"pusht", [episode()])
    before = files(tmp_path/"pusht")
    with pytest.raises(ValueError, match="is no frame store, and holds 'data', which would be lost"):
        import_lerobot(tmp_path/"pusht", tmp_path)
    assert files(tmp_path/"pusht") == before

def test_a_store_takes_no_folder_that_holds_something_else(tmp_path):
    (tmp_path/"thesis.txt").write_text("x")
    for make in (lambda: write_store(tmp_path, [episode()]), lambda: reuse_store(tmp_path, {}), lambda: recorded(tmp_path, {}),
                 lambda: write_store(tmp_path/"thesis.txt", [episode()])):
        with pytest.raises(ValueError, match="'thesis.txt', which would be lost"): make()
    assert (tmp_path/"thesis.txt").read_text() == "x"
    (tmp_path/"half").mkdir(); (tmp_path/"half/action.npy").write_bytes(b"x"); (tmp_path/"half/.meta.json.1@a.00000000.tmp").mkdir()
    assert len(write_store(tmp_path/"half", [episode()])) == 5

@pytest.mark.parametrize("first,later", [(np.uint8, np.full((5,3), 300, np.uint16)), (np.int32, np.full((5,3), 2**40))])
def test_whole_numbers_that_the_first_episodes_type_does_not_hold(first, later, tmp_path):
    small = episode(**{STATE: np.zeros((5,3), first)})
    with pytest.raises(ValueError, match="in a later one, which that does not hold; give float32"):
        write_store(tmp_path/"s", [small, episode(**{STATE: later})])
    assert len(write_store(tmp_path/"t", [small, episode(**{STATE: later*0+7})])) == 10

@pytest.mark.parametrize("change,said", [({STATE: np.full((5,3), 1e39)}, "numbers that float32 holds"), ({PROMPT: ["push"]*5}, "one text for the episode"),
    ({PROMPT: None}, "one text"), ({STATE: np.array([["a"]]*5)}, "found <U1"), ({IMAGE: np.zeros((5,8,8,3), np.uint8).tolist()}, "must be uint8")])
def test_episodes_that_no_store_can_keep(change, said):
    with pytest.raises(ValueError, match=said): check_episode(episode(**change))

def test_a_key_that_the_store_counts_itself(tmp_path):
    with pytest.raises(ValueError, match="'episode' is the store's own count"): write_store(tmp_path/"s", [episode(episode=np.arange(5))])

def test_masks_are_no_positions(tmp_path):
    store,mask = write_store(tmp_path/"s", [episode(3), episode(4)]),np.array([False, True])
    for wrong in (mask, [False, True], [.9]):
        with pytest.raises(ValueError, match="numbers, found"): store.gather(wrong, 2)
        with pytest.raises(ValueError, match="numbers, found"): store.some_episodes(wrong)
        with pytest.raises(ValueError, match="numbers, found"): take({"x": torch.arange(2)}, wrong)
    assert take({"x": torch.arange(2)}, [])["x"].shape == (0,) and len(store.gather([], 2)[STATE]) == 0
    assert take({"x": torch.arange(3)}, np.array([2, -1], np.int32))["x"].tolist() == [2, 2]

def test_pictures_of_two_widths(tmp_path):
    stores = {n: write_store(tmp_path/n, [episode(w=w)]) for n,w in (("a", 8), ("b", 12))}
    with pytest.raises(ValueError, match="pictures of equal height and width"): TaskData(stores, Processor(compute_stats(stores)), 4)

def test_what_is_written_as_a_data_set_can_be_read(tmp_path):
    path = write_lerobot(tmp_path/"r", [episode(reward=np.arange(5.))])
    assert json.loads((path/"meta/info.json").read_text())["features"]["reward"]["shape"] == [1] and len(next(read_lerobot(path))[STATE]) == 5
    for change,said in ((dict(task=" "), "is empty"), (dict(index=np.arange(5)), "counts itself"), (dict(force=np.zeros((5,2,2))), r"expected \(T,n\) or")):
        with pytest.raises(ValueError, match=said): write_lerobot(tmp_path/"w", [episode(**change)])
    for fps in (0, -1, float("nan"), "10"):
        with pytest.raises(ValueError, match="fps is .* expected a number above 0"): write_lerobot(tmp_path/"w", [episode()], fps=fps)
    assert not (tmp_path/"w").exists()

def test_cameras_without_a_main_one_are_refused_before_a_picture_is_decoded(tmp_path):
    path = write_lerobot(tmp_path/"r", [episode(**{IMAGES+"wrist": np.zeros((5,8,8,3), np.uint8)})])
    with pytest.raises(ValueError, match="and not the main camera; call one of them 'observation.images.front'"):
        import_lerobot(path, tmp_path/"out", cameras={IMAGES+"wrist": IMAGES+"wrist"})
    assert not (tmp_path/"out").exists() or files(tmp_path/"out") in ([], [".hashes.json"])
    with pytest.raises(ValueError, match="no folder of a data set"): import_lerobot([], tmp_path/"out")

def test_a_right_data_set_whose_strip_has_no_place_is_not_refused(tmp_path, capsys):
    path = write_lerobot(tmp_path/"r", [episode()])
    assert main([str(path), "--strip", str(tmp_path/"no/x.png")]) == 1
    said = capsys.readouterr(); assert "1 episodes, 5 frames" in said.out and "refused" not in said.err and "could not be written" in said.err

def test_the_command_that_converts_a_folder_with_spaces(tmp_path):
    (tmp_path/"old one/meta").mkdir(parents=True); (tmp_path/"old one/meta/info.json").write_text('{"codebase_version": "v2.1"}')
    with pytest.raises(ValueError, match=r"--root='[^']*old one'"): lerobot_info(tmp_path/"old one")

@pytest.mark.parametrize("torn", [b'{"a": ', b"{"*5000, b"x"])
def test_a_record_stands_in_the_place_of_a_torn_line(torn, tmp_path):
    file = tmp_path/"a.jsonl"; append_jsonl(file, dict(a=1))
    with open(file, "ab") as f: f.write(torn)
    kept_record(file, dict(a=2), lambda: dict(b=3))
    assert read_jsonl(file, pytest.fail) == [dict(a=1), dict(a=2, b=3)]
    file.write_bytes(torn); append_jsonl(file, dict(a=4)); assert read_jsonl(file, pytest.fail) == [dict(a=4)]
    assert keep_records(str(file), lambda r: False) == 1 and read_jsonl(str(file)) == []

def test_numpys_whole_numbers(tmp_path):
    stream = Stream("s", [Task(i, i, i) for i in "ab"], np.array([1, 0]))
    assert stream_from(json.loads(json_text(stream_json(stream)))).ids == ["b", "a"]
    assert seed_of(np.int64(3), "x") == seed_of(3, "x")

def test_one_plugin_by_its_name(tmp_path):
    with pytest.raises(ValueError, match="plugin '[^']*nothing.py': there is no such file"): load_plugins(str(tmp_path/"nothing.py"))

def test_a_layouts_short_names_count_where_a_data_set_is_read_directly(tmp_path):
    path = write_lerobot(tmp_path/"r", [episode(**{"true.pose": np.ones((5,2), np.float32)})])
    short,whole = (next(read_lerobot(path, layout=dict(columns={name: "true.pose"}))) for name in ("state", STATE))
    assert list(short) == list(whole) and (short[STATE] == 1).all() and short[STATE].shape == (5,2)
    assert IMAGES+"top" in next(read_lerobot(path, layout=dict(cameras=dict(top=IMAGE))))

def test_a_robot_of_a_data_set_with_columns_of_other_names(tmp_path):
    path = write_lerobot(tmp_path/"r", [episode()]); info = json.loads((path/"meta/info.json").read_text())
    info["features"]["pose"] = info["features"].pop(STATE); (path/"meta/info.json").write_text(json.dumps(info))
    assert columns_of(dict(path=str(path), layout=dict(columns={STATE: "pose"})), [IMAGE]) == {IMAGE: IMAGE, STATE: "pose"}

@pytest.mark.parametrize("stem", ["my-arm", "my.arm", "my arm", "[arm]"])
def test_a_plugins_file_is_named_whatever_stands_in_its_name(stem, tmp_path):
    (tmp_path/f"{stem}.py").write_text("class Arm: pass\n"); load_plugins([tmp_path/f"{stem}.py"])
    module = next(m for name,m in list(sys.modules.items()) if name.startswith(f"clvla_plugin_{stem}_"))
    assert author(module.Arm) == f"{stem}.py: Arm"

def test_the_stream_of_the_working_folder_has_that_folders_name(tmp_path, monkeypatch):
    monkeypatch.chdir(write_lerobot(tmp_path/"pusht", [episode()]))
    assert (make_stream(".").name, make_stream("../pusht").name) == ("pusht", "pusht")

@pytest.mark.parametrize("name", ["auto", "by_task_index", "by_dataset"])
def test_one_folder_is_a_list_of_one(name, tmp_path):
    path = write_lerobot(tmp_path/"pusht", [episode()])
    assert partitions[name](str(path)) == partitions[name](path) == partitions[name]([path])

@pytest.mark.parametrize("ids,said", [([".", "b"], "'.' names no folder"), (["", "b"], "'' names no folder"), (["a/", "b"], "'a/' names no folder"),
    (["b/./c"], "names no folder"), (["b", "a", "a/b"], "'a/b' would lie inside that of task 'a'")])
def test_tasks_without_a_folder_of_their_own(ids, said):
    with pytest.raises(ValueError, match=said): Stream("s", [Task(i, i, i) for i in ids])
    assert Stream("s", [Task(i, i, i) for i in ("a", "ab", "c/d", "c/e", "v1.0", ".x")]).ids[2] == "c/d"

def test_the_check_says_how_columns_of_other_names_are_read(tmp_path, capsys):
    path = write_lerobot(tmp_path/"r", [episode(pose=np.zeros((5,2)))]); info = json.loads((path/"meta/info.json").read_text())
    del info["features"][STATE]; (path/"meta/info.json").write_text(json.dumps(info))
    assert main([str(path)]) == 1
    said = capsys.readouterr().err
    assert "lacks ['observation.state']" in said and "this check takes no layout; in a stream, say which column is which: suite=" in said
    assert "name the cameras" not in said

@pytest.mark.parametrize("rank,world", [(2, 2), (5, 2), (-1, 2), (0, 0)])
def test_a_loader_of_a_process_that_there_is_not(rank, world, tmp_path):
    stores = {"a": write_store(tmp_path/"a", [episode()])}; data = TaskData(stores, Processor(compute_stats(stores)), 4)
    with pytest.raises(ValueError, match=f"of process {rank} of {world}; expected is a rank"): TaskLoader(data, ["a"], 0, rank=rank, world=world)

def test_pictures_that_are_no_squares(tmp_path):
    stores = {"a": write_store(tmp_path/"a", [episode(w=12)])}
    with pytest.raises(ValueError, match=r"front 8 x 12 \(height x width\) are none; import the data with image_size"):
        TaskData(stores, Processor(compute_stats(stores)), 4)

def test_a_noise_of_no_axes():
    for one in (np.array(.1), np.float64(.1), torch.tensor(.1, dtype=torch.float64), .1): assert noise_of(one, 4).tolist() == [.1, .1, .1, 0]
    for wrong in (None, "abc", float("nan"), np.ones((2, 2)), [.1, None]):
        with pytest.raises(ValueError, match="expected one finite number, or one per axis"): noise_of(wrong, 4)

def test_a_data_set_of_no_episodes_is_named_as_it_was_given(tmp_path):
    with pytest.raises(ValueError) as e: write_lerobot(tmp_path/"new/empty", iter(()))
    assert str(e.value).startswith(f"{tmp_path/'new/empty'}: a data set needs at least one episode") and not (tmp_path/"new").exists()
