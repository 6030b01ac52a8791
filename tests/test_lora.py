"Adapters: who is trained, what stays frozen to the bit, algorithms on adapters, checkpoints that fit or are refused."
import json, shutil, subprocess, sys
from copy import deepcopy
from types import SimpleNamespace
import pytest, torch
from safetensors.torch import load_file, save, save_file
from torch import nn
from clvla.core.batch import torch_rng
from clvla.cl.all import make_algo
from clvla.cl.base import CLContext, call_hook
from clvla.cl.engine import Engine, Loop, cl_step
from clvla.cl.mir import interference
from clvla.cl.quick import QuickData, QuickLoader, QuickStream
from clvla.core.names import ACTION, IMAGE, INDEX, PAD, PROMPT, STATE, TASK_ID
from clvla.core.files import sha256
from clvla.policies.all import build_policy, load_policy, make_policy
from clvla.policies.base import Context, Policy, n_params, param_groups
from clvla.policies.weights import (check_base, init_weights, load_weights, note_frozen, read_base, read_policy, save_base,
    save_policy, stored_weights)
from clvla.policies.ema import EMA
from clvla.policies.heads import L1Head
from clvla.policies.lora import adapted, add_lora, check_frozen, merge_lora, trainable_report

pytest.importorskip("peft")
torch.set_num_threads(1)


def make_batch(B=6, seed=0, task="push"):
    g = torch_rng(seed, "lora batch")
    return {IMAGE: torch.randint(0, 256, (B, 3, 32, 32), generator=g, dtype=torch.uint8),
            PROMPT: [f"{task} the drawer"]*B,
            STATE: torch.randn(B, 4, generator=g), ACTION: torch.randn(B, 8, 4, generator=g),
            PAD: torch.zeros(B, 8, dtype=torch.bool), TASK_ID: [task]*B, INDEX: torch.arange(B)}


def small(seed=0, head="flow"): return make_policy("tiny", 32, head=head, seed=seed, D=32)
def settings(**kw):
    return SimpleNamespace(**(dict(model="tiny", image_size=32, chunk=8, head="l1", seed=0, lora_rank=2, lora_alpha=8.,
                                   init_from="", model_kw={}) | kw))


def bits(policy, frozen=None):
    "Copies of a policy's weights; of the frozen or the trained ones if asked."
    return {k: p.detach().clone() for k,p in policy.named_parameters() if frozen is None or p.requires_grad != frozen}


def same(a, b): return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def loss_of(policy, batch, generator=None):
    noise,time = policy.draw(len(batch[ACTION]), generator)
    return policy(batch, noise=noise, time=time)


def train(policy, n=3, ema=None):
    opt = torch.optim.AdamW(param_groups(policy, 1e-2, .1))
    for i in range(n):
        loss,_ = loss_of(policy, make_batch(seed=i), torch_rng(i, "lora train"))
        opt.zero_grad(); loss.backward(); opt.step()
        if ema: ema.update(policy)
    return policy


def chunk(policy): return policy.predict_chunk(make_batch(4), generator=torch_rng(3, "lora chunk"))


# --- who is trained
@pytest.mark.parametrize("pretrained", [True, False])
def test_who_is_trained(pretrained):
    p = small(); n = n_params(p); linear = p.lora_targets(); add_lora(p, 2, 8., pretrained)
    matrices = {f"{k}.base_layer.weight" for k in linear}
    for k,q in p.named_parameters():
        want = ".lora_" in k or k.startswith("head.") or not pretrained and k not in matrices
        assert q.requires_grad == want, k
    assert adapted(p) == linear and not any(k.startswith("head") for k in linear)
    assert n_params(p, False) == n + sum(q.numel() for k,q in p.named_parameters() if ".lora_" in k)
    report = trainable_report(p)
    assert report.trained.sum() == n_params(p) and report.trained.sum()+report.frozen.sum() == n_params(p, False)
    assert list(report.columns) == ["module", "trained", "frozen", "how"]
    assert set(report[report.module == "words"].how) == {"frozen" if pretrained else "full"}
    assert set(report[report.module == "head"].how) == {"full"}

