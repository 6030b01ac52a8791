"Every link between pages, and every page that is mentioned by name, is there."
import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(p for p in (ROOT/"nbs").rglob("*.ipynb") if not any(s[0] in "._" for s in p.relative_to(ROOT).parts))
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
MENTION = re.compile(r"\bpages? ((?:\*[\w/]+\*(?:, | and )?)+)")


def cells(page, kind):
    return ["".join(c["source"]) for c in json.loads(page.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == kind]


def names(page):
    "What a page may be called in another one: room/module of what it exports, or its path without numbers."
    place = page.relative_to(ROOT/"nbs").with_suffix("")
    plain = "/".join(re.sub(r"^\d+_", "", part) for part in place.parts)
    exported = re.findall(r"^#\| default_exp ([\w.]+)", "\n".join(cells(page, "code")), re.M)
    return {plain, *(module.replace(".", "/") for module in exported)}


KNOWN = set().union(*map(names, PAGES))


def mentioned(text):
    return [name for found in MENTION.findall(text) for name in re.findall(r"\*([\w/]+)\*", found)]


def dead_links(text, folder, may_be=Path.exists):
    "Targets of relative links that do not exist, or that are not `may_be`; a heading behind # is not looked for."
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)
    targets = [unquote(t.split("#")[0]) for t in LINK.findall(text) if not re.match(r"[a-z]+:|#|attachment:", t)]
    return [t for t in targets if not may_be(folder/t)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT/"nbs")))
def test_links_and_mentions(page):
    text = "\n".join(cells(page, "markdown"))
    comments = "\n".join(line for code in cells(page, "code") for line in code.splitlines())
    assert dead_links(text, page.parent, Path.is_file) == []   # a folder is no page of the site
    assert [name for name in mentioned(text+"\n"+comments) if name not in KNOWN] == [], "name a page as room/module, as in *envs/pool*"


@pytest.mark.parametrize("document", [ROOT/"README.md"], ids=lambda p: p.name)
def test_links_of_documents(document):
    assert dead_links(document.read_text(), ROOT) == []


def test_what_is_looked_for():
    assert mentioned("see page *envs/pool*, pages *a/b* and *c*; a *word*") == ["envs/pool", "a/b", "c"]
    assert dead_links("[a](no.ipynb) [b](https://x.org) [c](index.ipynb#top)", ROOT/"nbs") == ["no.ipynb"]
    assert dead_links("[a](cl) [b](index.ipynb)", ROOT/"nbs", Path.is_file) == ["cl"]
