"Practice: refusals at the door, the same bits after any interruption, starts that are nobody else's, and what later pages read of it."
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from chaos import wait_for
from clvla.core.batch import first_weights, torch_rng
from clvla.core.files import read_json
from clvla.core.names import STATE
from clvla.core.state import load_state, save_state
from clvla.core.trials import use_of
from clvla.eval.compare import read_runs, summary, group
from clvla.policies.all import load_policy
from clvla.rl.config import SMOKE_STEPS, PracticeConfig, base_config, resolve_practice
from clvla.rl.episodes import Recorder, load_episodes
from clvla.rl.gains import gains
from clvla.rl.learner import Practice, practise
from clvla.rl.method import Method
from clvla.rl.td3 import TD3
from clvla.rl.token_ppo import TokenPPO, played_chunks
from clvla.rl.actor import Actor
from clvla.rl.all import methods
from clvla.rl.choice import ChoiceActor
from clvla.run.checkpoint import checkpoints
from clvla.run.config import differences
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint
from clvla.run.stop import Stopped
from clvla.train.checkpoint_eval import eval_cl
from clvla.train.config import stream_for
from clvla.train.eval_config import EvalConfig

SMALL = dict(suite="dot_2", algo="cloning", n_demos=2, steps_per_task=8, episodes=6, round_episodes=3, n_trials=2, rows_per_task=2, n_workers=1, threads=1,
             warmup=1, batch_size=8, image_size=32, stride=2, algo_kw=dict(updates=4))


class Crash(BaseException): "A power cut: nothing is written."


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


def config(data, path, **kw): return resolve_practice(PracticeConfig(data_dir=str(data), run_dir=str(path), **(SMALL | kw)))


@pytest.fixture(scope="module")
def done(data, tmp_path_factory): return practise(config(data, tmp_path_factory.mktemp("done")/"run"), say=len)


@pytest.mark.parametrize("kw, says", [
    (dict(suite=dict(base="dot_2", env=dict(discrete=True)), head="discrete"), "numbers"), (dict(machines="a,b"), "one machine"),
    (dict(stride=3), "divisor"), (dict(episodes=0), "episodes must be above 0"), (dict(episodes=200_000), "more than the 100000 starts"),
    (dict(algo="cloninng"), "did you mean 'cloning'"), (dict(algo_kw=dict(updates=0)), "updates must be a whole number of at least 1, found 0"), (dict(algo_kw=dict(demo_share=1.5)), "demo_share"),
    (dict(tasks=["lfet"]), "did you mean 'left'"), (dict(init_from="nowhere"), "does not exist"), (dict(algo_kw=dict(refresh=1)), "no setting 'refresh'"),
    (dict(seed=90), "expected 0..89"), (dict(accumulation=2), "whole batches"), (dict(algo="token_ppo", algo_kw={}, episodes=3), "make one round"),
    (dict(algo="token_grpo", algo_kw=dict(group_size=2)), "multiple of group_size"), (dict(algo="token_td3", lora_rank=2), "lora_rank"),
    (dict(algo="token_td3", algo_kw=dict(token_kw=dict(blocks=3))), "did you mean 'n_blocks'"), (dict(algo="token_td3", algo_kw=dict(tau=0)), "tau"),
    (dict(algo="token_td3", algo_kw=dict(token="paper", token_kw=dict(width=64))), "no setting 'width'"), (dict(algo="token_td3", algo_kw=dict(token_lr=0)), "token_lr"),
    (dict(algo="token_ppo", algo_kw=dict(lam=1.5)), "lam"), (dict(algo="token_grpo", algo_kw=dict(lam=.9)), "no setting 'lam'"),
    (dict(algo="choice_grpo", algo_kw=dict(value_weight=.5, group_size=3)), "compares attempts"),
    (dict(curve_points=2), "practice is evaluated before and after"), (dict(n_trials=0), "n_trials must be above 0"), (dict(model="tinny"), "did you mean 'tiny'"),
    (dict(model="lerobot-act-tiny", algo="token_td3", algo_kw={}), "Take a model of tiny")])
def test_bad_settings_are_refused_before_anything_is_made(data, tmp_path, kw, says):
    with pytest.raises(ValueError, match=says): practise(PracticeConfig(data_dir=str(data), run_dir=str(tmp_path/"run"), **(SMALL | kw)), say=len)
    assert not (tmp_path/"run/practice").exists() and not (tmp_path/"run/episodes.jsonl").exists()


