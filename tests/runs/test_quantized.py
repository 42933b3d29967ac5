"""A run on a checkpoint in block fp8: it begins with its values, and exports are unquantized."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.bridge.hf.quantized import dequantized_fp8, quantized_fp8
from tests.quantized_models import FP8
from tests.runs.conftest import LaunchedRun
from tests.runs.test_run import finish, records, summary


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def quantized(policy: Path, folder: Path) -> None:
    """Copy an HF checkpoint, with its projections in fp8."""
    shutil.copytree(policy, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = tensors_of(policy)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantized_fp8(tensors[name], ue8m0=False)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))


@pytest.mark.slow  # test_publishing_matrix.py has trainer and engine, test_bridge_quantization.py the values
def test_a_run_begins_with_the_values_of_a_quantized_checkpoint_and_exports_unquantized(
    inputs, tmp_path, launch
):
    quantized(inputs / "policy", tmp_path / "fp8")
    run: LaunchedRun = launch("run.steps=2", f"model.path={tmp_path / 'fp8'}")
    assert finish(run) == 0, run.output()
    # Every version of every engine is compared with the trainer, the initial one too.
    assert summary(run)["engine_restarts"] == 0
    assert len(records(run)) == 2
    begun, stored = tensors_of(run.folder / "engine-model"), tensors_of(tmp_path / "fp8")
    for name in (name for name in stored if name.endswith("_proj.weight")):
        assert (begun[name] == dequantized_fp8(stored[name], stored[f"{name}_scale_inv"], (128, 128))).all()
    for folder in ("engine-model", "checkpoint-hf"):
        config = json.loads((run.folder / folder / "config.json").read_text())
        assert "quantization_config" not in config, folder
