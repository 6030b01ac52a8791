"Both token codecs: padding, causality, stop-gradients, selection by held-out error, save and load, determinism, errors."
import pytest
import torch

from clvla.core.batch import torch_rng
from clvla.core.state import load_state, save_state
from clvla.rl.query_token import QueryToken, codecs
from clvla.rl.token import RLToken, TokenCodec, fit_token, linear_probe, pack, unexplained

SHAPES = dict(paper=dict(D=16, n_blocks=2), query=dict(D=16, width=6, length=12, n_blocks=2))
each = pytest.mark.parametrize("name", codecs)


def make(name, **kw): return codecs[name](**SHAPES[name] | kw)


def memory(n=60, L=6, seed=0):
    "Tokens that are a fixed function of three numbers each."
    hidden = torch.randn(n, 3, generator=torch_rng(seed, "hidden"))
    return (hidden@torch.randn(3, L*16, generator=torch_rng(0, "mix"))).tanh().view(n, L, 16), torch.arange(n)%3 == 0


def place(z, at, L, fill):
    "The tokens at some places of a longer sequence, and its mask."
    padded, mask = torch.full((len(z), L, z.shape[2]), fill), torch.zeros(len(z), L, dtype=torch.bool)
    padded[:, at], mask[:, at] = z, True
    return padded, mask


def same(a, b): return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@each
@pytest.mark.parametrize("fill", [0., 1e6, float("nan"), float("inf")])
@pytest.mark.parametrize("at", [[0, 1, 2, 3, 4, 5], [0, 1, 6, 7, 8, 10], [5, 6, 7, 8, 9, 10]])
def test_padding_never_changes_the_token(name, fill, at):
    codec, (z, _) = make(name), memory(4)
    padded, mask = place(z, at, 11, fill)
    with torch.no_grad():
        assert torch.equal(codec.encode(padded, mask), codec.encode(z))
        loss, written = codec(padded, mask)
        assert torch.equal(loss, codec(z)[0]) and torch.equal(written[:, at], codec(z)[1])
        assert written[~mask].abs().max() == 0


