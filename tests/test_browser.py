"""In a real browser: an experiment page in JupyterLab while it runs, is stopped, and is closed and opened again; a report and the site from the disk.

An error in a browser's console fails the test, and so does a request that leaves this machine. `.ci/run` takes these tests, and there a missing
Chromium is a failure; elsewhere they run where this file or the marker is named (`./clvla.sh test -m browser`), and are skipped without a Chromium."""
import json
import os
import re
import sys
from pathlib import Path

import pytest

import browser_help as help
from clvla.run.watch import Run

sync = pytest.importorskip("playwright.sync_api", reason="the extra dev is not installed")
pytest.importorskip("jupyterlab", reason="the extra dev is not installed")
pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[1]
# ER that waits in each update, so that a run takes as long on a fast machine as a reader needs to look, and little of its cores; from the second
# task on it waits for long, until the test lets the run go on, so that no run ends before a slow browser has come to look
PLUGIN = """import time
from pathlib import Path
from clvla.cl.all import algos
from clvla.cl.er import ER
class Waits(ER):
    def modify_batch(self, batch, ctx):
        time.sleep(.03 if ctx.t == 0 or Path({go!r}).exists() else 2.)
        return super().modify_batch(batch, ctx)
algos["waits"] = Waits
"""
SMALL = dict(suite="dot_2", cl="waits", plugins=["waits.py"], n_demos=2, steps_per_task=100, warmup=1, batch_size=4, image_size=32, n_trials=2, n_workers=1,
             rows_per_task=1, threads=1, model_kw=dict(D=32, n_blocks=1), data_dir="data")
# what a page shows of a run: updates in the loss curve, rows of the matrix, and whether there are bars and a time left
SHOWN = """() => {
  const figures = [...document.querySelectorAll('.js-plotly-plot')];
  const of = title => figures.filter(f => (f.layout?.title?.text || '').startsWith(title)).map(f => f.data);
  const text = [...document.querySelectorAll('.jp-OutputArea-output')].map(o => o.innerText).join('\\n');
  const [loss] = of('Training loss'), [matrix] = of('Success on each task (columns)');
  return {updates: loss ? loss.reduce((n, line) => n+line.x.length, 0) : 0,
          rows: matrix ? matrix[0].text.filter(row => row.some(cell => cell)).length : 0,
          drawn: figures.every(f => f.querySelector('.main-svg')), bars: /training (left|right): +\\d+%\\|/.test(text),
          left: /(time left: about|time left\\s+about) \\d/.test(text), over: text.includes('to open anywhere, without a network'), text};
}"""
# errors that are JupyterLab's own: it asks for the language servers of an extension that is not installed
NOT_OURS = re.compile(r"Failed to load resource: the server responded with a status of 404 \(Not Found\) at http://127\.0\.0\.1:\d+/lsp/status\?\d+")


@pytest.fixture(scope="module")
def chromium():
    try: path = help.chromium()
    except help.NoBrowser as e:
        if os.environ.get("CLVLA_BROWSER"): pytest.fail(str(e))
        pytest.skip(str(e))
    with sync.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=help.FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def new_tab(chromium):
    "Opens a tab; what its console calls an error, and requests to other machines, fail the test."
    context, bad = chromium.new_context(viewport=dict(width=1200, height=1600)), []
    def new_tab():
        tab = context.new_page()
        tab.set_default_timeout(help.WAIT)
        tab.on("console", lambda m: bad.append(f"{m.text} at {m.location['url']}") if m.type == "error" else None)
        tab.on("pageerror", lambda e: bad.append(str(e)))
        tab.on("request", lambda r: None if re.match(r"(http://127\.0\.0\.1:|file:|data:|blob:)", r.url) else bad.append(r.url))
        return tab
    new_tab.context = context
    yield new_tab
    context.close()
    assert [line for line in bad if not NOT_OURS.fullmatch(line)] == []


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    "The folder that JupyterLab serves."
    home = tmp_path_factory.mktemp("lab")
    (home/"waits.py").write_text(PLUGIN.format(go=str(home/"go")))
    return home


@pytest.fixture(scope="module")
def server(home, chromium):
    with help.lab(home) as server: yield server


def page_of(home, name, **kw):
    "A copy of the page run_cl with other parameters, as a user changes them."
    page = json.loads((ROOT/"nbs/run_cl.ipynb").read_text(encoding="utf-8"))
    for cell in page["cells"]:
        if cell["cell_type"] == "code": cell |= dict(outputs=[], execution_count=None)
        if "parameters" in cell["metadata"].get("tags", []):
            cell["source"] = "".join(cell["source"]) + "\n" + "\n".join(f"{k} = {v!r}" for k, v in (SMALL | kw).items())
    (home/f"{name}.ipynb").write_text(json.dumps(page), encoding="utf-8")
    return f"{name}.ipynb"


def updates(page): return page.tab.evaluate(SHOWN)["updates"]


