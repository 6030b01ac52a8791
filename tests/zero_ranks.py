"What the processes of test_zero.py run: every case under every stage, compared with one process; rank 0 writes what it measured."
import datetime, json, os, sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
import torch
from torch import nn
from torch.func import functional_call
from accelerate import Accelerator, InitProcessGroupKwargs
from clvla.core.state import load_state, save_state
from clvla.core.batch import torch_rng
from clvla.cl.engine import Engine
from clvla.core.names import ACTION, IMAGE, PAD, PROMPT, STATE
from clvla.policies.all import make_policy
from clvla.policies.ema import EMA
from clvla.train.zero import make_zero

torch.set_num_threads(1)


class Net(nn.Module):
    "Sizes that two processes cannot share evenly, a frozen layer, and one that only some batches use."
    def __init__(self):
        super().__init__(); torch.manual_seed(0)
        self.frozen,self.a,self.b = nn.Linear(5, 5).requires_grad_(False),nn.Linear(5, 7),nn.Linear(7, 3)
        self.scale,self.rare = nn.Parameter(torch.ones(3)),nn.Linear(7, 3)

    def forward(self, batch, **kw):
        z = torch.tanh(self.a(self.frozen(batch["x"])))
        out = self.b(z)*self.scale + (self.rare(z) if batch["rare"] else 0)
        return ((out-batch["y"])**2).mean(),dict(z=z)


def adamw(m):
    "AdamW with two groups, the way the trainer makes it."
    ps = [p for p in m.parameters() if p.requires_grad]
    return torch.optim.AdamW([dict(params=[p for p in ps if (p.ndim > 1) == w], weight_decay=.1*w, peak=.01) for w in (True, False)])

def trained(m): return {n: p for n,p in m.named_parameters() if p.requires_grad}

def data(n=12, B=8):
    g = torch_rng(1, "zero")
    return [dict(x=torch.randn(B, 5, generator=g), y=torch.randn(B, 3, generator=g)) for _ in range(n)]

def engine(m, stage, acc, clip=0.):
    "The plain engine for stage 0, DeepSpeed's for the others; under stage 3 even small weights are cut."
    opt = adamw(m)
    if not stage: return Engine(m, opt, max_norm=clip or None),opt
    cut = dict(stage3_param_persistence_threshold=0) if stage == 3 else {}
    return make_zero(m, opt, SimpleNamespace(strategy=f"zero{stage}", clip=clip, precision="no", timeout=1.), acc, **cut),opt

def update(e, opt, ps, batches, k, rows, clip, rare=True, edit=None, before_step=None):
    "One update over micro-batches; returns (loss, norm)."
    for g in opt.param_groups: g["lr"] = g["peak"]*(k+1)/4
    total = 0.
    for i,b in enumerate(batches):
        last = i == len(batches)-1
        with e.micro(last):
            loss,out = e.model(dict(x=b["x"][rows], y=b["y"][rows], rare=rare))
            e.backward(loss/len(batches), last)
        total += loss.item()/len(batches)
    e.complete()
    if edit: e.set_grads(ps, edit(e.grads(ps)))
    e.max_norm = clip or None
    norm = float(e.clip(ps))
    if before_step is None or before_step(): e.step()
    e.zero()
    return total,norm

def mask(gs): return [g*(torch.arange(g.numel()).view_as(g)%3 > 0)*2 for g in gs]

def weights(e): return e.full_weights() if hasattr(e, "full_weights") else {n: x.clone() for n,x in e.model.state_dict().items()}

def largest(xs):
    "The largest of some numbers; NaN if one of them is, which Python's `max` may pass over."
    return float(torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in xs]).max())

def diff(a, b):
    "Largest difference of two tensors of one shape, or of two dicts of them with the same names in the same order."
    if torch.is_tensor(a):
        assert a.shape == b.shape, (a.shape, b.shape)
        return largest([(a-b).abs().max()])
    assert list(a) == list(b), (list(a), list(b))
    return largest([diff(a[k], b[k]) for k in a])

