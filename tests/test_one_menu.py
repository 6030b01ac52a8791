"One menu of methods against forgetting, `cl`, for every learner; imitation's older spelling `algo` stays its short form."
import pytest

from clvla.core.config import config_json, long_form, short_form
from clvla.core.files import read_json, write_json
from clvla.crl.config import AgentConfig
from clvla.eval.compare import group, read_runs
from clvla.rl.config import PracticeConfig
from clvla.run.config import differences, identity, read_config, resolve
from clvla.train.config import TrainConfig
from clvla.train.learner import train_cl

SMALL = dict(suite="dot_2", n_demos=1, steps_per_task=2, warmup=1, n_trials=1, rows_per_task=1, n_workers=1, batch_size=8, image_size=32, save_minutes=0.)


def given(path, **kw): return resolve(TrainConfig.of(**(SMALL | dict(run_dir=str(path), data_dir=str(path.parent/"data")) | kw)))


def test_the_short_form_is_the_same_run(tmp_path):
    long, short = given(tmp_path/"run", cl="er", replay_ratio=.5), given(tmp_path/"run", algo="er", algo_kw=dict(replay_ratio=.5))
    assert long == short and (long.algo, long.algo_kw, long.cl, long.cl_kw) == ("imitation", {}, "er", dict(replay_ratio=.5))
    assert given(tmp_path/"run", algo="er", cl="er", replay_ratio=.5) == long
    stored = short_form(config_json(long))   # as every version before wrote it
    assert (stored["algo"], stored["algo_kw"]) == ("er", dict(replay_ratio=.5)) and "cl" not in stored
    assert differences(stored, long) == [] and identity(long)["algo"] == "er" and long_form(stored) == config_json(long)
    assert differences(stored, given(tmp_path/"run", cl="mir")) != []


def test_a_folder_in_the_short_form_is_continued_compared_and_named_as_before(tmp_path):
    run = train_cl(given(tmp_path/"data0"/"old", cl="er"), say=len)
    write_json(run.path/"config.json", short_form(read_json(run.path/"config.json")))
    said = []
    assert train_cl(given(tmp_path/"data0"/"old", algo="er"), say=said.append).done and "finished" in said[-1]
    new = train_cl(given(tmp_path/"data0"/"new", cl="er", seed=1), say=len)
    assert read_json(new.path/"config.json")["cl"] == "er" and read_config(run.path).cl == "er"
    assert [len(rs) for rs in group(read_runs([run.path, new.path])).values()] == [2] and [*group(read_runs([run.path, new.path]))] == ["er"]
    assert [*group(read_runs([run.path, new.path]), ("cl",))] == ["cl=er"]


@pytest.mark.parametrize("kw, says", [
    (dict(algo="er", cl="mir"), "give it once, as cl"), (dict(cl="err"), "did you mean 'er'?"), (dict(algo="err"), "did you mean 'er'?"),
    (dict(cl="er", lam=3), "nor a setting of algo 'imitation' or cl 'er'"), (dict(algo_kw=dict(replay_ratio=.2), cl="er", cl_kw=dict(replay_ratio=.3)), "given twice"),
    (dict(cl="er", refresh=3), "did you mean"), (dict(cl="er+er"), "names 'er' twice")])
def test_what_cannot_be_meant_is_a_sentence(tmp_path, kw, says):
    with pytest.raises(ValueError, match=says.replace("?", r"\?")): given(tmp_path/"run", **kw)


def test_none_is_sequential_in_imitation(tmp_path): assert given(tmp_path/"run", cl="none") == given(tmp_path/"run", cl="sequential")


@pytest.mark.parametrize("cls", [TrainConfig, PracticeConfig])
def test_several_methods_find_the_owners_of_flat_settings(cls):
    cfg = cls.of(suite="dot_2", cl="er + ewc", replay_ratio=".5", lam=3)
    assert cfg.cl_kw == dict(er=dict(replay_ratio=.5), ewc=dict(lam=3.))
    with pytest.raises(ValueError, match="of cl 'der' and of cl 'agem'"): cls.of(suite="dot_2", cl="der+agem", buffer_size=9)
