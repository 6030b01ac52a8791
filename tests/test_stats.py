"Intervals against known values and by simulation; paired tests against exact binomials."
from math import comb
import numpy as np, pytest
from clvla.core.seeds import np_rng
from clvla.eval.metrics import SuccessMatrix, asr, bwt
from clvla.eval.stats import (Outcomes, centred, final, mcnemar, metric_intervals, outcomes, paired, resample,
    seed_intervals, t_interval, t_quantile, wilson)

KNOWN = [(20, 0, 0, .161), (20, 10, .299, .701), (20, 18, .699, .972), (20, 20, .839, 1), (50, 38, .626, .857), (50, 45, .786, .957),
         (50, 50, .929, 1), (500, 385, .731, .805), (1500, 1155, .748, .791)]

@pytest.mark.parametrize("n,k,low,high", KNOWN)
def test_wilson_known_values(n, k, low, high): assert [float(x) for x in wilson(k, n)] == pytest.approx([low, high], abs=6e-4)

def test_wilson_of_nothing_is_nan(): assert np.isnan(wilson(0, 0)).all()

def test_t_quantiles():
    for df,q in ((1, 12.7062), (2, 4.30265), (4, 2.77645), (9, 2.26216), (30, 2.04227)): assert t_quantile(df) == pytest.approx(q, rel=1e-4)
    assert t_quantile(3, .9) == pytest.approx(2.35336, rel=1e-4)
    assert t_interval([1., 2., 3.])[:3] == pytest.approx((2, 2-4.30265/3**.5, 2+4.30265/3**.5), rel=1e-4)
    assert np.isnan(t_interval([.5]).low)

@pytest.mark.parametrize("b,c", [(0,0), (0,5), (1,9), (7,7), (10,25), (3,2)])
def test_mcnemar_is_the_exact_binomial(b, c):
    n = b+c; prob = [comb(n, i)/2**n for i in range(n+1)]
    assert mcnemar(b, c) == mcnemar(c, b) == pytest.approx(min(1, sum(p for i,p in enumerate(prob) if p <= prob[b]+1e-12)))

def simulate(rng, then, end, K=4, N=20):
    u = rng.random((K, N)); S = np.full((K+1, K, N), np.nan)
    for t,j in zip(*np.tril_indices(K)): S[t,j] = np.where(rng.random(N) < .5, u[j], rng.random(N)) < (then if t == j else end)
    ids = tuple("abcd"[:K]); n = (~np.isnan(S)).sum(-1); k = np.nansum(S, -1)
    return Outcomes(SuccessMatrix(ids, ids, k[:-1], n[:-1], k[-1], n[-1]), S, {})

@pytest.mark.parametrize("then,end", [(.9, .5), (.95, .9), (.99, .98), (.95, .05), (.5, .5)])
def test_bootstrap_covers_at_nominal_rate(then, end):
    hits = np.zeros(2)
    for i in range(300):
        rng = np_rng(i, "coverage", then, end); out = simulate(rng, then, end); stack = resample(out, 200, i)
        for c,(f,true) in enumerate(((asr, (then+3*end)/4), (bwt, end-then))):
            low,high = np.quantile(centred(f(stack).value, f(out.matrix).value, 20), [.025, .975]); hits[c] += low-1e-9 <= true <= high+1e-9
    assert (hits/300 > .9).all(), hits/300        # .95 nominal, 3 standard errors of 300 runs below it, and 1 point

def test_seed_interval_covers():
    hits = 0
    for i in range(150):
        rng = np_rng(i, "seeds"); ps = np.clip(rng.normal(.7, .1, 6), 0, 1)
        runs = [[dict(stage=0, after="a", task="a", trial=n, success=bool(rng.random() < p)) for n in range(20)] for p in ps]
        r = seed_intervals(runs, "a", "a", 200, i)["ASR"]; hits += r.low <= .7 <= r.high
    assert hits/150 > .85     # six seeds: the percentile bootstrap is a little short, and says so on its page

