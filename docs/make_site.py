"""Builds the site of all pages into _site, without a network: open _site/index.html.

    python docs/make_site.py [--out FOLDER] [--jobs N] [PAGE...]     # pages as nbs/cl/08_er.ipynb; default: all

Nothing is executed. A link that leads nowhere ends it with an error that names the page and the link.
"""
import argparse
import io
import json
import logging
import os
import re
import shutil
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT/"tools")]
import map as page_map  # noqa: E402
import site_api as api  # noqa: E402
import site_pages  # noqa: E402
from site_pages import SIMULATOR  # noqa: E402

DOCUMENTS = "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff", "LICENSE"
FRONT = [("index", "Start"), ("nbs/map", "All pages, by task"), ("nbs/claims", "What was measured"), ("gallery", "Gallery"),
         ("nbs/guides/coming_from", "Coming from ..."), ("api/index", "API")]
COLOURED = re.compile(r"\x1b\[[\d;]*m")


def hidden(path, root): return any(part[0] in "._" for part in path.relative_to(root).parts)


def all_pages(root): return sorted(p for p in (root/"nbs").rglob("*.ipynb") if not hidden(p, root))


def put(path, content):
    "Write a file of the staged folder."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content) if isinstance(content, bytes) else path.write_text(content, encoding="utf-8")


