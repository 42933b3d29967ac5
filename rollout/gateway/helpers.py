"""Requests by which agents help themselves: titles, summaries, suggestions. None is trained. Pure.

    X-Turn-Type, turn_type ─► rules of the recipe ─► known shapes ─► type of the key

The first of these that says something counts. A shape is a phrase with which an agent asks for its help, in
the instructions or at the beginning of the last message.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import cast

from slipstream.configs.schema import TurnRule
from slipstream.rollout.tokens.turn_entries import HELPER, TurnType

LOOKED_AT = 4096
"""Characters of a text in which a phrase is looked for: helpers begin with theirs."""

SHAPES: dict[str, tuple[str, ...]] = {
    "title": (
        "Generate a concise, sentence-case title",  # Claude Code
        "Analyze if this message indicates a new conversation topic",
        "extract a 2-3 word title",
        "Please write a 5-10 word title",
        "You are a title generator. You output ONLY a thread title",  # opencode
        "You are a helpful assistant. You will be presented with a user prompt, and your job is to provide a "
        "short title",  # Codex
        "### Task:\nGenerate a concise, 3-5 word title",  # Open WebUI
        "### Task:\nGenerate 1-3 broad tags",
    ),
    "compaction": (
        "You are a helpful AI assistant tasked with summarizing conversations",  # Claude Code, opencode
        "Your task is to create a detailed summary of the conversation so far",
        "You are performing a CONTEXT CHECKPOINT COMPACTION",  # Codex
        "Provide a detailed prompt for continuing our conversation above",  # opencode
        "You are the component that summarizes internal chat history",  # qwen-code
        "You are the component that summarizes a conversation when its context window is about to overflow",
        "First, reason in your <analysis> block. Then, produce the <state_snapshot> XML.",
        "You are a specialized system component responsible for distilling chat history",
        "You are a context summarization agent",  # opencode
        "You are a context summarization assistant",  # pi
        "The messages above are a conversation to summarize",
        "*Briefly* summarize this partial conversation about programming",  # aider
        "The current conversation is rapidly running out of context",  # cline
    ),
    "suggestion": (
        "[SUGGESTION MODE:",  # Claude Code
        "### Task:\nSuggest 3-5 relevant follow-up questions",  # Open WebUI
        "### Task:\nYou are an autocompletion system",
        "You are a NEXT INPUT PREDICTOR",  # qwen-code
    ),
    "check": (
        "Your task is to process Bash commands that an AI coding agent wants to run",  # Claude Code
        "<policy_spec>",
        "Analyze *only* the content and structure of your immediately preceding response",  # qwen-code
        "### Task:\nAnalyze the chat history to determine the necessity of generating search queries",
    ),
    "recap": (
        "The user stepped away and is coming back",  # Claude Code
        "Web page content:\n---",
    ),
    "memory": ("You are now acting as the managed memory extraction subagent",),  # qwen-code
    "commit": (
        "You are an expert software engineer that generates concise, one-line Git commit messages",  # aider
    ),
}
"""Kinds of help, and the phrases by which several agents ask for it."""

PROBES = frozenset({"quota", "warmup", "count"})
"""Whole messages with which Claude Code looks whether it is answered at all."""

SUBAGENTS = {"compact": "compaction", "memory_consolidation": "compaction"}
"""Codex' header ``x-openai-subagent``: the values that are help, and of which kind."""


@dataclass(frozen=True)
class TypedTurn:
    """The type of a turn whose request does not say it."""

    turn_type: TurnType
    reason: str
    """Why it is a side turn."""


class TurnTypes:
    """Finds the types of turns whose requests do not say."""

    def __init__(self, rules: Sequence[TurnRule] = (), *, known_helpers: bool = True) -> None:
        """``known_helpers``: turns of known shapes are side turns."""
        self._rules = rules
        self._known_helpers = known_helpers

    def of(self, key: str, headers: Mapping[str, str], body: Mapping[str, object]) -> TypedTurn | None:
        """Return the type of a request of a key; None: nothing says it. Names of headers in lower case."""
        texts: list[str] | None = None
        for number, rule in enumerate(self._rules, 1):
            if rule.text is not None and texts is None:
                texts = list(_texts(body))
            if _holds(rule, key, headers, body, texts or ()):
                return TypedTurn(TurnType[rule.turn_type.upper()], f"{HELPER}rule {number}")
        if not self._known_helpers:
            return None
        kind = SUBAGENTS.get(headers.get("x-openai-subagent", "")) or _shape(
            list(_texts(body)) if texts is None else texts
        )
        return None if kind is None else TypedTurn(TurnType.SIDE, f"{HELPER}{kind}")


def _holds(
    rule: TurnRule, key: str, headers: Mapping[str, str], body: Mapping[str, object], texts: Sequence[str]
) -> bool:
    """True if all conditions of a rule hold."""
    if not fnmatchcase(key, rule.key):
        return False
    if rule.model is not None and not fnmatchcase(str(body.get("model", "")), rule.model):
        return False
    if rule.header is not None:
        name, _, value = rule.header.partition(":")
        given = headers.get(name.strip().lower())
        if given is None or not fnmatchcase(given, value.strip() or "*"):
            return False
    return rule.text is None or any(rule.text in text[:LOOKED_AT] for text in texts)


def _shape(texts: Sequence[str]) -> str | None:
    """Return the kind of help for which texts ask; None: none that is known."""
    for kind, phrases in SHAPES.items():
        if any(phrase in text[:LOOKED_AT] for text in texts for phrase in phrases):
            return kind
    return "probe" if len(texts) == 1 and texts[0].strip().lower() in PROBES else None


def _texts(body: Mapping[str, object]) -> Iterator[str]:
    """Yield the texts of the instructions, and those of the last message if it is the user's."""
    for name in ("system", "instructions"):
        yield from _texts_of(body.get(name))
    said = body.get("messages", body.get("input"))
    if isinstance(said, str):
        yield said
        return
    messages = [cast("Mapping[str, object]", one) for one in _list(said) if isinstance(one, dict)]
    for message in messages[:1]:
        if message.get("role") in ("system", "developer"):
            yield from _texts_of(message.get("content"))
    for message in messages[-1:]:
        if message.get("role") == "user":
            yield from _texts_of(message.get("content"))


def _texts_of(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    for part in _list(content):
        text = cast("Mapping[str, object]", part).get("text") if isinstance(part, dict) else None
        if isinstance(text, str):
            yield text


def _list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []
