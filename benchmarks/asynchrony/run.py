"""One run of the benchmark: the quickstart with a wider policy, and its accuracy over time."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from benchmarks.simulation import measure as simulate
from slipstream.backend.checkpoint.manifest import read_manifest
from slipstream.backend.cluster.local_ranks import run_ranks
from slipstream.backend.commands.audit import audit_run
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.quickstart import task
from slipstream.backend.simulate.trace import Trace, read_trace
from slipstream.rollout.system.network import hold_port, port_of

HIDDEN = 512
"""Four times the quickstart's width: of the work of a step, a smaller part is then that of handing it on."""
BATCH = 4
"""Groups of a step, 32 completions: training then takes about as long as the generation of its batch."""
LEARNING_RATE = 1e-4
"""Chosen on seed 100: at 4e-4 so wide a policy unlearns again what it has learned."""
CHECKPOINT_EVERY = 8
"""Steps between two points of a curve. Checkpoints are evaluated after the run, so no run waits for it."""
HELD_OUT = 400
"""Number of held-out problems: the standard error of an accuracy of 0.9 is 1.5 percentage points."""
TIMEOUT_S = 900


@dataclass(frozen=True)
class Point:
    """The policy after a training step."""

    step: int
    seconds: float
    """Time since the first training step began to wait for its batch."""
    accuracy: float
    """Share of the held-out problems that greedy completions answer."""


@dataclass(frozen=True)
class Outcome:
    """A run, and its simulation with constants fitted to its own trace."""

    eta: int
    seed: int
    step_s: float
    simulated_step_s: float
    waiting: float
    """Share of the time in which the trainer waits for a batch."""
    training: float
    """Share of the time in which the trainer trains; the rest is publication."""
    mean_lag: float
    curve: tuple[Point, ...]
    discrepancies: int
    """Number of discrepancies that the audit has found."""

    def seconds_to(self, accuracy: float) -> float | None:
        """Return the time at which the curve, linear between its points, first reaches ``accuracy``."""
        if self.curve[0].accuracy >= accuracy:
            return 0.0
        for before, after in pairwise(self.curve):
            if before.accuracy < accuracy <= after.accuracy:
                share = (accuracy - before.accuracy) / (after.accuracy - before.accuracy)
                return before.seconds + share * (after.seconds - before.seconds)
        return None


def overrides(root: Path, eta: int, seed: int, steps: int) -> list[str]:
    """Return what the run changes in the recipe ``quickstart``."""
    inputs = root / f".inputs-{seed}"
    return [
        f"run={{name: {name_of(eta, seed)}, root: {root}, seed: {seed}, steps: {steps}}}",
        f"prepare={{path: slipstream.backend.quickstart.prepare, args: {{hidden: {HIDDEN}}}}}",
        f"model.path={inputs / 'policy'}",
        f"data.path={inputs / 'train.jsonl'}",
        "eval=null",
        f"actor.optimizer.lr={LEARNING_RATE}",
        f"rollout.batch_size={BATCH}",
        f"rollout.max_head_offpolicyness={eta}",
        f"checkpoint={{every: {CHECKPOINT_EVERY}, keep_every: {CHECKPOINT_EVERY}}}",
    ]


def name_of(eta: int, seed: int) -> str:
    return f"eta-{eta}-seed-{seed}"


def train(root: Path, eta: int, seed: int, steps: int) -> None:
    """Do a run. Raises RuntimeError, with its output, if it does not end well.

    ``root`` is made if it does not exist.
    """
    root.mkdir(parents=True, exist_ok=True)
    output = root / f"{name_of(eta, seed)}.out"
    command = [sys.executable, "-m", "slipstream.backend.cli", "train", "quickstart"]
    with output.open("w") as out:
        ended = subprocess.run(
            [*command, *overrides(root, eta, seed, steps)],
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )
    if ended.returncode:
        raise RuntimeError(
            f"slipstream train has ended with {ended.returncode}:\n{output.read_text()[-4000:]}"
        )


def outcomes(root: Path, etas: Sequence[int], seed: int) -> list[Outcome]:
    """Return what the runs of a seed show, which have been done."""
    traces = {eta: read_trace(root / name_of(eta, seed)) for eta in etas}
    checkpoints = [
        (eta, read_manifest(path).record.step, path)
        for eta in etas
        for path in (root / name_of(eta, seed) / "checkpoints").glob("v*")
    ]
    start = root / f".inputs-{seed}" / "policy"
    [accuracies] = run_ranks(
        1,
        accuracies_of,
        start,
        [path for *_, path in checkpoints],
        seed,
        HELD_OUT,
        timeout_s=TIMEOUT_S * len(etas),
    )
    curves = {eta: [Point(0, 0.0, accuracies[0])] for eta in etas}
    for (eta, step, _), accuracy in zip(checkpoints, accuracies[1:], strict=True):
        trace = traces[eta]
        curves[eta].append(Point(step, float(trace.end_S[step - 1] - trace.begin_s), accuracy))
    return [
        outcome(root / name_of(eta, seed), eta, seed, traces[eta], sorted(curves[eta], key=lambda p: p.step))
        for eta in etas
    ]


def outcome(run: Path, eta: int, seed: int, trace: Trace, curve: Sequence[Point]) -> Outcome:
    simulated = simulate(run, Console(quiet=True))
    total_s = trace.end_s - trace.begin_s
    return Outcome(
        eta,
        seed,
        step_s=float(simulated["step_s_real"] or 0),
        simulated_step_s=float(simulated["step_s_simulated"] or 0),
        waiting=float(trace.wait_S.sum()) / total_s,
        training=float(trace.train_S.sum()) / total_s,
        mean_lag=float(simulated["lag_real"] or 0),
        curve=tuple(curve),
        discrepancies=len(audit_run(run, print).discrepancies),
    )


def accuracies_of(
    rank: RankSpec, start: Path, checkpoints: Sequence[Path], seed: int, held_out: int
) -> list[float]:
    """Return the accuracy of the policy at ``start`` and of each checkpoint, on ``held_out`` problems."""
    from transformers import AutoTokenizer, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from slipstream.backend.megatron.conversion import write_huggingface
    from slipstream.backend.quickstart.policy import greedy_accuracy
    from slipstream.configs.schema import ParallelConfig

    disable_progress_bar()  # each model that is loaded would write one into the benchmark's log
    tokenizer, problems = AutoTokenizer.from_pretrained(start), task.held_out_set(seed, held_out)

    def accuracy(model: Path) -> float:
        return greedy_accuracy(Qwen3ForCausalLM.from_pretrained(model), tokenizer, problems)

    accuracies = [accuracy(start)]
    for checkpoint in checkpoints:
        with TemporaryDirectory() as folder:
            with hold_port(rank.address) as holder:  # each conversion has a meeting of its own
                meeting = replace(rank, port=port_of(holder))
                mismatches = write_huggingface(meeting, checkpoint, start, ParallelConfig(), Path(folder), {})
            assert not mismatches, mismatches
            accuracies.append(accuracy(Path(folder)))
    return accuracies
