"""Errors of the control core: bugs in the caller, never bad input."""


class ControlError(RuntimeError):
    """An event is impossible in the present state: a bug in the caller, never bad input."""


class UnknownVersion(ControlError):
    """A policy version was named that the run has never begun."""

    def __init__(self, version: int, newest: int) -> None:
        super().__init__(f"policy version {version} was never begun: this run has the versions 0 to {newest}")
        self.version = version
