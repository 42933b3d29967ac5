"""Rules about the endpoint for live users."""

from collections.abc import Iterator

from slipstream.configs.rules.rule import Rule
from slipstream.configs.schema import RunConfig
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


RULES = (
    Rule(users_go_first, ("rollout.engine.args", "gateway")),
    Rule(ports_differ, ("gateway.port", "gateway.admin_port")),
    Rule(
        answers_do_not_stand_still,
        ("gateway.allow_gaps", "rollout.engine.colocated", "rollout.engine.gpu_share"),
    ),
)
