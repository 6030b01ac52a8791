"Environments that are set back to a snapshot, draws that are played on, and the method that chooses among draws."
import numpy as np
import pytest
import torch

from clvla.core.names import IMAGE, STATE
from clvla.envs.all import make_env, make_stream
from clvla.policies.all import load_policy
from clvla.rl.all import methods
from clvla.rl.best_of_n import BestOfNMethod
from clvla.rl.chunk_critic import ChunkCritic, CriticLearner, chunk_rows
from clvla.rl.config import PracticeConfig, base_config
from clvla.rl.learner import practise
from clvla.rl.oracle import ceiling, share, value_of_choice
from clvla.run.checkpoint import checkpoints
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint
from clvla.train.checkpoint_eval import eval_cl
from clvla.train.eval_config import EvalConfig
from test_practice import Crash, SMALL, config, crash_after

FEW = dict(updates=3, N=4, sample=8, token_updates=4)


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


def played(env, snapshot, actions):
    "Pictures, rewards and everything that is seen after a snapshot; every third action is the scripted expert's."
    env.restore(snapshot)
    first, rows = env.render().copy(), []
    for k, u in enumerate(actions):
        rows.append((*env.step(u if k % 3 else env.expert()), *env.full))
    return first, np.array(rows, float), env.render().copy()


TASKS = [t.id for t in make_stream("mt50").tasks][::3]   # all fifty agree; a third of them is tried here


@pytest.mark.parametrize("task_id", TASKS)
def test_metaworld_is_set_back_to_the_bit(task_id):
    "In the same environment, in another one that began the same trial, and after its memory was used again."
    spec = next(t.env for t in make_stream("mt50").tasks if t.id == task_id)
    env, other = make_env(spec), make_env(spec)
    for e in (env, other): e.reset(3)
    for u in np.random.default_rng(1).uniform(-1, 1, (12, 4)): env.step(u)
    picture, snapshot, actions = env.render().copy(), env.save(), np.random.default_rng(0).uniform(-1, 1, (15, 4))
    runs = [played(e, snapshot, actions) for e in (env, env, other)]
    assert np.array_equal(runs[0][0], picture)
    assert all(np.array_equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))
    env.restore(snapshot)
    env.step(actions[0])
    again = env.save()
    used = env.save(reuse=env.save())
    assert all(np.array_equal(a, b) for a, b in zip(played(env, again, actions), played(other, used, actions)))
    env.reset(4)
    with pytest.raises(ValueError, match="call reset"): env.restore(snapshot)
    for e in (env, other): e.close()


