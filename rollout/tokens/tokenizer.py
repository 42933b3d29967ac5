"""The tokenizer of a model folder: one rule for trainer, collectors, gateways and `check`.

The rule is that of SGLang's `get_tokenizer`, and goes on where that stops: classes of transformers 5, such as
LlamaTokenizer, build their parts anew and drop those of tokenizer.json. SGLang restores the pre-tokenizer and
the decoder if the former is of another type; here every part that differs is restored. So all ids are those
of tokenizer.json, whatever class tokenizer_config.json names.
"""

import json
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar, cast

from slipstream.rollout.system.garbage import kept_for_good
from slipstream.rollout.tokens.trajectory import Finish, Messages

TokenizerT = TypeVar("TokenizerT")

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""Without any of these files transformers makes up an empty tokenizer."""

_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_MODEL_SETTINGS = (
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
    "max_input_chars_per_word",
)
"""What decides how a model of the library tokenizers splits a word, beside its vocabulary and merges."""

_WITH_FLAGS = {
    f"{family}Tokenizer{kind}" for family in ("Llama", "CodeLlama", "Gemma") for kind in ("", "Fast")
} | {"CohereTokenizerFast"}
"""Classes that heeded `add_bos_token` of tokenizer_config.json in transformers 4, with the default true."""

_CALL_END = "<|call|>"
"""End token of gpt-oss that is a part of the call before it: its parsers find no call without it."""

END_OF_REASONING = "</think>"
"""Ends the reasoning of an answer, in the formats of most models."""

_COMPILER = "torch._dynamo._trace_wrapped_higher_order_op"
_COMPILED_CLASS = "TransformGetItemToIndex"
"""A class of torch's compiler and its module. transformers imports them with its tokenizers for the attention
masks of compiled models, which takes two seconds of a core. Driver, collectors, gateways and judges load a
tokenizer, and compile nothing."""

Decode = Callable[[Sequence[int]], str]
"""Returns the text of token ids, special tokens included."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that workflows use."""

    eos_token_id: int

    def apply_chat_template(self, conversation: Messages, **kwargs: object) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], **kwargs: object) -> str: ...


class HfTokenizer(Tokenizer, Protocol):
    """An HF tokenizer, with what runs need of it beyond workflows."""

    chat_template: str | None
    restored: Sequence[str]
    """Parts of tokenizer.json that the class of the tokenizer had replaced."""

    def get_vocab(self) -> dict[str, int]: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def __len__(self) -> int: ...


def load_tokenizer(folder: Path, template_args: Mapping[str, object] | None = None) -> HfTokenizer:
    """Return the tokenizer of a model folder. Raises ValueError, OSError.

    ``template_args``: variables of the chat template, wherever no other values of them are given.
    """
    with kept_for_good(), _compiler_put_off():
        from transformers import AutoTokenizer

    if not any((folder / name).exists() for name in _FILES):
        raise ValueError(f"{folder} has no tokenizer; expected one of {', '.join(_FILES)}")
    try:
        tokenizer: Any = cast(Any, AutoTokenizer).from_pretrained(
            folder, trust_remote_code=False, clean_up_tokenization_spaces=False
        )
        restore(tokenizer, folder)
    except Exception as error:  # files of another format, or damaged ones
        raise ValueError(
            f"the tokenizer in {folder} cannot be read: {type(error).__name__}: {error}; copy the files "
            "tokenizer.json and tokenizer_config.json of the model again"
        ) from error
    return with_template_args(cast(HfTokenizer, tokenizer), template_args or {})


def restore(tokenizer: Any, folder: Path) -> None:
    """Give a tokenizer of transformers the parts of tokenizer.json, and note them as ``restored``.

    Raises whatever the library tokenizers raises for a damaged file.
    """
    restored = tokenizer.restored = list[str]()
    file, backend = folder / "tokenizer.json", getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not file.exists():
        return
    if type(tokenizer).__name__ not in ("TokenizersBackend", "PreTrainedTokenizerFast"):
        raw = raw_tokenizer(folder)
        for part in _PARTS:
            if _state(part, getattr(raw, part)) != _state(part, getattr(backend, part)):
                setattr(backend, part, getattr(raw, part))
                restored.append(part)
        if _model_state(raw.model) != _model_state(backend.model):
            backend.model = raw.model
            restored.append("model")
    _restore_begin_token(tokenizer, folder)


