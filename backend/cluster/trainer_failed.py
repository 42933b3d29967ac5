"""The errors by which a trainer fails."""


class TrainerFailed(RuntimeError):
    """A trainer rank raised, is gone or does not answer in time. Its state is lost with that: all ranks are
    to be killed, and may be started again from a checkpoint.
    """

    def __init__(self, reason: str, traceback: str = "", raised: str = "") -> None:
        """``traceback`` and ``raised``, the name of the exception's class: of the first rank at fault; empty
        where no rank has raised.
        """
        super().__init__(reason)
        self.traceback = traceback
        self.raised = raised

    @property
    def described(self) -> str:
        """The reason, followed by the traceback."""
        return f"{self}\n{self.traceback}" if self.traceback else str(self)
