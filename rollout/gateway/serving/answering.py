"""SGLang's endpoints, bound to one request each: they read the request, and write the answer for the client.

``/v1/responses`` is in ``answered_responses``.

SGLang applies the chat template, parses tool calls and reasoning and speaks the protocols. Three things
change here: where its prompts go (``LiveCall.begin``), where its tokens come from
(``StandIn.generate_request``), and that an answer is durable before its last byte leaves
(``LiveCall.record``). Imports SGLang.
"""

import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import orjson
from fastapi.responses import ORJSONResponse
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai import serving_chat, serving_responses
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    ErrorResponse,
    MessageProcessingResult,
)
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.managers.io_struct import GenerateReqInput

from slipstream.rollout.engine import patches
from slipstream.rollout.engine.whole_calls import WholeCalls
from slipstream.rollout.gateway.conversations import Arrival, ChatMessage
from slipstream.rollout.gateway.serving.call import LiveCall
from slipstream.rollout.gateway.serving.client_calls import StreamedChatCalls
from slipstream.rollout.gateway.serving.limits import Refusal
from slipstream.rollout.gateway.serving.messages import StreamedMessages, as_template_reads
from slipstream.rollout.gateway.serving.stand_in import StandIn
from slipstream.rollout.tokens.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DATA, ERROR, DONE = "data: ", 'data: {"error"', "data: [DONE]"


def _let_calls_be_repeated() -> None:
    """Let clients repeat calls whose arguments are no JSON object, as they have got them.

    An answer may be cut off within a call, and a policy may write what is no JSON. SGLang refuses every
    request that repeats such a call, so that the conversation could never go on.
    """
    as_objects = serving_chat.normalize_assistant_tool_call_arguments

    def as_objects_if_they_are(message: ChatMessage, *, strict: bool = True) -> None:
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and function.get("arguments") == "":
                function["arguments"] = {}
        as_objects(message, strict=False)

    serving_chat.FunctionCallParser = serving_responses.FunctionCallParser = WholeCalls
    serving_chat.normalize_assistant_tool_call_arguments = as_objects_if_they_are


patches.check(__name__)
_let_calls_be_repeated()


@dataclass(frozen=True)
class AppliedTemplate:
    """A chat template with the tools and settings of one request, and the text that it has made."""

    tokenizer: Tokenizer
    messages: Sequence[ChatMessage]
    settings: Mapping[str, object]
    encoding: Mapping[str, Any]
    text: str
    ids: Sequence[int] | None = None
    """Token ids of the text; None: it is not encoded yet."""

    def render(self, messages: Sequence[ChatMessage], *, answer: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=answer,
                return_dict=False,
                **self.settings,
            )
        except Exception as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def encode(self, text: str) -> list[int]:
        if self.ids is not None and text == self.text:
            return list(self.ids)
        return self.tokenizer.encode(text, **self.encoding)


def _least_length(messages: Sequence[Any], tools: Sequence[Any] | None) -> int:
    """Return a number of characters that a prompt has at least: no template leaves texts or tools out."""
    texts: list[str] = []
    for message in messages:
        if message.role == "assistant":
            continue  # templates leave the reasoning out
        content = message.content
        parts = (
            [content] if isinstance(content, str) else [getattr(part, "text", "") for part in content or ()]
        )
        texts += [part.strip() for part in parts if isinstance(part, str)]
    schemas = [tool.function.parameters for tool in tools or () if tool.function.parameters]
    return sum(map(len, texts)) + sum(len(orjson.dumps(schema)) for schema in schemas)


@contextmanager
def reading(call: LiveCall) -> Iterator[None]:
    """Take every error for a refusal: what a request looks like is all that the code inside depends on."""
    try:
        yield
    except Exception as error:
        if isinstance(error, Refusal):
            call.refusal = error
        if call.refusal is None:
            log.info("a request cannot be read: %s", type(error).__name__)
            is_for_clients = isinstance(error, ValueError | TypeError) and str(error)
            call.refusal = Refusal(
                400, str(error) if is_for_clients else f"the request cannot be read ({type(error).__name__})"
            )
        raise ValueError(call.refusal.message) from error


