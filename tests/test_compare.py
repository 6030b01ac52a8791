"Run folders are compared honestly, and the page that does it runs under papermill."
import json, subprocess, sys
from dataclasses import replace
from pathlib import Path
import numpy as np, pytest
from clvla.api import compare
from clvla.command.runs import comparison_facts, comparison_text
from clvla.core.seeds import np_rng
from clvla.core.files import write_json
from clvla.eval.compare import (REPEAT, Run, cost_table, difference_points, group, holm, label, paired_table, read_run,
    read_runs, run_from, summary, versus, wide)
from clvla.eval.followed import follow_runs
from clvla.eval.plan import check_plan
from clvla.eval.stats import mcnemar, t_test
from clvla.run.config import table
from clvla.train.config import TrainConfig

ROOT = Path(__file__).resolve().parents[1]; IDS = ["a", "b", "c"]

def write_run(folder, algo, seed, keep, n=10):
    stages = ["joint"] if algo == "joint" else IDS; luck = np_rng(seed, "luck").random((3, n))
    recs = [dict(stage=t, after=s, task=IDS[j], trial=i, success=bool(luck[j,i] < .9*keep**(t-j if algo != "joint" else 0)), step=None, seed=seed)
            for t,s in enumerate(stages) for j in range(3 if algo == "joint" else t+1) for i in range(n)]
    write_json(folder/"config.json", dict(algo=algo, seed=seed, lr=.1, run_dir=str(folder)))
    write_json(folder/"stream.json", dict(name="s", tasks=[dict(id=j, name=j, prompt=j) for j in IDS], stages=stages))
    write_json(folder/"cost.json", dict(seconds=dict(training=10.*seed)))
    (folder/"episodes.jsonl").write_text("".join(json.dumps(r)+"\n" for r in recs))

@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for algo,keep in dict(sequential=.2, er=.9, joint=1).items():
        for seed in range(2): write_run(root/f"{algo}-s{seed}", algo, seed, keep)
    return root

def test_groups_metrics_and_pairs(runs_dir):
    groups = group(read_runs(f"{runs_dir}/*-s*")); table = summary(groups, n_boot=200)
    row = table[(table.group == "er") & (table.metric == "ASR")].iloc[0]
    assert row.value == pytest.approx(np.mean([r.matrix.R[-1].mean() for r in groups["er"]])) and len(row["each"]) == 2
    assert "not defined" in wide(table).loc["joint", "BWT"]
    p = paired_table(groups, "sequential", 200).set_index("group")
    assert p.loc["er", "seeds"] == 2 and p.loc["er", "pairs"] == p.loc["joint", "pairs"] == 60
    assert p.loc["er", "p_states"] == mcnemar(p.loc["er", "only_this"], p.loc["er", "only_baseline"])
    assert p.p.isna().all() and p.p_holm.isna().all() and set(p.says) == {"cannot be told from 2 seeds"}
    assert cost_table(groups).training.tolist() == [5., 5., 5.]

def test_unshared_seeds_are_not_paired(runs_dir):
    runs = read_runs(f"{runs_dir}/er-s0,{runs_dir}/sequential-s1"); t = paired_table(group(runs), "sequential")
    assert label(runs[0], ("algo", "lr")) == "er lr=0.1" and versus(runs[:1], runs[:1], 50)["difference"] == 0
    assert t.seeds.tolist() == [0] and t.pairs.tolist() == [0]

def test_without_a_pair_the_table_and_the_figure_are_empty(runs_dir):
    "The baseline alone; and a group that shares no seed with it."
    for runs,n in ((f"{runs_dir}/er-s*", 0), (f"{runs_dir}/er-s0,{runs_dir}/sequential-s1", 1)):
        t = paired_table(group(read_runs(runs)), "er", 50)
        assert len(t) == n and "p_holm" in t and t.difference.isna().all() and all(len(d.x) == 0 for d in difference_points(t, "er").data)

