"""Messages between the driver and its collectors.

    driver ──► collector    Down: groups to collect or to give up, prompts to evaluate, the engines
    collector ──► driver    Up: what is new of each episode, verdicts on groups, the collector's status

A message travels as one frame (``system.frames``) over the collector's only connection; its payload are the
chunks of all events or assignments, in their order. The end of the connection ends the assignments: nothing
is ever sent twice, and what a collector has not sent is lost with it.
"""

from typing import Annotated

import msgspec

from slipstream.rollout.engine.routing import PoolStatus, Routing
from slipstream.rollout.system.frames import U32, Natural, decode_key
from slipstream.rollout.tokens.evaluated_set import EvaluatedSet
from slipstream.rollout.tokens.named_numbers import NamedNumbers
from slipstream.rollout.tokens.trajectory import Prompt, RewardParts

PIECE, ANSWERED, JUDGED = range(3)
"""Kinds of an event: a part of an unfinished episode, a trajectory without its reward, and one with it."""

TRAIN, FILTERED, FAILED = range(3)
"""Verdicts on a group: it is complete and is to be trained, the recipe's filter or its workflow rejects it,
or one of its episodes has failed as often as is allowed."""

FRAME_BYTES = 16 * 2**20
"""Number of bytes of chunks from which a frame takes no further chunk. After a long stand-still of a
connection, a frame of everything that waits could be longer than any frame may be."""

Kind = Annotated[int, msgspec.Meta(ge=PIECE, le=JUDGED)]

NOTHING = msgspec.Raw(b"\xc0")
"""The encoded None."""


class Event(msgspec.Struct, array_like=True, gc=False):
    """A new part of one episode of an assigned group."""

    group: int
    assignment: int
    """Number of the assignment. Events of an assignment that has ended are void."""
    sample: Natural
    kind: Kind
    header: msgspec.Raw = NOTHING
    """Encoded ``PieceHeader`` of a piece, or ``TrajectoryHeader``."""
    base: Natural = 0
    """Number of pieces of the episode that stand; those from here on are void. The chunk continues them."""
    size: U32 = 0
    """Bytes of the event's chunk in the payload of the frame; 0: none."""
    crc: U32 = 0


class GroupVerdict(msgspec.Struct, array_like=True, gc=False):
    """The end of an assigned group, after all of its events."""

    group: int
    assignment: int
    verdict: Annotated[int, msgspec.Meta(ge=TRAIN, le=FAILED)]
    note: str = ""
    """Reason of a failure."""


class FailedAttempt(msgspec.Struct, array_like=True, gc=False):
    """An attempt at an episode that has failed, for the user."""

    prompt: int
    attempt: int
    """From 1."""
    error: str


class Evaluated(msgspec.Struct, array_like=True, gc=False):
    """The result of one evaluation episode, or of a whole evaluation by a function."""

    task: int
    reward: float | None
    """None: the episode has failed."""
    response_length: int
    note: str
    """Reason of a failure."""
    reward_parts: RewardParts = ()
    is_truncated: bool = False
    sets: list[EvaluatedSet] = []
    """A whole evaluation has these, and no reward."""
    metrics: NamedNumbers = ()


class Status(msgspec.Struct, array_like=True, gc=False):
    """State of a collector."""

    pool: PoolStatus
    judging: int
    """Questions that wait for a judge or are being judged."""
    judging_s: float
    """Age of the oldest of them, in seconds."""


class Up(msgspec.Struct, array_like=True, gc=False):
    """A message of a collector."""

    events: list[Event] = []
    verdicts: list[GroupVerdict] = []
    released: Natural = 0
    """Number of episodes that the engines are done with since the last message."""
    failed: list[FailedAttempt] = []
    evaluated: list[Evaluated] = []
    status: Status | None = None
    fatal: str = ""
    """Reason why the run cannot go on: no engine serves, or no judge can be started."""
    flushed: int | None = None
    """Number of the last request to write the episode log out that was met."""


class PriorSample(msgspec.Struct, array_like=True, gc=False):
    """The part of an episode that exists already, from a collector or a driver that is gone."""

    sample: Natural
    kind: Kind
    """Kind of its last event."""
    header: msgspec.Raw
    """Encoded ``TrajectoryHeader``; nothing for an episode in pieces."""
    pieces: list[tuple[U32, msgspec.Raw]]
    """Bytes of each chunk in the payload, and its ``PieceHeader``, which a whole trajectory does not need."""


class Assignment(msgspec.Struct, array_like=True, gc=False):
    """One group to collect. Ends with its verdict, with its cancellation or with the connection."""

    group: int
    number: int
    """Over the life of the driver, from 1."""
    version: int
    """Policy version at admission."""
    prompt: Prompt
    prior: list[PriorSample] = []


class Question(msgspec.Struct, array_like=True, gc=False):
    """One evaluation episode to run greedily, or a whole evaluation for the recipe's function."""

    task: int
    prompt: Prompt | None
    """None: a whole evaluation."""
    version: int = 0
    """Policy version of the trainer; the function is given it as the number of the rollout."""
    step: int = 0
    """Number of training steps that led to that version."""
    sample: int = 0
    """Number of the episode among those of its prompt, from 0."""


class LostGroup(msgspec.Struct, array_like=True, gc=False):
    """A group that has ended untrained, for the episode log. Its loss is on disk."""

    group: int
    loss: str
    """``control.ends.Loss``."""
    reason: str
    """Reason of the loss, for the user; empty: there is none to show."""
    step: int
    """Training step that was under way, from 1."""
    version: int
    """Policy version of the trainer."""
    lags: list[tuple[int, int]]
    """(policy version, lag) of the versions of its tokens."""
    prompt: Prompt
    samples: Natural
    """Number of its episodes."""
    recorded: list[PriorSample]
    """Its episodes of which something is recorded."""


class Down(msgspec.Struct, array_like=True, gc=False):
    """A message of the driver. Its payload: the chunks of the assignments, then those of the lost groups."""

    assignments: list[Assignment] = []
    cancelled: list[tuple[int, int]] = []
    """(group, assignment) of the groups to give up."""
    questions: list[Question] = []
    withdrawn: list[int] = []
    """Tasks of evaluations that are not needed any more."""
    routing: Routing | None = None
    lost: list[LostGroup] = []
    evaluates_from: int | None = None
    """Evaluations of this training step and of later ones are still to come: any of them that is in the
    episode log was done before a restart, and is done again."""
    flush: int | None = None
    """Number of a request to write the episode log out, which ``Up.flushed`` answers."""


class BlockedReport(msgspec.Struct):
    """The last words of a collector that stands still, as JSON, over a request of their own."""

    group: int | None
    """Group whose workflow stands in the way; None: not known."""
    traceback: str


UP = msgspec.msgpack.Decoder(Up)
DOWN = msgspec.msgpack.Decoder(Down, dec_hook=decode_key)
BLOCKED = msgspec.json.Decoder(BlockedReport)
