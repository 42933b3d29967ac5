"""The launch scripts and arguments of a checkout of slime. ``tests.slime_contract`` runs this; SLIME_CHECKOUT
names the checkout.
"""

import os
import re
from collections import Counter
from pathlib import Path

from slipstream.rollout.compat.imports.importing import import_recipe
from slipstream.rollout.compat.imports.launch_script import Flag, LaunchScript
from slipstream.rollout.compat.imports.recipe import UNKNOWN
from slipstream.rollout.compat.slime.launch_recipe import recipe_of

CHECKOUT = Path(os.environ["SLIME_CHECKOUT"])
REFUSALS = ("expected a launch script", "expected reinforcement")
"""Ends of scripts that start no trainer, and of those of supervised training."""


def test_every_launch_script_makes_a_recipe_without_an_unknown_flag(tmp_path):
    outcomes: Counter[str] = Counter()
    for number, script in enumerate(sorted(CHECKOUT.rglob("*.sh"))):
        try:
            recipe = import_recipe("slime", [str(script)], tmp_path / f"{number}.yaml")
        except ValueError as error:
            assert any(reason in str(error) for reason in REFUSALS), f"{script}: {error}"
            outcomes["refused"] += 1
            continue
        assert all(outcome.reason for outcome in recipe.outcomes), script
        outcomes["imported"] += 1
    print(outcomes)
    assert outcomes["imported"] > 10


def test_every_argument_is_known():
    source = (CHECKOUT / "slime" / "utils" / "arguments.py").read_text()
    names = sorted(set(re.findall(r'"--([a-z0-9-]+)"', source)))
    script = LaunchScript("train.py", [Flag(name, ("1",)) for name in names])
    outcomes = recipe_of(script, "all").outcomes
    assert len(outcomes) == len(names) > 100
    assert not [outcome.flag.name for outcome in outcomes if outcome.outcome == UNKNOWN]
