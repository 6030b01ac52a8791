"What the site does to a notebook before Sphinx reads it: facts below its heading, figures to draw, folded imports."
import ast
import base64
import json
import re
from configparser import ConfigParser
from functools import cache
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLOTLY = "application/vnd.plotly.v1+json"
DIRECTIVE = re.compile(r"^#\|.*\n?", re.M)
MENTION = re.compile(r"\*([\w/]+)\*")
MENTIONS = re.compile(r"(\bpages? )((?:\*[\w/]+\*(?:, | and )?)+)")
# what an extra is imported as, where that is not the name of its first package
IMPORTED = dict(libero="libero robosuite bddl", metaworld="metaworld", gym="gymnasium minigrid",
                vlm="transformers torchvision", lerobot="lerobot diffusers", minihack="minihack nle", sb3="stable_baselines3", docs="sphinx", dev="playwright")
# what a page's own lines, strings above all, ask of a simulator or a library that is imported elsewhere
ASKED = dict(metaworld=r"""["'](?:mw\d|mw_(?!state)|mt\d|cw\d|metaworld)""", libero=r"""["']libero""",
             gym=r"""["'](?:minigrid|gym:)""",
             envpool=r"""["'](?:procgen|atari|climber|fruitbot|miner_|mw_state|minigrid_engine)""",
             minihack=r"""["']minihack""",
             lerobot=r"""["']lerobot-""", vlm=r"""["'](?:qwen|paligemma|llamaoft|neurovla)""")
ROOMS = {"envs/metaworld": "metaworld", "envs/libero": "libero", "envs/gym": "gym", "policies/lerobot": "lerobot", "policies/vlm": "vlm"}
TIMES = dict(run_cl="90 seconds on two cores as it stands", run_rl="minutes on two cores", run_crl="minutes on two cores")


def read(path): return json.loads(path.read_text(encoding="utf-8"))


def text(cell): return "".join(cell["source"])


def exported(cell): return re.search(r"^#\| *exports?\b", text(cell), re.M) is not None


def module(page):
    "The module that a page exports, as `cl.er`, or None."
    for cell in page["cells"]:
        if found := re.search(r"^#\| *default_exp ([\w.]+)", text(cell), re.M): return found[1]


@cache
def settings():
    found = ConfigParser(delimiters=["="])
    found.read(ROOT/"settings.ini", encoding="utf-8")
    return found["DEFAULT"]


@cache
def extra_of():
    "Importable name -> the extra of settings.ini that brings it."
    names = [key.removesuffix("_requirements") for key in settings() if key.endswith("_requirements")]
    return {imported: name for name in names for imported in IMPORTED.get(name, name).split()}


def imports(source):
    "First names of what some code imports, at any depth; nothing of code that only IPython reads."
    try: tree = ast.parse(DIRECTIVE.sub("", source))
    except SyntaxError: return set()
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module and not n.level}
    return {name.split(".")[0] for name in names}


def extras(place, page):
    "Extras that a page's own lines use, as their imports, and the names in the lines that are no export, say."
    code = [text(c) for c in page["cells"] if c["cell_type"] == "code"]
    lessons = "\n".join(text(c) for c in page["cells"] if c["cell_type"] == "code" and not exported(c))
    found = {extra_of()[name] for source in code for name in imports(source) if name in extra_of()}
    room = place.rsplit("/", 1)[0]
    if room not in ("core", "guides", "command"):   # whose lines hold such names as words only
        found |= {name for name, asked in ASKED.items() if re.search(asked, lessons)}
    return sorted(found | ({ROOMS[room]} if room in ROOMS and code else set()))


@cache
def seconds():
    "Page -> measured seconds on one core, where tests/later.txt or tests/slow.txt has them."
    lists = "".join((ROOT/"tests"/f"{name}.txt").read_text() for name in ("later", "slow"))
    rows = re.findall(r"^ *([\d.]+) test_notebooks\.py::test_notebook\[(.+)\]$", lists, re.M)
    return {page: float(s) for s, page in rows}


