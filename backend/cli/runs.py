"""Commands that look at the folder of a run: ``audit``, ``report``, ``trace``, ``watch`` and ``diagnose``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream.backend.cli.options import Json, errors, reported
from slipstream.backend.commands.outcome import Failed, WrongInput, no_run


def audit(
    run: Annotated[Path, typer.Argument(help="The folder of a run that is not running now.")],
    as_json: Json = False,
    hints: Annotated[
        bool,
        typer.Option("--hints", help="Print the hints of live users' judges instead, a line of JSON each."),
    ] = False,
) -> None:
    """Recount a run from its ledger and checkpoints: nothing lost, nothing trained twice."""
    with reported():
        from slipstream.backend.commands import audit as auditing
        from slipstream.rollout.ledger.storage.database import LedgerError

        if not run.is_dir():
            raise WrongInput(no_run(run, "ledger"))
        try:
            if hints:
                for line in auditing.hints_as_json(run):
                    typer.echo(line)
                return
            account = auditing.audit_run(run, lambda text: errors.print(text, markup=False))
        except LedgerError as error:
            raise WrongInput(str(error)) from None
        if as_json:
            typer.echo(auditing.as_json(account))
        else:
            auditing.print_audit(account, Console(soft_wrap=True))
        if account.discrepancies:
            raise typer.Exit(Failed.exit_code)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, also running ones.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page to write; default: report.html in RUN.")
    ] = None,
    audit: Annotated[bool, typer.Option(help="Recount the ledgers, which takes long for long runs.")] = True,
) -> None:
    """Write curves, staleness, time and episodes of one run or several as one page of HTML."""
    with reported():
        from slipstream.backend.commands import report as reporting

        typer.echo(reporting.report(runs, out, audit=audit))


def trace(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("trace.json"),
) -> None:
    """Write the timeline of a run's last start for Perfetto (https://ui.perfetto.dev)."""
    with reported():
        from slipstream.backend.commands import report as reporting

        typer.echo(reporting.write_trace(run, out))


def watch(
    run: Annotated[Path, typer.Argument(help="The folder of a run, on any machine that sees it.")],
    once: Annotated[bool, typer.Option("--once", help="Print what there is now, and end.")] = False,
) -> None:
    """Show reward, staleness, queues and the time left of a run, from its files alone. Ends with Ctrl-C."""
    with reported():
        from slipstream.backend.commands import watch as watching

        watching.watch(run, once=once)


def diagnose(run: Annotated[Path, typer.Argument(help="The folder of a run, also a running one.")]) -> None:
    """Name the likely causes of a reward that does not rise, with figures and what to do."""
    with reported():
        from slipstream.backend.commands import diagnose as diagnosing

        typer.echo(diagnosing.diagnose(run))
