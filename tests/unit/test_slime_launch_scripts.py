"""``slipstream import slime``: launch scripts are read, never run, and become recipes that load."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from slipstream.backend.cli.app import app
from slipstream.configs.load import load_recipe
from slipstream.configs.rules import trainer
from slipstream.configs.rules.inputs import NO_INPUTS
from slipstream.rollout.compat.imports.launch_script import Flag, read_launch_script
from slipstream.rollout.compat.imports.shell_words import UnreadableScript

SCRIPT = r"""#!/bin/bash
touch /tmp/this-script-was-run-and-must-not-be
NVLINK=$(nvidia-smi | wc -l)
if [ "$NVLINK" -gt 0 ]; then
    HAS=1
fi
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/tiny.sh"
BASE=/data
TP=${TP:-2}
CKPT_ARGS=(
   --hf-checkpoint ${BASE}/tiny   # the policy
   # --hf-checkpoint /old
   --save '/runs/$literal'
   --save-interval 5
)
ROLLOUT_ARGS=(
   --prompt-data "$BASE/train.jsonl@[0:10]" --input-key prompt --label-key label
   --apply-chat-template --rollout-shuffle
   --rm-type deepscaler --num-rollout 30 --rollout-batch-size 8 --n-samples-per-prompt 4
   --rollout-max-response-len=512 --rollout-temperature 0.8
   --global-batch-size 16 --custom-generate-function-path hooks.generate
)
FILTERS=slime.rollout.filter_hub.dynamic_sampling_filters
ROLLOUT_ARGS+=(--dynamic-sampling-filter-path ${FILTERS}.check_reward_nonzero_std)
GRPO_ARGS=(--advantage-estimator gspo --eps-clip 1e-4 --eps-clip-high 2e-4 --use-kl-loss --kl-loss-coef 0.01
   --kl-loss-type low_var_kl --num-layers 3)
OTHER_ARGS=(--sglang-mem-fraction-static 0.7 --sglang-dp-size 2 --eval-top-p 0.7
   --hidden-dropout 0.1
   --wandb-key ${WANDB_KEY})
cat <<EOF
python3 train_async.py --num-rollout 99999
EOF
ray job submit --runtime-env-json='{"a": "(b"}' \
   -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
   --tensor-model-parallel-size $TP --rollout-num-gpus-per-engine 2 --sequence-parallel \
   ${MODEL_ARGS[@]} "${CKPT_ARGS[@]}" ${ROLLOUT_ARGS[@]} ${GRPO_ARGS[@]} ${OTHER_ARGS[@]} \
   --update-weight-buffer-size $(( 1 << 30 ))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(
        'MODEL_ARGS=(\n --swiglu\n --rotary-base "${ROTARY:-10000}"\n)\n'
    )
    path = tmp_path / "run tiny.sh"
    path.write_text(SCRIPT)
    return path


def imported(script: Path, *options: str):
    out = script.with_name("recipe.yaml")
    result = CliRunner().invoke(app, ["import", "slime", str(script), "-o", str(out), *options])
    return result, out


def test_a_script_is_read_with_its_arrays_variables_and_sourced_files(script):
    launch = read_launch_script(script)
    assert launch.trainer == "train.py"
    flags = {flag.name: flag.values for flag in launch.flags}
    assert flags["hf-checkpoint"] == ("/data/tiny",) and flags["save"] == ("/runs/$literal",)
    assert flags["rotary-base"] == ("10000",) and flags["swiglu"] == ()
    assert flags["rollout-max-response-len"] == ("512",) and flags["tensor-model-parallel-size"] == ("2",)
    assert flags["num-rollout"] == ("30",) and flags["wandb-key"] == ()
    assert Flag("colocate", ()) in launch.flags
    assert any("WANDB_KEY" in note for note in launch.notes)
    assert not Path("/tmp/this-script-was-run-and-must-not-be").exists()


