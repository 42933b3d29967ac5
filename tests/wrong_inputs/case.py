"""What a wrong input is: a sound recipe with a change, and the words that the message must have."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

Content = str | bytes | Callable[[str], str] | None
"""What a file is to hold, or what makes it of what the sound file holds; None: the file is removed."""


@dataclass(frozen=True)
class WrongInput:
    """One wrong input."""

    name: str
    says: tuple[str, ...]
    """Words that the message must have: setting or file, value found, what was expected, the way out.
    ``FOLDER`` stands for the folder of the case."""
    overrides: tuple[str, ...] = ()
    """Settings that replace the recipe's. ``FOLDER`` stands for the folder of the case."""
    files: dict[str, Content] = field(default_factory=dict[str, Content])
    """Files to change, by their paths in the folder of the case."""
    arguments: tuple[str, ...] = ("check", "FOLDER/recipe.yaml")
    """Command and its arguments, before the overrides."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    count: int = 1
    """Smallest number of lines of the message that must be there: one for each thing that is wrong."""

    def in_folder(self, text: str, folder: Path) -> str:
        return text.replace("FOLDER", str(folder))
