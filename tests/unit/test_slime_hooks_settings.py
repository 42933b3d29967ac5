"""``rollout.hooks``: what is refused before a run, and the args that hooks get."""

import copy
import pickle
import sys
from pathlib import Path

import pytest

from slipstream.configs.load import load_recipe
from slipstream.configs.schema.hooks import HOOK_NAMES
from slipstream.configs.violations import RecipeError
from slipstream.rollout.compat.slime.arguments import slime_arguments
from slipstream.rollout.compat.slime.checking import SIGNATURES, hook_problems

HOOKS = """
import sys, time

async def generate(args, sample, sampling_params, evaluation=False): ...
async def without_params(args, sample): ...
def not_async(args, sample): ...
async def rm(args, sample, **kwargs): ...
def keep(args, samples, **kwargs): ...
def takes_nothing(): ...
def sample_hook(args, sample, *, rollout_id=None): ...
number = 3
class Source: ...
print("noise on the standard output")
"""

REWARD = "rollout.reward=slipstream.rollout.reward.FinalAnswer"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "user_hooks.py").write_text(HOOKS)
    (tmp_path / "hangs_hook.py").write_text("import time\ntime.sleep(3600)\n")
    (tmp_path / "exits_hook.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "raises_hook.py").write_text("raise RuntimeError('no license')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "run: {name: hooked, steps: 2}\nmodel: {path: /models/m}\ndata: {path: /data/d.jsonl}\n"
        "prepare: slipstream.backend.simulate.only_simulated\n"
        "rollout:\n  {max_head_offpolicyness: 4, batch_size: 2, n_samples_per_prompt: 2,\n"
        "   sampling: {max_new_tokens: 64}}\n"
    )
    return file


def reasons(file: Path, *overrides: str) -> dict[str, str]:
    try:
        load_recipe(file, overrides)
    except RecipeError as error:
        return {violation.path: violation.reason for violation in error.violations}
    return {}


def test_every_hook_has_a_signature():
    assert set(SIGNATURES) == set(HOOK_NAMES)


def test_a_recipe_may_reward_by_a_hook_alone(recipe):
    assert "rollout.reward" in reasons(recipe)
    assert not reasons(recipe, "rollout.hooks={custom_rm: user_hooks.rm}")
    assert not reasons(recipe, "rollout.hooks={rm_type: math}")


@pytest.mark.parametrize(
    ("hooks", "overrides", "path", "part"),
    [
        (
            "{custom_rm: a.b}",
            ["rollout.reward=slipstream.rollout.reward.FinalAnswer"],
            "custom_rm",
            "rollout.reward",
        ),
        ("{custom_rm: a.b, rm_type: math}", [], "rm_type", "rollout.hooks.custom_rm"),
        ("{custom_generate_function: a.b}", ["rollout.workflow=c.d"], "custom_generate_function", "workflow"),
        ("{custom_generate_function: a.b, group_rm: true}", [], "group_rm", "expected false"),
        ("{rm_type: remote_rm}", [], "rm_url", "the server"),
        ("{rm_type: math, rm_url: 'http://x'}", [], "rm_url", "expected null"),
        ("{rm_type: math, buffer_filter: a.b}", [], "buffer_filter", "gives groups back into a buffer"),
        ("{rm_type: math, eval_function: a.b}", ["eval=null"], "eval_function", "no section eval"),
        (
            "{rollout_function: a.b}",
            ["rollout.workflow=c.d"],
            "rollout_function",
            "rollout.workflow names code for the same",
        ),
        (
            "{rm_type: math, rollout_sample_filter: a.b}",
            ["rollout.group_filter=c.d"],
            "rollout_sample_filter",
            "rollout.group_filter",
        ),
        ("{rm_type: math, custom_config_path: /nowhere.yaml}", [], "custom_config_path", "nowhere"),
        ("{custom_rm: nodots}", [], "custom_rm", "dotted import path"),
    ],
)
def test_hooks_that_exclude_each_other_or_lack_something_are_refused(recipe, hooks, overrides, path, part):
    assert part in reasons(recipe, f"rollout.hooks={hooks}", *overrides)[f"rollout.hooks.{path}"]


def test_everything_that_is_wrong_with_hooks_is_found_at_once(recipe):
    hooks = (
        "{custom_generate_function: user_hooks.without_params, custom_rm: user_hooks.not_async, "
        "rollout_sample_hook: [user_hooks.sample_hook, user_hooks.number, hangs_hook.f, raises_hook.f, "
        "user_hooks.missing], "
        "dynamic_sampling_filter: exits_hook.f, import_timeout_s: 5}"
    )
    problems = hook_problems(load_recipe(recipe, [f"rollout.hooks={hooks}"]))
    expected = [
        ("custom_generate_function: user_hooks.without_params", "too many positional arguments"),
        ("custom_rm: user_hooks.not_async", "async def"),
        ("rollout_sample_hook: user_hooks.number", "is a int"),
        ("rollout_sample_hook: hangs_hook.f", "not imported within 5 s"),
        ("rollout_sample_hook: raises_hook.f", "RuntimeError: no license"),
        ("rollout_sample_hook: user_hooks.missing", "has no 'missing'"),
        ("dynamic_sampling_filter: exits_hook.f", "ends the process"),
    ]
    assert len(problems) == len(expected), problems
    for problem, (name, part) in zip(problems, expected, strict=True):
        assert problem.startswith(f"rollout.hooks.{name} ") and part in problem


