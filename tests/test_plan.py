"A plan of before the runs: its file, its hash in every run, what is said of it afterwards, and that it changes no number."
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from clvla.api import compare, compared
from clvla.command.entries import Sweep, check_entries, entries_of
from clvla.command.main import main
from clvla.core.files import read_json, write_json
from clvla.core.seeds import np_rng
from clvla.crl.config import AgentConfig
from clvla.eval.audit import audit
from clvla.eval.compare import CompareConfig, group, read_runs, run_from
from clvla.eval.followed import FREE, Planned, by_seeds, follow_results, follow_runs
from clvla.eval.metrics import metrics, plain
from clvla.eval.plan import check_plan, plan_hash, read_plan
from clvla.eval.results import read_results
from clvla.eval.verdict import judge_planned
from clvla.rl.config import PracticeConfig, base_config
from clvla.run.config import identity, resolve
from clvla.run.folder import RunFolder
from clvla.run.planned import seeds_verdict
from clvla.run.queue import Queue
from clvla.run.report import finish
from clvla.run.resume import fingerprint
from clvla.train.checkpoint_eval import eval_cl
from clvla.train.config import TrainConfig
from clvla.train.eval_config import EvalConfig
from clvla.train.learner import train_cl

SAID = dict(endpoint="ASR", methods=["er"], baseline="sequential", seeds="0..4", episodes=10, test="t", smallest=10)
SMALL = dict(suite="dot_2", n_demos=2, steps_per_task=2, warmup=1, batch_size=8, threads=1, image_size=32, n_trials=2, n_workers=1, rows_per_task=1)


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path/"plan.yaml"
    path.write_text(json.dumps(SAID | dict(episodes=2)))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shared_data):
    "The same run with a plan and without."
    home = tmp_path_factory.mktemp("planned")
    make = lambda name, **kw: train_cl(resolve(TrainConfig(algo="er", run_dir=str(home/name), data_dir=str(shared_data), **SMALL, **kw)), say=len).path
    return make("with", plan=SAID | dict(episodes=2)), make("without")


@pytest.mark.parametrize("change, says", [
    (dict(endpoint="success"), "unknown endpoint 'success'"), (dict(test="mcnemar"), "did you mean 'McNemar'"), (dict(test="Fisher", endpoint="BWT"), "so endpoint is ASR"),
    (dict(seeds="0..1"), "needs three or more"), (dict(seeds=[0, 0, 1]), "different whole numbers"), (dict(seeds=[0, 1, -2]), "different whole numbers"), (dict(seeds="0-4"), "a range as in 0..4"),
    (dict(seeds="4..0"), "at least one"), (dict(seeds="0..99999999"), "at most 10,000"), (dict(seeds=[True, 1, 2]), "different whole numbers"), (dict(methods=[]), "one method or more"),
    (dict(methods=["er", "er"]), "different names"), (dict(methods=["er", 3]), "different names"), (dict(baseline="er"), "different names"), (dict(episodes=0), "episodes is 0"),
    (dict(episodes="20"), "expected int"), (dict(smallest=float("nan")), "smallest is nan"), (dict(smallest=0), "smallest is 0"), (dict(alpha=.6), "at most 0.5"), (dict(alpha=0), "alpha is 0"),
    (dict(extra=1), "has no entry 'extra'"), (dict(sha256="0"*64), "were changed after they were stored")])
def test_what_is_no_plan_is_refused_in_a_line(change, says):
    with pytest.raises(ValueError, match=says) as e: check_plan(SAID | change)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("text, says", [("seeds: [0]\nseeds: [1]", "is there twice"), ("[1, 2]", "of type list"), ("a: [", "expected YAML or JSON"), ("", "of type NoneType"), ("!!python/object:os.system {}", "tag|expected")])
