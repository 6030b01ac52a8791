"Blind and deaf runs: what the policy is given in training, in evaluation and after a stop, how such runs are named and compared, and what is refused."
import importlib.util
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from clvla.core.config import config_json
from clvla.core.files import read_json, write_json
from clvla.core.names import ACTION, IMAGE, IMAGES, PROMPT, STATE
from clvla.data.controls import SENTENCE, Controls, check_colours, check_sentence, make_controls, mean_colours, plain_pictures
from clvla.data.frames import write_store
from clvla.data.lerobot_write import write_lerobot
from clvla.data.loader import TaskData
from clvla.data.stats import Processor, compute_stats
from clvla.eval.call import batch_gap, idle_row, predict
from clvla.eval.compare import group, label, paired_table, read_run, read_runs
from clvla.eval.rows import Row
from clvla.policies.all import make_policy
from clvla.policies.tiny import Tiny
from clvla.run.config import differences, from_page, read_config
from clvla.run.resume import fingerprint
from clvla.train.checkpoint_eval import EvalConfig, eval_cl
from clvla.train.config import TrainConfig, resolve
from clvla.train.eval_config import processor_of
from clvla.train.learner import train_cl
from clvla.train.prepare import make_processor, prepare

torch.set_num_threads(1)
job = sys.modules["clvla.train.learner"]
WRIST = IMAGES+"wrist"
TINY = dict(D=16, n_blocks=1)
DOT = dict(base="dot_2", env=dict(cameras=["front", "wrist"]))   # one set of demonstrations for all tests
SMALL = dict(suite=DOT, n_demos=2, steps_per_task=3, n_trials=2, rows_per_task=1, warmup=1, batch_size=8, threads=1, n_workers=1, image_size=32,
             model_kw=TINY, device="cpu")
BOTH = dict(blind=True, deaf=True)


def episode(T, seed=0, prompt="Push the block", size=32, cameras=(IMAGE,), low=0):
    g = np.random.default_rng(seed)
    return {**{k: g.integers(low, 255, (T, size, size, 3), np.uint8) for k in cameras}, STATE: g.normal(size=(T, 2)).astype(np.float32),
            ACTION: g.normal(size=(T, 3)).astype(np.float32), PROMPT: prompt}


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


def config(data, path, **kw): return resolve(TrainConfig(data_dir=str(data), run_dir=str(path), **(SMALL | kw)))


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    "Joint runs with and without controls, each trained and evaluated once."
    home, made = tmp_path_factory.mktemp("runs"), {}

    def get(**kw):
        name = "-".join(["joint", *(k for k in kw if kw[k])])
        if name not in made: made[name] = train_cl(config(data, home/name, algo="joint", **kw), say=len)
        return made[name]
    get.home = home
    return get


@pytest.fixture
def given(monkeypatch):
    "All batches and observations that a Tiny encodes: {'pictures', 'sentences', 'words'} that were seen."
    seen, real = dict(pictures=set(), sentences=set(), calls=0), Tiny.encode

    def encode(self, obs, tokens=False):
        for k in (k for k in obs if k.startswith(IMAGES)): seen["pictures"] |= {(k, x.numpy().tobytes()) for x in obs[k].contiguous()}
        seen["sentences"] |= set(obs[PROMPT])
        seen["calls"] += 1
        return real(self, obs, tokens)
    monkeypatch.setattr(Tiny, "encode", encode)
    return seen


def facts(records): return sorted((r["stage"], r["task"], r["trial"], r["success"], r["steps"], r["reward"]) for r in records)


# ---------------------------------------------------------------------- what replaces pictures and sentences

def test_the_colour_is_the_mean_over_all_frames_and_rounded_half_up(tmp_path):
    stores = [write_store(tmp_path/str(k), [episode(5+9*k, k, cameras=(IMAGE, WRIST), low=90*k)]) for k in range(2)]
    exact = {k: np.concatenate([s.images[k] for s in stores]).astype(np.int64).sum((0, 1, 2))/(19*32*32) for k in (IMAGE, WRIST)}
    assert mean_colours(stores) == {k: np.floor(v+.5).tolist() for k, v in exact.items()} == mean_colours(stores, n=3)
    half = np.zeros((2, 2, 2, 3), np.uint8); half[0] = 1; half[..., 2] = 255
    assert mean_colours([type("Store", (), dict(images={IMAGE: half}))]) == {IMAGE: [1, 1, 255]}


