"""Figures of a gateway process, as Prometheus reads them."""

from collections import Counter
from dataclasses import dataclass, field, fields

from prometheus_client.parser import text_string_to_metric_families

from slipstream.rollout.gateway.serving.metrics import SESSION_FIGURES, ServingMetrics, SessionCollector
from slipstream.rollout.gateway.sessions.counters import SessionCounters


@dataclass
class Counted:
    counters: SessionCounters = field(default_factory=SessionCounters)
    sessions: int = 0
    size: int = 0


def test_every_counter_is_shown():
    assert SESSION_FIGURES.keys() == {each.name for each in fields(SessionCounters)}


def test_counters_are_shown_as_they_are_now_by_reason():
    counted = Counted()
    metrics = ServingMetrics()
    metrics.registry.register(SessionCollector(counted))
    counted.counters.branches += Counter({"history rewritten": 2, "fork": 1})
    counted.counters.ended["evicted"] += 3
    counted.counters.evicted_tokens += 70
    counted.sessions, counted.size = 4, 5000

    def shown() -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(metrics.text().decode())
        return {
            (sample.name.removeprefix("slipstream_gateway_"), *sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }

    expected = {
        ("branches_total", "history rewritten"): 2,
        ("branches_total", "fork"): 1,
        ("sessions_ended_total", "evicted"): 3,
        ("tokens_evicted_total",): 70,
        ("sessions",): 4,
        ("session_bytes",): 5000,
        ("next_states_total",): 0,
    }
    assert expected.items() <= shown().items()
    counted.counters.branches["fork"] += 1
    assert shown()["branches_total", "fork"] == 2


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
