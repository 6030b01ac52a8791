"Anybody's results: numbers against scipy and published examples, false alarms and power by simulation, and records that nobody should believe."
import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from clvla.command.main import main
from clvla.eval.audit import against, audit, by_task, e_value, episodes_needed, fisher, latex, markdown, newcombe, paired_interval, paragraph, smallest_shown
from clvla.core.records import read_jsonl
from clvla.eval.changed import changed_table
from clvla.eval.followed import follow_results, result_deviations
from clvla.eval.metrics import ids_of
from clvla.eval.plan import check_plan
from clvla.eval.results import counted, of_counts, of_episodes, of_text, read_results
from clvla.eval.stats import mcnemar, wilson

GRID = [(0, 10, 0, 10), (1, 10, 8, 10), (3, 50, 9, 40), (185, 200, 184, 200), (462, 500, 459, 500), (50, 50, 0, 50), (7, 9, 120, 400)]
# Newcombe (1998), Table II, method 10
NEWCOMBE = [((56, 70, 48, 80), (.0524, .3339)), ((9, 10, 3, 10), (.1705, .8090)), ((6, 7, 2, 7), (.0582, .8062)), ((5, 56, 0, 29), (-.0381, .1926)),
            ((0, 10, 0, 20), (-.1611, .2775)), ((0, 10, 0, 10), (-.2775, .2775)), ((10, 10, 0, 20), (.6791, 1.)), ((10, 10, 0, 10), (.6075, 1.))]


@pytest.mark.parametrize("k1, n1, k2, n2", GRID)
def test_tests_and_intervals_are_scipys(k1, n1, k2, n2):
    assert fisher(k1, n1, k2, n2) == pytest.approx(stats.fisher_exact([[k1, n1-k1], [k2, n2-k2]]).pvalue, rel=1e-6)
    assert mcnemar(k1, k2) == pytest.approx(stats.binomtest(k1, k1+k2, .5).pvalue if k1+k2 else 1., rel=1e-6)
    low, high = stats.binomtest(k1, n1).proportion_ci(method="wilson")
    assert (float(wilson(k1, n1)[0]), float(wilson(k1, n1)[1])) == pytest.approx((low, high), abs=1e-9)


@pytest.mark.parametrize("counts, published", NEWCOMBE, ids=str)
def test_the_interval_is_newcombes(counts, published):
    assert newcombe(*counts) == pytest.approx(published, abs=6e-5)


@pytest.mark.parametrize("truth", [(.5, .1, .1, .3), (.3, .3, .1, .3), (.1, .05, .02, .83)], ids=str)
def test_the_paired_interval_covers(truth):
    "Of both, the first alone, the second alone, neither."
    draws = np.random.default_rng(0).multinomial(100, truth, 2000)
    inside = [low <= truth[1]-truth[2] <= high for low,high in (paired_interval(int(b), int(c), 100) for _,b,c,_ in draws)]
    assert .935 <= np.mean(inside) <= 1


def episodes(rng, rates, paired):
    "Two copies of one policy on 50 starts of 2 tasks."
    hard = rng.random((2, 50))
    def one(name, rate):
        x = (hard < rate)*(rng.random((2, 50)) < .9) if paired else rng.random((2, 50)) < rate*.9
        rows = [dict(task=f"t{j}", trial=i if paired else None, seed=0, success=int(x[j, i])) for j in range(2) for i in range(50)]
        return of_episodes(name, "rows", pd.DataFrame(rows))
    return [one(name, rate) for name,rate in zip("ab", rates)]


@pytest.mark.parametrize("paired", [True, False])
def test_two_copies_of_one_policy_seldom_differ(paired):
    rng = np.random.default_rng(1)
    verdicts = [audit(episodes(rng, (.8, .8), paired))[0] for _ in range(200)]
    assert {v.test for v in verdicts} == {"McNemar" if paired else "Fisher"}
    assert np.mean([v.says == "shown" for v in verdicts]) <= .07
    if paired: assert np.mean([v.e >= 20 for v in verdicts]) <= .05


