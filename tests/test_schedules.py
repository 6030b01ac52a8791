"Schedules along a stream, algorithms named with +, and kept runs of older versions: same numbers, same identity, exact resume."
import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from clvla.cl.all import algos, make_algo, split_settings
from clvla.cl.compose import Compose
from clvla.cl.quick import quick_run, quick_stream
from clvla.core.config import config_from, config_json, short_form
from clvla.core.files import read_json, write_json
from clvla.core.records import read_jsonl
from clvla.eval.compare import ADDED, CONTROLS, group, read_run
from clvla.run.config import differences, identity, table
from clvla.run.folder import RunFolder
from clvla.run.kept import read_kept
from clvla.run.resume import fingerprint
from clvla.train.checkpoint_eval import eval_cl
from clvla.train.config import TrainConfig, resolve
from clvla.train.eval_config import EvalConfig
from clvla.train.learner import train_cl
from clvla.train.prepare import check
from clvla.train.schedules import lr_factor, schedules
from clvla.train.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT/"nbs/benchmarks/records/metaworld.jsonl"
STREAM = quick_stream(0)


@pytest.fixture(scope="module")
def data(tmp_path_factory): return tmp_path_factory.mktemp("data")


def config(data, run_dir, **kw):
    small = dict(suite="dot_2", n_demos=3, steps_per_task=9, warmup=1, batch_size=8, threads=1, n_trials=2, n_workers=1, image_size=32,
                 chunk=4, save_every=4, model_kw=dict(D=32, n_blocks=1), run_dir=str(run_dir), data_dir=str(data))
    return resolve(TrainConfig(**small | kw))


# --- older versions
def test_every_kept_run_is_still_that_of_its_resolved_config(tmp_path):
    lines = read_jsonl(KEPT)
    cfgs = {}
    for line in lines:
        cfg = config_from(TrainConfig, TrainConfig.converted(line["config"]))
        cfgs[line["name"]] = resolve(replace(cfg, run_dir=str(tmp_path/line["name"]), data_dir=str(tmp_path)))
    assert len(lines) > 90 and len(read_kept(KEPT, cfgs)) == len(cfgs) == len({line["name"] for line in lines})
    others = {name: replace(cfg, schedule="linear") for name, cfg in cfgs.items()}
    assert read_kept(KEPT, others) == {}


def test_a_later_setting_is_left_out_of_the_identity_only_where_it_has_its_default():
    cfg = TrainConfig()
    later = table(TrainConfig, "ADDED")
    assert set(later) == {"schedule", "along", "patience", "look_every", "look_trials", "lora_dropout", "lora_init", "accept", "held_out", "cl", "cl_kw", "plan"} and not set(later) & set(identity(cfg))
    assert identity(replace(cfg, along="continue"))["along"] == "continue"
    stored = {k: v for k, v in config_json(cfg).items() if k not in later}
    assert differences(stored, cfg) == [] and differences(stored, replace(cfg, schedule="linear")) == ["schedule: 'cosine' -> 'linear'"]


def test_compare_fills_in_what_older_runs_did():
    defaults = {k: getattr(TrainConfig, k) for k in (*CONTROLS, *table(TrainConfig, "ADDED")) if k not in ("cl", "cl_kw")}
    assert ADDED == defaults | dict(cl="none", cl_kw={})   # of practice and agents; imitation's is written out (`long_form`)


# --- schedules
def test_the_default_is_the_cosine_of_older_versions_to_the_bit():
    def before(step, n_steps, warmup=0, floor=.05):
        if step < warmup: return (step+1)/warmup
        return floor + (1-floor)*.5*(1+math.cos(math.pi*min(1., (step-warmup)/max(1, n_steps-1-warmup))))
    for n, w, f in [(300, 20, .05), (97, 0, .13), (5, 20, 0.), (1, 0, .3), (21, 20, .05)]:
        assert [lr_factor(s, n, w, f) for s in range(n)] == [before(s, n, w, f) for s in range(n)]