@cache
def reading():
    "Page -> minutes of reading, from the table of guides/what_to_read."
    found = {}
    told = "\n".join(map(text, read(ROOT/"nbs/guides/what_to_read.ipynb")["cells"]))
    for row in re.findall(r"^\| (\[.*) \|.*\| ([\d, -]*) \|$", told, re.M):
        links = re.findall(r"\]\(\.\./([^)]+\.ipynb)\)", row[0])
        times = [t.strip() for t in row[1].split(",")]
        if len(links) == len(times): found |= {link: int(t) for link, t in zip(links, times) if t.isdigit()}
    return found


def facts(place, page):
    "The lines below a heading: module and its API, what the page needs, how long it takes."
    name, kind = module(page), page["metadata"].get("clvla", {}).get("run")
    code = any(c["cell_type"] == "code" for c in page["cells"])
    parts = []
    if name: parts.append(f"Module `clvla.{name}`: [API]({'../'*(place.count('/')+1)}api/{name}.md).")
    needs = ", ".join(f"`{name}`" for name in extras(place, page))
    if code and (needs or not kind): parts.append(f"Extras: {needs or 'none'}.")
    if code: parts.append("Needs a GPU." if place == "benchmarks/gpu.ipynb" else "No GPU needed.")
    if time := TIMES.get(place.removesuffix(".ipynb")): parts.append(f"Takes {time}.")
    elif kind == "benchmark" and place.startswith(("benchmarks/", "atlas/")):
        parts.append("A measurement of minutes to hours: what it gave is kept below.")
    elif place in seconds(): parts.append(f"Runs in {seconds()[place]:.0f} seconds on one core.")
    if place in reading(): parts.append(f"Read in about {reading()[place]} minutes.")
    if not code: parts.append("Nothing to run.")
    return "```{container} facts\n"+" ".join(parts)+"\n```"


def figure(output):
    "A Plotly figure as HTML: its static picture, and its data for site.js."
    fig = output["data"][PLOTLY]
    data = json.dumps(dict(data=fig["data"], layout=fig["layout"]), separators=(",", ":")).replace("<", "\\u003c")
    png = "".join(output["data"].get("image/png", "")).replace("\n", "")
    title = fig["layout"].get("title") or {}
    said = re.sub("<[^>]*>", " ", title.get("text") or "a figure" if isinstance(title, dict) else title)
    picture = f'<img alt="{escape(said)}" src="data:image/png;base64,{png}">' if png else ""
    return f'<div class="plotly-figure">{picture}<script type="application/json">{data}</script></div>'


def shown(output):
    "An output as the site shows it: figures alive, links of tables to the built pages."
    data = output.get("data", {})
    if PLOTLY in data: return output | dict(data={"text/html": figure(output)})
    if "text/html" not in data: return output
    return output | dict(data=data | {"text/html": re.sub(r'(href="[^":]+)\.ipynb', r"\1.html", "".join(data["text/html"]))})


def built(source, place, there, root):
    "Links to pages of the project that this site leaves out become plain text; `there` are the places of those that it has."
    folder = (root/"nbs"/place).parent if place != "index.ipynb" else root
    top = root if place == "index.ipynb" else root/"nbs"
    def one(m):
        target = (folder/m[2].split("#")[0]).resolve()
        return m[0] if target.is_relative_to(top) and target.relative_to(top).as_posix() in there or not target.exists() else m[1]
    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^()\s]+\.ipynb(?:#[^()\s]*)?)\)", one, source)


def linked(source, place, known):
    "A mention `page *cl/er*` becomes a link, where there is such a page."
    up = "../"*place.count("/")
    link = lambda m: f"[{m[1]}]({up}{known[m[1]]})" if m[1] in known else m[0]
    return MENTIONS.sub(lambda m: m[1]+MENTION.sub(link, m[2]), source)


def only_imports(source):
    "Whether a cell holds imports and settings of a library, so that a reader may pass over it."
    try: body = ast.parse(source).body
    except SyntaxError: return False
    return any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in body) and all(
        isinstance(n, (ast.Import, ast.ImportFrom)) or isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Attribute) for n in body)


