"README's code blocks, executed as they are pasted at the project's root: a copy of it, so that nothing is left behind."
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("metaworld") is None: pytest.skip("README's blocks play Meta-World", allow_module_level=True)   # importing it here would choose how mujoco draws
ROOT = Path(__file__).resolve().parents[1]
README = (ROOT/"README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)
COMMANDS = [line[4:].split("  #")[0].strip() for line in README.splitlines() if line.startswith("    ")]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    "A copy of the tracked files, as a clone has them."
    copy = tmp_path_factory.mktemp("clone")/"clvla"
    for name in subprocess.check_output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True).split("\0"):
        if not name or not (ROOT/name).exists(): continue
        (copy/name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT/name, copy/name)
    return copy


@pytest.fixture
def run(project, shared_data):
    "Run words at the root of the copy; everything that they print."
    bin = str(Path(sys.executable).parent)
    env = os.environ | dict(PATH=f"{bin}:{os.environ['PATH']}", PYTHONPATH=str(project), CLVLA_DATA=str(shared_data), CLVLA_ENV=sys.prefix)
    def run(words):
        done = subprocess.run(words, cwd=project, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=900)
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout
    return run


def texts(page):
    "What an executed page printed and shows as text."
    outputs = [o for c in json.loads(page.read_text(encoding="utf-8"))["cells"] for o in c.get("outputs", [])]
    return "\n".join("".join(o.get("text", o.get("data", {}).get("text/plain", ""))) for o in outputs)


def test_what_readme_says():
    assert len(PYTHON) == 1 and PYTHON[0].startswith("import clvla\n")
    assert COMMANDS[:2] == ["./clvla.sh run", "./clvla.sh test"] and len(COMMANDS) == 5
    assert all(words.startswith("papermill nbs/") for words in COMMANDS[2:])


def test_the_pasted_python_works_in_a_small_run(run, project):
    "The same lines with `smoke=True`, which takes seconds; the whole is in tests/slow.txt."
    said = run([sys.executable, "-u", "-c", PYTHON[0].replace('suite="mw5"', 'suite="mw5", smoke=True')+"\nprint(run, len(run.heatmap().data))"])
    assert said.splitlines()[-1] == "runs/mw5-er-tiny-s0-smoke: done 1"
    assert "demonstrations" in said and "after " in said, "a script that prints nothing looks like one that hangs"


def test_the_pasted_python_works_whole(run):
    said = run([sys.executable, "-u", "-c", PYTHON[0]+"\nprint(run, run.matrix.R[-1].mean() > .5)"])
    assert said.splitlines()[-1] == "runs/mw5-er-tiny-s0: done True"


def test_the_first_tutorial_works_as_pasted(run, project):
    "Its cells in order, asserts and all, from its own folder as Jupyter runs them."
    cells = json.loads((project/"nbs/tutorials/first_forgetting.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    said = run([sys.executable, "-u", "-c", f"import os\nos.chdir('nbs/tutorials')\n{code}\nprint(later, '<', kept)"])
    assert re.fullmatch(r"[\d.]+ < [\d.]+", said.splitlines()[-1])


SMALL = ["-p", "steps_per_task", "5", "-p", "n_trials", "2"]   # of the main job, whose folder keeps its name
FEW = ["-p", "n_trials", "2"]                                   # of its evaluation: after so few updates each episode lasts until its end


@pytest.mark.parametrize("small", [SMALL, []], ids=["small", "whole"])
def test_pasted_commands_work_in_their_order(run, project, small):
    "The main job and its evaluation in full are in tests/slow.txt; the other commands are always those of README."
    shutil.rmtree(project/"runs", ignore_errors=True)
    main,_,*pages = COMMANDS
    want = hashlib.sha256((ROOT/"settings.ini").read_bytes()+(ROOT/"setup.py").read_bytes()).hexdigest()[:16]
    made = Path(sys.prefix)/".clvla"
    prepared = made.exists() and made.read_text().strip() == want   # by clvla.sh from these files, so that it installs nothing from the copy
    if not prepared: (project/"runs").mkdir()   # clvla.sh makes it
    start = shlex.split(main) if prepared else ["papermill", "--log-output", "--no-progress-bar", "nbs/run_cl.ipynb", "runs/page.ipynb"]
    run(start+(["-p", "cl", "mir"] if small or not prepared else [])+small)
    for command in pages: run(shlex.split(command)+(FEW if small and "nbs/eval_cl.ipynb" in command else []))
    said = texts(project/"runs/compare.ipynb")
    assert "left out: runs/mw5-er-tiny-s0-smoke is a smoke run" in said and "paired with mir" in said
    assert (project/"runs/mw5-mir-tiny-s0/report.html").exists() and list((project/"runs/mw5-mir-tiny-s0/evals").iterdir())


def test_import_works_from_the_folder_that_holds_the_clone(project, tmp_path):
    "As `clvla.sh` installs it: the clone is named as the package, and an empty path finds it first."
    options = shlex.split(re.search(r"pip install -q (--no-build-isolation .*?)-e '", (project/"clvla.sh").read_text())[1])
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path/"venv"], check=True)
    python = tmp_path/"venv/bin/python"
    site = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.check_output([python, "-c", site], text=True).strip()
    (Path(packages)/"others.pth").write_text(subprocess.check_output([sys.executable, "-c", site], text=True))   # but none of its .pth files
    install = ["-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", "--ignore-installed", *options, "-e", project]
    subprocess.run([sys.executable, *install], check=True)
    said = subprocess.check_output([python, "-c", "import clvla; print(clvla.__file__); clvla.train"], cwd=project.parent, text=True,
                                   env={k: v for k,v in os.environ.items() if k != "PYTHONPATH"})
    assert said.strip() == str(project/"clvla/__init__.py")