@pytest.mark.parametrize("kw, algo", [({}, "best_of_n"), (dict(head="l1"), "token_td3"), (dict(model="qwenoft-tiny"), "token_td3"),
                                      (dict(model="qwengr00t-tiny"), "best_of_n"), (dict(model="qwenoft-tiny", algo="cloning"), "cloning")])
def test_a_run_that_names_no_method_takes_the_one_that_suits_its_head(data, tmp_path, kw, algo):
    "The stored config has the method's name, and the folder is found again by a command with that name or without."
    given = dict(suite="dot_2", data_dir=str(data), run_dir=str(tmp_path/"run"), **kw)
    cfg = resolve_practice(PracticeConfig(**given))
    assert cfg.algo == algo and resolve_practice(cfg) == cfg and resolve_practice(PracticeConfig(**given | dict(algo=algo))) == cfg
    assert algo in resolve_practice(PracticeConfig(**given | dict(run_dir=""))).run_dir
    RunFolder(cfg.run_dir).begin(cfg)
    assert RunFolder(cfg.run_dir).cfg == cfg and not differences(read_json(tmp_path/"run/config.json"), resolve_practice(PracticeConfig(**given)))


def test_settings_go_to_the_method_that_is_chosen():
    assert PracticeConfig.of(suite="dot_2", model="qwenoft-tiny", sample="8").algo_kw == dict(sample=8)
    assert PracticeConfig.of(suite="dot_2", N="8").algo_kw == dict(N=8)
    with pytest.raises(ValueError, match="unknown parameter 'N'"): PracticeConfig.of(suite="dot_2", model="qwenoft-tiny", N="8")


TD3_KW = dict(actor_lr=1e-3, critic_lr=2e-3, tau=.1, actor_every=1, target_std=.3, noise_clip=.4)


def test_settings_of_the_networks_reach_them(data, tmp_path, monkeypatch):
    "The token that a run learnt has the size that was asked for, and TD3 the steps."
    made, build = [], TD3.__init__
    def seen(self, *args, **kw):
        build(self, *args, **kw)
        made.append(self)
    monkeypatch.setattr(TD3, "__init__", seen)
    small = dict(updates=2, token_updates=3, sample=8, token="query", token_kw=dict(width=32, n_blocks=1, length=80))
    run = practise(config(data, tmp_path/"run", algo="token_td3", algo_kw=small | TD3_KW), say=len)
    codec = load_policy(checkpoints(run.path/"checkpoints", ends=True)[-1]).codec
    assert (codec.W, len(codec.encoder), len(codec.pos)) == (32, 1, 80)
    td3 = made[-1]
    assert (td3.tau, td3.actor_every, td3.target_std, td3.noise_clip) == (.1, 1, .3, .4)
    assert (td3.opt_actor.param_groups[0]["lr"], td3.opt_critic.param_groups[0]["lr"]) == (1e-3, 2e-3)


def test_the_rates_of_cloning_follow_the_schedule(data, tmp_path):
    "Four updates a round, warm-up of one: the rate stays where it is, in both rounds."
    run = practise(config(data, tmp_path/"run", schedule="constant", evaluate="none"), say=len)
    lr = [r["lr"] for r in run.logs() if "lr" in r]
    assert len(lr) == 8 and len(set(lr)) == 1


@pytest.mark.parametrize("algo, kw", [("token_ppo", dict(lam=.5)), ("token_ppo", dict(value_weight=.1)), ("token_ppo", dict(clip_value=1e-4)), ("token_ppo", dict(normalise=False)),
                                      ("choice_ppo", dict(lam=.5)), ("choice_ppo", dict(value_weight=.1))])
