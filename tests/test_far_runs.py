"One run of each learner on a device, pretended or real: stopped, gone on, with the CPU's numbers. And what else asks where a policy lies."
import copy
import importlib.machinery
import json
import sys
import types
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import far
from clvla.cl.all import make_algo
from clvla.cl.lwf import answers, weights_of
from clvla.core.batch import to_device, torch_rng
from clvla.core.names import ACTION, IMAGE, INDEX, PAD, PROMPT, STATE
from clvla.crl.config import AgentConfig
from clvla.crl.learner import learn_tasks
from clvla.data.loader import TaskLoader
from clvla.data.stats import Processor
from clvla.eval.player import Player
from clvla.policies.all import make_policy
from clvla.policies.vlm.pretrained import FLASH, choose_attention, watch_attention
from clvla.policies.vlm.qwen import Qwen
from clvla.rl.config import PracticeConfig
from clvla.rl.learner import practise
from clvla.rl.oracle import draw_chunks
from clvla.run.shell import Shell
from clvla.run.stop import Stopped
from clvla.train.config import TrainConfig
from clvla.train.learner import train_cl
from clvla.train.zero import ZeroEngine

TINY = dict(suite="dot_2", n_demos=2, n_trials=1, n_workers=1, threads=1, batch_size=8, image_size=32, save_minutes=0)
DOTS = dict(suite=dict(base="dot_2", env=dict(discrete=True), name="dots"), cycles=1, steps_per_task=80, eval_every=80, n_trials=1, image_size=8,
            threads=1, save_minutes=0)
ROLLOUT = dict(n_envs=4, horizon=10)
PRACTICE = dict(steps_per_task=4, episodes=6, round_episodes=3, rows_per_task=2, warmup=1, stride=2, **TINY)
RUNS = {   # function, settings, and the position before which it is stopped
    "imitation": (train_cl, TrainConfig, dict(algo="er", evaluate="full", reset_optimizer=False, steps_per_task=4, rows_per_task=1, warmup=1, **TINY), (1, 2)),
    "best_of_n": (practise, PracticeConfig, dict(algo="best_of_n", algo_kw=dict(updates=2, N=3, sample=8), **PRACTICE), (0, 3)),
    "token_ppo": (practise, PracticeConfig, dict(algo="token_ppo", algo_kw=dict(token_updates=2, epochs=2), **PRACTICE), (0, 1)),
    "ppo": (learn_tasks, AgentConfig, dict(algo="ppo", algo_kw=ROLLOUT, **DOTS), (1, 1)),
    "clear": (learn_tasks, AgentConfig, dict(algo="clear", algo_kw=ROLLOUT | dict(frames=200), cl="ewc", cl_kw=dict(fisher_steps=20), **DOTS), (1, 1))}


def done(name: str, path, data, device: str, monkeypatch, stop: bool) -> tuple:
    "Logged numbers and episodes of a run."
    learn, Config, kw, position = RUNS[name]
    kw = kw | dict(run_dir=str(path), device=device) | ({} if Config is AgentConfig else dict(data_dir=str(data)))
    plain = Shell.save_if_due

    def save_if_due(self):
        own = Config is not PracticeConfig or hasattr(self.learner, "rounds")   # practice trains a base before
        if own and self.position == position: self.stop.requested = True
        return plain(self)
    with monkeypatch.context() as changed:
        if stop:
            changed.setattr(Shell, "save_if_due", save_if_due)
            with pytest.raises(Stopped): learn(Config(**kw), say=len)
    run = learn(Config(**kw), say=len)
    log = [json.loads(text) for text in open(path/"log.jsonl")]
    numbers = [{k: v for k,v in record.items() if "/" in k and not k.startswith("time/") and isinstance(v, float)} for record in log]
    return [n for n in numbers if n],[(e["task"], e["stage"], e.get("success"), e["steps"]) for e in run.episodes()]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_the_same_on_a_device(name, device, tmp_path, shared_data, monkeypatch):
    played, plain = defaultdict(set), Player.evaluate

    def evaluate(self, policy, *args, **kw):
        played[kw.get("stage_info", {}).get("stage")].add(next(policy.parameters()).device.type)
        return plain(self, policy, *args, **kw)
    monkeypatch.setattr(Player, "evaluate", evaluate)
    here, mine = done(name, tmp_path/"cpu", shared_data, "cpu", monkeypatch, False)
    played.clear()
    with far.runs_on(device), far.counts() as seen:
        there, theirs = done(name, tmp_path/"device", shared_data, "auto", monkeypatch, True)
    if name == "imitation": assert dict(played) == {stage: {device.type} for stage in (-1, 0, 1)}   # before training, too
    assert len(here) == len(there) >= 2 and any("loss" in k for numbers in here for k in numbers)
    assert mine == theirs if device.type == "far" else len(mine) == len(theirs)
    # best_of_n remembers numbers of two bytes, in which a last bit is a thousandth
    close = far.close(device) | (dict(rel=1e-3, abs=1e-3) if name == "best_of_n" and device.type == "far" else {})
    for a,b in zip(here, there): assert a == pytest.approx(b, **close)
    if device.type != "far" and name == "imitation":   # not even a last bit: its sums have one order
        with far.runs_on(device): assert done(name, tmp_path/"again", shared_data, "auto", monkeypatch, False)[0] == there
    if device.type == "far": assert seen.kernels and not seen.draws, seen   # it did run there; no number is drawn there


