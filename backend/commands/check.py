"""``slipstream check``: everything that is wrong with a recipe and its models, before anything is started."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.memory.activations import Kernels
from slipstream.backend.memory.checkpoint_size import CheckpointPlan, checkpoint_bytes
from slipstream.backend.memory.engine_memory import EngineMemory, engine_memory
from slipstream.backend.memory.trainer_memory import RUNTIME, StageMemory, tokens_of, trainer_memory
from slipstream.backend.memory.verdict import GIB, judge_misfits, late_checkpoints, misfits
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.model.layout import UnevenSplit
from slipstream.bridge.shards.plan import ExportPlan
from slipstream.configs.document import read_document
from slipstream.configs.installed import untested_notes
from slipstream.configs.installed.environment import has_gpus
from slipstream.configs.load import load_recipe, load_supervised
from slipstream.configs.published import shipped_config
from slipstream.configs.rules.models import MODELS
from slipstream.configs.schema import RunConfig
from slipstream.configs.supervised import Supervised
from slipstream.rollout.compat.hooks import hook_problems
from slipstream.rollout.system import plugins

NO_INPUTS = "slipstream.backend.simulate.only_simulated"
"""Stands for a ``prepare``, which excuses missing models and prompts."""


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
    return load_recipe(Path(recipe), [*overrides, *_excused(model_config)])


def read_supervised(recipe: str, overrides: Sequence[str], *, model_config: Path | None = None) -> Supervised:
    """Load a recipe of ``slipstream sft``. Errors and ``model_config``: as of ``read_recipe``."""
    return load_supervised(Path(recipe), [*overrides, *_excused(model_config)])


def shipped_model(recipe: str, overrides: Sequence[str]) -> Path | None:
    """Return the config.json that ships for a recipe's model, if the model is not on this machine."""
    model = (read_document(Path(recipe), overrides).data or {}).get("model")
    path = cast("dict[str, object]", model).get("path") if isinstance(model, dict) else None
    if not isinstance(path, str) or (Path(path) / "config.json").exists():
        return None
    return shipped_config(Path(path))


def _excused(model_config: Path | None) -> list[str]:
    return [] if model_config is None else _without_inputs(model_config)


def _without_inputs(model_config: Path) -> list[str]:
    """Return overrides that name a folder with a config.json as the model, and excuse missing prompts."""
    folder = model_config if model_config.is_dir() else model_config.parent
    file = folder / "config.json"
    if model_config not in (folder, file) or not file.is_file():
        raise WrongInput(f"--model-config {model_config}: expected a config.json, or a folder with one")
    return [f"model.path={json.dumps(str(folder))}", f"prepare={NO_INPUTS}"]


def check(config: RunConfig, *, weights: bool = True, supervised: Supervised | None = None) -> list[str]:
    """Compare everything that a recipe names with the recipe, with each other and with this machine.

    Its models must fit its layout, their files and the memory of the GPUs, its tokenizer and chat template
    its data, every row of which is read, and the code that it names must have the shape that it is asked for.
    Return notes for the user. Raises WrongInput with everything that is wrong. What ``prepare`` has yet to
    make is not checked. weights: compare the tensors in the checkpoints too. supervised: the recipe is this
    one of ``slipstream sft``.
    """
    from slipstream.backend.commands.check_data import input_problems
    from slipstream.backend.commands.machine import fp8_problems_of, host_facts, machine_problems
    from slipstream.backend.commands.program_checks import program_problems
    from slipstream.backend.driver.start.engine_model import checkpoint_notes, engine_problems
    from slipstream.backend.driver.start.inputs import (
        adapter_problems,
        checkpoint_problems,
        cpu_engine_problems,
        judge_model_problems,
    )
    from slipstream.backend.driver.start.plugin_process import imported_plugin_problems

    notes = untested_notes(config)
    problems = [*imported_plugin_problems(config), *hook_problems(config), *judge_model_problems(config)]
    if (config.model.path / "config.json").exists():
        try:
            plan = planned(config, supervised=supervised is not None)
            notes += late_checkpoints(plan.checkpoint)
            notes += checkpoint_notes(config, plan.export.spec, has_engines=supervised is None)
            if supervised is None:
                problems += engine_problems(config, plan.export.spec)
            problems += adapter_problems(config, plan.export.spec)
            problems += misfits(plan.stages, plan.engine, config.rollout.engine.ranks, plan.gpu_memory)
            problems += judge_misfits(config.judge, plan.gpu_memory)
            problems += program_problems(config, has_engines=supervised is None)
        except WrongInput as error:
            problems.append(str(error))
        if supervised is None:
            problems += cpu_engine_problems(config)
        if weights:
            problems += checkpoint_problems(config, MODELS)
    if weights:
        wrong, more = input_problems(config, supervised)
        problems, notes = problems + wrong, notes + more
        problems += machine_problems(config, host_facts())
    problems += fp8_problems_of(config, on_gpus=_on_gpus(config))
    if problems:
        raise WrongInput("\n".join(dict.fromkeys(problems)))
    return notes


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
        export = export_plan(actor, dtype, transport, spec, layers=layers)
        stages = trainer_memory(
            actor,
            config.critic,
            dtype,
            export,
            tokens_of(actor, config.rollout.sampling.max_new_tokens),
            kernels,
            quantizes=engine.quantization is not None,
            runtime=RUNTIME if on_gpus else 0,
        )
        memory = None if supervised else engine_memory(engine, transport, dtype, spec, _gpu_memory(config))
        size = checkpoint_bytes(actor, config.critic, dtype, spec)
        written_per_s = config.cluster.file_system_bytes_per_s
        checkpoint = CheckpointPlan(size, written_per_s, config.checkpoint)
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
