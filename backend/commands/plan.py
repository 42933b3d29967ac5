"""The text of ``slipstream plan``: the layout of a recipe, the memory of its GPUs, and how they are split.

With ``--weights`` also the order in which the weights leave the trainer.
"""

from collections.abc import Callable, Iterable
from operator import itemgetter

from rich.console import Console

from slipstream.backend.commands.check import Planned
from slipstream.backend.commands.plan_document import (
    PlacedEngines,
    PlanDocument,
    PlannedCheckpoint,
    PlannedPublication,
    describe,
)
from slipstream.backend.megatron.export_plan import bucket_mb
from slipstream.backend.memory.engine_memory import EngineMemory
from slipstream.backend.memory.trainer_memory import StageMemory, tokens_of
from slipstream.backend.memory.verdict import GIB, trainers_part
from slipstream.backend.monitor.tables import rows_table
from slipstream.backend.simulate.advice import SplitAdvice
from slipstream.backend.simulate.compare import SimulatedRun
from slipstream.bridge.shards.plan import SENDER
from slipstream.configs.published import MODELS, repositories
from slipstream.configs.schema import RunConfig

SHOWN = 20
"""Number of buckets that the table shows from either end; ``--json`` lists them all."""


def print_plan(planned: Planned, advice: SplitAdvice | None, console: Console, *, weights: bool) -> None:
    """Print layout, memory and split, and with ``weights`` the export plan."""
    document = describe(planned, advice)
    _print_layout(planned, document, console)
    _print_memory(planned, console)
    _print_sharing(document, console)
    _print_judge(document, console)
    _print_checkpoint(document["checkpoint"], console)
    _print_publication(document["publication"], console)
    if advice is not None:
        _print_split(advice, console)
        _print_pace(planned, advice, console)
    _print_environment(document, console)
    if weights:
        _print_weights(planned, document, console)


def _print_layout(planned: Planned, document: PlanDocument, console: Console) -> None:
    plan, parallel = planned.export, planned.config.actor.parallel
    geometry = plan.spec.geometry
    _line(
        console,
        f"{document['family']}, {geometry.n_layers} layers, {document['parameters']:,} parameters: "
        f"{plan.spec.path}",
    )
    if plan.spec.path.parent == MODELS:
        repository = repositories()[plan.spec.path.name]
        _line(console, f"the model is not on this machine: planned with the config.json of {repository}")
    if document["quantization"] is not None:
        _line(
            console,
            f"its weights are stored in {document['quantization']}; the trainer loads them as "
            f"{planned.config.model.dtype}",
        )
    context = f"context {parallel.context} * " if parallel.context > 1 else ""
    ways = f"tensor {parallel.tensor} * {context}pipeline {parallel.pipeline} * data {parallel.data}"
    ranks = "rank" if document["ranks"] == 1 else "ranks"
    _line(console, f"{document['ranks']} trainer {ranks}: {ways}")
    if geometry.experts:
        _line(
            console,
            f"{geometry.experts.count} experts over {parallel.expert} ranks, each on {plan.layout.etp}",
        )
    if parallel.pipeline > 1:
        sizes = ", ".join(str(part["layers"]) for part in document["layers"])
        _line(console, f"layers of each part of the pipeline: {sizes}")
    if (engines := document["engines"]) is not None:
        _line(console, _placement(engines))
        if engines["fewest"] < engines["most"]:
            _line(console, _elastic(engines, on_gpus=planned.config.cluster.device != "cpu"))


def _placement(engines: PlacedEngines) -> str:
    """Return a line that says how the ranks of the engines are spread."""
    stages = f" * pipeline {engines['pipeline']}" if engines["pipeline"] > 1 else ""
    ways = f"tensor {engines['tensor']}{stages}"
    if engines["data"] > 1:
        ways += f", attention in {engines['data']} data-parallel groups"
    if engines["expert"] > 1:
        ways += f", experts in {engines['expert']} groups"
    count = "1 engine" if engines["engines"] == 1 else f"{engines['engines']} engines"
    ranks = "1 rank" if engines["ranks"] == 1 else f"{engines['ranks']} ranks"
    if engines["nodes"] == 1:
        return f"{count} of {ranks}, each on one node: {ways}"
    return f"{count} of {ranks}, each over {engines['nodes']} nodes of {engines['ranks_per_node']}: {ways}"


