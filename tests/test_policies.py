"What every policy promises: shapes, gradients, padding, repeatability, storage, and errors that say what to do."
import json, subprocess, sys, zlib
import pytest, torch
from clvla.core.batch import take, torch_rng
from clvla.core.names import ACTION, IMAGE, IMAGES, PAD, PROMPT, STATE
from clvla.policies.all import load_policy, make_policy, policies
from clvla.policies.base import load_weights, n_params, param_groups, save_policy
from clvla.policies.ema import EMA
from clvla.policies.heads import FlowHead, L1Head, masked_mean
from clvla.policies.tiny import Eye, Tiny, hash_words, word_ids

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

@pytest.fixture(params=[(n, h) for n in policies for h in ("flow", "l1")], ids="-".join)
def policy(request):
    name,head = request.param
    return make_policy(name, 32, 4, 4, 8, head)

def test_shapes_and_finite_loss(policy):
    batch = make_batch(); loss,out = policy(batch)
    assert loss.ndim == 0 and loss.isfinite() and out["pred"].shape[-2:] == (8, 4)
    assert policy.predict_chunk(batch).shape == (5, 8, 4)
    f = policy.features(batch)
    assert f.ndim == 3 and f.shape[0] == 5

def test_gradient_reaches_every_trained_leaf(policy):
    policy(make_batch())[0].backward()
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
    c,d = [policy(batch, generator=torch_rng(2, "rep"))[0] for _ in range(2)]
    assert torch.equal(c, d)
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
        loss,_ = policy(make_batch()); chunk = policy.predict_chunk(make_batch())
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
    with pytest.raises(ValueError, match=match): policy(change(make_batch()))

def test_arguments_that_cannot_be():
    for kw,match in [(dict(image_size=50), "32, 48"), (dict(head="flwo"), "'flow'"), (dict(n_block=3), "n_blocks")]:
        with pytest.raises(ValueError, match=match): make_policy("tiny", **kw)
    with pytest.raises(ValueError, match="did you mean 'tiny'"): make_policy("tinny")
    flow,l1,batch = make_policy("tiny", 32),make_policy("tiny", 32, head="l1"),make_batch()
    noise,time = torch.zeros(4, 4, 8, 4),torch.zeros(4, 4)
    with pytest.raises(ValueError, match="together"): flow(batch, time=time)
    with pytest.raises(ValueError, match="do not fit"): flow(batch, noise=noise, time=time)
    with pytest.raises(ValueError, match="neither"): l1(batch, noise=noise)

@pytest.mark.parametrize("size", [32, 48, 64, 96])
def test_image_sizes_and_two_cameras(size):
    cameras = (IMAGE, WRIST); p = make_policy("tiny", size, 7, 7, 10, cameras=cameras)
    b = make_batch(2, size, 7, 7, 10, cameras)
    assert p(b)[0].isfinite() and p.predict_chunk(b).shape == (2, 10, 7)
    assert len(p.eyes) == 2 and p.features(b).shape[1] == p.tokens(b)[0].shape[1]

def test_an_eye_gives_a_token_per_patch_and_one_for_where():
    assert Eye(48, 16)(torch.zeros(2, 3, 48, 48, dtype=torch.uint8)).shape == (2, 3*3+1, 16)

def test_context_is_the_first_of_the_features(policy):
    b = make_batch(); assert torch.allclose(policy.features(b)[:,0], policy.context(b), atol=1e-5)

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
    loss,_ = head.loss(action.flatten(1), action, torch.zeros(6, 8, dtype=torch.bool), *head.draw(6, g))
    assert loss.max() < 1e-6
    for n in (1, 4, 10):
        head.n_euler = n
        assert torch.allclose(head.sample(action.flatten(1), torch.randn(6, 8, 4, generator=g)), action, atol=1e-5)

def test_euler_converges_to_a_gaussian_with_a_curved_field():
    "Data N(m, s^2): the marginal velocity is known in closed form, and its flow carries N(0,1) to N(m, s^2)."
    m,s = 2.,.5
    class Field(FlowHead):
        def velocity(self, h, x, t):
            t = t[...,None,None]; var = t**2 + (1-t)**2*s**2
            return (t - (1-t)*s**2)/var*(x - (1-t)*m) - m
    noise = torch.randn(20000, 1, 1, generator=torch_rng(0, "gauss"))
    x = Field(1, 1, 1, n_euler=200).sample(torch.zeros(20000, 1), noise)
    assert abs(x.mean()-m) < .02 and abs(x.std()-s) < .02

def test_l1_head():
    head,h,a = L1Head(8, 3, 2),torch.randn(4, 8),torch.zeros(4, 3, 2); pad = torch.zeros(4, 3, dtype=torch.bool)
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
    with pytest.raises(ValueError, match="did you mean"): param_groups(p, 1e-3, lr_of={"eyess.0.conv.0.weight": 1.})
    with pytest.raises(ValueError, match="frozen"): param_groups(p.requires_grad_(False), 1e-3)

def test_ema_follows_evaluates_and_hands_over():
    p = make_policy("tiny", 32); start = [q.detach().clone() for q in p.parameters()]; ema = EMA(p)
    opt = torch.optim.SGD(p.parameters(), .1)
    for i in range(3):
        loss,_ = p(make_batch(seed=i), generator=torch_rng(i, "ema"))
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
    first = policy(batch, generator=torch_rng(1, "learn"))[0].item()
    for _ in range(60):
        loss,_ = policy(batch, generator=g); opt.zero_grad(); loss.backward(); opt.step()
    assert policy(batch, generator=torch_rng(1, "learn"))[0].item() < .5*first

def test_unknown_reduction(policy):
    with pytest.raises(ValueError, match="'mean' or 'none'"): policy(make_batch(), reduction="sum")

def test_policies_are_made_of_the_registry():
    assert policies["tiny"] is Tiny
