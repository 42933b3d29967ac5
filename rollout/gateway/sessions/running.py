"""A request whose answers have not all ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.rollout.gateway.conversations import Begun, ChatMessage
from slipstream.rollout.gateway.sessions.continuing import PromptPlan
from slipstream.rollout.gateway.sessions.pairing import Expected
from slipstream.rollout.gateway.sessions.stored import ChainTurn, SessionState
from slipstream.rollout.tokens.conversation.sameness import Mark


@dataclass(eq=False, kw_only=True)
class Running(Begun):
    """A request whose answers have not all ended."""

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
    reactions: dict[int, Sequence[ChatMessage]] = field(default_factory=dict[int, "Sequence[ChatMessage]"])
    """Next states of such answers by their places, where they have come already."""


def running_of(begun: Begun) -> Running:
    """Return a request as sessions know it. Raises TypeError if they have not begun it."""
    if not isinstance(begun, Running):
        raise TypeError(f"expected what begin() has returned, but this is a {type(begun).__name__}")
    return begun
