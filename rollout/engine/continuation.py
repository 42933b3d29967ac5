"""One answer out of parts: an interrupted answer is the prefix of the request that goes on with it. Pure.

    part one    tokens [0, n), cut off            -> sent behind the prompt, with the rest of the token budget
    part two    tokens [0, m), stop or length     -> merge(part one, part two): tokens [0, n + m)

Log-probs and versions are those under which each token was sampled; going on changes neither.
"""

from dataclasses import replace

from slipstream.rollout.trajectory import Completion, Finish, Span


def merge(first: Completion, then: Completion) -> Completion:
    """``then`` continued ``first``: one completion, with the finish of ``then``."""
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
    """The same tiling, with neighbours of one version made one span."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].version == span.version:
            found[-1] = replace(found[-1], end=span.end)
        else:
            found.append(span)
    return tuple(found)


def head(completion: Completion, n: int) -> Completion:
    """The first ``n`` tokens, as an answer that goes on."""
    return Completion(
        completion.tokens[:n],
        completion.logprobs[:n],
        tuple(Span(s.version, s.start, min(s.end, n)) for s in completion.spans if s.start < n),
        Finish.PARTIAL,
        completion.retractions,
    )


def tokens_left(so_far: Completion | None, budget: int) -> int:
    """How many tokens may still be asked for; 0 when the answer has ended."""
    if so_far is None:
        return budget
    return max(0, budget - len(so_far.tokens)) if so_far.finish is Finish.PARTIAL else 0


def ended(answer: Completion) -> Completion:
    """An answer that is complete: what was cut off with its token budget used up has ended by its length."""
    return replace(answer, finish=Finish.LENGTH) if answer.finish is Finish.PARTIAL else answer
