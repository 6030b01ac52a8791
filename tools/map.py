"""Write nbs/map.ipynb: every page of the project with the line that says what it is, by folder. Called by tools/readme.py.

    python tools/map.py
"""
import json
import re
from pathlib import Path

NBS = Path(__file__).resolve().parents[1]/"nbs"
ROOMS = {   # folder -> its heading
    ".": "Experiments", "tutorials": "Tutorials", "guides": "Guides", "core": "core: names, files, configs, state",
    "data": "data: tasks, demonstrations, data sets", "envs": "envs: environments and their processes",
    "envs/metaworld": "envs/metaworld", "envs/libero": "envs/libero", "envs/gym": "envs/gym: Gymnasium, MiniGrid, games",
    "policies": "policies: the contract, heads, adapters", "policies/lerobot": "policies/lerobot", "policies/vlm": "policies/vlm: families on language models",
    "cl": "cl: methods against forgetting", "train": "train: imitation", "rl": "rl: practice", "crl": "crl: agents that learn by reward",
    "eval": "eval: metrics, intervals, episodes, figures", "run": "run: a run as a process", "command": "command: `clvla` from a terminal", "benchmarks": "Benchmarks"}


def title(page):
    "A page's heading and the line below it; ValueError for a page that lacks one."
    cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
    text = next(("".join(c["source"]) for c in cells if c["cell_type"] == "markdown"), "")
    found = re.match(r"# (.+)\n+> (.+)", text)
    if not found: raise ValueError(f"{page}: its first text needs a heading '# name' and a line '> what it is', found {text[:60]!r}")
    return found[1].strip(), found[2].strip()


def pages():
    "Folder -> its pages, in order; ValueError for a folder without a heading."
    found = {}
    for page in sorted(NBS.rglob("*.ipynb")):
        place = page.relative_to(NBS)
        if any(part[0] in "._" for part in place.parts) or place.name in ("map.ipynb", "index.ipynb"): continue
        found.setdefault(place.parent.as_posix(), []).append(page)
    if unknown := sorted(set(found)-set(ROOMS)): raise ValueError(f"tools/map.py knows no heading for nbs/{unknown[0]}; add it to ROOMS")
    return {room: found[room] for room in ROOMS if room in found}


def notebook(texts):
    "Markdown cells as a notebook."
    cells = [dict(cell_type="markdown", id=f"map{k:05d}", metadata={}, source=text.splitlines(True)) for k, text in enumerate(texts)]
    meta = dict(kernelspec=dict(display_name="python3", language="python", name="python3"))
    return json.dumps(dict(cells=cells, metadata=meta, nbformat=4, nbformat_minor=5), indent=1, ensure_ascii=False)+"\n"


def main():
    there = pages()
    lines = lambda room: "\n".join(f"- [{title(p)[0]}]({p.relative_to(NBS).as_posix()}): {title(p)[1]}" for p in there[room])
    texts = [f"# map\n> Every page, by folder, with the line that says what it is\n\n{sum(map(len, there.values()))} pages. "
             "In which order to read them: [what to read](guides/what_to_read.ipynb)."]
    texts += [f"## {ROOMS[room]}\n\n{lines(room)}" for room in there]
    (NBS/"map.ipynb").write_text(notebook(texts), encoding="utf-8")


if __name__ == "__main__": main()
