"""Which tests a run leaves out; one thread for each worker, the longest files first, so that the workers end at about the
same time, and demonstrations that several files use, made once. What a test or a file wrote is deleted when it has passed, so that
the disk holds a file's folders at a time."""
import gc
import os
import shutil
import sys
import zlib
from functools import cache
from pathlib import Path

import pytest

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # read when torch and numpy are imported, and inherited: workers side by side fill the cores
# A run has two threads by default. One that waits for the other would spin on a core that somebody else needs, ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Tests end processes, not machines, so that nothing has to be forced to the disk: a fifth of the time of small runs, more on a slow disk.
os.fsync = lambda fd: None

LEFT = Path(__file__).parent/"later.txt", Path(__file__).parent/"slow.txt"   # what the short run leaves out, and what `more` leaves out, too

LONG = ("test_notebooks", "test_many", "test_sweep", "test_validity", "test_libero_env", "test_resume", "test_run",
        "test_ranks", "test_player", "test_demos_faults", "test_pool", "test_launch", "test_plugins",
        "test_libero_data", "test_checkpoint_eval", "test_algos", "test_zero", "test_door", "test_libero_assets",
        "test_pages_twice", "test_far_algos", "test_far_runs", "test_vlm", "test_libero_wide", "test_eyes",
        "test_checkpoint", "test_gym", "test_cl", "test_readme", "test_api", "test_crl", "test_crl_held",
        "test_practice_held", "test_workers", "test_stored")


@pytest.fixture(scope="session")
def shared_data(tmp_path_factory):
    "A data folder that all workers of a test session record into; the library's own locks let one record and the others wait."
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if base.name.startswith("popen-") else base)/"data"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture(params=["far", "cuda"])
def device(request):
    "The pretended GPU, and a real one where there is one; a test file that asks for it imports `far` at its top."
    import far
    if why := far.unfit(request.param): pytest.skip(why)
    with far.device(request.param) as there: yield there


def forget_plugins():
    "Take out plugins whose files are deleted: environments' processes would be told to import them."
    plugins = sys.modules.get("clvla.core.plugins")
    for name,plugin in list(plugins._loaded.items()) if plugins else ():
        if plugin.kind == "file" and not Path(name).is_file():
            del plugins._loaded[name]
            plugins._forget(plugin.module)


@pytest.fixture(autouse=True)
def plugins_of_a_test():
    "A test's plugins are forgotten with its folder, which is deleted before this ends."
    yield
    forget_plugins()


@pytest.fixture(scope="module", autouse=True)
def folders_of_a_file(request, tmp_path_factory):
    "Folders that a file's fixtures made (hundreds of MB of runs) are deleted after it, unless one of its tests failed."
    base, failed = tmp_path_factory.getbasetemp(), request.session.testsfailed
    before = set(base.iterdir())
    yield
    if request.session.testsfailed > failed: return
    for path in set(base.iterdir())-before:
        if path.name != "data": shutil.rmtree(path, ignore_errors=True)
    forget_plugins()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    "Python looks for no garbage while the test files are imported, all of which stays."
    gc.disable()
    try: return (yield)
    finally: gc.enable()


def pytest_collection_finish():
    "What all test files have imported is frozen: else each collection of garbage, one at the end of each run, goes through it."
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    config.addinivalue_line("markers", "slurm: needs SLURM's daemons on this machine (tests/slurm_nodes.py)")
    config.addinivalue_line("markers", "browser: opens pages in the machine's Chromium (tests/browser_help.py)")


def pytest_addoption(parser):
    group = parser.getgroup("clvla")
    group.addoption("--all", dest="level", action="store_const", const=2, help="every test; so it is where a file of tests is named")
    group.addoption("--more", dest="level", action="store_const", const=1, help="without the tests of tests/slow.txt, as .ci/run")
    group.addoption("--short", dest="level", action="store_const", const=0, help="without those of tests/later.txt and tests/slow.txt, also where a file is named")


@cache
def entries_of(path):
    "Entries of a list of tests: a file, a test of all its parameters, a test of some, or pages."
    rows = (line.split(maxsplit=1) for line in path.read_text().splitlines() if line and line[0] != "#")
    return tuple(f"tests/{name}" for _, name in rows)


def lists_left(config):
    "Lists whose tests this run leaves out: as it says itself, and none where somebody named a file or a test."
    named = all(Path(arg.split("::")[0]).is_file() for arg in config.args)
    level = config.getoption("level")
    return LEFT[(2 if named else 0) if level is None else level:]


def pytest_report_header(config):
    left = lists_left(config)
    slow = [f"the tests of {' and '.join(f'tests/{p.name}' for p in left)} are left out; --all (./clvla.sh test all) takes all, --more "
            "(./clvla.sh test more) those of tests/later.txt"] if left else []
    browser = [] if with_browser(config) else ["the tests of the marker browser are left out; -m browser takes them"]
    return slow+browser


def pytest_ignore_collect(collection_path, config):
    "A file that this run leaves out whole is not imported."
    if any(f"tests/{collection_path.name}" in entries_of(p) for p in lists_left(config)): return True


def with_browser(config):
    "Whether this run takes the tests in a browser: where somebody named the marker, a file or a test."
    return "browser" in config.getoption("-m") or all(Path(arg.split("::")[0]).is_file() for arg in config.args)


def leave_out(config, items):
    "Deselect the tests of the lists; UsageError for an entry that names no test of a file that was collected whole."
    known = {}
    for path in LEFT:
        entries, used = entries_of(path), set()
        for item in items:
            parts = item.nodeid.split("[")[0], item.nodeid, item.nodeid.split("::")[0]
            found = [e for e in entries if e in parts or e.endswith("*") and item.nodeid.startswith(e[:-1])]
            used.update(found)
            if found: known.setdefault(path, set()).add(item.nodeid)
        files = {item.nodeid.split("::")[0] for item in items}
        there = {e: (path.parents[1]/e.split("::")[0]).is_file() for e in entries}
        wrong = [e for e in entries if not there[e] or e not in used and e.split("::")[0] in files]
        if wrong and not any("::" in arg for arg in config.args):
            raise pytest.UsageError(f"tests/{path.name} names {wrong[0]}, and there is no such test; correct the line")
    left = set().union(*(known.get(p, ()) for p in lists_left(config)))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
    items[:] = [item for item in items if item.nodeid not in left]


@pytest.hookimpl(tryfirst=True)   # before -k and -m have taken out others
def pytest_collection_modifyitems(config, items):
    leave_out(config, items)
    if not with_browser(config):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("browser")])
        items[:] = [item for item in items if not item.get_closest_marker("browser")]
    place = {name: k for k, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))  # stable: files and tests keep their order otherwise


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    "Tests of a file stay in one worker; the pages, a third of all work, are three parts instead of one."
    from xdist.scheduler import LoadFileScheduling

    class Parts(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return f"{file}-{zlib.crc32(nodeid.encode())%3}" if "::test_notebook[" in nodeid else file
    return Parts(config, log) if config.getvalue("dist") == "loadfile" else None


def session_threads():
    "Let torch compute with the threads that the session began with."
    if "torch" in sys.modules: sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def same_threads():
    "A run sets the threads of its process, and the rounding of a sum depends on them: neither a fixture's run nor a test's is felt in the next test."
    session_threads()
    yield
    session_threads()
