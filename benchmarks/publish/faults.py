"""What a fault inside a transfer costs the engines that are well, in seconds."""

from dataclasses import dataclass

from slipstream.bridge.publish.publication import Timeouts
from slipstream.bridge.publish.report import PublishReport
from tests.ranks import run_ranks
from tests.shard_publishing import publish_thrice

TIMEOUTS = Timeouts(transfer_s=20.0, answer_s=5.0)
"""``weights.timeout_s`` and ``weights.answer_timeout_s`` of these runs."""


@dataclass(frozen=True)
class Fault:
    name: str
    trouble: str | None
    """What happens to the last rank of the engine in the second version, as in ``ShardEngine``."""
    ranks: int
    """Ranks of the engine."""


FAULTS = (
    Fault("none", None, 2),
    Fault("a rank of two killed", "dies", 2),
    Fault("the only rank killed", "dies", 1),
    Fault("a rank of two stopped", "stops", 2),
    Fault("weights changed on their way", "spoils", 2),
)


@dataclass(frozen=True)
class Cost:
    fault: Fault
    reports: list[PublishReport]
    seconds: list[float]
    """Time of each of three publications, of which the second one is struck."""
    stamped: int
    """The version that the struck engine says it has afterwards."""


def measure(fault: Fault) -> Cost:
    troubles = {} if fault.trouble is None else {"doomed": fault.trouble}
    head, _ = run_ranks(2, publish_thrice, troubles, fault.ranks, TIMEOUTS)
    reports, seconds, versions, _ = head
    return Cost(fault, reports, seconds, versions["doomed"])
