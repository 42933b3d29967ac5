"""Leaves prompts out that are longer than the recipe allows, and counts them.

The chat template writes a prompt and its tokens are counted only where it may be too long: no token has
less than a byte, so that a prompt of few bytes cannot be. What the template adds to prompts of a shape is
measured once, with a letter in place of each text.
"""

import json
from dataclasses import replace
from typing import cast

from slipstream.rollout.tokens.tokenizer import HfTokenizer
from slipstream.rollout.tokens.trajectory import Prompt

Shape = tuple[object, ...]


class LengthFilter:
    """Says which prompts of one file are kept, and counts the others."""

    def __init__(self, tokenizer: HfTokenizer, most: int) -> None:
        """``most``: largest number of tokens of a prompt that is kept."""
        self._tokenizer = tokenizer
        self._most = most
        self._added: dict[Shape, int] = {}
        """Tokens that the template adds to prompts of a shape."""
        self.left_out = 0
        """Number of prompts that were not kept."""

    def __call__(self, prompt: Prompt) -> bool:
        """Return whether a prompt is kept. One that the template refuses is: it is refused elsewhere."""
        shape = shape_of(prompt)
        if (added := self._added.get(shape)) is None:
            added = self._added[shape] = self._measured(prompt)
        if text_bytes(prompt.prompt) + added <= self._most:
            return True
        try:
            tokens = len(rendered_ids(self._tokenizer, prompt))
        except Exception:  # the template is code of the model's
            return True
        self.left_out += tokens > self._most
        return tokens <= self._most

    def _measured(self, prompt: Prompt) -> int:
        """Return what the template adds to prompts of this one's shape; as much as is allowed: not known."""
        if any(not isinstance(message.get("content"), str) for message in prompt.messages()):
            return self._most
        empty = [{**message, "content": "x"} for message in prompt.messages()]
        try:
            return len(rendered_ids(self._tokenizer, replace(prompt, prompt=empty)))
        except Exception:  # it may refuse such a text
            return self._most


def rendered_ids(tokenizer: HfTokenizer, prompt: Prompt) -> list[int]:
    """Return a prompt as a rollout sends it. Raises whatever the chat template raises."""
    return tokenizer.apply_chat_template(prompt.messages(), add_generation_prompt=True, return_dict=False)


def shape_of(prompt: Prompt) -> Shape:
    """Return the features of a prompt by which a chat template may treat it differently."""
    if isinstance(prompt.prompt, str):
        return ("text",)
    return tuple(
        (message["role"], type(message.get("content")), *sorted(message)) for message in prompt.prompt
    )


def text_bytes(content: object) -> int:
    """Return the number of bytes of a text, or of the texts of a chat."""
    if isinstance(content, str):
        return len(content) if content.isascii() else len(content.encode(errors="replace"))
    if isinstance(content, list):
        messages = cast("list[dict[str, object]]", content)
        return sum(
            text_bytes(
                value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            )
            for message in messages
            for value in message.values()
        )
    return text_bytes(json.dumps(content, ensure_ascii=False, default=str))