def test_adapters_are_a_function_of_the_seed_and_the_global_generator_is_left_alone():
    torch.manual_seed(1); a = add_lora(small(), 2, seed=5); x = torch.rand(3)
    torch.manual_seed(1); assert torch.equal(torch.rand(3), x)
    b,c = add_lora(small(), 2, seed=5),add_lora(small(), 2, seed=6)
    assert same(bits(a), bits(b)) and not same(bits(a), bits(c)) and same(bits(a, True), bits(c, True))
    assert all(not q.any() for k,q in a.named_parameters() if ".lora_B." in k)
    for k in adapted(a):
        A = a.get_submodule(k).lora_A["default"].weight
        assert A.abs().max() <= A.shape[1]**-.5 and A.abs().max() > .5*A.shape[1]**-.5

def test_a_new_adapter_changes_nothing_and_its_gradient_reaches_every_trained_leaf():
    plain = small(); p = add_lora(deepcopy(plain), 2); b = make_batch()
    assert type(p) is type(plain) and torch.allclose(chunk(p), chunk(plain), atol=1e-6)
    train(p, 1)                       # B is zero before the first step, so that A has no gradient yet
    p.zero_grad(); loss_of(p, b, torch_rng(0, "leaf"))[0].backward()
    dead = [k for k,q in p.named_parameters() if q.requires_grad and (q.grad is None or not q.grad.any())]
    assert dead == []

def test_bf16_autocast_is_finite():
    p = add_lora(small(), 2)
    with torch.autocast("cpu", torch.bfloat16): loss,_ = loss_of(p, make_batch())
    loss.backward()
    assert loss.isfinite() and all(q.grad.isfinite().all() for q in p.parameters() if q.grad is not None)

class Odd(Policy):
    "Shared weights and PyTorch's own attention: places where an adapter would do harm or nothing."
    def __init__(self):
        super().__init__(dict(H=8, action_dim=4))
        self.words,self.out = nn.Embedding(16, 16),nn.Linear(16, 16, bias=False); self.out.weight = self.words.weight
        self.inp,self.att = nn.Linear(4, 16),nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = L1Head(16, 8, 4)
        self.fixed = nn.Parameter(torch.ones(16), requires_grad=False)
    def encode(self, obs, tokens=False):
        x = torch.stack([self.inp(obs[STATE]), self.words(obs[INDEX])], 1)
        return Context(pooled=self.out(self.att(x, x, x)[0].mean(1)*self.fixed))

def test_shared_weights_and_pytorchs_attention_get_no_adapter_and_what_a_policy_froze_stays_frozen():
    p = Odd(); assert p.lora_targets() == ["inp"]
    add_lora(p, 2, pretrained=False)
    assert p.words.weight.requires_grad and p.att.out_proj.weight.requires_grad and not p.fixed.requires_grad
    with pytest.raises(ValueError, match="1 modules are frozen.*fixed.*init_from"): check_frozen(p, pretrained=False)
    check_frozen(p, pretrained=True)
    merged = merge_lora(train(p))
    assert torch.allclose(merged.encode(make_batch()).pooled, p.encode(make_batch()).pooled, atol=1e-5)

def test_modules_frozen_at_random_values_are_named():
    p = add_lora(small(), 2, pretrained=True)
    with pytest.raises(ValueError, match="query.*eyes.0.conv.0"): check_frozen(p, pretrained=False)
    check_frozen(small(), False); q = add_lora(small(), 2, pretrained=False); check_frozen(q, False)
    q.state[0].lora_B.requires_grad_(False)   # an adapter that is not trained is no adapter
    with pytest.raises(ValueError, match="state.0"): check_frozen(q, False)

