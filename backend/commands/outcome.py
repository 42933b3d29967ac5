"""Errors that end a command: exit code 2 for wrong input, 1 for everything else."""


class CommandError(Exception):
    """A command has come to an end. The message is for the user; every line of it stands for itself."""

    exit_code = 1


class Failed(CommandError):
    """The work has failed or was stopped."""


class WrongInput(CommandError):
    """The user's input cannot be used. The message lists every reason."""

    exit_code = 2
