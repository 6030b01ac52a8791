"Each figure of a committed page has a static picture beside it, of the very figure, for readers that run no script."
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT/"tools"))
from pictures import PLOTLY, figures, small_png, stale  # noqa: E402

PAGES = {p: page for p in sorted((ROOT/"nbs").rglob("*.ipynb")) if ".ipynb_checkpoints" not in p.parts
         and figures(page := json.loads(p.read_text(encoding="utf-8")))}


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT/"nbs")))
def test_each_figure_has_its_picture(path):
    "`python tools/pictures.py` draws those that are missing or of an earlier figure."
    bad = [k for k, o in enumerate(figures(PAGES[path])) if stale(o)]
    assert not bad, f"figures {bad} of the page have no picture, or an old one; run python tools/pictures.py"


def test_a_picture_belongs_to_one_figure():
    import base64
    import io
    from PIL import Image
    png = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(png, "PNG")
    figure = dict(data=[dict(y=[1, 2])], layout={})
    output = dict(data={PLOTLY: figure, "image/png": base64.b64encode(small_png(png.getvalue(), figure)).decode()})
    assert not stale(output)
    figure["data"][0]["y"][0] = 3
    assert stale(output) and stale(dict(data={PLOTLY: figure}))
