"""A run of live users without trainer and engines: its driver, and the gateway processes that it keeps.

    python -m tests.live_run SPECIFICATION

The parts are those of a run: receiver, turns, ledger, judging, and gateways as child processes. Engines are
``tests.http_engine``; judges take no time. Each line on standard input is a list of process ids. When all
gateways serve and none of them is in the list, it is answered by a line: how far the driver's event loop has
lagged behind since the last one, and how many entries it has. The end of standard input ends the run.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import yaml

from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.judge import CodeJudge
from slipstream.configs.schema.live import LiveJudgingConfig, NoBaseline
from slipstream.rollout.gateway.keys import add_key, keys_file
from slipstream.rollout.gateway.peers import read_address
from slipstream.rollout.system.network import hold_port, port_of
from tests.chat_model import CONTEXT
from tests.environment import environment

START_TIMEOUT_S = 180
LINGER_S = 20.0
TICK_S = 0.005
"""Time between two looks at the lag of the driver's event loop."""
VOCABULARY = 265
"""Of ``tests.chat_model``."""


@dataclass(frozen=True)
class LiveRunTask:
    """Everything that the driver must know."""

    run: str
    """Run folder, which has the recipe."""
    engines: Sequence[str]
    """Their URLs."""


@dataclass
class Lag:
    """What the driver has done since the last report."""

    lags_s: list[float] = field(default_factory=list[float])
    """Lag of the event loop at each tick."""
    entries: int = 0
    """Entries of journals that are on the driver's disk."""
    cpu_s: float = 0.0
    """CPU time of the process since its start."""


def recipe(folder: Path, model: Path, *, processes: int = 1, **gateway: Any) -> RunConfig:
    """Return a recipe with a gateway on free ports, and write it into the run folder."""
    with hold_port("127.0.0.1") as first, hold_port("127.0.0.1") as second:
        ports = port_of(first), port_of(second)
    config = RunConfig.model_validate(
        {
            "run": {"name": "live", "root": str(folder / "runs"), "steps": 1},
            "model": {"path": str(model)},
            "data": {"path": str(folder / "data.jsonl")},
            "rollout": {
                "max_head_offpolicyness": 2,
                "batch_size": 2,
                "n_samples_per_prompt": 2,
                "reward": {"path": "slipstream.rollout.reward.FinalAnswer"},
            },
            "gateway": {"port": ports[0], "admin_port": ports[1], "processes": processes, **gateway},
        }
    )
    config.run.folder.mkdir(parents=True)
    recipe = yaml.safe_dump(config.model_dump(mode="json"))
    (config.run.folder / "recipe.yaml").write_text(recipe)
    return config


