"""Rules about the endpoint for live users, and about learning from them."""

from collections.abc import Iterator

from slipstream.configs.rules.rule import Rule
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.live import live_places
from slipstream.configs.violations import Violation


def ports_differ(config: RunConfig) -> Iterator[Violation]:
    gateway = config.gateway
    if gateway is not None and gateway.admin_port == gateway.port:
        yield Violation(
            "gateway.admin_port",
            gateway.admin_port,
            "expected a port other than gateway.port: users must not reach what maintains it",
        )


def answers_do_not_stand_still(config: RunConfig) -> Iterator[Violation]:
    gateway = config.gateway
    if gateway is not None and config.rollout.engine.takes_turns and not gateway.allow_gaps:
        yield Violation(
            "rollout.engine.colocated",
            True,
            "expected false with a gateway: users' answers stand still while the trainer has the GPUs; "
            "to accept that, set gateway.allow_gaps to true; or let both work at once "
            "(rollout.engine.gpu_share)",
        )


def users_go_first(config: RunConfig) -> Iterator[Violation]:
    args = config.rollout.engine.args
    policy = args.get("schedule_policy", "fcfs")
    if config.gateway is not None and policy not in ("fcfs", "lof"):
        yield Violation(
            "rollout.engine.args",
            f"schedule_policy: {policy}",
            "expected the schedule_policy fcfs or lof with a gateway: only these let users' requests go "
            "before rollouts",
        )


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
    Rule(users_go_first, ("rollout.engine.args", "gateway")),
    Rule(ports_differ, ("gateway.port", "gateway.admin_port")),
    Rule(
        answers_do_not_stand_still,
        ("gateway.allow_gaps", "rollout.engine.colocated", "rollout.engine.gpu_share"),
    ),
    Rule(turns_have_an_advantage, ("live", "actor.advantage")),
    Rule(batch_has_room_for_groups, ("live.share", "live.train", "rollout.batch_size")),
    Rule(slots_bound_the_age, ("live.train", "rollout.admission")),
)
