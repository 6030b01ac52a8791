"Sphinx extension of the site: formulas as MathML, a side bar of rooms, titles of search results, one plotly.js, one font."
import json
import re
from html import escape
from importlib.util import find_spec
from pathlib import Path
from shutil import copy

from docutils import nodes
from math_core import LatexToMathML

ROOMS = "rooms.json"   # that make_site wrote into the staged folder
FROM_DISK = {}


def jupyter_anchor(title):
    "The anchor of a heading as Jupyter makes it, which the pages' own links use."
    return title.replace(" ", "-")


def mathml(latex, block):
    "A formula as MathML; a \\tag stands at the right."
    latex = latex.strip()
    if r"\tag" in latex: latex = rf"\begin{{equation}}{latex}\end{{equation}}"
    return LatexToMathML(fancy_error=False).convert_with_local_state(latex, displaystyle=block)


def visit_math(self, node):
    self.body.append(mathml(node.astext(), False))
    raise nodes.SkipNode


def visit_math_block(self, node):
    self.body.append(f'<div class="formula">{mathml(node.astext(), True)}</div>')
    raise nodes.SkipNode


def rooms(app):
    "Heading, place on the map and pages (name, title) of each room."
    if app.srcdir not in FROM_DISK: FROM_DISK[app.srcdir] = json.loads((Path(app.srcdir)/ROOMS).read_text(encoding="utf-8"))
    return FROM_DISK[app.srcdir]


def item(link, text, level, more="", here=False):
    return (f'<li class="toctree-l{level}{" current current-page" if here else ""}"><a class="reference internal" href="{link}">'
            f'{escape(text)}</a>{more}</li>')


def side_bar(app, page, pathto):
    "Links to all rooms, and to the pages of the room that the page stands in."
    found = rooms(app)
    on_map = "" if found["map"] == page else pathto(found["map"]) if found["map"] else None
    lines = [item(pathto(name), text, 1, here=name == page) for name, text in found["front"]]
    for room in found["rooms"]:
        inside = ""
        if any(name == page for name, _ in room["pages"]):
            own = "".join(item(pathto(name), text, 2, here=name == page) for name, text in room["pages"])
            inside = f"<ul>{own}</ul>"
        link = pathto(room["pages"][0][0]) if on_map is None else f"{on_map}#{nodes.make_id(room['heading'])}"
        lines.append(item(link, room["name"], 1, inside))
    return f"<ul>{''.join(lines)}</ul>"


def page_context(app, page, template, context, doctree):
    "After Furo's own: the side bar, and the pages before and behind in the same room."
    pathto = context["pathto"]
    context["furo_navigation_tree"] = side_bar(app, page, pathto)
    for room in rooms(app)["rooms"]:
        names = [name for name, _ in room["pages"]]
        if page not in names: continue
        k = names.index(page)
        near = dict(prev=k-1, next=k+1)
        for word, i in near.items():
            if 0 <= i < len(names): context[word] = dict(link=pathto(names[i]), title=escape(room["pages"][i][1]))


def search_title(app, doctree):
    "A result of the search says the room too: `cl / er`, `api / clvla.cl.er`."
    name = app.env.docname
    place = [re.sub(r"^\d+_", "", part) for part in name.split("/")]
    if len(place) > 2: app.env.longtitles[name] = nodes.title("", "", nodes.Text(" / ".join(place[1:])))


FONT = "STIXTwoMath-Regular.ttf"


def one_for_all(app, error):
    "What the whole site shares, out of installed packages: plotly.js, which site.js loads for a figure, and the font of formulas."
    if error: return
    from plotly.offline import get_plotlyjs
    static = Path(app.outdir)/"_static"
    (static/"plotly.js").write_text(get_plotlyjs(), encoding="utf-8")
    copy(Path(find_spec("ziamath").origin).parent/"fonts"/FONT, static/FONT)


def setup(app):
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.connect("html-page-context", page_context, priority=900)
    app.connect("doctree-read", search_title, priority=900)
    app.connect("build-finished", one_for_all)
    return dict(version="1", parallel_read_safe=True, parallel_write_safe=True)
