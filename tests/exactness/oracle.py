"""Judges what is trained by the records of the engines, and by what the clients have sent and got.

Nothing here asks the code under test how turns hang together. A trajectory is right if each part of it that
was sampled is, together with everything before it, exactly one completion of an engine.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.rollout.reward.live import JudgedTurn
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Messages, Trajectory
from tests.exactness.driver import BOUND
from tests.exactness.engines import Record, Records

SHOWN = 20
LONGEST = 3000
"""Most examples of what is wrong, and most characters of one."""


@dataclass
class Asked:
    """One request of a client, and how it has ended."""

    number: int
    is_main: bool
    """The client says nothing else, and has left sampling to the recipe."""
    session: str | None = None
    """As the reply has named it."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Roles and texts, as they were sent; empty: a prompt without messages."""
    texts: list[str] = field(default_factory=list[str])
    """Texts of the answers that have come, without blanks around them."""
    has_stops: bool = False
    outcome: str = "running"
    """``answered``; ``left``: the client has gone; ``refused`` or ``broken``; ``partial``: some answers of
    several have come."""


class Taught(NamedTuple):
    """A token that carried loss in a step."""

    record: int
    place: int


@dataclass
class Findings:
    """Numbers of what was looked at, and of what was wrong."""

    turns_trained: int = 0
    tokens_trained: int = 0
    trajectories: int = 0
    several_turns: int = 0
    """Trajectories with more than one turn that carries loss."""
    mismatched_ids: int = 0
    missing_logprobs: int = 0
    tokens_with_loss_twice: int = 0
    untrainable_trained: int = 0
    """Turns that carried loss although the client has gone, or has asked for something else."""
    wrong_versions: int = 0
    wrong_questions: int = 0
    """Turns that were judged by what nobody has said."""
    wrong_prompts: int = 0
    wrong_answers: int = 0
    """Replies that clients have not asked for."""
    examples: list[str] = field(default_factory=list[str])

    def wrong(self, kind: str, example: str) -> None:
        setattr(self, kind, getattr(self, kind) + 1)
        if len(self.examples) < SHOWN:
            self.examples.append(f"{kind}: {example[:LONGEST]}")


