"""Which tests a machine's GPUs and packages let run."""

import ast

import pytest

from tests.conftest import gpus, lacking
from tests.environment import ROOT


@pytest.mark.parametrize(
    ("count", "packages", "present", "expected"),
    [
        (1, (), 0, "needs 1 GPU, and none can be used"),
        (1, (), 1, None),
        (2, (), 1, "needs 2 GPUs, and 1 can be used"),
        (2, ("numpy",), 8, None),
        (1, ("no_such_package", "numpy"), 1, "needs no_such_package beside the GPU"),
        (1, ("no_such_package",), 0, "needs 1 GPU, and none can be used"),
    ],
)
def test_a_lone_gpu_runs_what_it_can_and_the_rest_says_what_it_lacks(count, packages, present, expected):
    assert lacking(count, packages, present) == expected


@pytest.mark.parametrize(("visible", "expected"), [(None, 2), ("0", 1), ("0,1", 2), ("", 0), ("0,1,2,3", 2)])
def test_gpus_are_counted_without_a_driver(tmp_path, monkeypatch, visible, expected):
    for name in ("nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus(tmp_path) == expected
    assert gpus(tmp_path / "absent") == 0


def test_every_test_for_gpus_is_marked():
    files = list((ROOT / "tests/gpu").glob("test_*.py"))
    assert files
    for file in files:
        names = {
            target.id
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        assert "pytestmark" in names, file
