"Metrics against hand-computed matrices, published definitions written out as loops, and missing cells."
import json
import numpy as np, pytest
from clvla.eval.metrics import (JOINT, Score, aaa, asr, auc, bwt, forgetting, from_json, from_rates, from_records,
    fwt, ids_of, la, libero_fwt, measure, measure_records, metrics, nbt, plain, score, to_json, upto)

nan = float("nan")
R3 = [[.9, .2, .1], [.6, .8, .3], [.4, .7, .8]]   # columns in training order

def ep(stage, after, task, trial, success, step=None):
    return dict(stage=stage, after=after, task=task, trial=trial, success=success, step=step)

def test_hand_computed():
    m = from_rates(R3, "abc", "abc", before=[.0, .1, .05])
    want = dict(ASR=(.4+.7+.8)/3, AAA=(.9+.7+1.9/3)/3, LA=2.5/3, BWT=(-.5-.1)/2, FWT=((.2-.1)+(.3-.05))/2, Forgetting=(.5+.1)/2)
    got = measure(m)
    for k,v in want.items():
        assert got[k].value == pytest.approx(v), k
        assert got[k].missing == 0

@pytest.mark.parametrize("perm", [(0,1,2), (2,0,1), (1,2,0), (2,1,0)])
def test_permuted_columns_change_nothing(perm):
    ids = "abc"; R = np.array(R3)[:, perm]; b = np.array([.0, .1, .05])[list(perm)]
    a,p = measure(from_rates(R3, ids, ids, before=[.0, .1, .05])),measure(from_rates(R, ids, [ids[i] for i in perm], before=b))
    for k in a: assert a[k].value == pytest.approx(p[k].value, nan_ok=True), k

def test_negative_forgetting_and_avalanche_golden():
    assert forgetting(from_rates([[.5, nan], [.8, .9]], "ab", "ab")).value == pytest.approx(-.3)  # the last stage helped
    assert forgetting(from_rates([[.9, nan], [.4, .9]], "ab", "ab")).value == pytest.approx(.5)
    assert bwt(from_rates([[.9, nan], [.4, .9]], "ab", "ab")).value == pytest.approx(-.5)

def test_chaudhry_peak_is_before_the_last_row_and_not_before_training():
    m = from_rates([[.2, .99, nan], [.9, .5, nan], [.3, .6, .8]], "abc", "abc")
    assert forgetting(m).value == pytest.approx(((.9-.3)+(.5-.6))/2)

def libero_literal(R, c):
    "FWT, NBT, AUC as the paper defines them, with 1-based k written as loops."
    K = len(R); fwt = nbt = auc = 0.
    for k in range(K):
        fwt_k = sum(c[k])/len(c[k]); nbt_k = auc_k = 0.
        for tau in range(k+1, K): nbt_k += (R[k][k]-R[tau][k])/(K-k-1); auc_k += R[tau][k]
        fwt += fwt_k/K; nbt += nbt_k/K; auc += (fwt_k+auc_k)/(K-k)/K
    return fwt, nbt, auc

@pytest.mark.parametrize("K", [1, 2, 5, 10])
def test_libero_against_its_definition(K):
    rng = np.random.default_rng(K); R,c = rng.random((K, K)),rng.random((K, 11)); ids = [f"t{i}" for i in range(K)]
    m = from_rates(R, ids, ids, curves=dict(zip(ids, c)))
    assert [f(m).value for f in (libero_fwt, nbt, auc)] == pytest.approx(libero_literal(R, c))

def test_gem_definitions_against_loops():
    rng = np.random.default_rng(3); K = 7; R,b = rng.random((K, K)),rng.random(K); ids = list("abcdefg"); m = from_rates(R, ids, ids, b)
    assert bwt(m).value == pytest.approx(sum(R[K-1,i]-R[i,i] for i in range(K-1))/(K-1))
    assert fwt(m).value == pytest.approx(sum(R[i-1,i]-b[i] for i in range(1, K))/(K-1))
    assert forgetting(m).value == pytest.approx(np.mean([max(R[l,j] for l in range(j, K-1))-R[K-1,j] for j in range(K-1)]))
    assert aaa(m).value == pytest.approx(np.mean([R[t,:t+1].mean() for t in range(K)]))
    assert la(m).value == pytest.approx(np.diag(R).mean())

