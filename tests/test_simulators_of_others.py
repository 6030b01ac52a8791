"Gymnasium environments of other people: chunks and specs that do not fit are refused, never stretched or renamed."
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from clvla.core.names import STATE
from clvla.data.demos import record_one
from clvla.data.streams import Stream, Task
from clvla.envs.all import defaults_of, make_env
from clvla.envs.gym.kind import CONTINUOUS
from clvla.envs.perturb import perturb_of
from clvla.envs.pool import EnvPool


class Arm(gymnasium.Env):
    "A steps; the reward is the sum of what it is given."
    metadata = dict(render_modes=["rgb_array"])
    def __init__(self, A=2, table=None, render_mode=None):
        part = lambda n: spaces.Box(-9, 9, (n,), np.float32)
        self.action_space,self.A,self.first = spaces.Box(-2, 2, (A,), np.float32),A,(table or {}).get(1, 0)
        self.observation_space = spaces.Dict(position=part(A+1), goal=part(2), x=part(1))
    def seen(self): return dict(position=np.full(self.A+1, self.A, np.float32), goal=np.zeros(2, np.float32),
                                x=np.full(1, self.first, np.float32))
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.seen(),{}
    def step(self, action): return self.seen(),float(np.sum(action)),False,False,{}


class Blind(Arm):
    "It draws nothing, and its constructor knows of no way to draw."
    metadata = dict(render_modes=[])
    def __init__(self, size=(3, 3)): super().__init__(); self.size = size


gymnasium.register("ArmOfOthers-v0", entry_point=Arm)
gymnasium.register("BlindArmOfOthers-v0", entry_point=Blind)
NAME = f"{__name__}:ArmOfOthers-v0"
SPEC = dict(kind="gym", name="ArmOfOthers-v0", picture="none", state=["position"])


@pytest.mark.parametrize("A,action", [(2, [[1.]]), (1, [[1., 1.]]), (2, [1.]), (2, [[1., 1., 1.]])])
def test_action_of_another_width(A, action):
    "NumPy would repeat one number for all joints, or give the simulator more numbers than it has joints."
    env = make_env(SPEC | dict(make=dict(A=A)), 8)
    env.reset(0)
    with pytest.raises(ValueError, match=rf"an action has shape \({A},\)"): env.step_chunk(np.array(action))
    assert env.step_chunk(np.ones((1, A)))[1].tolist() == [2*A]


def test_chunk_that_is_nan_or_empty():
    "The message speaks of the action, not of the simulator's reward."
    env = make_env(SPEC, 8)
    env.reset(0)
    with pytest.raises(ValueError, match="no NaN"): env.step_chunk(np.full((1, 2), np.nan))
    with pytest.raises(ValueError, match="the chunk is empty"): env.step_chunk(np.zeros((0, 2)))
    assert env.step_chunk(np.array([[np.inf, -np.inf]]))[1].tolist() == [0]   # clipped, as ever


def test_pool_of_two_widths():
    "Each simulator gets as many numbers as it has joints."
    specs = [SPEC | dict(name=NAME, make=dict(A=A)) for A in (1, 2)]
    with EnvPool(specs, 1, image_size=8) as pool:
        sums = []
        for slot in range(2):
            pool.reset(slot, 0)
            pool.wait()
            pool.step(slot, np.ones((2, 2)))
            sums.append(pool.wait()[0].rewards.tolist())
    assert sums == [[2, 2], [4, 4]]


def test_state_of_one_key():
    "A key is a key, not its letters."
    assert make_env(SPEC | dict(state="position"), 8).reset(0)[STATE].tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="an observation without 'places'"): make_env(SPEC | dict(state="places"), 8)


