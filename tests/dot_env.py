"""A plugin for tests: a dot that has to reach the origin, as the kind `dying`. `die` kills its worker once, `slow` makes each step take seconds,
`goes_on` lets an episode go on after its success, as some gymnasium environments do."""
import os, time
from pathlib import Path
import numpy as np
from clvla.core.seeds import np_rng
from clvla.envs.all import kinds
from clvla.envs.dot import Dot
from clvla.envs.kind import Kind

class Dying(Dot):
    kind,entries = "dying",(*Dot.entries, "die", "slow", "goes_on")
    def __init__(self, spec, image_size=8, seed=0):
        super().__init__({"goal": [0, 0], **spec}, image_size, seed)
        self.die,self.slow,self.goes_on = spec.get("die"),spec.get("slow", 0.),spec.get("goes_on", False)
    def _begin(self, seed): self.x = np_rng(seed, "dot").uniform(-1, 1, 2).astype("f4")
    def _act(self, action):
        if self.die and self.trial == self.die["trial"] and self.t == self.die["t"] and not Path(self.die["flag"]).exists():
            Path(self.die["flag"]).touch(); os._exit(3)
        time.sleep(self.slow)
        reward,success,terminated = super()._act(action)
        return reward,success,terminated and not self.goes_on

kinds["dying"] = Kind(label="the dying dot", env=Dying)
