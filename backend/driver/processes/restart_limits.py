"""Limits of the restarts of a run's processes, from its recipe."""

from slipstream.configs.schema import RunConfig
from slipstream.rollout.system.restarts import RestartLimit

GATEWAY_RESTARTS = 16
"""Number of restarts of one gateway within the window."""


def trainer_limit(config: RunConfig) -> RestartLimit:
    """All ranks count as one part: they start and end together."""
    run = config.run
    setting = "run.trainer_restarts"
    return RestartLimit(setting, run.trainer_restarts, run.restart_window_s, "no training step was committed")


def engine_limit(config: RunConfig) -> RestartLimit:
    """Limit of each engine of the policy."""
    allowed, window_s = config.rollout.engine.restarts, config.run.restart_window_s
    return RestartLimit("rollout.engine.restarts", allowed, window_s, "it has not served")


def collector_limit(config: RunConfig) -> RestartLimit:
    """Limit of each collector."""
    allowed, window_s = config.rollout.collector_restarts, config.run.restart_window_s
    return RestartLimit("rollout.collector_restarts", allowed, window_s, "it has finished no group")


def gateway_limit(config: RunConfig) -> RestartLimit:
    """Limit of each gateway. Its exit code alone does not tell two failures apart, and its port may be in use
    for a while: equal failures are counted like others.
    """
    allowed, window_s = GATEWAY_RESTARTS, config.run.restart_window_s
    return RestartLimit("Slipstream", allowed, window_s, "it has not served", same=None)