def test_a_file_that_is_no_plan_is_refused(tmp_path, text, says):
    (tmp_path/"p.yaml").write_text(text)
    with pytest.raises(ValueError, match=says): read_plan(tmp_path/"p.yaml")
    with pytest.raises(FileNotFoundError, match="there is no file"): read_plan(tmp_path/"q.yaml")


def test_the_hash_is_that_of_what_is_meant(plan_file):
    plan = check_plan(SAID)
    same = [SAID | dict(seeds=[4, 0, 3, 1, 2]), SAID | dict(smallest=10.), SAID | dict(by=["algo"], alpha=.05), dict(reversed(SAID.items())), plan]
    assert {check_plan(x)["sha256"] for x in same} == {plan["sha256"]} == {plan_hash(json.loads(json.dumps(plan)))}
    others = [dict(endpoint="BWT"), dict(methods=["mir"]), dict(seeds="0..5"), dict(episodes=11), dict(smallest=9), dict(alpha=.01), dict(question="?"), dict(test="McNemar")]
    assert len({check_plan(SAID | x)["sha256"] for x in others}) == len(others)


def test_a_plan_changes_no_number(trained):
    planned, plain = trained
    assert fingerprint(planned) == fingerprint(plain)
    assert read_json(planned/"config.json")["plan"] == check_plan(SAID | dict(episodes=2)) and read_json(plain/"config.json")["plan"] == ""
    assert "plan" not in identity(RunFolder(plain).cfg) and "plan" in identity(RunFolder(planned).cfg)


def test_a_run_goes_on_under_its_plan_alone(trained):
    planned, plain = trained
    cfg = RunFolder(planned).cfg
    assert RunFolder(planned).check(cfg) == []
    for run,other,says in ((planned, check_plan(SAID), "plan: plan [0-9a-f]{8} -> plan [0-9a-f]{8}"), (planned, "", "plan: plan [0-9a-f]{8} -> ''"), (plain, cfg.plan, "plan: '' -> plan [0-9a-f]{8}")):
        c = RunFolder(run).cfg
        with pytest.raises(ValueError, match=f"belongs to another run. It differs in {says}\\. Choose"): RunFolder(run).check(type(c)(**vars(c) | dict(plan=other)))


def test_the_plan_is_there_before_the_first_update(tmp_path, plan_file, shared_data, monkeypatch):
    import clvla.train.learner as job
    class Early(Exception): pass
    def stop(*a, **kw): raise Early
    monkeypatch.setattr(job.Trainer, "report", stop)
    with pytest.raises(Early): train_cl(resolve(TrainConfig(algo="er", plan=str(plan_file), run_dir=str(tmp_path/"run"), data_dir=str(shared_data), **SMALL)), say=len)
    assert read_json(tmp_path/"run/config.json")["plan"] == read_plan(plan_file)


@pytest.mark.parametrize("cls, kw", [(TrainConfig, dict(suite="dot_2")), (PracticeConfig, dict(suite="dot_2")), (AgentConfig, dict(suite="dot_2"))], ids=["run_cl", "run_rl", "run_crl"])
def test_every_page_takes_it(cls, kw, plan_file):
    cfg = resolve(cls(plan=str(plan_file), device="cpu", **kw))
    assert cfg.plan == read_plan(plan_file) and identity(cfg)["plan"] == cfg.plan
    with pytest.raises(ValueError, match="seed is 7, and the plan has .*leave plan out"): resolve(cls(plan=str(plan_file), seed=7, device="cpu", **kw))
    with pytest.raises(ValueError, match="'agent', which is no setting"): resolve(cls(plan=read_plan(plan_file) | dict(by=["agent"], sha256=plan_hash(read_plan(plan_file) | dict(by=["agent"]))), device="cpu", **kw))
    if cls is PracticeConfig: assert base_config(cfg) == base_config(resolve(cls(device="cpu", **kw)))   # the same base policy


def test_an_evaluation_has_it(trained, plan_file):
    planned, plain = trained
    cfg = EvalConfig(run_dir=str(plain), n_trials=1, n_workers=1, plan=str(plan_file), last_only=True)
    out = eval_cl(cfg, len)
    assert read_json(out.path/"config.json")["plan"] == read_plan(plan_file)
    plan_file.write_text(json.dumps(SAID))
    with pytest.raises(ValueError, match="belongs to another evaluation: plan: plan [0-9a-f]{8} -> plan [0-9a-f]{8}; evaluate"): eval_cl(cfg, len)
    assert [r.config["plan"]["episodes"] for r in read_runs([out.path])] == [2]


def test_the_report_of_a_run_says_it(trained):
    finish(trained[0])
    html = (trained[0]/"report.html").read_text()
    assert "The plan" in html and read_json(trained[0]/"config.json")["plan"]["sha256"] in html and "as planned" in html
    finish(trained[1])
    assert "The plan" not in (trained[1]/"report.html").read_text()


def test_a_sweep_gives_it_to_every_entry(tmp_path, plan_file):
    entries = entries_of(Sweep(grid="cl=er,sequential;seed=0..2", shared=dict(SMALL), plan="plan.yaml", beside=str(tmp_path)))
    plan = read_plan(plan_file)
    plan_file.write_text("changed: 1")   # read once
    queue = Queue(tmp_path/"sweep", entries)
    assert [c.plan["sha256"] for c in check_entries(queue).values()] == [plan["sha256"]]*6
    with pytest.raises(ValueError, match="seed is 5, and the plan has"): check_entries(Queue(tmp_path/"other", entries_of(Sweep(grid="seed=5", shared=dict(SMALL), plan=plan))))
    with pytest.raises(ValueError, match="plan is given twice"): entries_of(Sweep(grid="seed=0", plan=plan), dict(plan="x.yaml"))
    with pytest.raises(FileNotFoundError): entries_of(Sweep(grid="seed=0", plan="nowhere.yaml"))


def test_a_sweep_ends_with_the_planned_verdict(tmp_path, monkeypatch, shared_data, capsys):
    monkeypatch.chdir(tmp_path)
    write_json(Path("plan.json"), SAID | dict(episodes=2, seeds=[0], test="McNemar"))
    write_json(Path("sweep.json"), dict(grid="cl=er,sequential;seed=0", shared=SMALL | dict(data_dir=str(shared_data)), plan="plan.json"))
    assert main(["sweep", "sweep.json"]) == 0
    said = capsys.readouterr().out
    assert "It was followed." in said and "As planned, er against sequential: too small to tell." in said


IDS = ["a", "b"]

def write_run(folder, algo, seed, keep, n=10, plan=None):
    luck = np_rng(seed, algo, "luck").random((2, n))
    recs = [dict(stage=t, after=s, task=IDS[j], trial=i, success=bool(luck[j, i] < (.9 if j == t else keep)), step=None) for t,s in enumerate(IDS) for j in range(t+1) for i in range(n)]
    write_json(folder/"config.json", dict(algo=algo, seed=seed, lr=.1, n_trials=n, run_dir=str(folder)) | ({} if plan is None else dict(plan=plan)))
    write_json(folder/"stream.json", dict(name="s", tasks=[dict(id=j, name=j, prompt=j) for j in IDS], stages=IDS))
    (folder/"episodes.jsonl").write_text("".join(json.dumps(r)+"\n" for r in recs))


@pytest.fixture
def runs(tmp_path):
    for seed in range(5):
        for algo,keep in dict(sequential=.1, er=.6).items(): write_run(tmp_path/f"{algo}-s{seed}", algo, seed, keep, plan=check_plan(SAID))
    return tmp_path


def followed(runs, plan): return follow_runs(plan, group(read_runs(f"{runs}/*-s*"), plan["by"], FREE))