def test_settings_of_ppo_change_what_is_learnt(algo, kw):
    "The same rollout, six updates: other weights than with the defaults, which are those of the learner itself."
    def learnt(**kw):
        method = methods[algo](epochs=3, minibatch=4, kl_stop=1e9, **kw)
        with first_weights(0, "test"): actor = ChoiceActor(4, 2, 3) if algo == "choice_ppo" else Actor(4, 2, 3, ref_dropout=0.)
        method.policy, method.ctx = SimpleNamespace(actor=actor), SimpleNamespace(device="cpu")
        ppo, g = method.make_learner(), torch_rng(0, "rollout")
        ppo.max_drift = None   # the rollout stays, and the actor moves on
        draw = lambda *shape: torch.randn(shape, generator=g)
        ref = draw(8, 5, 2, 3) if algo == "choice_ppo" else draw(8, 2, 3)
        action = torch.randint(5, (8,), generator=g) if algo == "choice_ppo" else draw(8, 2, 3)
        x = draw(8, 4)
        with torch.no_grad(): logp = actor.log_prob(x, ref, action)
        rollout = dict(x=x, ref=ref, action=action, logp_old=logp, reward=draw(8), mask=torch.full((8,), .9), next_x=draw(8, 4), done=torch.zeros(8, dtype=torch.bool))
        for _ in range(6): ppo.update(rollout | dict(done=torch.arange(8) == 7))
        return torch.cat([p.detach().flatten() for p in (*ppo.actor.parameters(), *ppo.value.parameters())])
    assert torch.equal(learnt(), learnt(lam=.95, value_weight=1.)) and not torch.equal(learnt(), learnt(**kw))


def test_choosing_among_one_answer_is_refused_where_it_is_asked_for(data, tmp_path):
    cfg = PracticeConfig(suite="dot_2", model="qwenoft-tiny", algo="best_of_n", data_dir=str(data), run_dir=str(tmp_path/"run"))
    with pytest.raises(ValueError, match="head 'l1' has one answer.*-p algo token_td3"): practise(cfg, say=len)


def test_a_smoke_run_has_short_episodes_and_the_demonstrations_of_any_run():
    cfg = resolve_practice(PracticeConfig(suite="libero_five", smoke=True))
    stream, whole = stream_for(cfg), stream_for(resolve_practice(PracticeConfig(suite="libero_five")))
    assert [t.eval_env["max_steps"] for t in stream.tasks] == [SMOKE_STEPS]*2 and resolve_practice(cfg) == cfg
    assert [t.env for t in stream.tasks] == [t.env for t in whole.tasks[:2]] and whole.tasks[0].eval_env is None
    assert resolve_practice(PracticeConfig(suite="dot_2", smoke=True)).suite == "dot_2"   # 30 steps as they are


def test_starts_are_for_practice_alone(done):
    trials = [e.trial for path in sorted((done.path/"practice").glob("*.safetensors")) for e in load_episodes(path)]
    assert len(trials) == 12 and all(use_of(t)[0] == "practice" for t in trials) and len(set(trials)) == 6   # two tasks
    assert {use_of(r["trial"])[0] for r in done.episodes()} == {"report"}


def test_seeds_practise_on_other_starts(data, tmp_path, done):
    other = practise(config(data, tmp_path/"run", seed=1), say=len)
    starts = [{e.trial for e in load_episodes(run.path/"practice/round-000.safetensors")} for run in (done, other)]
    assert not starts[0] & starts[1] and base_config(other.cfg).run_dir != base_config(done.cfg).run_dir


def test_practice_changes_the_policy_and_the_base_stays(data, done):
    base = checkpoints(RunFolder(base_config(done.cfg).run_dir).path/"checkpoints", ends=True)[-1]
    policies = [load_policy(p).state_dict() for p in (base, checkpoints(done.path/"checkpoints", ends=True)[-1])]
    assert any((a != b).any() for a, b in zip(policies[0].values(), policies[1].values()))
    assert {r["stage"] for r in done.episodes()} == {-1, 0} and len(done.episodes()) == 8


def power_cut(): raise Crash


def crash_after(monkeypatch, n, happens=power_cut, algo="cloning"):
    "Something happens in update n."
    cls, count = methods[algo], iter(range(1000))
    real = cls.update

    def update(self):
        numbers = real(self)
        if next(count) == n-1: happens()
        return numbers
    monkeypatch.setattr(cls, "update", update)


@pytest.mark.parametrize("group_size", [0, 2.5, "x"])
def test_a_smoke_run_leaves_nonsense_to_the_method(data, tmp_path, group_size):
    given = SMALL | dict(algo="choice_grpo", smoke=True, algo_kw=dict(group_size=group_size))
    with pytest.raises(ValueError, match="group_size must be"): practise(PracticeConfig(data_dir=str(data), run_dir=str(tmp_path/"run"), **given))


