"Learning from an expert beside the policy: labels are what it does from there, a crash or a lost worker changes nothing, bad settings are refused."
import numpy as np
import pytest

from test_practice import SMALL, Crash, crash_after
from clvla.core.contract import ContractError
from clvla.core.names import ACTION, PAD, STATE
from clvla.core.state import save_state
from clvla.envs.all import kinds, make_env
from clvla.envs.base import Env
from clvla.envs.dot import Dot, DotKind
from clvla.envs.expert import advice, guided, plan_of
from clvla.rl.all import methods
from clvla.rl.config import PracticeConfig, resolve_practice
from clvla.rl.episodes import Recorder, load_episodes, save_episodes
from clvla.rl.learner import practise
from clvla.run.resume import fingerprint

ARMS = {"dagger": {}, "hg_dagger": dict(gate=.6), "hg_dagger late": dict(gate=None, late=8)}
SOME = SMALL | dict(steps_per_task=40)


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


def config(data, path, arm, **kw):
    own = dict(algo=arm.split()[0], algo_kw=dict(updates=4) | ARMS[arm])
    return resolve_practice(PracticeConfig(data_dir=str(data), run_dir=str(path), **(SOME | own | kw)))


def films_of(run): return {(int(f.parent.name[-3:]), f.name.split("-")[0], "-success-" in f.name) for f in (run.path/"videos").glob("*-round-*/*.gif")}


def rounds(run): return [load_episodes(path) for path in sorted((run.path/"practice").glob("round-*"))]


