"""What is stored is what is loaded: every tensor of a policy bit for bit and in its type, before and after further updates, for each family
of the menu that a CPU holds, with and without adapters, and with frozen weights in bfloat16."""
import pytest
import torch

from test_policies import make_batch
from clvla.core.batch import torch_rng
from clvla.core.names import ACTION
from clvla.policies.all import load_policy, make_policy, policies
from clvla.policies.base import param_groups
from clvla.policies.lora import add_lora
from clvla.policies.weights import note_frozen, save_base, save_policy
from clvla.train.config import TrainConfig, resolve

torch.set_num_threads(1)
SMALL = ["tiny", *(name for name in policies if name.endswith("-tiny"))]   # all of the menu that is no published size


def needs(name):
    "Skip a family whose library is not there."
    if name != "tiny": pytest.importorskip("transformers")
    if name.startswith("lerobot"): pytest.importorskip("lerobot")


def tensors(policy):
    "All that a policy keeps: name -> a copy."
    return {k: v.detach().clone() for k, v in policy.state_dict().items()}


def differ(a, b):
    "Names of tensors that are not the same bits in the same type."
    assert list(a) == list(b)
    raw = lambda x: x.contiguous().flatten().view(torch.uint8) if x.numel() else x
    return [k for k in a if a[k].dtype != b[k].dtype or a[k].shape != b[k].shape or not torch.equal(raw(a[k]), raw(b[k]))]


def updated(policy, seed, lr=1e-4):
    "One update with an optimizer of its own; the trained tensors that it moved."
    policy.train()
    trained = [k for k, p in policy.named_parameters(remove_duplicate=False) if p.requires_grad]   # X-VLA has a table twice
    before, b = tensors(policy), make_batch(2, seed=seed)
    noise, time = policy.draw(len(b[ACTION]), torch_rng(seed, "stored"))
    with policy.computing(): loss, _ = policy(b, noise=noise, time=time)
    loss.backward()
    opt = torch.optim.AdamW(param_groups(policy, lr))
    opt.step(), opt.zero_grad()
    moved = set(differ(before, tensors(policy)))
    assert moved and moved <= set(trained)
    return moved


def there_and_back(policy, name, folder):
    "Store it, load it, compare all bits; the loaded one."
    back = load_policy(save_policy(policy, name, folder))
    assert not differ(tensors(policy), tensors(back))
    return back


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("adapters", ["whole", "lora"])
@pytest.mark.parametrize("name", SMALL)
def test_each_family_is_loaded_as_it_was_stored_and_learns_on(name, adapters, precision, tmp_path):
    "A small rate moves a weight by less than bfloat16 can say: what is computed in bfloat16 is kept in float32, also on the disk."
    needs(name)
    if precision == "bf16" and name != "tiny" and adapters == "whole": pytest.skip("bfloat16 is measured with adapters, and of tiny")
    policy = make_policy(name, 32)
    if adapters == "lora":
        add_lora(policy, 2, 4., policy.pretrained() != [])
        if policy.frozen: save_base(policy, tmp_path/"weights")
    policy.set_precision(precision)
    updated(policy, 0)
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    back = there_and_back(policy, name, tmp_path/"checkpoints"/"000")
    back.set_precision(precision)
    moved = updated(policy, 1)
    assert updated(back, 1) == moved and not differ(tensors(policy), tensors(back))
    again = there_and_back(back, name, tmp_path/"checkpoints"/"001")
    assert not differ(tensors(policy), tensors(again))


@pytest.mark.parametrize("head", ["l1", "flow"])
def test_the_heads_of_tiny(head, tmp_path):
    policy = make_policy("tiny", 32, head=head)
    updated(policy, 0)
    back = there_and_back(policy, "tiny", tmp_path/"a")
    assert updated(policy, 1) == updated(back, 1) and not differ(tensors(policy), tensors(back))


def test_a_frozen_trunk_in_bfloat16_stays_and_its_adapters_keep_every_update(tmp_path):
    "Half the weights in bfloat16 and frozen, the adapters in float32: both come back in their type, and no update is rounded away."
    from clvla.policies.weights import load_weights, stored_weights, write_weights
    policy = make_policy("tiny", 32)
    add_lora(policy, 2, 4., True)
    updated(policy, 0, lr=1e-6)   # far below the step of bfloat16 at these sizes
    trained = {k for k, p in policy.named_parameters() if p.requires_grad}
    file = write_weights(stored_weights(policy), tmp_path/"weights.safetensors")
    from safetensors.torch import load_file
    stored = load_file(file)
    assert {k for k in stored if k in trained} == trained and all(stored[k].dtype == torch.float32 for k in trained)
    now = tensors(policy)
    rounded = sum(int((now[k].bfloat16().float() != now[k]).sum()) for k in trained)
    assert rounded > 0 and not differ({k: now[k] for k in trained}, {k: stored[k] for k in trained})


@pytest.mark.parametrize("dtype", ["float16", "fp16", "float64"])
def test_types_that_no_policy_is_stored_in_are_refused_at_the_door(dtype):
    pytest.importorskip("transformers")
    from clvla.policies.all import check_policy
    with pytest.raises(ValueError, match="dtype"):
        policies["qwenoft"].check(image_size=32, state_dim=4, action_dim=4, H=8, head="l1", dtype=dtype)
