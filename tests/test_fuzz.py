"""Damaged files: every reader of ours answers, or says in a sentence of its own which file is wrong. What damages them is drawn by Hypothesis,
the same on every machine, and nothing is written into the project."""
import contextlib
import io
import json
import os
import resource
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, Phase, given, settings, strategies as st  # noqa: E402

SECONDS = 20          # an example that takes longer hangs
EXAMPLES = int(os.environ.get("CLVLA_FUZZ", 20))   # of each reader and kind of damage
OURS = (ValueError, OSError, RuntimeError, ImportError)
NOT_OURS = (UnicodeError, json.JSONDecodeError, RecursionError, NotImplementedError)


# --- damage ----------------------------------------------------------------------------------------------------------------------------

def nested(n, open_="[", close="]"): return open_*n+close*n


VALUES = [None, True, False, 0, -1, 1, 2.5, -0.0, 10**400, 2**63, 1e308, "", "x", "1", "\u00e9\u4e2d\U0001f600", "a/b", "../..", "\0", "x"*5000, [], {}, [None], [[]],
          [1, 2, 3], {"a": 1}, {"": None}, ["a", "b"], float("nan"), float("inf"), -float("inf")]


def places(o, at=()):
    "All places in a JSON value."
    yield at
    for k, v in o.items() if isinstance(o, dict) else enumerate(o) if isinstance(o, list) else ():
        yield from places(v, (*at, k))


def changed(o, at, how, value, name):
    "A copy of a JSON value with something else at a place."
    o = json.loads(json.dumps(o))
    if not at: return value
    x = o
    for k in at[:-1]: x = x[k]
    k = at[-1]
    if how == "replace": x[k] = value
    elif how == "delete": del x[k]
    elif how == "text": x[k] = str(x[k])
    elif how == "wrap": x[k] = [x[k]]
    elif isinstance(x, dict): x[name] = x.pop(k) if how == "rename" else value
    else: x.insert(k, value)
    return o


HOW = ["replace", "replace", "replace", "delete", "delete", "rename", "add", "text", "wrap"]


def damage_json(data, text):
    "JSON that is still JSON, or nearly: other types, other names, names twice, deep nesting."
    o = json.loads(text)
    kind = data.draw(st.sampled_from(["change"]*8+["twice", "deep", "bom", "two"]))
    if kind == "change":
        for _ in range(data.draw(st.integers(1, 2))):
            all_places = list(places(o))
            o = changed(o, data.draw(st.sampled_from(all_places)), data.draw(st.sampled_from(HOW)), data.draw(st.sampled_from(VALUES)),
                        data.draw(st.sampled_from(["x", "", "\u00e9", "task", "0"])))
        return json.dumps(o).encode()
    if kind == "twice" and isinstance(o, dict) and o:
        k = data.draw(st.sampled_from(sorted(o)))
        return (json.dumps(o)[:-1]+f", {json.dumps(k)}: {json.dumps(data.draw(st.sampled_from(VALUES)))}}}").encode()
    if kind == "deep":
        n = data.draw(st.sampled_from([50, 2000, 100_000]))
        at = data.draw(st.sampled_from([a for a in places(o)]))
        return json.dumps(changed(o, at, "replace", "@deep@", "x")).replace('"@deep@"', data.draw(st.sampled_from([nested(n), nested(n, '{"a":', '}').replace(':}', ':1}', 1)]))).encode()
    if kind == "bom": return b"\xef\xbb\xbf"+text
    return text*2