@pytest.mark.parametrize("given, made", [(dict(algo_kw=dict(group_size=2)), (2, 6, 2)), (dict(episodes=5, round_episodes=5), (3, 3, 3)), ({}, (3, 6, 3)),
                                         (dict(algo_kw=dict(group_size=4), episodes=8, round_episodes=4), (3, 6, 3))])
def test_a_smoke_run_of_groups_is_begun_where_the_run_is(data, tmp_path, given, made):
    "Rounds of whole groups, as many as there were or fewer; what does not fit is refused with `smoke` and without."
    for smoke in (False, True):
        cfg = resolve_practice(PracticeConfig(suite="dot_2", algo="choice_grpo", data_dir=str(data), run_dir=str(tmp_path/"run"), smoke=smoke, **given))
        methods["choice_grpo"](seed=0, **cfg.algo_kw).check(cfg)
    assert (cfg.algo_kw["group_size"], cfg.episodes, cfg.round_episodes) == made and resolve_practice(cfg) == cfg
    wrong = resolve_practice(PracticeConfig(suite="dot_2", algo="choice_grpo", data_dir=str(data), run_dir=str(tmp_path/"run"), smoke=True, algo_kw=dict(group_size=2), round_episodes=5))
    with pytest.raises(ValueError, match="multiple of group_size"): methods["choice_grpo"](seed=0, **wrong.algo_kw).check(wrong)


@pytest.mark.parametrize("n, save_every", [(1, 0), (3, 3), (4, 0), (5, 0), (8, 3)])
def test_a_crash_changes_nothing(data, tmp_path, done, n, save_every):
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, n)
        with pytest.raises(Crash): practise(config(data, tmp_path/"run", save_every=save_every), say=len)
    assert fingerprint(practise(config(data, tmp_path/"run", save_every=save_every), say=len).path) == fingerprint(done.path)


@pytest.mark.parametrize("n", [2, 6])
def test_a_stop_is_saved_and_goes_on(data, tmp_path, done, n):
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, n, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Stopped): practise(config(data, tmp_path/"run"), say=len)
    assert (tmp_path/"run/stopped.json").exists()
    assert fingerprint(practise(config(data, tmp_path/"run"), say=len).path) == fingerprint(done.path)


@pytest.mark.parametrize("n", [1, 20])
def test_a_crash_while_attempts_are_played(data, tmp_path, done, n):
    "What was played of the round is played again, from the same starts with the same noise."
    real, count = Recorder.hear, iter(range(10_000))
    with pytest.MonkeyPatch.context() as m:
        def hear(self, row, result):
            if next(count) == n: raise Crash
            real(self, row, result)
        m.setattr(Recorder, "hear", hear)
        with pytest.raises(Crash): practise(config(data, tmp_path/"run"), say=len)
    assert fingerprint(practise(config(data, tmp_path/"run"), say=len).path) == fingerprint(done.path)


@pytest.mark.parametrize("moment", ["practice/round-000.safetensors", "practice/round-001.safetensors"])
def test_killed_processes(data, tmp_path, done, moment):
    "SIGKILL of the process that learns, at a random moment after a round was played."
    cfg = config(data, tmp_path/"run")
    RunFolder(cfg.run_dir).begin(cfg)
    child = subprocess.Popen([sys.executable, "-m", "clvla.run", cfg.run_dir], env=os.environ | dict(OMP_NUM_THREADS="1"))
    try:
        wait_for(lambda: (tmp_path/"run"/moment).exists() or child.poll() is not None)
        try: child.wait(random.random()*.3)
        except subprocess.TimeoutExpired: pass
        child.send_signal(signal.SIGKILL)
    finally: child.wait()
    assert fingerprint(practise(cfg, say=len).path) == fingerprint(done.path)


TOKEN = {"token_td3": dict(updates=3, token_updates=4, sample=8), "token_ppo": dict(token_updates=4, minibatch=8), "token_grpo": dict(token_updates=4, minibatch=8, group_size=3)}


