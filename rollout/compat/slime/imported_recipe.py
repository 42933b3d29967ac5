"""A recipe made of a launch script, and what has become of each of the script's flags."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from slipstream.rollout.compat.slime.launch_script import Flag

MAPPED, NEEDS_NOTHING, REFUSES, UNKNOWN = "mapped", "needs nothing", "refused", "unknown"
Settings = dict[str, Any]


@dataclass(frozen=True)
class FlagOutcome:
    """The translation of one flag."""

    flag: Flag
    outcome: str
    reason: str = ""
    """The setting of a mapped flag, and otherwise why there is none."""


@dataclass
class ImportedRecipe:
    """A recipe made of a script."""

    settings: Settings = field(default_factory=dict[str, Any])
    """By dotted path."""
    outcomes: list[FlagOutcome] = field(default_factory=list[FlagOutcome])
    notes: list[str] = field(default_factory=list[str])

    def set(self, path: str, value: object) -> str:
        """Set the setting at ``path``, and return the path."""
        self.settings[path] = value
        return path

    def nested(self) -> Settings:
        """Return the settings as a recipe holds them."""
        recipe: Settings = {}
        for path, value in self.settings.items():
            *sections, name = path.split(".")
            place = recipe
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
        return recipe

    def counts(self) -> Counter[str]:
        """Return the number of flags by outcome."""
        return Counter(outcome.outcome for outcome in self.outcomes)

    def refuse(self, path: str, reason: str) -> bool:
        """Take out a setting, and what lies in it, that the loader refuses. Return whether there was one."""
        taken = [name for name in self.settings if name == path or name.startswith(f"{path}.")]
        for name in taken:
            del self.settings[name]
        for position, outcome in enumerate(self.outcomes):
            if outcome.outcome == MAPPED and outcome.reason in taken:
                self.outcomes[position] = FlagOutcome(outcome.flag, REFUSES, f"{path}: {reason}")
        if taken:
            self.notes.append(f"{path} is left out: {reason}")
        return bool(taken)
