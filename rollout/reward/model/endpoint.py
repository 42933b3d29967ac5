"""The endpoint of the judging model: a server that speaks chat completions, or engines of the run."""

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any, Protocol, cast

import aiohttp

from slipstream.configs.schema.judge import ModelJudge, UrlEndpoint
from slipstream.rollout.engine.asked_engines import ModelEngines
from slipstream.rollout.engine.client import Aborted, EngineError, EngineLost, InvalidRequest
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.sampling import LiveSampling
from slipstream.rollout.tokens.tokenizer import Tokenizer
from slipstream.rollout.tokens.trajectory import Finish, Messages

LONGEST_REPLY = 8 << 20
"""Bytes of one reply of a server."""

SHOWN = 300
"""Characters of a reply in an error."""


class Missing(RuntimeError):
    """No answer has come."""


class CutOff(RuntimeError):
    """An answer has come that ends before its end."""


class ModelEndpoint(Protocol):
    """Answers one question at a time; many may be asked at once."""

    async def complete(self, messages: Messages) -> str:
        """Return the text of an answer. Raises Missing and CutOff."""
        ...


class ChatServer:
    """A server that speaks OpenAI's chat completions."""

    def __init__(self, endpoint: UrlEndpoint, settings: ModelJudge) -> None:
        """Raises ValueError when the environment lacks the server's key."""
        self._url = f"{endpoint.url.rstrip('/')}/chat/completions"
        key = key_of(endpoint.key_env, "judge.endpoint.key_env")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._body: dict[str, object] = {
            "model": endpoint.model,
            "temperature": settings.temperature,
            "max_tokens": settings.max_new_tokens,
        }
        self._timeout_s = settings.request_timeout_s
        self._session: tuple[asyncio.AbstractEventLoop, aiohttp.ClientSession] | None = None

    async def complete(self, messages: Messages) -> str:
        """Return the text of an answer. Raises Missing and CutOff."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return _text_in(self._url, await self._reply(messages))
        except TimeoutError:
            reason = f"{self._url}: no answer in {self._timeout_s:g} s (judge.request_timeout_s)"
            raise Missing(reason) from None
        except (aiohttp.ClientError, OSError) as error:
            raise Missing(f"{self._url}: {type(error).__name__}: {error}") from error

    async def _reply(self, messages: Messages) -> bytes:
        body = {**self._body, "messages": messages}
        async with self._open_session().post(
            self._url, json=body, headers=self._headers, allow_redirects=False
        ) as reply:
            data = bytearray()
            async for part in reply.content.iter_any():
                data += part
                if len(data) > LONGEST_REPLY:
                    raise Missing(f"{self._url}: a reply of more than {LONGEST_REPLY} bytes")
            if reply.status != 200:
                raise Missing(f"{self._url}: status {reply.status}: {_shown(bytes(data))}")
            return bytes(data)

    def _open_session(self) -> aiohttp.ClientSession:
        """Return the session of the running event loop; a judge process has one loop at a time."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._session[0] is not loop:
            self._session = loop, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session[1]


class ChatEngines:
    """A model in engines of the run: the policy as they hold it now, or the judge's own.

    Questions are rendered with its chat template.
    """

    def __init__(
        self, settings: ModelJudge, tokenizer: Callable[[], Tokenizer], engines: ModelEngines
    ) -> None:
        """``tokenizer``: returns the model's, when it is first needed."""
        self._settings = settings
        self._tokenizer = tokenizer
        self._engines = engines

    async def complete(self, messages: Messages) -> str:
        """Return the text of an answer. Raises Missing and CutOff."""
        settings, completion = self._settings, GrowingCompletion()
        try:
            async with asyncio.timeout(settings.request_timeout_s), self._engines.least_loaded() as engine:
                ids = self._ids(messages)
                room = min(settings.max_new_tokens, engine.address.max_length - len(ids))
                sampling = LiveSampling(room, {"temperature": settings.temperature}, priority=0)
                await engine.generate(ids, sampling, completion, version=0)
        except TimeoutError:
            reason = f"the engines gave no answer in {settings.request_timeout_s:g} s"
            raise Missing(f"{reason} (judge.request_timeout_s)") from None
        except (EngineError, EngineLost, Aborted, InvalidRequest) as error:
            raise Missing(str(error)) from error
        if completion.finish is not Finish.STOP:
            raise CutOff(f"an answer of {len(completion.tokens)} tokens was cut off")
        return self._tokenizer().decode(completion.tokens.tolist(), skip_special_tokens=True)

    def _ids(self, messages: Messages) -> list[int]:
        tokenizer = self._tokenizer()
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)


def key_of(variable: str | None, setting: str) -> str:
    """Return the key in an environment variable; empty if none is named. Raises ValueError if it has none."""
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"{setting}: the environment variable {variable} has no key")
    return key


def _text_in(url: str, reply: bytes) -> str:
    """Return the text of a chat completion. Raises Missing and CutOff."""
    try:
        choice = cast("dict[str, Any]", json.loads(reply))["choices"][0]
        content, finish = choice["message"].get("content"), choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}; it is {_shown(reply)}"
        raise Missing(f"{url}: the reply is no chat completion: {reason}") from None
    if content is not None and not isinstance(content, str):
        raise Missing(
            f"{url}: the content of the answer is of type {type(content).__name__}, expected a text"
        )
    if finish == "length":
        raise CutOff(f"{url}: the answer was cut off at its largest length")
    return content or ""


def _shown(reply: bytes) -> str:
    return repr(reply[:SHOWN].decode(errors="replace"))
