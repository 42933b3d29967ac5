"""Checks a recipe's tokenizer, chat templates and data: every row is read, and none is kept in memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.backend.commands.check_tokenizer import tokenizer_findings
from slipstream.backend.commands.prompt_survey import Survey
from slipstream.backend.driver.modes.sft import checked_examples, reward_model_problems
from slipstream.backend.driver.start.data_checks import template_problems, writes_prompts
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
from slipstream.rollout.prompts import Example
from slipstream.rollout.system import plugins
from slipstream.rollout.tokens.tokenizer import HfTokenizer


@dataclass
class CheckedInputs:
    """What is known of a recipe's tokenizer and data."""

    problems: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    training: list[Survey] = field(default_factory=list[Survey])
    held_out: list[Survey] = field(default_factory=list[Survey])

    @property
    def surveys(self) -> list[Survey]:
        return [*self.training, *self.held_out]

    def warnings(self) -> Iterator[str]:
        """Yield what is probably not meant, each with its setting."""
        for survey in self.surveys:
            yield from (f"{survey.setting}: {reason}" for reason in survey.warnings())
        for survey in self.held_out:
            yield from (f"{survey.setting}: {reason}" for reason in survey.shared_with(self.training))


def check_inputs(config: RunConfig, supervised: Supervised | None = None) -> CheckedInputs:
    """Read a recipe's tokenizer and each row of its data.

    Files that ``prepare`` has yet to make are not looked at. ``supervised``: the recipe of ``slipstream
    sft``.
    """
    checked = CheckedInputs()
    spec = _spec(config)
    tokenizer, checked.problems = _tokenizer(config, spec)
    if tokenizer is not None:
        args = config.rollout.engine.args if supervised is None else None
        problems, notes = tokenizer_findings(config.model.path, tokenizer, args)
        checked.problems += problems
        checked.notes += notes
    positions = None if spec is None else spec.geometry.max_positions
    if supervised is not None:
        _check_examples(supervised, spec, tokenizer, positions, checked)
        return checked
    if tokenizer is not None:
        checked.problems += tokenizer_problems(config, tokenizer)
    context = positions and served_length(positions, config.rollout.engine.args)
    for each in named_files(config):
        if _is_there(each.file.path):
            writes, reward = writes_prompts(config), config.rollout.reward
            survey = Survey(each.file.setting, tokenizer, reward, writes_prompts=writes)
            problems, notes = data_problems(each, tokenizer, context, survey.see)
            checked.problems += problems
            checked.notes += notes
            if not problems:
                is_training = each.file.setting.startswith("data.")
                (checked.training if is_training else checked.held_out).append(survey)
    return checked


def _check_examples(
    supervised: Supervised,
    spec: ModelSpec | None,
    tokenizer: HfTokenizer | None,
    positions: int | None,
    checked: CheckedInputs,
) -> None:
    if spec is not None:
        checked.problems += reward_model_problems(supervised, spec)
    if tokenizer is not None:
        checked.problems += [f"model.path: {reason}" for reason in template_problems(tokenizer)]
    if not all(_is_there(file.path) for file in supervised.run.training_files):
        return
    survey = Survey("data.path", tokenizer, None)

    def seen(examples: Iterable[Example]) -> Iterator[Example]:
        for example in examples:
            survey.see(example.prompt, example.targets)
            yield example

    problems = problems_in("data.path", seen(checked_examples(supervised, tokenizer, positions)))
    checked.problems += problems
    if not problems:
        checked.training.append(survey)


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
