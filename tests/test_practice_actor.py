"A run of before goes on with its own number of draws; the actor's turns and its winners are those that the settings say."
import json

import pytest
import torch

from test_practice import SMALL, Crash, crash_after
from clvla.core.batch import torch_rng
from clvla.rl.chunk_critic import ChunkCritic
from clvla.rl.config import PracticeConfig, resolve_practice
from clvla.rl.distilled import WinnerLearner, WinningNoise, winner
from clvla.rl.learner import practise
from clvla.run.config import differences, read_config
from clvla.run.resume import fingerprint


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


def test_a_folder_that_names_no_number_of_draws_goes_on_with_sixteen(data, tmp_path):
    def config(name, **kw): return resolve_practice(PracticeConfig(data_dir=str(data), run_dir=str(tmp_path/name), save_every=1, **SMALL | dict(
        algo="best_of_n", algo_kw=dict(updates=3, sample=8, reads="context") | kw)))
    whole = practise(config("whole", N=16), say=len)
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, 2, algo="best_of_n")
        with pytest.raises(Crash): practise(config("run", N=16), say=len)
    file = tmp_path/"run/config.json"
    stored = json.loads(file.read_text())
    assert stored["algo_kw"].pop("N") == 16   # as an older version wrote it
    file.write_text(json.dumps(stored))
    assert read_config(tmp_path/"run").algo_kw["N"] == 16
    assert [line for line in differences(stored, config("run")) if "algo_kw" in line] and not differences(stored, config("run", N=16))
    with pytest.raises(ValueError, match="N"): practise(config("run"), say=len)
    assert fingerprint(practise(read_config(tmp_path/"run"), say=len).path) == fingerprint(whole.path)


def test_the_winner_is_the_critics_best_whatever_the_rows():
    g = torch_rng(0, "winners")
    torch.manual_seed(0)
    critic, x = ChunkCritic(5, 2, 3, hidden=16), torch.randn(70, 5, generator=g)
    noise, draws = torch.randn(70, 6, 2, 3, generator=g), torch.randn(70, 6, 2, 3, generator=g)
    best = torch.stack([critic(x, draws[:, k]).mean(0) for k in range(6)], 1).argmax(1)
    assert torch.equal(winner(critic, x, noise, draws), noise[torch.arange(70), best]) and len(set(best.tolist())) > 3


def test_the_actors_turns_go_on_where_they_were():
    "Every third update, also across a stored state."
    learner = WinnerLearner(WinningNoise(2, 1, 1, 8), every=3)
    turns = [learner.due() for _ in range(4)]
    other = WinnerLearner(WinningNoise(2, 1, 1, 8), every=3)
    other.load_state_dict(learner.state_dict())
    assert turns+[other.due() for _ in range(3)] == [False, False, True, False, False, True, False]
