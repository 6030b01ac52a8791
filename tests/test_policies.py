"What every policy promises: shapes, gradients, padding, repeatability, storage, and errors that say what to do."
import functools, json, os, subprocess, sys, zlib
import pytest, torch
from clvla.core.batch import take, torch_rng
from torch.nn.functional import cross_entropy
from clvla.core.names import ACTION, IMAGE, IMAGES, N_ACTIONS, PAD, PROMPT, STATE
from clvla.policies.all import build_policy, check_policy, load_policy, make_policy, policies
from clvla.policies.base import Context, n_params, param_groups
from clvla.policies.ema import EMA
from clvla.policies.heads import DiscreteHead, FlowHead, L1Head, heads, masked_mean
from clvla.policies.tiny import Eye, Tiny, embed, hash_words, word_ids
from clvla.policies.weights import init_weights, load_weights, save_policy

torch.set_num_threads(1)
SHORT,LONG = "open a drawer","rotate the faucet counter-clockwise until the water in the kitchen runs"
WRIST = IMAGES+"wrist"

def make_batch(B=5, size=32, S=4, A=4, H=8, cameras=(IMAGE,), seed=0):
    g = torch_rng(seed, "test batch")
    pad = torch.zeros(B, H, dtype=torch.bool); pad[-1,3:] = True
    frames = lambda: torch.randint(0, 256, (B, size, size, 3), generator=g, dtype=torch.uint8).permute(0, 3, 1, 2)
    images = {k: frames() for k in cameras}
    return images | {STATE: torch.randn(B, S, generator=g), ACTION: torch.randn(B, H, A, generator=g), PAD: pad,
                     PROMPT: [(SHORT, LONG)[i%2] for i in range(B)]}

def keys_batch(B=5, n=6, **kw):
    "A batch of discrete actions: indices below n."
    b = make_batch(B, **kw); g = torch_rng(1, "keys")
    return b | {ACTION: torch.randint(0, n, (B, b[ACTION].shape[1], 1), generator=g).float()}

def loss_of(policy, batch, generator=None, **kw):
    noise,time = policy.draw(len(batch[ACTION]), generator)
    return policy(batch, noise=noise, time=time, **kw)

@pytest.fixture(params=[("tiny", h) for h in ("flow", "l1")], ids="-".join)   # the VLA families: test_vlm.py
def policy(request):
    name,head = request.param
    return make_policy(name, 32, 4, 4, 8, head)

def test_shapes_and_finite_loss(policy):
    batch = make_batch(); loss,out = loss_of(policy, batch)
    assert loss.ndim == 0 and loss.isfinite() and out["pred"].shape[-2:] == (8, 4)
    assert policy.predict_chunk(batch).shape == (5, 8, 4)
    assert policy.encode(batch).pooled.shape[0] == 5 and policy.encode(batch).tokens is None

def test_gradient_reaches_every_trained_leaf(policy):
    loss_of(policy, make_batch())[0].backward()
    dead = [k for k,p in policy.named_parameters() if p.grad is None or not p.grad.any()]
    assert dead == []

def test_sentence_alone_equals_sentence_in_padded_batch(policy):
    batch = make_batch(); noise,time = policy.draw(5, torch_rng(0, "pad"))
    pick = lambda x,i: None if x is None else x[i]
    each,_ = policy(batch, noise=noise, time=time, reduction="none")
    for i in (0, 1, 4):
        alone,_ = policy(take(batch, [i]), noise=pick(noise, [i]), time=pick(time, [i]), reduction="none")
        assert torch.allclose(alone[0], each[i], atol=1e-5)
    a = policy.predict_chunk(batch, generator=torch_rng(1, "pad"))
    b = policy.predict_chunk(take(batch, [0]), generator=torch_rng(1, "pad"))
    assert torch.allclose(a[0], b[0], atol=1e-5)

def test_the_words_matter(policy):
    batch = make_batch(2); other = batch | {PROMPT: ["close a drawer"]*2}; same = batch | {PROMPT: ["Open a DRAWER!"]*2}
    chunk = lambda b: policy.predict_chunk(b, generator=torch_rng(0, "words"))
    assert torch.equal(chunk(batch | {PROMPT: [SHORT]*2}), chunk(same))
    assert not torch.allclose(chunk(same), chunk(other), atol=1e-4)

