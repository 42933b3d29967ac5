"""``slipstream check``: everything that is wrong with a recipe and its models, before anything is started."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.memory.activations import Kernels
from slipstream.backend.memory.engine_memory import EngineMemory, engine_memory
from slipstream.backend.memory.trainer_memory import (
    StageMemory,
    buckets_at_once,
    runtime_of,
    tokens_of,
    trainer_memory,
)
from slipstream.backend.memory.verdict import (
    GIB,
    CheckpointPlan,
    checkpoint_bytes,
    judge_misfits,
    late_checkpoints,
    misfits,
    share_bytes,
)
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.model.layout import UnevenSplit
from slipstream.bridge.shards.plan import ExportPlan
from slipstream.configs.document import read_document
from slipstream.configs.installed import untested_notes
from slipstream.configs.installed.environment import has_gpus
from slipstream.configs.load import load_recipe, load_site, load_supervised, site_file
from slipstream.configs.published import shipped_config
from slipstream.configs.rules.inputs import NO_INPUTS
from slipstream.configs.rules.models import MODELS
from slipstream.configs.schema import RunConfig, hub_model, is_on_hub, path_text
from slipstream.configs.schema.cluster import LocalCluster, SiteConfig
from slipstream.configs.schema.live import live_places
from slipstream.configs.supervised import Supervised
from slipstream.configs.violations import RecipeError
from slipstream.rollout.compat.hooks import hook_problems
from slipstream.rollout.system import plugins
from slipstream.rollout.system.hub import HubError, model_files

if TYPE_CHECKING:
    from slipstream.backend.commands.prompt_survey import Survey


@dataclass(frozen=True)
class Planned:
    """A recipe's layout, the order in which its weights leave the trainer, and the memory of every rank."""

    config: RunConfig
    export: ExportPlan
    stages: list[StageMemory]
    engine: EngineMemory | None
    """None for supervised training, which has no engines."""
    checkpoint: CheckpointPlan

    @property
    def gpu_memory(self) -> int | None:
        """Bytes of a GPU's memory; None if it is not known or there are no GPUs."""
        return _gpu_memory(self.config)


def read_recipe(
    recipe: str, overrides: Sequence[str], *, model_config: Path | None = None, supervised: bool = False
) -> RunConfig:
    """Load a recipe. Raises RecipeError, and WrongInput for a ``model_config`` that is no config.json.

    model_config: the model's config.json, or its folder, on a machine that has neither model nor prompts.
    supervised: the recipe is one of ``slipstream sft``.
    """
    if supervised:
        return read_supervised(recipe, overrides, model_config=model_config).run
    return load_recipe(Path(recipe), [*overrides, *_excused(model_config)], _machines(recipe, overrides))


def read_supervised(recipe: str, overrides: Sequence[str], *, model_config: Path | None = None) -> Supervised:
    """Load a recipe of ``slipstream sft``. Errors and ``model_config``: as of ``read_recipe``."""
    return load_supervised(Path(recipe), [*overrides, *_excused(model_config)], _machines(recipe, overrides))


def _machines(recipe: str, overrides: Sequence[str]) -> dict[str, object]:
    """Return what the site's file says of its machines, for a cluster of any type. Raises RecipeError."""
    file = site_file(os.environ)
    shared = SiteConfig.model_fields.keys() & LocalCluster.model_fields.keys()
    found = {name: value for name, value in (load_site(file) if file else {}).items() if name in shared}
    named = (read_document(Path(recipe), overrides).data or {}).get("cluster")
    return found if named or not found else {"type": "local", **found}


def shipped_model(recipe: str, overrides: Sequence[str]) -> Path | None:
    """Return the config.json that ships for a recipe's model, if the model is not on this machine."""
    path = _named_model(recipe, overrides)
    if path is None or (path / "config.json").exists() or _is_cached(path):
        return None
    return shipped_config(path)


def _named_model(recipe: str, overrides: Sequence[str]) -> Path | None:
    model = (read_document(Path(recipe), overrides).data or {}).get("model")
    path = cast("dict[str, object]", model).get("path") if isinstance(model, dict) else None
    return Path(path) if isinstance(path, str) else None


def _is_cached(model: Path) -> bool:
    """True if all files of a model of the hub are in its cache on this machine."""
    try:
        return is_on_hub(model) and model_files(path_text(model), cached=True).is_dir()
    except HubError:
        return False


