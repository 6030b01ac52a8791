"""Write docs/materials.cdx.json: what clvla needs, ships and shows, with licences, as a bill of materials (CycloneDX 1.6).

    python tools/materials.py            # after a change of settings.ini, or of what a page shows

A package's licence and version are those of its installed metadata. Packages that are not installed here keep what the file says of them, and must be in
NOT_HERE where it says nothing. What is no package (pictures, fonts, scripts, assets that a user fetches) stands in ASSETS. tests/test_release.py holds the
file against settings.ini and against the pictures of the pages.
"""
import importlib.metadata
import json
import re
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT/"docs/materials.cdx.json"
# as the packages' own metadata spell it: SPDX
SPDX = {"apache 2.0": "Apache-2.0", "apache-2": "Apache-2.0", "apache": "Apache-2.0", "apache license 2.0": "Apache-2.0", "apache 2.0 license": "Apache-2.0", "apache license, version 2.0": "Apache-2.0",
        "apache license version 2.0": "Apache-2.0", "apache software license": "Apache-2.0", "apache software license 2.0": "Apache-2.0", "mit": "MIT", "mit license": "MIT", "bsd": "BSD-3-Clause", "bsd license": "BSD-3-Clause",
        "bsd-3-clause": "BSD-3-Clause", "bsd 3-clause": "BSD-3-Clause", "bsd 3-clause license": "BSD-3-Clause", "mpl-2.0 and mit": "MPL-2.0 AND MIT"}
NOT_HERE = {   # licences of packages whose extra the development environment does not have, read from their metadata
    "minihack": "Apache-2.0", "nle": "NGPL", "stable-baselines3": "MIT", "trackio": "MIT"}
MENDED = {   # metadata that say nothing, or less than the licence file that the package holds
    "robosuite": "MIT", "bddl": "MIT", "num2words": "LGPL-2.1-or-later", "minigrid": "Apache-2.0",
    "packaging": "Apache-2.0 OR BSD-2-Clause"}
ASSETS = (   # name, kind (CycloneDX), version, licence, where it is, what it is
    ("plotly.js", "library", None, "MIT", "copied into every report.html, and into the site as plotly.js", "from the package plotly; it draws the figures"),
    ("STIX Two Math", "file", "", "OFL-1.1", "in the site, as STIXTwoMath-Regular.ttf", "from the package ziamath; the font of formulas"),
    ("furo, Sphinx: styles and scripts of the site", "file", "", "MIT AND BSD-2-Clause", "in the site, below _static", "from the packages furo and sphinx"),
    ("pictures drawn by clvla", "data", "", "Apache-2.0", "nbs/images/*.svg, nbs/run/*.svg, figures of the pages", "made by this project"),
    ("nbs/images/front.gif", "data", "", "MIT", "README, nbs/benchmarks/front.ipynb", "Meta-World's arm, rendered by the package metaworld, whose licence this is"),
    ("pictures of Meta-World", "data", "", "MIT", "nbs/envs/metaworld, nbs/tutorials, nbs/data/12_check.ipynb", "rendered by the package metaworld"),
    ("pictures of LIBERO", "data", "", "MIT", "nbs/envs/libero, nbs/guides/libero.ipynb",
     "rendered from LIBERO's scenes; models of HOPE, Google Scanned Objects and TurboSquid are seen, whose terms LIBERO does not restate"),
    ("pictures of MiniGrid, Procgen and Atari", "data", "", "Apache-2.0 AND MIT", "nbs/envs/gym", "rendered by the packages minigrid and envpool; the games in Atari's pictures belong to their makers"),
    ("LIBERO's assets", "data", "", "MIT", "not shipped: clvla-libero fetches them once, and LICENSE.LIBERO, LICENSE.robosuite and NOTICE.md stay with each copy",
     "scenes, meshes, textures; models of HOPE, Google Scanned Objects and TurboSquid among them, whose terms LIBERO does not restate"),
    ("published weights of VLM trunks", "machine-learning-model", "", "each its own", "not shipped: clvla-weights fetches them once, where the user asks for them", "its page on the hub says the licence"))


def name_of(requirement): return re.sub(r"[._-]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement)[0]).lower()


def declared():
    "Name -> the ranges in settings.ini, each with the extra that asks for it (\"\" for the library itself)."
    c = ConfigParser(delimiters=["="])
    c.read(ROOT/"settings.ini", encoding="utf-8")
    found = {}
    for key, value in c["DEFAULT"].items():
        if key == "requirements" or key.endswith("_requirements"):
            for r in value.split(): found.setdefault(name_of(r), []).append((key.removesuffix("requirements").rstrip("_"), r))
    return found


def licence(name):
    "SPDX expression from a package's installed metadata; None where it is not installed. SystemExit where it says nothing that is known."
    try: m = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError: return None
    if name in MENDED: return MENDED[name]
    if m.get("License-Expression"): return m["License-Expression"]
    classes = [c.split(" :: ")[-1] for c in m.get_all("Classifier", ()) if c.startswith("License :: OSI Approved ::")]
    if len(classes) > 1: raise SystemExit(f"{name}: its metadata say {classes}; put what its licence file says into MENDED")
    for text in (m.get("License") or "", *classes):
        if spdx := SPDX.get(text.strip().lower(), text.strip() if text.strip() in SPDX.values() else None): return spdx
    raise SystemExit(f"{name}: its metadata say {m.get('License')!r} and {classes}; put what its licence file says into MENDED, or the spelling into SPDX")


def as_licence(text):
    if re.fullmatch(r"[A-Za-z0-9.+-]+", text): return [dict(license=dict(id=text))]
    return [dict(expression=text)] if re.fullmatch(r"[A-Za-z0-9.+() -]+", text) and re.search(r" (AND|OR|WITH) ", text) else [dict(license=dict(name=text))]


def component(kind, name, version, licence, **properties):
    "An entry of the list."
    purl = dict(purl=f"pkg:pypi/{name}"+f"@{version}"*bool(version)) if "range" in properties else {}
    return dict(type=kind, name=name) | (dict(version=version) if version else {}) | dict(licenses=as_licence(licence)) | purl | dict(
        properties=[dict(name=f"clvla:{k}", value=v) for k, v in properties.items()])


def materials(known):
    "The whole list; `known` is the one that was written before."
    from plotly.offline import get_plotlyjs_version
    before = {c["name"]: c for c in known.get("components", ())}
    parts = []
    for name, wanted in sorted(declared().items()):
        spdx = licence(name)
        version = importlib.metadata.version(name) if spdx else before.get(name, {}).get("version", "")
        if spdx is None and name not in NOT_HERE: raise SystemExit(f"{name} is not installed; install it, or put its licence into NOT_HERE")
        parts.append(component("library", name, version, spdx or NOT_HERE[name], range=" ".join(sorted({r for _, r in wanted})), needed_by=" ".join(sorted({e or "clvla" for e, _ in wanted}))))
    for name, kind, version, spdx, where, what in ASSETS:
        parts.append(component(kind, name, get_plotlyjs_version() if version is None else version, spdx, where=where, what=what))
    c = ConfigParser(delimiters=["="])
    c.read(ROOT/"settings.ini", encoding="utf-8")
    own = dict(type="library", name="clvla", version=c["DEFAULT"]["version"], licenses=as_licence("Apache-2.0"))
    return dict(bomFormat="CycloneDX", specVersion="1.6", version=1, metadata=dict(component=own), components=parts)


def main():
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    FILE.write_text(json.dumps(materials(known), indent=1, ensure_ascii=False)+"\n", encoding="utf-8")


if __name__ == "__main__": main()
