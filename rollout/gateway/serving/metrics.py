"""Figures of a gateway process for Prometheus. No figure names a user, a session or a content."""

from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class JournalFigures(Protocol):
    """How far a journal is, and the driver with it."""

    @property
    def last(self) -> int:
        """Number of the last entry."""
        ...

    @property
    def acknowledged(self) -> int:
        """Number of the last entry that the driver has."""
        ...


class ServingMetrics:
    """All figures of one application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "slipstream_gateway_requests",
            "Requests by endpoint and HTTP status.",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self.disconnects = Counter(
            "slipstream_gateway_disconnects",
            "Requests whose client has gone before the end.",
            ["endpoint"],
            registry=self.registry,
        )
        self.first_token_s = Histogram(
            "slipstream_gateway_first_token_seconds",
            "Time from the arrival of a request to its first token.",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.answers = Gauge(
            "slipstream_gateway_answers", "Answers that are generated now.", registry=self.registry
        )
        self.version = Gauge(
            "slipstream_gateway_policy_version",
            "Policy version that a new request gets.",
            registry=self.registry,
        )

    def follow(self, journal: JournalFigures) -> None:
        """Show how far the journal is."""
        for name, description, value in (
            ("entries", "Entries of the journal, over its whole life.", lambda: journal.last),
            (
                "unacknowledged",
                "Entries that the driver does not have yet.",
                lambda: journal.last - journal.acknowledged,
            ),
        ):
            gauge = Gauge(f"slipstream_gateway_journal_{name}", description, registry=self.registry)
            gauge.set_function(value)

    def text(self) -> bytes:
        """Return all figures in Prometheus' text format."""
        return generate_latest(self.registry)