# --- what else asks where a policy lies
def tiny(device): return make_policy("tiny", seed=0, head="flow", image_size=32, state_dim=4, action_dim=4, H=2, D=16, n_blocks=1).to(device)


def test_a_batch_is_moved_whole_and_has_arrived(device):
    x = torch.arange(6.).view(2, 3)
    batch = dict(x=x, cut=dict(state=x+1, deeper=dict(y=x+2)), items=[dict(z=x+3), "text"], prompt=["a", "b"], n=3)
    there = to_device(batch, device)
    assert {t.device for t in (there["x"], there["cut"]["state"], there["cut"]["deeper"]["y"], there["items"][0]["z"])} == {device}
    assert there["prompt"] == ["a", "b"] and there["items"][1] == "text" and there["n"] == 3
    back = to_device(there, "cpu")
    assert torch.equal(back["x"], x) and torch.equal(back["cut"]["deeper"]["y"], x+2) and torch.equal(back["items"][0]["z"], x+3)


@pytest.mark.parametrize("fused", [True, False])
def test_zero_goes_on_where_its_pieces_lie(device, fused):
    p, q = (torch.nn.Parameter(torch.ones(4, device=device)) for _ in range(2))   # a weight, and the flat piece that holds it
    opt = torch.optim.AdamW([q], fused=fused)
    engine = SimpleNamespace(pieces=[q], piece={p: q}, raw=opt, link=lambda: None)
    ZeroEngine.make_room(engine, dict(w=p), dict(w=dict(step=torch.tensor(3.), exp_avg=torch.zeros(4), exp_avg_sq=torch.zeros(4))))
    q.grad = torch.ones_like(q)
    opt.step()
    assert float(opt.state[q]["step"]) == 4 and opt.state[q]["step"].device == (device if fused else torch.device("cpu"))


def test_the_oracle_asks_a_policy_on_a_device(device):
    numbers = dict(mean=[0.]*4, std=[1.]*4, count=9, min=[-1.]*4, max=[1.]*4, q01=[-1.]*4, q99=[1.]*4, constant=[False]*4, binary=[False]*4)
    processor, task = Processor({STATE: numbers, ACTION: numbers}), SimpleNamespace(prompt="press it", id="a")
    obs = {IMAGE: np.full((32, 32, 3), 9, np.uint8), STATE: np.zeros(4, np.float32)}
    draws = lambda policy: draw_chunks(policy.eval(), processor, task, obs, 3, torch_rng(0, "draws"))
    (here, mine), (there, theirs) = draws(tiny("cpu")), draws(tiny(device))
    assert there.device.type == "cpu" and torch.allclose(here, there, atol=1e-4) and np.allclose(mine, theirs, atol=1e-4)


def test_what_a_run_on_the_cpu_prepares_ahead_is_not_pinned(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)   # the machine has a GPU, the run does not use it
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    data = SimpleNamespace(n_frames=lambda task: 6, fetch_refs=lambda refs: {INDEX: torch.tensor([frame for _,frame in refs])})
    for device, wanted in (("cpu", False), ("cuda:0", True)):
        loader = TaskLoader(data, ["a"], 0, prefetch=1, device=device)
        loader.next(2)
        loader.close()
        assert bool(pinned) == wanted


@pytest.fixture
def flash(monkeypatch):
    "A flash-attn that imports, and a GPU, which nothing asks."
    module = types.ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


