"Continual reinforcement learning: curves and their metrics, experiments, agents, and runs that go on exactly."
import numpy as np
import pytest

from clvla.crl.curves import Curves, boundary_values, final_performance, forgetting, from_episodes, measures, per_cycle, scales, smooth, transfer


def curves(K=3, cycles=2, runs=4, seed=0, lengths=None):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(30, 90, K*cycles) if lengths is None else lengths
    ends = np.cumsum(lengths)
    steps = np.unique(np.concatenate([[0], ends, rng.choice(np.arange(1, ends[-1]), 40, replace=False)]))
    return Curves(tuple("abcd"[:K]), cycles, steps, rng.normal(size=(runs, K, len(steps))), ends)


@pytest.mark.parametrize("seed", range(5))
def test_stages_of_any_length_against_plain_loops(seed):
    c = curves(seed=seed)
    F, Z, cycle = forgetting(c), transfer(c), per_cycle(c)
    for s, i in np.ndindex(4, 3):
        m = max(abs(x) for run in c.returns for x in run[i])
        at = lambda k: [y for x, y in zip(c.steps, c.returns[s, i]) if x <= (c.ends[k] if k >= 0 else c.steps[0])][-1]
        for k in range(c.L):
            if k > i: assert F[s, i, k] == pytest.approx((at(k-1)-at(k))/m, abs=1e-12)
            else: assert np.isnan(F[s, i, k])
        for j in range(i): assert Z[s, i, j] == pytest.approx((at(j)-at(j-1))/m, abs=1e-12)
    for s, n in np.ndindex(4, 2):
        values = [F[s, i, k] for i in range(3) for k in range(3*n, 3*n+3) if k > i and k % 3 != i]
        assert cycle[s, n] == pytest.approx(np.mean(values), abs=1e-12)


def test_a_task_that_never_earned_has_no_scale():
    c = Curves(("a", "b"), 1, [0, 1, 2], [[0, 1, .5], [0, 0, 0]], [1, 2])
    assert np.isnan(scales(c)[1]) and np.isnan(transfer(c)[1, 0]) and forgetting(c)[0, 1] == .5 and final_performance(c) == .25


@pytest.mark.parametrize("kw, says", [
    (dict(steps=[0, 2, 2]), "steps must increase"), (dict(ends=[2, 1]), "ends must increase"), (dict(ends=[2]), "2 tasks x 1 cycles are 2 stages"),
    (dict(returns=np.zeros((2, 2))), "each of the 3 evaluations")])
def test_impossible_curves_are_refused(kw, says):
    with pytest.raises(ValueError, match=says): Curves(**(dict(task_ids=("a", "b"), cycles=1, steps=[0, 1, 2], returns=np.zeros((2, 3)), ends=[1, 2]) | kw))


def test_a_stage_without_an_evaluation_is_refused():
    with pytest.raises(ValueError, match="stage 1 has no evaluation"): boundary_values(Curves(("a", "b"), 1, [0, 1, 9], np.ones((2, 3)), [2, 4]))
    with pytest.raises(ValueError, match="window"): smooth(curves(), 0)


def test_what_was_not_measured_stays_unknown():
    records = [{"task": t, "frames": f, "reward": 1.} for t, f in (("a", 0), ("b", 0), ("a", 1), ("b", 2), ("a", 2))]
    c = from_episodes(records, ["a", "b"], 1, [1, 2])
    assert np.isnan(c.returns[1, 1]) and np.isnan(measures(c)["zero-shot transfer"]) and measures(c)["isolated forgetting, cycle 0"] == 0
