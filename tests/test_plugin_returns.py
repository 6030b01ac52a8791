"What an environment or a policy of somebody's own returns: used where it is right, else one sentence that names class, method and task."
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from clvla.cl.engine import learnt, objective_of
from clvla.core.contract import ContractError
from clvla.core.names import IMAGE, PROMPT, STATE, TASK_ID
from clvla.core.plugins import load_plugins
from clvla.core.seeds import seed_of
from clvla.data.streams import Task
from clvla.envs.all import make_env
from clvla.envs.guard import guard
from clvla.envs.kind import Kind
from clvla.envs.pool import EnvPool
from clvla.eval.call import chunk_of, predict
from clvla.eval.player import Player
from clvla.eval.rows import Row
from clvla.policies.base import Context
from clvla.policies.tiny import Tiny

HERE = Path(__file__).parent
FILE = str(HERE/"odd_env.py")
load_plugins([FILE])
TABLES = next(m for name, m in sys.modules.items() if name.startswith("clvla_plugin_odd_env_"))
spec = lambda odd, **kw: dict(kind="odd", name="left", task_id="left", max_steps=6, odd=odd, **kw)


@pytest.fixture(scope="module")
def pool():
    with EnvPool([spec("")], 1, 8, H=4, timeout=20, max_restarts=0) as pool: yield pool


def play(env, steps=4):
    env.reset(0)
    while not env.ended: answer = env.step_chunk(np.zeros((steps, 2)), None, (1, 2))
    return answer


def in_pool(pool, spec):
    pool.reset(0, 0, spec)
    result, = pool.wait(20)
    while not (result.terminated or result.truncated):
        pool.step(0, np.zeros((4 if result.n_steps == 0 else 2, 2)), (1, 2))
        result, = pool.wait(20)
    return result


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("odd", [odd for odd in TABLES.ODD if odd not in ("raises", "exits", "raising_picture", "raising_reset")])
def test_a_wrong_answer_ends_with_one_sentence(pool, odd, at):
    method = TABLES.ODD[odd][0]
    if method == "reset" and at: return   # an episode begins at step 0
    says = f"odd_env.py: Odd.{method} of task 'left'"
    with pytest.raises(ContractError) as e: play(make_env(spec(odd, at=at), 8))
    assert str(e.value).startswith(says) and "expected" in str(e.value) and "\n" not in str(e.value), e.value
    with pytest.raises(ValueError) as e: in_pool(pool, spec(odd, at=at))
    assert str(e.value).startswith(says) and pool.restarts == 0


def test_an_environment_that_brings_its_own_step(pool):
    step = lambda self, action: (0., False, False)   # `truncated` is missing
    env = guard(type("Own", (TABLES.Odd,), dict(step=step))(spec(""), 8))
    env.reset(0)
    with pytest.raises(ContractError, match="Own.step of task 'left' gave a tuple of 3, expected a tuple of 4: reward, success, terminated, truncated"): env.step(np.zeros(2))


@pytest.mark.parametrize("change, says", [(dict(state_dim=1.5), "Own has state_dim 1.5"), (dict(action_dim=0), "has action_dim 0"), (dict(n_actions=2.), "n_actions 2.0"), (dict(prompt=None), "prompt None"), (dict(task_id=3), "task_id 3")])
def test_what_an_environment_says_of_itself(change, says):
    env = type("Own", (TABLES.Odd,), {})(spec(""), 8)
    vars(env).update(change)
    with pytest.raises(ContractError, match=says): guard(env)


@pytest.mark.parametrize("name, value, says", [("expert", np.zeros(3), "Odd.expert of task 'left' gave action ndarray .3,. of float64, expected 2 numbers"), ("expert", None, "gave action None"),
                                               ("expert", np.full(2, np.nan), "finite numbers"), ("state", np.full(2, np.nan), "Odd.state of task 'left' gave state .nan nan., expected finite numbers")])
