"""What a run reads: everything that may be wrong with it is found before Ray or an engine is started."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bridge.check import check_names
from bridge.families import ModelSpec, model_spec, value_spec
from bridge.hf_config import UnsupportedModel
from configs.schema import RunConfig
from rollout import plugins
from rollout.control.filters import GroupFilter
from rollout.data import PromptError, read_prompts
from rollout.reward import Reward
from rollout.trajectory import Prompt
from rollout.workflow import Tokenizer, Workflow

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

    def attempt(setting: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (UnsupportedModel, PromptError, plugins.PluginError, OSError, ValueError) as error:
            problems.append(f"{setting}: {error}")
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
    for setting, path in other_models(config).items():
        kind = value_spec if setting == "critic.path" else lambda spec: spec
        attempt(setting, lambda path=path, kind=kind: check_names(kind(model_spec(path))))
    if problems:
        raise InputError("\n".join(problems))
    return Inputs(**found)


def other_models(config: RunConfig) -> dict[str, Path]:
    """The checkpoints that the recipe names besides the policy's, by setting."""
    kl, teacher, critic = config.actor.kl, config.actor.teacher, config.critic
    reference = kl and getattr(kl.reference, "path", None)
    named = {
        "actor.kl.reference.path": reference,
        "actor.teacher.path": teacher and teacher.path,
        "critic.path": critic and critic.path,
    }
    return {setting: path for setting, path in named.items() if path is not None}


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
