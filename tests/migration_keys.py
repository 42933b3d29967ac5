"""Counts the settings that the example configurations of other systems use, for docs/migration.md.

    python -m tests.migration_keys --slime DIR --areal DIR --verl DIR --prime-rl DIR

reads checkouts of the four systems, and writes how often each setting is used, and what `slipstream import`
makes of them, into tests/unit/migration_keys.jsonl, one line for each system.
tests/unit/test_docs_migration.py compares the page with that file.

What counts is every use in a configuration of reinforcement learning: a flag of the command that a launch
script of slime ends in, an override in a script of verl, and a value in a YAML file of AReaL or a TOML file
of prime-rl. Configurations of supervised training and of inference alone are counted apart.
"""

import argparse
import json
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from slipstream.rollout.compat.imports.importing import import_recipe

RECORD = Path(__file__).parent / "unit" / "migration_keys.jsonl"

_OVERRIDE = re.compile(r"""(?:^|[\s"'(])\+{0,2}((?:[a-z_]+\.)+[A-Za-z_0-9.]+|model_engine)=""")
"""A Hydra override in a shell script: ``trainer.nnodes=2``, ``+reward.num_workers=8``."""


@dataclass
class Usage:
    """The settings that the example configurations of one system use."""

    system: str
    repository: str
    commit: str
    configurations: int = 0
    others: int = 0
    """Number of configurations of supervised training or of inference alone, which are not in ``uses``."""
    uses: Counter[str] = field(default_factory=Counter[str])
    imports: Counter[str] = field(default_factory=Counter[str])
    """Number of keys by what an import makes of them, and of recipes: ``recipes``."""

    def add(self, path: Path, settings: list[str], is_other: bool) -> None:
        """Count the settings of one configuration."""
        if is_other:
            self.others += 1
        elif settings:
            self.configurations += 1
            self.uses.update(settings)
            try:
                with TemporaryDirectory() as folder:
                    recipe = import_recipe(self.system, [str(path)], Path(folder) / "recipe.yaml")
            except ValueError as error:
                print(f"{path} is not imported: {error}")
                return
            self.imports.update({"recipes": 1, **recipe.counts()})


def _slime(checkout: Path, usage: Usage) -> None:
    from slipstream.rollout.compat.imports.launch_script import read_launch_script
    from slipstream.rollout.compat.imports.shell_words import UnreadableScript
    from slipstream.rollout.compat.slime.launch_flags import is_supervised

    for path in _files(checkout, "*.sh", "scripts", "examples"):
        try:
            script = read_launch_script(path)
        except UnreadableScript:  # a file that launch scripts source
            continue
        usage.add(path, [flag.name for flag in script.flags], is_supervised(script))


def _areal(checkout: Path, usage: Usage) -> None:
    for path in _files(checkout, "*.yaml", "examples"):
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(settings, dict) and "experiment_name" in settings:
            usage.add(path, list(_leaves(settings)), "rollout" not in settings)


def _verl(checkout: Path, usage: Usage) -> None:
    policies = ("fully_async_policy", "one_step_off_policy")
    asynchronous = [f"verl/experimental/{policy}/shell" for policy in policies]
    for path in _files(checkout, "*.sh", "examples", *asynchronous):
        lines = path.read_text(encoding="utf-8").splitlines()
        text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
        is_other = bool({"sft", "generation"} & set(path.relative_to(checkout).parts))
        usage.add(path, _OVERRIDE.findall(text), is_other)


def _prime_rl(checkout: Path, usage: Usage) -> None:
    for path in _files(checkout, "*.toml", "examples", "configs"):
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
        usage.add(path, list(_leaves(settings)), "orchestrator" not in settings)


READERS = {
    "slime": ("THUDM/slime", _slime),
    "areal": ("areal-project/AReaL", _areal),
    "verl": ("verl-project/verl", _verl),
    "prime-rl": ("PrimeIntellect-ai/prime-rl", _prime_rl),
}


def _files(checkout: Path, pattern: str, *folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(path for path in (checkout / folder).rglob(pattern) if path.is_file())


def _leaves(settings: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the dotted path of every value. Tables in a list have the path of the list."""
    for name, value in settings.items():
        path = f"{above}.{name}" if above else name
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for item in value:
                yield from _leaves(item, path)
        else:
            yield path


def commit_of(checkout: Path) -> str:
    """Return the commit that is checked out."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def usage_of(system: str, checkout: Path) -> Usage:
    """Count the settings that the example configurations in a checkout use."""
    repository, read = READERS[system]
    usage = Usage(system, repository, commit_of(checkout))
    read(checkout, usage)
    usage.uses = Counter(dict(sorted(usage.uses.items())))
    return usage


def recorded() -> dict[str, Usage]:
    """Return the counts of RECORD by system."""
    lines = RECORD.read_text(encoding="utf-8").splitlines()
    usages = [Usage(**json.loads(line)) for line in lines]
    return {usage.system: usage for usage in usages}


def main() -> None:
    """Write RECORD."""
    about, keep_lines = __doc__, argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=keep_lines)
    for system, (repository, _) in READERS.items():
        parser.add_argument(f"--{system}", type=Path, required=True, metavar="DIR", help=repository)
    checkouts: dict[str, Path] = vars(parser.parse_args())
    usages = [usage_of(system, checkouts[system.replace("-", "_")]) for system in READERS]
    RECORD.write_text("".join(json.dumps(vars(usage)) + "\n" for usage in usages), encoding="utf-8")
    for usage in usages:
        imported = ", ".join(f"{count:,} {name}" for name, count in sorted(usage.imports.items()))
        print(f"{usage.system}: {usage.configurations} configurations, {usage.uses.total()} uses; {imported}")


if __name__ == "__main__":
    main()