def damage_bytes(data, raw):
    "Bytes flipped, cut off, put in, twice, or none."
    kind = data.draw(st.sampled_from(["flip"]*4+["cut"]*2+["insert", "double", "empty", "zeros", "utf16", "lines"]))
    at = data.draw(st.integers(0, max(0, len(raw)-1)))
    if kind == "flip" and raw:
        b = bytearray(raw)
        for k in {at, *data.draw(st.lists(st.integers(0, len(raw)-1), max_size=2))}: b[k] ^= 1 << data.draw(st.integers(0, 7))
        return bytes(b)
    if kind == "cut": return raw[:at]
    if kind == "insert": return raw[:at]+data.draw(st.sampled_from([b"\0", b"\xff\xfe", b"\n", b"NaN", b"{", b'"', b"\xf0\x9f\x98\x80", b"1e999", b",,", b"["*5000, b"? "*3000]))+raw[at:]
    if kind == "double": return raw+raw
    if kind == "zeros": return bytes(len(raw))
    if kind == "utf16": return raw.decode("utf-8", "replace").encode("utf-16")
    if kind == "lines": return b"\n".join(reversed(raw.split(b"\n")))
    return b""


def damage_table(data, raw):
    "A parquet file that is one still, with another column, type, row or value."
    import pyarrow as pa
    from pyarrow import parquet
    t = parquet.read_table(pa.BufferReader(raw))
    names = t.column_names
    k = data.draw(st.integers(0, len(names)-1))
    how = data.draw(st.sampled_from(["drop", "rename", "text", "null", "nulls", "empty", "half", "twice", "reverse", "value"]))
    if how == "drop": t = t.drop_columns([names[k]])
    elif how == "rename": t = t.rename_columns([*names[:k], names[k]+"x", *names[k+1:]])
    elif how == "text": t = t.set_column(k, names[k], pa.array([str(v) for v in t.column(k).to_pylist()]))
    elif how == "null": t = t.set_column(k, names[k], pa.array([None]*len(t), t.schema.types[k]))
    elif how == "nulls": t = t.set_column(k, names[k], pa.nulls(len(t)))
    elif how == "empty": t = t.slice(0, 0)
    elif how == "half": t = t.slice(0, len(t)//2)
    elif how == "twice": t = pa.concat_tables([t, t])
    elif how == "reverse": t = t.take(list(range(len(t)))[::-1])
    else:
        column, v = t.column(k).to_pylist(), data.draw(st.sampled_from([-1, 0, 7, 2**62, float("nan"), float("inf"), "x", "", [1.], []]))
        column[data.draw(st.integers(0, len(column)-1))] = v
        with contextlib.suppress(pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError): t = t.set_column(k, names[k], pa.array(column))
    out = pa.BufferOutputStream()
    parquet.write_table(t, out)
    return out.getvalue().to_pybytes()


@contextlib.contextmanager
def in_time(seconds=SECONDS):
    "TimeoutError, by a signal, where the block takes longer: no reader may wait for ever."
    def late(*_): raise AssertionError(f"it took longer than {seconds} s")
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try: yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- readers ---------------------------------------------------------------------------------------------------------------------------

@dataclass
class Reader:
    "What is read, and which file is damaged."
    file:str                 # below the folder
    read:object              # called with the folder
    json:bool = True         # structured damage too
    names:tuple = ()         # what a message may name in place of the file
    sealed:bool = False      # no damage may pass
    lines:bool = False       # JSON lines: one of them is damaged
    table:bool = False       # parquet: columns and rows are damaged


def quiet(f, *args, **kw):
    with contextlib.redirect_stdout(io.StringIO()): return f(*args, **kw)


def judge(reader, folder, raw):
    "Read a damaged file: an answer, or one of our errors that names it."
    path = folder/reader.file
    path.write_bytes(raw)
    before = sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))
    with in_time():
        try: found = quiet(reader.read, folder)
        except OURS as e:
            text = str(e)
            assert not isinstance(e, NOT_OURS), f"{type(e).__name__}: {text[:300]}"
            named = (path.name, *reader.names)
            assert any(n in text for n in named), f"the message names none of {named}: {type(e).__name__}: {text[:400]}"
            assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*")) == before, "a refusal left something behind"
            return None
    return found


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    "A run with an evaluation, a data set, a sweep, and what people write by hand; made once, copied for each reader."
    from clvla.data.lerobot_write import write_lerobot
    from clvla.run.folder import RunFolder
    from clvla.train.config import TrainConfig, resolve
    from clvla.train.learner import train_cl
    home = tmp_path_factory.mktemp("whole")
    cfg = resolve(TrainConfig(suite="dot_2", cl="er", n_demos=2, steps_per_task=3, n_trials=1, rows_per_task=1, warmup=1, batch_size=4, threads=1, n_workers=1,
                              image_size=32, lora_rank=2, model_kw=dict(D=32), data_dir=str(home/"data"), run_dir=str(home/"run")))
    quiet(train_cl, cfg, len)
    RunFolder(home/"run").note_failed(ValueError("no reason"))
    (home/"run/console.txt").write_text('@{"phase": "training", "task": "left", "done": 1, "total": 3}\nplain\n')
    demo = next((home/"data").rglob("demos.json")).parent
    shutil.copytree(demo, home/"demo")
    write_lerobot(home/"dataset", episodes_of(2))
    (home/"parameters.yaml").write_text("suite: mw5\ncl: er\nseed: 3\nn_demos: 4\nlr: 0.001\nmodel_kw: {D: 32}\ntask_order: [1, 0]\n")
    (home/"parameters.json").write_text('{"suite": "mw5", "cl": "er", "seed": 3, "lr": 0.001, "model_kw": {"D": 32}}')
    (home/"sweep.yaml").write_text("name: both\nshared: {suite: dot_2, n_demos: 2}\ngrid: {cl: [er, mir], seed: 0..2}\ncompare: {by: cl}\n")
    (home/"sweep.json").write_text('{"name": "both", "shared": {"suite": "dot_2"}, "list": [{"cl": "er", "seed": 0}, {"cl": "mir", "name": "b"}], "compare": {"by": "cl"}}')
    (home/"plugin.py").write_text("from clvla.cl.all import algos\nfrom clvla.cl.base import CLAlgorithm\nclass Mine(CLAlgorithm): pass\nalgos['fuzzy'] = Mine\n")
    (home/"results.csv").write_text("task,trial,seed,success\n"+"".join(f"pick {k % 2},{k},0,{k % 3 == 0}\n".lower() for k in range(8)))
    (home/"counts.csv").write_text("task,k,n\npick,3,10\nplace,7,10\n")
    (home/"eval_info.json").write_text(json.dumps(dict(per_task=[dict(task_group="a", task_id=k, metrics=dict(successes=[True, False])) for k in range(2)])))
    (home/"episodes_info.json").write_text(json.dumps(dict(per_episode=[dict(seed=k, success=k > 1) for k in range(4)])))
    (home/"vla_eval.json").write_text(json.dumps(dict(harness_version="0.8", benchmark="b", seed=1, tasks=[dict(task="t", episodes=[
        dict(episode_id=k, metrics=dict(success=k > 0), failure_reason=None) for k in range(3)])])))
    shutil.copy(Path(__file__).parent/"openvla_oft.txt", home/"openvla.txt")
    from clvla.run.queue import Entry, Queue
    queue = Queue(home/"queue", [Entry(k, f"er-s{k}", "run_cl", dict(seed=k), dict(cl="er", suite="dot_2", seed=k)) for k in range(2)])
    queue.begin()
    claims = queue.claims(queue.entries[0])
    claims.take(1, every=1.)
    claims.write_end(1, state="failed", said="no")
    return home


