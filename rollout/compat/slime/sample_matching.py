"""Which tokens of a sample an engine has sampled, from the requests of its episode.

A hook reports token ids, a loss mask and log-probs. The engine's own record decides: a token that no request
has sampled carries no loss, its version and log-prob are the engine's, and a log-prob that the hook reports
otherwise is an error.

    tokens   p p p  a a a  t t  b b b           p prompt, t written by a tool
    replies         └──1─┘      └──2─┘          found from left to right


A reply belongs to a place if it was asked for with exactly the ids before it. Of several such replies, the
one counts whose log-probs the hook reports, and then the longest. A hook that asks by text may
get other ids for the same text; such a reply belongs to a place with loss where it stands as a whole, or with
the log-probs that the hook reports. A tool may repeat what the policy has said: its tokens stay the tool's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.rollout.tokens.trajectory import UNSAMPLED
from slipstream.rollout.workflow.endpoint import Reply

LOGPROB_TOLERANCE = 1e-4
"""Difference of a reported log-prob from the engine's that rounding explains."""


class LogprobsDiffer(ValueError):
    """A hook reports another log-prob than the one with which the token was sampled."""


@dataclass(frozen=True)
class Match:
    """The engines' reports on the tokens of a sample. All arrays are [tokens]."""

    sampled_T: npt.NDArray[np.bool_]
    logprobs_T: npt.NDArray[np.float32]
    versions_T: npt.NDArray[np.int32]
    retractions: int


@dataclass(eq=False)
class _Answer:
    served: Reply
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    owner: int | None = None
    """Group whose samples hold it: nobody else's may, or it would be trained twice. None: none so far."""


