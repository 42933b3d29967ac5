"""Reads the completions that SGLang 0.5.21 streams from /generate, and gives each token its policy version.

No I/O. This is the place where the policy version of each token is decided, and with it every lag in a run.
The version comes from the engine itself, never from the time at which a token arrives.

    last chunk       `weight_versions`: the engine's own spans, exact for every token. They replace what the
                     chunks before gave. An aborted completion ends with such a chunk, too.
    earlier chunks   `weight_version` alone: the version that the server has while it hands the chunk out. An
                     update may have come since it sampled the tokens.

So a completion whose last chunk is missing has *lower bounds* for versions: the tokens of a chunk
get the version reported with the chunk before, and those of the first chunk a version that the engine had
when the request was sent. Versions only grow, so a token may be newer than its number says, but never older:
lag may be overstated, but never understated. No token so far is newer than the version that is reported with
its chunk (``newest``): the server has that before it samples from the weights. (Tokens that follow a chunk
could only be older than the version reported with it if an update fitted between the sampling of its last
token and its handing out. That takes milliseconds, an update several round trips.)

With `stream` the server sends a chunk with the first token, a chunk after every `stream_interval` further
tokens, and a last chunk with the reason of the end. With `incremental_streaming_output`, which
``rollout.engine.server_process.server_args`` sets, a chunk holds only new tokens. Without it a chunk repeats
all tokens before, which is read as well.

Everything that a chunk says is checked before anything of it is kept: ids inside the vocabulary, finite
log-probs that are not positive, as many tokens as the server counts, versions for all of them.
"""

import base64
from collections.abc import Sequence
from typing import NamedTuple, NotRequired, TypedDict, cast

import numpy as np

from slipstream.rollout.engine.growing import Alternatives, GrowingCompletion
from slipstream.rollout.tokens.routes import Experts, narrowed
from slipstream.rollout.tokens.trajectory import Finish

HIGHEST_LOGPROB = 1e-3
"""Rounding may bring the log-prob of a certain token a little above 0."""

LOWEST_LOGPROB = -3.4028234663852886e38
"""Smallest finite float32: a log-prob below it would be stored as minus infinity."""

FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}
"""Reasons by which a completion ends, by SGLang's name."""


UNCOMPILED = "Aborted by AbortReq."
"""Message of a request that is aborted while its grammar is compiled. SGLang gives it a status of refusal."""


class _FinishReason(TypedDict):
    type: str
    message: str
    """With the type ``abort`` only, and even there not always."""
    status_code: NotRequired[int | None]
    """With the type ``abort`` only: an HTTP status if the server refuses the request."""
    matched: NotRequired[int | str | list[int] | None]
    """With the type ``stop`` only: the token id, string or expression that ended the completion."""


class _VersionSpan(TypedDict):
    version: str
    start: int
    end: int


class _Meta(TypedDict):
    finish_reason: _FinishReason | None
    weight_version: str
    weight_versions: list[_VersionSpan]
    """In the last chunk only."""
    prompt_tokens: int
    completion_tokens: int
    """Total over all chunks so far."""
    num_retractions: NotRequired[int | None]
    output_token_logprobs: Sequence[tuple[float, int, object]]
    """(log-prob, token id, text) of each token."""
    output_top_logprobs: NotRequired[Sequence[Sequence[tuple[float, int, object]] | None]]
    """The likeliest tokens at each position, where they were asked for."""
    cached_tokens: NotRequired[int | None]
    input_token_logprobs: Sequence[tuple[float | None, int, object]]
    """Only where it was asked for. The log-prob of the first token is None."""
    input_top_logprobs: NotRequired[Sequence[Sequence[tuple[float, int, object]] | None]]
    """The likeliest tokens at each position of the prompt, where they were asked for."""
    routed_experts: NotRequired[str | None]
    """In the last chunk only, where they were asked for: experts of the tokens from the one that was asked
    for up to the last but one, int32 [tokens, layers, experts of a token] in base64."""


class _Failure(TypedDict):
    message: str
    code: NotRequired[int | None]


class _Chunk(TypedDict):
    output_ids: list[int]
    meta_info: _Meta
    error: NotRequired[_Failure]


