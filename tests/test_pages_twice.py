"Each experiment page, run twice in one kernel with other parameters in between: the second pass has the second values."
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from clvla.crl.config import AgentConfig
from clvla.eval.compare import CompareConfig
from clvla.rl.config import PracticeConfig
from clvla.train.config import TrainConfig
from clvla.train.eval_config import EvalConfig

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")

ROOT = Path(__file__).resolve().parents[1]
DOT = "{'base': 'dot_2', 'env': {'discrete': True}}"
SMALL = dict(suite="dot_2", smoke=True, n_trials=1)
SETTINGS = dict(run_cl=dict(SMALL, algo="er"), run_rl=dict(SMALL, algo="cloning"),
                run_crl=dict(suite=DOT, smoke=True, algo_kw=dict(n_envs=2)))


class Kernel:
    "A page in a kernel: `run` executes all its cells with parameters in its parameters cell, as somebody who edits it does."
    def __init__(self, name):
        self.nb = nbformat.read(ROOT/f"nbs/{name}.ipynb", 4)
        self.cells = [c for c in self.nb.cells if c.cell_type == "code"]
        self.client = nbclient.NotebookClient(self.nb, timeout=300, kernel_name="python3", resources=dict(metadata=dict(path=str(ROOT))))

    def run(self, **parameters):
        "All code cells in turn, with lines of their own in the parameters cell."
        for c in self.cells:
            written = c.source
            if "parameters" in c.metadata.get("tags", []): c.source += "".join(f"\n{k} = {v!r}" for k, v in parameters.items())
            try: self.client.execute_cell(c, self.nb.cells.index(c), store_history=True)
            finally: c.source = written

    def ask(self, expression):
        "The value of an expression in the kernel."
        cell = nbformat.v4.new_code_cell(f"import json; print('answer'+json.dumps({expression}))")
        self.nb.cells.append(cell)
        self.client.execute_cell(cell, len(self.nb.cells)-1)
        self.nb.cells.pop()
        return json.loads(re.search("answer(.*)", "".join(o.get("text", "") for o in cell.outputs))[1])

    def said(self): return "".join(o.get("text", "") for c in self.cells for o in c.outputs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, shared_data):
    "Where the runs of this file lie, and where all find their demonstrations."
    path = tmp_path_factory.mktemp("twice")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLVLA_DATA", str(shared_data))
        yield path


def twice(name, first, second, facts):
    "What a page's names are after the first pass, after the second, and after a third one in which nothing was changed."
    kernel = Kernel(name)
    with kernel.client.setup_kernel():
        for parameters in (first, second, second):
            kernel.run(**parameters)
            yield kernel.ask(facts), kernel.said()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_page(name, folder):
    "Another seed is another run, an added setting is taken once, and an unchanged page shows the finished run."
    base, facts = SETTINGS[name], "[cfg.seed, cfg.run_dir, cfg.smoke, cfg.timeout]"
    one, two = str(folder/f"{name}-7"), str(folder/f"{name}-8")
    passes = [dict(base, seed=7, run_dir=one, timeout=777.), dict(base, seed=8, run_dir=two)]
    (a, _), (b, said), (c, again) = twice(name, *passes, facts)
    assert a == [7, one, True, 777.] and b[:3] == c[:3] == [8, two, True] and b[3] != 777.
    assert "finished" not in said and "this run is finished" in again
    assert [json.loads((folder/f"{name}-{s}/config.json").read_text())["seed"] for s in (7, 8)] == [7, 8]


def test_the_other_pages(folder):
    "An evaluation with other trials, and a comparison of other runs."
    runs = [str(folder/f"run_cl-{s}") for s in (7, 8)]
    first, second = (dict(run_dir=runs[k], n_trials=1, first_trial=500+k, last_only=True) for k in (0, 1))
    (a, _), (b, _), (c, _) = twice("eval_cl", first, second, "[evaluation.home.name, cfg.first_trial, sum(map(len, records.values()))]")
    assert a == ["run_cl-7", 500, 2] and b == c == ["run_cl-8", 501, 2]
    first, second = dict(runs=runs, baseline="er"), dict(runs=runs[1:], baseline="seed=8", by="seed")
    (a, _), (b, _), (c, _) = twice("compare", first, second, "[list(groups), cfg.by, len(groups[cfg.baseline])]")
    assert a == [["er"], "algo", 2] and b == c == [["seed=8"], "seed", 1]


