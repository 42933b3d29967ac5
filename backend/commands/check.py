"""``slipstream check``: everything that is wrong with a recipe and its models, before anything is started."""

from slipstream.backend.commands.outcome import WrongInput
from slipstream.bridge.families import ModelSpec, model_spec
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.model.layout import UnevenSplit
from slipstream.bridge.shards.plan import ExportPlan
from slipstream.configs.rules import MODELS
from slipstream.configs.schema import RunConfig


def check(config: RunConfig) -> None:
    """Compare the models of a recipe with its layout and with their files.

    Raises WrongInput with everything that is wrong. A model that ``prepare`` has yet to make is not checked.
    """
    if not (config.model.path / "config.json").exists():
        return
    from slipstream.backend.driver.inputs import checkpoint_problems

    planned(config)
    if problems := checkpoint_problems(config, MODELS):
        raise WrongInput("\n".join(problems))


def planned(config: RunConfig) -> tuple[ModelSpec, ExportPlan]:
    """Return the model that a recipe names, and the order in which its weights leave the trainer.

    Raises WrongInput when the model is not supported or the layout does not fit it.
    """
    from slipstream.backend.megatron.export_plan import export_plan

    try:
        spec = model_spec(config.model.path)
        return spec, export_plan(config, spec)
    except UnsupportedModel as error:
        raise WrongInput(f"model.path: {error}") from None
    except UnevenSplit as error:
        raise WrongInput(f"actor.parallel: {error}") from None
