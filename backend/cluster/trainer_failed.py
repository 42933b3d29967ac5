"""The errors by which a trainer fails."""


class TrainerFailed(RuntimeError):
    """A trainer rank raised, is gone or does not answer in time. Its state is lost with that: all ranks are
    to be killed, and may be started again from a checkpoint.
    """