@pytest.mark.parametrize("T, success, ended", [(T, s, s or e) for T in range(1, 14) for s in (True, False) for e in (True, False)])
def test_rows_of_an_episode_equal_brute_force(T, success, ended):
    "Return, reward, bootstrap factor and next chunk, for success at every position; the last chunk of a time-out has no successor."
    C, g = 4, .9
    plans = torch.arange(-(-T//C)).float()[:, None, None].expand(-1, C, 2)
    found = chunk_rows(plans, T, success, ended, g)
    starts = list(range(0, T, C))
    expected = starts if ended else starts[:-1]
    assert found["first"].tolist() == expected
    for k, first in enumerate(expected):
        rewards = [float(success and t == T-1) for t in range(first, T)]
        end = min(first+C, T)
        assert found["ret"][k] == pytest.approx(sum(g**i*r for i, r in enumerate(rewards)), abs=1e-6)
        assert found["reward"][k] == pytest.approx(sum(g**i*r for i, r in enumerate(rewards[:C])), abs=1e-6)
        assert found["mask"][k] == pytest.approx(0 if ended and end == T else g**(end-first), abs=1e-6)
        if found["mask"][k]: assert found["next_action"][k, 0, 0] == starts.index(end)
        assert found["action"][k, 0, 0] == k


def test_choices_are_valued_by_repeats_that_had_no_part_in_them():
    "Equation 1 against a loop, and no gain where draws do not differ."
    rng = np.random.default_rng(0)
    G = (rng.random((30, 5, 3)) < .5).astype(float)
    loop = [np.mean([g[np.argmax(np.delete(g, j, 1).sum(1)), j] for j in range(3)]) for g in G]
    assert np.allclose(ceiling(G)["oracle"], loop)
    G = (rng.random((3000, 16, 4)) < .4).astype(float)
    value = {k: v.mean() for k, v in ceiling(G).items()}
    assert abs(value["oracle"]-.4) < .02 and value["most"] > .7
    with pytest.raises(ValueError, match="a score for each draw"): value_of_choice(G, np.zeros((3000, 4)))


def test_a_share_is_drawn_over_starts():
    rng = np.random.default_rng(0)
    p = rng.random((40, 8))
    G = (rng.random((40, 8, 20)) < p[..., None]).astype(float)
    point, low, high = share(value_of_choice(G, p), G, np.arange(40)//2)
    assert .8 < low < point < high < 1.3
    assert share(value_of_choice(G, p), G, np.arange(40)//2) == (point, low, high)


def test_an_update_moves_towards_the_target():
    "The mean answer of many updates on one row is the target of equation 1 with the critic's own answer behind it."
    torch.manual_seed(0)
    critic = ChunkCritic(2, 2, 1, hidden=16)
    x, a = torch.randn(4, 2), torch.randn(4, 2, 1)
    row = dict(x=x, next_x=x, action=a, next_action=a, reward=torch.full((4,), .2), mask=torch.full((4,), .5), ret=torch.full((4,), .6))
    learner = CriticLearner(critic, lr=3e-3, mc=.5, tau=.2)
    for _ in range(250): learner.update(row)
    fixed = (.5*.2+.5*.6)/(1-.5*.5)   # q = .5*(.2+.5*q)+.5*.6
    assert critic.value(x, a).detach().numpy() == pytest.approx(fixed, abs=.02)


@pytest.mark.parametrize("kw, says", [
    (dict(head="l1"), "head 'l1' has one answer"), (dict(algo_kw=dict(N=1)), "N must be"), (dict(algo_kw=dict(reads="all")), "reads must be one of 'proprioception'"),
    (dict(lora_rank=2), "lora_rank"), (dict(algo_kw=dict(mc=2.)), "mc must be"), (dict(algo_kw=dict(shuffled="no")), "True or False"), (dict(model="lerobot-act-tiny"), "Take a model of tiny")])
def test_bad_settings_are_refused(data, tmp_path, kw, says):
    with pytest.raises(ValueError, match=says):
        practise(PracticeConfig(data_dir=str(data), run_dir=str(tmp_path/"run"), **(SMALL | dict(algo="best_of_n", algo_kw={}) | kw)), say=len)
    assert not (tmp_path/"run/practice").exists()


@pytest.mark.parametrize("reads, crash", [("token", 1), ("tokens", 5)])
def test_choosing_leaves_the_base_alone_and_goes_on_after_a_crash(data, tmp_path, reads, crash):
    kw = dict(algo="best_of_n", algo_kw=FEW | dict(reads=reads), save_every=1)
    run = practise(config(data, tmp_path/"run", **kw), say=len)
    point = checkpoints(run.path/"checkpoints", ends=True)[-1]
    base = load_policy(checkpoints(RunFolder(base_config(run.cfg).run_dir).path/"checkpoints", ends=True)[-1])
    policy = load_policy(point)
    assert policy.has_learnt and all(torch.equal(policy.vla.state_dict()[k], v) for k, v in base.state_dict().items())
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, crash, algo="best_of_n")
        with pytest.raises(Crash): practise(config(data, tmp_path/"again", **kw), say=len)
    assert fingerprint(practise(config(data, tmp_path/"again", **kw), say=len).path) == fingerprint(run.path)
    out = eval_cl(EvalConfig(run_dir=str(run.path), n_trials=2, n_workers=1), say=len)
    facts = lambda records: {(r["task"], r["trial"]): (r["success"], r["steps"]) for r in records}
    assert facts(out.episodes()) == facts(r for r in run.episodes() if r["stage"] == 0)


def test_the_replay_holds_the_chunks_that_were_played(data, tmp_path, monkeypatch):
    "Whole plans, whose first steps are the executed ones, in rounds with and without choice."
    gaps, real = [], BestOfNMethod.take

    def take(self, attempts):
        for a in attempts:
            e = a["episode"]
            action = self.ctx.processor.unnormalise(a["plans"].flatten(0, 1).float())[:e.n_steps]
            gaps.append((action-torch.from_numpy(e.action)).abs().max().item())
        real(self, attempts)
    monkeypatch.setattr(methods["best_of_n"], "take", take)
    practise(config(data, tmp_path/"run", algo="best_of_n", algo_kw=FEW), say=len)
    assert len(gaps) == 12 and max(gaps) < 1e-3


def test_the_control_deals_the_chunks_out():
    "The same chunks, each once, almost none beside its own observation; states, lengths and successes stay."
    method = BestOfNMethod(shuffled=True)
    method.replay = []
    plans = torch.arange(30.)[:, None, None].expand(30, 4, 2)
    attempts = [dict(x=i, episode=i, plans=p) for i, p in enumerate(plans.split([5, 20, 5]))]
    dealt = method.deal(attempts)
    assert [(a["x"], a["episode"], len(a["plans"])) for a in dealt] == [(i, i, n) for i, n in enumerate((5, 20, 5))]
    mixed = torch.cat([a["plans"] for a in dealt])
    assert sorted(mixed[:, 0, 0].tolist()) == list(range(30)) and (mixed == plans).flatten(1).all(1).float().mean() < .2
    assert BestOfNMethod().shuffled is False


def test_a_state_says_what_was_not_stored():
    "A dot's state too is exact, and kinds without snapshots say what to do."
    env = make_env({"kind": "dot", "name": "left"}, image_size=16)
    env.reset(2)
    env.step_chunk(np.ones((3, 2)))
    snapshot = env.save()
    first = env.step_chunk(np.full((4, 2), -.5))[0]
    env.restore(snapshot)
    again = env.step_chunk(np.full((4, 2), -.5))[0]
    assert all(np.array_equal(first[k], again[k]) for k in (IMAGE, STATE)) and env.t == 7


def test_constant_actions_are_no_difference():
    "Where a number of the actions never changes, the executed chunk is found by the others."
    from clvla.rl.best_of_n import planned
    draws = torch.randn(5, 4, 3)
    as_played = draws.clone()
    as_played[..., 2] = -1.
    assert planned(as_played, as_played[3, :2]) == 3
    with pytest.raises(ValueError, match="differs from all draws"): planned(draws, as_played[3, :2])


@pytest.mark.parametrize("C, says", [(3, "multiple of stride 2"), (16, "up to the policy's chunk"), (-2, "actor_chunk must be")])
def test_chunks_of_the_actor_that_are_refused(data, tmp_path, C, says):
    with pytest.raises(ValueError, match=says): practise(config(data, tmp_path/"run", algo="token_td3", algo_kw=dict(actor_chunk=C)), say=len)


def test_a_shorter_chunk_of_the_actor(data, tmp_path, monkeypatch):
    "Executed steps, references, returns and bootstrap factors of chunks of 4 steps beside a policy's of 8, by a loop."
    cls, real, rows, rounds = methods["token_td3"], methods["token_td3"].take, [], []

    def take(self, attempts):
        real(self, attempts)
        assert self.policy.actor.C == self.policy.H == 4 and self.base.H == 8
        rounds.append(attempts)
        for a in attempts:
            e = a["episode"]
            for k, first in enumerate(e.at[:-1].tolist()):
                m = min(4, e.n_steps-first)
                won = e.success and first+m == e.n_steps
                rows.append((a["x"][k], a["ref"][k], .99**(m-1) if won else 0., 0. if won else .99**m, a["x"][e.at.tolist().index(first+m)]))
        rows_in_order = torch.as_tensor((self.replay.next >= 0).nonzero()[0])
        assert len(rows_in_order) == len(rows)
        held = dict(x=self.replay.states["x"], ref=self.replay.states["ref"], reward=self.replay.fields["reward"], mask=self.replay.fields["mask"])
        for k, value in enumerate(held.values()):
            assert torch.allclose(value[rows_in_order].float(), torch.stack([torch.as_tensor(r[k], dtype=torch.float32) for r in rows]), atol=1e-6)
        reached = self.replay.states["x"][torch.as_tensor(self.replay.next[rows_in_order.numpy()])]
        assert torch.equal(reached, torch.stack([r[4] for r in rows]))
    monkeypatch.setattr(cls, "take", take)
    run = practise(config(data, tmp_path/"run", algo="token_td3", algo_kw=dict(updates=3, token_updates=4, sample=8, actor_chunk=4)), say=len)
    for a in rounds[0]:   # the policy alone: each fourth step begins the first half of a chunk of its own
        e = a["episode"]
        for k, first in enumerate(e.at.tolist()):
            if first%4 or first == e.n_steps: continue
            m = min(4, e.n_steps-first)
            assert torch.allclose(a["action"][first:first+m], a["ref"][k][:m], atol=1e-4)
    for e in (a["episode"] for attempts in rounds for a in attempts):   # stride 2: four starts in each eight whole steps
        assert all(((e.at[:-1] >= first) & (e.at[:-1] < first+8)).sum() == 4 for first in range(0, e.n_steps-7, 8))
    policy = load_policy(checkpoints(run.path/"checkpoints", ends=True)[-1])
    assert (policy.H, policy.vla.H, policy.actor.C) == (4, 8, 4) and any(e["episode"].n_steps > 8 for e in rounds[0])
