"""The judge of live turns that asks the language model: ``judge: {type: model, ...}``."""

import asyncio
from typing import NamedTuple

from slipstream.configs.schema.judge import ModelQuestion
from slipstream.rollout.reward.live import NO_VOTES, JudgedTurn, Verdict
from slipstream.rollout.reward.model.functions import Parser, Prompt, load_parser, load_prompt
from slipstream.rollout.reward.model.judge_model import Election, JudgeModel
from slipstream.rollout.reward.model.teacher import HintTeacher
from slipstream.rollout.reward.model.votes import hints_for
from slipstream.rollout.system.plugins import PluginError
from slipstream.rollout.tokens.trajectory import Messages

YES = 1.0
"""The vote that says that there is a hint."""

NOT_ASKED = Election(())


class _Question(NamedTuple):
    prompt: Prompt
    parser: Parser


class TurnVotes:
    """A ``LiveJudge``: asks for votes on the score of a turn, on a hint, or both.

    A question that decides nothing (too few votes have come, or two scores lead) leaves the turn without a
    verdict, so that it is asked about again as a whole.
    """

    def __init__(self, judge_model: JudgeModel) -> None:
        """Raises PluginError for a prompt or a parser that cannot be used: all problems at once."""
        settings = judge_model.settings
        self._model = judge_model
        problems: list[str] = []
        self._score = settings.score and _question(settings.score, "judge.score", problems)
        asked = settings.hint and settings.hint.question
        self._hint = asked and _question(asked, "judge.hint.question", problems)
        if problems:
            raise PluginError("\n".join(problems))
        self._wants_hints = settings.hint is not None
        self._teacher: HintTeacher | None = None
        if settings.hint is not None and settings.hint.teacher is not None:
            tokenizer, timeout_s = (lambda: judge_model.tokenizer), settings.request_timeout_s
            self._teacher = HintTeacher(settings.hint, tokenizer, timeout_s)

    async def judge(self, turn: JudgedTurn, next_state: Messages) -> Verdict:
        """Return the verdict of the votes on a turn, with the teacher's scores of its tokens.

        Raises what ``EngineClient.score_tokens`` raises: without them there is no verdict.
        """
        scores, decisions = await asyncio.gather(
            self._ask(self._score, turn, next_state), self._ask(self._hint, turn, next_state)
        )
        score, counts = scores.winner() if self._score else (None, NO_VOTES)
        counts += decisions.counts
        is_decided = (not self._score or score is not None) and decisions.enough
        if not is_decided:
            return Verdict(None, votes=counts)
        hints = self._hints(scores, score, decisions)
        hint = hints[0] if hints else None
        taught = await self._teacher.taught(turn, hints) if self._teacher else None
        if taught is not None:
            return Verdict(score, taught.hint, taught.scores, counts)
        return Verdict(score, hint, votes=counts, nothing_to_learn=score is None and hint is None)

    async def _ask(self, question: _Question | None, turn: JudgedTurn, next_state: Messages) -> Election:
        if question is None:
            return NOT_ASKED
        return await self._model.ask(question.prompt(turn, next_state), question.parser)

    def _hints(self, scores: Election, score: float | None, decisions: Election) -> list[str]:
        """Return the hints of the votes that say yes, the longest first."""
        if not self._wants_hints:
            return []
        if self._hint:
            return hints_for(decisions.votes, YES)
        return [] if score is None else hints_for(scores.votes, score)


def _question(settings: ModelQuestion, section: str, problems: list[str]) -> _Question | None:
    """Return prompt and parser of a section of the recipe; None, with ``problems``, if one cannot be used."""
    prompt = parser = None
    try:
        prompt = load_prompt(settings.prompt)
    except PluginError as error:
        problems.append(f"{section}.prompt: {error}")
    try:
        parser = load_parser(settings.parser)
    except PluginError as error:
        problems.append(f"{section}.parser: {error}")
    return _Question(prompt, parser) if prompt and parser else None
