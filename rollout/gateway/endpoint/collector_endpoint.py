"""The endpoint of a collector on a port of its process: the gateway's application for users, on loopback.

    async with serve(config, context=..., version=..., decode=...) as served:
        endpoint = served.of(recording, config.rollout.sampling)      # of one attempt at an episode

Importing this module imports SGLang, for which ``needed.load_endpoint`` prepares the process.
"""

import asyncio
import socket
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import cast

from slipstream.configs.schema import EndpointConfig, LimitsConfig, RunConfig, SamplingConfig
from slipstream.rollout.gateway.endpoint.attempt import Attempt, AttemptLimits, EpisodeEngines
from slipstream.rollout.gateway.endpoint.attempts import UNLIMITED, Attempts
from slipstream.rollout.gateway.keys import KEY_VARIABLE
from slipstream.rollout.gateway.port import PortServer
from slipstream.rollout.gateway.serving.assemble import assemble, served_model
from slipstream.rollout.tokens.tokenizer import Decode
from slipstream.rollout.tokens.trajectory import Trajectory
from slipstream.rollout.workflow.endpoint import EndedEpisode, NothingToTrain, PolicyEndpoint, Reply, ResultT

RAY_TOKEN = "RAY_AUTH_TOKEN"
"""The environment variable by which Ray's processes get the secret of their cluster."""

KEY_SETTINGS = ("key_env", "key_variable", "headers_env")
"""Settings that name a variable with a key, among the arguments of plug-ins too."""


def key_variables(config: RunConfig) -> frozenset[str]:
    """Return the variables with the keys of Ray, of the gateway and of the servers that a recipe names."""
    return frozenset({RAY_TOKEN, KEY_VARIABLE, *_named(config.model_dump())})


def _named(settings: object) -> Iterator[str]:
    """Yield the values of all settings in KEY_SETTINGS, however deep they lie."""
    if isinstance(settings, Mapping):
        for name, value in cast("Mapping[object, object]", settings).items():
            if name in KEY_SETTINGS and isinstance(value, str):
                yield value
            else:
                yield from _named(value)
    elif isinstance(settings, list | tuple):
        for value in cast("list[object]", settings):
            yield from _named(value)


LOOPBACK = "127.0.0.1"

CLOSE_S = 5.0
"""Seconds for the ends of connections when the collector ends."""

CANCEL_S = 10.0
"""Seconds for an agent to end when it is cancelled."""

_LIMITS = LimitsConfig(body_bytes=1 << 30, messages=UNLIMITED, choices=UNLIMITED, concurrent=UNLIMITED)
"""Limits of requests. Agents are the user's own: settings of their workflow bound an episode."""


@asynccontextmanager
async def serve(
    config: RunConfig, *, context: int, version: Callable[[], int], decode: Decode
) -> AsyncGenerator["CollectorEndpoint"]:
    """Serve the endpoint inside the block. Once in a process.

    ``context``: largest number of tokens of prompt and completion together. ``version``: returns the policy
    version that a new request gets. ``decode``: returns the text of token ids.
    """
    dialect, sampling = config.rollout.endpoint or EndpointConfig(), config.rollout.sampling
    attempts = Attempts(version, decode)
    serving = assemble(
        served_model(config.model, name=config.run.name, context=context, dialect=dialect, sampling=sampling),
        limits=_LIMITS,
        source=attempts,
        conversations=attempts,
        entries=attempts,
        keys=attempts,
        mint=_mint,
        aborts_all=True,
    )
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    server = PortServer(serving.app, listener)
    running = asyncio.create_task(server.serve(), name="the endpoint of the collector")
    try:
        await server.is_listening.wait()
        if running.done():
            running.result()
        yield CollectorEndpoint(
            attempts,
            server.url,
            dialect.sampling == "recipe",
            decode,
            key_variables(config),
        )
    finally:
        await serving.close()
        server.should_exit = server.force_exit = True
        await asyncio.wait({running}, timeout=CLOSE_S)
        running.cancel()
        server.close()


