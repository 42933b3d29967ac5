"""API keys of a gateway: its operator adds, lists and revokes them."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slipstream.backend.commands.outcome import WrongInput
from slipstream.configs.load import load_recipe
from slipstream.rollout.gateway.keys import KeysError, add_key, keys_file, read_keys, revoke_key
from slipstream.rollout.tokens.turn_entries import TurnType


def file_of(where: str) -> Path:
    """Return the file of API keys that a user names: itself (.json), or the recipe whose it is.

    Raises WrongInput, and RecipeError for a wrong recipe.
    """
    if where.endswith(".json"):
        return Path(where)
    try:
        config = load_recipe(Path(where), [])
        return keys_file(config.gateway, config.run.folder)
    except KeysError as error:
        raise WrongInput(f"{where}: {error}") from None


def add(where: str, name: str, *, session: str | None, side: bool) -> str:
    """Add a key, and return it. Raises as ``file_of``."""
    try:
        return add_key(
            file_of(where), name, session=session, turn_type=TurnType.SIDE if side else TurnType.MAIN
        )
    except (KeysError, OSError) as error:
        raise WrongInput(str(error)) from None


def revoke(where: str, name: str) -> None:
    """Revoke a key. Raises as ``file_of``."""
    try:
        revoke_key(file_of(where), name)
    except (KeysError, OSError) as error:
        raise WrongInput(str(error)) from None


def listed(where: str) -> list[dict[str, str | None]]:
    """Return what may be shown of all keys, revoked ones included. Raises as ``file_of``."""
    try:
        keys = read_keys(file_of(where))
    except KeysError as error:
        raise WrongInput(str(error)) from None
    return [
        {
            "name": key.name,
            "turn_type": key.turn_type.name.lower(),
            "session": key.session,
            "created": key.created,
            "revoked": key.revoked,
        }
        for key in keys
    ]


def as_json(keys: list[dict[str, str | None]]) -> str:
    return json.dumps(keys, indent=2)


def print_keys(keys: list[dict[str, str | None]], console: Console) -> None:
    """Print a table of keys."""
    if not keys:
        console.print("there is no key: every request is refused")
        return
    table = Table(box=None, pad_edge=False)
    for column in keys[0]:
        table.add_column(column)
    for key in keys:
        table.add_row(*(value or "" for value in key.values()))
    console.print(table)
