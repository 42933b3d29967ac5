"""Agents that rewrite what they send again in several ways at once, and an oracle that knows what they said.

Each message of an agent has ids that the gateway does not look at (``of``), and takes them along wherever it
is rewritten. So a next state says itself which messages of whom it holds, also where all texts are equal.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from slipstream.rollout.gateway.conversations import PromptTooLong, User
from slipstream.rollout.gateway.sessions.running import RunningRequest
from slipstream.rollout.tokens.turn_entries import Entry, NextState, SessionEnd, Turn
from tests.unit.rewritings import REWRITINGS
from tests.unit.rewritten_histories import Message, Messages, Rewriting, system
from tests.unit.talking import Gateway, assistant, parsed, user, written_call

NAMINGS: tuple[dict[str, Any], ...] = ({}, {"session": "s"}, {"client_session": "c"})
MOST_REQUESTS = 14
LONG = 40
"""Letters of an answer that is known in what is written around it, with room to spare."""


@dataclass(eq=False)
class Said:
    """A turn, and what its agent has said after it, as often as it has asked."""

    agent: "Agent"
    sent: Messages
    message: Message
    asked: list[str]
    """What its agent had heard and said until then."""
    session: str
    trained: bool
    reactions: list[list[str]] = field(default_factory=list[list[str]])
    paired: bool = False
    exchanged: bool = False
    """Nothing tells it from another turn, or from what an agent says itself."""


@dataclass(eq=False)
class Agent:
    """One conversation."""

    name: str
    key: str
    naming: dict[str, Any]
    tag: str
    """Agents with equal tags say the same."""
    words: Random
    rewritings: Sequence[Rewriting]
    system: str | None
    ids: str
    """``unique``, ``repeated`` or ``none``: the ids of its tool calls."""
    most: int
    """Requests after which it has nothing left to say."""
    history: Messages = field(default_factory=list[Message])
    new: Messages = field(default_factory=list[Message])
    """What it says now, and again where a request has failed."""
    turn: int | None = None
    """Number of the turn that ``new`` follows."""
    before: list[tuple[Messages, Messages, int | None]] = field(default_factory=list[Any])
    """What was said before each answer, and the turn before that."""
    steps: int = 0
    calls: int = 0
    helper: "Agent | None" = None
    """Its sub-agent, for whose last answer it waits."""
    running: RunningRequest | None = None
    sent: Messages = field(default_factory=list[Message])
    used: Sequence[Rewriting] = ()
    prefilled: str = ""

    def message(self, message: Message) -> Message:
        """Return a message with an id of its own, which nothing has answered yet."""
        self.steps += 1
        return message | {"of": [f"{self.name}.{self.steps}"], "new": True}

    def say(self) -> None:
        """Find what comes next: results of all calls, a question, or both."""
        words, calls = self.words, self.history[-1].get("tool_calls", ()) if self.history else ()
        self.new = []
        for call in calls:
            text = words.choice(["done", f"result {self.tag} {len(self.history)} of it"])
            if self.helper is not None:
                text = str(self.helper.history[-1]["content"])
            result = {"role": "tool", "content": text, "tool_call_id": call.get("id", "")}
            self.new.append(self.message(result))
        self.helper = None
        for _ in range(words.choice([0, 0, 1]) if calls else words.choice([1, 1, 1, 1, 2])):
            self.new.append(self.message(user(self.question())))

    def question(self) -> str:
        number = len(self.history)
        return self.words.choice(
            [
                "continue",
                f"question {self.tag} number {number}",
                f"look at {self.tag}, please,\n\nat part {number} of it",
            ]
        )

    def answer(self) -> tuple[str, Message]:
        """Return what the policy samples, and the message that the agent gets."""
        words, number = self.words, f"{self.tag} {len(self.history)}"
        text = words.choice(
            [
                "OK",
                f"answer {number} is this one",
                f"Here it is, {number}:  \n\n```python\nprint('{number}')\n```\n\n\nDone.",
                f"Voila\u0300, {number}: cafe\u0301s",
                f"<read_file><path>/{number}</path></read_file>",
            ]
        )
        thought = words.choice(["", "", f"<think>thought {number}</think>"])
        calls = ""
        for place in range(words.choice([0, 0, 1, 2])):
            arguments = words.choice([{"all": True, "dir": "/"}, {"path": f"/{number}", "line": place}])
            calls += written_call({"name": words.choice(["ls", "read"]), "arguments": arguments})
        sampled = f"{thought}{words.choice([text, '']) if calls else text}{calls}<|end|>"
        message = parsed(sampled)
        for place, call in enumerate(message.get("tool_calls", ())):
            self.calls += 1
            unique = f"call_{self.name}_{self.calls}"
            call["id"] = {"unique": unique, "repeated": f"call_{place}", "none": ""}[self.ids]
        return sampled, message

    def rewritten(self, draw: Random) -> Messages:
        """Return what it sends, with one or more of its rewritings."""
        count = draw.randint(1, len(self.rewritings))
        self.used = sorted(draw.sample(list(self.rewritings), count), key=REWRITINGS.index)
        messages = [*([system(self.system)] if self.system else []), *self.history, *self.new]
        messages = [dict(message) for message in messages]
        for rewrite in self.used:
            messages = rewrite(messages, self.steps)
        return messages

    def names(self) -> str:
        return " + ".join(rewrite.__name__ for rewrite in self.used)


class World:
    """A gateway and its agents. ``problems`` says what the oracle does not allow."""

    def __init__(self, seed: int, *, restarts: bool, rewritings: Sequence[Rewriting] = REWRITINGS) -> None:
        self.draw = Random(f"world {seed}")
        self.seed, self.restarts = seed, restarts
        self.gateway = Gateway()
        self.turns: dict[int, Said] = {}
        self.problems: list[str] = []
        self.missed: list[tuple[Agent, Said, bool]] = []
        self.told = 0
        self.reasons: Counter[str] = Counter()
        """How often nothing could tell whose a next state is, by reason."""
        self.states: dict[str, list[str]] = {}
        """Next states by the id of the answer."""
        self.kinds = self.draw.sample(rewritings, min(len(rewritings), self.draw.randint(1, 4)))
        self.agents = self.made()

    def made(self) -> list[Agent]:
        draw = self.draw
        naming = draw.choice(NAMINGS)
        match draw.choice(["alone", "alone", "helpers", "helpers", "same words", "other words", "two keys"]):
            case "alone":
                return [self.agent("a", naming)]
            case "helpers":
                return [self.agent("a", draw.choice(NAMINGS[1:]), most=8)]
            case "same words":
                names = draw.choice([({}, {}), ({"session": "s"}, {"session": "t"})])
                return [self.agent(name, named, tag="x") for name, named in zip("ab", names, strict=True)]
            case "other words":
                return [self.agent(name, {}) for name in "ab"]
            case _:
                return [self.agent(name, naming, key=name, tag="x") for name in "ab"]

    def agent(
        self, name: str, naming: dict[str, Any], *, key: str = "key", tag: str = "", **more: Any
    ) -> Agent:
        draw, tag = self.draw, tag or name
        values = {
            "rewritings": self.kinds,
            "system": Random(f"{self.seed} {tag}").choice([None, "be brief"]),
            "ids": draw.choice(["unique", "unique", "repeated", "none"]),
            "most": draw.randint(2, 7),
        }
        return Agent(name, key, naming, tag, Random(f"{self.seed} words {tag}"), **(values | more))

    # ---- what happens

    def run(self) -> "World":
        for _ in range(4 * MOST_REQUESTS):
            ready = [agent for agent in self.agents if agent.running or self.has_more(agent)]
            if not ready or self.problems:
                break
            agent = self.draw.choice(ready)
            if agent.running is None:
                self.ask(agent)
            else:
                self.finish(agent)
            restarts = self.draw.random() < 0.15
            if restarts and self.restarts and not any(agent.running for agent in self.agents):
                self.gateway.restart()
        for agent in self.agents:
            if agent.running is not None:
                self.finish(agent)
        self.gateway.append(self.gateway.sessions.sweep(self.gateway.now + 1e6))
        self.check_ends()
        return self

    def has_more(self, agent: Agent) -> bool:
        helper = agent.helper
        if helper is not None and (helper.running or self.has_more(helper)):
            return False
        return len(agent.before) < agent.most

    def ask(self, agent: Agent) -> None:
        draw = self.draw
        if not agent.new:
            agent.say()
        sent = agent.rewritten(draw)
        answers = any(message["role"] == "assistant" for message in sent)
        agent.prefilled = "The " if draw.random() < 0.04 else ""
        if agent.prefilled:
            sent = [*sent, assistant(agent.prefilled)]
        before = None if agent.turn is None else self.turns[agent.turn]
        ids = [id_ for message in agent.new for id_ in message["of"]]
        if before is not None:
            before.reactions.append(ids)
        count = len(self.gateway.journal)
        fails = draw.random() < 0.04
        try:
            begun = self.gateway.begin(
                sent,
                **agent.naming,
                user=User(agent.key),
                choices=2 if draw.random() < 0.06 else 1,
                **({"most_tokens": 1} if fails else {}),
            )
        except PromptTooLong:
            assert fails and len(self.gateway.journal) == count
            return
        agent.running, agent.sent = begun, sent
        self.check_states(agent, sent, self.gateway.journal[count:])
        if before is None or not before.trained:
            return
        if before.paired:
            self.told += 1
        else:
            reason = self.untold(agent, before, sent)
            self.reasons[reason] += 1
            if not reason:
                self.problem(agent, "left", before, [])
            self.missed.append((agent, before, begun.session == before.session and answers))

    def finish(self, agent: Agent) -> None:
        draw, begun = self.draw, agent.running
        assert begun is not None
        agent.running = None
        how = draw.random()
        choices = [*begun.open]
        answers = [agent.answer() for _ in choices]
        if len(choices) > 1 and draw.random() < 0.3:
            answers[1] = answers[0]
        numbers: list[int] = []
        for choice, (sampled, message) in zip(choices, answers, strict=True):
            if how < 0.05:  # the client is gone
                number = self.gateway.end(begun, sampled[:3], choice=choice, cancelled=True)
            elif how < 0.08:  # the engine is gone
                number = self.gateway.end(begun, "", choice=choice, finish=None)
            else:
                number = self.gateway.end(begun, sampled, choice=choice, message=message)
            numbers.append(number)
            entry = self.gateway.turn(number)
            asked = [visible(message) for message in [*agent.history, *agent.new]]
            self.turns[number] = Said(agent, agent.sent, message, asked, begun.session, entry.may_be_trained)
        if how < 0.08:
            if draw.random() < 0.3:
                agent.new.append(agent.message(user("[Request interrupted by user]")))
            return
        picked = draw.choice(choices)
        self.take(agent, numbers[picked], answers[picked][1])

    def take(self, agent: Agent, number: int, message: Message) -> None:
        """Let an agent go on from an answer."""
        draw = self.draw
        if draw.random() < 0.04:
            return  # it asks for another answer
        said = [{key: value for key, value in m.items() if key != "new"} for m in agent.new]
        agent.before.append((agent.history, agent.new, agent.turn))
        content = f"{agent.prefilled}{message['content']}"
        answer = {**message, "content": content, "of": [f"{agent.name} {number}"]}
        agent.history = [*agent.history, *said, answer]
        agent.new, agent.turn = [], number
        helped = message.get("tool_calls") and agent.naming and "." not in agent.name
        if helped and agent.most > 7 and draw.random() < 0.5:
            name = f"{agent.name}.{len(self.agents)}"
            helper = self.agent(
                name, agent.naming, key=agent.key, system="you search", most=draw.randint(1, 3)
            )
            self.agents.append(helper)
            agent.helper = helper if draw.random() < 0.8 else None

    # ---- what the oracle says

    def check_states(self, agent: Agent, sent: Messages, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if not isinstance(entry, NextState):
                continue
            said = self.turns[entry.turn]
            state = json.loads(bytes(entry.messages))
            ids = [id_ for message in state for id_ in message.get("of", ())]
            mine = None if agent.turn is None else self.turns[agent.turn]
            meant = said if said is mine or mine is None or not is_twin(mine, said, sent) else mine
            if said.paired:
                self.problem(agent, "twice", said, ids)
            elif meant is not mine:
                if said.agent is agent and all(m["role"] != "assistant" for m in sent[:-1]):
                    self.reasons["asked again with more, and without an answer"] += 1
                elif mine is None or not is_hidden(mine, said, sent):
                    self.problem(agent, "another's", said, ids)
                else:
                    mine.exchanged = True
                    self.reasons["taken for an answer of the agent's own"] += 1
            elif mine is not None and not is_whole(ids, mine.reactions[-1], sent):
                self.problem(agent, "other messages", said, ids)
            said.paired = True
            if meant is not said:
                self.exchange(meant, said)
            self.states[f"{meant.agent.name} {meant.message}"] = ids

    def exchange(self, meant: Said, said: Said) -> None:
        """Let two turns that nobody can tell apart be each other."""
        for number, turn in self.turns.items():
            if turn is meant:
                self.turns[number] = said
            elif turn is said:
                self.turns[number] = meant
        meant.paired, said.paired = said.paired, meant.paired
        meant.exchanged = said.exchanged = True

    def problem(self, agent: Agent, kind: str, said: Said, ids: Sequence[str]) -> None:
        mine = None if agent.turn is None else self.turns[agent.turn]
        last = None if mine is None else (mine.reactions[-1:], shown([mine.message]))
        self.problems.append(
            f"{kind}: seed {self.seed} {agent.names()}, {agent.naming}: {ids} went to the answer "
            f"{shown([said.message])} of {said.agent.name}, expected {last}; sent {shown(agent.sent)}"
        )

    def untold(self, agent: Agent, mine: Said, sent: Messages) -> str:
        """Return why nothing tells a gateway which answer a request goes on from; empty: it can be told."""
        answer = answer_in(sent, agent.turn, agent)
        if answer is None:
            return "the answer is left out"
        if answer.get("spoilt"):
            return "the answer is rewritten"
        if answer.get("touched") and (not agent.naming or len(mine.message["content"]) < LONG):
            return "a name stands before a short answer, or before one in a session without a name"
        has_own = any(m["role"] == "assistant" and "of" not in m for m in sent[:-1])
        if not answer["content"] and mine.message["content"] and (has_own or not agent.naming):
            return "before answers of the agent's own, or without a name, the text beside calls is left out"
        answers = [visible(said.message) for said in self.turns.values() if said is not mine]
        if visible(mine.message) in answers:
            return "there is an equal answer"
        others = len(self.agents) > 1 and not agent.naming
        if agent.naming and not any("." in other.name for other in self.agents) and not others:
            return ""
        asked = set(agent.history[-2]["of"])
        questions = [
            next((message for message in each if asked & set(message.get("of", ()))), None)
            for each in (mine.sent, sent)
        ]
        before = (mine.sent[-1], sent[sent.index(answer) - 1])
        if any("of" not in message and "note" in visible(message) for message in before):
            return "beside others, or without a name, a note stands before the answer"
        if None in questions:
            return "beside others, or without a name, the question is left out"
        if any(m.get("spoilt") or m.get("touched") for m in questions if m is not None):
            return "beside others, or without a name, the question is rewritten"
        return ""

    def check_ends(self) -> None:
        """A turn that has lost its next state within its session is known to have lost it."""
        lost = {n for entry in self.gateway.journal if isinstance(entry, SessionEnd) for n in entry.unpaired}
        for number, said in self.turns.items():
            agents = [agent for agent, before, same in self.missed if before is said and same]
            if agents and not (said.paired or said.exchanged) and said.trained and number not in lost:
                self.problem(agents[-1], "taken for the end", said, [])


def is_whole(ids: Sequence[str], said: Sequence[str], sent: Messages) -> bool:
    """True if a next state is all that was said. Where a request holds no answer at all, nothing tells what
    is new from what stands for the rest: then it may be the end of that."""
    if any(message["role"] == "assistant" for message in sent[:-1]):
        return list(ids) == list(said)
    return bool(ids) and list(ids) == list(said[-len(ids) :])


def answer_in(sent: Messages, number: int | None, agent: Agent) -> Message | None:
    """Return the answer of a turn as an agent repeats it; None: it leaves it out."""
    return next((m for m in sent if m.get("of") == [f"{agent.name} {number}"]), None)


def is_hidden(mine: Said, other: Said, sent: Messages) -> bool:
    """True if an answer was rewritten, so that nothing tells it from one that the agent gave itself, after an
    earlier answer of the same conversation."""
    answer = answer_in(sent, mine.agent.turn, mine.agent)
    return mine.agent is other.agent and answer is not None and bool(answer.get("spoilt"))


def is_twin(mine: Said, other: Said, sent: Messages) -> bool:
    """True if a request that follows one turn may as well follow the other: it begins exactly as that one,
    and the answers are equal; or both have answered the same questions alike."""
    if mine.agent.key != other.agent.key or visible(mine.message) != visible(other.message):
        return False
    whole = [*other.sent, other.message]
    begins = [visible(m) for m in sent[: len(whole)]] == [visible(m) for m in whole]
    return begins or mine.asked == other.asked


def visible(message: Message) -> str:
    """Return what sameness is about: text without reasoning and blanks, and calls without their ids."""
    content = message["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content or ())
    text = text.rpartition("</think>")[2]
    if message["role"] == "assistant":
        text = "".join(text.split())
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [
        [f["name"], json.loads(f["arguments"]) if isinstance(f["arguments"], str) else f["arguments"]]
        for f in functions
    ]
    return json.dumps([message["role"], text, calls], sort_keys=True)


def shown(messages: Messages) -> list[str]:
    return [f"{m['role'][0]}:{m['content']}{m.get('tool_calls', '')}" for m in messages]


def turns_of(world: World) -> list[Turn]:
    return [entry for entry in world.gateway.journal if isinstance(entry, Turn)]
