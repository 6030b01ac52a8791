"""One thread for each worker, the longest files first, so that the workers end at about the same time, and demonstrations that
several files use, made once. What a test or a file wrote is deleted when it has passed, so that the disk holds a file's folders at a time."""
import gc
import os
import shutil
import sys
import zlib
from pathlib import Path

import pytest

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # read when torch and numpy are imported, and inherited: workers side by side fill the cores
# A run has two threads by default. One that waits for the other would spin on a core that somebody else needs, ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

LONG = ("test_notebooks", "test_many", "test_libero_env", "test_resume", "test_run", "test_ranks", "test_player", "test_demos_faults",
        "test_pool", "test_launch", "test_plugins", "test_libero_data", "test_checkpoint_eval", "test_algos", "test_zero", "test_door",
        "test_libero_assets", "test_pages_twice", "test_far_algos", "test_far_runs", "test_vlm", "test_libero_wide", "test_eyes", "test_checkpoint",
        "test_gym", "test_cl")


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


def pytest_collection_finish():
    "What all test files have imported is frozen: else each collection of garbage, one at the end of each run, goes through it."
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
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
