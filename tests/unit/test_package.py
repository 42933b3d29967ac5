"""The wheel: one top-level package with every module and every file that a run needs; the public names."""

from pathlib import Path
from zipfile import ZipFile

import pytest

import slipstream
from tests.environment import ROOT
from tests.wheels import build_wheel

PACKAGES = ("backend", "bridge", "configs", "rollout", "slurm")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files of the wheel."""
    with ZipFile(build_wheel(tmp_path_factory.mktemp("wheel"))) as wheel:
        return set(wheel.namelist())


def test_the_wheel_installs_one_package(names):
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"slipstream"}


def test_the_wheel_holds_every_file_of_the_product(names):
    files = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    api = {f"backend/api/{name}": name for name in ("__init__.py", "client.py", "py.typed")}
    expected = {f"slipstream/{api.get(file, file)}" for file in files}
    assert {name for name in names if name.startswith("slipstream/")} == expected


def test_the_wheel_holds_the_license(names):
    assert any(Path(name).name == "LICENSE" for name in names)


def test_every_public_name_can_be_imported_and_has_a_docstring():
    for name in slipstream.__all__:
        assert getattr(slipstream, name).__doc__, name


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        slipstream.Nothing  # noqa: B018
