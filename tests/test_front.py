"The first screen: README's size, its links and pictures, and each of its numbers on a page that it links."
import ast
import json
import re
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT/"README.md").read_text(encoding="utf-8")
RESULTS = [line for line in README.splitlines() if line.startswith("- **")]
NUMBER = re.compile(r"-?\d+\.\d+")


def said(page):
    "Texts and outputs of a page."
    cells = json.loads((ROOT/page).read_text(encoding="utf-8"))["cells"]
    outputs = ["".join(o.get("text", o.get("data", {}).get("text/plain", ""))) for c in cells for o in c.get("outputs", [])]
    return "\n".join(["".join(c["source"]) for c in cells]+outputs).replace("+", "")


def test_readme_is_one_screen():
    assert len(README.encode()) <= 6144


@pytest.mark.parametrize("line", RESULTS, ids=lambda line: line[4:].split("*")[0])
def test_each_number_stands_on_a_page_that_is_linked(line):
    text = "\n".join(said(page) for page in re.findall(r"\]\((nbs/[^)]+\.ipynb)\)", line))
    numbers = NUMBER.findall(re.sub(r"\]\([^)]*\)", "", line))
    assert len(numbers) >= 6, "a result has its interval, and so has its control"
    assert [n for n in numbers if not re.search(rf"(?<![\d.]){re.escape(n)}(?!\d)", text)] == []


def test_four_results_each_with_intervals_and_a_link():
    assert len(RESULTS) == 4
    for line in RESULTS: assert len(re.findall(r"\[-?[\d.]+, -?[\d.]+\]", line)) >= 2 and ".ipynb)" in line, line


def test_pictures_are_there_and_small():
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert [Path(p).name for p in pictures] == ["front.gif", "front.svg", "rooms.svg"]
    assert (ROOT/"nbs/images/front.gif").stat().st_size < 1.5e6
    film = Image.open(ROOT/"nbs/images/front.gif")
    assert film.n_frames > 10 and film.width >= 300
    for p in pictures[1:]: assert (ROOT/p).read_text(encoding="utf-8").startswith("<svg xmlns=")


def test_pictures_of_readme_are_those_of_its_page():
    page = (ROOT/"nbs/benchmarks/front.ipynb").read_text(encoding="utf-8")
    assert "images/front.gif" in page and "images/front.svg" in page


def test_the_matrices_are_those_that_the_page_measured():
    "Each panel's last row is the page's own output."
    found = ast.literal_eval(re.search(r"\{'sequential': .*?\}", said("nbs/benchmarks/front.ipynb"), re.S)[0])
    drawn = re.findall(r">(\d+)</text>", (ROOT/"nbs/images/front.svg").read_text())
    assert len(drawn) == 30 and [drawn[10:15], drawn[25:]] == [[r.removesuffix(" %") for r in found[name]] for name in ("sequential", "er")]


@pytest.mark.parametrize("name", ["CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", "LICENSE"])
def test_files_of_a_project(name):
    assert (ROOT/name).stat().st_size > 300 and f"]({name})" in README


def test_every_page_is_on_the_map():
    linked = set(re.findall(r"\]\(([^)]+\.ipynb)\)", said("nbs/map.ipynb")))
    pages = {p.relative_to(ROOT/"nbs").as_posix() for p in (ROOT/"nbs").rglob("*.ipynb") if not any(part[0] in "._" for part in p.relative_to(ROOT).parts)}
    assert pages-linked == {"map.ipynb", "index.ipynb"}