@pytest.mark.parametrize("p1, p2", [(.5, .6), (.8, .9), (.95, .85)])
def test_power_is_that_of_theory(p1, p2):
    "As many episodes as the formula asks for find the difference in 80 % of the trials."
    n, rng = math.ceil(episodes_needed(p1, p2)), np.random.default_rng(2)
    found = [fisher(int(a), n, int(b), n) <= .05 for a,b in zip(rng.binomial(n, p1, 2000), rng.binomial(n, p2, 2000))]
    assert np.mean(found) == pytest.approx(.8, abs=.03)
    assert episodes_needed(p1, p1+smallest_shown(p1, n)*(-1 if p1 > .5 else 1)) == pytest.approx(n, rel=1e-3)


def test_evidence_is_a_fair_bet_at_any_time():
    "Its mean is 1 at every length where neither is better."
    for n in (1, 5, 40): assert sum(math.comb(n, b)*e_value(b, n-b) for b in range(n+1))/2**n == pytest.approx(1)
    assert e_value(10**6, 0) < math.inf


def test_episodes_pair_where_they_can(tmp_path):
    "In another order, one of them more; the difference is that of the pairs."
    a = pd.DataFrame(dict(task="t", trial=range(40), success=[1]*30+[0]*10))
    b = pd.DataFrame(dict(task="t", trial=range(39), success=[1]*20+[0]*19)).sample(frac=1, random_state=0)
    for name,t in dict(a=a, b=b).items(): t.to_csv(tmp_path/f"{name}.csv", index=False)
    v = against(read_results(f"a={tmp_path/'a.csv'}"), read_results(f"b={tmp_path/'b.csv'}"))
    assert (v.test, v.n, v.p) == ("McNemar", 39, mcnemar(10, 0)) and v.difference == pytest.approx(10/39)


def test_holm_holds_for_the_family():
    v = audit([of_text(*x) for x in (("a", "80/100"), ("b", "92/100"), ("c", "93/100"))])
    assert sorted(x.p for x in v)[0]*3 == pytest.approx(min(x.p_holm for x in v)) and all(x.p_holm >= x.p for x in v)


def test_a_percentage_is_the_count_that_it_rounds():
    assert [counted("x", p, n, d) for p,n,d in ((92.5, 200, 1), (93, 120, 0), (0, 7, 1), (100, 7, 1), (91.8, 500, 1))] == [185, 112, 0, 7, 459]


@pytest.mark.parametrize("text, says", [
    ("task,success\na,.5\n", "expected 0 or 1"), ("task,success\na,\n", "expected 0 or 1"), ("task,trial,success\na,0,1\na,0,1\n", "is there twice"),
    ("task,k,n\na,5,4\n", "5 successes in 4 trials"), ("task,k,n\na,1.5,4\n", "whole numbers"), ("task,k,n\na,nan,4\n", "whole numbers"), ("task,k,n\na,1,2\na,1,2\n", "is there twice"),
    ("task,mean,n\na,92.5,500\n", "no share of 500 trials"), ("score\n1\n", "expected success"), ("task,success\n", "without episodes"), ("", "is empty"), ("task,k,n\na,0,0\n", "0 successes in 0 trials")])
def test_records_that_cannot_be_are_refused_in_a_line(tmp_path, text, says, capsys):
    (tmp_path/"x.csv").write_text(text)
    assert main(["audit", f"x={tmp_path/'x.csv'}", "y=1/2"]) == 1
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said and said.count("\n") == 1


@pytest.mark.parametrize("words, says", [("a=1/2", "two results or more"), ("a=1/2 a=1/3", "name of its own"), ("a=nowhere.csv b=1/2", "there is no nowhere.csv"), ("a=1/2 b=92.5%/500", "no share of 500"),
                                         ("a=1/2 b=2/2 --margin 200", "from 0 to 100"), ("a=1/2 b=2/2 --margn 2", "did you mean 'margin'?")])
def test_what_is_no_audit_is_refused(words, says, capsys):
    assert main(["audit", *words.split()]) == 1
    assert says in capsys.readouterr().err


def test_vla_evals_own_file():
    "Written by the collector of vla-eval 0.8.0: its means, its seed, and an episode that ended with an error."
    said = json.loads((Path(__file__).parent/"vla_eval_080.json").read_text())
    r = read_results(f"theirs={Path(__file__).parent/'vla_eval_080.json'}")
    assert r.rate == pytest.approx(said["mean_success"], abs=5e-5) and r.pairs and set(r.episodes.seed) == {7}
    assert [k/n for k,n in r.counts.itertuples(index=False)] == pytest.approx([t["mean_success"] for t in said["tasks"]], abs=5e-5)
    assert r.lacks == ["1 of its episodes ended with an error and count as failures"]
    assert against(r, r).test == "McNemar"


