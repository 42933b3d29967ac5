"""Conversations with tools in the formats of families, and chat templates with which there can be none."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from slipstream.backend.driver.start.inputs import tool_problems
from tests.chat_model import APPENDING, build_tokenizer
from tests.environment import environment
from tests.tool_conversations import FORMATS, tokenizer_of

REWRITTEN = {"gpt_oss"}
"""Formats whose template writes a call in another way than the policy: each turn is a trajectory."""


@pytest.fixture(scope="module")
def held() -> dict[str, dict[str, object]]:
    """What became of a conversation in each format, in a process that may import SGLang."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.tool_conversations"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_found_results_are_read_and_ids_of_earlier_turns_stay(held, name):
    right = {"requests": 3, "results": [True, True], "repeats": name not in REWRITTEN, "trained": True}
    assert held[name] == right


def recipe(**args) -> SimpleNamespace:
    workflow = SimpleNamespace(path="slipstream.rollout.workflow.ToolUse", args={"tools": ["a.b"], **args})
    return SimpleNamespace(
        rollout=SimpleNamespace(hooks=None, workflow=workflow), model=SimpleNamespace(path="MODEL")
    )


@pytest.mark.parametrize("name", FORMATS)
def test_templates_with_tools_are_accepted(name):
    assert tool_problems(recipe(), tokenizer_of(FORMATS[name])) == []


EVERY = "{%- for message in messages %}{{- message.role + message.content }}{%- endfor %}"
ALTERNATES = "{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}BODY{%- endif %}"
NO_TOOLS = "leaves out the tools"


@pytest.mark.parametrize(
    ("template", "args", "reason"),
    [
        (EVERY, {}, NO_TOOLS),
        (EVERY, {"system": "You may call `add`."}, None),
        (
            EVERY.replace("}}", "if message.role != 'tool' }}", 1) + "{{ tools }}",
            {},
            "leaves out the results",
        ),
        (
            ALTERNATES.replace("BODY", "{{ raise_exception('roles must alternate') }}") + "{%- endfor %}",
            {},
            "raises TemplateError: roles must alternate",
        ),
        (EVERY + "{{ xml_tools or '' }}", {}, NO_TOOLS),
        (EVERY + "{{ xml_tools }}", {"template": {"xml_tools": ["add"]}}, None),
        (APPENDING, {}, None),
    ],
)
def test_a_template_with_which_there_are_no_tools_is_refused_with_the_reason(template, args, reason):
    problems = tool_problems(recipe(**args), build_tokenizer(template))
    if reason is None:
        assert not problems
    else:
        [problem] = problems
        assert problem.startswith("rollout.workflow: ToolUse cannot be used with the chat template of MODEL")
        assert reason in problem
