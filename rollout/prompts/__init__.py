"""Prompt sets: jsonl or parquet files with columns ``prompt`` and ``label``, in a seeded endless order."""

from slipstream.rollout.prompts.order import PromptStream
from slipstream.rollout.prompts.reading import (
    Check,
    Example,
    PromptError,
    checked_prompts,
    read_examples,
    read_prompts,
    text_in,
)

__all__ = [
    "Check",
    "Example",
    "PromptError",
    "PromptStream",
    "checked_prompts",
    "read_examples",
    "read_prompts",
    "text_in",
]
