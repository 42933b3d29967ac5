"""Puts a completion together from parts: its tokens so far are the prefix of the request for the rest. Pure.

    part one    tokens [0, n), interrupted        -> sent behind the prompt, with the rest of the token budget
    part two    tokens [0, m), stop or length     -> merge(part one, part two): tokens [0, n + m)

Each token keeps the log-prob and the version with which it was sampled.
"""

from dataclasses import replace

from slipstream.rollout.trajectory import Completion, Finish, Span


def merge(first: Completion, then: Completion) -> Completion:
    """Return ``first`` continued by ``then`` as one completion, with the finish of ``then``."""
    n = len(first.tokens)
    shifted = tuple(Span(span.version, span.start + n, span.end + n) for span in then.spans)
    return Completion(
        first.tokens + then.tokens,
        first.logprobs + then.logprobs,
        joined(first.spans + shifted),
        then.finish,
        first.retractions + then.retractions,
    )


def joined(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Join neighbouring spans of one version; together they tile the same tokens."""
    tiles: list[Span] = []
    for span in spans:
        if tiles and tiles[-1].version == span.version:
            tiles[-1] = replace(tiles[-1], end=span.end)
        else:
            tiles.append(span)
    return tuple(tiles)


def head(completion: Completion, n: int) -> Completion:
    """Return the first ``n`` tokens, as a partial completion."""
    return Completion(
        completion.tokens[:n],
        completion.logprobs[:n],
        tuple(Span(s.version, s.start, min(s.end, n)) for s in completion.spans if s.start < n),
        Finish.PARTIAL,
        completion.retractions,
    )


def tokens_left(so_far: Completion | None, budget: int) -> int:
    """Return how many tokens of ``budget`` may still be generated; 0 when the completion has ended."""
    if so_far is None:
        return budget
    return max(0, budget - len(so_far.tokens)) if so_far.finish is Finish.PARTIAL else 0


def ended(completion: Completion) -> Completion:
    """Return ``completion``, which nothing is added to: if it is partial, it has used up its token budget."""
    return replace(completion, finish=Finish.LENGTH) if completion.finish is Finish.PARTIAL else completion
