"""A pretended GPU, the device "far": its tensors hold real values on the CPU and obey a GPU's rules about devices.

What lies on the CPU cannot be computed with what lies far, a copy to the CPU that nobody waits for holds garbage until something waits,
random numbers come from a generator of the device's own, and an operation that makes the CPU wait can be counted, by the line of the
package that asked for it. It is built on torch's backends in Python (`PrivateUse1`), an interface that may change with every minor
version. So tests use it with one version of torch and are skipped, in a line, with others.

Autocast, pinned memory, streams, several devices, and the GPU's own kernels are not pretended. Attention is torch's plain formula, and
`inference_mode` is `no_grad`.

    with far.device("far") as there, far.counts() as seen:
        update(policy.to(there))
    assert seen.waits.total() <= 20, seen

A process registers the backend when it imports this module, and keeps it: torch counts its devices at the first backward, and a device
that comes later has no thread for its own. So tests import it when they are collected, not where they use it. On a machine with a GPU it
is not registered, and the tests use the GPU.
"""
import sys
import threading
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

VERSION = "2.11"      # of torch, for which this was tried
PACKAGE = "clvla"     # whose lines are counted
BOTH = "expected all tensors on one device, found far:0 and cpu"


def unfit(name: str = "far") -> str:
    "Why tests cannot use a device on this machine; empty: they can."
    if name == "cuda": return "" if torch.cuda.is_available() else "there is no GPU here"
    # torch's backward takes one kind of device: with this one registered it fails on a GPU (engine.cpp, opt_ready_stream)
    if torch.cuda.is_available(): return "there is a GPU here, and torch cannot compute on both in one process"
    found = ".".join(torch.__version__.split(".")[:2])
    return "" if found == VERSION else f"the pretended device needs torch {VERSION}, found {found}"


# What lies behind the device

class Machine:
    "One pretended device: its random numbers, the copies that are under way, and who counts."
    def __init__(self):
        self.lock = threading.RLock()   # backward runs in a thread of its own, as a GPU's does
        self.random = torch.Generator().manual_seed(20).get_state()
        self.under_way = []             # (CPU tensor that holds garbage, what it will hold)
        self.counting = []              # `Counts` that are open

    def note(self, what: str, op: str, n: int = 1):
        "Count something at the package's line that is being carried out."
        if not self.counting: return
        place = line()
        for seen in self.counting: getattr(seen, what)[place, op] += n

    def wait(self, why: str):
        "The CPU waits for the device: what was under way has arrived."
        self.note("waits", why)
        with self.lock:
            for here,value in self.under_way: here.copy_(value)
            self.under_way.clear()

    def send(self, here, value):
        "Begin a copy to the CPU; until somebody waits, `here` is garbage."
        if here.dtype == torch.bool: garbage = ~value
        else: garbage = torch.full_like(value, float("nan") if value.is_floating_point() else torch.iinfo(value.dtype).max)
        with self.lock: self.under_way.append((here, value))
        here.copy_(garbage)

    @contextmanager
    def own_random(self):
        "Inside, torch's generator of the CPU stands where the device's own stands."
        with self.lock, torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random)
            yield
            self.random = torch.get_rng_state()


machine = Machine()


@lru_cache(maxsize=1)
def package_folder() -> str:
    "Where the package's files lie; a clone that is named as the package has its tests beside it."
    return str(Path(find_spec(PACKAGE).origin).parent)+"/"


def line() -> str:
    "The innermost line of the package on this thread's stack, as in cl/engine.py:40."
    frame,home = sys._getframe(2),package_folder()
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(home): return f"{name[len(home):]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"   # backward's thread, a test


