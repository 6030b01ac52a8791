"""Puts a static picture beside each Plotly figure of the committed pages, for readers that run no script (GitHub, nbconvert).

    python tools/pictures.py [PAGE...]        # pages that lack pictures, or whose figures were made again; default: all of nbs/

A picture is a PNG of 64 colours. It carries the SHA-256 of its figure's data, so that `stale` tells when the figure has changed.
Needs Chromium (Debian: apt-get install chromium) and playwright, which the extra `dev` brings; a reader needs neither.
"""
import base64
import hashlib
import io
import json
import shutil
import sys
from pathlib import Path

from PIL import Image, PngImagePlugin

ROOT = Path(__file__).resolve().parents[1]
PLOTLY = "application/vnd.plotly.v1+json"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
DRAW = """async fig => {
  const div = document.getElementById("figure"), size = {width: fig.layout.width || 700, height: fig.layout.height || 450};
  await Plotly.newPlot(div, fig.data, Object.assign({}, fig.layout, size), {staticPlot: true});
  const url = await Plotly.toImage(div, Object.assign({format: "png", scale: 1}, size));
  Plotly.purge(div);
  return url;
}"""


def digest(figure):
    "SHA-256 of a figure's data, independent of the order of its keys."
    return hashlib.sha256(json.dumps(figure, sort_keys=True).encode()).hexdigest()


def figures(page):
    "The outputs of a page, as read from JSON, that hold a Plotly figure."
    return [o for c in page["cells"] for o in c.get("outputs", []) if PLOTLY in o.get("data", {})]


def stale(output):
    "Whether an output's picture is missing, or is that of another figure."
    if "image/png" not in output["data"]: return True
    picture = Image.open(io.BytesIO(base64.b64decode("".join(output["data"]["image/png"]))))
    return picture.info.get("figure") != digest(output["data"][PLOTLY])


def small_png(png, figure):
    "A PNG in 64 colours that carries the digest of its figure."
    info, out = PngImagePlugin.PngInfo(), io.BytesIO()
    info.add_text("figure", digest(figure))
    Image.open(io.BytesIO(png)).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(out, "PNG", optimize=True, pnginfo=info)
    return out.getvalue()


def browser_path():
    "The Chromium of this machine."
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None: raise SystemExit("needs Chromium to draw the pictures, and found none; install it (Debian: apt-get install chromium)")
    return found


def draw_all(pages):
    "Draw what is missing in each page, and write the page."
    from playwright.sync_api import sync_playwright
    from plotly.offline import get_plotlyjs
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=browser_path(), args=FLAGS)
        tab = browser.new_page()
        tab.set_content('<div id="figure"></div>')
        tab.add_script_tag(content=get_plotlyjs())
        for path, page in pages.items():
            todo = [o for o in figures(page) if stale(o)]
            for output in todo:
                figure = output["data"][PLOTLY]
                url = tab.evaluate(DRAW, figure)
                output["data"]["image/png"] = base64.b64encode(small_png(base64.b64decode(url.split(",")[1]), figure)).decode()
            path.write_text(json.dumps(page, indent=1, ensure_ascii=False, sort_keys=True)+"\n", encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: {len(todo)} pictures")
        browser.close()


def main(paths):
    paths = [Path(p).resolve() for p in paths] or sorted(p for p in (ROOT/"nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    pages = {p: json.loads(p.read_text(encoding="utf-8")) for p in paths}
    draw_all({p: page for p, page in pages.items() if any(map(stale, figures(page)))})


if __name__ == "__main__": main(sys.argv[1:])