def episodes_of(n):
    "Two short episodes, with one camera."
    import numpy as np
    from clvla.core.names import ACTION, IMAGE, PROMPT, STATE
    g = np.random.default_rng(0)
    return [{IMAGE: g.integers(0, 256, (4, 16, 16, 3), np.uint8), STATE: g.normal(size=(4, 3)).astype(np.float32),
             ACTION: g.normal(size=(4, 2)).astype(np.float32), PROMPT: f"go {k}"} for k in range(n)]


def last_checkpoint(folder):
    from clvla.run.checkpoint import checkpoints
    return checkpoints(folder/"run/checkpoints")[-1]


def checkpoint(folder):
    from clvla.run.checkpoint import load_checkpoint
    return load_checkpoint(last_checkpoint(folder))


def records(folder, name):
    from clvla.core.records import read_jsonl
    return read_jsonl(folder/"run"/name, len)


def watched(folder):
    from clvla.run.watch import Run
    run = Run.open(folder/"run")
    return run.status, run.position, run.table(), run.last_time


def reported(folder):
    from clvla.run.folder import without_success
    from clvla.run.report import cost_table, matrix_of, settings_table, versions_table
    run = folder/"run"
    return matrix_of(run), without_success(run), cost_table(run), settings_table(run), versions_table(run)


