"A dot in the plane that has to reach the origin: an environment without a simulator, for worker processes. `die` kills its worker once."
import os, time
from pathlib import Path
import numpy as np
from clvla.core.seeds import np_rng
from clvla.envs.all import kinds
from clvla.envs.base import Env
from clvla.envs.kind import Kind

class DotEnv(Env):
    kind,state_dim,action_dim,views,entries = "dot",2,2,("front", "wrist"),("die", "slow")
    def __init__(self, spec, image_size=8, seed=0): super().__init__(spec, image_size, seed); self.die,self.slow = spec.get("die"),spec.get("slow", 0.)
    def _begin(self, seed): self.x = np_rng(seed, "dot").uniform(-1, 1, 2).astype("f4")
    def _act(self, action):
        if self.die and self.trial == self.die["trial"] and self.t == self.die["t"] and not Path(self.die["flag"]).exists():
            Path(self.die["flag"]).touch(); os._exit(3)
        self.x = np.clip(self.x+.2*action, -1, 1).astype("f4"); time.sleep(self.slow)
        ok = bool(np.abs(self.x).max() < .1)
        return float(ok),ok,ok
    @property
    def state(self): return self.x.copy()
    def render(self, out=None, camera="front"):
        img = np.full((self.image_size, self.image_size, 3), 127+int(100*self.x[("front", "wrist").index(camera)]), "u1")
        if out is None: return img
        out[:] = img
        return out
    def expert(self): return np.clip(-5*self.x, -1, 1).astype("f4")
    def close(self): pass

kinds["dot"] = Kind(label="Dot", env=DotEnv)