class Counts:
    "What happened on the device: Counters over (line, operation)."
    def __init__(self):
        self.kernels = Counter()   # operations that compute
        self.waits = Counter()     # synchronisations: the CPU stands still until the device is done
        self.draws = Counter()     # operations that use the device's generator
        self.loads = Counter()     # bytes from the CPU

    def by_line(self, what: str = "waits") -> Counter:
        "Sums over the operations of each line."
        sums = Counter()
        for (place,_),n in getattr(self, what).items(): sums[place] += n
        return sums

    def __repr__(self):
        most = lambda what: ", ".join(f"{place} {n}" for place,n in self.by_line(what).most_common(5))
        return (f"{self.kernels.total()} kernels ({most('kernels')}), {self.waits.total()} waits ({most('waits')}), "
                f"{self.draws.total()} draws, {self.loads.total()} bytes to the device")


@contextmanager
def counts():
    "Count what happens on the device inside the block."
    seen = Counts()
    machine.counting.append(seen)
    try: yield seen
    finally: machine.counting.remove(seen)


# A tensor of the device

class FarTensor(torch.Tensor):
    "Looks like a tensor of the device to torch; `near` has its values."
    @staticmethod
    def __new__(cls, near):
        new = torch.Tensor._make_wrapper_subclass(cls, near.size(), strides=near.stride(), dtype=near.dtype, device="far:0",
                                                  storage_offset=near.storage_offset())
        new.near = near.detach()
        return new

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None): return run(func, args, kwargs or {})

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert far:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.")

    def __array__(self, *args, **kwargs): return self.numpy()
    def tolist(self): return self.detach().cpu().tolist()
    def data_ptr(self): return self.near.data_ptr()
    def __repr__(self): return f"far {self.near}"

    def __deepcopy__(self, memo):
        if id(self) in memo: return memo[id(self)]
        new = FarTensor(self.near.clone())
        if isinstance(self, torch.nn.Parameter): new = torch.nn.Parameter(new, requires_grad=False)
        memo[id(self)] = new.requires_grad_(self.requires_grad)
        if self.grad is not None: new.grad = FarTensor(self.grad.near.clone())
        return new

    @property
    def data(self): return self.detach()

    @data.setter
    def data(self, new):
        if not isinstance(new, FarTensor):   # a GPU would let the parameter move; a wrapper cannot
            raise RuntimeError("the data of a tensor on far:0 cannot be a tensor on the CPU")
        self.near = new.near


def is_far(device) -> bool: return device is not None and torch.device(device).type == "far"
def nearby(x): return x.near if isinstance(x, FarTensor) else x


# Its rules. An operation is a torch overload, as in aten.add.Tensor; `plain` is its name without the underscore of "in place".

INDEXED = {"index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"}   # whose indices may lie on the CPU
SCALARS = {"masked_fill", "fill", "rsub", "__and__", "__or__", "__xor__"}  # take a number on the CPU, beside torch's "pointwise" ones
NO_WORK = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}


def plain(func) -> str:
    name = func._schema.name.split("::")[1]
    return name if name.endswith("__") else name.rstrip("_")


def trouble(func, args, leaves) -> str:
    "What is wrong with the CPU's tensors in an operation with far ones; empty: a GPU takes them."
    strangers = {id(x): x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, FarTensor)}
    if not strangers: return ""
    name,first = plain(func),id(args[0]) in strangers
    if name in INDEXED:
        if first: return "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        values = args[2] if len(args) > 2 else None
        return BOTH if id(values) in strangers and values.dim() else ""
    if shapes := [tuple(x.shape) for x in strangers.values() if x.dim()]: return f"{BOTH}: {shapes} on the CPU"
    if torch.Tag.pointwise not in func.tags and name not in SCALARS: return f"{BOTH}: a number on the CPU, which this operation takes nowhere"
    in_place = func._schema.name.endswith("_") and not func._schema.name.endswith("__")
    if first and (in_place or name in ("where", "masked_fill")): return f"{BOTH}: the first argument on the CPU"
    if name == "masked_fill" and id(args[1]) in strangers: return f"{BOTH}: the mask on the CPU"
    return "more than one number on the CPU" if len(strangers) > 1 else ""


