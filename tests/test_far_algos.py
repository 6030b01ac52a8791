"Each algorithm and agent of the menus on a device, pretended or real: two short stages, stored and loaded on the way, with the CPU's losses."
import gc
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import far
from clvla.cl.all import algos, make_algo
from clvla.cl.quick import QuickData
from clvla.core.batch import to_device, torch_rng
from clvla.core.names import ACTION, IMAGE, INDEX, PAD, PROMPT, STATE, TASK_ID
from clvla.core.state import load_state, save_state
from clvla.crl.all import make_agent, make_cl
from clvla.crl.experiment import Spaces
from clvla.policies.all import make_policy
from clvla.run.stop import Stopped
from clvla.train.config import TrainConfig
from clvla.train.trainer import Trainer

UPDATES, SIDE = 3, 32
SMALL = dict(mir=dict(candidates=4, top_k=2), gss=dict(buffer_size=6), phaser=dict(buffer_size=6, n_phases=2), latent=dict(buffer_size=12), mlr=dict(buffer_size=12), keeplora=dict(rank=2, n_batches=1, B=8), gdumb=dict(total_size=20),
             ewc=dict(n_batches=1, B=8), mas=dict(n_batches=1, B=8), agem=dict(n_ref=4), gem=dict(n_ref=4), rwalk=dict(interval=2),
             router=dict(n_frames=16, rank=2), task_lora=dict(rank=2), progressive=dict(rank=2), dwe=dict(units=2))
SMALL |= {"er+ewc": dict(n_batches=1), "lwf+packnet": {}}
# what is carried from stage to stage where the optimizer is kept, and runs without an average of the weights
CARRIED = [(name, dict(reset_optimizer=False)) for name in ("er", "packnet", "task_lora", "dwe")] + [("er", dict(ema=0.)), ("mir", dict(prefetch=2))]
CASES = [(name, {}) for name in (*algos, "er+ewc", "lwf+packnet")] + CARRIED


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory):
    "Each engine that ends collects garbage; what the first one has made torch import is left out of that."
    whole("sequential", tmp_path_factory.mktemp("first"), "cpu")
    gc.collect()
    gc.freeze()


def frames(k: int, n: int = 24) -> dict:
    "Pictures, states and chunks of a task."
    g = torch_rng(k, "far")
    return {IMAGE: torch.randint(0, 255, (n, 3, SIDE, SIDE), dtype=torch.uint8, generator=g), STATE: torch.randn(n, 4, generator=g),
            ACTION: torch.randn(n, 2, 4, generator=g), PAD: torch.zeros(n, 2, dtype=torch.bool), PROMPT: [f"press {k}"]*n,
            TASK_ID: [f"task{k}"]*n, INDEX: torch.arange(n)}


@dataclass
class Stream:
    ids: tuple = ("task0", "task1")

    @property
    def stages(self): return [SimpleNamespace(task=SimpleNamespace(id=i, budget=None)) for i in self.ids]


class Run:
    "A run of a trainer that stops where it is told to; its state goes through a file."
    def __init__(self, name: str, cfg: TrainConfig, folder, state: dict | None = None):
        self.name, self.cfg, self.folder, self.losses = name, cfg, folder, []
        self.data = QuickData({i: frames(k) for k,i in enumerate(Stream().ids)})
        self.policy = make_policy("tiny", head="flow", image_size=SIDE, state_dim=4, action_dim=4, H=2, D=16, n_blocks=1)
        self.algo = make_algo(name, 0, **SMALL.get(name, {}))
        self.trainer = Trainer(cfg, Stream(), self.data, self.policy, self.algo, self.note)
        if state is None: return
        self.trainer.prepare(state["last"])   # as a run that goes on: shape, weights, then everything else
        self.policy.load_state_dict(state["weights"])
        self.trainer.load_state_dict(state["trainer"])

    def note(self, **record):
        if "train/loss" in record: self.losses.append(record["train/loss"])

    def stored(self):
        "The run as another process finds it."
        last = self.trainer.t if self.trainer.ctx else self.trainer.t-1
        save_state(self.folder/"state.safetensors", dict(last=last, weights=self.policy.state_dict(), trainer=self.trainer.state_dict()))
        self.trainer.close()
        again = Run(self.name, self.cfg, self.folder, load_state(self.folder/"state.safetensors"))
        again.losses = self.losses
        again.trainer.log = again.note
        return again

    def stop_at(self, step: int | None):
        def check():
            if self.trainer.ctx.step == step: raise Stopped("here")
        self.trainer.save_if_due = check

    @torch.no_grad()
    def measure(self) -> list:
        "The loss on each task, by the weights that the algorithm plays it with."
        found = []
        for i in Stream().ids:
            batch = to_device(self.data.fetch(i, range(8)), next(self.policy.parameters()).device)
            noise, time = self.policy.draw(8, torch_rng(0, "measure", i))
            with self.algo.eval_policy(self.policy, i): found.append(float(self.policy.eval()(batch, noise=noise, time=time)[0]))
        return found


def whole(name: str, folder, device: str, stops: dict | None = None, **kw):
    "Losses of all updates, and the tasks' losses after each stage; `stops`: stage -> updates before which the run ends and begins again."
    cfg = TrainConfig(device=device, steps_per_task=UPDATES, batch_size=8, lr=1e-2, warmup=1, seed=0, **(dict(ema=.9) | kw))
    run, after = Run(name, cfg, folder), []
    for t in range(len(run.trainer.stages)):
        for step in (stops or {}).get(t, ()):
            run.stop_at(step)
            with pytest.raises(Stopped): run.trainer.fit(*run.trainer.stages[t])
            run = run.stored()
        run.stop_at(None)
        run.trainer.fit(*run.trainer.stages[t])
        after.append(run.measure())
        if t == 0: run = run.stored()   # between two stages
    run.trainer.close()
    return run.losses, after


