"What is released: every module imports without the extras' packages or names the extra, and the list of materials is whole."
import importlib.metadata
import json
import re
import subprocess
import sys
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
# what a package is imported as, where that is not its name
IMPORTED = {"hf-libero": ["libero"], "stable-baselines3": ["stable_baselines3"], "huggingface-hub": ["huggingface_hub"], "myst-nb": ["myst_nb"], "math-core": ["math_core"],
            "pytest-xdist": ["xdist"], "setuptools": [], "numpy": [], "fastcore": [], "safetensors": []}   # the last are needed without extras, too
HIDE = """import sys
hidden = set(sys.argv[1].split())
class Without:
    def __init__(self, finder): self.finder = finder
    def __getattr__(self, name): return getattr(self.finder, name)
    def find_spec(self, name, *rest): return None if name.split(".")[0] in hidden else self.finder.find_spec(name, *rest)
sys.meta_path[:] = map(Without, sys.meta_path)
"""


def hidden_modules():
    "Top-level modules that only an extra brings."
    core = {name_of(r) for r in REQUIREMENTS["requirements"]}
    extra = {name_of(r) for k, rs in REQUIREMENTS.items() if k != "requirements" for r in rs}-core
    return sorted({m for name in extra for m in IMPORTED.get(name, [name.replace("-", "_")])})


def test_every_module_imports_without_the_extras_or_names_its_extra():
    "In one process, from which the extras' packages are hidden: what `pip install clvla` alone gives."
    hidden = hidden_modules()
    assert {"lerobot", "gymnasium", "mujoco", "transformers", "tensorboard", "trackio", "sphinx"} <= set(hidden)
    done = subprocess.run([sys.executable, "-c", HIDE+release_check.IMPORT_ALL, " ".join(hidden)], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    n, lacking = map(int, re.findall(r"\d+", done.stdout.splitlines()[-1]))
    assert n > 250 and lacking <= 5


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