def test_the_recipe_of_a_script_loads_and_has_its_settings(script):
    result, out = imported(script)
    assert result.exit_code == 0, result.output
    config = load_recipe(out, [f"prepare={NO_INPUTS}"])
    assert (config.run.name, config.run.steps, str(config.model.path)) == ("run-tiny", 30, "/data/tiny")
    assert str(config.data.path) == "/data/train.jsonl" and config.data.shuffle
    rollout, actor = config.rollout, config.actor
    assert (rollout.batch_size, rollout.n_samples_per_prompt, rollout.max_head_offpolicyness) == (8, 4, 0)
    assert rollout.engine.colocated and rollout.engine.count == 4 and rollout.engine.tensor_parallel == 2
    assert rollout.engine.args == {"mem_fraction_static": 0.7}
    assert rollout.sampling.max_new_tokens == 512 and rollout.sampling.temperature == 0.8
    assert (actor.parallel.tensor, actor.parallel.data, actor.parallel.sequence) == (2, 4, True)
    assert actor.minibatches == 2 and actor.averaging == "sequence"
    assert actor.objective.type == "gspo" and actor.objective.clip_high == 2e-4
    assert actor.kl.coefficient == 0.01 and actor.kl.estimator == "k3"
    assert config.weights.transport.type == "tensor" and config.checkpoint.every == 5
    assert (
        rollout.hooks.rm_type == "deepscaler" and rollout.hooks.custom_generate_function == "hooks.generate"
    )
    assert rollout.hooks.dynamic_sampling_filter.endswith("check_reward_nonzero_std")
    assert config.eval is None


def test_what_has_no_counterpart_is_listed_with_its_reason(script):
    result, _ = imported(script, "--json")
    flags = {entry["flag"]: entry for entry in json.loads(result.stdout)["flags"]}
    assert flags["eval-top-p"]["outcome"] == "mapped"
    assert flags["hidden-dropout"]["outcome"] == "refused" and "dropout" in flags["hidden-dropout"]["reason"]
    assert (
        flags["sglang-dp-size"]["outcome"] == "refused"
        and "rollout.engine.count" in flags["sglang-dp-size"]["reason"]
    )
    assert flags["num-layers"]["outcome"] == "ours by default"
    assert flags["rm-type"]["outcome"] == "mapped"
    assert flags["rm-type"]["reason"] == "rollout.hooks.rm_type"


def test_an_asynchronous_script_is_one_version_behind_and_has_engines_of_its_own(script):
    text = SCRIPT.replace("-- python3 train.py", "-- python3 -u ${BASE}/train_async.py")
    script.write_text(text.replace("--colocate", "--rollout-num-gpus 4 --update-weights-interval 3"))
    result, out = imported(script)
    assert result.exit_code == 0, result.output
    rollout = load_recipe(out, [f"prepare={NO_INPUTS}"]).rollout
    assert rollout.max_head_offpolicyness == 3 and rollout.engine.count == 2 and not rollout.engine.colocated


def test_an_engine_that_is_larger_than_a_node_is_spread_over_nodes(script):
    text = SCRIPT.replace("--rollout-num-gpus-per-engine 2", "--rollout-num-gpus-per-engine 32")
    text = text.replace("--colocate", "--rollout-num-gpus 64")
    text = text.replace("--sglang-dp-size 2", "--sglang-dp 4 --sglang-enable-dp-attention --sglang-pp-size 2")
    script.write_text(text)
    _, out = imported(script)
    engine = yaml.safe_load(out.read_text())["rollout"]["engine"]
    sizes = {"count": 2, "tensor_parallel": 16, "data_parallel": 4, "pipeline_parallel": 2, "nodes": 4}
    assert engine.items() >= sizes.items()
    assert load_recipe(out, [f"prepare={NO_INPUTS}"]).weights.transport.type == "disk"


def test_a_supervised_script_is_refused_with_the_command_for_it(script):
    script.write_text(
        SCRIPT.replace("--swiglu", "").replace("GRPO_ARGS=(", "GRPO_ARGS=(--loss-type sft_loss ")
    )
    result, out = imported(script)
    assert result.exit_code == 2 and "slipstream sft" in result.stderr and not out.exists()


@pytest.mark.parametrize("text", ["", "echo hello\n", "A=(--x\n", "python3 other.py --lr 1\n", "cat <<EOF\n"])
def test_a_file_that_starts_no_trainer_is_refused(script, text):
    script.write_text(text)
    with pytest.raises(UnreadableScript, match=r"train\.py"):
        read_launch_script(script)
    assert imported(script)[0].exit_code == 2