def test_refusals(runs_dir, tmp_path):
    runs = read_runs(f"{runs_dir}/er-*"); odd = replace(runs[0], config={**runs[0].config, "lr": .2, "seed": 5})
    with pytest.raises(ValueError, match="differ in lr"): group(runs+[odd])
    assert len(group(runs+[odd], ("algo", "lr"))) == 2
    with pytest.raises(ValueError, match="several runs of one seed"): group(runs+runs)
    with pytest.raises(ValueError, match="did you mean 'algo'"): group(runs, ("alg",))
    with pytest.raises(ValueError, match="no folder matches"): read_runs(str(tmp_path/"x*"))
    with pytest.raises(ValueError, match="lacks config.json"): read_run(tmp_path)
    with pytest.raises(ValueError, match="not on the same tasks"): group(runs+[replace(runs[0], task_ids=("z",), config={**runs[0].config, "algo": "x"})])

def test_a_run_that_is_not_at_its_end_is_left_out_and_named(runs_dir):
    "Its last row is not the others' last row: after one task nothing was forgotten yet."
    runs = read_runs(f"{runs_dir}/sequential-*"); early = replace(runs[0], records=[r for r in runs[0].records if r["stage"] == 0])
    assert runs[0].finished and not early.finished
    only = versus([early], runs, 50); assert (only["seeds"], only["pairs"], only["unfinished"]) == (0, 0, "sequential-s0")
    two = versus([early, runs[1]], runs, 50); assert (two["seeds"], two["difference"], two["unfinished"]) == (1, 0, "sequential-s0")
    assert versus(runs, runs, 50)["unfinished"] == ""
    some = [r for r in runs[0].records if r["stage"] < 2 or r["trial"] < 4]; wants = runs[0].config | dict(n_trials=10)
    assert replace(runs[0], config=wants).finished and not replace(runs[0], records=some, config=wants).finished   # in the middle of its last cells
    assert not replace(runs[0], records=[r for r in runs[0].records if r["stage"] < 2 or r["task"] == "a"]).finished


def test_tasks_that_were_simulated_differently_are_no_pairs(runs_dir):
    runs = read_runs(f"{runs_dir}/*-s0"); env = dict(kind="libero", max_steps=300)
    here = [replace(r, envs=dict.fromkeys(IDS, env), config=r.config | dict(suite=k)) for k,r in enumerate(runs)]
    odd = replace(here[1], envs=here[1].envs | dict(b=env | dict(protocol="published", max_steps=600)))
    assert len(group(here)) == 3
    with pytest.raises(ValueError, match=r"simulate b in different ways: max_steps 300 and 600, protocol None and 'published'"):
        group([here[0], odd, here[2]])
    assert len(group([here[0], odd, here[2]], ("algo", "suite"))) == 3


def test_later_evaluations_are_compared_as_runs_are(runs_dir):
    for algo in ("er", "sequential"):
        at = runs_dir/f"{algo}-s0"/"evals"/"lower-0+5-s0"; at.mkdir(parents=True)
        few = [r for r in map(json.loads, (at.parents[1]/"episodes.jsonl").read_text().splitlines()) if r["trial"] < 5]
        (at/"episodes.jsonl").write_text("".join(json.dumps(r)+"\n" for r in few)); write_json(at/"config.json", dict(n_trials=5))
    runs = read_runs(f"{runs_dir}/*/evals/*"); p = paired_table(group(runs), "sequential", 50)
    assert p.pairs.tolist() == [15] and {r.config["cl"] for r in runs} == {"er", "sequential"}
    with pytest.raises(ValueError, match="differ in evaluation"): group([runs[0], read_run(runs_dir/"er-s1")])


def test_what_repetitions_may_differ_in_is_what_computes_nothing():
    assert set(REPEAT) == {"seed", "plan", *table(TrainConfig, "FREE")}   # a plan changes no number, and no run goes on under another one


def test_holm(): assert holm([.01, .04, .03, float("nan")])[:3] == pytest.approx([.03, .06, .06])