class Trunk(torch.nn.Module):
    "What of a trunk is asked: its weights' place, and how each part computes attention, set as transformers' models set it."
    def __init__(self, place):
        super().__init__()
        part = lambda: SimpleNamespace(_attn_implementation="sdpa", sub_configs={})
        self.place, self.config = torch.device(place), part()
        self.config.sub_configs = dict(text_config=object, vision_config=object)
        self.config.text_config, self.config.vision_config = part(), part()
    def parameters(self): return iter([SimpleNamespace(device=self.place)])
    def set_attn_implementation(self, how):
        for name, value in how.items(): (getattr(self.config, name) if name else self.config)._attn_implementation = value
    def forward(self): return [c._attn_implementation for c in (self.config, self.config.text_config, self.config.vision_config)]


def test_attention_follows_the_weights(flash):
    heard = []
    assert choose_attention("", Qwen.stock, "bfloat16", True) == "sdpa"   # a policy is built on the CPU
    trunk = Trunk("cpu")
    watch_attention(trunk, "", Qwen.stock, "bfloat16", True, heard.append)
    assert trunk() == ["sdpa"]*3 and not heard
    trunk.place = torch.device("cuda:0")
    assert trunk() == [FLASH]*3 == trunk() and len(heard) == 1 and "cuda:0" in heard[0]
    trunk.place = torch.device("cpu")
    assert trunk() == ["sdpa"]*3
    trunk.place, trunk.config.vision_config._attn_implementation = torch.device("cuda:0"), "by windows"
    assert trunk() == [FLASH, FLASH, "by windows"]
    for asked, dtype, published in (("eager", "bfloat16", True), ("", "float32", True), ("", "bfloat16", False)):
        other = Trunk("cuda:0")
        watch_attention(other, asked, Qwen.stock, dtype, published, heard.append)
        assert other() == ["sdpa"]*3   # nobody changes what was chosen for it
    asked = Trunk("cpu")
    watch_attention(asked, FLASH, Qwen.stock, "bfloat16", True)
    with pytest.raises(ValueError, match="needs a GPU, and the weights of Trunk lie on the CPU"): asked()


# --- beside it, on any device: LeRobot's families under methods that put something beside a layer, or call with other weights
def lerobot_batch(policy):
    g, c = torch_rng(0, "batch"), policy.config
    images = {k: torch.randint(0, 255, (2, 3, h, h), dtype=torch.uint8, generator=g) for k,h in policy.pixels.items()}
    return images | {STATE: torch.randn(2, c["state_dim"], generator=g), ACTION: torch.randn(2, policy.H, policy.A, generator=g),
                     PAD: torch.zeros(2, policy.H, dtype=torch.bool), PROMPT: ["press it", "open it"], INDEX: torch.arange(2)}


@pytest.fixture(scope="module", params=["lerobot-smolvla-tiny", "lerobot-xvla-tiny"])
def family(request):
    pytest.importorskip("lerobot", reason="the extra lerobot is not installed")
    return make_policy(request.param, seed=0, image_size=64, state_dim=4, action_dim=4, H=4)


@pytest.mark.parametrize("algo", ["task_lora", "progressive", "dwe"])
def test_layers_with_something_beside_them_are_read_as_layers(family, algo):
    policy, batch = copy.deepcopy(family), lerobot_batch(family)
    noise, time = policy.draw(2, torch_rng(0, "noise"))
    make = make_algo(algo, 0, **(dict(units=2) if algo == "dwe" else dict(rank=2)))
    before = policy.eval()(batch, noise=noise, time=time)[0]
    for t in (0, 1): make.prepare(policy, t, SimpleNamespace(stages=[0, 1]))
    loss = policy.eval()(batch, noise=noise, time=time)[0]
    assert loss.item() == pytest.approx(before.item(), rel=1e-4)   # what is added begins at zero
    loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.parameters())


def test_a_teacher_with_tied_weights_answers_as_itself(family):
    policy, batch = copy.deepcopy(family), lerobot_batch(family)
    noise, time = policy.draw(2, torch_rng(0, "noise"))
    teacher = weights_of(policy)
    now = policy.eval()(batch, noise=noise, time=time)[1]["pred"]
    with torch.no_grad():
        for p in policy.parameters(): p.add_(.01)
    then = answers(policy, teacher, batch, dict(noise=noise, time=time))["pred"]
    assert torch.allclose(now, then, atol=1e-5) and not torch.allclose(now, policy(batch, noise=noise, time=time)[1]["pred"], atol=1e-3)
