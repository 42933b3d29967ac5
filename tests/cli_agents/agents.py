"""The agents: how each is set up, called, and what its tools are called. Plain data."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ToolCall = tuple[str, Mapping[str, Any]]
"""Name and arguments."""

SCENES = ("chat", "tool", "resume", "compaction", "sub-agents")


@dataclass(frozen=True)
class Agent:
    """One program. In ``files`` and ``env``, GATEWAY stands for the gateway's address; in commands, PROMPT
    for what the user says."""

    name: str
    package: str
    """Name of its package in ``package.json`` or ``requirements.txt``."""
    talk: Sequence[str]
    """Begins a conversation."""
    again: Sequence[str]
    """Goes on with the last conversation; empty: it cannot."""
    env: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """By their paths in the home folder."""
    before: Sequence[str] = ()
    """Is run once before a scene."""
    compact: Sequence[str] = ()
    """Compacts the last conversation; empty: ``compacted`` does by itself."""
    compacted: Sequence[str] = ()
    """Goes on with a conversation that is compacted; empty: ``again`` does."""
    much: int = 0
    """Words of the first message where they bring a compaction about."""
    goes_on: str = ""
    """Text that the agent itself adds after such a compaction."""
    echo: Callable[[str], ToolCall] | None = None
    """Returns the call of a tool that prints a text; None: the agent has no tools."""
    delegate: Callable[[str], ToolCall] | None = None
    """Returns the call that gives a sub-agent its task."""
    collect: Callable[[str], ToolCall] | None = None
    """Returns the call that waits for sub-agents, given what their starts have returned; None: the call that
    gives a task returns what the sub-agent says."""
    cannot: Mapping[str, str] = field(default_factory=dict[str, str])
    """Scenes that the agent has no means for, with the reason."""


CLAUDE_CODE = Agent(
    "claude-code",
    "@anthropic-ai/claude-code",
    talk=("claude", "-p", "PROMPT", "--allowedTools", "Bash,Task,Agent"),
    again=("claude", "-p", "PROMPT", "--continue", "--allowedTools", "Bash,Task,Agent"),
    compact=("claude", "-p", "/compact", "--continue"),
    env={
        "ANTHROPIC_BASE_URL": "GATEWAY",
        "ANTHROPIC_AUTH_TOKEN": "key-anna",
        "ANTHROPIC_MODEL": "policy",
        "ANTHROPIC_SMALL_FAST_MODEL": "policy",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    },
    echo=lambda text: ("Bash", {"command": f"echo {text}", "description": "Say it"}),
    delegate=lambda text: (
        "Agent",
        {
            "description": "Say it",
            "prompt": text,
            "subagent_type": "general-purpose",
            "run_in_background": False,
        },
    ),
)

CODEX = Agent(
    "codex",
    "@openai/codex",
    talk=("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "PROMPT"),
    again=(
        *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("resume", "--last", "PROMPT"),
    ),
    compacted=(
        *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("resume", "--last", "PROMPT", "-c", "model_auto_compact_token_limit=1"),
    ),
    env={"POLICY_KEY": "key-anna"},
    files={
        ".codex/config.toml": """\
model = "policy"
model_provider = "slipstream"
web_search = "disabled"

[model_providers.slipstream]
name = "slipstream"
base_url = "GATEWAY/v1"
env_key = "POLICY_KEY"
wire_api = "responses"

