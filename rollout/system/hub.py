"""Files of the Hugging Face Hub: found in its cache on this machine, or downloaded into the cache.

python -m slipstream.rollout.system.hub '{"hf://ORG/NAME": "COMMIT or null", ...}'

Downloads models. Prints a list in JSON for each line of progress, folder and problem: kind, model and
text.
"""

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from slipstream.configs.schema.base import hub_model
from slipstream.rollout.system.disk import FULL

Kind = Literal["model", "dataset"]

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "tokenizer*")

SHARES = 50
"""Number of lines about a whole download."""


class HubError(ValueError):
    """Files of the hub cannot be had. The message names them, and says why and what to do."""


def hub_files(
    name: str,
    repository: str,
    kind: Kind,
    revision: str | None,
    patterns: Sequence[str],
    *,
    cached: bool = False,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Return the folder with those files of a repository that ``patterns`` name. Missing ones are downloaded.

    The folder is named after the commit. ``name``: names the files in messages. ``revision``: a branch, a tag
    or a commit; None: the default branch. ``cached``: look in the cache alone. ``say``: hears of the
    download. Raises HubError.
    """
    what = {"model": "model", "dataset": "data set"}[kind]
    command = f"hf download {repository}{' --repo-type dataset' * (kind == 'dataset')}"
    command += f" --revision {revision}" if revision else ""
    way_out = (
        "download the files where there is a network, into the same HF_HOME, or with --local-dir into a "
        f"folder to name instead: {command}"
    )
    if importlib.util.find_spec("huggingface_hub") is None:
        raise HubError(
            f"{name}: the package huggingface_hub, which downloads it, is not installed: pip install "
            f"huggingface_hub; or {way_out}"
        )
    from httpx import HTTPError
    from huggingface_hub import constants, snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    download = cast("Callable[..., Any]", snapshot_download)
    how: dict[str, Any] = {"repo_type": kind, "revision": revision, "allow_patterns": list(patterns)}
    if kind == "model":  # other forms of the weights have folders or names of their own
        how["ignore_patterns"] = ["*/*", "consolidated*"]
    if cached:
        how["local_files_only"] = True
    try:
        if say is not None:
            size = _missing_bytes(download, repository, how)
            _check_room(name, size, Path(constants.HF_HUB_CACHE))
            how["tqdm_class"] = _bar(name, size, say)
        return Path(download(repository, **how))
    except HubError:
        raise
    except GatedRepoError:
        page = f"{constants.ENDPOINT}/{'datasets/' * (kind == 'dataset')}{repository}"
        raise HubError(
            f"{name}: the {what} is gated: accept its terms on the hub ({page}), and log in (hf auth login)"
        ) from None
    except RepositoryNotFoundError:
        raise HubError(
            f"{name}: the hub has no {what} {repository!r} that you may see; correct the name, or log in "
            "(hf auth login)"
        ) from None
    except RevisionNotFoundError:
        raise HubError(
            f"{name}: the {what} has no revision {revision!r}; expected a branch, a tag or a commit of it"
        ) from None
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        if any(isinstance(each, OSError) and each.errno in FULL for each in _causes(error)):
            raise HubError(_no_room(name, Path(constants.HF_HUB_CACHE), "more room")) from None
        is_wrapped = isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None
        reason = " ".join(str(error.__cause__ if is_wrapped else error).split())[:200]
        raise HubError(f"{name} cannot be downloaded: {reason}; {way_out}") from None


def model_files(
    name: str, commit: str | None = None, *, cached: bool = False, say: Callable[[str], None] | None = None
) -> Path:
    """Return the folder of the model that a recipe names ``name``, at a ``commit`` if one is given.

    The rest is as of ``hub_files``.
    """
    named = hub_model(Path(name))
    if named is None:
        raise HubError(f"{name}: expected hf://ORG/NAME or hf://ORG/NAME@REVISION")
    repository, revision = named
    return hub_files(name, repository, "model", commit or revision, MODEL_FILES, cached=cached, say=say)


def _missing_bytes(download: Callable[..., Any], repository: str, how: dict[str, Any]) -> int:
    """Return the bytes that are not in the cache yet; 0 without a hub, which the download itself tells."""
    from huggingface_hub.errors import DryRunError

    try:
        files = download(repository, **how, dry_run=True)
    except DryRunError:
        return 0
    return sum(file.file_size for file in files if file.will_download)


def _check_room(name: str, size: int, cache: Path) -> None:
    """Raise HubError when a download does not fit on the disk of the cache."""
    place = next(folder for folder in (cache, *cache.absolute().parents) if folder.is_dir())
    if size > shutil.disk_usage(place).free:
        raise HubError(_no_room(name, cache, _gb(size)))


def _no_room(name: str, cache: Path, needed: str) -> str:
    place = next(folder for folder in (cache, *cache.absolute().parents) if folder.is_dir())
    return (
        f"{name}: the cache {cache} has {_gb(shutil.disk_usage(place).free)} free, expected {needed}; free "
        "some, or set HF_HOME to a folder on a larger disk"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _bar(name: str, size: int, say: Callable[[str], None]) -> type:
    """Return a progress bar that says each further share of ``size`` bytes in a line."""
    from tqdm import tqdm

    bar = cast("type[Any]", tqdm)

    class SaidBar(bar):
        said = -1

        def display(self, *_: object, **__: object) -> None:
            # The library has other bars: of files, and of bytes that the network compresses.
            if self.unit != "B" or not str(self.desc).startswith("Reconstruct") or not size:
                return
            share = SHARES * int(self.n) // size
            if share > self.said:
                self.said = share
                say(f"downloading {name}: {_gb(int(self.n))} of {_gb(size)}")

    return SaidBar


def _gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def main() -> None:
    for name, commit in json.loads(sys.argv[1]).items():
        try:
            folder = model_files(name, commit, say=partial(_print, "progress", name))
            _print("folder", name, str(folder))
        except HubError as error:
            _print("problem", name, str(error))


def _print(kind: str, name: str, text: str) -> None:
    print(json.dumps([kind, name, text]), flush=True)


if __name__ == "__main__":
    main()