@pytest.mark.parametrize("algo", TOKEN)
def test_methods_with_a_frozen_policy(data, tmp_path, algo):
    "The base does not change, a crash in the last round changes nothing, and the checkpoint is evaluated as the run was."
    kw = dict(algo=algo, algo_kw=TOKEN[algo])
    run = practise(config(data, tmp_path/"run", **kw), say=len)
    point = checkpoints(run.path/"checkpoints", ends=True)[-1]
    base = load_policy(checkpoints(RunFolder(base_config(run.cfg).run_dir).path/"checkpoints", ends=True)[-1])
    assert all(torch.equal(load_policy(point).vla.state_dict()[k], v) for k, v in base.state_dict().items())
    for n in (1, 4 if algo == "token_td3" else 2):
        with pytest.MonkeyPatch.context() as m:
            crash_after(m, n, algo=algo)
            with pytest.raises(Crash): practise(config(data, tmp_path/f"crash{n}", **kw, save_every=1), say=len)
        assert fingerprint(practise(config(data, tmp_path/f"crash{n}", **kw, save_every=1), say=len).path) == fingerprint(run.path)
    out = eval_cl(EvalConfig(run_dir=str(run.path), n_trials=2, n_workers=1), say=len)
    facts = lambda records: {(r["task"], r["trial"]): (r["success"], r["steps"]) for r in records}
    assert facts(out.episodes()) == facts(r for r in run.episodes() if r["stage"] == 0)


def test_chunks_are_those_that_were_played(data, tmp_path, monkeypatch):
    "The noise that is drawn again gives the executed actions in the round that explored; in the first round, which did not, it cannot."
    gaps, real = [], TokenPPO.take

    def take(self, attempts):
        chunks = [played_chunks(a, self.policy.actor, self.gamma)["action"].flatten(0, 1)[:len(a["action"])] for a in attempts]
        gaps.append(max((c-a["action"]).abs().max().item() for c, a in zip(chunks, attempts)))
        real(self, attempts)
    monkeypatch.setattr(TokenPPO, "take", take)
    practise(config(data, tmp_path/"run", algo="token_ppo", algo_kw=TOKEN["token_ppo"]), say=len)
    assert len(gaps) == 2 and gaps[1] < 1e-3 < gaps[0]


@pytest.mark.parametrize("algo", ["best_of_n", "distilled"])
def test_a_critic_without_a_transition_chooses_nothing(tmp_path, algo):
    "Attempts of one chunk whose time ran out have no successor, so nothing is learnt, and the first draw is played."
    suite = dict(base="dot_2", env=dict(max_steps=4))
    run = practise(config(tmp_path/"data", tmp_path/"run", suite=suite, chunk=4, algo=algo, algo_kw=dict(updates=2, sample=4, N=2)), say=len)
    policy = load_policy(checkpoints(run.path/"checkpoints", ends=True)[-1])
    assert not any(r["success"] for r in run.episodes()) and not policy.has_learnt


def test_a_new_actor_plays_as_the_policy(data, tmp_path, done):
    "Start by start: the base of a run with an actor does what the base alone does."
    run = practise(config(data, tmp_path/"run", algo="token_td3", algo_kw=TOKEN["token_td3"]), say=len)
    before = lambda r: sorted((e["task"], e["trial"], e["success"], e["steps"]) for e in r.episodes() if e["stage"] == -1)
    assert before(run) == before(done)


def test_equal_starts_with_other_noise(data, tmp_path):
    run = practise(config(data, tmp_path/"run", algo="token_grpo", algo_kw=TOKEN["token_grpo"], videos=True), say=len)
    assert len({f.parent.name for f in (run.path/"videos").glob("*-round-*/*.gif")}) == 2   # of attempts from one start the first is filmed
    episodes = load_episodes(run.path/"practice/round-001.safetensors")
    assert len(episodes) == 6 and len({(e.task_id, e.trial) for e in episodes}) == 2 and len({e.seed for e in episodes}) == 3
    firsts = {e.task_id: [x for x in episodes if x.task_id == e.task_id] for e in episodes}
    assert all((a.obs["observation.state"][0] == b.obs["observation.state"][0]).all() and not (a.action[0] == b.action[0]).all()
               for of in firsts.values() for a, b in zip(of, of[1:]))


