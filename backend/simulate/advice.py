"""Compares a recipe's split of its GPUs with the splits next to it, by short simulations."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from slipstream.backend.memory.engine_memory import EngineMemory
from slipstream.backend.simulate.compare import SimulatedRun, Work
from slipstream.backend.simulate.derived import derived_model
from slipstream.backend.simulate.gpu_split import GpuSplit, layout_of, model_of, trainer_unit
from slipstream.backend.simulate.publication import transport_of
from slipstream.backend.simulate.schedules import recipe_schedule
from slipstream.backend.simulate.world import MeasuredSteps, SimulationStalled, World
from slipstream.bridge.shards.plan import ExportPlan
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.simulate import FailureModel, LengthModel, RecipeLayout

MEASURED_STEPS = range(3, 7)
"""Fewest and most steps that are measured. The steps that fill the slots come before them, and the run would
go on after them: over hundreds of steps neither its begin nor its end counts."""
TRAJECTORIES = 4096
"""Trajectories that are measured for one split, if these are not too few or too many steps."""
PATIENCE_S = 1e6
"""Virtual seconds that anything may take: the comparison is about speed."""


@dataclass(frozen=True)
class SplitAdvice:
    """The recipe's split and its neighbours, by the number of GPUs that train."""

    runs: tuple[SimulatedRun, ...]
    recipe: GpuSplit
    steps: int
    """Measured ones."""
    costs: tuple[str, ...]
    """The cost model in words: the figures mean nothing without it."""

    @property
    def best(self) -> SimulatedRun:
        return max(self.runs, key=lambda run: run.tokens_per_s)


def advise(
    config: RunConfig, export: ExportPlan, engine: EngineMemory, *, alone: bool = False
) -> SplitAdvice | None:
    """Simulate the recipe on its split, on the next smaller and on the next larger share for the trainer.

    ``alone``: on its own split only.

    Returns None unless ``cluster.device`` is gpu, since the cost model is a GPU's, and for engines that
    cannot hold the model.
    """
    if config.cluster.device != "gpu" or engine.tokens == 0:
        return None
    window = _window(config)
    config = _patient(config, window)
    layout, schedule = layout_of(config), recipe_schedule(config)

    def on(split: GpuSplit) -> Work:
        model = derived_model(config, export, engine, split)
        return Work(config.model_copy(update={"simulate": model}), config.run.seed)

    runs: list[SimulatedRun] = []
    for split in [layout] if alone else _neighbours(config, layout):
        work = on(split)
        try:
            outcome = World(work.config, schedule, split, work.workload()).run(window=window)
            runs.append(SimulatedRun(schedule, split, outcome))
        except SimulationStalled as stalled:
            runs.append(SimulatedRun(schedule, split, None, str(stalled)))
    return SplitAdvice(tuple(runs), layout, window.measured, tuple(cost_model(on(layout))))


def _window(config: RunConfig) -> MeasuredSteps:
    rollout = config.rollout
    wanted = TRAJECTORIES // (rollout.batch_size * rollout.n_samples_per_prompt)
    measured = min(max(wanted, MEASURED_STEPS.start), MEASURED_STEPS.stop - 1)
    return MeasuredSteps(rollout.max_head_offpolicyness + 1, measured)


def _patient(config: RunConfig, window: MeasuredSteps) -> RunConfig:
    """Return the recipe on its own GPUs, with much patience and more steps than are simulated."""
    rollout = config.rollout
    steps = 2 * window.skipped + window.measured
    patient = {"steps": steps, "batch_timeout_s": PATIENCE_S, "step_timeout_s": PATIENCE_S}
    return config.model_copy(
        update={
            "simulate": model_of(config).model_copy(update={"layout": RecipeLayout(), "compare": False}),
            "run": config.run.model_copy(update=patient),
            "rollout": rollout.model_copy(update={"episode_timeout_s": PATIENCE_S}),
            "eval": None,
        }
    )


