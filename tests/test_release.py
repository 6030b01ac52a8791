"What is released: the wheel runs alone, the core and each extra bring all that they need, and the list of materials is whole."
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT/"tools")]
import release_check  # noqa: E402

c = ConfigParser(delimiters=["="])
c.read(ROOT/"settings.ini", encoding="utf-8")
REQUIREMENTS = {k: v.split() for k, v in c["DEFAULT"].items() if k == "requirements" or k.endswith("_requirements")}
name_of = lambda requirement: re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-").replace(".", "-")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    "The wheel of these files, unpacked."
    home = tmp_path_factory.mktemp("wheel")
    zipfile.ZipFile(release_check.build(home, "--no-build-isolation")).extractall(home/"installed")
    shutil.rmtree(home/"source")
    return home/"installed"


@pytest.fixture
def alone(wheel, tmp_path):
    "`alone(extra, line)`: what a command says in an empty folder, of the wheel, beside the packages that `pip install clvla[extra]` brings."
    metadata = importlib.metadata.PathDistribution(next(wheel.glob("*.dist-info")))
    (tmp_path/"hide").mkdir()
    (tmp_path/"hide/sitecustomize.py").write_text(release_check.HIDE)
    (tmp_path/"empty").mkdir()
    env = os.environ | dict(CLVLA_DATA=str(tmp_path/"data"), CLVLA_STATE=str(tmp_path/"state"),
                            RAY_ADDRESS="127.0.0.1:1")   # somebody else's Ray, or one that has ended: ours starts its own

    def alone(extra, line):
        hidden = release_check.strangers(metadata.requires, extra)
        modules = hidden.split(",")[0].split()
        assert "clvla" not in modules and "torch" not in modules and ("ray" in modules) == (extra != "ray") and len(modules) > 60
        program, *words = shlex.split(line.replace("SOURCE", str(ROOT)))
        words = ["-c", "import sys; from clvla.command.main import main; sys.exit(main())", *words] if program == "clvla" else words
        own = env | dict(PYTHONPATH=f"{tmp_path/'hide'}:{wheel}", CLVLA_HIDDEN=hidden)
        done = subprocess.run([sys.executable, *words], cwd=tmp_path/"empty", env=own, text=True, capture_output=True, timeout=500)
        assert done.returncode == 0, done.stdout[-2000:]+done.stderr[-3000:]
        return done.stdout
    return alone


def test_every_module_of_the_wheel_imports_without_the_extras_or_names_its_extra(alone):
    n, lacking = map(int, re.findall(r"\d+", alone("core", f"python -c {shlex.quote(release_check.IMPORT_ALL)}").splitlines()[-1]))
    assert n > 250 and 0 < lacking <= 5


def test_what_an_extra_does_not_bring_is_hidden(alone):
    "The trial can fail: what one extra is for is not found beside another."
    for module, extra in (("peft", "vlm"), ("gymnasium", "vlm"), ("ray", "served"), ("lerobot", "vlm")):
        with pytest.raises(AssertionError, match=f"No module named '{module}'"): alone(extra, f"python -c 'import {module}'")


ELSEWHERE = {"minihack", "sb3", "trackio"}   # not in the environment of the tests: `tools/release_check.py` makes one for each
HERE = [extra for extra in release_check.TRIES if extra not in ELSEWHERE]


@pytest.mark.parametrize("extra", sorted({*HERE}-{"core", "peft", "tensorboard", "gym", "dev", "docs"}))   # these are used below, by every run
def test_an_extra_brings_what_it_is_for(alone, extra):
    alone(extra, f"python -c 'import clvla, {release_check.TRIES[extra]}'")


USED = {f"{extra}-{k}": (extra, line) for extra in HERE for k, line in enumerate(release_check.USES.get(extra, ()))}


@pytest.mark.parametrize("extra,line", USED.values(), ids=USED)
def test_an_extra_is_put_to_use(alone, extra, line):
    alone(extra, line)


