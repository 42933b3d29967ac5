"""``slipstream plan`` and what ``check`` says about the model."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from slipstream.backend.cli.app import app
from slipstream.backend.commands.plan_document import planned_publication_s
from slipstream.backend.megatron.layer_spec import layer_spec_on_gpus
from slipstream.backend.megatron.supported import require_supported
from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.bridge.families import FAMILIES, spec_of
from slipstream.bridge.hf.config import UnsupportedModel, read_config
from slipstream.bridge.model.layout import Layout
from slipstream.configs.load import load_recipe
from slipstream.configs.schema import ActorConfig
from slipstream.rollout.engine.model_limits import TIED_ONLY, UNSERVED, UNSERVED_ON_CPUS
from tests.bridge_cases import MIXTURES
from tests.models import make_checkpoint
from tests.quantized_models import FP8, write_quantized


@pytest.fixture
def recipe(tmp_path):
    make_checkpoint(tmp_path / "model", "deepseek_v3", tied=False)
    return written_recipe(tmp_path)


def written_recipe(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"run: {{name: test, steps: 1, root: {tmp_path / 'runs'}}}\n"
        f"model: {{path: {tmp_path / 'model'}, dtype: bfloat16}}\n"
        f"data: {{path: {tmp_path / 'train.jsonl'}}}\n"
        "rollout: {max_head_offpolicyness: 4, batch_size: 4, n_samples_per_prompt: 4,\n"
        "          reward: slipstream.rollout.reward.FinalAnswer, sampling: {max_new_tokens: 64}}\n"
        "actor: {parallel: {tensor: 2, sequence: true, pipeline: 2, data: 2, expert: 4, expert_tensor: 1}}\n"
        "weights: {transport: {type: tensor, bucket_mb: 1}}\n"
    )
    return file


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("count: 1", None),
        (
            "count: 2, max_count: 6",
            "2 to 6 engines as nodes come and go: 6 take 6 GPUs beside those of the tr",
        ),
        ("count: 2, min_count: 1", "1 to 2 engines as nodes come and go: 2 take 2 GPUs"),
    ],
)
def test_a_plan_says_what_the_largest_number_of_engines_takes(recipe, settings, told):
    shown = call("plan", recipe, f"rollout.engine={{{settings}}}")
    assert shown.exit_code == 0, shown.output
    assert (told in shown.stdout) if told else "come and go" not in shown.stdout


def test_a_plan_shows_the_layout_and_with_weights_the_way_of_every_tensor(recipe):
    short = call("plan", recipe)
    assert short.exit_code == 0, short.output
    for told in ("deepseek_v3, 4 layers", "8 trainer ranks: tensor 2 * pipeline 2 * data 2"):
        assert told in short.stdout
    assert "8 experts over 4 ranks, each on 1" in short.stdout
    assert "layers of each part of the pipeline: 2, 2" in short.stdout
    assert "bucket" not in short.stdout
    weights = call("plan", recipe, "--weights")
    assert "leave through rank 0 in 2 buckets" in weights.stdout
    assert "0-7" in weights.stdout, "experts come from all ranks"


def test_plan_and_check_say_how_the_weights_of_the_checkpoint_are_stored(recipe, tmp_path):
    hf = json.loads((tmp_path / "model/config.json").read_text())
    write_quantized(tmp_path / "model", hf, FP8)
    build_tokenizer().save_pretrained(tmp_path / "model")
    planned, checked = call("plan", recipe), call("check", recipe)
    told = "stored in fp8 in blocks of 128x128; the trainer loads them as bfloat16"
    for ended in (planned, checked):
        assert told in " ".join(ended.output.split()), ended.output
    assert "engines hold the weights in bfloat16, and start from a copy" in " ".join(checked.output.split())
    assert json.loads(call("plan", recipe, "--json").stdout)["quantization"] == "fp8 in blocks of 128x128"


def test_a_plan_says_what_replayed_experts_take_and_shared_prompts_save(recipe):
    given = ("actor.routing_replay=rollout", "actor.share_prefixes=auto", "simulate.responses.median=64")
    saved = call("plan", recipe, *given, "simulate.prompts.median=64").stdout
    assert "replayed experts: 16 bytes a token" in saved
    assert re.search(r"shared prompts: .* save (2|3)\d% of the trainer's FLOPs", saved)
    assert "save less than a tenth" in call("plan", recipe, *given, "simulate.prompts.median=4").stdout
    plain = call("plan", recipe).stdout
    assert "replayed experts" not in plain and "shared prompts" not in plain


def test_the_json_document_has_every_tensor_of_the_checkpoint_once(recipe, tmp_path):
    ended = call("plan", recipe, "--json")
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)
    tensors = {name: shape for bucket in found["buckets"] for name, shape in bucket["tensors"].items()}
    stored = load_file(tmp_path / "model/model.safetensors")
    assert tensors == {name: list(tensor.shape) for name, tensor in stored.items()}
    assert found["parameters"] == sum(tensor.numel() for tensor in stored.values())
    assert found["bytes"] == sum(found["bytes_from_rank"].values())
    assert [bucket["dtype"] for bucket in found["buckets"]] == ["bfloat16", "float32"]


def test_a_plan_shows_how_engines_are_spread_over_nodes(recipe):
    assert "1 engine of 1 rank, each on one node: tensor 1" in call("plan", recipe).stdout
    spread = (
        recipe,
        "cluster={type: slurm}",
        "weights.transport={type: disk}",
        "rollout.engine={count: 3, nodes: 2, tensor_parallel: 4, data_parallel: 2, expert_parallel: 4}",
    )
    line = "tensor 4, attention in 2 data-parallel groups, experts in 4 groups"
    assert f"3 engines of 4 ranks, each over 2 nodes of 2: {line}" in call("plan", *spread).stdout
    assert json.loads(call("plan", *spread, "--json").stdout)["engines"] == {
        "engines": 3,
        "fewest": 3,
        "most": 3,
        "ranks": 4,
        "tensor": 4,
        "data": 2,
        "expert": 4,
        "pipeline": 1,
        "nodes": 2,
        "ranks_per_node": 2,
    }


def test_plan_and_check_know_the_judges_own_engines(recipe, tmp_path):
    with_judge = (
        recipe,
        f"judge={{type: model, endpoint: {{type: engines, path: {tmp_path / 'model'}, count: 2}}, "
        "max_new_tokens: 32}",
        "rollout.reward=slipstream.rollout.reward.ModelVotes",
    )
    weights = (tmp_path / "model/model.safetensors").stat().st_size
    shown = call("plan", *with_judge)
    assert "judge: 2 engines of its own, tensor 1, on 2 GPUs of their own" in shown.stdout, shown.output
    found = json.loads(call("plan", *with_judge, "--json").stdout)["judge"]
    assert (found["engines"], found["ranks"], found["weights"]) == (2, 1, weights)
    small = ["cluster.type=local", "cluster.device=gpu", f"cluster.gpu_memory_gib={weights / 2**31}"]
    ended = call("check", *with_judge, *small)
    text = " ".join(ended.output.split())
    assert ended.exit_code == 2
    assert "judge.endpoint.path: " in text and "has no tokenizer" in text
    assert "judge.endpoint.tensor_parallel: the weights take" in text


def test_a_plan_shows_the_environment_that_processes_on_gpus_get(recipe):
    on_gpus = ("plan", recipe, "cluster={type: local, device: gpu}", "--no-split")
    shown = call(*on_gpus).stdout
    assert "environment of trainer on GPUs: NCCL_CUMEM_ENABLE=0" in shown
    assert "environment of engines on GPUs: NCCL_CUMEM_ENABLE=0" in shown
    variables = json.loads(call(*on_gpus, "--json").stdout)["environment"]
    processes = {variable["name"]: variable["processes"] for variable in variables}
    assert processes["CUDA_DEVICE_MAX_CONNECTIONS"] == ["trainer"]
    assert "environment" not in call("plan", recipe, "cluster={type: local, device: cpu}").stdout


def test_plan_and_check_compare_the_time_of_a_checkpoint_with_its_time_out(recipe, tmp_path):
    build_tokenizer().save_pretrained(tmp_path / "model")
    found = json.loads(call("plan", recipe, "--json").stdout)["checkpoint"]
    assert found["seconds"] == found["bytes"] / found["bytes_per_s"]
    assert (found["every"], found["timeout_s"], found["in_time"]) == (10, 1800, True)
    assert found["kept_bytes"] == 2 * found["bytes"]
    assert found["pinned_bytes"] == 0
    on_gpus = ("plan", recipe, "cluster={type: local, device: gpu}", "--no-split")
    pinned = json.loads(call(*on_gpus, "--json").stdout)["checkpoint"]["pinned_bytes"]
    assert found["bytes"] <= 8 * pinned < found["bytes"] + 8, "eight ranks share it"
    assert "snapshots for checkpoints: " in call(*on_gpus).stdout
    assert "at 5 GB/s (cluster.file_system_bytes_per_s), of 1,800 s" in call("plan", recipe).stdout
    files = "cluster={type: local, file_system_bytes_per_s: 100}"
    slow = (recipe, files, "checkpoint={every: 20, timeout_s: 900}")
    assert "GIVEN UP after 900 s (checkpoint.timeout_s)" in call("plan", *slow).stdout
    checked = call("check", *slow)
    assert checked.exit_code == 0, "the rate is an estimate"
    assert "checkpoint.timeout_s: 900: a checkpoint of" in " ".join(checked.output.split())
    assert "checkpoint.timeout_s" not in call("check", recipe).output
    assert (found["share_bytes"], found["node_bytes"]) == (0, 0)
    on_nodes = ("plan", recipe, "checkpoint.local_dir=/scratch", "--no-split")
    share = json.loads(call(*on_nodes, "--json").stdout)["checkpoint"]["share_bytes"]
    assert "checkpoints on disks of nodes (checkpoint.local_dir): " in call(*on_nodes).stdout
    assert found["bytes"] / 8 < share < found["bytes"], "ranks share the optimizer's state, not the weights"
    none = call("plan", recipe, "checkpoint.every=0", files)
    assert "checkpoints: none is written" in none.stdout


def test_a_plan_for_gpus_says_how_long_a_version_takes_to_reach_the_engines(recipe):
    def publication(*overrides: str):
        ended = call("plan", recipe, "cluster={type: local, device: gpu}", "--no-split", "--json", *overrides)
        assert ended.exit_code == 0, ended.output
        return json.loads(ended.stdout)

    document = publication()
    found = document["publication"]
    assert found == {
        "transport": "tensor",
        "prepare_s": 0,
        "pause_s": pytest.approx(0.5 + document["bytes"] / 14e9),
        "bytes": document["bytes"],
        "bytes_per_s": 14e9,
    }
    slower = publication("simulate.transfer.bytes_per_s=1e6")["publication"]
    assert (slower["bytes"], slower["bytes_per_s"]) == (found["bytes"], 1e6)
    shards = publication("weights.transport={type: shards}")["publication"]
    assert (shards["transport"], shards["bytes_per_s"]) == ("shards", 45e9)
    shown = call("plan", recipe, "cluster={type: local, device: gpu}", "--no-split").stdout
    assert "publication by tensor: a pause of" in shown
    on_cpus = call("plan", recipe, "cluster={type: local, device: cpu}", "--json")
    assert json.loads(on_cpus.stdout)["publication"] is None
    of_gpus, of_cpus = (
        planned_publication_s(load_recipe(recipe, [f"cluster={{type: local, device: {device}}}"]))
        for device in ("gpu", "cpu")
    )
    assert (of_gpus, of_cpus) == (pytest.approx(found["pause_s"]), None)


def test_a_layout_that_does_not_fit_is_exit_code_2(recipe):
    ended = call("plan", recipe, "actor.parallel.expert=3")
    assert ended.exit_code == 2
    assert "actor.parallel.expert" in ended.output


def test_check_names_every_tensor_that_does_not_fit(recipe, tmp_path):
    build_tokenizer().save_pretrained(tmp_path / "model")
    ended = call("check", recipe)
    assert ended.exit_code == 0, ended.output
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    tensors["model.norm.weight"] = torch.zeros(5)
    tensors["model.layers.0.self_attn.sinks"] = torch.zeros(4)
    save_file(tensors, file)
    ended = call("check", recipe)
    assert ended.exit_code == 2
    for told in (
        "missing: model.layers.1.mlp.experts.3.up_proj.weight",
        "not mapped: model.layers.0.self_attn.sinks",
        "model.norm.weight has shape (5,), config.json implies (64,)",
    ):
        assert told in ended.output


def test_check_names_all_code_of_the_wrong_shape_with_everything_else(recipe, tmp_path, monkeypatch):
    (tmp_path / "code_of_the_user.py").write_text(
        "class Reward:\n"
        "    def __init__(self, scale):\n"
        "        raise RuntimeError('a check calls nothing')\n"
        "    def score(self, prompt, response):\n"
        "        return 0.0\n"
        "class Filter:\n"
        "    def __init__(self, least): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "model/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    ended = call(
        "check",
        recipe,
        "rollout.reward={path: code_of_the_user.Reward, args: {scale: 2}}",
        "rollout.workflow=code_of_the_user.Workflow",
        "rollout.group_filter={path: code_of_the_user.Filter, args: {leest: 1}}",
    )
    assert ended.exit_code == 2
    text = " ".join(ended.output.split())
    for told in (
        "rollout.reward: code_of_the_user.Reward: `score(prompt, response)` cannot be called with",
        "rollout.workflow: code_of_the_user.Workflow: code_of_the_user has no 'Workflow'",
        "`leest` is unknown: did you mean `least`?; `least` is missing",
        "cannot be read",
    ):
        assert told in text
    assert "a check calls nothing" not in text


def test_check_looks_at_the_values_of_a_reward_that_ships(recipe):
    parts = "{a: {path: slipstream.rollout.reward.Regex, args: {pattern: '('}, weight: 1}}"
    ended = call(
        "check",
        recipe,
        f"rollout.reward={{path: slipstream.rollout.reward.Weighted, args: {{parts: {parts}}}}}",
    )
    assert ended.exit_code == 2
    assert "parts.a: pattern: '(' is no regular expression" in " ".join(ended.output.split())


def test_a_checkpoint_that_is_cut_off_or_no_checkpoint_is_exit_code_2(recipe, tmp_path):
    file = tmp_path / "model/model.safetensors"
    whole = file.read_bytes()
    for data in (whole[:-100], whole[:20], b"", b"\xff" * 100, whole[:8] + b"[" + whole[9:]):
        file.write_bytes(data)
        ended = call("check", recipe)
        assert ended.exit_code == 2
        assert "cannot be read" in ended.output
        assert "Traceback" not in ended.output


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_plan_and_check_take_a_checkpoint_of_every_family(tmp_path, family):
    folder = make_checkpoint(tmp_path / "model", family, tied=family in TIED_ONLY)
    build_tokenizer().save_pretrained(folder)
    file = written_recipe(tmp_path)
    experts = family in MIXTURES
    layout = "{tensor: 2, sequence: true, pipeline: 2" + (
        ", expert: 2, expert_tensor: 1}" if experts else "}"
    )
    shown = call("plan", file, f"actor.parallel={layout}", "--no-split")
    assert shown.exit_code == 0, shown.output
    assert f"{family}, 4 layers" in shown.stdout
    checked = call("check", file, f"actor.parallel={layout}", "cluster={type: local, device: cpu}")
    reasons = [
        *([f"SGLang cannot serve {family}: {UNSERVED[family]}"] if family in UNSERVED else []),
        *(
            [f"SGLang cannot serve {family} on CPUs: {UNSERVED_ON_CPUS[family]}"]
            if family in UNSERVED_ON_CPUS
            else []
        ),
    ]
    assert checked.exit_code == (2 if reasons else 0), checked.output
    assert all(reason in " ".join(checked.output.split()) for reason in reasons)


def test_check_refuses_engines_that_cannot_divide_the_experts_of_a_model(tmp_path):
    folder = make_checkpoint(tmp_path / "model", "gpt_oss", tied=False)
    build_tokenizer().save_pretrained(folder)
    engine = "rollout.engine={tensor_parallel: 2, expert_parallel: 2}"
    refused = call("check", written_recipe(tmp_path), engine, "cluster={type: local, device: gpu}")
    assert refused.exit_code == 2
    assert (
        "rollout.engine.expert_parallel: 2: SGLang cannot divide the experts of gpt_oss among ranks"
        in " ".join(refused.output.split())
    )


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "gpt_oss",
            {"actor.parallel": "{tensor: 2, sequence: true}"},
            "each of the 2 tensor-parallel ranks that share an expert would add its bias; set "
            "actor.parallel.expert_tensor to 1",
        ),
    ],
)
def test_a_layout_that_megatron_s_layers_cannot_compute_is_exit_code_2(tmp_path, family, changes, message):
    build_tokenizer().save_pretrained(make_checkpoint(tmp_path / "model", family, tied=False))
    overrides = [f"{name}={value}" for name, value in changes.items()]
    ended = call("plan", written_recipe(tmp_path), *overrides, "--no-split")
    assert ended.exit_code == 2
    assert f"{family}: {message}" in " ".join(ended.output.split())


def test_a_model_with_sparse_attention_gets_layers_of_the_local_spec_by_itself(tmp_path):
    build_tokenizer().save_pretrained(make_checkpoint(tmp_path / "model", "deepseek_v32", tied=False))
    settings = ("model.dtype=bfloat16", "actor.parallel={}", "cluster={type: local, device: gpu}")
    ended = call("plan", written_recipe(tmp_path), *settings, "--no-split")
    assert ended.exit_code == 0, ended.output


def test_layers_of_transformer_engine_are_refused_to_a_model_with_sparse_attention(tmp_path):
    folder = make_checkpoint(tmp_path / "model", "deepseek_v32", tied=False)
    geometry = spec_of(read_config(folder), folder).geometry
    with pytest.raises(UnsupportedModel, match=r"sparse attention .* set actor.layer_spec to local"):
        require_supported(geometry, Layout(layer_spec="transformer_engine"))


@pytest.mark.parametrize(("family", "kind"), [("deepseek_v32", "sparse"), ("qwen3_next", "linear")])
def test_models_that_cannot_share_prefixes_are_refused(tmp_path, family: str, kind: str):
    folder = make_checkpoint(tmp_path / "model", family, tied=False)
    geometry = spec_of(read_config(folder), folder).geometry
    with pytest.raises(UnsupportedModel, match=rf"{kind} attention .* set actor.share_prefixes to off"):
        require_supported(geometry, Layout(), shares_prefixes=True)
    require_supported(geometry, Layout())


def test_shared_prefixes_get_layers_of_the_local_spec_by_themselves(tmp_path):
    folder = make_checkpoint(tmp_path / "model")
    geometry = spec_of(read_config(folder), folder).geometry
    actor = ActorConfig(share_prefixes="auto")
    assert layer_spec_on_gpus(actor, "bfloat16", geometry) == "local"
    assert layer_spec_on_gpus(ActorConfig(), "bfloat16", geometry) == "transformer_engine"


def test_check_refuses_adapters_of_experts_that_hf_stacks(tmp_path):
    build_tokenizer().save_pretrained(make_checkpoint(tmp_path / "model", "gpt_oss", tied=False))
    recipe = written_recipe(tmp_path)
    settings = ("actor.parallel={}", "actor.layer_spec=local", "cluster={type: local, device: cpu}")
    refused = call("check", recipe, *settings, "actor.lora={rank: 2, alpha: 4}")
    said = " ".join(refused.output.split())
    assert refused.exit_code == 2
    assert "actor.lora.targets: experts whose weights HF stacks in one tensor cannot have adapters" in said
    of_attention = call(
        "check", recipe, *settings, "actor.lora={rank: 2, alpha: 4, targets: [linear_qkv, linear_proj]}"
    )
    assert "actor.lora" not in of_attention.output
