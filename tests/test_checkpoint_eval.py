"Evaluations of a run's checkpoints: continued when the run has grown, in the mode they were begun in, with one stack, on the run's device."
import re, shutil, sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as NS
import pytest, torch
from clvla.core.files import read_json, write_json
from clvla.eval.parts import merge
from clvla.train.checkpoint_eval import EvalConfig, eval_cl
from clvla.train.config import RunConfig, resolve
from clvla.train.learner import train_cl
from clvla.run.folder import RunFolder
from clvla.run.stop import Stopped

ce,SECOND = sys.modules["clvla.train.checkpoint_eval"],"001-window-close"

@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    home = tmp_path_factory.mktemp("trained")
    return train_cl(resolve(RunConfig(algo="er", suite=dict(base="mw5", num_tasks=2), n_demos=2, steps_per_task=2, warmup=1, batch_size=8, image_size=32,
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
    with ce.arena_of(whole, RunFolder(run).cfg, ce.points_of(whole)[1]) as arena: assert arena.batch == 8
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
    monkeypatch.setattr(ce, "load_policy", lambda path, **kw: NS(to=lambda device: None))
    def begin(part, device="cpu"):
        cfg = config(run, part=part); shutil.rmtree(cfg.folder, ignore_errors=True)
        ce.begin_queue(cfg, RunFolder(cfg.folder), *ce.points_of(cfg), NS(batch=8, doubt=lambda *a: ""), len, device)
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

def test_the_device_is_that_of_training(monkeypatch):
    said = []
    for gpu,want in ((True, ["cuda", "cpu", "cuda"]), (False, ["cpu", "cpu", "cpu"])):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        assert [ce.device_of(d, said.append) for d in ("auto", "cpu", "cuda")] == want and len(said) == int(not gpu)

@pytest.mark.parametrize("device,gpu,want,word", [("auto", True, "cuda", ""), ("cuda", False, "cpu", "torch finds no GPU here")])
def test_a_policy_is_tried_where_the_run_would_train(run, monkeypatch, device, gpu, want, word):
    "Episodes and doubts; a machine without a GPU is said."
    real,went,said = ce.load_policy,[],[]
    def load(path, **kw):
        p = real(path, **kw); p.to = lambda where: (went.append(where), p)[1]
        return p
    monkeypatch.setattr(ce, "load_policy", load); monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    write_json(run/"config.json", read_json(run/"config.json") | dict(device=device))
    out = eval_cl(config(run, n_trials=1, part="0/2", last_only=True), said.append)
    assert went == [want]*2 and read_json(out.path/"plan.json")["device"] == want   # its doubts, and its episodes
    assert bool(word) == any("GPU" in s for s in said) and (not word or any(word in s for s in said))

def test_doubts_are_said(run, monkeypatch):
    said = []; monkeypatch.setattr("clvla.eval.player.batch_gap", lambda *a: 2.4e-7)
    eval_cl(config(run, n_trials=1, part="0/2", last_only=True), said.append)
    assert sum("up to 2e-07" in s for s in said) == 1