def read_plannable(
    recipe: str, overrides: Sequence[str], *, model_config: Path | None, supervised: bool
) -> tuple[RunConfig, list[str]]:
    """Load a recipe as ``read_recipe`` to plan it, with what is on this machine in place of the hub's models.

    Return it with notes on what a run would download. Raises WrongInput without a config.json of the policy.
    """
    from slipstream.backend.driver.start.hub_models import WILL_DOWNLOAD, cached_models
    from slipstream.backend.driver.start.inputs import InputError

    shipped = shipped_model(recipe, overrides) if model_config is None else None
    config = read_recipe(recipe, overrides, model_config=model_config or shipped, supervised=supervised)
    try:
        config, notes = cached_models(config)
    except InputError as error:
        raise WrongInput(str(error)) from None
    named = _named_model(recipe, overrides)
    if shipped is not None and named is not None and is_on_hub(named):
        notes.insert(0, f"model.path: {path_text(named)} {WILL_DOWNLOAD}")
    if is_on_hub(config.model.path):
        repository, _ = hub_model(config.model.path) or ("", None)
        raise WrongInput(
            f"model.path: {path_text(config.model.path)} {WILL_DOWNLOAD}; a plan needs its config.json: hf "
            f"download {repository} config.json --local-dir FOLDER, then --model-config FOLDER"
        )
    if config.prepare is not None and not (config.model.path / "config.json").exists():
        raise WrongInput(
            f"model.path: {config.model.path} has not been made yet, and a plan needs its config.json: "
            f"`slipstream try {recipe}` has `prepare` make it; or name another one with --model-config PATH"
        )
    return config, notes


def _excused(model_config: Path | None) -> list[str]:
    return [] if model_config is None else _without_inputs(model_config)


def _without_inputs(model_config: Path) -> list[str]:
    """Return overrides that name a folder with a config.json as the model, and excuse missing prompts."""
    folder = model_config if model_config.is_dir() else model_config.parent
    file = folder / "config.json"
    if model_config not in (folder, file) or not file.is_file():
        raise WrongInput(f"--model-config {model_config}: expected a config.json, or a folder with one")
    return [f"model.path={json.dumps(str(folder))}", f"prepare={NO_INPUTS}"]


@dataclass
class Findings:
    """What ``check`` has found in a recipe that nothing is wrong with."""

    report: list[str] = field(default_factory=list[str])
    """What will run."""
    notes: list[str] = field(default_factory=list[str])
    """What the user may not know."""
    warnings: list[str] = field(default_factory=list[str])
    """What is probably not meant."""


def check(config: RunConfig, *, weights: bool = True, supervised: Supervised | None = None) -> Findings:
    """Compare everything that a recipe names with the recipe, with each other and with this machine.

    Its models must fit its layout, their files and the memory of the GPUs, its tokenizer and chat template
    its data, every row of which is read, and the code that it names must have the shape that it is asked for.
    Raises WrongInput with everything that is wrong. What ``prepare`` has yet to make is not checked. weights:
    compare the tensors in the checkpoints too. supervised: the recipe is this one of ``slipstream sft``.
    """
    findings, problems = _found(config, weights=weights, supervised=supervised)
    if problems:
        raise WrongInput("\n".join(problems))
    return findings


def further_problems(error: RecipeError) -> list[str]:
    """Return what ``check`` finds wrong with a recipe beyond its settings, which are wrong as well."""
    if error.config is None:
        return []
    try:
        _, problems = _found(error.config)
    except Exception:  # what is wrong with the settings is told, and may well be the reason
        return []
    told = {violation.path for violation in error.violations} | error.unsure
    settings = [re.split(r"[^\w.]", problem, maxsplit=1)[0] for problem in problems]
    return [
        problem
        for problem, setting in zip(problems, settings, strict=True)
        if not any(
            f"{setting}.".startswith(f"{path}.") or f"{path}.".startswith(f"{setting}.") for path in told
        )
    ]


