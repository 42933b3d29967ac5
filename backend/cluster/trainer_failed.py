"""The errors by which a trainer fails."""


class TrainerFailed(RuntimeError):
    """A trainer rank raised, is gone or does not answer in time. Its state is lost with that: all ranks are
    to be killed, and may be started again from a checkpoint.
    """

    def __init__(self, reason: str, traceback: str = "") -> None:
        """``traceback``: of the first rank at fault; empty where there is none."""
        super().__init__(reason)
        self.traceback = traceback

    @property
    def described(self) -> str:
        """The reason, followed by the traceback."""
        return f"{self}\n{self.traceback}" if self.traceback else str(self)