def test_arguments_that_cannot_be(monkeypatch):
    p = small()
    for rank,alpha in ((0, 8.), (-1, 8.), (2, 0.)):
        with pytest.raises(ValueError, match="rank >= 1"): add_lora(p, rank, alpha)
    before = bits(p)
    with pytest.raises(ValueError, match="lora_rank 9999 .* choose at most"): add_lora(p, 9999, 8.)   # also of a family that does not know before
    assert same(before, bits(p)) and not p.lora
    class Bare(Policy):
        def __init__(self): super().__init__(dict(H=8, action_dim=4)); self.head = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="no linear layer"): add_lora(Bare(), 2)
    with pytest.raises(ValueError, match="nothing to merge"): merge_lora(p)
    add_lora(p, 2)
    with pytest.raises(ValueError, match="already"): add_lora(p, 2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"clvla\[peft\]"): add_lora(small(), 2)


# --- frozen stays frozen
@pytest.mark.parametrize("pretrained", [True, False])
def test_optimizer_and_average_leave_frozen_weights_alone(pretrained):
    p = add_lora(small(), 2, pretrained=pretrained); frozen,trained = bits(p, True),bits(p, False)
    groups = param_groups(p, 1e-3)
    assert {id(q) for g in groups for q in g["params"]} == {id(q) for q in p.parameters() if q.requires_grad}
    assert sum(len(g["params"]) for g in groups) == len(trained)
    ema = EMA(p, .5); assert ema.shadow.keys() == trained.keys()
    train(p, ema=ema)
    assert same(bits(p, True), frozen) and all(not torch.equal(v, trained[k]) for k,v in bits(p, False).items())
    raw = bits(p)
    with ema.swap(p): assert same(bits(p, True), frozen) and not same(bits(p, False), {k: raw[k] for k in trained})
    assert same(bits(p), raw)
    ema.copy_to(p); assert same(bits(p, True), frozen) and same(bits(p, False), ema.shadow)


def cl_context(policy):
    "Two tasks of random frames and a context on a policy with adapters."
    data = QuickData({t: make_batch(24, i, t) for i,t in enumerate(("push", "pull"))})
    stream = QuickStream(("push", "pull"), data, data)
    opt = torch.optim.AdamW(param_groups(policy, 1e-2, .1))
    return Loop(CLContext(policy=policy, stream=stream, data=data), Engine(policy, opt, max_norm=1.), torch_rng(0, "lora noise"))

def cl_task(algo, loop, t, steps=3):
    ctx = loop.ctx
    ctx.t,ctx.task_id,ctx.step = t,ctx.stream.ids[t],0
    ctx.loader = QuickLoader(ctx.data, [ctx.task_id], 0, f"stage {t}")
    call_hook(algo, "on_task_start", ctx)
    for _ in range(steps): cl_step(algo, loop, 6)
    call_hook(algo, "on_task_end", ctx)

@pytest.mark.parametrize("name,kw", [("sequential", {}), ("er", dict(replay_ratio=.5)),
                                     ("mir", dict(replay_ratio=.5, candidates=6, top_k=3, n_draws=1)),
                                     ("ewc", dict(n_batches=1, B=4, lam=10.)), ("l2", {}), ("si", {}), ("mas", dict(n_batches=1)), ("from_scratch", {}), ("gdumb", dict(total_size=90)), ("der", dict(buffer_size=50)), ("gem", dict(buffer_size=50, n_ref=8)), ("rwalk", dict(interval=5)), ("gss", dict(buffer_size=8))])
@pytest.mark.parametrize("pretrained", [True, False])
def test_algorithms_train_adapters_and_nothing_that_is_frozen(name, kw, pretrained):
    p = add_lora(small(), 2, pretrained=pretrained, dropout=.1*pretrained)
    loop,algo = cl_context(p),make_algo(name, 0, **kw); ctx = loop.ctx
    frozen = bits(p, True); assert ctx.params().keys() == bits(p, False).keys()
    cl_task(algo, loop, 0); between = bits(p, False); cl_task(algo, loop, 1)
    assert same(bits(p, True), frozen)
    assert all(not torch.equal(v, between[k]) for k,v in bits(p, False).items() if ".lora_" in k)
    assert {id(q) for q in loop.engine.raw.state} == {id(q) for q in p.parameters() if q.requires_grad}
    if name in ("er", "mir"): assert loop.drawn["push"] == 18+9   # its own steps, and half of the next ones
    if name == "ewc":
        assert algo.names == list(ctx.params()) and algo.F.numel() == n_params(p)
        assert float(ctx.penalty.detach()) > 0

