"""The length of a run in training steps, where a recipe gives it in passes over its data."""

from fractions import Fraction
from math import ceil

from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.live import live_places


def in_steps(config: RunConfig, prompts: int) -> RunConfig:
    """Return the recipe with ``run.steps`` in place of ``run.epochs``; as it is if it has steps.

    ``prompts``: number of prompts to train on, or of examples. A step takes ``rollout.batch_size`` of them,
    less the places of live users. The last step of the last pass may go beyond its end.
    """
    epochs = config.run.epochs
    if epochs is None:
        return config
    size = config.rollout.batch_size
    return with_steps(config, ceil(Fraction(str(epochs)) * prompts / (size - live_places(config.live, size))))


def with_steps(config: RunConfig, steps: int) -> RunConfig:
    """Return the recipe with this number of steps, whatever it has said."""
    run = config.run.model_copy(update={"steps": steps, "epochs": None})
    return config.model_copy(update={"run": run})


def length_note(epochs: float, prompts: int, steps: int, noun: str = "prompts") -> str:
    """Return a message for the user about the steps of ``run.epochs``. ``noun``: name of the data's rows."""
    passes = "1 pass" if epochs == 1 else f"{epochs:g} passes"
    return f"run.epochs: {passes} over {prompts:,} {noun} are {steps:,} steps"


def words_of_length(config: RunConfig) -> str:
    """Return the length of a run, whose data may not have been counted."""
    run = config.run
    return f"{run.epochs:g} epochs" if run.steps is None else f"{run.steps} steps"