def begin(
    call: LiveCall,
    prompt: Arrival,
    sampling: Mapping[str, object],
    top_logprobs: int,
    *,
    scores_prompt: bool = False,
) -> None:
    """Begin the turn of a prompt. Raises ValueError if it is refused, which SGLang's endpoints expect."""
    try:
        call.begin(prompt, sampling, top_logprobs=top_logprobs, scores_prompt=scores_prompt)
    except Refusal as refusal:
        call.refusal = refusal
        raise ValueError(refusal.message) from refusal


def _read_answers(messages: Sequence[Any]) -> None:
    """Read the answers that a client repeats as they were recorded: see ``as_template_reads``.

    Clients of some protocols repeat an answer in several parts, between whose texts SGLang would put blanks,
    and streams have the blanks before a call.
    """
    for message in messages:
        if message.role != "assistant":
            continue
        parts = message.content
        if isinstance(parts, list) and all(getattr(part, "type", None) == "text" for part in parts):
            message.content = "".join(part.text for part in parts)
        if isinstance(message.content, str) and getattr(message, "tool_calls", None):
            message.content = message.content.strip()


class Chatting(OpenAIServingChat):
    """The common part of SGLang's chat and Responses endpoints."""

    tokenizer_manager: StandIn  # pyright: ignore[reportIncompatibleVariableOverride]
    call: LiveCall
    encodes_prompts = False
    """Prompts are given to SGLang as ids. Else as text: the ids that a conversation repeats are known, and
    only the others are encoded."""
    _applied: AppliedTemplate | None = None

    def bound_to(self, call: LiveCall) -> Self:
        """Return a copy that answers one request."""
        bound = copy(self)
        bound.call = call
        bound.tokenizer_manager = self.tokenizer_manager.bound_to(call)
        return bound

    def supports_native_reasoning_history(self) -> bool:
        """Return True: reasoning is never a part of the text of an answer, whatever protocol repeats it.

        Else an answer would not be known again where the template does not read ``reasoning_content``.
        """
        return True

    def _resolve_lora_path(self, request_model: str, explicit_lora_path: object) -> None:
        """No name of a model means an adapter."""

    def _process_messages(
        self, request: ChatCompletionRequest, is_multimodal: bool
    ) -> MessageProcessingResult:
        with reading(self.call):
            self.call.check_length(_least_length(request.messages, request.tools))
            _read_answers(request.messages)
            return super()._process_messages(request, is_multimodal)

    def _render_and_encode_chat_template(
        self,
        messages: list[ChatMessage],
        *,
        tools: list[dict[str, object]] | None,
        template_kwargs: dict[str, object],
        encode_kwargs: dict[str, object],
        use_cache: bool,
    ) -> tuple[Any, str | None]:
        tokenizer: Any = self.tokenizer_manager.tokenizer
        if self._prompt_text_round_trip_is_lossy:
            return super()._render_and_encode_chat_template(
                messages,
                tools=tools,
                template_kwargs=template_kwargs,
                encode_kwargs=encode_kwargs,
                use_cache=use_cache,
            )
        settings = {"tools": tools, **template_kwargs}
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, return_dict=False, **settings
        )
        applied = AppliedTemplate(tokenizer, messages, settings, encode_kwargs, text)
        has_answers = any(message.get("role") == "assistant" for message in messages)
        ids = self.call.measured(text, applied.encode, has_answers=has_answers)
        self._applied = applied = replace(applied, ids=ids)
        return applied.encode(text) if self.encodes_prompts else text, None

    def _append_assistant_prefix_to_prompt_ids(self, prompt_ids: Any, assistant_prefix: str) -> list[int]:
        if self._applied is not None and isinstance(prompt_ids, str):
            prompt_ids = self._applied.encode(prompt_ids)
        return super()._append_assistant_prefix_to_prompt_ids(prompt_ids, assistant_prefix)

    def _is_parsed(self, has_tools: bool) -> bool:
        """True if a parser splits the text of the answer."""
        return bool(self.reasoning_parser or (has_tools and self.tool_call_parser))

    def _prompt(self, prompt: object) -> Arrival:
        """Return the request with its prompt: the text that the template has made, or ids.

        Raises ValueError otherwise.
        """
        applied = self._applied
        if applied is not None and isinstance(prompt, str):
            return self.call.prompt(None, applied.messages, applied.text, applied)
        if not isinstance(prompt, list):
            raise ValueError("only text is read here")
        return self.call.prompt(cast("list[int]", prompt), applied.messages if applied else ())


