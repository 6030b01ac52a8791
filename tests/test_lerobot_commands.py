"LeRobot's own commands: lerobot-train trains and continues a policy of clvla; lerobot-eval plays a checkpoint, also of each class of LeRobot's own, as clvla does."
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("lerobot")
from safetensors.torch import load_file
from test_resume import config
from clvla.eval.results import read_results
from clvla.core.batch import torch_rng
from clvla.core.files import read_json, write_json
from clvla.core.names import ACTION, IMAGE, PROMPT, STATE
from clvla.data.lerobot_write import write_lerobot
from clvla.data.stats import Processor
from clvla.envs.all import make_env
from clvla.policies.all import load_policy, make_policy
from clvla.policies.lora import add_lora
from clvla.policies.weights import save_base, save_policy
from clvla.run.checkpoint import checkpoints
from clvla.train.learner import train_cl

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[1]
MAINS = """
import importlib, json, sys
for command,args in json.loads(sys.argv[1]):
    sys.argv = [f"lerobot-{command}", "--plugin.discover_packages_path=clvla.run.lerobot", *args]
    importlib.import_module(f"lerobot.scripts.lerobot_{command}").main()
"""
NOTES = """
import torch, lerobot.scripts.lerobot_eval as at
from safetensors.torch import save_file
real = at.rollout
def rollout(env, policy, *a, **kw):   # what torch's generator was before each action, and the action
    seen,act = [],policy.select_action
    def noted(batch):
        seen.append(torch.get_rng_state())
        return act(batch)
    policy.select_action = noted
    out = real(env, policy, *a, **kw)
    policy.select_action = act
    where.append(dict(rng=torch.stack(seen), action=out["action"][0].contiguous()))
    return out
where,at.rollout = [],rollout
"""
KEEP = """
    save_file({f"{i}.{k}": x for i,one in enumerate(where) for k,x in one.items()}, f"{args[-1].split('=')[1]}/notes.safetensors")
    where.clear()
"""
EVAL = ["--env.type=clvla", "--env.suite=dot_2", "--env.image_size=32", "--seed=0", "--eval.use_async_envs=false"]


