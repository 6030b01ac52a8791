"Evaluations of a run's checkpoints: continued when the run has grown, in the mode they were begun in, with one stack, on the run's device."
import re, shutil, sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as NS
import numpy as np, pytest, torch
from clvla.core.config import config_json
from clvla.core.files import read_json, write_json
from clvla.core.records import append_jsonl
from clvla.cl.all import algos
from clvla.cl.base import CLAlgorithm
from clvla.data.streams import stream_json
from clvla.envs.all import kinds, make_stream
from clvla.envs.kind import Kind
from clvla.eval.compare import group, read_run, summary
from clvla.eval.parts import merge
from clvla.eval.stats import final_trained
from clvla.run.report import matrix_of
from clvla.run.config import RunConfig
from clvla.train.checkpoint_eval import EvalConfig, eval_cl
from clvla.train.eval_config import Evaluation, begin_eval
from clvla.train.config import TrainConfig, resolve
from clvla.train.learner import train_cl
from clvla.run.folder import RunFolder
from clvla.run.stop import Stopped

ce,SECOND = sys.modules["clvla.train.checkpoint_eval"],"001-right"

@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    home = tmp_path_factory.mktemp("trained")
    return train_cl(resolve(TrainConfig(algo="er", suite="dot_2", n_demos=2, steps_per_task=2, warmup=1, batch_size=8, threads=1, image_size=32,
                                      evaluate="none", run_dir=str(home/"run"), data_dir=str(home/"data"))), say=len).path

@pytest.fixture
def run(trained, tmp_path): return Path(shutil.copytree(trained, tmp_path/"run"))

def config(run, **kw): return EvalConfig(run_dir=str(run), **(dict(n_trials=2, n_workers=1, rows_per_task=1) | kw))
def bare(recs): return sorted((r["stage"], r["task"], r["trial"], r["success"], r["steps"], r["reward"]) for r in recs)

@pytest.fixture
def few(monkeypatch):
    "Stop an evaluation after so many new episodes."
    real = RunFolder.episode
    def set_to(n):
        left = iter(range(n-1))
        def episode(self, r):
            real(self, r)
            if next(left, None) is None: raise Stopped("asked to stop")
        monkeypatch.setattr(RunFolder, "episode", episode if n else real)
    return set_to

def test_a_run_that_has_grown_is_evaluated_on(run):
    "As a queue: the second task's checkpoint comes later; another first one is refused with what to do."
    aside = (run/"checkpoints"/SECOND).rename(run/"aside"); cfg = config(run, part="0/2", n_trials=1)
    out = eval_cl(cfg, len); first = (out.path/"episodes.jsonl").read_bytes(); assert len(out.episodes()) == 1
    aside.rename(run/"checkpoints"/SECOND)
    assert len(eval_cl(cfg, len).episodes()) == 2 and (out.path/"episodes.jsonl").read_bytes().startswith(first)
    assert [s["stage"] for s in read_json(out.path/"plan.json")["stages"]] == [0, 1]
    old = read_json(out.path/"plan.json"); write_json(out.path/"plan.json", old | dict(policy=[{"weights.safetensors": "0"}]+old["policy"][1:]))
    with pytest.raises(ValueError, match=f"{re.escape(out.path.name)} belongs to another evaluation, which differs in policy.*remove that folder"): eval_cl(cfg, len)

def test_a_run_that_keeps_its_last_checkpoint_alone_reaches_the_same(trained, tmp_path):
    cfg = replace(RunFolder(trained).cfg, keep_tasks=False, keep=1, run_dir=str(tmp_path/"last"))
    last = train_cl(cfg, say=len).path
    assert [p.name for p in sorted((last/"checkpoints").glob("0*"))] == [SECOND]
    weights = lambda path: (path/"checkpoints"/SECOND/"weights.safetensors").read_bytes()
    assert weights(last) == weights(trained)
    with pytest.raises(ValueError, match="set last_only to True"): eval_cl(config(last))
    assert len(eval_cl(config(last, last_only=True), say=len).episodes()) == 4


