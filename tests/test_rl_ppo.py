"PPO and GRPO: advantages against loops, switches that change what they should and nothing else, small problems and their controls."
import math

import pytest
import torch
from clvla.core.batch import torch_rng
from clvla.core.state import load_state, save_state
from clvla.rl.actor import Actor, Value
from clvla.rl.grpo import GRPO, chunk_weights, group_advantages, kl_to_ref
from clvla.rl.ppo import PPO
from clvla.train.on_policy import approx_kl, check_rollout, clip_loss, explained, gae, value_loss

torch.set_num_threads(1)


# ---------------------------------------------------------------- advantages over chunks

def episode(n_steps, C, ending, draw, g):
    "Rewards, values at the chunks' borders, and what the page transitions would give for each chunk."
    cuts = [*range(0, n_steps, C), n_steps]
    r = torch.randn(n_steps, generator=draw, dtype=torch.double).tolist()
    values = torch.randn(len(cuts), generator=draw, dtype=torch.double)
    m = torch.tensor(cuts).diff()
    mask = g**m.double()
    if ending == "terminated": mask[-1] = 0   # the stored value behind the end stays, and must not count
    reward = torch.tensor([sum(g**i*x for i, x in enumerate(r[a:b])) for a, b in zip(cuts, cuts[1:])], dtype=torch.double)
    done = torch.arange(len(m)) == len(m)-1
    return cuts, r, values, dict(reward=reward, mask=mask, v=values[:-1], next_v=values[1:], done=done)


def by_definition(cuts, r, values, k, g, lam, ending):
    "The weighted mean of the estimates that look 1, 2, ... chunks ahead (GAE, eq. 16), from the single steps' rewards."
    def ahead(j):
        total = sum(g**(i-cuts[k])*r[i] for i in range(cuts[k], cuts[k+j]))
        beyond = 0 if ending == "terminated" and k+j == len(cuts)-1 else values[k+j]
        return total + g**(cuts[k+j]-cuts[k])*beyond - values[k]
    last = len(cuts)-1-k
    return sum((1-lam)*lam**(j-1)*ahead(j) for j in range(1, last)) + lam**(last-1)*ahead(last)


@pytest.mark.parametrize("lam", [0., .5, .95, 1.])
@pytest.mark.parametrize("ending", ["terminated", "truncated"])
def test_gae_is_the_definition_at_every_chunk(lam, ending):
    draw = torch_rng(0, "gae", lam, ending)
    for n_steps in range(1, 22):   # every length of the last chunk, several times
        cuts, r, values, rows = episode(n_steps, 4, ending, draw, .9)
        adv = gae(**rows, lam=lam)
        want = [by_definition(cuts, r, values.tolist(), k, .9, lam, ending) for k in range(len(adv))]
        assert adv.tolist() == pytest.approx(want, abs=1e-12), n_steps


