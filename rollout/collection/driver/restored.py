"""Takes in the groups that a restart finds unfinished: of the run, or of its trainer alone.

all trajectories judged ──► ready, unless too old by now ──────┐
something recorded      ──► continued, unless too old by now ──┼──► generated again from the prompt
nothing recorded        ───────────────────────────────────────┘
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from slipstream.rollout.collection.driver.collected_group import CollectedGroup
from slipstream.rollout.collection.driver.intake import PromptSource
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.ledger import recovery
from slipstream.rollout.ledger.reading.contents import sampled_tokens
from slipstream.rollout.ledger.rows.samples import JUDGED
from slipstream.rollout.tokens.record import decode_header, decode_piece
from slipstream.rollout.tokens.trajectory import UNSAMPLED


@dataclass
class RestoredGroups:
    """The groups that hold slots again."""

    ready: list[CollectedGroup] = field(default_factory=list[CollectedGroup])
    continued: list[CollectedGroup] = field(default_factory=list[CollectedGroup])
    restarted: int = 0
    """Number of groups that are generated again."""


def take_up(
    groups: Iterable[recovery.OpenGroup],
    control: RolloutControl,
    discarded: Callable[[int, int], None],
    prompts: PromptSource,
    samples: int,
    *,
    other_prompts: bool = False,
) -> RestoredGroups:
    """Give slots to groups from before a restart, those with the oldest tokens first. Nothing else was
    admitted to ``control``. ``samples``: episodes of a group. ``other_prompts``: the prompt set has
    changed, so that groups which are not complete begin again. ``discarded``: of the ledger, called with the
    number of each group that is given up, and of its sampled tokens. Raises CorruptRecord.
    """
    restored = RestoredGroups()
    begun: list[tuple[recovery.OpenGroup, frozenset[int]]] = []
    """Groups with the policy versions of the tokens that carry loss or may do so."""
    restarted: dict[int, int] = {}
    """Groups that are generated again, with the number of times that the prompt of each was requeued."""
    for group in groups:
        versions = _versions(group)
        if group.is_ready:
            begun.append((group, versions))
        elif versions:
            begun.append((group, control.may_have(versions)))
        else:
            restarted[group.id] = group.requeues
    begun.sort(key=lambda each: (-max(map(control.lag, each[1]), default=0), each[0].id))
    for group, versions in begun:
        id_, requeues = group.id, group.requeues
        if group.is_ready:
            if control.restore_ready(id_, versions, requeues):
                restored.ready.append(_collected(group, group.version, prompts, samples).counted())
                continue
        elif not other_prompts and (ticket := control.restore_open(id_, versions, requeues)):
            restored.continued.append(_collected(group, ticket.version, prompts, samples))
            control.generating(id_)
            continue
        discarded(id_, sum(map(sampled_tokens, group.samples.values())))
        restarted[id_] = requeues
    for id_, requeues in sorted(restarted.items()):
        control.restore_unstarted(id_, requeues)
    restored.restarted = len(restarted)
    return restored


def _versions(group: recovery.OpenGroup) -> frozenset[int]:
    """Return the versions of the group's tokens that carry loss or may do so. Raises CorruptRecord."""
    versions: set[int] = set()
    for sample in group.samples.values():
        if sample.header is not None:
            versions.update(decode_header(sample.header).trained_tokens)
            continue
        spans = [span for _, piece in sample.pieces for span in decode_piece(piece).spans]
        versions.update(version for version, _ in spans if version != UNSAMPLED)
    return frozenset(versions)


def _collected(
    group: recovery.OpenGroup, version: int, prompts: PromptSource, samples: int
) -> CollectedGroup:
    """Return a group with what exists of it, as its new assignment needs it, or its batch."""
    for sample in group.samples.values():
        if sample.state == JUDGED and sample.header is not None:
            sample.judged = decode_header(sample.header)
    recorded = [group.samples.get(number) for number in range(samples)]
    return CollectedGroup(group.id, version, prompts.at(group.position), recorded)
