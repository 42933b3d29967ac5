"""Removes what a user has said from the gateways of a run, and has the run never train on it again.

running gateway ──POST /forget──► journal ──► driver: ledger
journal of a gateway that is not running ──► the driver takes it over when the run goes on
"""

import json
import urllib.error
import urllib.request
from pathlib import Path

from slipstream.backend.commands.outcome import Failed, WrongInput
from slipstream.rollout.gateway.administration import FORGET
from slipstream.rollout.gateway.journal_file import JournalBusy, JournalError, JournalFile
from slipstream.rollout.gateway.peers import GatewayAddress, address_beside, journals_of
from slipstream.rollout.tokens.turn_entries import Forgotten

TIMEOUT_S = 60.0

_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs without the http_proxy of the environment, which does not reach this machine's loopback."""


def forget(run: Path, session: str | None, key: str | None) -> list[str]:
    """Forget a session, the sessions of a key, or the session of a key. Return what was done where.

    Raises WrongInput, and Failed when a gateway could not be reached.
    """
    if not session and not key:
        raise WrongInput("nothing to forget: give --session, --key, or both")
    journals = journals_of(run)
    if not journals:
        raise WrongInput(f"{run} has no journal of a gateway: give the folder of a run that has served users")
    return [_forget(journal, session or None, key or None) for journal in journals]


def _forget(journal: Path, session: str | None, key: str | None) -> str:
    """Forget in one journal. Return what was done."""
    address = address_beside(journal)
    if address is not None and _told(address, session, key):
        return f"{journal.stem}: removed"
    try:
        file = JournalFile.open(journal, journal.stem)
        try:
            stamp = file.stamp
            file.append(stamp.last + 1, [Forgotten(session, key)], stamp.acknowledged)
        finally:
            file.close()
    except JournalBusy as error:
        raise Failed(
            f"{journal.stem} runs and cannot be reached: {error}; nothing was removed there"
        ) from None
    except JournalError as error:
        raise Failed(str(error)) from None
    return f"{journal.stem}: removed from its journal, and from the ledger when the run goes on"


def _told(address: GatewayAddress, session: str | None, key: str | None) -> bool:
    """Tell a running gateway. Return False if none listens there."""
    request = urllib.request.Request(
        address.admin + FORGET,
        json.dumps({"session": session, "key": key}).encode(),
        {"Content-Type": "application/json", "Authorization": address.key.header},
    )
    try:
        with _DIRECTLY.open(request, timeout=TIMEOUT_S):
            return True
    except urllib.error.HTTPError as error:
        if error.code == 401:  # whatever else listens there now
            return False
        raise Failed(f"{address.admin}{FORGET}: HTTP {error.code}: {error.read().decode()[:500]}") from None
    except OSError:
        return False
