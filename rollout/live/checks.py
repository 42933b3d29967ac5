"""Checks what gateways and judges send about turns before anything is made of it. Pure."""

import numpy as np

from slipstream.rollout.ledger.rows.stored_turns import KnownTurn
from slipstream.rollout.tokens.record import CorruptRecord, decode_chunks
from slipstream.rollout.tokens.teacher import TeacherNeeds, TeacherScores
from slipstream.rollout.tokens.turn_entries import Turn

LARGEST_LOGPROB = 1e-3
"""Log-probs may be above 0 by what rounding adds."""


def check_chunk(entry: Turn, vocab: int) -> tuple[int, str | None]:
    """Return the number of context tokens of a turn's chunk, and what is wrong with the chunk, if anything.

    ``vocab``: number of token ids.
    """
    try:
        chunks = list(decode_chunks(entry.chunk))
    except CorruptRecord as error:
        return 0, str(error)
    if len(chunks) != 1:
        return 0, f"{len(chunks)} chunks, expected 1"
    context, tokens, logprobs = chunks[0]
    sampled = sum(number for _, number in entry.spans)
    if len(tokens) != sampled or any(number < 0 for _, number in entry.spans):
        return len(context), f"{len(tokens)} sampled tokens, and version spans {entry.spans}"
    for ids in (context, tokens):
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocab):
            return len(context), f"token ids outside the vocabulary of {vocab}"
    if not (np.isfinite(logprobs) & (logprobs <= LARGEST_LOGPROB)).all():
        return len(context), "log-probs that are no finite numbers of at most 0"
    return len(context), None


def problem_of_scores(turn: KnownTurn, teacher: TeacherScores, needs: TeacherNeeds, vocab: int) -> str | None:
    """Return what is wrong with a teacher's scores of a turn, if anything."""
    if len(teacher) != turn.head.sampled or not teacher.has_T.all():
        return (
            f"its judge gave a teacher's scores of {int(teacher.has_T.sum())} tokens, expected one for "
            f"each of the {turn.head.sampled} sampled tokens"
        )
    missing = needs.problem(teacher, np.ones(len(teacher), np.bool_))
    if missing is not None:
        return f"its judge has not given {missing}"
    if teacher.largest_id >= vocab:
        return f"its judge gave a teacher's token ids outside the vocabulary of {vocab}"
    return None


def can_continue(shared: int, parent: KnownTurn | None) -> bool:
    """True if a turn can share so many tokens with its parent; None: there is no such turn."""
    if parent is None:
        return False
    return not shared or (not parent.is_lost and shared <= parent.head.length)
