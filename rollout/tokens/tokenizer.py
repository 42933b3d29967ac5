"""The tokenizer of a model folder."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from slipstream.rollout.system.garbage import kept_for_good
from slipstream.rollout.system.torch_compiler import compiler_put_off
from slipstream.rollout.tokens.trajectory import Messages

TokenizerT = TypeVar("TokenizerT")

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""Without any of these files transformers makes up an empty tokenizer."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that workflows use."""

    def apply_chat_template(self, conversation: Messages, **kwargs: object) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], **kwargs: object) -> str: ...


class HfTokenizer(Tokenizer, Protocol):
    """An HF tokenizer, with what runs need of it beyond workflows."""

    eos_token_id: int
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