def test_an_unknown_flag_is_an_error_that_names_the_nearest(script):
    script.write_text(LEFT_OUT.replace("--num-rollout", "--rolout-batch-size 4 --quux 1 --num-rollout"))
    result, out = imported(script)
    assert result.exit_code == 2 and not out.exists()
    said = " ".join(result.stderr.split())
    assert (
        "--rolout-batch-size 4: no such setting of slime is known; did you mean --rollout-batch-size?" in said
    )
    assert "--quux 1" in said


def test_an_existing_recipe_is_not_overwritten(script):
    out = script.with_name("recipe.yaml")
    out.write_text("mine: true\n")
    assert imported(script)[0].exit_code == 2 and out.read_text() == "mine: true\n"


def test_a_missing_backslash_is_noticed(script):
    script.write_text(SCRIPT.replace("--sequence-parallel \\\n", "--sequence-parallel\n"))
    launch = read_launch_script(script)
    assert any("backslash" in note for note in launch.notes)
    assert "hf-checkpoint" in {flag.name for flag in launch.flags}


FURTHER = """python3 train.py --rollout-num-gpus-per-engine 2 \\
 --hf-checkpoint /m --prompt-data /d.jsonl --rm-type math --num-rollout 3 \\
 --rollout-batch-size 8 --n-samples-per-prompt 4 --context-parallel-size 2 --no-rope-fusion \\
 --rollout-sample-hook-path hooks.first --rollout-sample-hook-path hooks.second --eps-clip-c 3.5 \\
 --sglang-config engines.yaml --sglang-expert-parallel-size 2 --use-rollout-logprobs --no-offload-train \\
 --eval-input-key question
"""


def test_flags_that_need_more_than_a_name_are_mapped_or_refused_with_what_to_do(script):
    script.write_text(FURTHER)
    result, out = imported(script, "--json")
    recipe = yaml.safe_load(out.read_text())
    assert recipe["rollout"]["hooks"]["rollout_sample_hook"] == ["hooks.first", "hooks.second"]
    assert recipe["actor"]["objective"] == {
        "type": "dual_clip",
        "bound": 3.5,
        "clip_low": 0.2,
        "clip_high": 0.2,
    }
    assert recipe["actor"]["megatron"] == {"apply_rope_fusion": False}
    assert recipe["rollout"]["engine"]["expert_parallel"] == 2
    assert (recipe["actor"]["use_decoupled_loss"], recipe["actor"]["recompute_logprobs"]) == (False, False)
    flags = {entry["flag"]: entry for entry in json.loads(result.stdout)["flags"]}
    assert {name for name, entry in flags.items() if entry["outcome"] == "refused"} == {
        "sglang-config",
        "no-offload-train",
    }
    assert "alike" in flags["sglang-config"]["reason"]


