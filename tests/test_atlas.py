"The atlas of claims: the rule of a verdict case by case, what decides it at its borders, and pages that come from their records alone."
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_notebooks import CODE, ask

from clvla.cl.er import ER
from clvla.cl.selection import TaskFrames, select
from clvla.core.names import ACTION, STATE
from clvla.core.records import append_jsonl, read_jsonl
from clvla.eval.choice import choice, flatters, flatters_of
from clvla.eval.plan import plan_hash, read_plan
from clvla.eval.verdict import CLAIMS, judge_seeds, opens_with, rule
from clvla.rl.gains import share_gained
from clvla.run.planned import core_minutes, planned_runs, planned_verdict
from clvla.train.config import TrainConfig, resolve
from clvla.train.prepare import check, init_processor
from clvla.train.recovery import savings_of

ROOT = Path(__file__).resolve().parents[1]
ATLAS = ROOT/"nbs/atlas"
PAGES = sorted(p.stem for p in ATLAS.glob("*.ipynb"))
H, D, T = "holds", "does not", "too small to tell"
CASES = {   # interval in points, ten of interest -> what it says of more, less, not more, alike
    (12, 20): (H, D, D, D), (2, 20): (H, D, D, D), (2, 9.9): (D, D, H, H), (2, 10): (H, D, D, D), (0, 20): (T, D, T, T),
    (-4, 20): (T, D, T, T), (-9.9, 9.9): (D, D, H, H), (-10, 9.9): (D, T, H, T), (-20, 20): (T, T, T, T), (-20, -12): (D, H, H, D),
    (-20, 4): (D, T, H, T), (-8, -2): (D, D, H, H), (-30, -2): (D, H, H, D), (0, 0): (D, D, H, H)}


@pytest.mark.parametrize("interval", CASES, ids=str)
def test_the_rule_case_by_case(interval):
    assert tuple(rule(claim, *interval, 10) for claim in CLAIMS) == CASES[interval]


@pytest.mark.parametrize("interval", CASES, ids=str)
def test_less_is_more_seen_from_the_other_side_and_no_claim_holds_with_its_contrary(interval):
    low, high = interval
    assert rule("less", low, high, 10) == rule("more", -high, -low, 10)
    assert {rule("more", low, high, 10), rule("not more", low, high, 10)} in ({H, D}, {T})


@pytest.mark.parametrize("said", [("more", 1, math.nan, 5), ("more", 2, 1, 5), ("more", 0, 1, 0), ("mroe", 0, 1, 5)], ids=str)
def test_what_is_no_interval_or_claim_is_refused(said):
    with pytest.raises(ValueError): rule(*said)


def test_what_could_have_been_shown_is_half_of_the_interval():
    v = judge_seeds("alike", [.1, 0, -.1, .05, -.05], 10)
    assert v.could == pytest.approx((v.high-v.low)/2) and v.low == pytest.approx(-v.high) and v.n == 5
    assert abs(judge_seeds("more", [x+v.could/100*1.001 for x in (.1, 0, -.1, .05, -.05)], 1).low) < .02


def test_a_page_that_found_nothing_cannot_open_otherwise(tmp_path):
    cells = [dict(cell_type="markdown", source=f"# page\n> line\n> more\n\n{text}") for text in ("The claim holds here: +3.",)]
    (tmp_path/"p.ipynb").write_text(json.dumps(dict(cells=cells)))
    assert opens_with(tmp_path/"p.ipynb", "The claim holds here") == "The claim holds here: +3."
    with pytest.raises(AssertionError, match="its records say 'Nothing was found"): opens_with(tmp_path/"p.ipynb", "Nothing was found")


@pytest.mark.parametrize("reported, other, best, chosen", [
    (["00", "11"], ["11", "00"], 1, 0), (["11", "00"], ["01", "10"], 1, 0), (["01", "01"], ["00", "00"], .5, .5), (["1"], ["0"], 1, 1)])
def test_a_choice_by_hand(reported, other, best, chosen):
    c = choice(reported, other)
    assert (c.best, c.chosen) == (best, chosen) and flatters(reported, other) == flatters(other, reported)


