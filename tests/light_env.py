"""An environment without a simulator, for the tests of the pool: a point in the plane, and faults on demand."""
import time
import numpy as np
from clvla.envs.base import Env, envs

class LightEnv(Env):
    "A point that adds up its actions; `fault` in the spec is one of start, raise, sleep."
    kind,state_dim,action_dim = "light",3,2
    def __init__(self, spec, image_size=8, seed=0):
        super().__init__(spec, image_size, seed)
        self.fault = spec.get("fault")
        if self.fault == "start": raise ValueError("this environment cannot be built")
    def _begin(self, seed): self.x = np.random.default_rng(seed).normal(size=3)
    def _act(self, a):
        if self.fault == "raise": raise ZeroDivisionError("the robot fell over")
        if self.fault == "sleep": time.sleep(60)
        self.x = self.x+np.array([a[0], a[1], .01])
        return float(a[0]),bool(self.x[0] > 3)
    @property
    def state(self): return self.x.astype(np.float32)
    def render(self, out=None):
        im = np.full((self.image_size,)*2+(3,), int(abs(self.x[0])*50)%256, np.uint8)
        if out is None: return im
        out[:] = im
        return out
    def expert(self): return np.ones(2, np.float32)
    def close(self): self.x = None

envs["light"] = LightEnv