def raw_tokenizer(folder: Path) -> Any:
    """Return tokenizer.json of a folder as the library tokenizers reads it."""
    from tokenizers import Tokenizer as RawTokenizer

    raw = cast(Any, RawTokenizer).from_file(str(folder / "tokenizer.json"))
    raw.no_truncation()
    raw.no_padding()
    return raw


def _state(name: str, part: Any) -> object:
    """Return the settings of a part that have an effect on ids or texts."""
    if part is None:
        return None
    if name == "decoder" and type(part).__name__ == "ByteLevel":
        return "bytes, whatever the settings"
    return json.loads(part.__getstate__(), object_hook=_without_offsets)


def _without_offsets(settings: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in settings.items() if name != "trim_offsets"}


def _model_state(model: Any) -> tuple[object, ...]:
    return (type(model).__name__, *(getattr(model, name, None) or None for name in _MODEL_SETTINGS))


def _restore_begin_token(tokenizer: Any, folder: Path) -> None:
    """Let `encode` add the begin token as SGLang does: transformers 5 drops `add_bos_token` of the config."""
    file = folder / "tokenizer_config.json"
    settings: dict[str, object] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if settings.get("tokenizer_class") not in _WITH_FLAGS:
        return
    flag = settings.get("add_bos_token")
    wanted = {"add_bos_token": True if flag is None else flag, "add_eos_token": False}
    if any(getattr(tokenizer, name, None) != value for name, value in wanted.items()):
        for name, value in wanted.items():
            setattr(tokenizer, f"_{name}", value)
        tokenizer.update_post_processor()


def with_template_args(tokenizer: TokenizerT, template_args: Mapping[str, object]) -> TokenizerT:
    """Let a tokenizer apply its chat template with these variables, and return it."""
    if template_args:
        applied: Any = tokenizer
        applied.apply_chat_template = partial(applied.apply_chat_template, **template_args)
    return tokenizer


def said(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    finish: Finish,
    matched: int | str | None = None,
    stops: Sequence[str] = (),
) -> str:
    """Return what a completion says: its text with all special tokens, without the token that ends its turn.

    ``matched``: the token id or the stop text that has ended the completion; None: unknown, or neither. Where
    it is unknown, ``stops`` are the texts that may have. A stop text and a stop token that is text, such as
    `</tool_call>`, belong to what is said.
    """
    ids = list(tokens)
    if finish is Finish.STOP and ids:
        if matched is None:
            matched = _stop_in_end(tokenizer, ids, stops)
        if _ends_turn(tokenizer, ids[-1], matched):
            ids.pop()
    return tokenizer.decode(ids)


def _stop_in_end(tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str]) -> str | None:
    """Return the stop text that is complete with the last token; None: none of them is."""
    found = [stop for stop in stops if stop]
    if not found:
        return None
    whole, before = tokenizer.decode(ids), tokenizer.decode(ids[:-1])
    return next((stop for stop in found if whole.count(stop) > before.count(stop)), None)


def _ends_turn(tokenizer: Tokenizer, token: int, matched: int | str | None) -> bool:
    """True if a completion has said nothing with its last token.

    Published models have several end tokens (`eos_token_id` of generation_config.json), and recipes name
    others (`stop_token_ids`). All that end a turn are special tokens. A special token may also be a part of
    an answer: a closing tag, the end of a call, or one in which a stop text is complete. Recipes of base
    models name the end of a turn as a stop text, too; the chat template writes it.
    """
    if token == tokenizer.eos_token_id:
        return True
    text = tokenizer.decode([token])
    if tokenizer.decode([token], skip_special_tokens=True) or text == _CALL_END or text.startswith("</"):
        return False
    if not isinstance(matched, str):
        return True
    return matched == text and text in str(getattr(tokenizer, "chat_template", ""))


class _Later(ModuleType):
    """Stands for the module until somebody makes an object of the class."""

    class TransformGetItemToIndex:
        def __new__(cls) -> object:
            return getattr(import_module(_COMPILER), _COMPILED_CLASS)()


@contextmanager
def _compiler_put_off() -> Generator[None]:
    """Let modules that are imported inside the block have the class without torch's compiler.

    The compiler is imported when a module first uses the class. After the block, nothing replaces it.
    """
    if _COMPILER in sys.modules:
        yield
        return
    sys.modules[_COMPILER] = _Later(_COMPILER)
    try:
        yield
    finally:
        del sys.modules[_COMPILER]
