"""``slipstream train --debug-rollout-only`` and ``--debug-train-only``: the two halves of a run alone."""

from functools import partial
from pathlib import Path

from slipstream.backend.cluster.placement import place, place_trainer
from slipstream.backend.commands.preflight import check_start
from slipstream.backend.commands.run import attended
from slipstream.backend.commands.serve import check_has_prompts
from slipstream.configs.schema import RunConfig


def rollout_only(config: RunConfig, *, overwrite: bool = False) -> Path:
    """Generate, judge and save batches. Return their folder. Raises as ``check_start`` and ``attended``."""
    check_has_prompts(config)
    from slipstream.backend.driver.modes.halves import rollout_half, saved_in
    from slipstream.backend.driver.run import run

    half = rollout_half(config)
    check_start(half, place=partial(place, trains=False))
    attended(half, partial(run, half, overwrite=overwrite, trains=False))
    return saved_in(half)


def train_only(config: RunConfig, batches: Path, *, overwrite: bool = False) -> Path:
    """Train on saved batches. Return the run folder. Raises as ``check_start`` and ``attended``."""
    check_start(config, place=place_trainer)
    from slipstream.backend.driver.modes.halves import run_trainer_half, trainer_half

    half = trainer_half(config)
    return attended(half, partial(run_trainer_half, half, batches, overwrite=overwrite))