OFT = Path(__file__).parent/"openvla_oft.txt"


def test_openvla_ofts_own_file():
    "Written by the functions of OpenVLA-OFT's evaluation of LIBERO: an episode that raised, and two tasks with the same words."
    r = read_results(f"theirs={OFT}")
    said = re.search(r"Total episodes: (\d+)\nTotal successes: (\d+)\n", OFT.read_text())
    assert (r.n, r.k, r.pairs) == (int(said[1]), int(said[2]), True)
    assert list(r.counts.index) == ["open the middle drawer of the cabinet", "put the bowl on the stove", "put the bowl on the stove (2)"]
    assert list(r.counts.k) == [3, 2, 3] and set(r.episodes.trial) == {0, 1, 2, 3}
    assert r.lacks == ["1 of its episodes ended with an error and count as failures"]
    assert against(r, r).test == "McNemar"


@pytest.mark.parametrize("change, says", [
    (lambda t: t.replace("Success: True\n", "", 1), "expected one whole evaluation"),     # a line was lost
    (lambda t: t.replace("Starting episode 3...\n", "", 1), "no task or no number"),
    (lambda t: t.replace("Task: open the middle drawer of the cabinet\n", "", 1), "no task or no number"),
    (lambda t: t.replace("Task: put the bowl on the stove\n", "", 1), "no task or no number"),
    (lambda t: "Success: True\n"+t, "no task or no number"),
    (lambda t: t+t, "expected one whole evaluation"),                                     # two evaluations in one file
    (lambda t: t.replace("# successes: 8 ", "# successes: 9 "), "the file says # successes: 9")])
def test_a_file_of_openvla_that_does_not_add_up_is_refused(tmp_path, change, says):
    (tmp_path/"log.txt").write_text(change(OFT.read_text()))
    with pytest.raises(ValueError, match=says): read_results(f"theirs={tmp_path/'log.txt'}")


def test_what_a_file_of_openvla_lacks_is_said(tmp_path):
    lines = OFT.read_text().splitlines(keepends=True)
    (tmp_path/"stopped.txt").write_text("".join(lines[:lines.index("# episodes completed so far: 6\n")+2]))
    r = read_results(str(tmp_path/"stopped.txt"))
    assert r.n == 6 and any("2 to 4 episodes" in x for x in r.lacks)
    (tmp_path/"chosen.txt").write_text(OFT.read_text().replace("Using default initial states", "Using initial states from mine.json"))
    assert not read_results(str(tmp_path/"chosen.txt")).pairs


@pytest.mark.parametrize("front", ["INFO:root:", "2026-01-02 03:04:05,678 [INFO] ", "03:04:05.678 [INFO] root: ", "2026-01-02 03:04:05 - INFO - "])
@pytest.mark.parametrize("colours", [False, True])
def test_a_log_in_front_and_in_colours_is_read_alike(tmp_path, front, colours):
    "As openpi logs: the words of a task begin a line of their own; as AlphaBrain logs: with colours and a sign before True and False."
    lines = [line if line.startswith("Task: ") else front+line for line in OFT.read_text().splitlines()]
    if colours:
        lines = [re.sub(r"^(.*?)(Task:|Starting episode|# successes:) (\d*)", "\\1\x1b[1;38;5;45m\\2\x1b[0m \x1b[1m\\3\x1b[0m", line) for line in lines]
        lines = [line.replace("Success: True", "Success: \x1b[1m✓ True\x1b[0m").replace("Success: False", "Success: \x1b[1m✗ False\x1b[0m") for line in lines]
    (tmp_path/"eval.log").write_text("\n".join(lines))
    plain,other = read_results(str(OFT)),read_results(str(tmp_path/"eval.log"))
    assert other.counts.equals(plain.counts) and other.episodes.equals(plain.episodes) and other.lacks == plain.lacks


def test_episodes_with_seeds_of_lerobot_pair(tmp_path):
    "What `eval_policy` returns, written as JSON: each episode with the seed of its start."
    for name,won in dict(a=[1, 1, 0, 1], b=[1, 0, 0, 1]).items():
        episodes = [dict(episode_ix=i, sum_reward=0., max_reward=0., success=bool(s), seed=1000+i) for i,s in enumerate(won)]
        (tmp_path/f"{name}.json").write_text(json.dumps(dict(per_episode=episodes, aggregated=dict(pc_success=100*sum(won)/4))))
    v = against(*(read_results(f"{k}={tmp_path/k}.json") for k in "ab"))
    assert (v.test, v.n, v.difference) == ("McNemar", 4, .25)


