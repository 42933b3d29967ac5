"""Reads the inputs of a run, so that everything wrong with them is found before anything is started."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from slipstream.backend.driver.data_checks import (
    prompt_checks,
    template_file_problems,
    template_problems,
    writes_prompts,
)
from slipstream.backend.driver.plugin_checks import model_of
from slipstream.backend.driver.plugin_process import imported_plugin_problems
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.hf.index import HfCheckpointError
from slipstream.bridge.model.spec import ModelSpec, value_spec
from slipstream.bridge.shards.check import check_tensors
from slipstream.configs.rules.models import CRITIC, JUDGE, OTHER_MODELS, model_folder
from slipstream.configs.schema import PluginConfig, RunConfig
from slipstream.configs.schema.judge import own_engines
from slipstream.rollout import plugins
from slipstream.rollout.compat.slime.checking import hook_problems
from slipstream.rollout.control.filters import GroupFilter
from slipstream.rollout.engine.model_limits import context_of, vocabulary_of
from slipstream.rollout.prompts import Check, PromptError, read_prompts
from slipstream.rollout.reward.loading import load_judge
from slipstream.rollout.tokenizer import HfTokenizer, load_tokenizer
from slipstream.rollout.trajectory import Prompt
from slipstream.rollout.workflow import Workflow

T = TypeVar("T")


class InputError(ValueError):
    """The inputs of a run cannot be used; the message lists every reason."""


@dataclass(frozen=True)
class Inputs:
    """Everything that a recipe names, read and constructed."""

    spec: ModelSpec
    tokenizer: HfTokenizer
    prompts: list[Prompt]
    held_out: list[Prompt]
    workflow: Workflow
    reward: object
    """The object that judges, or the function; None without prompts."""
    group_filter: GroupFilter | None


def read_inputs(config: RunConfig) -> Inputs:
    """Read and construct what the recipe names. Raises InputError with all problems at once."""
    rollout, problems = config.rollout, imported_plugin_problems(config)

    def attempt(name: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (UnsupportedModel, PromptError, plugins.PluginError, OSError, ValueError) as error:
            problems.extend(f"{name}: {line}" for line in str(error).splitlines())
        except Exception as error:  # code of the user's
            problems.append(f"{name}: {plugins.raised(error)}")
        return None

    def plugin(name: str, settings: PluginConfig | None) -> object:
        return attempt(name, lambda: plugins.build(settings)) if settings is not None else None

    workflow = reward = group_filter = None
    if not problems:  # what cannot be imported is not tried again here
        workflow = plugin("rollout.workflow", rollout.workflow)
        reward = attempt("rollout.reward", lambda: _reward(config))
        group_filter = plugin("rollout.group_filter", rollout.group_filter)
    spec = attempt(
        "model.path", lambda: model_spec(config.model.path, plugins.resolved(config.model.families))
    )
    tokenizer = attempt("model.path", lambda: read_tokenizer(config.model.path, spec))
    if tokenizer is not None:
        problems += tokenizer_problems(config, tokenizer)
    context = spec and spec.geometry.max_positions
    sets = {
        each.setting: attempt(each.setting, partial(read_prompts, each.path, each.checks(tokenizer, context)))
        for each in prompt_sets(config)
    }
    problems += [
        *hook_problems(config),
        *checkpoint_problems(config, OTHER_MODELS),
        *judge_model_problems(config),
    ]
    if problems or spec is None or tokenizer is None:
        raise InputError("\n".join(dict.fromkeys(problems)))
    return Inputs(
        spec=spec,
        tokenizer=tokenizer,
        prompts=sets.get("data.path") or [],
        held_out=(sets.get("eval.path") or [])[: config.eval and config.eval.max_prompts],
        workflow=cast(Workflow, workflow),
        reward=reward,
        group_filter=cast(GroupFilter | None, group_filter),
    )


@dataclass(frozen=True)
class PromptSet:
    """A prompt set that a recipe names."""

    setting: str
    path: Path
    config: RunConfig
    new_tokens: int
    new_tokens_setting: str

    def checks(self, tokenizer: HfTokenizer | None, context: int | None) -> list[Check]:
        """Return the checks of its rows."""
        return prompt_checks(self.config, tokenizer, context, self.new_tokens, self.new_tokens_setting)


def prompt_sets(config: RunConfig) -> list[PromptSet]:
    """Return the prompt sets that a recipe names."""
    sets, sampling = list[PromptSet](), "rollout.sampling.max_new_tokens"
    most = config.rollout.sampling.max_new_tokens
    if config.data is not None:
        sets.append(PromptSet("data.path", config.data.path, config, most, sampling))
    if config.eval is not None:
        own = config.eval.max_new_tokens
        setting = sampling if own is None else "eval.max_new_tokens"
        sets.append(PromptSet("eval.path", config.eval.path, config, own or most, setting))
    return sets


def tokenizer_problems(config: RunConfig, tokenizer: HfTokenizer) -> list[str]:
    """Return what is wrong with the chat templates that the recipe uses."""
    own = template_problems(tokenizer) if writes_prompts(config) and prompt_sets(config) else []
    return [*(f"model.path: {reason}" for reason in own), *template_file_problems(config, tokenizer)]


def checkpoint_problems(config: RunConfig, settings: Iterable[str]) -> list[str]:
    """Return what is wrong with HF checkpoints: tensors that do not fit their config.json.

    ``settings``: the settings that name checkpoints.
    """
    problems: list[str] = []
    for name in settings:
        if (path := model_folder(config, name)) is not None:
            try:
                spec = model_spec(path, plugins.resolved(config.model.families))
                check_tensors(value_spec(spec) if name == CRITIC else spec)
            except (UnsupportedModel, HfCheckpointError, plugins.PluginError, OSError) as error:
                problems.append(f"{name}: {error}")
            except Exception as error:
                if not config.model.families:
                    raise
                problems.append(f"model.families: {plugins.raised(error)}")
    return problems


def judge_model_problems(config: RunConfig) -> list[str]:
    """Return what is wrong with the model of the judge's own engines, as far as it is not in the weights."""
    engines = own_engines(config.judge)
    if engines is None:
        return []
    try:
        tokenizer, vocabulary = load_tokenizer(engines.path), vocabulary_of(engines.path)
        context_of(engines.path)
    except (OSError, ValueError) as error:
        return [f"{JUDGE}: {error}"]
    problems: list[str] = []
    if not tokenizer.chat_template:
        problems.append(f"{JUDGE}: the tokenizer has no chat template, which writes questions for the model")
    if len(tokenizer) > vocabulary:
        problems.append(
            f"{JUDGE}: the tokenizer has {len(tokenizer)} tokens, the model {vocabulary} (vocab_size in "
            "config.json)"
        )
    hint = config.judge.hint if config.judge.type == "model" else None
    teaches = hint is not None and hint.teacher is not None and hint.teacher.type == "judge"
    has_policy = (config.model.path / "config.json").exists()
    if teaches and has_policy and load_tokenizer(config.model.path).get_vocab() != tokenizer.get_vocab():
        problems.append(
            f"{JUDGE}: its tokenizer is not that of model.path, whose tokens it is to score "
            "(judge.hint.teacher)"
        )
    return problems


def read_tokenizer(folder: Path, spec: ModelSpec | None) -> HfTokenizer:
    """Return the tokenizer of a checkpoint. Raises ValueError, OSError.

    A tokenizer with ids that the model does not have would end the engines.
    """
    tokenizer = load_tokenizer(folder)
    if spec is not None and len(tokenizer) > spec.geometry.vocab:
        raise ValueError(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens, the model {spec.geometry.vocab} "
            "(vocab_size in config.json); expected the tokenizer of this model"
        )
    if cast(object, tokenizer.eos_token_id) is None:
        raise ValueError(
            f"the tokenizer in {folder} has no end token; expected `eos_token` in tokenizer_config.json"
        )
    return tokenizer


def _reward(config: RunConfig) -> object:
    settings = config.rollout.reward
    return settings and load_judge(settings.path, settings.args, model=model_of(config)).plugin
