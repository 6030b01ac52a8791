"Every notebook of the library runs from its first cell to its last, in a process and within a time of its own."
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import lists_left
from libero_help import WHY
from nbdev.config import get_config

ROOT = Path(__file__).resolve().parents[1]
ALL = sorted(p for p in (ROOT/"nbs").rglob("*.ipynb") if not any(s[0] in "._" for s in p.relative_to(ROOT).parts))
CODE = "import sys; sys.path.insert(0, sys.argv[1]); from page_server import serve; sys.path.pop(0); serve()"


def meta(path):
    return json.loads(path.read_text(encoding="utf-8")).get("metadata", {}).get("clvla", {})


# Experiments and benchmarks (metadata clvla.run) take minutes by design; tests/test_run.py runs the experiments small.
LIBRARY = [p for p in ALL if "run" not in meta(p)]


def simulates_libero(path):
    "Whether a page uses LIBERO's simulator, and so its assets."
    text = path.read_text(encoding="utf-8")
    return re.search(r'"from clvla\.envs\.libero(?!_states|_files)|CLVLA_LIBERO_ASSETS|make_env\(.*libero', text)


@pytest.fixture(scope="module")
def server():
    "A process that has imported what nearly all pages import, and forks one for each page."
    one_thread = dict(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")   # numpy's would be lost in a fork
    p = subprocess.Popen([sys.executable, "-c", CODE, str(ROOT/"tests")], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, env=os.environ | one_thread)
    yield p
    p.stdin.close()
    p.wait(60)


def ask(server, page, log, limit, flags=()):
    "Exit code of a page (None when it took too long) and what it printed."
    log.touch()
    server.stdin.write(json.dumps(dict(page=str(page), log=str(log), limit=limit, flags=[*flags]))+"\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the process that runs the pages has ended"
    return json.loads(answer)["code"], log.read_text(errors="replace")


@pytest.fixture(scope="module")
def flags(request):
    "Cells of these flags are left out: figures that take 10 seconds and more (`#| slow`) where the tests of tests/slow.txt are."
    kept = [] if lists_left(request.config) else ["slow"]
    return [flag for flag in get_config().tst_flags.split() if flag not in kept]


@pytest.mark.parametrize("nb", LIBRARY, ids=lambda p: str(p.relative_to(ROOT/"nbs")))
def test_notebook(nb, server, tmp_path, flags):
    if simulates_libero(nb) and not os.environ.get("CLVLA_LIBERO_ASSETS"): pytest.skip(WHY)
    limit = meta(nb).get("timeout", 180)
    code, out = ask(server, nb, tmp_path/"page.log", limit, flags)
    if code is None: pytest.fail(f"time limit of {limit} s\n{out[-3000:]}", pytrace=False)
    if code: pytest.fail(out[-6000:], pytrace=False)


@pytest.mark.parametrize("source, code, says", [("x = 1/0", 1, "ZeroDivisionError"), ("import time; time.sleep(60)", None, ""),
                                                ("import os; os._exit(3)", 3, ""), ("import os; os.kill(os.getpid(), 9)", -9, ""),
                                                ("import torch; torch.clvla = 1", 0, ""), ("import torch; assert not hasattr(torch, 'clvla')", 0, "")])
def test_the_server_tells_how_a_page_ends(server, tmp_path, source, code, says):
    "And one page's doings are not seen by the next."
    cell = dict(cell_type="code", id="a", execution_count=None, metadata={}, outputs=[], source=source)
    (tmp_path/"page.ipynb").write_text(json.dumps(dict(cells=[cell], metadata={}, nbformat=4, nbformat_minor=5)))
    ended, out = ask(server, tmp_path/"page.ipynb", tmp_path/"page.log", 5)
    assert ended == code and says in out


@pytest.mark.parametrize("flags, code", [((), 1), (("slow", "gpu"), 0)])
def test_cells_with_a_flag_are_left_out(server, tmp_path, flags, code):
    cell = dict(cell_type="code", id="a", execution_count=None, metadata={}, outputs=[], source="#| slow\n1/0")
    (tmp_path/"page.ipynb").write_text(json.dumps(dict(cells=[cell], metadata={}, nbformat=4, nbformat_minor=5)))
    ended, out = ask(server, tmp_path/"page.ipynb", tmp_path/"page.log", 30, flags)
    assert ended == code, out


def test_only_figures_are_slow():
    "No exported code, and few pages: what such a cell asserts is tried by `test all` alone."
    slow = [(p, c) for p in LIBRARY for c in json.loads(p.read_text(encoding="utf-8"))["cells"] if "".join(c["source"]).startswith("#| slow")]
    assert len({p for p, _ in slow}) <= 20 and not [c for _, c in slow if "#| export" in "".join(c["source"])]


@pytest.mark.parametrize("nb", ALL, ids=lambda p: str(p.relative_to(ROOT/"nbs")))
def test_outputs_are_kept_and_small(nb):
    "A page without outputs shows nothing; one with errors or megabytes of them shows too much."
    cells = json.loads(nb.read_text(encoding="utf-8"))["cells"]
    outputs = [o for c in cells if c["cell_type"] == "code" for o in c["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error"]
    prose = all(c["cell_type"] == "markdown" for c in cells)   # a guide, or a list of pages
    assert outputs or prose or "parameters" in str(cells)
    assert nb.stat().st_size < 1_500_000


def test_experiments_keep_their_parameters_tag():
    tagged = {nb.stem: [c for c in json.loads(nb.read_text())["cells"] if "parameters" in c["metadata"].get("tags", [])]
              for nb in ALL if meta(nb).get("run") == "experiment"}
    assert set(tagged) >= {"run_cl", "eval_cl", "compare"}
    assert all(len(v) == 1 for v in tagged.values())


@pytest.mark.parametrize("name", ["run_cl", "run_rl", "run_crl"])
def test_the_settings_of_a_page_fit_one_screen_and_the_others_are_folded(name):
    from clvla.command.words import defaults_of, parameters_of
    page = ROOT/f"nbs/{name}.ipynb"
    cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
    at, folded = (next(k for k, c in enumerate(cells) if tag in c["metadata"].get("tags", ())) for tag in ("settings", "parameters"))
    assert folded == at+1 and "\n" in (shown := "".join(cells[at]["source"])) and len(shown.splitlines()) <= 20
    assert cells[folded]["metadata"]["jupyter"] == dict(source_hidden=True)   # papermill adds its cell behind this one, which defines no setting
    assert "".join(cells[folded]["source"]).split('"""')[2].strip() == "further_settings(_names, globals())"
    table, names = "".join(cells[folded]["outputs"][0]["data"]["text/html"]), parameters_of(page)
    assert {n for n in names if f"<tr><td>{n}</td>" in table} == set(names)-set(defaults_of(page))
