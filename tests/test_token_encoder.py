"PPO and GRPO whose encoder learns too: its steps against plain torch, the next round's token, checkpoints, the same bits after a crash, refusals."
import pytest
import torch

from test_practice import TOKEN, Crash, config, crash_after
from clvla.core.batch import first_weights, torch_rng
from clvla.core.files import read_json
from clvla.policies.all import load_policy
from clvla.rl.actor import Actor, Value
from clvla.rl.grpo import GRPO, kl_to_ref
from clvla.rl.learner import practise
from clvla.rl.ppo import PPO
from clvla.rl.query_token import codecs
from clvla.rl.token_file import read_token, weights_hash
from clvla.rl.token_ppo import READ, GRPOWithEncoder, PPOWithEncoder, TokenPPO, TokenRounds, played_chunks
from clvla.run.checkpoint import checkpoints
from clvla.run.resume import fingerprint
from clvla.train.on_policy import clip_loss

ALGOS = {algo: TOKEN[algo] | dict(recon=1., epochs=3, kl_stop=1e9) for algo in ("token_ppo", "token_grpo")}
ROUNDS = dict(episodes=9, save_every=1, evaluate="none")   # three rounds; the last two are learnt from
SIZES = dict(paper=dict(D=8, n_blocks=1), query=dict(D=8, width=8, length=5, n_blocks=1))


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


@pytest.fixture(scope="module")
def done(data, tmp_path_factory):
    "A run of each method, and what its method was at the end."
    home, kept, runs = tmp_path_factory.mktemp("done"), [], {}
    with pytest.MonkeyPatch.context() as m:
        real = TokenRounds.finish
        m.setattr(TokenRounds, "finish", lambda self: (kept.append(self), real(self)))
        for algo, kw in ALGOS.items(): runs[algo] = practise(config(data, home/algo, algo=algo, algo_kw=kw, **ROUNDS), say=len)
    return dict(zip(ALGOS, zip(runs.values(), kept)))


def networks(token):
    with first_weights(0, "test"): actor, value = Actor(10, 2, 2, hidden=16, ref_dropout=0.).eval(), Value(10, 16)
    torch.nn.init.normal_(actor.net[-1].weight, std=.1, generator=torch_rng(0, "actor"))   # it reads its state
    return actor, value, codecs[token](**SIZES[token], seed=3)


def rollout_of(actor, codec):
    "Eight chunks of four attempts from two starts, whose observations have three to five tokens."
    g = torch_rng(0, "rollout")
    draw = lambda *shape: torch.randn(8, *shape, generator=g)
    tokens, own, ref, noise, adv = draw(5, 8), draw(2), draw(2, 2), draw(2, 2), draw()
    real = torch.arange(5) < torch.tensor([3, 4, 5, 5, 3, 4, 5, 5])[:, None]
    with torch.no_grad():
        x = torch.cat([codec.encode(tokens, real), own], 1)
        action = actor.sample(x, ref, noise)
        logp = actor.log_prob(x, ref, action)
    return dict(tokens=tokens, real=real, x=x, ref=ref, action=action, logp_old=logp, next_x=x, reward=adv, mask=torch.zeros(8), done=torch.ones(8, dtype=torch.bool),
                episode=torch.arange(4).repeat_interleave(2), ret=torch.tensor([1., 0., 0., 1.]), group=torch.tensor([0, 0, 1, 1]))


def written_off(codec, tokens, real):
    "Mean squared error of each sample's real numbers, one sample after another and without padding."
    errors = []
    for t, r in zip(tokens, real):
        alone = t[r][None]
        errors.append((codec(alone)[1]-alone).square().mean())
    return torch.stack(errors)


