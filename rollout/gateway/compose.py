"""Puts SGLang's endpoints onto the sessions of a gateway process, which serves the result. Imports SGLang.

journal ──entries──► Sessions ◄──► endpoints ◄──► users
"""

from collections.abc import Sequence

from slipstream.rollout.gateway.helpers import TurnTypes
from slipstream.rollout.gateway.peers import name_of
from slipstream.rollout.gateway.serving.assemble import Serving, assemble, served_model
from slipstream.rollout.gateway.serving.metrics import SessionCollector
from slipstream.rollout.gateway.sessions.placing import SessionLimits
from slipstream.rollout.gateway.sessions.sessions import Sessions
from slipstream.rollout.gateway.spec import GatewaySurroundings
from slipstream.rollout.system.key import Application
from slipstream.rollout.system.steady_clock import steady_s
from slipstream.rollout.tokens.turn_entries import Entry


class ServedSessions:
    """Sessions and endpoints of a process: its ``Served``."""

    def __init__(self, sessions: Sessions, serving: Serving) -> None:
        self._sessions = sessions
        self._serving = serving
        self.app: Application = serving.app
        self.figures: Application = serving.admin

    def sweep(self, now_s: float) -> Sequence[Entry]:
        return self._sessions.sweep(now_s)

    def forget(self, session: str | None, key: str | None) -> Sequence[Entry]:
        return self._sessions.forget(session, key)

    async def close(self) -> None:
        await self._serving.close()


def build(surroundings: GatewaySurroundings) -> ServedSessions:
    """Make sessions, as they were when the process ended the last time, and endpoints."""
    spec, journal = surroundings.spec, surroundings.journal
    config, gateway = spec.config, spec.gateway
    sampling = config.rollout.sampling
    sessions = Sessions(
        SessionLimits(
            gateway.limits.sessions,
            gateway.limits.session_bytes,
            gateway.idle_timeout_s,
            gateway.limits.sessions_per_key,
        ),
        temperature=sampling.temperature,
        override=gateway.sampling == "recipe",
        decode=surroundings.decode,
        mint=surroundings.mint,
        credit=1.0 if config.live is None else config.live.credit.share,
    )
    if entries := sessions.restore(surroundings.retained):
        journal.append(entries)
    sessions.rest_from(steady_s())
    model = served_model(
        config.model,
        name=gateway.served_model_name or config.run.name,
        context=min(spec.context, gateway.limits.context or spec.context),
        dialect=gateway,
        sampling=sampling,
    )
    serving = assemble(
        model,
        limits=gateway.limits,
        types=TurnTypes(gateway.turns, known_helpers=gateway.helpers == "side"),
        log_content=gateway.log_content,
        source=surroundings.source,
        conversations=sessions,
        entries=journal,
        keys=surroundings.keys,
        mint=surroundings.mint,
        traces=gateway.traces,
        instance=f"{config.run.name}/{name_of(spec.number)}",
    )
    serving.metrics.registry.register(SessionCollector(sessions))
    serving.metrics.follow(journal)
    return ServedSessions(sessions, serving)
