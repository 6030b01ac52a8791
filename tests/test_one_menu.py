"One menu of methods against forgetting, `cl`, for every learner; imitation's older spelling `algo` stays its short form."
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from clvla.core.config import config_json, long_form, short_form
from clvla.core.files import read_json, write_json
from clvla.crl.config import AgentConfig
from clvla.eval.compare import group, read_runs
from clvla.rl.config import PracticeConfig
from clvla.run.config import differences, files_of, from_page, identity, read_config, resolve
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


# --- a file of parameters fills defaults
ROOT = Path(__file__).resolve().parents[1]
ROWS = [(m[1], m[2]) for p in sorted((ROOT/"nbs/protocols").glob("*.yaml")) for m in re.finditer(r"(?m)^# +([\d.]+) %  (papermill .+)$", p.read_text())]
PUBLISHED = {   # percent of the published tables -> method, adapters' rank, suite, settings of the method
    "77.0": ("mir", 32, "libero_goal", {"sampling", "refresh", "candidates", "top_k", "between"}), "51.6": ("er", 0, "libero_goal", {"sampling"}),
    "9.8": ("sequential", 32, "libero_goal", set()), "30.0": ("mir", 32, "libero_10", {"sampling", "refresh", "candidates", "top_k", "between"}),
    "16.0": ("er", 32, "libero_10", {"sampling"})}


def of_command(line, say=print):
    "The config that a papermill command asks for."
    words = shlex.split(line)
    file, beside = files_of(words, ROOT)
    typed = {words[k+1]: words[k+2] for k, word in enumerate(words) if word == "-p"}
    return resolve(from_page(TrainConfig, file | typed, set(), file, beside))


def test_every_published_row_has_a_line(): assert {percent for percent, _ in ROWS} == set(PUBLISHED)


@pytest.mark.parametrize("percent, line", ROWS)
def test_each_published_row_resolves(percent, line, capsys):
    cfg, (cl, rank, suite, kw) = of_command(line), PUBLISHED[percent]
    assert (cfg.cl, cfg.lora_rank, cfg.suite["name"], cfg.model, cfg.batch_size, cfg.seed) == (cl, rank, suite, "qwengr00t", 16, 42)
    assert set(cfg.cl_kw) == (kw | {"replay_ratio", "buffer_size"} if cl != "sequential" else set())
    said = capsys.readouterr().out
    assert said.count("left out") == (cl != "mir") and said.count("\n") == (cl != "mir") and ("refresh" in said) == (cl != "mir")


@pytest.mark.parametrize("more, says", [("-p cl er -p refresh 50", "unknown parameter 'refresh'"), ("-p cl er -p cl_kw \"{'refresh': 50}\"", "cl 'er' has no setting 'refresh'"),
                                        ("-p cl er -p algo mir", "give it once, as cl"), ("-p cl err", "did you mean 'er'")])
def test_what_is_given_beside_the_file_is_refused_as_ever(more, says):
    with pytest.raises(ValueError, match=says): of_command(f"papermill nbs/run_cl.ipynb runs/x.ipynb -f nbs/protocols/libero_goal.yaml {more}")


def test_an_entry_that_no_method_of_the_file_has_is_refused(tmp_path):
    (tmp_path/"mine.yaml").write_text("cl: mir\nrefrehs: 3\n")
    with pytest.raises(ValueError, match="unknown parameter 'refrehs'"): of_command(f"papermill a b -f {tmp_path}/mine.yaml -p cl er")


def test_the_page_says_what_is_left_out(tmp_path):
    small = {k: v for k, v in SMALL.items()} | dict(cl="mir", refresh=2, buffer_size=9, candidates=16, data_dir=str(tmp_path/"data"), run_dir=str(tmp_path/"run"))
    (tmp_path/"mine.yaml").write_text(yaml.safe_dump(small))
    words = [sys.executable, "-m", "papermill", "nbs/run_cl.ipynb", str(tmp_path/"page.ipynb"), "-f", str(tmp_path/"mine.yaml"), "-p", "algo", "er", "--log-output"]
    out = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=os.environ | dict(PYTHONPATH=str(ROOT)), timeout=170)
    assert out.returncode == 0, out.stderr[-3000:]
    assert "candidates, refresh of the parameters file: of cl 'mir', which is not in this run; left out" in (tmp_path/"page.ipynb").read_text()
    cfg = read_config(tmp_path/"run")
    assert (cfg.cl, cfg.cl_kw) == ("er", dict(buffer_size=9))
