"""Figures of a gateway process for Prometheus. No figure names a user, a session or a content."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.rollout.gateway.journal import TurnJournal
from slipstream.rollout.gateway.otlp import OtlpExport
from slipstream.rollout.gateway.serving.client_tools import family
from slipstream.rollout.gateway.serving.preferences import WISHES
from slipstream.rollout.gateway.serving.schema import ReadBody
from slipstream.rollout.gateway.sessions.sessions import Sessions

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


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

        self.ignored = Counter(
            "slipstream_gateway_wishes_ignored",
            "Wishes of clients that the policy cannot grant, and fields that nobody knows.",
            ["wish"],
            registry=self.registry,
        )
        self.dropped_tools = Counter(
            "slipstream_gateway_tools_dropped",
            "Tools that a provider would run, which were left out.",
            ["tool"],
            registry=self.registry,
        )
        self.marks = Counter(
            "slipstream_gateway_contents_marked",
            "Images, documents and other contents in whose places marks stand.",
            ["content"],
            registry=self.registry,
        )

    def count_read(self, read: ReadBody) -> None:
        """Count what was left out of a body."""
        self.count_ignored(read.ignored)
        for tool in read.tools.hosted:
            self.dropped_tools.labels(family(tool)).inc()
        for mark in read.marks:
            self.marks.labels(mark).inc()

    def count_ignored(self, wishes: Sequence[str]) -> None:
        for wish in wishes:
            self.ignored.labels(wish if wish in WISHES else "other").inc()

    def follow(self, journal: TurnJournal) -> None:
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

    def follow_export(self, export: OtlpExport) -> None:
        """Show what has become of spans and events."""
        self.registry.register(_ExportCollector(export))

    def text(self) -> bytes:
        """Return all figures in Prometheus' text format."""
        return generate_latest(self.registry)


class _ExportCollector(Collector):
    """Shows the counters of the export as they are when somebody looks."""

    def __init__(self, export: OtlpExport) -> None:
        self._export = export

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "slipstream_gateway_traces_sent",
            "Spans and events that a collector has taken.",
            self._export.sent,
        )
        dropped = CounterMetricFamily(
            "slipstream_gateway_traces_dropped",
            "Spans and events that were dropped: full, refused and ended.",
            labels=("reason",),
        )
        for reason in ("full", "refused", "ended"):
            dropped.add_metric((reason,), self._export.dropped[reason])
        yield dropped


@dataclass(frozen=True)
class SessionFigure:
    """How a field of ``SessionCounters`` is shown."""

    name: str
    help: str
    label: str | None = None
    """Name of the label by which a field with several numbers is divided."""


SESSION_FIGURES = {
    "minted": SessionFigure("sessions_begun", "Sessions of requests that named none and continued none."),
    "by_history": SessionFigure("requests_by_history", "Requests that were placed by their history."),
    "ambiguous": SessionFigure(
        "ambiguous_histories", "Requests that began a session because several have theirs."
    ),
    "joined": SessionFigure("retries_joined", "Retries that joined a running request."),
    "turns": SessionFigure("turns", "Turns that have ended: main, side and cancelled.", "type"),
    "side": SessionFigure("side_turns", "Side turns that the client has not asked for.", "reason"),
    "overridden": SessionFigure("turns_overridden", "Main turns that were sampled as the recipe says."),
    "branches": SessionFigure("branches", "Turns that began a branch.", "reason"),
    "next_states": SessionFigure("next_states", "Next states that were recorded."),
    "unpaired": SessionFigure("next_states_unpaired", "Next states that no turn waited for."),
    "lost": SessionFigure("turns_unpaired", "Turns whose next states were lost."),
    "ended": SessionFigure("sessions_ended", "Sessions that have ended: client, idle and evicted.", "reason"),
    "evicted_histories": SessionFigure(
        "sessions_cleared", "Sessions without their histories, to save memory."
    ),
    "evicted_tokens": SessionFigure("tokens_evicted", "Tokens of the chains of evicted sessions."),
    "refused": SessionFigure("sessions_refused", "Requests for which no session could be evicted."),
}
"""Every field of ``SessionCounters``, by its name."""


class SessionCollector(Collector):
    """Shows the counters of the sessions as they are when somebody looks."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def collect(self) -> Iterator[Metric]:
        counters = self._sessions.counters
        for field, figure in SESSION_FIGURES.items():
            family = CounterMetricFamily(
                f"slipstream_gateway_{figure.name}",
                figure.help,
                labels=() if figure.label is None else (figure.label,),
            )
            value: int | Mapping[str, int] = getattr(counters, field)
            if isinstance(value, int):
                family.add_metric((), value)
            else:
                for name, number in sorted(value.items()):
                    family.add_metric((name,), number)
            yield family
        for name, what, value in (
            ("sessions", "Sessions that are kept.", self._sessions.sessions),
            ("session_bytes", "Memory of the stored histories.", self._sessions.size),
        ):
            yield GaugeMetricFamily(f"slipstream_gateway_{name}", what, value)