def compared(folder):
    from clvla.eval.compare import find_runs
    return find_runs([str(folder/"run")], len)


def configured(folder):
    from clvla.run.config import read_config
    return read_config(folder/"run")


def begun(folder):
    from clvla.run.folder import RunFolder
    cfg = configured_first(folder)
    return RunFolder(folder/"run").check(cfg)


def configured_first(folder):
    from clvla.run.config import read_config
    from dataclasses import replace
    return replace(read_config(folder/"first"), run_dir=str(folder/"run"))


def frames(folder):
    from clvla.data.frames import FrameStore
    store = FrameStore.open(folder/"demo/frames")
    return store.gather([0, 1], 4)


def demonstrated(folder):
    from clvla.core.files import read_json
    from clvla.data.demos import recorded
    settings = json.loads((folder/"settings.json").read_text())
    return recorded(folder/"demo", settings)


def policy(folder):
    from clvla.policies.all import load_policy
    return load_policy(last_checkpoint(folder))


def state(folder):
    from clvla.core.state import load_state
    return load_state(last_checkpoint(folder)/"algo.safetensors")


def processed(folder):
    from clvla.core.files import read_json
    from clvla.data.stats import Processor
    point = last_checkpoint(folder)
    return Processor.from_json(read_json(point/"processor.json"), point/"processor.json")


def streamed(folder):
    from clvla.core.files import read_json
    from clvla.data.streams import stream_from
    point = last_checkpoint(folder)
    return stream_from(read_json(point/"stream.json"), point/"stream.json")


def statistics(folder):
    from clvla.data.stats import read_stats
    return read_stats(folder/"run/dataset_statistics.json")


def versioned(folder):
    from clvla.run.versions import changed_versions
    return changed_versions(folder/"run/versions.json")


def costed(folder):
    from clvla.run.folder import Cost
    Cost(folder/"run").add("training", 1.)


def given_by_file(folder, name):
    from clvla.command.runs import read_files
    from clvla.run.config import make_config
    from clvla.train.config import TrainConfig
    found = read_files([str(folder/name)])
    try: make_config(TrainConfig, found)
    except ValueError as e: raise ValueError(f"{name}: {e}") from e   # the setting is named; which file it came from, the command knows
    return found


def swept(folder, name):
    from clvla.command.entries import entries_of, read_sweep
    sweep = read_sweep(folder/name)
    try: return entries_of(sweep, {}, len)
    except ValueError as e: raise ValueError(f"{name}: {e}") from e


def queued(folder):
    from clvla.run.queue import Queue, remember
    queue = Queue.open(folder/"queue")
    remember(queue)
    return queue.states()


def plugged(folder):
    from clvla.core.plugins import load_plugins
    return load_plugins([str(folder/"plugin.py")])


def audited(folder, name):
    from clvla.eval.results import read_results
    r = read_results(str(folder/name))
    return r.k, r.n, r.rate, r.interval, r.pairs


def data_set(folder):
    from clvla.data.lerobot import read_lerobot
    return list(read_lerobot(folder/"dataset"))


def partitioned(folder):
    from clvla.data.partition import partitions
    return partitions["auto"]([folder/"dataset"])


def trusted(folder):
    from clvla.core.trust import foreign, refused
    return foreign(folder/"run"), refused(folder/"run", ["module x:y"])


def held(folder):
    from clvla.run.folder import RunFolder
    run = RunFolder(folder/"run")
    return run.interruption, run.holder, run.status


