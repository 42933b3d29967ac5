"""``slipstream engine``: engines from outside join a run, and leave it."""

from pathlib import Path
from typing import Annotated

import typer

from slipstream.backend.cli.options import Json, reported

app = typer.Typer(no_args_is_help=True, help="Engines of a run: see them, add one from outside, remove it.")

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that is training now.")]


@app.command(name="list")
def list_engines(run: RunFolder, as_json: Json = False) -> None:
    """Print the engines of a run, and which of them serve."""
    with reported():
        from slipstream.backend.commands import engines

        states = engines.listed(run)
        typer.echo(engines.as_json(states) if as_json else "\n".join(map(engines.line, states)))


@app.command(name="join")
def join_engine(
    run: RunFolder,
    host: Annotated[
        str | None,
        typer.Option(help="Address at which the run reaches this machine; default: the one towards it."),
    ] = None,
) -> None:
    """Start an engine on this machine for a run, until the run ends, or Ctrl-C or SIGTERM: then it leaves."""
    with reported():
        from slipstream.backend.commands import engines

        engines.join_run(run, host, typer.echo)


@app.command(name="remove")
def remove_engine(
    run: RunFolder,
    name: Annotated[str, typer.Argument(help="Name of an engine that has joined.")],
    wait: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Longest wait for it. Then it leaves on: exit code 75."),
    ] = 60.0,
) -> None:
    """Let an engine leave that has joined. Its requests go on elsewhere."""
    with reported():
        from slipstream.backend.commands import engines

        engines.remove(run, name, wait)
        typer.echo(f"{name} has left")
