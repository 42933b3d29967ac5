"""SGLang's endpoint of responses, bound to one request (``answering``). Imports SGLang."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import orjson
from fastapi.responses import ORJSONResponse
from openai_harmony import Message
from sglang.srt.entrypoints.harmony_utils import parse_response_input
from sglang.srt.entrypoints.openai.protocol import (
    ResponsesRequest,
    ResponsesResponse,
    ToolCallConstraint,
)
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses

from slipstream.rollout.gateway.serving.answering import DATA, Chatting, begin, reading
from slipstream.rollout.gateway.serving.call import LiveCall
from slipstream.rollout.gateway.serving.client_calls import StreamedItems, response_in_form
from slipstream.rollout.gateway.serving.client_tools import read_tools
from slipstream.rollout.gateway.serving.marks import marked
from slipstream.rollout.gateway.serving.messages import as_template_reads
from slipstream.rollout.gateway.serving.stand_in import StandIn
from slipstream.rollout.gateway.serving.words import Protocols
from slipstream.rollout.gateway.serving.workers import finished


class Responses(Chatting, OpenAIServingResponses):
    """/v1/responses."""

    _is_stored = False
    """Later requests may name the response."""

    def __init__(self, stand_in: StandIn) -> None:
        OpenAIServingResponses.__init__(self, stand_in, stand_in.templates)  # pyright: ignore[reportArgumentType]

    def continuing(self, call: LiveCall, exchanges: Sequence[Mapping[str, Any]]) -> Self:
        """Return a copy that answers one request, which continues ``exchanges``.

        SGLang keeps responses in memory, by their ids. The copy has just those that the request needs, and
        whatever it adds to them goes with it: what is kept is in the journal.
        """
        bound = self.bound_to(call)
        bound.response_store, bound.msg_store = {}, {}
        if exchanges:
            items: list[dict[str, Any]] = []
            for exchange in exchanges:
                items += as_policy_reads([*exchange["input"], *exchange["response"]["output"]])
            last: Any = SimpleNamespace(id=exchanges[-1]["response"]["id"], output=items)
            bound.response_store[last.id] = last
            bound.msg_store[last.id] = _harmony_messages(items) if self.use_harmony else items
        return bound

    @classmethod
    def _normalize_response_message_for_chat(cls, message: object) -> object:
        """Leave out the phase, which would keep the reasoning and the text of a turn apart in the chat."""
        normalized = super()._normalize_response_message_for_chat(message)
        if isinstance(normalized, dict):
            return {name: value for name, value in normalized.items() if name != "phase"}
        return normalized

    def _validate_model(self, model: str | None) -> None:
        """Requests may name any model."""

    async def _make_request(
        self, request: ResponsesRequest, prev_response: ResponsesResponse | None, tokenizer: object
    ) -> object:
        with reading(self.call):
            made = super()._make_request(request, prev_response, tokenizer)
            messages, _, _, processed = await self.call.prepared(partial(finished, made))
            sampling = self._sampling(request, processed.stop, processed.tool_call_constraint)
            if not processed.skip_special_tokens:
                sampling["skip_special_tokens"] = False
            self.call.one_by_one = bool(request.stream) and self._is_parsed(bool(request.tools))
            prompt = self._prompt(processed.prompt_ids)
        begin(self.call, prompt, sampling, request.top_logprobs or 0)
        self._name(request)
        prompts = [list(self.call.input_ids)]
        return messages, prompts, prompts, processed

    def _make_request_with_harmony(
        self, request: ResponsesRequest, prev_response: ResponsesResponse | None
    ) -> object:
        with reading(self.call):
            made = super()._make_request_with_harmony(request, prev_response)
            sampling = self._sampling(request, request.stop, None)
        begin(self.call, self.call.prompt(made[-1][0]), sampling, 0)
        self._name(request)
        return made

    def _name(self, request: ResponsesRequest) -> None:
        request.request_id = f"resp_{self.call.answer_id}"
        self._is_stored = bool(request.store)

    def _sampling(
        self, request: ResponsesRequest, stop: str | list[str] | None, constraint: ToolCallConstraint | None
    ) -> dict[str, Any]:
        """Return the sampling parameters as SGLang makes them later, with exactly the length asked for."""
        parameters = request.to_sampling_params(
            self.tokenizer_manager.model_config.context_len,
            self.default_sampling_params,
            stop=stop,
            tool_call_constraint=constraint,
        )
        return parameters | {"max_new_tokens": request.max_output_tokens}

    async def responses_full_generator(
        self, request: ResponsesRequest, *args: Any, **settings: Any
    ) -> ResponsesResponse | ORJSONResponse:
        response = await super().responses_full_generator(request, *args, **settings)
        if isinstance(response, ResponsesResponse):
            await self._record(response.model_dump(mode="json", by_alias=True))
        return response

    async def responses_stream_generator_non_harmony(
        self, request: ResponsesRequest, *args: Any, **settings: Any
    ) -> AsyncGenerator[str]:
        streamed = StreamedItems(self.call.tools.forms)
        events = super().responses_stream_generator_non_harmony(request, *args, **settings)
        async with aclosing(events):
            async for event in events:
                await self._record_at_end(event)
                for one in self._in_form(event, streamed):
                    yield one

    async def responses_stream_generator(
        self, request: ResponsesRequest, *args: Any, **settings: Any
    ) -> AsyncGenerator[str]:
        streamed = StreamedItems(self.call.tools.forms)
        events = super().responses_stream_generator(request, *args, **settings)
        async with aclosing(events):
            async for event in events:
                await self._record_at_end(event)
                for one in self._in_form(event, streamed):
                    yield one

    def _in_form(self, event: str, streamed: StreamedItems) -> Iterator[str]:
        """Yield an event as the client expects it."""
        data = event.partition("\n")[2]
        if not self.call.tools.forms or not data.startswith(DATA):
            yield event
            return
        for one in streamed.read(orjson.loads(data.removeprefix(DATA))):
            yield f"event: {one['type']}\n{DATA}{orjson.dumps(one).decode()}\n\n"

    async def _record_at_end(self, event: str) -> None:
        kind, _, data = event.partition("\n")
        if kind in ("event: response.completed", "event: response.incomplete"):
            await self._record(orjson.loads(data.removeprefix(DATA))["response"])

    async def _record(self, response: dict[str, Any]) -> None:
        """Record the answer with the response that the client gets, so that it can be named later."""
        parts = [self._normalize_response_message_for_chat(dict(item)) for item in response["output"]]
        merged = self._merge_consecutive_assistant_messages([part for part in parts if part is not None])
        message = merged[-1] if merged else {}
        given = self.call.body["input"]
        added = [{"role": "user", "content": given}] if isinstance(given, str) else given
        exchange = {"input": added, "response": response_in_form(response, self.call.tools.forms)}
        await self.call.record(
            [as_template_reads({**message, "content": _text(message.get("content"))})],
            orjson.dumps(exchange) if self._is_stored and response["status"] != "failed" else b"",
        )


def as_policy_reads(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items of a conversation with functions' calls and texts alone."""
    read, _ = read_tools({"input": list(items)}, Protocols.RESPONSES, refuse=False)
    return marked(read, refuse=False)[0]["input"]


def _text(content: str | list[dict[str, str]] | None) -> str:
    """Return the text of a message's content, which may be a list of parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _harmony_messages(items: Sequence[dict[str, Any]]) -> list[Message]:
    """Return the items of a conversation as gpt-oss reads them."""
    before: list[dict[str, Any]] = []
    messages: list[Message] = []
    for item in items:
        messages.append(parse_response_input(dict(item), before))  # pyright: ignore[reportArgumentType]
        before.append(item)
    return messages