def test_mirs_look_aside_leaves_every_weight_as_it_was():
    p = add_lora(small(), 2); loop = cl_context(p); ctx = loop.ctx; cl_task(make_algo("sequential", 0), loop, 0)
    loss_of(p, make_batch(7), torch_rng(7, "grad"))[0].backward()   # a gradient stands, as it does between backward and step
    gradients = lambda: {k: q.grad.clone() for k,q in p.named_parameters() if q.grad is not None}
    before,grads,state = bits(p),gradients(),torch.get_rng_state(); assert grads.keys() == bits(p, False).keys()
    s = interference(ctx, ctx.data.fetch("pull", range(6)), ctx.data.fetch("push", range(8)), torch_rng(0, "mir"), 2)
    assert s.shape == (8,) and s.isfinite().all() and s.any()
    assert same(bits(p), before) and same(gradients(), grads)
    assert torch.equal(torch.get_rng_state(), state) and p.training and all(m.training for m in p.modules())


# --- checkpoints in two parts
@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "A run with a base, a checkpoint of trained adapters, the same merged, and a plain policy."
    root = tmp_path_factory.mktemp("run"); plain = train(make_policy("tiny", 32, head="l1"), 1)
    save_policy(plain, "tiny", root/"plain")
    policy = build_policy(settings(init_from=root/"plain"), 4, 4)
    sum_ = save_base(policy, root/"weights"); train(policy)
    save_policy(policy, "tiny", root/"checkpoints"/"000-push"); save_policy(merge_lora(policy), "tiny", root/"merged")
    return SimpleNamespace(root=root, plain=plain, policy=policy, sha=sum_, point=root/"checkpoints"/"000-push")

def test_without_adapters_a_folder_is_as_it_was(run):
    p = run.plain; assert p.lora is None
    whole = save({k: v.clone() for k,v in p.state_dict().items()})
    assert (run.root/"plain"/"weights.safetensors").read_bytes() == whole
    about = json.loads((run.root/"plain"/"policy.json").read_text())
    assert list(about) == ["policy", "config"] and about["config"] == json.loads(json.dumps(p.config))
    assert "lora" not in read_policy(run.root/"plain") and stored_weights(p, frozen=True) == {}

def test_a_checkpoint_holds_what_is_trained_and_names_its_base(run):
    held,base = load_file(run.point/"weights.safetensors"),load_file(run.root/"weights"/f"{run.sha}.safetensors")
    assert held.keys() == bits(run.policy, False).keys() and base.keys() == bits(run.policy, True).keys()
    about = json.loads((run.point/"policy.json").read_text())["lora"]
    assert about == dict(rank=2, alpha=8., pretrained=True, dropout=0., init="kaiming", base=dict(path=f"../../weights/{run.sha}.safetensors", sha256=run.sha))
    assert run.sha == sha256(run.root/"weights"/f"{run.sha}.safetensors")
    merged = load_file(run.root/"merged"/"weights.safetensors")
    assert merged.keys() == run.plain.state_dict().keys()