def _found(
    config: RunConfig, *, weights: bool = True, supervised: Supervised | None = None
) -> tuple[Findings, list[str]]:
    """Return what ``check`` finds, and everything that is wrong."""
    from slipstream.backend.commands.check_data import check_inputs
    from slipstream.backend.commands.machine import fp8_problems_of, host_facts, machine_problems
    from slipstream.backend.commands.program_checks import program_answers
    from slipstream.backend.driver.start.engine_model import (
        checkpoint_notes,
        engine_problems,
        sampling_problems,
    )
    from slipstream.backend.driver.start.hub_models import cached_models
    from slipstream.backend.driver.start.inputs import (
        InputError,
        adapter_problems,
        checkpoint_problems,
        cpu_engine_problems,
        judge_model_problems,
    )
    from slipstream.backend.driver.start.plugin_process import imported_plugin_problems
    from slipstream.backend.monitor.trackers.opened import missing_packages

    findings = Findings(notes=untested_notes(config))
    problems, named = list[str](), config
    try:
        config, downloads = cached_models(config)
        findings.notes += downloads
    except InputError as error:
        problems += str(error).splitlines()
    if supervised is not None and config is not named:
        supervised = replace(supervised, run=config)
    problems += [*imported_plugin_problems(config), *hook_problems(config), *judge_model_problems(config)]
    problems += missing_packages(config.log)
    if (config.model.path / "config.json").exists():
        try:
            plan = planned(config, supervised=supervised is not None)
            findings.report += _of_plan(plan)
            findings.notes += late_checkpoints(plan.checkpoint)
            findings.notes += checkpoint_notes(config, plan.export.spec, has_engines=supervised is None)
            if supervised is None:
                problems += engine_problems(config, plan.export.spec)
                problems += sampling_problems(config, plan.export.spec.geometry.vocab)
            problems += adapter_problems(config, plan.export.spec)
            problems += misfits(plan.stages, plan.engine, config.rollout.engine, plan.gpu_memory)
            problems += judge_misfits(config.judge, plan.gpu_memory)
            against, silent = program_answers(config, has_engines=supervised is None)
            problems += against
            findings.notes += silent
        except WrongInput as error:
            problems.append(str(error))
        if supervised is None:
            problems += cpu_engine_problems(config)
        if weights:
            problems += checkpoint_problems(config, MODELS)
    elif config.prepare is not None and config.prepare.path != NO_INPUTS:
        findings.notes.append(
            f"model.path: `prepare` has yet to make {config.model.path}: what depends on the model and its "
            "tokenizer is checked after `slipstream try`"
        )
    if weights:
        checked = check_inputs(config, supervised)
        problems += checked.problems
        findings.notes += checked.notes
        if not problems:
            findings.warnings += [*checked.warnings(), *_few_prompts(config, checked.training)]
            findings.report += [survey.report() for survey in checked.surveys]
            findings.report += _passes(config, checked.training)
        problems += machine_problems(config, host_facts())
    problems += fp8_problems_of(config, on_gpus=_on_gpus(config))
    return findings, list(dict.fromkeys(problems))


def _of_plan(plan: Planned) -> Iterator[str]:
    """Yield lines about the model, its layout and its memory."""
    config, spec, parallel = plan.config, plan.export.spec, plan.config.actor.parallel
    parameters = sum(bucket.numel for bucket in plan.export.buckets)
    name = f"{spec.geometry.family}, {parameters:,} parameters, {config.model.dtype}"
    yield f"model: {name}: {config.model.path}"
    ranks = plan.export.layout.world_size
    sizes = {name: getattr(parallel, name) for name in ("tensor", "context", "pipeline", "data", "expert")}
    ways = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    trainer = f"{ranks} trainer rank{'s' * (ranks > 1)}{f' ({ways})' if ways else ''}"
    engines = config.rollout.engine
    if plan.engine is None:
        yield f"layout: {trainer}"
    else:
        each = "1 rank" if engines.ranks == 1 else f"{engines.ranks} ranks"
        shared = ", on the trainer's devices" if engines.colocated else ""
        yield (f"layout: {trainer}, {engines.count} engine{'s' * (engines.count > 1)} of {each}{shared}")
    peaks = f"{max(stage.peak for stage in plan.stages) / GIB:,.1f} GiB on the fullest trainer rank"
    if plan.engine is not None:
        peaks += f", {plan.engine.weights / GIB:,.1f} GiB of weights on a rank of an engine"
    of = "" if plan.gpu_memory is None else f"; a GPU has {plan.gpu_memory / GIB:,.0f} GiB"
    yield f"memory, estimated: {peaks}{of}"
    yield from _step_time(plan)


