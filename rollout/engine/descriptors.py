"""The file descriptors of a process that asks engines: some for each request that runs, and for the rest."""

import logging
import resource

log = logging.getLogger(__name__)

RESERVED = 256
"""Descriptors for everything but requests: logs, libraries, judges, and the connections of workflows."""


def make_room(requests: int, *, setting: str = "rollout.max_concurrent", each: int = 1) -> int:
    """Raise the limit on open files as far as it goes. Return how many requests may run at one time.

    ``requests``: the number that may be asked of this process, by the ``setting`` of this name: by
    ``rollout.max_concurrent``, if it is the only collector left. ``each``: descriptors that a request needs.
    A limit that is too low for them is named in the log.
    """
    limit = raise_limit()
    if limit >= each * requests + RESERVED:
        return requests
    room = max(1, (limit - RESERVED) // each)
    log.warning(
        "this process may open %d files, but %d requests and %d descriptors for the rest need %d: no more "
        "than %d requests run here at one time. Raise the hard limit (`ulimit -Hn`, LimitNOFILE= of systemd, "
        "--ulimit nofile= of a container), or lower %s",
        limit,
        requests,
        RESERVED,
        each * requests + RESERVED,
        room,
        setting,
    )
    return room


def raise_limit() -> int:
    """Raise the soft limit on open files to the hard one, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError) as error:  # the system has a smaller limit of its own
            log.warning("the limit on open files stays at %d instead of %d: %s", soft, hard, error)
    return 1 << 62 if soft == resource.RLIM_INFINITY else soft
