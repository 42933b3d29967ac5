"""Each way of choosing batches, against AReaL's volume gate, on the same work: largest lag, waste, makespan.

    python -m benchmarks.staleness

Two settings, both in the simulator, that is with the loops and the control core of a real run. First 64
groups at work for batches of 32: answers decode at a constant speed, training takes half the time that
generating a batch does, so that the engines are what limits everything; lengths spread so much that the gate
exceeds a bound of 1 fivefold, and with stragglers 2 % of the answers are 10 times as long. Then
`simulate-areal`, where the longest answer takes about two steps, and its cluster of 64 GPUs with a quarter of
the answers in a step, where it takes four.

No policy can keep the bound and lose nothing and be as fast as the gate where an answer takes longer than
eta steps: an answer of duration D that is trained within eta versions of its start makes eta steps last D.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream.backend.simulate.account import Outcome
from slipstream.backend.simulate.command import recipe
from slipstream.backend.simulate.compare import Work
from slipstream.backend.simulate.gpu_split import layout_of
from slipstream.backend.simulate.schedules import BOUNDS, Schedule, policies, volume_gate
from slipstream.backend.simulate.world import World
from slipstream.configs.schema import RunConfig

BATCH, CONCURRENT, STEPS = 32, 64, 60
"""Groups, and training steps."""

MEDIAN, SIGMA, TOKEN_S = 1000, 0.4, 0.01
BATCH_S = BATCH / CONCURRENT * MEDIAN * 1.083 * TOKEN_S
"""What the engines need for a batch: 1.083 is the mean of a log-normal with this sigma over its median."""

STRAGGLERS = 0.02
LONGEST_S = 1e9
"""No time-out of the recipe is to end a straggler."""

MAX_WASTE, MAX_MAKESPAN = 0.01, 1.03
"""What is asked of the default: lost groups as a part of all, and makespan over the gate's."""

GATE = "volume gate"


@dataclass(frozen=True)
class Case:
    name: str
    samples: int
    """Answers per prompt."""
    stragglers: float
    overrides: tuple[str, ...] | None = None
    """Of `simulate-areal`; None: it is a case of the small setting."""

    def config(self) -> RunConfig:
        return small(self) if self.overrides is None else recipe("simulate-areal", list(self.overrides))


CASES = (
    Case("one answer a prompt", 1, 0.0),
    Case("one answer a prompt, 2 % stragglers", 1, STRAGGLERS),
    Case("8 answers a prompt", 8, 0.0),
    Case("8 answers a prompt, 2 % stragglers", 8, STRAGGLERS),
    Case("simulate-areal", 16, 0.0, overrides=()),
    Case(
        "simulate-areal, small steps",
        16,
        0.0,
        overrides=("simulate.layout.nodes=8", "rollout.batch_size=64"),
    ),
)


def small(case: Case) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "staleness", "steps": STEPS, "batch_timeout_s": LONGEST_S},
            "model": {"path": "none"},
            "data": {"path": "none.jsonl"},
            "rollout": {
                "max_head_offpolicyness": 0,
                "batch_size": BATCH,
                "n_samples_per_prompt": case.samples,
                "max_concurrent": CONCURRENT * case.samples,
                "episode_timeout_s": LONGEST_S,
                "sampling": {"max_new_tokens": 32 * MEDIAN},
                "reward": "slipstream.rollout.reward.FinalAnswer",
            },
            "weights": {"interrupt": "in_place"},
            "simulate": {
                "responses": {
                    "median": MEDIAN,
                    "sigma": SIGMA,
                    "straggler_fraction": case.stragglers,
                    "straggler_factor": 10,
                },
                "engine": {
                    "step_s": TOKEN_S,
                    "request_s": 0,
                    "prefill_tokens_per_s": 1e9,
                    "max_running": CONCURRENT * case.samples,
                },
                "trainer": {"step_s": BATCH_S / 2, "tokens_per_s": 1e12},
                "transfer": {"bytes": 0, "pause_s": 0.05},
                "reward": {"median_s": 0},
            },
        }
    )