def test_what_a_demonstration_would_hold(name, value, says):
    from clvla.data.demos import record_one
    env = type("Odd", (TABLES.Odd,), {name: property(lambda self: value) if name == "state" else lambda self: value, "obs": lambda self, out=None: {}})
    env.__module__ = TABLES.__name__
    kind = Kind(env=env, entries=TABLES.Odd.entries)
    made = guard(kind.make(spec("")), )
    made._begin(0)
    with pytest.raises(ContractError, match=says): made.expert()
    made.reset = lambda trial: None
    with pytest.raises(ContractError, match=says): record_one(made, 0, np.random.default_rng(0))


@pytest.mark.parametrize("odd", TABLES.RIGHT)
def test_another_form_of_a_right_answer_changes_nothing(pool, odd):
    env, plain = make_env(spec(odd), 8), make_env(spec(""), 8)
    for a, b in zip([env.reset(0), play(env)[0]], [plain.reset(0), play(plain)[0]]):
        assert a[IMAGE].dtype == np.uint8 and np.array_equal(a[IMAGE], b[IMAGE]) and np.array_equal(a[STATE], b[STATE]) and a[STATE].dtype == np.float32
    result = in_pool(pool, spec(odd))
    assert np.array_equal(result.obs[IMAGE], b[IMAGE]) and np.array_equal(result.obs[STATE], b[STATE]) and result.truncated and not result.success


@pytest.mark.parametrize("odd, says", [("raises", "joint"), ("exits", "sys.exit was called with status 3"), ("raising_picture", "joint"), ("raising_reset", "joint")])
def test_what_an_environment_raises_names_it(odd, says):
    method = TABLES.ODD[odd][0]
    named = f"{says}.*in odd_env.py: Odd.{method} of task 'left'; expected"
    with pytest.raises(Exception, match=named) as e: play(make_env(spec(odd), 8))
    assert "\n" not in str(e.value)
    with EnvPool([spec(odd)], 1, 8, H=4, timeout=20, max_restarts=0) as pool, pytest.raises(RuntimeError) as e: in_pool(pool, spec(odd))
    first = str(e.value).splitlines()[0]
    assert says in first and f"Odd.{method} of task 'left'" in first


def test_a_process_that_ends_without_a_word_names_the_environment():
    with EnvPool([dict(kind="leaves", name="left")], 1, 8, H=4, max_restarts=0) as pool, pytest.raises(RuntimeError) as e: in_pool(pool, dict(kind="leaves", name="left"))
    assert "trial 0 of left" in str(e.value) and "odd_env.py: Leaves.step_chunk: exit status 3" in str(e.value).splitlines()[0]


@pytest.mark.parametrize("odd, says", [
    ("nan", "step of task 'game' gave reward nan"), ("half", "step of task 'game': its info gave 'success' 0.5"), ("word", "'success' 'yes'"), ("none", "'success' None"),
    ("cut", "step of task 'game' gave truncated 'no'"), ("old step", "step of task 'game' gave a tuple with .* expected a tuple of observation, reward, terminated, truncated, info"),
    ("old reset", "reset of task 'game' gave a dict with 'place', 'image', expected a tuple of observation, info"), ("no key", "step of task 'game' gave an observation without 'place'"),
    ("grows", r"step of task 'game' gave observation 'place' ndarray \(3,\) of float32"), ("outside", r"observation\['image'\] of task 'game', camera 'front': .*150"),
    ("bytes", "observation 'image' ndarray .* of uint8"), ("global", "reset of task 'game' gave two different observations for one seed"), ("raises", "level .in .*Game.reset of task 'game'"),
    ("many", "game, .*Game-v0: actions are MultiDiscrete"), ("unlimited", "game, .*Game-v0: actions are Box"), ("close", "joint .in .*Game.close of task 'game'")])
def test_a_gymnasium_environment_that_breaks_its_promises(odd, says):
    game = dict(kind="gym", name=f"{TABLES.__name__}:Game-v0", task_id="game", make=dict(odd=odd), state=["place"], picture="image", success="is_success", max_steps=9)
    def whole():
        env = make_env(game, 8)
        env.reset(0)
        while not env.ended: env.step_chunk(np.zeros((1, 1)))
        env.close()
    with pytest.raises(Exception, match=says) as e: whole()
    assert "\n" not in str(e.value) and (isinstance(e.value, ValueError) or odd in ("raises", "close"))


