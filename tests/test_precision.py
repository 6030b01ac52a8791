"What `precision` changes: the calls of a policy in evaluation and practice, and nothing that learns beside it."
import pytest
import torch

from clvla.core.batch import torch_rng
from clvla.core.names import IMAGE, PROMPT, STATE
from clvla.policies.all import make_policy
from clvla.policies.base import in_precision
from clvla.policies.tiny import Tiny
from clvla.rl.best_of_n import AGREE, BestOfN, planned
from clvla.rl.config import PracticeConfig
from clvla.rl.learner import practise
from clvla.rl.token_policy import sizes_of
from clvla.run.config import RunConfig, check_machine


def seen(n=5):
    g = torch_rng(0, "seen")
    return {IMAGE: torch.randint(0, 255, (n, 3, 32, 32), dtype=torch.uint8, generator=g), STATE: torch.randn(n, 2, generator=g),
            PROMPT: ["push the button"]*n}

def tiny(): return make_policy("tiny", 32, 2, 2, H=4, head="flow", seed=0).eval()

class Own(Tiny):
    "A family with a `predict_chunk` of its own."
    @torch.no_grad()
    @in_precision
    def predict_chunk(self, obs, *, n=1, noise=None, generator=None): return self.head.sample(self.encode(obs), None)

@pytest.mark.parametrize("family", [Tiny, Own])
def test_a_call_is_made_in_the_policys_precision_and_float32_is_untouched(family):
    torch.manual_seed(0)
    policy, kinds = family(image_size=32, state_dim=2, action_dim=2, H=4, head="l1").eval(), []
    before = policy.predict_chunk(seen())
    layer = next(m for m in policy.modules() if isinstance(m, torch.nn.Linear))
    layer.register_forward_hook(lambda m, x, y: kinds.append(y.dtype))
    policy.set_precision("bf16")
    half = policy.predict_chunk(seen())
    policy.set_precision("no")
    assert torch.equal(policy.predict_chunk(seen()), before) and kinds == [torch.bfloat16, torch.float32]
    assert half.dtype == torch.float32 and 0 < (half-before).abs().max() < .1

def test_what_learns_beside_a_frozen_policy_stays_in_float32():
    base = tiny()
    base.set_precision("bf16")
    config = dict(X=base.encode(seen()).pooled.shape[1]+2, C=4, A=2, hidden=8, members=2)
    policy = BestOfN("tiny", dict(base.config), "context", "", {}, config, 3, 0., **sizes_of(base)).eval()
    policy.take_frozen(base)
    policy.has_learnt.fill_(True)
    kinds = []
    for module in policy.critic.modules():
        if isinstance(module, torch.nn.Linear): module.register_forward_hook(lambda m, x, y: kinds.append((x[0].dtype, y.dtype)))
    noise = torch.stack([policy.chunk_noise(torch_rng(0, i)) for i in range(5)])
    played = policy.predict_chunk(seen(), noise=noise)
    assert policy.vla.precision == "bf16" and policy.precision == "no"
    assert set(kinds) <= {(torch.float32, torch.float32)}
    x, draws = policy.look({k: v[:2] for k, v in seen().items()}, noise[:2, :3])   # among fewer neighbours
    assert x.dtype == draws.dtype == torch.float32
    for chunk, ways in zip(played, draws): planned(ways, chunk, AGREE["bf16"])

def test_a_chunk_that_is_none_of_the_draws_is_refused_in_every_precision():
    draws = torch.randn(3, 4, 2, generator=torch_rng(0, "draws"))
    for precision, within in AGREE.items():
        assert planned(draws, draws[1]+.9*within, within) == 1
        with pytest.raises(ValueError, match="differs from all draws"): planned(draws, draws[1]+1.1*within, within)

def test_practice_in_bfloat16(tmp_path):
    cfg = dict(suite="dot_2", smoke=True, algo="best_of_n", device="cpu", data_dir=str(tmp_path/"data"))
    run = practise(PracticeConfig(**cfg, precision="bf16", run_dir=str(tmp_path/"run")), say=len)
    assert run.done

@pytest.mark.parametrize("settings,says", [
    (dict(precision="fp16"), "fp16' needs gradients that are scaled"), (dict(precision="tf32", overlap=True), "switch of the whole process")])
def test_precisions_that_practice_cannot_have(settings, says):
    from clvla.rl.all import make_method
    from types import SimpleNamespace
    cfg = SimpleNamespace(**dict(head="flow", machines="", strategy="ddp", overlap=False, accumulation=1, precision="no", algo="cloning", lora_rank=0) | settings)
    with pytest.raises(ValueError, match=says): make_method("cloning", 0).check(cfg)

@pytest.mark.parametrize("precision", ["fp16", "tf32"])
def test_what_a_cpu_would_compute_in_float32_without_a_word(precision):
    with pytest.raises(ValueError, match=f"'{precision}' needs a GPU"): check_machine(RunConfig(device="cpu", precision=precision))