def groups(e):
    "The optimizer's settings of every parameter of the policy; None for a frozen one."
    m = getattr(e, "policy", e.model); seen = {n: e.group(p) for n,p in m.named_parameters()}
    return {n: g and {k: v for k,v in g.items() if k != "params"} for n,g in seen.items()}


def plain_way(stage, acc, rows, save=None):
    "Eight updates with accumulation, changed gradients and clipping; what the fourth one left is kept."
    m = Net(); e,opt = engine(m, stage, acc, .05); ps,xs,norms = trained(m),data(16),[]
    assert e.moments(ps["a.weight"]) == {}
    for k in range(8):
        norms.append(update(e, opt, ps, xs[2*k:2*k+2], k, rows, .05, edit=mask)[1])
        if k == 3 and save: keep(save, e, ps, acc)
    assert groups(e)["frozen.weight"] is None and groups(e)["b.bias"]["weight_decay"] == 0 < groups(e)["b.weight"]["weight_decay"]
    out = dict(w=weights(e), opt=e.state_dict(ps), norms=norms, groups=groups(e))
    if stage: e.close()
    return out

def keep(path, e, ps, acc):
    state = dict(w=weights(e), opt=e.state_dict(ps))
    if acc.is_main_process: save_state(path, state)
    if e.model is not None and torch.distributed.is_initialized() and hasattr(e, "ds"): acc.wait_for_everyone()

def odd_way(stage, acc, rows):
    "What a run may do besides: unused weights, a skipped update, new moments, averaged weights, gradients beside."
    m = Net(); e,opt = engine(m, stage, acc); ps,xs,seen = trained(m),data(12),[]
    world,whole = acc.num_processes if stage else 1,e.gather_weights if stage else lambda **kw: nullcontext()
    with whole(): ema = EMA(m, .9)
    def beside(b):
        "A second gradient, by autograd, while the first one waits."
        gs = torch.autograd.grad(m(dict(x=b["x"][rows], y=b["y"][rows], rare=True))[0], list(ps.values()))
        flat = torch.cat([g.flatten() for g in gs])
        if world > 1: torch.distributed.all_reduce(flat)
        return flat/world
    def add(gs):
        flat = torch.cat([g.flatten() for g in gs]) + .5*beside(xs[11])
        return [x.view_as(g) for x,g in zip(flat.split([g.numel() for g in gs]), gs)]
    e.load_state_dict(ps, {}); assert e.state_dict(ps) == {}
    for k in range(10):
        if k == 2: e.load_state_dict(ps, {n: s for n,s in e.state_dict(ps).items() if n.endswith("weight")})
        if k == 5: e.reset(); seen.append(len(e.state_dict(ps)))
        if k == 7:
            with whole(write=True): [p.data.mul_(.9) for p in ps.values()]
        loss,norm = update(e, opt, ps, [xs[k]], k, rows, 0., rare=k%3 == 0, edit=add if k%2 else lambda gs: gs,
                           before_step=lambda: k not in (3, 4))
        seen.append(norm)
        with whole(): ema.update(m)
        if k == 8:
            with whole(run=True), ema.swap(m): seen.append(m(xs[0]|dict(rare=True))[0].item()); seen.append(float(weights(e)["a.bias"].sum()))
            with whole(write=True): ema.copy_to(m)
    out = dict(w=weights(e), opt=e.state_dict(ps), norms=seen, groups=groups(e))
    if stage: e.close()
    return out

