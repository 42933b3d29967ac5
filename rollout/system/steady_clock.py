"""A clock for time-outs whose times are also dates."""

import time

_START_S = time.time() - time.monotonic()


def steady_s() -> float:
    """Return the seconds since the epoch, by the wall clock as it was when this process began.

    Somebody who sets the wall clock changes no difference between two times of the process. Times of another
    process may be off by as much as the clock was set.
    """
    return _START_S + time.monotonic()