class CollectorEndpoint:
    """Makes the endpoint of each attempt at an episode."""

    def __init__(
        self,
        attempts: Attempts,
        url: str,
        override: bool,
        decode: Decode,
        key_variables: Set[str],
    ) -> None:
        """``override``: sample as the recipe says, whatever clients ask for. ``key_variables``: environment
        variables with keys of the run itself.
        """
        self.attempts = attempts
        self.url = url
        self._override = override
        self._decode = decode
        self._key_variables = key_variables

    def of(
        self, engines: EpisodeEngines, sampling: SamplingConfig, *, is_trained: bool = True
    ) -> "AttemptEndpoint":
        """Return the endpoint of an attempt. ``is_trained``: the trainer must reproduce its sampling."""

        def make(name: str, limits: AttemptLimits) -> Attempt:
            return Attempt(
                name,
                engines,
                limits,
                sampling=sampling,
                is_trained=is_trained,
                override=self._override,
                decode=self._decode,
                mint=_mint,
            )

        return AttemptEndpoint(self.attempts, self.url, make, sampling.max_new_tokens, self._key_variables)


class AttemptEndpoint:
    """The ``PolicyEndpoint`` of one attempt at an episode."""

    def __init__(
        self,
        attempts: Attempts,
        url: str,
        make: Callable[[str, AttemptLimits], Attempt],
        completion: int,
        key_variables: Set[str],
    ) -> None:
        """``completion``: largest number of tokens of a completion."""
        self._attempts = attempts
        self._url = url
        self._make = make
        self._completion = completion
        self._key_variables = key_variables

    def make(self, name: str, *, max_turns: int | None = None, max_tokens: int | None = None) -> Attempt:
        """Return an attempt of this endpoint."""
        limits = AttemptLimits(max_turns=max_turns, max_tokens=max_tokens, completion=self._completion)
        return self._make(name, limits)

    @asynccontextmanager
    async def open(
        self, *, max_turns: int | None = None, max_tokens: int | None = None
    ) -> AsyncGenerator["OpenedEndpoint"]:
        """Open the endpoint for the block."""
        key, attempt = self._attempts.open(partial(self.make, max_turns=max_turns, max_tokens=max_tokens))
        opened = OpenedEndpoint(self._attempts, attempt, self._url, key, self._key_variables)
        try:
            yield opened
        finally:
            opened.close()


class OpenedEndpoint:
    """The ``OpenEndpoint`` of one attempt at an episode."""

    def __init__(
        self, attempts: Attempts, attempt: Attempt, url: str, key: str, key_variables: Set[str]
    ) -> None:
        self._attempts = attempts
        self._attempt = attempt
        self.base_url = url
        self.api_key = key
        self.key_variables = key_variables

    @property
    def limit(self) -> str | None:
        """Name of the limit that has stopped the episode."""
        fatal = self._attempt.fatal
        cannot_go_on = fatal.done() and not fatal.cancelled()
        return None if cannot_go_on else self._attempt.limits.reached

    async def run(self, work: Awaitable[ResultT]) -> ResultT:
        """Return what ``work`` returns. Cancels it, and raises NoEngine, when the run cannot go on."""
        running, fatal = asyncio.current_task(), self._attempt.fatal
        # The watchdog knows whose code runs by the name of its task.
        name = "" if running is None else running.get_name()
        task = asyncio.create_task(_awaited(work), name=name)
        try:
            await asyncio.wait({task, fatal}, return_when=asyncio.FIRST_COMPLETED)
            if fatal.done():
                raise fatal.result()
            return task.result()
        except _EndedItself as ended:
            raise ended.error from None  # of this task, whose caller takes whatever user code raises
        except asyncio.CancelledError:
            self.close()  # at once: what the engines have sampled so far is recorded
            raise
        finally:
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_S)

    def trajectories(self) -> Sequence[Trajectory]:
        """End the episode, and return what was sampled in it. Raises NothingToTrain."""
        self.close()
        return self._attempt.trajectories()

    def replies(self) -> Sequence[Reply]:
        """End the episode, and return each of its completions. Raises NothingToTrain."""
        self.close()
        return self._attempt.replies()

    def renew(self, endpoint: PolicyEndpoint) -> EndedEpisode:
        """End the episode, and return its completions. The key names one of ``endpoint`` from now on."""
        assert isinstance(endpoint, AttemptEndpoint)
        ended, self._attempt = self._attempt, self._attempts.renew(self.api_key, endpoint.make)
        replies: Sequence[Reply] = ()
        with suppress(NothingToTrain):
            replies = ended.replies()
        return EndedEpisode(replies, ended.untrained_replies())

    def close(self) -> None:
        """Make the key void, and end all requests."""
        self._attempts.close(self.api_key)


async def _awaited(work: Awaitable[ResultT]) -> ResultT:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:  # out of a task, they end the event loop
        raise _EndedItself(error) from error


class _EndedItself(Exception):
    """User code has raised what ends a process. It is the error of its episode alone."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def _mint() -> str:
    return uuid.uuid4().hex