def stage(paths, root, folder):
    "Everything that Sphinx reads, into `folder`: pages, documents, front page, API, gallery."
    notebooks = {p.relative_to(root/"nbs").as_posix(): site_pages.read(p) for p in paths}
    known = {site_pages.name_of(place): place for place in notebooks}
    known |= {name.replace(".", "/"): place for place, page in notebooks.items() if (name := site_pages.module(page))}
    there = {f"nbs/{place}" for place in notebooks}
    for path in (root/"nbs").rglob("*"):   # pictures, records, parameters files that the pages link
        if path.is_file() and path.suffix != ".ipynb" and not hidden(path, root):
            put(folder/path.relative_to(root), path.read_bytes())
    for name in DOCUMENTS:
        if not (root/name).exists(): continue
        put(folder/name, site_pages.built((root/name).read_text(encoding="utf-8"), "index.ipynb", there, root))
    for place, page in notebooks.items():
        if place != "index.ipynb": put(folder/"nbs"/place, json.dumps(site_pages.for_site(place, page, known, root)))
    stage_api(notebooks, root, folder)
    put(folder/"gallery.md", gallery(notebooks, folder))
    put(folder/"index.md", front(root, notebooks))
    staged = {p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*") if p.suffix in (".md", ".ipynb")}
    put(folder/"rooms.json", json.dumps(dict(rooms=rooms(notebooks), map="nbs/map" if "nbs/map" in staged else None,
                                             front=[entry for entry in FRONT if entry[0] in staged])))


def title(page):
    "Heading and line of a notebook."
    first = next((site_pages.text(c) for c in page["cells"] if c["cell_type"] == "markdown"), "")
    found = re.search(r"# (.+)\n+> (.+)", first)
    return (found[1].strip(), found[2].strip()) if found else ("", "")


def stage_api(notebooks, root, folder):
    "A page for each exported module, and a list of them."
    modules = {name: place for place, page in notebooks.items() if (name := site_pages.module(page))}
    for name, place in modules.items():
        source = root/"clvla"/(name.replace(".", "/")+".py")
        if not source.exists(): source = source.with_suffix("")/"__init__.py"
        said = api.module_page(f"clvla.{name}", source.read_text(encoding="utf-8"), f"../nbs/{place}", *title(notebooks[place]))
        put(folder/f"api/{name}.md", said)
    lines, room = ["# API\n> Each module with its functions, classes, parameters and their defaults"], None
    for name, place in sorted(modules.items(), key=lambda m: (m[1].rsplit("/", 1)[0], m[1])):
        if room != (room := "/".join(place.split("/")[:-1]) or "clvla"): lines.append(f"\n## {room}\n")
        lines.append(f"- [clvla.{name}]({name}.md): {title(notebooks[place])[1]}")
    put(folder/"api/index.md", "\n".join(lines)+"\n")


def rooms(notebooks):
    "Rooms of the side bar in the order of the map: name, heading on the map, pages."
    found = {}
    for place, page in notebooks.items():
        if place in ("index.ipynb", "map.ipynb"): continue
        room = place.rsplit("/", 1)[0] if "/" in place else "."
        found.setdefault(room, []).append((f"nbs/{place.removesuffix('.ipynb')}", title(page)[0]))
    ordered = [room for room in page_map.ROOMS if room in found]
    short = lambda room: page_map.ROOMS[room] if room in (".", "tutorials", "guides", "benchmarks", "atlas") else room
    return [dict(name=short(room), heading=page_map.ROOMS[room], pages=found[room]) for room in ordered]


def gallery(notebooks, folder):
    "Films and success matrices that the pages made, each with its page."
    lines = ["# Gallery\n> Films and success matrices that pages made; each picture leads to its page\n"]
    films, matrices, simulators = [], [], []
    if (folder/"nbs/images/front.gif").exists() and "benchmarks/front.ipynb" in notebooks:
        films.append(("nbs/images/front.gif", "benchmarks/front.ipynb", title(notebooks["benchmarks/front.ipynb"])[1]))
    for place, page in notebooks.items():
        for k, (said, kind, data) in enumerate(site_pages.pictures(page)):
            name = f"gallery/{place.removesuffix('.ipynb').replace('/', '-')}-{k}.{kind}"
            put(folder/name, data)
            of = simulators if said is SIMULATOR else matrices if said else films
            of.append((name, place, title(page)[1] if of is not matrices else said))
    for heading, of in (("Films and pictures", films), ("Success matrices", matrices), ("Simulators", simulators)):
        if not of: continue
        lines.append(f"## {heading}\n\n````{{container}} gallery")
        for name, place, said in of:
            name_of_page = title(notebooks[place])[0]
            lines.append(f"```{{container}} picture\n[![{said}]({name})](nbs/{place})\n\n{name_of_page}: {said}\n```")
        lines.append("````\n")
    return "\n".join(lines)


def front(root, notebooks):
    "The first page: docs/front.md, with what nbs/index.ipynb says."
    from readme import from_root
    cells = site_pages.read(root/"nbs/index.ipynb")["cells"]
    index = [from_root(site_pages.text(c)) for c in cells if c["cell_type"] == "markdown"]
    lead = re.search(r"^> (.+)", index[0], re.M)[1]
    head, code, behind = re.match(r"(.*?)(```python\n.*?```)(.*)", index[1], re.S).groups()
    read_first = re.search(r"\*\*Read\*\*.*?;", "\n".join(index), re.S)[0]
    first = re.findall(r"\[([^\]]+)\]\(nbs/([^)]+\.ipynb)\)", read_first)
    hour = "\n".join(f"1. [{said}](nbs/{place}): {title(notebooks[place])[1]}"
                     for said, place in first if place in notebooks)
    words = dict(lead=lead, code=code, hour=hour, pictures=head.strip(), rest="\n\n".join([behind.strip(), *index[2:]]))
    said = re.sub(r"<<(\w+)>>", lambda m: words[m[1]], (HERE/"front.md").read_text(encoding="utf-8"))
    return site_pages.built(said, "index.ipynb", {f"nbs/{place}" for place in notebooks}, root)


class Links(HTMLParser):
    "Targets of a page's links, what it loads, and its anchors."
    def __init__(self):
        super().__init__()
        self.links, self.loads, self.anchors = [], [], set()
    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        self.anchors |= {a[key] for key in ("id", "name") if a.get(key)}
        if tag == "a" and a.get("href"): self.links.append(a["href"])
        if tag == "link" and a.get("href"): self.loads.append(a["href"])
        if tag in ("script", "img", "source", "video", "iframe") and a.get("src"): self.loads.append(a["src"])


def wrong_links(out, told=()):
    "One line for each link of the built pages that leads nowhere, but those in `told`, and for what another host would send."
    found = {}
    for path in sorted(out.rglob("*.html")):
        found[path] = Links()
        found[path].feed(path.read_text(encoding="utf-8"))
    for path, page in found.items():
        name = path.relative_to(out).as_posix()
        for url in page.loads:
            if re.match(r"(https?:)?//", url): yield f"{name} loads {url} from another host"
        for url in dict.fromkeys(page.links+page.loads):
            if re.match(r"[a-z]+:|//", url) or (name.removesuffix(".html"), url.removeprefix("#")) in told: continue
            place, _, anchor = unquote(url).partition("#")
            target = (path.parent/place.split("?")[0]).resolve() if place.split("?")[0] else path
            if not target.exists(): yield f"{name} links to {url}, and there is no such file"
            elif anchor and target in found and anchor not in found[target].anchors:
                yield f"{name} links to {url}, and that page has no such heading"


WARNED = (   # a warning of Sphinx -> what the page does with its target, and what is not there; None: `wrong_links` says it
    (r"'myst' cross-reference target not found: '([^']*)'", "links to", "page"),
    (r"image file not readable: (\S+)", "shows", "file"), (r"local id not found in doc", None, None))


def complaints(said, folder):
    "Sphinx's warnings: each as one line that names the page, and the page and the target that it is of."
    for line in COLOURED.sub("", said).splitlines():
        page, _, warning = line.replace(f"{folder}/", "").partition(": WARNING: ")
        page = page.split(":")[0]
        found = next(((m, does, what) for pattern, does, what in WARNED if (m := re.match(pattern, warning))), None)
        if found is None:
            if line.strip(): yield line.replace(f"{folder}/", ""), None
        elif found[1]:
            target = found[0][1]
            yield f"{page} {found[1]} {target}, and there is no such {found[2]}", (page.rsplit(".", 1)[0], target)


def build(paths=None, out=None, root=ROOT, jobs=None):
    "Build the pages (default: all) into the folder `out`; the list of what is wrong with them, empty when all is well."
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace, patch_docutils
    out = Path(out or root/"_site").resolve()
    work = out.parent/f".{out.name}-work"   # myst-nb writes beside the pages too
    disabled = logging.root.manager.disable   # the program around may have silenced logging, and with it what Sphinx warns of
    for folder in (out, work): shutil.rmtree(folder, ignore_errors=True)
    source = work/"source"
    try:
        stage([Path(p).resolve() for p in paths] if paths else all_pages(root), root, source)
        said = io.StringIO()
        logging.disable(logging.NOTSET)
        for name in [n for n in logging.root.manager.loggerDict if n.partition(".")[0] == "sphinx"]:
            logging.getLogger(name).disabled = False   # a library that configured logging in this process silenced those that it found
        with patch_docutils(HERE), docutils_namespace():   # a second site in the same process begins as the first one did
            Sphinx(source, HERE, work/"html", work/"doctrees", "html", status=None, warning=said,
                   parallel=jobs or os.cpu_count()).build()
        shutil.move(work/"html", out)
        warned = dict(complaints(said.getvalue(), source))
        return [*warned, *wrong_links(out, set(warned.values()))]
    finally:
        logging.disable(disabled)
        shutil.rmtree(work, ignore_errors=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("pages", nargs="*", help="notebooks under nbs/; all of them when none is named")
    parser.add_argument("--out", default=ROOT/"_site", help="folder of the site, made anew (default: _site)")
    parser.add_argument("--jobs", type=int, help="processes (default: one a core)")
    args = parser.parse_args(argv)
    began = time.monotonic()
    wrong = build(args.pages, args.out, jobs=args.jobs)
    for line in wrong: print(line, file=sys.stderr)
    if wrong: raise SystemExit(f"the site has {len(wrong)} faults, named above; correct the pages that they are of")
    size = sum(p.stat().st_size for p in Path(args.out).rglob("*") if p.is_file())
    n = len(list(Path(args.out).rglob("*.html")))
    print(f"{n} pages, {size/1e6:.0f} MB, in {time.monotonic()-began:.0f} s: open {Path(args.out)/'index.html'}")


if __name__ == "__main__": main()