def must_wait(func, args, leaves) -> bool:
    "Does the CPU need a value of the device, or the device one that the CPU holds, before it can go on?"
    if plain(func) in INDEXED:
        indices = [i for i in args[1] if isinstance(i, torch.Tensor)]
        return any(not isinstance(i, FarTensor) or i.dtype in (torch.bool, torch.uint8) for i in indices)
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


def move(func, args, kwargs):
    "`x.to(device)` and its kind: a new tensor."
    source,device,patient = args[0],kwargs.get("device"),not kwargs.get("non_blocking", False)
    out = func(nearby(source), *args[1:], **{k: v for k,v in kwargs.items() if k != "device"})
    if isinstance(source, FarTensor) and (device is None or is_far(device)):
        machine.note("kernels", "copy")
        return FarTensor(out)
    if not isinstance(source, FarTensor):
        machine.note("loads", "copy", out.nbytes)
        if patient: machine.wait("copy from the CPU")
        return FarTensor(out)
    if patient:
        machine.wait("copy to the CPU")
        return out
    here = torch.empty_like(out)
    machine.send(here, out)
    return here


def write(target, source, patient: bool):
    "`target.copy_(source)`, in one device or between two."
    there,here = isinstance(target, FarTensor),isinstance(source, FarTensor)
    value = nearby(source)
    if there and here: machine.note("kernels", "copy")
    elif there: machine.note("loads", "copy", value.nbytes)
    elif not patient: return machine.send(target.detach(), value.clone().to(target.dtype).expand_as(target))
    if there != here and patient: machine.wait("copy from the CPU" if there else "copy to the CPU")
    nearby(target).copy_(value)


def compute(func, args, kwargs, leaves, there: bool):
    "The operation on the CPU's values; its results lie far where `there` says so."
    kwargs = kwargs | (dict(device="cpu") if is_far(kwargs.get("device")) else {})
    drawn = there and torch.Tag.nondeterministic_seeded in func.tags
    if drawn: machine.note("draws", str(func))
    with machine.own_random() if drawn else nullcontext():
        out = func(*tree_map(nearby, args), **tree_map(nearby, kwargs))
    if not there: return out
    if torch.Tag.inplace_view in func.tags:   # as in unsqueeze_: torch's own view of the tensor has to change, too
        with no_dispatch(): func(*args, **kwargs)
        return args[0]
    if not func.is_view and plain(func) not in NO_WORK: machine.note("kernels", str(func))
    known = {id(x.near): x for x in leaves if isinstance(x, FarTensor)}   # an operation in place gives the tensor itself
    wrap = lambda x: known[id(x)] if id(x) in known else FarTensor(x)
    return tree_map(lambda x: wrap(x) if isinstance(x, torch.Tensor) and not isinstance(x, FarTensor) else x, out)


def run(func, args, kwargs):
    "Carry out one operation as the device does; RuntimeError where a GPU would refuse it."
    name,leaves = plain(func),tree_leaves((args, kwargs))
    if name == "_to_copy": return move(func, args, kwargs)
    if name in ("copy", "_foreach_copy") and func._schema.name.endswith("_"):
        patient = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        for target,source in zip(*args[:2]) if name == "_foreach_copy" else [args[:2]]: write(target, source, patient)
        return None if name == "_foreach_copy" else args[0]
    if name == "_fused_sdp_choice": return 0   # attention by the plain formula
    if name == "_pin_memory": raise RuntimeError("cannot pin a tensor on far:0, only those of the CPU")
    far = any(isinstance(x, FarTensor) for x in leaves)
    if far and (wrong := trouble(func, args, leaves)): raise RuntimeError(f"{func}: {wrong}")
    there = is_far(kwargs["device"]) if kwargs.get("device") is not None else far
    if there and any(isinstance(x, torch.Generator) for x in leaves):
        raise RuntimeError(f"{func}: expected a 'far' device type for generator but found 'cpu'")
    if far and must_wait(func, args, leaves): machine.wait(name)
    return compute(func, args, kwargs, leaves, there)


# Registering it

