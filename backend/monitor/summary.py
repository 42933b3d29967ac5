"""The result of a run: ``summary.json`` for programs, a small table for people."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TextIO, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    ValidationError,
)
from rich.box import ROUNDED
from rich.console import Console
from rich.text import Text

from slipstream.backend.monitor.tables import pairs_table
from slipstream.backend.monitor.units import count, reward, seconds
from slipstream.rollout.control.live_door import TurnEnd
from slipstream.rollout.live.status import LiveStatus
from slipstream.rollout.system.durable import write_durably

SUMMARY_FILE = "summary.json"


def _finite(value: object) -> object:
    """Return None for a number that is not finite: JSON has none, and a summary is written in any case."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


Measured = Annotated[float | None, BeforeValidator(_finite)]
"""A number that was computed from what a run did. Any value is valid."""

EXIT_STYLES = {"done": "green", "stopped": "yellow", "failed": "red"}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class GroupTotals(_Strict):
    """Number of groups of the whole run. Groups that are only in `admitted` were unfinished at the end."""

    admitted: NonNegativeInt
    trained: NonNegativeInt
    filtered: NonNegativeInt
    expired: NonNegativeInt
    failed: NonNegativeInt


class TurnTotals(_Strict):
    """Number of turns of live users in the whole run, by what has become of them (``docs/live.md``)."""

    trained: NonNegativeInt
    side: NonNegativeInt
    filtered: NonNegativeInt
    expired: NonNegativeInt
    failed: NonNegativeInt
    cancelled: NonNegativeInt
    forgotten: NonNegativeInt
    unpaired: NonNegativeInt = 0
    waiting: NonNegativeInt
    unjudged: NonNegativeInt
    ready: NonNegativeInt


def turn_totals(status: LiveStatus) -> TurnTotals:
    """Return how many turns there are of each kind."""
    ends = {end.value: status.ends.get(end, 0) for end in TurnEnd}
    return TurnTotals(**ends, waiting=status.waiting, unjudged=status.unjudged, ready=status.ready)


class RunSummary(_Strict):
    """A finished run. Fields that need a training step or an evaluation are None without one."""

    exit: Literal["done", "failed", "stopped"] = Field(
        description="How the run ended; stopped: by the user or the scheduler."
    )
    steps: NonNegativeInt = Field(
        description="Number of training steps that led to the last policy, earlier starts included."
    )
    steps_of_start: NonNegativeInt = Field(description="Number of training steps that this process has done.")
    wall_s: NonNegativeFloat = Field(description="Seconds from start to end, setup and evaluation included.")
    training_s: NonNegativeFloat = Field(
        description="Seconds from the first admission to the end of the last step."
    )
    reward_before: Measured = Field(description="Mean held-out reward of the initial policy.")
    reward_after: Measured = Field(description="Mean held-out reward of the last policy.")
    reward_is_accuracy: bool = Field(description="Whether the mean of the rewards is an accuracy.")
    head_lag_max: int | None = Field(description="Largest head lag trained, in versions.")
    head_lag_mean: Measured = Field(description="Mean head lag of trained trajectories, in versions.")
    multi_version_fraction: Measured = Field(
        description="Share of trained trajectories with tokens of more than one version."
    )
    tokens_generated: NonNegativeInt = Field(
        description="Response tokens that the engines generated, for users too, evaluations excluded."
    )
    tokens_trained: NonNegativeInt = Field(description="Number of tokens that carried loss.")
    versions: int = Field(description="The last policy version.")
    resumed: NonNegativeInt = Field(
        description="Restarts before this process, of the run or of its trainer alone. All fields but "
        "steps, groups, turns and versions are about this process."
    )
    stall_s_mean: Measured = Field(description="Mean seconds for which generation stood still per version.")
    engine_restarts: NonNegativeInt = Field(description="Number of engines that were restarted.")
    trainer_restarts: NonNegativeInt = Field(
        description="Number of times that the trainer was started again from a checkpoint."
    )
    trainer_wait_fraction: Measured = Field(description="Share of training_s spent waiting for batches.")
    prompts_left_out: NonNegativeInt = Field(
        default=0,
        description="Prompts that were not used because they have more tokens than `max_prompt_tokens`.",
    )
    untested: list[str] = Field(
        default=[],
        description="Fields of Megatron and SGLang that the recipe sets although they are untested.",
    )
    groups: GroupTotals
    turns: TurnTotals | None = Field(description="Turns of the users of a gateway; null: there is none.")


