"""Shared by all tests: what needs a GPU is skipped where there is none, and nothing else is."""

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.path.exists("/dev/nvidiactl"):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
