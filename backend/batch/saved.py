"""A batch as a file: the arrays as safetensors, everything else as MessagePack in one of them. No pickle.

chunks, sizes, groups   as in ``EncodedBatch``
fields                  uint8: MessagePack of ``_Fields``
"""

from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from slipstream.backend.batch.train_batch import EncodedBatch
from slipstream.rollout.tokens.record import CorruptRecord
from slipstream.rollout.tokens.trajectory import TrajectoryHeader

FORMAT = "slipstream-batch-1"

BATCHES = "batches"
"""Folder of saved batches in the run folder of a rollout half."""

BATCH_FILES = "step-*.safetensors"
"""Names of saved batches; their order is that of the steps."""


class BatchFileError(ValueError):
    """A file does not hold a saved batch."""


_Fields = tuple[
    str,
    int,
    tuple[TrajectoryHeader, ...],
    dict[int, int] | None,
    dict[int, tuple[float | None, ...]],
    tuple[float, ...] | None,
    tuple[tuple[int, ...], ...] | None,
    float,
    float | None,
]
"""The format, then ``version``, ``headers``, ``lags``, ``turn_advantages``, ``given_rewards``,
``response_masks``, ``rate_factor`` and ``mismatch`` of the batch."""


def batch_path(folder: Path, step: int) -> Path:
    """Return the file of the batch of a training step, the first of which is 1."""
    return folder / f"step-{step:06d}.safetensors"


def saved_batch(batch: EncodedBatch) -> bytes:
    """Return the content of a batch's file."""
    fields: _Fields = (
        FORMAT,
        batch.version,
        batch.headers,
        None if batch.lags is None else dict(batch.lags),
        {place: tuple(by_turn) for place, by_turn in batch.turn_advantages.items()},
        batch.given_rewards,
        batch.response_masks,
        batch.rate_factor,
        batch.mismatch,
    )
    return save(
        {
            "chunks": batch.chunks,
            "sizes": np.array(batch.sizes, np.int64),
            "groups": np.asarray(batch.group_N, np.int64),
            "fields": np.frombuffer(msgspec.msgpack.encode(fields), np.uint8),
        }
    )


def read_batch(path: Path) -> EncodedBatch:
    """Return the batch of a file, as it was saved. Raises BatchFileError and OSError."""
    try:
        arrays = load(path.read_bytes())
        fields = msgspec.msgpack.decode(arrays["fields"].tobytes(), type=_Fields)
        found, version, headers, lags, advantages, rewards, masks, rate_factor, mismatch = fields
        sizes = tuple(arrays["sizes"].tolist())
        if found != FORMAT or not len(sizes) == len(headers) == len(arrays["groups"]):
            raise BatchFileError(f"{path}: {found!r} found, a whole batch of {FORMAT!r} expected")
        batch = EncodedBatch(
            version,
            headers,
            arrays["chunks"],
            sizes,
            arrays["groups"],
            lags=lags,
            turn_advantages=advantages,
            given_rewards=rewards,
            response_masks=masks,
            rate_factor=rate_factor,
            mismatch=mismatch,
        )
        batch.decoded()
    except (SafetensorError, KeyError, msgspec.MsgspecError, CorruptRecord, UnicodeDecodeError) as error:
        raise BatchFileError(
            f"{path}: expected a batch that --debug-rollout-only has saved: {type(error).__name__}: {error}"
        ) from error
    return batch