def test_the_planned_test_is_scipys(runs):
    plan = check_plan(SAID)
    f = followed(runs, plan)
    assert f.deviations == [] and f.tests[0].says == "shown"
    groups = group(read_runs(f"{runs}/*-s*"))
    a, b = ([r.scores["ASR"].value for r in groups[k]] for k in ("er", "sequential"))
    assert f.tests[0].p == pytest.approx(stats.ttest_rel(a, b).pvalue, rel=1e-3) and f.tests[0].difference == pytest.approx(np.mean(a)-np.mean(b))
    low, high = stats.ttest_rel(a, b).confidence_interval(.95)
    assert (f.tests[0].low, f.tests[0].high) == pytest.approx((low, high), rel=1e-3)
    for test in ("McNemar", "Fisher"): assert followed(runs, check_plan(SAID | dict(test=test))).tests[0].n == 100   # of 5 seeds, 2 tasks


@pytest.mark.parametrize("keep, n, smallest, says", [(.1, 10, 10, "too small to tell"), (.1, 400, 30, "not shown"), (.9, 10, 10, "shown")])
def test_the_verdict_is_held_against_the_smallest_difference(tmp_path, keep, n, smallest, says):
    plan = check_plan(SAID | dict(test="Fisher", seeds=[0], episodes=n, smallest=smallest))
    for algo,k in dict(sequential=.1, er=keep).items(): write_run(tmp_path/f"{algo}-s0", algo, 0, k, n, plan)
    assert followed(tmp_path, plan).tests[0].says == says


def change(runs, name, **kw): write_json(runs/name/"config.json", read_json(runs/name/"config.json") | kw)


@pytest.mark.parametrize("do, says", [
    (lambda r: (r/"er-s3/episodes.jsonl").unlink(), "er: no run of seed 3"),
    (lambda r: change(r, "er-s2", seed=7), "has seed 7, which is not of the plan"),
    (lambda r: write_run(r/"mir-s0", "mir", 0, .5), "'mir', which is no method of the plan"),
    (lambda r: write_run(r/"er-s1", "er", 1, .6, 7, check_plan(SAID)), "has 7 episodes of a task at its end, and the plan 10"),
    (lambda r: change(r, "er-s2", plan=""), "er-s2 was begun without a plan"),
    (lambda r: change(r, "er-s2", plan=check_plan(SAID | dict(alpha=.1))), "er-s2 was begun under another plan"),
    (lambda r: change(r, "er-s2", plan=check_plan(SAID) | dict(endpoint="BWT")), "were changed after they were stored"),
    (lambda r: change(r, "er-s2", n_trials=20), "is not at its end")], ids=["missing", "seed", "method", "episodes", "none", "other", "edited", "unfinished"])
def test_each_deviation_is_named(runs, do, says):
    do(runs)
    plan = check_plan(SAID)
    f = follow_runs(plan, group([r for r in read_runs([p for p in sorted(runs.glob("*-s*")) if (p/"episodes.jsonl").exists()])], plan["by"], FREE))
    assert any(says in line for line in f.deviations) and len(f.deviations) <= 2
    assert "It was not followed:" in f.text and "\nNot as planned, er against sequential" in f.text


def test_a_method_without_runs_counts_in_the_family(runs):
    plan = check_plan(SAID | dict(methods=["er", "mir"]))
    f = followed(runs, plan)
    assert [t.says for t in f.tests] == ["shown", "no runs"] and f.tests[0].p_holm == pytest.approx(2*f.tests[0].p)


def test_seeds_that_all_agree_still_have_a_spread(tmp_path):
    "Five trainings with one and the same difference of a single episode show nothing."
    plan = check_plan(SAID | dict(endpoint="BWT", seeds="0..2", episodes=10))
    for seed in range(3):
        for algo in ("sequential", "er"):
            write_run(tmp_path/f"{algo}-s{seed}", algo, seed, .5, plan=plan)
            recs = [json.loads(x) for x in (tmp_path/f"{algo}-s{seed}/episodes.jsonl").read_text().splitlines()]
            for r in recs: r["success"] = r["trial"] < (5+(algo == "er") if r["stage"] == 1 and r["task"] == "a" else 8)
            (tmp_path/f"{algo}-s{seed}/episodes.jsonl").write_text("".join(json.dumps(r)+"\n" for r in recs))
    assert followed(tmp_path, plan).tests[0].says == "too small to tell"


