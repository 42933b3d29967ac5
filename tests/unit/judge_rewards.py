"""Rewards as users write them, and as no user should. Judge processes import this module."""

import asyncio
import ctypes
import faulthandler
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.rollout.reward import Judgement
from slipstream.rollout.tokens.teacher import TeacherScores

FOREVER_S = 600


class Interrupted(BaseException):
    """An exception that no `except Exception` catches."""


def sleeps() -> None:
    time.sleep(FOREVER_S)


def spins_in_python() -> None:
    while True:
        pass


def spins_in_c() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")


def exits() -> None:
    os._exit(3)


def complains_and_exits() -> None:
    print("the compiler is missing")
    os._exit(2)


def crashes() -> None:
    ctypes.string_at(0)


def aborts() -> None:
    os.abort()


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kills_its_keeper() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(FOREVER_S)


def stops_its_keeper() -> None:
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(FOREVER_S)


def stops_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def disables_the_watchdog() -> None:
    faulthandler.cancel_dump_traceback_later()
    time.sleep(FOREVER_S)


def closes_every_descriptor() -> None:
    os.closerange(0, 1024)


def writes_into_every_descriptor() -> None:
    for name in os.listdir("/proc/self/fd"):  # their numbers are as high as those of the process around it
        try:
            if int(name) > 2:
                os.write(int(name), b"\xff" * 64)
        except OSError:
            """Not open, or not for writing."""


def raises() -> None:
    raise LookupError("a judge is down")


def leaves_by_sys_exit() -> None:
    sys.exit(7)


def interrupts() -> None:
    raise KeyboardInterrupt


def raises_cancelled_error() -> None:
    raise asyncio.CancelledError


def raises_generator_exit() -> None:
    raise GeneratorExit


def raises_stop_iteration() -> None:
    raise StopIteration


def raises_a_base_exception() -> None:
    raise Interrupted


def recurses() -> None:
    recurses()


def raises_an_error_that_cannot_be_shown() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise SystemExit

    raise Unspeakable


def raises_an_endless_message() -> None:
    raise ValueError("x" * 10_000_000)


def allocates_too_much() -> None:
    np.zeros(1 << 32, np.uint8).sum()


def returns_nothing() -> None:
    """Forgotten: a return statement."""


def returns_a_text() -> str:
    return "0.5"


def returns_an_array_of_text() -> Any:
    return np.array("0.5")


def returns_nan() -> float:
    return float("nan")


def returns_infinity() -> float:
    return float("inf")


def returns_more_than_float32() -> float:
    return 1e39


def returns_a_complex_number() -> complex:
    return 1j


def returns_a_complex_scalar() -> Any:
    return np.complex64(1)


def returns_two_numbers() -> Any:
    return np.zeros(2)


def returns_a_huge_integer() -> int:
    return 10**5000


def returns_an_object_that_cannot_be_shown() -> object:
    class Unspeakable:
        def __repr__(self) -> str:
            raise ValueError

    return Unspeakable()


def waits_in_a_thread_that_never_ends() -> float:
    threading.Thread(target=time.sleep, args=(FOREVER_S,)).start()
    return 1.0


def forks_and_returns_twice() -> float:
    return 1.0 if os.fork() else 2.0


def forks_and_raises() -> float:
    if os.fork():
        return 1.0
    sys.exit("the child of a fork")


def forks_a_child_that_lingers() -> float:
    if os.fork() == 0:
        time.sleep(FOREVER_S)
    return 1.0


def forks_a_daemon() -> float:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(FOREVER_S)
        os._exit(0)
    return 1.0


def starts_a_program_that_lingers() -> float:
    subprocess.Popen(["sleep", str(FOREVER_S)], start_new_session=True)
    return 1.0


def starts_a_program_with_a_bare_environment() -> float:
    marked = f"{FOREVER_S}.{int(os.environ['SLIPSTREAM_RUN'][:8], 16)}"
    subprocess.Popen(["/bin/sleep", marked], start_new_session=True, env={})
    return 1.0


def leaves_its_directory() -> float:
    os.chdir("/")
    return 1.0


def leaks_descriptors() -> float:
    while True:
        LEAKED.append(os.open("/dev/null", os.O_RDONLY))


LEAKED: list[int] = []


def leaves_a_temporary_file() -> float:
    Path(os.environ["TMPDIR"], "left_behind").write_bytes(b"x" * 4096)
    return 1.0


def prints_much() -> float:
    for _ in range(100):
        print("x" * 999_999)
    return 1.0


def says_hello() -> float:
    print("hello from a reward")
    return 1.0


