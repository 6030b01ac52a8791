"Progress and compress: the divergence by hand, which network learns when, what is evaluated, and the same bits after a crash in either phase."
import math

import pytest
import torch

from test_crl import Crash, small

KW = dict(n_envs=2, horizon=20, hidden=8, channels=2, epochs=2, fisher_steps=50)


def run(path, **kw):
    from clvla.crl.learner import learn_tasks
    base = dict(algo="progress_compress", algo_kw=KW, cycles=1, save_every=1)
    return learn_tasks(small(path, **base | kw), say=len)


@pytest.fixture(scope="module")
def whole(tmp_path_factory): return run(tmp_path_factory.mktemp("progress")/"run")


def test_divergence_by_brute_force():
    "Step by step and action by action, with two rows of fewer actions."
    from clvla.crl.agent import log_probs
    from clvla.crl.progress_compress import compress_loss
    g, n = torch.Generator().manual_seed(0), torch.tensor([4, 2, 3, 4, 4, 2])
    p, q = (log_probs(torch.randn(6, 4, generator=g), n) for _ in "pq")
    plain = sum(math.exp(p[k, a])*(float(p[k, a])-float(q[k, a])) for k in range(6) for a in range(n[k]))/6
    got = compress_loss(dict(logps=p.view(3, 2, 4), reward=torch.zeros(3, 2)), q.view(3, 2, 4))
    assert float(got) == pytest.approx(plain, abs=1e-6)
    q.requires_grad_(True)   # the gradient of sum p log(p/q) in the log-probabilities of q is -p
    compress_loss(dict(logps=p.view(3, 2, 4), reward=torch.zeros(3, 2)), q.log_softmax(1).view(3, 2, 4)).backward()
    assert torch.allclose(q.grad, (q.detach().exp()-p.exp())/6, atol=1e-6)


def test_the_phases_of_a_run_and_its_springs(whole):
    "Two rollouts of progress and two of compression in each stage; springs pull from the second stage on."
    from clvla.core.state import load_state
    logs = whole.logs()
    assert [r["train/compress"] for r in logs] == [0, 0, 1, 1]*2
    assert [("train/kl" in r, "train/actor_loss" in r) for r in logs] == [(False, True)]*2 + [(True, False)]*2 + [(False, True)]*2 + [(True, False)]*2
    assert [r["train/penalty"] > 0 for r in logs if "train/penalty" in r] == [False, False, True, True]
    last = sorted(p for p in (whole.path/"checkpoints").iterdir() if p.is_dir())[-1]
    ewc = load_state(last/"algo.safetensors")["ewc"]
    assert ewc["n_tasks"] == 2 and ewc["seen"] == {}


def test_a_progress_phase_changes_no_evaluation(whole):
    "The knowledge base is what is evaluated: after two rollouts of the second task it answers as at the first one's end."
    at = lambda stage, step: [(r["task"], r["trial"], r["reward"], r["steps"]) for r in whole.episodes() if (r["stage"], r["step"]) == (stage, step)]
    assert len(at(0, None)) == 4 and at(1, 2) == at(0, None) and at(0, 2) == at(-1, None)


@pytest.mark.parametrize("n", [6, 8], ids=["progress", "compress"])
def test_a_run_that_lost_power_ends_with_the_same_bits(tmp_path, whole, n):
    "In the second stage, one rollout into a phase."
    from clvla.crl.progress_compress import ProgressCompress
    from clvla.run.resume import fingerprint
    count, real = [0], ProgressCompress.learn

    def learn(self, rollout):
        count[0] += 1
        if count[0] == n: raise Crash
        return real(self, rollout)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(ProgressCompress, "learn", learn)
        with pytest.raises(Crash): run(tmp_path/"run")
    assert fingerprint(run(tmp_path/"run").path) == fingerprint(whole.path)


def test_frozen_weights_keep_every_bit():
    "What a column hears is a copy of the knowledge base as the task began, and stays it; the column stands still in compression."
    from clvla.cl.base import flat
    from clvla.core.batch import torch_rng
    from clvla.crl.all import make_agent
    from clvla.crl.experiment import Spaces, Stage, make_experiment
    from clvla.crl.runner import Lanes
    task = make_experiment(dict(base="dot_2", env=dict(discrete=True))).stream["left"]
    agent, lanes, draws = make_agent("progress_compress", **KW), Lanes(task.env, 2, 8), torch_rng(0, "draws")
    agent.build(None, Spaces(8, 2, dict(left=5)))
    of = lambda *nets: [flat(net.parameters()).detach().clone() for net in nets]
    for t in (0, 1):
        agent.on_task_start(Stage(t, 0, f"task {t}", 160))
        heard, = of(agent.base.net)
        for k in range(4):
            column, base = of(agent.net, agent.base.net)
            agent.learn(lanes.play(agent, 20, draws))
            now = of(agent.net, agent.base.net, agent.net.base)
            assert (now[0].equal(column), now[1].equal(base), now[2].equal(heard)) == (k > 1, k < 2, True)
        agent.on_task_end(Stage(t, 0, f"task {t}", 160))
    assert not any(p.requires_grad for p in agent.net.base.parameters())


def test_methods_from_outside_are_refused(tmp_path):
    with pytest.raises(ValueError, match="choose ppo, impala or clear"): run(tmp_path/"run", cl="ewc")
    assert not (tmp_path/"run").exists()


@pytest.mark.parametrize("kw, says", [
    (dict(progress=0.), "progress must be a number above 0 and below 1, found 0.0"), (dict(progress=1), "progress must be a number above 0 and below 1"),
    (dict(progress=.1), "are for progress and 4 to compress"), (dict(progress=.95), "4 are for progress and 0 to compress"), (dict(horizon=80), "which is 1 rollouts of 2 x 80"),
    (dict(lateral=-.1), "lateral must be a number at least 0"), (dict(ewc_lam=-1.), "ewc_lam must be a number at least 0"), (dict(ewc_decay=2.), r"ewc_decay must be a number in \[0,1\]"),
    (dict(fisher_steps=0), "fisher_steps must be"), (dict(f_max=0.), "f_max must be"), (dict(lag=2), "lag"), (dict(gamma=2.), "gamma must be")])
def test_bad_settings_are_refused_before_anything_is_made(tmp_path, kw, says):
    with pytest.raises(ValueError, match=says): run(tmp_path/"run", algo_kw=KW | kw)
    assert not (tmp_path/"run").exists()
