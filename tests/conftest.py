"The longest files begin first, so that two processes end at about the same time; demonstrations that several files use are made once."
import pytest

LONG = ("test_many", "test_notebooks", "test_resume", "test_run", "test_demos_faults", "test_launch", "test_zero", "test_checkpoint", "test_checkpoint_eval")


@pytest.fixture(scope="session")
def shared_data(tmp_path_factory):
    "A data folder that all workers of a test session record into; the library's own locks let one record and the others wait."
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if base.name.startswith("popen-") else base)/"data"
    path.mkdir(exist_ok=True)
    return path


def pytest_collection_modifyitems(items):
    place = {name: k for k, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))  # stable: files and tests keep their order otherwise
