"Whole matrices: read from our runs, AlphaBrain's logs and tables; intervals that cover, differences that are no false alarms."
import json

import numpy as np
import pytest

from clvla.command.main import main
from clvla.core.files import write_json
from clvla.core.seeds import np_rng
from clvla.eval.matrices import Matrix, audit_matrices, differences, intervals, of_counts, read_matrix, terms
from clvla.eval.metrics import from_records, measure
from clvla.eval.stats import metric_intervals, outcomes

IDS = ["a", "b", "c"]


def records(rng, keep=.6, n=20, stages=IDS):
    return [dict(stage=t, after=s, task=j, trial=i, success=bool(rng.random() < .8*keep**(t-stages.index(j))), step=None) for t,s in enumerate(stages) for j in stages[:t+1] for i in range(n)]


def write_run(folder, recs, stages=IDS):
    write_json(folder/"config.json", dict(algo="er", seed=0))
    write_json(folder/"stream.json", dict(name="s", tasks=[dict(id=j, name=j, prompt=j) for j in IDS], stages=stages))
    (folder/"episodes.jsonl").write_text("".join(json.dumps(r)+"\n" for r in recs))


def log(counts):
    "An eval.log of AlphaBrain: the words of each task, and its episodes."
    lines, k, n = [], 0, 0
    for task,(a,b) in counts.items():
        for i in range(b):
            n, k = n+1, k+(i < a)
            lines += [f"INFO:root:\nTask: {task}", f"INFO:root:Starting episode {i+1}...", f"INFO:root:Success: {i < a}", f"INFO:root:# episodes completed so far: {n}", f"INFO:root:# successes: {k} ({100*k/n:.1f}%)"]
    return "\n".join(lines).replace("INFO:root:\nTask", "Task")


def write_logs(folder, rows):
    for name,counts in rows.items():
        (folder/name).mkdir(parents=True)
        (folder/name/"eval.log").write_text(log(counts))


ROWS = {"task_0_id2_steps_9": dict(x=(0, 4), y=(1, 4), z=(4, 4)), "task_1_id0_steps_9": dict(x=(3, 4), y=(0, 4), z=(2, 4)), "task_2_id1_steps_9": dict(x=(2, 4), y=(4, 4), z=(1, 4))}


def test_our_run_has_the_metrics_and_intervals_of_its_own_page(tmp_path):
    recs = records(np_rng(0, "r"))
    write_run(tmp_path, recs)
    x = read_matrix(f"ours={tmp_path}")
    table = intervals(x, 500).set_index("metric")
    own = metric_intervals(recs, IDS, IDS, 500)
    for k in ("ASR", "LA", "BWT", "Forgetting", "LIBERO NBT"):
        assert table.loc[k, ["value", "low", "high"]].tolist() == pytest.approx([100*v for v in own[k][:3]], abs=1e-9)
    for k,v in terms(x.m).items():
        if not np.isnan(v).any(): assert v.mean() == pytest.approx(measure(x.m)[k].value)
    assert (table.high_tasks-table.low_tasks)["BWT"] > (table.high-table.low)["BWT"]*.8


def test_alphabrains_columns_are_those_of_its_names(tmp_path):
    "Its second stage trained the first column, whatever the successes look like."
    write_logs(tmp_path/"run", ROWS)
    m = read_matrix(f"theirs={tmp_path/'run'}").m
    assert (m.stages, m.task_ids) == (("z", "x", "y"), ("x", "y", "z")) and m.k.tolist() == [[0, 1, 4], [3, 0, 2], [2, 4, 1]] and (m.n == 4).all()
    assert measure(m)["BWT"].value == pytest.approx(((1-4)/4+(2-3)/4)/2)


@pytest.mark.parametrize("change, says", [
    (lambda r: r.pop("task_1_id0_steps_9"), "logs of the stages [0, 2], expected all from 0"), (lambda r: r.update({"task_1_id1_x": r["task_0_id2_steps_9"]}), "stage 1 has two logs"),
    (lambda r: r.update({"task_1_id0_steps_9": dict(y=(0, 4), x=(1, 4), z=(1, 4))}), "in another order"), (lambda r: r.update({"task_2_id7_steps_9": r.pop("task_2_id1_steps_9")}), "task 7")])
def test_logs_of_no_one_stream_are_refused(tmp_path, change, says):
    rows = dict(ROWS)
    change(rows)
    write_logs(tmp_path/"run", rows)
    with pytest.raises(ValueError) as e: read_matrix(f"x={tmp_path/'run'}")
    assert says in str(e.value)


@pytest.mark.parametrize("text, n, says", [
    ("s,a,b\na,90,0\nz,1,2\n", 50, "a stage trained 'z'"), ("s,a,b\na,91,0\n", 50, "no share of 50 trials"), ("s,a,b\na,x,0\n", 50, "a share, a percentage, or empty"), ("s,a,b\na,120,0\n", 50, "a share, a percentage, or empty"),
    ("s,a,b\na,inf,0\n", 50, "a share, a percentage, or empty"), ("", 50, "is empty"), ("s,a,a \na,1,1\n", 50, "two columns")])
def test_tables_that_cannot_be_are_refused_in_a_line(tmp_path, text, n, says, capsys):
    (tmp_path/"m.csv").write_text(text)
    assert main(["audit", "--matrices", "True", f"x={tmp_path/'m.csv'}/{n}"]) == 1
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said and said.count("\n") == 1


