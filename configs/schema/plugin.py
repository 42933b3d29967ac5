"""Named by import path: how a recipe points at code, the built-in code included."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from slipstream.configs.schema.base import Section

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def _is_dotted(path: str) -> str:
    if not _DOTTED.fullmatch(path):
        raise ValueError("expected a dotted import path such as 'my_package.module.Name'")
    return path


ImportPath = Annotated[str, AfterValidator(_is_dotted)]


class PluginConfig(Section):
    """An object to construct: ``path`` names a class (or factory), ``args`` are its keyword arguments."""

    path: ImportPath
    args: dict[str, Any] = Field(default_factory=dict)


def _from_string(value: object) -> object:
    return {"path": value} if isinstance(value, str) else value


Plugin = Annotated[PluginConfig, BeforeValidator(_from_string)]
"""``package.module.Name``, or ``{path: package.module.Name, args: {...}}``."""
