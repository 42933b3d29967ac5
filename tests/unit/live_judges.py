"""Judges of live turns for tests, by import path. They run in judge processes."""

import asyncio
import os
from pathlib import Path

from slipstream.rollout.reward.live import JudgedTurn, Verdict, text_of
from slipstream.rollout.tokens.trajectory import Messages


class Told:
    """Does what the next state says."""

    async def judge(self, turn: JudgedTurn, next_state: Messages) -> Verdict | None:
        said = text_of(next_state[0]) if next_state else "nothing"
        match said.split():
            case ["score", number]:
                return Verdict(float(number), hint=f"{turn.session} {turn.key} {turn.text}")
            case ["nothing"]:
                return Verdict(None)
            case ["none"]:
                return None
            case ["number"]:
                return 1.0  # type: ignore[return-value]
            case ["raise"]:
                raise ConnectionError("the server of the judge is down")
            case ["sleep"]:
                await asyncio.sleep(60)
            case ["die"]:
                os._exit(3)
        raise AssertionError(said)


class DownUntil:
    """Cannot be constructed, or raises, until a file exists."""

    def __init__(self, path: str, *, at_start: bool = False) -> None:
        self._path = Path(path)
        if at_start and not self._path.exists():
            raise ConnectionError("down")

    async def judge(self, turn: JudgedTurn, next_state: Messages) -> Verdict:
        if not self._path.exists():
            raise ConnectionError("down")
        return Verdict(1.0)


def judge(turn: JudgedTurn, next_state: Messages, least: int = 0) -> Verdict:
    """A plain function is a judge, too."""
    return Verdict(float(turn.tokens > least))


class NoJudge:
    def score(self) -> float:
        return 0.0
