"""The data source that slime's rollout functions are given: the groups that are leased to this collector.

lease ──► waiting ──get_samples──► drawn ──► returned, or dropped
             ▲                       │
          buffer ◄────add_samples────┘

Rollout functions are plain functions in a thread, or coroutines on a loop of their own: all of this may be
called from any thread. Where nothing waits, ``get_samples`` blocks until a group is leased. That is what
bounds the age of the samples.
"""

import threading
from collections.abc import Callable, Sequence
from typing import cast

from slipstream.rollout.compat.slime.arguments import SlimeArguments

GROUP = "leased_group"
"""Attribute of samples: the number under which their group was leased, whatever functions write into
``group_index``."""

SampleGroup = list[object]
"""A group as rollout functions have it: a sample, or a list of siblings, for each episode."""


class CallEnded(RuntimeError):
    """A rollout function asks for groups after the end of its call, or of its collector."""


class TooFewGroups(RuntimeError):
    """A rollout function asks for more groups than may exist at one time, and returns none."""


class LeasedGroups:
    """A data source of slime."""

    def __init__(
        self,
        args: SlimeArguments,
        buffer_filter: Callable[[object, object, list[SampleGroup], int], Sequence[SampleGroup]],
        *,
        prompts: int,
        patience_s: float,
    ) -> None:
        """``prompts``: number of prompts of the recipe. ``patience_s``: seconds for which a function waits
        for a group to be leased.
        """
        self._args = args
        self._filter = buffer_filter
        self._prompts = prompts
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._waiting: dict[int, SampleGroup] = {}
        self._drawn: dict[int, None] = {}
        """Numbers of the groups that the running call has got, in order."""
        self.buffer: list[SampleGroup] = []
        """Groups that a function has given back."""
        self._is_open = False
        self._is_closed = False

    # ---- slime's DataSource

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        """Return at least one group, and ``num_samples`` at most: those that were given back come first.

        Blocks while there is none. Raises TooFewGroups and CallEnded.
        """
        with self._changed:
            groups = self._from_buffer(num_samples)
            if len(groups) < num_samples and not (groups or self._waiting):
                self._await_lease()
            for number in list(self._waiting)[: num_samples - len(groups)]:
                groups.append(self._waiting.pop(number))
                self._drawn[number] = None
            return groups

    def add_samples(self, samples: list[SampleGroup]) -> None:
        """Take groups back that were drawn in this call: they are drawn again in the next one.

        Raises ValueError for groups of other samples: every group that is trained has a place of its own
        among those that are leased.
        """
        with self._changed:
            for group in samples or ():
                number = number_of(group)
                if number is None or number not in self._drawn:
                    raise ValueError(
                        f"add_samples: a group with the group_index {number}, which this call has not drawn: "
                        "samples of its own belong into a file of prompts, or into rollout.hooks.data_source"
                    )
                del self._drawn[number]
                self.buffer.append(group)

    def save(self, rollout_id: int) -> None:
        """Do nothing: the run's checkpoints hold the position in the prompts."""

    def load(self, rollout_id: int | None = None) -> None:
        """Do nothing: see ``save``."""

    def __len__(self) -> int:
        """Return the number of prompts."""
        return self._prompts

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    # ---- the collector's end

    def lease(self, number: int, samples: SampleGroup) -> None:
        """Hand out a group from now on."""
        with self._changed:
            self._waiting[number] = samples
            self._changed.notify_all()

    def withdraw(self, number: int) -> None:
        """Hand a group out no more. One that is drawn is forgotten when the call ends."""
        with self._changed:
            self._waiting.pop(number, None)
            self._drawn.pop(number, None)
            self.buffer = [group for group in self.buffer if number_of(group) != number]

    @property
    def available(self) -> int:
        """Number of groups that can be drawn without waiting."""
        with self._changed:
            return len(self._waiting) + len(self.buffer)

    def begin_call(self) -> None:
        with self._changed:
            self._is_open = True
            self._drawn.clear()

    def end_call(self) -> list[int]:
        """Return the numbers of the groups that were drawn and not given back, in order."""
        with self._changed:
            self._is_open = False
            drawn, self._drawn = list(self._drawn), {}
            return drawn

    def close(self) -> None:
        """Wake all tasks that wait."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _from_buffer(self, most: int) -> list[SampleGroup]:
        self._check()
        if not self.buffer or most <= 0:
            return []
        groups = list(self._filter(self._args, None, self.buffer, most))
        for group in groups:
            if (number := number_of(group)) is not None:
                self._drawn[number] = None
        return groups

    def _await_lease(self) -> None:
        came = self._changed.wait_for(
            lambda: bool(self._waiting) or self._is_closed or not self._is_open, self._patience_s
        )
        self._check()
        if not came:
            raise TooFewGroups(
                f"get_samples: no group was leased within {self._patience_s:g} s: the rollout function holds "
                f"{len(self._drawn)} groups and asks for more. Those that it drops are replaced when it "
                "returns; raise rollout.max_head_offpolicyness, or return fewer groups than "
                "args.rollout_batch_size"
            )

    def _check(self) -> None:
        if self._is_closed or not self._is_open:
            raise CallEnded("get_samples: the call of the rollout function, or its collector, has ended")


def number_of(group: object) -> int | None:
    """Return the number under which a group was leased; None: its samples do not say."""
    first: object = group
    while isinstance(first, list):
        if not first:
            return None
        first = cast("list[object]", first)[0]
    number = getattr(first, GROUP, getattr(first, "group_index", None))
    return number if isinstance(number, int) else None


def pop_first(args: object, rollout_id: object, buffer: list[SampleGroup], number: int) -> list[SampleGroup]:
    """Take the groups out of the buffer that were given back first: the default of ``buffer_filter``."""
    groups = buffer[:number]
    del buffer[:number]
    return groups