def test_missing_cells_are_counted_never_averaged():
    R = np.array(R3); R[2,1] = nan; m = from_rates(R, "abc", "abc")
    got = measure(m)
    for k,n in dict(ASR=1, BWT=1, Forgetting=1, AAA=1, FWT=2, LA=0).items(): assert (k, got[k].missing) == (k, n)
    assert np.isnan(got["ASR"].value) and got["LA"].value == pytest.approx(2.5/3)
    assert np.isnan(got["LIBERO AUC"].value) and got["LIBERO FWT"].missing == 3

def test_a_whole_row_missing():
    R = np.array(R3); R[1] = nan; got = measure(from_rates(R, "abc", "abc"))
    assert got["ASR"].value == pytest.approx(1.9/3) and np.isnan(got["BWT"].value) and got["BWT"].missing == 1

def test_last_only():
    got = measure(from_rates([[nan]*3, [nan]*3, R3[2]], "abc", "abc"))
    assert got["ASR"].missing == 0 and got["AAA"].missing == 3 and got["BWT"].missing == 2

def test_one_task():
    got = measure(from_rates([[.5]], "a", "a"))
    assert got["ASR"].value == got["LA"].value == got["AAA"].value == .5
    for k in ("BWT", "FWT", "Forgetting"): assert np.isnan(got[k].value) and got[k].missing == 0
    assert got["LIBERO NBT"].value == 0      # as LIBERO counts the task trained last

def test_joint_run_is_one_row():
    recs = [ep(0, JOINT, j, i, i < 3) for j in "ab" for i in range(4)]
    m = from_records(recs, "ab", "ab"); got = measure(m)
    assert m.stages == (JOINT,) and m.R.tolist() == [[.75, .75]]
    assert got["ASR"].value == got["LA"].value == got["AAA"].value == .75 and np.isnan(got["BWT"].value) and got["BWT"].missing == 0

def test_cycles():
    R = [[.8, nan], [.2, .9], [.9, .1], [.5, .7]]; m = from_rates(R, "abab", "ab"); got = measure(m)
    assert (m.first.tolist(), m.last.tolist()) == ([0,1], [2,3])
    assert got["BWT"].value == pytest.approx(.5-.9)               # since task a was trained for the last time
    assert got["Forgetting"].value == pytest.approx(.9-.5)
    assert got["LA"].value == pytest.approx((.8+.9+.9+.7)/4)
    assert got["AAA"].value == pytest.approx((.8+.55+.5+.6)/4)

def test_records_counts_baseline_looks_and_order():
    recs = [ep(-1, None, j, i, False) for j in "ab" for i in range(2)]
    recs += [ep(0, "b", "b", i, i < n, s) for s,n in ((0, 0), (10, 1), (None, 2)) for i in range(2)]
    recs += [ep(1, "a", j, i, i < 1) for j in "ab" for i in range(2)]
    m = from_records(recs, "ba", "ab")
    assert m.b.tolist() == [0, 0] and m.n.tolist() == [[0,2], [2,2]] and m.curves["b"].tolist() == [0, .5, 1] and "a" not in m.curves
    m2 = from_records(recs[::-1], "ba", "ab"); assert np.array_equal(m.k, m2.k) and m2.curves["b"].tolist() == [0, .5, 1]

@pytest.mark.parametrize("bad, text", [(ep(0, "a", "z", 0, True), "does not fit"), (ep(5, "a", "a", 0, True), "does not fit"),
                                       (ep(1, "a", "a", 0, True), "does not fit")])
def test_records_that_do_not_fit(bad, text):
    with pytest.raises(ValueError, match=text): from_records([bad], "ab", "ab")

def test_columns_that_no_stage_trained():
    "Probes, and tasks of another stream: a metric of their own, and the others are as without them."
    R = [[.9, .2, .1, .3], [.6, .8, .3, .5], [.4, .7, .8, .7]]; whole,more = (from_rates(np.array(R)[:, :k], "abc", "abcx"[:k], before=[.0, .1, .05, .2][:k]) for k in (3, 4))
    curve = dict(curves=dict(a=np.array([.1, .2]), b=np.array([.3, .4]), c=np.array([.5, .6])))
    whole,more = (type(m)(m.stages, m.task_ids, m.k, m.n, m.k0, m.n0, **curve) for m in (whole, more))
    assert measure(more) == measure(whole) | {"Untrained": Score(pytest.approx(.7), 0, 1)} and "Untrained" not in measure(whole)
    assert from_json(to_json(more)).task_ids == tuple("abcx") and upto(more, 1).task_ids == ("a", "b")