def uses_a_tenth_of_a_second() -> float:
    time.sleep(0.1)
    return 1.0


def uses_an_event_loop() -> float:
    return asyncio.run(asyncio.sleep(0, 1.0))


def closes_its_output() -> float:
    sys.stdout.close()
    os.close(1)
    os.close(2)
    return 1.0


NUMBERS: dict[str, tuple[Any, float]] = {
    "bool": (True, 1.0),
    "int": (3, 3.0),
    "float": (-0.5, -0.5),
    "float16": (np.float16(0.5), 0.5),
    "float32": (np.float32(0.1), float(np.float32(0.1))),
    "int64": (np.int64(-7), -7.0),
    "numpy bool": (np.True_, 1.0),
    "0-d": (np.array(2.5), 2.5),
    "one element": (np.array([2.5]), 2.5),
    "Decimal": (Decimal("0.25"), 0.25),
    "Fraction": (Fraction(1, 4), 0.25),
}
"""What a reward may return, and what that is as a float."""


class Plain:
    """Does what the response says: a number, the name of a function above, `number NAME`, and so on."""

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale
        self._leak: list[bytes] = []

    def score(self, prompt: Any, response: str, trajectory: Any) -> Any:
        if response.startswith("number "):
            return NUMBERS[response.removeprefix("number ")][0]
        if response.startswith("leak "):
            self._leak.append(b"x" * (int(response.removeprefix("leak ")) << 20))
            return 1.0
        if response.startswith("read "):
            return float(Path(response.removeprefix("read ")).read_text())
        if response.startswith("fail until "):
            return fails_until(Path(response.removeprefix("fail until ")), attempts=2)
        if response.startswith("log "):
            with open(response.removeprefix("log "), "a") as log:
                log.write(f"{prompt.id}\n")
            return 1.0
        if response.isidentifier():
            return call(response)
        return self._scale * float(response)


def call(name: str) -> Any:
    behaviour: Callable[[], Any] = globals()[name]
    return behaviour()


def fails_until(tries: Path, attempts: int) -> float:
    """Fail ``attempts`` times. The file ``tries`` has a letter for each try."""
    with tries.open("a") as file:
        file.write("x")
    if tries.stat().st_size <= attempts:
        raise ConnectionError("a judge is down")
    return 0.75


class Overlapping(Plain):
    """Does the same, and waits for a moment before a number, so that many questions are open at one time."""

    def __init__(self, pause_s: float = 0.05) -> None:
        super().__init__()
        self._pause_s = pause_s

    async def score(self, prompt: Any, response: str, trajectory: Any) -> Any:
        if response in AWAITED:
            return await AWAITED[response]()
        if not response.isidentifier():
            await asyncio.sleep(self._pause_s)
        return super().score(prompt, response, trajectory)


async def awaits_for_ever() -> None:
    await inner_wait()


async def inner_wait() -> None:
    await asyncio.get_running_loop().create_future()


async def refuses_to_be_cancelled() -> None:
    while True:
        try:
            await asyncio.sleep(FOREVER_S)
        except asyncio.CancelledError:
            """And goes on."""


async def waits_for_a_thread() -> None:
    await asyncio.to_thread(time.sleep, FOREVER_S)


async def exits_in_a_task() -> None:
    async def leave() -> None:
        sys.exit(9)

    await asyncio.create_task(leave())


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(FOREVER_S)


async def cancels_everybody() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(FOREVER_S)


async def stops_the_loop() -> float:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    return 1.0


async def forks_in_the_loop() -> float:
    if os.fork() == 0:
        await asyncio.sleep(0)
        return 2.0
    await asyncio.sleep(0.05)
    return 1.0


async def blocks_after_a_while() -> None:
    await asyncio.sleep(0.05)
    time.sleep(FOREVER_S)


async def runs_a_program() -> float:
    program = await asyncio.create_subprocess_exec("echo", "0.5", stdout=subprocess.PIPE)
    output, _ = await program.communicate()
    return float(output)


AWAITED: dict[str, Callable[[], Any]] = {
    function.__name__: function
    for function in (
        awaits_for_ever,
        refuses_to_be_cancelled,
        waits_for_a_thread,
        exits_in_a_task,
        cancels_itself,
        cancels_everybody,
        stops_the_loop,
        forks_in_the_loop,
        blocks_after_a_while,
        runs_a_program,
    )
}


def by_length(prompt: Any, response: str, trajectory: Any, limit: int = 5) -> float:
    """A reward that is a function."""
    return float(len(response) <= limit)


