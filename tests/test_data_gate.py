"A data set is held against what it says of itself: refused in a sentence, or read as LeRobot reads it; known by what it holds."
import io, json, os, shutil, time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from clvla.core.files import read_json, write_json
from clvla.core.names import ACTION, IMAGE, IMAGES, PROMPT, STATE
from clvla.core.pictures import as_picture
from clvla.data import contents, lerobot, lerobot_read
from clvla.data.contents import file_hashes
from clvla.data.frames import FrameStore, write_store
from clvla.data.gate import lerobot_index
from clvla.data.lerobot import fingerprint, import_lerobot, import_task, read_lerobot
from clvla.data.lerobot_write import decode_image, image_header, lerobot_ready, write_lerobot
from clvla.data.partition import partitions
from clvla.data.streams import Task

TEXTS, WRIST = ("Open the box", "Close the box", "Open the box", "Wave"), IMAGES+"wrist"
ROWS, META = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
FILM = f"videos/{IMAGE}/chunk-000/file-000.mp4"


def drawn(e, T=None, text=None, size=(24, 32)):
    "An episode whose pictures and states name their frame."
    T, x = T or 5+e, np.zeros((T or 5+e, *size, 3), np.uint8)
    x[..., 0], x[..., 1] = 40*e, (12*np.arange(len(x))+10)[:, None, None]
    state = np.stack([np.arange(T)+100*e, np.full(T, .5)], 1).astype(np.float32)
    action = np.random.default_rng(e).normal(size=(T, 3)).astype(np.float32)
    return {IMAGE: x, WRIST: np.ascontiguousarray(x[:, :16, :16]), STATE: state, ACTION: action, PROMPT: text or TEXTS[e % 4]}


