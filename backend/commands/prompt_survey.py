"""What the prompt files of a recipe hold, and what of it is probably not meant.

    prompts that nothing is wrong with, one at a time ──► Survey ──► a line of the report, warnings

A prompt takes 16 bytes of memory: its digest and its place.
"""

import hashlib
import json
import math
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from slipstream.backend.driver.start.length_filter import rendered_ids, text_bytes
from slipstream.backend.driver.start.plugin_checks import is_user_code
from slipstream.configs.schema import PluginConfig
from slipstream.rollout.prompts import row_word
from slipstream.rollout.tokens.tokenizer import HfTokenizer
from slipstream.rollout.tokens.trajectory import Messages, Prompt

MOST_MEASURED = 1 << 20
"""Bytes of prompts whose tokens are counted."""

MOST_CHARACTERS = 20_000
"""Number of different characters that are compared with the tokenizer."""

SHOWN = 5
"""Number of characters that a warning names."""


class Survey:
    """Of one prompt file. ``see`` is called with each of its prompts."""

    def __init__(
        self,
        setting: str,
        tokenizer: HfTokenizer | None,
        reward: PluginConfig | None,
        *,
        writes_prompts: bool = True,
    ) -> None:
        """``setting``: names the file. ``reward``: compares with the labels; None: nothing does.
        ``writes_prompts``: the chat template does, and no code of the user's.
        """
        self.setting = setting
        self._tokenizer = tokenizer
        self._reward = reward
        self._writes_prompts = writes_prompts
        self._digests = array("Q")
        self._lines = array("Q")
        self._files: dict[str, int] = {}
        """Number of the first prompt of each file."""
        self._lengths: list[int] = []
        self._measured = 0
        """Bytes of the prompts whose tokens were counted."""
        self._characters: dict[str, int] = {}
        """Number of the first prompt with each character."""
        self._labels: Counter[str] = Counter()
        """Number of labels of each kind."""
        self._odd_labels: dict[str, str] = {}
        """By what is odd: the first such label."""
        self._tools: int | None = None
        """Number of the first prompt with a column of tools."""

    @property
    def count(self) -> int:
        """Number of prompts so far."""
        return len(self._digests)

    def see(self, prompt: Prompt, targets: Sequence[str] = ()) -> None:
        """Take note of a prompt, and of the texts to learn that belong to it."""
        number = self.count
        self._files.setdefault(prompt.file, number)
        content = json.dumps([prompt.prompt, *targets], ensure_ascii=False, default=str)
        digest = hashlib.blake2b(content.encode(errors="replace"), digest_size=8).digest()
        self._digests.append(int.from_bytes(digest))
        self._lines.append(prompt.line)
        if len(self._characters) < MOST_CHARACTERS:
            for character in set("".join([*_texts(prompt.prompt), *targets])):
                self._characters.setdefault(character, number)
        self._measure(prompt)
        if self._tools is None and prompt.metadata.get("tools"):
            self._tools = number
        if self._reward is not None:
            self._see_label(prompt)

    def report(self) -> str:
        """Return a line about the file."""
        text = f"{self.setting}: {self.count:,} prompt{'s' * (self.count != 1)}"
        if self._lengths:
            lengths = sorted(self._lengths)
            part = "" if len(lengths) == self.count else f", of the first {len(lengths):,}"
            text += (
                f" of {lengths[0]:,} to {lengths[-1]:,} tokens (median {lengths[len(lengths) // 2]:,}{part})"
            )
        return text

    def warnings(self) -> Iterator[str]:
        """Yield what is probably not meant, without its setting."""
        yield from self._equal_prompts()
        yield from self._unknown_characters()
        yield from self._unequal_labels()
        if self._tools is not None and self._writes_prompts:
            yield (
                f"{self._place(self._tools)}: nothing writes the column `tools` into prompts: name tools in "
                "the recipe (the workflow ToolUse), or write their schemas into the prompt"
            )

    def shared_with(self, training: Iterable["Survey"]) -> Iterator[str]:
        """Yield what this held-out file has in common with files to train on."""
        own = self._keys()
        for other in training:
            found = np.flatnonzero(np.isin(own, other._keys()))
            if not found.size:
                continue
            here = int(found[0])
            there = int(np.flatnonzero(other._keys() == own[here])[0])
            yield (
                f"{len(found):,} of {self.count:,} held-out prompts are trained on, such as "
                f"{self._place(here)} ({other.setting}: {other._place(there)}): an evaluation rewards memory"
            )

    def _measure(self, prompt: Prompt) -> None:
        if self._tokenizer is None or not self._tokenizer.chat_template or self._measured > MOST_MEASURED:
            return
        self._measured += text_bytes(prompt.prompt)
        try:
            self._lengths.append(len(rendered_ids(self._tokenizer, prompt)))
        except Exception:  # the template is code of the model's, and is checked elsewhere
            return

    def _keys(self) -> npt.NDArray[np.uint64]:
        return np.frombuffer(self._digests, np.uint64)

    def _place(self, number: int, beside: int | None = None) -> str:
        """Return file and line of a prompt; its line alone if that of ``beside`` is in the same file."""
        file, line = self._file(number), self._lines[number]
        is_known = beside is not None and self._file(beside) == file
        return f"{'' if is_known else f'{file}, '}{row_word(file)} {line}"

    def _file(self, number: int) -> str:
        return max((first, name) for name, first in self._files.items() if first <= number)[1]

    def _equal_prompts(self) -> Iterator[str]:
        keys = self._keys()
        _, firsts, inverse = np.unique(keys, return_index=True, return_inverse=True)
        later = np.flatnonzero(firsts[inverse] != np.arange(keys.size))
        if later.size:
            number = int(later[0])
            first = int(firsts[inverse[number]])
            yield (
                f"{later.size:,} of {self.count:,} prompts are equal to an earlier one: "
                f"{self._place(number)} to {self._place(first, beside=number)}"
            )

    def _unknown_characters(self) -> Iterator[str]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return
        unknown = {
            character: number
            for character, number in self._characters.items()
            if not character.isspace() and _is_unknown(tokenizer, character)
        }
        if unknown:
            named = " ".join(sorted(unknown, key=lambda each: unknown[each])[:SHOWN])
            more = f" and {len(unknown) - SHOWN:,} others" if len(unknown) > SHOWN else ""
            yield (
                f"the tokenizer has no tokens for {named}{more}, first in "
                f"{self._place(min(unknown.values()))}: the model does not see them"
            )

    def _see_label(self, prompt: Prompt) -> None:
        assert self._reward is not None
        label = prompt.label
        self._labels[_kind(label)] += 1
        odd = reason = ""
        if isinstance(label, float) and math.isnan(label):
            odd, reason = "NaN", "no answer equals it"
        elif isinstance(label, str) and not label.strip():
            odd, reason = "empty", "it is an empty text"
        elif isinstance(label, bool | int | float) and is_user_code(self._reward):
            odd = "number"
            reason = (
                f"a response is a text, and never equals it unless {self._reward.path} converts one of them"
            )
        elif isinstance(label, bool) or (isinstance(label, float) and not label.is_integer()):
            odd, reason = "number", f"{self._reward.path} compares with the text {str(label)!r}"
        if odd and odd not in self._odd_labels:
            place = f"{prompt.file}, {row_word(prompt.file)} {prompt.line}"
            self._odd_labels[odd] = f"{place}: the label is {label!r}: {reason}"

    def _unequal_labels(self) -> Iterator[str]:
        yield from self._odd_labels.values()
        if len(self._labels) > 1:
            kinds = ", ".join(f"{number:,} {kind}" for kind, number in self._labels.most_common())
            yield f"labels are of several kinds: {kinds}"


def _texts(prompt: "str | Messages") -> Iterator[str]:
    if isinstance(prompt, str):
        yield prompt
        return
    for message in prompt:
        content = message.get("content")
        if isinstance(content, str):
            yield content


def _is_unknown(tokenizer: HfTokenizer, character: str) -> bool:
    """True if a character cannot be told from the tokens, in whatever form the tokenizer writes it."""
    kept = tokenizer.decode(tokenizer.encode(character, add_special_tokens=False)).casefold()
    return all(
        unicodedata.normalize(form, character).casefold() not in kept
        for form in ("NFC", "NFD", "NFKC", "NFKD")
    )


def _kind(label: object) -> str:
    match label:
        case None:
            return "without one"
        case bool():
            return "true or false"
        case int() | float():
            return "numbers"
        case str():
            return "texts"
        case list():
            return "lists"
        case _:
            return "objects"
