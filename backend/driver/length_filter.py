"""Leaves prompts out that are longer than the recipe allows, and counts them.

The chat template writes a prompt and its tokens are counted only where it may be too long: no token has
less than a byte, so that a prompt of few bytes cannot be. What the template itself adds to prompts of a shape
is at most what the shortest of them has in all.
"""

import json

from slipstream.rollout.tokenizer import HfTokenizer
from slipstream.rollout.trajectory import Prompt

Shape = tuple[object, ...]


class LengthFilter:
    """Says which prompts of one file are kept, and counts the others."""

    def __init__(self, tokenizer: HfTokenizer, most: int) -> None:
        """``most``: largest number of tokens of a prompt that is kept."""
        self._tokenizer = tokenizer
        self._most = most
        self._shortest: dict[Shape, int] = {}
        """Tokens of the shortest prompt of each shape whose tokens were counted."""
        self.left_out = 0
        """Number of prompts that were not kept."""

    def __call__(self, prompt: Prompt) -> bool:
        """Return whether a prompt is kept. One that the template refuses is: it is refused elsewhere."""
        shape = shape_of(prompt)
        added = self._shortest.get(shape)
        if added is not None and text_bytes(prompt.prompt) + added <= self._most:
            return True
        try:
            tokens = len(rendered_ids(self._tokenizer, prompt))
        except Exception:  # the template is code of the model's
            return True
        self._shortest[shape] = min(tokens, tokens if added is None else added)
        self.left_out += tokens > self._most
        return tokens <= self._most


def rendered_ids(tokenizer: HfTokenizer, prompt: Prompt) -> list[int]:
    """Return a prompt as a rollout sends it. Raises whatever the chat template raises."""
    return tokenizer.apply_chat_template(prompt.messages(), add_generation_prompt=True, return_dict=False)


def shape_of(prompt: Prompt) -> Shape:
    """Return what of a prompt a chat template may treat in another way."""
    if isinstance(prompt.prompt, str):
        return ("text",)
    return tuple(
        (message["role"], type(message.get("content")), *sorted(message)) for message in prompt.prompt
    )


def text_bytes(content: object) -> int:
    """Return the number of bytes of a text, or of a chat as JSON."""
    if not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False, default=str)
    return len(content.encode(errors="replace"))
