"The longest files begin first, so that two processes end at about the same time."
LONG = ("test_many", "test_notebooks", "test_resume", "test_run", "test_demos_faults", "test_launch", "test_zero", "test_checkpoint", "test_checkpoint_eval")


def pytest_collection_modifyitems(items):
    place = {name: k for k, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))  # stable: files and tests keep their order otherwise
