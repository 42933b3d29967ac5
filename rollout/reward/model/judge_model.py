"""The language model of the recipe's section ``judge``: it is asked questions, and its votes are counted."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from slipstream.configs.schema.judge import Judge, ModelJudge
from slipstream.rollout.engine.asked_engines import ENGINES
from slipstream.rollout.reward.live import NO_VOTES, VoteCounts
from slipstream.rollout.reward.model.endpoint import ChatEngines, ChatServer, CutOff, Missing, ModelEndpoint
from slipstream.rollout.reward.model.functions import Parser
from slipstream.rollout.reward.model.votes import Tied, Vote, elected
from slipstream.rollout.tokens.tokenizer import Tokenizer, load_tokenizer
from slipstream.rollout.tokens.trajectory import Messages


@dataclass(frozen=True)
class Election:
    """The votes on one question."""

    votes: tuple[Vote, ...]
    """Those that have come and could be read."""
    counts: VoteCounts = NO_VOTES
    reason: str = ""
    """Why the first of the others is missing."""
    enough: bool = True
    """As many have come as the recipe demands."""

    def winner(self) -> tuple[float | None, VoteCounts]:
        """Return the score that has won, and the counts; None: too few votes, or a tie."""
        if not self.enough:
            return None, self.counts
        try:
            return elected(self.votes), self.counts
        except Tied:
            return None, self.counts + VoteCounts(tied=1)

    def decided(self) -> float:
        """Return the score that has won. Raises Undecided, by which judging fails and is tried again."""
        score, counts = self.winner()
        if score is None:
            raise Undecided(
                f"the votes decide nothing: {len(self.votes)} could be read, {counts.unparsable} could not, "
                f"{counts.missing} are missing{', two scores lead' if counts.tied else ''} ({self.reason})"
            )
        return score


class Undecided(RuntimeError):
    """The votes on a question decide nothing: too few have come, or two scores lead."""


class JudgeModel:
    """Asks the model. Code that judges gets it as its parameter ``judge_model``:

    class Polite:
        def __init__(self, judge_model: JudgeModel) -> None:
            self._model = judge_model

        async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
            question = f"Is this polite? End with \\boxed{1} or \\boxed{0}.\n\n{response}"
            votes = await self._model.ask([{"role": "user", "content": question}], read_score)
            return votes.decided()
    """

    def __init__(
        self,
        settings: ModelJudge,
        policy: Path,
        endpoint: ModelEndpoint | None = None,
        template_args: Mapping[str, object] | None = None,
    ) -> None:
        """``policy``: folder of the policy's tokenizer, whose chat template has the variables
        ``template_args``. ``endpoint``: in place of that of the settings.

        Raises ValueError when the environment lacks a key.
        """
        self.settings = settings
        self._policy = policy
        self._template_args = template_args
        self._tokenizer: Tokenizer | None = None
        self._endpoint = endpoint or self._server()

    @classmethod
    def of(
        cls, settings: Mapping[str, object], policy: str, template_args: Mapping[str, object] | None = None
    ) -> "JudgeModel":
        """Return the model of a section as plain data. Raises ValueError as the constructor does."""
        judge: ModelJudge = TypeAdapter[Any](Judge).validate_python(settings)
        return cls(judge, Path(policy), template_args=template_args)

    async def ask(self, messages: Messages, parse: Parser) -> Election:
        """Ask one question as often as the recipe says, and return the votes.

        A vote whose request fails is missing. One in which ``parse`` finds nothing, which is cut off, or for
        which it raises ValueError is unparsable.
        """
        asked = (self._vote(messages, parse) for _ in range(self.settings.votes))
        given = await asyncio.gather(*asked)
        votes = tuple(vote for vote in given if isinstance(vote, Vote))
        missing = [vote for vote in given if isinstance(vote, Missing)]
        unparsable = len(given) - len(votes) - len(missing)
        return Election(
            votes,
            VoteCounts(unparsable=unparsable, missing=len(missing)),
            str(missing[0]) if missing else "an answer of the model cannot be read" if unparsable else "",
            len(votes) >= self.settings.min_votes,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's tokenizer, which is loaded when it is first needed."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._policy, self._template_args)
        return self._tokenizer

    async def _vote(self, messages: Messages, parse: Parser) -> Vote | Missing | None:
        """Return a vote, or why it is missing; None: it is unparsable."""
        try:
            return parse(await self._endpoint.complete(messages))
        except Missing as error:
            return error
        except (CutOff, ValueError):
            return None

    def _server(self) -> ModelEndpoint:
        endpoint = self.settings.endpoint
        if endpoint.type == "url":
            return ChatServer(endpoint, self.settings)
        if endpoint.type == "engines":
            tokenizer = cache(lambda: load_tokenizer(endpoint.path))
            return ChatEngines(self.settings, tokenizer, ENGINES.judge)
        return ChatEngines(self.settings, lambda: self.tokenizer, ENGINES.policy)
