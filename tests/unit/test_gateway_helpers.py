"""Which requests are taken for help that agents ask for themselves, and which rules a recipe may have."""

import pytest
from pydantic import ValidationError

from slipstream.configs.schema import TurnRule
from slipstream.rollout.gateway.helpers import SHAPES, TurnTypes
from slipstream.rollout.tokens.turn_entries import TurnType


def chat(said: object, system: str = "You write code.") -> dict[str, object]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": said}]}


def typed(body: dict[str, object], key: str = "anna", rules: list | None = None, **headers: str):
    types = TurnTypes([TurnRule(**rule) for rule in rules or []])
    found = types.of(key, {name.replace("_", "-"): value for name, value in headers.items()}, body)
    return None if found is None else (found.turn_type, found.reason)


@pytest.mark.parametrize(
    ("kind", "phrase"), [(kind, phrase) for kind, phrases in SHAPES.items() for phrase in phrases]
)
def test_a_known_shape_is_a_side_turn_wherever_agents_put_it(kind, phrase):
    side = (TurnType.SIDE, f"helper: {kind}")
    assert typed(chat(f"{phrase} of this")) == side
    assert (
        typed(chat([{"type": "text", "text": "<system-reminder>"}, {"type": "text", "text": phrase}])) == side
    )
    assert typed(chat("hello", system=phrase)) == side
    assert typed({"system": [{"type": "text", "text": phrase}], "messages": []}) == side
    assert typed({"instructions": phrase, "input": "hello"}) == side
    assert typed({"input": [{"role": "user", "content": [{"type": "input_text", "text": phrase}]}]}) == side


def test_work_is_no_help():
    assert (
        typed(chat("Write a title page for my thesis, then summarize the conversation of the two poets."))
        is None
    )
    phrase = SHAPES["title"][0]
    before = [{"role": "user", "content": phrase}, {"role": "assistant", "content": "A"}]
    assert typed({"messages": [*before, {"role": "user", "content": "Now the work."}]}) is None
    assert typed(chat("x" * 5000 + phrase)) is None
    assert typed({"messages": [{"role": "tool", "content": phrase}]}) is None


def test_probes_and_headers_of_codex_are_help():
    assert typed({"messages": [{"role": "user", "content": "quota"}]}) == (TurnType.SIDE, "helper: probe")
    assert typed(chat("a"), x_openai_subagent="compact") == (TurnType.SIDE, "helper: compaction")
    assert typed(chat("a"), x_openai_subagent="review") is None


def test_the_first_rule_that_holds_counts_and_goes_before_known_shapes():
    rules = [
        {"turn_type": "main", "key": "bot-*", "text": "sentence-case"},
        {"turn_type": "side", "model": "*haiku*"},
        {"turn_type": "side", "header": "X-App: help*"},
        {"turn_type": "main", "key": "anna", "header": "x-always"},
    ]
    title = chat(SHAPES["title"][0])
    assert typed(title, "bot-1", rules) == (TurnType.MAIN, "helper: rule 1")
    assert typed(title, "anna", rules) == (TurnType.SIDE, "helper: title")
    assert typed({"model": "claude-haiku-4-5", **chat("a")}, "anna", rules)[1] == "helper: rule 2"
    assert typed(chat("a"), "anna", rules, x_app="helper")[1] == "helper: rule 3"
    assert typed(chat("a"), "anna", rules, x_app="main", x_always="")[0] is TurnType.MAIN
    assert typed(chat("a"), "berta", rules, x_app="main", x_always="") is None


@pytest.mark.parametrize(
    "body", [{}, {"messages": 5}, {"input": None}, {"messages": [[], {"role": 5, "content": [5]}]}]
)
def test_a_body_of_any_shape_can_be_asked_about(body):
    assert typed(body) is None


def test_known_helpers_can_be_turns_as_all_others():
    assert TurnTypes(known_helpers=False).of("anna", {}, chat(SHAPES["title"][0])) is None


@pytest.mark.parametrize(
    "rule",
    [
        {"turn_type": "side"},
        {"turn_type": "side", "key": "*"},
        {"turn_type": "both", "key": "a"},
        {"turn_type": "side", "header": "a b"},
    ],
)
def test_a_rule_without_a_condition_or_with_a_wrong_one_is_refused(rule):
    with pytest.raises(ValidationError):
        TurnRule(**rule)
