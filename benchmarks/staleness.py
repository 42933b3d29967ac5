"""Every consumption policy against AReaL's volume gate on the same work: largest lag, waste, makespan.

    python -m benchmarks.staleness

There are two settings, both in the simulator and therefore with the loops and the control core of a real run.
In the first, 64 groups are at work for batches of 32. Completions decode at a constant speed, and training
takes half the time of generating a batch, so that the engines are the bottleneck. Lengths vary so much that
the gate exceeds a bound of 1 fivefold; with stragglers, 2 % of the completions are 10 times as long. The
second setting is `simulate-areal`, where the longest completion takes about two steps, and its cluster of 64
GPUs with a quarter of the completions in a step, where it takes four.

Where a completion takes longer than eta steps, no policy can keep the bound, lose nothing and be as fast as
the gate: a completion of duration D that is trained within eta versions of its start makes eta steps last D.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.backend.simulate.account import Outcome
from slipstream.backend.simulate.compare import Work
from slipstream.backend.simulate.gpu_split import layout_of
from slipstream.backend.simulate.inputs import recipe
from slipstream.backend.simulate.schedules import BOUNDS, Schedule, policies, volume_gate
from slipstream.backend.simulate.world import World
from slipstream.configs.schema import RunConfig

BATCH, CONCURRENT, STEPS = 32, 64, 60
"""Groups of a batch, groups at work, and training steps."""

MEDIAN, SIGMA, TOKEN_S = 1000, 0.4, 0.01
BATCH_S = BATCH / CONCURRENT * MEDIAN * 1.083 * TOKEN_S
"""Seconds of generating a batch. The mean of a log-normal with this sigma is 1.083 times its median."""

STRAGGLERS = 0.02
LONGEST_S = 1e9
"""Time-out of the recipe, which must not end a straggler."""

MAX_WASTE, MAX_MAKESPAN = 0.01, 1.03
"""Requirements on the default policy: share of lost groups, and makespan over the gate's."""

GATE = "volume gate"


@dataclass(frozen=True)
class Case:
    """Work to be done."""

    name: str
    samples: int
    """Completions per prompt."""
    stragglers: float
    overrides: tuple[str, ...] | None = None
    """Overrides of `simulate-areal`; None for a case of the first setting."""

    def config(self) -> RunConfig:
        return small(self) if self.overrides is None else recipe("simulate-areal", list(self.overrides))


CASES = (
    Case("1 completion per prompt", 1, 0.0),
    Case("1 completion per prompt, 2 % stragglers", 1, STRAGGLERS),
    Case("8 completions per prompt", 8, 0.0),
    Case("8 completions per prompt, 2 % stragglers", 8, STRAGGLERS),
    Case("simulate-areal", 16, 0.0, overrides=()),
    Case(
        "simulate-areal, small steps",
        16,
        0.0,
        overrides=("simulate.layout.nodes=8", "rollout.batch_size=64"),
    ),
)


def small(case: Case) -> RunConfig:
    """Return the recipe of a case of the first setting."""
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
    """A policy and the gate on the same work."""

    case: Case
    bound: int
    policy: str
    outcome: Outcome
    gate: Outcome

    @property
    def makespan_ratio(self) -> float:
        return self.outcome.makespan_s / self.gate.makespan_s

    @property
    def over_bound(self) -> float:
        """Share of the trained tokens that are older than the bound."""
        lags = self.outcome.token_lags
        return sum(tokens for lag, tokens in lags.items() if lag > self.bound) / sum(lags.values())

    @property
    def useful(self) -> float:
        """Tokens trained within the bound per second, over the gate's."""
        gate = Row(self.case, self.bound, GATE, self.gate, self.gate)
        within = (1 - self.over_bound) * self.outcome.tokens_per_s
        return within / ((1 - gate.over_bound) * self.gate.tokens_per_s)


TABLE: Columns[Row] = {
    "eta": lambda row: row.bound,
    "policy": lambda row: row.policy,
    "max lag": lambda row: f"{row.outcome.max_lag}{'!' if row.outcome.max_lag > row.bound else ''}",
    "above eta": lambda row: f"{row.over_bound:.1%}",
    "lost groups": lambda row: f"{row.outcome.groups_wasted:.2%}",
    "lost tokens": lambda row: f"{row.outcome.tokens_wasted:.2%}",
    "makespan / gate's": lambda row: f"{row.makespan_ratio:.3f}",
    "within eta/s / gate's": lambda row: f"{row.useful:.3f}",
}


def measure() -> Iterator[Row]:
    """Simulate every policy; the gate comes first in each case and bound."""
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
    """Return the policy that should be the default, and the reason."""
    worst: dict[str, tuple[float, float, float]] = {}
    for name in policies():
        chosen = [row for row in rows if row.policy == name]
        if all(row.outcome.max_lag <= row.bound and row.outcome.groups_wasted < MAX_WASTE for row in chosen):
            worst[name] = (
                max(row.makespan_ratio for row in chosen),
                max(row.outcome.tokens_wasted for row in chosen),
                min(row.useful for row in chosen),
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


def document(rows: list[Row]) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Return each figure by case, policy and bound."""
    figures: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for row in rows:
        for key, value in (
            ("max_lag", row.outcome.max_lag),
            ("waste", row.outcome.groups_wasted),
            ("waste_tokens", row.outcome.tokens_wasted),
            ("tokens_above_eta", row.over_bound),
            ("makespan_ratio", row.makespan_ratio),
            ("tokens_within_eta_ratio", row.useful),
        ):
            by_policy = figures.setdefault(key, {}).setdefault(row.case.name, {})
            by_policy.setdefault(row.policy, {})[str(row.bound)] = round(value, 4)
    return figures


def main() -> None:
    rows = list(measure())
    console = table_console()
    for case in CASES:
        chosen = [row for row in rows if row.case is case]
        console.print(rows_table(case.name, chosen, TABLE, left=["policy"], section=lambda row: row.bound))
    best, reason = recommended(rows)
    console.print(f"recommended default: {best}, because {reason}")
    print(json.dumps({**document(rows), "recommended": best, "reason": reason}))


if __name__ == "__main__":
    main()