EPISODES = [drawn(e) for e in range(4)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "What LeRobot itself wrote, and its own tools edited: two data sets, one without an episode, both halves, all together."
    pytest.importorskip("lerobot")
    root = tmp_path_factory.mktemp("made")
    with lerobot_ready() as LeRobotDataset:
        import av
        from lerobot.configs import RGBEncoderConfig
        from lerobot.datasets import dataset_tools as tools
        av.logging.set_libav_level(av.logging.ERROR)
        encoder = RGBEncoderConfig(vcodec="h264", pix_fmt="yuv420p", crf=20, g=4, preset="veryfast", extra_options={"bf": "0"})
        for kind in ("video", "image"):
            pictures = {k: dict(dtype=kind, shape=EPISODES[0][k].shape[1:], names=["height", "width", "channels"]) for k in (IMAGE, WRIST)}
            feats = pictures | {k: dict(dtype="float32", shape=(n,), names=None) for k, n in ((STATE, 2), (ACTION, 3))}
            for name, episodes in dict(one=EPISODES, two=[drawn(4), drawn(5, text="Turn")]).items():
                d = LeRobotDataset.create("local/x", 10, feats, root/f"{kind}-{name}", use_videos=kind == "video",
                                          **({"rgb_encoder": encoder} if kind == "video" else {}))
                for ep in episodes:
                    for t in range(len(ep[ACTION])): d.add_frame({k: v if k == PROMPT else v[t] for k, v in ep.items()})
                    d.save_episode()
                d.finalize()
            one, two = (LeRobotDataset("local/x", root=root/f"{kind}-{name}") for name in ("one", "two"))
            tools.delete_episodes(one, [1], output_dir=root/f"{kind}-deleted", repo_id="local/deleted")
            tools.split_dataset(one, dict(first=[0, 2], second=[1, 3]), output_dir=root/f"{kind}-split")
            tools.merge_datasets([one, two], output_repo_id="local/merged", output_dir=root/f"{kind}-merged")
    return root


@pytest.fixture
def films(made, tmp_path):
    "LeRobot's data set with videos, to be damaged."
    return shutil.copytree(made/"video-one", tmp_path/"films")


@pytest.fixture(scope="module")
def plain(tmp_path_factory): return write_lerobot(tmp_path_factory.mktemp("plain")/"set", [{k: v for k, v in e.items() if k != WRIST} for e in EPISODES])


@pytest.fixture
def data(plain, tmp_path):
    "The project's own data set with pictures in its rows, to be damaged."
    return shutil.copytree(plain, tmp_path/"set")


def change(path, file, f):
    "Write a table anew as `f` gives it."
    pq.write_table(f(pq.read_table(path/file)), path/file)


def column(path, file, name, values):
    "Another column of that name."
    t = pq.read_table(path/file)
    i = t.column_names.index(name)
    pq.write_table(t.set_column(i, name, values if isinstance(values, pa.Array) else pa.array(values)), path/file)


def values(path, name, file=ROWS): return pq.read_table(path/file)[name].to_pylist()
def info(path, **kw): write_json(path/"meta/info.json", read_json(path/"meta/info.json") | kw)
def feature(path, key, **kw): info(path, features=(f := read_json(path/"meta/info.json")["features"]) | {key: f[key] | kw})
def refused(path, says):
    with pytest.raises(ValueError, match=says) as e: list(read_lerobot(path))
    assert "\n" not in str(e.value)
    return str(e.value)


# what LeRobot wrote and edited

SETS = [f"{kind}-{name}" for kind in ("video", "image") for name in ("one", "deleted", "split/first", "split/second", "merged")]


@pytest.mark.parametrize("name", SETS)
def test_frames_are_lerobots_own(made, name):
    with lerobot_ready() as LeRobotDataset: theirs = LeRobotDataset("local/x", root=made/name, video_backend="pyav")
    items = iter(theirs)
    for ep in read_lerobot(made/name):
        assert ep[IMAGE].shape[1:] == (24, 32, 3) and ep[WRIST].shape[1:] == (16, 16, 3)
        for t in range(len(ep[ACTION])):
            item = next(items)
            assert item[PROMPT] == ep[PROMPT]
            for k in (STATE, ACTION): assert np.array_equal(item[k].numpy(), ep[k][t])
            for k in (IMAGE, WRIST): assert np.array_equal((item[k]*255).round().byte().permute(1, 2, 0).numpy(), ep[k][t])
    assert next(items, None) is None


def encode(file, pictures, rate, pixels="yuv420p", codec="libx264", **options):
    "Write a video by hand."
    import av
    with av.open(str(file), "w") as f:
        s = f.add_stream(codec, rate=rate, options=dict(g="4", crf="10", preset="veryfast") | options)
        s.width, s.height, s.pix_fmt = pictures[0].shape[1], pictures[0].shape[0], pixels
        for x in pictures: f.mux(s.encode(av.VideoFrame.from_ndarray(x, format="rgb24")))
        f.mux(s.encode())


@pytest.mark.parametrize("faster", [2, 3])
def test_a_camera_of_another_rate_is_paired_by_time(films, faster):
    "Each picture stands `faster` times in the video, which is the camera's own rate; then it differs between them, and only the right one is right."
    whole = np.concatenate([e[IMAGE] for e in EPISODES])
    between = np.repeat(whole, faster, 0)
    for k in range(1, faster): between[k::faster] = 255
    encode(films/FILM, between, 10*faster)
    with lerobot_ready() as LeRobotDataset: theirs = LeRobotDataset("local/x", root=films, video_backend="pyav")
    got = np.concatenate([e[IMAGE] for e in read_lerobot(films)])
    assert abs(got.astype(int)-whole).max() < 12
    for i in (0, 7, 25): assert np.array_equal((theirs[i][IMAGE]*255).round().byte().permute(1, 2, 0).numpy(), got[i])


def test_a_rate_without_a_picture_at_the_rows_times_is_refused(films):
    whole = np.concatenate([e[IMAGE] for e in EPISODES])
    encode(films/FILM, np.repeat(whole, 2, 0)[:39], 15)
    assert "LeRobot allows" in refused(films, "none at the time of frame 1 of episode 0")


def test_each_task_reads_its_own_rows_and_spans(made, tmp_path, monkeypatch):
    "Decoded frames are as many as used ones, whatever the number of instructions."
    real, seen = lerobot_read._video, []
    def counted(*a):
        for x in real(*a):
            seen.append(x[0])
            yield x
    monkeypatch.setattr(lerobot_read, "_video", counted)
    stores = import_lerobot(made/"video-merged", tmp_path/"frames", image_size=16)
    n = sum(map(len, stores.values()))
    assert len(stores) == 4 and n == 26+19 and 2*n <= len(seen) <= 2*n*1.3
    assert [s.state[0, 0] for s in stores.values()] == [0, 100, 300, 500] and stores["open-the-box"].episode_lengths.tolist() == [5, 7, 9]


# rows

def take(*order): return lambda path: change(path, ROWS, lambda t: t.take([*order]))
def put(name, f): return lambda path: column(path, ROWS, name, f(values(path, name)))


N = 5+6+7+8
def uncounted(*order):
    "Rows in that order, without the column `index`."
    def f(path):
        change(path, ROWS, lambda t: t.take([*order]).drop_columns("index"))
        info(path, features={k: v for k, v in read_json(path/"meta/info.json")["features"].items() if k != "index"})
    return f


ROW_FAULTS = dict(
    uncounted_swapped=(uncounted(1, 0, *range(2, N)), "its rows stand in another order"), uncounted_missing=(uncounted(0, 1, *range(3, N)), "some of its rows are missing"),
    uncounted_last=(uncounted(*range(4), *range(5, N)), "total_frames 26, found 25"),
    backwards=(take(*range(N-1, -1, -1)), "another order"), swapped=(take(1, 0, *range(2, N)), "another order"),
    missing=(take(*range(6), *range(9, N)), "missing"), doubled=(take(*range(5), *range(5), *range(5, N)), "stand twice"),
    first_missing=(take(*range(1, N)), "missing"), last_missing=(take(*range(N-1)), "total_frames"), gone=(take(*range(18)), "total_episodes"),
    mixed=(take(0, 5, *range(1, 5), *range(6, N)), "do not stand together"), episodes_turned=(take(*range(5, N), *range(5)), "in this order"),
    renumbered=(put("episode_index", lambda v: [x+(x > 1) for x in v]), "in this order"), index=(put("index", lambda v: [*v[:-1], 99]), "has index 99"),
    unknown_task=(put("task_index", lambda v: [7 if x == 2 else x for x in v]), "instruction 7"), two_tasks=(put("task_index", lambda v: [1, *v[1:]]), "under way"),
    restarts=(put("timestamp", lambda v: [.1*(t % 3) for t in range(N)]), "time runs backwards"), no_time=(put("timestamp", lambda v: [float("nan")]*N), "'timestamp'"),
    milliseconds=(put("timestamp", lambda v: [1000*t for t in v]), "'fps'"), float_counts=(put("frame_index", lambda v: [float(x) for x in v]), "whole numbers"),
    hole=(put("episode_index", lambda v: [None, *v[1:]]), "whole numbers"), empty=(lambda p: change(p, ROWS, lambda t: t.slice(0, 0)), "no rows"),
    nan=(lambda p: column(p, ROWS, ACTION, pa.array([*values(p, ACTION)[:7], [0., float("nan"), 0.], *values(p, ACTION)[8:]])), "episode 1, column action: number 1 of frame 2 is nan"),
    shape=(lambda p: feature(p, STATE, shape=[3]), "gives the shape"), text=(lambda p: column(p, ROWS, STATE, ["1.5"]*N), "column observation.state"),
    lacks=(lambda p: info(p, features=read_json(p/"meta/info.json")["features"] | {"next.reward": dict(dtype="float32", shape=[1])}), "lacks columns .'next.reward'"),
    fewer_numbers=(lambda p: column(p, ROWS, STATE, [[1., 2.]]*9+[[1.]]+[[1., 2.]]*(N-10)), "column observation.state"))


@pytest.mark.parametrize("fault", ROW_FAULTS)
def test_rows(data, fault):
    ROW_FAULTS[fault][0](data)
    refused(data, ROW_FAULTS[fault][1])


def test_rows_that_are_unusual_and_right(data):
    "Uneven times, none from 0, another dtype, a scalar, a nested one, more columns, group sizes, many chunks."
    t = pq.read_table(data/ROWS)
    T = np.asarray(t["timestamp"])+50+np.random.default_rng(0).uniform(0, .04, N)
    t = t.set_column(t.column_names.index("timestamp"), "timestamp", pa.array(T.astype(np.float32)))
    t = t.set_column(t.column_names.index(STATE), STATE, pa.array(range(N), pa.int8()))
    t = t.set_column(t.column_names.index(ACTION), ACTION, pa.array([[[x], [x], [x]] for x in range(N)], pa.list_(pa.list_(pa.float64()))))
    pq.write_table(t.append_column("note", pa.array(["x"]*N)), data/ROWS, row_group_size=7)
    feature(data, STATE, shape=[1], dtype="int8")
    feature(data, ACTION, shape=[3, 1], names=dict(motors=["a", "b", "c"]))
    got = list(read_lerobot(data))
    assert np.concatenate([e[STATE] for e in got]).ravel().tolist() == [*range(N)] and got[3][ACTION].shape == (8, 3)
    for a, b in zip(EPISODES, got): assert np.array_equal(a[IMAGE], b[IMAGE]) and a[PROMPT] == b[PROMPT]


def test_an_episode_in_two_files_is_whole(data):
    t = pq.read_table(data/ROWS)
    pq.write_table(t.slice(0, 8), data/ROWS)
    pq.write_table(t.slice(8), data/"data/chunk-000/file-001.parquet")
    column(data, META, "data/file_index", [0, 0, 1, 1])
    for a, b in zip(EPISODES, read_lerobot(data)): assert np.array_equal(a[IMAGE], b[IMAGE]) and np.array_equal(a[STATE], b[STATE])
    for a, b in zip(EPISODES[1:2], read_lerobot(data, [1])): assert np.array_equal(a[IMAGE], b[IMAGE])
    (data/"data/chunk-000/file-001.parquet").rename(data/"data/chunk-000/file-002.parquet")
    refused(data, "there is no .*file-001.parquet")


def test_many_files_stand_in_the_order_of_their_numbers(data):
    t = pq.read_table(data/ROWS)
    (data/ROWS).unlink()
    for i, (a, n) in enumerate(((0, 5), (5, 6), (11, 7), (18, 8))): pq.write_table(t.slice(a, n), data/f"data/chunk-000/file-{i+8}.parquet")
    info(data, data_path="data/chunk-{chunk_index:03d}/file-{file_index}.parquet")
    column(data, META, "data/file_index", [8, 9, 10, 11])
    assert [len(e[ACTION]) for e in read_lerobot(data)] == [5, 6, 7, 8]


# meta

META_FAULTS = dict(
    fps_text=(lambda p: info(p, fps="10"), "'fps'"), fps_zero=(lambda p: info(p, fps=0), "'fps'"), fps_other=(lambda p: info(p, fps=60), "'fps'"),
    tasks=(lambda p: info(p, total_tasks=9), "total_tasks 9, found 3"), frames=(lambda p: info(p, total_frames=N+1), "total_frames 27, found 26"),
    episodes=(lambda p: info(p, total_episodes=None), "total_episodes None, found 4"), no_episodes=(lambda p: shutil.rmtree(p/"meta/episodes"), "no meta/episodes"),
    length=(lambda p: column(p, META, "length", [5, 6, 8, 7]), "length 8, found 7"), start=(lambda p: column(p, META, "dataset_from_index", [0, 5, 10, 18]), "dataset_from_index 10"),
    fewer=(lambda p: change(p, META, lambda t: t.slice(0, 3)), "episodes .0, 1, 2., data/ has 0..3"), said=(lambda p: column(p, META, "tasks", [["Wave"]]*4), "tasks"),
    file=(lambda p: column(p, META, "data/file_index", [0, 0, 3, 0]), "there is no .*file-003"), blank=(lambda p: column(p, "meta/tasks.parquet", "task", ["a", " ", "b"]), "is empty"),
    deep=(lambda p: (p/"meta/info.json").write_text("["*100_000), "not valid JSON"), fifo=(lambda p: ((p/ROWS).unlink(), os.mkfifo(p/ROWS)), "a pipe"),
    folder=(lambda p: ((p/"meta/tasks.parquet").unlink(), (p/"meta/tasks.parquet").mkdir()), "a folder"), info_fifo=(lambda p: ((p/"meta/info.json").unlink(), os.mkfifo(p/"meta/info.json")), "a pipe"),
    device=(lambda p: ((p/ROWS).unlink(), (p/ROWS).symlink_to("/dev/zero")), "a device"), loop=(lambda p: ((p/META).unlink(), (p/META).symlink_to(p/META)), "in a circle"),
    cut=(lambda p: (p/ROWS).write_bytes((p/ROWS).read_bytes()[:-100]), "is damaged"), size=(lambda p: feature(p, IMAGE, shape=[24, 24, 3]), "24 x 32 .height x width., meta/info.json says 24 x 24"))


@pytest.mark.parametrize("fault", META_FAULTS)
def test_meta(data, fault):
    META_FAULTS[fault][0](data)
    refused(data, META_FAULTS[fault][1])


def test_instructions(data, tmp_path):
    "One sentence under two numbers is one task, and a sentence that no episode has is none."
    t = pa.table(dict(task=["Open the box", "Close the box", "Wave", "Wave", "Sing"], task_index=range(5)))
    pq.write_table(t, data/"meta/tasks.parquet")
    info(data, total_tasks=5)
    column(data, ROWS, "task_index", [3 if x == 2 else x for x in values(data, "task_index")])
    stores = import_lerobot(data, tmp_path/"frames")
    assert {k: len(s) for k, s in stores.items()} == {"open-the-box": 12, "close-the-box": 6, "wave": 8}


# videos

def spans(path, **kw):
    for k, v in kw.items(): column(path, META, f"videos/{IMAGE}/{k}", v)


FILM_FAULTS = dict(
    longer=(lambda p: spans(p, to_timestamp=[.7, 1.1, 1.8, 2.6]), "0.700 s long; its 5 rows"), next_episode=(lambda p: spans(p, from_timestamp=[0., .5, .5, 1.8], to_timestamp=[.5, 1.1, 1.2, 2.6]), "overlap"),
    beyond=(lambda p: spans(p, from_timestamp=[0., .5, 1.1, 2.8], to_timestamp=[.5, 1.1, 1.8, 3.6]), "ends before episode 3 does"),
    no_file=(lambda p: (p/FILM).unlink(), "there is no video"), other_file=(lambda p: spans(p, file_index=[0, 0, 0, 1]), "there is no video"),
    cut=(lambda p: (p/FILM).write_bytes((p/FILM).read_bytes()[:-300]), "file-000.mp4 is damaged"), pipe=(lambda p: ((p/FILM).unlink(), os.mkfifo(p/FILM)), "a pipe"),
    short=(lambda p: encode(p/FILM, np.concatenate([e[IMAGE] for e in EPISODES])[:-4], 10), "ends before episode 3 does"),
    slow=(lambda p: encode(p/FILM, np.concatenate([e[IMAGE] for e in EPISODES])[::2], 5), "none at the time of frame 1"),
    size=(lambda p: encode(p/FILM, np.concatenate([e[IMAGE] for e in EPISODES])[:, :16], 10), "16 x 32 .height x width., meta/info.json says 24 x 32"))


@pytest.mark.parametrize("fault", FILM_FAULTS)
def test_videos(films, fault):
    FILM_FAULTS[fault][0](films)
    refused(films, FILM_FAULTS[fault][1])


def test_a_video_whose_index_came_first_and_whose_end_did_not(films):
    "Its header is whole, its last pictures are not there."
    import av
    with av.open(str(films/FILM)) as old, av.open(str(films/"front.mp4"), "w", options=dict(movflags="faststart")) as new:
        s = new.add_stream_from_template(old.streams.video[0])
        for p in old.demux(old.streams.video[0]):
            if p.dts is None: continue
            p.stream = s
            new.mux(p)
    whole = (films/"front.mp4").read_bytes()
    (films/FILM).write_bytes(whole)
    assert len(list(read_lerobot(films))) == 4
    (films/FILM).write_bytes(whole[:-200])
    refused(films, "file-000.mp4 is damaged")


def test_uneven_times_with_a_picture_for_each_row(films):
    column(films, ROWS, "timestamp", pa.array(np.asarray(values(films, "timestamp"), np.float32)+np.random.default_rng(0).uniform(0, .04, N).astype(np.float32)))
    for a, b in zip(EPISODES, read_lerobot(films)): assert abs(a[IMAGE].astype(int)-b[IMAGE]).max() < 12


def test_rates_below_a_second(films):
    "29.97 pictures a second, in rows and video."
    from fractions import Fraction
    rate = Fraction(30000, 1001)
    encode(films/FILM, np.concatenate([e[IMAGE] for e in EPISODES]), rate)
    encode(films/FILM.replace("front", "wrist"), np.concatenate([e[WRIST] for e in EPISODES]), rate)
    ends = np.cumsum([5, 6, 7, 8])/float(rate)
    for k in (IMAGE, WRIST):
        column(films, META, f"videos/{k}/from_timestamp", [0., *ends[:-1]])
        column(films, META, f"videos/{k}/to_timestamp", ends)
    column(films, ROWS, "timestamp", pa.array((np.asarray(values(films, "frame_index"))/float(rate)).astype(np.float32)))
    info(films, fps=29.97)
    for a, b in zip(EPISODES, read_lerobot(films)): assert abs(a[IMAGE].astype(int)-b[IMAGE]).max() < 12


# pictures

def png(x, mode=None, **kw):
    f = io.BytesIO()
    (x if isinstance(x, Image.Image) else Image.fromarray(x, mode) if mode else Image.fromarray(x)).save(f, kw.pop("format", "PNG"), **kw)
    return f.getvalue()


X = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
GREY = np.dstack([X[..., 0]]*3)


def test_forms_of_picture_files():
    "Each as LeRobot shows it: EXIF turned, palettes as colours, grey as three channels."
    test = lambda data, x: np.testing.assert_array_equal(decode_image(data), x)
    test(png(X), X)
    test(png(X[..., 0]), GREY)
    test(png(np.dstack([X, np.full((6, 8), 255, np.uint8)])), X)
    test(png(np.dstack([X[..., 0], np.full((6, 8), 255, np.uint8)])), GREY)
    few = Image.fromarray(X).quantize(256)
    test(png(few), np.asarray(few.convert("RGB")))
    test(png(Image.fromarray(X[..., 0] > 99)), 255*np.dstack([X[..., 0] > 99]*3).astype(np.uint8))
    exif = Image.Exif()
    exif[274] = 6
    test(png(X, exif=exif), np.rot90(X, -1))
    assert image_header(png(X, exif=exif), "x") == ((8, 6), "RGB")
    smooth = np.dstack([np.add.outer(np.arange(6), np.arange(8)).astype(np.uint8)*9]*3)
    assert abs(decode_image(png(smooth, format="JPEG", quality=95)).astype(int)-smooth).max() < 8
    with pytest.raises(ValueError, match="more than 8 bits"): decode_image(png(np.full((6, 8), 1500, np.uint16)))
    with pytest.raises(ValueError, match="opacity"): decode_image(png(np.dstack([X, X[..., 0]])))


@pytest.mark.parametrize("form,want", [(X, X), (X.transpose(2, 0, 1), X), (X/255, X), ((X/255).astype(np.float32).transpose(2, 0, 1), X), (X.astype(np.int32), X),
                                       (X[..., 0], GREY), (X[..., :1], GREY), (X[..., :1].transpose(2, 0, 1)/255, GREY), (np.dstack([X, np.full((6, 8), 9, np.uint8)]), X)])
def test_forms_of_arrays(form, want): assert np.array_equal(as_picture(form, "camera"), want) and as_picture(form, "camera").dtype == np.uint8


@pytest.mark.parametrize("kind,low,high", [("int8", -100, 100), ("int16", -20_000, 20_000), ("int32", -2**31, 2**31-1), ("float16", -60_000, 60_000), ("float32", -3e38, 3e38)])
def test_a_span_wider_than_its_type(kind, low, high):
    values = np.array([[[low, 0, high]]*8]*8).astype(kind)
    assert as_picture(values, "camera", (values.min(), values.max()))[0, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize("form", [None, "x", X > 5, X.astype(float), X/255*np.nan, X.astype(np.uint16), X[..., 0].astype(np.int32), X[None], X[0, 0], X[:, :, :2], X[:3, :3],
                                  X[:0], -(X/255), X.astype(complex), np.dstack([X, X[..., 0]]), [[1, 2], [3]], object()])
def test_no_pictures(form):
    with pytest.raises(ValueError, match="task 'stack', camera 'top'"): as_picture(form, "task 'stack', camera 'top'")


def test_a_picture_of_144_million_pixels(data, monkeypatch):
    "Refused from its header: nothing of it is decoded."
    big = png(Image.new("1", (12_000, 12_000)))
    monkeypatch.setattr(Image.Image, "convert", lambda *a, **kw: pytest.fail("it was decoded"))
    files = [dict(bytes=big, path=None)]*N
    column(data, ROWS, IMAGE, files)
    assert "CLVLA_MAX_PIXELS to 144000000" in refused(data, "12000 x 12000 pixels")


def test_a_size_that_changes_and_a_picture_that_is_cut(data):
    files = values(data, IMAGE)
    column(data, ROWS, IMAGE, [*files[:9], dict(bytes=png(X), path=None), *files[10:]])
    refused(data, "episode 1.*frame 4")
    column(data, ROWS, IMAGE, [*files[:9], dict(bytes=files[9]["bytes"][:60], path=None), *files[10:]])
    refused(data, "episode 1.*frame 4.* is damaged")


@pytest.mark.parametrize("size", [0, -3, "8", 100_000, 2.5])
def test_sizes_beyond_memory(data, size):
    with pytest.raises(ValueError, match="image_size"): list(read_lerobot(data, image_size=size))


def test_an_episode_beyond_memory(data, monkeypatch):
    real = open
    monkeypatch.setattr("builtins.open", lambda f, *a, **kw: io.StringIO("MemAvailable: 1 kB\n") if f == "/proc/meminfo" else real(f, *a, **kw))
    refused(data, "GB of memory to decode")


def test_the_colours_of_a_picture_are_counted_once(data, monkeypatch):
    frames, real = max(len(ep[ACTION]) for ep in EPISODES), open
    kB = -(-2*3*frames*(24*32+16*16)//1024)   # twice the pictures of the longest episode
    monkeypatch.setattr("builtins.open", lambda f, *a, **kw: io.StringIO(f"MemAvailable: {kB} kB\n") if f == "/proc/meminfo" else real(f, *a, **kw))
    assert len(list(read_lerobot(data))) == len(EPISODES)


def depth(path, key, name, **kw):
    "Give the picture column another name, and another one of depth."
    d, t = read_json(path/"meta/info.json")["features"], pq.read_table(path/ROWS)
    old = t[IMAGE].combine_chunks()
    deep = pa.array([dict(bytes=png(np.full((24, 32), 1500, np.uint16)), path=None)]*N)
    t = t.rename_columns([key if c == IMAGE else c for c in t.column_names]).append_column(name, kw.pop("pictures", deep))
    pq.write_table(t, path/ROWS)
    pic = d.pop(IMAGE)
    info(path, features={name: pic | kw, key: pic, **d})
    return old


def test_depth_is_no_front_camera(data, tmp_path, capsys):
    depth(data, IMAGES+"top", IMAGES+"a_range")
    task = partitions["by_dataset"]([data])[0]
    store = import_task(task, tmp_path/"store")
    assert store.cameras == [IMAGE] and np.array_equal(store.images[IMAGE][:5], EPISODES[0][IMAGE])
    assert "a_range hold depth and are left out" in capsys.readouterr().out
    with pytest.raises(ValueError, match="more than 8 bits"): list(read_lerobot(data, cameras={IMAGE: IMAGES+"a_range"}))


def test_what_is_called_or_marked_depth(data):
    "8 bits that LeRobot marks as depth are left out; those that are only called so are a camera beside the front one."
    pictures = pq.read_table(data/ROWS)[IMAGE].combine_chunks()
    depth(data, IMAGES+"top", IMAGES+"a_depth", pictures=pictures)
    ep = next(read_lerobot(data))
    assert {k for k in ep if k.startswith(IMAGES)} == {IMAGE, IMAGES+"a_depth"} and lerobot.camera_map(read_json(data/"meta/info.json"))[IMAGE] == IMAGES+"top"
    feature(data, IMAGES+"a_depth", info=dict(is_depth_map=True))
    assert IMAGES+"a_depth" not in next(read_lerobot(data))
    assert np.array_equal(next(read_lerobot(data, cameras={IMAGE: IMAGES+"a_depth"}))[IMAGE], EPISODES[0][IMAGE])


def test_videos_of_more_bits(films):
    "12 bits of grey are depth; 10 bits of colours are colours."
    import av
    whole = np.concatenate([e[IMAGE] for e in EPISODES])
    encode(films/FILM, whole, 10, pixels="yuv420p10le")
    got = np.concatenate([e[IMAGE] for e in read_lerobot(films)])
    assert abs(got.astype(int)-whole).max() < 12
    encode(films/FILM, whole, 10, "gray12le", "libx265", **{"x265-params": "log-level=none"})
    ep = next(read_lerobot(films))
    assert np.array_equal(ep[IMAGE], next(read_lerobot(films, cameras={IMAGE: WRIST}))[IMAGE]) and WRIST not in ep


# identity

def task_of(path): return partitions["by_dataset"]([path])[0]


def test_spellings_of_a_folder(data, tmp_path, monkeypatch):
    store = import_task(task_of(data), tmp_path/"store")
    (tmp_path/"link").symlink_to(data)
    monkeypatch.chdir(tmp_path)
    for name in (f"{data}/", "set", "./set/../set", "link", tmp_path/"link"):
        task = Task("x", "x", "x", None, dict(kind="lerobot", parts=[dict(path=str(name), task_index=[0, 1, 2])]))
        assert import_task(task, tmp_path/"store").meta == store.meta
        assert os.path.isabs(task_of(name).source["parts"][0]["path"])
    monkeypatch.chdir(data)
    assert import_task(task_of("."), tmp_path/"store").meta == store.meta and task_of(".").id == "set"
    moved = shutil.copytree(data, tmp_path/"elsewhere")
    assert import_task(task_of(moved), tmp_path/"store").meta == store.meta


def test_a_correction_in_place_is_noticed(data, tmp_path):
    import_task(task_of(data), tmp_path/"store", notes=tmp_path/"notes")
    f, said = data/ROWS, (data/ROWS).stat()
    raw = bytearray(f.read_bytes())
    raw[len(raw)//2] ^= 1
    f.write_bytes(raw)
    os.utime(f, ns=(said.st_atime_ns, said.st_mtime_ns))
    with pytest.raises(ValueError, match=f"data set 0, {ROWS}.*remove the folder"): import_task(task_of(data), tmp_path/"store", notes=tmp_path/"notes")


def test_hashes_are_noted(data, tmp_path, monkeypatch):
    "A file is read once; a note of another stamp, or a damaged one, counts nothing."
    for f in data.rglob("*"): os.utime(f, (1, 1))
    monkeypatch.setattr(contents, "_settled", lambda now: True)
    monkeypatch.setattr(contents, "_noted", {})
    want, read = file_hashes(data, tmp_path/"notes"), []
    real = contents.sha256
    monkeypatch.setattr(contents, "sha256", lambda f: read.append(f) or real(f))
    monkeypatch.setattr(contents, "_noted", {})
    assert file_hashes(data, tmp_path/"notes") == want and read == []
    (data/ROWS).write_bytes((data/ROWS).read_bytes())
    assert file_hashes(data, tmp_path/"notes") == want and [Path(f).name for f in read] == ["file-000.parquet"]
    monkeypatch.setattr(contents, "_noted", {})
    for text in ("[", "[1]", '{"x": 3}'):
        (tmp_path/"notes").write_text(text)
        assert file_hashes(data, tmp_path/"notes") == want
    (data/"meta/stats.json").write_text("{}")
    assert file_hashes(data) == want


def old_store(data, out, **kw):
    "A store as it was written before: its source has the sizes of files."
    size = {str(f.relative_to(data)): f.stat().st_size for f in sorted(data.glob("*/**/*")) if f.suffix in (".parquet", ".mp4", ".json")}
    source = dict(kind="lerobot", parts=[dict(path=str(data), task_index=[0, 1, 2], files=size)], image_size=None, cameras=None) | kw
    return write_store(out, read_lerobot(data), source=source)


def test_a_store_of_before(data, tmp_path):
    "Used while its data are the same files, and refused with what to do when they are not."
    store = old_store(data, tmp_path/"store")
    assert import_task(task_of(data), tmp_path/"store").meta == store.meta
    with pytest.raises(ValueError, match="another size.*remove the folder"): import_task(task_of(data), tmp_path/"store", 8)
    (data/ROWS).write_bytes((data/ROWS).read_bytes())
    with pytest.raises(ValueError, match="changed since.*remove the folder"): import_task(task_of(data), tmp_path/"store")


def test_a_store_of_before_from_a_data_set_that_is_refused_today(data, tmp_path):
    put("timestamp", lambda v: v[::-1])(data)
    with pytest.raises(ValueError, match="backwards"): old_store(data, tmp_path/"store")
    info_ok = pq.read_table(data/ROWS)
    change(data, ROWS, lambda t: t.set_column(t.column_names.index("timestamp"), "timestamp", pa.array(np.asarray(t["timestamp"])[::-1])))
    old_store(data, tmp_path/"store")
    change(data, ROWS, lambda t: info_ok)
    s = read_json(tmp_path/"store/meta.json")
    s["source"]["parts"][0]["files"][ROWS] = (data/ROWS).stat().st_size
    write_json(tmp_path/"store/meta.json", s)
    with pytest.raises(ValueError, match="backwards"): import_task(task_of(data), tmp_path/"store")


def test_places_of_stores(plain, tmp_path):
    "Two folders of one name have a store each; so do tasks and streams with long names; an old place is kept."
    from clvla.train.config import TrainConfig
    from clvla.train.demos import make_store, places
    a, b = (shutil.copytree(plain, tmp_path/day/"pick") for day in ("mon", "tue"))
    column(b, ROWS, ACTION, pa.array([[1., 2., 3.]]*N))
    time.sleep(.2)   # the hash of a file that was written a moment ago is not kept
    cfg = TrainConfig(data_dir=str(tmp_path/"data"), image_size=16)
    ours, theirs = (make_store(task_of(p), cfg, "pick") for p in (a, b))
    assert ours.path == tmp_path/"data/lerobot/pick/pick" and theirs.path != ours.path and theirs.action[0, 0] == 1 != ours.action[0, 0]
    assert [make_store(task_of(p), cfg, "pick").path for p in (a, b)] == [ours.path, theirs.path]
    shutil.rmtree(ours.path)
    assert places(task_of(b), cfg, "pick")[1] == theirs.path
    long = "+".join(f"a folder with a long name, number {k}" for k in range(12))
    assert make_store(task_of(a), cfg, long).path.parent.parent == tmp_path/"data/lerobot"
    assert (tmp_path/"data/lerobot/.hashes.json").exists()


def test_long_instructions_have_short_names(data):
    pq.write_table(pa.table(dict(task=["go "*200+"left", "go "*200+"right", "x"], task_index=range(3))), data/"meta/tasks.parquet")
    ids = [t.id for t in partitions["by_task_index"]([data])]
    assert len(set(ids)) == 3 and max(map(len, ids)) == 160


def test_a_data_set_that_changes_while_it_is_read(data, tmp_path, monkeypatch):
    real = lerobot.write_store
    def written(*a):
        store = real(*a)
        put("timestamp", lambda v: [x+1e-3 for x in v])(data)
        return store
    monkeypatch.setattr(lerobot, "write_store", written)
    with pytest.raises(ValueError, match="while the data set was read"): import_task(task_of(data), tmp_path/"store")
    assert not (tmp_path/"store/meta.json").exists()


# the check

def test_the_command_says_what_it_is(made, films, tmp_path, capsys):
    from clvla.data.check import check_lerobot, main
    column(films, ROWS, ACTION, pa.array([[x[0], .25, x[2]] for x in values(films, ACTION)], pa.list_(pa.float32())))
    column(films, ROWS, STATE, pa.array([[300+1e-4*(i % 3), 1.] for i in range(N)], pa.list_(pa.float32())))
    assert main([str(films), "--strip", str(tmp_path/"strip.png")]) == 0
    text, strip = capsys.readouterr().out, np.asarray(Image.open(tmp_path/"strip.png"))
    for said in ("4 episodes, 26 frames at 10 a second, 5 to 8 frames", "task 0: 2 episodes, 12 frames, 3 words, 12 letters: Open the box", "camera front): 24 x 32, h264 yuv420p, 10 a second",
                 "camera wrist): 16 x 16", "action, axis 1 never moves: it is 0.25", "observation.state, axis 0 hardly moves"): assert said in text
    assert strip.shape == (3*96, 5*128+5*96, 3) and abs(strip[10:80, 10:100].reshape(-1, 3).mean(0)-[0, 10, 0]).max() < 6
    for e, row in enumerate((0, 1, 3)): assert abs(strip[96*e+48, 600].astype(int)-[40*row, 12*(4+row)+10, 0]).max() < 12
    d = check_lerobot(films)
    assert np.isclose(d["stats"][ACTION][0]["mean"], np.mean([x[0] for x in values(films, ACTION)])) and d["warnings"] and json.dumps(d)


@pytest.mark.parametrize("fault", ["backwards", "gone", "nan", "lacks"])
def test_the_check_and_the_import_say_the_same(data, tmp_path, capsys, fault):
    from clvla.data.check import main
    ROW_FAULTS[fault][0](data)
    assert main([str(data)]) == 1
    said = capsys.readouterr().err
    with pytest.raises(ValueError) as e: import_lerobot(data, tmp_path/"frames", "by_dataset")
    assert said == f"clvla-data: refused: {e.value}\n" and "\n" not in str(e.value)


def test_folders_that_are_none(tmp_path, capsys):
    from clvla.data.check import main
    os.mkfifo(tmp_path/"pipe")
    for folder in (tmp_path, tmp_path/"nothing", tmp_path/"pipe", "/dev/null"): assert main([str(folder)]) == 1
    assert capsys.readouterr().err.count("is no LeRobotDataset v3") == 4


def test_the_check_reads_a_data_set_once(data, monkeypatch):
    "No column is read from a row group twice, and pictures are left where they are."
    from clvla.data.check import check_lerobot
    seen, real = [], pq.ParquetFile.iter_batches
    def counted(self, *a, **kw):
        seen.append((kw.get("row_groups"), tuple(kw["columns"])))
        return real(self, *a, **kw)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    check_lerobot(data)
    assert seen == [(None, (IMAGE,)), *(([g], (STATE, ACTION)) for g in range(4))]


def test_a_run_goes_on_from_another_working_folder(plain, tmp_path, monkeypatch):
    "The folder is named relative to two places, with a slash behind, and whole; a run of before kept the relative name."
    from clvla.run.folder import RunFolder
    from clvla.train.config import TrainConfig
    from clvla.train.learner import train_cl
    shutil.copytree(plain, tmp_path/"a/set")
    (tmp_path/"b").mkdir()
    kw = dict(algo="er", evaluate="none", smoke=True, steps_per_task=2, image_size=32, n_workers=1, run_dir=str(tmp_path/"run"), data_dir=str(tmp_path/"data"))
    monkeypatch.chdir(tmp_path/"a")
    run = train_cl(TrainConfig(suite="set", **kw), say=len)
    write_json(run.path/"config.json", read_json(run.path/"config.json") | dict(suite="set"))
    assert train_cl(TrainConfig(suite="set/", **kw), say=len).done
    write_json(run.path/"config.json", read_json(run.path/"config.json") | dict(suite=str(tmp_path/"a/set")))
    monkeypatch.chdir(tmp_path/"b")
    for suite in ("../a/set", str(tmp_path/"a/set")): assert train_cl(TrainConfig(suite=suite, **kw), say=len).done
    assert len(list((tmp_path/"data").rglob("meta.json"))) == 2 and RunFolder(tmp_path/"run").done
