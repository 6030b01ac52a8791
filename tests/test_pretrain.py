"A token that is learnt by a run of its own: the same bits after a crash, what it learns from, what it is refused with."
import pytest
import torch

from test_practice import SMALL, Crash, crash_after
from clvla.policies.all import load_policy
from clvla.rl.config import PracticeConfig, resolve_practice
from clvla.rl.episodes import load_episodes
from clvla.rl.learner import practise
from clvla.run.checkpoint import checkpoints
from clvla.run.resume import fingerprint


def config(data, path, **kw):
    own = dict(evaluate="none", save_every=1, algo="token_pretrain", algo_kw=dict(updates=6, sample=8))
    return resolve_practice(PracticeConfig(data_dir=str(data), run_dir=str(path), **(SMALL | own | kw)))


def codec_of(run): return load_policy(checkpoints(run.path/"checkpoints", ends=True)[-1]).codec.state_dict()


@pytest.fixture(scope="module")
def done(shared_data, tmp_path_factory): return practise(config(shared_data, tmp_path_factory.mktemp("pretrain")/"run"), say=len)


@pytest.mark.parametrize("n", [1, 6, 9])   # in the first round, between the rounds, in the second one
def test_a_crash_changes_nothing(shared_data, tmp_path, done, n):
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, n, algo="token_pretrain")
        with pytest.raises(Crash): practise(config(shared_data, tmp_path/"run"), say=len)
    assert fingerprint(practise(config(shared_data, tmp_path/"run"), say=len).path) == fingerprint(done.path)


@pytest.mark.parametrize("sees", ["demonstrations", "random"])
def test_other_observations_give_another_token(shared_data, tmp_path, done, sees):
    run = practise(config(shared_data, tmp_path/"run", algo_kw=dict(updates=6, sample=8, sees=sees)), say=len)
    assert any(not torch.equal(x, codec_of(done)[k]) for k,x in codec_of(run).items())
    actions = [[e.action for e in load_episodes(r.path/"practice/round-000.safetensors")] for r in (run, done)]
    same = all(a.shape == b.shape and (a == b).all() for a,b in zip(*actions))
    assert same == (sees == "demonstrations"), "the policy plays the attempts, but for random actions"


def test_random_attempts_are_of_the_runs_seed(shared_data, tmp_path):
    kw = dict(algo_kw=dict(updates=2, sample=8, sees="random"))
    assert len({fingerprint(practise(config(shared_data, tmp_path/name, **kw), say=len).path) for name in ("a", "b")}) == 1


def test_the_next_run_takes_it_and_another_policys_is_refused(shared_data, tmp_path, done):
    kw = dict(algo="token_td3", algo_kw=dict(token=str(done.path), updates=2, sample=8))
    run = practise(config(shared_data, tmp_path/"second", **kw), say=len)
    assert all(torch.equal(x, codec_of(done)[k]) for k,x in codec_of(run).items())
    with pytest.raises(ValueError, match="has learnt the tokens of a policy"): practise(config(shared_data, tmp_path/"other", **kw, steps_per_task=SMALL["steps_per_task"]+1), say=len)


def test_no_method_against_forgetting_holds_it(shared_data, tmp_path):
    with pytest.raises(ValueError, match="cannot hold 'token_pretrain': only the token learns"):
        practise(config(shared_data, tmp_path/"run", stream=True, cl="er"), say=len)
