"""Days of a large run in which parts fail: effective training time, and what the control plane makes of it.

    python -m benchmarks.survival

The loops, the control core, the revival of the trainer and the placement of engines are those of a run, in
virtual time. Work and speed are published for 128 H100 GPUs that train a software engineering agent (NeMo RL
v0.6, Nemotron-3-Nano-30B-A3B: 31.6k tokens an episode, 37.5 tokens/s and GPU over all GPUs).

Failures come at the rate of Llama 3's training (arXiv 2407.21783, table 5): 419 in 54 days of 16,384 GPUs. 63
of them (software, watchdogs of NCCL, dependencies) end one process, all others a node of eight GPUs. What a
failure costs is what ``benchmarks.recovery`` has measured. A node is taken to be repaired after a day.
"""

import json
import time
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.harness import parser
from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.backend.simulate.account import Outcome
from slipstream.backend.simulate.compare import Work
from slipstream.backend.simulate.gpu_split import layout_of
from slipstream.backend.simulate.inputs import recipe
from slipstream.backend.simulate.schedules import recipe_schedule
from slipstream.backend.simulate.simulated_ledger import SimulatedLedger
from slipstream.backend.simulate.world import World
from slipstream.configs.schema import RunConfig

GPUS, DAYS, FAILURES, OF_A_PROCESS = 16_384, 54, 419, 63
GPU_S = DAYS * 86_400 * GPUS / FAILURES
"""Seconds of a GPU between two failures."""

GPUS_PER_NODE = 8
RANK_S, JOB_S, ENGINE_S = 7.6, 135.1, 30.4
"""Seconds of recovery: a trainer rank, the first node, an engine's node (benchmarks/README.md)."""

TRAINER_NODE_S = ENGINE_S + RANK_S
"""Seconds of recovery of another node of the trainer: until Ray takes a node for dead, and new ranks."""

TOKENS_PER_S_GPU, EPISODE_TOKENS, GROUP = 37.5, 31_600, 16

REQUIRED, FLAT = 0.90, 1.2
"""Requirements: effective training time, and CPU per trajectory in the last third over the first one."""


@dataclass(frozen=True)
class Survived:
    """One simulated run, and what it took of this machine."""

    placement: str
    rate: float
    """Times the published rate of failures."""
    bound: int
    outcome: Outcome
    ledger: SimulatedLedger
    cpu_s: tuple[float, ...]
    """CPU seconds of this process for each third of the steps."""

    @property
    def flatness(self) -> float:
        """CPU per trajectory in the last third of the steps over that in the first one."""
        return self.cpu_s[2] / self.cpu_s[0]

    @property
    def lost(self) -> int:
        """Groups that nobody accounts for."""
        return self.ledger.untold(self.outcome.counts.in_flight)

    @property
    def duplicated(self) -> int:
        """Groups that the weights at the end are trained on twice."""
        return self.ledger.trained_twice


def config(
    *, engines: int, ranks: int, steps: int, rate: float, placement: str, spare_nodes: int
) -> RunConfig:
    """Return the recipe. ``rate``: times the published rate of failures."""
    tokens_per_s = TOKENS_PER_S_GPU * (engines + ranks)
    groups = max(round(430 * tokens_per_s / EPISODE_TOKENS / GROUP), 1)
    process_s = GPU_S * FAILURES / OF_A_PROCESS / rate
    node_s = GPU_S * FAILURES / (FAILURES - OF_A_PROCESS) / GPUS_PER_NODE / rate
    settings: dict[str, object] = {
        "run.steps": steps,
        "rollout.max_head_offpolicyness": 4,
        "rollout.batch_size": groups,
        "rollout.n_samples_per_prompt": GROUP,
        "rollout.sampling.max_new_tokens": 131_072,
        "actor.parallel.data": ranks,
        "rollout.engine.count": engines,
        "checkpoint.every": 5,
        "simulate.layout.type": "cluster",
        "simulate.layout.nodes": (engines + ranks) // GPUS_PER_NODE,
        "simulate.layout.trainer_share": ranks / (engines + ranks),
        "simulate.responses.median": round(EPISODE_TOKENS / 1.2),
        "simulate.responses.sigma": 0.6,
        "simulate.responses.cap": 131_072,
        "simulate.trainer.tokens_per_s": tokens_per_s / ranks,
        "simulate.trainer.checkpoint_stall_s": 5,
        "simulate.transfer.bytes": 60_000_000_000,
        "simulate.transfer.bytes_per_s": 45e9,
        "simulate.failures.engine_mean_time_s": process_s,
        "simulate.failures.engine_restart_s": ENGINE_S,
        "simulate.failures.trainer_mean_time_s": process_s / ranks,
        "simulate.failures.trainer_restart_s": RANK_S,
        "simulate.failures.node_mean_time_s": node_s,
        "simulate.failures.trainer_node_restart_s": TRAINER_NODE_S,
        "simulate.failures.job_restart_s": JOB_S,
        "simulate.failures.spare_nodes": spare_nodes,
        "simulate.failures.engine_placement": placement,
        "simulate.compare": "false",
    }
    return recipe("simulate-areal", [f"{key}={value}" for key, value in settings.items()])


