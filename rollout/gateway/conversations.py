"""The interface of endpoints and sessions: a request is placed in a session, and its answer is recorded.

    running = conversations.begin(arrival)      # which ids go to the engine, in which session, as which turn
    ... the engine generates; the answer is parsed for the client ...
    entries = conversations.end(running, answer)
    numbers = log.append(entries);  log.append(conversations.recorded(running, choice, numbers))
    await log.durable(numbers[-1])     # and only then does the last byte of the answer leave

Plain data and protocols: nothing here knows HTTP, engines or disks. ``serving/`` calls, ``sessions/`` decides
and the journal records.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.rollout.gateway.source import Finished
from slipstream.rollout.tokens.turn_entries import Entry, Turn, TurnType

ChatMessage = dict[str, Any]
"""A message as the chat template reads it: `role`, `content`, and with an assistant `tool_calls`, whose
`function.arguments` are JSON values, and `reasoning_content`."""


@dataclass(frozen=True, slots=True)
class User:
    """The holder of an API key."""

    name: str
    """Name of the key, which stands in the journal. The key itself is never stored."""
    session: str | None = None
    """The one session that the key was made for."""
    turn_type: TurnType = TurnType.MAIN
    """Type of turns whose requests do not say."""


class Template(Protocol):
    """The chat template with the tools and settings of one request."""

    def render(self, messages: Sequence[ChatMessage], *, answer: bool) -> str:
        """Return the text of messages; with ``answer`` it ends where the policy's answer begins.

        Raises ValueError if the template refuses the messages.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a part of a rendered text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of a client, and the prompt that it wants to have answered.

    The handler of requests makes it of what the request says about itself, and the endpoint adds the prompt.
    A request with several prompts arrives with each of them.
    """

    user: User
    session: str | None
    """The session that the client names by the gateway's own means; None: none."""
    turn_type: TurnType | None
    """Type that the client or a rule gives the turn; None: neither does, so that ``user.turn_type`` holds."""
    side_reason: str = ""
    """Why a rule takes the turn for a side turn; empty: none does."""
    ends_session: bool
    """No request of the session follows this one."""
    digest: bytes
    """Digest of the endpoint and the body. A retry has the same."""
    retries: int
    """How often the client says that it has sent this request before (``x-stainless-retry-count``)."""
    arrived_s: float
    """When the request arrived, by the clock by which sessions rest (``steady_s``)."""
    client_session: str | None = None
    """The session that an agent names by a header of its own; None: none."""
    request: str = ""
    """Id of the request, which its answer is named after."""
    previous: str = ""
    """Id of the request whose answer this one names as the one before; empty: it names none."""

    messages: Sequence[ChatMessage] = ()
    """As the template reads them. Empty where the client has sent text or ids instead of a chat."""
    prompt_ids: Sequence[int] | None = None
    """The whole prompt as it was sent, or tokenized anew. None: ``template`` encodes as much of ``text`` as
    is needed."""
    text: str | None = None
    """The whole prompt as rendered; None where the client has sent ids, or where no template made the ids."""
    template: Template | None = None
    """None where no template made the ids."""
    most_tokens: int = 0
    """Length of the longest prompt that leaves room for an answer."""
    sampling: Mapping[str, object] = field(default_factory=dict[str, object])
    """Sampling parameters under SGLang's names, without ``n``."""
    choices: int = 1
    """Number of answers to this prompt."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as it was sampled and as the client got it."""

    choice: int
    """Its place among the answers to the same prompt, from 0."""
    tokens: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[tuple[int, int]]
    """(version, tokens) of the tokens, in order; they tile them."""
    finish: Finished | None
    """None: it was cut off."""
    text: str
    message: ChatMessage
    """The answer as the template will read it when the client repeats it."""
    cancelled: bool
    """The client has gone before the end."""
    ended_s: float = field(default=0.0)
    """By the same clock as ``Arrival.arrived_s``."""
    exchange: bytes = b""
    """JSON to be kept with the turn, so that later requests can name the answer; empty: they cannot."""


