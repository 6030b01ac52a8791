"""Replay memory that keeps what differs from an earlier picture: nothing is lost, no byte too many, and runs that go on"""
from types import SimpleNamespace
import numpy as np, pytest, torch
from clvla.cl.all import make_algo
from clvla.cl.buffer import TaskBuffer, gather, sizes
from clvla.cl.deltas import HEAD, LONGEST, Deltas, as_arrays, from_arrays, restored, take_restored, with_deltas
from clvla.cl.quick import quick_loop
from clvla.core.batch import cat, take
from clvla.core.names import IMAGE, INDEX, PROMPT, STATE
from clvla.core.state import load_state, save_state
from clvla.train.config import TrainConfig, resolve
from clvla.train.learner import state_size, train_cl

WRIST = "observation.images.wrist"


def scene(n, C=3, h=17, w=10, seed=0):
    "Pictures of one background on which a square and a little noise move."
    rng = np.random.default_rng(seed)
    pictures = np.repeat(rng.integers(0, 256, (1, C, h, w), np.uint8), n, 0)
    for x in pictures:
        i, j = rng.integers(0, h-4), rng.integers(0, w-4)
        x[:, i:i+4, j:j+4] = rng.integers(0, 256)
        x[0, rng.integers(h), rng.integers(w)] ^= 3
    return pictures


class Scenes:
    "Tasks of pictures of two cameras."
    def __init__(self, **n):
        self.tasks = {t: {IMAGE: torch.from_numpy(scene(k, seed=i)), WRIST: torch.from_numpy(scene(k, 3, 12, 12, seed=90+i)), STATE: torch.arange(k)[:, None].float(),
                          INDEX: torch.arange(k), PROMPT: [t]*k} for i, (t, k) in enumerate(n.items())}
    def n_frames(self, t): return len(self.tasks[t][INDEX])
    def fetch(self, t, idx): return take(self.tasks[t], idx)
    def fetch_refs(self, refs): return gather(refs, self.fetch)


@pytest.mark.parametrize("C,h,w", [(3, 17, 10), (1, 3, 2), (4, 8, 8), (3, 1, 1)])
@pytest.mark.parametrize("tolerance", [0, 1, 16, 255])
def test_no_pixel_is_further_off_than_the_tolerance(C, h, w, tolerance):
    pictures = scene(40, C, h, w) if min(h, w) > 4 else np.random.default_rng(0).integers(0, 256, (40, C, h, w), np.uint8)
    deltas = Deltas(tolerance)
    for x in pictures: deltas.add(x)
    back = np.stack([restored(deltas.packed, i) for i in range(40)])
    assert np.abs(back.astype(int)-pictures).max() <= tolerance
    assert (back == np.stack(deltas.pictures)).all(), "what is compared with later pictures is what a decoder sees"


def test_a_picture_that_was_there_before_costs_nearly_nothing():
    deltas = Deltas()
    for x in np.concatenate([scene(30), scene(30)]): deltas.add(x)
    assert max(map(len, deltas.packed[30:])) < 40 < min(map(len, deltas.packed[:1]))


@pytest.mark.parametrize("total", ["4 kB", "6 kB", "20 kB"])
@pytest.mark.parametrize("store", ["deltas", "deltas 16"])
def test_a_memory_never_holds_more_bytes_than_it_was_given(store, total):
    data, most = Scenes(a=90, b=60, c=30), int(float(total.split()[0])*1000)
    buf = TaskBuffer(None, store=store, total_size=total)
    for t in data.tasks:
        buf.add_task(t, data)
        held = state_size({k: v for k, v in buf.state_dict().items() if k in ("frames", "values")})
        assert held <= most
        share = most//len(buf.frames)
        for k, rows in buf.values.items():   # and leaves no room for another frame where there are more
            assert len(buf.frames[k]) == len(rows[INDEX]) and sizes(rows).sum() <= share
    drawn = buf.draw(40)
    batch, real = buf.fetch(drawn, None), data.fetch_refs(buf.named(drawn))
    for camera in (IMAGE, WRIST): assert (batch[camera].int()-real[camera].int()).abs().max() <= buf.tolerance
    assert torch.equal(batch[STATE], real[STATE]) and batch[PROMPT] == real[PROMPT]


