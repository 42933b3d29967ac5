"""What the benchmark of isolation counts, and when its users say that they were answered."""

import asyncio
import json
import subprocess
import sys
import time

import psutil
import pytest
from aiohttp import web

from benchmarks import live_users
from benchmarks.isolation.course import Cell, LoopRun
from benchmarks.isolation.disturb import disturbed
from benchmarks.isolation.picture import draw
from benchmarks.isolation.rates import RATES, Events, others
from benchmarks.live_users import Answered, Crowd, Habits

HABITS = Habits(every_s=0.01, turns=2, max_tokens=5, says=lambda rng: str(rng.random()))


# ---- rates


def test_rates_and_gaps_are_those_of_a_time():
    events = Events({"answers": [1.0, 2.0, 3.0, 8.0], "groups": [1.0] * 8})
    assert events.rate("answers", 1.0, 5.0) == 0.5, "from 2.0 on, up to 3.0"
    assert events.longest_gap_s("answers", 1.0, 10.0) == 5.0
    assert events.longest_gap_s("verdicts", 1.0, 10.0) == 9.0
    assert events.rate("groups", 0.0, 1.0) == 2.0, "four rewards make a group"


def test_entries_are_counted_between_two_looks_in_proportion():
    events = Events(journal=[(0.0, 10, 10), (10.0, 30, 10), (20.0, 60, 5), (21.0, 60, 5)])
    assert events.rate("entries", 0.0, 10.0) == 2.0
    assert events.rate("entries", 5.0, 15.0) == pytest.approx((20 + 0.5 * 35 - 10) / 10)
    assert events.longest_gap_s("entries", 0.0, 21.0) == 10.0
    assert events.unacknowledged(0.0, 20.0) == 10


def test_times_can_be_counted_from_another_moment():
    events = Events({"steps": [101.0]}, [(102.0, 5, 1)], [(103.0, 0.5)]).since(100.0)
    assert events == Events({"steps": [1.0]}, [(2.0, 5, 1)], [(3.0, 0.5)])


def test_what_a_disturbance_starves_is_not_held_against_the_others():
    assert others("engine") == list(RATES)
    assert others("gateway") == ["groups", "steps"]
    assert others("trainer") == ["answers", "entries", "verdicts"]
    assert others("judge") == ["answers", "entries", "groups", "steps"]


def test_a_picture_is_drawn():
    rates = dict.fromkeys(RATES, (1.0, 0.9))
    cell = Cell(
        "judge",
        "slowed",
        (0.0, 30.0),
        (30.0, 60.0),
        rates,
        {},
        None,
        (0.1, 0.2),
        (0.5, 0.5),
        (0.1, 0.1),
        (0.1, 0.1),
        {},
    )
    assert cell.shares == dict.fromkeys(others("judge"), 0.9)
    events = Events({"steps": [float(second) for second in range(70)]})
    assert draw([LoopRun("judge", [cell], events, [])]).startswith(b"\x89PNG")


# ---- disturbances


@pytest.fixture
def process():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield psutil.Process(child.pid)
    child.kill()
    child.wait()


def awaited_state(process: psutil.Process, *states: str) -> bool:
    deadline = time.monotonic() + 60
    while process.status() not in states:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


@pytest.mark.parametrize("kind", ["stopped", "slowed"])
def test_a_process_goes_on_behind_a_disturbance(process, kind):
    with disturbed(kind, lambda: [process]):
        assert awaited_state(process, psutil.STATUS_STOPPED)
        if kind == "slowed":
            assert awaited_state(process, psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)
    assert awaited_state(process, psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)


def test_a_killed_process_is_gone(process):
    with disturbed("killed", lambda: [process]):
        assert awaited_state(process, psutil.STATUS_ZOMBIE)
    with disturbed("killed", lambda: [process]):
        """It is gone already."""


# ---- users


class Gateway:
    """Answers each request as the test says; then well."""

    def __init__(self, *behaviours: str) -> None:
        self.behaviours = list(behaviours)
        self.bodies: list[dict] = []
        self.retries: list[str] = []

    async def take(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.retries.append(request.headers["x-stainless-retry-count"])
        behaviour = self.behaviours.pop(0) if self.behaviours else "answers"
        if behaviour == "refuses":
            return web.Response(status=429, headers={"Retry-After": "1"})
        response = web.StreamResponse()
        await response.prepare(request)
        text = f"answer {len(self.bodies)}"
        for piece in text.split(" "):
            await self._send(response, {"choices": [{"delta": {"content": piece}}]})
        if behaviour == "fails":
            await self._send(response, {"error": {"message": "no"}})
        if behaviour == "cuts off":
            assert request.transport is not None
            request.transport.abort()
            return response
        if behaviour != "forgets the end":
            await self._send(response, {"choices": [], "usage": {"completion_tokens": 7}})
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, event: dict) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def talking(gateway: Gateway, answers: int, **more) -> tuple[list[Answered], Crowd]:
    """Let one user talk until it has got so many answers."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", gateway.take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    answered: list[Answered] = []
    enough = asyncio.Event()

    def take(answer: Answered) -> None:
        answered.append(answer)
        if len(answered) == answers:
            enough.set()

    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    crowd = Crowd(url, "key", 1, more.pop("habits", HABITS), take, time.time)
    talk = asyncio.create_task(crowd.talk())
    async with asyncio.timeout(60):
        await enough.wait()
    talk.cancel()
    await asyncio.wait({talk})
    await runner.cleanup()
    return answered, crowd


def test_a_conversation_goes_on_with_what_was_answered_and_its_end_is_told():
    gateway = Gateway()
    answered, _ = asyncio.run(talking(gateway, 4))
    short, first, second, third = gateway.bodies[:4]
    assert (len(short["messages"]), short["session_done"]) == (1, True), "all lengths come first"
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == "answer2"
    assert [body["session_id"] for body in (short, first, second, third)] == [
        "user-0-0",
        "user-0-1",
        "user-0-1",
        "user-0-2",
    ]
    assert ("session_done" in first, second["session_done"]) == (False, True)
    assert [(a.session, a.said, a.text, a.tokens) for a in answered[1:3]] == [
        ("user-0-1", first["messages"][0]["content"], "answer2", 7),
        ("user-0-1", second["messages"][2]["content"], "answer3", 7),
    ]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("refuses", "HTTP 429"),
        ("cuts off", "ClientPayloadError"),
        ("forgets the end", "CutOff"),
        ("fails", "an error in the stream"),
    ],
)
def test_what_has_not_arrived_in_whole_is_asked_for_again(monkeypatch, behaviour, reason):
    monkeypatch.setattr(live_users, "AGAIN_S", 0.01)
    monkeypatch.setattr(live_users, "LONGEST_REFUSAL_S", 0.01)
    gateway = Gateway(behaviour, behaviour)
    answered, crowd = asyncio.run(talking(gateway, 1))
    assert [answer.text for answer in answered[:1]] == ["answer3"]
    assert gateway.bodies[0] == gateway.bodies[1] == gateway.bodies[2]
    assert gateway.retries[:3] == ["0", "1", "2"]
    assert crowd.failures == {reason: 2}


def test_a_user_who_was_kept_waiting_misses_ticks():
    now = 0.5
    ticks = live_users._ticks(3.0, lambda: now, phase=0.5)
    assert next(ticks) == 1.5, "half of the time between two ticks later"
    now = 2.0
    assert next(ticks) == 3.0
    now = 12.0
    assert next(ticks) == 2.0, "the ticks at 5, 8 and 11 have passed"
    now = 14.0
    assert next(ticks) == 3.0