[analytics]
enabled = false
"""
    },
    echo=lambda text: ("exec_command", {"cmd": f"echo {text}"}),
    delegate=lambda text: ("multi_agent_v1__spawn_agent", {"message": text}),
    collect=lambda started: (
        "multi_agent_v1__wait_agent",
        {"targets": re.findall(r'"agent_id": ?"([^"]+)"', started), "timeout_ms": 60_000},
    ),
)

OPENCODE_CONFIG = """{
  "$schema": "https://opencode.ai/config.json", "autoupdate": false, "share": "disabled",
  "model": "slipstream/policy", "small_model": "slipstream/policy",
  "provider": {"slipstream": {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "GATEWAY/v1", "apiKey": "key-anna"},
    "models": {"policy": {"limit": {"context": 100000, "output": 8192}}}
  }}
}"""

OPENCODE = Agent(
    "opencode",
    "opencode-ai",
    talk=("opencode", "run", "--auto", "PROMPT"),
    again=("opencode", "run", "--auto", "--continue", "PROMPT"),
    much=20_000,
    goes_on="Continue if you have next steps",
    env={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    files={"work/opencode.json": OPENCODE_CONFIG},
    echo=lambda text: ("bash", {"command": f"echo {text}", "description": "Say it"}),
    delegate=lambda text: ("task", {"description": "Say it", "prompt": text, "subagent_type": "general"}),
)

QWEN_CODE = Agent(
    "qwen-code",
    "@qwen-code/qwen-code",
    talk=("qwen", "--yolo", "PROMPT"),
    again=("qwen", "--yolo", "--continue", "PROMPT"),
    compact=("qwen", "--yolo", "--continue", "/compress"),
    env={"OPENAI_BASE_URL": "GATEWAY/v1", "OPENAI_API_KEY": "key-anna", "OPENAI_MODEL": "policy"},
    files={
        ".qwen/settings.json": """{
  "privacy": {"usageStatisticsEnabled": false}, "security": {"auth": {"selectedType": "openai"}},
  "general": {"disableAutoUpdate": true}
}"""
    },
    echo=lambda text: ("run_shell_command", {"command": f"echo {text}", "is_background": False}),
    delegate=lambda text: (
        "agent",
        {
            "description": "Say it",
            "prompt": text,
            "subagent_type": "general-purpose",
            "run_in_background": False,
        },
    ),
    cannot={
        "compaction": "it names no session and keeps no answer, so that nothing tells what it goes on from"
    },
)

PI = Agent(
    "pi",
    "@mariozechner/pi-coding-agent",
    talk=("pi", "--provider", "slipstream", "--model", "policy", "-p", "PROMPT"),
    again=("pi", "--provider", "slipstream", "--model", "policy", "-c", "-p", "PROMPT"),
    compacted=(
        *("sh", "-c"),
        "sed -i s/16384/299000/ ~/.pi/agent/settings.json && "
        'exec pi --provider slipstream --model policy -c -p "$0"',
        "PROMPT",
    ),
    env={"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"},
    files={
        ".pi/agent/models.json": """{"providers": {"slipstream": {
  "baseUrl": "GATEWAY/v1", "api": "openai-completions", "apiKey": "key-anna",
  "models": [{
    "id": "policy", "reasoning": false, "input": ["text"], "contextWindow": 300000, "maxTokens": 8192
  }]
}}}""",
        ".pi/agent/settings.json": '{"compaction": {"reserveTokens": 16384, "keepRecentTokens": 8}}',
    },
    echo=lambda text: ("bash", {"command": f"echo {text}"}),
    cannot={"sub-agents": "it has none"},
)

AIDERS_ANSWERS = (
    "it names no session, and puts an answer of its own (`Ok.`) after those of the policy, so that nothing "
    "tells what its next request goes on from"
)

AIDER = Agent(
    "aider",
    "aider-chat",
    talk=("aider", "--message", "PROMPT"),
    again=("aider", "--restore-chat-history", "--message", "PROMPT"),
    compacted=("aider", "--restore-chat-history", "--max-chat-history-tokens", "1", "--message", "PROMPT"),
    env={"OPENAI_API_BASE": "GATEWAY/v1", "OPENAI_API_KEY": "key-anna"},
    files={
        ".aider.conf.yml": """\
model: openai/policy
check-update: false
show-release-notes: false
show-model-warnings: false
yes-always: true
git: false
analytics-disable: true
map-tokens: 0
pretty: false
"""
    },
    cannot={
        "tool": "it makes no tool calls: edits are texts",
        "resume": AIDERS_ANSWERS,
        "compaction": AIDERS_ANSWERS,
        "sub-agents": "it has none",
    },
)

CLINE = Agent(
    "cline",
    "cline",
    before=("cline", "auth", "-p", "openai", "-k", "key-anna", "-m", "policy", "-b", "GATEWAY/v1"),
    talk=("cline", "-P", "openai", "--json", "PROMPT"),
    again=(),
    env={"CLINE_TELEMETRY": "0"},
    echo=lambda text: ("run_commands", {"commands": [f"echo {text}"]}),
    delegate=lambda text: ("spawn_agent", {"systemPrompt": "You say it.", "task": text}),
    cannot={
        "resume": "outside of a terminal it refuses a prompt together with `--id`",
        "compaction": "its command line has no means to bring one about",
    },
)

AGENTS = (CLAUDE_CODE, CODEX, OPENCODE, QWEN_CODE, PI, AIDER, CLINE)
