"""Replies about one question: the numbers that a reward returned, or why there are none."""

import asyncio
import linecache
import os
import traceback
from collections.abc import Iterator
from itertools import pairwise
from typing import cast

import numpy as np
import numpy.typing as npt

from slipstream.rollout.reward.judge.wire import (
    LONGEST_REPLY,
    Blame,
    EpisodeQuestion,
    GroupQuestion,
    GroupScored,
    Question,
    Ruled,
    Scored,
    TurnQuestion,
    Unscored,
    framed,
)
from slipstream.rollout.reward.live import NO_VOTES, Verdict, VoteCounts
from slipstream.rollout.reward.value import Judgement, NoNumber, TurnRewards, judgement_of, number_of
from slipstream.rollout.tokens.record import encode_scores
from slipstream.rollout.tokens.teacher import TeacherScores
from slipstream.rollout.tokens.trajectory import RewardParts

LONGEST_SCORES = LONGEST_REPLY // 2
"""Bytes of a teacher's scores in a reply."""

LONGEST_TRACEBACK = 6000
"""Characters of a traceback in a reply. The middle of a longer one is left out."""

_HERE = os.path.dirname(__file__)


def scored(question: Question, value: object, key: str) -> Scored:
    """Return the reply with a reward. ``key``, errors: as of ``judgement_of``."""
    assert isinstance(question, EpisodeQuestion)
    judgement = judgement_of(value, key)
    teacher = _encoded(judgement.teacher, question.episode.length)
    turns = _turns(judgement, question.episode.length)
    return Scored(question.number, judgement.reward, judgement.parts, teacher, turns)


def _turns(judgement: Judgement, tokens: int) -> TurnRewards:
    """Return the rewards of an episode's turns. Raises NoNumber for turns that it cannot have."""
    ends = [0, *(end for end, _ in judgement.turn_rewards)]
    if ends[-1] > tokens or any(end <= before for before, end in pairwise(ends)):
        raise NoNumber(
            f"it returned rewards of turns that end at tokens {ends[1:]}, expected growing numbers of at "
            f"most {tokens}"
        )
    return judgement.turn_rewards


def _encoded(teacher: TeacherScores | None, tokens: int) -> bytes:
    """Return the scores of an episode's tokens; nothing if there are none. Raises NoNumber."""
    if teacher is None:
        return b""
    if len(teacher) != tokens:
        raise NoNumber(f"it returned a teacher's scores of {len(teacher)} tokens, expected {tokens}")
    encoded = encode_scores(teacher)
    if len(encoded) > LONGEST_SCORES:
        raise NoNumber(
            f"it returned {len(encoded)} bytes of a teacher's scores, expected at most {LONGEST_SCORES}: "
            "return fewer of its likeliest tokens"
        )
    return encoded


def group_scored(question: Question, value: object, key: str) -> GroupScored:
    """Return the reply with the rewards of a group: as many as it has episodes, in their order.

    Raises NoNumber and what ``judgement_of`` raises.
    """
    assert isinstance(question, GroupQuestion)
    expected = len(question.episodes)
    if isinstance(value, np.ndarray):
        value = cast("npt.NDArray[np.generic]", value).tolist()
    if not isinstance(value, list | tuple):
        raise NoNumber(
            f"it returned something of type {type(value).__name__}, expected a list of {expected} rewards"
        )
    values = cast("list[object] | tuple[object, ...]", value)
    if len(values) != expected:
        raise NoNumber(f"it returned {len(values)} rewards for {expected} episodes")
    judgements: list[tuple[float, RewardParts, bytes, TurnRewards]] = []
    for place, each in enumerate(values):
        try:
            judgement = judgement_of(each, key)
            length = question.episodes[place].length
            teacher, turns = _encoded(judgement.teacher, length), _turns(judgement, length)
        except NoNumber as error:
            raise NoNumber(f"episode {place}: {error}") from error
        judgements.append((judgement.reward, judgement.parts, teacher, turns))
    reply = GroupScored(question.number, judgements)
    if len(framed(reply)) > LONGEST_REPLY:
        raise NoNumber(f"it returned {expected} judgements of more than {LONGEST_REPLY} bytes together")
    return reply


