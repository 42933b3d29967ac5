"""How a trainer fails."""


class TrainerFailed(RuntimeError):
    """A trainer rank raised or is gone. The trainer holds the only copy of the policy, so the run is over."""
