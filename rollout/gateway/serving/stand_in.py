"""Stands in for the server that SGLang's endpoints expect: tokenizer, template, settings.

Imports SGLang, and is therefore imported by gateway processes only. SGLang keeps its settings once for each
process, so that a process serves one model.
"""

import logging
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from transformers import AutoConfig, PreTrainedTokenizerBase
from xgrammar import TokenizerInfo

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.engine.sampling import GRAMMARS, violations
from slipstream.rollout.gateway.serving.call import LiveCall
from slipstream.rollout.gateway.serving.contents import Content, Form
from slipstream.rollout.tokens.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

AUTO = "auto"
"""Setting of a parser that lets SGLang choose by the chat template."""

UNPUBLISHED = "dummy"
"""SGLang's name for a model that its settings must not look at: no weights are loaded here."""


@dataclass(frozen=True)
class ServedModel:
    """The policy as clients see it."""

    path: Path
    """Checkpoint directory with config.json and tokenizer."""
    name: str
    context: int
    """Largest number of tokens of prompt and answer together."""
    sampling: SamplingConfig
    """Values of the sampling parameters that a request does not set."""
    chat_template: Path | None = None
    tool_parser: str | None = AUTO
    reasoning_parser: str | None = None
    hosted_tools: str = "drop"
    contents: str = "mark"
    template_args: Mapping[str, object] = field(default_factory=dict[str, object])
    """Variables of the chat template, where a request gives no other values of them."""


class ModelFacts:
    """SGLang's ``model_config``, as far as its endpoints read it."""

    is_multimodal = False
    is_image_understandable_model = False
    is_audio_understandable_model = False

    def __init__(self, model: ServedModel) -> None:
        self.hf_config = AutoConfig.from_pretrained(model.path)
        self.vocab_size = int(self.hf_config.get_text_config().vocab_size)
        self.context_len = model.context
        self._defaults = {
            "temperature": model.sampling.temperature,
            "top_p": model.sampling.top_p,
            "top_k": model.sampling.top_k,
        }

    def get_default_sampling_params(self) -> dict[str, object]:
        """Return the recipe's sampling: SGLang would take the model's own defaults."""
        return dict(self._defaults)


LONGEST_UNKNOWN = 64
"""Characters that one unknown token is taken to stand for at most. Tokenizers that make one of any number of
characters would have megabytes encoded to find that a prompt is too long."""