def _step_time(plan: Planned) -> Iterator[str]:
    """Yield how long the tokens of a step keep each side busy, by the cost model, which is one of GPUs."""
    from slipstream.backend.simulate.derived import busy_seconds
    from slipstream.backend.simulate.gpu_split import layout_of

    if plan.engine is None or not plan.engine.tokens or plan.config.cluster.device != "gpu":
        return
    training, generating = busy_seconds(plan.config, plan.export, plan.engine, layout_of(plan.config))
    yield (
        f"a step, estimated: its tokens keep the trainer busy for {training:,.0f} s and the engines for "
        f"{generating:,.0f} s; `slipstream plan` simulates both"
    )


def _few_prompts(config: RunConfig, training: Sequence["Survey"]) -> Iterator[str]:
    count, size = sum(survey.count for survey in training), config.rollout.batch_size
    if training and count < size:
        yield (
            f"{training[0].setting.partition('.')[0]}: {count:,} prompts for batches of {size:,} "
            "(batch_size): every batch holds some of them more than once"
        )


def _passes(config: RunConfig, training: Sequence["Survey"]) -> Iterator[str]:
    """Yield how often the data is trained on, where the recipe says the number of steps."""
    count, steps = sum(survey.count for survey in training), config.run.steps
    size = config.rollout.batch_size - live_places(config.live, config.rollout.batch_size)
    if count and steps is not None:
        yield f"length: {steps:,} steps of {size:,} prompts are {steps * size / count:,.2f} passes"


def planned(config: RunConfig, *, supervised: bool = False) -> Planned:
    """Return the plan of a recipe. Needs the model's config.json, no weights.

    Raises WrongInput when the model is not supported or the layout does not fit it.
    """
    from slipstream.backend.megatron.export_plan import export_plan
    from slipstream.backend.megatron.layer_spec import layer_spec_on_gpus

    on_gpus = _on_gpus(config)
    # A login node has no GPUs, but the recipe is for machines that have.
    for_gpus = config.cluster.device == "gpu"
    kernels: Kernels = "fused" if on_gpus else "plain"
    try:
        spec = model_spec(config.model.path, plugins.resolved(config.model.families))
        layers = layer_spec_on_gpus(config.actor, config.model.dtype, spec.geometry) if for_gpus else None
        actor, dtype, transport = config.actor, config.model.dtype, config.weights.transport
        engine = config.rollout.engine
        joins_engines = transport.type == "shards" and not (supervised or actor.serves_adapter)
        engines = engine.most if joins_engines else 0
        export = export_plan(actor, dtype, transport, spec, layers=layers)
        stages = trainer_memory(
            actor,
            config.critic,
            dtype,
            export,
            tokens_of(actor, config.rollout.sampling.max_new_tokens),
            kernels,
            buckets=buckets_at_once(transport, quantizes=engine.quantization is not None, on_gpus=on_gpus),
            runtime=runtime_of(actor.parallel, engines) if on_gpus else 0,
        )
        memory = None if supervised else engine_memory(engine, transport, dtype, spec, _gpu_memory(config))
        size = checkpoint_bytes(actor, config.critic, dtype, spec)
        written_per_s = config.cluster.file_system_bytes_per_s
        on_nodes = config.checkpoint.local_dir is not None
        share = share_bytes(actor, config.critic, dtype, export) if on_nodes else 0
        checkpoint = CheckpointPlan(size, written_per_s, config.checkpoint, share)
        return Planned(config, export, stages, memory, checkpoint)
    except (UnsupportedModel, plugins.PluginError) as error:
        raise WrongInput(f"model.path: {error}") from None
    except UnevenSplit as error:
        raise WrongInput(f"actor.parallel: {error}") from None
    except Exception as error:
        if not config.model.families:
            raise
        raise WrongInput(f"model.families: {plugins.raised(error)}") from None


def _on_gpus(config: RunConfig) -> bool:
    if config.cluster.device == "auto":
        return has_gpus()
    return config.cluster.device == "gpu"


def _gpu_memory(config: RunConfig) -> int | None:
    memory = config.cluster.gpu_memory_gib
    return round(memory * GIB) if memory is not None and config.cluster.device != "cpu" else None
