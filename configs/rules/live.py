"""Rules about learning from live users."""

from collections.abc import Iterator

from slipstream.configs.rules.rule import Rule
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.live import live_places
from slipstream.configs.violations import Violation


def turns_have_an_advantage(config: RunConfig) -> Iterator[Violation]:
    """A turn's advantage is its score less a baseline. A critic has learned nothing about live users."""
    if config.live is not None and config.live.train and config.actor.estimator == "gae":
        yield Violation(
            "actor.advantage",
            "gae",
            "the advantage of a live turn is its score minus live.baseline, which no critic estimates; "
            "choose another estimator for the groups of the batch, or leave the section live out",
        )


def batch_has_room_for_groups(config: RunConfig) -> Iterator[Violation]:
    live, batch_size = config.live, config.rollout.batch_size
    if live is None or not live.train or live.share == 1:
        return
    if live_places(live, batch_size) >= batch_size:
        yield Violation(
            "live.share",
            live.share,
            f"leaves no group of rollout.batch_size: {batch_size} in a batch; choose a smaller share or a "
            "larger batch, or 1 for batches of live trajectories alone",
        )


def slots_bound_the_age(config: RunConfig) -> Iterator[Violation]:
    if config.live is not None and config.live.train and config.rollout.admission.type == "volume":
        yield Violation(
            "rollout.admission.type",
            "volume",
            "counts the groups of all batches, whose number differs with live trajectories in them; "
            "expected 'slots'",
        )


RULES = (
    Rule(turns_have_an_advantage, ("live", "actor.advantage")),
    Rule(batch_has_room_for_groups, ("live.share", "live.train", "rollout.batch_size")),
    Rule(slots_bound_the_age, ("live.train", "rollout.admission")),
)
