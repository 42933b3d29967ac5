"""API keys: a file of hashes, which ``slipstream key`` writes and every gateway process reads.

    sk-slip-3f9a1c07d2-KTxw...      what the user has: a public id, and a secret of 256 random bits
    {"id": "3f9a1c07d2", "name": "ann", "hash": "9b2c...", ...}      what the file has

A secret of 256 bits cannot be guessed from its SHA-256, so that no slow hash is needed and a request costs
microseconds. A secret is compared in constant time, also where there is no key of its id.

The name of a key stands for its holder in journals and ledgers. It is never given to another key, so that
nobody inherits sessions, or the wish to be forgotten.
"""

import fcntl
import hashlib
import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from slipstream.configs.schema import GatewayConfig
from slipstream.rollout.gateway.conversations import User
from slipstream.rollout.gateway.naming import checked_name
from slipstream.rollout.system.durable import write_durably
from slipstream.rollout.system.frames import UNREADABLE
from slipstream.rollout.tokens.turn_entries import TurnType

log = logging.getLogger(__name__)

PREFIX = "sk-slip-"

NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._@-")
LONGEST_NAME = 128

KEY_VARIABLE = "SGLANG_API_KEY"
"""Environment variable of a gateway process with a further key."""

ENVIRONMENT_NAME = "environment"
"""Name of the key that a process is given in its environment."""

CHECK_EVERY_S = 1.0
"""Shortest time between two looks at the file: how long a revoked key may still be used, unless the disk
stalls."""

LOOK_S = 0.25
"""Longest wait of a request for a look at the file. While the disk stalls, the keys known so far count."""


class KeysError(ValueError):
    """The file of API keys cannot be used, or not in this way. The message says why and what to do."""


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key, as the file has it."""

    id: str
    name: str
    hash: str
    """SHA-256 of the secret, in hexadecimal. Empty: the key is revoked."""
    created: str
    session: str | None = None
    """The one session that the key is made for."""
    turn_type: TurnType = TurnType.MAIN
    """Type of turns whose requests do not say."""
    revoked: str | None = None

    def user(self) -> User:
        return User(self.name, self.session, self.turn_type)


class KeysFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    format: int
    keys: list[ApiKey]


_FORMAT = 1
_FILE = msgspec.json.Decoder(KeysFile)


def keys_file(gateway: GatewayConfig | None, run: Path) -> Path:
    """Return the file of a recipe's API keys. It lies beside ``run``, the run folder, which every new run
    makes anew.

    Raises KeysError for a recipe without a gateway.
    """
    if gateway is None:
        raise KeysError("the recipe has no gateway section: add one")
    return gateway.keys or run.with_name(f"{run.name}.keys.json")


class ApiKeys:
    """The keys of a gateway process: its ``KeyRing``. Follows the file."""

    def __init__(
        self, path: Path, *, environment: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``environment``: a further key, which is no key of the file; empty: none. Raises KeysError."""
        self._path = path
        self._environment = _hash(environment) if environment else ""
        self._clock = clock
        self._stamp = _stamp(path)
        self._keys = _by_id(read_keys(path))
        self._checked_s = clock()
        self._looking: threading.Thread | None = None

    def user(self, key: str) -> User | None:
        """Return whose key it is, in constant time; None: nobody's. An empty text is a missing key."""
        self._follow()
        id_, _, secret = key.removeprefix(PREFIX).partition("-")
        known = self._keys.get(id_) if key.startswith(PREFIX) else None
        is_key = hmac.compare_digest(_hash(secret), known.hash if known is not None else _NOBODYS)
        is_environment = hmac.compare_digest(_hash(key), self._environment or _NOBODYS)
        if known is not None and is_key:
            return known.user()
        return User(ENVIRONMENT_NAME) if is_environment else None

    def _follow(self) -> None:
        """Have the file read again if it has changed, in a thread: the disk may stall."""
        now_s = self._clock()
        if now_s - self._checked_s < CHECK_EVERY_S or (self._looking and self._looking.is_alive()):
            return
        self._checked_s = now_s
        self._looking = threading.Thread(target=self._look, name="keys", daemon=True)
        self._looking.start()
        self._looking.join(LOOK_S)

    def _look(self) -> None:
        """Read the file again if it has changed. No key counts while it cannot be read."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = _by_id(read_keys(self._path))
        except KeysError as error:
            log.error("no API key is accepted: %s", error)
            self._keys = {}


_NOBODYS = hashlib.sha256(secrets.token_bytes(32)).hexdigest()
"""Hash of a secret that nobody has: what a secret is compared with where there is no key."""


def add_key(path: Path, name: str, *, session: str | None = None, turn_type: TurnType = TurnType.MAIN) -> str:
    """Add a key, and return it: nothing else ever shows it. Raises KeysError, OSError."""
    if not name or len(name) > LONGEST_NAME or not NAME_CHARACTERS.issuperset(name):
        raise KeysError(
            f"the name {name!r}: expected 1 to {LONGEST_NAME} letters, digits and characters of `._@-`"
        )
    if name == ENVIRONMENT_NAME:
        raise KeysError(f"the name {name!r} is that of a key in a gateway's environment: choose another name")
    try:
        session = checked_name("--session", session)
    except ValueError as error:
        raise KeysError(str(error)) from error
    secret, id_ = secrets.token_urlsafe(32), secrets.token_hex(5)
    with _locked(path):
        keys = read_keys(path)
        if any(key.name == name for key in keys):
            raise KeysError(
                f"{path} has, or had, a key of the name {name!r}, under which turns may be stored: choose "
                "another name"
            )
        _write(path, [*keys, ApiKey(id_, name, _hash(secret), _now(), session, turn_type)])
    return f"{PREFIX}{id_}-{secret}"


def revoke_key(path: Path, name: str) -> None:
    """Make a key invalid within ``CHECK_EVERY_S``. Raises KeysError, OSError."""
    with _locked(path):
        keys = read_keys(path)
        if not any(key.name == name and key.revoked is None for key in keys):
            names = ", ".join(key.name for key in keys if key.revoked is None) or "none"
            raise KeysError(f"{path} has no valid key of the name {name!r}; it has: {names}")
        _write(
            path,
            [
                msgspec.structs.replace(key, hash="", revoked=_now()) if key.name == name else key
                for key in keys
            ],
        )


def read_keys(path: Path) -> list[ApiKey]:
    """Return all keys, revoked ones included; none if there is no file. Raises KeysError."""
    try:
        content = _FILE.decode(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, *UNREADABLE) as error:
        raise KeysError(
            f"{path} is no file of API keys: {error}: restore it from a copy, or remove it and add the keys "
            "again with `slipstream key add`"
        ) from error
    if content.format != _FORMAT:
        raise KeysError(
            f"{path} has the format {content.format}, expected {_FORMAT}: use the version that wrote it"
        )
    return content.keys


def _by_id(keys: list[ApiKey]) -> dict[str, ApiKey]:
    return {key.id: key for key in keys if key.revoked is None and key.hash}


def _write(path: Path, keys: list[ApiKey]) -> None:
    content = msgspec.json.format(msgspec.json.encode(KeysFile(_FORMAT, keys)), indent=2).decode()
    write_durably(path, content + "\n", mode=0o600)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other commands from changing the file inside the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return values that change with every change of the file; None: there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
