"""A policy that cannot see, or cannot hear, fails here: two squares, a red and a blue one, and a sentence that names one of them.
Where the squares are is in the picture only, and which one is meant in the sentence only."""
import numpy as np
import pytest
import torch

from clvla.core.batch import torch_rng
from clvla.core.names import ACTION, IMAGE, PAD, PROMPT, STATE
from clvla.policies.all import make_policy

SENTENCES = dict(red="go to the red square", blue="go to the blue square")
COLOURS = dict(red=(220, 40, 40), blue=(40, 40, 220))
SIZE, H = 32, 2
FAMILIES = {f"tiny-{head}": dict(name="tiny", head=head, D=48, n_blocks=2, H=H) for head in ("l1", "flow")}


def scenes(n, rng):
    "n pictures with both squares, and where each is, from -1 to 1."
    pictures = np.full((n, SIZE, SIZE, 3), 90, np.uint8)
    at = {name: rng.integers(3, SIZE-3, (n, 2)) for name in COLOURS}
    for name, colour in COLOURS.items():
        for picture, (y, x) in zip(pictures, at[name]): picture[y-3:y+3, x-3:x+3] = colour
    return pictures, {name: 2*yx/SIZE-1 for name, yx in at.items()}


def batch(n, rng, said=None):
    "A batch that names one of the squares at random, or `said`; where the named one and the other one are."
    pictures, at = scenes(n, rng)
    names = np.array([said]*n if said else rng.choice(list(COLOURS), n))
    named = np.where((names == "red")[:, None], at["red"], at["blue"])
    other = np.where((names == "red")[:, None], at["blue"], at["red"])
    chunk = torch.tensor(named, dtype=torch.float32)[:, None].repeat(1, H, 1)
    made = {IMAGE: torch.tensor(pictures).permute(0, 3, 1, 2), STATE: torch.zeros(n, 2), ACTION: chunk,
            PAD: torch.zeros(n, H, dtype=torch.bool), PROMPT: [SENTENCES[name] for name in names]}
    return made, named, other


def learn(family, blind=False, deaf=False, steps=500):
    "Train, and measure on new pictures: the mean distances along an axis to the named and to the other square."
    torch.manual_seed(0)
    kw = dict(FAMILIES[family])
    policy = make_policy(kw.pop("name"), SIZE, 2, 2, seed=0, **kw)
    rng, noise, opt = np.random.default_rng(0), torch_rng(0, "squares"), torch.optim.AdamW(policy.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 2e-3, total_steps=steps)

    def given(made):
        if blind: made[IMAGE] = torch.full_like(made[IMAGE], 90)
        if deaf: made[PROMPT] = ["go"]*len(made[PROMPT])
        return made
    for _ in range(steps):
        made, *_ = batch(32, rng)
        z, t = policy.draw(32, noise)
        policy(given(made), noise=z, time=t)[0].backward()
        opt.step(), opt.zero_grad(), schedule.step()
    made, named, other = batch(200, np.random.default_rng(1))
    went = policy.eval().predict_chunk(given(made), generator=torch_rng(1, "squares"))[:, 0].numpy()
    far = lambda to: float(np.abs(went-to).mean())
    return far(named), far(other)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_goes_to_the_square_that_the_sentence_names(family):
    named, other = learn(family)
    assert named < .15 and other > .4, (named, other)


@pytest.mark.parametrize("control", ["blind", "deaf"])
def test_without_pictures_or_sentences_it_cannot(control):
    "The control: this is what a dead eye, or a dead ear, would get."
    named, other = learn("tiny-flow", **{control: True})
    assert named > .2 and named > .8*other, (named, other)
