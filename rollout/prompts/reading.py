"""Reads prompt files: every row is looked at, and everything that is wrong is said at once.

file ──► rows, one at a time ──► columns ──► filter ──► checks of the caller ──► Prompt
            │                       │           │              │
            │                       │           └──► left out  │
            └───────────────────────┴──────────────────────────┴──► problems: file, line, value, expectation
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slipstream.configs.schema import PromptFile
from slipstream.rollout.prompts.columns import ABSENT, RowReader, value_at
from slipstream.rollout.prompts.files import local_files
from slipstream.rollout.prompts.rows import Problems, PromptError, rows, shown
from slipstream.rollout.tokens.trajectory import Prompt

Check = Callable[[Prompt], str | None]
"""Returns what is wrong with a prompt, beginning with the column; None: nothing."""

Filter = Callable[[Prompt], bool]
"""Returns whether a prompt is kept."""


@dataclass(frozen=True)
class Example:
    """A prompt with the texts to learn from, one for each column that was asked for."""

    prompt: Prompt
    targets: tuple[str, ...]
    fields: Mapping[str, object] = field(default_factory=dict[str, object])
    """Other fields of the message to learn, such as `reasoning_content`."""


def read_prompts(file: PromptFile, checks: Sequence[Check] = ()) -> list[Prompt]:
    """Read all prompts of a jsonl or parquet file, numbered from 0 in file order.

    Raises PromptError with every wrong row, and OSError.
    """
    return list(checked_prompts(file, checks))


def read_examples(file: PromptFile, columns: Sequence[str], checks: Sequence[Check]) -> Iterator[Example]:
    """Yield all prompts of a file, each with what it has in every one of ``columns``, in their order.

    ``checks``: ``text_in`` of each column among them. Raises PromptError with every wrong row, and OSError.
    """
    for prompt in checked_prompts(file, checks):
        yield Example(prompt, tuple(value_at(prompt.metadata, column) for column in columns))


def ends_with_answer(prompt: Prompt) -> str | None:
    """Check that a prompt is a chat whose last message is an answer, which is learned."""
    last = prompt.prompt[-1] if isinstance(prompt.prompt, list) and len(prompt.prompt) > 1 else {}
    if last.get("role") == "assistant" and isinstance(last.get("content"), str) and last["content"]:
        return None
    return (
        "expected two or more chat messages, of which the last one is a text of the role assistant to learn"
    )


def answered_chat(prompt: Prompt) -> Example:
    """Return a chat without its last message, and the text of that one to learn."""
    *asked, answer = prompt.messages()
    fields = {name: value for name, value in answer.items() if name not in ("role", "content")}
    return Example(replace(prompt, prompt=asked), (answer["content"],), fields)


def text_in(column: str) -> Check:
    """Return a check that a column besides the prompt holds a text."""

    def check(prompt: Prompt) -> str | None:
        text = value_at(prompt.metadata, column)
        if text is ABSENT:
            return f"there is no column `{column}`; expected a text to learn from"
        if isinstance(text, str) and text:
            return None
        return f"`{column}` is {shown(text)}, expected a text that is not empty"

    return check


def checked_prompts(
    file: PromptFile, checks: Sequence[Check] = (), *, first: int = 0, keeps: Filter | None = None
) -> Iterator[Prompt]:
    """Yield the prompts of a file that nothing is wrong with, and hold none of them.

    ``first``: number of the first prompt. ``keeps``: which prompts are not left out; None: all. Raises
    OSError, and after the last prompt PromptError with every wrong row.
    """
    reader, count = RowReader(file), 0
    for path in local_files(file.path):
        problems = Problems(path)
        for line, row in rows(path, problems):
            prompt = reader.prompt(row, first + count, str(path), line)
            count += 1
            if isinstance(prompt, str):
                problems.add(line, prompt)
                continue
            if keeps is not None and not keeps(prompt):
                continue
            reason = next(filter(None, (check(prompt) for check in checks)), None)
            if reason is not None:
                problems.add(line, reason)
            else:
                yield prompt
        problems.raise_any()
    if not count:
        raise PromptError(
            f"{file.path} holds no prompts; expected one or more rows with `{file.columns.prompt}`"
        )