def test_repeatable_with_given_noise(policy):
    batch = make_batch(); noise,time = policy.draw(5, torch_rng(0, "rep"))
    a,b = [policy(batch, noise=noise, time=time, reduction="none")[0] for _ in range(2)]
    assert torch.equal(a, b)
    c,d = [loss_of(policy, batch, torch_rng(2, "rep"))[0] for _ in range(2)]
    assert torch.equal(c, d)
    assert policy.needs_noise == (noise is not None)
    e,f = [policy.predict_chunk(batch, generator=torch_rng(3, "rep")) for _ in range(2)]
    assert torch.equal(e, f)

def test_rows_of_a_call_take_their_own_noise(policy):
    batch = make_batch(3); rows = [policy.chunk_noise(torch_rng(i, "row")) for i in range(3)]
    noise = None if rows[0] is None else torch.stack(rows)
    together = policy.predict_chunk(batch, noise=noise)
    one = policy.predict_chunk(take(batch, [1]), noise=None if noise is None else noise[1:2])
    assert torch.allclose(together[1], one[0], atol=1e-5)

def test_per_sample_losses_average_to_the_mean(policy):
    batch = make_batch(); noise,time = policy.draw(5, torch_rng(0, "mean"))
    each,_ = policy(batch, noise=noise, time=time, reduction="none")
    assert each.shape == (5,) and torch.allclose(each.mean(), policy(batch, noise=noise, time=time)[0])

def test_padded_steps_do_not_count(policy):
    batch = make_batch(); noise,time = policy.draw(5, torch_rng(0, "steps"))
    far = batch | {ACTION: batch[ACTION].clone()}; far[ACTION][-1,3:] = 7.
    a,b = [policy(x, noise=noise, time=time, reduction="none")[0] for x in (batch, far)]
    assert torch.equal(a[:4], b[:4])
    assert torch.allclose(a[4], b[4]) == (noise is None)   # a flow head sees padded steps, but is not asked about them

def test_all_padding_is_zero_not_nan():
    assert masked_mean(torch.ones(2, 3, 1), torch.ones(2, 3, dtype=torch.bool)).tolist() == [0., 0.]

def test_bf16_autocast_is_finite(policy):
    with torch.autocast("cpu", torch.bfloat16):
        loss,_ = loss_of(policy, make_batch()); chunk = policy.predict_chunk(make_batch())
    loss.backward()
    assert loss.isfinite() and loss.dtype == torch.float32 and chunk.dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in policy.parameters())

