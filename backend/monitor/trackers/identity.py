"""Which run of a tracker belongs to a run folder: a file that a resumed run finds again."""

from collections.abc import Callable
from pathlib import Path

from slipstream.rollout.system.durable import write_durably


def tracked_id(folder: Path, tracker: str, make: Callable[[], str]) -> str:
    """Return the id that the run in ``folder`` has at a tracker, or make one and remember it.

    Raises OSError, and whatever ``make`` raises.
    """
    path = folder / f"{tracker}-run.txt"
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    made = make()
    write_durably(path, made + "\n")
    return made
