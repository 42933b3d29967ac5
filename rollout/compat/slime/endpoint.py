"""The way of hooks to the policy: what an episode needs of the collector's own `/generate`."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from slipstream.rollout.trajectory import Completion
from slipstream.rollout.workflow import WorkflowContext


@dataclass(frozen=True)
class SampledReply:
    """One request of an episode, as the engine has answered it."""

    input_ids: tuple[int, ...]
    """Token ids that the completion continues. Those of a request by text are the endpoint's."""
    completion: Completion


class EpisodeEndpoint(Protocol):
    """SGLang's native `POST /generate` for the requests of one episode.

    A request has `input_ids` or `text`, `sampling_params` and `return_logprob`; the reply has `text` and
    `meta_info` with `output_token_logprobs`, `finish_reason` and `weight_version`, as SGLang's have.
    """

    @property
    def host(self) -> str:
        """Host of the URL, which names the episode: hooks write `http://{host}:{port}/generate`."""
        ...

    @property
    def port(self) -> int: ...

    def served(self) -> Sequence[SampledReply]:
        """Return what was sampled, in the order of the requests. Unanswered and broken ones are missing."""
        ...


class EpisodeEndpoints(Protocol):
    """Opens the endpoint of an episode."""

    def open(self, context: WorkflowContext) -> AbstractAsyncContextManager[EpisodeEndpoint]:
        """Return an endpoint whose requests go through ``context.generator``, until it is left."""
        ...
