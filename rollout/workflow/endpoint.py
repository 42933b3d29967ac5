"""The endpoint of an episode, as its workflow sees it: an agent talks to the policy as to any provider.

async with context.endpoint.open() as opened:
    ... somebody sends requests to opened.base_url with opened.api_key ...
    return opened.trajectories()
"""

from collections.abc import Awaitable, Sequence, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from slipstream.rollout.tokens.trajectory import Completion, Trajectory

ResultT = TypeVar("ResultT")


class NothingToTrain(RuntimeError):
    """No completion of an episode can be trained. The message says why."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One request of an episode, as the engines have answered it."""

    input_ids: tuple[int, ...]
    """Token ids that the completion continues. Those of a request by text are the endpoint's."""
    completion: Completion


class EndedEpisode(NamedTuple):
    """The completions of an episode, in the order in which they have ended."""

    replies: Sequence[Reply]
    untrained: Sequence[Reply]
    """Those that the trainer cannot reproduce, or whose client has gone before their end."""


class OpenEndpoint(Protocol):
    """The endpoint during one attempt at an episode. The key is void after the block that has opened it."""

    @property
    def base_url(self) -> str:
        """URL without a path, as Anthropic's clients take it. OpenAI's clients take it with ``/v1`` added."""
        ...

    @property
    def api_key(self) -> str:
        """Key that names the attempt. Nobody can guess it."""
        ...

    @property
    def key_variables(self) -> Set[str]:
        """Environment variables with keys of the run itself, which no program of an agent may get."""
        ...

    @property
    def limit(self) -> str | None:
        """Name of the limit that has stopped the episode: its last request was refused because of it."""
        ...

    async def run(self, work: Awaitable[ResultT]) -> ResultT:
        """Return what ``work`` returns. Cancels it, and raises NoEngine, when the run cannot go on."""
        ...

    def trajectories(self) -> Sequence[Trajectory]:
        """End the episode, and return what the policy has sampled in it, without a reward.

        Each branch is a trajectory: a conversation that nothing has rewritten on the way. A sampled token
        carries loss in one of them only. Completions that the trainer cannot reproduce, and those whose
        client has gone before their end, carry no loss.

        Raises NothingToTrain.
        """
        ...

    def replies(self) -> Sequence[Reply]:
        """End the episode, and return each of its completions, in the order in which they have ended.

        For a workflow that builds its trajectories itself. Completions that the trainer cannot reproduce, and
        those whose client has gone before their end, are left out. The last one has the retractions of all.
        Raises NothingToTrain.
        """
        ...

    def renew(self, endpoint: "PolicyEndpoint") -> EndedEpisode:
        """End the episode, and return its completions.

        The same key names another episode from now on: one of ``endpoint``, which has nothing of this one.
        """
        ...


class PolicyEndpoint(Protocol):
    """OpenAI's and Anthropic's protocols and SGLang's own ``/generate``, on the engines of the run."""

    def open(
        self, *, max_turns: int | None = None, max_tokens: int | None = None
    ) -> AbstractAsyncContextManager[OpenEndpoint]:
        """Open the endpoint for this attempt at the episode, once.

        After ``max_turns`` completions, or ``max_tokens`` sampled tokens, requests are refused with HTTP
        400. Completions that run side by side may exceed the number of tokens together.
        """
        ...
