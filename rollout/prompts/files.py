"""The files of a prompt set's path: one, several by a pattern, or those of a data set of the hub."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.configs.schema import is_on_hub, path_text
from slipstream.configs.schema.data import PROMPT_SUFFIXES
from slipstream.rollout.prompts.rows import PromptError
from slipstream.rollout.system.hub import HubError, hub_files


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
