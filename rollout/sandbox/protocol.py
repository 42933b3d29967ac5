"""The HTTP protocol between ``RemoteSandbox`` and a server of sandboxes.

    PUT    /sandboxes/NAME               CreateBody  -> 200 Isolation as CreatedBody; again: the same sandbox
    POST   /sandboxes/NAME/exec          ExecBody    -> 200 ExecResult
    PUT    /sandboxes/NAME/files?path=P  bytes       -> 204
    GET    /sandboxes/NAME/files?path=P              -> 200 bytes
    DELETE /sandboxes/NAME                           -> 204, also if there is none

NAME is 32 hexadecimal digits that the client draws, so that a request to create one can be repeated. Each
request has the header ``Authorization: Bearer KEY``. An error has the body ErrorBody and one of the statuses:

    400 malformed   401 no key   404 no such sandbox   422 refused, the sandbox can still be used
    502 the sandbox has failed and is closed   503 the server is full: ask again later

A sandbox ends with DELETE, with a connection that breaks while a command runs, and after ``idle_s`` without a
request.
"""

import msgspec

from slipstream.rollout.sandbox.interface import Level

NAME_PATTERN = "[0-9a-f]{32}"
REFUSED, FAILED, FULL = 422, 502, 503


class CreateBody(msgspec.Struct, forbid_unknown_fields=True):
    """The request to create a sandbox."""

    limits: dict[str, int | float]
    """Settings of ``SandboxLimits``; what is left out has its default."""
    idle_s: float


class CreatedBody(msgspec.Struct):
    """The reply to it: the fields of ``Isolation``."""

    level: Level
    reason: str


class ExecBody(msgspec.Struct, forbid_unknown_fields=True):
    """The request to run a command, as ``Sandbox.exec``."""

    command: list[str]
    stdin: bytes = b""
    """base64, in JSON."""
    env: dict[str, str] = {}
    wall_s: float | None = None


class ErrorBody(msgspec.Struct):
    """The reply to a request that fails."""

    error: str