def test_saved_policy_acts_the_same_in_a_fresh_process(policy, tmp_path):
    batch = make_batch(2); save_policy(policy, "tiny", tmp_path/"p")
    code = f"""import sys; sys.path.insert(0, {str(__file__).rsplit('/', 1)[0]!r})
import json; from test_policies import *
p = load_policy({str(tmp_path/'p')!r})
print(json.dumps(p.predict_chunk(make_batch(2), generator=torch_rng(5, 'disk')).tolist()))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    here = policy.predict_chunk(batch, generator=torch_rng(5, "disk"))
    assert torch.equal(torch.tensor(json.loads(done.stdout)), here)

@pytest.mark.parametrize("k", range(2))
def test_threads_that_a_test_sets_end_with_it(k):
    "Else a policy of this process and the same one of a fresh process differ in the last bits."
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(torch.get_num_threads()+1)

def test_missing_unexpected_and_misshapen_weights_are_errors(tmp_path):
    save_policy(make_policy("tiny", 32), "tiny", tmp_path)
    l1 = make_policy("tiny", 32, head="l1")
    with pytest.raises(ValueError, match="missing head.*unexpected head"): load_weights(l1, tmp_path)
    with pytest.raises(ValueError, match=r"the policy has \("): load_weights(make_policy("tiny", 32, H=4), tmp_path)
    with pytest.raises(ValueError, match="no weights"): load_weights(make_policy("tiny", 32), tmp_path/"elsewhere")
    with pytest.raises(ValueError, match="no stored policy"): load_policy(tmp_path/"elsewhere")

@pytest.mark.parametrize("change,match", [
    (lambda b: b | {IMAGE: torch.zeros(5, 3, 64, 64, dtype=torch.uint8)}, r"\(B,3,32,32\)"),
    (lambda b: b | {IMAGE: b[IMAGE].float()}, "uint8"),
    (lambda b: b | {STATE: torch.zeros(5, 39)}, r"built for \(B,4\)"),
    (lambda b: b | {ACTION: torch.zeros(5, 8, 7)}, r"built for \(B,8,4\)"),
    (lambda b: {k: v for k,v in b.items() if k != IMAGE}, "lacks"),
    (lambda b: {k: v for k,v in b.items() if k != PAD}, "action_is_pad"),
    (lambda b: b | {PROMPT: ["word "*33]*5}, "33 words"),
], ids=["image size", "image type", "state size", "action size", "no image", "no padding mask", "long sentence"])
def test_a_batch_that_does_not_fit_is_named(policy, change, match):
    batch = make_batch()
    noise,time = policy.draw(5)
    with pytest.raises(ValueError, match=match): policy(change(batch), noise=noise, time=time)

def test_arguments_that_cannot_be():
    for kw,match in [(dict(image_size=50), "32, 48"), (dict(head="flwo"), "'flow'"), (dict(n_block=3), "n_blocks")]:
        with pytest.raises(ValueError, match=match): make_policy("tiny", **kw)
    with pytest.raises(ValueError, match="did you mean 'tiny'"): make_policy("tinny")
    flow,l1,batch = make_policy("tiny", 32),make_policy("tiny", 32, head="l1"),make_batch()
    noise,time = torch.zeros(4, 4, 8, 4),torch.zeros(4, 4)
    with pytest.raises(ValueError, match="policy.draw"): flow(batch, time=time)
    with pytest.raises(ValueError, match="policy.draw"): flow(batch)
    with pytest.raises(ValueError, match="do not fit"): flow(batch, noise=noise, time=time)
    with pytest.raises(ValueError, match="neither"): l1(batch, noise=noise)

@pytest.mark.parametrize("size", [32, 48, 64, 96])
def test_image_sizes_and_two_cameras(size):
    cameras = (IMAGE, WRIST); p = make_policy("tiny", size, 7, 7, 10, cameras=cameras)
    b = make_batch(2, size, 7, 7, 10, cameras)
    assert loss_of(p, b)[0].isfinite() and p.predict_chunk(b).shape == (2, 10, 7)
    assert len(p.eyes) == 2 and p.encode(b, tokens=True).tokens.shape[1] == embed(p, b)[0].shape[1]

def test_an_eye_gives_a_token_per_patch_and_one_for_where():
    assert Eye(48, 16)(torch.zeros(2, 3, 48, 48, dtype=torch.uint8)).shape == (2, 3*3+1, 16)

def test_asking_for_tokens_changes_nothing_in_what_the_head_reads(policy):
    b = make_batch(); assert torch.allclose(policy.encode(b, tokens=True).pooled, policy.encode(b).pooled, atol=1e-5)

def test_spans_cover_the_tokens_once_and_the_mask_marks_padding(policy):
    b = make_batch(4); seen = policy.encode(b, tokens=True); L = seen.tokens.shape[1]
    rows = [i for s in seen.spans.values() for i in range(s.start, s.stop)]
    assert rows == list(range(L)) and seen.mask.shape == (4, L) and seen.tokens.shape[2] == seen.pooled.shape[1]
    assert {"state", "words", "image.front"} <= seen.spans.keys()
    words = seen.mask[:,seen.spans["words"]]
    assert words.sum(1).tolist() == [policy.prompt_length(p) for p in b[PROMPT]]
    assert seen.mask.sum() - words.sum() == 4*(L-words.shape[1])      # only words are padded

def test_tokens_of_a_sample_alone_equal_those_in_a_padded_batch(policy):
    b = make_batch(4); full = policy.encode(b, tokens=True)
    for i in (0, 1):
        alone = policy.encode(take(b, [i]), tokens=True)
        for name in full.spans:
            if name == "words": continue
            assert torch.allclose(alone.tokens[0,alone.spans[name]], full.tokens[i,full.spans[name]], atol=1e-5), name
        n = policy.prompt_length(b[PROMPT][i])
        words = lambda c,k: c.tokens[k,c.spans["words"]][:n]
        assert torch.allclose(words(alone, 0), words(full, i), atol=1e-5)

def test_chunks_of_one_encoding_equal_single_calls(monkeypatch):
    p,b = make_policy("tiny", 32),make_batch(3)
    noise = torch.randn(3, 5, 8, 4, generator=torch_rng(0, "chunks"))
    each = torch.stack([p.predict_chunk(b, noise=noise[:,k]) for k in range(5)], 1)
    calls,encode = [],p.encode
    monkeypatch.setattr(p, "encode", lambda *a, **kw: calls.append(1) or encode(*a, **kw))
    many = p.predict_chunk(b, n=5, noise=noise)
    assert len(calls) == 1 and many.shape == (3, 5, 8, 4) and torch.allclose(many, each, atol=1e-5)
    drawn = p.predict_chunk(b, n=5, generator=torch_rng(1, "chunks")); g = torch_rng(1, "chunks")
    rows = torch.stack([p.chunk_noise(g) for _ in range(15)]).view(3, 5, 8, 4)
    assert torch.equal(drawn, p.predict_chunk(b, n=5, noise=rows))
    with pytest.raises(ValueError, match="expected .3, 5, 8, 4."): p.predict_chunk(b, n=5, noise=noise[:,:4])
    with pytest.raises(ValueError, match="1 chunk or more"): p.predict_chunk(b, n=0)
    with pytest.raises(ValueError, match="one answer"): make_policy("tiny", 32, head="l1").predict_chunk(b, n=2)

def test_weights_are_a_function_of_the_seed_and_global_generator_is_left_alone():
    torch.manual_seed(1); a = make_policy("tiny", 32, seed=2); x = torch.rand(3)
    torch.manual_seed(1); y = torch.rand(3); b = make_policy("tiny", 32, seed=2)
    assert torch.equal(x, y) and all(torch.equal(p, q) for p,q in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.query, make_policy("tiny", 32, seed=3).query)

def test_size_is_about_what_the_page_says():
    assert .35e6 < n_params(make_policy("tiny", 48)) < .55e6

def test_exact_field_has_zero_loss_and_euler_recovers_the_data():
    class Exact(FlowHead):
        def velocity(self, h, x, t): return (x - h.view(-1, 1, 8, 4))/t[...,None,None]
    g = torch_rng(0, "exact"); head,action = Exact(32, 8, 4),torch.randn(6, 8, 4, generator=g)
    known = Context(pooled=action.flatten(1))
    loss,_ = head.loss(known, action, torch.zeros(6, 8, dtype=torch.bool), *head.draw(6, g))
    assert loss.max() < 1e-6
    for n in (1, 4, 10):
        head.n_euler = n
        assert torch.allclose(head.sample(known, torch.randn(6, 8, 4, generator=g)), action, atol=1e-5)

def test_euler_converges_to_a_gaussian_with_a_curved_field():
    "Data N(m, s^2): the marginal velocity is known in closed form, and its flow carries N(0,1) to N(m, s^2)."
    m,s = 2.,.5
    class Field(FlowHead):
        def velocity(self, h, x, t):
            t = t[...,None,None]; var = t**2 + (1-t)**2*s**2
            return (t - (1-t)*s**2)/var*(x - (1-t)*m) - m
    noise = torch.randn(20000, 1, 1, generator=torch_rng(0, "gauss"))
    x = Field(1, 1, 1, n_euler=200).sample(Context(pooled=torch.zeros(20000, 1)), noise)
    assert abs(x.mean()-m) < .02 and abs(x.std()-s) < .02

def test_l1_head():
    head,h,a = L1Head(8, 3, 2),Context(pooled=torch.randn(4, 8)),torch.zeros(4, 3, 2); pad = torch.zeros(4, 3, dtype=torch.bool)
    loss,out = head.loss(h, a, pad)
    assert torch.allclose(loss, out["pred"].abs().flatten(1).mean(1))
    assert head.draw(4) == (None, None) and head.chunk_noise() is None

def test_hashed_words_are_the_same_everywhere():
    assert word_ids("Push and close a window", 512) == word_ids("push, and close... a WINDOW", 512)
    assert hash_words(["", "a"], 512).shape == (2, 1) and hash_words([""], 512).shape == (1, 0)
    assert hash_words(["open a drawer"], 512).tolist() == [[*word_ids("open a drawer", 512)]]
    assert word_ids("drawer", 512) == (1 + zlib.crc32(b"drawer")%511,) == (383,)

def test_groups_hold_every_trained_parameter_once():
    p = make_policy("tiny", 32); p.words.weight.requires_grad_(False)
    groups = param_groups(p, 1e-3, 1e-2, lr_of={"head": 1e-4, "head.net": 1e-5})
    ids = [id(q) for g in groups for q in g["params"]]
    assert len(ids) == len(set(ids))
    assert sum(q.numel() for g in groups for q in g["params"]) == n_params(p) < n_params(p, trained=False)
    assert {g["lr"] for g in groups} == {1e-3, 1e-4, 1e-5} and {g["weight_decay"] for g in groups} == {0., 1e-2}
    assert all(q.ndim > 1 for g in groups if g["weight_decay"] for q in g["params"])
    near = torch.nn.ModuleDict({k: torch.nn.Linear(2, 2) for k in ("head", "header")})
    rates = {g["name"]: (len(g["params"]), g["lr"]) for g in param_groups(near, 1., lr_of={"head": .1})}
    assert rates == {"all/decay": (1, 1.), "all/plain": (1, 1.), "head/decay": (1, .1), "head/plain": (1, .1)}
    assert [g["lr"] for g in param_groups(near, 1., lr_of={"head.": .1})] == [.1, .1, 1., 1.]
    with pytest.raises(ValueError, match="no parameter lies in 'hea'; did you mean 'head"): param_groups(near, 1., lr_of=dict(hea=.1))
    with pytest.raises(ValueError, match="did you mean"): param_groups(p, 1e-3, lr_of={"eyess.0.conv.0.weight": 1.})
    with pytest.raises(ValueError, match="frozen"): param_groups(p.requires_grad_(False), 1e-3)

def test_ema_follows_evaluates_and_hands_over():
    p = make_policy("tiny", 32); start = [q.detach().clone() for q in p.parameters()]; ema = EMA(p)
    opt = torch.optim.SGD(p.parameters(), .1)
    for i in range(3):
        loss,_ = loss_of(p, make_batch(seed=i), torch_rng(i, "ema"))
        opt.zero_grad(); loss.backward(); opt.step(); ema.update(p)
    raw = [q.detach().clone() for q in p.parameters()]
    with ema.swap(p): inside = [q.detach().clone() for q in p.parameters()]
    same = lambda a,b: all(torch.equal(x, y) for x,y in zip(a, b))
    assert same(p.parameters(), raw) and same(inside, ema.shadow.values())
    assert not same(inside, raw) and not same(inside, start)
    ema.copy_to(p); assert same(p.parameters(), inside)
    ema.restart(p); assert ema.s == 0 and same(ema.shadow.values(), p.parameters())
    p.query.requires_grad_(False)
    with pytest.raises(ValueError, match="after freezing"): ema.update(p)

def test_it_learns_a_handful_of_samples(policy):
    batch = make_batch(4); opt = torch.optim.AdamW(param_groups(policy, 1e-3)); g = torch_rng(0, "learn")
    first = loss_of(policy, batch, torch_rng(1, "learn"))[0].item()
    for _ in range(60):
        loss,_ = loss_of(policy, batch, g); opt.zero_grad(); loss.backward(); opt.step()
    assert loss_of(policy, batch, torch_rng(1, "learn"))[0].item() < .5*first

def test_unknown_reduction(policy):
    with pytest.raises(ValueError, match="'mean' or 'none'"): policy(make_batch(), reduction="sum")

def test_policies_are_made_of_the_registry():
    assert policies["tiny"] is Tiny


# --- discrete actions
def test_discrete_loss_is_torchs_cross_entropy_over_the_steps_that_happened():
    head,n = DiscreteHead(8, 5, 1, n_actions=6),torch.tensor([6, 3, 4])
    ctx = Context(pooled=torch.randn(3, 8, generator=torch_rng(0, "h")), n_actions=n)
    action = torch.randint(0, 3, (3, 5, 1), generator=torch_rng(0, "a")).float()
    pad = torch.zeros(3, 5, dtype=torch.bool); pad[1,2:] = True
    loss,out = head.loss(ctx, action, pad); z = head.net(ctx.pooled).view(3, 5, 6)
    for i in range(3):
        steps = int((~pad[i]).sum())
        want = cross_entropy(z[i,:steps,:n[i]], action[i,:steps,0].long())   # only the actions that the sample has
        assert torch.allclose(loss[i], want, atol=1e-6)
    loss.sum().backward()
    assert all(p.grad.isfinite().all() for p in head.parameters())
    none = head.loss(Context(pooled=ctx.pooled), action, pad)[0]
    assert torch.allclose(none[0], loss[0]) and (none[1:] > loss[1:]).all()

def test_discrete_policy_takes_only_actions_that_a_task_has():
    p = make_policy("tiny", 32, action_dim=1, head="discrete", n_actions=6)
    b = keys_batch(20) | {N_ACTIONS: torch.tensor([2, 6]*10)}
    with torch.no_grad(): p.head.net[2].bias.view(8, 6)[:,5] += 50.   # it would always choose the last
    chunk = p.predict_chunk(b)
    assert chunk.shape == (20, 8, 1) and chunk.dtype == torch.float32
    assert chunk[::2].max() <= 1 and (chunk[1::2] == 5).all()
    free = {k: v for k,v in b.items() if k != N_ACTIONS}
    assert (p.predict_chunk(free) == 5).all()
    assert p.draw(3) == (None, None) and p.chunk_noise() is None and not p.needs_noise
    with pytest.raises(ValueError, match="expected whole numbers from 0"): p(b)
    with pytest.raises(ValueError, match="one answer"): p.predict_chunk(b, n=2)

def test_discrete_policy_learns_is_stored_and_averages():
    p = make_policy("tiny", 32, action_dim=1, head="discrete", n_actions=6, D=32); b = keys_batch(4)
    opt = torch.optim.AdamW(param_groups(p, 3e-3)); first = p(b)[0].item()
    for _ in range(60): opt.zero_grad(); p(b)[0].backward(); opt.step()
    each = p(b, reduction="none")[0]
    assert torch.allclose(each.mean(), p(b)[0]) and each.mean() < .5*first
    assert (p.predict_chunk(b) == b[ACTION])[~b[PAD]].float().mean() > .8

def test_discrete_policy_from_disk(tmp_path):
    p = make_policy("tiny", 32, action_dim=1, head="discrete", n_actions=6, D=32)
    q = load_policy(save_policy(p, "tiny", tmp_path/"p"))
    assert torch.equal(p.predict_chunk(keys_batch()), q.predict_chunk(keys_batch()))


# --- refused without building
@pytest.mark.parametrize("kw,match", [
    (dict(D=7), "D is 7, expected a multiple of 4"), (dict(D="big"), "D is 'big', expected a multiple"), (dict(D=4.), "D is 4.0"),
    (dict(n_blocks=-1), "n_blocks is -1"), (dict(n_blocks=True), "whole number"), (dict(n_rows=1), "from 2"), (dict(max_words=0), "max_words is 0"),
    (dict(H=0), "H is 0"), (dict(action_dim="4"), "action_dim is '4'"), (dict(image_size=50), "takes 32, 48, 64, 80, 96"),
    (dict(image_size={IMAGE: 48, WRIST: 50}), "wrist"), (dict(image_size={IMAGE: 48}, cameras=[IMAGE, WRIST]), "name the same ones"),
    (dict(image_size=None), "image_size of"), (dict(image_size={}), "cameras are"), (dict(cameras=3), "cameras are 3"), (dict(cameras=[]), "cameras are"),
    (dict(cameras=[IMAGE, IMAGE]), "different image keys"), (dict(cameras=["front"]), "begin with"), (dict(head="flwo"), "did you mean 'flow'"),
    (dict(head="discrete"), "found n_actions None"), (dict(head="discrete", action_dim=1, n_actions=1), "from 2"),
    (dict(head="discrete", n_actions=5), "found action_dim 4"), (dict(n_actions=5), "5 discrete actions, and head 'flow' predicts numbers"), (dict(n_block=3), "'n_blocks'"),
    (dict(seed=3), "no argument 'seed'")], ids=str)
def test_check_refuses_and_builds_nothing(kw, match, monkeypatch):
    made = []
    monkeypatch.setattr(torch.nn.Parameter, "__new__", lambda *a, **k: made.append(1))
    with pytest.raises(ValueError, match=match): policies["tiny"].check(**kw)
    policies["tiny"].check(image_size={IMAGE: 64, WRIST: 32}, D=4096, n_blocks=48)     # a large one, in no time
    assert not made

class Run:
    model,image_size,chunk,head,seed,lora_rank,lora_alpha,init_from,model_kw = "tiny",32,8,"flow",0,0,16.,"",{}
    def __init__(self, **kw): self.__dict__.update(kw)

def test_a_runs_settings_are_checked_without_building(monkeypatch):
    monkeypatch.setattr(Tiny, "__init__", functools.wraps(Tiny.__init__)(lambda self, **kw: pytest.fail("built")))
    check_policy(Run()); check_policy(Run(lora_rank=96)); check_policy(Run(head="discrete")); check_policy(Run(head="discrete"), action_dim=1, n_actions=7)
    for kw,match in [(dict(model="tinny"), "did you mean 'tiny'"), (dict(model_kw=dict(D="big")), "'big'"), (dict(model_kw=dict(H=3)), "leave it out"),
                     (dict(image_size=50), "takes 32"), (dict(lora_rank=100000), "lora_rank 100000 .* at most 96"),
                     (dict(lora_rank=129, model_kw=dict(D=128)), "at most 128")]:
        with pytest.raises(ValueError, match=match): check_policy(Run(**kw))

def test_cameras_of_different_sizes():
    p = build_policy(Run(), 4, 4, {IMAGE: 48, WRIST: 32}); b = make_batch(3, 48); b[WRIST] = make_batch(3, 32)[IMAGE]
    assert p.pixels == {IMAGE: 48, WRIST: 32} and loss_of(p, b)[0].isfinite()
    n = {k: s.stop-s.start for k,s in p.encode(b).spans.items()}
    assert (n["image.front"], n["image.wrist"]) == (10, 5)
    with pytest.raises(ValueError, match=r"wrist.*\(B,3,32,32\)"): p.predict_chunk(b | {WRIST: b[IMAGE]})
    same = build_policy(Run(), 4, 4, {IMAGE: 32, WRIST: 32})
    assert same.config["image_size"] == 32 and same.config["cameras"] == [IMAGE, WRIST]

def test_instructions_are_looked_at_before_training():
    p = make_policy("tiny", 32, max_words=5); p.check_prompts([SHORT])
    with pytest.raises(ValueError, match="takes 12 positions, Tiny reads 5"): p.check_prompts([SHORT, LONG])

def test_a_head_of_ones_own():
    assert set(Tiny.heads) <= set(heads)
    with pytest.raises(ValueError, match="no head 'mine'"): make_policy("tiny", head="mine")


def test_weights_never_go_to_another_camera(tmp_path):
    "With three cameras in another order, init_from had given the wrist camera the eye of the side camera."
    wrist, side = "observation.images.wrist", "observation.images.side"
    save_policy(make_policy("tiny", 32, cameras=[IMAGE, wrist, side]), "tiny", tmp_path/"a")
    with pytest.raises(ValueError, match="cameras in the order .*wrist.*side.* this policy has .*side.*wrist"):
        init_weights(make_policy("tiny", 32, cameras=[IMAGE, side, wrist]), tmp_path/"a")
    init_weights(make_policy("tiny", 32, cameras=[IMAGE, wrist, side], seed=1), tmp_path/"a")
    init_weights(make_policy("tiny", {IMAGE: 32, wrist: 32, side: 32}, seed=1), tmp_path/"a")


def test_a_camera_can_be_left_out_where_the_sizes_differ():
    from types import SimpleNamespace
    cfg = SimpleNamespace(model="tiny", model_kw=dict(cameras=[IMAGE]), image_size=48, chunk=4, head="flow", seed=0, lora_rank=0, init_from="")
    sizes = {IMAGE: 48, WRIST: 32, IMAGES+"top": 48}
    check_policy(cfg, cameras=sizes)
    assert build_policy(cfg, 4, 4, sizes).pixels == {IMAGE: 48}
    for names in ([WRIST, IMAGE], [IMAGES+"top", IMAGE]):
        cfg.model_kw = dict(cameras=names)
        assert build_policy(cfg, 4, 4, sizes).pixels == {k: sizes[k] for k in names}
    cfg.model_kw = dict(cameras=[IMAGES+"back"])
    with pytest.raises(ValueError, match="names the camera 'observation.images.back'"): build_policy(cfg, 4, 4, sizes)
