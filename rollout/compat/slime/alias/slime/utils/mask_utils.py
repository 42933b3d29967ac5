"""Which tokens of a chat its assistant has written: the loss mask of supervised examples."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

_PROBE = "PROBE OF THE CHAT TEMPLATE"
_DISTILLED = "<\uff5cAssistant\uff5c>"
"""Token that only the templates of distilled models have."""

Chat = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None
Rendered = tuple[Mapping[str, Any], list[int], bool]
"""A message, its token ids, and whether a system message that the template adds leads them."""
Masked = tuple[list[int], list[int]]
"""Token ids, and 1 for each that carries loss, 0 for each that does not."""


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def __call__(self, text: str, **kwargs: Any) -> Any: ...
    def apply_chat_template(self, conversation: Chat, /, **kwargs: Any) -> Any: ...
    def decode(self, token_ids: Sequence[int], /) -> str: ...
    def get_added_vocab(self) -> Mapping[str, int]: ...


def get_response_lengths(loss_masks: list[list[int]]) -> list[int]:
    """Return, for each mask, the number of tokens from its first 1 to its end."""
    return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Token ids and loss masks of chats.

    ``tokenizer_type``: `qwen` renders every message by itself; `qwen3` renders it beside a user's message,
    and tool messages in a row together; `qwen3_5` renders the chat as a whole; `distill_qwen` trains on the
    last message alone.
    """

    def __init__(self, tokenizer: ChatTokenizer, tokenizer_type: str = "qwen") -> None:
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type
        self.system_message_length = self.gen_token_length = 0
        if tokenizer_type in ("qwen", "qwen3"):
            self.system_message_length, self.gen_token_length = self.get_system_message_length()

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        return get_response_lengths(loss_masks)

    def find_all_sublist_indices(self, main_list: list[int], sublist: list[int]) -> list[int]:
        starts = range(len(main_list) - len(sublist) + 1)
        return [start for start in starts if main_list[start : start + len(sublist)] == sublist]

    def get_system_message_length(self) -> tuple[int, int]:
        """Return the lengths of the system message that the template adds, and of its generation prompt."""
        chat = [{"role": "user", "content": _PROBE}] * 2
        text = self.tokenizer.apply_chat_template(chat, add_special_tokens=False, tokenize=False)
        ids, probe = self._encode(text), self._encode(_PROBE)
        first, second = self.find_all_sublist_indices(ids, probe)
        after = len(ids) - second - len(probe)
        before = (second - first) - len(probe) - after
        prompted = self._render(chat, add_generation_prompt=True, add_special_tokens=False)
        return first - before, len(prompted) - len(ids)

    def get_loss_mask(self, messages: Chat, tools: Tools = None) -> Masked:
        """Return token ids and loss mask of a chat. Raises ValueError."""
        kinds = {
            "qwen": self.gen_multi_turn_loss_mask_qwen,
            "qwen3": self.gen_multi_turn_loss_mask_qwen3,
            "qwen3_5": self.gen_multi_turn_loss_mask_qwen3_5,
            "distill_qwen": self.gen_multi_turn_loss_mask_distill_qwen,
        }
        kind = self.tokenizer_type
        if kind not in kinds:
            raise ValueError(f"tokenizer_type is {kind!r}, expected one of {', '.join(kinds)}")
        if kind == "qwen" and _DISTILLED in self.tokenizer.get_added_vocab():
            kind = "distill_qwen"
        return kinds[kind](messages, tools)

    def gen_multi_turn_loss_mask_qwen(self, messages: Chat, tools: Tools = None) -> Masked:
        return self._joined(
            (message, self._render([message], **({"tools": tools} if index == 0 else {})), index > 0)
            for index, message in enumerate(messages)
        )

    def gen_multi_turn_loss_mask_qwen3(self, messages: Chat, tools: Tools = None) -> Masked:
        return self._joined(self._beside_a_user(messages, tools))

    def _beside_a_user(self, messages: Chat, tools: Tools) -> Iterator[Rendered]:
        user = [{"role": "user", "content": _PROBE}]
        length = len(self._render(user))
        numbered = enumerate(messages)
        for _, run in groupby(numbered, _tools_together):
            (index, message), *others = run
            group = [message, *(other for _, other in others)]
            if index == 0:
                yield message, self._render(group + user, tools=tools)[:-length], False
            else:
                yield message, self._render(user + group)[length:], True

    def _joined(self, rendered: Iterable[Rendered]) -> Masked:
        ids: list[int] = []
        mask: list[int] = []
        for message, message_ids, is_led in rendered:
            if is_led and message["role"] != "system":
                message_ids = message_ids[self.system_message_length :]
            is_trained = message["role"] == "assistant" and message.get("step_loss_mask", 1) == 1
            prompt = self.gen_token_length if is_trained else len(message_ids)
            ids += message_ids
            mask += [0] * prompt + [1] * (len(message_ids) - prompt)
        return ids, mask

    def gen_multi_turn_loss_mask_qwen3_5(self, messages: Chat, tools: Tools = None) -> Masked:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, tools=tools, return_dict=False)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded.get("offset_mapping")
        if offsets is None:
            raise ValueError("tokenizer_type qwen3_5 needs a fast tokenizer, which gives offsets of tokens")
        if ids != self._render(messages, tools=tools):
            raise ValueError("the text of this chat template has other tokens than the chat")
        spans = list(self._assistant_spans(text, messages))
        return ids, [
            int(any(max(start, begin) < min(stop, end) for start, stop in spans)) for begin, end in offsets
        ]

    @staticmethod
    def _assistant_spans(text: str, messages: Chat) -> Iterator[tuple[int, int]]:
        """Yield start and end of each trained message in the text: after `<think>`, with its end token."""
        header, think, end_token = "<|im_start|>assistant\n", "<think>\n", "<|im_end|>"
        cursor = 0
        for message in messages:
            if message["role"] != "assistant":
                continue
            start = text.find(header, cursor)
            end = text.find(end_token, start + len(header))
            if start < 0 or end < 0:
                raise ValueError("a message of the assistant is not in the text of the chat template")
            start += len(header)
            cursor = end + len(end_token)
            cursor += text[cursor : cursor + 1] == "\n"
            if message.get("step_loss_mask", 1) == 1:
                yield start + len(think) * text.startswith(think, start), cursor

    def gen_multi_turn_loss_mask_distill_qwen(self, messages: Chat, tools: Tools = None) -> Masked:
        prompt = self._encode(
            self.tokenizer.apply_chat_template(
                messages[:1], tokenize=False, add_generation_prompt=True, tools=tools
            )
        )
        response = self._encode(messages[-1]["content"])
        trained = int(messages[-1].get("step_loss_mask", 1) == 1)
        return prompt + response, [0] * len(prompt) + [trained] * len(response)

    def get_loss_mask_with_multimodal_alignment(
        self, messages: Chat, input_ids: list[int], tools: Tools = None
    ) -> Masked:
        """Return ``input_ids``, and the mask of the chat's text aligned with their end."""
        _, mask = self.get_loss_mask([_as_text(message) for message in messages], tools)
        if len(input_ids) < len(mask):
            raise ValueError(f"{len(input_ids)} input_ids, but the text of the chat has {len(mask)} tokens")
        return input_ids, [0] * (len(input_ids) - len(mask)) + mask

    def get_text_from_loss_mask(self, token_ids: list[int], loss_masks: list[int]) -> list[str]:
        """Return the text of each run of tokens that carry loss."""
        runs = groupby(zip(loss_masks, token_ids, strict=True), lambda pair: pair[0] == 1)
        return [self.tokenizer.decode([token for _, token in run]) for is_trained, run in runs if is_trained]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _render(self, messages: Chat, **kwargs: Any) -> list[int]:
        return self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs)


def _tools_together(numbered: tuple[int, Mapping[str, Any]]) -> int:
    index, message = numbered
    return -1 if message["role"] == "tool" else index


def _as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content: str | list[str | dict[str, str]] | None = message.get("content")
    if not isinstance(content, list):
        return message
    parts = (part if isinstance(part, str) else part.get("text", "") for part in content)
    return {"role": message["role"], "content": " ".join(part for part in parts if part)}
