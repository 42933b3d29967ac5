"""``slipstream audit RUN``: the ledger and the checkpoints of a run, recounted and compared."""

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slipstream.backend.checkpoint.folder import CHECKPOINTS, CheckpointFolder
from slipstream.rollout.control.versions import survives
from slipstream.rollout.ledger.audit import Audit, audit_ledger
from slipstream.rollout.ledger.recovery import LEDGER


def audit_run(folder: Path) -> Audit:
    """Raises LedgerError when there is nothing to audit, or the run is running."""
    audit, line, starts = audit_ledger(folder / LEDGER)
    checkpoints = CheckpointFolder(folder / CHECKPOINTS, keep_last=1)
    behind = 0
    for path in checkpoints.all():
        problems = checkpoints.verify(path)
        if problems:
            audit.checkpoints[path.name] = f"damaged: {'; '.join(problems)}"
            continue
        record = checkpoints.record(path)
        if not survives(record.version, record.epoch, starts):
            audit.checkpoints[path.name] = "sound; the run has gone on from an older one since"
            continue
        audit.checkpoints[path.name] = "sound"
        behind += 1
        trained = line.trained_by(record.version)
        if record.counts["trained"] != trained:
            audit.discrepancies.append(
                f"checkpoint {path.name} was written behind {record.counts['trained']} trained groups, "
                f"the ledger has {trained} up to its version"
            )
        drawn = sum(audit.groups.values())
        if record.data_position > drawn:
            audit.discrepancies.append(
                f"checkpoint {path.name} had drawn {record.data_position} prompts, "
                f"the ledger knows of {drawn} groups"
            )
    if audit.checkpoints and not behind:
        audit.discrepancies.append("there are checkpoints, but none that the run could go on from")
    return audit


def print_audit(audit: Audit, console: Console) -> None:
    """For people: what there is, then what is wrong."""
    table = Table("groups", "", box=None, pad_edge=False)
    for state, count in audit.groups.items():
        table.add_row(state, str(count))
    for loss, count in audit.losses.items():
        table.add_row(f"  of these {loss}", str(count))
    console.print(table)
    lag = "no step yet" if audit.max_head_lag is None else f"largest head lag {audit.max_head_lag}"
    console.print(
        f"{audit.steps} training steps behind the weights, {audit.steps_lost} lost to restarts; "
        f"{audit.starts} start{'s' * (audit.starts != 1)}; {lag}"
    )
    tokens = audit.tokens
    console.print(
        f"tokens: {tokens['trained']} trained, {tokens['masked']} masked, {tokens['discarded']} "
        "given up by restarts"
    )
    for name, state in audit.checkpoints.items():
        console.print(f"checkpoint {name}: {state}", markup=False)
    for text in audit.discrepancies:
        console.print("[red]wrong[/]: ", end="")
        console.print(text, markup=False)
    if not audit.discrepancies:
        console.print("[green]nothing lost, nothing trained twice, nothing beyond the bound[/]")


def as_json(audit: Audit) -> str:
    return json.dumps({"clean": not audit.discrepancies, **asdict(audit)}, indent=2)
