"""Reads the completions that SGLang 0.5.21 streams from /generate, and gives each token its policy version.

No I/O. This is the place where the policy version of each token is decided, and with it every lag in a run.
The version comes from the engine itself, never from the time at which a token arrives.

    last chunk       `weight_versions`: the engine's own spans, exact for every token. They replace what the
                     chunks before gave. An aborted completion ends with such a chunk, too.
    earlier chunks   `weight_version` alone: the version that the server has while it hands the chunk out. An
                     update may have come since it sampled the tokens.

So a partial completion, whose last chunk is missing, has *lower bounds* for versions: the tokens of a chunk
get the version reported with the chunk before, and those of the first chunk a version that the engine had
when the request was sent. Versions only grow, so a token may be newer than its number says, but never older:
lag may be overstated, but never understated. (Tokens that follow a chunk could only be older than the version
reported with it if an update fitted between the sampling of its last token and its handing out. That takes
milliseconds, an update several round trips.)

With `stream` the server sends a chunk with the first token, a chunk after every `stream_interval` further
tokens, and a last chunk with the reason of the end. With `incremental_streaming_output`, which
``process.server_args`` sets, a chunk holds only new tokens. Without it a chunk repeats all tokens before,
which is read as well.
"""

from collections.abc import Sequence
from typing import NotRequired, TypedDict, cast

from slipstream.rollout.engine.continuation import head, joined
from slipstream.rollout.trajectory import Completion, Finish, Span


class _FinishReason(TypedDict):
    type: str
    message: str
    """With the type ``abort`` only, and even there not always."""
    status_code: NotRequired[int | None]
    """With the type ``abort`` only: an HTTP status if the server refuses the request."""


class _VersionSpan(TypedDict):
    version: str
    start: int
    end: int


class _Meta(TypedDict):
    finish_reason: _FinishReason | None
    weight_version: str
    weight_versions: list[_VersionSpan]
    """In the last chunk only."""
    completion_tokens: int
    """Total over all chunks so far."""
    num_retractions: NotRequired[int | None]
    output_token_logprobs: Sequence[tuple[float, int, object]]
    """(log-prob, token id, text) of each token."""
    input_token_logprobs: Sequence[tuple[float, int, object]]
    """Only where it was asked for. The log-prob of the first token is None."""


class _Failure(TypedDict):
    message: str


class _Chunk(TypedDict):
    output_ids: list[int]
    meta_info: _Meta
    error: NotRequired[_Failure]


class Aborted(RuntimeError):
    """The server gave up this one completion. Send the request again, or continue it from ``partial``."""

    def __init__(self, message: str, partial: Completion | None = None) -> None:
        super().__init__(message)
        self.partial = partial
        """Tokens that were generated and arrived, or None if there are none."""


class CompletionStream:
    """Collects one completion from its chunks.

        stream = CompletionStream(version)
        while (completion := stream.add(next_chunk)) is None:
            ...                          # stream.partial holds the tokens so far

    The versions in ``partial`` are lower bounds; those of the whole completion are the engine's own spans.
    """

    def __init__(self, version: int) -> None:
        """``version``: any policy version that the engine has had when the request is sent."""
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._spans: tuple[Span, ...] = ()
        self._reported = version
        self._retractions = 0

    @property
    def partial(self) -> Completion | None:
        """The tokens so far as a partial completion, or None if there are none."""
        return self._completion(Finish.PARTIAL) if self._tokens else None

    def add(self, chunk: object) -> Completion | None:
        """Take the next chunk. Return the whole completion if it is the last chunk, else None.

        Raises Aborted when the server gave the completion up, ValueError for a refusal or a malformed chunk.
        """
        try:
            return self._add(cast(_Chunk, chunk))
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"not a reply of /generate: {type(error).__name__}: {error}") from error

    def _add(self, chunk: _Chunk) -> Completion | None:
        if "error" in chunk:
            raise ValueError(chunk["error"]["message"])
        meta = chunk["meta_info"]
        reason = meta["finish_reason"]
        aborted = reason is not None and reason["type"] == "abort"
        if reason is not None and aborted and reason.get("status_code"):
            raise ValueError(reason["message"])
        new = self._take(meta)
        self._retractions = int(meta.get("num_retractions") or self._retractions)
        if not aborted:
            self._check_ids(list(chunk["output_ids"]), new)
        if reason is None:
            self._reported = int(meta["weight_version"])
            return None
        if not aborted or "weight_versions" in meta:
            self._spans = _spans(meta["weight_versions"])
        if aborted:
            raise Aborted(f"generation was aborted: {reason.get('message', '')}", self._without_end(new))
        return self._completion(Finish(reason["type"]))

    def _take(self, meta: _Meta) -> int:
        """Take over the new tokens and return their number.

        The number follows from the total, and the tokens are taken from the end of the list. The list may
        hold all tokens although earlier chunks held only new ones: SGLang sends a request that is aborted in
        its queue that way.
        """
        known = len(self._tokens)
        new = int(meta["completion_tokens"]) - known
        given = meta["output_token_logprobs"]
        if not 0 <= new <= len(given):
            raise ValueError(f"{known} tokens and log-probs of {len(given)} are not {known + new} tokens")
        for logprob, token, *_ in given[len(given) - new :]:
            self._logprobs.append(float(logprob))
            self._tokens.append(int(token))
        if new:
            self._spans = joined((*self._spans, Span(self._reported, known, known + new)))
        return new

    def _check_ids(self, ids: list[int], new: int) -> None:
        if len(ids) < new or self._tokens[len(self._tokens) - len(ids) :] != ids:
            raise ValueError("the token ids of the log-probs differ from output_ids")

    def _without_end(self, new: int) -> Completion | None:
        """Return the tokens from which an aborted completion may be continued.

        An abort hides whether the token sampled last is the end token, behind which nothing must follow. So
        this token is dropped and sampled again, whichever it is: dropping it by its value would bias what is
        trained. Tokens of earlier chunks stay, because the end token is always in the last chunk.
        """
        kept = len(self._tokens) - (1 if new else 0)
        return head(self._completion(Finish.PARTIAL), kept) if kept else None

    def _completion(self, finish: Finish) -> Completion:
        return Completion(tuple(self._tokens), tuple(self._logprobs), self._spans, finish, self._retractions)


def _spans(reported: list[_VersionSpan]) -> tuple[Span, ...]:
    # SGLang gives a completion without tokens one empty span.
    return tuple(
        Span(int(span["version"]), int(span["start"]), int(span["end"]))
        for span in reported
        if span["end"] != span["start"]
    )


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
        logprobs = [float(logprob) for logprob, *_ in rest]
        if version is not None and int(meta["weight_version"]) != version:
            raise ValueError(f"log-probs of version {meta['weight_version']}, expected {version}")
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not a reply of /generate: {type(error).__name__}: {error}") from error
    if len(logprobs) != length - 1:
        raise ValueError(f"log-probs of {len(logprobs) + 1} prompt tokens, expected {length}")
    return logprobs