def test_all_three_act_the_same_in_a_fresh_process(run):
    code = f"""import sys; sys.path.insert(0, {str(__file__).rsplit('/', 1)[0]!r})
import json
from clvla.policies.all import load_policy
roots = {[str(run.root/k) for k in ('plain', 'merged')] + [str(run.point)]!r}
a,b = [load_policy(r) for r in roots[:2]]; assert 'peft' not in sys.modules
from test_lora import chunk
print(json.dumps([chunk(p).tolist() for p in (a, b, load_policy(roots[2]))]))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    plain,merged,adapters = map(torch.tensor, json.loads(done.stdout))
    assert torch.equal(plain, chunk(run.plain)) and torch.equal(adapters, chunk(run.policy))
    assert torch.equal(merged, chunk(merge_lora(run.policy))) and torch.allclose(merged, adapters, atol=1e-5)
    assert not torch.allclose(plain, adapters, atol=1e-3)

def test_merging_leaves_the_policy_alone_and_gives_an_ordinary_one(run):
    before = bits(run.policy); merged = merge_lora(run.policy)
    assert same(bits(run.policy), before) and merged.lora is None and n_params(merged) == n_params(run.plain)
    assert [*merged.state_dict()] == [*run.plain.state_dict()] and type(merged) is type(run.plain)
    assert not any("peft" in type(m).__module__ for m in merged.modules())
    bad = deepcopy(run.policy); bad.state[0].lora_B["default"].weight.data[0] = torch.nan
    with pytest.raises(ValueError, match="NaN"): merge_lora(bad)

def test_a_moved_run_still_finds_its_base_and_continues(run, tmp_path):
    shutil.copytree(run.root, tmp_path/"moved"); point = tmp_path/"moved"/"checkpoints"/"000-push"
    back = load_policy(point)
    assert same(bits(back), bits(run.policy)) and same(bits(back, False), bits(run.policy, False))
    again = save_policy(back, "tiny", point.parent/"001-pull")
    assert json.loads((again/"policy.json").read_text()) == json.loads((point/"policy.json").read_text())
    assert (again/"weights.safetensors").read_bytes() == (point/"weights.safetensors").read_bytes()
    fresh = build_policy(settings(init_from=str(tmp_path/"moved"/"plain")), 4, 4)   # as a run does that starts again
    assert save_base(fresh, tmp_path/"moved"/"weights", run.sha) == run.sha
    load_weights(fresh, point); assert same(bits(fresh), bits(run.policy))

def edit(folder, change):
    d = load_file(folder/"weights.safetensors"); change(d); save_file(d, folder/"weights.safetensors")

def test_missing_unexpected_and_misshapen_weights_are_errors(run, tmp_path):
    def copy(name, change):
        shutil.copytree(run.root, tmp_path/name); point = tmp_path/name/"checkpoints"/"000-push"; edit(point, change)
        return point
    one = "state.0.lora_A.default.weight"
    with pytest.raises(ValueError, match=f"missing {one}"): load_policy(copy("a", lambda d: d.pop(one)))
    extra = lambda d: d.update({"state.0.base_layer.weight": torch.zeros(96, 4)})
    with pytest.raises(ValueError, match="unexpected state.0.base_layer.weight"): load_policy(copy("b", extra))
    with pytest.raises(ValueError, match=r"is \(3, 4\), the policy has \(2, 4\)"):
        load_policy(copy("c", lambda d: d.update({one: torch.zeros(3, 4)})))
    before = bits(run.policy)
    with pytest.raises(ValueError, match="1 differences"):
        load_weights(run.policy, tmp_path/"a"/"checkpoints"/"000-push")
    assert same(bits(run.policy), before)
    (tmp_path/"cut.safetensors").write_bytes((run.point/"weights.safetensors").read_bytes()[:5000])
    with pytest.raises(ValueError, match="cut off"): load_weights(run.policy, tmp_path/"cut.safetensors")

def test_a_base_that_is_missing_or_another_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setenv("CLVLA_DATA", str(tmp_path/"data"))
    shutil.copytree(run.point, tmp_path/"alone")
    with pytest.raises(ValueError, match="frozen weights of this policy are missing"): load_policy(tmp_path/"alone")
    shutil.copytree(run.root/"weights", tmp_path/"data"/"weights")      # a run's folder was moved without its data
    assert same(bits(load_policy(tmp_path/"alone")), bits(run.policy))
    shutil.copytree(run.root, tmp_path/"run"); base = tmp_path/"run"/"weights"/f"{run.sha}.safetensors"
    d = load_file(base); d["query"] += 1; save_file(d, base)
    with pytest.raises(ValueError, match="another base"): load_policy(tmp_path/"run"/"checkpoints"/"000-push")
    other = build_policy(settings(seed=1, init_from=run.root/"merged"), 4, 4)
    with pytest.raises(ValueError, match="not those of the checkpoint"): save_base(other, tmp_path/"run"/"weights", run.sha)
    assert list((tmp_path/"run"/"weights").iterdir()) == [base]
    save_base(other, tmp_path/"run"/"weights")
    with pytest.raises(ValueError, match="trained on other frozen weights"): load_weights(other, run.point)

def test_runs_with_the_same_frozen_weights_share_one_file_and_damage_is_mended(run, tmp_path):
    said,ps = [],[build_policy(settings(seed=s, init_from=run.root/"plain"), 4, 4) for s in (1, 2)]
    assert not same(bits(ps[0], False), bits(ps[1], False)) and {save_base(p, tmp_path/"w") for p in ps} == {run.sha}
    (path,) = (tmp_path/"w").iterdir(); made = path.stat().st_mtime_ns
    save_base(ps[0], tmp_path/"w", say=said.append)
    assert path.stat().st_mtime_ns == made and not said                 # it lies there already
    whole = path.read_bytes(); path.write_bytes(whole[:-1]+bytes([whole[-1]^4]))
    with pytest.raises(ValueError, match="another base"): check_base(path, run.sha)
    save_base(ps[0], tmp_path/"w", run.sha, said.append)
    assert path.read_bytes() == whole and len(said) == 1 and "damaged" in said[0] and list((tmp_path/"w").iterdir()) == [path]

def test_an_old_run_with_its_base_beside_the_checkpoints_is_read(run, tmp_path):
    shutil.copytree(run.point, tmp_path/"old"/"checkpoints"/"000-push"); point = tmp_path/"old"/"checkpoints"/"000-push"
    shutil.copy(run.root/"weights"/f"{run.sha}.safetensors", tmp_path/"old"/"base.safetensors")
    d = json.loads((point/"policy.json").read_text()); d["lora"]["base"]["path"] = "../../base.safetensors"
    del d["config"]["n_actions"]                                        # an argument of later
    (point/"policy.json").write_text(json.dumps(d))
    assert same(bits(load_policy(point)), bits(run.policy)) and read_base(point)["sha256"] == run.sha
    goes_on = build_policy(settings(init_from=run.root/"plain"), 4, 4)  # and goes on with the new place
    assert save_base(goes_on, tmp_path/"data"/"weights", read_base(point)["sha256"]) == run.sha
    load_weights(goes_on, point); again = save_policy(goes_on, "tiny", point.parent/"001-pull")
    assert json.loads((again/"policy.json").read_text())["lora"]["base"]["path"] == f"../../../data/weights/{run.sha}.safetensors"

def test_weights_that_are_frozen_later_stay_in_the_checkpoint(tmp_path):
    p = add_lora(small(), 2); save_base(p, tmp_path/"w"); p.state[0].lora_A.requires_grad_(False)
    held = load_file(save_policy(p, "tiny", tmp_path/"c"/"p")/"weights.safetensors")
    assert "state.0.lora_A.default.weight" in held and same(bits(load_policy(tmp_path/"c"/"p")), bits(p))

def test_a_family_that_freezes_pretrained_parts_has_a_base_without_adapters(tmp_path, monkeypatch):
    from clvla.policies.all import policies
    from clvla.policies.tiny import Tiny
    class Sees(Tiny):
        "Its eyes came from elsewhere."
        def __init__(self, **kw): super().__init__(**kw); self.eyes.requires_grad_(False)
        def pretrained(self): return ["eyes."]
    monkeypatch.setitem(policies, "sees", Sees)
    p = build_policy(settings(model="sees", lora_rank=0, lora_alpha=1.), 4, 4)
    assert p.lora is None and p.frozen and all(k.startswith("eyes.") for k in p.frozen)
    with pytest.raises(ValueError, match="save_base"): save_policy(p, "sees", tmp_path/"c"/"p")
    sha = save_base(p, tmp_path/"w"); train(p); point = save_policy(p, "sees", tmp_path/"c"/"p")
    assert not any(k.startswith("eyes.") for k in load_file(point/"weights.safetensors"))
    back = load_policy(point); assert same(bits(back), bits(p)) and read_base(point)["sha256"] == sha
    plain = build_policy(settings(model="sees", lora_rank=0, seed=9, init_from=point), 4, 4); assert same(bits(plain), bits(p))
    lora = add_lora(make_policy("sees", 32), 2, pretrained=False)
    assert not lora.eyes[0].pos.requires_grad and lora.words.weight.requires_grad
    check_frozen(lora, False)

def test_other_settings_of_adapters_are_refused(run):
    for kw,match in [(dict(lora_rank=3), "rank 2, this policy has 3"),
                     (dict(lora_alpha=4.), "alpha 8.0, this policy has 4.0")]:
        with pytest.raises(ValueError, match=match):
            load_weights(build_policy(settings(init_from=run.root/"plain", **kw), 4, 4), run.point)
    with pytest.raises(ValueError, match="pretrained True, this policy has False"):
        load_weights(build_policy(settings(), 4, 4), run.point)
    with pytest.raises(ValueError, match="rank None, this policy has 2"): load_weights(run.policy, run.root/"plain")
    with pytest.raises(ValueError, match="holds adapters, and this policy"): load_weights(run.plain, run.point)

def test_a_policy_without_a_stored_base_is_not_saved(tmp_path):
    p = build_policy(settings(), 4, 4)
    with pytest.raises(ValueError, match="save_base"): save_policy(p, "tiny", tmp_path/"p")
    assert not (tmp_path/"p").exists()
    with pytest.raises(ValueError, match="has no base"): save_base(small(), tmp_path/"b")
    assert note_frozen(small()).frozen == ()

def test_persistent_buffers_travel_with_the_checkpoint(tmp_path):
    p = add_lora(small(), 2); p.register_buffer("seen", torch.tensor(3.))
    sha = save_base(p, tmp_path/"weights"); save_policy(p, "tiny", tmp_path/"checkpoints"/"p")
    assert "seen" in load_file(tmp_path/"checkpoints"/"p"/"weights.safetensors")
    assert "seen" not in load_file(tmp_path/"weights"/f"{sha}.safetensors")


# --- starting a run
def test_a_run_is_built_from_its_settings_alone(run, tmp_path):
    a,b = [build_policy(settings(), 4, 4) for _ in range(2)]
    assert same(bits(a), bits(b)) and a.lora["pretrained"] is False
    assert save_base(a, tmp_path/"a") == save_base(b, tmp_path/"b") != run.sha
    plain = build_policy(settings(lora_rank=0, seed=2), 4, 4)
    assert plain.lora is None and same(bits(plain), bits(make_policy("tiny", 32, head="l1", seed=2)))

@pytest.mark.parametrize("where", ["plain", "plain/weights.safetensors", "merged"])
def test_a_run_starts_from_a_stored_policy(run, where):
    want = {k: v for k,v in load_policy(run.root/where.split("/")[0]).state_dict().items()}
    p = build_policy(settings(lora_rank=0, seed=7, init_from=str(run.root/where)), 4, 4)
    assert same(dict(p.state_dict()), want)
    q = build_policy(settings(seed=7, init_from=str(run.root/where)), 4, 4)
    assert q.lora["pretrained"] and torch.equal(q.state[0].base_layer.weight, want["state.0.weight"])
    assert torch.allclose(chunk(p), chunk(q), atol=1e-6)

def test_a_checkpoint_of_adapters_is_no_start_until_merged(run, tmp_path):
    for path in (run.point, run.point/"weights.safetensors"):
        with pytest.raises(ValueError, match="save_policy.merge_lora.load_policy"):
            build_policy(settings(init_from=path), 4, 4)
    with pytest.raises(ValueError, match="before add_lora"): init_weights(run.policy, run.root/"plain")
    with pytest.raises(ValueError, match="no weights"): build_policy(settings(init_from=tmp_path), 4, 4)
    with pytest.raises(ValueError, match="missing head"):
        build_policy(settings(head="flow", init_from=run.root/"plain"), 4, 4)
