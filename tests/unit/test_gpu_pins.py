"""The exact versions of the GPU environment against everything that can be known of them without an index."""

import tomllib
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from slipstream.configs.installed.environment import PINS, pinned
from tests.environment import ROOT

TARGET = {
    "python_version": "3.12",
    "python_full_version": "3.12.9",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
}
"""Values of the markers on the machines that the versions are for."""


def violated(requirements: list[str], extras: tuple[str, ...] = ("",)) -> list[str]:
    """The requirements that hold on the target and that the exact versions do not satisfy."""
    pins = pinned("gpu")
    wrong = []
    for text in requirements:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker and not any(marker.evaluate({**TARGET, "extra": extra}) for extra in extras):
            continue
        version = pins.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{text} (pinned: {version})")
    return wrong


def test_the_pins_satisfy_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert not violated([*project["dependencies"], *extras["gpu"], *extras["dev"]])


def installed_alike() -> list[str]:
    """The pinned packages that are installed here in the same version."""
    alike = []
    for name, version in pinned("gpu").items():
        try:
            if distribution(name).version.partition("+")[0] == version:
                alike.append(name)
        except PackageNotFoundError:
            continue
    return alike


def test_the_pins_satisfy_every_package_that_is_installed_here_in_the_same_version():
    names = installed_alike()
    assert {"sglang", "transformers", "ray"} <= set(names)
    wrong = {name: violated(distribution(name).requires or []) for name in names}
    assert not {name: what for name, what in wrong.items() if what}


def test_a_requirement_that_is_not_met_is_noticed():
    assert violated(["numpy>=2.4", "numpy<3", 'nothing-of-this-name; python_version < "3.12"']) == [
        f"numpy>=2.4 (pinned: {pinned('gpu')['numpy']})"
    ]


@pytest.mark.parametrize(
    "name", ["torch", "sglang", "transformers", "tokenizers", "ray", "transformer-engine"]
)
def test_both_kinds_of_environment_have_the_same_libraries(name):
    assert pinned("gpu")[name] == pinned("cpu")[name]


def test_both_kinds_of_environment_have_the_same_megatron_on_python_3_12():
    line = f"megatron-core=={pinned('gpu')['megatron-core']}; python_version >= '3.12'"
    assert line in PINS["cpu"].read_text().splitlines()


def test_the_pins_are_exact_and_sorted():
    lines = [line for line in PINS["gpu"].read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == len(pinned("gpu"))
    assert lines == sorted(lines, key=lambda line: line.partition("==")[0])