def trained(rng, n_seeds, spread, gain=0., n=20):
    "Runs of one method: each training comes out better or worse by a deviation of `spread`, on the same initial states."
    runs = []
    for seed in range(n_seeds):
        level = np.clip(.6+gain+spread*rng.standard_normal(), 0, 1)
        recs = [dict(stage=2, after="c", task=i, trial=k, success=bool(rng.random() < level), step=None) for i in IDS for k in range(n)]
        runs.append(Run(Path(f"s{seed}"), dict(seed=seed), tuple(IDS), tuple(IDS), recs, {}, {}))
    return runs


def alarms(n_seeds, spread, R=2000, gain=0., n=60):
    "How often two methods are said to differ: by the seeds, and by all pairs together."
    rng, by_seed, by_pairs = np_rng(n_seeds, "alarms"), 0, 0
    for _ in range(R):
        a, b = (rng.random((n_seeds, n)) < np.clip(.6+g+spread*rng.standard_normal((n_seeds, 1)), 0, 1) for g in (gain, 0.))
        by_seed += t_test((a.mean(1)-b.mean(1)), (a ^ b).mean()/n) < .05
        by_pairs += mcnemar(int((a & ~b).sum()), int((b & ~a).sum())) < .05
    return by_seed/R, by_pairs/R


@pytest.mark.parametrize("n_seeds, spread", [(2, .1), (3, .1), (5, .1), (3, 0.), (5, 0.)])
def test_equal_methods_are_seldom_called_different(n_seeds, spread):
    "At most 7 % at the 5 % level, with trainings that vary or not; all pairs together alarm in more than a tenth where they vary."
    by_seed, by_pairs = alarms(n_seeds, spread)
    assert by_seed <= .07 and (not spread or by_pairs > .1) and (by_seed > .03) == (n_seeds > 2)


def test_a_real_difference_is_found():
    assert alarms(5, .05, 200, gain=.25)[0] > .8


def test_the_tables_p_is_that_of_the_seeds():
    "`versus` asks the seeds' differences; `says` follows Holm's correction of its p."
    rng = np_rng(0, "table")
    groups = {name: trained(rng, 4, .03, gain) for name, gain in dict(base=0., same=0., better=.35, worse=-.35).items()}
    table = paired_table(groups, "base", 10).set_index("group")
    for name, row in table.iterrows():
        diffs = [np.mean([r["success"] for r in a.records])-np.mean([r["success"] for r in b.records]) for a, b in zip(groups[name], groups["base"])]
        assert row.p == pytest.approx(t_test(diffs)) and row.difference == pytest.approx(np.mean(diffs))
    assert table.p_holm.tolist() == pytest.approx(holm(table.p))
    assert table.says.to_dict() == dict(same="no difference shown", better="better", worse="worse")


def test_seeds_that_are_all_equal_are_not_certain():
    "Three seeds that differ by the same one of sixty pairs: their trials' noise stands in for the spread."
    a = [Run(Path(f"s{s}"), dict(seed=s), ("a",), ("a",), [dict(stage=0, after="a", task="a", trial=k, success=k < n, step=None) for k in range(60)], {}, {})
         for n in (31, 30) for s in range(3)]
    row = versus(a[:3], a[3:], 50)
    assert row["difference"] == pytest.approx(1/60) and .1 < row["p"] < 1 and row["t_low"] < 0 < row["t_high"]
    assert versus(a[:3], a[:3], 50)["p"] == 1


def papermill(tmp_path, *args):
    cmd = [sys.executable, "-m", "papermill", str(ROOT/"nbs/compare.ipynb"), str(tmp_path/"page.ipynb"), "--no-progress-bar", *args]
    return subprocess.run(cmd, cwd=ROOT, capture_output=True, text=True, timeout=120)

def test_page(runs_dir, tmp_path):
    out = papermill(tmp_path, "-p", "runs", f"{runs_dir}/*-s*", "-p", "report", str(tmp_path/"r.html"))
    assert out.returncode == 0, out.stderr[-3000:]
    assert (tmp_path/"r.html").stat().st_size > 3e6 and "Paired with the baseline" in (tmp_path/"r.html").read_text()

