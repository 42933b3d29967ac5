"""Prompt sets: jsonl or parquet with the columns ``prompt`` and ``label``, in a seeded endless order."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from slipstream.rollout.trajectory import Prompt


class PromptError(ValueError):
    """A prompt file that cannot be used; the message names the file, the line and what was expected."""


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            rows = pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise PromptError(f"{path}: not a parquet file: {error}") from None
        yield from enumerate(rows, start=1)
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield number, json.loads(line.decode())
                except ValueError as error:  # also of the decoding
                    raise PromptError(f"{path}, line {number}: not JSON: {error}") from None


@dataclass(frozen=True)
class Example:
    """A prompt, and answers to learn from."""

    prompt: Prompt
    answers: tuple[str, ...]


def read_examples(path: Path, columns: Sequence[str]) -> list[Example]:
    """As ``read_prompts``, with a text in each of ``columns`` too. Raises PromptError, OSError."""
    found = []
    for number, prompt in enumerate(read_prompts(path), start=1):
        answers = tuple(prompt.metadata.get(column) for column in columns)
        for column, answer in zip(columns, answers, strict=True):
            if not answer or not isinstance(answer, str):
                raise PromptError(f"{path}, example {number}: `{column}` must be a text")
        found.append(Example(prompt, answers))
    return found


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(turn, dict) and "role" in turn for turn in prompt)


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file, numbered in file order. Raises PromptError, OSError."""
    prompts = []
    for number, row in _rows(path):
        if not isinstance(row, dict) or "prompt" not in row:
            raise PromptError(f"{path}, line {number}: expected an object with `prompt` (and `label`)")
        if not row["prompt"] or not (isinstance(row["prompt"], str) or _is_chat(row["prompt"])):
            raise PromptError(
                f"{path}, line {number}: `prompt` must be a text or a list of chat messages with a `role`"
            )
        rest = {key: value for key, value in row.items() if key not in ("prompt", "label")}
        prompts.append(Prompt(len(prompts), row["prompt"], row.get("label"), rest))
    if not prompts:
        raise PromptError(f"{path} holds no prompts")
    return prompts


class PromptStream:
    """An endless order over a prompt set, of which any position can be looked up.

    Epoch e is shuffled by (seed, e). ``position`` is where the next fresh prompt is.
    """

    def __init__(self, prompts: list[Prompt], *, shuffle: bool, seed: int, position: int = 0) -> None:
        self._prompts = prompts
        self._shuffle = shuffle
        self._seed = seed
        self.position = position
        self._order = lru_cache(maxsize=2)(self._order_of)

    def at(self, position: int) -> Prompt:
        """The prompt at a position, passed or to come."""
        epoch, offset = divmod(position, len(self._prompts))
        return self._order(epoch)[offset]

    def _order_of(self, epoch: int) -> list[Prompt]:
        order = list(self._prompts)
        if self._shuffle:
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return order