def test_shares_and_percentages_are_one(tmp_path):
    (tmp_path/"p.csv").write_text("s,a,b\na,90,0\nb,40,88\n")
    (tmp_path/"f.csv").write_text("s,a,b\na,.9,0\nb,.4,.88\n")
    p, f = (read_matrix(f"{tmp_path/k}.csv/50").m for k in "pf")
    assert p.k.tolist() == f.k.tolist() == [[45, 0], [20, 44]]
    (tmp_path/"e.csv").write_text("s,a,b\na,90,\nb,40,88\n")
    assert read_matrix(f"{tmp_path/'e.csv'}/50").m.n.tolist() == [[50, 0], [50, 50]]


def counts(rng, name, R, n=20):
    k = rng.binomial(n, R)
    return of_counts(name, "made up", list("abcd"), list("abcd"), {(t, "abcd"[j]): (int(k[t, j]), n) for t in range(4) for j in range(4)})


def ours(rng, name, R, n=20):
    recs = [dict(stage=t, after="abcd"[t], task="abcd"[j], trial=i, success=bool(rng.random() < R[t, j]), step=None) for t in range(4) for j in range(4) for i in range(n)]
    out = outcomes(recs, tuple("abcd"), tuple("abcd"))
    return Matrix(name, "made up", out.matrix, out)


R = np.array([[.9*.7**max(0, t-j) if j <= t else .05 for j in range(4)] for t in range(4)])


@pytest.mark.parametrize("make", [counts, ours], ids=["counts", "runs"])
def test_two_copies_of_one_policy_seldom_differ(make):
    "200 comparisons by all metrics together, and the interval of one over its truth."
    rng, alarms, inside = np.random.default_rng(0), 0, []
    truth = 100*np.mean([R[3, j]-R[j, j] for j in range(3)])
    for i in range(200):
        a, b = make(rng, "a", R), make(rng, "b", R)
        alarms += (differences([a, b], 200, i).says == "shown").any()
        if i < 100:
            row = intervals(a, 300, i).set_index("metric").loc["BWT"]
            inside.append(row.low <= truth <= row.high)
    assert alarms/200 <= .07 and np.mean(inside) >= .9


def test_a_difference_is_found_and_its_side_is_right():
    rng = np.random.default_rng(1)
    keeps = np.array([[.9*.98**max(0, t-j) if j <= t else .05 for j in range(4)] for t in range(4)])
    table = differences([counts(rng, "keeps", keeps, 50), counts(rng, "forgets", R, 50)], 1000).set_index("metric")
    assert table.says["BWT"] == "shown" and table.difference["BWT"] > 0 > table.difference["Forgetting"] and table.says["LA"] == "not shown"
    with pytest.raises(ValueError, match="not on the same tasks"): differences([counts(rng, "x", R), of_counts("y", "", ["a"], ["a"], {(0, "a"): (1, 2)})])


def test_the_command_says_it(tmp_path, capsys):
    write_run(tmp_path/"ours", records(np_rng(0, "r"), .9))
    (tmp_path/"m.csv").write_text("s,a,b,c\na,80,0,0\nb,10,80,0\nc,0,10,80\n")
    words = ["audit", "--matrices", "True", f"ours={tmp_path/'ours'}", f"<b>theirs</b>={tmp_path/'m.csv'}/50"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "points, with 95 % intervals" in said and "BWT" in said and "it has counts, so its trials do not pair" in said
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {r["metric"]: r["says"] for r in found["differences"]}["BWT"] == "shown" and len(found["matrices"]) == 2
    for extra, says in ((["--out", str(tmp_path/"o")], "leave plan and out away"), (["ours=1/2"], "name of its own|no folder")):
        assert main([*words, *extra]) == 1
    assert audit_matrices([f"x={tmp_path/'ours'}"])[0]["differences"] == []
    assert from_records(records(np_rng(0, "r")), IDS, IDS).T == 3


@pytest.mark.parametrize("stages, trials", [(IDS[::-1], range(20)), (IDS, range(25)), (IDS, range(1, 20))], ids=["order", "more", "fewer"])
def test_runs_pair_by_task_and_initial_state(stages, trials):
    "A hard start is hard for both, wherever it stands: the interval of a difference is as narrow as with equal columns, up to what is not shared."
    hard = {(j, i): np_rng(0, "hard", j, i).random() < .5 for j in IDS for i in range(25)}
    def run(name, order, trials):
        noisy = lambda j, i: bool(hard[j, i]) ^ (np_rng(0, name, j, i).random() < .05)
        recs = [dict(stage=t, after=s, task=j, trial=i, success=noisy(j, i), step=None) for t,s in enumerate(order) for j in order[:t+1] for i in trials]
        out = outcomes(recs, tuple(order), tuple(order))
        return Matrix(name, "", out.matrix, out)
    width = lambda b: next(r.high-r.low for r in differences([run("x", IDS, range(20)), b]).itertuples() if r.metric == "ASR")
    same, other = width(run("y", IDS, range(20))), width(run("y", stages, trials))
    assert other < 1.3*same and differences([run("x", IDS, range(20)), run("y", stages, trials)]).p_holm.min() > .05