def test_hooks_with_the_right_signatures_pass(recipe):
    hooks = (
        "{custom_generate_function: user_hooks.generate, custom_rm: user_hooks.rm, "
        "rollout_sample_hook: [user_hooks.sample_hook], dynamic_sampling_filter: user_hooks.keep}"
    )
    assert hook_problems(load_recipe(recipe, [f"rollout.hooks={hooks}"])) == []


def test_args_hold_slimes_names_with_the_recipes_values(recipe, tmp_path):
    (tmp_path / "own.yaml").write_text("max_turns: 7\n")
    overrides = [f"rollout.hooks={{custom_rm: user_hooks.rm, custom_config_path: {tmp_path / 'own.yaml'}}}"]
    args = slime_arguments(load_recipe(recipe, overrides))
    assert args.hf_checkpoint == "/models/m" and args.rollout_max_response_len == 64
    assert (
        args.rollout_batch_size == 2
        and args.global_batch_size == 4
        and args.custom_rm_path == "user_hooks.rm"
    )
    assert args.max_turns == 7 and args.custom_generate_function_path is None and args.reward_key is None


def test_args_may_be_changed_copied_and_stored(recipe):
    args = slime_arguments(load_recipe(recipe, ["rollout.hooks={rm_type: math}"]))
    first, second = args.copied(), copy.deepcopy(args)
    first.results_dict = {"a": [1]}
    first.apply_chat_template_kwargs["x"] = 1
    assert not hasattr(second, "results_dict") and second.apply_chat_template_kwargs == {}
    assert pickle.loads(pickle.dumps(first)).results_dict == {"a": [1]}


@pytest.mark.parametrize(
    ("hooks", "overrides", "path", "part"),
    [
        (
            "{custom_tis_function: a.b}",
            ["actor.use_decoupled_loss=false"],
            "actor.use_decoupled_loss",
            "true",
        ),
        (
            "{custom_tis_function: a.b}",
            ["actor.correction={token: {type: mask}}"],
            "actor.correction.token",
            "drops tokens itself",
        ),
        ("{custom_update_weight_post_write: a.b}", [], "weights.transport", "expected disk"),
        (
            "{custom_eval_rollout_log_function: a.b}",
            [],
            "rollout.hooks.custom_eval_rollout_log_function",
            "no section eval",
        ),
        (
            "{custom_advantage_function: a.b}",
            ["actor.advantage=[{type: teacher, scores: {type: model, path: /t}}]"],
            "actor.advantage",
            "expected no term",
        ),
    ],
)
def test_hooks_of_the_trainer_that_nothing_would_call_are_refused(recipe, hooks, overrides, path, part):
    assert part in reasons(recipe, f"rollout.hooks={hooks}", *overrides)[path]


@pytest.mark.parametrize(
    "hooks",
    [
        "{custom_tis_function: a.b, custom_pg_loss_reducer_function: a.c, custom_advantage_function: a.d}",
        "{custom_loss_function: a.b, rollout_data_postprocess: a.c, custom_model_provider: a.d}",
        "{custom_reward_post_process: a.b, custom_rollout_log_function: a.c, custom_megatron_init: a.d}",
    ],
)
def test_hooks_of_the_trainer_need_nothing_else(recipe, hooks):
    assert not reasons(recipe, f"rollout.hooks={hooks}", REWARD)


def test_a_file_may_repeat_what_the_recipe_decides(recipe, tmp_path):
    file = tmp_path / "names.yaml"
    file.write_text("use_tis: true\ntis_level: token\n")
    hooks = f"rollout.hooks={{custom_tis_function: a.b, custom_config_path: {file}}}"
    args = slime_arguments(load_recipe(recipe, [hooks, REWARD]))
    assert args.use_tis is True and args.tis_level == "token"


def test_a_name_that_args_do_not_hold_is_an_error_that_names_the_nearest(recipe):
    args = slime_arguments(load_recipe(recipe, ["rollout.hooks={rm_type: math}"]))
    with pytest.raises(
        AttributeError, match=r"'rollout_batchsize'.*Nearest: rollout_batch_size.*custom_config_path"
    ):
        _ = args.rollout_batchsize
    assert getattr(args, "use_opd", "absent") == "absent"


def test_a_file_of_further_names_cannot_contradict_the_recipe(recipe, tmp_path):
    (tmp_path / "own.yaml").write_text("rollout_batch_size: 7\nmax_turns: 3\n")
    overrides = [f"rollout.hooks={{rm_type: math, custom_config_path: {tmp_path / 'own.yaml'}}}"]
    [problem] = hook_problems(load_recipe(recipe, overrides))
    assert "sets rollout_batch_size, which the recipe decides" in problem
