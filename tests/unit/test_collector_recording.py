"""The record of an episode holds what its requests have been given, however they end."""

import asyncio

import pytest

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.collector.recording import Recording
from slipstream.rollout.record import PieceHeader, decode_chunks
from slipstream.rollout.trajectory import Finish

SAMPLING = SamplingConfig(max_new_tokens=9)


class Outbox:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.pieces: list[tuple[PieceHeader, bytes]] = []

    def piece(self, group, lease, sample, base, header, chunk) -> None:
        self.pieces.append((header, chunk))


class CancelledAtItsEnd:
    """Engines whose request is cancelled when its completion has ended, but nobody has been told yet."""

    async def generate(self, input_ids, sampling, completion, *, greedy=False, grown=None) -> None:
        completion.add(3, [1], [-1.0])
        grown()
        completion.add(3, [2, 3], [-2.0, -3.0])
        completion.finish = Finish.STOP
        raise asyncio.CancelledError


def test_a_completion_that_has_ended_as_its_request_is_cancelled_is_recorded_as_a_whole():
    """With its end, but without its last tokens, it would be taken for complete after a restart."""
    outbox = Outbox()
    recording = Recording(CancelledAtItsEnd(), outbox, group=0, lease=1, sample=0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(recording.generate([7], SAMPLING))
    tokens = [
        token for _, data in outbox.pieces for chunk in decode_chunks(data) for token in chunk.tokens.tolist()
    ]
    assert tokens == [1, 2, 3]
    assert outbox.pieces[-1][0].finish is Finish.STOP