LONGEST_HINT = 100_000
"""Characters of a hint in a reply. The middle of a longer one is left out."""


def ruled(question: Question, value: object) -> Ruled:
    """Return the reply with a verdict; None is one without a score. Raises what ``number_of`` raises."""
    assert isinstance(question, TurnQuestion)
    if value is None:
        return Ruled(question.number, None)
    if not isinstance(value, Verdict):
        raise NoNumber(f"it returned something of type {type(value).__name__}, expected a Verdict or None")
    score, hint, votes = cast(object, value.score), cast(object, value.hint), cast(object, value.votes)
    if hint is not None and not isinstance(hint, str):
        raise NoNumber(f"its hint is of type {type(hint).__name__}, expected a text or None")
    return Ruled(
        question.number,
        None if score is None else number_of(score),
        None if hint is None else shortened(hint, LONGEST_HINT),
        _encoded(_whole(value.teacher), question.turn.tokens),
        votes if isinstance(votes, VoteCounts) else NO_VOTES,
        value.nothing_to_learn is True,
    )


def _whole(teacher: object) -> TeacherScores | None:
    """Return the scores of a turn, none of which may be missing. Raises NoNumber."""
    if teacher is None or isinstance(teacher, TeacherScores):
        if teacher is not None and not teacher.has_T.all():
            raise NoNumber(
                f"it returned a teacher's scores of which {int((~teacher.has_T).sum())} of {len(teacher)} "
                "are missing: a turn has a teacher's log-prob of every sampled token, or of none"
            )
        return teacher
    raise NoNumber(f"its teacher is of type {type(teacher).__name__}, expected TeacherScores or None")


def unscored(number: int, error: BaseException) -> Unscored:
    """Return the reply about whatever the reward has raised, exits and cancellations included."""
    if isinstance(error, NoNumber):
        return Unscored(number, str(error))
    if isinstance(error, MemoryError):
        reason = "it ran out of memory (rollout.judging.memory_mb)"
        return Unscored(number, f"{reason}:\n{traceback_of(error)}", Blame.MEMORY)
    blame = Blame.CANCELLED if isinstance(error, asyncio.CancelledError) else Blame.QUESTION
    return Unscored(number, f"it raised {type(error).__name__}:\n{traceback_of(error)}", blame)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error from user code, without frames of ours at its top."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next and _is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
    except BaseException as second:
        text = f"{type(error).__name__}, which cannot be shown: {type(second).__name__}"
    return shortened(text)


def waiting_at(task: "asyncio.Task[object]") -> str:
    """Return where a task awaits, in the form of a traceback without frames of ours at its top."""
    lines = [
        f'  File "{file}", line {line}, in {name}\n    {linecache.getline(file, line).strip()}\n'
        for file, line, name in _places(task.get_coro())
        if not _is_ours(file)
    ]
    return shortened("It was awaiting at (most recent call last):\n" + "".join(lines))


def _places(awaitable: object) -> Iterator[tuple[str, int, str]]:
    """Yield file, line and function of every frame between a coroutine and what it finally awaits."""
    while awaitable is not None:
        for kind, awaited in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            frame = getattr(awaitable, f"{kind}_frame", None)
            if frame is not None:
                yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
                awaitable = getattr(awaitable, awaited)
                break
        else:
            return


def shortened(text: str, longest: int = LONGEST_TRACEBACK) -> str:
    """Return ``text`` with the middle left out if it is longer than ``longest`` characters."""
    if len(text) <= longest:
        return text
    head = longest // 3
    return f"{text[:head]}\n[... {len(text) - longest} characters left out ...]\n{text[head - longest :]}"


def _is_ours(file: str) -> bool:
    return os.path.dirname(file) == _HERE