def _neighbours(config: RunConfig, layout: GpuSplit) -> Sequence[GpuSplit]:
    """Return the recipe's split between the next ones that can be placed: whole replicas, whole nodes."""
    if layout.shared:
        return [layout]
    step, cluster = trainer_unit(config), config.cluster
    if cluster.type != "local":
        step = lcm(step, max(layout.trainer_gpus // (cluster.trainer_nodes or 1), 1))
    per_engine = layout.gpus_per_engine
    return [
        layout
        if count == layout.trainer_gpus
        else GpuSplit(layout.gpus, count, (layout.gpus - count) // per_engine, per_engine)
        for count in (layout.trainer_gpus - step, layout.trainer_gpus, layout.trainer_gpus + step)
        if 0 < count <= layout.gpus - per_engine
    ]


def cost_model(work: Work) -> list[str]:
    """Return one line for each activity that takes time, with its constants."""
    model = model_of(work.config)
    engine, trainer, transfer, failures = model.engine, model.trainer, model.transfer, model.failures
    slow_engine = f", times {engine.slowdown:g} during training" if engine.slowdown > 1 else ""
    slow_trainer = f", times {trainer.slowdown:g} while engines decode" if trainer.slowdown > 1 else ""
    memory = f" and {engine.kv_tokens:,} tokens of KV" if engine.kv_tokens else ""
    engine_failures = (
        f"an engine fails every {failures.engine_mean_time_s:g} s, back after {failures.engine_restart_s:g} s"
        if failures.engine_mean_time_s
        else "no engine fails"
    )
    episode_failures = (
        f"{failures.episode:.2%} of the episodes fail" if failures.episode else "no episode fails"
    )
    return [
        f"decode step {1e3 * engine.step_s:.4g} ms + {1e3 * engine.request_s:.4g} ms per running request"
        f"{slow_engine}; prefill {engine.prefill_tokens_per_s:,.0f} tokens/s; at most {engine.max_running} "
        f"requests{memory} on an engine",
        f"training step {trainer.step_s:.4g} s + {trainer.tokens_per_s:,.0f} tokens/s and GPU{slow_trainer}",
        f"publication by {transport_of(work.config)}: {transfer.prepare_s:.3g} s, then a pause of "
        f"{transfer.stall_s:.3g} s: {transfer.pause_s:g} s + {transfer.bytes / 1e9:.3g} GB at "
        f"{transfer.bytes_per_s / 1e9:.3g} GB/s"
        f"; abort: {1e3 * engine.resend_s:g} ms more per running request",
        f"responses {_responses(work)}; prompts {_log_normal(model.prompts, None)}",
        f"rewards after {model.reward.median_s:g} s (median; sigma {model.reward.sigma:g}); "
        f"{engine_failures}, {episode_failures}",
        *_failures_of_trainer(failures),
    ]


def _failures_of_trainer(model: FailureModel) -> list[str]:
    if not model.of_trainer:
        return []
    ranks = (
        f"a trainer rank dies every {model.trainer_mean_time_s:g} s, back after {model.trainer_restart_s:g} s"
        if model.trainer_mean_time_s
        else "no trainer rank dies"
    )
    nodes = (
        f"a node fails every {model.node_mean_time_s:g} s, back after {model.node_repair_s:g} s, with "
        f"{model.spare_nodes} spare ones and {model.engine_placement} engines; the trainer is back after "
        f"{model.trainer_node_restart_s:g} s, and after {model.job_restart_s:g} s with the job"
        if model.node_mean_time_s
        else "no node fails"
    )
    return [f"{ranks}; {nodes}"]


def _responses(work: Work) -> str:
    model, lengths = model_of(work.config).responses, work.lengths
    if lengths is None:
        text = _log_normal(model, work.config.rollout.sampling.max_new_tokens)
    else:
        kind = "given lengths" if lengths.ndim == 1 else "lengths, group by group as they came"
        text = f"of {lengths.size:,} {kind}: mean {lengths.mean():,.0f}, longest {lengths.max():,}"
    if model.straggler_fraction:
        text += f", {model.straggler_fraction:.1%} of them {model.straggler_factor:g} times longer"
    return text


def _log_normal(model: LengthModel, longest: int | None) -> str:
    cap = model.cap or longest
    return f"log-normal, median {model.median:,.0f}, sigma {model.sigma:.3g}, at most {cap:,}"
