"""Write the list of all parameters into the folded cell of run_cl, run_rl and run_crl, where papermill looks for names.

    python tools/parameters.py            # rewrite the lists; tests/test_run.py checks that they are complete

Papermill reads the cell tagged `parameters` without running it, and says "Passed unknown parameter" of every name that has no line
`name = value` there. The list is a text, so that the cell defines none of these names: the cell `settings` before it has those
that a user changes, the config the defaults of the others.
"""
import inspect
import json
import re
from pathlib import Path

NBS = Path(__file__).resolve().parents[1]/"nbs"
FOLDED = '_names = """\n{}\n"""\nfurther_settings(_names, globals())'


def groups_and_menus(page):
    "The classes whose fields a page takes, those that count first, and the menus whose entries have settings."
    from clvla.cl.all import algos
    from clvla.crl.all import agents, cl_methods, runners
    from clvla.crl.config import AgentConfig, AgentSettings
    from clvla.policies.all import policies
    from clvla.rl.all import methods
    from clvla.rl.config import PracticeConfig, PracticeSettings
    from clvla.run.config import ProcessSettings, RunConfig, RunSettings, SavingSettings
    from clvla.train.config import DataSettings, EvaluationSettings, LearningSettings, PolicySettings
    run = (RunSettings, ProcessSettings, SavingSettings, RunConfig)
    if page == "run_crl": return (AgentConfig, AgentSettings, *run), dict(algo_kw=agents, cl_kw={name: menu[name] for menu in (algos, cl_methods) for name in menu}, runner_kw=runners)   # agents have no policy
    shared = (DataSettings, PolicySettings, LearningSettings, EvaluationSettings, *run)
    if page == "run_rl": return (PracticeConfig, PracticeSettings, *shared), dict(algo_kw=methods, model_kw=policies, cl_kw=algos)
    return shared, dict(cl_kw=algos, model_kw=policies)


def fields_with_help(groups):
    "Name, default as text and comment of every field of a config, from the source of its groups."
    for group in groups:
        for line in inspect.getsource(group).splitlines():
            m = re.match(r"    (\w+):\S+ = (.+?)\s+# (.+)", line)
            if m: yield m[1], {"field(default_factory=dict)": "{}", "field(default_factory=list)": "[]"}.get(m[2], m[2]), m[3]


def settings_with_owner(menus):
    "Name, default and owners of every setting of the algorithms, policies and methods that come with the library."
    from clvla.core.config import arguments_of
    from clvla.run.config import settings_of
    from clvla.train.config import FILLED
    owners, filled = {}, dict(model_kw=FILLED, runner_kw=("cfg", "exp"))   # arguments that the run gives
    for kind, menu in menus.items():
        for name in menu:
            defaults = {p.name: p.default for p in arguments_of(menu[name]).values()}
            for setting in settings_of(menu[name], filled.get(kind, ("seed",))):
                owners.setdefault(setting, []).append((name, defaults[setting]))
    for setting, given in owners.items():
        same = all(default == given[0][1] for _, default in given)
        yield setting, repr(given[0][1]), "of " + ", ".join(n if same else f"{n} ({default!r})" for n, default in given)


def lines(page, shown):
    "The lines of the list; first those of the settings that the page shows, from the source of their cell."
    groups, menus = groups_and_menus(page)
    rows, taken = [], set()
    for name, default, text in [*shown, *fields_with_help(groups), *settings_with_owner(menus)]:
        if name in taken: continue
        taken.add(name)
        rows.append(f"{name} = {default}  # {text.replace('="', ' "').replace('=', 'is')}")   # papermill reads one = a line
    return rows


def write(name):
    "Rewrite the list of one page, and the table that its cell shows."
    from clvla.command.words import defaults_of, parameters_of
    from clvla.run.page_settings import further_settings
    path = NBS/f"{name}.ipynb"
    page = json.loads(path.read_text())
    tagged = lambda tag: next(c for c in page["cells"] if tag in c["metadata"].get("tags", ()))
    told = parameters_of(path)
    shown = [(name, *told[name]) for name in defaults_of(path)]
    listed = "\n".join(lines(name, shown))
    table = further_settings(listed, [name for name, *_ in shown])
    data = {"text/html": table.data.splitlines(True), "text/plain": [repr(table)]}
    output = dict(output_type="execute_result", data=data, execution_count=None, metadata={})
    tagged("parameters").update(source=FOLDED.format(listed).splitlines(True), outputs=[output])   # what the cell shows
    path.write_text(json.dumps(page, indent=1, ensure_ascii=False)+"\n")


def main():
    for name in ("run_cl", "run_rl", "run_crl"): write(name)


if __name__ == "__main__": main()
