"The actor begins at the reference, TD3's targets and copies are exact, it solves small problems that controls do not, and it resumes."
import pytest
import torch
from clvla.core.batch import torch_rng
from clvla.core.state import load_state, save_state
from clvla.rl.actor import Actor, TwinCritic, Value, check_chunks, chunk_logp
from clvla.rl.td3 import KEYS, TD3, actor_loss, clip_chunk, polyak_, q_bound, slow_copy, smooth_chunk, td_target


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


def make(X=3, C=2, A=2, seed=0, hidden=32, std=.1, ref_dropout=.5, layer_norm=True, **kw):
    torch.manual_seed(seed)
    nets = Actor(X, C, A, hidden, std=std, ref_dropout=ref_dropout), TwinCritic(X, C, A, hidden, layer_norm=layer_norm)
    return TD3(*nets, seed=seed, **kw)


def random_batch(k=0, B=32, X=3, C=2, A=2):
    g = torch_rng(k, "batch")
    draw = lambda *shape: torch.randn(B, *shape, generator=g)
    return dict(x=draw(X), ref=draw(C, A), action=draw(C, A), reward=torch.rand(B, generator=g),
                mask=torch.rand(B, generator=g)*.9, next_x=draw(X), next_ref=draw(C, A))


def weights(td3):
    "All numbers of a learner that a resume must keep, in one vector."
    nets = [p.detach().flatten() for net in (td3.actor, td3.critic, td3.actor_targ, td3.critic_targ) for p in net.parameters()]
    moments = [v.flatten().float() for opt in (td3.opt_actor, td3.opt_critic) for s in opt.state.values() for v in s.values()]
    return torch.cat(nets+moments+[td3.largest, td3.generator.get_state().float()])


# the networks

@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 4, 3), (264, 8, 7)])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_actor_equals_the_reference_at_the_start(sizes, layers):
    X, C, A = sizes
    x, ref = torch.randn(16, X)*100, torch.randn(16, C, A)
    assert torch.equal(Actor(X, C, A, layers=layers).eval()(x, ref), ref)


def test_the_reference_is_dropped_in_training_only():
    actor, ref = Actor(3, 2, 2, ref_dropout=.25), torch.randn(2000, 2, 2)
    x = torch.randn(2000, 3)
    zeros = (actor(x, ref, torch_rng(1)) == 0).flatten(1)
    assert torch.equal(zeros.any(1), zeros.all(1)), "a reference was dropped in part"
    assert abs(zeros.all(1).float().mean() - .25) < .04
    assert torch.equal(actor(x, ref, torch_rng(1)), actor(x, ref, torch_rng(1)))
    assert torch.equal(actor.eval()(x, ref), ref)
    assert torch.equal(Actor(3, 2, 2, ref_dropout=0)(x, ref), ref), "training without dropout asks for no generator"


