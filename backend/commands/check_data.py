"""Checks a recipe's tokenizer, chat templates and data: every row is read, and none is kept in memory."""

from pathlib import Path

from slipstream.backend.driver.modes.sft import checked_examples, reward_model_problems
from slipstream.backend.driver.start.data_checks import template_problems
from slipstream.backend.driver.start.inputs import (
    data_problems,
    named_files,
    problems_in,
    read_tokenizer,
    tokenizer_problems,
)
from slipstream.bridge.families import model_spec
from slipstream.bridge.model.spec import ModelSpec
from slipstream.configs.schema import RunConfig, is_on_hub
from slipstream.configs.supervised import Supervised
from slipstream.rollout.engine.context import served_length
from slipstream.rollout.system import plugins
from slipstream.rollout.tokens.tokenizer import HfTokenizer


def input_problems(config: RunConfig, supervised: Supervised | None = None) -> tuple[list[str], list[str]]:
    """Return what is wrong with the tokenizer and with each row of the recipe's data, and notes for the user.

    Files that ``prepare`` has yet to make are not looked at. ``supervised``: the recipe of ``slipstream
    sft``.
    """
    notes: list[str] = []
    spec = _spec(config)
    tokenizer, problems = _tokenizer(config, spec)
    positions = None if spec is None else spec.geometry.max_positions
    if supervised is not None:
        if spec is not None:
            problems += reward_model_problems(supervised, spec)
        if tokenizer is not None:
            problems += [f"model.path: {reason}" for reason in template_problems(tokenizer)]
        if all(_is_there(file.path) for file in config.training_files):
            problems += problems_in("data.path", checked_examples(supervised, tokenizer, positions))
        return problems, notes
    if tokenizer is not None:
        problems += tokenizer_problems(config, tokenizer)
    context = positions and served_length(positions, config.rollout.engine.args)
    for each in named_files(config):
        if _is_there(each.file.path):
            found, said = data_problems(each, tokenizer, context)
            problems, notes = problems + found, notes + said
    return problems, notes


def _is_there(path: Path) -> bool:
    return is_on_hub(path) or path.exists() or any(path.parent.glob(path.name))


def _spec(config: RunConfig) -> ModelSpec | None:
    """Return the model, or None if something is wrong with it, which is said elsewhere."""
    if not (config.model.path / "config.json").exists():
        return None
    try:
        return model_spec(config.model.path, plugins.resolved(config.model.families))
    except Exception:  # also of a family of the user's
        return None


def _tokenizer(config: RunConfig, spec: ModelSpec | None) -> tuple[HfTokenizer | None, list[str]]:
    if not (config.model.path / "config.json").exists():
        return None, []
    try:
        return read_tokenizer(config.model, spec), []
    except (ValueError, OSError) as error:
        return None, [f"model.path: {error}"]