def test_page_refuses_what_it_does_not_know(runs_dir, tmp_path):
    out = papermill(tmp_path, "-p", "run", f"{runs_dir}/*"); assert out.returncode != 0 and "did you mean 'runs'" in out.stderr


def test_a_probe_is_no_part_of_what_was_learnt():
    "Also not of the joint run, whose stage names no task, nor of the paired difference and the planned counts beside ASR."
    def made(algo, seed, rate, probe, stages=("a", "b"), n=20):
        stream = dict(tasks=[dict(id="a"), dict(id="p", trained=False), dict(id="b")], stages=list(stages), order=[0, 1, 2])
        won = dict(a=rate, b=rate, p=probe)
        records = [dict(stage=len(stages)-1, after=stages[-1], step=None, task=t, trial=i, success=i < n*won[t], seed=seed) for t in won for i in range(n)]
        return run_from(Path(f"{algo}-s{seed}"), dict(algo="imitation", cl=algo, seed=seed, n_trials=n), stream, records, {})
    groups = group([*(made("er", s, .9, .5) for s in range(3)), *(made("sequential", s, .6, .5) for s in range(3)), *(made("joint", s, 1., 0., ("joint",)) for s in range(3))])
    means = summary(groups, ("ASR", "Untrained"), 50).set_index(["group", "metric"]).value
    assert means.to_dict() == pytest.approx({("er", "ASR"): .9, ("er", "Untrained"): .5, ("sequential", "ASR"): .6, ("sequential", "Untrained"): .5, ("joint", "ASR"): 1., ("joint", "Untrained"): 0.})
    assert versus(groups["er"], groups["sequential"], 50)["difference"] == pytest.approx(.3) and versus(groups["joint"], groups["er"], 50)["difference"] == pytest.approx(.1)
    for test in ("t", "McNemar", "Fisher"):
        plan = check_plan(dict(endpoint="ASR", methods=["er"], baseline="sequential", seeds=[0, 1, 2], episodes=20, test=test, smallest=5))
        assert follow_runs(plan, groups).tests[0].difference == pytest.approx(.3)


def test_the_terminal_shows_the_interval_that_says_goes_by(tmp_path):
    "Over seeds, beside that over starts; and it names a run that has not come to its end, whose cells are not whole."
    for algo,keep in dict(sequential=.5, er=.6).items():
        for seed in range(3): write_run(tmp_path/f"{algo}-s{seed}", algo, seed, keep, 20)
    c = compare(f"{tmp_path}/*", n_boot=50); row = c.paired.iloc[0]
    said = comparison_text(c); cells = said.split("paired with")[1].splitlines()[1].split()
    assert cells == ["group", "seeds", "pairs", "difference", "low", "high", "t_low", "t_high", "says"] and f"{100*row.t_low:.1f}" in said and "says goes by" in said
    assert c.unfinished == [] and "not at their end" not in said and comparison_facts(c)["unfinished"] == []
    numbers = {(r["group"], r["metric"]): r for r in comparison_facts(c)["summary"]}   # what a script reads, beside the text of the table
    asr, = (r for r in c.summary.itertuples() if (r.group, r.metric) == ("er", "ASR"))
    assert numbers["er", "ASR"]["value"] == pytest.approx(asr.value) and len(numbers["er", "ASR"]["each"]) == 3
    path = tmp_path/"er-s2/episodes.jsonl"
    for folder in tmp_path.iterdir(): write_json(folder/"config.json", json.loads((folder/"config.json").read_text()) | dict(n_trials=20))
    path.write_text("".join(line+"\n" for line in path.read_text().splitlines()[:-15]))
    c = compare(f"{tmp_path}/*", n_boot=50); said = comparison_text(c)
    assert c.unfinished == [str(tmp_path/"er-s2")] == comparison_facts(c)["unfinished"] and f"not at their end: {tmp_path/'er-s2'}" in said
    assert c.paired.iloc[0].seeds == 2
