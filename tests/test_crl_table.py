"The recorded runs of the page benchmarks/minigrid_agents against CORA's formulas, written as loops over their episodes."
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from clvla.core.records import read_jsonl
from clvla.crl.curves import final_performance, forgetting, per_cycle, performance, smooth, transfer, transfer_per_cycle, zero_shot
from clvla.crl.learner import curves_from
from clvla.run.kept import unpack

FILE = Path(__file__).resolve().parents[1]/"nbs/benchmarks/records/minigrid_agents.jsonl"
LINES = {line["name"]: line for line in read_jsonl(FILE)}
NAMES = [name for name in LINES if int(name.rpartition("-s")[2]) in range(10, 15)]   # other seeds were for choosing settings


def curve(line, task):
    "(frames, mean return) of a task's evaluations, from the line as it stands in the file."
    cells = sorted((cell for cell in line["episodes"] if cell["task"] == task), key=lambda cell: cell["frames"])
    return np.array([cell["frames"] for cell in cells]), np.array([sum(cell["rewards"])/len(cell["rewards"]) for cell in cells])


def region(x, y, low, high):
    "The values strictly between two steps, as CORA's code selects them; None is no limit."
    return [value for step, value in zip(x, y) if (low is None or step > low) and (high is None or step < high)]


def ends(line):
    "Training steps at the ends of the stages."
    found = {cell["stage"]: cell["frames"] for cell in line["episodes"] if cell["step"] is None and cell["stage"] >= 0}
    return [0]+[found[k] for k in sorted(found)]


def test_the_file_has_every_agent_with_its_seeds():
    groups = {}
    for name in NAMES: groups.setdefault(name.rpartition("-s")[0], []).append(name)
    assert {agent: len(of) for agent, of in groups.items()} == {"random": 3, "ppo": 3, "impala": 5, "clear": 5, "ewc": 3, "online-ewc": 3,
                                                               "progress-compress": 3, "sane": 3}


@pytest.mark.parametrize("name", NAMES)
def test_recorded_curves_against_coras_loops(name):
    line = LINES[name]
    tasks, e, c = list(dict.fromkeys(line["stream"]["stages"])), ends(line), curves_from(unpack(name, line))
    K, L = len(tasks), len(e)-1
    strict, at_ends = forgetting(c, strict=True), forgetting(c)
    kept, later, since = {n: [] for n in range(L//K)}, {n: [] for n in range(L//K)}, []
    for i, task in enumerate(tasks):
        x, y = curve(line, task)
        m = max(abs(value) for value in y)
        for k in range(L):
            if k <= i: continue
            before, after = region(x, y, None, e[k])[-1], region(x, y, e[k], e[k+1])[-1]
            assert strict[i, k] == pytest.approx((before-after)/m, abs=1e-12)
            lost = (y[list(x).index(e[k])]-y[list(x).index(e[k+1])])/m   # the evaluations at the very ends of the stages
            assert at_ends[i, k] == pytest.approx(lost, abs=1e-12)
            if k % K != i: kept[k//K].append(lost)
        value = lambda k: y[list(x).index(e[k])]
        for k in range(L):
            if k % K < i: later[k//K].append((value(k+1)-value(k))/m)
        for j in range(i):
            before, after = region(x, y, 0, e[j])[-1] if j else y[0], region(x, y, e[j], e[j+1])[-1]
            assert transfer(c, strict=True)[i, j] == pytest.approx((after-before)/m, abs=1e-12)
            assert transfer(c, strict=True, isolated=False)[i, j] == pytest.approx((after-y[0])/m, abs=1e-12)   # USE_ISOLATED_ZSFT off
            since.append((value(j+1)-y[0])/m)
    assert per_cycle(c) == pytest.approx([np.mean(of) for of in kept.values()], abs=1e-12)
    assert transfer_per_cycle(c) == pytest.approx([np.mean(of) for of in later.values()], abs=1e-12)
    assert zero_shot(c) == pytest.approx(np.mean(since), abs=1e-12)
    ends_of_cycles = [np.mean([curve(line, task)[1][list(curve(line, task)[0]).index(e[n])] for task in tasks]) for n in range(K, L+1, K)]
    assert performance(c) == pytest.approx(ends_of_cycles, abs=1e-12)
    assert final_performance(c) == pytest.approx(np.mean([curve(line, task)[1][-1] for task in tasks]), abs=1e-12)


def rolling(y, window):
    "CORA's filter 'ma': the mean of the last values, in a deque."
    last, means = deque(maxlen=window), []
    for value in y:
        last.append(value)
        means.append(np.mean(last))
    return means


@pytest.mark.parametrize("window", [5, 20])
@pytest.mark.parametrize("name", NAMES[::5])
def test_smoothed_curves_against_coras_loops(name, window):
    "As CORA's figures and tables: smoothed first, scaled by the largest smoothed return, read inside the stages."
    line = LINES[name]
    tasks, e, c = list(dict.fromkeys(line["stream"]["stages"])), ends(line), smooth(curves_from(unpack(name, line)), window)
    for i, task in enumerate(tasks):
        x, y = curve(line, task)
        y = rolling(y, window)
        m = max(abs(value) for value in y)
        for k in range(i+1, len(e)-1):
            assert forgetting(c, strict=True)[i, k] == pytest.approx((region(x, y, None, e[k])[-1]-region(x, y, e[k], e[k+1])[-1])/m, abs=1e-12)
        for j in range(i):
            before = region(x, y, 0, e[j])[-1] if j else y[0]
            assert transfer(c, strict=True)[i, j] == pytest.approx((region(x, y, e[j], e[j+1])[-1]-before)/m, abs=1e-12)


def test_the_comparison_page_shows_what_agents_forget(tmp_path):
    from test_compare import papermill
    from test_crl import small
    from clvla.crl.learner import learn_tasks
    for seed in (0, 1):
        for algo in ("ppo", "random"):
            kw = dict(algo_kw=dict(n_envs=2, horizon=20)) if algo == "random" else {}
            learn_tasks(small(tmp_path/f"runs/{algo}-s{seed}", data=tmp_path, algo=algo, seed=seed, cycles=1, **kw), say=len)
    report = tmp_path/"r.html"
    out = papermill(tmp_path, "-p", "runs", f"{tmp_path}/runs/*-s?", "-p", "baseline", "random", "-p", "report", str(report))
    assert out.returncode == 0, out.stderr[-2000:]
    text = report.read_text()
    assert "What agents forget" in text and "isolated forgetting, cycle 0" in text and "isolated forward transfer, cycle 0" in text and "Curves: ppo" in text
