"""Errors in the words of each provider: one table of statuses, types, codes and phrases. Pure.

Agents act on these words: they compact a conversation that is too long, wait when there is no room, and give
up without a key. What OpenAI's and Anthropic's own servers say is the only form that all of them know.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from slipstream.rollout.gateway.serving.limits import Refusal


class Protocols(StrEnum):
    """Whose words an endpoint uses."""

    OPENAI = "openai"
    RESPONSES = "responses"
    """OpenAI's, of the endpoint of responses."""
    ANTHROPIC = "anthropic"


def protocol_of(path: str, headers: Mapping[str, str] | None = None) -> Protocols:
    """Return in whose words a path is answered. Anthropic's clients send a header with their version."""
    if "/v1/messages" in path or "anthropic-version" in (headers or {}):
        return Protocols.ANTHROPIC
    return Protocols.RESPONSES if "/v1/responses" in path else Protocols.OPENAI


@dataclass(frozen=True)
class Words:
    """One situation in the words of a provider."""

    status: int
    type: str
    code: str | None = None
    phrase: str = "{message}"
    """With the message and the facts of the refusal."""


TOO_LONG = "context_length_exceeded"
UNKNOWN_MODEL = "model_not_found"
UNKNOWN_RESPONSE = "previous_response_not_found"

_INVALID = "invalid_request_error"

WORDS: dict[str | int, tuple[Words, Words]] = {
    TOO_LONG: (
        Words(
            400,
            _INVALID,
            TOO_LONG,
            "This model's maximum context length is {context} tokens. However, your messages resulted in "
            "{tokens} tokens. Please reduce the length of the messages.",
        ),
        Words(400, _INVALID, phrase="prompt is too long: {tokens} tokens > {longest} maximum"),
    ),
    UNKNOWN_MODEL: (
        Words(
            404,
            _INVALID,
            UNKNOWN_MODEL,
            "The model `{model}` does not exist or you do not have access to it: {message}",
        ),
        Words(404, "not_found_error", phrase="model: {model} ({message})"),
    ),
    UNKNOWN_RESPONSE: (
        Words(400, _INVALID, UNKNOWN_RESPONSE),
        Words(404, "not_found_error"),
    ),
    400: (Words(400, _INVALID), Words(400, _INVALID)),
    401: (
        Words(401, _INVALID, "invalid_api_key", "Incorrect API key provided: {message}"),
        Words(401, "authentication_error", phrase="invalid x-api-key: {message}"),
    ),
    403: (Words(403, _INVALID, "permission_denied"), Words(403, "permission_error")),
    404: (Words(404, _INVALID), Words(404, "not_found_error")),
    408: (
        Words(408, _INVALID, "request_timeout", "Request timed out: {message}"),
        Words(408, "timeout_error", phrase="Request timed out: {message}"),
    ),
    413: (
        Words(413, _INVALID, "request_too_large", "Request too large: {message}"),
        Words(413, "request_too_large", phrase="Request exceeds the maximum size: {message}"),
    ),
    429: (
        Words(
            429,
            "{unit}",
            "rate_limit_exceeded",
            "Rate limit reached: {message}. Please try again in {retry}.",
        ),
        Words(429, "rate_limit_error", phrase="This request would exceed your rate limit: {message}"),
    ),
    500: (
        Words(500, "server_error", phrase="The server had an error while processing your request: {message}"),
        Words(500, "api_error", phrase="Internal server error: {message}"),
    ),
    503: (
        Words(
            503,
            "service_unavailable_error",
            "server_is_overloaded",
            "Our servers are currently overloaded. Please try again later: {message}",
        ),
        Words(529, "overloaded_error", phrase="Overloaded: {message}"),
    ),
    504: (
        Words(504, "server_error", "timeout", "Request timed out: {message}"),
        Words(504, "timeout_error", phrase="Request timed out: {message}"),
    ),
}
"""By the code of a refusal, or else by its status: OpenAI's words, and Anthropic's."""

_RESPONSES_TOO_LONG = (
    "Your input exceeds the context window of this model. Please adjust your input and try again. (It has "
    "{tokens} tokens, and the context ends at {context}.)"
)


def words_of(refused: Refusal, protocol: Protocols) -> Words:
    """Return a refusal as the provider says it."""
    both = WORDS.get(refused.code or "") or WORDS.get(refused.status)
    if both is None:
        openai, anthropic = WORDS[400 if refused.status < 500 else 500]
        both = (
            Words(refused.status, openai.type, refused.code),
            Words(refused.status, anthropic.type),
        )
    words = both[protocol is Protocols.ANTHROPIC]
    phrase = words.phrase
    if protocol is Protocols.RESPONSES and words.code == TOO_LONG:
        phrase = _RESPONSES_TOO_LONG
    facts = {
        "unit": "requests",
        "retry": f"{math.ceil(refused.retry_after_s or 1)}s",
        **refused.facts,
        "message": refused.message,
    }
    return Words(words.status, words.type.format(**facts), words.code or refused.code, phrase.format(**facts))


def error_body(refused: Refusal, protocol: Protocols) -> dict[str, object]:
    """Return the body of an error as the clients of a protocol expect it."""
    words = words_of(refused, protocol)
    if protocol is Protocols.ANTHROPIC:
        return {"type": "error", "error": {"type": words.type, "message": words.phrase}}
    return {
        "error": {
            "message": words.phrase,
            "type": words.type,
            "param": refused.param,
            "code": words.code,
        }
    }
