"""docs/migration.md: ``slipstream import slime`` says what becomes of each flag that slime's examples use."""

import pytest

from slipstream.configs.installed import passthrough_path
from slipstream.rollout.compat.imports.launch_script import Flag, LaunchScript
from slipstream.rollout.compat.imports.recipe import MAPPED, NEEDS_NOTHING, REFUSES, FlagOutcome
from slipstream.rollout.compat.slime.launch_flags import HOOKS, SETTINGS
from slipstream.rollout.compat.slime.launch_recipe import recipe_of
from tests.unit.test_docs_migration import (
    SECTIONS,
    USAGES,
    nine_uses_of_ten_are_covered_and_the_page_says_what_imports_make,
)

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


SLIME_FLAGS = sorted({*USAGES["slime"].uses, *SETTINGS, *HOOKS})


@pytest.mark.parametrize("name", SLIME_FLAGS)
def test_the_importer_names_a_setting_for_a_flag_or_says_why_there_is_none(name: str):
    outcome = outcome_of(name)
    assert outcome.reason
    if outcome.outcome == MAPPED:
        section, _, field = outcome.reason.rpartition(".")
        known = outcome.reason in SECTIONS or outcome.reason == passthrough_path(field)
        assert known or section == "rollout.engine.args", outcome  # SGLang's own names, some of GPUs alone
    else:
        assert name not in {*SETTINGS, *HOOKS}, outcome


def table_of(flag: str) -> str:
    return {MAPPED: "set", NEEDS_NOTHING: "nothing", REFUSES: "without"}.get(outcome_of(flag).outcome, "")


def test_nine_uses_of_ten_are_covered_and_the_page_says_what_imports_make():
    nine_uses_of_ten_are_covered_and_the_page_says_what_imports_make("slime", "slime", table_of)