@pytest.mark.parametrize("kw,says", [(dict(schedule="linaer"), "did you mean 'linear'?"), (dict(along="continu"), "did you mean 'continue'?")])
def test_unknown_names_are_refused(data, tmp_path, kw, says):
    with pytest.raises(ValueError) as e: config(data, tmp_path/"run", **kw)
    assert says in str(e.value)


def test_a_schedule_from_a_plugin(data, tmp_path):
    plugin = tmp_path/"steps.py"
    plugin.write_text("from clvla.train.schedules import schedules\nschedules['steps'] = lambda x, floor: 1. if x < .5 else floor\n")
    cfg = config(data, tmp_path/"run", algo="sequential", plugins=[str(plugin)], schedule="steps", warmup=0, lr=.002, evaluate="none")
    rates = [r["lr"] for r in train_cl(cfg, say=len).logs() if "lr" in r]
    assert rates == pytest.approx(([.002]*4 + [.002*.05]*5)*2)


def lose_at(monkeypatch, t, step):
    "The process is lost after an update."
    real = Trainer.report
    def lost(self, ctx, *args):
        real(self, ctx, *args)
        if (ctx.t, ctx.step) == (t, step): raise RuntimeError("lost")
    monkeypatch.setattr(Trainer, "report", lost)
    return lambda: monkeypatch.setattr(Trainer, "report", real)


@pytest.mark.parametrize("name,kw", [("er+task_lora", dict(schedule="linear", along="continue", algo_kw=dict(rank=4))),
                                     ("der+agem", dict(algo_kw=dict(der=dict(buffer_size=20), agem=dict(buffer_size=30))))])
def test_a_run_that_was_lost_goes_on_bit_for_bit_and_eval_cl_gives_its_episodes(data, tmp_path, monkeypatch, name, kw):
    whole = train_cl(config(data, tmp_path/"whole", algo=name, **kw), say=len)
    again = lose_at(monkeypatch, 1, 6)
    with pytest.raises(RuntimeError, match="lost"): train_cl(config(data, tmp_path/"lost", algo=name, **kw), say=len)
    again()
    said = []
    rest = train_cl(config(data, tmp_path/"lost", algo=name, **kw), say=said.append)
    assert any("continued after 001+000004" in line for line in said) and fingerprint(rest.path) == fingerprint(whole.path)
    facts = lambda folder: {(r["stage"], r["task"], r["trial"]): (r["success"], r["steps"], r["reward"]) for r in folder.episodes()}
    evaluated = eval_cl(EvalConfig(run_dir=str(whole.path), n_trials=2, n_workers=1), len)
    assert facts(RunFolder(evaluated.path)) == facts(whole) and len(facts(whole)) == 6
    assert list(group([read_run(whole.path)])) == [name]


def test_a_folder_from_before_the_settings_goes_on(data, tmp_path):
    cfg = config(data, tmp_path/"old", algo="er")
    run = train_cl(cfg, say=len)
    before = fingerprint(run.path)
    write_json(run.path/"config.json", {k: v for k, v in short_form(read_json(run.path/"config.json")).items() if k not in table(TrainConfig, "ADDED")})
    (run.path/"done.json").unlink()
    said = []
    assert fingerprint(train_cl(cfg, say=said.append).path) == before and any("continued" in line for line in said)


def test_one_schedule_over_the_stream_is_counted_in_updates(data, tmp_path):
    run = train_cl(config(data, tmp_path/"run", algo="sequential", schedule="linear", along="continue", warmup=0, lr_floor=.1, evaluate="none"), say=len)
    rates = [r["lr"] for r in run.logs() if "lr" in r]
    steps = {round(a-b, 12) for a, b in zip(rates, rates[1:])}
    assert len(rates) == 18 and len(steps) == 1 and abs(rates[-1]/rates[0]-.1) < 1e-9


