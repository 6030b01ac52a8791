"A plugin for tests: the dot, whose methods return something else on demand, as the kind `odd`; and Gymnasium environments of the same sort."
import os
import sys

import gymnasium
import numpy as np
from gymnasium import spaces

from clvla.core.names import IMAGE, STATE
from clvla.envs.all import kinds
from clvla.envs.dot import Dot
from clvla.envs.kind import Kind


def leave(): sys.exit(3)
def fail(): raise KeyError("joint")


# name -> (method, what it returns, made from what the right one returned)
ODD = dict(
    nan_reward=("_act", lambda a: (np.nan, *a[1:])), inf_reward=("_act", lambda a: (-np.inf, *a[1:])), word_reward=("_act", lambda a: ("1", *a[1:])),
    two_rewards=("_act", lambda a: (np.zeros(2), *a[1:])), no_reward=("_act", lambda a: (None, *a[1:])), complex_reward=("_act", lambda a: (1j, *a[1:])),
    half_success=("_act", lambda a: (a[0], .5, a[2])), word_success=("_act", lambda a: (a[0], "yes", a[2])), no_success=("_act", lambda a: (a[0], None, a[2])),
    many_ends=("_act", lambda a: (*a[:2], np.array([False, True]))), two_results=("_act", lambda a: a[:2]), four_results=("_act", lambda a: (*a, {})),
    nothing=("_act", lambda a: None), raises=("_act", lambda a: fail()), exits=("_act", lambda a: leave()),
    no_picture=("render", lambda x: None), small_picture=("render", lambda x: x[:4, :4]), bright_picture=("render", lambda x: x*2.), flat_picture=("render", lambda x: x.ravel()),
    deep_picture=("render", lambda x: x[..., 0].astype(np.uint16)*200), film=("render", lambda x: np.stack([x, x])), word_picture=("render", lambda x: "ansi"),
    raising_picture=("render", lambda x: fail()),
    tuple_reset=("reset", lambda o: (o, {})), bare_reset=("reset", lambda o: o[STATE]), raising_reset=("_begin", lambda o: fail()),
    no_key=("obs", lambda o: {k: v for k, v in o.items() if k != IMAGE}), no_state=("obs", lambda o: {k: v for k, v in o.items() if k != STATE}),
    short_state=("obs", lambda o: o | {STATE: o[STATE][:1]}), long_state=("obs", lambda o: o | {STATE: np.zeros(3)}), nan_state=("obs", lambda o: o | {STATE: np.full(2, np.nan)}),
    word_state=("obs", lambda o: o | {STATE: ["a", "b"]}), square_state=("obs", lambda o: o | {STATE: np.zeros((1, 2))}),
    few_steps=("step_chunk", lambda c: (*c[:5], c[5]-1)), many_steps=("step_chunk", lambda c: (*c[:5], c[5]+1)), half_step=("step_chunk", lambda c: (*c[:5], 1.5)),
    few_rewards=("step_chunk", lambda c: (c[0], c[1][:-1], *c[2:])), nan_rewards=("step_chunk", lambda c: (c[0], c[1]*np.nan, *c[2:])), word_rewards=("step_chunk", lambda c: (c[0], "none", *c[2:])),
    five_results=("step_chunk", lambda c: c[1:]), half_end=("step_chunk", lambda c: (*c[:4], .5, c[5])), no_watched=("step_chunk", lambda c: c))
RIGHT = dict(   # other forms of right answers
    whole_reward=("_act", lambda a: (int(a[0]), *map(int, a[1:]))), numpy_answer=("_act", lambda a: (np.float64(a[0]), *map(np.bool_, a[1:]))),
    one_of_one=("_act", lambda a: tuple(np.array([x]) for x in a)), channels_first=("render", lambda x: np.moveaxis(x, -1, 0)), floats=("render", lambda x: x/np.float32(255)),
    opacity=("render", lambda x: np.concatenate([x, np.full_like(x[..., :1], 255)], -1)), doubles=("obs", lambda o: o | {STATE: o[STATE].astype(float)}),
    lists=("obs", lambda o: o | {STATE: o[STATE].tolist()}))


class Odd(Dot):
    kind, entries = "odd", (*Dot.entries, "odd", "at")

    def __init__(self, spec, image_size=8, seed=0):
        super().__init__({"goal": [5, 5], **spec}, image_size, seed)   # too far away
        self.method, self.change = (ODD | RIGHT).get(spec.get("odd"), ("", None))
        self.at = spec.get("at", 0)

    def odd(self, method, answer): return self.change(answer) if method == self.method and self.t >= self.at else answer
    def _begin(self, seed): return self.odd("_begin", super()._begin(seed))
    def _act(self, action): return self.odd("_act", super()._act(action))
    def render(self, out=None, camera="front"): return self.odd("render", super().render(None if self.method == "render" else out, camera))
    def obs(self, out=None): return self.odd("obs", super().obs(out))
    def reset(self, trial, out=None): return self.odd("reset", super().reset(trial, out))

    def step_chunk(self, actions, out=None, watch=()):
        answer = self.odd("step_chunk", super().step_chunk(actions, out, watch))
        if self.change is ODD["no_watched"][1]: self.watched = {}
        return answer


class Leaves(Dot):
    "Ends its process without a word."
    kind = "leaves"
    def _act(self, action): os._exit(3)


kinds["odd"] = Kind(label="the odd dot", env=Odd)
kinds["leaves"] = Kind(label="the dot that leaves", env=Leaves)


class Game(gymnasium.Env):
    "Counts its steps; `odd` names what is wrong with it."
    metadata = dict(render_modes=["rgb_array"])
    observation_space, action_space = spaces.Dict(place=spaces.Box(-9, 9, (2,), np.float32), image=spaces.Box(0, 1, (8, 8, 3), np.float32)), spaces.Discrete(2)

    def __init__(self, odd="", render_mode=None):
        self.odd, self.render_mode = odd, render_mode
        if odd == "many": self.action_space = spaces.MultiDiscrete([2, 3])
        if odd == "unlimited": self.action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def see(self):
        seen = dict(place=np.array([self.k, self.x], np.float32), image=np.full((8, 8, 3), .5, np.float32))
        if self.odd == "no key" and self.k == 2: del seen["place"]
        if self.odd == "grows" and self.k == 2: seen["place"] = np.zeros(3, np.float32)
        if self.odd == "outside": seen["image"] = seen["image"]*300
        if self.odd == "bytes": seen["image"] = np.full((8, 8, 3), 127, np.uint8)
        return seen

    def reset(self, *, seed=None, options=None):
        if self.odd == "raises": raise KeyError("level")
        super().reset(seed=seed)
        self.k, self.x = 0, np.random.rand() if self.odd == "global" else self.np_random.uniform()
        if self.odd == "narrow": self.x = np.random.RandomState(seed).uniform()
        return (self.see(), {}) if self.odd != "old reset" else self.see()

    def step(self, action):
        self.k += 1
        info = dict(success={"half": .5, "word": "yes", "none": None}.get(self.odd, np.True_ if self.k == 3 else 0))
        if self.odd == "old step": return self.see(), 1., False, info
        return self.see(), float("nan") if self.odd == "nan" else 1., self.k == 3, "no" if self.odd == "cut" else False, info

    def render(self):
        if self.odd == "film": return [np.zeros((8, 8, 3), np.uint8)]
        return None if self.odd == "no render" else np.full((8, 8, 3), 127, np.uint8)

    def close(self):
        if self.odd == "close": fail()


gymnasium.register("Game-v0", entry_point=Game)
