"""Settings that name code by its import path, the code that comes with Slipstream included."""

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from slipstream.configs.schema.base import Section

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def _is_dotted(path: str) -> str:
    if not _DOTTED.fullmatch(path):
        raise ValueError("expected a dotted import path such as my_code.score, for `score` in my_code.py")
    return path


ImportPath = Annotated[str, AfterValidator(_is_dotted)]


class PluginConfig(Section):
    """A class or factory, and the keyword arguments that it is called with."""

    path: ImportPath = Field(
        description="Import path `package.module.Name` of a class or of a function that returns an object."
    )
    args: dict[str, object] = Field(default={}, description="Keyword arguments of the class or function.")


Plugin = Annotated[
    PluginConfig, BeforeValidator(lambda value: {"path": value} if isinstance(value, str) else value)
]
"""``package.module.Name``, or ``{path: package.module.Name, args: {...}}``."""
