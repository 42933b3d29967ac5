"""Defines an endpoint, and the OpenAPI description of all: the fields of requests. No SGLang in here."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from slipstream.configs.schema import LimitsConfig
from slipstream.rollout.gateway.serving import fields
from slipstream.rollout.gateway.serving.call import LiveCall
from slipstream.rollout.gateway.serving.client_tools import ClientTools, read_tools
from slipstream.rollout.gateway.serving.limits import Refusal
from slipstream.rollout.gateway.serving.marks import marked
from slipstream.rollout.gateway.serving.preferences import Abilities, served
from slipstream.rollout.gateway.serving.replies import Result
from slipstream.rollout.gateway.serving.rewarding import OPENING, REWARD, SESSION_REWARD, schema_of
from slipstream.rollout.gateway.serving.words import Protocols

_REFERENCE = "#/components/schemas/{model}"
_OWN: dict[str, object] = {
    "session_id": {"type": "string", "maxLength": 256},
    "turn_type": {"enum": ["main", "side"]},
    "session_done": {"enum": [True, False, "1", "true", "yes", "on"]},
}
_ABORT: dict[str, object] = {
    "type": "object",
    "required": ["rid"],
    "properties": {"rid": {"type": "string"}, "abort_all": {"const": False}},
}


@dataclass(frozen=True)
class Reading:
    """How a process reads what its policy cannot do as asked."""

    policy: Abilities
    refuses_hosted: bool
    """Refuse tools that a provider would run, in place of leaving them out."""
    refuses_contents: bool
    """Refuse contents that are no text, in place of marking them."""


@dataclass(frozen=True)
class Endpoint:
    """One way of asking for answers."""

    path: str
    body: type[BaseModel]
    allowed: Collection[str]
    known: Mapping[str, object]
    """The default of every field that SGLang's endpoint reads."""
    protocol: Protocols
    answer: Callable[[LiveCall, Any], Awaitable[Result]]
    reading: Reading
    generates: bool = True
    chats: bool = True
    """The body has messages and tools; else text or ids."""

    @property
    def name(self) -> str:
        return self.path.removeprefix("/")

    def read(self, body: object, limits: LimitsConfig) -> "ReadBody":
        """Return a checked body. Raises Refusal with 400."""
        if not isinstance(body, dict):
            raise Refusal(400, "expected a JSON object as the body")
        try:
            given, tools, ignored, marks = self._understood(cast("dict[str, object]", body))
            _check_messages(given, limits)
            return ReadBody(self.body.model_validate(given), tools, ignored, marks)
        except Refusal:
            raise
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise Refusal(400, f"{where}: {first['msg']}" if where else first["msg"], param=where) from error
        except Exception as error:
            # SGLang's own validators meet what they do not expect before the types are checked.
            raise Refusal(400, f"the body cannot be read: {type(error).__name__}: {error}") from error

    def _understood(
        self, body: dict[str, object]
    ) -> tuple[dict[str, object], ClientTools, list[str], list[str]]:
        """Return the fields of a body that SGLang reads, and what became of the others."""
        if not self.chats:
            given, ignored = fields.check_fields(body, self.allowed, self.known)
            return given, ClientTools(), ignored, []
        given, tools = read_tools(body, self.protocol, refuse=self.reading.refuses_hosted)
        given, wishes = served(given, self.protocol, self.reading.policy)
        given, marks = marked(given, refuse=self.reading.refuses_contents)
        given, unknown = fields.check_fields(given, self.allowed, self.known)
        return given, tools, [*tools.ignored, *wishes, *unknown], marks


@dataclass(frozen=True)
class ReadBody:
    """A body as SGLang's endpoint reads it, and what was left out of it."""

    request: BaseModel
    tools: ClientTools
    ignored: list[str]
    """Wishes and unknown fields."""
    marks: list[str]
    """What the contents are called in whose places marks stand."""


def _check_messages(given: dict[str, object], limits: LimitsConfig) -> None:
    for name in ("messages", "input"):
        messages = given.get(name)
        if isinstance(messages, list) and len(messages) > limits.messages:
            raise Refusal(
                400, f"{name}: expected at most {limits.messages}, found {len(messages)}", param=name
            )


def describe(document: dict[str, Any], endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Add the bodies of all endpoints to an OpenAPI document, and return it."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for endpoint in endpoints:
        schema = endpoint.body.model_json_schema(ref_template=_REFERENCE)
        schemas |= schema.pop("$defs", {})
        schema["properties"] = {
            name: value for name, value in schema["properties"].items() if name in endpoint.allowed
        } | _OWN
        schemas[endpoint.body.__name__] = schema
        reference = {"$ref": _REFERENCE.format(model=endpoint.body.__name__)}
        for path in (endpoint.path, f"/sessions/{{session}}{endpoint.path}"):
            if path in document["paths"]:
                _set_body(document["paths"][path]["post"], reference)
    for path, own, required in (
        ("/rewards", REWARD, ["value"]),
        ("/sessions", OPENING, []),
        ("/sessions/{session}/reward", SESSION_REWARD, ["reward"]),
    ):
        _set_body(document["paths"][path]["post"], schema_of(own, required))
    _set_body(document["paths"]["/abort_request"]["post"], _ABORT)
    return document


def _set_body(operation: dict[str, object], schema: Mapping[str, object]) -> None:
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