def test_spec_that_json_would_change():
    "The worker's environment is that of `make_env`, or the pool says which entry it cannot be sent."
    table = SPEC | dict(make=dict(table={1: 5}), state="x")
    assert make_env(table, 8).reset(0)[STATE].tolist() == [5]
    with pytest.raises(ValueError, match=r"slot 1: the spec\['make'\]\['table'\] has the key 1"):
        EnvPool([SPEC, table], 1)
    with pytest.raises(ValueError, match=r"the spec\['make'\]\['A'\] is np.int64\(2\) \(int64\)"):
        EnvPool([SPEC | dict(make=dict(A=np.int64(2)))], 1)
    with EnvPool([dict(kind="dot", name="left")], 1, image_size=8) as pool:
        with pytest.raises(ValueError, match=r"the spec\['goal'\]\[0\]"):
            pool.reset(0, 0, spec=dict(kind="dot", name="far", goal=[np.float32(.1), 0]))
        pool.reset(0, 0)
        assert pool.wait()[0].n_steps == 0


def test_simulator_that_cannot_be_made():
    "The settings that suit a stream do not need it: the run refuses the task, and names it."
    task = Task("arm", "arm", "reach", SPEC | dict(make=dict(joints=2)))
    assert defaults_of(Stream("arms", [task]))["head"] != CONTINUOUS["head"]
    with pytest.raises(TypeError, match="of task 'ArmOfOthers-v0'"): make_env(task.env, 8)


def test_perturbation_named_twice():
    "Of two strengths the first was dropped."
    with pytest.raises(ValueError, match="names one of them twice"): perturb_of("camera+light+camera:.5")
    assert perturb_of(dict(camera=np.float32(.5))) == dict(camera=.5)


@pytest.mark.parametrize("name", ["BlindArmOfOthers-v0", f"{__name__}:BlindArmOfOthers-v0"])
def test_constructor_without_render_mode(name):
    "Where nobody reads its picture it is made as it is, and its actions are seen to be numbers."
    spec = SPEC | dict(name=name)
    assert make_env(spec, 8).reset(0)[STATE].tolist() == [2, 2, 2]
    assert defaults_of(Stream("blind", [Task("arm", "arm", "reach", spec)]))["head"] == CONTINUOUS["head"]
    with pytest.raises(TypeError, match="render_mode"): make_env(spec | dict(picture="render"), 8)
    assert make_env(SPEC, 8).sim.unwrapped.spec.kwargs["render_mode"] == "rgb_array"   # one that knows it is told, as ever


def test_no_step_behind_the_end():
    "The simulator went on, and so did the count of steps."
    env = make_env(SPEC | dict(max_steps=2), 8)
    with pytest.raises(ValueError, match=r"the episode has ended; call reset\(trial\) first"): env.step([0., 0.])
    env.reset(0)
    assert [env.step([0., 0.])[3] for _ in range(2)] == [False, True]
    with pytest.raises(ValueError, match=r"the episode has ended; call reset\(trial\) first"): env.step([0., 0.])
    env.reset(0)
    assert env.step([1., 0.])[0] == 2 and env.t == 1


class Cut(Arm):
    "It cuts its episode at step 2, and would be won at step 4."
    def reset(self, **kw): self.t = 0; return super().reset(**kw)
    def step(self, action):
        self.t += 1
        seen,*_ = super().step(action)
        return seen,0.,False,self.t == 2,dict(is_success=self.t == 4)


gymnasium.register("CutArmOfOthers-v0", entry_point=Cut)
def forward(sim): return [1., 1.]


def test_demonstrations_end_where_the_simulator_cuts():
    spec = SPEC | dict(name="CutArmOfOthers-v0", success="is_success", expert=f"{__name__}:forward", max_steps=9)
    assert record_one(make_env(spec, 8), 0, np.random.default_rng(0), 0, 2) is None


def test_frames_after_success_may_lie_behind_the_end():
    env = make_env(dict(kind="dot", name="left"), 16)
    n = len(record_one(env, 0, np.random.default_rng(0), 0, 0)[STATE])
    env = make_env(dict(kind="dot", name="left", max_steps=n), 16)
    assert len(record_one(env, 0, np.random.default_rng(0), 0, 4)[STATE]) == n+4 and env.ended