@pytest.mark.parametrize("odd", ["no render", "film"])
def test_a_gymnasium_environment_that_draws_nothing(odd):
    game = dict(kind="gym", name=f"{TABLES.__name__}:Game-v0", task_id="game", make=dict(odd=odd))
    for size in (8, 12):
        with pytest.raises(ContractError, match="Game.render of task 'game', camera 'front'"): make_env(game, size).reset(0)


def test_a_right_game_is_played_and_its_success_counts():
    game = dict(kind="gym", name=f"{TABLES.__name__}:Game-v0", task_id="game", state=["place"], picture="image", success="is_success", max_steps=9)
    env = make_env(game, 12)
    assert (env.reset(0)[IMAGE] == 128).all() and env.wide
    *_, success, terminated, truncated, n = env.step_chunk(np.zeros((9, 1)))
    assert (success, terminated, truncated, n) == (True, True, False, 3)


def test_seeds_of_32_bits_only_where_a_simulator_wants_them():
    "A simulator that takes the whole seed begins where it always did; the other one gets it modulo 2**31-1."
    game = dict(kind="gym", name=f"{TABLES.__name__}:Game-v0", task_id="game", state=["place"], picture="none", max_steps=9)
    wide, narrow = make_env(game, 8), make_env(game | dict(make=dict(odd="narrow")), 8)
    for trial in range(3):
        seed = seed_of(0, "gym", game["name"], trial)
        assert wide.reset(trial)[STATE][1] == np.float32(np.random.Generator(np.random.PCG64(seed)).uniform())
        assert narrow.reset(trial)[STATE][1] == np.float32(np.random.RandomState(seed % (2**31-1)).uniform()) and seed >= 2**32


# policies

def tiny(cls=Tiny): return cls(H=4, action_dim=2, state_dim=2, image_size=32, D=32, head="l1")


def changed(name, change):
    "A tiny policy one of whose methods returns something else."
    def method(self, *args, **kw): return change(getattr(Tiny, name)(self, *args, **kw))
    return tiny(type("Mine", (Tiny,), {name: method}))


CHUNKS = dict(
    short=lambda c: c[:, :3], long=lambda c: torch.cat([c, c], 1), rows=lambda c: c[:1], flat=lambda c: c.flatten(), wide=lambda c: torch.cat([c, c], 2), tuple=lambda c: (c, {}),
    none=lambda c: None, array=lambda c: c.numpy(), whole=lambda c: c.long(), nan=lambda c: c*torch.nan, inf=lambda c: c+torch.inf, meta=lambda c: c.to("meta"), list=lambda c: c.tolist())


@pytest.fixture(scope="module")
def player():
    tasks = [Task(name, name, f"go {name}", dict(kind="dot", name=name, max_steps=6)) for name in ("left", "up")]
    with Player(tasks, 1, 1, image_size=32, H=4) as player: yield player


class AsIs:
    def obs(self, raw): return {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in raw.items()} | {IMAGE: torch.from_numpy(raw[IMAGE]).permute(0, 3, 1, 2)}
    def unnormalise(self, chunk): return chunk


@pytest.mark.parametrize("what", CHUNKS)
def test_a_wrong_chunk_ends_the_evaluation_with_one_sentence(player, what):
    with pytest.raises(ContractError, match="^test_plugin_returns.Mine.predict_chunk of task 'left'.* expected ") as e:
        player.evaluate(changed("predict_chunk", CHUNKS[what]), AsIs(), range(1), 0, dict(stage=0, after="left"))
    assert "\n" not in str(e.value)