@pytest.mark.parametrize("token", SIZES)
@pytest.mark.parametrize("kind", [PPOWithEncoder, GRPOWithEncoder])
def test_a_step_is_that_of_plain_torch(kind, token):
    "One minibatch: encoder and decoder move as Adam moves them on the written-out loss, and actor and value as without the encoder."
    actor, value, codec = networks(token)
    rollout = rollout_of(actor, codec)
    nets, kw = ((actor, value), {}) if kind is PPOWithEncoder else ((actor,), dict(beta=.3))
    learner = kind(*nets, epochs=1, minibatch=8, grad_clip=1., **kw)
    learner.take_encoder(codec, .7, 1e-3)
    learner.update(rollout)

    actor2, value2, codec2 = networks(token)
    plain = (PPO(actor2, value2, epochs=1, minibatch=8) if kind is PPOWithEncoder else GRPO(actor2, epochs=1, minibatch=8, **kw))
    rows, _ = plain.prepare(rollout)
    z = torch.cat([codec2.encode(rollout["tokens"], rollout["real"]), rollout["x"][:, 8:]], 1)
    mean = actor2(z, rollout["ref"])
    each = clip_loss(actor2.log_prob(z, rollout["ref"], rollout["action"]), rollout["logp_old"], rows["adv"], .2)
    if kind is PPOWithEncoder: each = each+.5*(value2(z)-rows["ret"]).square()
    else: each = rows["weight"]*(each+.3*kl_to_ref(mean, rollout["ref"], actor2.std))
    opt = torch.optim.Adam(codec2.parameters(), lr=1e-3, eps=1e-5)
    (each+.7*written_off(codec2, rollout["tokens"], rollout["real"])).mean().backward()
    torch.nn.utils.clip_grad_norm_(codec2.parameters(), 1.)
    opt.step()
    for (name, a), b in zip(codec.named_parameters(), codec2.parameters()): assert (a-b).abs().max() < 2e-5, name
    assert max((a-b).abs().max() for a, b in zip(codec.parameters(), networks(token)[2].parameters())) > 5e-4
    alone = (PPO(*networks(token)[:2], epochs=1, minibatch=8) if kind is PPOWithEncoder else GRPO(networks(token)[0], epochs=1, minibatch=8, **kw))
    alone.update(rollout)
    for a, b in zip(actor.parameters(), alone.actor.parameters()): assert (a-b).abs().max() < 1e-5
    assert not any(p.requires_grad for p in codec.parameters())


def test_what_a_learner_stores_is_all_that_it_needs():
    "Three updates without a break, and with a state stored and loaded between the second and the third."
    def learnt(breaks):
        def new():
            actor, value, codec = networks("paper")
            learner = PPOWithEncoder(actor, value, epochs=1, minibatch=4, max_drift=None, kl_stop=None)
            learner.take_encoder(codec, 1., 1e-3)
            return learner
        learner = new()
        rollout = rollout_of(learner.actor, learner.codec)
        for _ in range(2): learner.update(rollout)
        if breaks:
            state, learner = learner.state_dict(), new()
            learner.load_state_dict(state)
        learner.update(rollout)
        return torch.cat([p.detach().flatten() for net in learner.nets.values() for p in net.parameters()])
    assert torch.equal(learnt(False), learnt(True))


@pytest.mark.parametrize("algo, n", [("token_ppo", 2), ("token_grpo", 3)])
def test_a_crash_changes_nothing(data, tmp_path, done, algo, n):
    "In the second round's update, whose chunks are then read again, and in the third's, whose optimizer goes on."
    kw = dict(algo=algo, algo_kw=ALGOS[algo], **ROUNDS)
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, n, algo=algo)
        with pytest.raises(Crash): practise(config(data, tmp_path/"run", **kw), say=len)
    assert fingerprint(practise(config(data, tmp_path/"run", **kw), say=len).path) == fingerprint(done[algo][0].path)


@pytest.mark.parametrize("algo", ALGOS)
def test_the_checkpoint_holds_the_encoder_that_learnt(done, algo):
    run, method = done[algo]
    points = checkpoints(run.path/"checkpoints")
    found = weights_hash(load_policy(points[-1]).codec)
    assert found == weights_hash(method.policy.codec) == read_json(points[-1]/"token.json")["sha256"]
    assert all(torch.equal(v, method.policy.codec.state_dict()[k]) for k, v in read_token(run.path)[1].items())
    assert all(torch.equal(v, load_policy(points[-1]).vla.state_dict()[k]) for k, v in method.base.state_dict().items())
    errors = [r["token/unexplained"] for r in run.logs() if "token/unexplained" in r]
    assert len(errors) == 3 and len(set(errors)) == 3, "before, and after each round that is learnt from"
    assert all(r["rl/recon"] > 0 and r["rl/drift"] < 1e-3 for r in run.logs() if "rl/drift" in r)
    assert len({g["lr"] for g in method.learner.opt.param_groups}) == 2


