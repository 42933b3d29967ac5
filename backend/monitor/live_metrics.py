"""Metrics of live users: how many turns wait for what, how old they are, and how they end."""

from collections.abc import Mapping

import numpy as np

from slipstream.backend.monitor.metrics import Value
from slipstream.rollout.control.live_door import TurnEnd
from slipstream.rollout.live.live_turns import SAMPLING
from slipstream.rollout.live.status import LiveStatus
from slipstream.rollout.tokens.turn_entries import HELPER


def live_metrics(status: LiveStatus, requests_running: int) -> dict[str, Value]:
    """Return the metrics of a training step, by the tags of ``tags.py``.

    ``requests_running``: number of requests of users that engines are serving.
    """
    since = status.since
    metrics: dict[str, Value] = {
        "live/requests_running": requests_running,
        "live/turns_waiting": status.waiting,
        "live/turns_unjudged": status.unjudged,
        "live/turns_ready": status.ready,
        "live/oldest_waiting_s": status.oldest_waiting_s,
        "live/oldest_unjudged_s": status.oldest_unjudged_s,
        "live/oldest_ready_s": status.oldest_ready_s,
        "live/side_helpers": _sum(status.side_reasons, is_helper=True),
        "live/side_sampling": _sum(status.side_reasons, is_helper=False),
        **{f"live/{end.value}": status.ends.get(end, 0) for end in TurnEnd},
        "live/verdicts": status.verdicts,
        "live/put_off": status.put_off,
        "live/given_up": status.given_up,
        "live/votes_tied": status.votes.tied,
        "live/votes_unparsable": status.votes.unparsable,
        "live/votes_missing": status.votes.missing,
        "live/judge_outages": status.judge_outages,
        "live/late_rewards": status.late_rewards,
        "live/batch_turns": len(since.scores),
    }
    if since.scores:
        metrics["live/score_mean"] = float(np.mean(since.scores))
        metrics["live/trained_age_s"] = float(np.mean(since.trained_ages_s))
    if since.expired_lags:
        metrics["live/expired_lags"] = list(since.expired_lags)
        metrics["live/expired_age_s"] = float(np.mean(since.expired_ages_s))
    if status.baseline is not None:
        metrics["live/baseline"] = status.baseline
    return metrics


def _sum(reasons: Mapping[str, int], *, is_helper: bool) -> int:
    """Return the number of side turns that helpers of agents are, or that their sampling has made."""
    if is_helper:
        return sum(number for reason, number in reasons.items() if reason.startswith(HELPER))
    return sum(number for reason, number in reasons.items() if SAMPLING.issuperset(reason.split(", ")))
