"""Prompt sets: jsonl or parquet files with columns ``prompt`` and ``label``, in a seeded endless order."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard, cast

import msgspec

from slipstream.rollout.trajectory import Messages, Prompt


class PromptError(ValueError):
    """A prompt file cannot be used; the message names the file, the line and what was expected."""


def _rows(path: Path) -> Iterator[tuple[int, object]]:
    """Yield the number of each row or line, from 1, and what it holds."""
    if path.suffix == ".parquet":
        yield from enumerate(_parquet_rows(path), start=1)
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield number, json.loads(line.decode())
                except ValueError as error:  # UnicodeDecodeError included
                    raise PromptError(f"{path}, line {number}: not JSON: {error}") from None


def _parquet_rows(path: Path) -> list[object]:
    import pyarrow  # pyright: ignore[reportMissingTypeStubs]
    import pyarrow.parquet  # pyright: ignore[reportMissingTypeStubs]

    arrow, parquet = cast("Any", pyarrow), cast("Any", pyarrow.parquet)  # pyarrow has no types
    try:
        return parquet.read_table(path).to_pylist()
    except arrow.ArrowInvalid as error:
        raise PromptError(f"{path}: not a parquet file: {error}") from None


@dataclass(frozen=True)
class Example:
    """A prompt with the texts to learn from, one for each column that was asked for."""

    prompt: Prompt
    targets: tuple[str, ...]


def read_examples(path: Path, columns: Sequence[str]) -> list[Example]:
    """Read all prompts of a file, each with a text from every one of ``columns``, in their order.

    Raises PromptError and OSError.
    """
    examples: list[Example] = []
    for number, prompt in enumerate(read_prompts(path), start=1):
        targets: list[str] = []
        for column in columns:
            text = prompt.metadata.get(column)
            if not text or not isinstance(text, str):
                raise PromptError(f"{path}, example {number}: `{column}` must be a text that is not empty")
            targets.append(text)
        examples.append(Example(prompt, tuple(targets)))
    return examples


def _is_chat(prompt: object) -> TypeGuard[Messages]:
    if not isinstance(prompt, list):
        return False
    return all(isinstance(message, dict) and "role" in message for message in cast("list[object]", prompt))


def read_prompts(path: Path) -> list[Prompt]:
    """Read all prompts of a jsonl or parquet file, numbered from 0 in file order.

    Raises PromptError and OSError.
    """
    prompts: list[Prompt] = []
    for number, row in _rows(path):
        if not isinstance(row, dict) or "prompt" not in row:
            raise PromptError(f"{path}, line {number}: expected an object with `prompt` (and `label`)")
        columns = cast("dict[str, object]", row)
        prompt = columns["prompt"]
        if not prompt or not (isinstance(prompt, str) or _is_chat(prompt)):
            raise PromptError(
                f"{path}, line {number}: `prompt` must be a text or a list of chat messages with a `role`"
            )
        try:
            msgspec.msgpack.encode(columns)  # as messages to other processes hold them
        except (TypeError, OverflowError, UnicodeEncodeError) as error:
            raise PromptError(f"{path}, line {number}: {error}; write such a value as a text") from None
        metadata = {name: value for name, value in columns.items() if name not in ("prompt", "label")}
        prompts.append(Prompt(len(prompts), prompt, columns.get("label"), metadata))
    if not prompts:
        raise PromptError(f"{path} holds no prompts")
    return prompts


class PromptStream:
    """An endless order over a prompt set in which any position can be looked up.

    Each epoch holds every prompt once. Epoch e is shuffled by (seed, e), so that the order depends on
    nothing else and a resumed run goes on in it.
    """

    def __init__(self, prompts: list[Prompt], *, shuffle: bool, seed: int, position: int = 0) -> None:
        self._prompts = prompts
        self._shuffle = shuffle
        self._seed = seed
        self.position = position
        """Position of the next prompt that has not been drawn."""
        self._order = lru_cache(maxsize=2)(self._order_of)

    def draw(self) -> int:
        """Return the position of the next prompt, and go on behind it."""
        self.position += 1
        return self.position - 1

    @property
    def is_ready(self) -> bool:
        """True if the next prompt is there, as it always is."""
        return True

    def at(self, position: int) -> Prompt:
        """Return the prompt at any position, drawn already or not."""
        epoch, offset = divmod(position, len(self._prompts))
        return self._order(epoch)[offset]

    def _order_of(self, epoch: int) -> list[Prompt]:
        order = list(self._prompts)
        if self._shuffle:
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return order