class Chat(Chatting):
    """/v1/chat/completions, and what /v1/messages is translated to."""

    _prepared: Future[tuple[GenerateReqInput, ChatCompletionRequest]]
    _invalid: str | None = None
    """Why SGLang refuses the request; None: it does not."""

    def prepare(self, request: ChatCompletionRequest) -> None:
        """Do all that depends on the request alone: check it, apply the template, encode what is long.

        SGLang's endpoint finds it done, and the error that there was.
        """
        self._prepared = Future()
        try:
            with reading(self.call):
                self.call.check_length(_least_length(request.messages, request.tools))
                self._invalid = super()._validate_request(request)
                if self._invalid is None:
                    self._prepared.set_result(super()._convert_to_internal_request(request, None))  # pyright: ignore
        except Exception as error:
            self._prepared.set_exception(error)

    def _validate_request(self, request: ChatCompletionRequest) -> str | None:
        return self._invalid

    def apply_reasoning_enabled(self, request: ChatCompletionRequest, enabled: bool) -> None:
        """Let the policy reason or not, if it can do both. A client's wish is no reason to refuse it."""
        try:
            super().apply_reasoning_enabled(request, enabled)
        except ValueError:
            self.call.ignored.append("thinking")

    def _convert_to_internal_request(
        self, request: ChatCompletionRequest, raw_request: object = None
    ) -> tuple[GenerateReqInput, ChatCompletionRequest]:
        with reading(self.call):
            try:
                converted, request = self._prepared.result(timeout=0)  # it never waits: the event loop would
            finally:
                del self._prepared  # an error in it refers to this frame
            self.call.one_by_one = bool(request.stream) and self._is_parsed(
                bool(self._effective_tools(request))
            )
            prompt = self._prompt(converted.input_ids if converted.text is None else converted.text)
        sampling: Any = converted.sampling_params
        begin(self.call, prompt, dict(sampling), request.top_logprobs or 0)
        return converted, request

    async def _generate_chat_stream(
        self, adapted_request: GenerateReqInput, request: ChatCompletionRequest, raw_request: object
    ) -> AsyncGenerator[str]:
        collected, has_failed = StreamedMessages(len(self.call.answers)), False
        calls = StreamedChatCalls(self.call.tools.forms)
        events = super()._generate_chat_stream(adapted_request, request, raw_request)  # pyright: ignore
        async with aclosing(events):
            async for event in events:
                if event.startswith(ERROR):
                    has_failed = True  # for all answers
                elif event.startswith(DONE):
                    if not has_failed:
                        await self.call.record(collected.messages())
                elif event.startswith(DATA):
                    chunk = orjson.loads(event[len(DATA) :])
                    collected.add(chunk)
                    if self.call.tools.forms:
                        event = f"{DATA}{orjson.dumps(calls.read(chunk)).decode()}\n\n"
                yield event

    async def _process_tool_call_stream(
        self,
        index: int,
        delta: str,
        parser_dict: dict[int, Any],
        content: dict[str, Any],
        *args: Any,
        **more: Any,
    ) -> AsyncGenerator[str]:
        finish = content["meta_info"]["finish_reason"]
        if index in parser_dict and finish is not None and finish["type"] == "length":
            parser_dict[index].is_cut_off = True
        events = super()._process_tool_call_stream(index, delta, parser_dict, content, *args, **more)
        async for event in events:
            yield event

    async def _handle_non_streaming_request(
        self, adapted_request: GenerateReqInput, request: ChatCompletionRequest, raw_request: object
    ) -> ChatCompletionResponse | ErrorResponse | ORJSONResponse:
        response = await super()._handle_non_streaming_request(adapted_request, request, raw_request)  # pyright: ignore
        if isinstance(response, ChatCompletionResponse):
            await self.call.record(
                [as_template_reads(choice.message.model_dump()) for choice in response.choices]
            )
        return response


class Messages(AnthropicServing):
    """/v1/messages and /v1/messages/count_tokens."""

    openai_serving_chat: Chat
    _translated: ChatCompletionRequest | None = None

    def prepare(self, request: AnthropicMessagesRequest) -> None:
        """Do all that depends on the request alone, as ``Chat.prepare`` does."""
        with suppress(Exception):  # SGLang's endpoint gets the same error, and tells the client
            self._translated = self._convert_to_chat_completion_request(request)
            self.openai_serving_chat.prepare(self._translated)

    def _convert_to_chat_completion_request(
        self, anthropic_request: AnthropicMessagesRequest
    ) -> ChatCompletionRequest:
        if self._translated is not None:
            return self._translated
        return super()._convert_to_chat_completion_request(anthropic_request)

    def bound_to(self, call: LiveCall) -> Self:
        """Return a copy that answers one request."""
        bound = copy(self)
        bound.openai_serving_chat = self.openai_serving_chat.bound_to(call)
        return bound

    def counting(self, call: LiveCall) -> Self:
        """Return a copy that counts the tokens of one request."""
        bound = self.bound_to(call)
        bound.openai_serving_chat.encodes_prompts = True
        return bound


class TextCompletion(OpenAIServingCompletion):
    """/v1/completions: prompts without a chat template."""

    tokenizer_manager: StandIn  # pyright: ignore[reportIncompatibleVariableOverride]
    call: LiveCall
    _encoded: dict[str, list[int]]
    """Ids of each prompt."""

    def bound_to(self, call: LiveCall) -> Self:
        """Return a copy that answers one request."""
        bound = copy(self)
        bound._encoded = {}
        bound.call = call
        bound.tokenizer_manager = self.tokenizer_manager.bound_to(call)
        return bound

    def _resolve_lora_path(self, request_model: str, explicit_lora_path: object) -> None:
        """No name of a model means an adapter."""

    def prepare(self, request: CompletionRequest) -> None:
        """Do all that depends on the request alone: encode its prompts."""
        texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        try:
            with reading(self.call):
                for text in texts:
                    if isinstance(text, str):
                        self.call.check_length(len(text))
                        self._encoded[text] = self.tokenizer_manager.encode(text)
        except ValueError:
            pass  # SGLang's endpoint gets the refusal

    def _convert_to_internal_request(
        self, request: CompletionRequest, raw_request: object = None
    ) -> tuple[GenerateReqInput, CompletionRequest]:
        with reading(self.call):
            if self.call.refusal is not None:
                raise self.call.refusal
            scores_prompt = bool(request.echo) and request.logprobs is not None
            if scores_prompt and not request.logprobs:
                raise Refusal(400, "logprobs: expected at least 1 with echo, found 0", param="logprobs")
            converted, request = super()._convert_to_internal_request(request, raw_request)  # pyright: ignore
            sampling = {
                name: value
                for name, value in dict[str, Any](converted.sampling_params or {}).items()  # pyright: ignore
                if name not in ("temperature", "top_p", "top_k") or name in request.model_fields_set
            }
            prompts = [self.call.prompt(ids, text=text) for text, ids in self._prompts(converted)]
        for prompt in prompts:
            begin(self.call, prompt, sampling, request.logprobs or 0, scores_prompt=scores_prompt)
        converted.rid = f"cmpl-{self.call.answer_id}"
        return converted, request

    def _prompts(self, converted: GenerateReqInput) -> Iterator[tuple[str | None, list[int]]]:
        """Yield text and ids of each prompt. There is no text where the client has sent ids."""
        if converted.text is not None:
            for text in [converted.text] if isinstance(converted.text, str) else converted.text:
                yield text, self._encoded[text]
        else:
            for ids in as_batch(converted.input_ids):
                yield None, ids

    async def _generate_completion_stream(
        self, adapted_request: GenerateReqInput, request: CompletionRequest, raw_request: object
    ) -> AsyncGenerator[str]:
        has_failed = False
        events = super()._generate_completion_stream(adapted_request, request, raw_request)  # pyright: ignore
        async with aclosing(events):
            async for event in events:
                has_failed = has_failed or event.startswith(ERROR)
                if event.startswith(DONE) and not has_failed:
                    await self._record()
                yield event

    async def _handle_non_streaming_request(
        self, adapted_request: GenerateReqInput, request: CompletionRequest, raw_request: object
    ) -> CompletionResponse | ErrorResponse | ORJSONResponse:
        response = await super()._handle_non_streaming_request(adapted_request, request, raw_request)  # pyright: ignore
        if isinstance(response, CompletionResponse):
            await self._record()
        return response

    async def _record(self) -> None:
        await self.call.record(
            [{"role": "assistant", "content": answer.text} for answer in self.call.answers]
        )


def as_batch(ids: Any) -> list[list[int]]:
    """Return a list of prompts; a single one is a list of ids."""
    return ids if ids and isinstance(ids[0], list) else [ids]
