"""Write the list of rarely needed parameters into run_cl's parameters cell, where papermill looks for names.

    python tools/parameters.py            # rewrite the list; tests/test_run.py checks that it is complete

Papermill reads the cell without running it, and says "Passed unknown parameter" of every name that has no line `name = value`
there. The list is a text, so that the page defines none of these names; the config has their defaults.
"""
import inspect
import json
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1]/"nbs/run_cl.ipynb"
BEGIN, END = '_others = """', '"""'


def fields_with_help():
    "Name, default as text and comment of every field of TrainConfig, from the source of its groups."
    from clvla.run.config import RunConfig
    from clvla.train.config import DataSettings, EvaluationSettings, LearningSettings, PolicySettings
    for group in (DataSettings, PolicySettings, LearningSettings, EvaluationSettings, RunConfig):
        for line in inspect.getsource(group).splitlines():
            m = re.match(r"    (\w+):\S+ = (.+?)\s+# (.+)", line)
            if m: yield m[1], {"field(default_factory=dict)": "{}", "field(default_factory=list)": "[]"}.get(m[2], m[2]), m[3]


def settings_with_owner():
    "Name, default and owners of every setting of the algorithms and policies that come with the library."
    from clvla.cl.all import algos
    from clvla.policies.all import policies
    from clvla.run.config import settings_of
    from clvla.train.config import FILLED
    owners = {}
    for kind, menu in (("algo_kw", algos), ("model_kw", policies)):
        for name in menu:
            for setting in settings_of(menu[name], FILLED[kind]):
                default = inspect.signature(menu[name]).parameters[setting].default
                owners.setdefault(setting, []).append((name, default))
    for setting, given in owners.items():
        yield setting, repr(given[0][1]), "of " + ", ".join(name for name, _ in given)


def lines(shown):
    "The lines of the list, without the names that the cell itself defines."
    rows, taken = [], set(shown)
    for name, default, text in [*fields_with_help(), *settings_with_owner()]:
        if name in taken: continue
        taken.add(name)
        rows.append(f"{name} = {default}  # {text.replace('=', 'is')}")   # papermill reads one = a line
    return rows


def main():
    page = json.loads(PAGE.read_text())
    cell = next(c for c in page["cells"] if "parameters" in c["metadata"].get("tags", ()))
    source = "".join(cell["source"]).split(BEGIN)[0].rstrip()
    shown = re.findall(r"(?m)^(\w+) = ", source)
    text = "\n".join([source, BEGIN, *lines(shown), END])
    cell["source"] = text.splitlines(True)
    PAGE.write_text(json.dumps(page, indent=1, ensure_ascii=False)+"\n")


if __name__ == "__main__": main()
