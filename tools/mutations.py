"""Does the short test run notice a fault? Breaks one line in each of twenty modules, one after another, and runs the tests on each.

    python tools/mutations.py           # all; tests that are named beside a fault come first, then the rest of the short run
    python tools/mutations.py 3 7       # these faults
    python tools/mutations.py --named   # the named tests alone
    python tools/mutations.py --list

Each fault is put into a copy of the tracked files, into the exported module and into the cell of its notebook; the copy is deleted
afterwards. A line is looked for by its text in all modules, so that a module may be renamed; one that is not there, or that is there
twice, ends this with an error: choose another line of that idea. Exit code 1 when a fault was not noticed.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULTS = (   # line, what becomes of it, what is wrong then, tests of the short run that look there: files, or pages without .ipynb
    ("penalty = self.lam/2*((self.F*d*d).sum() + self.rest)", "penalty = self.lam*((self.F*d*d).sum() + self.rest)",
     "EWC's springs are twice as stiff", "test_cl cl/10_ewc"),
    ("int(self.rng.integers(self.n_seen))) < self.size", "int(self.rng.integers(self.n_seen-1))) < self.size",
     "the reservoir keeps late samples too often", "test_cl cl/03_buffer"),
    ("return [x - overlap/dot(ref, ref)*r for x,r in zip(g, ref)]", "return [x - overlap/dot(g, ref)*r for x,r in zip(g, ref)]",
     "A-GEM's projection is divided by the wrong product", "test_cl cl/11_agem"),
    ("return w/(moved.square()+xi)", "return w/(moved.abs()+xi)", "SI divides by the distance in place of its square", "cl/19_si test_cl"),
    ("params[n].masked_fill_((owner == 0) | (owner > k), 0.)", "params[n].masked_fill_(owner == 0, 0.)",
     "PackNet plays an earlier task with later tasks' weights", "test_cl cl/14_packnet"),
    ("np.quantile(x, [.01, .99], axis=0)", "np.quantile(x, [.01, .9], axis=0)", "a wrong quantile in the statistics", "test_stats data/02_stats"),
    ("if position == len(self): epoch,position = epoch+1,0", "if position == len(self): epoch,position = epoch,0",
     "each epoch has the order of the first", "test_data data/03_loader"),
    ("return np.minimum(ahead, last),ahead > last", "return np.minimum(ahead, last),ahead >= last", "an episode's last action counts as padding",
     "test_data data/01_frames"),
    ("return score(end-then, end, then)", "return score(then-end, end, then)", "backward transfer has the other sign", "test_metrics eval/00_metrics"),
    ("z = NormalDist().inv_cdf(.5+conf/2)", "z = NormalDist().inv_cdf(conf)", "intervals are too narrow", "test_metrics eval/01_stats"),
    ("x - self.velocity(h, x, x.new_full(x.shape[:2], 1-i/n))/n", "x - self.velocity(h, x, x.new_full(x.shape[:2], 1-(i+1)/n))/n",
     "the flow is integrated at wrong times", "test_policies policies/01_heads"),
    ("(step-warmup)/max(1, n_steps-1-warmup)", "(step-warmup)/max(1, n_steps-warmup)", "the learning rate never reaches its floor",
     "test_schedules train/08_schedules"),
    ("""while path in ts: path += "'\"""", """if path in ts: path += "'\"""", "of three entries with one path, a state keeps two",
     "test_checkpoint core/05_state"),
    ("if not 0 <= operator.index(i) < end-first:", "if not 0 <= operator.index(i) <= end-first:", "the door lets a trial of the next use in",
     "test_door core/06_trials"),
    ("if left := refused(folder, code_of(value)): raise ValueError(refusal(folder, left))",
     "if left := refused(folder, code_of(value)): return", "the door lets a stranger's code in", "test_trust core/14_trust"),
    ("""if deep and sha256(p) != entry["sha256"]: return""", """if deep and not entry["sha256"]: return""",
     "a changed file of a checkpoint is taken", "test_checkpoint run/01_checkpoint"),
    ("if success and not self.success_at: self.success_at = n", "if success: self.success_at = n",
     "a success is reported at the chunk's end", "test_envs envs/00_base"),
    ("mask = np.where((end == T) & bool(terminated), 0,", "mask = np.where((end == T) & (not terminated), 0,",
     "a critic looks past an end, and not past the time limit", "test_rl_replay rl/01_transitions"),
    ("delta = cut*(reward + mask*next_v - v)", "delta = ratio*(reward + mask*next_v - v)", "V-trace's first limit is left out", "test_crl crl/21_vtrace"),
    ("""gap = (old["v"]-out["v"]).square().mean()""", """gap = (old["v"]-out["v"]).mean()""", "CLEAR's values are pulled down for ever",
     "test_crl_small crl/05_clear"),
)