class Refused(ValueError):
    """The server refuses the request. The message is the server's own."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The server's HTTP status; None: it gave none."""


class Aborted(RuntimeError):
    """The server gave up this one completion, which may be continued: what has arrived of it is kept."""

    def __init__(self, message: str, *, attested: bool = False) -> None:
        super().__init__(message)
        self.attested = attested
        """The versions of what is kept are the engine's own, not lower bounds."""


class CompletionStream:
    """Adds the reply to one request to a completion, chunk by chunk.

        stream = CompletionStream(completion, version, vocab_size)
        while not stream.add(next_chunk):
            ...                          # the completion has grown

    The versions of the added tokens are lower bounds until the last chunk replaces them by the engine's own.
    """

    def __init__(self, completion: GrowingCompletion, version: int, vocab_size: int) -> None:
        """``version``: any policy version that the engine has had when the request is sent.

        ``completion``: empty, or what the request continues.
        """
        self._completion = completion
        self._start = len(completion.tokens)
        self._retractions_before = completion.retractions
        self._reported = version
        self._vocab_size = vocab_size

    def add(self, chunk: object) -> bool:
        """Take the next chunk. Return True if it was the last one.

        Raises Aborted when the server gave the completion up, Refused when it refuses the request, and
        another ValueError for a malformed chunk, nothing of which is kept.
        """
        try:
            return self._add(cast(_Chunk, chunk))
        except (LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a reply of /generate: {type(error).__name__}: {error}") from error

    def _add(self, chunk: _Chunk) -> bool:
        if "error" in chunk:
            raise Refused(chunk["error"]["message"], chunk["error"].get("code"))
        meta = chunk["meta_info"]
        reason = meta["finish_reason"]
        aborted = reason is not None and reason["type"] == "abort"
        if reason is not None and aborted and reason.get("message") == UNCOMPILED:
            raise Aborted(UNCOMPILED)
        if reason is not None and aborted and reason.get("status_code"):
            raise Refused(reason["message"], reason.get("status_code"))
        # Everything is read before anything changes: a malformed chunk leaves the completion as it was.
        tokens, logprobs = self._new(meta)
        if not aborted:
            self._check_ids(list(chunk["output_ids"]), tokens)
        alternatives = _alternatives(meta, len(tokens))
        prompt = _prompt(meta) if self._completion.wants_prompt else None
        if prompt is None and self._completion.wants_prompt and reason is not None and not aborted:
            raise ValueError("the log-probs of the prompt are missing")
        finish, matched, spans, reported = Finish.PARTIAL, None, None, self._reported
        if reason is None:
            reported = int(meta["weight_version"])
        elif not aborted:
            finish, matched = FINISHES[reason["type"]], _matched(reason)
        if reason is not None and (not aborted or "weight_versions" in meta):
            spans = _spans(meta["weight_versions"], self._known + len(tokens))
        retractions = int(meta.get("num_retractions") or 0)
        routes = None if reason is None else self._routes(meta)

        completion = self._completion
        if not completion.tokens:
            completion.cached_tokens = int(meta.get("cached_tokens") or 0)
        completion.add(self._reported, tokens, logprobs)
        completion.alternatives += alternatives
        if prompt is not None:
            completion.prompt_logprobs, completion.prompt_alternatives = prompt
            completion.wants_prompt = False
        self._reported = completion.newest = reported
        if retractions:
            completion.retractions = self._retractions_before + retractions
        if spans is not None:
            completion.retag(self._start, spans)
        completion.finish, completion.matched = finish, matched
        if routes is not None:
            completion.add_routes(int(meta["prompt_tokens"]) - self._start, routes)
        if reason is not None and aborted:
            self._drop_last(tokens)
            message = f"generation was aborted: {reason.get('message', '')}"
            raise Aborted(message, attested=spans is not None)
        return reason is not None

    @property
    def _known(self) -> int:
        """Number of tokens of this reply so far."""
        return len(self._completion.tokens) - self._start

    def _new(self, meta: _Meta) -> tuple[list[int], list[float]]:
        """Return the new tokens and their log-probs.

        Their number follows from the total, and they are taken from the end of the list. The list may hold
        all tokens although earlier chunks held only new ones: SGLang sends a request that is aborted in its
        queue that way.
        """
        known = self._known
        new = int(meta["completion_tokens"]) - known
        given = meta["output_token_logprobs"]
        if not 0 <= new <= len(given):
            raise ValueError(f"{known} tokens and log-probs of {len(given)} are not {known + new} tokens")
        entries = given[len(given) - new :]
        tokens = [int(entry[1]) for entry in entries]
        logprobs = [float(entry[0]) for entry in entries]
        self._check_values(tokens, logprobs)
        return tokens, logprobs

    def _routes(self, meta: _Meta) -> Experts | None:
        """Return the experts of tokens. None: they are not wanted, or the server does not know them, as of a
        request that was aborted in its queue."""
        wanted, given = self._completion.routes_wanted, meta.get("routed_experts")
        if wanted is None or not given:
            return None
        rows = int(meta["prompt_tokens"]) + int(meta["completion_tokens"]) - 1 - wanted
        ids = np.frombuffer(base64.b64decode(given, validate=True), "<i4")
        if rows <= 0 or len(ids) % rows or not len(ids):
            raise ValueError(f"{len(ids)} experts of {rows} tokens, expected equally many of each")
        return narrowed(ids.reshape(rows, -1))

    def _check_values(self, tokens: list[int], logprobs: list[float]) -> None:
        for number, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), self._known):
            if not 0 <= token < self._vocab_size:
                raise ValueError(
                    f"token {number} of the completion has the id {token}, "
                    f"which is outside the vocabulary of {self._vocab_size}"
                )
            if not LOWEST_LOGPROB <= logprob <= HIGHEST_LOGPROB:  # NaN is not
                raise ValueError(
                    f"token {number} of the completion has the log-prob {logprob}, "
                    "expected a finite number that is not positive"
                )

    def _check_ids(self, ids: list[int], new: list[int]) -> None:
        """Compare ``output_ids``, which hold the new tokens and may repeat the ones before."""
        repeated = len(ids) - len(new)
        known = self._completion.tokens[len(self._completion.tokens) - max(0, repeated) :]
        if not 0 <= repeated <= self._known or known.tolist() + new != ids:
            raise ValueError("the token ids of the log-probs differ from output_ids")

    def _drop_last(self, new: list[int]) -> None:
        """Keep the tokens from which an aborted completion may be continued.

        An abort hides whether the token sampled last is the end token, after which no token may follow. So
        this token is dropped and sampled again, whichever it is: dropping only end tokens would bias the
        trained completions. Tokens of earlier chunks stay, because the end token is always in the last chunk.
        """
        if new:
            self._completion.cut(len(self._completion.tokens) - 1)