def test_gpus_that_this_machine_lacks_are_refused_at_the_door(trained, tmp_path, monkeypatch):
    for k in ("CUDA_VISIBLE_DEVICES", "CLVLA_GPUS"): monkeypatch.setenv(k, "0,1")   # as `use_gpus` leaves them
    monkeypatch.setattr("clvla.run.machine.count_gpus", lambda: 1)
    with pytest.raises(ValueError, match="gpus is '0,1', and this machine has 1"): train_cl(replace(RunFolder(trained).cfg, gpus="0,1", run_dir=str(tmp_path/"x")), say=len)
    assert not (tmp_path/"x"/"checkpoints").exists()


def test_rows_that_were_begun_stay_rows_when_a_part_appears(run):
    whole,said = config(run, n_trials=1),[]
    before = bare(eval_cl(whole, len).episodes()); eval_cl(replace(whole, part="0/2"), len)
    out = eval_cl(whole, said.append)
    assert bare(out.episodes()) == before and len(before) == 3 and not (out.path/"plan.json").exists()
    assert any(f"remove {out.path}" in s and "part0of2" in s for s in said)
    shutil.rmtree(out.path); said.clear()   # as it was told
    out = eval_cl(whole, said.append)
    assert len(out.episodes()) == 3 and (out.path/"plan.json").exists() and "2 episodes were played in parts" in said

def test_a_queue_that_was_begun_stays_a_queue_when_its_parts_are_gone(run, few):
    whole = config(run); eval_cl(config(run, part="0/2"), len)
    few(4)
    with pytest.raises(Stopped): eval_cl(whole, len)
    few(0); n = len(RunFolder(whole.folder).episodes()); shutil.rmtree(config(run, part="0/2").folder)
    out = eval_cl(whole, len)
    assert n == 4 and read_json(out.path/"clock.json")["episodes"] == 3 and len(out.episodes()) == 6   # one of the four and the two after them
    with ce.player_of(ce.check_eval(whole)) as player: assert player.shared and player.places == 9
    old = read_json(out.path/"plan.json"); write_json(out.path/"plan.json", old | dict(seed=5))
    with pytest.raises(ValueError, match="seed: 5 -> 0"): eval_cl(whole, len)   # the plan is still checked

def test_the_clock_goes_on_after_a_stop(run, few):
    cfg = config(run, part="0/2", n_trials=3); few(2)
    with pytest.raises(Stopped): eval_cl(cfg, len)
    clock = cfg.folder/"clock.json"; few(0); one = read_json(clock)
    eval_cl(replace(cfg, n_workers=2), len); two = read_json(clock)
    assert one["episodes"] == 2 and two["episodes"] == 5 and two["wall"] > one["wall"] and 1 < two["n_workers"] < 2 and two["steps"] > one["steps"]
    rest = two["wall"]-one["wall"]; assert two["n_workers"] == pytest.approx((one["wall"]+2*rest)/two["wall"])

@pytest.mark.parametrize("k,v", [("torch", "1.0"), ("gl", "egl"), ("mujoco", "3.0"), ("device", "cuda")])
def test_shares_of_other_stacks_are_not_merged(run, monkeypatch, k, v):
    real,have = ce.versions,{}; monkeypatch.setattr(ce, "versions", lambda: real() | have)
    monkeypatch.setattr(ce, "load_point", lambda *a: (None, None, None))
    monkeypatch.setattr(kinds["dot"], "packages", ("mujoco",))
    def begin(part, device="cpu"):
        cfg = config(run, part=part); shutil.rmtree(cfg.folder, ignore_errors=True)
        ce.begin_queue(ce.check_eval(cfg), RunFolder(cfg.folder), NS(places=9, pool=None), len, device)
        return cfg.folder
    one = begin("0/2"); begin("1/2"); assert {"torch", "mujoco", "gl", "device"} < set(read_json(begin("0/1")/"plan.json"))
    have |= {k: v}; device = have.get("device", "cpu")
    with pytest.raises(ValueError, match=f"part0of2 differs from this evaluation in {k}: .* -> .{v}.*remove it"): begin("0/1", device)
    other = begin("1/2", device)
    with pytest.raises(ValueError, match=f"parts of different evaluations: {k}: .{v}.* -> "): merge([one, other])