# --- algorithms as a list
def test_the_name_and_the_classes_give_the_same_numbers():
    settings = dict(er=dict(replay_ratio=.5), ewc=dict(n_batches=1, lam=3))
    parts = Compose(*(make_algo(k, 2, **v) for k, v in settings.items()))
    for given in (settings, dict(replay_ratio=.5, n_batches=1, ewc=dict(lam=3))):
        assert (quick_run(make_algo("er+ewc", 2, **given), STREAM, steps=12) == quick_run(parts, STREAM, steps=12)).all()
        parts = Compose(*(make_algo(k, 2, **v) for k, v in settings.items()))
    assert (quick_run(make_algo("er+ewc", 2, **settings), STREAM, steps=12) != quick_run(make_algo("er", 2), STREAM, steps=12)).any()


FEW = dict(ewc=dict(n_batches=1), mas=dict(n_batches=1), task_lora=dict(rank=4), olora=dict(rank=4), keeplora=dict(rank=4, n_batches=1), gem=dict(n_ref=8), agem=dict(n_ref=20), rwalk=dict(interval=2))

def test_a_pair_is_refused_at_the_door_or_runs():
    "None of the menu's pairs fails after hours."
    refused,stream = [],quick_stream(0, n_frames=60)   # GSS asks for the gradient of every frame
    for pair in combinations(algos, 2):
        name = "+".join(pair)
        try:
            algo = make_algo(name, **{k: FEW[k] for k in pair if k in FEW})
            algo.check(32)
        except ValueError:
            refused.append(name)
            continue
        assert quick_run(algo, stream, steps=2).shape == (3, 3)
    assert {"joint+er", "er+gdumb", "ewc+packnet", "packnet+task_lora", "joint+cumulative"} <= set(refused)
    assert not {"er+ewc", "er+mir", "agem+der", "er+packnet", "cumulative+ewc", "er+task_lora"} & set(refused) and "er+ewc" in map("+".join, combinations(algos, 2))


@pytest.mark.parametrize("kw,says", [(dict(algo="er+er"), "names 'er' twice"), (dict(algo="er+ewx"), "did you mean 'ewc'?"),
    (dict(algo="er+joint"), "nothing to forget"), (dict(algo="er+gdumb"), "from the initial weights"), (dict(algo="packnet+task_lora"), "choose the parameters"),
    (dict(algo="ewc+packnet"), "same trained parameters"), (dict(algo="er+mir", algo_kw=dict(er=dict(replay_ratio=.5), mir=dict(replay_ratio=.5))), "none of the present task"),
    (dict(algo="der+agem", algo_kw=dict(buffer_size=9)), "say which one is meant"), (dict(algo="er+ewc", algo_kw=dict(er=dict(lam=1))), "no setting 'lam'"),
    (dict(algo="er+ewc", algo_kw=dict(seed=1)), "has a setting 'seed'"), (dict(algo="er+ewc", algo_kw=dict(er=dict(seed=1))), "no setting 'seed'"),
    (dict(algo="er+"), "unknown algorithm ''"), (dict(algo="er+ewc", algo_kw=dict(er=3)), "are a dict")])
def test_what_cannot_be_combined_ends_before_anything_is_made(data, tmp_path, kw, says):
    with pytest.raises(ValueError) as e: check(config(data, tmp_path/"run", **kw))
    assert says in str(e.value) and not (tmp_path/"run").exists()


def test_one_run_has_one_config_however_its_settings_are_given(data, tmp_path):
    ways = [dict(algo_kw=dict(replay_ratio=.5, lam=2)), dict(algo_kw=dict(er=dict(replay_ratio=.5), lam=2)), dict(algo_kw=dict(ewc=dict(lam=2), er=dict(replay_ratio=.5)))]
    cfgs = [config(data, tmp_path/"run", algo=name, **kw) for kw in ways for name in ("er+ewc", "er + ewc")]
    assert all(cfg == cfgs[0] for cfg in cfgs) and cfgs[0].cl_kw == dict(er=dict(replay_ratio=.5), ewc=dict(lam=2))
    assert Path(resolve(replace(cfgs[0], run_dir="")).run_dir).name == "dot_2-er+ewc-tiny-s0"
    assert json.loads(json.dumps(identity(cfgs[0])))["algo_kw"] == cfgs[0].cl_kw   # the short form, as older runs have it
    assert split_settings("er", dict(replay_ratio=.5)) == dict(er=dict(replay_ratio=.5))