def source_of(text, root=ROOT):
    "Exported module in which a line stands, and its notebook; SystemExit unless there is exactly one."
    found = [p for p in sorted((root/"clvla").rglob("*.py")) for _ in range(p.read_text().count(text))]
    if len(found) != 1:
        said = ", ".join(str(p.relative_to(root)) for p in found) or "nowhere"
        raise SystemExit(f"the line {text!r} is to stand once in clvla/ and stands {said}; choose another line of that idea in {__file__}")
    edit = re.search(r"File to edit: (\S+?\.ipynb)", found[0].read_text())
    if not edit: raise SystemExit(f"{found[0]} does not name its notebook")
    return found[0], (found[0].parent/edit[1]).resolve()


def put(text, other, root):
    "Break a line in a copy: in the module, and in the cell that it is exported from."
    module, page = source_of(text, root)
    module.write_text(module.read_text().replace(text, other))
    notebook = json.loads(page.read_text())
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code" and text in "".join(c["source"]) and "export" in "".join(c["source"])[:200]]
    if len(cells) != 1: raise SystemExit(f"the line {text!r} stands in {len(cells)} exported cells of {page}")
    cells[0]["source"] = "".join(cells[0]["source"]).replace(text, other)
    page.write_text(json.dumps(notebook))
    return module.relative_to(root)


def copy_of(root):
    "A copy of the tracked files."
    folder = Path(tempfile.mkdtemp(prefix="mutation-"))
    for name in subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True, text=True).stdout.split("\0"):
        if not name or not (root/name).is_file(): continue
        (folder/name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root/name, folder/name)
    return folder


def run(folder, *args):
    "Whether pytest ended with a failed test, and the first of them; SystemExit when it could not begin."
    env = os.environ | dict(PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1")
    p = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "--short", "-p", "no:cacheprovider", *args], cwd=folder, env=env,
                       capture_output=True, text=True, errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+(?: \S*\])?)", p.stdout, re.M)
    if p.returncode not in (0, 1, 2, 5) or p.returncode == 2 and not failed: raise SystemExit(p.stdout[-3000:]+p.stderr[-3000:])
    return failed[0] if failed else ""


def notice(folder, names, rest):
    "The first test that notices; \"\"."
    files = [f"tests/{n}.py" for n in names if "/" not in n]
    pages = [f"tests/test_notebooks.py::test_notebook[{n}.ipynb]" for n in names if "/" in n]
    for args in (pages, files):
        if args and (found := run(folder, "-n", "0", *args)): return found
    return run(folder, "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "tests") if rest else ""


def main():
    p = argparse.ArgumentParser(usage=__doc__)
    p.add_argument("numbers", nargs="*", type=int)
    p.add_argument("--named", action="store_true")
    p.add_argument("--list", action="store_true")
    args = p.parse_args()
    chosen = [n for n in range(1, len(FAULTS)+1) if not args.numbers or n in args.numbers]
    modules = {source_of(text)[0] for text, *_ in FAULTS}   # before the first of them is tried
    if len(modules) != len(FAULTS): raise SystemExit(f"{len(FAULTS)} faults are to lie in as many modules, they lie in {len(modules)}")
    missed = []
    for n in chosen:
        text, other, says, names = FAULTS[n-1]
        if args.list:
            print(f"{n:2d} {source_of(text)[0].relative_to(ROOT)}: {says}")
            continue
        t0, folder = time.time(), copy_of(ROOT)
        try:
            module = put(text, other, folder)
            found = notice(folder, names.split(), not args.named)
        finally: shutil.rmtree(folder, ignore_errors=True)
        if not found: missed.append(n)
        print(f"{n:2d} {module}: {says}: " + (f"noticed by {found}" if found else "NOT NOTICED") + f" ({time.time()-t0:.0f} s)", flush=True)
    if args.list: return 0
    print(f"{len(chosen)-len(missed)} of {len(chosen)} faults are noticed"+(f"; not {missed}" if missed else ""))
    return bool(missed)


if __name__ == "__main__": sys.exit(main())