def test_rows_say_what_has_changed_since(run):
    cfg,said = config(run, n_trials=1, last_only=True),[]; out = eval_cl(cfg, len); now = read_json(out.path/"versions.json")
    write_json(out.path/"versions.json", now | dict(torch="1.0")); eval_cl(cfg, said.append)
    assert [s for s in said if "since" in s] == [f"since this evaluation began, torch 1.0 -> {now['torch']}"]

@pytest.mark.parametrize("device,gpu,want,word", [("auto", True, "cuda", ""), ("cpu", True, "cpu", ""), ("cuda", False, "cpu", "torch finds no GPU here")])
def test_checkpoints_are_evaluated_where_the_run_would_train(run, monkeypatch, device, gpu, want, word):
    "Episodes and doubts; a machine without a GPU is said."
    real,went,said = ce.load_policy,[],[]
    def load(path, prepare):
        p = real(path, prepare); p.to = lambda where: (went.append(where), p)[1]
        return p
    monkeypatch.setattr(ce, "load_policy", load); monkeypatch.setattr("clvla.run.machine.count_gpus", lambda: int(gpu))
    write_json(run/"config.json", read_json(run/"config.json") | dict(device=device))
    out = eval_cl(config(run, n_trials=1, part="0/2", last_only=True), said.append)
    assert went == [want]*2 and read_json(out.path/"plan.json")["device"] == want   # its doubts, and its episodes
    assert bool(word) == any("GPU" in s for s in said) and (not word or any(word in s for s in said))

def test_doubts_are_said(run, monkeypatch):
    said = []; monkeypatch.setattr("clvla.eval.neighbours.batch_gap", lambda *a, **kw: 2.4e-7)
    eval_cl(config(run, n_trials=1, part="0/2", last_only=True), said.append)
    assert sum("up to 2e-07" in s for s in said) == 1

# ---------------------------------------------------------------------- other tasks

def test_on_a_stream_that_was_never_trained(run):
    "All its tasks after every stage, in a folder of its own; the run's own tasks among them have the run's own columns' records."
    own = eval_cl(config(run, evaluate="full"), len); out = eval_cl(config(run, suite="dot_3"), len)
    assert out.path.name.endswith("-on-dot_3") and read_json(out.path/"stream.json")["stages"] == ["left", "right"]
    m = matrix_of(out.path, out.episodes()); assert (m.stages, m.task_ids) == (("left", "right"), ("left", "right", "up")) and (m.n == 2).all()
    assert [r for r in bare(out.episodes()) if r[1] != "up"] == bare(own.episodes())
    read = read_run(out.path); assert read.task_ids == m.task_ids and read.finished and read.config["evaluation"] == out.path.name
    table = summary(group([read]), n_boot=20).set_index("metric"); assert {"ASR", "Untrained"} <= set(table.index)
    assert len(eval_cl(config(run, suite="dot_3"), len).episodes()) == 12   # nothing is played twice

def test_on_a_part_of_the_tasks(run):
    own = eval_cl(config(run), len); out = eval_cl(config(run, tasks="right"), len)
    assert bare(out.episodes()) == [r for r in bare(own.episodes()) if r[1] == "right"] and len(out.episodes()) == 2 and out.path.name.endswith("-on-right")
    m = matrix_of(out.path, out.episodes()); assert m.task_ids == ("right",) and m.n.tolist() == [[0], [2]]
    up = eval_cl(config(run, suite=dict(base="dot_3", name="dot_4"), tasks=["up"], last_only=True), len)
    assert {r["task"] for r in up.episodes()} == {"up"} and re.search("-last-on-dot_4-[0-9a-f]{8}$", up.path.name)

