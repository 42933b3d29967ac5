"""The gateway's own endpoints of sessions: opened, listed, rewarded and forgotten by their clients.

POST   /sessions                    open sessions that the client rewards itself
GET    /sessions, /sessions/ID      what they consist of
DELETE /sessions/ID                 forget one
POST   /rewards, /sessions/ID/reward
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from slipstream.rollout.gateway.conversations import (
    AmbiguousTurn,
    ClientReward,
    EntryLog,
    GivenBefore,
    ListedSession,
    TakenReward,
    TooManySessions,
    UnknownTurn,
    User,
)
from slipstream.rollout.gateway.serving import replies
from slipstream.rollout.gateway.serving.handling import RequestHandler, path_session
from slipstream.rollout.gateway.serving.limits import Refusal
from slipstream.rollout.gateway.serving.rewarding import (
    read_opening,
    read_reward,
    read_session_reward,
    reply_of,
)
from slipstream.rollout.gateway.serving.running import Conversations
from slipstream.rollout.gateway.serving.traces import Traces

ONCE_HEADER = "idempotency-key"
"""Header that may name an opening or the giving of a reward, in place of ``key`` of its body."""


PIECE = 20
"""Sessions of one piece of a list: less than a millisecond's work, unless they are long."""


class SessionRoutes:
    """Takes what clients say of their sessions, beside the requests in them."""

    def __init__(
        self,
        handler: RequestHandler,
        conversations: Conversations,
        entries: EntryLog,
        clock: Callable[[], float],
        traces: Traces | None = None,
    ) -> None:
        """``traces``: takes an event of each reward; None: nothing does."""
        self._traces = traces
        self._handler = handler
        self._conversations = conversations
        self._entries = entries
        self._clock = clock

    async def open(self, request: Request) -> Response:
        """Open sessions, and return their names."""
        user, raw = await self._handler.own_body(request)
        opening = read_opening(raw, request.headers.get(ONCE_HEADER))
        try:
            names, entries = self._conversations.open_sessions(
                user,
                opening.count,
                opening.tags,
                is_group=opening.is_group,
                once=opening.once,
                now_s=self._clock(),
            )
        except TooManySessions as error:
            raise Refusal(429, str(error), retry_after_s=error.retry_after_s) from error
        except GivenBefore as error:
            raise Refusal(409, str(error), param="key") from error
        self._entries.append(entries)
        await self._entries.durable(self._entries.last)  # those of an earlier request may not be on disk yet
        return replies.json_reply({"sessions": names})

    async def list_all(self, request: Request) -> Response:
        """Return all sessions of the user that this process has, the one that has rested longest first."""
        user, _ = await self._handler.own_body(request)
        return StreamingResponse(_pieces(self._conversations.listed(user)), media_type="application/json")

    async def list_one(self, request: Request) -> Response:
        """Return a session with its turns."""
        user, _ = await self._handler.own_body(request)
        return replies.json_reply(_shown(self._known(user, path_session(request) or "")))

    async def forget(self, request: Request) -> Response:
        """Forget a session: nothing of it is trained any more, and what was said is overwritten."""
        user, _ = await self._handler.own_body(request)
        session = path_session(request) or ""
        self._known(user, session)
        entries = self._conversations.forget(session, user.name)
        await self._entries.durable(self._entries.append(entries)[-1])
        return replies.json_reply({"session_id": session, "status": "forgotten"})

    async def reward_turn(self, request: Request) -> Response:
        """Take a client's reward of one turn of the session in the path."""
        user, raw = await self._handler.own_body(request)
        session = path_session(request) or ""
        return await self._give(user, read_session_reward(raw, session, request.headers.get(ONCE_HEADER)))

    async def reward(self, request: Request) -> Response:
        """Take a client's reward of a turn, or of a whole session."""
        user, raw = await self._handler.own_body(request)
        return await self._give(user, read_reward(raw, request.headers.get(ONCE_HEADER)))

    def _known(self, user: User, session: str) -> ListedSession:
        try:
            return next(self._conversations.listed(user, session))
        except UnknownTurn as error:
            raise Refusal(404, str(error)) from error

    async def _give(self, user: User, reward: ClientReward) -> Response:
        """Record a reward, and tell the client what has become of it."""
        try:
            given = self._conversations.reward(user, reward)
        except UnknownTurn as error:
            raise Refusal(404, str(error)) from error
        except GivenBefore as error:
            raise Refusal(409, str(error), param="key") from error
        except (AmbiguousTurn, ValueError) as error:
            raise Refusal(400, str(error)) from error
        if given.entries:
            given.numbers = self._entries.append(given.entries)
        await self._await(given)
        if given.entries and self._traces is not None:
            self._traces.rewarded(given)
        status, content = reply_of(given)
        headers = replies.session_headers(given.session)
        return replies.json_reply(content, status=status, headers=headers)

    async def _await(self, given: TakenReward) -> None:
        """Wait until a reward is recorded, and note what the driver has made of it, if it says so in time.

        One that is given again may wait beside the first giving, or learn what came too late for that.
        """
        last = given.numbers[-1] if given.numbers else self._entries.last
        # The driver takes what is held with its group: then there are no turns.
        asked = [pair for pair in zip(given.turns, given.numbers, strict=False) if not pair[0].outcome]
        _, outcomes = await asyncio.gather(
            self._entries.durable(last), self._entries.outcomes([number for _, number in asked])
        )
        for (turn, _), outcome in zip(asked, outcomes, strict=True):
            turn.outcome = turn.outcome or outcome


async def _pieces(sessions: Iterator[ListedSession]) -> AsyncIterator[bytes]:
    """Yield the JSON of a list in pieces. Other requests have as much time as the list."""
    separator, clock = b'{"sessions":[', asyncio.get_running_loop().time
    began_s = clock()
    while some := list(islice(sessions, PIECE)):
        yield separator + b",".join(orjson.dumps(_shown(each)) for each in some)
        separator = b","
        await asyncio.sleep(clock() - began_s)
        began_s = clock()
    yield b"]}" if separator == b"," else separator + b"]}"


def _shown(session: ListedSession) -> dict[str, object]:
    turns = [
        {
            "turn": turn.turn,
            "response_id": turn.request,
            "choice": turn.choice,
            "type": "main" if turn.is_main else "side",
            "versions": list(turn.versions),
            "call_ids": list(turn.calls),
            "rewards": dict(turn.rewards),
        }
        for turn in session.turns
    ]
    return {
        "session": session.session,
        "tags": dict(session.tags),
        "group": session.group or None,
        "ended": session.ended,
        "turns": turns,
    }
