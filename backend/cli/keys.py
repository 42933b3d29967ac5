"""``slipstream key``: API keys of the users whom a gateway serves."""

from typing import Annotated

import typer
from rich.console import Console

from slipstream.backend.cli.options import Json, reported

app = typer.Typer(no_args_is_help=True, help="API keys of the users whom a gateway serves.")

KeysOf = Annotated[
    str, typer.Argument(metavar="RECIPE", help="The gateway's recipe, or its file of API keys (.json).")
]
KeyName = Annotated[str, typer.Argument(help="Name of the key's holder, under which turns are stored.")]


@app.command(name="add")
def add_key(
    recipe: KeysOf,
    name: KeyName,
    session: Annotated[
        str | None, typer.Option(help="The one session that the key is for; default: any session.")
    ] = None,
    side: Annotated[
        bool, typer.Option("--side", help="Do not train on its turns unless a request asks for it.")
    ] = False,
) -> None:
    """Add a key, and print it. It cannot be shown again."""
    with reported():
        from slipstream.backend.commands import keys as keeping

        typer.echo(keeping.add(recipe, name, session=session, side=side))


@app.command(name="list")
def list_keys(recipe: KeysOf, as_json: Json = False) -> None:
    """Print the names of all keys, revoked ones included."""
    with reported():
        from slipstream.backend.commands import keys as keeping

        known = keeping.listed(recipe)
        if as_json:
            typer.echo(keeping.as_json(known))
        else:
            keeping.print_keys(known, Console(soft_wrap=True))


@app.command(name="revoke")
def revoke_key(recipe: KeysOf, name: KeyName) -> None:
    """Make a key invalid, also for gateways that are running."""
    with reported():
        from slipstream.backend.commands import keys as keeping

        keeping.revoke(recipe, name)
        typer.echo(f"{name}: revoked")
