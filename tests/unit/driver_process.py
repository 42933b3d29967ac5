"""A process that drives a run as far as its lease and its ledger go, for tests of two such processes.

    python -m tests.unit.driver_process FOLDER HOST LEASE_S [nolocks]

``HOST`` is the machine that the process pretends to be on. With ``nolocks`` every lock is granted to
everybody, as on a file system without locks. Prints ``holding``, then the number of each group that it has
recorded, and why it ends. A line on standard input makes it end in an orderly way.
"""

import asyncio
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

from slipstream.rollout.control.core import Ticket
from slipstream.rollout.ledger.lease.driver_file import Machine
from slipstream.rollout.ledger.lease.folder_lease import Fenced, take_lease
from slipstream.rollout.ledger.recovery import open_ledger
from slipstream.rollout.ledger.storage import database
from slipstream.rollout.ledger.storage.database import LedgerBusy
from slipstream.rollout.ledger.storage.locks import flock


def say(text: str) -> None:
    print(text, flush=True)


async def drive(folder: Path, host: str, lease_s: float, locks: bool) -> None:
    if not locks:
        database.fcntl_error = lambda folder: "none here"
    lease = await take_lease(
        folder,
        lease_s=lease_s,
        say=lambda text: None,
        machine=Machine(host, "boot", "pids"),
        lock=flock if locks else lambda descriptor: None,
    )
    with ExitStack() as stack:
        stack.enter_context(lease.held(lambda loss: None))
        lease.keep()
        ledger, recovered = open_ledger(folder, batch_size=1, n_samples=1, bound=2, guard=lease.check)
        stack.callback(ledger.close)
        say("holding")
        asked = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.readline(), asked.set()), daemon=True).start()
        number = recovered.counts.admitted
        while not asked.is_set():
            ledger.admitted(Ticket(number, 0), number)
            await ledger.flushed()
            say(str(number))
            number += 1
            await asyncio.sleep(0.02)
    say("ended")


def main() -> None:
    folder, host, lease_s, *more = sys.argv[1:]
    try:
        asyncio.run(drive(Path(folder), host, float(lease_s), "nolocks" not in more))
    except Fenced as error:
        say(str(error))
    except LedgerBusy as error:
        say(f"busy: {error}")


if __name__ == "__main__":
    main()