@dataclass(frozen=True)
class Row:
    case: Case
    bound: int
    policy: str
    found: Outcome
    gate: Outcome

    @property
    def makespan_ratio(self) -> float:
        return self.found.makespan_s / self.gate.makespan_s

    @property
    def over_bound(self) -> float:
        """Part of the trained tokens that are older than the bound."""
        lags = self.found.token_lags
        return sum(tokens for lag, tokens in lags.items() if lag > self.bound) / sum(lags.values())

    @property
    def useful(self) -> float:
        """Tokens trained within the bound per second, over the gate's."""
        gate = Row(self.case, self.bound, GATE, self.gate, self.gate)
        mine = (1 - self.over_bound) * self.found.tokens_per_s
        return mine / ((1 - gate.over_bound) * self.gate.tokens_per_s)


def measure() -> Iterator[Row]:
    """The gate first in each case and bound."""
    for case in CASES:
        config = case.config()
        workload, interrupt = Work(config, seed=0).workload(), config.weights.interrupt

        @cache
        def simulated(schedule: Schedule) -> Outcome:
            return World(config, schedule, layout_of(config), workload).run()  # noqa: B023

        for bound in BOUNDS:
            gate = simulated(volume_gate(bound, interrupt))
            yield Row(case, bound, GATE, gate, gate)
            for name, policy in policies().items():
                yield Row(case, bound, name, simulated(Schedule(name, bound, policy, interrupt)), gate)


def recommended(rows: list[Row]) -> tuple[str, str]:
    """The policy for the default, and why."""
    worst: dict[str, tuple[float, float, float]] = {}
    for name in policies():
        mine = [row for row in rows if row.policy == name]
        if all(row.found.max_lag <= row.bound and row.found.groups_wasted < MAX_WASTE for row in mine):
            worst[name] = (
                max(row.makespan_ratio for row in mine),
                max(row.found.tokens_wasted for row in mine),
                min(row.useful for row in mine),
            )
    fast = [name for name, (makespan, _, _) in worst.items() if makespan <= MAX_MAKESPAN]
    best = max(fast or worst, key=lambda name: worst[name][2])
    figures = "; ".join(
        f"{name}: at worst {makespan:.2f} of the gate's makespan, {wasted:.1%} of the tokens not trained, "
        f"{useful:.2f} of its trained tokens/s within the bound"
        for name, (makespan, wasted, useful) in worst.items()
    )
    met = "meets" if fast else "does not meet either, but comes closest to"
    reason = (
        f"it keeps the bound, loses less than {MAX_WASTE:.0%} of the groups and {met} "
        f"{MAX_MAKESPAN:.2f} of the gate's makespan. {figures}"
    )
    return best, reason


def show(rows: list[Row], console: Console) -> None:
    for case in CASES:
        table = Table(title=case.name, title_justify="left")
        for name in ("eta", "policy", "max lag", "above eta", "lost groups", "lost tokens"):
            table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
        table.add_column("makespan / gate's", justify="right")
        table.add_column("within eta/s / gate's", justify="right")
        for row in rows:
            if row.case is case:
                found = row.found
                table.add_row(
                    str(row.bound),
                    row.policy,
                    f"{found.max_lag}{'!' if found.max_lag > row.bound else ''}",
                    f"{row.over_bound:.1%}",
                    f"{found.groups_wasted:.2%}",
                    f"{found.tokens_wasted:.2%}",
                    f"{row.makespan_ratio:.3f}",
                    f"{row.useful:.3f}",
                )
                if row.policy == list(policies())[-1]:
                    table.add_section()
        console.print(table)


def document(rows: list[Row]) -> dict[str, Any]:
    """Each figure by case, policy and bound."""
    figures: dict[str, dict[str, Any]] = {}
    for row in rows:
        for key, value in (
            ("max_lag", row.found.max_lag),
            ("waste", row.found.groups_wasted),
            ("waste_tokens", row.found.tokens_wasted),
            ("tokens_above_eta", row.over_bound),
            ("makespan_ratio", row.makespan_ratio),
            ("tokens_within_eta_ratio", row.useful),
        ):
            by_policy = figures.setdefault(key, {}).setdefault(row.case.name, {})
            by_policy.setdefault(row.policy, {})[str(row.bound)] = round(value, 4)
    return figures


def main() -> None:
    rows = list(measure())
    console = Console(highlight=False, width=120)
    show(rows, console)
    best, reason = recommended(rows)
    console.print(f"recommended default: {best}, because {reason}")
    print(json.dumps({**document(rows), "recommended": best, "reason": reason}))


if __name__ == "__main__":
    main()
