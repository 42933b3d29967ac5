"""Prompts that are drawn from a source beside the driver, and are on disk before they are used."""

from collections.abc import Mapping, Sequence
from typing import Protocol


class DataSource(Protocol):
    """Prompts from anywhere, in an endless order: any class with this method. ``rollout.data_source`` names
    it.

    It runs in a process of its own beside the driver, which is started with a run and with every
    ``--resume``. What it raises ends the run; so does an answer that takes longer than
    ``run.batch_timeout_s`` seconds.
    """

    def prompts(self, start: int, count: int) -> Sequence[Mapping[str, object]]:
        """Return the prompts at positions ``start``, ``start + 1`` and so on: at least one, at most
        ``count``.

        Each is a row as a prompt set has them: ``prompt`` (a text, or a list of chat messages), ``label``,
        and further columns, all of plain data. Each is written to the run folder before it is used. Positions
        are asked for once and in ascending order: a resumed run, with a new object, goes on after the last
        prompt that was written, so that a source which depends on the position alone gives the same prompts
        whenever a run is interrupted.
        """
        ...


__all__ = ["DataSource"]