@pytest.mark.parametrize("harm", ["missing", "changed", "other"])
def test_a_rounds_file_is_verified(data, tmp_path, harm):
    with pytest.MonkeyPatch.context() as m:
        crash_after(m, 6)
        with pytest.raises(Crash): practise(config(data, tmp_path/"run"), say=len)
    path = tmp_path/"run/practice/round-000.safetensors"
    if harm == "missing": path.unlink()
    elif harm == "changed": path.write_bytes(path.read_bytes()[:-1]+b"x")
    else: save_state(path, load_state(tmp_path/"run/practice/round-001.safetensors"))
    with pytest.raises(ValueError, match="round-000.safetensors is missing or was changed"): practise(config(data, tmp_path/"run"), say=len)


def test_init_from_is_the_base(data, tmp_path, done):
    point = checkpoints(done.path/"checkpoints", ends=True)[-1]
    run = practise(config(data, tmp_path/"run", init_from=str(point)), say=len)
    before = lambda r, stage: [(e["task"], e["trial"], e["success"], e["steps"]) for e in sorted(r.episodes(), key=lambda e: (e["task"], e["trial"])) if e["stage"] == stage]
    assert before(run, -1) == before(done, 0)


def test_checkpoints_are_evaluated_afterwards(done, tmp_path):
    home = tmp_path/"run"
    shutil.copytree(done.path, home)
    out = eval_cl(EvalConfig(run_dir=str(home), n_trials=2, n_workers=1), say=len)
    played = {(r["task"], r["trial"]): (r["success"], r["steps"]) for r in out.episodes()}
    assert played == {(r["task"], r["trial"]): (r["success"], r["steps"]) for r in done.episodes() if r["stage"] == 0}


def test_compare_reads_runs_of_practice(done):
    runs = read_runs([done.path])
    assert runs[0].finished and runs[0].stages == ("joint",)
    table = summary(group(runs), ("ASR",), n_boot=50)
    assert len(table) == 1 and len(gains(done.path).values) == 2


def test_a_method_of_ones_own(data, tmp_path):
    "Registered under a name; one that learns nothing gives back its base."
    methods["nothing"] = Method
    try: run = practise(config(data, tmp_path/"run", algo="nothing", algo_kw=dict(updates=1)), say=len)
    finally: del methods["nothing"]
    facts = lambda stage: [(r["task"], r["trial"], r["success"], r["steps"]) for r in run.episodes() if r["stage"] == stage]
    assert sorted(facts(-1)) == sorted(facts(0))


@pytest.mark.parametrize("algo", methods)
def test_smoke_settings_of_every_method(data, tmp_path, algo):
    cfg = resolve_practice(PracticeConfig(data_dir=str(data), run_dir=str(tmp_path/"run"), suite="dot_2", algo=algo, smoke=True))
    assert cfg.episodes == 6 and Practice(cfg).stages[0].n_steps <= 8


@pytest.mark.parametrize("controls", [dict(blind=True), dict(deaf=True)])
def test_controls_reach_practice(data, tmp_path, controls):
    run = practise(config(data, tmp_path/"run", **controls), say=len)
    processor = read_json(checkpoints(run.path/"checkpoints", ends=True)[-1]/"processor.json")
    assert "controls" in processor


def test_the_page(data, tmp_path):
    "The smoke run, as a user starts it."
    from papermill.inspection import inspect_notebook
    from test_run import ROOT, page
    out = page("run_rl", tmp_path/"page.ipynb", "-p", "smoke", "True", "-p", "suite", "dot_2", "-p", "run_dir", str(tmp_path/"run"), env={"CLVLA_DATA": str(data)})
    assert out.returncode == 0, out.stderr[-3000:]
    assert read_json(tmp_path/"run/done.json")["rounds"] == 2
    listed = set(inspect_notebook(ROOT/"nbs/run_rl.ipynb"))
    assert not set(PracticeConfig.__dataclass_fields__) - listed and {"tau", "updates", "demo_share"} <= listed


def test_it_gets_better(data, tmp_path):
    "With its own successes; with nothing but the demonstrations again it does not get as far."
    kw = dict(suite="dot_3", tasks=["left"], n_demos=2, steps_per_task=25, batch_size=32, episodes=80, round_episodes=40, n_trials=60, rows_per_task=10,
              image_size=48)
    run = practise(config(data, tmp_path/"own", **kw, algo_kw=dict(updates=100)), say=len)
    control = practise(config(data, tmp_path/"demos", **kw, algo_kw=dict(updates=100, demo_share=1.)), say=len)
    rate = lambda r, stage: sum(e["success"] for e in r.episodes() if e["stage"] == stage)/60
    assert rate(run, 0) >= rate(run, -1)+.15 and rate(run, 0) >= rate(control, 0)


