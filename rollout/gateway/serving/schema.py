"""The OpenAPI description of the endpoints: exactly what a client may set."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from pydantic import BaseModel

from slipstream.configs.schema import LimitsConfig
from slipstream.rollout.gateway.serving.call import LiveCall
from slipstream.rollout.gateway.serving.replies import Protocols, Result

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
_REWARD: dict[str, object] = {
    "type": "object",
    "required": ["reward"],
    "properties": {"reward": {"type": "number"}, "turn": {"type": "integer", "minimum": 0}},
}


class EndpointPort(Protocol):
    """An endpoint as the application uses it."""

    @property
    def path(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def body(self) -> type[BaseModel]: ...
    @property
    def allowed(self) -> Collection[str]: ...
    @property
    def protocol(self) -> Protocols: ...
    @property
    def generates(self) -> bool: ...
    @property
    def answer(self) -> Callable[[LiveCall, Any], Awaitable[Result]]: ...

    def read(self, body: object, limits: LimitsConfig) -> BaseModel: ...


def describe(document: dict[str, Any], endpoints: Sequence[EndpointPort]) -> dict[str, Any]:
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
    _set_body(document["paths"]["/sessions/{session}/reward"]["post"], _REWARD)
    _set_body(document["paths"]["/abort_request"]["post"], _ABORT)
    return document


def _set_body(operation: dict[str, object], schema: Mapping[str, object]) -> None:
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