def test_samples_and_log_probabilities_agree_with_torch():
    actor, x, ref = Actor(3, 4, 2, std=.3).eval(), torch.randn(9, 3), torch.randn(9, 4, 2)
    torch.nn.init.normal_(actor.net[-1].weight)
    noise = torch.randn(9, 4, 2)
    chunk, mu = actor.sample(x, ref, noise), actor(x, ref)
    torch.testing.assert_close((chunk-mu)/.3, noise, atol=1e-5, rtol=1e-5)
    expected = torch.distributions.Normal(mu, .3).log_prob(chunk).sum((1, 2))
    torch.testing.assert_close(actor.log_prob(x, ref, chunk), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(chunk_logp(chunk, mu, .3), expected, atol=1e-4, rtol=1e-5)


def test_the_path_and_the_net_are_both_trained():
    actor = Actor(3, 2, 2).eval()
    (actor(torch.randn(4, 3), torch.randn(4, 2, 2))**2).sum().backward()
    assert actor.path.weight.grad.abs().max() > 0 and actor.net[-1].weight.grad.abs().max() > 0


def test_networks_are_built_again_from_their_config():
    for net in (Actor(3, 2, 1, hidden=8, std=.2, layers=3), TwinCritic(3, 2, 1, layer_norm=False), Value(3, layer_norm=True)):
        other = type(net)(**net.config)
        other.load_state_dict(net.state_dict())
        assert other.config == net.config


# the parts of an update

def test_targets_equal_brute_force():
    td3, batch = make(bounds=(-.8, .9)), random_batch()
    noise = torch.randn(32, 2, 2, generator=torch_rng(3))*3
    chunk = smooth_chunk(td3.actor_targ(batch["next_x"], batch["next_ref"]), noise, .2, .3, td3.bounds)
    y = td_target(td3.critic_targ, batch["next_x"], chunk, batch["reward"], batch["mask"])
    for b in range(32):
        mu = td3.actor_targ(batch["next_x"][b:b+1], batch["next_ref"][b:b+1])[0]
        moved = [[min(max(mu[c, a].item() + min(max(.2*noise[b, c, a].item(), -.3), .3), -.8), .9) for a in range(2)] for c in range(2)]
        q = [q.item() for q in td3.critic_targ(batch["next_x"][b:b+1], torch.tensor([moved]))]
        assert y[b].item() == pytest.approx(batch["reward"][b].item() + batch["mask"][b].item()*min(q), abs=1e-5)
    assert torch.equal(clip_chunk(noise), noise)


def test_an_update_uses_these_targets():
    "The metric td_target is computed again from a copy of the learner and its generator."
    td3, batch = make(bounds=(-1, 1)), random_batch()
    g = torch_rng(0, "td3")
    noise = torch.randn(32, 2, 2, generator=g)
    chunk = smooth_chunk(batch["next_ref"], noise, .2, .5, (-1, 1))   # the target actor is the reference still
    q1, q2 = td3.critic_targ(batch["next_x"], chunk)
    expected = (batch["reward"] + batch["mask"]*torch.minimum(q1, q2)).mean().item()
    assert td3.update(batch)["td_target"].item() == pytest.approx(expected, abs=1e-6)


def test_polyak_is_exact():
    online, targ = Value(3, 8), slow_copy(Value(3, 8))
    before = [p.clone() for p in targ.parameters()]
    polyak_(targ, online, .005)
    for new, old, goal in zip(targ.parameters(), before, online.parameters()):
        torch.testing.assert_close(new.double(), .995*old.double() + .005*goal.double(), atol=1e-7, rtol=1e-6)
        assert not new.requires_grad and goal.requires_grad
    polyak_(targ, online, 1)
    assert all(torch.equal(a, b) for a, b in zip(targ.parameters(), online.parameters()))


@pytest.mark.parametrize("every, after, moved", [(1, 0, [1, 2, 3, 4, 5, 6]), (2, 0, [2, 4, 6]), (3, 0, [3, 6]), (2, 3, [4, 6])])
def test_the_actor_is_delayed(every, after, moved):
    td3, seen = make(actor_every=every, actor_after=after, lr_actor=1e-2), []
    for k in range(1, 7):
        before = torch.cat([p.detach().flatten().clone() for p in td3.actor.parameters()])
        targ = torch.cat([p.flatten().clone() for p in td3.critic_targ.parameters()])
        metrics = td3.update(random_batch(k))
        if not torch.equal(before, torch.cat([p.flatten() for p in td3.actor.parameters()])): seen.append(k)
        assert ("actor_loss" in metrics) == (seen[-1:] == [k])
        assert torch.equal(targ, torch.cat([p.flatten() for p in td3.critic_targ.parameters()])) == (k % every != 0)
    assert seen == moved


def test_the_actors_loss_is_as_written_and_leaves_the_critic_alone():
    td3, batch = make(beta=.7), random_batch()
    noise = torch.randn(32, 2, 2)
    seen = torch.zeros_like(batch["ref"])
    loss, q, dist, mu = actor_loss(td3.actor, td3.critic, batch["x"], batch["ref"], seen, noise, .7)
    assert torch.equal(mu, seen), "an untrained actor gives what it sees"
    torch.testing.assert_close(dist, (batch["ref"]**2).sum((1, 2)))
    expected = (-td3.critic.q1(batch["x"], .1*noise) + .7*(batch["ref"]**2).sum((1, 2))).mean()
    torch.testing.assert_close(loss, expected)
    before = torch.cat([p.detach().flatten().clone() for p in td3.critic.parameters()])
    td3.update_actor(batch)
    assert torch.equal(before, torch.cat([p.flatten() for p in td3.critic.parameters()]))
    assert all(p.grad is None for p in td3.critic.parameters())


def test_metrics_are_detached_scalars_and_players_get_an_actor_in_eval_mode():
    td3 = make(actor_every=1)
    metrics = td3.update(random_batch())
    assert all(v.ndim == 0 and not v.requires_grad for v in metrics.values())
    assert set(metrics) == {"critic_loss", "q", "td_target", "actor_loss", "q_actor", "ref_dist", "saturated"}
    assert not td3.actor.training


def test_saturation_is_measured():
    "The untrained actor gives the reference, so the share is known."
    batch = random_batch()
    share = make(actor_every=1, ref_dropout=0, bounds=([-.5, -9], [9, .2])).update(batch)["saturated"]
    ref = batch["ref"]
    assert share.item() == pytest.approx(((ref[..., 0] < -.5).float().mean() + (ref[..., 1] > .2).float().mean()).item()/2)
    assert make(actor_every=1).update(batch)["saturated"] == 0


# small problems

def learn(td3, sample, updates, per_update=16, B=128, worth=1):
    g = torch_rng(0, "learn")
    pool = sample(td3, 256, g)
    for _ in range(updates):
        pool = {k: torch.cat([pool[k], new]) for k, new in sample(td3, per_update, g).items()}
        rows = torch.randint(len(pool["x"]), (B,), generator=g)
        td3.update({k: v[rows]*(worth if k == "reward" else 1) for k, v in pool.items()})
    return sample(td3, 1000, torch_rng(1, "judge"), noise=0)


def bandit(td3, n, g, noise=1.):
    "Reward 1 where a chunk is within .2 (rms) of the right one; the reference is off by .3."
    x = 2*torch.rand(n, 3, generator=g) - 1
    right = torch.stack([x, x.flip(1)], 1)*.5
    ref = right + .3*torch.tensor([1., -1., 1.])
    with torch.no_grad(): chunk = td3.actor.sample(x, ref, noise*torch.randn(ref.shape, generator=g)).clamp(-1, 1)
    reward = ((chunk-right).pow(2).mean((1, 2)).sqrt() < .2).float()
    return dict(x=x, ref=ref, action=chunk, reward=reward, mask=torch.zeros(n), next_x=x, next_ref=ref)


FAST = dict(hidden=64, std=.3, lr_actor=1e-3, lr_critic=1e-3, beta=.03, tau=.05, bounds=(-1, 1))


def test_it_solves_a_contextual_bandit_and_not_without_rewards():
    start = bandit(make(A=3, **FAST), 1000, torch_rng(1, "judge"), noise=0)["reward"].mean()
    solved = learn(make(A=3, **FAST), bandit, 250)["reward"].mean()
    control = learn(make(A=3, **FAST), bandit, 250, worth=0)["reward"].mean()
    assert start == 0 and control < .2 and solved > .8, (start, control, solved)


def identity(td3, n, g, noise=1., mask=.8):
    "The right action is the observation at each step; the next observation is drawn anew, so the best return is 1/(1-mask)."
    x, next_x, ref = 2*torch.rand(n, 2, generator=g)-1, 2*torch.rand(n, 2, generator=g)-1, torch.zeros(n, 2, 2)
    with torch.no_grad(): chunk = td3.actor.sample(x, ref, noise*torch.randn(ref.shape, generator=g)).clamp(-1, 1)
    reward = 1 - (chunk-x[:, None]).abs().mean((1, 2))
    return dict(x=x, ref=ref, action=chunk, reward=reward, mask=torch.full((n,), mask), next_x=next_x, next_ref=ref)


def test_it_solves_the_identity_environment_and_values_it():
    "With a mask of .8 the critic's answer is near five rewards, without bootstrapping near one."
    settings = FAST | dict(beta=0.)
    td3, alone = make(X=2, **settings), make(X=2, **settings)
    end = learn(td3, identity, 400)
    control = learn(alone, lambda *a, **kw: identity(*a, mask=0., **kw), 400)
    assert end["reward"].mean() > .85, end["reward"].mean()
    q, q_alone = td3.critic.q1(end["x"], end["action"]).mean().item(), alone.critic.q1(control["x"], control["action"]).mean().item()
    assert 2.5 < q < 5.1 and .7 < q_alone < 1.1, (q, q_alone)


# stopping, and what goes wrong

def test_same_seed_twice_and_another_seed():
    a, b, c = make(seed=0), make(seed=0), make(seed=0)
    c.generator.manual_seed(7)
    for td3 in (a, b, c):
        for k in range(4): td3.update(random_batch(k))
    assert torch.equal(weights(a), weights(b)) and not torch.equal(weights(a), weights(c))


@pytest.mark.parametrize("stop", [1, 2, 5])
def test_resume_is_bit_equal(stop, tmp_path):
    whole, first, second = make(seed=0), make(seed=0), make(seed=1)
    for k in range(6): whole.update(random_batch(k))
    for k in range(stop): first.update(random_batch(k))
    second.load_state_dict(load_state(save_state(tmp_path/"td3.safetensors", first.state_dict())))
    for k in range(stop, 6): second.update(random_batch(k))
    assert torch.equal(weights(whole), weights(second)) and second.n_updates == 6


def test_a_state_of_other_sizes_is_refused():
    with pytest.raises(ValueError, match="build them as stored"): make(hidden=8).load_state_dict(make().state_dict())


def test_a_diverging_critic_is_named():
    fast = dict(lr_actor=3e-3, lr_critic=3e-3, check_every=10)
    lost, held = make(layer_norm=False, tau=1., beta=0., actor_every=1, **fast), make(**fast)
    steady = lambda k: random_batch(k) | dict(mask=torch.full((32,), .95))
    with pytest.raises(FloatingPointError, match=r"the critic diverges: mean .*\(rewards to"):
        for k in range(600): lost.update(steady(k))
    for k in range(100): held.update(steady(k))
    with pytest.raises(FloatingPointError, match="returns are at most 0.01"):
        tight = make(max_return=.01, check_every=1)
        for k in range(600): tight.update(steady(k) | dict(reward=torch.full((32,), 5.)))
    assert q_bound(1., .95) == pytest.approx(20) and q_bound(1., 1.) == float("inf")


def test_a_bound_of_zero_is_no_alarm():
    "Before the first success all rewards are 0, and an untrained critic answers something."
    td3 = make(check_every=1)
    for k in range(5): td3.update(random_batch(k) | dict(reward=torch.zeros(32)))


@pytest.mark.parametrize("key, value, says", [("reward", torch.nan, r"largest \|reward\| nan"), ("x", torch.nan, r"mean \|q\| is nan"),
                                              ("mask", 1.5, "a mask of 1.5")])
def test_impossible_numbers_are_named(key, value, says):
    td3, batch = make(check_every=1), random_batch()
    with pytest.raises(FloatingPointError, match=says): td3.update(batch | {key: torch.full_like(batch[key], value)})


@pytest.mark.parametrize("wrong, says", [
    (dict(tau=0), "tau must be a number in"), (dict(tau=2), "tau"), (dict(actor_every=0), "actor_every"), (dict(actor_after=-1), "actor_after"),
    (dict(lr_actor=0), "lr_actor must be a number above 0"), (dict(beta=-1), "beta"), (dict(noise_clip=float("nan")), "noise_clip"),
    (dict(bounds=(1, -1)), "low < high"), (dict(bounds=([0]*3, 1)), "2 numbers each"), (dict(max_return=0), "max_return"),
    (dict(sampled="yes"), "sampled must be True or False"), (dict(std=0), "std must be a number above 0"), (dict(ref_dropout=1.), "ref_dropout")])
def test_wrong_settings_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says): make(**wrong)


def test_wrong_sizes_are_refused_before_anything_changes():
    td3, batch = make(), random_batch()
    before = weights(td3)
    for key in KEYS:
        with pytest.raises(ValueError, match=f"lacks {key}"): td3.update({k: v for k, v in batch.items() if k != key})
        with pytest.raises(ValueError): td3.update(batch | {key: batch[key][1:]})
        with pytest.raises(ValueError): td3.update(batch | {key: batch[key][..., None]})
    with pytest.raises(ValueError): td3.update({k: v[:0] for k, v in batch.items()})
    assert torch.equal(before, weights(td3)) and td3.n_updates == 0
    with pytest.raises(ValueError, match="same X, C and A"): TD3(Actor(3, 2, 2), TwinCritic(3, 2, 1))
    with pytest.raises(ValueError, match="first 2 steps of a longer chunk"): check_chunks(td3.actor, batch["x"], torch.zeros(32, 8, 2))
    with pytest.raises(ValueError, match="needs a generator while it trains"): td3.actor.train()(batch["x"], batch["ref"])
