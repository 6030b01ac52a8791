"`init_from` as a parameters file: trained once, found by later runs, the same bits either way, in a run and in practice."
import shutil
from pathlib import Path

import pytest

from clvla.rl.config import PracticeConfig
from clvla.rl.learner import practise
from clvla.run.config import read_config, resolve
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint
from clvla.train.config import TrainConfig
from clvla.train.learner import train_cl
from clvla.train.prepare import check
from clvla.train.recipe import make_start, recipe_run

SMALL = dict(suite="dot_2", n_demos=2, steps_per_task=6, n_trials=2, n_workers=1, threads=1, device="cpu")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("recipe")
    (home/"first.yaml").write_text("suite: dot_3\ncl: joint\nn_demos: 2\nsteps_per_task: 8\nevaluate: none\nimage_size: 32\n")
    return home


def config(home, name, recipe="first.yaml", **kw):
    return resolve(TrainConfig.of(**SMALL | dict(cl="er", stats="init", init_from=str(home/recipe), run_dir=str(home/name), data_dir=str(home/"data")) | kw))


@pytest.fixture(scope="module")
def made(home):
    "A run that had to make its start, with the lines that it said."
    said = []
    return train_cl(config(home, "made"), said.append), said


def test_it_is_trained_once_and_said(home, made):
    run, said = made
    point = Path(run.cfg.init_from)
    assert point.is_dir() and point.parents[2] == home/"data/bases" and RunFolder(point.parents[1]).done
    assert sum("the weights to start from are trained first: first-" in line for line in said) == 1
    again = []
    train_cl(config(home, "later", cl="sequential"), again.append)
    assert not any("trained first" in line for line in again)
    assert len(list((home/"data/bases").glob("first-*"))) == 1


def test_who_finds_it_has_the_bits_of_who_made_it(home, made):
    assert fingerprint(train_cl(config(home, "found"), len).path) == fingerprint(made[0].path)
    by_hand = config(home, "by_hand", init_from=made[0].cfg.init_from)
    assert fingerprint(train_cl(by_hand, len).path) == fingerprint(made[0].path)


def test_in_a_process_of_its_own_it_is_the_same(home, made):
    "Several processes let one alone make it."
    cfg = config(home, "alone", data_dir=str(home/"other"))
    make_start(cfg, None, len)
    assert fingerprint(recipe_run(cfg.init_from, cfg.data_dir)) == fingerprint(Path(made[0].cfg.init_from).parents[1])


def test_what_does_not_fit_is_refused_before_anything_is_trained(home):
    with pytest.raises(ValueError, match="holds another policy: chunk 8 there and 4 in this run"): check(config(home, "x", chunk=4, data_dir=str(home/"new")))
    with pytest.raises(ValueError, match="there is no file nowhere.yaml; these come with the library: protocols/pretrain_mw.yaml"): config(home, "x", init_from="nowhere.yaml")
    (home/"wrong.yaml").write_text("suite: dot_2\ncl: joint\nsteps: 5\n")
    with pytest.raises(ValueError, match="unknown parameter 'steps'"): config(home, "x", recipe="wrong.yaml")
    (home/"odd.yaml").write_text("suite: [dot_2\n")
    with pytest.raises(ValueError, match="odd.yaml is damaged"): config(home, "x", recipe="odd.yaml")
    assert not list((home/"new/bases").glob("*/checkpoints"))


def test_another_recipe_of_the_same_name_is_another_checkpoint(home, tmp_path):
    shutil.copy(home/"first.yaml", tmp_path/"first.yaml")
    same, text = config(home, "y", init_from=str(tmp_path/"first.yaml")), (home/"first.yaml").read_text()
    (tmp_path/"first.yaml").write_text(text.replace("steps_per_task: 8", "steps_per_task: 9"))
    other = config(home, "y", init_from=str(tmp_path/"first.yaml"))
    assert same.init_from == config(home, "y").init_from != other.init_from


def test_the_shipped_recipe(tmp_path):
    cfg = resolve(TrainConfig(suite="mw5", init_from="protocols/pretrain_mw.yaml", stats="init", smoke=True, data_dir=str(tmp_path)))
    run = recipe_run(cfg.init_from, cfg.data_dir)
    assert run.name.startswith("pretrain_mw-") and read_config(run).smoke and len(read_config(run).suite["tasks"]) == 25


def test_practice_starts_from_it(home, made):
    cfg = PracticeConfig(**SMALL | dict(suite="dot_3", tasks=["left"], algo="cloning", algo_kw=dict(updates=2), episodes=4, round_episodes=4, n_trials=2,
                                        init_from=str(home/"first.yaml"), run_dir=str(home/"practice"), data_dir=str(home/"data")))
    run = practise(cfg, say=len)
    assert run.cfg.init_from == made[0].cfg.init_from and run.done


def test_a_folder_of_data_by_another_name(home, made, tmp_path):
    (tmp_path/"link").symlink_to(home/"data", target_is_directory=True)
    cfg = config(home, "z", data_dir=str(tmp_path/"link"))
    assert cfg.init_from == made[0].cfg.init_from and recipe_run(cfg.init_from, cfg.data_dir)
    (tmp_path/"new").mkdir()
    (tmp_path/"far").symlink_to(tmp_path/"new", target_is_directory=True)
    check(config(home, "z", data_dir=str(tmp_path/"far")))   # still to be trained


def test_a_checkpoint_that_was_removed_is_not_there(home, made, tmp_path):
    shutil.copytree(home/"data/bases", tmp_path/"bases")
    shutil.rmtree(next((tmp_path/"bases").glob("first-*"))/"checkpoints")
    with pytest.raises(ValueError, match="first-.* does not exist; name the folder of a checkpoint"): check(config(home, "w", data_dir=str(tmp_path)))
