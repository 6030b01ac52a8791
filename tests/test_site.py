"The site of the pages: links, figures, formulas, search, API, a link that leads nowhere. A handful of pages stands for all."
import json
import logging
import re
import shutil
import sys
from pathlib import Path

import pytest

for name in ("sphinx", "myst_nb", "furo", "math_core", "ziamath"): pytest.importorskip(name, reason="the extra docs is not installed")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT/"docs"), str(ROOT/"tools")]
import make_site  # noqa: E402
import pictures  # noqa: E402
import site_api as api  # noqa: E402
import site_pages  # noqa: E402
from site_look import jupyter_anchor, mathml  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")   # of Sphinx to its extensions
PAGES = ("index", "map", "run_cl", "cl/00_base", "cl/08_er", "cl/09_mir", "cl/91_avalanche", "eval/00_metrics", "eval/07_plots",
         "tutorials/read_a_matrix", "guides/coming_from", "benchmarks/front")


def notebook(*texts):
    "A page of Markdown."
    cells = [dict(cell_type="markdown", id=f"c{k}", metadata={}, source=text) for k, text in enumerate(texts)]
    return json.dumps(dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")/"_site"
    assert make_site.build([ROOT/f"nbs/{name}.ipynb" for name in PAGES], out, jobs=1) == []
    return out


@pytest.fixture(scope="module")
def html(site): return {p.relative_to(site).as_posix(): p.read_text(encoding="utf-8") for p in site.rglob("*.html")}


def test_each_page_is_there_and_nothing_else_is_left(site, html):
    assert {f"nbs/{name}.html" for name in PAGES if name != "index"} <= set(html)
    assert {"index.html", "gallery.html", "search.html", "api/index.html", "api/cl.er.html"} <= set(html)
    assert [p.name for p in site.parent.iterdir()] == ["_site"], "the staged folder is removed"


def test_nothing_comes_from_another_host(html):
    for name, page in html.items():
        loaded = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"", page)
        assert loaded and not [url for url in loaded if re.match(r"(https?:)?//", url)], name


def test_plotly_is_there_once(site, html):
    found = [p for p in site.rglob("*") if p.is_file() and p.stat().st_size > 2e6 and b"plotly.js v" in p.read_bytes()[:500]]
    assert [p.name for p in found] == ["plotly.js"] and [p.name for p in site.rglob("*.ttf")] == ["STIXTwoMath-Regular.ttf"]
    page = html["nbs/cl/08_er.html"]
    assert page.count('class="plotly-figure"') == 1 and "data:image/png;base64," in page and "plotly.js" not in page
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page, re.S)[1])
    assert {trace.get("name") for trace in data["data"]} >= {"sequential", "ER"}


def test_formulas_are_mathml_and_numbered(html):
    page = html["nbs/cl/08_er.html"]
    assert page.count("<math") >= 8 and ">(1)<" in page and "$$" not in page
    assert "\\tag" not in mathml(r"a=b\tag{7}", True) and "(7)" in mathml(r"a=b\tag{7}", True)


def test_every_formula_of_every_page_is_understood():
    for path in make_site.all_pages(ROOT):
        texts = [site_pages.text(c) for c in site_pages.read(path)["cells"] if c["cell_type"] == "markdown"]
        text = "\n".join(re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S) for text in texts)
        for block, line in re.findall(r"\$\$(.*?)\$\$|\$([^$\n]+)\$", text, re.S):
            assert mathml(block or line, bool(block)).startswith("<math"), path


def test_links_between_pages_and_mentions(html):
    page = html["nbs/cl/08_er.html"]
    assert 'href="../../api/cl.er.html"' in page and 'href="00_base.html"' in page   # the second stands as `page *cl/base*` in the notebook
    assert 'href="../../nbs/cl/08_er.html"' in html["api/cl.er.html"] or 'href="../nbs/cl/08_er.html"' in html["api/cl.er.html"]
    assert 'href="08_er.html"' in html["nbs/cl/91_avalanche.html"], "a link in an output"
    assert "17_er_choices" not in page, "a link to a page that this site leaves out is text"


