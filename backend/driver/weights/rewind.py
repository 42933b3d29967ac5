"""Takes a running run back to an older version, as a resume does, without ending anything but the trainer.

    assignments closed: collectors send what they have ──► ledger: trainings undone ──► control core, prompts
                                                                                        │
    assignments open again: what is recorded goes on  ◄──────────────────────────────────────┘

The engines go on with the version that they serve, which is now one of a line that is left: the control core
knows the lag of its tokens (``rollout/control/core.py``). Then they get the restored weights, under a number
of their own.
"""

from collections.abc import Callable
from typing import Protocol

from slipstream.backend.driver.start.resume import RestoredCollection
from slipstream.configs.schema import RolloutConfig
from slipstream.rollout.collection.driver.assignments import Assignments
from slipstream.rollout.collection.driver.batches import Batches
from slipstream.rollout.collection.driver.gate import AdmissionGate
from slipstream.rollout.control.versions import UnknownVersion
from slipstream.rollout.ledger.recovery import Recovered
from slipstream.rollout.live.live_turns import LiveTurns


class RestartableLedger(Protocol):
    """The part of the ledger (``ledger.writing.writer.Ledger``) that goes back to an older version."""

    async def restarted(self, version: int, *, bound: int, n_samples: int) -> Recovered: ...


class Rewind:
    """Single event loop. While ``to`` runs, nobody takes a batch, and no version is published."""

    def __init__(
        self,
        rollout: RolloutConfig,
        restore: Callable[[Recovered, int], RestoredCollection],
        ledger: RestartableLedger,
        gate: AdmissionGate,
        batches: Batches,
        assignments: Assignments,
        note: Callable[[str], None],
        turns: LiveTurns | None = None,
        when_done: Callable[[], None] = lambda: None,
    ) -> None:
        """``restore``: returns the control core and the groups of what the ledger has read again, given the
        version that the engines serve. ``turns``: those of live users; None without a gateway. ``when_done``
        is called when the run stands at the older version.
        """
        self._rollout = rollout
        self._restore = restore
        self._ledger = ledger
        self._gate = gate
        self._batches = batches
        self._assignments = assignments
        self._note = note
        self._turns = turns
        self._when_done = when_done

    @property
    def step(self) -> int:
        """Number of training steps that led to the version that the trainer holds."""
        return self._gate.core.step

    def is_possible(self, version: int) -> bool:
        """True if the present weights are those of ``version`` or descend from them."""
        core = self._gate.core
        try:
            return core.versions.is_ancestor(version, of=core.version)
        except UnknownVersion:
            return False

    async def copy_begins(self) -> int | None:
        """Return a new number for the trainer's weights, under which the engines must get them at once.

        None if the engines serve them already. Raises LedgerError.
        """
        return None if self._gate.core.served is None else await self._batches.copy_begins()

    async def to(self, version: int) -> None:
        """Go back to ``version``. Raises LedgerError and CorruptRecord."""
        was_open = self._assignments.is_open
        if was_open:
            await self._assignments.close()
        if self._turns is not None:
            self._turns.hold()
        rollout = self._rollout
        recovered = await self._ledger.restarted(
            version, bound=rollout.max_head_offpolicyness, n_samples=rollout.n_samples_per_prompt
        )
        collected = self._restore(recovered, self._gate.core.sampled_version)
        self._gate.restored(collected.control, collected.intake, collected.groups.ready)
        self._batches.restored(recovered.failures)
        self._assignments.restored(collected.groups.continued)
        if self._turns is not None:
            self._turns.restored(collected.control, recovered.live)
        self._when_done()
        for note in recovered.notes:
            self._note(note)
        self._note(
            f"the trainer goes on from {collected.described()}; the engines serve version "
            f"{collected.control.sampled_version} until version {collected.control.versions.next}"
        )
        if was_open:
            self._assignments.open()
