"""The settings that name models, and the config.json of those models."""

import json
from pathlib import Path
from typing import cast

from slipstream.configs.rules.rule import setting
from slipstream.configs.schema import RunConfig

POLICY, CRITIC = "model.path", "critic.path"
OTHER_MODELS = ("actor.kl.reference.path", "actor.advantage.scores.path", CRITIC)
"""Settings that name the checkpoints of the models besides the policy. All of them have its layout."""
MODELS = (POLICY, *OTHER_MODELS)

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of a config.json that may hold the number of experts."""

JUDGE = "judge.endpoint.path"
"""Setting that names the judge's model, which engines alone load: it may be of any family."""


def model_folder(config: RunConfig, model: str) -> Path | None:
    """The checkpoint directory at the setting ``model``; None if the setting is not given."""
    return setting(config, model, Path)


def model_config(config: RunConfig, model: str = POLICY) -> dict[str, object] | None:
    """The config.json of a model; None if the model is not given or the file cannot be read."""
    folder = model_folder(config, model)
    if folder is None:
        return None
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return cast(dict[str, object], content) if isinstance(content, dict) else None


def model_number(config: RunConfig, key: str, model: str = POLICY) -> int | None:
    """The positive whole number at ``key`` of a model's config.json; None if there is none.

    A model that reads more than text describes its language model in ``text_config``.
    """
    content = model_config(config, model) or {}
    text = content.get("text_config")
    for each in (content, cast(dict[str, object], text) if isinstance(text, dict) else {}):
        number = each.get(key)
        if isinstance(number, int) and not isinstance(number, bool) and number > 0:
            return number
    return None


def model_words(model: str) -> str:
    """The words for a model in a message."""
    return "the model" if model == POLICY else f"the model in {model}"