@pytest.mark.parametrize("wrong", [([], []), (["01", "0"], ["01", "01"]), (["02"], ["01"]), (["01"], ["01", "10"])], ids=str)
def test_outcomes_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError): choice(*wrong)


def test_first_keeps_the_first_frames_and_asks_nobody():
    class Data:
        def n_frames(self, task_id): return 9
    assert select("first", TaskFrames("t", Data()), 4, None).tolist() == [0, 1, 2, 3]
    assert ER(selection="first").zero3


OWN = dict(best_epoch=range(200, 205), best_epoch_again=range(210, 226), dormant=range(200, 205), one_demonstration=range(60, 68))   # pages with records of their own form, and their seeds
PLANNED = sorted(p.stem for p in (ATLAS/"plans").glob("*.yaml") if p.stem not in OWN)


@pytest.mark.parametrize("name", PLANNED)
def test_every_planned_run_is_there_once_and_stores_its_plan(name):
    plan, file = read_plan(ATLAS/f"plans/{name}.yaml"), ATLAS/f"records/{name}.jsonl"
    groups = planned_runs(file, plan)
    assert {*groups} == {plan["baseline"], *plan["methods"]} and len(plan["seeds"]) >= 5
    assert all(sorted(r.config["seed"] for r in runs) == plan["seeds"] for runs in groups.values())
    assert len(read_jsonl(file)) == sum(map(len, groups.values())) and 0 < core_minutes(file, plan) < 30


@pytest.mark.parametrize("name", OWN)
def test_records_of_another_form_store_their_plan_too(name):
    lines = read_jsonl(ATLAS/f"records/{name}.jsonl")
    digest = plan_hash(yaml.safe_load((ATLAS/f"plans/{name}.yaml").read_text()))
    assert list(dict.fromkeys(line["config"]["seed"] for line in lines)) == [*OWN[name]] and {line["plan"] for line in lines} == {digest}
    measured = dict(best_epoch=lambda r: flatters_of(r["looks"]), best_epoch_again=lambda r: flatters_of(r["looks"]), dormant=lambda r: savings_of(r["probes"]),
                    one_demonstration=lambda r: share_gained(r["before"], r["after"]))[name]
    assert all(-.5 < measured(line) < 1 for line in lines)


