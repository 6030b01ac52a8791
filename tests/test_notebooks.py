"Every notebook of the library runs from its first cell to its last, in a process and within a time of its own."
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from libero_help import WHY

ROOT = Path(__file__).resolve().parents[1]
ALL = sorted(p for p in (ROOT/"nbs").rglob("*.ipynb") if not any(s[0] in "._" for s in p.relative_to(ROOT).parts))
CODE = """import sys; from pathlib import Path; from nbdev.test import test_nb; from nbdev.config import get_config
c = get_config()
ok, t = test_nb(Path(sys.argv[1]), skip_flags=c.tst_flags.split(), basepath=c.config_path)
sys.exit(not ok)"""


def meta(path):
    return json.loads(path.read_text(encoding="utf-8")).get("metadata", {}).get("clvla", {})


# Experiments and benchmarks (metadata clvla.run) take minutes by design; tests/test_run.py runs the experiments small.
LIBRARY = [p for p in ALL if "run" not in meta(p)]


def simulates_libero(path):
    "Whether a page uses LIBERO's simulator, and so its assets."
    text = path.read_text(encoding="utf-8")
    return re.search(r'"from clvla\.envs\.libero(?!_states|_files)|CLVLA_LIBERO_ASSETS|make_env\(.*libero', text)


@pytest.mark.parametrize("nb", LIBRARY, ids=lambda p: str(p.relative_to(ROOT/"nbs")))
def test_notebook(nb):
    if simulates_libero(nb) and not os.environ.get("CLVLA_LIBERO_ASSETS"): pytest.skip(WHY)
    limit = meta(nb).get("timeout", 180)
    p = subprocess.Popen([sys.executable, "-c", CODE, str(nb)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, start_new_session=True)
    try:
        out, _ = p.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(p.pid, signal.SIGKILL)
        out, _ = p.communicate()
        pytest.fail(f"time limit of {limit} s\n{out[-3000:]}", pytrace=False)
    if p.returncode: pytest.fail(out[-6000:], pytrace=False)


@pytest.mark.parametrize("nb", ALL, ids=lambda p: str(p.relative_to(ROOT/"nbs")))
def test_outputs_are_kept_and_small(nb):
    "A page without outputs shows nothing; one with errors or megabytes of them shows too much."
    cells = json.loads(nb.read_text(encoding="utf-8"))["cells"]
    outputs = [o for c in cells if c["cell_type"] == "code" for o in c["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error"]
    assert outputs or "parameters" in str(cells) or nb.name == "index.ipynb"
    assert nb.stat().st_size < 1_500_000


def test_experiments_keep_their_parameters_tag():
    tagged = {nb.stem: [c for c in json.loads(nb.read_text())["cells"] if "parameters" in c["metadata"].get("tags", [])]
              for nb in ALL if meta(nb).get("run") == "experiment"}
    assert set(tagged) >= {"run_cl", "eval_cl", "compare"}
    assert all(len(v) == 1 for v in tagged.values())