def peek_way(stage, acc, rows):
    "Penalties on weights, and losses at other weights, as EWC and MIR need them; stage 3 makes the weights whole meanwhile."
    m = Net(); e,opt = engine(m, stage, acc); ps,xs,norms = trained(m),data(6),[]
    for k in range(6):
        with e.gather_weights(run=True) if stage else nullcontext():
            if k:
                there = {n: p.detach()-.1*e.moments(p)["exp_avg"] for n,p in ps.items()}
                norms.append(functional_call(m, there, (xs[0]|dict(rare=True),))[0].item())
            with e.micro(True):
                loss,_ = e.model(dict(x=xs[k]["x"][rows], y=xs[k]["y"][rows], rare=True))
                e.backward(loss + sum((p-1).square().sum() for p in ps.values()))
            norms.append(float(e.clip(ps))); e.step(); e.zero()
    out = dict(w=weights(e), opt=e.state_dict(ps), norms=norms, groups=groups(e))
    if stage: e.close()
    return out

def tiny_way(stage, acc, rows):
    "Two updates of the small policy, with the flow head's noise."
    g = torch_rng(2, "tiny"); torch.manual_seed(0); m = make_policy("tiny", image_size=32, seed=0)
    b = {IMAGE: torch.randint(0, 256, (4, 3, 32, 32), generator=g, dtype=torch.uint8), STATE: torch.randn(4, 4, generator=g),
         ACTION: torch.randn(4, 8, 4, generator=g), PAD: torch.zeros(4, 8, dtype=torch.bool), PROMPT: ["push", "open it", "close", "pull"]}
    noise,time = m.draw(4, torch_rng(3, "tiny")); e,opt = engine(m, stage, acc, 1.); ps,norms = trained(m),[]
    mine = {k: v[rows] for k,v in b.items()}; opt.param_groups[0]["lr"] = opt.param_groups[1]["lr"] = 1e-3
    for k in range(2):
        with e.micro(True):
            loss,_ = e.model(mine, noise=noise[rows], time=time[rows]); e.backward(loss)
        norms.append(float(e.clip(ps))); e.step(); e.zero()
    copy = make_policy("tiny", image_size=32, seed=1); copy.load_state_dict(weights(e))
    chunk,opt,of = copy.eval().predict_chunk(b, noise=torch.zeros(4, 8, 4)),e.state_dict(ps),groups(e)
    if stage:
        with e.gather_weights(run=True): alone = m.eval().predict_chunk(b, noise=torch.zeros(4, 8, 4)) if acc.is_main_process else chunk
        e.close(); norms += [diff(x, chunk) for x in (alone, m.predict_chunk(b, noise=torch.zeros(4, 8, 4)))]
    return dict(w=dict(chunk=chunk), opt=opt, norms=norms + ([] if stage else [0., 0.]), groups=of)

def nan_step(stage, acc, rows):
    "A gradient that is no number: is the update left out?"
    m = Net(); e,opt = engine(m, stage, acc); ps,xs = trained(m),data(2); before = weights(e)
    update(e, opt, ps, [xs[0]], 0, rows, 0., edit=lambda gs: [g*float("nan") for g in gs])
    same = diff(before, weights(e)) == 0
    update(e, opt, ps, [xs[1]], 0, rows, 0.); moved = diff(before, weights(e)); e.close()
    return same and 0 < moved < 1

def bf16(stage, acc, rows):
    "The precision inside the forward, and of the weights."
    m = Net(); at = dict(device=acc.device, process_index=acc.process_index, num_processes=acc.num_processes, local_process_index=acc.local_process_index)
    e,_ = engine(m, stage, SimpleNamespace(**at, autocast=lambda: torch.autocast("cpu", torch.bfloat16))); x = data(1)[0]
    with torch.autocast("cpu", torch.bfloat16): _,out = e.model(dict(x=x["x"][rows], y=x["y"][rows], rare=True))
    kinds = [str(out["z"].dtype), *{str(p.dtype) for p in m.parameters()}]; e.close()
    return kinds

def compare(ways, stage, acc, rows, **kw):
    "Largest differences between a stage and one process."
    one,many = ways(0, acc, slice(None)),ways(stage, acc, rows, **kw)
    d = dict(weights=diff(one["w"], many["w"]), norms=largest([abs(a-b) for a,b in zip(one["norms"], many["norms"], strict=True)]),
             moments=diff(one["opt"], many["opt"]), groups=one["groups"] == many["groups"])
    return d,one,many