def test_the_next_round_is_played_by_the_encoder_that_learnt(data, tmp_path, monkeypatch):
    "A fast encoder under an actor that reads its state: the third round's chunks are its answers, and not those of the encoder before."
    seen, old, real = [], [], TokenPPO.take
    def gap(self, attempts):
        chunks = [played_chunks(a, self.policy.actor, self.gamma)["action"].flatten(0, 1)[:len(a["action"])] for a in attempts]
        return max((c-a["action"]).abs().max().item() for c, a in zip(chunks, attempts))
    def take(self, attempts):
        if seen and old:
            now = {k: v.clone() for k, v in self.policy.codec.state_dict().items()}
            self.policy.codec.load_state_dict(old[0])
            before = gap(self, [self.states(a["episode"])|dict(episode=a["episode"]) for a in attempts])
            self.policy.codec.load_state_dict(now)
            seen.append((gap(self, attempts), before))
        else: seen.append((gap(self, attempts), None))
        if len(seen) == 2: old.append({k: v.clone() for k, v in self.policy.codec.state_dict().items()})
        real(self, attempts)
    monkeypatch.setattr(TokenPPO, "take", take)
    kw = ALGOS["token_ppo"] | dict(encoder_lr=3e-2, actor_lr=3e-3)
    practise(config(data, tmp_path/"run", algo="token_ppo", algo_kw=kw, **ROUNDS), say=len)
    assert len(seen) == 3 and seen[2][0] < 2e-3 and seen[2][1] > 10*seen[2][0], seen


def test_without_recon_nothing_is_added(data, tmp_path, monkeypatch):
    kept, real = [], TokenRounds.finish
    monkeypatch.setattr(TokenRounds, "finish", lambda self: (kept.append(self), real(self)))
    run = practise(config(data, tmp_path/"run", algo="token_ppo", algo_kw=TOKEN["token_ppo"] | dict(recon=0., encoder_lr=.5), **ROUNDS), say=len)
    plain = practise(config(data, tmp_path/"plain", algo="token_ppo", algo_kw=TOKEN["token_ppo"], **ROUNDS), say=len)
    assert [{k: v for k, v in r.items() if k.startswith(("rl/", "token/"))} for r in run.logs()] == [{k: v for k, v in r.items() if k.startswith(("rl/", "token/"))} for r in plain.logs()]
    assert len([r for r in run.logs() if "token/unexplained" in r]) == 1
    state = kept[0].state_dict()
    assert type(kept[0].learner) is PPO and len(kept[0].learner.opt.param_groups) == 1
    assert set(state) == {"fitted", "noted", "rollout", "learner"} and not set(READ) & set(state["rollout"])
    assert weights_hash(kept[0].policy.codec) == weights_hash(kept[1].policy.codec)


@pytest.mark.parametrize("algo, kw, more, says", [
    ("token_ppo", dict(recon=1.), dict(stream=True, cl="ewc"), "cannot hold 'token_ppo': recon lets an encoder learn"),
    ("token_grpo", dict(recon=1., group_size=3), dict(stream=True, cl="l2"), "cannot hold 'token_grpo': recon lets an encoder learn"),
    ("token_ppo", dict(recon=-1.), {}, "recon"), ("token_grpo", dict(recon=1., encoder_lr=0., group_size=3), {}, "encoder_lr"), ("token_ppo", dict(recon="yes"), {}, "recon"),
    ("choice_ppo", dict(recon=1.), {}, "no setting 'recon'"), ("flow_grpo", dict(encoder_lr=1.), {}, "no setting 'encoder_lr'")])
def test_refusals(data, tmp_path, algo, kw, more, says):
    with pytest.raises(ValueError, match=says): practise(config(data, tmp_path/"run", algo=algo, algo_kw=kw, **more), say=len)
    assert not (tmp_path/"run/practice").exists()
