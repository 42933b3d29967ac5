"""Reads prompt files: every row is looked at, and everything that is wrong is said at once.

file ──► rows, one at a time ──► columns ──► filter ──► checks of the caller ──► Prompt
            │                       │           │              │
            │                       │           └──► left out  │
            └───────────────────────┴──────────────────────────┴──► problems: file, line, value, expectation
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slipstream.configs.schema import PromptFile, is_on_hub, path_text
from slipstream.configs.schema.data import PROMPT_SUFFIXES
from slipstream.rollout.prompts.columns import ABSENT, RowReader, value_at
from slipstream.rollout.prompts.rows import Problems, PromptError, rows, shown
from slipstream.rollout.system.hub import HubError, hub_files
from slipstream.rollout.tokens.trajectory import Prompt


def local_files(path: Path) -> Sequence[Path]:
    """Return the files that a path names, in the order of their names. Those of the hub are downloaded once.

    Raises PromptError when there are none.
    """
    if is_on_hub(path):
        return _downloaded(path_text(path))
    if "*" not in path.name:
        return [path]
    files = sorted(path.parent.glob(path.name))
    if not files:
        raise PromptError(f"{path}: no file has such a name; expected one or more .jsonl or .parquet files")
    return files


def at_commit(path: Path, commit: str) -> Path:
    """Return the path of files of a data set of the hub at a commit, in place of their revision."""
    repository, _, folder = _named(path_text(path))
    return Path(f"hf://datasets/{repository}@{commit}", folder)


def cached_commit(path: Path) -> str | None:
    """Return the commit of files of a data set of the hub; None if they are not in the hub's cache."""
    try:
        return _top(path_text(path), cached=True).name
    except HubError:
        return None


def _top(name: str, *, cached: bool = False) -> Path:
    repository, revision, folder = _named(name)
    patterns = [f"{folder}*{suffix}" for suffix in PROMPT_SUFFIXES]
    return hub_files(name, repository, "dataset", revision, patterns, cached=cached)


def _downloaded(name: str) -> list[Path]:
    """Return local copies of the files of a data set: those in the hub's cache, or new ones."""
    _, _, folder = _named(name)
    try:
        top = _top(name)
    except HubError as error:
        raise PromptError(str(error)) from None
    return _chosen(name, folder, {path.relative_to(top).as_posix(): path for path in sorted(top.rglob("*"))})


def _chosen(name: str, folder: str, paths: Mapping[str, Path]) -> list[Path]:
    """Return the files of a data set whose names begin with ``folder``. Raises PromptError."""
    files = {
        each: path
        for each, path in paths.items()
        if each.startswith(folder) and each.endswith(PROMPT_SUFFIXES) and path.is_file()
    }
    if not files:
        raise PromptError(
            f"{name}: no .jsonl or .parquet file of the data set has a name that begins with {folder!r}; "
            f"its files: https://huggingface.co/datasets/{_named(name)[0]}/tree/main"
        )
    if not folder and len(files) > 1:
        raise PromptError(
            f"{name} has several files: {', '.join(list(files)[:10])}; add the folder or the beginning of "
            "the name of those that you mean, such as /main/train"
        )
    return list(files.values())


def _named(name: str) -> tuple[str, str | None, str]:
    """Return the data set, the revision and the beginning of the file names that a path names."""
    owner, data_set, *folder = name.removeprefix("hf://datasets/").split("/")
    data_set, _, revision = data_set.partition("@")
    return f"{owner}/{data_set}", revision or None, "/".join(folder)


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