def with_facts(source, place, page):
    "The facts below the heading of a page's first text; other texts as they are."
    found = re.match(r"# .+\n+(?:> .+(?:\n|$))?", source)
    return f"{source[:found.end()].rstrip()}\n\n{facts(place, page)}\n\n{source[found.end():]}" if found else source


def code_cells(cell):
    """What a code cell becomes, without directives; nothing for a hidden one. `folded` is the line that stands for code that a
    reader may pass over: imports, all parameters of an experiment page, the lines of a table that is shown below."""
    if re.search(r"^#\| *(hide|default_exp)\b", text(cell), re.M): return []
    source = DIRECTIVE.sub("", text(cell)).strip("\n")
    outputs = [shown(o) for o in cell.get("outputs", [])]
    told = [dict(cell_type="markdown", source="".join(o["data"]["text/markdown"]))   # as a text of the page, its links are checked
            for o in outputs if "text/markdown" in o.get("data", {})]
    rare = "parameters" in cell["metadata"].get("tags", ()) and "hide-input" in cell["metadata"]["tags"]
    folded = ("All parameters" if rare else "Imports" if only_imports(source) and not outputs
              else "The lines of this table" if told and '"""' in source else None)
    kept = [o for o in outputs if "text/markdown" not in o.get("data", {})]
    return ([dict(cell_type="code", source=source, outputs=kept, folded=folded)] if source else [])+told


def for_site(place, page, known, root):
    "A notebook as Sphinx gets it; neighbours that only import are one cell. `known`: name -> place of the site's pages."
    there, cells = set(known.values()), []
    for cell in page["cells"]:
        markdown = cell["cell_type"] == "markdown"
        new = [dict(cell, source=with_facts(text(cell), place, page))] if markdown else code_cells(cell)
        if new and cells and new[0].get("folded") == cells[-1].get("folded") == "Imports":
            cells[-1]["source"] += "\n"+new.pop(0)["source"]
        cells += new
    meta = dict(kernelspec=dict(name="python3", language="python", display_name="python3"),
                language_info=dict(name="python", pygments_lexer="python"))
    cells = [clean(k, cell, place, known, there, root) for k, cell in enumerate(cells)]
    return dict(cells=cells, metadata=meta, nbformat=4, nbformat_minor=5)


def clean(k, cell, place, known, there, root):
    "A cell with what the format of notebooks knows, and nothing else."
    if cell["cell_type"] == "markdown":
        source = linked(built(cell["source"], place, there, root), place, known)
        return dict(cell_type="markdown", id=f"cell-{k}", metadata={}, source=source)
    folded = cell["folded"]
    meta = dict(tags=["hide-input"], mystnb=dict(code_prompt_show=folded, code_prompt_hide=folded)) if folded else {}
    return dict(cell_type="code", id=f"cell-{k}", metadata=meta, source=cell["source"], outputs=cell["outputs"],
                execution_count=None)


def name_of(place):
    "What other pages call a page: its path without numbers."
    return "/".join(re.sub(r"^\d+_", "", part) for part in Path(place).with_suffix("").parts)


SIMULATOR = "simulator"   # a figure that shows what a camera sees


def pictures(page):
    "What the gallery shows of a page: the title of a matrix, `SIMULATOR` or \"\"; the kind of picture; its bytes."
    for cell in page["cells"]:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            kind = next((kind for kind in ("image/png", "image/jpeg") if kind in data), None)
            if kind is None: continue
            said, figure = "", data.get(PLOTLY)
            if figure:
                drawn = {trace.get("type") for trace in figure["data"]}
                title = (figure["layout"].get("title") or {}).get("text", "")
                matrix = "heatmap" in drawn and re.match(r"Success|Mean return|IMPALA|CLEAR|[a-z_]+(, seed \d+)?$", title)
                said = title if matrix else SIMULATOR if drawn == {"image"} else ""
                if not said: continue
            yield said, kind.split("/")[1], base64.b64decode("".join(data[kind]))