def first(folder, acc):
    "Every case under every stage; leaves a state of each stage and of one process behind."
    rows,res = slice(acc.process_index, None, acc.num_processes),{}
    plain_way(0, acc, slice(None), save=folder/"plain.safetensors")
    for stage in (1, 2, 3):
        rng = torch.get_rng_state(); m = Net(); torch.set_rng_state(rng); e,_ = engine(m, stage, acc); e.close()
        r = {"rng": torch.equal(rng, torch.get_rng_state())}
        r["plain"],one,many = compare(plain_way, stage, acc, rows, save=folder/f"zero{stage}.safetensors")
        if acc.is_main_process: save_state(folder/f"zero{stage}-end.safetensors", dict(w=many["w"], opt=many["opt"]))
        r["odd"] = compare(odd_way, stage, acc, rows)[0]
        r["peek"] = compare(peek_way, stage, acc, rows)[0]
        r["tiny"] = compare(tiny_way, stage, acc, rows)[0]
        r["nan"],r["bf16"] = nan_step(stage, acc, rows),bf16(stage, acc, rows)
        res[stage] = r
    return res

def second(folder, acc):
    "Fresh processes continue from each state; bit for bit where stage and number of processes are the same."
    rows,res = slice(acc.process_index, None, acc.num_processes),{}
    for stage in (1, 2, 3):
        for src in [f"zero{stage}", "plain"] + (["zero3"] if stage == 2 else []):
            state = load_state(folder/f"{src}.safetensors"); m = Net()
            if src == "plain": m.load_state_dict(state["w"])
            e,opt = engine(m, stage, acc, .05); ps,xs = trained(m),data(16)
            if src != "plain":
                with e.gather_weights(write=True): m.load_state_dict(state["w"])
            e.load_state_dict(ps, state["opt"]); loaded = same_state(e, ps, state)
            for k in range(4, 8): update(e, opt, ps, xs[2*k:2*k+2], k, rows, .05, edit=mask)
            end = load_state(folder/f"zero{stage}-end.safetensors")
            res[f"{src} to zero{stage}"] = dict(loaded=loaded, **same_state(e, ps, end))
            if src == "zero1":
                odd = {n: dict(s, step=s["step"]+(n == "a.weight")) for n,s in state["opt"].items()}
                res["messages"] = [error(e, ps, dict(other=state["opt"]["a.bias"])), error(e, ps, odd)]
            e.close()
        if acc.is_main_process:
            m = Net(); e,opt = engine(m, 0, acc); ps,state = trained(m),load_state(folder/f"zero{stage}.safetensors")
            m.load_state_dict(state["w"]); e.load_state_dict(ps, state["opt"]); loaded = same_state(e, ps, state)
            for k in range(4, 8): update(e, opt, ps, xs[2*k:2*k+2], k, slice(None), .05, edit=mask)
            res[f"zero{stage} to plain"] = dict(loaded=loaded, **same_state(e, ps, end))
    return res

def same_state(e, ps, state):
    "How far weights and moments are from stored ones."
    return dict(weights=diff(weights(e), state["w"]), moments=diff(e.state_dict(ps), state["opt"]))

def error(e, ps, state):
    try: e.load_state_dict(ps, state)
    except ValueError as x: return str(x)

if __name__ == "__main__":
    folder = Path(sys.argv[2])
    acc = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=60))])
    out = dict(first=first, second=second)[sys.argv[1]](folder, acc)
    if acc.is_main_process: (folder/f"{sys.argv[1]}.json").write_text(json.dumps(out))
    acc.wait_for_everyone(); torch.distributed.destroy_process_group()
    sys.stdout.flush(); os._exit(0)  # DeepSpeed keeps gloo's threads alive, and on a busy machine they abort an interpreter that ends
