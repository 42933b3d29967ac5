"""Rules about the parsers of the policy's answers, which are SGLang's."""

import difflib
from collections.abc import Iterator

from slipstream.configs.installed.parsers import Kind, parser_names
from slipstream.configs.rules.rule import Rule
from slipstream.configs.schema import RunConfig
from slipstream.configs.violations import Violation

TOOL_USE = ("slipstream.rollout.workflow.ToolUse", "slipstream.rollout.workflow.multi_turn.ToolUse")
"""Import paths of the workflow with tools, whose argument `parser` names one."""

AUTO = "auto"
NEAREST = 3
"""Number of alike names that a violation gives."""


def parsers_are_known(config: RunConfig) -> Iterator[Violation]:
    kinds: tuple[Kind, ...] = ("tool_parser", "reasoning_parser")
    for section, dialect in (
        ("rollout.endpoint", config.rollout.endpoint),
        ("gateway", config.gateway),
    ):
        for kind in kinds:
            name: str | None = getattr(dialect, kind, None)
            if name not in (None, AUTO):
                yield from _unknown(f"{section}.{kind}", kind, name)
    workflow = config.rollout.workflow
    if workflow.path in TOOL_USE and "parser" in workflow.args:
        yield from _unknown("rollout.workflow.args.parser", "tool_parser", workflow.args["parser"])


def _unknown(path: str, kind: Kind, name: object) -> Iterator[Violation]:
    known = parser_names(kind)
    if known is None or name in known:
        return
    near = difflib.get_close_matches(str(name), known, n=NEAREST, cutoff=0.4)
    hint = f"nearest: {', '.join(near)}; all: " if near else ""
    what = "tool calls" if kind == "tool_parser" else "reasoning"
    yield Violation(path, name, f"expected a parser of {what} that SGLang has; {hint}{', '.join(known)}")


RULES = (
    Rule(
        parsers_are_known,
        (
            "rollout.endpoint.tool_parser",
            "rollout.endpoint.reasoning_parser",
            "gateway.tool_parser",
            "gateway.reasoning_parser",
            "rollout.workflow",
        ),
    ),
)