class StandIn:
    """SGLang's tokenizer manager, as far as its endpoints know it, for all requests of the process.

    Each request has a copy with its own ``call``.
    """

    call: LiveCall

    def __init__(self, model: ServedModel) -> None:
        settings: dict[str, object] = {
            "model_path": UNPUBLISHED,
            "device": "cpu",
            "incremental_streaming_output": True,  # else every chunk repeats all text before it
            "enable_response_store": True,
        }
        self.server_args = ServerArgs(**settings)
        publish(self.server_args, role="tokenizer")
        self.model = model
        tokenizer = cast(Any, load_tokenizer(model.path, model.template_args))
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        self.processor = None
        self.model_config = ModelFacts(model)
        self.model_path = str(model.path)
        self.served_model_name = model.name
        self.request_logger = SimpleNamespace(log_requests=False, log_requests_level=0)
        self.lora_registry = None
        self.num_reserved_tokens = 0
        self.image_token_id = None
        self.templates = TemplateManager()
        self.templates.load_chat_template(
            self,  # pyright: ignore[reportArgumentType]
            str(model.chat_template) if model.chat_template else None,
            "",  # SGLang would guess a template from the name of the folder
        )
        self._settings = {
            "tool_call_parser": _parser(
                "gateway.tool_parser",
                model.tool_parser,
                self.templates.suggested_tool_call_parser,
                FunctionCallParser.ToolCallParserEnum,
            ),
            "reasoning_parser": _parser(
                "gateway.reasoning_parser",
                model.reasoning_parser,
                self.templates.suggested_reasoning_parser,
                ReasoningParser.DetectorMap,
            ),
        }
        self._thought_end = self._end_of_thought()
        vocabulary = TokenizerInfo.from_huggingface(self.tokenizer).decoded_vocab
        self._spells_all = spells_all(vocabulary)
        self.longest_token = max(map(len, vocabulary))
        if not self._spells_all:
            self.longest_token = max(self.longest_token, LONGEST_UNKNOWN)
        log.info("parsers: %s", self._settings)
        # SGLang logs requests that it refuses, with what is in them.
        logging.getLogger("sglang").setLevel(logging.CRITICAL)

    def bound_to(self, call: LiveCall) -> Self:
        """Return a copy that generates for one request."""
        bound = copy(self)
        bound.call = call
        return bound

    async def generate_request(
        self, request: GenerateReqInput, _raw: object = None
    ) -> AsyncGenerator[Content | list[Content]]:
        """Yield the answers of the request that this copy is bound to. Its turns have begun already."""
        form = Form(
            id=str(request.rid or f"chatcmpl-{self.call.answer_id}"),
            stream=bool(request.stream),
            logprobs=bool(request.return_logprob),
            top_logprobs=int(request.top_logprobs_num or 0),  # pyright: ignore[reportArgumentType]
            prompt_ids=bool(request.return_prompt_token_ids),
            thought_end=self._thought_end if request.require_reasoning else None,
        )
        # `LiveCall.end` alone closes the contents: SGLang may leave this generator to the event loop, which
        # closes it in a task of its own, and two tasks must not close one generator.
        async for content in self.call.contents(form):
            yield content

    def create_abort_task(self, _request: GenerateReqInput) -> None:
        """Do nothing after a reply: a request that is left is cancelled as soon as its client goes."""

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Do nothing: only background responses are aborted by name, and there are none."""

    def check_sampling(self, parameters: Mapping[str, object]) -> None:
        """Check sampling parameters as engines and SGLang do. Raises ValueError or TypeError."""
        if wrong := violations(parameters, self.vocab_size):
            raise ValueError("; ".join(wrong))
        if any(parameters.get(name) for name in GRAMMARS) and not self._spells_all:
            raise ValueError(
                "the vocabulary of this model cannot spell every text, so that no token may be left that a "
                "grammar, a response format or a required tool call allows: send none of these"
            )
        sampling = SamplingParams(**parameters)  # pyright: ignore[reportArgumentType]
        sampling.normalize(self.tokenizer)
        sampling.verify(self.vocab_size)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a plain text, with the special tokens that the tokenizer adds."""
        return list(self.tokenizer(text)["input_ids"])

    @property
    def vocab_size(self) -> int:
        return self.model_config.vocab_size

    def config_value(self, name: str) -> str | None:
        """Return a setting that SGLang would change at run time."""
        return self._settings[name]

    def _end_of_thought(self) -> int | None:
        """Return the token that ends the reasoning; None if there is no parser or no such token."""
        parser = self._settings["reasoning_parser"]
        if parser is None:
            return None
        end = ReasoningParser(model_type=parser, tokenizer=self.tokenizer).detector.think_end_token
        ids = self.tokenizer.encode(end, add_special_tokens=False) if end else []
        return ids[0] if len(ids) == 1 else None


UTF8_BYTES = frozenset((*range(0xC0), *range(0xC2, 0xF5)))
"""All bytes that texts can have."""


def spells_all(vocabulary: Sequence[bytes]) -> bool:
    """Return True if a vocabulary has a token for every byte that texts can have.

    An engine whose model has none of the tokens that a grammar allows next samples from a distribution
    without any token, and its scheduler ends.
    """
    return {token[0] for token in vocabulary if len(token) == 1} >= UTF8_BYTES


def _parser(setting: str, name: str | None, suggested: str | None, known: Collection[str]) -> str | None:
    """Return the name of the parser to use; None: no parser. Raises ValueError for an unknown name."""
    if name == AUTO:
        return suggested
    if name is not None and name not in known:
        choices = ", ".join(sorted(known))
        raise ValueError(f"{setting} = {name!r}: SGLang has no such parser; it has {choices}")
    return name