def test_what_a_policy_raises_keeps_its_class_and_names_it(player):
    def fail(c): raise KeyError("layer")
    with pytest.raises(KeyError, match="layer .in test_plugin_returns.Mine.predict_chunk of task 'left', 'up'; expected a tensor .2, 4, 2. of float numbers on cpu"):
        player.evaluate(changed("predict_chunk", fail), AsIs(), range(1), 0, dict(stage=0, after="left"))


def test_an_idle_row_may_get_anything(player):
    "What is given to a place without an episode is not looked at."
    rows = [Row(0, 0, player.tasks[0], trial=0), Row(1, 1, player.tasks[1])]
    policy = changed("predict_chunk", lambda c: torch.stack([c[0], c[0]*torch.nan]))
    obs = {IMAGE: np.zeros((2, 32, 32, 3), np.uint8), STATE: np.zeros((2, 2), np.float32)}
    assert np.isfinite(predict(policy, AsIs(), obs, rows)[0]).all()
    rows[1].trial = 3
    with pytest.raises(ContractError, match="of task 'up' gave numbers that are not finite .trial 3, step 0."): predict(policy, AsIs(), obs, rows)


def batch(B=3): return {IMAGE: torch.zeros(B, 3, 32, 32, dtype=torch.uint8), STATE: torch.zeros(B, 2), PROMPT: ["go"]*B, TASK_ID: ["left"]*B, "action": torch.zeros(B, 4, 2), "action_is_pad": torch.zeros(B, 4, dtype=torch.bool)}


LOSSES = dict(vector=lambda a: (a[0].repeat(3), a[1]), number=lambda a: (1., a[1]), cut=lambda a: (a[0].detach(), a[1]), alone=lambda a: a[0], three=lambda a: (*a, 0), none=lambda a: None,
              words=lambda a: (a[0], "out"), whole=lambda a: (a[0].detach().long(), a[1]))


@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_that_is_none(what):
    policy = changed("forward", LOSSES[what])
    ctx = SimpleNamespace(batch=batch(), noise=None, time=None, task_id="left", penalty=None)
    def objective(policy):
        ctx.loss, _ = learnt(policy, policy, ctx)
        return objective_of(policy, ctx)
    with pytest.raises(ContractError, match="^test_plugin_returns.Mine.forward of task 'left' gave .* expected a tuple"): objective(policy)
    assert objective(tiny()).ndim == 0


def test_a_penalty_alone_may_have_the_gradient():
    "An algorithm may freeze the policy and train numbers of its own."
    policy = changed("forward", LOSSES["cut"])
    ctx = SimpleNamespace(batch=batch(), noise=None, time=None, task_id="left", penalty=torch.ones((), requires_grad=True))
    ctx.loss, _ = learnt(policy, policy, ctx)
    assert objective_of(policy, ctx).requires_grad


CONTEXTS = dict(rows=lambda c: Context(pooled=c.pooled[:1]), flat=lambda c: Context(pooled=c.pooled[0]), none=lambda c: None, tensor=lambda c: c.pooled, array=lambda c: Context(pooled=c.pooled.detach().numpy()),
                mask=lambda c: Context(pooled=c.pooled, tokens=c.pooled[:, None], mask=torch.ones(1, 1)))


@pytest.mark.parametrize("what", CONTEXTS)
def test_an_encoding_of_another_shape(what):
    policy, rows = changed("encode", CONTEXTS[what]), [Row(0, 0, SimpleNamespace(id="left"), trial=0)]*3
    says = "^test_plugin_returns.Mine.encode gave .* for 3 observations, expected a Context"
    with pytest.raises(ContractError, match=says): chunk_of(policy, batch(), rows)
    with pytest.raises(ContractError, match=says): learnt(policy, policy, SimpleNamespace(batch=batch(), noise=None, time=None, task_id="left"))


def test_an_encoding_of_another_width_names_the_policy():
    policy, rows = changed("encode", lambda c: Context(pooled=torch.cat([c.pooled, c.pooled], 1))), [Row(0, 0, SimpleNamespace(id="left"), trial=0)]*3
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied.*in test_plugin_returns.Mine.predict_chunk of task 'left'"): chunk_of(policy, batch(), rows)
