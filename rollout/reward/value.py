"""The values that rewards return: a number, or a mapping of numbers, one of which trains."""

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, SupportsFloat, cast

import numpy as np
import numpy.typing as npt

from slipstream.rollout.tokens.teacher import TeacherScores
from slipstream.rollout.tokens.trajectory import LARGEST_REWARD, Prompt, RewardParts, Trajectory

RESERVED = frozenset({"mean", "std", "turn_mean", "parts", "source_parts"})
"""Names that no part may have: the metrics ``reward/NAME`` are there already."""

OF_SOURCES = "source_"
"""Beginning of the names of other metrics: ``reward/source_NAME`` is the mean reward of a source."""

MOST_PARTS = 32
"""Largest number of parts: each is a metric, and travels with every trajectory."""

_NAME = re.compile(r"[\w.-]{1,64}")

_repr = reprlib.Repr()
_repr.maxother = _repr.maxstring = 200


TurnRewards = tuple[tuple[int, float], ...]


class NoNumber(ValueError):
    """A reward returned something else than a finite real number, or a mapping without one."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The worth of an episode. A reward may return one instead of a number or a mapping."""

    reward: float
    """The number that trains."""
    parts: RewardParts = ()
    """The other numbers, by name."""
    teacher: TeacherScores | None = None
    """A teacher's scores of all tokens of the trajectory; None: the trajectory keeps those that it has."""
    turn_rewards: TurnRewards = ()
    """(number of tokens up to the end of a turn, its reward), in order, for ``actor.turns``. Empty: the
    trajectory keeps those that it has."""


def is_name(name: str) -> bool:
    """True if a number may be logged by this name."""
    return _NAME.fullmatch(name) is not None


def is_part_name(name: str) -> bool:
    """True if a further number of a reward may have this name."""
    return is_name(name) and not _is_taken(name)


def _is_taken(name: str) -> bool:
    return name in RESERVED or name.startswith(OF_SOURCES)


def number_of(value: object) -> float:
    """Return what a reward returned as a float. Raises NoNumber, and whatever a type of the user's raises."""
    if isinstance(value, np.ndarray | np.generic):
        array = cast("npt.NDArray[np.generic]", value)
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise NoNumber(_refusal(array))
        value = array.item()
    if not isinstance(value, SupportsFloat):
        raise NoNumber(_refusal(value))
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise NoNumber(_refusal(value)) from error
    if not math.isfinite(result):
        raise NoNumber(_refusal(value))
    if abs(result) > LARGEST_REWARD:
        raise NoNumber(f"it returned {result:g}, expected at most {LARGEST_REWARD:g} (float32)")
    return result


def judgement_of(value: object, key: str) -> Judgement:
    """Return the judgement that a reward's return value stands for.

    ``key``: name of the number that trains, where the value is a mapping (``rollout.reward_key``). Texts in a
    mapping are left out: rewards return them for logs. Raises NoNumber for everything else that is no finite
    number, and whatever a type of the user's raises.
    """
    if isinstance(value, Judgement):
        return _checked(value)
    if not isinstance(value, Mapping):
        return Judgement(number_of(value))
    values = dict(cast("Mapping[object, object]", value))
    if key not in values:
        raise NoNumber(
            f"it returned a mapping with the keys {_shown(list(values))}, expected {key!r} among them: "
            "rollout.reward_key names the number that trains"
        )
    reward = _number_at(key, values.pop(key))
    numbers = {name: number for name, number in values.items() if not isinstance(number, str)}
    if len(numbers) > MOST_PARTS:
        raise NoNumber(
            f"it returned a mapping with {len(numbers)} further numbers, expected {MOST_PARTS} at most"
        )
    return Judgement(reward, tuple((_name(name), _number_at(name, part)) for name, part in numbers.items()))


def _checked(judgement: Judgement) -> Judgement:
    check_parts(judgement.parts)
    teacher = cast(object, judgement.teacher)
    if teacher is not None and not isinstance(teacher, TeacherScores):
        raise NoNumber(f"its teacher is of type {type(teacher).__name__}, expected TeacherScores or None")
    turns = tuple((int(end), number_of(reward)) for end, reward in judgement.turn_rewards)
    return Judgement(number_of(judgement.reward), judgement.parts, judgement.teacher, turns)


def check_parts(parts: object) -> None:
    """Raise NoNumber unless these are parts of a reward, as a workflow may have set them itself."""
    if not isinstance(parts, tuple):
        raise NoNumber(
            f"its reward_parts are of type {type(parts).__name__}, expected a tuple of (name, number)"
        )
    pairs = cast("tuple[object, ...]", parts)
    names: set[str] = set()
    for pair in pairs:
        shown = _shown(pair)
        if not isinstance(pair, tuple) or len(cast("tuple[object, ...]", pair)) != 2:
            raise NoNumber(f"its reward_parts have {shown}, expected (name, number)")
        name, value = cast("tuple[object, object]", pair)
        if type(value) is not float or not abs(value) <= LARGEST_REWARD:  # NaN is not
            raise NoNumber(f"its reward part {_shown(name)} is {_shown(value)}, expected a float of float32")
        names.add(_name(name))
    if len(names) != len(pairs) or len(pairs) > MOST_PARTS:
        raise NoNumber(f"it has {len(pairs)} reward_parts, expected {MOST_PARTS} at most, each once")


def _name(name: object) -> str:
    if not isinstance(name, str) or not is_name(name):
        raise NoNumber(
            f"it returned a mapping with the key {_shown(name)}, expected a name of at most 64 letters, "
            "digits, `_`, `-` and `.`"
        )
    if _is_taken(name):
        raise NoNumber(f"it returned a mapping with the key {name!r}, which names another metric: rename it")
    return name


def _number_at(name: object, value: object) -> float:
    try:
        return number_of(value)
    except NoNumber as error:
        raise NoNumber(f"its value {_shown(name)}: {error}") from error


def _refusal(value: object) -> str:
    return f"it returned {_shown(value)} of type {type(value).__name__}, expected a finite number"


def _shown(value: object) -> str:
    try:
        return _repr.repr(value)
    except Exception:  # a repr of the user's, or an integer with more digits than Python prints
        return "something"


class EpisodeJudge(Protocol):
    """Asks for rewards in a collector. Its methods raise JudgingFailed after the last attempt."""

    @property
    def of_groups(self) -> bool:
        """True if only whole groups are judged, and only when all of their episodes have ended."""
        ...

    async def judge(self, prompt: Prompt, trajectory: Trajectory) -> Judgement: ...
    async def judge_group(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Judgement]: ...
