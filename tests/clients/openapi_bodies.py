"""Bodies for fuzzing: from the OpenAPI schema of an endpoint, most of them valid, some broken on purpose."""

from typing import Any

from hypothesis import strategies as st

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["", "auto", "function", "user", "http://127.0.0.1:1/x", "\x00", "{", "😀", "#reject"]),
    st.lists(st.integers(-1, 300), max_size=5),
    st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8), max_size=3),
)
DEPTH = 5


def bodies(document: dict[str, Any], path: str, valid: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Bodies of an endpoint: any, and a valid one with some fields set to anything."""
    operation = document["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    fields = _resolved(schema["$ref"], document)["properties"] if "$ref" in schema else schema["properties"]

    def near(names: list[str], wild: bool) -> st.SearchStrategy[dict[str, Any]]:
        drawn = {name: of_schema(fields[name], document, DEPTH, wild=wild) for name in names}
        return st.fixed_dictionaries(drawn).map(lambda values: {**valid, **values})

    some = st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=4, unique=True)
    return st.one_of(
        of_schema(schema, document, DEPTH, wild=True),
        st.tuples(some, st.booleans()).flatmap(lambda choice: near(*choice)),
        st.tuples(some, st.just(False)).flatmap(lambda choice: near(*choice)),
    )


def of_schema(schema: Any, document: dict[str, Any], depth: int, *, wild: bool) -> st.SearchStrategy[Any]:
    """Values of a schema; with ``wild``, one in a few is something else."""
    value = _valid(schema, document, depth, wild=wild)
    return st.integers(0, 9).flatmap(lambda die: JUNK if die == 0 else value) if wild else value


def _valid(schema: Any, document: dict[str, Any], depth: int, *, wild: bool) -> st.SearchStrategy[Any]:
    if not isinstance(schema, dict) or not schema or depth < 0:
        return JUNK
    if "$ref" in schema:
        return st.deferred(lambda: _valid(_resolved(schema["$ref"], document), document, depth, wild=wild))
    for kind in ("anyOf", "oneOf"):
        if kind in schema:
            return st.one_of([of_schema(part, document, depth, wild=wild) for part in schema[kind]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    match schema.get("type"):
        case "object":
            return _object(schema, document, depth, wild=wild)
        case "array":
            return st.lists(of_schema(schema.get("items"), document, depth - 1, wild=wild), max_size=3)
        case "string":
            return st.text(max_size=24) | st.sampled_from(["#say a", "#hold", "#reject", "user"])
        case "integer":
            return st.integers(schema.get("minimum", -5), schema.get("maximum", 40)) | st.integers()
        case "number":
            return st.floats(-3, 3) | st.integers(-2, 2)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return JUNK


def _object(
    schema: dict[str, Any], document: dict[str, Any], depth: int, *, wild: bool
) -> st.SearchStrategy[Any]:
    properties = {
        name: of_schema(part, document, depth - 1, wild=wild)
        for name, part in schema.get("properties", {}).items()
    }
    required = {name: properties.get(name, JUNK) for name in schema.get("required", [])}
    optional = {name: part for name, part in properties.items() if name not in required}
    if not properties:
        return st.dictionaries(st.text(max_size=8), JUNK, max_size=3)
    few = st.lists(st.sampled_from(sorted(optional)), max_size=5, unique=True) if optional else st.just([])
    return few.flatmap(
        lambda names: st.fixed_dictionaries({**required, **{name: optional[name] for name in names}})
    )


def _resolved(reference: str, document: dict[str, Any]) -> Any:
    value: Any = document
    for part in reference.removeprefix("#/").split("/"):
        value = value[part]
    return value