class Module:
    "What torch asks of a device, as `torch.cuda` answers."
    def is_initialized(self): return True
    def is_available(self): return True
    def _is_in_bad_fork(self): return False
    def device_count(self): return 1
    def current_device(self): return 0
    def set_device(self, device): pass
    def device(self, index): return nullcontext()
    def synchronize(self, device=None): machine.wait("synchronize")
    def get_amp_supported_dtype(self): return [torch.float16, torch.bfloat16]
    def get_rng_state(self, device=0): return machine.random.clone()
    def set_rng_state(self, state, device=0): machine.random = state.clone()
    def manual_seed_all(self, seed): machine.random = torch.Generator().manual_seed(seed+1).get_state()


# Without an implementation by name, torch would make these from others, and change a wrapper's shape behind its back.
NAMED = """copy_ _to_copy fill_ lift_fresh empty empty_strided arange linspace logspace eye full zeros ones scalar_tensor rand randn
    randint randperm tril_indices triu_indices""".split()


def register():
    "Make the device known to torch; once in a process."
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    _setup_privateuseone_for_python_backend("far", backend_module=Module())
    rest,named = torch.library.Library("_", "IMPL"),torch.library.Library("aten", "IMPL")
    rest.fallback(lambda op, *args, **kwargs: run(op, args, kwargs), "PrivateUse1")
    for packet in [getattr(torch.ops.aten, name) for name in NAMED]:
        for op in [getattr(packet, o) for o in packet.overloads() if not any(no in o for no in ("out", "names", "Tensor"))]:
            name = op._schema.name.removeprefix("aten::")+("" if op._overloadname == "default" else f".{op._overloadname}")
            named.impl(name, lambda *args, op=op, **kwargs: run(op, args, kwargs), "PrivateUse1")
    return rest,named   # torch forgets what is not kept


libraries = register() if not unfit() else None


@contextmanager
def replaced(*changes):
    "Set (object, attribute, value) inside the block."
    before = [(where, name, getattr(where, name)) for where,name,_ in changes]
    for change in changes: setattr(*change)
    try: yield
    finally:
        for change in reversed(before): setattr(*change)


@contextmanager
def device(name: str = "far"):
    "The device of that name, far or cuda, ready to be used inside the block."
    if name != "far":
        with replaced((torch.backends.cudnn, "allow_tf32", False)): yield torch.device(name, 0)   # numbers of four bytes, as on the CPU
        return
    future = torch.__future__
    swap = future.get_swap_module_params_on_conversion()
    future.set_swap_module_params_on_conversion(True)   # `.to` keeps a parameter's identity, as it does for a GPU
    try:
        # attention by the plain formula on the CPU, too: what differs then is the device's doing
        with sdpa_kernel(SDPBackend.MATH), replaced((torch, "inference_mode", lambda mode=True: torch.no_grad())):
            yield torch.device("far", 0)
    finally: future.set_swap_module_params_on_conversion(swap)


def close(there: torch.device) -> dict:
    "How near its numbers are to the CPU's, for `pytest.approx`: the same sums, or sums in another order that AdamW's first updates enlarge."
    far = 1e-5 if there.type == "far" else 1e-2
    return dict(rel=far, abs=far, nan_ok=True)


@contextmanager
def runs_on(there: torch.device):
    "Inside, runs whose setting is device=\"auto\" train and are evaluated on the device."
    if there.type != "far":
        yield
        return
    from accelerate.state import PartialState
    trainer = import_module("clvla.train.trainer")
    plain_one = trainer.make_accelerator

    def make(cfg):
        acc = plain_one(cfg)
        if cfg.device != "cpu": PartialState._shared_state["device"] = acc.state.device = there
        return acc
    homes = [import_module(f"clvla.{name}") for name in ("train.trainer", "train.learner", "rl.learner", "crl.learner")]
    evaluation = import_module("clvla.train.checkpoint_eval")
    PartialState._reset_state()
    try:
        with replaced(*[(home, "make_accelerator", make) for home in homes],
                      (evaluation, "_device_for", lambda evaluation, out, say=print: str(there))): yield
    finally: PartialState._reset_state()
