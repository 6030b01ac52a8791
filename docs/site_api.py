"A page of Markdown for each exported module: functions, classes and methods with docstrings and docments; nothing is imported."
import ast
import io
import textwrap
import tokenize


def comments(source):
    "Line -> the comment at its end."
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("# ").strip() for t in tokens if t.type == tokenize.COMMENT}


def cell(text):
    "A text inside a table; code keeps its backticks, so that no `*` is read as emphasis."
    return text.replace("|", "\\|").replace("\n", " ")


EMPTY = {"field(default_factory=dict)": "{}", "field(default_factory=list)": "[]"}   # of a dataclass


def code(node): return f"`{cell(EMPTY.get(text := ast.unparse(node), text))}`" if node is not None else ""


def table(rows, notes):
    "Rows of name, type, default, line as a table; nothing without rows."
    if not rows: return ""
    lines = [f"| `{name}` | {code(kind)} | {code(default)} | {cell(plain(notes.get(line, '')))} |"
             for name, kind, default, line in rows]
    return "\n".join(["| parameter | type | default | |", "|---|---|---|---|", *lines])+"\n"


def plain(text):
    "A comment or docstring as Markdown shows it: brackets, stars and dollars stand for themselves outside of code."
    parts = text.split("`")
    return "`".join(part if k % 2 else "".join("\\"+c if c in "*_[]<>$#" else c for c in part) for k, part in enumerate(parts))


def parameters(f):
    "Name, type, default and line of a function's parameters, without self."
    a = f.args
    given = [*a.posonlyargs, *a.args]
    defaults = [None]*(len(given)-len(a.defaults))+a.defaults
    rows = [*zip(given, defaults), (a.vararg, None), *zip(a.kwonlyargs, a.kw_defaults), (a.kwarg, None)]
    stars = {id(a.vararg): "*", id(a.kwarg): "**"}
    return [(stars.get(id(arg), "")+arg.arg, arg.annotation, default, arg.end_lineno if default is None else default.end_lineno)
            for arg, default in rows if arg and arg.arg not in ("self", "cls")]


def signature(f, name=None):
    "A call with its parameters, types and defaults, in lines of 90 columns."
    given = ", ".join(one(*row) for row in parameters(f))
    returns = f" -> {ast.unparse(f.returns)}" if f.returns is not None else ""
    lines = textwrap.wrap(f"{name or f.name}({given}){returns}", 90, subsequent_indent="    ", break_long_words=False,
                          break_on_hyphens=False)
    return "```python\n"+"\n".join(lines)+"\n```\n"


def one(name, kind, default, _):
    given = f"={ast.unparse(default)}" if default is not None else ""
    return name+(f": {ast.unparse(kind)}" if kind is not None else "")+given


def patched(f):
    "The class that fastcore's `@patch` adds a function to, or None."
    names = [ast.unparse(d).split("(")[0] for d in f.decorator_list]
    first = (f.args.posonlyargs+f.args.args)[:1]
    if not any(name in ("patch", "patch_to") for name in names) or not first or first[0].annotation is None: return None
    return ast.unparse(first[0].annotation)


def function(f, notes, level, name=None):
    returned = notes.get(f.returns.end_lineno, "") if f.returns is not None else ""
    said = ast.get_docstring(f) or ""
    name = name or f.name
    parts = [f"{'#'*level} {name}", signature(f, name.split(".")[-1]), plain(said), table(parameters(f), notes)]
    if returned: parts.append(f"Returns {plain(returned)}")
    return "\n\n".join(p for p in parts if p)


def public(f): return not f.name.startswith("_")


FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


def fields(c):
    "Annotated fields of a class, as a dataclass has them."
    return [(n.target.id, n.annotation, n.value, n.end_lineno)
            for n in c.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]


def klass(c, notes, more):
    "A class: its docstring, the parameters of its `__init__` or its fields, and its methods, those of `@patch` included."
    bases = ", ".join(map(ast.unparse, c.bases))
    parts = [f"## {c.name}", f"```python\nclass {c.name}({bases})\n```" if bases else "", plain(ast.get_docstring(c) or "")]
    methods = [n for n in c.body if isinstance(n, FUNCTIONS)]
    init = [m for m in methods if m.name == "__init__"]
    parts += [signature(m, c.name)+"\n"+table(parameters(m), notes) for m in init] or [table(fields(c), notes)]
    shown = [m for m in [*methods, *more] if public(m) and (ast.get_docstring(m) or parameters(m))]
    parts += [function(m, notes, 3, f"{c.name}.{m.name}") for m in shown]
    return "\n\n".join(p for p in parts if p)


def module_page(name, source, page, title, lead):
    "The Markdown of a module: `page` is the link to its notebook, `title` and `lead` what stands at its top."
    tree, notes = ast.parse(source), comments(source)
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    functions = [n for n in tree.body if isinstance(n, FUNCTIONS)]
    added = {}
    for f in functions:
        if patched(f): added.setdefault(patched(f), []).append(f)
    parts = [f"# {name}", f"> {lead}", f"Explained, with examples, on its page: [{title}]({page})."]
    for n in tree.body:
        if isinstance(n, ast.ClassDef) and public(n): parts.append(klass(n, notes, added.get(n.name, [])))
        elif isinstance(n, FUNCTIONS) and public(n) and not patched(n): parts.append(function(n, notes, 2))
    for owner, methods in added.items():
        if owner in classes: continue
        parts.append(f"## Added to {owner}")
        parts += [function(m, notes, 3, f"{owner}.{m.name}") for m in methods if public(m)]
    return "\n\n".join(parts)+"\n"
