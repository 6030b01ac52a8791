"LeRobot's own commands: lerobot-train trains and continues a policy of clvla, lerobot-eval plays a checkpoint as clvla's evaluation did."
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
from clvla.core.names import ACTION, IMAGE, PROMPT, STATE
from clvla.data.lerobot_write import write_lerobot
from clvla.envs.all import make_env
from clvla.policies.all import load_policy
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
EVAL = ["--env.type=clvla", "--env.suite=dot_2", "--env.image_size=32", "--seed=0", "--eval.use_async_envs=false"]


def lerobot(*commands):
    "Run LeRobot's commands, one after the other in one process, which saves starting it again; what it printed."
    env = dict(os.environ, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", MAINS, json.dumps(commands)], capture_output=True, text=True, env=env, timeout=300)
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
