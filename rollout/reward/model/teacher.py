"""The teacher: log-probs of the sampled tokens after a prompt with a hint, from engines of SGLang.

A missing log-prob is a failure, and never 0: no verdict is returned, and the turn is asked about again.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple

import numpy as np

from slipstream.configs.schema.judge import HintConfig, JudgeTeacher, OverlapHint, UrlTeacher
from slipstream.rollout.engine.asked_engines import ENGINES
from slipstream.rollout.engine.client import EngineAddress, EngineClient
from slipstream.rollout.engine.completion import TokenScores
from slipstream.rollout.reward.live import JudgedTurn
from slipstream.rollout.reward.model.endpoint import key_of
from slipstream.rollout.reward.model.hints import NoPlace, with_hint
from slipstream.rollout.system.key import NO_KEY, Key
from slipstream.rollout.tokens.teacher import TeacherScores
from slipstream.rollout.tokens.tokenizer import Tokenizer

AnyEngine = Callable[[], AbstractAsyncContextManager[EngineClient]]
"""Gives an engine inside a block. Raises EngineLost."""


class Taught(NamedTuple):
    """A hint, and what the teacher says of the answer with it."""

    hint: str
    scores: TeacherScores


class HintTeacher:
    """Scores the answer of a turn with hints, and says which hint is taken."""

    def __init__(
        self,
        settings: HintConfig,
        tokenizer: Callable[[], Tokenizer],
        timeout_s: float,
        *,
        policy: AnyEngine = ENGINES.policy.least_loaded,
        judge: AnyEngine = ENGINES.judge.least_loaded,
    ) -> None:
        """``tokenizer``: returns the policy's. ``timeout_s``: of one request to a server that is not the
        run's. ``policy``, ``judge``: give an engine of the policy, and of the judge's own.

        Raises ValueError when the environment lacks a key.
        """
        assert settings.teacher is not None
        self._choose = settings.choose
        self._top_k = settings.teacher.top_k
        self._tokenizer = tokenizer
        self._policy = policy
        self._teacher = policy
        if isinstance(settings.teacher, UrlTeacher):
            self._teacher = _server(settings.teacher, timeout_s)
        elif isinstance(settings.teacher, JudgeTeacher):
            self._teacher = judge

    async def taught(self, turn: JudgedTurn, hints: Sequence[str]) -> Taught | None:
        """Return the hint that is taken, with the teacher's scores of the sampled tokens.

        ``hints``: the longest first. None: no hint has a place in the prompt, or the prompt is too long with
        each of them. Raises what ``EngineClient.score_tokens`` raises.
        """
        answer = ids_in(turn.answer_ids)
        if not hints or not answer:
            return None
        if isinstance(self._choose, OverlapHint):
            return await self._agreeing(turn, hints, answer, self._choose.top_k)
        for hint in hints:
            scores = await self._scores(turn, hint, answer, self._top_k)
            if scores is not None:
                return Taught(hint, _as_scores(scores, self._top_k))
        return None

    async def _agreeing(
        self, turn: JudgedTurn, hints: Sequence[str], answer: Sequence[int], top_k: int
    ) -> Taught | None:
        """Return the hint under which the teacher's likeliest tokens agree most with the policy's."""
        async with self._policy() as engine:
            student = await engine.score_tokens(ids_in(turn.prompt_ids), answer, top_k=top_k)
        best: tuple[float, str, TokenScores] | None = None
        for hint in hints:
            scores = await self._scores(turn, hint, answer, max(top_k, self._top_k))
            if scores is None:
                continue
            share = overlap(student, scores, top_k)
            if best is None or share > best[0]:
                best = share, hint, scores
        return None if best is None else Taught(best[1], _as_scores(best[2], self._top_k))

    async def _scores(
        self, turn: JudgedTurn, hint: str, answer: Sequence[int], top_k: int
    ) -> TokenScores | None:
        """Return the teacher's scores of the answer with a hint; None: it cannot be given to the teacher."""
        try:
            messages = [*turn.history, *turn.messages]
            prompt = with_hint(self._tokenizer(), ids_in(turn.prompt_ids), messages, hint)
        except NoPlace:
            return None
        async with self._teacher() as engine:
            if len(prompt) + len(answer) > engine.address.max_length:
                return None
            return await engine.score_tokens(prompt, answer, top_k=top_k)


def ids_in(data: bytes) -> list[int]:
    """Return token ids that are stored as int32."""
    return np.frombuffer(data, "<i4").tolist()


def overlap(student: TokenScores, teacher: TokenScores, top_k: int) -> float:
    """Return the mean share of the student's ``top_k`` likeliest tokens that are among the teacher's."""
    shares = [
        len({token for _, token in ours[:top_k]} & {token for _, token in theirs[:top_k]}) / top_k
        for ours, theirs in zip(student.top, teacher.top, strict=True)
    ]
    return sum(shares) / len(shares)


def _as_scores(scores: TokenScores, top_k: int) -> TeacherScores:
    logp_T = np.array(scores.logprobs, np.float32)
    if not top_k:
        return TeacherScores(logp_T)
    return TeacherScores(
        logp_T,
        np.array([[token for _, token in position[:top_k]] for position in scores.top], np.int32),
        np.array([[logprob for logprob, _ in position[:top_k]] for position in scores.top], np.float32),
    )


def _server(teacher: UrlTeacher, timeout_s: float) -> AnyEngine:
    """Return a function that gives the client of a server. It makes the client in the loop that uses it."""
    key = Key(key_of(teacher.key_env, "judge.hint.teacher.key_env") or NO_KEY)
    # The vocabulary is the policy's, whose ids were checked when they were recorded.
    address = EngineAddress(
        "the teacher", teacher.url.rstrip("/"), 1, 1 << 31, teacher.context, timeout_s, key=key
    )
    clients: list[EngineClient] = []

    @asynccontextmanager
    async def server():
        if not clients:
            clients.append(EngineClient(address))
        yield clients[0]

    return server
