"Writes README.md from nbs/index.ipynb (prose with its links, shown code, text outputs), and what the README leads to: nbs/map.ipynb, nbs/images/rooms.svg."
import json
import re
from pathlib import Path

import map as page_map
import rooms

ROOT = Path(__file__).resolve().parents[1]


def from_root(text):
    "Relative links of a page in nbs/, as the README beside nbs/ needs them."
    return re.sub(r"\]\((?!https?:|#|/|\.\./)", "](nbs/", text).replace("](../", "](")


def readme(path):
    "Markdown of a notebook, without hidden cells."
    out = []
    for c in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        src = "".join(c["source"])
        directives = [l for l in src.splitlines() if l.startswith("#|")]
        if any("hide" in d or "default_exp" in d for d in directives): continue
        if c["cell_type"] == "markdown":
            out.append(from_root(src))
            continue
        code = "\n".join(l for l in src.splitlines() if not l.startswith("#|")).strip()
        if code: out.append(f"```python\n{code}\n```")
        for o in c.get("outputs", []):
            data = o.get("data", {})
            if any("plotly" in k or k.startswith("image/") for k in data): continue
            text = "".join(o.get("text", data.get("text/plain", "")))
            if text: out.append("    "+text.rstrip().replace("\n", "\n    "))
    return "\n\n".join(out)+"\n"


if __name__ == "__main__":
    page_map.main()
    rooms.main()
    (ROOT/"README.md").write_text(readme(ROOT/"nbs/index.ipynb"), encoding="utf-8")