def test_a_page_shows_its_run_is_stopped_in_the_middle_and_goes_on(home, server, new_tab):
    page = help.Page(new_tab(), server, page_of(home, "own", run_dir="own"))
    page.call("notebook:run-all-cells")
    page.until(f"{{ const s = ({SHOWN})(); return s.bars && s.updates > 2 && s.drawn }}", "bars and a loss curve")
    seen = updates(page)
    page.until(f"({SHOWN})().updates > {seen}+10", "the loss curve grows")
    page.until(f"{{ const s = ({SHOWN})(); return s.rows == 1 && s.left }}", "the first row of the matrix, and the time left")
    assert not page.tab.evaluate(SHOWN)["over"] and Run.open(home/"own").status == "running"
    page.tab.locator("jp-button[data-command='notebook:interrupt-kernel'], [data-jp-item-name='interrupt'] button, [data-jp-item-name='interrupt'] jp-button").first.click()
    page.until("document.body.innerText.includes('RunStopped')", "the run is stopped")
    (home/"go").touch()
    page.until_idle()   # the kernel drops what was asked of it together with the cell that ended in an error
    assert Run.open(home/"own").status == "stopped"
    page.call("notebook:run-all-cells")
    page.until(f"({SHOWN})().text.includes('continued after')", "the run goes on where it was")
    page.until(f"{{ const s = ({SHOWN})(); return s.over && s.rows == 2 && s.drawn }}", "the results of the whole run")
    steps = [(r["stage"], r["step"]) for r in Run.open(home/"own").folder.logs() if "train/loss" in r]
    assert steps == [(t, k) for t in (0, 1) for k in range(100)]


def test_a_closed_tab_comes_back_to_a_detached_run(home, server, new_tab):
    (home/"go").unlink(missing_ok=True)
    tab = new_tab()
    page = help.Page(tab, server, page_of(home, "detached", run_dir="detached", detached=True, steps_per_task=120))
    page.call("notebook:run-all-cells")
    page.until(f"{{ const s = ({SHOWN})(); return s.bars && s.updates > 2 && s.drawn }}", "bars and a loss curve")
    seen = updates(page)
    page.until(f"({SHOWN})().updates > {seen}+10", "the loss curve grows, of a detached run too")
    hint = re.search(r"follow the run in any notebook: (from clvla.*follow\(\))", page.text())[1]
    tab.close()

    (home/"any.ipynb").write_text(json.dumps(dict(nbformat=4, nbformat_minor=5, metadata=json.loads((ROOT/"nbs/run_cl.ipynb").read_text())["metadata"], cells=[
        dict(cell_type="code", id="a", metadata={}, source=hint, outputs=[], execution_count=None)])))
    other = help.Page(new_tab(), server, "any.ipynb")
    other.call("notebook:run-all-cells")
    other.until(f"{{ const s = ({SHOWN})(); return s.bars && s.left && s.updates > {seen} && s.drawn }}", "another notebook follows the run")
    other.tab.close()

    page = help.Page(new_tab(), server, "detached.ipynb", idle=False)   # its kernel still watches the run, for a tab that is gone
    page.call("notebook:interrupt-kernel")
    page.until_idle()
    assert Run.open(home/"detached").status == "running", "an interrupt ends the watching alone"
    page.call("notebook:run-all-cells")
    page.until(f"{{ const s = ({SHOWN})(); return s.rows == 1 && !s.over && s.drawn }}", "the first row of the matrix, while the run goes on")
    (home/"go").touch()
    page.until(f"{{ const s = ({SHOWN})(); return s.over && s.rows == 2 && s.drawn }}", "the results of the whole run")
    started = [line for line in (home/"detached/console.txt").read_text().splitlines() if '"phase": "started"' in line]
    assert len(started) == 1 and Run.open(home/"detached").status == "done"


def test_a_report_opens_from_the_disk_without_a_network(home, new_tab):
    report = home/"own/report.html"
    assert report.is_file(), "of the run above"
    tab = new_tab()
    tab.context.set_offline(True)
    tab.context.route(re.compile("^(?!file:|data:|blob:)"), lambda route: route.abort())
    tab.goto(report.as_uri())
    n = report.read_text(encoding="utf-8").count('class="plotly-graph-div"')
    assert n >= 5
    tab.wait_for_function(f"document.querySelectorAll('.js-plotly-plot .main-svg').length >= {n}")
    assert "Success matrix" in tab.inner_text("body") and tab.locator("table").count() >= 3
    tab.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for name in ("sphinx", "myst_nb", "furo", "math_core", "ziamath"): pytest.importorskip(name, reason="the extra docs is not installed")
    sys.path[:0] = [str(ROOT/"docs")]
    import make_site
    out = tmp_path_factory.mktemp("site")/"_site"
    assert make_site.build([ROOT/f"nbs/{name}.ipynb" for name in ("index", "cl/09_mir", "cl/08_er")], out, jobs=1) == []
    return out


def test_the_site_is_searched_and_draws_its_figures(site, new_tab):
    tab = new_tab()
    tab.goto((site/"search.html").as_uri()+"?q=interference")
    tab.locator("#search-results a", has_text="cl / mir").first.click()
    tab.wait_for_url("**/09_mir.html*")
    for name in ("09_mir", "08_er"):
        tab.goto((site/f"nbs/cl/{name}.html").as_uri())
        figures = tab.locator(".plotly-figure")
        assert figures.count() >= 1
        for k in range(figures.count()):
            figures.nth(k).scroll_into_view_if_needed()
            figures.nth(k).locator(".main-svg").first.wait_for()
    tab.close()