def lerobot(*commands, code=MAINS):
    "Run LeRobot's commands, one after the other in one process, which saves starting it again; what it printed."
    env = dict(os.environ, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout+done.stderr


def successes(out): return [t["metrics"]["successes"] for t in json.loads((out/"eval_info.json").read_text())["per_task"]]


@pytest.fixture(scope="module")
def run(shared_data, tmp_path_factory):
    "Two tasks trained together until some episodes succeed and some do not."
    cfg = config(shared_data, tmp_path_factory.mktemp("run")/"run", head="l1", algo="joint", steps_per_task=60, n_trials=6, rows_per_task=3, lr=1e-3)
    return train_cl(cfg, say=len)


@pytest.fixture(scope="module")
def last(run): return checkpoints(run.path/"checkpoints", ends=True)[-1]


def test_lerobot_eval_ends_every_episode_as_clvla_did(run, last, tmp_path):
    from clvla.run.lerobot.commands import lerobot_folder
    folder = lerobot_folder(last, tmp_path/"theirs")
    lerobot(["eval", [f"--policy.path={folder}", *EVAL, "--eval.n_episodes=6", "--eval.batch_size=3", f"--output_dir={tmp_path/'out'}"]])
    ours = {(r["task"], r["trial"]): r["success"] for r in run.episodes()}
    theirs = successes(tmp_path/"out")
    assert theirs == [[ours[task, i] for i in range(6)] for task in ("left", "right")]
    assert {True, False} == set(sum(theirs, []))
    found, said = read_results(f"theirs={tmp_path/'out/eval_info.json'}"), json.loads((tmp_path/"out/eval_info.json").read_text())
    assert 100*found.rate == pytest.approx(said["overall"]["pc_success"]) and found.counts.k.tolist() == [sum(s) for s in theirs] and not found.pairs


THEIRS = {f"lerobot-{name}-tiny": kind for name, kind in dict(act="act", smolvla="smolvla", diffusion="diffusion", xvla="clvla").items()} | {"lerobot-multi-task-dit-tiny": "multi_task_dit"}


@pytest.fixture(scope="module")
def played(last, tmp_path_factory):
    "A checkpoint of each of LeRobot's classes, played by one process: name -> (checkpoint, what lerobot-eval wrote)."
    pytest.importorskip("diffusers")
    from clvla.run.lerobot.commands import lerobot_folder
    home, found, commands = tmp_path_factory.mktemp("theirs"), {}, []
    for name in THEIRS:
        policy = make_policy(name, 32, 2, 2)
        for k, p in policy.named_parameters():   # a new multi-task transformer is the identity and reads nothing
            if "adaLN" in k: torch.nn.init.normal_(p.data, std=.1, generator=torch_rng(0, k))
        save_policy(policy, name, home/name)
        write_json(home/name/"processor.json", read_json(last/"processor.json"))
        found[name] = home/name, home/f"{name}-out"
        commands.append(["eval", [f"--policy.path={lerobot_folder(home/name, home/f'{name}-theirs')}", *EVAL, "--eval.n_episodes=1", "--eval.batch_size=1",
                                  f"--output_dir={found[name][1]}"]])
    lerobot(*commands, code=NOTES+MAINS+KEEP)
    return found


@pytest.mark.parametrize("name", THEIRS)
def test_lerobot_eval_plays_a_checkpoint_of_lerobots_class_as_clvla_does(played, name):
    "Every action and every end of an episode is clvla's, at the noise that LeRobot drew."
    checkpoint, out = played[name]
    notes, ends = load_file(out/"notes.safetensors"), []
    policy, processor = load_policy(checkpoint).eval(), Processor.from_json(read_json(checkpoint/"processor.json"))
    assert json.loads((checkpoint.parent/f"{name}-theirs/config.json").read_text())["type"] == THEIRS[name]
    for i, task in enumerate(("left", "right")):
        env, theirs, ours = make_env(dict(kind="dot", name=task), 32), notes[f"{i}.action"], []
        obs, won = env.reset(0), False
        while not env.ended:
            if len(ours)%8 == 0:
                torch.set_rng_state(notes[f"{i}.rng"][len(ours)].clone())   # aligned
                noise = torch.randn(1, 8, policy.noise_size) if policy.needs_noise else None
                seen = processor.obs({k: v[None] for k, v in obs.items()}) | {PROMPT: [env.prompt]}
                chunk = processor.unnormalise(policy.predict_chunk(seen, noise=noise))[0]
            ours.append(chunk[len(ours)%8])
            won |= bool(env.step(ours[-1].numpy())[1])
            obs = env.obs()
        assert len(ours) == len(theirs) and torch.allclose(torch.stack(ours), theirs, atol=1e-4)
        ends.append([won])
    assert ends == successes(out)


def episodes(n=3, size=32):
    "The dot's expert on its way."
    for i in range(n):
        env, frames = make_env(dict(kind="dot", name=("left", "right")[i%2]), size), []
        obs = env.reset(100_000+i)
        while not env.ended:
            frames.append({**obs, ACTION: np.float32(env.expert())})
            env.step(frames[-1][ACTION])
            obs = env.obs()
        yield {k: np.stack([f[k] for f in frames]) for k in (IMAGE, STATE, ACTION)} | {PROMPT: env.prompt}


def test_lerobot_train_trains_and_continues_to_the_bit(tmp_path):
    "Four updates, and the last two of them again from the checkpoint in the middle; then the policy plays."
    write_lerobot(tmp_path/"dots", episodes())
    out = tmp_path/"out"
    train = ["--dataset.repo_id=me/dots", f"--dataset.root={tmp_path/'dots'}", f"--output_dir={out}", "--policy.type=clvla", "--policy.model=tiny",
             "--policy.head=flow", "--policy.device=cpu", "--policy.push_to_hub=false", "--policy.chunk_size=4", "--policy.n_action_steps=3", "--steps=4",
             "--save_freq=2", "--batch_size=4", "--num_workers=0", "--env_eval_freq=0", "--log_freq=1", "--seed=3"]
    begun = f"--config_path={out}/checkpoints/000002/pretrained_model/train_config.json"
    lerobot(["train", train], ["train", [begun, "--resume=true", f"--output_dir={tmp_path/'again'}"]],
            ["eval", [f"--policy.path={tmp_path}/again/checkpoints/000004/pretrained_model", *EVAL, "--eval.n_episodes=1", f"--output_dir={tmp_path/'played'}"]])
    whole, half, again = (load_file(path/"pretrained_model/model.safetensors") for path in (out/"checkpoints/000004", out/"checkpoints/000002", tmp_path/"again/checkpoints/000004"))
    assert all(torch.equal(v, again[k]) for k, v in whole.items()) and any((v != half[k]).any() for k, v in whole.items())
    assert [len(s) for s in successes(tmp_path/"played")] == [1, 1]


def test_what_lerobot_cannot_have_is_refused(last, tmp_path):
    from lerobot.configs import FeatureType, PolicyFeature
    from clvla.run.lerobot.commands import ClvlaConfig, ClvlaPolicy, lerobot_folder
    policy = load_policy(last)
    add_lora(policy, 2, 16.)
    (tmp_path/"lora").mkdir()
    save_base(policy, tmp_path/"base")
    save_policy(policy, "tiny", tmp_path/"lora")
    (tmp_path/"lora/processor.json").write_text((last/"processor.json").read_text())
    with pytest.raises(ValueError, match="merge them first"): lerobot_folder(tmp_path/"lora", tmp_path/"out")
    sees = lambda h, w: {IMAGE: PolicyFeature(FeatureType.VISUAL, (3, h, w)), STATE: PolicyFeature(FeatureType.STATE, (2,))}
    acts = {ACTION: PolicyFeature(FeatureType.ACTION, (2,))}
    with pytest.raises(ValueError, match="read squares; set --policy.image_size"): ClvlaPolicy(ClvlaConfig(device="cpu", input_features=sees(32, 48), output_features=acts))
    with pytest.raises(ValueError, match=r"expected 1\.\.8"): ClvlaConfig(device="cpu", n_action_steps=9)
    assert ClvlaPolicy(ClvlaConfig(device="cpu", image_size=32, input_features=sees(48, 64), output_features=acts)).policy.pixels == {IMAGE: 32}


def test_without_transformers_lerobots_commands_find_policies_and_streams():
    "As `pip install clvla[lerobot]` leaves them: there is no SmolVLA, and no reason to miss the rest."
    from test_release import HIDE
    code = HIDE+"import clvla.run.lerobot.commands as c; print(c.ClvlaConfig.__name__, c.ClvlaEnv.__name__)"
    done = subprocess.run([sys.executable, "-c", code, "transformers peft"], cwd=ROOT, text=True, capture_output=True)
    assert done.stdout.split() == ["ClvlaConfig", "ClvlaEnv"], done.stderr[-2000:]
