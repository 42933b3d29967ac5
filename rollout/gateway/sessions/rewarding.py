"""Rewards that clients give: which turns they go to, and how the turns of a session share one.

    response id, call id, session and place  ──► one turn
    session                                  ──► its main turns, the last one first:
                                                 value, value * discount, value * discount^2, ...

A giving with a name counts once: sent again, it changes nothing. The entries of a session that has ended are
still rewarded, until the session is removed.
"""

import hashlib
from collections.abc import Sequence
from statistics import fmean, stdev

from slipstream.rollout.gateway.conversations import (
    AmbiguousTurn,
    ClientReward,
    GivenBefore,
    RewardedTurn,
    TakenReward,
    UnknownTurn,
    User,
)
from slipstream.rollout.gateway.sessions.placing import SessionTable
from slipstream.rollout.gateway.sessions.stored import EndedTurn, SessionGroup, SessionState
from slipstream.rollout.tokens.trajectory import LARGEST_REWARD
from slipstream.rollout.tokens.turn_entries import HeldReward, UserReward

MOST_GIVEN = 10_000
"""Givings with a name in one session. Each is remembered, so that a client may not make up more of them."""


def give(table: SessionTable, user: User, reward: ClientReward, credit: float) -> TakenReward:
    """Return the turns that a reward goes to, and what is to be recorded.

    ``credit``: the recipe's discount. Raises UnknownTurn, AmbiguousTurn and GivenBefore, and ValueError for a
    reward that is not finite.
    """
    if not abs(reward.value) <= LARGEST_REWARD:  # NaN is not
        raise ValueError(f"the reward is {reward.value}, expected a finite number of float32")
    digest = _digest(reward) if reward.once else b""
    before = table.given(user.name, reward.once) if reward.once else None
    if before is not None:
        if before.digest != digest:
            raise GivenBefore(f"the key {reward.once!r} was used for another reward: give this one its own")
        waits_for = 0 if before.turns else _missing(table.known(user.name, before.session))
        return TakenReward(before.session, before.turns, (), waits_for=waits_for, numbers=before.numbers)
    if (taken := _for_group(table, user, reward, credit, digest)) is not None:
        return taken
    session, turns = _rewarded(table, user, reward, credit)
    if reward.once and len(session.given) >= MOST_GIVEN:
        raise ValueError(f"session {session.name} has {MOST_GIVEN} rewards with keys: give others without")
    entries = [_entry(session, turn, reward.name, reward.once, digest) for turn in turns]
    given = TakenReward(session.name, turns, entries, digest)
    if reward.once:
        table.note_given(session, reward.once, given)
    return given


def _entry(
    session: SessionState,
    turn: RewardedTurn,
    name: str,
    once: str,
    digest: bytes,
    group: tuple[float, float, int] | None = None,
) -> UserReward:
    ended = session.ended_turns[turn.turn]
    ended.rewards[name] = turn.value
    return UserReward(ended.number, turn.value, name, once, digest, group)


def _for_group(
    table: SessionTable, user: User, reward: ClientReward, credit: float, digest: bytes
) -> TakenReward | None:
    """Take the reward of a session in a group; None: the session belongs to none.

    The reward is held until all sessions of the group have one. Then each of their main turns gets its share,
    with what it is compared with.
    """
    session = table.get(user.name, reward.session) if reward.session else _owner_of(table, user, reward)
    if session is None or session.group is None:
        return None
    group = session.group
    if not reward.is_whole:
        raise ValueError(
            f"session {session.name} belongs to a group, whose sessions are compared as wholes: give "
            "`session` without a turn"
        )
    _missing(session)
    shared(session, reward.value, 1.0)  # raises UnknownTurn without a main turn
    discount = credit if reward.discount is None else reward.discount
    session.held = HeldReward(
        session.name, session.key, float(reward.value), discount, reward.name, reward.once, digest
    )
    waits_for = _missing(session)
    taken = TakenReward(session.name, [], [session.held], digest, waits_for)
    if not waits_for:
        turns, entries = _compared(table, group)
        taken = TakenReward(session.name, turns, entries, digest)
    if reward.once:
        table.note_given(session, reward.once, taken)
    return taken


def _missing(session: SessionState) -> int:
    """Return how many sessions of a session's group have no reward yet. Raises GivenBefore if it is over."""
    group = session.group
    if group is None or group.is_over:
        raise GivenBefore(f"the group of session {session.name} has its rewards, or has lost a session")
    return sum(member.held is None for member in group.sessions)