@pytest.mark.parametrize("name, kw", CASES, ids=["-".join([name, *map(str, kw)]) for name,kw in CASES])
def test_an_algorithm_is_the_same_on_a_device(name, kw, device, tmp_path):
    here = whole(name, tmp_path, "cpu", **kw)
    torch.manual_seed(0)
    with far.runs_on(device), far.counts() as seen:
        there = whole(name, tmp_path, "auto", {0: [UPDATES], 1: [1, UPDATES]}, **kw)
    assert here[0] == pytest.approx(there[0], **far.close(device))   # losses of the updates
    for a,b in zip(here[1], there[1], strict=True): assert a == pytest.approx(b, **far.close(device))   # of the tasks, after each stage
    if device.type == "far": assert seen.kernels and not seen.draws, seen   # it did run there; no number is drawn there


# --- agents, and what keeps them from forgetting
AGENT = dict(n_envs=4, horizon=6)
AGENTS = {"ppo": ("ppo", AGENT, "none", {}), "impala": ("impala", AGENT | dict(lag=2), "none", {}), "clear": ("clear", AGENT | dict(frames=60), "none", {}),
          "progress_compress": ("progress_compress", AGENT | dict(fisher_steps=20), "none", {}),
          "sane": ("sane", AGENT | dict(frames=60, hold=9), "none", {}), "ppo-ewc": ("ppo", AGENT, "ewc", dict(fisher_steps=20)),
          "impala-online_ewc": ("impala", AGENT, "online_ewc", dict(fisher_steps=20)),
          "ppo-packnet": ("ppo", AGENT, "packnet", {}), "ppo-l2": ("ppo", AGENT, "l2", {}),
          "impala-derpp": ("impala", AGENT, "derpp", {}), "impala-task_lora": ("impala", AGENT, "task_lora", dict(rank=2))}


def rollout(k: int, T: int = 6, N: int = 4, A: int = 3) -> dict:
    "What four environments with pictures of 8 pixels gave in six steps."
    g = torch_rng(k, "rollout")
    obs = dict(image=torch.randint(0, 255, (T, N, 8, 8, 3), dtype=torch.uint8, generator=g), state=torch.randn(T, N, 2, generator=g),
               n_actions=torch.full((T, N), A))
    logps, action, never = torch.randn(T, N, A, generator=g).log_softmax(2), torch.randint(A, (T, N), generator=g), torch.zeros(T, N, dtype=torch.bool)
    return obs | dict(action=action, logps=logps, logp=logps.gather(2, action[..., None])[..., 0], v=torch.zeros(T, N), terminated=never,
                      reward=torch.randn(T, N, generator=g), truncated=never.clone(), cut={k: v[-1] for k,v in obs.items()},
                      cut_at=torch.tensor([(T-1, e) for e in range(N)]))


def learnt(case: str, device, path, stores: bool) -> list:
    "Numbers of four updates and of what the agent then does; `stores`: each behind a file."
    name, kw, cl_name, cl_kw = AGENTS[case]

    def built():
        agent, cl = make_agent(name, 0, **kw), make_cl(cl_name, 0, **cl_kw)
        agent.build(None, Spaces(image_size=8, state=2, n_actions=dict(a=3)), device)
        if cl: cl.bind(agent)
        if name == "ppo": agent.learner.max_drift = None   # these probabilities are nobody's
        return agent, cl
    (agent, cl), found = built(), []
    n_steps = 8 if name == "ppo" else 2
    for t in (0, 1):
        stage = SimpleNamespace(t=t, task_id=f"task{t}", steps=48)
        agent.on_task_start(stage)
        if cl: cl.begin(stage, n_steps, Stream())
        starts = {k: v[0] for k,v in rollout(t).items() if k in ("image", "state", "n_actions")}
        agent.on_starts(starts)
        for k in (0, 1):
            found.append(agent.learn(rollout(2*t+k)))
            if cl: cl.observe(rollout(2*t+k))
            if stores:
                save_state(path/"agent.safetensors", dict(agent=agent.state_dict(), cl=cl.state_dict() if cl else {}))
                state, (agent, cl) = load_state(path/"agent.safetensors"), built()
                if cl: cl.reshape(stage, n_steps, Stream())
                agent.load_state_dict(state["agent"])
                if cl: cl.load_state_dict(state["cl"])
        agent.on_task_end(stage)
        if cl: cl.on_task_end(stage)
        agent.on_starts(starts, evaluation=True)
        found.append(dict(action=agent.predict(starts, torch.linspace(.1, .9, 4))["action"].float().mean().item()))
    return found


@pytest.mark.parametrize("case", AGENTS)
def test_an_agent_is_the_same_on_a_device(case, device, tmp_path):
    here, there = learnt(case, "cpu", tmp_path, False), learnt(case, device, tmp_path, True)
    plain = lambda numbers: {k: float(v) for k,v in numbers.items()}
    assert len(here) == 6
    for a,b in zip(here, there, strict=True): assert plain(a) == pytest.approx(plain(b), **far.close(device))