class Oracle:
    """Compares everything that is trained with the records of the engines."""

    def __init__(self, records: Records) -> None:
        self.findings = Findings()
        self.asked: dict[int, Asked] = {}
        self.taught: dict[Taught, int] = {}
        """Version whose step has trained each token."""
        self.trained_records: set[int] = set()
        self.records = records
        self._seen = 0
        self._by_prompt: dict[int, list[Record]] = defaultdict(list)
        self._parents: dict[int, int] = {}
        self.trajectories: list[Trajectory] = []
        """All of them, where they are kept."""
        self.keeps = False
        self.questions: list[tuple[JudgedTurn, Messages]] = []
        """What judges were asked."""
        self.answered_questions: set[tuple[int, int]] = set()
        """Conversation and number of what agents that rewrite histories have got answers to."""

    # ---- training

    def trained(self, version: int, parent: int, batch: TrainBatch, lags: Mapping[int, int]) -> None:
        """Look at everything that a step is given."""
        self._parents[version] = parent
        self._index()
        for trajectory in batch.trajectories:
            self.findings.trajectories += 1
            if self.keeps:
                self.trajectories.append(trajectory)
            self._check(trajectory, version, lags)

    def _index(self) -> None:
        for record in self.records.all[self._seen :]:
            self._by_prompt[hash(record.prompt)].append(record)
        self._seen = len(self.records.all)

    def _check(self, trajectory: Trajectory, version: int, lags: Mapping[int, int]) -> None:
        ids = trajectory.tokens_T.tolist()
        mask_T, versions_T = trajectory.loss_mask_T, trajectory.versions_T
        begin, turns = 0, 0
        if (mask_T & (versions_T == UNSAMPLED)).any():
            self.findings.wrong("mismatched_ids", "a token that nobody has sampled carries loss")
        for end, _ in trajectory.turn_rewards:
            sampled = np.flatnonzero(versions_T[begin:end] != UNSAMPLED)
            if not len(sampled) or sampled[-1] != end - begin - 1 or len(np.unique(np.diff(sampled))) > 1:
                self.findings.wrong(
                    "mismatched_ids", f"turn [{begin}, {end}) does not end with what was sampled"
                )
                begin = end
                continue
            start = begin + int(sampled[0])
            record = self._record(ids, trajectory, start, end)
            if record is None:
                self.findings.wrong(
                    "mismatched_ids",
                    f"no engine has sampled tokens [{start}, {end}) of {len(ids)} behind these",
                )
            else:
                self._check_turn(record, trajectory, start, end, version, lags)
            begin = end
            turns += 1
        if begin != len(ids):
            self.findings.wrong("mismatched_ids", f"the last turn ends at {begin} of {len(ids)}")
        self.findings.turns_trained += turns
        self.findings.several_turns += turns > 1

    def _record(self, ids: list[int], trajectory: Trajectory, start: int, end: int) -> Record | None:
        """Return the completion that these tokens are, behind exactly the ids before them."""
        prompt = tuple(ids[:start])
        same = [
            record
            for record in self._by_prompt.get(hash(prompt), ())
            if record.prompt == prompt and record.tokens[: end - start] == ids[start:end]
        ]
        logprobs = trajectory.logprobs_T[start:end].tolist()
        for record in same:
            if record.logprobs[: end - start] == logprobs:
                return record
        if same:
            self.findings.wrong(
                "missing_logprobs", f"tokens [{start}, {end}) have other log-probs than sampled"
            )
        return None

    def _check_turn(
        self,
        record: Record,
        trajectory: Trajectory,
        start: int,
        end: int,
        version: int,
        lags: Mapping[int, int],
    ) -> None:
        versions = trajectory.versions_T[start:end].tolist()
        if versions != record.said[: end - start]:
            self.findings.wrong("wrong_versions", f"{versions} instead of {record.said[: end - start]}")
        mask = trajectory.loss_mask_T[start:end]
        for place, (said, carries_loss) in enumerate(zip(versions, mask.tolist(), strict=True)):
            if carries_loss != (lags.get(said, BOUND + 1) <= BOUND):
                self.findings.wrong("wrong_versions", f"a token of version {said} has loss: {carries_loss}")
            if carries_loss:
                self._teach(Taught(record.number, place), version)
        self.trained_records.add(record.number)
        asked = self.asked.get(record.asked_by)
        if asked is None or not asked.is_main or asked.outcome in ("refused", "broken"):
            self.findings.wrong("untrainable_trained", f"a completion of {asked}")
        is_seen_by_gateway = asked is not None and asked.has_stops
        if record.finish is None and not is_seen_by_gateway:
            self.findings.wrong("untrainable_trained", "a completion that has not ended")

    def _teach(self, token: Taught, version: int) -> None:
        self.findings.tokens_trained += 1
        if token in self.taught:
            self.findings.wrong("tokens_with_loss_twice", f"{token} in {self.taught[token]} and {version}")
        self.taught[token] = version

    def rewound(self, version: int) -> None:
        """Note that the run goes on from a version: what was trained behind it is undone."""
        line = {version}
        while version in self._parents:
            version = self._parents[version]
            line.add(version)
        self.taught = {token: by for token, by in self.taught.items() if by in line}

    # ---- judging

    def judged(self, turn: JudgedTurn, next_state: Messages) -> None:
        """Remember what a judge is asked. The clients may not have read the answer yet."""
        self.questions.append((turn, next_state))

    def check_questions(self) -> None:
        """Look at all that judges were asked."""
        for turn, next_state in self.questions:
            self._check_question(turn, next_state)

    def _check_question(self, turn: JudgedTurn, next_state: Messages) -> None:
        said = plain(turn.messages)
        matching = [
            asked
            for asked in self.asked.values()
            if (asked.session == turn.session or (asked.session is None and asked.outcome == "left"))
            and _ends_with(asked, said)
            and (turn.text.strip() in asked.texts or asked.outcome == "left")
        ]
        if not matching:
            near = [
                (asked.number, asked.outcome, asked.session, asked.texts)
                for asked in self.asked.values()
                if _ends_with(asked, said) and asked.messages
            ]
            self.findings.wrong(
                "wrong_questions",
                f"nobody has said {said} in {turn.session} and been answered {turn.text!r}: {near}",
            )
        elif next_state and not any(self._follows(asked, turn, next_state) for asked in matching):
            self.findings.wrong("wrong_questions", f"nobody has sent {next_state} behind {turn.text!r}")

    def _follows(self, asked: Asked, turn: JudgedTurn, next_state: Messages) -> bool:
        """Return whether a request of the session has repeated an answer and sent this behind it."""
        sent = plain(next_state)
        return not asked.messages or any(
            other.session in (None, turn.session) and _ends_with(other, sent) for other in self.asked.values()
        )

    # ---- the end

    def outcomes(self) -> Counter[str]:
        return Counter(asked.outcome for asked in self.asked.values())

    def due(self) -> tuple[int, int]:
        """Return how many completions must have come to a training or an expiry, and how many may have."""
        certain = possible = 0
        for record in self.records.all:
            asked = self.asked.get(record.asked_by)
            if asked is None or not asked.is_main or not record.tokens:
                continue
            if asked.outcome == "answered":
                certain += 1
                possible += 1
            elif asked.outcome in ("left", "partial"):
                possible += 1
        return certain, possible


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, whose content may be parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""


def plain(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return roles and texts, without blanks around answers, and without answers that say nothing.

    /v1/responses has no items for these.
    """
    pairs = [(ROLES.get(m["role"], m["role"]), text_of(m), m.get("tool_calls")) for m in messages]
    stripped = [(role, text.strip() if role == "assistant" else text, calls) for role, text, calls in pairs]
    return [(role, text) for role, text, calls in stripped if role != "assistant" or text or calls]


ROLES = {"developer": "system"}


def _ends_with(asked: Asked, said: list[tuple[str, str]]) -> bool:
    if not asked.messages:
        return True
    sent = plain(asked.messages)
    return sent[len(sent) - len(said) :] == said
