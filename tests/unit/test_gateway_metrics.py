"""Figures of a gateway process."""

from dataclasses import dataclass

from slipstream.rollout.gateway.serving.metrics import ServingMetrics


@dataclass
class Journal:
    last: int
    acknowledged: int


def test_the_journal_is_shown_as_it_is_now():
    metrics, journal = ServingMetrics(), Journal(7, 5)
    metrics.follow(journal)
    text = metrics.text().decode().splitlines()
    assert "slipstream_gateway_journal_entries 7.0" in text
    assert "slipstream_gateway_journal_unacknowledged 2.0" in text
    journal.acknowledged = 7
    assert "slipstream_gateway_journal_unacknowledged 0.0" in metrics.text().decode().splitlines()
