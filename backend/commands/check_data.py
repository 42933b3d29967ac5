"""What is wrong with a recipe's tokenizer, chat templates and data: every row is read, and none is kept."""

from slipstream.backend.driver.data_checks import data_problems, example_checks, template_problems
from slipstream.backend.driver.inputs import prompt_sets, read_tokenizer, tokenizer_problems
from slipstream.backend.driver.sft import COLUMNS
from slipstream.bridge.families import model_spec
from slipstream.bridge.model.spec import ModelSpec
from slipstream.configs.schema import RunConfig
from slipstream.configs.supervised import Supervised
from slipstream.rollout import plugins
from slipstream.rollout.tokenizer import HfTokenizer


def input_problems(config: RunConfig, supervised: Supervised | None = None) -> list[str]:
    """Return what is wrong with the tokenizer and with each row of the recipe's data.

    Files that ``prepare`` has yet to make are not looked at. ``supervised``: the recipe of ``slipstream
    sft``.
    """
    spec = _spec(config)
    tokenizer, problems = _tokenizer(config, spec)
    context = None if spec is None else spec.geometry.max_positions
    if supervised is not None:
        if tokenizer is not None:
            problems += [f"model.path: {reason}" for reason in template_problems(tokenizer)]
        if config.data is not None and config.data.path.exists():
            checks = example_checks(tokenizer, context, COLUMNS[supervised.learn])
            problems += data_problems("data.path", config.data.path, checks)
        return problems
    if tokenizer is not None:
        problems += tokenizer_problems(config, tokenizer)
    for each in prompt_sets(config):
        if each.path.exists():
            problems += data_problems(each.setting, each.path, each.checks(tokenizer, context))
    return problems


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
        return read_tokenizer(config.model.path, spec), []
    except (ValueError, OSError) as error:
        return None, [f"model.path: {error}"]