def test_a_draw_of_one_cell_is_jeffreys():
    S = np.full((2, 1, 20), np.nan); S[0,0] = [1]*18+[0]*2
    one = Outcomes(SuccessMatrix(("a",), ("a",), np.array([[18.]]), np.array([[20.]]), np.zeros(1), np.zeros(1)), S, {})
    R = resample(one, 20000).R.ravel(); a,b = 18.5,2.5
    assert R.mean() == pytest.approx(a/(a+b), abs=2e-3) and R.var() == pytest.approx(a*b/((a+b)**2*(a+b+1)), rel=.05)

def lesson_run(seed, p=.8, trials=range(10), stages="ab"):
    rng = np_rng(seed, "run")
    return [dict(stage=t, after=s, task=j, trial=i, success=bool(rng.random() < p), step=None)
            for t,s in enumerate(stages) for j in stages[:t+1] for i in trials]

def test_joint_resampling_keeps_the_checkpoints_together():
    recs = lesson_run(0); same = [{**r, "success": r["trial"] < 6} for r in recs]     # every checkpoint solves the same states
    wide = metric_intervals(recs, "ab", "ab")["BWT"]; tight = metric_intervals(same, "ab", "ab")["BWT"]
    assert tight.value == 0 and tight.high-tight.low < wide.high-wide.low

def test_intervals_are_reproducible_and_report_missing():
    recs = lesson_run(1); a,b = metric_intervals(recs, "ab", "ab", 300, 3),metric_intervals(recs[::-1], "ab", "ab", 300, 3)
    assert a["ASR"] == b["ASR"] and a["FWT"].missing == 2 and np.isnan(a["FWT"].low)
    assert a["ASR"].low <= a["ASR"].value <= a["ASR"].high

def test_unanimous_trials_are_not_certainty():
    r = metric_intervals(lesson_run(0, 2.), "ab", "ab")["ASR"]; assert r.value == r.high == 1 and r.low < .97

def test_learning_curves_get_intervals_too():
    recs = lesson_run(0)+[dict(stage=t, after=s, task=s, trial=i, success=i < 2, step=k) for t,s in enumerate("ab") for k in (0, 50) for i in range(10)]
    out = outcomes(recs, "ab", "ab"); assert out.curves["a"].shape == (3, 10)
    r = metric_intervals(recs, "ab", "ab", 300)["LIBERO AUC"]; assert r.missing == 0 and r.low < r.value < r.high

def test_paired_matches_by_name():
    a = lesson_run(0); b = [{**r, "success": r["success"] and r["trial"] != 3} for r in a][::-1]
    p = paired(a, b); lost = sum(r["success"] for r in a if r["trial"] == 3)
    assert (p.only_a, p.only_b, p.unmatched) == (lost, 0, 0) and p.diff == pytest.approx(lost/30) and p.p == mcnemar(lost, 0)
    q = paired(a, b[:-4]); assert q.unmatched == 4
    assert paired(b, a).diff == pytest.approx(-p.diff)

def test_paired_of_equal_runs_has_width():
    p = paired(lesson_run(0), lesson_run(0)); assert p.diff == 0 and p.p == 1 and p.low < 0 < p.high

def test_final_pairs_joint_with_a_stream():
    joint = [{**r, "stage": 0, "after": "joint"} for r in lesson_run(2) if r["stage"] == 1]
    assert paired(final(joint), final(lesson_run(2))).diff == 0
    with pytest.raises(ValueError, match="share no"): paired(final(joint), lesson_run(2))

def test_paired_covers():
    hits = 0
    for i in range(300):
        rng = np_rng(i, "paired"); u = rng.random(60); pick = lambda p: np.where(rng.random(60) < .6, u, rng.random(60)) < p
        eps = lambda s: [dict(stage=0, task="a", trial=n, success=bool(x)) for n,x in enumerate(s)]
        r = paired(eps(pick(.9)), eps(pick(.8)), 300, i); hits += r.low <= .1 <= r.high
    assert hits/300 > .9
