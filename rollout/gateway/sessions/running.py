"""A request whose answers have not all ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.rollout.gateway.conversations import ChatMessage
from slipstream.rollout.gateway.sessions.continuing import PromptPlan
from slipstream.rollout.gateway.sessions.pairing import Expected
from slipstream.rollout.gateway.sessions.stored import ChainTurn, EndedTurn, SessionState
from slipstream.rollout.tokens.conversation.sameness import Mark
from slipstream.rollout.tokens.turn_entries import Entry, TurnType


@dataclass(eq=False, kw_only=True)
class RunningRequest:
    """A request whose answers have not all ended: a turn, or several that answer the same prompt.

    Identity counts: a retry gets the same object.
    """

    session: str
    input_ids: Sequence[int]
    """The ids that go to the engine in place of ``Arrival.prompt_ids``."""
    sampling: Mapping[str, object]
    """The sampling parameters that go to the engine in place of ``Arrival.sampling``."""
    turn_type: TurnType
    reason: str
    """Why it is a side turn."""
    entries: Sequence[Entry] = ()
    """Entries that the arrival itself adds to the journal: next states of earlier turns."""
    request: str
    """Id of the request that has begun it. A request that joins it gets the same answer."""
    key: str
    home: SessionState
    digest: bytes
    retries: int
    prompt: PromptPlan
    marks: Sequence[Mark]
    """Digests of the messages of the prompt."""
    ends_session: bool
    arrived_s: float
    previous: str
    named: bool = False
    """Later requests can name its answer."""
    open: set[int]
    """Answers that have not ended, by their places."""
    expected: list[Expected] = field(default_factory=list[Expected])
    stored: dict[int, tuple[ChainTurn, int]] = field(default_factory=dict[int, tuple[ChainTurn, int]])
    """Answers without a number by their places, each with the position of its entry in those of ``end``."""
    ended: dict[int, EndedTurn] = field(default_factory=dict[int, EndedTurn])
    """What rewards need of such answers, by their places. The numbers in it do not count."""
    reactions: dict[int, Sequence[ChatMessage]] = field(default_factory=dict[int, "Sequence[ChatMessage]"])
    """Next states of such answers by their places, where they have come already."""
