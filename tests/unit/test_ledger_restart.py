"""A trainer that dies: the ledger of the running process goes on from an older version, as a resume does."""

import asyncio
from pathlib import Path

import pytest

from slipstream.rollout.control.core import Ticket
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.ledger.audit.account import audit_ledger
from slipstream.rollout.ledger.recovery import Recovered, open_ledger
from slipstream.rollout.ledger.storage.database import LedgerError
from slipstream.rollout.ledger.writing.writer import SAMPLES, Ledger
from tests.unit.test_ledger import add_piece, ready_group, train

BOUND = 2


async def three_steps(ledger: Ledger) -> None:
    """Versions 1, 2 and 3, a group that is ready, and one of which a part is recorded."""
    for version in range(1, 4):
        ready_group(ledger, version - 1, [version - 1], version - 1)
        train(ledger, version, version - 1, version - 1, [version - 1])
    ready_group(ledger, 3, [3], 3)
    ledger.admitted(Ticket(4, 3), 4)
    add_piece(ledger, 4 * SAMPLES, 0, 3, 4)


def state_of(recovered: Recovered) -> dict[str, object]:
    """Everything that a run goes on with, in a form that can be compared."""
    return {
        "step": recovered.step,
        "versions": recovered.versions,
        "copies": recovered.copies,
        "position": recovered.position,
        "counts": recovered.counts,
        "losses": recovered.losses,
        "open": [
            (group.id, group.position, group.is_ready, group.requeues, sorted(group.samples))
            for group in recovered.open
        ],
        "requeued": recovered.requeued,
        "failures": recovered.failures,
    }


def in_new_ledger(folder: Path, work):
    ledger, _ = open_ledger(folder, batch_size=1, n_samples=2, bound=BOUND)
    try:
        return asyncio.run(work(ledger))
    finally:
        ledger.close()


@pytest.mark.parametrize("restored", [0, 1, 2, 3])
def test_a_running_process_goes_on_as_a_resumed_one_does(tmp_path: Path, restored: int):
    async def life(ledger: Ledger) -> None:
        await three_steps(ledger)
        ledger.admitted(Ticket(5, 3), 5)
        ledger.lost(5, Loss.REQUEUED)
        ledger.copy_begins(4, 3)
        ledger.published(4, [])
        ledger.step_begins(5, 4, [3])
        ledger.step_failed(5, "rank 0 was killed")
        await ledger.flushed()

    async def running(ledger: Ledger) -> Recovered:
        await life(ledger)
        return await ledger.restarted(restored, bound=BOUND, n_samples=2)

    (tmp_path / "running").mkdir()
    (tmp_path / "killed").mkdir()
    going_on = in_new_ledger(tmp_path / "running", running)
    in_new_ledger(tmp_path / "killed", life)
    ledger, resumed = open_ledger(
        tmp_path / "killed", batch_size=1, n_samples=2, bound=BOUND, restored=restored
    )
    ledger.close()
    assert state_of(going_on) == state_of(resumed)
    assert (going_on.epoch, going_on.step, going_on.copies) == (1, restored, {4})
    assert going_on.failures == [(3,)]
    for folder in ("running", "killed"):
        assert audit_ledger(tmp_path / folder)[0].discrepancies == []


def test_what_is_trained_after_it_is_accounted_for_and_the_run_can_be_resumed(tmp_path: Path):
    async def life(ledger: Ledger) -> None:
        await three_steps(ledger)
        recovered = await ledger.restarted(1, bound=BOUND, n_samples=2)
        assert [group.id for group in recovered.open if group.is_ready] == [1, 2, 3]
        assert ledger.watermark().trained == 1
        train(ledger, 4, 1, 1, [1])
        ready_group(ledger, 5, [4], 5)
        await ledger.flushed()
        assert ledger.watermark().trained == 2
        recovered = await ledger.restarted(4, bound=BOUND, n_samples=2)
        assert recovered.step == 2
        train(ledger, 5, 4, 5, [4])
        await ledger.flushed()

    in_new_ledger(tmp_path, life)
    audit, lineage = audit_ledger(tmp_path)
    assert audit.discrepancies == []
    assert lineage.versions == [1, 4, 5]
    assert (audit.starts, audit.steps, audit.steps_lost) == (3, 3, 2)
    ledger, recovered = open_ledger(tmp_path, batch_size=1, n_samples=2, bound=BOUND, restored=5)
    ledger.close()
    assert recovered.counts.trained == 3


def test_groups_whose_trajectories_are_forgotten_are_generated_again(tmp_path: Path):
    async def life(ledger: Ledger) -> Recovered:
        await three_steps(ledger)
        ledger.release(2)
        await ledger.flushed()
        return await ledger.restarted(1, bound=BOUND, n_samples=2)

    recovered = in_new_ledger(tmp_path, life)
    assert [(group.id, group.is_ready) for group in recovered.open] == [
        (1, False),
        (2, True),
        (3, True),
        (4, False),
    ]
    audit, _ = audit_ledger(tmp_path)
    assert audit.discrepancies == []
    assert audit.tokens["discarded"] == 2


def test_the_trajectories_that_are_ready_again_can_be_read(tmp_path: Path):
    async def life(ledger: Ledger) -> list[bytes]:
        await three_steps(ledger)
        recovered = await ledger.restarted(1, bound=BOUND, n_samples=2)
        ready = [group for group in recovered.open if group.is_ready]
        return [ledger.read(sample.refs) for group in ready for sample in group.samples.values()]

    assert len(in_new_ledger(tmp_path, life)) == 6


def test_a_version_that_the_weights_do_not_descend_from_is_refused(tmp_path: Path):
    async def life(ledger: Ledger) -> None:
        await three_steps(ledger)
        await ledger.restarted(1, bound=BOUND, n_samples=2)
        await ledger.restarted(3, bound=BOUND, n_samples=2)

    ledger, _ = open_ledger(tmp_path, batch_size=1, n_samples=2, bound=BOUND)
    with pytest.raises(LedgerError, match="the trainer cannot go on from version 3"):
        asyncio.run(life(ledger))
    with pytest.raises(LedgerError):
        ledger.close()