class LiveRun:
    """A run as tests and benchmarks see it."""

    def __init__(self, folder: Path, model: Path, engines: Sequence[str], **settings: Any) -> None:
        """``settings``: of the recipe's section ``gateway``."""
        self.config = recipe(folder, model, **settings)
        self.key = add_key(keys_file(self.config.gateway, self.config.run.folder), "ann")
        assert self.config.gateway is not None
        self.processes = self.config.gateway.processes
        self.url = f"http://127.0.0.1:{self.config.gateway.port}"
        self.headers = {"authorization": f"Bearer {self.key}"}
        task = LiveRunTask(str(self.config.run.folder), engines)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.live_run", json.dumps(asdict(task))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(OMP_NUM_THREADS="1"),
        )
        try:
            self._line()
        except BaseException:
            self.close()
            raise

    def pid(self, number: int = 0) -> int:
        """Return the process id of a gateway."""
        address = read_address(self.config.run.folder, number)
        assert address is not None
        return address.pid

    def lag(self) -> Lag:
        """Return what the driver has done since the last call."""
        return Lag(**self._ask([]))

    def _ask(self, gone: Sequence[int]) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(gone).encode() + b"\n")
        self.process.stdin.flush()
        return self._line()

    def kill_gateways(self) -> None:
        """Kill every gateway, and wait until others have taken their places and serve."""
        pids = [self.pid(number) for number in range(self.processes)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self._ask(pids)

    def _line(self) -> Any:
        assert self.process.stdout is not None
        timer = threading.Timer(START_TIMEOUT_S, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise RuntimeError(f"the driver has ended; logs are in {self.config.run.folder / 'logs'}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# ---- the process


class _Instant:
    """Judges without processes."""

    async def judge(self, turn: object, next_state: object) -> Any:
        from slipstream.rollout.reward.live import Verdict

        return Verdict(1.0)


@asynccontextmanager
async def _instant() -> AsyncIterator[_Instant]:
    yield _Instant()


async def _tick(lag: Lag) -> None:
    clock = asyncio.get_running_loop().time
    due_s = clock()
    while True:
        due_s = max(due_s + TICK_S, clock())
        await asyncio.sleep(due_s - clock())
        lag.lags_s.append(max(0.0, clock() - due_s))


async def _drive(task: LiveRunTask) -> None:
    from slipstream.backend.driver.loops.live_users import LiveUsers
    from slipstream.backend.driver.processes.gateways import Gateways, gateway_command
    from slipstream.backend.driver.processes.restart_limits import gateway_limit
    from slipstream.rollout.control.core import RolloutControl
    from slipstream.rollout.engine.client import EngineAddress, EngineClient
    from slipstream.rollout.engine.roster import EngineRoster
    from slipstream.rollout.gateway.spec import GatewaySpec
    from slipstream.rollout.ledger.recovery import open_ledger
    from slipstream.rollout.live.baseline import ScoreBaseline
    from slipstream.rollout.live.judging import LiveJudging
    from slipstream.rollout.live.live_turns import LiveTurns
    from slipstream.rollout.live.receiver import GatewayReceiver
    from slipstream.rollout.system.key import new_key

    run = Path(task.run)
    config = GatewaySpec.read(
        json.dumps({"run": task.run, "number": 0, "processes": 1, "context": 1, "linger_s": 1})
    ).config
    gateway = config.gateway
    assert gateway is not None
    ledger, recovered = open_ledger(run, batch_size=0, n_samples=1, bound=2)
    control = RolloutControl(0, 2, live_trajectories=1)
    turns = LiveTurns(
        control,
        ledger,
        partial(ScoreBaseline, NoBaseline()),
        recovered.live,
        train=True,
        vocab=VOCABULARY,
    )
    key = new_key()
    roster = EngineRoster(lambda: control.version, limit=1)
    receiver = GatewayReceiver(key, turns, roster, limit=gateway.limits.concurrent)
    (run / "logs").mkdir()

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def command(number: int) -> list[str]:
        whole = gateway_command(config.gateway, config.run.folder, config.model.path, number, CONTEXT)
        return [*whole[:-1], json.dumps({**json.loads(whole[-1]), "linger_s": LINGER_S})]

    commands = [command(number) for number in range(gateway.processes)]
    limit = gateway_limit(config)
    kept = Gateways(commands, run, run / "logs", note, limit=limit, first_pause_s=0.0)
    judging = LiveJudging(
        CodeJudge(), LiveJudgingConfig(), turns.verdicts, _instant, SimpleNamespace(note=note)
    )
    users = LiveUsers(receiver, kept, judging, run, key)
    clients = [
        EngineClient(EngineAddress(f"engine-{number}", url, 1, VOCABULARY, CONTEXT, 60.0, stream_interval=1))
        for number, url in enumerate(task.engines)
    ]
    for client in clients:
        roster.add(client)
    lag = Lag()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    keeping = loop.create_task(users.keep("127.0.0.1"))
    ticking = loop.create_task(_tick(lag))

    async def gateways_serve(gone: Sequence[int]) -> None:
        """Wait until each gateway, none of them in ``gone``, has a connection and the routing record."""
        while True:
            addresses = [read_address(run, number) for number in range(gateway.processes)]
            pids = {each.pid for each in addresses if each is not None}.difference(gone)
            statuses = receiver.statuses.values()
            follow = [status for status in statuses if status.pool.number >= roster.number]
            if len(pids) == len(follow) == gateway.processes:
                return
            if keeping.done():
                keeping.result()
            await asyncio.sleep(0.02)  # a file and another process say so, and neither is an event here

    try:
        await gateways_serve([])
        print("{}", flush=True)
        while line := await reader.readline():
            await gateways_serve(json.loads(line))
            taken = sum(turns.durable(identity) for identity in receiver.statuses)
            report = Lag(lag.lags_s, taken, time.process_time())
            print(json.dumps(asdict(report)), flush=True)
            lag.lags_s.clear()
    finally:
        for work in (keeping, ticking):
            work.cancel()
        await asyncio.wait({keeping, ticking})
        await users.stop()
        for client in clients:
            await client.close()
        ledger.close()


if __name__ == "__main__":
    import uvloop

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_drive(LiveRunTask(**json.loads(sys.argv[1]))))