def _owner_of(table: SessionTable, user: User, reward: ClientReward) -> SessionState | None:
    """Return the one session of a turn that is named by an id."""
    sessions = table.with_id(user.name, reward.request or reward.call)
    return sessions[0] if len(sessions) == 1 else None


def _compared(table: SessionTable, group: SessionGroup) -> tuple[list[RewardedTurn], list[UserReward]]:
    """Return the turns of a group whose sessions have all got their rewards, and what is to be recorded."""
    held = [(session, session.held) for session in group.sessions if session.held is not None]
    values = [given.value for _, given in held]
    mean, deviation = fmean(values), stdev(values) if len(values) > 1 else 0.0
    group.is_over = True
    turns: list[RewardedTurn] = []
    entries: list[UserReward] = []
    for session, given in held:
        own, factors = _factors(session, given)
        for turn, factor in zip(own, factors, strict=True):
            compared = (mean * factor, deviation, len(values))
            entries.append(_entry(session, turn, given.name, given.once, given.digest, compared))
        turns += own
        if given.once:
            table.note_given(session, given.once, TakenReward(session.name, own, (), given.digest))
        session.held = None
    return turns, entries


def _factors(session: SessionState, given: HeldReward) -> tuple[list[RewardedTurn], list[float]]:
    """Return the main turns of a session with their shares in its reward, and of each the share in 1."""
    ones = shared(session, 1.0, given.discount)
    return shared(session, given.value, given.discount), [turn.value for turn in ones]


def _digest(reward: ClientReward) -> bytes:
    return hashlib.blake2b(repr(reward).encode(errors="surrogatepass"), digest_size=8).digest()


def _rewarded(
    table: SessionTable, user: User, reward: ClientReward, credit: float
) -> tuple[SessionState, list[RewardedTurn]]:
    if reward.is_whole:
        session = table.known(user.name, reward.session)
        return session, shared(session, reward.value, credit if reward.discount is None else reward.discount)
    if reward.request or reward.call:
        session, place = _named(table, user, reward)
    else:
        session = table.known(user.name, reward.session)
        place = _placed(session, reward.turn)
    request = session.ended_turns[place].request
    return session, [RewardedTurn(session.name, place, request, float(reward.value))]


def shared(session: SessionState, value: float, discount: float) -> list[RewardedTurn]:
    """Return the main turns of a session with the share of each in its reward. A turn without a share is left
    out: 0 would be a reward. Raises UnknownTurn if no turn has one.
    """
    main = [place for place, turn in enumerate(session.ended_turns) if turn.is_main]
    if not main:
        raise UnknownTurn(f"session {session.name} has no main turn that has ended")
    turns: list[RewardedTurn] = []
    factor = 1.0
    for place in reversed(main):
        turns.append(RewardedTurn(session.name, place, session.ended_turns[place].request, value * factor))
        factor *= discount
        if not factor:
            break
    return turns[::-1]


def _placed(session: SessionState, turn: int | None) -> int:
    """Return the place of a turn that a client has numbered. Raises UnknownTurn."""
    count = len(session.ended_turns)
    place = count - 1 if turn is None else turn
    if not 0 <= place < count:
        which = "no newest turn" if turn is None else f"no turn {turn}"
        raise UnknownTurn(f"session {session.name} has {count} turns that have ended, but {which}")
    return place


def _named(table: SessionTable, user: User, reward: ClientReward) -> tuple[SessionState, int]:
    """Return the turn with an id. Raises UnknownTurn and AmbiguousTurn."""
    id_, what = (reward.request, "response") if reward.request else (reward.call, "tool call")
    found = [
        (session, place)
        for session in table.with_id(user.name, id_)
        for place, turn in enumerate(session.ended_turns)
        if _has(turn, reward)
    ]
    if not found:
        choice = "" if reward.choice is None else f" with the choice {reward.choice}"
        raise UnknownTurn(f"there is no {what} {id_}{choice}, or it has not ended, or its session is gone")
    if len(found) > 1:
        raise AmbiguousTurn(_several(what, id_, found))
    return found[0]


def _several(what: str, id_: str, found: Sequence[tuple[SessionState, int]]) -> str:
    turns = [session.ended_turns[place] for session, place in found]
    if what == "response":
        return f"{len(found)} answers have the id {id_}: give `choice`, one of {[t.choice for t in turns]}"
    places = ", ".join(f"turn {place} of session {session.name}" for session, place in found[:3])
    return f"{len(found)} turns have made a tool call {id_} ({places}): give `session` and `turn`"


def _has(turn: EndedTurn, reward: ClientReward) -> bool:
    if reward.request:
        return turn.request == reward.request and reward.choice in (None, turn.choice)
    return reward.call in turn.calls