@pytest.mark.parametrize("d", [dict(harness_version="1", tasks=[dict(task="a", episodes=[dict(episode_id=0, metrics={})])]), dict(per_task=[1]), dict(per_task=[dict(task_group="a", task_id=0, metrics={})]), dict(per_episode=[dict(seed=0)]), dict(overall={}), []])
def test_json_of_another_kind_is_refused(tmp_path, d):
    (tmp_path/"x.json").write_text(json.dumps(d))
    with pytest.raises(ValueError, match="not as .* writes it|no known form"): read_results(str(tmp_path/"x.json"))


def test_a_million_rows(tmp_path):
    rng = np.random.default_rng(0)
    for name in "ab": pd.DataFrame(dict(task=rng.integers(0, 50, 10**6), trial=range(10**6), success=rng.integers(0, 2, 10**6))).to_csv(tmp_path/f"{name}.csv", index=False)
    v = audit([read_results(f"{name}={tmp_path/name}.csv") for name in "ab"])[0]
    assert v.n < 10**6 and v.says in ("alike", "shown")


def test_names_do_not_become_markup(tmp_path):
    r = [of_text("<script>|a|_b&c%", "5/10"), of_text("d", "6/10")]
    assert "<script>" not in markdown(r) and r"\%" in latex(r) and r"\_b\&c" in latex(r) and markdown(r).count("\n") == 3
    from clvla.eval.audit import write_audit
    html = (write_audit(tmp_path/"out", r, audit(r))/"audit.html").read_text()
    assert "<script>|a|" not in html


def test_the_same_files_give_the_same_text(tmp_path, capsys):
    (tmp_path/"a.csv").write_text("task,k,n\nleft,18,20\nright,3,20\n")
    words = ["audit", f"ours={tmp_path/'a.csv'}", "theirs=30/40", "--out", str(tmp_path/"out"), "--json"]
    said = []
    for _ in range(2):
        assert main(words) == 0
        said.append(capsys.readouterr().out+"".join((tmp_path/f"out/audit.{k}").read_text() for k in ("txt", "md", "tex", "json")))
    assert said[0] == said[1]
    found = json.loads(said[0].splitlines()[0])
    assert found["results"][0]["tasks"] == dict(left=[18, 20], right=[3, 20]) and found["verdicts"][0]["e"] is None


def test_by_task_and_the_paragraph_say_what_is_missing():
    a, b = of_counts("a", "counts", pd.DataFrame(dict(k=[5, 6], n=[10, 10]), index=["left", "right"])), of_counts("b", "counts", pd.DataFrame(dict(k=[5], n=[10]), index=["left"]))
    assert by_task([a, b]).loc["right", "b"] == "not measured" and "nothing pairs" in paragraph([a, b], audit([a, b]))


# ---- the bar: false alarms of each kind of record, the bet at any time, and more that nobody should believe

def _lines(won):
    "As OpenVLA's evaluation writes it."
    return "\n".join(line for i,s in enumerate(won) for line in ("Task: push", f"Starting episode {i+1}...", f"Success: {bool(s)}", f"# episodes completed so far: {i+1}", f"# successes: {sum(won[:i+1])} (0%)"))


def _written(kind, folder, name, won):
    "One policy's episodes as each kind of record holds them; what `clvla audit` is told."
    n, k, path = len(won), int(sum(won)), folder/f"{name}.{'csv' if kind.startswith('CSV') else 'txt' if kind == 'OpenVLA' else 'json'}"
    if kind == "two numbers": return f"{name}={k}/{n}"
    if kind == "a percentage": return f"{name}={100*k/n:.1f}%/{n}"
    if kind == "run":
        (folder/name).mkdir(exist_ok=True)
        (folder/name/"episodes.jsonl").write_text("".join(json.dumps(dict(stage=0, step=None, task="push", trial=i, success=bool(s), after="push"))+"\n" for i,s in enumerate(won)))
        return f"{name}={folder/name}"
    text = {"CSV of episodes": lambda: "task,trial,success\n"+"".join(f"push,{i},{s}\n" for i,s in enumerate(won)), "CSV without trials": lambda: "task,success\n"+"".join(f"push,{s}\n" for s in won),
            "CSV of counts": lambda: f"task,k,n\npush,{k},{n}\n", "CSV of means": lambda: f"task,mean,n\npush,{100*k/n:.1f},{n}\n", "OpenVLA": lambda: _lines(won),
            "LeRobot per task": lambda: json.dumps(dict(per_task=[dict(task_group="g", task_id=0, metrics=dict(successes=[bool(s) for s in won]))])),
            "LeRobot per episode": lambda: json.dumps(dict(per_episode=[dict(success=bool(s), seed=i) for i,s in enumerate(won)])),
            "vla-eval": lambda: json.dumps(dict(harness_version="0.8.0", benchmark="b", tasks=[dict(task="push", episodes=[dict(episode_id=i, metrics=dict(success=bool(s))) for i,s in enumerate(won)])]))}
    path.write_text(text[kind]())
    return f"{name}={path}"


