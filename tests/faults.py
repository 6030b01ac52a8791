"A plugin for tests: the dot of the lessons with faults on demand, as the kind `faulty`."
import ctypes, os, sys, time
from pathlib import Path
import numpy as np
from clvla.envs.dot import Dot
from clvla.envs.all import kinds
from clvla.envs.kind import Kind


class Faulty(Dot):
    """A point that adds up its actions. `fault` in the spec is one of start, begin, raise, sleep, render, segv, exit, noise;
    `at` is the step at which it happens, `once` a file that is made by the first fault and prevents the next. `open` is the
    time it takes to build it, seconds, and `lazy` the time of what is built by its first reset."""
    kind, state_dim, action_dim = "faulty", 3, 2
    entries = *Dot.entries, "fault", "at", "once", "open", "lazy", "state_dim"

    def __init__(self, spec, image_size=8, seed=0):
        super().__init__({"goal": [0, 0], "prompt": spec["name"].replace("-", " "), "max_steps": 150, **spec}, image_size, seed)
        self.state_dim = spec.get("state_dim", 3)
        time.sleep(spec.get("open", 0))
        self.lazy, self.fault, self.at, self.once = spec.get("lazy", 0), spec.get("fault"), spec.get("at", 0), spec.get("once")
        if self.fault == "start": raise ValueError("this environment cannot be built")
        if self.fault in ("start-segv", "start-hang", "start-type"): self.do(self.fault.removeprefix("start-"))

    def do(self, fault):
        if self.once:
            if Path(self.once).exists(): return
            Path(self.once).touch()
        if fault == "raise": raise ZeroDivisionError("the robot fell over")
        if fault == "type": raise KeyError("no such joint")
        if fault == "segv": print("the last thing I did", flush=True); ctypes.string_at(0)
        if fault == "exit": sys.exit(7)
        if fault in ("sleep", "hang", "render"): time.sleep(60)
        if fault == "draw": os._exit(9)
        if fault == "noise": os.write(2, b"WARNING: a loud simulator\n"*20_000)

    def _begin(self, seed):
        time.sleep(self.lazy); self.lazy = 0
        self.x = np.random.default_rng(seed).normal(size=3)

    def _act(self, a):
        if self.t == self.at and self.fault in ("raise", "sleep", "segv", "exit", "noise"): self.do(self.fault)
        self.x = self.x+np.array([a[0], a[1], .01])
        return float(a[0]), bool(self.x[0] > 3), bool(self.x[0] > 3)

    @property
    def state(self): return np.resize(self.x, self.state_dim).astype(np.float32)

    def render(self, out=None, camera="front"):
        if self.fault in ("render", "draw") and self.t > self.at: self.do(self.fault)
        im = np.full((self.sizes[camera],)*2+(3,), int(abs(self.x[("front", "wrist").index(camera)])*50) % 256, np.uint8)
        if out is None: return im
        out[:] = im
        return out

    def expert(self): return np.ones(2, np.float32)


kinds["faulty"] = Kind(label="the faulty dot", env=Faulty)
