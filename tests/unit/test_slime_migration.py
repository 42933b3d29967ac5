"""docs/migration.md: its rows of slime are what ``slipstream import-slime`` does."""

import pytest
import yaml

from slipstream.rollout.compat.slime.launch_flags import HOOKS, MAPPED, NEEDS_NOTHING, SETTINGS, FlagOutcome
from slipstream.rollout.compat.slime.launch_recipe import recipe_of
from slipstream.rollout.compat.slime.launch_script import Flag, LaunchScript
from tests.unit.test_docs_migration import NOTHING, ROWS, Row, leaves

WORDS = {
    "advantage-estimator": "gspo",
    "apply-chat-template-kwargs": "{}",
    "attention-dropout": "0",
    "decoder-first-pipeline-num-layers": "2",
    "decoder-last-pipeline-num-layers": "2",
    "eval-prompt-data": "aime /aime.jsonl",
    "hidden-dropout": "0",
    "kl-coef": "0.01",
    "kl-loss-coef": "0.01",
    "kl-loss-type": "low_var_kl",
    "lr-decay-style": "cosine",
    "opd-teacher-load": "/teacher",
    "opd-type": "sglang",
    "optimizer": "adam",
    "prompt-data": "/train.jsonl",
    "recompute-granularity": "full",
    "rollout-function-path": "hooks.generate",
    "transformer-impl": "local",
    "update-weight-mode": "delta",
}
"""Values of flags for which 1 is none."""

BESIDE = {
    "decoder-first-pipeline-num-layers": ("pipeline-model-parallel-size 4", "num-layers 8"),
    "decoder-last-pipeline-num-layers": ("pipeline-model-parallel-size 4", "num-layers 8"),
    "kl-loss-coef": ("use-kl-loss",),
    "kl-loss-type": ("use-kl-loss", "kl-loss-coef 0.01"),
    "use-kl-loss": ("kl-loss-coef 0.01",),
    "tis-clip": ("use-tis",),
    "use-opd": ("opd-type sglang",),
    "opd-type": ("use-opd",),
    "opd-kl-coef": ("use-opd", "opd-type sglang"),
    "opd-teacher-load": ("use-opd", "opd-type megatron"),
    **dict.fromkeys(
        ("sglang-dp-size", "sglang-dp", "sglang-data-parallel-size"), ("sglang-enable-dp-attention",)
    ),
    "use-opsm": ("use-rollout-logprobs",),
    "opsm-delta": ("use-opsm", "use-rollout-logprobs"),
    "use-wandb": ("wandb-project mine",),
    "wandb-project": ("use-wandb",),
    **dict.fromkeys(("wandb-group", "wandb-team", "wandb-mode"), ("use-wandb", "wandb-project mine")),
    "gamma": ("advantage-estimator ppo",),
    "lambd": ("advantage-estimator ppo",),
    "value-clip": ("advantage-estimator ppo",),
    "num-critic-only-steps": ("advantage-estimator ppo",),
}
"""Flags that decide about another one."""


def outcome_of(name: str) -> FlagOutcome:
    """Return what the importer makes of a flag."""
    value = WORDS.get(name, "hooks.function" if name in HOOKS else "1")
    words = [*BESIDE.get(name, ()), f"{name} {value}"]
    flags = [Flag(flag, tuple(values)) for flag, *values in (word.split(" ") for word in words)]
    outcomes = recipe_of(LaunchScript("train.py", flags), "x").outcomes
    return next(outcome for outcome in outcomes if outcome.flag.name == name)


SLIME_FLAGS = [
    (row, key.removeprefix("--"))
    for row in ROWS
    for key in row.keys
    if row.system == "slime" and not key.endswith("*")
]


@pytest.mark.parametrize(("row", "name"), SLIME_FLAGS, ids=lambda value: value if type(value) is str else "")
def test_a_row_of_slime_says_what_the_importer_does(row: Row, name: str):
    outcome = outcome_of(name)
    if not row.setting:
        assert outcome.outcome not in (MAPPED, NEEDS_NOTHING), outcome
    elif row.setting == NOTHING:
        assert outcome.outcome == NEEDS_NOTHING, outcome
    else:
        named = set[str]()
        for text in row.pieces():
            path, colon, value = text.partition(": ")
            inner = yaml.safe_load(value) if colon else None
            named |= {path, *(f"{path}.{below}" for below, _ in leaves(inner if type(inner) is dict else {}))}
        assert outcome.outcome == MAPPED, outcome
        section = outcome.reason.rpartition(".")[0]
        passed_on = {section} & {"actor.megatron", "rollout.engine.args"}
        assert {outcome.reason, *passed_on} & named, outcome


def test_every_flag_that_the_importer_maps_has_a_row():
    with_rows = {name for row, name in SLIME_FLAGS if row.setting}
    assert not {*SETTINGS, *HOOKS} - with_rows