KINDS = ["run", "CSV of episodes", "CSV without trials", "CSV of counts", "CSV of means", "LeRobot per task", "LeRobot per episode", "vla-eval", "OpenVLA", "two numbers", "a percentage"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_record_raises_few_false_alarms(tmp_path, kind):
    "200 comparisons of two copies of one policy on 50 starts, some of which are harder."
    rng, alarms, tests = np.random.default_rng(3), 0, set()
    for _ in range(200):
        hard = rng.random(50)*.5+.45
        read = [read_results(_written(kind, tmp_path, name, (rng.random(50) < hard).astype(int).tolist())) for name in "ab"]
        v = audit(read)[0]
        alarms += v.says == "shown"
        tests.add(v.test)
    assert alarms/200 <= .07 and tests == {"McNemar" if kind in ("run", "CSV of episodes", "LeRobot per episode", "vla-eval", "OpenVLA") else "Fisher"}


def test_the_bet_is_seldom_won_at_any_time():
    "The largest of 300 looks exceeds 20 in at most 5 % of the walks of two equal policies."
    e = {(b, n-b): e_value(b, n-b) for n in range(1, 301) for b in range(n+1)}
    rng = np.random.default_rng(4)
    won = rng.integers(0, 2, (1000, 300)).cumsum(1)
    peaks = [max(e[int(b), n-int(b)] for n,b in enumerate(row, 1)) for row in won]
    assert np.mean(np.array(peaks) >= 20) <= .05


def test_the_bet_finds_a_better_policy():
    rng = np.random.default_rng(5)
    assert np.mean([max(e_value(int(b), n-int(b)) for n,b in enumerate((rng.random(200) < .75).cumsum(), 1)) >= 20 for _ in range(100)]) >= .8


@pytest.mark.parametrize("n", [2001, 200_000])
def test_mcnemar_of_many_pairs_is_scipys_and_quick(n):
    for k in (n//2, n//2-int(n**.5), n//3):
        assert mcnemar(k, n-k) == pytest.approx(stats.binomtest(k, n, .5).pvalue, rel=1e-5, abs=1e-300)


@pytest.mark.parametrize("text, says", [
    ("task,k,n\na,inf,inf\n", "at most"), ("task,k,n\na,x,4\n", "whole numbers"), ("task,k,n\na,1e300,1e300\n", "at most"), ("task,k,n\na,-1,4\n", "whole numbers"), ("task,mean,n\na,x,4\n", "expected a number"), ("task,mean,n\na,50,nan\n", "expected a number"),
    ("task,mean,n\na,-5,100\n", "expected a number"), ("task,success\na,nan\n", "expected 0 or 1"), ("task,success\na,2\n", "expected 0 or 1"), ("task,trial,seed,success\na,0,1,1\na,0,1,0\n", "is there twice"), ("task,success,progress\na,1,1.5\n", "divide a return"),
    ("task,success,progress\na,1,nan\n", "expected a share"), ("task,success,progress\na,1,-1\n", "expected a share")])
def test_more_records_that_cannot_be(tmp_path, text, says, capsys):
    (tmp_path/"x.csv").write_text(text)
    assert main(["audit", f"x={tmp_path/'x.csv'}", "y=1/2"]) == 1
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said and said.count("\n") == 1


@pytest.mark.parametrize("word", ["a=10000000000/10000000000", "a="+"9"*400+"/"+"9"*400])
def test_counts_without_end_are_refused_at_once(word, capsys):
    assert main(["audit", word, "b=1/2"]) == 1
    assert "at most 10,000,000" in capsys.readouterr().err or len(word) > 100


def test_a_million_pairs(tmp_path):
    rng = np.random.default_rng(0)
    make = lambda: pd.DataFrame(dict(task="t", trial=range(10**6), seed=0, success=rng.integers(0, 2, 10**6)))
    v = against(of_episodes("a", "rows", make()), of_episodes("b", "rows", make()))
    assert v.n == 10**6 and v.p > 1e-6


def test_partial_credit_is_told_beside_success(tmp_path, capsys):
    for name,x in dict(a=.9, b=.4).items():
        (tmp_path/f"{name}.csv").write_text("task,trial,success,progress\n"+"".join(f"t,{i},{i%2},{x if i%2 else x/2}\n" for i in range(40)))
    assert main(["audit", *(f"{n}={tmp_path/n}.csv" for n in "ab"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert [r["success"] for r in found] == [.5, .5] and [r["credit"][0] for r in found] == pytest.approx([.675, .3]) and all(r["credit"][1] < r["credit"][0] < r["credit"][2] for r in found)
    assert main(["audit", *(f"{n}={tmp_path/n}.csv" for n in "ab")]) == 0
    assert "partial credit 67.5 % [" in capsys.readouterr().out
    d = json.loads((Path(__file__).parent/"vla_eval_080.json").read_text())
    for t in d["tasks"]:
        for e in t["episodes"]: e["metrics"]["progress"] = .5
    (tmp_path/"v.json").write_text(json.dumps(d))
    assert read_results(str(tmp_path/"v.json")).credit[0] == .5
    d["tasks"][0]["episodes"][0]["metrics"]["progress"] = 7
    (tmp_path/"v.json").write_text(json.dumps(d))
    with pytest.raises(ValueError, match="progress is 7.0 in row 0"): read_results(str(tmp_path/"v.json"))


def test_the_interval_of_partial_credit_covers():
    from clvla.eval.results import share_interval
    rng, inside = np.random.default_rng(0), []
    for _ in range(300):
        _, low, high = share_interval(np.clip(rng.beta(.5, .7, 30), 0, 1), 400)
        inside.append(low <= .5/1.2 <= high)
    assert np.mean(inside) >= .92 and share_interval(np.ones(20))[1] < 1


def test_tasks_do_not_become_markup(tmp_path):
    from clvla.eval.audit import write_audit
    rows = pd.DataFrame(dict(task=["<img src=x onerror=alert(1)>"]*2, trial=[0, 1], seed=0, success=[0, 1]))
    r = [of_episodes(name, "<b>form</b>", rows) for name in ("a", "</script><script>alert(1)</script>")]
    html = (write_audit(tmp_path/"out", r, audit(r))/"audit.html").read_text()
    assert "<img src=x" not in html and "<script>alert(1)" not in html and "<b>form</b>" not in html


def test_a_run_that_is_not_at_its_end_is_named(tmp_path):
    "Old tasks are best before the later ones are learnt: a run under way must not stand beside a whole one without a word."
    def made(name, episodes, n_trials=2):
        (tmp_path/name).mkdir(parents=True)
        (tmp_path/name/"config.json").write_text(json.dumps(dict(n_trials=n_trials, seed=0)))
        rows = [dict(stage=t, step=None, task=task, trial=i, success=True) for t,task,n in episodes for i in range(n)]
        (tmp_path/name/"episodes.jsonl").write_text("".join(json.dumps(r)+"\n" for r in rows))
        if "evals" not in name: (tmp_path/name/"stream.json").write_text(json.dumps(dict(tasks=[dict(id="a"), dict(id="b")], stages=["a", "b"])))
        return read_results(f"x={tmp_path/name}")
    first, end = [(0, "a", 2)], [(0, "a", 2), (1, "a", 2), (1, "b", 2)]
    assert made("whole", end).lacks == [] and made("whole/evals/more", end).lacks == []
    assert made("under_way", first).lacks == made("whole/evals/begun", first).lacks == ["the run has come to stage 1 of 2, after a"]
    assert made("stopped", [*end[:2], (1, "b", 1)]).lacks == ["the run has at its end 1 of 2 episodes of b"]
    plan = check_plan(dict(endpoint="ASR", methods=["x"], baseline="y", seeds=[0], episodes=2, test="McNemar", smallest=5))
    assert "x has come to stage 1 of 2, after a" in result_deviations(plan, read_results(f"x={tmp_path}/under_way"))


def write_run(folder, rate, probe, stages=("a", "b"), n=20, order="abp"):
    "A run whose probe `p` was played and never trained."
    folder.mkdir(parents=True)
    (folder/"config.json").write_text(json.dumps(dict(algo="imitation", cl="er", seed=0, n_trials=n)))
    tasks = [dict(id=t, name=t, prompt=t, trained=t != "p") for t in order]
    (folder/"stream.json").write_text(json.dumps(dict(name="s", order=[0, 1, 2], cycles=1, stages=list(stages), tasks=tasks)))
    rows = [dict(stage=len(stages)-1, after=stages[-1], task=t, trial=i, success=i < n*(probe if t == "p" else rate), step=None, seed=0) for t in order for i in range(n)]
    (folder/"episodes.jsonl").write_text("".join(json.dumps(r)+"\n" for r in rows))
    return folder


@pytest.mark.parametrize("stages", [("a", "b"), ("joint",)], ids=str)
def test_a_probe_is_no_part_of_a_runs_success(tmp_path, stages):
    "Neither of its share nor of a difference or of a planned count, and what is left out is said; a run of probes alone has their success."
    x,y = (read_results(f"{name}={write_run(tmp_path/name, .5, probe, stages)}") for name,probe in (("x", 1.), ("y", 0.)))
    assert (x.k, x.n, y.rate) == (20, 40, .5) and "p, on which it was not trained, is left out" in x.lacks[0]
    assert audit([x, y])[0].difference == 0
    plan = check_plan(dict(endpoint="ASR", methods=["x"], baseline="y", seeds=[0], episodes=20, test="Fisher", smallest=5))
    assert follow_results(plan, [x, y]).tests[0].difference == 0
    alone = write_run(tmp_path/"alone", .5, .25)
    said = json.loads((alone/"stream.json").read_text())
    (alone/"stream.json").write_text(json.dumps(said | dict(tasks=[t | dict(trained=False) for t in said["tasks"]])))
    assert (read_results(str(alone)).n, read_results(str(alone)).lacks) == (60, [])


def test_a_probe_is_no_part_of_what_a_perturbation_leaves(tmp_path):
    found = {label: read_jsonl(write_run(tmp_path/(label or "plain"), rate, probe)/"episodes.jsonl") for label,rate,probe in (("", 1., 0.), ("camera", .5, 1.))}
    table = changed_table(found, ids_of(json.loads((tmp_path/"plain/stream.json").read_text())))
    assert table["of plain"].tolist() == [1., .5] and table.episodes.tolist() == [40, 40] and table.p.tolist() == [0., 100.]


def test_a_run_counts_trained_tasks_under_its_own_seed_and_plan(tmp_path):
    "An evaluation has a seed too, of the policy's noise; a probe is no part of what was learnt."
    def folder(path, settings, stream=None):
        path.mkdir(parents=True)
        (path/"config.json").write_text(json.dumps(settings))
        if stream: (path/"stream.json").write_text(json.dumps(stream))
        rows = [dict(stage=0, step=None, task=task, trial=i, success=task == "a") for task in "ab" for i in range(2)]
        (path/"episodes.jsonl").write_text("".join(json.dumps(r)+"\n" for r in rows))
        return read_results(f"x={path}")
    stream = dict(tasks=[dict(id="a"), dict(id="b", trained=False)], stages=["joint"])
    run = folder(tmp_path/"run", dict(seed=4, plan="ours"), stream)
    more = folder(tmp_path/"run/evals/more", dict(seed=0, plan="", first_trial=0))
    planned = folder(tmp_path/"run/evals/planned", dict(seed=0, plan="its own", first_trial=0))
    other = folder(tmp_path/"evals/other", dict(seed=7, plan="of a run"), stream)   # a run whose folder lies in one of that name
    assert [(r.k, r.n, set(r.episodes.seed), r.plan) for r in (run, more, planned, other)] == [
        (2, 2, {4}, "ours"), (2, 2, {4}, "ours"), (2, 2, {4}, "its own"), (2, 2, {7}, "of a run")]
    (tmp_path/"run/stream.json").write_text(json.dumps(stream | dict(tasks=[dict(id=i, trained=False) for i in "ab"])))
    assert read_results(f"x={tmp_path/'run'}").n == 4   # where nothing was trained, everything counts