def test_a_plain_picture_keeps_shape_type_and_order_in_memory():
    x = torch.zeros(4, 6, 6, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    y = plain_pictures(x, [1, 2, 250])
    assert (y.shape, y.dtype, y.stride()) == (x.shape, x.dtype, x.stride()) and y[3, :, 5, 0].tolist() == [1, 2, 250]
    assert x.max() == 0 and y.flatten(2).float().std(2).max() == 0


def test_batches_and_observations_get_the_same_constant_inputs(tmp_path):
    stores = {t: write_store(tmp_path/t, [episode(12, k, f"Do {t} {t}"[:5+2*k], cameras=(IMAGE, WRIST))]) for k, t in enumerate("ab")}
    controls = make_controls(list(stores.values()), True, True)
    data = TaskData(stores, Processor(compute_stats(stores), controls=controls), H=2, prepare=lambda b: b | dict(heard=b[PROMPT], saw=b[IMAGE]))
    plain = TaskData(stores, Processor(compute_stats(stores)), H=2)
    batch, true = data.fetch_refs(refs := [("a", 3), ("b", 7), ("a", 0)]), plain.fetch_refs(refs)
    assert batch[PROMPT] == batch["heard"] == [SENTENCE]*3 and len(set(true[PROMPT])) == 2
    for k in (IMAGE, WRIST): assert batch[k][:, :, 0, 0].tolist() == [controls.colours[k]]*3 and (batch[k] == batch[k][:1, :, :1, :1]).all()
    assert torch.equal(batch["saw"], batch[IMAGE]) and not torch.equal(true[IMAGE][0], true[IMAGE][1])
    for k in (STATE, ACTION): assert torch.equal(batch[k], true[k])
    obs = data.processor.obs({k: np.asarray(stores["b"].images[k][:2]) for k in (IMAGE, WRIST)} | {STATE: stores["b"].state[:2], PROMPT: ["x", "y"]})
    assert torch.equal(obs[WRIST], batch[WRIST][:2]) and obs[IMAGE].stride() == batch[IMAGE].stride() and obs[PROMPT] == [SENTENCE]*2


def test_a_camera_that_was_not_trained_on_is_hidden_too():
    batch = {IMAGE: torch.ones(1, 3, 4, 4, dtype=torch.uint8), WRIST: torch.ones(1, 3, 4, 4, dtype=torch.uint8), STATE: torch.zeros(1, 2)}
    assert set(Controls({IMAGE: [0, 0, 0]})(batch)) == {IMAGE, STATE} and Controls()(batch) is batch


@pytest.mark.parametrize("head", ["flow", "l1", "discrete"])
def test_no_head_depends_on_what_is_hidden(head):
    "Calls of an evaluation with other pictures and sentences: the same actions for a blind and deaf policy, others for a plain one."
    n = 5 if head == "discrete" else None
    policy = make_policy("tiny", 32, state_dim=2, action_dim=1 if n else 3, H=4, head=head, n_actions=n, seed=0, **TINY).train(False)
    with torch.no_grad():   # new heads may begin at zero, and then nothing depends on anything
        for p in policy.parameters(): p.add_(.1*torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    g = np.random.default_rng(0)
    stats = compute_stats(type("Store", (), dict(state=g.normal(size=(9, 2)), action=np.ones((9, 1)) if n else g.normal(size=(9, 3)), n_actions=n)))
    tasks = [type("Task", (), dict(id="one", prompt="move the block "*k)) for k in (1, 2)]   # one id: equal noise
    state = np.zeros((3, 2), np.float32)

    def act(processor, task, value):
        rows = [Row(0, 0, task) for _ in range(2)]
        for row in rows: row.begin(task, 0, 0)
        return predict(policy, processor, {IMAGE: np.full((3, 32, 32, 3), value, np.uint8), STATE: state}, [*rows, idle_row(tasks, policy)])[:2]
    both, plain = Processor(stats, controls=Controls({IMAGE: [9, 99, 200]}, SENTENCE)), Processor(stats)
    assert np.array_equal(act(both, tasks[0], 0), act(both, tasks[1], 255))
    if not n: assert not np.array_equal(act(plain, tasks[0], 0), act(plain, tasks[0], 255)) and not np.array_equal(act(plain, tasks[0], 0), act(plain, tasks[1], 0))
    obs = {IMAGE: g.integers(0, 255, (3, 32, 32, 3), np.uint8), STATE: state}
    assert batch_gap(policy, both, obs, tasks, 4) < 1e-4   # equal states: only rounding is left, whatever is drawn and said


# ---------------------------------------------------------------------- runs

@pytest.mark.parametrize("head,algo", [("flow", "mir"), ("l1", "derpp")])
def test_all_that_a_run_shows_its_policy_is_controlled(data, tmp_path, given, head, algo):
    "Training, replay, scores, kept outputs and evaluation: one picture a camera and one sentence. Films show the simulator."
    run = train_cl(config(data, tmp_path/"run", head=head, algo=algo, n_trials=1, last_only=True, videos=True, **BOTH), say=len)
    assert given["sentences"] == {SENTENCE} and {k for k, _ in given["pictures"]} == {IMAGE, WRIST} and len(given["pictures"]) == 2
    assert given["calls"] > 9 and len(run.episodes()) == 2
    films = list((run.path/"videos").rglob("*.gif"))
    assert len(films) == 2 and all(len(Image.open(f).convert("RGB").getcolors(9999)) > 1 for f in films)


def test_without_controls_pictures_and_sentences_differ(runs, given):
    "The test above can fail: its spy sees many pictures and every sentence of a plain run."
    runs()
    assert len(given["pictures"]) > 20 and given["sentences"] == {"move the dot to the left", "move the dot to the right"}


def test_a_control_changes_what_is_learnt_and_nothing_else_of_the_data(runs):
    prints = {name: fingerprint(runs(**kw).path) for name, kw in dict(plain={}, blind=dict(blind=True), deaf=dict(deaf=True), both=BOTH).items()}
    assert len(set(prints.values())) == 4
    stats = [read_json(runs(**kw).path/"dataset_statistics.json") for kw in ({}, BOTH)]
    assert stats[0] == stats[1] and "controls" not in read_json(last(runs())/"processor.json")


def last(run): return sorted((run.path/"checkpoints").glob("0*"))[-1]


def test_a_later_evaluation_of_a_blind_run_is_the_runs_own(runs, monkeypatch):
    "Without being told; and it would not be, if the checkpoint did not say so."
    run, kw = runs(**BOTH), dict(n_trials=2, n_workers=1, rows_per_task=1)
    assert processor_of(last(run)).controls == Controls(read_json(last(run)/"processor.json")["controls"]["colours"], SENTENCE)
    assert facts(eval_cl(EvalConfig(run_dir=str(run.path), **kw), len).episodes()) == facts(run.episodes())
    chunks = []
    for keep in (True, False, True):
        with monkeypatch.context() as m:
            m.setattr("clvla.train.checkpoint_eval.processor_of", lambda path: replace(processor_of(path), **({} if keep else dict(controls=Controls()))))
            seen = []
            m.setattr(Tiny, "predict_chunk", lambda self, obs, *, noise=None, real=Tiny.predict_chunk: (seen.append(x := real(self, obs, noise=noise)), x)[1])
            shutil.rmtree(eval_cl(EvalConfig(run_dir=str(run.path), first_trial=10, **kw), len).path)
        chunks.append(seen[0])
    assert not torch.equal(chunks[0], chunks[1]) and torch.equal(chunks[0], chunks[2])


def test_another_stream_is_played_blind_too(runs, given):
    out = eval_cl(EvalConfig(run_dir=str(runs(**BOTH).path), suite="dot_3", n_trials=1, n_workers=1), len)
    assert len(out.episodes()) == 3 and given["sentences"] == {SENTENCE} and len(given["pictures"]) == 2


def test_a_run_that_was_killed_goes_on_blind(data, tmp_path, monkeypatch, given):
    class Crash(BaseException): pass
    kw = dict(algo="er", save_every=2, n_trials=1, last_only=True, **BOTH)
    whole = fingerprint(train_cl(config(data, tmp_path/"whole", **kw), say=len).path)
    cfg, real = config(data, tmp_path/"run", **kw), job.Trainer.report

    def report(self, ctx, *a):
        real(self, ctx, *a)
        if (ctx.t, ctx.step) == (1, 2): raise Crash
    with monkeypatch.context() as m:
        m.setattr(job.Trainer, "report", report)
        with pytest.raises(Crash): train_cl(cfg, say=len)
    for change, says in ((dict(blind=False), "blind: True -> False"), (dict(deaf=False), "deaf: True -> False")):
        with pytest.raises(ValueError, match=f"belongs to another run.*{says}"): train_cl(replace(cfg, **change), say=len)
    assert fingerprint(train_cl(cfg, say=len).path) == whole and len(given["pictures"]) == 2


def test_frames_of_other_colours_are_noticed(runs, tmp_path, monkeypatch):
    "States and actions are the same; a blind policy would go on with another picture."
    path, real = shutil.copytree(runs(blind=True).path, tmp_path/"run"), job.make_processor
    (path/"done.json").unlink()

    def other(*a):
        processor = real(*a); processor.controls.colours[IMAGE][0] += 1
        return processor
    monkeypatch.setattr(job, "make_processor", other)
    with pytest.raises(ValueError, match="not those that 000-joint was trained on"): train_cl(read_config(path), say=len)


def test_the_colours_come_from_the_frames_of_the_statistics(data, tmp_path):
    cfg = config(data, tmp_path/"run", **BOTH)
    stream = job.check(cfg); stores = prepare(stream, cfg, len)
    first, pooled = (make_processor(stream, stores, replace(cfg, stats=s)).controls.colours for s in ("first", "global"))
    assert first == mean_colours([stores["left"]]) and pooled == mean_colours(list(stores.values()))


# ---------------------------------------------------------------------- other streams

def test_lerobot_data_sets_from_disk(tmp_path, given):
    "No simulator, two cameras, two sentences of different length."
    sets = [write_lerobot(tmp_path/k, [episode(9, i, p, cameras=(IMAGE, WRIST))]) for i, (k, p) in enumerate(dict(a="Push the red block", b="Wave").items())]
    cfg = config(tmp_path/"data", tmp_path/"run", suite=[str(s) for s in sets], algo="er", evaluate="none", prefetch=2, chunk=4, **BOTH)
    run = train_cl(cfg, say=len)
    want = {k: np.floor(np.concatenate([episode(9, i, cameras=(IMAGE, WRIST))[k] for i in range(2)]).mean((0, 1, 2))+.5).astype(int).tolist() for k in (IMAGE, WRIST)}
    assert processor_of(last(run)).controls == Controls(want, SENTENCE)
    assert given["sentences"] == {SENTENCE} and len(given["pictures"]) == 2


@pytest.mark.skipif(importlib.util.find_spec("minigrid") is None, reason="needs the extra gym")
def test_a_gym_stream_with_discrete_actions(data, tmp_path, given):
    "And a teacher that is asked with past instructions."
    run = train_cl(config(data, tmp_path/"run", suite=dict(base="minigrid_3", num_tasks=2), algo="lwf", n_trials=1, last_only=True, **BOTH), say=len)
    assert len(run.episodes()) == 2 and given["sentences"] == {SENTENCE} and len(given["pictures"]) == 1


def test_an_instruction_that_is_too_long_is_not_for_the_deaf(data, tmp_path):
    kw = dict(algo="joint", steps_per_task=1, evaluate="none", model_kw=TINY | dict(max_words=3))
    with pytest.raises(ValueError, match="'move the dot to the left' takes 6 positions"): train_cl(config(data, tmp_path/"a", **kw), say=len)
    assert train_cl(config(data, tmp_path/"b", deaf=True, **kw), say=len).done
    with pytest.raises(ValueError, match="'do the task' takes 3 positions"):
        train_cl(config(data, tmp_path/"c", deaf=True, **kw | dict(model_kw=TINY | dict(max_words=2))), say=len)


# ---------------------------------------------------------------------- names, settings, files

@pytest.mark.parametrize("kw,end", [({}, ""), (dict(blind=True), "-blind"), (dict(deaf=True), "-deaf"), (BOTH, "-blind-deaf"), (BOTH | dict(smoke=True), "-blind-deaf-smoke")])
def test_the_folder_says_it(kw, end): assert Path(resolve(TrainConfig(suite="dot_2", algo="er", **kw)).run_dir).name == "dot_2-er-tiny-s0"+end


@pytest.mark.parametrize("name", ["blind", "deaf"])
@pytest.mark.parametrize("value", [1, 0, "yes", None, []])
def test_what_is_no_bool_is_refused(name, value, tmp_path):
    with pytest.raises(ValueError, match=f"'{name}'.*(expected bool|is not a value of type)"): from_page(TrainConfig, {name: value}, set())
    with pytest.raises(ValueError, match=f"'{name}': found .* expected bool"): resolve(TrainConfig(suite="dot_2", **{name: value}))
    write_json(tmp_path/"config.json", {name: value})
    with pytest.raises(ValueError, match=f"'{name}': found .* expected bool"): read_config(tmp_path)


def test_a_page_may_set_them(): assert [getattr(from_page(TrainConfig, dict(blind=True, deaf="true"), set()), k) for k in ("blind", "deaf")] == [True, True]


def test_older_configs_had_no_controls(tmp_path):
    cfg = resolve(TrainConfig(suite="dot_2", run_dir=str(tmp_path)))
    old = {k: v for k, v in config_json(cfg).items() if k not in BOTH}
    write_json(tmp_path/"config.json", old)
    assert (read_config(tmp_path).blind, read_config(tmp_path).deaf, differences(old, cfg)) == (False, False, [])
    assert differences(old, replace(cfg, deaf=True)) == ["deaf: False -> True"] and not set(BOTH) & {*TrainConfig.FREE}


STATS = compute_stats(type("Store", (), dict(state=np.arange(6.).reshape(3, 2), action=np.arange(3.).reshape(3, 1), n_actions=None)))
PLAIN = Processor(STATS).to_json()


@pytest.mark.parametrize("controls,says", [
    ({}, "expected 'colours', 'sentence' or both"), ([], "expected dict"), (None, "expected dict"), (True, "expected dict"),
    (dict(sentence=""), "a text with a word"), (dict(sentence=None), "expected str"), (dict(sentense="x"), "did you mean 'sentence'"), (dict(colours={}), "one camera or more"),
    (dict(colours=[1, 2, 3]), "expected dict"), (dict(colours={"front": [1, 2, 3]}), "begins with"), (dict(colours={IMAGE: [1, 2]}), r"expected \[r,g,b\]"),
    (dict(colours={IMAGE: [1, 2, 256]}), "in 0..255"), (dict(colours={IMAGE: [1, 2, 3.]}), "in 0..255"), (dict(colours={IMAGE: [1, 2, True]}), "in 0..255"),
    (dict(colours={IMAGE: [1, 2, -1]}), "in 0..255"), (dict(colours={IMAGE: "abc"}), "in 0..255")])
def test_malformed_controls_in_a_file_are_refused(tmp_path, controls, says):
    write_json(tmp_path/"processor.json", PLAIN | dict(controls=controls))
    with pytest.raises(ValueError, match=says) as e: processor_of(tmp_path)
    assert str(tmp_path/"processor.json") in str(e.value)


def test_files_with_and_without_controls_are_read():
    assert set(PLAIN) == {"stats", "state_norm", "action_norm"} and Processor.from_json(PLAIN).controls == Controls()   # as older versions wrote them
    for controls in (Controls({IMAGE: [1, 2, 3]}), Controls(sentence="x"), Controls({IMAGE: [1, 2, 3], WRIST: [0, 0, 255]}, "x y")):
        p = Processor(STATS, controls=controls); assert Processor.from_json(p.to_json()) == p != Processor(STATS)
    for check, wrong in ((check_colours, 3), (check_sentence, 3)):
        with pytest.raises(ValueError, match="expected"): check(wrong)
    with pytest.raises(ValueError, match="expected Controls"): Processor(STATS, controls=True)


# ---------------------------------------------------------------------- compared

def test_controls_are_groups_of_their_own(runs):
    for kw in ({}, dict(blind=True), dict(deaf=True), BOTH): runs(**kw)
    found = read_runs(f"{runs.home}/joint*"); groups = group(found)
    assert set(groups) == {"joint", "joint blind", "joint deaf", "joint blind deaf"} and all(len(rs) == 1 for rs in groups.values())
    assert set(group(found, ("algo", "blind"))) == {"joint blind=False", "joint blind=True", "joint blind=False deaf", "joint blind=True deaf"}
    table = paired_table(groups, "joint", 20).set_index("group")
    assert set(table.index) == {"joint blind", "joint deaf", "joint blind deaf"} and (table.pairs == 4).all()
    other = replace(found[0], config=found[0].config | dict(lr=.5, seed=7))
    with pytest.raises(ValueError, match="differ in lr; add that to `by`"): group([*found, other])
    assert label(replace(found[0], config={"algo": "er", "seed": 0}), ("algo",)) == "er"


def test_a_run_of_an_older_version_is_one_of_the_group(runs, tmp_path):
    "Its config.json has neither setting."
    run, old = runs(), tmp_path/"old"; old.mkdir()
    for name in ("stream.json", "episodes.jsonl"): (old/name).write_bytes((run.path/name).read_bytes())
    write_json(old/"config.json", {k: v for k, v in read_json(run.path/"config.json").items() if k not in BOTH} | dict(seed=1))
    assert {k: len(v) for k, v in group([read_run(run.path), read_run(old)]).items()} == {"joint": 2}
    assert list(group([read_run(old)], ("algo", "blind"))) == ["joint blind=False"]