def test_a_run_whose_plan_somebody_changed_is_named(tmp_path):
    name = PLANNED[0]
    lines = read_jsonl(ATLAS/f"records/{name}.jsonl")
    lines[0]["config"]["plan"]["smallest"] = 1.
    for line in lines: append_jsonl(tmp_path/"r.jsonl", line)
    wrong = planned_verdict("more", tmp_path/"r.jsonl", ATLAS/f"plans/{name}.yaml").followed.deviations
    assert len(wrong) == 1 and "changed after they were stored" in wrong[0]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    "A process that runs pages, where no run lies but those of the records."
    runs = tmp_path_factory.mktemp("runs")
    env = os.environ | dict(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", CLVLA_RUNS=str(runs))
    p = subprocess.Popen([sys.executable, "-c", CODE, str(ROOT/"tests")], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    yield p
    p.stdin.close()
    p.wait(60)
    assert not [*runs.iterdir()], "a page made a run that its records should hold"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_comes_from_its_records_alone(page, server, tmp_path):
    before = {p: p.read_bytes() for p in (ATLAS/"records").iterdir()}
    code, out = ask(server, ATLAS/f"{page}.ipynb", tmp_path/"page.log", 60)
    assert code == 0, out[-4000:]
    assert {p: p.read_bytes() for p in (ATLAS/"records").iterdir()} == before


def test_the_table_in_front_has_a_row_for_every_page():
    text = "".join("".join(c["source"]) for c in json.loads((ATLAS/"atlas.ipynb").read_text())["cells"])
    assert [p for p in PAGES if p != "atlas" and f'page="{p}"' not in text] == []


class Store:
    def __init__(self, state, action):
        import numpy as np
        self.state, self.action = np.zeros((3, state)), np.zeros((3, action))


def test_statistics_that_go_along(tmp_path):
    from clvla.data.controls import Controls
    one = dict(mean=[0., 0.], std=[1., 1.], min=[-1., -1.], max=[1., 1.], q01=[-1., -1.], q99=[1., 1.], count=5, constant=[False, False], binary=[False, False])
    (tmp_path/"processor.json").write_text(json.dumps(dict(stats={STATE: one, ACTION: one}, state_norm="mean_std", action_norm="min_max")))
    cfg = TrainConfig(init_from=str(tmp_path), stats="init", action_norm="min_max")
    assert init_processor(cfg, dict(t=Store(2, 2)), Controls()).stats[ACTION] == one
    for store in (Store(3, 2), Store(2, 1)):
        with pytest.raises(ValueError, match="numbers in .* take stats='global'"): init_processor(cfg, dict(t=store), Controls())
    with pytest.raises(ValueError, match="no processor.json|it is empty"): check(resolve(TrainConfig(suite="dot_2", stats="init", run_dir=str(tmp_path/"run"))))


def test_practice_takes_the_checkpoints_statistics_in_any_case(tmp_path):
    from clvla.rl.config import PracticeConfig, base_config
    given = lambda **kw: base_config(resolve(PracticeConfig(suite="dot_2", run_dir=str(tmp_path/"run"), data_dir=str(tmp_path), **kw)))
    assert given(init_from=str(tmp_path), stats="init") == given(init_from=str(tmp_path))
    assert given(stats="first").stats == "first"
    with pytest.raises(ValueError, match="it is empty"): check(given(stats="init"))


def test_the_protocol_that_pretrains_has_tasks_of_no_stream():
    from clvla.envs.metaworld.tasks import BUTTONS, CW10, HALFWAY, MT10, MT50, NARROW10
    said = yaml.safe_load((ROOT/"nbs/protocols/pretrain_mw.yaml").read_text())
    names = said["suite"]["tasks"]
    assert len({*names}) == 25 and {*names} <= {*MT50} and not {*names} & {*NARROW10, *CW10, *MT10, *BUTTONS, *HALFWAY.values()}
    assert not [n for n in names if n.startswith(("button", "faucet", "drawer"))]
    assert resolve(TrainConfig.of(**said)).cl == "joint"


def test_a_run_begins_with_the_checkpoints_numbers(tmp_path):
    "Statistics of another stream go along with the weights, or do not, as `stats` says; the data are the new stream's either way."
    from clvla.core.files import read_json
    from clvla.train.learner import train_cl
    small = dict(n_demos=1, steps_per_task=1, warmup=1, evaluate="none", n_workers=1, batch_size=8, image_size=32, data_dir=str(tmp_path/"data"))
    def run(name, **kw): return train_cl(resolve(TrainConfig(**small, run_dir=str(tmp_path/name), **kw)), say=len).path
    begin = next((run("before", suite="dot_2", cl="joint")/"checkpoints").iterdir())
    other = dict(suite=dict(base="dot_3", tasks=["up"]), cl="sequential", init_from=str(begin))
    theirs, along, own = (read_json(p/"dataset_statistics.json") for p in (begin, run("along", stats="init", **other), run("own", **other)))
    assert along == theirs and own != theirs


def test_runs_that_were_made_again_under_one_plan_are_refused(tmp_path):
    "A page whose settings were changed appends its new runs below the old ones: no verdict may come from either without a word."
    name = PLANNED[0]
    plan, lines = read_plan(ATLAS/f"plans/{name}.yaml"), read_jsonl(ATLAS/f"records/{name}.jsonl")
    for line in [*lines, *(x | dict(config=x["config"] | dict(steps_per_task=7)) for x in lines)]: append_jsonl(tmp_path/"r.jsonl", line)
    with pytest.raises(ValueError, match="differ in steps_per_task"): planned_runs(tmp_path/"r.jsonl", plan)
    for line in [*lines, lines[0]]: append_jsonl(tmp_path/"twice.jsonl", line)
    with pytest.raises(ValueError, match="several runs of one seed"): planned_runs(tmp_path/"twice.jsonl", plan)