@dataclass(frozen=True, slots=True)
class NamedAnswer:
    """An answer that later requests can name."""

    session: str
    turn: int
    """Number of the entry of its turn."""
    previous: str
    """Id of the request whose answer it continues by name; empty: it continues none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientReward:
    """A reward as a client gives it. Exactly one of ``session``, ``request`` and ``call`` names the turn."""

    value: float
    session: str = ""
    turn: int | None = None
    """Place of the turn in the session, from 0; None: the newest turn, or with ``is_whole`` all of them."""
    is_whole: bool = False
    """The reward is that of the whole session, and its main turns share it by ``discount``."""
    discount: float | None = None
    """Factor of a main turn's reward for each main turn that follows it; None: as the recipe has it."""
    request: str = ""
    """Id of the request that the turn has answered."""
    choice: int | None = None
    """Which of several answers to that request; None: there is one."""
    call: str = ""
    """Id of a tool call in the answer."""
    name: str = ""
    once: str = ""
    """Name of this giving, which counts once however often the client sends it; empty: none."""


@dataclass(slots=True)
class RewardedTurn:
    """A turn that a reward was given to."""

    session: str
    turn: int
    """Its place in the session, from 0."""
    request: str
    value: float
    outcome: str = ""
    """What the driver has made of the reward; empty: it has not said so yet."""


@dataclass(slots=True)
class TakenReward:
    """A reward that was taken, and the turns that it went to."""

    session: str
    turns: Sequence[RewardedTurn]
    entries: Sequence[Entry]
    """What is to be recorded, an entry for each turn. Empty: the same giving was recorded before."""
    digest: bytes = b""
    waits_for: int = 0
    """Sessions of its group without a reward. Above 0, the reward is held until they have theirs."""
    numbers: Sequence[int] = ()
    """Numbers of its entries, once the journal has given them. Empty after a restart."""


@dataclass(frozen=True, slots=True)
class ListedTurn:
    """A turn in a list."""

    turn: int
    request: str
    choice: int
    is_main: bool
    versions: tuple[int, ...]
    """Policy versions of its tokens, in order."""
    calls: tuple[str, ...]
    rewards: Mapping[str, float]
    """Rewards that clients have given since the process started, by name."""


@dataclass(frozen=True, slots=True)
class ListedSession:
    """A session in a list."""

    session: str
    tags: Mapping[str, object]
    group: str
    ended: bool
    turns: Sequence[ListedTurn]


class PromptTooLong(ValueError):
    """A prompt leaves no room for an answer."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"the prompt has {tokens} tokens")
        self.tokens = tokens


class TooManySessions(RuntimeError):
    """A cap on sessions is reached, and nothing may be evicted."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        """``retry_after_s``: seconds until the first session ends that may make room."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnknownTurn(LookupError):
    """A session, or a turn of it, does not exist."""


class AmbiguousTurn(ValueError):
    """What a client names a turn by belongs to several turns."""


class GivenBefore(ValueError):
    """A client has used the name of a request for another one."""


class EntryLog(Protocol):
    """The journal, as far as the endpoints need it."""

    @property
    def last(self) -> int:
        """Number of the last entry; 0: there is none."""
        ...

    def append(self, entries: Sequence[Entry]) -> Sequence[int]:
        """Give entries their numbers, and begin to write them."""
        ...

    async def durable(self, number: int) -> None:
        """Wait until the entry of this number, and all before it, survive the end of the process."""
        ...

    async def turns(self, numbers: Sequence[int]) -> Sequence[Turn]:
        """Return the turns with these numbers. Raises UnknownTurn if one of them is not kept any more."""
        ...

    async def outcomes(self, numbers: Sequence[int]) -> Sequence[str]:
        """Return what the driver has made of the rewards with these numbers. An outcome is empty where the
        driver has not said so in time."""
        ...


class KeyRing(Protocol):
    """The API keys."""

    def user(self, key: str) -> User | None:
        """Return whose key it is, in constant time; None: nobody's. An empty text is a missing key."""
        ...
