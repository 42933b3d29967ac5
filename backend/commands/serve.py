"""``slipstream serve``: users take the place of the prompt set, and the command ends when it is stopped."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from slipstream.backend.cluster.placement import place, place_engines
from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.commands.preflight import check_start
from slipstream.backend.commands.run import attended
from slipstream.backend.monitor.progress import Progress
from slipstream.backend.monitor.summary import RunSummary, read_summary
from slipstream.configs.document import read_document
from slipstream.configs.load import load_recipe
from slipstream.configs.schema import RunConfig

VARIABLES = {
    "HOST": "gateway.host",
    "PORT": "gateway.port",
    "SERVED_MODEL_NAME": "gateway.served_model_name",
}
"""Environment variables of OpenClaw-RL's servers, and the settings that take their values. A gateway reads
SGLANG_API_KEY itself."""

VOTES = ("PRM_M", "judge.votes")
"""Variable and setting that count in addition where a language model votes on turns of users."""


def load_serving(recipe: Path, overrides: Sequence[str], variables: Mapping[str, str]) -> RunConfig:
    """Load a recipe as ``slipstream serve`` runs it: without prompts, and with a gateway.

    What it trains on, if anything, is live users alone. ``overrides`` win over ``variables``. Raises
    RecipeError.
    """
    named = [(setting, variables[name]) for name, setting in VARIABLES.items() if name in variables]
    given = [f"{setting}={_yaml(value)}" for setting, value in named]
    document = read_document(recipe, [*given, *overrides])
    sections = document.data or {}
    serving = [*given, *overrides, "data=null", "eval=null"]
    if sections.get("gateway") is None:
        serving.append("gateway={}")
    live = sections.get("live")
    if isinstance(live, dict) and cast("dict[str, object]", live).get("train", True) is True:
        serving.append("live.share=1")
        judge = sections.get("judge")
        is_model = isinstance(judge, dict) and cast("dict[str, object]", judge).get("type") == "model"
        if VOTES[0] in variables and is_model:
            serving.insert(0, f"{VOTES[1]}={_yaml(variables[VOTES[0]])}")
    return load_recipe(recipe, serving)


def serve(
    config: RunConfig, *, resume: bool = False, accept_changed_inputs: bool = False, overwrite: bool = False
) -> RunSummary | None:
    """Serve until stopped. Return the account of a run that trains.

    Raises as ``check_start`` and ``attended``.
    """
    check_start(config, place=place if _trains(config) else place_engines)
    attended(config, partial(_serve, config, resume, accept_changed_inputs, overwrite))
    return read_summary(config.run.folder) if _trains(config) else None


async def _serve(
    config: RunConfig, resume: bool, accept_changes: bool, overwrite: bool, progress: Progress
) -> None:
    from slipstream.backend.driver.loops.stop import Stopped
    from slipstream.backend.driver.modes.serving_alone import serve
    from slipstream.backend.driver.run import run

    try:
        if _trains(config):
            await run(config, progress, resume=resume, accept_changes=accept_changes, overwrite=overwrite)
        else:
            await serve(config, progress, resume=resume, accept_changes=accept_changes, overwrite=overwrite)
    except Stopped:
        """This is how the command ends."""


def _trains(config: RunConfig) -> bool:
    return config.live is not None and config.live.train


def check_has_prompts(config: RunConfig) -> None:
    """Raise WrongInput for a recipe that ``slipstream train`` cannot run: it has nothing to train on."""
    if not config.has_prompts and not _trains(config):
        raise WrongInput(
            "data: expected the prompts to train on; `slipstream serve` serves a policy without training it"
        )


def _yaml(text: str) -> str:
    """Return a text as YAML; a number stays a number."""
    return text if text.isdecimal() else json.dumps(text)