CHECKPOINT = ("checkpoint",)
READERS = {
    "manifest": Reader("@/manifest.json", checkpoint, sealed=True, names=CHECKPOINT),
    "checkpoint-config": Reader("@/config.json", checkpoint, sealed=True, names=CHECKPOINT),
    "weights": Reader("@/weights.safetensors", checkpoint, json=False, sealed=True, names=CHECKPOINT),
    "log": Reader("run/log.jsonl", lambda f: records(f, "log.jsonl"), lines=True),
    "episodes": Reader("run/episodes.jsonl", lambda f: records(f, "episodes.jsonl"), lines=True),
    "watched-log": Reader("run/log.jsonl", watched, lines=True),
    "console": Reader("run/console.txt", watched, json=False),
    "failed": Reader("run/failed.json", watched),
    "lock": Reader("run/run.lock", held),
    "begun-note": Reader("run/begun.json", trusted),
    "config": Reader("run/config.json", configured),
    "config-begin": Reader("run/config.json", begun, names=("run",)),
    "reported-stream": Reader("run/stream.json", reported),
    "reported-cost": Reader("run/cost.json", reported),
    "reported-config": Reader("run/config.json", reported),
    "reported-episodes": Reader("run/episodes.jsonl", reported, lines=True),
    "reported-versions": Reader("run/versions.json", reported),
    "versions": Reader("run/versions.json", versioned),
    "cost": Reader("run/cost.json", costed),
    "compared-config": Reader("run/config.json", compared),
    "compared-stream": Reader("run/stream.json", compared),
    "compared-cost": Reader("run/cost.json", compared),
    "statistics": Reader("run/dataset_statistics.json", statistics),
    "frames-meta": Reader("demo/frames/meta.json", frames, names=("frames",)),
    "frames-action": Reader("demo/frames/action.npy", frames, json=False, sealed=True),
    "demos": Reader("demo/demos.json", demonstrated, names=("demo",)),
    "policy": Reader("@/policy.json", policy, names=("checkpoints",)),
    "state": Reader("@/algo.safetensors", state, json=False),
    "processor": Reader("@/processor.json", processed),
    "stream": Reader("@/stream.json", streamed),
    "parameters-yaml": Reader("parameters.yaml", lambda f: given_by_file(f, "parameters.yaml"), json=False),
    "parameters-json": Reader("parameters.json", lambda f: given_by_file(f, "parameters.json")),
    "sweep-yaml": Reader("sweep.yaml", lambda f: swept(f, "sweep.yaml"), json=False),
    "sweep-json": Reader("sweep.json", lambda f: swept(f, "sweep.json")),
    "queue": Reader("queue/sweep.json", queued),
    "claim": Reader("queue/entries/000/0001.json", queued),
    "claim-end": Reader("queue/entries/000/0001.end", queued),
    "plugin": Reader("plugin.py", plugged, json=False),
    "csv": Reader("results.csv", lambda f: audited(f, "results.csv"), json=False, names=("results",)),
    "csv-counts": Reader("counts.csv", lambda f: audited(f, "counts.csv"), json=False, names=("counts",)),
    "eval-info": Reader("eval_info.json", lambda f: audited(f, "eval_info.json"), names=("eval_info",)),
    "episodes-info": Reader("episodes_info.json", lambda f: audited(f, "episodes_info.json"), names=("episodes_info",)),
    "vla-eval": Reader("vla_eval.json", lambda f: audited(f, "vla_eval.json"), names=("vla_eval",)),
    "openvla": Reader("openvla.txt", lambda f: audited(f, "openvla.txt"), json=False, names=("openvla",)),
    "audited-config": Reader("run/config.json", lambda f: audited(f, "run")),
    "info": Reader("dataset/meta/info.json", data_set, names=("dataset",)),
    "info-partition": Reader("dataset/meta/info.json", partitioned, names=("dataset",)),
    "tasks": Reader("dataset/meta/tasks.parquet", data_set, json=False, table=True, names=("dataset",)),
    "episodes-parquet": Reader("dataset/meta/episodes/chunk-000/file-000.parquet", data_set, json=False, table=True, names=("dataset",)),
    "rows": Reader("dataset/data/chunk-000/file-000.parquet", data_set, json=False, table=True, names=("dataset",)),
}


