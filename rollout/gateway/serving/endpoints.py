"""The endpoints that answer: what each reads of a body, whom it asks, and in whose words. Imports SGLang."""

import dataclasses
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from types import SimpleNamespace
from typing import Any

import orjson
from pydantic import BaseModel
from sglang.srt.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from starlette.responses import Response, StreamingResponse

from slipstream.rollout.gateway.serving import fields
from slipstream.rollout.gateway.serving.answered_responses import Responses
from slipstream.rollout.gateway.serving.answering import Chat, Messages, TextCompletion
from slipstream.rollout.gateway.serving.call import LiveCall
from slipstream.rollout.gateway.serving.client_calls import chat_call, response_in_form
from slipstream.rollout.gateway.serving.limits import Refusal
from slipstream.rollout.gateway.serving.native import GenerateBody, Native
from slipstream.rollout.gateway.serving.preferences import TIERS, Abilities
from slipstream.rollout.gateway.serving.replies import Result
from slipstream.rollout.gateway.serving.schema import Endpoint, Reading
from slipstream.rollout.gateway.serving.stand_in import StandIn
from slipstream.rollout.gateway.serving.words import Protocols
from slipstream.rollout.gateway.serving.workers import finished


class Endpoints:
    """All endpoints of a process."""

    def __init__(self, stand_in: StandIn) -> None:
        self._model = stand_in.served_model_name
        self._reads_developer = "developer" in str(stand_in.tokenizer.chat_template)
        self._chat = Chat(stand_in, stand_in.templates)  # pyright: ignore[reportArgumentType]
        self._completion = TextCompletion(stand_in, stand_in.templates)  # pyright: ignore[reportArgumentType]
        self._messages = Messages(self._chat)
        self._responses = Responses(stand_in)
        self._native = Native(stand_in)
        self._reading = _reading(stand_in, is_gpt_oss=self._chat.is_gpt_oss)

    def all(self) -> tuple[Endpoint, ...]:
        openai, anthropic = Protocols.OPENAI, Protocols.ANTHROPIC
        return (
            self._endpoint(
                "/v1/chat/completions", ChatCompletionRequest, fields.CHAT, openai, self._answer_chat
            ),
            self._endpoint(
                "/v1/completions",
                CompletionRequest,
                fields.COMPLETION,
                openai,
                self._answer_completion,
                chats=False,
            ),
            self._endpoint(
                "/v1/responses",
                ResponsesRequest,
                fields.RESPONSES,
                Protocols.RESPONSES,
                self._answer_responses,
            ),
            self._endpoint(
                "/v1/messages", AnthropicMessagesRequest, fields.MESSAGES, anthropic, self._answer_messages
            ),
            self._endpoint(
                "/v1/messages/count_tokens",
                AnthropicCountTokensRequest,
                fields.COUNT_TOKENS,
                anthropic,
                self._count_tokens,
                generates=False,
            ),
            Endpoint(
                "/generate",
                GenerateBody,
                fields.GENERATE,
                {field.name: field.default for field in dataclasses.fields(GenerateReqInput)},
                openai,
                self._native.answer,
                self._reading,
                chats=False,
            ),
        )

    def _endpoint(
        self,
        path: str,
        body: type[BaseModel],
        allowed: Collection[str],
        protocol: Protocols,
        answer: Callable[[LiveCall, Any], Awaitable[Result]],
        **kind: bool,
    ) -> Endpoint:
        known = {name: field.default for name, field in body.model_fields.items()}
        return Endpoint(path, body, allowed, known, protocol, answer, self._reading, **kind)

    async def _answer_chat(self, call: LiveCall, body: ChatCompletionRequest) -> Result:
        if "model" not in body.model_fields_set:
            body.model = self._model
        if not self._reads_developer:
            for message in body.messages:
                if message.role == "developer":
                    message.role = "system"
        bound = self._chat.bound_to(call)
        await call.prepared(lambda: bound.prepare(body))
        result = _result(await bound.handle_request(body, _no_headers()))
        if call.tools.forms and isinstance(result, dict):
            for choice in result["choices"]:
                calls = choice["message"].get("tool_calls")
                choice["message"]["tool_calls"] = calls and [
                    chat_call(one, call.tools.forms) for one in calls
                ]
        return result

    async def _answer_completion(self, call: LiveCall, body: CompletionRequest) -> Result:
        if "model" not in body.model_fields_set:
            body.model = self._model
        bound = self._completion.bound_to(call)
        await call.prepared(lambda: bound.prepare(body))
        return _result(await bound.handle_request(body, _no_headers()))

    async def _answer_responses(self, call: LiveCall, body: ResponsesRequest) -> Result:
        body.model = body.model or self._model
        bound = self._responses.continuing(call, await call.exchanges())
        result = _result(await bound.create_responses(body, _no_headers()))
        return response_in_form(result, call.tools.forms) if isinstance(result, dict) else result

    async def _answer_messages(self, call: LiveCall, body: AnthropicMessagesRequest) -> Result:
        _drop_attribution(body)
        bound = self._messages.bound_to(call)
        await call.prepared(lambda: bound.prepare(body))
        return _result(await bound.handle_messages(body, _no_headers()))

    async def _count_tokens(self, call: LiveCall, body: AnthropicCountTokensRequest) -> Result:
        _drop_attribution(body)
        counting = self._messages.counting(call).handle_count_tokens(body, _no_headers())
        return _result(await call.prepared(lambda: finished(counting)))


