"""Counters of sessions. Readers take the numbers whenever they want; nothing is ever reset."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class SessionCounters:
    """Totals since the process started."""

    minted: int = 0
    """Sessions of requests that named none and continued none."""
    by_history: int = 0
    """Requests that named no session and were placed by their history."""
    ambiguous: int = 0
    """Requests whose history several sessions have, so that they began a new one."""
    joined: int = 0
    """Retries that joined a running request."""
    turns: Counter[str] = field(default_factory=Counter[str])
    """Turns, by ``main``, ``side`` and ``cancelled``."""
    side: Counter[str] = field(default_factory=Counter[str])
    """Side turns that the client has not declared, by reason: parameters of sampling, and helpers."""
    overridden: int = 0
    """Main turns that were sampled with the recipe's parameters in place of the client's."""
    branches: Counter[str] = field(default_factory=Counter[str])
    """Turns that began a branch, by reason."""
    next_states: int = 0
    unpaired: int = 0
    """Next states of turns that have one already, or that several turns could claim: not recorded."""
    lost: int = 0
    """Turns of sessions that have ended whose next states were lost."""
    ended: Counter[str] = field(default_factory=Counter[str])
    """Sessions that have ended, by ``client``, ``idle`` and ``evicted``."""
    evicted_histories: int = 0
    """Sessions whose turns and messages were dropped to save memory, while turns of them wait for their next
    states."""
    evicted_tokens: int = 0
    """Tokens of the chains of evicted sessions."""
    refused: int = 0
    """Requests that were refused because no session could be evicted."""
