"""What ``make test`` runs of these tests, and what ``make test-peers`` does, which has fetched the engines."""

import os


def pytest_ignore_collect(collection_path):
    """Skip the tests of engines without their releases. Programs that tests start are not read for examples."""
    if collection_path.name == "test_engines.py":
        return True if "RANKMESH_PEERS" not in os.environ else None
    return True if collection_path.suffix == ".py" and not collection_path.name.startswith("test_") else None
