"""Shared by all tests: a test runs where the GPUs and packages that it needs are, else it is skipped."""

import gc
import importlib.util
import os
import re
from contextlib import suppress
from pathlib import Path

import pytest

with suppress(ImportError):  # a machine for the tests on GPUs may lack it
    from hypothesis import settings

    from tests.tries import EXAMPLES, tries

    # Where CI is set, hypothesis has loaded a profile that draws the same examples each time.
    loaded = settings.get_profile(settings.get_current_profile_name())
    # No deadline: an example may wait for a busy core.
    settings.register_profile("ours", tries(EXAMPLES, loaded, deadline=None))
    settings.load_profile("ours")

os.environ["SLIPSTREAM_SITE"] = ""  # no test depends on the site of who runs it
os.environ.setdefault("OMP_NUM_THREADS", "1")
"""One thread for the tensors of each process, here and in whatever a test starts: models are tiny, and
further threads wait for each other on a busy core."""

gc.disable()  # until all modules are imported

DEVICES = Path("/dev")


def gpus(devices: Path = DEVICES) -> int:
    """The number of GPUs that this process may use, without loading a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not devices.is_dir() or not (devices / "nvidiactl").exists():
        return 0
    present = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.iterdir())
    return present if visible is None else min(present, len([name for name in visible.split(",") if name]))


def lacking(count: int, packages: tuple[str, ...], present: int) -> str | None:
    """Why a test that needs ``count`` GPUs and these packages cannot run beside ``present`` GPUs.

    None: it runs. Packages only count on a machine with GPUs: elsewhere the GPUs are the reason.
    """
    if present < count:
        return f"needs {count} GPU{'s' * (count > 1)}, and {present or 'none'} can be used"
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(absent)} beside the GPU" if absent else None


def pytest_collection_finish() -> None:
    """Look for garbage from now on, and never at the million objects that imports have made."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    present = gpus()
    for item in items:
        # The first one is the closest: a test's own mark comes before its module's.
        for mark in item.iter_markers("gpu"):
            reason = lacking(mark.args[0] if mark.args else 1, mark.args[1:], present)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
            break