def _elastic(engines: PlacedEngines, *, on_gpus: bool) -> str:
    """Return a line that says what the engines of an elastic run need."""
    most = engines["most"]
    if on_gpus:
        needs = f"{most} take {most * engines['ranks']} GPUs beside those of the trainer"
    elif most > engines["engines"]:
        needs = f"each beyond {engines['engines']} needs a node without engines, or joins from outside"
    else:
        needs = "any node has room"
    return f"{engines['fewest']} to {most} engines as nodes come and go: {needs}"


def _print_memory(planned: Planned, console: Console) -> None:
    """Print a row for the trainer ranks with the largest peak, and one for the ranks of engines."""
    worst = max(planned.stages, key=lambda stage: stage.peak)
    gpu, stages, engine = planned.gpu_memory, len(planned.stages), planned.config.rollout.engine
    place = f", pipeline stage {worst.stage} of {stages}" if stages > 1 else ""
    rows = {f"trainer{place}": _of_trainer(worst)}
    if planned.engine is not None:
        rows["engine"] = _of_engine(planned.engine, shares=engine.gpu_share is not None)
    names = [name for name in COLUMNS if any(row.get(name) for row in rows.values())]
    columns: dict[str, Callable[[tuple[str, Sizes]], object]] = {"GiB on each rank": itemgetter(0)}
    for name in names:
        columns[name] = lambda row, name=name: _gib(row[1].get(name))
    console.print(rows_table("memory, estimated", rows.items(), columns))
    actor, layout = planned.config.actor, planned.export.layout
    new_tokens = planned.config.rollout.sampling.max_new_tokens
    part = None if gpu is None else trainers_part(engine, gpu)
    fits = "" if part is None else f"{_gib(worst.peak)} of {_gib(part)} GiB, {_verdict(worst.peak, part)}; "
    _line(
        console,
        f"trainer: {fits}micro-batches of {tokens_of(actor, new_tokens):,} tokens on a rank, recompute "
        f"{actor.recompute}, layers of {layout.layer_spec}",
    )
    if planned.engine is not None:
        _print_cache(planned.config, planned.engine, gpu, console)


def _print_sharing(document: PlanDocument, console: Console) -> None:
    """Print what replayed experts and shared prompts cost and save, where the recipe asks for them."""
    if (size := document["route_bytes"]) is not None:
        _line(
            console,
            f"replayed experts: {size:,} bytes a token in the record, and between the passes of a step",
        )
    if (saved := document["saved_flops"]) is not None:
        text = (
            f"save {saved:.0%} of the trainer's FLOPs" if saved else "save less than a tenth, which is left"
        )
        _line(console, f"shared prompts: with the lengths of the cost model they {text}")


def _print_judge(document: PlanDocument, console: Console) -> None:
    if (judge := document["judge"]) is not None:
        ranks, gpus = judge["ranks"], judge["engines"] * judge["ranks"]
        _line(
            console,
            f"judge: {judge['engines']} engines of its own, tensor {ranks}, on {gpus} GPUs of their own, "
            f"{_gib(judge['weights'])} GiB of weights on each: {judge['model']}",
        )


def _print_checkpoint(checkpoint: PlannedCheckpoint, console: Console) -> None:
    size, seconds = _size(checkpoint["bytes"]), checkpoint["seconds"]
    rate = f"{checkpoint['bytes_per_s'] / 1e9:g} GB/s (cluster.file_system_bytes_per_s)"
    if not checkpoint["every"]:
        _line(console, f"checkpoints: none is written (checkpoint.every: 0); one would have {size}")
        return
    timeout = f"{checkpoint['timeout_s']:,.0f} s (checkpoint.timeout_s)"
    verdict = f"of {timeout}" if checkpoint["in_time"] else f"GIVEN UP after {timeout}"
    _line(
        console,
        f"checkpoints: {size} every {checkpoint['every']} steps, {seconds:,.0f} s at {rate}, {verdict}; "
        f"{_size(checkpoint['kept_bytes'])} are kept",
    )
    if share := checkpoint["share_bytes"]:
        _line(
            console,
            f"checkpoints on disks of nodes (checkpoint.local_dir): {_size(share)} for each rank, as much "
            f"for its copy, {_size(checkpoint['node_bytes'])} for each rank of a node at most",
        )
    if pinned := checkpoint["pinned_bytes"]:
        _line(console, f"snapshots for checkpoints: {_size(pinned)} of host memory for each trainer rank")