def write_summary(folder: Path, summary: RunSummary) -> Path:
    """Write ``summary.json`` into `folder`. At any instant a reader finds the old file or the new one."""
    path = folder / SUMMARY_FILE
    write_durably(path, summary.model_dump_json(indent=2) + "\n")
    return path


def read_summary(folder: Path) -> RunSummary | None:
    """Return the account of the run in a folder; None: there is none that can be read."""
    try:
        return RunSummary.model_validate_json((folder / SUMMARY_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def write_end(folder: Path, end: Literal["done", "failed", "stopped"], steps: int) -> None:
    """Write how a run without engines has ended, after so many training steps."""
    write_durably(folder / SUMMARY_FILE, json.dumps({"exit": end, "steps": steps}) + "\n")


def read_end(folder: Path) -> str | None:
    """Return how the run in a folder has ended; None: it has not, or was killed."""
    try:
        summary: object = json.loads((folder / SUMMARY_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    end = cast("dict[str, object]", summary).get("exit") if isinstance(summary, dict) else None
    return end if isinstance(end, str) else None


def print_summary(summary: RunSummary, stream: TextIO, folder: Path) -> None:
    """Print the summary of the run in a folder, a table on a terminal and plain lines elsewhere; then what
    the user may want to do next."""
    _print_totals(summary, stream, folder.name)
    print_commands(next_commands(summary, folder), stream)


def print_commands(commands: Mapping[str, str], stream: TextIO) -> None:
    """Print commands that go on from what has ended, with what each of them does."""
    width = max(map(len, commands))
    for command, does in commands.items():
        print(f"  {command:{width}}  # {does}", file=stream, flush=True)


def next_commands(summary: RunSummary, folder: Path) -> dict[str, str]:
    """Return commands that go on from a run in a folder, with what each of them does."""
    run, policy, recipe = shlex.quote(str(folder)), folder / "checkpoint-hf", folder / "recipe.yaml"
    commands = _commands_that_look(folder)
    before, after = summary.reward_before, summary.reward_after
    if before is not None and after is not None and after <= before:
        commands[f"slipstream diagnose {run}"] = "why the reward does not rise"
    if summary.exit == "done" and policy.exists():
        commands[shlex.join(["slipstream", "eval", str(policy), str(recipe)])] = "what the policy gets"
    if summary.exit == "done":
        commands["slipstream init my-task"] = "a recipe, a reward and data of your own"
    return commands


def commands_after_sft(checkpoint: Path, learn: str) -> dict[str, str]:
    """Return commands that go on from a supervised run, which has written ``checkpoint`` into its folder.

    ``learn``: the setting of its recipe.
    """
    commands = _commands_that_look(checkpoint.parent)
    if learn == "preferences":
        return commands | {"slipstream settings critic": "whose path may be this reward model"}
    return commands | model_commands(checkpoint)


def model_commands(model: Path) -> dict[str, str]:
    """Return commands that go on from an HF checkpoint of a policy."""
    path = str(model)
    return {
        shlex.join(["slipstream", "eval", path, "RECIPE"]): "what the policy gets with a recipe",
        shlex.join(["slipstream", "init", "my-task", "--model", path]): "a recipe that begins with it",
    }


def _commands_that_look(folder: Path) -> dict[str, str]:
    return {
        shlex.join(["slipstream", "report", str(folder)]): "its curves and episodes as a page",
        shlex.join(["tensorboard", "--logdir", str(folder.parent)]): "all runs beside each other",
    }


def _print_totals(summary: RunSummary, stream: TextIO, name: str) -> None:
    if not stream.isatty():
        print(summary_text(summary, name), file=stream, flush=True)
        return
    rows = summary_rows(summary)
    values = {
        label: Text(value.replace("->", "→"), style="bold" if label in ("accuracy", "reward") else "")
        for label, value in rows.items()
    }
    heading = Text(_title(summary, name), style=f"bold {EXIT_STYLES[summary.exit]}")
    Console(file=stream, highlight=False).print(pairs_table(heading, values, ROUNDED))


def summary_text(summary: RunSummary, name: str) -> str:
    """Return the summary of the run `name` as plain lines."""
    rows = summary_rows(summary)
    width = max(map(len, rows))
    return "\n".join(
        [_title(summary, name), *(f"  {label:{width}}  {value}" for label, value in rows.items())]
    )


def _title(summary: RunSummary, name: str) -> str:
    return f"{name}: {summary.exit} after {summary.steps} steps"


def summary_rows(summary: RunSummary) -> dict[str, str]:
    """Return labels and values in ASCII, without the labels that have no value."""
    rows: dict[str, str] = {}
    before, after, is_accuracy = summary.reward_before, summary.reward_after, summary.reward_is_accuracy
    if before is not None or after is not None:
        rows["accuracy" if is_accuracy else "reward"] = _course(before, after, is_accuracy=is_accuracy)
    time = f"{seconds(summary.wall_s)} in all, {seconds(summary.training_s)} of training"
    if summary.steps_of_start:
        time += f", {seconds(summary.training_s / summary.steps_of_start)} per step"
    if summary.resumed:
        time += f"; since the last start, which did {summary.steps_of_start} of the steps"
    rows["time"] = time
    if summary.head_lag_max is not None and summary.head_lag_mean is not None:
        lag = f"head lag {summary.head_lag_max} at most, {summary.head_lag_mean:.2f} on average"
        if summary.multi_version_fraction is not None:
            lag += f"; {summary.multi_version_fraction:.0%} of trajectories span versions"
        rows["staleness"] = lag
    throughput = (
        f"{count(summary.tokens_generated)} tokens generated, {count(summary.tokens_trained)} trained"
    )
    if summary.training_s > 0:
        throughput += f"; {count(summary.tokens_generated / summary.training_s)} generated per second"
    rows["throughput"] = throughput
    if summary.trainer_wait_fraction is not None:
        rows["trainer"] = f"waited for batches {summary.trainer_wait_fraction:.0%} of its time"
    versions = f"{summary.steps_of_start} published"
    if summary.stall_s_mean is not None:
        versions += f", generation paused {seconds(summary.stall_s_mean)} for each"
    rows["versions"] = versions
    rows["engines"] = f"{summary.engine_restarts} restarts"
    if summary.trainer_restarts:
        rows["trainer restarts"] = str(summary.trainer_restarts)
    if summary.groups.admitted or summary.turns is None:
        rows["groups"] = _totals(summary.groups)
    if summary.turns is not None:
        rows["turns"] = _totals(summary.turns)
    return rows | untested_row(summary.untested)


def _course(before: float | None, after: float | None, *, is_accuracy: bool) -> str:
    """Return what evaluations have given. A resumed process has not seen the initial policy."""
    if before is None or after is None:
        when = "before training" if after is None else "at the end"
        return f"{reward(before or after or 0.0, is_accuracy=is_accuracy)} {when}"
    change = f"{100 * (after - before):+.1f} points" if is_accuracy else f"{after - before:+.4g}"
    shown = [reward(value, is_accuracy=is_accuracy) for value in (before, after)]
    return f"{' -> '.join(shown)}  ({change})"


def untested_row(fields: Sequence[str]) -> dict[str, str]:
    """Return the row about fields that a recipe sets although they are untested; empty: there are none."""
    return {"untested": ", ".join(fields)} if fields else {}


def _totals(totals: GroupTotals | TurnTotals) -> str:
    return ", ".join(f"{number} {what}" for what, number in totals if number or what == "trained")
