"""Starts ``slipstream``. The command line itself is ``app``, whose imports take a while."""

from slipstream.rollout.system import interrupts


def main() -> None:
    """Run the command line. The user's own workflows and rewards are importable from where it is called."""
    interrupts.end_at_once()
    from slipstream.backend.cli.app import run

    interrupts.attended(run)
