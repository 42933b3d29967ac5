"""The base of every recipe section."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Strict


class Section(BaseModel):
    """A frozen group of settings.

    An unknown key is an error, and no value is converted: quoted text is not a number, and a number is
    neither text nor a boolean. A whole number is accepted where a fraction is expected.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True
    )


PathSetting = Annotated[Path, Strict(False)]
"""A path, which a recipe writes as text."""
