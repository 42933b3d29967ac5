"""Prompt sets: jsonl or parquet files, as the recipe says how to read them, in a seeded endless order."""

from slipstream.rollout.prompts.order import EpochOrder, PromptStream
from slipstream.rollout.prompts.reading import (
    Check,
    Example,
    Filter,
    answered_chat,
    checked_prompts,
    ends_with_answer,
    read_examples,
    read_prompts,
    text_in,
)
from slipstream.rollout.prompts.rows import PromptError, row_word
from slipstream.rollout.prompts.stored import PromptSet, SourcePrompts, StoredPrompts

__all__ = [
    "Check",
    "EpochOrder",
    "Example",
    "Filter",
    "PromptError",
    "PromptSet",
    "PromptStream",
    "SourcePrompts",
    "StoredPrompts",
    "answered_chat",
    "checked_prompts",
    "ends_with_answer",
    "read_examples",
    "read_prompts",
    "row_word",
    "text_in",
]