def test_shares_of_another_stream_are_merged(run):
    kw = dict(suite="dot_3", last_only=True); alone = bare(eval_cl(config(run, batch=8, **kw), len).episodes())
    whole = config(run, **kw); shutil.rmtree(whole.folder)
    for a in range(2): eval_cl(replace(whole, part=f"{a}/2"), len)
    said = []; assert bare(eval_cl(whole, said.append).episodes()) == alone and "6 episodes were played in parts" in said

def test_what_a_policy_cannot_play_is_refused_at_the_door(run, monkeypatch):
    with pytest.raises(ValueError, match="task 'press-right' has state_dim 4, the policy 2; action_dim 4, the policy 2; choose a stream of the same robot and cameras as dot_2"):
        ce.check_eval(config(run, suite="mw5"))
    with pytest.raises(ValueError, match="discrete True, the policy False"): ce.check_eval(config(run, suite=dict(base="dot_2", env=dict(discrete=True))))
    with pytest.raises(ValueError, match="did you mean 'right'"): ce.check_eval(config(run, tasks=["rihgt"]))
    with pytest.raises(ValueError, match="did you mean 'dot_3'"): ce.check_eval(config(run, suite="dot3"))
    monkeypatch.setattr("clvla.train.eval_config.cameras_of", lambda path: {"front": None, "ceiling": None})
    with pytest.raises(ValueError, match="suite 'dot_3': .*ceiling.*choose a stream"): ce.check_eval(config(run, suite="dot_3"))
    assert not (run/"evals").exists()

def test_starts_of_a_benchmark_and_drawn_ones_are_not_mixed():
    say = lambda first, n, kind="libero": ce.check_starts(EvalConfig(first_trial=first, n_trials=n), [NS(env=None), NS(env=dict(kind=kind))])
    assert say(0, 50) == say(49, 1) == say(0, 51, "metaworld") == "" and "trials 50 to 69 are drawn" in say(50, 20)
    for first,n in ((0, 51), (49, 2), (1, 50)):
        with pytest.raises(ValueError, match=f"trials {first} to {first+n-1} mix .*set n_trials to {50-first} or less"): say(first, n)

def test_a_variation_of_libero_has_no_starts_of_its_own():
    "No trial of it begins at a stored state, so any number of trials is of one kind."
    cfg,tasks = EvalConfig(n_trials=60),{name: list(make_stream(name).tasks) for name in ("libero_five", "libero_five_wide")}
    assert ce.check_starts(cfg, tasks["libero_five_wide"]) == "" == ce.check_starts(replace(cfg, first_trial=50), tasks["libero_five_wide"])
    moved = [replace(task, eval_env=task.env | dict(spread=2)) for task in tasks["libero_five"]]
    for some in (tasks["libero_five_wide"], moved): Kind.check(kinds["libero"], NS(evaluate="lower", n_trials=60), some)
    for some in (tasks["libero_five"], tasks["libero_five"][:1]+moved):
        with pytest.raises(ValueError, match="mix LIBERO's own 50 starts"): Kind.check(kinds["libero"], NS(evaluate="lower", n_trials=60), some)
        with pytest.raises(ValueError, match="mix LIBERO's own 50 starts"): ce.check_starts(cfg, some)

def test_parts_made_with_other_assets_are_not_merged(run, monkeypatch):
    "The plan of a queue names the assets of its tasks' simulators."
    monkeypatch.setattr(ce, "load_point", lambda *a: (None, None, None))
    def begin(assets, part="0/1"):
        monkeypatch.setattr(kinds["dot"], "identity", lambda env: assets)
        cfg = config(run, part=part); ce.begin_queue(ce.check_eval(cfg), RunFolder(cfg.folder), NS(places=9, pool=None), len)
        return read_json(cfg.folder/"plan.json")
    one,two = dict(assets="1"*12),dict(assets="2"*12)
    assert begin(one, "0/2")["assets"] == dict(left=one, right=one)
    with pytest.raises(ValueError, match="differs from this evaluation in assets"): begin(two)
    assert not (config(run).folder/"plan.json").exists(); begin(one); begin(two, "1/2")
    with pytest.raises(ValueError, match="parts of different evaluations: assets"): begin(one)

