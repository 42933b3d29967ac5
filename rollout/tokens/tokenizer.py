"""The tokenizer of a model folder."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from slipstream.rollout.system.garbage import kept_for_good
from slipstream.rollout.system.torch_compiler import compiler_put_off
from slipstream.rollout.tokens.trajectory import Finish, Messages

TokenizerT = TypeVar("TokenizerT")

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""Without any of these files transformers makes up an empty tokenizer."""


_CALL_END = "<|call|>"
"""End token of gpt-oss that is a part of the call before it: its parsers find no call without it."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that workflows use."""

    eos_token_id: int

    def apply_chat_template(self, conversation: Messages, **kwargs: object) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], **kwargs: object) -> str: ...


class HfTokenizer(Tokenizer, Protocol):
    """An HF tokenizer, with what runs need of it beyond workflows."""

    chat_template: str | None

    def get_vocab(self) -> dict[str, int]: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def __len__(self) -> int: ...


def load_tokenizer(folder: Path, template_args: Mapping[str, object] | None = None) -> HfTokenizer:
    """Return the tokenizer of a model folder. Raises ValueError, OSError.

    ``template_args``: variables of the chat template, wherever no other values of them are given.
    """
    with kept_for_good(), compiler_put_off():
        from transformers import AutoTokenizer

    if not any((folder / name).exists() for name in _FILES):
        raise ValueError(f"{folder} has no tokenizer; expected one of {', '.join(_FILES)}")
    try:
        tokenizer = cast(HfTokenizer, AutoTokenizer.from_pretrained(folder))  # pyright: ignore[reportUnknownMemberType]
    except Exception as error:  # files of another format, or damaged ones
        raise ValueError(
            f"the tokenizer in {folder} cannot be read: {type(error).__name__}: {error}; copy the files "
            "tokenizer.json and tokenizer_config.json of the model again"
        ) from error
    return with_template_args(tokenizer, template_args or {})


def with_template_args(tokenizer: TokenizerT, template_args: Mapping[str, object]) -> TokenizerT:
    """Let a tokenizer apply its chat template with these variables, and return it."""
    if template_args:
        applied: Any = tokenizer
        applied.apply_chat_template = partial(applied.apply_chat_template, **template_args)
    return tokenizer


def said(
    tokenizer: Tokenizer, tokens: Sequence[int], finish: Finish, matched: int | str | None = None
) -> str:
    """Return what a completion says: its text with all special tokens, without the token that ends its turn.

    ``matched``: the token id or the stop text that has ended the completion; None: unknown, or neither. A
    stop text and a stop token that is text, such as `</tool_call>`, belong to what is said.
    """
    ids = list(tokens)
    if finish is Finish.STOP and ids and _ends_turn(tokenizer, ids[-1], matched):
        ids.pop()
    return tokenizer.decode(ids)


def _ends_turn(tokenizer: Tokenizer, token: int, matched: int | str | None) -> bool:
    """True if a completion has said nothing with its last token.

    Published models have several end tokens (`eos_token_id` of generation_config.json), and recipes name
    others (`stop_token_ids`). All that end a turn are special tokens. A special token may also be a part of
    an answer: a closing tag, the end of a call, or one in which a stop text is complete.
    """
    if token == tokenizer.eos_token_id:
        return True
    text = tokenizer.decode([token])
    if tokenizer.decode([token], skip_special_tokens=True) or text == _CALL_END or text.startswith("</"):
        return False
    return not isinstance(matched, str) or matched == text