@pytest.mark.parametrize("arm", ARMS)
def test_the_expert_acts_from_the_live_state_and_a_crash_changes_nothing(data, tmp_path, arm):
    run = practise(config(data, tmp_path/"run", arm, save_every=1), say=len)
    seen, H, acted = 0, run.cfg.chunk, 0
    for e in sum(rounds(run), []):
        env = make_env(dict(kind="dot", name=e.task_id, max_steps=30), 32)
        env.reset(e.trial)
        for step, action in enumerate(e.action):
            if step in e.at: assert (env.state == e.obs[STATE][e.at.tolist().index(step)]).all()
            if e.plan is not None and step % H == 0:
                plan, n = e.plan[step//H], e.plan_steps[step//H]
                twin = make_env(dict(kind="dot", name=e.task_id, max_steps=30), 32)
                twin.reset(e.trial)
                for a in e.action[:step]: twin.step(a)
                for k in range(n):
                    assert np.array_equal(plan[k], twin.expert())
                    twin.step(plan[k])
                assert n == H or twin.ended
                seen += 1
            if e.is_intervention[step]: assert np.array_equal(action, env.expert())
            acted += e.is_intervention[step]
            env.step(action)
        if "late" in arm: assert e.is_intervention.tolist() == [step >= 8 for step in range(e.n_steps)]
    assert (seen > 0) == (arm == "dagger") and (acted > 0) == (arm != "dagger")
    for n in (1, 6):
        with pytest.MonkeyPatch.context() as m:
            crash_after(m, n, algo=arm.split()[0])
            with pytest.raises(Crash): practise(config(data, tmp_path/f"crash{n}", arm, save_every=1), say=len)
        assert fingerprint(practise(config(data, tmp_path/f"crash{n}", arm, save_every=1), say=len).path) == fingerprint(run.path)


def test_samples_are_the_labels(data, tmp_path, monkeypatch):
    "Each sample of a run is an observation with the expert's steps that follow it, as the batch has it."
    kept, real = [], methods["hg_dagger"].begin

    def begin(self):
        kept.append(self.data.own)
        real(self)
    monkeypatch.setattr(methods["hg_dagger"], "begin", begin)
    run = practise(config(data, tmp_path/"run", "hg_dagger late", videos=True), say=len)
    assert films_of(run) == {(r, e.task_id, e.success) for r, of in enumerate(rounds(run)) for e in of}   # a replay that ended otherwise would raise
    labels = kept[-1]
    batch = labels.gather(range(len(labels)))
    assert labels.n_steps == sum(int(e.is_intervention.sum()) for e in sum(rounds(run), []))
    found = 0
    for e in sum(rounds(run), []):
        for row, at in enumerate(e.at[:-1].tolist()):
            if not e.is_intervention[at]: continue
            same = (batch[STATE].numpy() == e.obs[STATE][row]).all(1).nonzero()[0]
            n = min(run.cfg.chunk, e.n_steps-at)
            assert any((~batch[PAD][i]).sum() == n and np.array_equal(batch[ACTION][i, :n].numpy(), e.action[at:at+n]) for i in same)
            found += 1
    assert found == len(labels) > 0


@pytest.mark.parametrize("algo, kw, says", [
    ("dagger", dict(most=-1), "most"), ("dagger", dict(gate=.5), "no setting 'gate'"), ("hg_dagger", dict(gate=-.1), "gate"),
    ("hg_dagger", dict(gate=None), "never takes over"), ("hg_dagger", dict(late=1.5), "late"), ("hg_dagger", dict(tau=3.), "no setting 'tau'|unexpected|tau")])
def test_bad_settings_are_refused(data, tmp_path, algo, kw, says):
    with pytest.raises((ValueError, TypeError), match=says):
        practise(PracticeConfig(data_dir=str(data), run_dir=str(tmp_path/"run"), **(SMALL | dict(algo=algo, algo_kw=kw))), say=len)
    assert not (tmp_path/"run/practice").exists()


class Mute(Env): kind, state_dim, action_dim = "mute", 2, 2
class Deaf(Dot):
    _save = Env._save


@pytest.mark.parametrize("env, algo, says", [(Mute, "hg_dagger", "has none; take another method"), (Deaf, "dagger", "needs snapshots"), (Deaf, "hg_dagger", "needs snapshots")])
def test_environments_that_cannot_are_refused(data, tmp_path, monkeypatch, env, algo, says):
    monkeypatch.setattr(kinds["dot"], "env", env)
    with pytest.raises(ValueError, match=says):
        methods[algo]().check(config(data, tmp_path/"run", algo))


def test_files_without_an_expert_are_as_before(tmp_path, data):
    run = practise(config(data, tmp_path/"run", "dagger", algo="cloning", algo_kw=dict(updates=1), episodes=3), say=len)
    episodes = rounds(run)[0]
    assert all(e.is_intervention is None and e.plan is None for e in episodes)
    again = save_episodes(tmp_path/"again.safetensors", episodes)
    assert again.read_bytes() == (run.path/"practice/round-000.safetensors").read_bytes()
    save_state(tmp_path/"odd.safetensors", dict(episodes=[{"task_id": "left"}]))
    with pytest.raises(ValueError, match="no episodes"): load_episodes(tmp_path/"odd.safetensors")


def test_a_probe_needs_no_expert(monkeypatch):
    "A task that is only evaluated is played by the policy alone."
    from clvla.rl import corrections
    cfg = resolve_practice(PracticeConfig(**(SOME | dict(suite=dict(base="dot_3", probes=["up"]), algo="dagger"))))
    def lacking(task):
        monkeypatch.setattr(corrections, "kind_of", lambda t: t.id)
        monkeypatch.setattr(corrections, "offers", lambda kind: () if kind == task else ("expert", "snapshots"))
    lacking("up")
    corrections.check_experts(cfg, True)
    lacking("right")
    with pytest.raises(ValueError, match="asks a scripted expert, and right of kind 'dot' has none"): corrections.check_experts(cfg, True)


def test_an_expert_of_discrete_actions_is_taken_at_its_word():
    env, still = make_env(dict(kind="dot", name="up", discrete=True), 16), np.zeros((12, 1), np.float32)
    env.reset(3)
    plan = plan_of(env, 12)
    assert {4.} < {*plan.ravel().tolist()} and advice(env).tolist() == env.expert().tolist()
    assert guided(env, still, gate=1.)[0].done == [] and guided(env, plan, gate=1e-3)[0] is plan   # the share of other actions
    acting, _ = guided(env, still, gate=0)
    assert env.step_chunk(acting)[2] and np.array_equal(acting.done, plan)