def test_facts_of_a_page(html):
    found = {name: re.search(r'<div class="facts docutils container">(.*?)</div>', page, re.S) for name, page in html.items()}
    facts = {name: re.sub("<[^>]+>", "", m[1]) for name, m in found.items() if m}
    assert "No GPU needed." in facts["nbs/cl/08_er.html"] and "Read in about 3 minutes." in facts["nbs/cl/08_er.html"]
    assert "metaworld" in facts["nbs/run_cl.html"] and "90 seconds" in facts["nbs/run_cl.html"]
    assert set(facts) == {f"nbs/{name}.html" for name in PAGES if name not in ("index",)}
    page = site_pages.read(ROOT/"nbs/rl/29_choice.ipynb")
    assert "Runs in 32 seconds on one core." in site_pages.facts("rl/29_choice.ipynb", page)
    assert site_pages.extras("policies/vlm/01_qwen.ipynb", site_pages.read(ROOT/"nbs/policies/vlm/01_qwen.ipynb")) == ["vlm"]


def test_what_a_reader_may_pass_over_is_folded_and_directives_left_out(html):
    page = html["nbs/cl/08_er.html"]
    assert page.count("<details") == 1 and "#|" not in re.sub("<[^>]+>", "", page)
    folded = lambda name: set(re.findall(r'<p class="collapsed admonition-title">(.*?)</p>', html[name]))
    assert folded("nbs/cl/08_er.html") == {"Imports"} and folded("nbs/run_cl.html") == {"All parameters"}
    assert folded("nbs/guides/coming_from.html") == {"Imports", "The lines of this table"}
    assert "buffer_size_per_task</span></code></p></td>" in html["nbs/guides/coming_from.html"], "the table itself is shown"
    assert site_pages.only_imports("import a\nb.c = 1") and not site_pages.only_imports("import a\nf()") and not site_pages.only_imports("x = 1")


def test_the_search_holds_words_of_pages(site):
    text = (site/"searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text[text.index("(")+1:text.rindex(")")])
    found = index["terms"]["interfer"]   # its stem
    names = [index["docnames"][k] for k in (found if isinstance(found, list) else [found])]
    assert "nbs/cl/09_mir" in names
    assert index["titles"][index["docnames"].index("nbs/cl/09_mir")] == "cl / mir"


def test_api_says_what_the_source_says(html):
    from clvla.cl import er
    text = re.sub("<[^>]+>", "", html["api/cl.er.html"])
    assert all(f"{name}" in text for name in er.__all__)
    assert "samples kept of each finished task; None or 0: all" in text and "buffer_size: Count(0, none=True)=1000" in text
    assert "Samples in memory, and samples replayed" in text, "a method that @patch adds"


def test_docments_of_all_forms():
    source = '''def f(
    a:int, # first *one*
    *rest,
    b=[1, 2] # | second
)->str: # a word
    "Do it."
@patch
def g(self:A, n=3): # no
    "Of A."
class B:
    "A b."
    x:int = 1 # ex
'''
    page = api.module_page("m", source, "../nbs/a.ipynb", "a", "lead")
    assert "| `a` | `int` |  | first \\*one\\* |" in page and "| `b` |  | `[1, 2]` | \\| second |" in page and "Returns a word" in page
    assert "f(a: int, *rest, b=[1, 2]) -> str" in page
    assert "## Added to A" in page and "A.g" in page and "| `x` | `int` | `1` | ex |" in page


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    "The project's pages, beside which a test puts its own."
    root = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT/"nbs", root/"nbs")
    for name in make_site.DOCUMENTS: shutil.copy(ROOT/name, root)
    return root


@pytest.mark.parametrize("text, line", [
    ("[a](cl/none.ipynb)", "nbs/bad.ipynb links to cl/none.ipynb, and there is no such page"),
    ("[a](benchmarks/front.ipynb#Nowhere)", "nbs/bad.html links to benchmarks/front.html#Nowhere, and that page has no such heading"),
    ("![a](images/none.png)", "nbs/bad.ipynb shows nbs/images/none.png, and there is no such file"),
    ('<img src="https://x.org/a.png">', "nbs/bad.html loads https://x.org/a.png from another host"),
    ("<a href='none.html'>a</a>", "nbs/bad.html links to none.html, and there is no such file")], ids=["page", "heading", "picture", "host", "html"])
def test_a_link_that_leads_nowhere(project, tmp_path, text, line):
    (project/"nbs/bad.ipynb").write_text(notebook("# bad\n> A page", text))
    pages = [project/"nbs/index.ipynb", project/"nbs/bad.ipynb", project/"nbs/benchmarks/front.ipynb"]
    wrong = make_site.build(pages, tmp_path/"_site", root=project, jobs=1)
    assert len(wrong) == 1 and line in wrong[0] and "nbs/bad" in wrong[0], wrong