def _matched(reason: _FinishReason) -> int | str | None:
    """Return what ended a completion. SGLang lists several token ids where a request stops at sequences."""
    matched = reason.get("matched")
    return matched[-1] if isinstance(matched, list) else matched


def _alternatives(meta: _Meta, new: int) -> list[Alternatives]:
    """Return the likeliest tokens at the positions of the ``new`` last tokens; nothing if none are given."""
    given = meta.get("output_top_logprobs")
    if not given or not new:
        return []
    if len(given) < new:
        raise ValueError(f"alternatives to {len(given)} tokens, expected {new}")
    return [_position(position) for position in given[len(given) - new :]]


def _position(given: Sequence[tuple[float, int, object]] | None) -> Alternatives:
    return tuple((float(entry[0]), int(entry[1])) for entry in given or ())


def _prompt(meta: _Meta) -> tuple[list[float | None], list[Alternatives]] | None:
    """Return the log-probs of the prompt, and the alternatives to its tokens; None: they have not come."""
    given = meta.get("input_token_logprobs")
    if not given:
        return None
    logprobs = [None if entry[0] is None else float(entry[0]) for entry in given]
    if len(logprobs) != int(meta["prompt_tokens"]) or any(
        logprob is None or not LOWEST_LOGPROB <= logprob <= HIGHEST_LOGPROB for logprob in logprobs[1:]
    ):
        raise ValueError(f"log-probs of {len(logprobs)} of {meta['prompt_tokens']} prompt tokens")
    return logprobs, [_position(position) for position in meta.get("input_top_logprobs") or ()]


