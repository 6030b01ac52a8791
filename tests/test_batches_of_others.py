"Batches and observations of other people: masks, instructions, rows and pictures that do not fit are refused before a wrong number."
import numpy as np
import pytest
import torch
from torch import nn

from clvla.core.names import ACTION, IMAGE, PAD, PROMPT, STATE
from clvla.data.stats import Processor, array_stats
from clvla.policies.all import make_policy
from clvla.policies.ema import EMA


def seen(B=2, **more):
    return {IMAGE: torch.zeros(B, 3, 48, 48, dtype=torch.uint8), STATE: torch.zeros(B, 4), PROMPT: ["go"]*B} | more


def batch(**more):
    return seen() | {ACTION: torch.zeros(2, 8, 4), PAD: torch.zeros(2, 8, dtype=torch.bool)} | more


@pytest.fixture(scope="module")
def policy(): return make_policy("tiny", 48, 4, 4, 8, head="l1")


@pytest.mark.parametrize("pad", [torch.zeros(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.uint8),
                                 torch.zeros(2, 1, dtype=torch.bool), torch.zeros(2, 8)])
def test_mask_of_another_kind(policy, pad):
    "Whole numbers gave losses below 0: `~0` is -1."
    with pytest.raises(ValueError, match=r"expected are 2 rows.*torch.bool \(2,8\)"): policy(batch(**{PAD: pad}))
    assert policy(batch(**{PAD: pad.bool().expand(2, 8)}))[0] >= 0


def test_actions_of_fewer_rows(policy):
    "One chunk was the goal of every row."
    one = {ACTION: torch.zeros(1, 8, 4), PAD: torch.zeros(1, 8, dtype=torch.bool)}
    with pytest.raises(ValueError, match="has 1 rows"): policy(batch(**one))


@pytest.mark.parametrize("name", ["tiny", "qwenoft-tiny"])
def test_instructions_that_are_no_list(name):
    "A text of two letters was two instructions of one letter."
    if name != "tiny": pytest.importorskip("transformers")
    policy,obs = make_policy(name, 48, 4, 4, 8, head="l1"),seen()
    assert policy.predict_chunk(obs).shape == (2, 8, 4)
    with pytest.raises(ValueError, match="is 'go'; expected is a list"): policy.predict_chunk(obs | {PROMPT: "go"})
    with pytest.raises(ValueError, match="is 1 instructions"): policy.predict_chunk(obs | {PROMPT: ["go"]})
    obs.pop(PROMPT)
    with pytest.raises(ValueError, match="the batch lacks 'task'"): policy.predict_chunk(obs)


def test_pictures_of_fewer_rows(policy):
    with pytest.raises(ValueError, match="has 1 rows, observation.state has 2"):
        policy.predict_chunk(seen(**{IMAGE: torch.zeros(1, 3, 48, 48, dtype=torch.uint8)}))


def test_flipped_pictures():
    "NumPy flips without copying, and torch takes no such array."
    stats = array_stats(np.random.default_rng(0).normal(size=(9, 4)))
    picture = np.random.default_rng(0).integers(0, 255, (2, 8, 8, 3), np.uint8)
    process = Processor({STATE: stats, ACTION: stats})
    both = [process.obs({IMAGE: x, STATE: np.zeros((2, 4))})[IMAGE] for x in (picture[:,::-1], picture[:,::-1].copy())]
    assert both[0].equal(both[1])


def test_average_of_a_wider_model():
    "One number was copied to all of a weight's."
    average = EMA(nn.Linear(1, 1, bias=False))
    wider = EMA(nn.Linear(3, 3, bias=False))
    with pytest.raises(ValueError, match="other parameters"): wider.load_state_dict(average.state_dict())


@pytest.mark.parametrize("head,A,more", [("l1", 4, {}), ("flow", 4, {}), ("discrete", 1, dict(n_actions=5))])
def test_batch_without_rows(head, A, more):
    "The loss was NaN, or the noise was asked for."
    policy = make_policy("tiny", 48, 4, A, 8, head=head, **more)
    none = seen(0) | {ACTION: torch.zeros(0, 8, A), PAD: torch.zeros(0, 8, dtype=torch.bool)}
    noise,time = policy.draw(0)
    for given in ({}, dict(noise=noise, time=time, reduction="none")):
        with pytest.raises(ValueError, match="the batch is empty"): policy(none, **given)
    with pytest.raises(ValueError, match="needs 1 observation or more, found none"): policy.predict_chunk(seen(0))
