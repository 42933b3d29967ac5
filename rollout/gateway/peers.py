"""The gateway processes of a run, as they find each other: a file of each in the run folder.

Only the owner of the run can read the files: they hold the secret that the processes share. A process that is
started again listens elsewhere, and replaces its file.
"""

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from slipstream.rollout.live.driver_address import FOLDER
from slipstream.rollout.system.durable import write_durably
from slipstream.rollout.system.frames import UNREADABLE
from slipstream.rollout.system.key import Key, new_key


class GatewayAddress(msgspec.Struct, frozen=True):
    """Where one gateway process listens."""

    pid: int
    url: str
    """For users."""
    admin: str
    """For the operator of the gateway."""
    peer: str
    """For the other gateway processes."""
    secret: str
    """Secret that ``admin`` and ``peer`` ask for before they change or show anything of a user."""

    @property
    def key(self) -> Key:
        return Key(self.secret)


def name_of(number: int) -> str:
    """Return the name of a gateway process of a run."""
    return f"gateway-{number}"


def journal_of(run: Path, number: int) -> Path:
    """Return the journal of a gateway process."""
    return run / FOLDER / f"{name_of(number)}.sqlite"


def shared_secret(run: Path) -> Key:
    """Return the secret that the gateway processes of a run share; the first one makes it. Raises OSError."""
    folder = run / FOLDER
    path, draft = folder / "secret", folder / f".secret.{os.getpid()}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(new_key())
        with suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    return Key(path.read_text(encoding="utf-8"))


def journals_of(run: Path) -> list[Path]:
    """Return the journals of all gateway processes that a run has had."""
    return sorted((run / FOLDER).glob("gateway-*.sqlite"))


def write_address(run: Path, number: int, address: GatewayAddress) -> None:
    """Publish where a process listens. Raises OSError."""
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    write_durably(_file(run, number), msgspec.json.encode(address).decode(), mode=0o600)


def remove_address(run: Path, number: int) -> None:
    """Note that a process has ended. Raises OSError."""
    _file(run, number).unlink(missing_ok=True)


def read_address(run: Path, number: int) -> GatewayAddress | None:
    """Return where a process listens; None: nothing is known of it."""
    return _read(_file(run, number))


def address_beside(journal: Path) -> GatewayAddress | None:
    """Return where the process of a journal listens; None: nothing is known of it."""
    return _read(journal.with_suffix(".json"))


def _read(path: Path) -> GatewayAddress | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=GatewayAddress)
    except (OSError, *UNREADABLE):
        return None


def _file(run: Path, number: int) -> Path:
    return run / FOLDER / f"{name_of(number)}.json"
