"""The environment variables that hold keys of the run itself. Programs of agents do not get them."""

from collections.abc import Iterator, Mapping
from typing import cast

from slipstream.configs.schema import RunConfig
from slipstream.rollout.gateway.keys import KEY_VARIABLE

RAY_TOKEN = "RAY_AUTH_TOKEN"
"""The environment variable by which Ray's processes get the secret of their cluster."""

KEY_SETTINGS = ("key_env", "key_variable")
"""Settings that name a variable with a key, among the arguments of plug-ins too."""


def key_variables(config: RunConfig) -> frozenset[str]:
    """Return the variables with the keys of Ray, of the gateway and of the servers that a recipe names."""
    return frozenset({RAY_TOKEN, KEY_VARIABLE, *_named(config.model_dump())})


def _named(settings: object) -> Iterator[str]:
    """Yield the values of all settings in KEY_SETTINGS, however deep they lie."""
    if isinstance(settings, Mapping):
        for name, value in cast("Mapping[object, object]", settings).items():
            if name in KEY_SETTINGS and isinstance(value, str):
                yield value
            else:
                yield from _named(value)
    elif isinstance(settings, list | tuple):
        for value in cast("list[object]", settings):
            yield from _named(value)
