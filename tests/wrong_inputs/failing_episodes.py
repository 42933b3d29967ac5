"""Episodes that fail, and the words that name the culprit. Each message also has the prompt, its file and
line."""

import sys
from dataclasses import dataclass, field

from tests.wrong_inputs.their_code import HERE

FILE = "their_code.py"
OURS = "slipstream.rollout.workflow"


@dataclass(frozen=True)
class FailingEpisode:
    """One way to fail."""

    name: str
    says: tuple[str, ...]
    reward: str | None = None
    """Name of a reward in ``their_code``; None: one that works."""
    workflow: str = f"{HERE}.Sound"
    args: dict[str, object] = field(default_factory=dict[str, object])
    """Arguments of the workflow."""
    timeout_s: float = 30.0
    """Time limit of the episode. Short only where it is shown: programs may start slowly."""
    filter: str | None = None
    starts: bool = True
    """False: the reward cannot be constructed, which ends the run before any episode."""


def _reward(name: str, reward: str, *says: str) -> FailingEpisode:
    return FailingEpisode(name, (f"the reward {HERE}.{reward} has failed", *says), reward=reward)


def _workflow(name: str, workflow: str, *says: str, timeout_s: float = 30.0) -> FailingEpisode:
    path = f"{HERE}.{workflow}"
    return FailingEpisode(name, (f"the workflow {path}", *says), workflow=path, timeout_s=timeout_s)


def _turns(name: str, world: str, *says: str) -> FailingEpisode:
    args: dict[str, object] = {"environment": f"{HERE}.{world}", "reset_timeout_s": 0.3, "reset_attempts": 2}
    path = f"{OURS}.MultiTurn"
    says = (f"the workflow {path}", f"the environment {HERE}.{world} could not be reset in 2 attempts", *says)
    return FailingEpisode(name, says, workflow=path, args=args)


def _agent(name: str, args: dict[str, object], *says: str) -> FailingEpisode:
    return FailingEpisode(name, (f"the workflow {OURS}.Agent", *says), workflow=f"{OURS}.Agent", args=args)


CASES = (
    _reward("a reward raises KeyError", "raises", "KeyError: 'answer_idx'", f'{FILE}", line', "in raises"),
    _reward("a reward returns None", "returns_nothing", "it returned None", "expected a finite number"),
    _reward("a reward returns NaN", "returns_nan", "it returned nan", "expected a finite number"),
    _reward("a reward returns a text", "returns_text", "'1.0' of type str", "expected a finite number"),
    _reward(
        "a reward returns a mapping without the key",
        "returns_other_key",
        "'accuracy'",
        "'reward'",
        "rollout.reward_key",
    ),
    _reward(
        "a reward blocks",
        "blocks",
        "it took longer than 1 s (rollout.judging.timeout_s)",
        f'{FILE}", line',
        "blocks",
    ),
    _reward(
        "a reward blocks and ignores SIGTERM",
        "blocks_and_ignores_sigterm",
        "it took longer than 1 s (rollout.judging.timeout_s)",
        f'{FILE}", line',
        "blocks_and_ignores_sigterm",
    ),
    _reward(
        "an async reward never answers",
        "never_answers",
        "it took longer than 1 s (rollout.judging.timeout_s)",
        f'{FILE}", line',
        "in never_answers",
    ),
    _reward("a reward ends its process", "exits", "it ended its judge process with exit code 3"),
    _reward("a reward exits", "leaves", "SystemExit: no such file", f'{FILE}", line', "in leaves"),
    _reward("a reward kills its process", "kills_itself", "by signal SIGKILL"),
    _reward("a reward of groups returns too few", "too_few", "it returned 1 rewards for 2 episodes"),
    FailingEpisode(
        "a reward cannot be constructed",
        (f"the reward {HERE}.CannotBegin cannot be started", "KeyError: 'table.json'", f'{FILE}", line'),
        reward="CannotBegin",
        starts=False,
    ),
    _workflow("a workflow raises", "Raises", f"{FILE}:", "in run: ValueError: no level 1"),
    _workflow(
        "a workflow returns nothing", "ReturnsNothing", "returned NoneType, expected a slipstream.Trajectory"
    ),
    _workflow(
        "a workflow returns a mapping", "ReturnsDict", "returned dict, expected a slipstream.Trajectory"
    ),
    _workflow(
        "a workflow samples nothing", "ReturnsPromptAlone", "2 tokens, none of them sampled by the policy"
    ),
    _workflow(
        "a workflow never returns",
        "NeverReturns",
        f"{FILE}:",
        "TimeoutError: not done within 1 s (rollout.episode_timeout_s)",
        timeout_s=1.0,
    ),
    _workflow("a workflow cancels itself", "CancelsItself", f"{FILE}:", "CancelledError"),
    _workflow("a workflow exits", "Leaves", f"{FILE}:", "SystemExit: 4"),
    _workflow(
        "a workflow returns tokens of nobody's", "TurnedAway", "1000000", "outside the vocabulary of 48"
    ),
    _workflow(
        "a tool raises",
        "CallsTool",
        f"the tool {HERE}.broken_tool raised KeyError: 'x'",
        f"{FILE}:",
        "in broken_tool",
    ),
    FailingEpisode(
        "a filter raises",
        (f"the group filter {HERE}.RaisingFilter", f"{FILE}:", "in keep: AttributeError", "scores"),
        filter=f"{HERE}.RaisingFilter",
    ),
    _turns(
        "an environment cannot be reset",
        "World",
        "ConnectionError: no world at port 80",
        f"{FILE}:",
        "in reset",
    ),
    _turns("an environment takes too long", "SlowWorld", "took too long", f"{FILE}:", "in reset"),
    _agent(
        "a command exits",
        {"command": [sys.executable, "-c", "import sys; print('no key', file=sys.stderr); sys.exit(3)"]},
        "the agent command",
        "has ended with exit code 3: no key",
    ),
    _agent(
        "an agent raises in its process",
        {"run": f"{HERE}.agent"},
        f"the agent {HERE}.agent has ended with exit code 1",
        f'{FILE}", line',
        "LookupError: no plan",
    ),
    _agent("an async agent raises", {"run": f"{HERE}.awaiting_agent"}, f"{FILE}:", "LookupError: no plan"),
)
