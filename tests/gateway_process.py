"""A gateway with scripted tokens as a process of its own, which tests and benchmarks talk to over HTTP.

It prints its port, and ends with its standard input. Beside the application for users it has /control, which
tells what it has seen and lets it stand still. Gateways are forks of one process, which takes six seconds
of a core to import what they are made of.
"""

import asyncio
import gc
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

import httpx
from pydantic import BaseModel

from slipstream.rollout.engine.server_process import environment_without_gpu
from tests.environment import environment

CONTEXT = 2048
TEMPERATURE = 0.9
START_TIMEOUT_S = 600
END_TIMEOUT_S = 10


class Recorded:
    """The journal of a gateway, and the prompts of its engine."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.turns: dict[int, dict[str, Any]] = {int(n): turn for n, turn in values["turns"].items()}
        self.next_states = {int(n): messages for n, messages in values["next_states"].items()}
        self.ended: list[str] = values["ended"]
        """Sessions that have ended."""
        self.prompts: list[list[int]] = values["prompts"]
        self.encoded: int = values["encoded"]
        """Number of characters that were encoded."""

    def of(self, session: str) -> list[tuple[int, dict[str, Any]]]:
        """Return the turns of a session with their numbers, in order."""
        return [(number, turn) for number, turn in self.turns.items() if turn["session"] == session]

    def ids(self, number: int) -> list[int]:
        """Return the ids of a turn: prompt and answer."""
        turn = self.turns[number]
        before = [] if turn["parent"] is None else self.ids(turn["parent"])[: turn["shared"]]
        return before + turn["context"] + turn["sampled"]

    def continues(self, number: int) -> int | None:
        """Return the turn whose ids a turn repeats whole; None: it begins a branch.

        Checks that an engine was given these ids.
        """
        turn = self.turns[number]
        ids = self.ids(number)
        assert ids[: len(ids) - len(turn["sampled"])] in self.prompts
        parent = turn["parent"]
        is_whole = parent is not None and turn["shared"] == len(self.ids(parent))
        return parent if is_whole else None


class GatewayProcess:
    """The process, as the tests see it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        standard_input, self._lifeline = os.pipe()
        self._output, standard_output = os.pipe()
        request = json.dumps([str(folder), settings]).encode()
        socket.send_fds(_nursery(), [request], [standard_input, standard_output])
        os.close(standard_input)
        os.close(standard_output)
        port, self._pid = self._started()
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def _started(self) -> tuple[int, int]:
        """Return the port, and the id of the process."""
        printed = b""
        while select.select([self._output], [], [], START_TIMEOUT_S)[0] and (
            data := os.read(self._output, 4096)
        ):
            printed += data
            for line in printed.splitlines(keepends=True):
                if line.startswith(b"port ") and line.endswith(b"\n"):
                    return int(line.split()[1]), int(line.split()[2])
        raise RuntimeError(f"the gateway has not started within {START_TIMEOUT_S} s; its error is above")

    def control(self, **orders: Any) -> dict[str, Any]:
        """Give orders, and return what the gateway has seen."""
        return self.http.post("/control", json=orders).raise_for_status().json()

    def recorded(self) -> "Recorded":
        """Return what is in the journal, and which prompts the engine was given."""
        return Recorded(self.control(recorded=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.http.close()
        os.close(self._lifeline)
        deadline = time.monotonic() + END_TIMEOUT_S
        while select.select([self._output], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not os.read(self._output, 4096):  # it has ended
                break
        else:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        os.close(self._output)


@cache
def _nursery() -> socket.socket:
    """Return the connection to the process that gateways are forks of. It ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "tests.gateway_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment() | _with_path(environment_without_gpu()),
        )
    return ours


def _with_path(variables: dict[str, str]) -> dict[str, str]:
    path = [variables["PYTHONPATH"], environment()["PYTHONPATH"]]
    return variables | {"PYTHONPATH": os.pathsep.join(path)}


class _Exceptions(logging.Handler):
    """Keeps the errors that are logged: the application answers them with 500, or breaks off a stream."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(logging.Formatter().format(record))


async def _serve(folder: Path, settings: dict[str, Any]) -> None:
    import uvicorn
    from starlette.requests import Request
    from transformers import AutoTokenizer

    from slipstream.configs.schema import GatewayConfig, ModelConfig, SamplingConfig
    from slipstream.rollout.gateway.helpers import TurnTypes
    from slipstream.rollout.gateway.serving.assemble import assemble, served_model
    from tests.scripted_source import ScriptedSource
    from tests.watched_sessions import FixedKeys, MemoryLog, WatchedSessions

    exceptions = _Exceptions()
    context = settings.pop("context", CONTEXT)
    gateway = GatewayConfig.model_validate(settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = _count_encoded(type(tokenizer))
    source = ScriptedSource(tokenizer)
    conversations, entries = WatchedSessions(TEMPERATURE, tokenizer.decode), MemoryLog()
    serving = assemble(
        served_model(
            ModelConfig(path=folder),
            name="scripted",
            context=context,
            dialect=gateway,
            sampling=SamplingConfig(temperature=TEMPERATURE),
        ),
        limits=gateway.limits,
        types=TurnTypes(gateway.turns, known_helpers=gateway.helpers == "side"),
        source=source,
        conversations=conversations,
        entries=entries,
        keys=FixedKeys(),
        mint=lambda: uuid.uuid4().hex,
        traces=gateway.traces,
        instance="scripted",
    )
    actions = {
        "hold": source.hold,
        "release": source.release,
        "hold_log": entries.hold,
        "release_log": entries.release,
    }

    lags_s: list[float] = []
    """By how much the event loop was late, looked at a hundred times a second."""

    async def look_at_the_loop() -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due_s = clock() + 0.01
            await asyncio.sleep(0.01)
            lags_s.append(clock() - due_s)

    async def control(request: Request) -> dict[str, Any]:
        orders = await request.json()
        for name in orders.keys() & actions.keys():
            actions[name]()
        if "full_for_s" in orders:
            source.full_for_s = orders["full_for_s"]
        if orders.get("garbage"):
            return {"garbage": _garbage()}
        if orders.get("recorded"):
            return {"encoded": encoded[0], **_recorded(entries.entries, source.requests)}
        return {
            "requests": [
                {**request.sampling, "prompt": len(request.input_ids)} for request in source.requests
            ],
            "cancelled": source.cancelled,
            "exceptions": exceptions.texts,
            "running": serving.turns.answers,
            "lag_p99_ms": 1000 * sorted(lags_s)[len(lags_s) * 99 // 100] if lags_s else 0.0,
            "answers": [
                {
                    "session": session,
                    "text": answer.text,
                    "message": answer.message,
                    "cancelled": answer.cancelled,
                    "tokens": list(answer.tokens),
                    "logprobs": list(answer.logprobs),
                    "spans": list(answer.spans),
                }
                for session, answer in conversations.answers
            ],
            "arrivals": [
                {
                    "user": arrival.user.name,
                    "session": arrival.session,
                    "turn_type": arrival.turn_type,
                    "ends_session": arrival.ends_session,
                    "messages": list(arrival.messages),
                    "text": arrival.text,
                }
                for arrival in conversations.arrivals
            ],
            "rewards": conversations.rewards,
        } | ({"openapi": serving.app.openapi()} if orders.get("openapi") else {})

    serving.app.add_api_route("/control", control, methods=["POST"], include_in_schema=False)
    server = uvicorn.Server(uvicorn.Config(serving.app, host="127.0.0.1", port=0, log_level="warning"))
    for name in (None, "uvicorn"):  # which hands nothing on to the root
        logging.getLogger(name).addHandler(exceptions)
    looking = asyncio.ensure_future(look_at_the_loop())
    serve = asyncio.ensure_future(server.serve())
    while not server.started and not serve.done():
        await asyncio.sleep(0.01)  # uvicorn announces its start by this flag alone
    print("port", server.servers[0].sockets[0].getsockname()[1], os.getpid(), flush=True)
    await serve
    looking.cancel()
    await serving.close()


def _garbage() -> list[str]:
    """Return the types of bodies that only a search for garbage has freed since the last call."""
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    bodies = [type(one).__name__ for one in gc.garbage if isinstance(one, BaseModel)]
    gc.garbage.clear()
    gc.collect()
    gc.freeze()  # the next search is short
    return bodies


def _count_encoded(tokenizer: type[Any]) -> list[int]:
    """Return a list whose one number is that of the characters which were encoded so far."""
    encoded, encode = [0], tokenizer.encode

    def counting(self: Any, text: str, *args: Any, **settings: Any) -> list[int]:
        encoded[0] += len(text)
        return encode(self, text, *args, **settings)

    tokenizer.encode = counting
    return encoded


def _recorded(entries: Sequence[Any], requests: Sequence[Any]) -> dict[str, Any]:
    """Return the journal, by the numbers of its entries, and the prompts that the engine was given."""
    from slipstream.rollout.tokens.record import decode_chunks
    from slipstream.rollout.tokens.turn_entries import NextState, SessionEnd, Turn

    turns: dict[int, dict[str, Any]] = {}
    next_states: dict[int, Any] = {}
    for number, entry in enumerate(entries, 1):
        match entry:
            case Turn() as turn:
                [chunk] = decode_chunks(turn.chunk)
                turns[number] = {
                    "session": turn.session,
                    "parent": turn.parent,
                    "shared": turn.shared,
                    "kept": turn.kept,
                    "type": turn.turn_type.name.lower(),
                    "reason": turn.reason,
                    "cancelled": turn.cancelled,
                    "is_rewarded": turn.is_rewarded,
                    "messages": json.loads(bytes(turn.messages)),
                    "answer": json.loads(bytes(turn.answer)),
                    "context": chunk.context.tolist(),
                    "sampled": chunk.tokens.tolist(),
                }
            case NextState() as state:
                next_states[state.turn] = json.loads(bytes(state.messages))
            case _:
                pass
    ends = [item.session for item in entries if isinstance(item, SessionEnd)]
    prompts = [list(request.input_ids) for request in requests]
    return {"turns": turns, "next_states": next_states, "ended": ends, "prompts": prompts}


def _end_with_owner() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _fork_gateways(requests: socket.socket) -> None:
    """Start a gateway for each request, with the ends of pipes that come with it as its input and output."""
    import uvicorn  # noqa: F401
    from transformers import AutoTokenizer  # noqa: F401

    from slipstream.rollout.gateway.serving import assemble  # noqa: F401

    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while (message := socket.recv_fds(requests, 1 << 16, 2))[0]:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, end in enumerate(message[1]):
                os.dup2(end, number)
                os.close(end)
            requests.close()
            folder, settings = json.loads(message[0])
            threading.Thread(target=_end_with_owner, name="end-with-owner", daemon=True).start()
            asyncio.run(_serve(Path(folder), settings))
            os._exit(0)
        for end in message[1]:
            os.close(end)


if __name__ == "__main__":
    _fork_gateways(socket.socket(fileno=int(sys.argv[1])))