class Wrapped:
    """A plain function that returns an awaitable, as decorators of coroutine functions do."""

    def score(self, prompt: Any, response: str, trajectory: Any) -> Any:
        return asyncio.sleep(0, float(response))


class Echo:
    """Raises everything that it was given, for a comparison."""

    def score(self, prompt: Any, response: str, trajectory: Any) -> float:
        trajectory.tokens_T[0] += 1  # the arrays are its own
        trajectory.tokens_T[0] -= 1
        raise ValueError(f"<<{prompt!r} {response!r} {described(trajectory)}>>")


def described(trajectory: Any) -> str:
    arrays = (trajectory.tokens_T, trajectory.loss_mask_T, trajectory.logprobs_T, trajectory.versions_T)
    fields = (trajectory.finish, trajectory.retractions, trajectory.reward, trajectory.turn_rewards)
    return f"{[(array.dtype.str, array.tolist()) for array in arrays]} {fields}"


def ignores_sigterm(pid: int) -> bool:
    [ignored] = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(ignored, 16) >> (signal.SIGTERM - 1) & 1)


class SharesMemory:
    """Makes shared memory that Python's resource tracker removes, and is killed."""

    def score(self, prompt: Any, response: str, trajectory: Any) -> float:
        shared_memory.SharedMemory(response, create=True, size=4096)
        tracker = resource_tracker._resource_tracker._pid
        while not ignores_sigterm(tracker):  # it is still starting
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0


class Ordered:
    """Writes down the order in which it is asked."""

    def __init__(self, path: str) -> None:
        self._path = path

    def score(self, prompt: Any, response: str, trajectory: Any) -> float:
        with open(self._path, "a") as file:
            file.write(f"{prompt.id} ")
        time.sleep(0.002)
        return 1.0


class NoScore:
    """Lacks the method."""


class RefusesToStart:
    def __init__(self, how: str) -> None:
        if how == "raise":
            raise ConnectionError("the server of the judge is down")
        call(how)

    def score(self, prompt: Any, response: str, trajectory: Any) -> float:
        return 1.0


class StartsWhile:
    """Starts as long as a file exists."""

    def __init__(self, path: str, starts: str | None = None) -> None:
        if starts is not None:
            with open(starts, "a") as file:
                file.write("x")
        Path(path).read_text()

    def score(self, prompt: Any, response: str, trajectory: Any) -> float:
        os._exit(1)


class EndsWhenIdle:
    """Starts a thread that ends the process although nothing was asked."""

    def __init__(self) -> None:
        threading.Timer(0.05, os._exit, (5,)).start()

    def score(self, prompt: Any, response: str, trajectory: Any) -> float:
        return 1.0


class Lingers:
    """Starts a daemon of its own, and says which processes there are."""

    async def score(self, prompt: Any, response: str, trajectory: Any) -> float:
        program = subprocess.Popen(["sleep", str(FOREVER_S)], start_new_session=True)
        Path(response).write_text(f"{os.getppid()} {os.getpid()} {program.pid}")
        await asyncio.sleep(FOREVER_S)
        return 1.0


class Parts:
    """Returns the mapping that the response says in Python."""

    def score(self, prompt, response, trajectory):
        return eval(response, {"np": np, "Judgement": Judgement, "TeacherScores": TeacherScores})


class Lengths:
    """Ranks the responses of a group; the first response may say otherwise."""

    def score_group(self, prompt, responses, trajectories):
        assert [len(each.tokens_T) for each in trajectories] == [12] * len(responses)
        if responses[0].startswith("return "):
            names = {"np": np, "Judgement": Judgement, "TeacherScores": TeacherScores}
            return eval(responses[0].removeprefix("return "), names)
        if responses[0] == "sleeps":
            sleeps()
        ranked = sorted(responses, key=len)
        return [{"reward": ranked.index(response), "length": len(response)} for response in responses]


class LengthsTogether(Lengths):
    async def score_group(self, prompt, responses, trajectories):
        await asyncio.sleep(0)
        return super().score_group(prompt, responses, trajectories)


def by_other_names(a, b, c, d):
    return 0.0


def by_share(prompt, responses, trajectories, scale=1.0):
    """A reward of groups that is a function."""
    return [scale / len(responses)] * len(responses)


class Both:
    def score(self, prompt, response, trajectory):
        return 0.0

    def score_group(self, prompt, responses, trajectories):
        return [0.0] * len(responses)


class ThreeArguments:
    def __init__(self, scale, limit=3):
        raise RuntimeError("a check constructs no class of the user")

    def score(self, prompt, response):
        return 0.0
