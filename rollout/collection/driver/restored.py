"""Takes in the groups that a restart finds unfinished: of the run, or of its trainer alone.

all trajectories judged ──► ready, unless too old by now ──────┐
something recorded      ──► continued, unless too old by now ──┼──► generated again from the prompt
nothing recorded        ───────────────────────────────────────┘
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.rollout.collection.driver.assignments import CollectedGroup, SampleState
from slipstream.rollout.collection.driver.intake import PromptSource
from slipstream.rollout.collection.driver.ready_groups import ReadyGroup, StoredTrajectory
from slipstream.rollout.collection.messages import ANSWERED, JUDGED
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.ledger import recovery
from slipstream.rollout.tokens.record import decode_header, decode_piece
from slipstream.rollout.tokens.trajectory import UNSAMPLED

KINDS = {"answered": ANSWERED, "judged": JUDGED}
"""Kinds of whole trajectories by their state in the ledger."""


class Discarding(Protocol):
    """The part of the ledger that hears of tokens which a restart gives up."""

    def discarded(self, id_: int, tokens: int) -> None: ...


@dataclass
class RestoredGroups:
    """The groups that hold slots again."""

    ready: list[ReadyGroup] = field(default_factory=list[ReadyGroup])
    continued: list[CollectedGroup] = field(default_factory=list[CollectedGroup])
    restarted: int = 0
    """Number of groups that are generated again."""


@dataclass(frozen=True)
class _Found:
    group: recovery.OpenGroup
    samples: list[SampleState | None]
    versions: frozenset[int]
    """Policy versions of the tokens that carry loss or may do so."""
    tokens: int
    """Sampled tokens."""


def take_up(
    groups: Iterable[recovery.OpenGroup],
    control: RolloutControl,
    ledger: Discarding,
    prompts: PromptSource,
    samples: int,
    *,
    other_prompts: bool = False,
) -> RestoredGroups:
    """Give slots to groups from before a restart, those with the oldest tokens first. Nothing else was
    admitted to ``control``. ``samples``: episodes of a group. ``other_prompts``: the prompt set has
    changed, so that groups which are not complete begin again. Raises CorruptRecord.
    """
    restored = RestoredGroups()
    begun: list[_Found] = []
    restarted: dict[int, int] = {}
    """Groups that are generated again, with the number of times that the prompt of each was requeued."""
    for group in groups:
        found = _read(group, samples)
        if found.versions or group.is_ready:
            begun.append(found)
        else:
            restarted[group.id] = group.requeues
    for found in sorted(begun, key=lambda found: (-_head_lag(found, control), found.group.id)):
        id_, requeues, versions = found.group.id, found.group.requeues, _versions(found, control)
        if found.group.is_ready:
            if control.restore_ready(id_, versions, requeues):
                restored.ready.append(_ready(found))
                continue
        elif not other_prompts and (ticket := control.restore_open(id_, versions, requeues)):
            prompt = prompts.at(found.group.position)
            restored.continued.append(CollectedGroup(ticket, prompt, found.samples))
            control.generating(id_)
            continue
        ledger.discarded(id_, found.tokens)
        restarted[id_] = requeues
    for id_, requeues in sorted(restarted.items()):
        control.restore_unstarted(id_, requeues)
    restored.restarted = len(restarted)
    return restored


def _read(group: recovery.OpenGroup, n: int) -> _Found:
    samples: list[SampleState | None] = [None] * n
    versions: set[int] = set()
    tokens = 0
    for number, stored in group.samples.items():
        sample = samples[number] = SampleState()
        if stored.state in KINDS and stored.header is not None:
            header = decode_header(stored.header)
            sample.kind, sample.refs, sample.header = KINDS[stored.state], stored.refs, stored.header
            sample.trajectory = header if sample.kind == JUDGED else None
            versions.update(header.trained_tokens)
            tokens += header.sampled_length
            continue
        sample.pieces = list(stored.pieces)
        spans = [span for _, piece in stored.pieces for span in decode_piece(piece).spans]
        versions.update(version for version, _ in spans if version != UNSAMPLED)
        tokens += sum(length for _, length in spans)
    return _Found(group, samples, frozenset(versions), tokens)


def _versions(found: _Found, control: RolloutControl) -> frozenset[int]:
    """Return the versions of all tokens that the group has or can have before the next version."""
    return found.versions if found.group.is_ready else control.may_have(found.versions)


def _head_lag(found: _Found, control: RolloutControl) -> int:
    return max(map(control.lag, _versions(found, control)), default=0)


def _ready(found: _Found) -> ReadyGroup:
    trajectories: list[StoredTrajectory] = []
    for sample in found.samples:
        assert sample is not None
        assert sample.trajectory is not None
        trajectories.append(StoredTrajectory(sample.trajectory, sample.refs))
    return ReadyGroup(found.group.id, tuple(trajectories))
