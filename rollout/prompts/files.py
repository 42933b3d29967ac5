"""The files of a prompt set's path: one, several by a pattern, or those of a data set of the hub."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from slipstream.configs.schema.data import PROMPT_SUFFIXES, is_on_hub, path_text
from slipstream.rollout.prompts.rows import PromptError

WAY_OUT = "download the files where there is a network, and name them by their path"


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


def _downloaded(name: str) -> list[Path]:
    """Return local copies of the files of a data set: those in the hub's cache, or new ones."""
    repository, revision, folder = _named(name)
    if importlib.util.find_spec("huggingface_hub") is None:
        raise PromptError(
            f"{name}: the package huggingface_hub, which downloads it, is not installed: pip install "
            f"huggingface_hub; or {WAY_OUT}"
        )
    from httpx import HTTPError
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    patterns = [f"{folder}*{suffix}" for suffix in PROMPT_SUFFIXES]
    try:
        download = cast("Callable[..., str]", snapshot_download)
        top = Path(download(repository, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        raise PromptError(
            f"{name}: the data set is gated: accept its terms on the hub, and log in (hf auth login)"
        ) from None
    except RepositoryNotFoundError:
        raise PromptError(
            f"{name}: the hub has no data set {repository!r} that you may see; correct the name, or log in "
            "(hf auth login)"
        ) from None
    except (HTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PromptError(f"{name} cannot be downloaded: {reason}; {WAY_OUT}") from None
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
