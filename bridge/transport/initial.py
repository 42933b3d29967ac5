"""The weights that an engine has started with, as the files of a replica hold them.

Trainer and engine each read them from a checkpoint of their own node. A patch may then start from what no one
has sent.
"""

from math import prod
from pathlib import Path
from typing import Protocol

import torch

from slipstream.bridge.hf.files import HFCheckpoint
from slipstream.bridge.hf.index import ITEMSIZE, StoredTensor, stored_tensors
from slipstream.bridge.transport.patches import ByteArray


class TensorsOfAFile(Protocol):
    """What a file of a replica holds."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def dtype(self) -> str: ...


class StartingWeights:
    """The HF checkpoint from which the engines of a run start. Its index is read when it is first needed."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._stored: dict[str, StoredTensor] | None = None

    def copy_into(self, target: ByteArray, file: TensorsOfAFile) -> None:
        """Write the tensors of ``file`` into ``target``, in its dtype.

        A tensor that the checkpoint lacks, or has in another shape, becomes zeros. Raises HfCheckpointError.
        """
        if self._stored is None:
            self._stored = stored_tensors(self._model)
        dtype, end = getattr(torch, file.dtype), 0
        with HFCheckpoint(self._stored) as checkpoint:
            for name, shape in zip(file.names, file.shapes, strict=True):
                start, end = end, end + prod(shape) * ITEMSIZE[file.dtype]
                stored = self._stored.get(name)
                if stored is None or stored.shape != shape:
                    target[start:end] = 0
                else:
                    weights = checkpoint.tensor(name).to(dtype).reshape(-1)
                    target[start:end] = weights.view(torch.uint8).numpy()
