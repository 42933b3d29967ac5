"""The folder of a low-rank adapter in PEFT's format, without its values: which adapters can be read, which
tensors one has, and how ours are described. Imports no torch.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from slipstream.bridge.hf.index import HfCheckpointError, tensors_in

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

PLAIN: Mapping[str, tuple[object, ...]] = {
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alpha_pattern": (None, {}),
    "rank_pattern": (None, {}),
    "fan_in_fan_out": (None, False),
    "target_parameters": (None, []),
    "megatron_config": (None,),
}
"""Fields of PEFT's LoraConfig that change what an adapter computes or holds, and the values with which it is
W + scale * B A of linear layers."""


class PeftError(ValueError):
    """A folder does not hold an adapter that can be read; the message says what was expected."""


def peft_config(*, rank: int, alpha: float, leaves: Sequence[str], base: str) -> dict[str, object]:
    """Return the fields of PEFT's LoraConfig. ``leaves``: last parts of the names of the adapted modules."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": list(leaves),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def scale_of(config: Mapping[str, object]) -> float:
    """Return the factor of B A that a config implies. Raises PeftError for an adapter of another kind."""
    if str(config.get("peft_type")).upper() != "LORA":
        raise PeftError(f"peft_type is {config.get('peft_type')!r}, expected 'LORA'")
    if unsupported := [f"{name}: {config[name]!r}" for name in PLAIN if config.get(name) not in PLAIN[name]]:
        raise PeftError(
            f"{', '.join(unsupported)}: only adapters that are W + scale * B A of linear layers can be read"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not _is_number(rank) or not _is_number(alpha):
        raise PeftError(f"r is {rank!r} and lora_alpha is {alpha!r}, expected positive numbers")
    rank, alpha = cast("float", rank), cast("float", alpha)
    return alpha / rank**0.5 if config.get("use_rslora") else alpha / rank


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def read_config(folder: Path) -> dict[str, object]:
    """Return the config of an adapter. Raises PeftError."""
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PeftError(f"{folder} holds no adapter: expected {CONFIG} and {WEIGHTS} in it") from None
    except (OSError, ValueError) as error:
        raise PeftError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise PeftError(f"{file} cannot be read: expected a JSON object")
    return cast("dict[str, object]", config)


class PeftIndex:
    """The names and shapes of an adapter's tensors, and the factor of B A."""

    def __init__(self, folder: Path) -> None:
        """Raises PeftError unless ``folder`` holds an adapter that can be read."""
        self.folder = folder
        config = read_config(folder)
        try:
            self.scale = scale_of(config)
        except PeftError as error:
            raise PeftError(f"{folder / CONFIG}: {error}") from None
        file = folder / WEIGHTS
        if not file.is_file():
            raise PeftError(f"{folder} has no {WEIGHTS}; other formats, such as pickles, are not read")
        try:
            self.stored = tensors_in(file)
        except HfCheckpointError as error:
            raise PeftError(str(error)) from error

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored[name].shape


def peft_folder(hf: Path) -> Path:
    """Return the folder of an adapter beside the merged weights in ``hf``: PEFT's loader, and that of
    transformers, would apply an adapter in one folder with the weights once more.

    >>> peft_folder(Path("runs/my-run/checkpoint-hf")).name
    'checkpoint-peft'
    """
    return hf.with_name(f"{hf.name.removesuffix('-hf')}-peft")