def _print_publication(publication: PlannedPublication | None, console: Console) -> None:
    if publication is None:
        return
    link = f"{_size(publication['bytes'])} on the fullest link at {publication['bytes_per_s'] / 1e9:g} GB/s"
    before = f"{publication['prepare_s']:.3g} s, then " if publication["prepare_s"] else ""
    pause = f"a pause of {publication['pause_s']:.3g} s"
    _line(console, f"publication by {publication['transport']}: {before}{pause}, {link}")


def _print_pace(planned: Planned, advice: SplitAdvice, console: Console) -> None:
    """Print how long a step takes on the recipe's split, and how many pass while a checkpoint is written."""
    outcome = next((run.outcome for run in advice.runs if run.layout == advice.recipe), None)
    every = planned.checkpoint.settings.every
    if outcome is None or not outcome.steps:
        return
    step_s = outcome.makespan_s / outcome.steps
    text = f"a step of the recipe's split takes {step_s:,.0f} s"
    if every:
        steps = planned.checkpoint.steps(step_s)
        text += f"; a checkpoint is written during {steps} of the {every} steps until the next one"
        if steps > every:
            text += ", which is LATE"
    _line(console, text)


Sizes = dict[str, int | None]
"""Bytes by the name of a column."""

COLUMNS = (
    "weights",
    "gradients",
    "optimizer",
    "critic",
    "activations",
    "work",
    "scoring model",
    "KV cache",
    "transfer",
    "runtime",
    "in all",
)


def _of_trainer(stage: StageMemory) -> Sizes:
    return {
        "weights": stage.weights,
        "gradients": stage.gradients,
        "optimizer": stage.optimizer,
        "critic": stage.critic,
        "activations": stage.activations,
        "work": stage.work,
        "scoring model": stage.frozen,
        "transfer": stage.transfer,
        "runtime": stage.runtime,
        "in all": stage.peak,
    }


def _of_engine(engine: EngineMemory, *, shares: bool) -> Sizes:
    """Return the sizes of an engine rank; its transfer takes place in the memory that SGLang leaves free.

    shares: a trainer at work has that memory, and it is no part of the engine's.
    """
    pool, reserved = engine.pool, 0 if shares else engine.reserved
    return {
        "weights": engine.weights,
        "KV cache": None if pool is None else max(pool, 0),
        "transfer": engine.transfer,
        "runtime": None if shares else reserved,
        "in all": None if pool is None else engine.weights + max(pool, 0) + reserved,
    }


def _verdict(peak: int, gpu: int) -> str:
    return "fits" if peak <= gpu else "DOES NOT FIT"