@pytest.mark.parametrize("silenced", ["loggers", "all"])
def test_a_missing_picture_is_said_where_logging_was_silenced(project, tmp_path, silenced):
    "Python's `dictConfig`, which Ray calls, disables the loggers that it finds, and `logging.disable` everything."
    (project/"nbs/bad.ipynb").write_text(notebook("# bad\n> A page", "![a](images/none.png)"))
    pages = [project/"nbs/index.ipynb", project/"nbs/bad.ipynb", project/"nbs/benchmarks/front.ipynb"]
    make_site.build(pages[:1], tmp_path/"first", root=project, jobs=1)   # so that the loggers are there
    there = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith("sphinx")]
    assert there
    before = logging.root.manager.disable
    if silenced == "loggers":
        for logger in there: logger.disabled = True
    else: logging.disable(logging.ERROR)
    try:
        wrong = make_site.build(pages, tmp_path/"_site", root=project, jobs=1)
        assert logging.root.manager.disable == (before if silenced == "loggers" else logging.ERROR)
    finally: logging.disable(before)
    assert wrong == ["nbs/bad.ipynb shows nbs/images/none.png, and there is no such file"]


def test_the_command_fails_with_a_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(make_site, "build", lambda *a, **kw: ["nbs/a.ipynb links to b.ipynb, and there is no such page"])
    with pytest.raises(SystemExit, match="1 faults"): make_site.main(["--out", str(tmp_path)])
    assert capsys.readouterr().err == "nbs/a.ipynb links to b.ipynb, and there is no such page\n"


def test_anchors_are_jupyters():
    assert jupyter_anchor("On a common grid") == "On-a-common-grid"


@pytest.fixture(scope="module")
def browser():
    try: path = pictures.browser_path()
    except SystemExit as e: pytest.skip(str(e))
    sync = pytest.importorskip("playwright.sync_api", reason="the extra dev is not installed")
    with sync.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=path, args=pictures.FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser):
    "A new tab of a size and a scheme; console errors and requests to other hosts fail the test."
    tabs, bad = [], []
    def tab(width=1280, height=800, scheme="light"):
        page = browser.new_page(viewport=dict(width=width, height=height), color_scheme=scheme)
        page.on("console", lambda m: bad.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: bad.append(str(e)))
        page.on("request", lambda r: bad.append(r.url) if not r.url.startswith(("file:", "data:", "blob:")) else None)
        tabs.append(page)
        return page
    yield tab
    for page in tabs: page.close()
    assert bad == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_figure_is_drawn_when_it_comes_near(site, tab, scheme):
    page = tab(scheme=scheme)
    page.goto((site/"nbs/cl/08_er.html").as_uri())
    assert page.evaluate("typeof Plotly") == "undefined", "the figure is far below"
    page.locator(".plotly-figure").scroll_into_view_if_needed()
    page.wait_for_selector(".plotly-figure.alive .main-svg", timeout=20_000)
    assert page.locator(".plotly-figure > img").is_hidden()
    white = page.evaluate("getComputedStyle(document.querySelector('.plotly-figure .main-svg')).background").startswith("rgb(255, 255, 255)")
    assert white == (scheme == "light")


def test_the_search_works_from_the_disk(site, tab):
    page = tab()
    page.goto((site/"search.html").as_uri()+"?q=interference")
    page.wait_for_selector("#search-results a:has-text('cl / mir')", timeout=20_000)


def test_the_side_bar_shows_the_page_that_is_open(site, tab):
    page = tab(1280, 400)
    page.goto((site/"nbs/benchmarks/front.html").as_uri())
    box = page.locator(".sidebar-tree .current-page").last.bounding_box()
    assert 0 < box["y"] and box["y"]+box["height"] <= 400


@pytest.mark.parametrize("width, height", [(1280, 800), (400, 860)])
def test_the_first_screen_says_what_for_whom_and_how(site, tab, width, height):
    page = tab(width, height)
    page.goto((site/"index.html").as_uri())
    for what in ("blockquote", ".for-whom", ".first-hour", ".first-pictures img"):
        box = page.locator(what).first.bounding_box()
        assert box["y"]+box["height"] <= height, f"{what} ends below the first screen"
    assert len(page.query_selector_all(".first-hour li")) == 5


def test_pages_are_no_wider_than_a_narrow_screen(site, html, tab):
    page = tab(400, 860)
    for name in html:
        page.goto((site/name).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, name