def test_a_share_is_filled_as_far_as_frames_fit():
    data = Scenes(a=90)
    buf = TaskBuffer(None, store="deltas", total_size="6 kB")
    buf.add_task("a", data)
    order = TaskBuffer(None, store="values")
    order.add_task("a", data)
    n = len(buf.frames["a"])
    assert (order.frames["a"][:n] == buf.frames["a"]).all(), "the same frames as any other store"
    more = cat(*with_deltas([data.fetch("a", order.frames["a"][:n+1])], 0, None))
    assert sizes(more)[:n].sum() <= 6000 < sizes(more).sum()


def test_a_budget_without_room_is_a_sentence_before_the_task_begins():
    with pytest.raises(ValueError, match="a share of 500 bytes, one of 1, holds no frame of task 'a', whose first one takes"):
        TaskBuffer(None, store="deltas", total_size="500 B").add_task("a", Scenes(a=5))
    ctx = SimpleNamespace(stream=SimpleNamespace(stages=list("abcd")), task_id="a", data=Scenes(a=5))
    with pytest.raises(ValueError, match="a share of 500 bytes, one of 4,"): TaskBuffer(None, store="deltas", total_size="2 kB").check_room(ctx)
    TaskBuffer(None, store="deltas", total_size="20 kB").check_room(ctx)


@pytest.mark.parametrize("name", ["er", "mir", "gss", "phaser", "gdumb", "agem", "gem"])
def test_samples_without_pictures_are_refused_before_the_task_begins(name):
    algo,ctx = make_algo(name, store="deltas"),quick_loop().ctx
    ctx.task_id = "task0"
    with pytest.raises(ValueError, match="these samples have none; use 'values' or 'refs'"): algo.on_task_start(ctx)


@pytest.mark.parametrize("size", ["0.5 B", "0.0001 kB", "0 MB"])
def test_a_memory_of_less_than_a_byte_is_refused_and_not_without_bound(size):
    for store in ("refs", "values", "deltas"):
        with pytest.raises(ValueError, match=f"'50 MB' .*found '{size}'"): TaskBuffer(None, store=store, total_size=size)


def test_a_task_that_is_refused_leaves_the_memory_as_it_was():
    data = Scenes(a=20, b=20, c=0)
    buf = TaskBuffer(None, store="deltas", total_size="20 kB")
    buf.add_task("a", data)
    before = {k: v.tolist() for k, v in buf.frames.items()}
    data.tasks["b"][IMAGE] = data.tasks["b"][IMAGE].float()
    with pytest.raises(ValueError, match="in uint8, found"): buf.add_task("b", data)
    with pytest.raises(ValueError, match="has no frames to remember"): buf.add_task("c", data)
    assert {k: v.tolist() for k, v in buf.frames.items()} == before and list(buf.values) == ["a"]
    assert len(buf.fetch(buf.draw(8), None)[INDEX]) == 8


def test_only_pictures_lose_anything():
    "Other columns of whole numbers and of bytes stay as they are."
    rows = Scenes(a=30).tasks["a"] | {"labels": torch.randint(0, 8, (30, 1, 5, 5), dtype=torch.uint8), "names": [b"x"]*30}
    back = take_restored(cat(*with_deltas([rows], 16, None)), range(30))
    assert torch.equal(back["labels"], rows["labels"]) and back["names"] == rows["names"] and not torch.equal(back[IMAGE], rows[IMAGE])


def test_pictures_of_another_size_are_refused():
    deltas = Deltas()
    deltas.add(scene(1)[0])
    with pytest.raises(ValueError, match="the pictures of a task have one size"): deltas.add(scene(1, h=16)[0])


