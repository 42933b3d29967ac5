"""Memory over 20,000 turns: neither a gateway nor the driver's live users may hold more and more.

    python -m tests.gateway_memory [--turns 20000] [--users 24]      ten minutes

A gateway process as a run has it, with a scripted engine behind it, hands its turns over to a process with
the driver's receiver, ledger, live turns, judging and control core (``tests.gateway_memory.driver``).
Sessions end, rest for too long, are evicted and forgotten; users hang up; turns are judged, put off,
trained, and expire. The memory of a gateway is what would be free if it ended with the process that it was
forked from.

Prints a table and, as the last line, one JSON object. Exit code 1 if a process has more than 1.05 times the
memory at the end that it had after half of the turns. Until then caches fill: a tokenizer keeps the ids of
10,000 words, which are whole texts here.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from slipstream.backend.monitor.tables import Columns, rows_table
from slipstream.rollout.gateway.keys import add_key
from slipstream.rollout.system.network import hold_port, port_of
from tests.chat_model import write_chat_model
from tests.gateway_memory.engine import ScriptedEngine
from tests.gateway_memory.programs import Program, gateway_of, recipe, started
from tests.gateway_memory.users import Users

ALLOWED = 1.05
PARTS = 10
"""Times at which memory is looked at: after every tenth of the turns."""
IDLE_S = 8.0
LIMITS = {"sessions": 400, "session_bytes": 1_048_576}
"""Limits of the gateway, so that sessions are evicted and cleared."""


async def measure(turns: int, users: int, scratch: Path) -> tuple[list[Program], Users, dict[str, Any]]:
    """Have so many turns. Return the processes with their memory, the users, and what the driver says."""
    engine = ScriptedEngine()
    policy = write_chat_model(scratch / "policy", weights=False)
    key = add_key(scratch / "memory.keys.json", "users")
    with ExitStack() as stack:
        ports = [port_of(stack.enter_context(hold_port("127.0.0.1"))) for _ in range(2)]
        config = recipe(scratch, policy, *ports, idle_timeout_s=IDLE_S, limits=LIMITS)
        run = config.run.folder
        async with engine.serving() as url:
            arguments = ("tests.gateway_memory.driver", str(run), url, str(engine.vocab))
            driver = stack.enter_context(Program("driver", *arguments, log=scratch / "driver.log"))
            await asyncio.to_thread(driver.line)
            gateway = stack.enter_context(gateway_of(config, scratch / "gateway.log"))
            address = await started(gateway, run)
            talking = Users(address.url, key, address.admin, address.secret)
            for part in range(1, PARTS + 1):
                await talking.talk(users, turns * part // PARTS)
                await asyncio.sleep(IDLE_S)
                await asyncio.gather(gateway.sample(), driver.sample())
            return [gateway, driver], talking, await driver.status()


TABLE: Columns[Program] = {
    "process": lambda program: program.name,
    **{
        f"{part * 100 // PARTS} %": lambda program, part=part: f"{program.mb[part - 1]:.1f}"
        for part in range(1, PARTS + 1)
    },
    "ratio": lambda program: f"{program.ratio:.3f}",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=partial(argparse.RawTextHelpFormatter, width=110)
    )
    parser.add_argument("--turns", type=int, default=20_000)
    parser.add_argument("--users", type=int, default=24, help="users at a time")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slipstream-memory-") as scratch:
        programs, users, status = asyncio.run(measure(arguments.turns, arguments.users, Path(scratch)))
    Console(width=110).print(rows_table("memory, MB", programs, TABLE))
    for error in users.errors[:10]:
        print(error, file=sys.stderr)
    print(
        json.dumps(
            {
                "turns": users.turns,
                "sessions": users.sessions,
                "errors": len(users.errors),
                "steps": status["steps"],
                "ends": status["ends"],
                "held": status["held"],
                "mb": {program.name: [round(mb, 1) for mb in program.mb] for program in programs},
                "ratio": {program.name: round(program.ratio, 3) for program in programs},
                "seconds": round(time.monotonic() - began),
            }
        )
    )
    sys.exit(any(program.ratio > ALLOWED for program in programs) or bool(users.errors))


if __name__ == "__main__":
    main()