def _print_cache(config: RunConfig, engine: EngineMemory, gpu: int | None, console: Console) -> None:
    """Print what the KV cache of an engine holds, and what the recipe asks of it."""
    rollout = config.rollout
    requests = -(-rollout.max_concurrent // rollout.engine.count)
    running = rollout.engine.args.get("max_running_requests")
    requests = min(requests, running) if isinstance(running, int) else requests
    _line(console, f"engines: {engine.token / 1024:,.1f} KiB of KV cache per token and rank")
    if engine.tokens == 0 and gpu is not None:
        weights = f"{_gib(engine.weights)} GiB of weights on a GPU of {_gib(gpu)} GiB"
        _line(console, f"engines: DO NOT FIT: {weights}")
    elif engine.tokens is not None:
        _line(
            console,
            f"engines: {engine.tokens:,} tokens in the cache of each, {engine.tokens // max(requests, 1):,} "
            f"for each of {requests:,} running requests; a completion has at most "
            f"{rollout.sampling.max_new_tokens:,}",
        )
    if rollout.engine.gpu_share is not None:
        share = f"{rollout.engine.gpu_share:.0%}"
        _line(console, f"engines and trainer work at the same time: engines have {share} of a GPU's memory")
    elif rollout.engine.colocated:
        _line(
            console,
            "engines and trainer take turns: each has the GPU's memory while the other rests; both have "
            "weights while a version is published",
        )


def _print_split(advice: SplitAdvice, console: Console) -> None:
    """Print the simulated splits and the cost model they rest on."""

    def remark(run: SimulatedRun) -> str:
        marks = ["the recipe's"] * (run.layout == advice.recipe) + ["fastest"] * (run is advice.best)
        return ", ".join(marks) if run.outcome else "does not get through"

    def share(name: str) -> Callable[[SimulatedRun], str]:
        return lambda run: f"{getattr(run.outcome, name):.0%}" if run.outcome else "-"

    columns = {
        "GPUs that train": lambda run: run.layout.trainer_gpus,
        "generate": lambda run: run.layout.engine_gpus,
        "tokens/s": lambda run: f"{run.tokens_per_s:,.0f}",
        "trainer idle": share("trainer_idle"),
        "engines idle": share("engine_idle"),
        "": remark,
    }
    title = f"split of {advice.recipe.gpus} GPUs, {advice.steps} simulated steps after the first ones"
    console.print(rows_table(title, advice.runs, columns))
    for line in advice.costs:
        _line(console, f"  {line}")


def _print_environment(document: PlanDocument, console: Console) -> None:
    """Print the variables that both sides must agree on, or that either needs."""
    for side in ("trainer", "engines"):
        settings = [
            f"{variable['name']}={variable['value']}"
            for variable in document["environment"]
            if side in variable["processes"]
        ]
        if settings:
            _line(console, f"environment of {side} on GPUs: {' '.join(settings)}")


def _print_weights(planned: Planned, document: PlanDocument, console: Console) -> None:
    config, plan = planned.config, planned.export
    if config.weights.transport.type == "shards":
        _line(
            console,
            f"\n{_size(document['bytes'])} of every version go from the trainer's shards straight "
            "into the parameters of each engine",
        )
    _line(
        console,
        f"\n{_size(document['bytes'])} of HF tensors leave through rank {SENDER} in {len(plan.buckets)} "
        f"buckets, at most {bucket_mb(config.weights.transport)} MB each unless a tensor is larger",
    )
    rows: list[tuple[object, ...]] = [
        (
            number,
            len(bucket["tensors"]),
            _size(bucket["bytes"]),
            next(iter(bucket["tensors"])),
            _ranges(bucket["bytes_from_rank"]),
        )
        for number, bucket in enumerate(document["buckets"])
    ]
    if len(rows) > 2 * SHOWN:
        rows[SHOWN:-SHOWN] = [("...", "", "", "", "")]
    names = ("bucket", "tensors", "size", "first tensor", "from ranks")
    columns = {name: itemgetter(number) for number, name in enumerate(names)}
    console.print(rows_table("export plan", rows, columns, left=("first tensor", "from ranks")))
    sent = ", ".join(f"{rank}: {_size(size)}" for rank, size in document["bytes_from_rank"].items())
    _line(console, f"sent by rank: {sent}")


def _line(console: Console, text: str) -> None:
    """Print a line as it is, however wide the console is."""
    console.print(text, markup=False, soft_wrap=True)


def _gib(bytes_: int | None) -> str:
    return "" if bytes_ is None else f"{bytes_ / GIB:.1f}"


def _size(bytes_: int) -> str:
    if bytes_ >= 1e12:
        return f"{bytes_ / 1e12:.2f} TB"
    return f"{bytes_ / 1e9:.2f} GB" if bytes_ >= 1e9 else f"{bytes_ / 1e6:.1f} MB"


def _ranges(ranks: Iterable[int]) -> str:
    """
    >>> _ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    ranges: list[tuple[int, int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
