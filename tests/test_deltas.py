"""Replay memory that keeps what differs from an earlier picture: nothing is lost, no byte too many, and runs that go on"""
import numpy as np, pytest, torch
from clvla.cl.all import make_algo
from clvla.cl.buffer import TaskBuffer, gather, sizes
from clvla.cl.deltas import Deltas, Store, as_arrays, from_arrays, restored, take_restored, with_deltas
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
    back = np.stack([restored(deltas.files, i) for i in range(40)])
    assert np.abs(back.astype(int)-pictures).max() <= tolerance
    assert (back == np.stack(deltas.pictures)).all(), "what is compared with later pictures is what a decoder sees"


def test_a_picture_that_was_there_before_costs_nearly_nothing():
    deltas = Deltas()
    for x in np.concatenate([scene(30), scene(30)]): deltas.add(x)
    assert max(map(len, deltas.files[30:])) < 40 < min(map(len, deltas.files[:1]))


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


def test_a_budget_without_room_is_a_sentence():
    with pytest.raises(ValueError, match="a share of 500 bytes holds no frame of task 'a'; raise total_size"):
        TaskBuffer(None, store="deltas", total_size="500 B").add_task("a", Scenes(a=5))


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
    with pytest.raises(ValueError, match="the saved one was of the other kind"): TaskBuffer(30).load_state_dict(load_state(tmp_path/"s"))


def test_arrays_and_back_after_a_cut():
    rows = take(cat(*with_deltas([Scenes(a=20).tasks["a"]], 0, None)), range(7))
    back = from_arrays(as_arrays(rows))
    assert back[IMAGE] == rows[IMAGE] and (take_restored(back, [6])[IMAGE] == scene(20)[6]).all()


def test_a_reference_into_the_future_is_refused():
    deltas = Deltas()
    for x in scene(4): deltas.add(x)
    with pytest.raises(ValueError, match="does not come before it"): restored(deltas.files[::-1], 0)


def test_a_run_without_loss_is_the_run_of_whole_samples(tmp_path):
    "With as many frames the weights are the same, bit for bit."
    def run(store):
        cfg = TrainConfig(suite="dot_2", cl="er", cl_kw=dict(store=store, buffer_size=20), n_demos=2, steps_per_task=6, evaluate="none", image_size=32, n_workers=1, threads=1,
                          data_dir=str(tmp_path/"data"), run_dir=str(tmp_path/store))
        return train_cl(resolve(cfg), lambda line: None)
    runs = [run(store).path/"checkpoints" for store in ("values", "deltas")]
    last = [max(p for p in path.iterdir() if p.is_dir())/"weights.safetensors" for path in runs]
    assert last[0].read_bytes() == last[1].read_bytes()
