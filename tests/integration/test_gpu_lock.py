"""The exact versions of the GPU environment resolve for Linux on x86-64, on a machine without a GPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.configs.installed.environment import PINS
from tests.environment import ROOT, environment
from tests.lock_check import NotResolved, resolve


def test_the_versions_resolve_as_they_are():
    ended = subprocess.run(
        [sys.executable, "-m", "tests.lock_check"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.fullmatch(r"ok 2\d\d packages", ended.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("package", "version"), [("numpy", "2.4.6"), pytest.param("protobuf", "7.36.2", marks=pytest.mark.slow)]
)
def test_a_version_that_a_package_forbids_is_refused(package: str, version: str, tmp_path: Path):
    pins = tmp_path / "pins.txt"
    text = PINS["gpu"].read_text()
    pins.write_text(re.sub(rf"(?m)^{package}==.*$", f"{package}=={version}", text))
    assert pins.read_text() != text
    with pytest.raises(NotResolved, match=package):
        resolve(pins)