# ---------------------------------------------------------------------- what an algorithm changes

class Turns(CLAlgorithm):
    "Adds a parameter for each stage, and evaluates each task that it has learnt with other weights."
    def __init__(self): self.scale = {}
    def prepare(self, policy, t, stream): policy.register_parameter(f"extra_{t}", torch.nn.Parameter(torch.zeros(1), requires_grad=False))
    def on_task_end(self, ctx): self.scale[ctx.task_id] = .5+ctx.t; dict(ctx.policy.named_parameters())[f"extra_{ctx.t}"].data.fill_(1.+ctx.t)
    def eval_key(self, task_id): return self.scale.get(task_id)
    @contextmanager
    def eval_policy(self, policy, task_id):
        before = policy.query.detach().clone(); policy.query.data.mul_(self.scale.get(task_id, 1.)*sum(p for n,p in policy.named_parameters() if n.startswith("extra")))
        try: yield
        finally: policy.query.data.copy_(before)
    def state_dict(self): return dict(scale=self.scale)
    def load_state_dict(self, state): self.scale = dict(state["scale"])

def test_the_runs_own_numbers_with_an_algorithm_that_changes_the_policy(tmp_path, monkeypatch):
    "Meta-World's rewards have every bit of the actions in them; films replay what was done."
    algos["turns"] = Turns
    try:
        run = train_cl(resolve(TrainConfig(algo="turns", suite=dict(base="mw5_narrow", num_tasks=2, eval_env=dict(max_steps=24)), n_demos=2, steps_per_task=2, warmup=1, batch_size=8, threads=1, image_size=32,
                                         evaluate="full", n_trials=2, n_workers=2, videos=True, run_dir=str(tmp_path/"run"), data_dir=str(tmp_path/"data"))), say=len)
        own = bare(r for r in run.episodes() if r["stage"] >= 0)
        out = eval_cl(EvalConfig(run_dir=str(run.path), evaluate="full", n_trials=2, n_workers=1), len)
        assert bare(out.episodes()) == own and len(own) == 8 and len(list((run.path/"videos").rglob("*.gif"))) >= 4
        shutil.rmtree(out.path); real = TrainConfig.eval_algo
        monkeypatch.setattr(TrainConfig, "eval_algo", lambda cfg: (algo := real(cfg), setattr(algo, "load_state_dict", lambda state: None))[0])
        blind = bare(eval_cl(EvalConfig(run_dir=str(run.path), evaluate="full", n_trials=2, n_workers=1), len).episodes())
        assert sum(a != b for a,b in zip(blind, own)) >= 4      # without the algorithm's state the numbers are others
    finally: del algos["turns"]

def test_algorithm_states_of_older_checkpoints_are_read(run):
    "They lie in state.safetensors, beside the optimizer."
    from clvla.core.state import load_state, save_state
    path = run/"checkpoints"/SECOND; ev = ce.check_eval(config(run)); _,_,new = ce.load_point(path, ev.run, ev.own)
    state = load_state(path/"state.safetensors") | dict(algo=load_state(path/"algo.safetensors")); (path/"algo.safetensors").unlink(); save_state(path/"state.safetensors", state)
    _,_,old = ce.load_point(path, ev.run, ev.own); assert str(old.state_dict()) == str(new.state_dict())

def test_two_processes_play_what_one_does_as_a_queue(run, tmp_path):
    "The whole has the records of one process with `batch` 8; begun by one process with rows for each task, it is refused; a part that fails is named."
    alone = eval_cl(config(shutil.copytree(run, tmp_path/"alone"), batch=8), say=len)
    said = []
    both = eval_cl(config(run, num_processes=2), say=said.append)
    assert bare(both.episodes()) == bare(alone.episodes()) and "2 processes play a part each, on the CPU" in said
    assert [len(RunFolder(p).episodes()) for p in sorted(run.glob("evals/*-part*of2"))] == [3, 3]
    assert bare(eval_cl(config(run), say=len).episodes()) == bare(both.episodes())   # without the setting: nothing is left to play
    eval_cl(config(run, first_trial=50), say=len)
    with pytest.raises(ValueError, match="was begun by one process"): eval_cl(config(run, first_trial=50, num_processes=2))