def test_episodes_of_one_rollout_do_not_touch_and_the_ends_differ():
    draw = torch_rng(0, "several")
    ends = ["truncated", "terminated", "truncated", "truncated", "terminated"]
    parts = [episode(n, 4, e, draw, .9)[3] for n, e in zip((9, 4, 1, 12, 7), ends)]
    joined = {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
    alone = torch.cat([gae(**p, lam=.9) for p in parts])
    assert torch.equal(gae(**joined, lam=.9), alone)
    # what the definition guards against: running on behind a truncated end, and taking it for a terminal one
    assert not torch.allclose(gae(**{**joined, "done": torch.zeros_like(joined["done"])}, lam=.9), alone)
    terminal = {**joined, "mask": torch.where(joined["done"], 0, joined["mask"])}
    assert not torch.allclose(gae(**terminal, lam=.9), alone)


def test_lam_one_is_the_return_and_a_rollout_cut_off_bootstraps():
    cuts, r, values, rows = episode(10, 4, "terminated", torch_rng(0, "one"), .9)
    ret = [sum(.9**(i-c)*r[i] for i in range(c, 10)) for c in cuts[:-1]]
    assert (gae(**rows, lam=1)+rows["v"]).tolist() == pytest.approx(ret)
    first = {k: x[:2] for k, x in rows.items()}   # the episode goes on; the rollout does not
    assert not first["done"].any()
    want = sum(.9**i*r[i] for i in range(8)) + .9**8*values[2].item() - values[0].item()
    assert gae(**first, lam=1)[0].item() == pytest.approx(want)


# ---------------------------------------------------------------- losses

def test_the_clip_takes_gradients_away_and_changes_no_other():
    log_ratio = torch.linspace(-1, 1, 41, dtype=torch.double)
    for sign in (1., -1.):
        logp, adv = log_ratio.clone().requires_grad_(), torch.full((41,), sign, dtype=torch.double)
        grad, = torch.autograd.grad(clip_loss(logp, torch.zeros_like(logp), adv, .2).sum(), logp)
        beyond = log_ratio.exp() > 1.2 if sign > 0 else log_ratio.exp() < .8
        assert torch.equal(grad, torch.where(beyond, 0, -sign*log_ratio.exp()))
    plain = clip_loss(log_ratio, torch.zeros(41), torch.ones(41), None)
    assert torch.equal(plain, -log_ratio.exp())


def test_value_loss_and_kl():
    v, ret, old = torch.tensor([0., .1, .5, -.5]), torch.ones(4), torch.zeros(4)
    assert value_loss(v, ret, old).tolist() == pytest.approx([.5, .405, .125, 1.125])
    assert value_loss(v, ret, old, .2).tolist() == pytest.approx([.5, .405, .32, 1.125])
    draw = torch_rng(0, "kl")
    z = torch.randn(200_000, 6, generator=draw, dtype=torch.double)
    kl = approx_kl(-.5*(z-.2).square().sum(1), -.5*z.square().sum(1))
    assert kl.mean().item() == pytest.approx(6*.2**2/2, rel=.02) and (kl >= 0).all()
    assert explained(torch.zeros(3), torch.ones(3)) == 0 and explained(ret, ret) == 0
    assert explained(v, v) == pytest.approx(1) and explained(-v, v) == pytest.approx(-3)


# ---------------------------------------------------------------- a rollout to try the switches on

def make(cls=PPO, seed=0, dtype=torch.float, ref_dropout=.5, X=4, C=3, A=2, **kw):
    torch.manual_seed(seed)
    actor, value = Actor(X, C, A, hidden=32, ref_dropout=ref_dropout).to(dtype), Value(X, hidden=32).to(dtype)
    kw = {"lr": 1e-3, "seed": seed, "epochs": 4, "minibatch": 32, "kl_stop": None, **kw}
    return cls(actor, **kw) if cls is GRPO else cls(actor, value, **kw)


def rows(actor, E=32, chunks=3, dtype=torch.float, purpose="rows"):
    "E episodes of `chunks` chunks with random rewards, and what PPO and GRPO read."
    draw, n = torch_rng(0, purpose), E*chunks
    x = torch.randn(n, 4, generator=draw).to(dtype)
    ref = torch.randn(n, 3, 2, generator=draw).to(dtype)
    actor.eval()
    with torch.no_grad():
        action = actor.sample(x, ref, torch.randn(n, 3, 2, generator=draw).to(dtype))
        logp = actor.log_prob(x, ref, action)
    done = torch.arange(n)%chunks == chunks-1
    return dict(x=x, ref=ref, action=action, logp_old=logp, reward=action[:, 0, 0]*x[:, 0], next_x=x.roll(-1, 0), done=done,
                mask=torch.where(done, 0, .9).to(dtype), episode=torch.arange(n)//chunks, group=torch.arange(E)//4,
                ret=(torch.rand(E, generator=draw) < .4).to(dtype))


def flat(net): return torch.cat([p.detach().flatten() for p in net.parameters()])


def learn(cls=PPO, **kw):
    "Metrics, and the weights after one update."
    method = make(cls, **kw)
    info = method.update(rows(method.actor, dtype=kw.get("dtype", torch.float)))
    return info, {k: flat(net) for k, net in method.nets.items()}


@pytest.mark.parametrize("cls", [PPO, GRPO])
def test_the_ratio_is_one_before_the_first_step(cls):
    method = make(cls)
    rollout, first = rows(method.actor), []
    method.actor.train()                          # as a caller may have left it; an update plays by the rules of playing
    step = method.step
    method.step = lambda r: first.append(method.loss(r)[1]) or step(r)
    info = method.update(rollout)
    assert torch.allclose(first[0]["ratio"], torch.ones(32), atol=1e-4)
    assert first[0]["kl"].max() < 1e-8 and first[0]["clipped"].sum() == 0
    assert not torch.allclose(first[-1]["ratio"], torch.ones(32), atol=1e-2)
    assert info["drift"] < 1e-4 and not method.actor.training


def test_chunks_that_the_actor_did_not_draw_are_refused():
    method = make()
    rollout = rows(method.actor)
    method.actor.train()
    dropped = method.actor.log_prob(*(rollout[k] for k in ("x", "ref", "action")), torch_rng(0, "drop")).detach()
    with pytest.raises(ValueError, match="played by other weights or with reference dropout"):
        method.update({**rollout, "logp_old": dropped})
    older = make(max_drift=None)
    assert older.update({**rollout, "logp_old": rollout["logp_old"]-.5})["drift"] == pytest.approx(.5, abs=1e-3)


@pytest.mark.parametrize("cls", [PPO, GRPO])
@pytest.mark.parametrize("parts", [2, 3, 5, 32])
def test_accumulated_gradients_are_those_of_one_batch(cls, parts):
    grads = []
    for accumulation in (1, parts):
        method = make(cls, dtype=torch.double, accumulation=accumulation, epochs=1, minibatch=32, grad_clip=None)
        method.loop.engine.zero = lambda: None   # the gradients stay, to be looked at
        batch, _ = method.prepare(rows(method.actor, dtype=torch.double))
        method.step({k: v[:32] for k, v in batch.items()})
        grads.append(torch.cat([p.grad.flatten() for net in method.nets.values() for p in net.parameters()]))
    assert grads[0].norm() > 1e-3
    assert torch.allclose(grads[0], grads[1], rtol=1e-12, atol=1e-14)


def test_accumulation_changes_no_update():
    (one, w1), (four, w4) = learn(dtype=torch.double), learn(dtype=torch.double, accumulation=5)
    assert one.keys() == four.keys()
    for k in one: assert one[k] == pytest.approx(four[k], rel=1e-7, abs=1e-9), k
    for k in w1: assert torch.allclose(w1[k], w4[k], atol=1e-9)


def test_clip_changes_the_actor_alone():
    (info, w), (free, wf) = learn(clip=.05), learn(clip=None)
    assert torch.equal(w["value"], wf["value"]) and not torch.equal(w["actor"], wf["actor"])
    assert info["clipped"] > 0 and free["clipped"] == 0
    once = [learn(clip=c, epochs=1, minibatch=96)[1]["actor"] for c in (.05, None)]
    assert torch.equal(*once)                     # nothing to clip where the actor has not moved


def test_value_clip_changes_the_value_alone():
    (_, w), (_, wf) = learn(clip_value=.005), learn()
    assert torch.equal(w["actor"], wf["actor"]) and not torch.equal(w["value"], wf["value"])
    assert torch.allclose(learn(clip_value=1e6)[1]["value"], wf["value"], atol=1e-5)   # old + (new-old): rounded


def test_the_stop_leaves_out_steps_and_nothing_else():
    free = learn(epochs=6, lr=3e-3)
    info, w = learn(epochs=6, lr=3e-3, kl_stop=.05)
    assert 0 < info["steps"] < free[0]["steps"] == 18 and info["kl"] > .05
    method = make(epochs=6, lr=3e-3)              # the same steps, counted instead of stopped
    step, n = method.step, iter(range(100))
    method.step = lambda r: step(r) if next(n) < info["steps"] else (method.loss(r)[1] | {"kl": torch.tensor(1.)}, False)
    method.update(rows(method.actor))
    for k, net in method.nets.items(): assert torch.equal(flat(net), w[k])
    never = learn(epochs=6, lr=3e-3, kl_stop=1e6)
    for k in w: assert torch.equal(never[1][k], free[1][k])
    stopped, unstopped = (make(epochs=6, lr=3e-3, kl_stop=s) for s in (.05, None))
    for m in (stopped, unstopped): m.update(rows(m.actor))
    assert torch.equal(stopped.generator.get_state(), unstopped.generator.get_state())


def test_grad_clip_bounds_each_network_by_itself():
    long = [learn(grad_clip=g) for g in (None, .01)]
    assert not torch.equal(long[0][1]["actor"], long[1][1]["actor"])
    method = make(grad_clip=.01)
    method.loop.engine.zero = lambda: None
    batch, _ = method.prepare(rows(method.actor))
    info, _ = method.step(batch)
    for k, net in method.nets.items():
        assert info[f"grad_norm/{k}"] > .01
        assert math.sqrt(sum(p.grad.square().sum().item() for p in net.parameters())) == pytest.approx(.01, rel=1e-3)


def test_normalised_advantages_and_lam():
    batch = {flag: (m := make(normalise=flag)).prepare(rows(m.actor))[0] for flag in (True, False)}
    adv = batch[True]["adv"]
    assert adv.mean().item() == pytest.approx(0, abs=1e-6) and adv.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    raw = batch[False]["adv"]
    assert torch.allclose(adv, (raw-raw.mean())/raw.std(correction=0), atol=1e-5)
    for k in set(batch[True])-{"adv"}: assert torch.equal(batch[True][k], batch[False][k])
    method = make(lam=0., normalise=False)
    r = rows(method.actor)
    one = method.prepare(r)[0]
    with torch.no_grad(): assert torch.allclose(one["ret"], r["reward"]+r["mask"]*method.value(r["next_x"]), atol=1e-5)


@pytest.mark.parametrize("cls", [PPO, GRPO])
def test_the_same_seed_gives_the_same_bits(cls):
    (a, wa), (b, wb) = learn(cls), learn(cls)
    assert a == b
    for k in wa: assert torch.equal(wa[k], wb[k])
    method = make(cls, seed=0)
    method.generator = torch_rng(1, "other order")
    method.update(rows(method.actor))
    assert not torch.equal(flat(method.actor), wa["actor"])


@pytest.mark.parametrize("cls", [PPO, GRPO])
def test_resume_is_equal_to_the_bit(cls, tmp_path):
    def run(path=None):
        method = make(cls)
        method.update(rows(method.actor))
        if path:
            save_state(path, method.state_dict())
            method = make(cls, seed=5)
            method.load_state_dict(load_state(path))
        info = method.update(rows(method.actor, purpose="second"))
        return info, torch.cat([flat(net) for net in method.nets.values()]), method.n_updates
    (a, wa, n), (b, wb, _) = run(), run(tmp_path/"s.safetensors")
    assert a == b and torch.equal(wa, wb) and n == 2
    other = make(GRPO if cls is PPO else PPO)
    with pytest.raises(ValueError, match="the state has the networks"): other.load_state_dict(make(cls).state_dict())


# ---------------------------------------------------------------- groups

@pytest.mark.parametrize("scale", [True, False])
def test_group_advantages_are_those_of_a_loop(scale):
    draw = torch_rng(0, "groups")
    group = torch.randint(0, 9, (60,), generator=draw)*7-20          # any numbers, any order, any sizes
    ret = torch.randn(60, generator=draw, dtype=torch.double)
    ret[group == -20] = .1                                            # equal, and no number that floats hold exactly
    adv = group_advantages(ret, group, scale)
    for g in group.unique():
        r = ret[group == g]
        want = (r-r.mean())/((r.std(correction=0)+1e-6) if scale else 1)
        assert torch.allclose(adv[group == g], want, atol=1e-9)
    assert (adv[group == -20] == 0).all()
    order = torch.randperm(60, generator=draw)
    assert torch.allclose(group_advantages(ret[order], group[order], scale), adv[order], atol=1e-12)
    assert torch.allclose(group_advantages(ret+5*group, group, scale), adv, atol=1e-6)   # how hard a start is: no matter


def test_equal_returns_give_exactly_nothing():
    for value in (0., 1., .1, 1/3, 1e6+.1):
        assert (group_advantages(torch.full((7,), value), torch.zeros(7).long()) == 0).all()
    assert group_advantages(torch.tensor([1., .5]), torch.tensor([0, 1])).tolist() == [0, 0]


def test_weights_of_chunks():
    w = chunk_weights(torch.tensor([0, 0, 0, 1, 2, 2]))
    assert w.mean().item() == pytest.approx(1)
    assert [w[i].sum().item() for i in (slice(0, 3), slice(3, 4), slice(4, 6))] == pytest.approx([2, 2, 2])
    assert (chunk_weights(torch.tensor([0, 1, 1]), "chunk") == 1).all()
    same = [learn(GRPO, per=per)[1]["actor"] for per in ("episode", "chunk")]   # episodes of equal length: nothing to choose
    assert torch.allclose(*same, atol=1e-7)


def test_idle_groups_leave_the_actor_alone_and_beta_pulls_it_back():
    method = make(GRPO)
    before = flat(method.actor)
    info = method.update({**rows(method.actor), "ret": torch.ones(32)})
    assert info["idle"] == 1 and torch.equal(flat(method.actor), before)
    away = make(GRPO, beta=1.)
    with torch.no_grad(): away.actor.net[-1].bias += .3
    r = rows(away.actor)
    def distance():
        with torch.no_grad(): return kl_to_ref(away.actor(r["x"], r["ref"]), r["ref"], away.actor.std).mean().item()
    start = distance()
    away.update({**r, "ret": torch.ones(32)})
    assert distance() < .97*start


# ---------------------------------------------------------------- small problems

def bandit(actor, n, repeats, *purpose, explore=1):
    "n starts, each played `repeats` times: a success when every number of the one chunk is within .25 of the right one."
    draw, E = torch_rng(0, "bandit", *purpose), n*repeats
    x = (torch.rand(n, 4, generator=draw)*2-1).repeat_interleave(repeats, 0)
    right = .5*torch.stack([x, x.flip(1), x.roll(1, 1)], 1)[:, :, :2]
    ref = right + .28*torch.tensor([1, 0])*x[:, :2].sign()[:, None]
    actor.eval()
    with torch.no_grad():
        action = actor.sample(x, ref, torch.randn(E, 3, 2, generator=draw)*explore)
        logp = actor.log_prob(x, ref, action)
    ret = ((action-right).abs().amax((1, 2)) < .25).float()
    return dict(x=x, ref=ref, action=action, logp_old=logp, reward=ret, mask=torch.zeros(E), next_x=x, ret=ret,
                done=torch.ones(E).bool(), episode=torch.arange(E), group=torch.arange(n).repeat_interleave(repeats))


@pytest.mark.parametrize("cls", [PPO, GRPO])
@pytest.mark.parametrize("kind", ["learns", "shuffled"])
def test_bandit(cls, kind):
    method = make(cls, epochs=10, minibatch=64, kl_stop=.05)
    def success(): return bandit(method.actor, 1000, 1, "trial", explore=0)["ret"].mean().item()
    assert success() == 0
    for k in range(12):
        r = bandit(method.actor, 32, 8, k)
        if kind == "shuffled":
            order = torch.randperm(256, generator=torch_rng(0, "order", k))
            r |= dict(reward=r["reward"][order], ret=r["ret"][order])
        method.update(r)
    assert success() > .9 if kind == "learns" else success() < .3


STEPS, C, G = 12, 2, .95


def turn(p, angle): return p*math.cos(angle) + torch.stack([-p[:, 1], p[:, 0]], 1)*math.sin(angle)


def walk(actor, n, repeats, *purpose, explore=1):
    """Walk to the origin from a ring, two steps a chunk, 12 steps at most; the policy's chunks point 57 degrees beside it.
    A success ends the episode in the step in which it happens; an episode that runs out of time is truncated."""
    draw, E = torch_rng(0, "walk", *purpose), n*repeats
    angle, radius = torch.rand(n, generator=draw)*6.283, .4+.6*torch.rand(n, generator=draw)
    p = (radius[:, None]*torch.stack([angle.cos(), angle.sin()], 1)).repeat_interleave(repeats, 0)
    playing, success, parts = torch.ones(E, dtype=torch.bool), torch.zeros(E), []
    actor.eval()
    for k in range(STEPS//C):
        ref = (.5*turn(-p/p.norm(dim=1, keepdim=True), math.radians(57)))[:, None].expand(E, C, 2).contiguous()
        with torch.no_grad():
            action = actor.sample(p, ref, torch.randn(E, C, 2, generator=draw)*explore)
            logp = actor.log_prob(p, ref, action)
        path = p[:, None]+.25*action.cumsum(1)
        hit = path.norm(dim=2) < .2
        won = playing & hit.any(1)
        reward = torch.where(won, G**hit.float().argmax(1).float(), 0.)
        mask = torch.where(won, 0., G**C)
        parts.append(dict(x=p, ref=ref, action=action, logp_old=logp, reward=reward, mask=mask, next_x=path[:, -1],
                          done=won | (k == STEPS//C-1), episode=torch.arange(E), playing=playing))
        success = torch.where(won, 1., success)
        p, playing = path[:, -1], playing & ~won
    out = {key: torch.stack([part[key] for part in parts], 1).flatten(0, 1) for key in parts[0]}
    keep = out.pop("playing")
    return {key: v[keep] for key, v in out.items()} | dict(ret=success, group=torch.arange(n).repeat_interleave(repeats))


@pytest.mark.parametrize("cls", [PPO, GRPO])
@pytest.mark.parametrize("kind", ["learns", "shuffled"])
def test_walk_of_many_chunks(cls, kind):
    method = make(cls, X=2, C=C, A=2, epochs=5, minibatch=128, kl_stop=.05)
    def success(): return walk(method.actor, 500, 1, "trial", explore=0)["ret"].mean().item()
    before = success()
    for k in range(12):
        r = walk(method.actor, 16, 8, k)
        if kind == "shuffled":
            chunks, episodes = (torch.randperm(len(r[key]), generator=torch_rng(0, key, k)) for key in ("reward", "ret"))
            r |= dict(reward=r["reward"][chunks], ret=r["ret"][episodes])
        method.update(r)
    assert before < .2
    assert success() > .9 if kind == "learns" else success() < .35


# ---------------------------------------------------------------- errors

@pytest.mark.parametrize("text,entries", [
    ("has one row for each chunk", dict(reward=torch.zeros(3))),
    ("x has values that are not finite", dict(x=torch.full((96, 4), math.inf))),
    ("done must be bool", dict(done=torch.ones(96))), (r"mask must lie in \[0,1\]", dict(mask=torch.full((96,), -1.))),
    ("chunk 0 ends its episode", dict(mask=torch.zeros(96)))])
def test_rollouts_that_are_refused(text, entries):
    method = make()
    before = flat(method.actor)
    with pytest.raises(ValueError, match=text): method.update({**rows(method.actor), **entries})
    assert torch.equal(flat(method.actor), before)


@pytest.mark.parametrize("text,entries", [
    ("single episode", dict(group=torch.arange(32))), ("found ret \\(32,\\), group \\(31,\\)", dict(group=torch.arange(31))),
    ("whole numbers", dict(group=torch.rand(32))), ("found ret", dict(ret=torch.ones(33), group=torch.zeros(33).long())),
    ("ret has values", dict(ret=torch.full((32,), math.nan)))])
def test_groups_that_are_refused(text, entries):
    method = make(GRPO)
    with pytest.raises(ValueError, match=text): method.update({**rows(method.actor), **entries})


def test_missing_entries_and_empty_rollouts():
    r = rows(make().actor)
    for cls, key in ((PPO, "next_x"), (GRPO, "ret"), (GRPO, "logp_old")):
        with pytest.raises(ValueError, match=f"lacks {key}"): make(cls).update({k: v for k, v in r.items() if k != key})
    with pytest.raises(ValueError, match="at least one"): check_rollout({"x": torch.zeros(0, 4)}, ["x"])


@pytest.mark.parametrize("kw", [
    dict(epochs=0), dict(minibatch=1.5), dict(accumulation=-1), dict(clip=0.), dict(kl_stop=math.nan), dict(lr=0.),
    dict(lam=2.), dict(clip_value=0.), dict(normalise=1), dict(grad_clip=-1.), dict(max_drift=0.)])
def test_settings_that_are_refused(kw):
    with pytest.raises(ValueError, match=next(iter(kw))): make(**kw)
    with pytest.raises(TypeError): make(epoch=3)


def test_lost_weights_are_named():
    method = make(lr=1e9, clip=None)
    with pytest.raises(FloatingPointError, match="update 1 has .* not finite"): method.update(rows(method.actor))


def test_processes_pass_over_weights_that_no_loss_reads(monkeypatch):
    "A model may hold layers that nothing asks for; the others' gradients are joined as ever."
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: x.mul_(2))   # as if another process had found the same
    torch.manual_seed(0)
    actor = Actor(X=6, C=2, A=2, hidden=16, std=.3)
    actor.spare = torch.nn.Linear(2, 2)
    before = {k: v.clone() for k, v in actor.state_dict().items()}
    method, x = PPO(actor, Value(6, 16), epochs=1, minibatch=10), torch.randn(20, 6)
    method.part = 0, 2
    ref = torch.randn(20, 2, 2)
    action = actor.eval()(x, ref).detach()+.3*torch.randn(20, 2, 2)
    with torch.no_grad(): logp = actor.log_prob(x, ref, action)
    method.update(dict(x=x, ref=ref, action=action, logp_old=logp, reward=torch.randn(20), mask=torch.zeros(20), next_x=x, done=torch.ones(20, dtype=torch.bool)))
    moved = {k for k, v in actor.state_dict().items() if not torch.equal(v, before[k])}
    assert moved and not any(k.startswith("spare") for k in moved)