def test_a_model_with_a_name_of_the_hub_stays_there_unless_a_folder_has_the_name(
    script, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    script.write_text(FURTHER.replace("--hf-checkpoint /m", "--hf-checkpoint some-lab/tiny"))
    _, out = imported(script)
    assert yaml.safe_load(out.read_text())["model"]["path"] == "hf://some-lab/tiny"
    (tmp_path / "some-lab/tiny").mkdir(parents=True)
    out.unlink()
    _, out = imported(script)
    assert yaml.safe_load(out.read_text())["model"]["path"] == "some-lab/tiny"


DATA = """python3 train.py --hf-checkpoint /m --prompt-data /d.parquet --rm-type math --num-rollout 3 \\
 --rollout-batch-size 8 --n-samples-per-prompt 4 --input-key messages --label-key answer \\
 --metadata-key extra --rollout-max-prompt-len 2048 --rollout-stop '</a>' --rollout-stop-token-ids 7 8 \\
 --apply-chat-template-kwargs '{"enable_thinking": false}' \\
 --eval-prompt-data aime /aime.jsonl gsm8k /gsm8k.jsonl --eval-input-key prompt --eval-temperature 0.6 \\
 --eval-top-p 0.9 --eval-max-prompt-len 1024 --n-samples-per-eval-prompt 4 --skip-eval-before-train
"""


def test_flags_of_data_and_sampling_are_settings(script):
    script.write_text(DATA)
    _, out = imported(script, "--json")
    recipe = yaml.safe_load(out.read_text())
    assert recipe["data"]["columns"] == {"prompt": "messages", "label": "answer", "metadata": "extra"}
    assert recipe["data"]["max_prompt_tokens"] == 2048
    assert recipe["model"]["template_args"] == {"enable_thinking": False}
    assert recipe["rollout"]["sampling"] == {"stop": ["</a>"], "stop_token_ids": [7, 8]}
    assert recipe["eval"]["sets"] == [
        {"name": "aime", "path": "/aime.jsonl"},
        {"name": "gsm8k", "path": "/gsm8k.jsonl"},
    ]
    assert recipe["eval"]["columns"] == {"prompt": "prompt"}
    assert recipe["eval"]["sampling"] == {"temperature": 0.6, "top_p": 0.9}
    assert recipe["eval"]["max_prompt_tokens"] == 1024
    assert recipe["eval"]["n_samples_per_prompt"] == 4 and recipe["eval"]["before_training"] is False


LEFT_OUT = """python3 train.py --hf-checkpoint /m --prompt-data /d.jsonl --rm-type math --num-rollout 3 \\
 --rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-temperature 0.8 --eval-prompt-data aime /aime.jsonl
"""


def test_flags_that_a_script_leaves_out_have_the_defaults_of_slime(script):
    script.write_text(LEFT_OUT)
    recipe = yaml.safe_load(imported(script)[1].read_text())
    assert recipe["actor"]["objective"] == {"type": "ppo", "clip_low": 0.2, "clip_high": 0.2}
    optimizer = recipe["actor"]["optimizer"]
    assert optimizer == {"weight_decay": 0.01, "beta2": 0.999, "distributed": True}
    assert recipe["eval"]["sampling"] == {"temperature": 0.8}


def test_one_set_of_held_out_prompts_keeps_its_name(script):
    script.write_text(LEFT_OUT)
    recipe = yaml.safe_load(imported(script)[1].read_text())
    assert recipe["eval"]["sets"] == [{"name": "aime", "path": "/aime.jsonl"}]


def test_every_flag_is_reported_and_every_setting_says_where_it_comes_from(script):
    script.write_text(LEFT_OUT.replace("--num-rollout 3", "--num-rollout 3 --swiglu"))
    result, out = imported(script)
    flags = {flag.name for flag in read_launch_script(script).flags}
    assert not {flag for flag in flags if f"--{flag}" not in result.stdout}
    assert "mapped: --num-rollout 3 (run.steps)" in result.stdout
    text = out.read_text()
    assert "  steps: 3  # --num-rollout 3\n" in text
    assert "    distributed: true  # slime's default\n" in text
    assert "  sets:  # --eval-prompt-data aime /aime.jsonl\n" in text


def test_a_setting_of_several_lines_is_not_broken_by_its_comment(script):
    script.write_text(LEFT_OUT.replace("--num-rollout", "--rollout-stop 'a b' 'c\n\nd: # e' --num-rollout"))
    recipe = yaml.safe_load(imported(script)[1].read_text())
    assert recipe["rollout"]["sampling"]["stop"] == ["a b", "c\n\nd: # e"]


def test_variables_of_the_environment_are_read_but_no_secrets(script, monkeypatch):
    script.write_text(LEFT_OUT.replace("/m ", "${MY_BASE}/m --wandb-key ${WANDB_API_KEY} "))
    monkeypatch.setenv("MY_BASE", "/from/the/shell")
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    result, out = imported(script)
    assert yaml.safe_load(out.read_text())["model"]["path"] == "/from/the/shell/m"
    assert "s3cret" not in result.stdout + out.read_text()


def test_one_check_says_everything_that_is_wrong_with_an_imported_recipe(script):
    rows = script.with_name("rows.jsonl")
    rows.write_text('{"prompt": "x", "label": "1"}\nnot json\n')
    flags = "--custom-rm-path my_missing.rm --lr -1 --num-rollout"
    text = LEFT_OUT.replace("/d.jsonl", str(rows)).replace("--rm-type math", "")
    script.write_text(text.replace("--num-rollout", flags))
    _, out = imported(script)
    said = CliRunner().invoke(app, ["check", str(out), "rollout.batch_size=0"]).stderr
    for wrong in ("model.path", "/aime.jsonl", "rollout.batch_size", "my_missing", "rows.jsonl, line 2"):
        assert wrong in said


def test_the_upper_clip_range_is_the_lower_one_unless_it_is_given(script):
    script.write_text(LEFT_OUT.replace("--num-rollout", "--eps-clip 0.1 --num-rollout"))
    objective = yaml.safe_load(imported(script)[1].read_text())["actor"]["objective"]
    assert objective == {"type": "ppo", "clip_low": 0.1, "clip_high": 0.1}
    script.with_name("recipe.yaml").unlink()
    script.write_text(LEFT_OUT.replace("--num-rollout", "--advantage-estimator cispo --num-rollout"))
    assert yaml.safe_load(imported(script)[1].read_text())["actor"]["objective"] == {
        "type": "cispo",
        "clip_high": 0.2,
    }


def test_deterministic_engines_get_the_seed_of_slimes_requests(script):
    script.write_text(
        LEFT_OUT.replace("--num-rollout", "--sglang-enable-deterministic-inference --num-rollout")
    )
    result, out = imported(script)
    assert result.exit_code == 0, result.output
    rollout = yaml.safe_load(out.read_text())["rollout"]
    assert rollout["sampling"]["seed"] == 42 and rollout["engine"]["args"]["enable_deterministic_inference"]


def test_a_layout_that_needs_transformer_engine_is_kept_where_there_is_none(script, monkeypatch):
    script.write_text(FURTHER)
    for installed in (False, True):
        monkeypatch.setattr(trainer, "transformer_engine_is_installed", lambda is_there=installed: is_there)
        result, out = imported(script, "--json")
        recipe = yaml.safe_load(out.read_text())
        assert recipe["actor"]["layer_spec"] == "transformer_engine"
        assert recipe["actor"]["parallel"]["context"] == 2
        notes = "\n".join(json.loads(result.stdout)["notes"])
        assert ("Transformer Engine is not installed" in notes) is not installed
        out.unlink()


def refusals_and_recipe(script: Path, flags: str) -> tuple[set[str], dict]:
    script.write_text(LEFT_OUT.replace("--num-rollout", f"{flags} --num-rollout"))
    script.with_name("recipe.yaml").unlink(missing_ok=True)
    result, out = imported(script, "--json")
    outcomes = json.loads(result.stdout)["flags"]
    return {each["flag"] for each in outcomes if each["outcome"] == "refused"}, yaml.safe_load(
        out.read_text()
    )


def test_metrics_go_to_weights_and_biases_only_with_its_switch(script):
    flags = "--wandb-project mine --wandb-group trials --wandb-team us"
    refused, recipe = refusals_and_recipe(script, f"--use-wandb {flags}")
    wandb = recipe.get("log", {}).get("wandb")
    assert not refused and wandb == {"project": "mine", "group": "trials", "entity": "us"}
    assert "log" not in refusals_and_recipe(script, flags)[1]
    assert refusals_and_recipe(script, "--use-wandb")[0] == {"use-wandb"}


def test_advantages_are_normalized_over_the_batch_once(script):
    refused, recipe = refusals_and_recipe(script, "--normalize-advantages")
    assert not refused and recipe["actor"]["advantage_norm"] == {"eps": 1e-4}
    for estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"):
        flags = f"--normalize-advantages --advantage-estimator {estimator}"
        refused, recipe = refusals_and_recipe(script, flags)
        assert not refused and "advantage_norm" not in recipe["actor"]


def test_importance_weights_are_capped_as_in_slime(script):
    for flags, cap in (("--use-tis", 2.0), ("--use-tis --tis-clip 3 --tis-clip-low 0", 3.0)):
        refused, recipe = refusals_and_recipe(script, flags)
        assert not refused and recipe["actor"]["correction"]["token"] == {"type": "cap", "cap": cap}
    assert "correction" not in refusals_and_recipe(script, "--tis-clip 3")[1]["actor"]
    for flags, is_noted in (("--tis-clip 3", True), ("--use-tis", False)):
        script.write_text(LEFT_OUT.replace("--num-rollout", f"{flags} --num-rollout"))
        script.with_name("recipe.yaml").unlink()
        said = imported(script)[0].stdout
        assert ("without --use-tis slime has no importance weight" in said) is is_noted
    assert refusals_and_recipe(script, "--use-tis --tis-clip-low 0.5")[0] == {"tis-clip-low"}


def test_sequences_are_masked_where_slime_compares_with_the_policy_that_sampled(script):
    refused, recipe = refusals_and_recipe(script, "--use-opsm --opsm-delta 1e-3 --use-rollout-logprobs")
    assert not refused
    assert recipe["actor"]["correction"]["negative"] == {"delta": 1e-3, "errors": None}
    refused, recipe = refusals_and_recipe(script, "--use-opsm --opsm-delta 1e-3")
    assert refused == {"use-opsm", "opsm-delta"} and "correction" not in recipe["actor"]


def test_epochs_are_the_length_of_a_run_that_has_no_number_of_rollouts(script):
    script.write_text(LEFT_OUT.replace("--num-rollout 3", "--num-epoch 2 --lr-warmup-fraction 0.1"))
    result, out = imported(script, "--json")
    assert yaml.safe_load(out.read_text())["run"] == {"name": "run-tiny", "epochs": 2}
    said = json.loads(result.stdout)
    assert not [note for note in said["notes"] if "num-rollout" in note]
    [refused] = [each for each in said["flags"] if each["outcome"] == "refused"]
    assert refused["flag"] == "lr-warmup-fraction" and "actor.optimizer.warmup_steps" in refused["reason"]
    both = refusals_and_recipe(script, "--num-epoch 2")
    assert both[1]["run"] == {"name": "run-tiny", "steps": 3} and not both[0]


def test_a_teacher_is_a_term_of_the_advantage(script):
    megatron = "--use-opd --opd-type megatron --opd-teacher-load /teacher_torch_dist --opd-kl-coef 0.5"
    refused, recipe = refusals_and_recipe(script, megatron)
    reward = {"type": "reward", "estimator": "grpo"}
    term = {"type": "teacher", "weight": 0.5, "clip": None}
    assert not refused
    assert recipe["actor"]["advantage"] == [
        reward,
        {**term, "scores": {"type": "model", "path": "/teacher_torch_dist"}},
    ]
    script.with_name("recipe.yaml").unlink()
    notes = json.loads(imported(script, "--json")[0].stdout)["notes"]
    assert any("expected a directory in the format of Hugging Face" in note for note in notes)
    slimes = "slime.rollout.on_policy_distillation"
    server = (
        f"--use-opd --opd-type sglang --opd-kl-coef 0.5 --custom-rm-path {slimes}.reward_func "
        f"--custom-reward-post-process-path {slimes}.post_process_rewards --rm-url http://teacher/generate"
    )
    text = LEFT_OUT.replace("--rm-type math ", "").replace("--num-rollout", f"{server} --num-rollout")
    script.with_name("recipe.yaml").unlink()
    script.write_text(text)
    result, out = imported(script, "--json")
    recipe = yaml.safe_load(out.read_text())
    assert not [each for each in json.loads(result.stdout)["flags"] if each["outcome"] == "refused"]
    assert recipe["actor"]["advantage"] == [reward, {**term, "scores": {"type": "trajectory"}}]
    assert recipe["rollout"]["hooks"] == {
        "custom_rm": "slipstream.rollout.compat.slime.teacher_server.taught_by_server",
        "rm_url": "http://teacher/generate",
        "apply_chat_template": False,
    }


def test_a_teacher_of_whom_slime_would_know_nothing_is_refused(script):
    for flags in (
        "--use-opd",
        "--use-opd --opd-type megatron",
        "--use-opd --opd-type sglang --opd-teacher-load /t",
    ):
        refused, recipe = refusals_and_recipe(script, flags)
        assert "use-opd" in refused and len(recipe["actor"]["advantage"]) == 1
    for flags in ("--opd-type megatron --opd-teacher-load /t", "--use-opd --opd-type sglang --opd-kl-coef 0"):
        refused, recipe = refusals_and_recipe(script, flags)
        assert not refused and len(recipe["actor"]["advantage"]) == 1


def test_fields_of_megatron_and_sglang_that_a_recipe_may_not_set_are_refused_with_their_reason(script):
    flags = "--sglang-speculative-algorithm EAGLE --sglang-deepep-mode auto --moe-token-dispatcher-type flex"
    script.write_text(LEFT_OUT.replace("--num-rollout", f"{flags} --fp8-format hybrid --num-rollout"))
    result, _ = imported(script, "--json")
    outcomes = {each["flag"]: each for each in json.loads(result.stdout)["flags"]}
    for flag, words in (
        ("sglang-speculative-algorithm", "no speculative decoding"),
        ("sglang-deepep-mode", "rollout.engine.untested: [deepep_mode]"),
        ("moe-token-dispatcher-type", "expected alltoall"),
        ("fp8-format", "not in fp8"),
    ):
        assert outcomes[flag]["outcome"] == "refused" and words in outcomes[flag]["reason"]


SHELL = {
    "an if whose condition the script decides": (
        'MODE=a\nif [ "$MODE" = b ]; then LR=1; elif [[ $MODE == a* && -n $MODE ]]; then LR=2\nelse LR=3; fi',
        "$LR",
        "2",
    ),
    "a case": ("M=x/B-8b\ncase ${M##*/} in\n A*) LR=1 ;;\n C|B-*) LR=2;;\n *) LR=3\nesac", "$LR", "2"),
    "an if in one that is skipped": (
        "if false; then if true; then LR=1; fi; LR=3; fi\nLR=${LR:-2}",
        "$LR",
        "2",
    ),
    "a default after a test": ('LR=2\n[ -z "$LR" ] && LR=1\n[ -n "$LR" ] || LR=3', "$LR", "2"),
    "options that are not given": (
        "LR=2\nwhile [ $# -gt 0 ]; do\ncase $1 in --lr) LR=$9;; esac; done",
        "$LR",
        "2",
    ),
    "a loop": ("for LR in 2 3; do :; done", "$LR", "2"),
    "a function with arguments": ("f() {\n local a=$1 b\n LR=$a\n}\nf 2 3", "$LR", "2"),
    "a function that is not called": ("LR=2\nf() {\n LR=1\n}", "$LR", "2"),
    "an empty variable with a default": ("LR=", "${LR:-2}", "2"),
    "a default that is not asked for": ("A=2", "${A:-${B}}", "2"),
    "what a variable ends or begins with": ("A=x/2.sh\nB=${A%.sh}", "${B#x/}", "2"),
    "what is added to a variable": ("LR=1\nLR+=e-6", "$LR", "1e-6"),
    "a declaration": ("declare -r LR=2", "$LR", "2"),
    "quotes within quotes": ('A="{\\"a\\": $(echo "b c")}"', '"{\\"a\\": \\"\\$x\\"}"', '{"a": "$x"}'),
    "a comment between flags": ("A=(\n --x 1 \\\n # --y 2 \\\n --lr 2\n)", "1 ${A[@]}", "2"),
    "output that goes elsewhere": ("", "2 2>&1 | tee log", "2"),
    "output that goes into a file": ("", "2 > log --x", "2"),
    "arguments that are passed on": ("", '2 "$@"', "2"),
    "flags in a variable": ('A="--x 1 --lr 2"', "1 $A", "2"),
}


@pytest.mark.parametrize("text", SHELL)
def test_a_script_is_read_as_bash_runs_it(tmp_path, text):
    before, word, value = SHELL[text]
    path = tmp_path / "run.sh"
    path.write_text(f"{before}\npython3 train.py --lr {word}\n")
    launch = read_launch_script(path)
    assert next(flag.text for flag in reversed(launch.flags) if flag.name == "lr") == value
    assert not [note for note in launch.notes if "for LR" not in note]


@pytest.mark.parametrize(
    ("start", "trainer"),
    [
        ("ENTRY=train_async.py\npython3 $ENTRY --lr 2", "train_async.py"),
        ('CMD="python3 train.py --lr 2"\n$CMD', "train.py"),
        ('CMD="python3 train.py"\neval "$CMD --lr 2"', "train.py"),
        ("LR=2\nssh node 'bash -lc \"ls\"'\nbash -c 'python3 train.py --lr $LR'", "train.py"),
        ("f() { python3 train.py --lr 2; }\nrun_on_all_nodes f", "train.py"),
        ('C=$(cat <<EOF\npython3 train.py --lr 2\nEOF\n)\nsrun bash -c "$C"', "train.py"),
        ("if [ 0 = 1 ]; then python3 train.py --lr 2; fi", "train.py"),
        ("LR=2\nsrun bash <<EOF\npython3 train.py --lr \\$LR\nEOF\necho", "train.py"),
    ],
)
def test_a_trainer_is_found_however_the_script_starts_it(tmp_path, start, trainer):
    path = tmp_path / "run.sh"
    path.write_text(start)
    launch = read_launch_script(path)
    assert launch.trainer == trainer and launch.flags == [Flag("lr", ("2",))]


def test_what_only_a_shell_can_decide_is_noted_where_a_flag_depends_on_it(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(
        "N=$(nvidia-smi | wc -l)\n"
        'if [ "$N" -gt 0 ]; then BS=64; OTHER=1; else BS=32; OTHER=2; fi\n'
        'if [ -n "$SOME_KEY" ]; then W=(--use-wandb); fi\nSIZE=$((BS * 2))\n'
        "python3 train.py --global-batch-size $SIZE ${W[@]}\n"
    )
    launch = read_launch_script(path)
    assert launch.flags == [Flag("global-batch-size", ("64",))]
    assert [note.partition(" ")[0] for note in launch.notes] == ["W", "BS"]


def test_adapters_of_forks_are_imported(script):
    script.write_text(
        LEFT_OUT.replace(
            "--num-rollout",
            "--lora-rank 32 --lora-alpha 16 --lora-dropout 0.1 --target-modules all-linear "
            "--gradient-checkpointing --megatron-to-hf-mode bridge --num-rollout",
        )
    )
    result, out = imported(script, "--json")
    assert result.exit_code == 0, result.output
    actor = yaml.safe_load(out.read_text())["actor"]
    assert (actor["lora"], actor["recompute"]) == ({"rank": 32, "alpha": 16}, "full")
    outcomes = {each["flag"]: each["outcome"] for each in json.loads(result.stdout)["flags"]}
    assert outcomes["lora-dropout"] == outcomes["target-modules"] == "refused"


def test_what_a_recipe_needs_is_filled_in_where_the_script_has_no_such_value(script, monkeypatch):
    monkeypatch.setattr(trainer, "transformer_engine_is_installed", lambda: True)
    script.write_text(
        "python3 train.py --num-rollout 5 --rollout-batch-size 8 --rm-type no-such-type "
        "--lora-rank 8 --lora-alpha 16 --transformer-impl transformer_engine"
    )
    result, out = imported(script)
    assert result.exit_code == 0, result.output
    config = load_recipe(out, [f"prepare={NO_INPUTS}"])
    assert config.rollout.batch_size == 8 and config.actor.lora is not None
    assert "set rollout.reward" in result.stdout or config.rollout.hooks.rm_type


def test_a_path_in_a_variable_without_a_value_is_refused_and_filled_in(script):
    script.write_text(
        "python3 train.py --hf-checkpoint ${BASE_DIR}/tiny --prompt-data $BASE_DIR/a.jsonl --rm-type math "
        "--num-rollout 5 --rollout-batch-size 8 --n-samples-per-prompt 4"
    )
    result, out = imported(script, "--json")
    assert result.exit_code == 0, result.output
    recipe = yaml.safe_load(out.read_text())
    assert recipe["model"]["path"] == "models/policy" and recipe["data"]["path"] == "set/this/path.jsonl"
    flags = {each["flag"]: each for each in json.loads(result.stdout)["flags"]}
    assert flags["hf-checkpoint"]["value"] == "${BASE_DIR}/tiny"
    assert all("variables are not read" in flags[name]["reason"] for name in ("hf-checkpoint", "prompt-data"))


ENDLESS = {
    "a value that doubles": "A=aaaaaaaaaa\n" + "A=$A$A\n" * 60 + "python3 train.py --hf-checkpoint $A\n",
    "an array that doubles": "A=(a b)\n" + 'A+=("${A[@]}")\n' * 60 + "python3 train.py ${A[@]}\n",
    "a value that names itself": "python3 train.py --hf-checkpoint $OF_ITSELF\n",
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_script_whose_values_grow_without_end_is_refused(tmp_path, kind, monkeypatch):
    monkeypatch.setenv("OF_ITSELF", "x$OF_ITSELF")
    path = tmp_path / "run.sh"
    path.write_text(ENDLESS[kind])
    made = CliRunner().invoke(app, ["import", "slime", str(path), "-o", str(tmp_path / "recipe.yaml")])
    assert made.exit_code == 2
    assert "without end" in made.output or "characters in all" in made.output


def test_a_number_beyond_those_of_bash_stays_as_it_is_written(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("A=9\n" + "A=$(( A * A ))\n" * 60 + "python3 train.py --num-rollout $A --seed 3\n")
    script = read_launch_script(path, {})
    assert Flag("seed", ("3",)) in script.flags