def test_each_part_sees_its_own_gpu(run, monkeypatch):
    "With two pretended GPUs, and with two that the user named; a part that fails is an error with its name."
    from clvla.train.eval_config import check_eval_here
    for of in ("clvla.run.machine", "clvla.train.eval_config", "clvla.train.checkpoint_eval"): monkeypatch.setattr(f"{of}.count_gpus", lambda: 2)
    for k in ("CUDA_VISIBLE_DEVICES", "CLVLA_GPUS"): monkeypatch.delenv(k, raising=False)
    started = []
    def start(words, env, **kw):
        started.append((words[-1][-9:], env.get("CUDA_VISIBLE_DEVICES")))
        return NS(poll=lambda: 0, terminate=lambda: None, wait=lambda: int(len(started) > 2))
    monkeypatch.setattr(ce.subprocess, "Popen", start)
    evaluation = check_eval_here(config(run))
    assert evaluation.cfg.num_processes == 2 and check_eval_here(config(run, gpus="1")).cfg.num_processes == 1 and check_eval_here(config(run, part="0/3")).cfg.num_processes == 1
    ce.play_parts(evaluation, say=len)
    assert started == [("-part0of2", "0"), ("-part1of2", "1")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with pytest.raises(RuntimeError, match="part0of2 .exit code 1"): ce.play_parts(evaluation, say=len)
    assert [gpu for _, gpu in started[2:]] == ["4", "6"]


@pytest.mark.parametrize("stages", [["left", "right"], ["joint"]], ids=str)
def test_what_a_run_never_trained_is_no_part_of_its_average_on_another_stream(tmp_path, stages):
    "Also not of a joint run's, whose stage names no task."
    own, other = make_stream(dict(base="dot_3", tasks=["left", "right"])), make_stream(dict(base="dot_3", tasks=["right", "up"]))
    write_json(tmp_path/"config.json", config_json(TrainConfig(cl="joint", n_trials=2)))
    write_json(tmp_path/"stream.json", stream_json(own)|dict(stages=stages))
    at = begin_eval(Evaluation(EvalConfig(run_dir=str(tmp_path), suite="dot_3", tasks="right,up", n_trials=2), RunConfig(), [], own, other, tuple(other.ids)))
    for task, won in dict(right=True, up=False).items():
        for i in range(2): append_jsonl(at/"episodes.jsonl", dict(stage=len(stages)-1, after=stages[-1], task=task, trial=i, success=won, step=None))
    scores = read_run(at).scores
    assert (scores["ASR"].value, scores["Untrained"].value) == (1., 0.)


def test_of_another_suite_only_trained_tasks_count_as_trained(tmp_path):
    "A joint run's rows are of no task, so its columns say which tasks it trained; an evaluation on the same suite is as before."
    run = train_cl(resolve(TrainConfig(algo="joint", suite="dot_2", n_demos=2, steps_per_task=1, warmup=1, batch_size=8, threads=1, image_size=32,
                                       evaluate="none", run_dir=str(tmp_path/"run"), data_dir=str(tmp_path/"data"))), say=len).path
    wide, own = (read_run(eval_cl(config(run, n_trials=1, **kw), len).path) for kw in (dict(suite="dot_3"), {}))
    assert [(r.stages, list(r.task_ids), r.matrix.trained.tolist()) for r in (wide, own)] == [
        (("joint",), ["left", "right", "up"], [[True, True, False]]), (("joint",), ["left", "right"], [[True, True]])]
    assert {r["task"] for r in final_trained(wide.records, wide.task_ids)} == {"left", "right"} and "Untrained" in wide.scores
    assert wide.scores["ASR"] == own.scores["ASR"]
