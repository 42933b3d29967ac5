"""Episodes that a limit has ended: on the number of turns or tokens, or one of the environment."""

from typing import Literal, get_args

from slipstream.rollout.tokens.trajectory import Trajectory

OnLimit = Literal["train", "mask", "drop"]
"""Treatment of an episode that a limit has ended: it is trained like others; no token of it carries loss, but
its reward counts in its group; or its group is formed without it."""


def limited(trajectory: Trajectory, on_limit: OnLimit) -> Trajectory:
    """Return the trajectory of an episode that a limit has ended, as it is to be trained."""
    match on_limit:
        case "train":
            return trajectory
        case "mask":
            return trajectory.without_loss()
        case "drop":
            return trajectory.without_loss(is_dropped=True)


def wrong_on_limit(value: object) -> list[str]:
    """Return what is wrong with a setting ``on_limit``."""
    names = get_args(OnLimit)
    return [] if value in names else [f"on_limit: expected one of {', '.join(names)}, found {value!r}"]