def test_a_wheel_runs_alone(wheel, tmp_path):
    "In an empty folder: a page of the wheel, its protocols, and a run with its report."
    kw = dict(cwd=tmp_path, text=True, capture_output=True, env=os.environ | dict(PYTHONPATH=str(wheel), CLVLA_DATA=str(tmp_path/"data")))
    files = "from clvla.command.words import page_file, settings_file; print(page_file('run'), settings_file('protocols/libero_goal.yaml'))"
    where = subprocess.run([sys.executable, "-c", files], **kw).stdout.split()
    assert where == [str(wheel/"clvla/pages/run_cl.ipynb"), str(wheel/"clvla/pages/protocols/libero_goal.yaml")]
    words = "run --suite dot_2 --smoke --n_workers 1 --page page.ipynb".split()
    done = subprocess.run([sys.executable, "-c", "import sys; from clvla.command.main import main; sys.exit(main())", *words], **kw)
    assert done.returncode == 0, done.stderr
    assert (tmp_path/"runs/dot_2-mir-tiny-s0-smoke/report.html").exists() and (tmp_path/"page.ipynb").exists()
    scripts = (next(wheel.glob("*.dist-info"))/"entry_points.txt").read_text()
    assert "clvla = clvla.command.main:main" in scripts


def test_every_extra_is_tried_by_the_release_check():
    assert set(release_check.TRIES) == set(release_check.extras())


# --- the list of materials
BOM = json.loads((ROOT/"docs/materials.cdx.json").read_text(encoding="utf-8"))
PARTS = {c["name"]: c for c in BOM["components"]}
said = lambda part: {p["name"].removeprefix("clvla:"): p["value"] for p in part["properties"]}


@pytest.mark.parametrize("key", REQUIREMENTS)
def test_every_declared_dependency_is_in_the_list_with_its_range_and_a_licence(key):
    for requirement in REQUIREMENTS[key]:
        part = PARTS[name_of(requirement)]
        assert requirement in said(part)["range"].split(), f"the list is older than settings.ini; run tools/materials.py ({requirement})"
        assert (key.removesuffix("requirements").rstrip("_") or "clvla") in said(part)["needed_by"].split()
        assert part["licenses"] and part["purl"].startswith(f"pkg:pypi/{part['name']}")


def test_the_list_names_no_dependency_that_is_gone():
    declared = {name_of(r) for rs in REQUIREMENTS.values() for r in rs}
    assert {name for name, part in PARTS.items() if "purl" in part} == declared


def test_licences_are_those_of_the_installed_packages():
    import materials
    wrong = {}
    for name, part in PARTS.items():
        if "purl" in part and (spdx := materials.licence(name)) and materials.as_licence(spdx) != part["licenses"]: wrong[name] = spdx
    assert not wrong, f"run tools/materials.py: {wrong}"


def test_the_list_is_cyclonedx():
    assert (BOM["bomFormat"], BOM["specVersion"], BOM["version"], BOM["metadata"]["component"]["name"]) == ("CycloneDX", "1.6", 1, "clvla")
    for part in BOM["components"]:
        assert part["type"] in ("library", "file", "data", "machine-learning-model") and set(part) <= {"type", "name", "version", "licenses", "purl", "properties"}
        for entry in part["licenses"]: assert set(entry) in ({"license"}, {"expression"}) and (entry.get("expression") or set(entry["license"]) <= {"id", "name"})


def test_scripts_fonts_and_pictures_are_in_the_list():
    from plotly.offline import get_plotlyjs_version
    assert PARTS["plotly.js"]["version"] == get_plotlyjs_version(), "run tools/materials.py"
    assert {"STIX Two Math", "nbs/images/front.gif", "LIBERO's assets", "pictures of LIBERO", "pictures of Meta-World"} <= set(PARTS)
    places = " ".join(said(part).get("where", "") for part in PARTS.values())
    pictures = [p.relative_to(ROOT).as_posix() for p in (ROOT/"nbs").rglob("*") if p.suffix in (".gif", ".jpg", ".jpeg", ".png", ".ttf", ".woff2")]
    assert [p for p in pictures if p not in PARTS] == [] and "nbs/images/*.svg" in places and "report.html" in places


# --- what a working tree holds
def test_gitignore_names_only_what_the_project_makes():
    "Each entry is made by a command of this repository; a tool of one user's own belongs into that user's ignore file."
    made = {"__pycache__/", "*.egg-info/", "build/", "dist/", "_proc/", "_docs/", "_site/", "._site-work/", ".ipynb_checkpoints/", ".pytest_cache/", ".venv/", "runs/"}
    assert set((ROOT/".gitignore").read_text().split()) <= made
