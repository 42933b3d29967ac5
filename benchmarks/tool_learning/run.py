"""The run of a seed: `slipstream train` with tools, a policy with the bad habit, and held-out problems."""

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import yaml

from benchmarks.tool_learning import task
from benchmarks.tool_learning.policy import WARM_START_STEPS, write_policy
from slipstream.backend.commands.audit import audit_run

ROOT = Path(__file__).parents[2]

TRAIN, HELD_OUT = 2048, 200
"""Prompts. With so many held-out ones the standard error of an accuracy is at most 3.5 percentage points."""

STEPS, GROUPS, SAMPLES, BOUND = 14, 8, 8, 2
"""Training steps, groups of a step, episodes of a group, and the largest lag."""

LONGEST_ANSWER = 20
"""Tokens. A call as demonstrated has 16 at most, with its end."""

TIMEOUT_S = 600


@dataclass(frozen=True)
class Outcome:
    """What a policy has learned."""

    seed: int
    before: float
    after: float
    """Share of the held-out problems that are answered right, at temperature 0."""
    seconds: float
    """Duration of the training steps."""
    trained: int
    """Number of trained episodes."""
    max_lag: int
    discrepancies: int
    """Number of discrepancies that the audit has found."""

    @property
    def gain(self) -> float:
        """In percentage points."""
        return round(100 * (self.after - self.before), 1)


def recipe(inputs: Path, root: Path, seed: int, steps: int = STEPS) -> dict[str, object]:
    """Return the recipe of a run in `root` on the policy and the prompts in `inputs`."""
    return {
        "run": {"name": f"seed-{seed}", "root": str(root), "seed": seed, "steps": steps},
        "model": {"path": str(inputs / "policy"), "dtype": "float32"},
        "data": {"path": str(inputs / "train.jsonl")},
        "eval": {"path": str(inputs / "heldout.jsonl"), "every": 0},
        "actor": {
            "use_decoupled_loss": True,
            "recompute_logprobs": True,
            "minibatches": 4,
            "microbatch_tokens": 4096,
            "optimizer": {"lr": 2.5e-4, "warmup_steps": 3},
        },
        "rollout": {
            "max_head_offpolicyness": BOUND,
            "batch_size": GROUPS,
            "n_samples_per_prompt": SAMPLES,
            "max_concurrent": GROUPS * SAMPLES,
            "sampling": {"temperature": 1.0, "max_new_tokens": LONGEST_ANSWER},
            "workflow": {
                "path": "slipstream.rollout.workflow.ToolUse",
                "args": {
                    "tools": ["benchmarks.tool_learning.tools.calc"],
                    "parser": "pythonic",
                    "max_turns": task.TURNS + 1,
                },
            },
            "reward": {"path": "slipstream.rollout.reward.Exact"},
            "engine": {"args": {"max_running_requests": 64, "max_total_tokens": 16384}},
        },
        "checkpoint": {"every": 1000},
    }


def prepare(inputs: Path, seed: int, warm_start_steps: int = WARM_START_STEPS) -> None:
    """Write the policy, the prompts to train on and the held-out ones."""
    inputs.mkdir(parents=True)
    prompts = islice(task.train_prompts(random.Random(f"train-{seed}")), TRAIN)
    _write(inputs / "train.jsonl", list(map(task.problem_of, prompts)))
    _write(inputs / "heldout.jsonl", task.held_out_set(seed, HELD_OUT))
    write_policy(inputs / "policy", seed, warm_start_steps)


def learn(root: Path, seed: int) -> Outcome:
    """Train the policy of a seed. Raises RuntimeError, with its output, if the run does not end well."""
    inputs = root / f"inputs-{seed}"
    prepare(inputs, seed)
    path, output = root / f"seed-{seed}.yaml", root / f"seed-{seed}.out"
    path.write_text(yaml.safe_dump(recipe(inputs, root, seed)))
    command = [sys.executable, "-m", "slipstream.backend.cli", "train", str(path)]
    with output.open("w") as out:
        ended = subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, env=_environment(), timeout=TIMEOUT_S
        )
    if ended.returncode:
        raise RuntimeError(
            f"slipstream train has ended with {ended.returncode}:\n{output.read_text()[-4000:]}"
        )
    folder = root / f"seed-{seed}"
    summary, audit = json.loads((folder / "summary.json").read_text()), audit_run(folder, print)
    return Outcome(
        seed,
        summary["reward_before"],
        summary["reward_after"],
        summary["training_s"],
        summary["groups"]["trained"] * SAMPLES,
        summary["head_lag_max"],
        len(audit.discrepancies),
    )


def _write(path: Path, problems: list[task.Problem]) -> None:
    path.write_text("".join(f"{json.dumps(asdict(problem))}\n" for problem in problems))


def _environment() -> dict[str, str]:
    """Return this process's environment, with a PYTHONPATH on which the run finds the tool."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path}