@pytest.fixture(scope="module")
def place(home, tmp_path_factory):
    "A copy of all files that examples damage and put back."
    folder = tmp_path_factory.mktemp("damaged")/"all"
    shutil.copytree(home, folder)
    shutil.copytree(folder/"run", folder/"first")
    (folder/"settings.json").write_text(json.dumps(json.loads((folder/"demo/demos.json").read_text())["settings"]))
    return folder


def whole_file(reader, place):
    "The reader with its file's name in full, and what stands in it."
    from dataclasses import replace
    r = replace(reader, file=reader.file.replace("@", str(last_checkpoint(place).relative_to(place))))
    return r, (place/r.file).read_bytes()


def answers(reader, place, raw):
    "What a whole file gives."
    with contextlib.suppress(Exception): return repr(quiet(reader.read, place))


def an_example(data, reader, place, raw):
    "Damage the file in one way, read it, put it back."
    structured = reader.json and data.draw(st.integers(0, 3)) > 0
    if reader.lines and data.draw(st.booleans()):
        lines = raw.splitlines(keepends=True)
        k = data.draw(st.integers(0, len(lines)-1))
        lines[k] = damage_json(data, lines[k])+b"\n"
        bad = b"".join(lines)
    elif reader.table and data.draw(st.booleans()): bad = damage_table(data, raw)
    else: bad = damage_json(data, raw) if structured and not reader.lines else damage_bytes(data, raw)
    try:
        found = judge(reader, place, bad)
        assert not (reader.sealed and found is not None and bad != raw), "damage passed unnoticed"
    finally: (place/reader.file).write_bytes(raw)


# no shrinking: the seed makes a failing example again, and a search for a smaller one would take minutes
AS_ALWAYS = settings(derandomize=True, database=None, deadline=None, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), phases=[Phase.generate],
                     report_multiple_bugs=False)


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_answered_or_named(place, name):
    reader, raw = whole_file(READERS[name], place)
    quiet(reader.read, place)   # whole, it is read

    @AS_ALWAYS
    @given(st.data())
    def run(data): an_example(data, reader, place, raw)
    run()


# --- large files -----------------------------------------------------------------------------------------------------------------------

def in_a_fork(work):
    "What a function returns, as text, from a process of its own: that one's largest memory counts from its birth."
    ours, theirs = os.pipe()
    if not (pid := os.fork()):
        with contextlib.suppress(BaseException): os.write(theirs, str(work()).encode())
        os._exit(0)
    os.close(theirs)
    with open(ours) as f: said = f.read()
    os.waitpid(pid, 0)
    return said


def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*1024


MANY = 40*2**20   # bytes
BIG = {"state": lambda raw: (2**60).to_bytes(8, "little")+raw[8:]+bytes(MANY),               # a header of 2**60 bytes
       "frames-action": lambda raw: raw.replace(b"(", b"(99999999999, ", 1)+bytes(MANY),     # an array of 10**12 numbers
       "rows": lambda raw: raw[:200]+bytes(MANY)+raw[200:],
       "config": lambda raw: raw+bytes(MANY),
       "plugin": lambda raw: b"#"*MANY+b"\n)"}


@pytest.mark.parametrize("name", BIG)
def test_a_large_damaged_file_is_refused_within_twice_its_size(place, name):
    "16 MB are left for what is imported on the way."
    reader, raw = whole_file(READERS[name], place)
    quiet(reader.read, place)   # what it imports
    path = place/reader.file

    def refused():
        before = peak()
        try: quiet(reader.read, place)
        except OURS as e: return any(n in str(e) for n in (path.name, *reader.names)), peak()-before
    try:
        assert in_a_fork(lambda: path.write_bytes(BIG[name](raw)))
        named, more = eval_pair(in_a_fork(refused))
    finally: path.write_bytes(raw)
    assert named and more < 2*MANY+16*2**20, f"{more/MANY:.1f} times"


def eval_pair(text):
    "(True, 12) as text."
    a, _, b = text.strip("()").partition(", ")
    return a == "True", int(b)