def survive(config: RunConfig, placement: str, rate: float, seed: int = 0) -> Survived:
    """Simulate one run."""
    world = World(config, recipe_schedule(config), layout_of(config), Work(config, seed).workload())
    marks = [time.process_time()]

    def watch(now: float) -> None:
        if len(world.trainer.training) >= len(marks) * config.run.total_steps / 3 and len(marks) < 3:
            marks.append(time.process_time())

    outcome = world.run(watch)
    marks.append(time.process_time())
    assert isinstance(world.ledger, SimulatedLedger)
    cpu_s = tuple(end - begin for begin, end in pairwise(marks))
    return Survived(placement, rate, config.rollout.max_head_offpolicyness, outcome, world.ledger, cpu_s)


TABLE: Columns[Survived] = {
    "failures": lambda run: f"{run.rate:g} x published",
    "engines": lambda run: run.placement,
    "days": lambda run: f"{run.outcome.makespan_s / 86400:.1f}",
    "failed": lambda run: ", ".join(f"{n} {kind}" for kind, n in run.outcome.failures_by_kind.items()),
    "effective": lambda run: f"{run.outcome.effective:.2%}",
    "undone": lambda run: f"{run.outcome.undone_s / run.outcome.makespan_s:.2%}",
    "waiting": lambda run: f"{run.outcome.wait_s / run.outcome.makespan_s:.2%}",
    "engines down": lambda run: f"{run.outcome.engine_s.down / run.outcome.engine_s.total:.2%}",
    "lost, twice": lambda run: f"{run.lost}, {run.duplicated}",
    "lag": lambda run: f"{run.outcome.max_lag} of {run.bound}",
    "CPU": lambda run: f"{run.flatness:.2f}",
}


def document(runs: list[Survived]) -> dict[str, object]:
    """Return the figures of the last line."""
    return {
        f"{run.rate:g}x_{run.placement}": {
            "effective_fraction": round(run.outcome.effective, 4),
            "failures": run.outcome.failures_by_kind,
            "undone_fraction": round(run.outcome.undone_s / run.outcome.makespan_s, 5),
            "engines_down": round(run.outcome.engine_s.down / run.outcome.engine_s.total, 5),
            "lost": run.lost,
            "duplicated": run.duplicated,
            "tokens_generated_again": run.ledger.discarded_tokens,
            "max_lag": run.outcome.max_lag,
            "bound": run.bound,
            "cpu_last_third_over_first": round(run.flatness, 3),
            "cpu_us_per_trajectory": round(1e6 * sum(run.cpu_s) / run.outcome.trajectories),
            "trajectories": run.outcome.trajectories,
            "days": round(run.outcome.makespan_s / 86400, 2),
            "meets": run.outcome.effective >= REQUIRED
            and run.flatness <= FLAT
            and not run.lost
            and not run.duplicated
            and run.outcome.max_lag <= run.bound,
        }
        for run in runs
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--engines", type=int, default=1024)
    options.add_argument("--ranks", type=int, default=512)
    options.add_argument("--steps", type=int, default=600)
    options.add_argument(
        "--rates", type=float, nargs="+", default=[1.0, 10.0], help="times the published rate"
    )
    options.add_argument("--spare-nodes", type=int, default=4)
    given = options.parse_args()
    runs = [
        survive(
            config(
                engines=given.engines,
                ranks=given.ranks,
                steps=given.steps,
                rate=rate,
                placement=placement,
                spare_nodes=given.spare_nodes,
            ),
            placement,
            rate,
        )
        for rate in given.rates
        for placement in ("elastic", "fixed")
    ]
    table_console().print(rows_table("what a run makes of failures", runs, TABLE, left=["engines", "failed"]))
    print(json.dumps(document(runs)))


if __name__ == "__main__":
    main()