def test_columns_of_another_stream_and_of_a_part():
    recs = [ep(t, s, j, i, i < t+1) for t,s in enumerate("ab") for j in "xy" for i in range(4)]; other = measure(from_records(recs, "ab", "xy"))
    assert other["Untrained"] == Score(.5, 0, 2) and all(np.isnan(s.value) and s.missing == 0 for k,s in other.items() if k != "Untrained")
    part = measure(from_rates([[nan], [.8], [.6]], "abc", "b"))
    assert part["ASR"].value == pytest.approx(.6) and part["LA"].value == pytest.approx(.8) and part["BWT"].value == pytest.approx(-.2) and part["AAA"].value == pytest.approx(.7)
    with pytest.raises(ValueError, match="give each task id once"): from_rates([[1., 1.]], "a", "aa")

def test_a_registered_metric_stands_in_all_tables():
    from clvla.eval.compare import Run, summary, wide
    from clvla.eval.plots import metrics_table
    from clvla.eval.stats import metric_intervals, seed_intervals
    recs = [ep(t, s, j, i, i < 2+t) | {"steps": 10*(i+1)} for t,s in enumerate("ab") for j in "ab"[:t+1] for i in range(4)]
    metrics["Steps"] = lambda records, stages, ids: np.mean([r["steps"] for r in records if r["success"] and r["stage"] == len(stages)-1]); plain.add("Steps")
    try:
        assert measure_records(recs, "ab", "ab")["Steps"] == Score(20., 0, 0) and measure_records(recs, "ab", "ab")["ASR"] == metrics["ASR"](recs, "ab", "ab")
        one = metric_intervals(recs, "ab", "ab", 20)["Steps"]; assert one.value == 20 and np.isnan(one.low)
        slow = [r | {"steps": r["steps"]+2} for r in recs]; two = seed_intervals([recs, slow], "ab", "ab", 20)["Steps"]; assert two.value == 21 and two.low < 20 < 22 < two.high
        table = metrics_table(recs, "ab", "ab", 20).set_index("metric"); assert table.percent["Steps"] == 20 and table.percent["ASR"] == pytest.approx(75)
        runs = [Run(None, dict(seed=s), ("a", "b"), ("a", "b"), r, {}, {}) for s,r in enumerate((recs, slow))]
        text = wide(summary(dict(er=runs), n_boot=20)).loc["er"]; assert text["Steps"].startswith("21.0 [") and text["ASR"].startswith("75.0 [")
    finally: del metrics["Steps"]; plain.clear()

def test_json_round_trip():
    m = from_rates(R3, "cab", "abc", before=[.0, nan, .5], n=20, curves=dict(a=np.array([.1, .2])))
    d = json.loads(json.dumps(to_json(m))); back = from_json(d)
    assert back.stages == m.stages and back.task_ids == m.task_ids and d["rows"][0]["after"] == "c"
    for x,y in ((m.k, back.k), (m.n, back.n), (m.k0, back.k0), (m.n0, back.n0), (m.curves["a"], back.curves["a"])): assert np.array_equal(x, y)

def test_upto_and_stacks():
    m = from_rates(R3, "abc", "abc"); assert asr(upto(m, 1)).value == pytest.approx(.7)
    stack = from_rates(R3, "abc", "abc"); k = np.stack([stack.k, stack.k*.5]); n = np.stack([stack.n]*2); z = np.zeros((2, 3))
    two = type(m)(m.stages, m.task_ids, k, n, z, z)
    for name,s in measure(two).items():
        one = measure(m)[name].value
        assert np.shape(s.value) == (2,) and s.value[0] == pytest.approx(one, nan_ok=True) and s.value[1] == pytest.approx(one/2, nan_ok=True)

def test_recorded_twice():
    r = ep(0, "a", "a", 0, True)
    with pytest.raises(ValueError, match="recorded twice"): from_records([r, r], "a", "a")
    assert score(np.array([.5]), np.array([.5])) == Score(.5, 0, 1)
    assert score(np.array([.5, nan]), np.array([.5, nan])).missing == 1


def test_a_stored_matrix_knows_its_probes():
    "A joint run's stage names no task, so its columns have to; a matrix without probes is stored as before."
    ids = ids_of(dict(tasks=[dict(id="a"), dict(id="b"), dict(id="p", trained=False)]))
    m = from_rates([[.9, .8, .1]], [JOINT], ids, n=10)
    back = from_json(json.loads(json.dumps(to_json(m))))
    assert [measure(back)[k].value for k in ("ASR", "Untrained")] == pytest.approx([.85, .1])
    assert "probes" not in to_json(from_rates([[.9, .8]], [JOINT], ["a", "b"]))
