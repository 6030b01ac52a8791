"""Dropout of adapters: the same draws drop the same, in every family; recomputed layers, samples alone, gradients of each sample,
and a run that crashed. How adapters begin."""
import pytest
import torch

pytest.importorskip("transformers"); pytest.importorskip("peft")
from test_lora import cl_context, cl_task, small
from test_policies import LONG, SHORT, make_batch
from test_resume import Crash, config, crash_at
from clvla.cl.probe import grads_apart, grads_together
from clvla.core.batch import take, torch_rng
from clvla.core.names import ACTION, PROMPT
from clvla.policies.all import check_policy, load_policy, make_policy, policies
from clvla.policies.dropout import SampleDropout
from clvla.policies.lora import REFUSED, add_lora, check_adapters, inits, merge_lora
from clvla.policies.vlm.trunk import VLM
from clvla.policies.weights import save_base, save_policy
from clvla.run.resume import fingerprint
from clvla.train.config import TrainConfig, resolve
from clvla.train.learner import train_cl

torch.set_num_threads(1)
ALL = [k for k in policies if k.endswith("tiny")]


def data(B=4): return make_batch(B=B) | {PROMPT: [(SHORT, LONG)[i%2] for i in range(B)]}
def drawn(p, B=4, seed=0): return dict(zip(("noise", "time"), p.draw(B, torch_rng(seed, "draws"))))
def chunk(p, b): return p.predict_chunk(b, generator=torch_rng(1, "chunk"))


def adapted(name, dropout=.3, **kw):
    "A family with adapters that have an effect."
    p = make_policy(name, 32, **kw)
    add_lora(p, 2, dropout=dropout)
    for n, q in p.named_parameters():
        if ".lora_B." in n or not q.any(): q.data.normal_(0, .2, generator=torch_rng(0, n))   # also gates that begin closed
    return p.train()


@pytest.mark.parametrize("name", ALL)
def test_the_same_draws_drop_the_same_and_acting_drops_nothing(name):
    if name.startswith("lerobot"): pytest.importorskip("lerobot")
    p, whole, b = adapted(name), adapted(name, 0.), data()
    state, one = torch.get_rng_state(), drawn(p)
    each = p(b, **one, reduction="none")[0].detach()
    assert torch.equal(p(b, **one, reduction="none")[0], each)                        # the same draws
    assert not torch.allclose(p(b, **drawn(p, seed=1), reduction="none")[0], each)    # others
    assert torch.equal(torch.get_rng_state(), state)
    alone = torch.cat([p(take(b, [i]), **{k: None if x is None else x[i:i+1] for k, x in one.items()}, reduction="none")[0] for i in range(4)])
    assert torch.allclose(alone, each, atol=1e-4, rtol=1e-4)                          # in another batch, with other padding
    own = one if p.needs_noise else dict(noise=None, time=None)
    without = whole(b, **own, reduction="none")[0]
    assert (without-each).abs().min() > 1e-5                                          # each sample has lost something
    for mode in (True, False): assert torch.equal(chunk(p.train(mode), b), chunk(whole.train(mode), b))
    assert torch.equal(p.eval()(b, **one)[0], whole.eval()(b, **own)[0])
    numbers = [m.number for m in p.modules() if isinstance(m, SampleDropout)]
    assert sorted(numbers) == [*range(len(numbers))]                                  # no two layers alike
    with pytest.raises(ValueError, match="policy.draw"): p.train()(b, noise=None, time=None)
    assert merge_lora(p).dropout == 0. and torch.isfinite(merge_lora(p).train()(b, **own)[0])


@pytest.mark.parametrize("name", [k for k in ALL if issubclass(policies[k], VLM)])
def test_a_recomputed_layer_has_the_first_mask(name):
    "Another forward runs between the first one and its backward pass."
    grads, b = {}, data()
    for on in (False, True):
        p = adapted(name, checkpointing=on)
        loss = p(b, **drawn(p))[0]
        p(b, **drawn(p, seed=1))
        loss.backward(retain_graph=True); loss.backward()   # and twice
        grads[on] = {n: q.grad for n, q in p.named_parameters() if q.grad is not None}
    assert grads[True].keys() == grads[False].keys() and all(torch.equal(g, grads[False][n]) for n, g in grads[True].items())


@pytest.mark.parametrize("head", ["flow", "l1"])
def test_gradients_of_samples_are_those_of_each_alone(head, recwarn):
    p = add_lora(small(head=head), 2, dropout=.3)
    for n, q in p.named_parameters():
        if ".lora_B." in n: q.data.normal_(0, .2, generator=torch_rng(0, n))
    ctx = cl_context(p).ctx
    b = ctx.data.fetch("push", range(4))
    noise, time = ctx.draw(4, torch_rng(0, "samples"))
    many, one = grads_together(ctx, b, noise, time), list(grads_apart(ctx, b, noise, time))
    assert all(torch.allclose(x, y, atol=1e-5) for xs, ys in zip(many, one) for x, y in zip(xs, ys))
    assert not [w for w in recwarn if "vmap refuses" in str(w.message)]


