"""A run that serves users and learns from them, in one interrupt mode, and what its users have got.

The learning rate is so small that no weight changes. An update does all that it does with any other, but
a greedy answer has one right text, whichever versions it is sampled from.
"""

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import yaml

from benchmarks.streaming.answers import Account, Reading, Recorded, account_of
from benchmarks.streaming.policy import write_policy
from benchmarks.streaming.users import PROMPTS, Users
from slipstream.backend.commands.audit import audit_run
from slipstream.rollout.gateway.journal_file import JournalFile
from slipstream.rollout.gateway.keys import add_key
from slipstream.rollout.gateway.peers import journal_of, name_of
from slipstream.rollout.system.network import hold_port, port_of
from slipstream.rollout.tokens.turn_entries import Turn
from tests.chat_model import END
from tests.environment import environment
from tests.runs.conftest import LaunchedRun, RunProcess, run_command

START_TIMEOUT_S = 240.0
UPDATES_TIMEOUT_S = 480.0
END_TIMEOUT_S = 120.0
LOOK_S = 0.25
"""Time between two looks at the version that is served."""

AFTERWARDS_S = 2.0
"""Time for which users go on after the last update."""

ENGINE = "slipstream.rollout.engine.launch"
"""What the command line of an engine's server has in it."""


@dataclass(frozen=True)
class Load:
    """What a run goes through."""

    mode: str
    """``weights.interrupt``."""
    clients: int
    updates: int
    tokens: int
    """Largest number of tokens of an answer."""
    kills: bool = False
    """One of the two engines is killed half-way."""


@dataclass(frozen=True)
class Result:
    """What a run has come to."""

    account: Account
    updates: int
    """Versions after the initial one of which users have got tokens."""
    is_audit_clean: bool


def recipe(load: Load, root: Path, policy: Path, port: int, admin_port: int) -> dict[str, Any]:
    """Return the recipe of the run. Its two engines together have places for four fifths of the users."""
    places = max(4, load.clients * 2 // 5)
    return {
        "run": {"name": load.mode, "root": str(root), "steps": load.updates},
        "model": {"path": str(policy), "dtype": "float32"},
        "actor": {"microbatch_tokens": 4096, "optimizer": {"lr": 1e-20}},
        "rollout": {
            "max_head_offpolicyness": 16,
            "batch_size": 4,
            "n_samples_per_prompt": 4,
            "max_concurrent": 16,
            "sampling": {"temperature": 1.0, "max_new_tokens": load.tokens},
            "engine": {
                "count": 2,
                "args": {"max_running_requests": places, "max_total_tokens": 8 * places * load.tokens},
            },
        },
        "weights": {"interrupt": load.mode},
        "gateway": {"port": port, "admin_port": admin_port},
        "judge": {
            "type": "code",
            "code": {"path": "slipstream.rollout.reward.live.RuleJudge", "args": {"otherwise": 0.0}},
        },
        "live": {"share": 1},
    }


def measure(load: Load, scratch: Path) -> Result:
    """Run, and compare what users have got with what was recorded."""
    policy, folder = scratch / "policy", scratch / load.mode
    tokenizer = write_policy(policy)
    prompt_ids = [
        cast(
            "list[int]",
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
            ),
        )
        for prompt in PROMPTS
    ]
    key = add_key(scratch / f"{load.mode}.keys.json", "users")
    with hold_port("127.0.0.1") as first, hold_port("127.0.0.1") as second:
        settings = recipe(load, scratch, policy, port_of(first), port_of(second))
        file = scratch / f"{load.mode}.yaml"
        file.write_text(yaml.safe_dump(settings))
        users = Users(f"http://127.0.0.1:{port_of(first)}", key, load.tokens, prompt_ids)
        with running(file, folder) as run:
            asyncio.run(serve(load, users, Served(run, f"http://127.0.0.1:{port_of(second)}/state")))
    end = cast(int, tokenizer.convert_tokens_to_ids(END))
    reading = Reading(lambda ids: cast(str, tokenizer.decode(list(ids), skip_special_tokens=True)), end)
    sums = account_of(users.heard, turns_of(folder), reading)
    audit = audit_run(folder, lambda _: None)
    return Result(sums, len(sums.versions - {0}), not audit.discrepancies)


class Served:
    """A run as an observer sees it, through the gateway's state."""

    def __init__(self, run: LaunchedRun, state: str) -> None:
        """``state``: URL of the gateway's state."""
        self.run = run
        self._state = state

    async def version(self, version: int, timeout_s: float) -> None:
        """Wait until this version, or a later one, is served."""
        async with asyncio.timeout(timeout_s), httpx.AsyncClient() as http:
            while True:
                with suppress(httpx.TransportError):
                    state = (await http.get(self._state)).json()
                    if state["retry_after_s"] is None and state["version"] >= version:
                        return
                if self.run.process.poll() is not None:
                    raise RuntimeError(f"the run has ended by itself:\n{self.run.output()[-3000:]}")
                await asyncio.sleep(LOOK_S)

    def kill_engine(self) -> None:
        """Kill one engine as the kernel does when memory is short."""
        os.kill(self.run.pids_of(ENGINE)[0], signal.SIGKILL)


async def serve(load: Load, users: Users, served: Served) -> None:
    """Let users talk until every version was served, and ask once more for greedy answers."""
    await served.version(0, START_TIMEOUT_S)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(users.talk(load.clients), name="users")
        if load.kills:
            await served.version(load.updates // 2, UPDATES_TIMEOUT_S)
            served.kill_engine()
        await served.version(load.updates, UPDATES_TIMEOUT_S)
        await asyncio.sleep(AFTERWARDS_S)
        users.enough.set()
    await users.repeat()


@contextmanager
def running(recipe: Path, folder: Path) -> Iterator[LaunchedRun]:
    """Serve inside the block."""
    output = folder.with_suffix(".out")
    with output.open("w") as file:
        run = LaunchedRun(
            RunProcess(run_command("serve", str(recipe)), file, environment=environment()), folder
        )
    try:
        yield run
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(END_TIMEOUT_S)
    finally:
        run.end()


def turns_of(folder: Path) -> dict[str, list[Recorded]]:
    """Return the turns of the gateway's journal by session, in their order."""
    turns: dict[str, list[Recorded]] = defaultdict(list)
    journal = JournalFile.open(journal_of(folder, 0), name_of(0))
    try:
        number = 0
        while rows := journal.rows(number):
            number = rows[-1].number
            for row in rows:
                if isinstance(entry := row.entry(), Turn):
                    turns[entry.session].append(Recorded.read(entry, row.chunk))
    finally:
        journal.close()
    return turns
