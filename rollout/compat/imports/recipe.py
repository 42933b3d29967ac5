"""The recipe that an import makes of another system's configuration, and what becomes of each of its keys."""

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from slipstream.configs.schema.base import HUB
from slipstream.configs.schema.paths import model_settings
from slipstream.rollout.compat.imports.launch_script import Flag

MAPPED, NEEDS_NOTHING, REFUSES, UNKNOWN = "mapped", "ours by default", "refused", "unknown"
"""What becomes of a flag or key. An unknown one fails the import; with `--without-unknown` it is refused."""

Settings = dict[str, Any]

_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""A model's name on the Hugging Face Hub, as the other systems write it."""


@dataclass(frozen=True)
class FlagOutcome:
    """What becomes of one flag of a script, or of one key of a file."""

    flag: Flag
    outcome: str
    reason: str = ""
    """The settings of a mapped flag, with a comma between them, and otherwise why there is none."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of a mapped flag, by dotted path."""
        return tuple(self.reason.split(", ")) if self.outcome == MAPPED else ()


@dataclass
class ImportedRecipe:
    """A recipe made of a configuration."""

    system: str
    """Name of the other system."""
    spelling: str
    """How a user of the system writes a key: ``--{} {}`` or ``{}={}``."""

    settings: Settings = field(default_factory=Settings)
    """By dotted path."""
    outcomes: list[FlagOutcome] = field(default_factory=list[FlagOutcome])
    notes: list[str] = field(default_factory=list[str])
    defaults: frozenset[str] = frozenset()
    """Settings that have the system's default, because the configuration leaves their keys out."""
    fallbacks: Settings = field(default_factory=Settings)
    """Values of settings that a recipe cannot be without, where the configuration has none that loads."""

    def set(self, path: str, value: object) -> str:
        """Set the setting at ``path``, and return the path."""
        self.settings[path] = value
        return path

    def name_hub(self) -> None:
        """Write the names of models on the hub as a recipe does, unless a local folder has the name."""
        for path in model_settings():
            name = self.settings.get(path)
            if isinstance(name, str) and _ON_HUB.fullmatch(name) and not Path(name).is_dir():
                self.settings[path] = HUB + name

    def written(self, flag: Flag) -> str:
        """Return a flag or key with its value, as the system's users write it, on one line."""
        return " ".join(self.spelling.format(flag.name, flag.text).split())

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

    def text(self) -> str:
        """Return the recipe as YAML, with the flag that each setting comes from."""
        origins = dict.fromkeys(self.defaults, f"{self.system}'s default")
        for outcome in self.outcomes:
            for path in outcome.settings:
                written = self.written(outcome.flag)
                origins[path] = ", ".join(filter(None, [origins.get(path), written]))
        return "\n".join(self._lines(self.nested(), "", origins)) + "\n"

    def _lines(self, section: Settings, around: str, origins: Mapping[str, str]) -> Iterator[str]:
        indent = "  " * len(around.split(".")) if around else ""
        for name, value in section.items():
            path = f"{around}.{name}" if around else name
            origin = f"  # {origins[path]}" if path in origins else ""
            if isinstance(value, dict) and path not in self.settings:
                yield f"{indent}{name}:{origin}"
                yield from self._lines(cast("Settings", value), path, origins)
                continue
            first, *others = yaml.safe_dump({name: value}, sort_keys=False, width=math.inf).splitlines()
            # A text of several lines goes on in the next one, and cannot have a comment.
            yield f"{indent}{first}{'' if others and not first.endswith(':') else origin}"
            yield from (f"{indent}{line}" for line in others)

    def fill_in(self, path: str) -> bool:
        """Give what is missing at a path its fallbacks. Return whether it has one."""
        missing = [name for name in self.fallbacks if _lies_in(name, path) and name not in self.settings]
        for name in missing:
            self.settings[name] = value = self.fallbacks.pop(name)  # once, for one that is refused as well
            self.notes.append(f"set {name}: nothing says it, and it is {value!r} until then")
        return bool(missing)

    def unknown(self, known: Iterable[str]) -> list[str]:
        """Refuse unknown flags or keys. Returns a line for each, with the nearest of the ``known`` names."""
        names, lines = sorted(known), list[str]()
        for position, outcome in enumerate(self.outcomes):
            if outcome.outcome == UNKNOWN:
                near = difflib.get_close_matches(outcome.flag.name, names, 1, cutoff=0.5)
                hint = f"; did you mean {self.spelling.split('{')[0]}{near[0]}?" if near else ""
                why = f"no such setting of {self.system} is known{hint}"
                self.outcomes[position] = FlagOutcome(outcome.flag, REFUSES, why)
                lines.append(f"{self.written(outcome.flag)}: {why}")
        return lines

    def counts(self) -> Counter[str]:
        """Return the number of flags by outcome."""
        return Counter(outcome.outcome for outcome in self.outcomes)

    def refuse(self, path: str, reason: str) -> bool:
        """Take out a setting, and what lies in it, that the loader refuses. Return whether there was one."""
        taken = [name for name in self.settings if _lies_in(name, path) or _lies_in(path, name)]
        for name in taken:
            del self.settings[name]
        for position, outcome in enumerate(self.outcomes):
            kept = [each for each in outcome.settings if each not in taken]
            if len(kept) < len(outcome.settings):
                left = (MAPPED, ", ".join(kept)) if kept else (REFUSES, f"{path}: {reason}")
                self.outcomes[position] = FlagOutcome(outcome.flag, *left)
        if taken:
            self.notes.append(f"{path} is left out: {reason}")
        return bool(taken)


def _lies_in(path: str, section: str) -> bool:
    return path == section or path.startswith(f"{section}.")