@pytest.mark.parametrize("algo", ["mir", "ewc", "derpp", "lwf", "gss", "latent"])
def test_an_algorithm_takes_a_regression_that_drops(algo, shared_data, tmp_path):
    "A head without noise is given some for its masks: those that compare losses, take single gradients, store outputs or features."
    kw = dict(model="tiny", head="l1", algo=algo, algo_kw=dict(n_batches=1) if algo == "ewc" else {}, steps_per_task=2, batch_size=8,
              evaluate="none", ema=0., lora_rank=2, lora_dropout=.2)
    losses = [r["train/loss"] for r in train_cl(config(shared_data, tmp_path/"run", **kw), say=len).logs() if "train/loss" in r]
    assert len(losses) > 1 and torch.tensor(losses).isfinite().all()


@pytest.mark.parametrize("model,head", [("tiny", "flow"), ("qwenoft-tiny", "l1")])
def test_a_run_with_dropout_that_crashed_goes_on_to_the_bit(model, head, shared_data, tmp_path, monkeypatch):
    kw = dict(model=model, head=head, algo="mir", algo_kw=dict(refresh=2, candidates=8), steps_per_task=3, threads=1, evaluate="none",
              lora_rank=2, lora_dropout=.2, lora_init="gaussian")
    whole = train_cl(config(shared_data, tmp_path/"whole", **kw), say=len)
    dry = train_cl(config(shared_data, tmp_path/"dry", **kw | dict(lora_dropout=0.)), say=len)
    cfg = config(shared_data, tmp_path/"run", save_every=2, **kw)
    with monkeypatch.context() as m:
        crash_at(m, 1, 3)
        with pytest.raises(Crash): train_cl(cfg, say=len)
    train_cl(cfg, say=len)
    assert fingerprint(cfg.run_dir) == fingerprint(whole.path) != fingerprint(dry.path)


@pytest.mark.parametrize("init", inits)
def test_every_beginning_leaves_the_policy_and_the_frozen_weights_as_they_were(init, tmp_path):
    plain, b = small(), make_batch(B=4)
    want, noise = chunk(plain, b), torch.get_rng_state()
    a, c = [add_lora(small(), 4, seed=3, init=init, dropout=.1) for _ in range(2)]
    assert torch.equal(noise, torch.get_rng_state())
    before = {k: v for k, v in plain.state_dict().items()}
    for k, v in a.state_dict().items():
        if ".lora_" not in k: assert torch.equal(v, before[k.replace(".base_layer", "")]), k
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), c.parameters()))
    assert torch.allclose(chunk(a, b), want, atol=1e-4)
    save_base(a, tmp_path/"w")
    back = load_policy(save_policy(a, "tiny", tmp_path/"c"/"p"))
    assert back.lora == a.lora == dict(rank=4, alpha=16., pretrained=True, dropout=.1, init=init) and back.dropout == .1
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), back.parameters()))


def test_pefts_own_beginnings_have_the_same_spread():
    from peft import LoraConfig, inject_adapter_in_model
    for name, theirs in (("kaiming", True), ("gaussian", "gaussian"), ("orthogonal", "orthogonal")):
        net = torch.nn.ModuleDict(dict(a=torch.nn.Linear(512, 384)))
        torch.manual_seed(0)
        inject_adapter_in_model(LoraConfig(r=16, target_modules=["a"], init_lora_weights=theirs), net)
        A, B = net.a.lora_A["default"].weight, net.a.lora_B["default"].weight
        for ours, peft in zip(inits[name](A.shape, B.shape, torch_rng(0, "spread")), (A, B)):
            assert abs(float(ours.std()-peft.std())) <= .06*float(peft.std()) and ours.shape == peft.shape


@pytest.mark.parametrize("kw,match", [
    (dict(lora_dropout=1.), r"\[0,1\), found 1.0"), (dict(lora_dropout=-.1), "lora_dropout"), (dict(lora_dropout=.1, lora_rank=0), "lora_rank is 0"),
    (dict(lora_init="gausian"), "gaussian"), (dict(lora_init="orthogonal", lora_rank=3), "even lora_rank, found 3; set it to 4"),
    (dict(lora_init="False"), "random B"), *((dict(lora_init=k), "not offered") for k in ("pissa", "pissa_niter_4", "olora", "loftq", "eva", "corda"))])
def test_the_door_refuses_what_cannot_be(kw, match):
    with pytest.raises(ValueError, match=match): check_policy(resolve(TrainConfig(model="tiny", **dict(lora_rank=4) | kw)))


def test_every_way_of_peft_is_offered_or_refused():
    "A later peft with a further one makes this fail."
    import typing
    from peft import LoraConfig
    said = [x for part in typing.get_args(typing.get_type_hints(LoraConfig)["init_lora_weights"]) for x in typing.get_args(part)]
    names = {str(x).split("_niter")[0] for x in said}
    assert {"gaussian", "pissa", "olora"} <= names <= {*inits, *REFUSED}, names-{*inits, *REFUSED}
    for name in names-{*inits}:
        with pytest.raises(ValueError, match="not offered"): check_adapters(4, 0., name)