def _spans(reported: list[_VersionSpan], length: int) -> list[tuple[int, int]]:
    """Return (version, tokens) of the engine's own spans. Raises ValueError unless they tile all tokens.

    SGLang gives a completion without tokens one empty span.
    """
    spans: list[tuple[int, int]] = []
    begin = 0
    for span in reported:
        start, end = int(span["start"]), int(span["end"])
        if start != begin or end < start:
            raise ValueError(f"version spans {reported} do not tile {length} tokens")
        spans.append((int(span["version"]), end - start))
        begin = end
    if begin != length:
        raise ValueError(f"version spans {reported} do not tile {length} tokens")
    return spans


class TokenScores(NamedTuple):
    """Log-probs of the last tokens of a prompt, each given all tokens before it."""

    logprobs: list[float]
    top: list[Alternatives]
    """The likeliest tokens at each of these places; empty: they were not asked for."""


def parse_token_scores(reply: object, tokens: Sequence[int], top_k: int) -> TokenScores:
    """Return the log-probs of ``tokens``, the last of a prompt. The reply begins with the token before them.

    Raises Aborted when the server gave the request up, and ValueError for a reply about other tokens and for
    any value that is missing or no log-prob.
    """
    try:
        meta = cast(_Chunk, reply)["meta_info"]
        reason = cast(_FinishReason, meta["finish_reason"])
        if reason["type"] == "abort":
            raise Aborted(f"generation was aborted: {reason.get('message', '')}")
        given = meta["input_token_logprobs"]
        if len(given) != len(tokens) + 1:
            raise ValueError(f"log-probs of {len(given)} tokens, expected {len(tokens) + 1}")
        entries = given[1:]
        # SGLang reports the last id of the vocabulary as 0, with its own log-prob.
        if any(int(entry[1]) not in (token, 0) for entry, token in zip(entries, tokens, strict=True)):
            raise ValueError("the log-probs are of other tokens than those that were asked about")
        logprobs = [_checked_logprob(entry[0], place) for place, entry in enumerate(entries)]
        if not top_k:
            return TokenScores(logprobs, [])
        top = [_position(position) for position in meta.get("input_top_logprobs") or ()][1:]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not a reply of /generate: {type(error).__name__}: {error}") from error
    short = [place for place, position in enumerate(top) if len(position) != top_k]
    if len(top) != len(tokens) or short:
        raise ValueError(f"the {top_k} likeliest tokens are missing at some of {len(tokens)} places")
    for place, position in enumerate(top):
        for logprob, _ in position:
            _checked_logprob(logprob, place)
    return TokenScores(logprobs, top)


def _checked_logprob(value: float | None, place: int) -> float:
    if value is None or not LOWEST_LOGPROB <= float(value) <= HIGHEST_LOGPROB:  # NaN is not
        raise ValueError(
            f"the log-prob of token {place} is {value}, expected a finite number that is not positive"
        )
    return float(value)


def parse_prompt_logprobs(reply: object, length: int, version: int | None = None) -> list[float]:
    """Return the log-probs of all but the first of ``length`` prompt tokens.

    Raises Aborted when the server gave the request up, ValueError for a malformed reply, or one of weights
    other than ``version``, unless that is None.
    """
    try:
        meta = cast(_Chunk, reply)["meta_info"]
        reason = cast(_FinishReason, meta["finish_reason"])
        if reason["type"] == "abort":
            raise Aborted(f"generation was aborted: {reason.get('message', '')}")
        _first, *rest = meta["input_token_logprobs"]
        logprobs = [float(cast(float, logprob)) for logprob, *_ in rest]
        if version is not None and int(meta["weight_version"]) != version:
            raise ValueError(f"log-probs of version {meta['weight_version']}, expected {version}")
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not a reply of /generate: {type(error).__name__}: {error}") from error
    if len(logprobs) != length - 1:
        raise ValueError(f"log-probs of {len(logprobs) + 1} prompt tokens, expected {length}")
    return logprobs
