"""A grammar that allows no further token ends its request, and not the engine with all of its requests.

A grammar may have no text at all (``root ::= root``), or none that the vocabulary can spell. SGLang 0.5.21
then masks every token, and its scheduler ends while it samples one. With these hooks, which SGLang's plugins
bring into every scheduler, such a mask masks nothing: the grammar rejects the token that is sampled, SGLang
ends the request, and its sender is told why.
"""

import os
from collections.abc import Callable
from http import HTTPStatus
from importlib.metadata import entry_points
from typing import Any

VARIABLE = "SLIPSTREAM_ENGINE"
"""Environment variable that is set in the processes of our engines, and not where others use SGLang."""

GROUP = "sglang.srt.plugins"
"""Entry points that SGLang's processes call when they start (pyproject.toml)."""

REASON = "the grammar (regex, ebnf, json_schema, ...) allows no further token: the vocabulary cannot spell it"

_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"


def use() -> None:
    """Let the processes that this one starts be guarded. Raises RuntimeError for an outdated installation."""
    if not any(point.value == f"{__name__}:guard" for point in entry_points(group=GROUP)):
        raise RuntimeError(
            f"the installed package lacks the entry point {GROUP} of its pyproject.toml: install Slipstream "
            "again (make install)"
        )
    os.environ[VARIABLE] = "1"


def guard() -> None:
    """Register the hooks. Called by SGLang."""
    if VARIABLE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in (
        ("sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.fill_vocab_mask", _fill),
        (f"{_RESULTS}._apply_prefill_grammar", _advance_first),
        (f"{_RESULTS}._accept_grammar_tokens", _advance),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)


def _fill(fill: Callable[..., None], grammar: object, vocab_mask: Any, idx: int) -> None:
    """``vocab_mask``: a bit for each token, 32 in an element of int32."""
    fill(grammar, vocab_mask, idx)
    if not vocab_mask[idx].any():
        vocab_mask[idx].fill_(-1)


def _advance_first(advance: Callable[..., None], processor: object, *, req: Any, **more: object) -> None:
    before = req.to_finish
    advance(processor, req=req, **more)
    _say_why(req, before)


def _advance(advance: Callable[..., Any], processor: object, req: Any, tokens: object) -> Any:
    before = req.to_finish
    kept = advance(processor, req, tokens)
    _say_why(req, before)
    return kept


def _say_why(request: Any, before: object) -> None:
    """Refuse a request that has just been ended by its grammar: an abort would have it sent again."""
    if request.to_finish is not before:
        request.to_finish = type(request.to_finish)(REASON, HTTPStatus.BAD_REQUEST, "BadRequestError")