class SampledReplies:
    """The replies among which the tokens of samples are looked for. Made once for many samples."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        self.count = len(replies)
        self._by_first: dict[int, list[_Answer]] = {}
        self._by_place: dict[tuple[int, int], list[_Answer]] = {}
        for served in replies:
            if served.completion.tokens:
                first, answer = served.completion.tokens[0], _answer(served)
                self._by_first.setdefault(first, []).append(answer)
                self._by_place.setdefault((len(served.input_ids), first), []).append(answer)

    def asked_at(self, ids: tuple[int, ...], place: int, owner: int | None) -> list[_Answer]:
        """Return the replies that were asked for with the ids before ``place``, and begin as these go on."""
        answers = self._by_place.get((place, ids[place]))
        if answers is None:
            return []
        before = ids[:place]
        return [answer for answer in _free(answers, owner) if answer.served.input_ids == before]

    def beginning_with(self, token: int, owner: int | None) -> list[_Answer]:
        return _free(self._by_first.get(token, ()), owner)


def _free(answers: Sequence[_Answer], owner: int | None) -> list[_Answer]:
    return [answer for answer in answers if answer.owner is None or answer.owner == owner]


def match_sample(
    tokens: Sequence[int],
    response_start: int,
    served: SampledReplies,
    loss_mask: Sequence[int],
    reported: Sequence[float] | None,
    owner: int | None = None,
) -> Match:
    """Return what engines say of ``tokens``, of which those from ``response_start`` may be sampled.

    ``loss_mask`` and ``reported`` (log-probs; None: the hook reports none) cover the response. ``owner``: the
    group of the sample, where the replies are those of several: the ones that are found become its own.
    Raises LogprobsDiffer where a token that is to carry loss has another log-prob than the hook says.
    """
    ids, size, trained = tuple(tokens), len(tokens), np.asarray(loss_mask, np.bool_)
    claimed = None if reported is None else np.asarray(reported, np.float64)
    match = Match(np.zeros(size, np.bool_), np.zeros(size, np.float32), np.full(size, UNSAMPLED, np.int32), 0)
    retractions, place = 0, response_start
    while place < size:
        rest = None if claimed is None else claimed[place - response_start :]
        best = _best(served.asked_at(ids, place, owner), ids, place, rest, is_exact=True)
        if trained[place - response_start] and (best is None or not best.is_sure):
            best = max(
                filter(None, (best, _best(served.beginning_with(ids[place], owner), ids, place, rest))),
                key=lambda found: (found.agreed, found.shared),
                default=None,
            )
        if best is None:
            place += 1
            continue
        length, end = best.shared, place + best.shared
        match.sampled_T[place:end] = True
        match.logprobs_T[place:end] = best.answer.logprobs[:length]
        match.versions_T[place:end] = best.answer.versions[:length]
        retractions += best.answer.served.completion.retractions
        best.answer.owner = owner
        place = end
    if claimed is not None:
        _check_logprobs(match, response_start, trained, claimed)
    return Match(match.sampled_T, match.logprobs_T, match.versions_T, retractions)


@dataclass(frozen=True)
class _Found:
    """A reply that belongs to a place of a sample."""

    answer: _Answer
    shared: int
    """Number of its tokens that stand there."""
    agreed: int
    """Number of these up to the first one whose log-prob the hook reports otherwise."""

    @property
    def is_sure(self) -> bool:
        return self.agreed == self.shared == len(self.answer.logprobs)


def _best(
    answers: Iterable[_Answer],
    ids: tuple[int, ...],
    place: int,
    claimed: npt.NDArray[np.float64] | None,
    *,
    is_exact: bool = False,
) -> _Found | None:
    """Return the first of the replies that agree with the hook, and then with the tokens, for the longest.

    ``claimed``: log-probs that the hook reports from ``place`` on.
    """
    best = None
    for answer in answers:
        shared = _shared_length(answer, ids, place, is_exact, claimed)
        agreed = shared if claimed is None else _agreed_length(answer, claimed, shared)
        if shared and (best is None or (agreed, shared) > (best.agreed, best.shared)):
            best = _Found(answer, shared, agreed)
    return best


def _answer(served: Reply) -> _Answer:
    completion = served.completion
    lengths = [span.end - span.start for span in completion.spans]
    versions = np.repeat(np.array([span.version for span in completion.spans], np.int32), lengths)
    return _Answer(served, np.array(completion.logprobs, np.float32), versions)


def _shared_length(
    reply: _Answer, ids: tuple[int, ...], place: int, is_exact: bool, claimed: npt.NDArray[np.float64] | None
) -> int:
    """Return how many tokens of a reply stand at ``place``; 0 if it does not belong there.

    ``is_exact``: it was asked for with the ids before. ``claimed``: log-probs that the hook reports.
    """
    sampled = reply.served.completion.tokens
    length = 0
    for mine, theirs in zip(sampled, ids[place : place + len(sampled)], strict=False):
        if mine != theirs:
            break
        length += 1
    if is_exact or length == len(sampled):
        return length
    return 0 if claimed is None else _agreed_length(reply, claimed, length)


def _agreed_length(reply: _Answer, claimed: npt.NDArray[np.float64], length: int) -> int:
    """Return how many of the first ``length`` log-probs of a reply, up to a wrong one, a hook reports."""
    agrees = np.abs(claimed[:length] - reply.logprobs[:length]) <= LOGPROB_TOLERANCE
    return length if agrees.all() else int(agrees.argmin())


def _check_logprobs(
    match: Match, start: int, trained: npt.NDArray[np.bool_], claimed: npt.NDArray[np.float64]
) -> None:
    agree = np.abs(claimed - match.logprobs_T[start:]) <= LOGPROB_TOLERANCE  # a NaN agrees with nothing
    wrong = np.flatnonzero(~agree & trained & match.sampled_T[start:])
    if len(wrong):
        first = int(wrong[0])
        raise LogprobsDiffer(
            f"{len(wrong)} log-probs of the sample differ from those of the engine: token {first} of the "
            f"response was sampled with {match.logprobs_T[start + first]:.6f}, and rollout_log_probs says "
            f"{claimed[first]:.6f}"
        )
