"""``slipstream check``: everything that is wrong with a recipe and its models, before anything is started."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.memory.activations import Kernels
from slipstream.backend.memory.engine import EngineMemory, engine_memory
from slipstream.backend.memory.trainer import RUNTIME, StageMemory, trainer_memory
from slipstream.backend.memory.verdict import GIB, judge_misfits, misfits
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.model.layout import UnevenSplit
from slipstream.bridge.shards.plan import ExportPlan
from slipstream.configs.installed.environment import has_gpus
from slipstream.configs.load import load_recipe, load_supervised
from slipstream.configs.rules.models import MODELS
from slipstream.configs.schema import RunConfig
from slipstream.rollout.compat.slime.checking import hook_problems

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
    if model_config is not None:
        overrides = [*overrides, *_without_inputs(model_config)]
    if supervised:
        return load_supervised(Path(recipe), overrides).run
    return load_recipe(Path(recipe), overrides)


def _without_inputs(model_config: Path) -> list[str]:
    """Return overrides that name a folder with a config.json as the model, and excuse missing prompts."""
    folder = model_config if model_config.is_dir() else model_config.parent
    file = folder / "config.json"
    if model_config not in (folder, file) or not file.is_file():
        raise WrongInput(f"--model-config {model_config}: expected a config.json, or a folder with one")
    return [f"model.path={json.dumps(str(folder))}", f"prepare={NO_INPUTS}"]


def check(config: RunConfig, *, weights: bool = True, supervised: bool = False) -> None:
    """Compare the models of a recipe with its layout, with their files and with the memory of the GPUs, and
    its hooks with their signatures.

    The code that it names must have the shape that it is asked for, and take the arguments. Raises WrongInput
    with everything that is wrong. A model that ``prepare`` has yet to make is not checked. weights: compare
    the tensors in the checkpoints too.
    """
    from slipstream.backend.driver.inputs import checkpoint_problems, judge_model_problems, plugin_problems

    problems = [*plugin_problems(config), *hook_problems(config), *judge_model_problems(config)]
    if (config.model.path / "config.json").exists():
        try:
            plan = planned(config, supervised=supervised)
            problems += misfits(config, plan.stages, plan.engine, plan.gpu_memory)
            problems += judge_misfits(config, plan.gpu_memory)
        except WrongInput as error:
            problems.append(str(error))
        if weights:
            problems += checkpoint_problems(config, MODELS)
    if problems:
        raise WrongInput("\n".join(problems))


def planned(config: RunConfig, *, supervised: bool = False) -> Planned:
    """Return the plan of a recipe. Needs the model's config.json, no weights.

    Raises WrongInput when the model is not supported or the layout does not fit it.
    """
    from slipstream.backend.megatron.export_plan import export_plan
    from slipstream.backend.megatron.layer_spec import layer_spec_on_gpus

    on_gpus = _on_gpus(config)
    # A login node has no GPUs, but the recipe is for machines that have.
    for_gpus = config.cluster.device == "gpu"
    layers = layer_spec_on_gpus(config.actor, config.model.dtype) if for_gpus else None
    kernels: Kernels = "fused" if on_gpus else "plain"
    try:
        spec = model_spec(config.model.path)
        export = export_plan(config, spec, layers=layers)
        stages = trainer_memory(config, export, kernels, runtime=RUNTIME if on_gpus else 0)
        engine = None if supervised else engine_memory(config, spec, _gpu_memory(config))
        return Planned(config, export, stages, engine)
    except UnsupportedModel as error:
        raise WrongInput(f"model.path: {error}") from None
    except UnevenSplit as error:
        raise WrongInput(f"actor.parallel: {error}") from None


def _on_gpus(config: RunConfig) -> bool:
    if config.cluster.device == "auto":
        return has_gpus()
    return config.cluster.device == "gpu"


def _gpu_memory(config: RunConfig) -> int | None:
    memory = config.cluster.gpu_memory_gib
    return round(memory * GIB) if memory is not None and config.cluster.device != "cpu" else None
