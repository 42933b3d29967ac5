"""Models of the Hugging Face Hub that a recipe names. A run downloads them when it starts, and all of its
processes get the folders in the hub's cache.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from slipstream.backend.driver.start.inputs import InputError
from slipstream.backend.driver.start.job import is_restart
from slipstream.backend.driver.start.prepare import run_module
from slipstream.backend.driver.start.run_folder import with_paths
from slipstream.configs.rules import check_rules
from slipstream.configs.schema import RunConfig, hub_model, is_on_hub, path_text
from slipstream.rollout.prompts.reading import at_commit, cached_commit
from slipstream.rollout.system.durable import write_durably
from slipstream.rollout.system.hub import HubError, model_files

COMMITS = "hub.json"
"""Commit of each model and data set of the hub, by its name in the recipe. A resumed run keeps to them."""

WILL_DOWNLOAD = "is not in the cache of this machine: the run downloads it when it starts"


def models_of_hub(config: RunConfig) -> dict[str, str]:
    """Return the models of the hub by the settings that name them."""
    names: dict[str, str] = {}

    def see(setting: str, path: Path) -> Path:
        if hub_model(path) is not None:
            names[setting] = path_text(path)
        return path

    with_paths(config, see)
    return names


async def with_local_models(
    config: RunConfig, say: Callable[[str], None], *, resume: bool = False
) -> RunConfig:
    """Return the recipe with folders in place of models of the hub, which are downloaded if need be.

    ``resume``: the run goes on with the commits that it has used, also of data sets. Raises InputError with
    all problems, those of the rules that read a model among them, and PrepareFailed.
    """
    goes_on = resume or is_restart(config.run.folder, os.environ)
    commits = _recorded(config.run.folder / COMMITS) if goes_on else {}

    def kept(_: str, path: Path) -> Path:
        commit = commits.get(path_text(path)) if _is_data(path) else None
        return path if commit is None else at_commit(path, commit)

    config = with_paths(config, kept)
    names = models_of_hub(config)
    if not names:
        return config
    folders, problems = dict[str, Path](), dict[str, str]()

    def hear(line: str) -> None:
        kind, name, text = json.loads(line)
        if kind == "folder":
            folders[name] = Path(text)
        elif kind == "problem":
            problems[name] = text
        else:
            say(text)

    asked = {name: commits.get(name) for name in dict.fromkeys(names.values())}
    await run_module("slipstream.rollout.system.hub", asked, hear, name="the download of models from the hub")
    if problems:
        raise InputError(
            "\n".join(f"{setting}: {problems[name]}" for setting, name in names.items() if name in problems)
        )
    return with_folders(config, folders)


def with_folders(config: RunConfig, folders: Mapping[str, Path]) -> RunConfig:
    """Return the recipe with ``folders`` in place of the names of models.

    Raises InputError with every rule that the recipe breaks now that the config.json of the models is known.
    """
    local = with_paths(config, lambda _, path: folders.get(path_text(path), path))
    before = set(map(str, check_rules(config)))
    broken = [text for text in map(str, check_rules(local)) if text not in before]
    if broken:
        raise InputError("\n".join(broken))
    return local


def cached_models(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return the recipe with folders in place of those models that are in the hub's cache, and notes.

    Each note tells which model a run would download. Nothing is. Raises InputError as ``with_folders``.
    """
    folders, notes = dict[str, Path](), list[str]()
    for setting, name in models_of_hub(config).items():
        try:
            folders[name] = model_files(name, cached=True)
        except HubError:
            notes.append(f"{setting}: {name} {WILL_DOWNLOAD}, and what depends on its files is checked then")
    return with_folders(config, folders), notes


def record_commits(named: RunConfig, local: RunConfig) -> None:
    """Write the commits into the run folder. ``named``: the recipe; ``local``: it from ``with_local_models``.

    Raises OSError.
    """
    paths, commits = dict[str, Path](), dict[str, str]()
    with_paths(local, lambda setting, path: paths.setdefault(setting, path))

    def note(setting: str, path: Path) -> Path:
        commit = cached_commit(paths[setting]) if _is_data(path) else None
        if hub_model(path) is not None:
            commit = paths[setting].name
        if commit is not None:
            commits[path_text(path)] = commit
        return path

    with_paths(named, note)
    if commits:
        write_durably(local.run.folder / COMMITS, json.dumps(commits, indent=2) + "\n")


def _is_data(path: Path) -> bool:
    return is_on_hub(path) and path.parts[1:2] == ("datasets",)


def _recorded(file: Path) -> Mapping[str, str]:
    """Return the recorded commits; none of a run that had nothing of the hub. Raises InputError."""
    try:
        return TypeAdapter(dict[str, str]).validate_json(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        raise InputError(
            f"{file} cannot be read: {' '.join(str(error).split())[:200]}; expected the commits of what the "
            "run has of the hub. Restore it from a copy, or delete it to go on with the present ones"
        ) from None