def test_a_chain_of_references_ends():
    "A scene that drifts would make one as long as the task."
    deltas, x = Deltas(), np.zeros((3, 30, 30), np.uint8)
    for i in range(300):
        x[0, 3*(i%10), 3*(i//10%10)] += 1
        deltas.add(x.copy())
    assert max(deltas.chain) == LONGEST and (restored(deltas.packed, 299) == x).all()


@pytest.mark.parametrize("name,kw", [("er", {}), ("mir", dict(candidates=4, top_k=2)), ("agem", {}), ("gem", {}), ("gdumb", {}), ("gss", {}), ("phaser", {})])
def test_every_method_with_the_setting_takes_it(name, kw):
    assert make_algo(name, 0, store="deltas 8", **kw).buf.tolerance == 8
    with pytest.raises(ValueError, match="tolerance from 1 to 255"): make_algo(name, 0, store="deltas 300", **kw)


def test_state_goes_through_a_file(tmp_path):
    data = Scenes(a=40, b=40)
    a, b = (TaskBuffer(30, store="deltas 4", seed=s) for s in (0, 9))
    for t in data.tasks: a.add_task(t, data)
    a.draw(3)
    save_state(tmp_path/"s", a.state_dict())
    b.load_state_dict(load_state(tmp_path/"s"))
    for _ in range(20):
        x, y = a.fetch(a.draw(5), None), b.fetch(b.draw(5), None)
        assert all(torch.equal(x[k], y[k]) for k in (IMAGE, WRIST, STATE, INDEX))
    for store in ("refs", "values", "deltas", "deltas 5"):
        with pytest.raises(ValueError, match="the saved one was of the other kind \\('deltas 4'\\)"): TaskBuffer(30, store=store).load_state_dict(load_state(tmp_path/"s"))


@pytest.mark.parametrize("store", ["refs", "values"])
def test_a_state_from_before_says_no_store(store):
    a, b, data = TaskBuffer(30, store=store), TaskBuffer(30, store=store), Scenes(a=40)
    a.add_task("a", data)
    state = a.state_dict()
    del state["store"]
    b.load_state_dict(state)
    assert b.draw(5) == a.draw(5)
    with pytest.raises(ValueError, match="of the other kind"): TaskBuffer(30, store=dict(refs="values", values="deltas")[store]).load_state_dict(state)


def test_arrays_and_back_after_a_cut():
    rows = take(cat(*with_deltas([Scenes(a=20).tasks["a"]], 0, None)), range(7))
    back = from_arrays(as_arrays(rows))
    assert back[IMAGE] == rows[IMAGE] and (take_restored(back, [6])[IMAGE] == scene(20)[6]).all()


def test_a_reference_into_the_future_is_refused():
    deltas = Deltas()
    for x in scene(4): deltas.add(x)
    with pytest.raises(ValueError, match="does not come before it"): restored(deltas.packed[::-1], 0)


def test_damaged_pictures_are_refused():
    deltas = Deltas()
    for x in scene(4): deltas.add(x)
    whole, last = deltas.packed[0], deltas.packed[3]
    for packed in ([whole[:-5]], [b""], [HEAD.pack(-7, *HEAD.unpack_from(whole)[1:])+whole[HEAD.size:]], [HEAD.pack(-1, 3, 5, 5)+whole[HEAD.size:]], [HEAD.pack(-1, *HEAD.unpack_from(last)[1:])+last[HEAD.size:]]):
        with pytest.raises(ValueError, match="picture 0 of a memory is damaged"): restored(packed, 0)
    arrays = as_arrays(cat(*with_deltas([Scenes(a=5).tasks["a"]], 0, None)))
    arrays[IMAGE]["sizes"] = arrays[IMAGE]["sizes"][:-1]
    with pytest.raises(ValueError, match="their sizes add up to"): from_arrays(arrays)


def test_a_run_without_loss_is_the_run_of_whole_samples(tmp_path):
    "With as many frames the weights are the same, bit for bit."
    def run(store):
        cfg = TrainConfig(suite="dot_2", cl="er", cl_kw=dict(store=store, buffer_size=20), n_demos=2, steps_per_task=6, evaluate="none", image_size=32, n_workers=1, threads=1,
                          data_dir=str(tmp_path/"data"), run_dir=str(tmp_path/store))
        return train_cl(resolve(cfg), lambda line: None)
    runs = [run(store).path/"checkpoints" for store in ("values", "deltas")]
    last = [max(p for p in path.iterdir() if p.is_dir())/"weights.safetensors" for path in runs]
    assert last[0].read_bytes() == last[1].read_bytes()