def _drop_attribution(body: AnthropicMessagesRequest | AnthropicCountTokensRequest) -> None:
    """Take out the block with which Claude Code begins its system message, for Anthropic's own servers.

    It is no instruction, and differs from request to request: no prompt would repeat the one before.
    """
    if isinstance(body.system, list):
        body.system = [
            block
            for block in body.system
            if not str(getattr(block, "text", "")).startswith("x-anthropic-billing-header:")
        ]


def _no_headers() -> Any:
    """Return the request as SGLang's endpoints see it: their headers, which are none of ours, are not for
    clients. They can name requests, priorities and ranks.
    """
    return SimpleNamespace(headers={}, state=SimpleNamespace())


_TEMPLATE_REASONS = re.compile(r"\b(enable_thinking|reasoning_effort|thinking_budget|thinking_mode)\b")
"""Variables by which a template says how much the policy should think."""


def _reading(stand_in: StandIn, *, is_gpt_oss: bool) -> Reading:
    reasons = stand_in.config_value("reasoning_parser") is not None or bool(
        _TEMPLATE_REASONS.search(str(stand_in.tokenizer.chat_template))
    )
    efforts = TIERS - {"none"} if is_gpt_oss else TIERS  # whose template has no word for it
    return Reading(
        Abilities(reasons, efforts),
        refuses_hosted=stand_in.model.hosted_tools == "refuse",
        refuses_contents=stand_in.model.contents == "refuse",
    )


def _result(reply: object) -> Result:
    """Return a reply of SGLang as JSON or as events. Raises Refusal for an error."""
    if isinstance(reply, StreamingResponse):
        return reply.body_iterator  # pyright: ignore[reportReturnType]
    if isinstance(reply, AsyncGenerator):
        return reply
    if isinstance(reply, BaseModel):
        return reply.model_dump(mode="json", by_alias=True)
    assert isinstance(reply, Response), type(reply)
    content = orjson.loads(reply.body)
    if reply.status_code >= 400:
        raise _error(content, reply.status_code)
    return content


def _error(content: Any, status: int) -> Refusal:
    """Return an error of SGLang, which has several forms of them, as one of ours."""
    error = content.get("error", content)
    message = str(error.get("message"))
    return Refusal(status, message if status < 500 else "internal error", param=error.get("param"))
