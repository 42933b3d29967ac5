"""``slipstream audit RUN``: recounts the ledger and the checkpoints of a run and compares them."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError, describe
from slipstream.backend.checkpoint.folder import CHECKPOINTS, CheckpointFolder
from slipstream.backend.checkpoint.watermarks import check_watermarks
from slipstream.backend.monitor.tables import pairs_table
from slipstream.rollout.ledger.audit.account import Audit, audit_ledger
from slipstream.rollout.ledger.lease.folder_lease import wait_until_free
from slipstream.rollout.ledger.reading.history import history_of
from slipstream.rollout.ledger.reading.turn_hints import hints_of
from slipstream.rollout.ledger.storage.database import LedgerError


def audit_run(folder: Path, say: Callable[[str], None]) -> Audit:
    """Audit the run in ``folder``. ``say`` tells the user of a wait.

    Raises LedgerError if the folder has no ledger, or if the run is running.
    """
    if folder.is_dir():
        try:
            asyncio.run(wait_until_free(folder, say=say))
        except OSError as error:
            raise LedgerError(f"{folder}: {describe(error)}") from error
    audit, line = audit_ledger(folder)
    checkpoints = CheckpointFolder(folder / CHECKPOINTS, keep_last=1)
    usable = 0
    for path in checkpoints.all():
        problems = checkpoints.verify(path)
        if problems:
            audit.checkpoints[path.name] = f"damaged: {'; '.join(problems)}"
            continue
        record = checkpoints.record(path)
        if not line.is_ancestor(record.version):
            audit.checkpoints[path.name] = "sound; the run has since continued from an older one"
            continue
        audit.checkpoints[path.name] = "sound"
        usable += 1
        trained = line.trained_by(record.version)
        if record.counts["trained"] != trained:
            audit.discrepancies.append(
                f"checkpoint {path.name} records {record.counts['trained']} trained groups, the ledger has "
                f"{trained} up to its version"
            )
        drawn = sum(audit.groups.values())
        if record.data_position > drawn:
            audit.discrepancies.append(
                f"checkpoint {path.name} records {record.data_position} drawn prompts, the ledger has "
                f"{drawn} groups"
            )
    if audit.checkpoints and not usable:
        audit.discrepancies.append("there are checkpoints, but the run can continue from none of them")
    try:
        check_watermarks(history_of(folder), checkpoints)
    except (LedgerError, CheckpointError) as error:
        audit.discrepancies.append(str(error))
    return audit


def hints_as_json(folder: Path) -> Iterator[str]:
    """Yield the hints of the judges of a run, a line of JSON each. Raises LedgerError."""
    for hint in hints_of(folder):
        yield json.dumps(asdict(hint), ensure_ascii=False)


def print_audit(audit: Audit, console: Console) -> None:
    """Print the account, then every discrepancy."""
    losses = {f"  {loss}": str(count) for loss, count in audit.losses.items()}
    if audit.groups or not audit.turns:
        console.print(pairs_table("groups", {state: str(n) for state, n in audit.groups.items()} | losses))
    if audit.turns:
        console.print(pairs_table("turns", {state: str(n) for state, n in audit.turns.items()}))
    lag = "no step yet" if audit.max_head_lag is None else f"largest head lag {audit.max_head_lag}"
    console.print(
        f"{audit.steps} training steps led to the weights, {audit.steps_lost} were lost to restarts; "
        f"{audit.starts} start{'s' * (audit.starts != 1)}; {lag}"
    )
    tokens = audit.tokens
    console.print(
        f"tokens: {tokens['trained']} trained, {tokens['masked']} masked, {tokens['discarded']} "
        "given up by restarts"
    )
    for name, state in audit.checkpoints.items():
        console.print(f"checkpoint {name}: {state}", markup=False)
    for discrepancy in audit.discrepancies:
        console.print("[red]wrong[/]: ", end="")
        console.print(discrepancy, markup=False)
    if not audit.discrepancies:
        console.print("[green]nothing lost, nothing trained twice, nothing beyond the bound[/]")


def as_json(audit: Audit) -> str:
    """Return the audit as one JSON document; ``clean`` is true if there is no discrepancy."""
    return json.dumps({"clean": not audit.discrepancies, **asdict(audit)}, indent=2)