class Straight(torch.nn.Module):
    "Goes to the origin with some noise, in chunks of eight steps."
    H = 8
    def __init__(self): super().__init__(); self.gain = torch.nn.Parameter(torch.tensor(1.))
    def chunk_noise(self, generator=None): return torch.randn(8, 2, generator=generator)
    def prompt_length(self, text): return len(text.split())
    def predict_chunk(self, obs, *, noise=None, generator=None): return -self.gain*obs[STATE][:, None] + .5*noise


def test_a_success_that_ends_no_episode_is_credited_to_its_own_step():
    "The attempts are those of a simulator that ends there, step for step; transitions too; only the last picture comes later."
    import numpy as np
    from types import SimpleNamespace
    from clvla.core.plugins import load_plugins
    from clvla.core.trials import trial_number
    from clvla.data.streams import Task
    from clvla.envs.all import make_env
    from clvla.eval.player import Player
    from clvla.rl.transitions import transitions
    load_plugins([str(Path(__file__).parent/"dot_env.py")])
    as_is = SimpleNamespace(obs=lambda raw: {**raw, STATE: torch.tensor(raw[STATE])}, unnormalise=lambda a: a)
    found = {}
    for goes_on in (True, False):
        task, recorder = Task("dot", "dot", "go", dict(kind="dying", name="dot", goes_on=goes_on, max_steps=40)), Recorder(4, H=8)
        with Player([task], 3, 1, image_size=8, H=8) as player:
            player.evaluate(Straight(), as_is, [trial_number("practice", i) for i in range(10)], 0, dict(stage=0, after="dot"), recorder=recorder)
        found[goes_on] = recorder.take()
    for a, b in zip(found[True], found[False], strict=True):
        env = make_env(task.env | dict(goes_on=True), image_size=8)   # a plain loop: the first step with a success
        env.reset(b.trial)
        first = next((k for k, action in enumerate(a.action, 1) if env.step(action)[1]), 0)
        assert a.success == b.success == bool(first) and a.n_steps == b.n_steps and (not first or first == a.n_steps)
        assert np.array_equal(a.action, b.action) and a.at.tolist() == b.at.tolist() and np.array_equal(a.reward, b.reward)
        assert all(np.array_equal(a.obs[k][:-1], b.obs[k][:-1]) for k in b.obs)
        one, other = (transitions(e.at, e.success_reward, e.ended, 8, .9) for e in (a, b))
        assert all(np.array_equal(one[k], other[k]) for k in other)
    assert {e.n_steps % 8 for e in found[True] if e.success} - {0}   # inside a chunk


def test_tasks_of_other_lengths_have_equal_shares_of_the_draws():
    "Ten successes of 30 to 48 steps beside ten of 120 to 147: half each; inside a task the quicker ones more often, by equation 1."
    import numpy as np
    from clvla.core.names import IMAGE
    from clvla.rl.cloning import Successes
    from clvla.rl.episodes import Episode
    lengths = dict(short=range(30, 50, 2), long=range(120, 150, 3), never=[])

    def attempt(task, n):
        at = np.array([*range(0, n, 4), n])
        obs = {IMAGE: np.zeros((len(at), 2, 2, 3), np.uint8), STATE: np.zeros((len(at), 1), np.float32)}
        return Episode(task, 0, 0, obs, at, np.zeros((n, 1), np.float32), np.zeros(n, np.float32), True, True, False)
    own = Successes(4, [IMAGE], {task: task for task in lengths}, 25.)
    own.add([attempt(task, n) for task, ns in lengths.items() for n in ns])
    p, tasks, steps = own.chances(list(lengths)), np.array(own.task_ids), np.array(own.rows)
    for task in ("short", "long"):
        mine = tasks == task
        weight = np.exp(-steps[mine]/25)
        assert p[mine] == pytest.approx(weight/weight.sum()/2) and own.chances([task])[mine] == pytest.approx(weight/weight.sum())
    assert p.sum() == pytest.approx(1)
