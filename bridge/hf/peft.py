"""The folder of a low-rank adapter as PEFT writes and reads it: a config, and one file of factors.

PEFT's names of the factors are ``base_model.model.{module}.lora_A.weight`` and ``lora_B.weight``.
"""

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  # bare os.PathLike
from torch import Tensor

from slipstream.bridge.hf.files import HFCheckpoint, sync
from slipstream.bridge.hf.peft_config import CONFIG, WEIGHTS, PeftIndex


class PeftFolder(PeftIndex):
    """An adapter that PEFT or ``write_peft`` has written. Its file is memory-mapped.

    with PeftFolder(path) as adapter:
        adapter.scale, adapter.names, adapter.tensor(name)
    """

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        self._tensors = self._stack.enter_context(HFCheckpoint(self.stored))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def tensor(self, name: str) -> Tensor:
        """Return a view into the file, valid inside the ``with`` block."""
        return self._tensors.tensor(name)


def write_peft(tensors: Mapping[str, Tensor], config: Mapping[str, object], folder: Path) -> None:
    """Write an adapter. ``tensors``: by PEFT's names; several may be the same tensor.

    The folder is made under a temporary name and renamed when it is complete and on disk.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # Safetensors refuses tensors that share memory.
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()},
        partial / WEIGHTS,
        {"format": "pt"},
    )
    (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    for path in (*partial.iterdir(), partial):
        sync(path)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    sync(folder.parent)