def test_compare_says_it_and_marks_what_was_not_planned(runs, capsys, tmp_path):
    write_json(tmp_path/"plan.json", SAID)
    assert main(["compare", f"{runs}/*-s*", "--plan", str(tmp_path/"plan.json"), "--report", str(tmp_path/"c.html")]) == 0
    said = capsys.readouterr().out
    assert "As planned, er against sequential: shown." in said and "BWT (not planned)" in said and " ASR (not planned)" not in said and "Looked at besides, not planned: AAA; LA; BWT; Forgetting." in said
    assert "As planned, er against sequential" in (tmp_path/"c.html").read_text()
    assert main(["compare", f"{runs}/*-s*", "--plan", str(tmp_path/"plan.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["planned"]
    assert found["followed"] and found["tests"][0]["says"] == "shown" and found["plan"]["sha256"] == check_plan(SAID)["sha256"]
    assert main(["compare", f"{runs}/*-s*", "--plan", str(tmp_path/"plan.json"), "--baseline", "er"]) == 1
    assert "leave baseline out" in capsys.readouterr().err
    plain = compare(f"{runs}/*-s*", n_boot=50)
    assert plain.followed is None and not any("planned" in c for c in plain.table.columns)


def test_another_comparison_is_marked(runs):
    write_run(runs/"mir-s0", "mir", 0, .5, plan=check_plan(SAID))
    c = compared(CompareConfig(runs=f"{runs}/*-s*", plan=SAID), n_boot=50)
    assert "mir against sequential" in c.followed.besides


@pytest.mark.parametrize("rows, says", [(40, []), (30, ["ours has 30 episodes of a task, and the plan 40"])])
def test_audit_says_it(tmp_path, capsys, rows, says):
    for name,rate,n in (("ours", .9, rows), ("theirs", .4, 40), ("other", .5, 40)):
        (tmp_path/f"{name}.csv").write_text("task,trial,seed,success\n"+"".join(f"a,{i},3,{int(np_rng(i, name).random() < rate)}\n" for i in range(n)))
    write_json(tmp_path/"plan.json", dict(endpoint="ASR", methods=["ours"], baseline="theirs", seeds=[3], episodes=40, test="McNemar", smallest=5))
    words = ["audit", *(f"{n}={tmp_path/n}.csv" for n in ("ours", "theirs")), "--plan", str(tmp_path/"plan.json"), "--out", str(tmp_path/"out")]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["planned"]
    assert found["deviations"] == says and found["tests"][0]["says"] == "shown" and len(found["unsaid"]) == 2
    assert "against theirs: shown" in (tmp_path/"out/audit.txt").read_text() and read_json(tmp_path/"out/audit.json")["planned"] == found
    results = [read_results(f"{n}={tmp_path/n}.csv") for n in ("ours", "theirs", "other")]
    f = follow_results(read_plan(tmp_path/"plan.json"), results, audit(results))
    assert "ours against other" in f.besides and "other is no method of the plan" in f.deviations


def test_audit_with_counts_and_with_runs(runs, tmp_path):
    plan = check_plan(dict(endpoint="ASR", methods=["ours"], baseline="theirs", seeds=[0], episodes=10, test="Fisher", smallest=5))
    results = [read_results(f"ours={runs/'er-s0'}"), read_results("theirs=1/20")]
    f = follow_results(plan, results)
    assert "ours was begun under another plan" in f.deviations[0] and f.tests[0].n == 20 and f.tests[0].p == pytest.approx(stats.fisher_exact([[results[0].k, 20-results[0].k], [1, 19]]).pvalue)
    assert any("which seeds its episodes have" in line for line in f.unsaid)
    with pytest.raises(ValueError, match="clvla compare"): follow_results(check_plan(SAID), results)
    (tmp_path/"x.csv").write_text("task,seed,success\na,x,1\n")
    with pytest.raises(ValueError, match="expected whole numbers"): follow_results(plan, [results[0], read_results(f"theirs={tmp_path/'x.csv'}")])


def test_two_copies_of_one_method_are_seldom_told_apart(tmp_path):
    "Trainings of one kind: the planned test over five seeds finds a difference in at most 7 % of 200 plans."
    rng, plan = np.random.default_rng(0), check_plan(SAID)
    from clvla.eval.followed import by_seeds, decide
    class Fake:
        def __init__(self, v): self.scores = {"ASR": type("S", (), dict(value=v))}
    alarms = [decide(plan, [by_seeds(plan, "er", *({s: Fake(x) for s,x in enumerate(rng.binomial(20, np.clip(rng.normal(.6, .1, 5), 0, 1))/20)} for _ in "ab"))])[0].says == "shown" for _ in range(200)]
    assert np.mean(alarms) <= .07


def test_a_claim_about_a_metric_that_is_no_share_is_not_judged_in_points(monkeypatch):
    "One step less, of 5 that are of interest, had been told as 100 points."
    monkeypatch.setitem(metrics, "steps", lambda records, stages, task_ids: 0.)
    plan, found = check_plan(SAID | dict(endpoint="steps", smallest=5)), Planned("er", 5, -1., -2., .5, .2)
    plain.add("steps")
    try:
        with pytest.raises(ValueError, match="is no share"): judge_planned("alike", plan, found)
    finally: plain.discard("steps")
    assert judge_planned("alike", check_plan(SAID), Planned("er", 5, -.01, -.02, .05, .2)).says == "holds"


def test_seeds_that_are_all_equal_show_no_more_than_their_trials():
    "Two methods that win every one of ten episodes in three seeds are not known to be alike within 3 points, with a plan or without."
    def made(algo, seed):
        records = [dict(stage=1, after="b", step=None, task=t, trial=i, success=True, seed=seed) for t in "ab" for i in range(5)]
        return run_from(Path(f"{algo}-s{seed}"), dict(algo="imitation", cl=algo, seed=seed, n_trials=5), dict(tasks=[dict(id="a"), dict(id="b")], stages=["a", "b"], order=[0, 1]), records, {})
    a, b = ([made(algo, s) for s in range(3)] for algo in ("er", "derpp"))
    asked, planned = seeds_verdict("alike", a, b, 3), by_seeds(dict(endpoint="ASR", alpha=.05), "er", *({r.config["seed"]: r for r in rs} for rs in (a, b)))
    assert asked.says == "too small to tell" and (asked.low, asked.high) == pytest.approx((100*planned.low, 100*planned.high))


@pytest.mark.parametrize("claim, low, high, p_holm, says", [
    ("more", .003, .197, .138, "too small to tell"), ("more", .003, .197, .046, "holds"), ("less", -.197, -.003, .138, "too small to tell"),
    ("not more", .003, .197, .138, "too small to tell"), ("not more", .003, .197, .05, "does not"), ("alike", .003, .197, .138, "too small to tell"),
    ("alike", -.02, .03, .9, "holds"), ("more", -.02, .03, .9, "does not"), ("not more", -.02, .03, .9, "holds")], ids=str)
def test_a_claims_verdict_is_corrected_as_its_plans_test_is(claim, low, high, p_holm, says):
    "That two are apart needs the p-value after Holm; that they are not is the interval's own."
    plan = check_plan(dict(endpoint="ASR", methods=["x", "y", "z"], baseline="b", seeds="0..4", episodes=20, test="t", smallest=5))
    found = judge_planned(claim, plan, Planned("x", 5, (low+high)/2, low, high, p_holm/3, p_holm))
    assert found.says == says and ("after Holm" in found.text) == (says == "too small to tell")