@each
def test_a_short_sample_beside_a_long_one(name):
    codec, (z, _) = make(name), memory(2)
    mask = torch.tensor([[True]*6, [True]*3+[False]*3])
    with torch.no_grad():
        torch.testing.assert_close(codec.encode(z, mask)[1:], codec.encode(z[1:, :3]), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(codec(z, mask)[0][1:], codec(z[1:, :3])[0], rtol=1e-5, atol=1e-6)


@each
def test_padding_gives_no_gradient(name):
    z, _ = memory(2)
    padded, mask = place(z, [0, 2, 3, 4, 5, 7], 9, 3.)
    padded.requires_grad_()
    make(name)(padded, mask)[0].sum().backward()
    assert padded.grad[~mask].abs().max() == 0 and (padded.grad[mask].abs().amax(-1) > 0).all()


@each
@pytest.mark.parametrize("i", range(6))
def test_a_row_has_seen_only_what_stands_before_it(name, i):
    codec, (z, _) = make(name), memory(3)
    other = z.clone()
    other[:, i] = torch.randn(3, 16, generator=torch_rng(i, "other"))
    with torch.no_grad():
        token = codec.encode(z)
        change = (codec(z, token=token)[1]-codec(other, token=token)[1]).abs().amax((0, 2))
    assert (change[:i+1] == 0).all() and (change[i+1:] > 0).all()


@each
def test_every_row_reads_the_token_and_the_token_every_row(name):
    codec, (z, _) = make(name), memory(3)
    with torch.no_grad():
        token = codec.encode(z)
        assert ((codec(z, token=token)[1]-codec(z, token=-token)[1]).abs().amax((0, 2)) > 0).all()
        for i in range(6):
            other = z.clone()
            other[:, i] = torch.randn(3, 16, generator=torch_rng(i, "other"))
            assert (codec.encode(other)-token).abs().max() > 0


@each
def test_inputs_and_targets_of_the_decoder_stop_the_gradient(name):
    codec, (z, _) = make(name), memory(2)
    leaf = z.clone().requires_grad_()
    loss = codec(leaf, token=codec.encode(z).detach())[0].sum()
    assert torch.autograd.grad(loss, leaf, allow_unused=True) == (None,)
    whole, = torch.autograd.grad(codec(leaf)[0].sum(), leaf)
    token = codec.encode(z).detach().requires_grad_()
    into, = torch.autograd.grad(codec(z, token=token)[0].sum(), token)
    through, = torch.autograd.grad((codec.encode(leaf)*into).sum(), leaf)
    torch.testing.assert_close(whole, through, rtol=1e-4, atol=1e-5)


@each
def test_all_weights_learn(name):
    codec, (z, _) = make(name), memory(4)
    codec(z)[0].sum().backward()
    assert [n for n, p in codec.named_parameters() if p.grad is None] == []


def test_sum_and_mean():
    z, _ = memory(2)
    for name, want in dict(paper=lambda e: e.sum((1, 2)), query=lambda e: e.mean((1, 2))).items():
        loss, written = make(name)(z)
        torch.testing.assert_close(loss, want((written-z).square()))


@each
def test_the_best_held_out_weights_are_kept(name):
    codec, (z, held_out) = make(name, n_blocks=1), memory()
    curve = fit_token(codec, z, None, held_out, updates=40, look=10, batch=16)
    assert [c["update"] for c in curve] == [0, 10, 20, 30, 40]
    errors = [c["unexplained"] for c in curve]
    assert min(errors) < errors[0] and unexplained(codec, z[held_out]) == min(errors)


@each
def test_a_fit_that_gets_worse_ends_where_it_began(name):
    codec, (z, held_out) = make(name, n_blocks=1), memory()
    fit_token(codec, z, None, held_out, updates=60, batch=16)
    good = {k: v.clone() for k, v in codec.state_dict().items()}
    curve = fit_token(codec, z, None, held_out, updates=4, look=2, lr=3., batch=16)
    assert min(c["unexplained"] for c in curve) == curve[0]["unexplained"] and same(good, codec.state_dict())


@each
def test_held_out_samples_are_never_learnt_from(name):
    (z, held_out), drawn = memory(), []
    for noise in (0., 5.):
        codec, seen = make(name, n_blocks=1), z.clone()
        seen[held_out] += noise
        fit_token(codec, seen, None, held_out, updates=6, look=6, batch=8, lr=1e-5,
                  extra=lambda i: (drawn.append(i), torch.zeros(()))[1])
    assert not held_out[torch.cat(drawn)].any() and len(drawn) == 12


@each
def test_twice_the_same_bits_and_no_global_draws(name):
    (z, held_out), ends = memory(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.random.get_rng_state()
        codec = make(name, n_blocks=1)
        curve = fit_token(codec, z, None, held_out, updates=12, look=4, batch=8, generator=torch_rng(3, "fit"))
        assert torch.equal(state, torch.random.get_rng_state())
        ends.append((curve, codec.state_dict()))
    assert ends[0][0] == ends[1][0] and same(ends[0][1], ends[1][1])


@each
def test_save_and_load_by_config(name, tmp_path):
    codec, (z, held_out) = make(name, n_blocks=1), memory()
    fit_token(codec, z, None, held_out, updates=4, batch=8)
    save_state(tmp_path/"codec.safetensors", dict(name=name, config=codec.config, weights=codec.state_dict()))
    state = load_state(tmp_path/"codec.safetensors")
    again = codecs[state["name"]](**state["config"])
    again.load_state_dict(state["weights"])
    with torch.no_grad(): assert torch.equal(again.encode(z), codec.encode(z))
    assert again.config == codec.config and isinstance(again, TokenCodec) and again.W == codec.encode(z).shape[1]


@each
def test_extra_adds_a_loss_and_trains_its_own(name):
    (z, held_out), w = memory(), torch.nn.Parameter(torch.zeros(()))
    fit_token(make(name, n_blocks=1), z, None, held_out, updates=5, batch=8, lr=.1, extra=lambda i: (w-1)**2, params=[w])
    assert w > .3


@each
def test_half_precision_tokens(name):
    z, _ = memory(2)
    codec = make(name)
    with torch.no_grad(): assert torch.equal(codec.encode(z.bfloat16()), codec.encode(z.bfloat16().float()))


def test_pack_keeps_the_order():
    mask = torch.rand(20, 9, generator=torch_rng(0, "m")) < .6
    mask[:, 4] = True
    tokens = torch.arange(9.).expand(20, 9)[..., None]
    z, real, order = pack(tokens, mask)
    for i in range(20): assert z[i, real[i], 0].tolist() == mask[i].nonzero()[:, 0].tolist()


@each
def test_errors_at_the_door(name):
    codec, (z, held_out) = make(name), memory()
    ok = torch.ones(60, 6, dtype=torch.bool)
    for tokens, mask, words in [(z[0], None, "built for floats"), (z[..., :8], None, "built for floats"),
                                (z.long(), None, "built for floats"), (None, None, "tokens=True"),
                                (z, ok.float(), "expected bool"), (z, ok[:, :3], "expected bool"),
                                (z, ok & (torch.arange(60) != 7)[:, None], "1 of them without"), (z[:0], None, "0 samples")]:
        with pytest.raises(ValueError, match=words): codec.encode(tokens, mask)
    bad = z.clone()
    bad[5, 2, 1] = float("nan")
    for tokens, out, words in [(z, held_out.long(), "expected bool"), (z, held_out[:-1], "expected bool"),
                               (z, held_out & False, "0 of 60"), (z, held_out | True, "60 of 60"), (bad, held_out, "sample 5")]:
        with pytest.raises(ValueError, match=words): fit_token(codec, tokens, None, out, updates=1)
    losses = iter([0., float("nan")])
    with pytest.raises(FloatingPointError, match="update 1"):
        fit_token(codec, z, None, held_out, updates=3, extra=lambda i: torch.tensor(next(losses)))
    with pytest.raises(ValueError, match="D is 18"): make(name, D=18)
    with pytest.raises(ValueError, match="n_blocks"): make(name, n_blocks=0)


def test_query_token_has_a_length():
    with pytest.raises(ValueError, match="raise length"): QueryToken(16, length=5)(torch.zeros(1, 6, 16))
    assert RLToken(16)(torch.zeros(1, 40, 16))[1].shape == (1, 40, 16)


def test_linear_probe():
    x = torch.randn(120, 40, generator=torch_rng(0, "x"))
    x[:, 7] = 3.                                            # a constant column
    y = torch.stack([x[:, 0]*2-1, torch.randn(120, generator=torch_rng(0, "y"))], 1)
    train = torch.arange(120) < 80
    rmse = linear_probe(x, y, train, ~train)
    assert rmse[0] < 1e-3 and .8 < rmse[1]/y[~train, 1].std() < 1.3
    wide = linear_probe(torch.cat([x]*9, 1), y, train, ~train)   # more columns than samples
    assert wide[0] < 1e-2
    assert torch.equal(rmse, linear_probe(x, torch.where(train[:, None], y, y), torch.arange(80), torch.arange(80, 120)))
    with pytest.raises(ValueError, match="features"): linear_probe(x[:5], y, train, ~train)
