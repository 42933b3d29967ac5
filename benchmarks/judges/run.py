"""The run of a seed and a way: `slipstream serve`, its users, and a judge that is often down."""

import asyncio
import json
import random
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from benchmarks.judges.server import JudgeServer
from benchmarks.judges.task import START, explaining, hinted
from benchmarks.judges.teacher import KEY_VARIABLE, teaching
from benchmarks.live_learning import Served
from benchmarks.quickstart_users import POLL_S, Users
from slipstream.backend.commands.audit import audit_run
from slipstream.backend.quickstart import write_policy
from slipstream.backend.quickstart.task import Problem, held_out_set, is_correct, train_problems

Way = Literal["reward", "hints", "both"]
WAYS: tuple[Way, ...] = ("reward", "hints", "both")

USERS = 64
"""Users that talk at the same time."""

HELD_OUT = 300
"""Held-out problems: the standard error of an accuracy is at most 2.9 percentage points."""

BATCH = 64
"""Turns of a training step."""

TURNS = 12 * BATCH
"""A run ends after the first training step by which this many turns of users were trained or filtered. A run
that learns from hints alone filters the turns without a hint."""

CONTEXT = 512
"""Tokens of a request to the teacher, at the most."""

WARM_START_STEPS = 400

OPTIMIZER: dict[str, object] = {
    "lr": 2.5e-4,
    "warmup_steps": 3,
    "decay": {"type": "linear", "start": 0, "min_lr": 1e-5},
}
"""The decay keeps Adam from wandering where there is little left to learn."""

VOTES = 3

ASK_AGAIN_S = 0.5
"""Seconds until a turn is asked about again whose votes are missing; twice as long each time."""

TURNS_TIMEOUT_S = 400

REWARD: dict[str, object] = {"type": "reward"}
TEACHER: dict[str, object] = {"type": "teacher"}
ADVANTAGE: dict[Way, list[dict[str, object]]] = {
    "reward": [REWARD],
    "hints": [TEACHER],
    "both": [REWARD, TEACHER],
}


@dataclass(frozen=True)
class Outcome:
    """What a policy has learned."""

    way: Way
    seed: int
    before: float
    after: float
    """Share of the held-out problems that are answered right, at temperature 0."""
    with_hint: tuple[float, float]
    """The same with the hint in the prompt: before and after."""
    curve: tuple[tuple[int, float], ...]
    """Number of turns, and share of the users' answers that were right around that time."""
    seconds: float
    """Duration of the training steps."""
    turns: int
    """Number of turns of users that were judged, trained or not."""
    trained: int
    """Number of turns that were trained."""
    refused: float
    """Share of the judge's requests that it has refused."""
    max_lag: int
    discrepancies: int
    """Number of discrepancies that the audit has found."""

    @property
    def gain(self) -> float:
        """In percentage points."""
        return round(100 * (self.after - self.before), 1)


def prepare(root: Path, seed: int) -> None:
    """Make the start policy of a seed."""
    write_policy(_policy(root, seed), seed, steps=WARM_START_STEPS, say=print, task=START)


def _policy(root: Path, seed: int) -> Path:
    return root / f"policy-{seed}"


def judge(way: Way, url: str, teacher: str) -> dict[str, object]:
    """Return the section `judge` of a way. ``url``: of the judge's server. ``teacher``: of the teacher's."""
    taught = {"teacher": {"type": "url", "url": teacher, "key_env": KEY_VARIABLE, "context": CONTEXT}}
    return {
        "type": "model",
        "endpoint": {"type": "url", "url": url, "model": "judge"},
        "votes": VOTES,
        "ask_again_s": ASK_AGAIN_S,
        **({"score": None} if way == "hints" else {}),
        **({} if way == "reward" else {"hint": taught}),
    }


async def learn(root: Path, seed: int, way: Way) -> Outcome:
    """Serve the policy of a seed to users until it has learned in this way from ``TURNS`` turns."""
    held_out = held_out_set(seed, HELD_OUT)
    with_hint = [Problem(hinted(problem.prompt), problem.label) for problem in held_out]
    server, start = JudgeServer(), _policy(root, seed)
    async with server.serving() as url, teaching(start, root / f"teacher-{seed}.log") as teacher:
        served = Served(
            root,
            f"{way}-{seed}",
            *(f"rollout.batch_size={BATCH}", "live={}", "checkpoint.every=1000"),
            *(f"run.seed={seed}", f"run.steps={TURNS // BATCH}", f"model.path={start}"),
            f"actor.optimizer={json.dumps(OPTIMIZER)}",
            *(
                f"judge={json.dumps(judge(way, url, teacher))}",
                f"actor.advantage={json.dumps(ADVANTAGE[way])}",
            ),
        )
        try:
            async with served.conversations() as conversations:
                before = await conversations.accuracy(held_out, USERS)
                hinted_before = await conversations.accuracy(with_hint, USERS)
                problems = train_problems(random.Random(f"users-{seed}"))
                said = explaining(random.Random(f"words-{seed}"))
                users = Users(conversations, problems, USERS, said)
                began = time.monotonic()
                async with users.talking():
                    marks = await _watched(served, users)
                seconds = time.monotonic() - began
                after = await conversations.accuracy(held_out, USERS)
                hinted_after = await conversations.accuracy(with_hint, USERS)
        finally:
            await asyncio.to_thread(served.end)
    audit = await asyncio.to_thread(audit_run, served.folder, print)
    right = [is_correct(answer.text, problem.label) for problem, answer in users.answers.values()]
    return Outcome(
        way,
        seed,
        before,
        after,
        (hinted_before, hinted_after),
        tuple(shares(marks, right)),
        seconds,
        marks[-1][0],
        audit.turns["trained"],
        server.refused / max(1, server.refused + server.answered),
        audit.max_head_lag or 0,
        len(audit.discrepancies),
    )


async def _watched(served: Served, users: Users) -> list[tuple[int, int]]:
    """Wait for all turns. Return after each step the number of turns, and of the answers so far."""
    marks = [(0, 0)]
    async with asyncio.timeout(TURNS_TIMEOUT_S):
        while marks[-1][0] < TURNS:
            served.check()
            metrics = served.last_step()
            turns = int(metrics.get("live/trained", 0) + metrics.get("live/filtered", 0))
            if turns > marks[-1][0]:
                marks.append((turns, len(users.answers)))
            await asyncio.sleep(POLL_S)
    return marks


WINDOW = 256
"""Smallest number of answers to users from which one point of the curve is computed."""


def shares(marks: list[tuple[int, int]], right: list[bool]) -> list[tuple[int, float]]:
    """Return the share of right answers between two marks, at the turns in their middle.

    ``marks``: turns, and answers so far. Marks between which there are too few answers are left out,
    but not the last one.
    """
    kept = marks[:1]
    for mark in marks[1:]:
        if mark[1] - kept[-1][1] >= WINDOW:
            kept.append(mark)
    if len(kept) > 1:
        kept[-1] = marks[-1]
    return [
        ((first[0] + last[0]) // 2, sum(right[first[1] : last[1]]) / (last[1] - first[1]))
        for first, last in pairwise(kept)
    ]
