"""What a run reads: everything that may be wrong with it is found before Ray or an engine is started."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from slipstream.bridge.check import check_names
from slipstream.bridge.families import ModelSpec, model_spec, value_spec
from slipstream.bridge.hf_config import UnsupportedModel
from slipstream.bridge.hf_index import HfCheckpointError
from slipstream.configs.rules.models import CRITIC, OTHER_MODELS, model_folder
from slipstream.configs.schema import RunConfig
from slipstream.rollout import plugins
from slipstream.rollout.control.filters import GroupFilter
from slipstream.rollout.prompts import PromptError, read_prompts
from slipstream.rollout.reward import Reward
from slipstream.rollout.trajectory import Prompt
from slipstream.rollout.workflow import Tokenizer, Workflow

T = TypeVar("T")

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""Without any of these transformers makes up an empty tokenizer."""


class InputError(ValueError):
    """The inputs of a run cannot be used; the message lists every reason."""


@dataclass(frozen=True)
class Inputs:
    spec: ModelSpec
    tokenizer: Tokenizer
    prompts: list[Prompt]
    held_out: list[Prompt]
    workflow: Workflow
    reward: Reward
    group_filter: GroupFilter | None


def read_inputs(config: RunConfig) -> Inputs:
    """Read and construct what the recipe names. Raises InputError with all problems at once."""
    problems: list[str] = []

    def attempt(name: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (UnsupportedModel, PromptError, plugins.PluginError, OSError, ValueError) as error:
            problems.append(f"{name}: {error}")
            return None

    rollout, eval_ = config.rollout, config.eval
    spec = attempt("model.path", lambda: model_spec(config.model.path))
    found: dict[str, Any] = {
        "spec": spec,
        "tokenizer": attempt("model.path", lambda: read_tokenizer(config, spec)),
        "prompts": attempt("data.path", lambda: read_prompts(config.data.path)),
        "held_out": attempt("eval.path", lambda: read_prompts(eval_.path)[: eval_.max_prompts])
        if eval_
        else [],
        "workflow": attempt("rollout.workflow", lambda: plugins.build(rollout.workflow)),
        "reward": attempt("rollout.reward", lambda: plugins.build(rollout.reward)),
        "group_filter": attempt("rollout.group_filter", lambda: plugins.build(rollout.group_filter))
        if rollout.group_filter
        else None,
    }
    problems += checkpoint_problems(config, OTHER_MODELS)
    if problems:
        raise InputError("\n".join(problems))
    return Inputs(**found)


def checkpoint_problems(config: RunConfig, settings: Iterable[str]) -> list[str]:
    """Where checkpoints do not have what their config.json means. ``settings``: those that name them."""
    problems = []
    for name in settings:
        if (path := model_folder(config, name)) is not None:
            try:
                spec = model_spec(path)
                check_names(value_spec(spec) if name == CRITIC else spec)
            except (UnsupportedModel, HfCheckpointError, OSError) as error:
                problems.append(f"{name}: {error}")
    return problems


def read_tokenizer(config: RunConfig, spec: ModelSpec | None) -> Tokenizer:
    """The checkpoint's tokenizer. One with ids that the model does not know would stop the engines."""
    from transformers import AutoTokenizer

    if not any((config.model.path / name).exists() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"{config.model.path} has no tokenizer; expected one of {', '.join(_TOKENIZER_FILES)}"
        )
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    if spec is not None and len(tokenizer) > spec.geometry.vocab:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {spec.geometry.vocab} "
            "(vocab_size in config.json)"
        )
    return tokenizer