@pytest.mark.parametrize("name", [*SETTINGS, "eval_cl", "compare"])
def test_no_later_name_of_a_page_is_a_parameter(name):
    "Such a name would be there before the parameters cell of a second pass, and not be taken."
    cells = ["".join(c["source"]) for c in json.loads((ROOT/f"nbs/{name}.ipynb").read_text())["cells"] if c["cell_type"] == "code"]
    k = next(k for k, c in enumerate(cells) if ("from_page(" in c or "page_config(" in c) and "page_begins(" not in c)
    given = {n.id for c in cells[k:] for n in ast.walk(ast.parse(c)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    given |= {a.asname or a.name for c in cells[k:] for n in ast.walk(ast.parse(c)) if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names}
    parameters = {"run_cl": TrainConfig, "run_rl": PracticeConfig, "run_crl": AgentConfig, "eval_cl": EvalConfig, "compare": CompareConfig}[name]
    names = {f.name for f in fields(parameters)} | set(re.findall(r"(?m)^(\w+) = ", next(c for c in cells if "algo = " in c or "runs = " in c or "run_dir = " in c)))
    assert len(names) > 4 and not given & names


def test_a_figure_that_is_drawn_again_is_html():
    "JupyterLab's Plotly extension draws an output of its own type once, and ignores the updates of it."
    kernel = Kernel("run_cl")
    with kernel.client.setup_kernel():
        cell = nbformat.v4.new_code_cell("""import plotly.graph_objects as go
from clvla.run.watch import Board
from clvla.eval.plots import show_offline
show_offline()
board = Board()
for y in (1, 2, 3): board.put("loss", go.Figure(go.Scatter(y=[y])))""")
        kernel.nb.cells = [cell]
        kernel.client.execute_cell(cell, 0)
    script, figure = cell.outputs
    assert sorted(figure.data) == ["text/html", "text/plain"] and figure.data["text/html"].count("Plotly.newPlot(") == 1
    assert '"y":[3]' in figure.data["text/html"] and "Plotly" in script.data["text/html"]


def test_lab_opens_copies_and_passes_its_options_on(tmp_path):
    "Options reach Jupyter, Jupyter takes the script's place (a signal ends it), and no tracked page is opened."
    (tmp_path/"nbs").mkdir()
    (tmp_path/"env/bin").mkdir(parents=True)
    for name in ("clvla.sh", "settings.ini", "setup.py", *(f"nbs/{p}.ipynb" for p in (*SETTINGS, "eval_cl", "compare", "audit", "sweep"))):
        shutil.copy(ROOT/name, tmp_path/name)
    want = hashlib.sha256((ROOT/"settings.ini").read_bytes()+(ROOT/"setup.py").read_bytes()).hexdigest()[:16]
    (tmp_path/"env/.clvla").write_text(want+"\n")
    jupyter = tmp_path/"env/bin/jupyter"
    jupyter.write_text('#!/bin/sh\necho "$$" "$@"\n')
    jupyter.chmod(0o755)
    p = subprocess.Popen(["bash", "clvla.sh", "lab", "--no-browser", "--port", "9"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                         env=os.environ | dict(CLVLA_ENV=str(tmp_path/"env")))
    words = p.communicate(timeout=60)[0].split()
    assert words[0] == str(p.pid) and words[1] == "lab" and words[-3:] == ["--no-browser", "--port", "9"]
    assert f"--ServerApp.root_dir={tmp_path}" in words and any(w.endswith("/lab/tree/runs/pages/run_cl.ipynb") for w in words)
    assert sorted(p.stem for p in (tmp_path/"runs/pages").iterdir()) == sorted([*SETTINGS, "eval_cl", "compare", "audit", "sweep"])
