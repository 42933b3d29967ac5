"""HF weights through Megatron checkpoints and back, with the real Megatron: the same bits at every layout."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.backend.checkpoint.folder import CheckpointFolder
from slipstream.backend.checkpoint.manifest import CheckpointRecord
from slipstream.backend.commands.convert import LayoutOptions, megatron_to_hf
from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.megatron import conversion
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.bridge.families import spec_of
from slipstream.configs.schema import ParallelConfig
from slipstream.rollout.system import plugins
from tests.bridge_cases import CONFIG, DEEPSEEK, LINEAR_ATTENTION, random_tensors, same_bits
from tests.environment import environment
from tests.integration.test_trainer_checkpoint import Case, train, trainer_of
from tests.models import make_checkpoint, stack_experts
from tests.ports import held_port
from tests.ranks import run_ranks
from tests.selection import chosen, shortened
from tests.unit.test_bridge_checkpoint import tensors_of

ROOT = Path(__file__).parents[2]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DOTS = {
    "model_type": "dots1",
    "head_dim": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    **EXPERTS,
}
MODELS = {
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": [2], **EXPERTS},
    "glm4_moe": {
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        **EXPERTS,
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **DEEPSEEK, "num_key_value_heads": 4},
    "qwen3_next": {
        "model_type": "qwen3_next",
        **LINEAR_ATTENTION,
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        **EXPERTS,
    },
    "qwen3_5_moe_text": {
        "model_type": "qwen3_5_moe_text",
        **LINEAR_ATTENTION,
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        **EXPERTS,
    },
    "kimi_k2": {"model_type": "kimi_k2", **DEEPSEEK, "num_key_value_heads": 4},
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **DEEPSEEK, "num_key_value_heads": 4},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 24, "tie_word_embeddings": False},
    "minimax_m2": {"model_type": "minimax_m2", "head_dim": 24, "num_local_experts": 4, **EXPERTS},
    "qwen3_vl": {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text", **CONFIG}},
    "dots1": DOTS,
    "gemma3_text": {"model_type": "gemma3_text", "head_dim": 24, "sliding_window": 4},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 24,
        "num_local_experts": 4,
        "sliding_window": 4,
        **EXPERTS,
    },
    "deepseek_v32": {
        "model_type": "deepseek_v32",
        **DEEPSEEK,
        "num_key_value_heads": 4,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
    },
}
FAMILIES = {"dots1": "examples.family.dots1"}
"""The family of a user, which needs to be named."""
BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Trip:
    model: str
    dtype: torch.dtype
    written: dict[str, Any]
    read: dict[str, Any]


TENSOR_2, PIPELINE_2, EXPERT_2 = {"tensor": 2}, {"pipeline": 2}, {"data": 2, "expert": 2}
UNEVEN, VIRTUAL = {"pipeline": 2, "layers": [1, 3]}, {"pipeline": 2, "virtual_pipeline": 2}
SEQUENCE = {"tensor": 2, "sequence": True}
SEQUENCE_EXPERT_2 = SEQUENCE | {"expert": 2, "expert_tensor": 1}
TRIPS = {
    "tied, tensor 2 -> pipeline 2": Trip("qwen3", F32, TENSOR_2, PIPELINE_2),
    "tied, uneven pipeline -> tensor 2": Trip("qwen3", BF16, UNEVEN, TENSOR_2),
    "tied, one rank -> virtual pipeline": Trip("llama", BF16, {}, VIRTUAL),
    "untied, virtual pipeline -> tensor 2": Trip("qwen2", BF16, VIRTUAL, TENSOR_2),
    "experts, tensor 2 -> expert 2": Trip("qwen3_moe", F32, SEQUENCE, EXPERT_2),
    "experts, expert 2 -> tensor 2 and expert 2": Trip("qwen3_moe", BF16, EXPERT_2, SEQUENCE_EXPERT_2),
    "biased experts, expert 2 -> pipeline 2": Trip("glm4_moe", BF16, EXPERT_2, PIPELINE_2),
    "a family of the user's, tensor 2 -> pipeline 2": Trip("dots1", BF16, SEQUENCE, PIPELINE_2),
    "latent, pipeline 2 -> expert 2": Trip("deepseek_v3", BF16, PIPELINE_2, EXPERT_2),
    "latent, tensor 2 and expert 2 -> one rank": Trip("deepseek_v3", F32, SEQUENCE_EXPERT_2, {}),
    "linear attention, tensor 2 and expert 2 -> pipeline 2": Trip(
        "qwen3_next", BF16, SEQUENCE_EXPERT_2, PIPELINE_2
    ),
    "latent, pipeline 2 -> tensor 2": Trip("kimi_k2", BF16, PIPELINE_2, SEQUENCE),
    "latent, tensor 2 -> uneven pipeline": Trip("glm4_moe_lite", BF16, SEQUENCE, UNEVEN),
    "biased, tensor 2 -> pipeline 2": Trip("seed_oss", F32, TENSOR_2, PIPELINE_2),
    "a vision tower beside, tensor 2 -> pipeline 2": Trip("qwen3_vl", BF16, TENSOR_2, PIPELINE_2),
    "norms over all heads, tensor 2 -> expert 2": Trip("minimax_m2", F32, SEQUENCE, EXPERT_2),
    "norms over all heads, pipeline 2 -> tensor 2": Trip("minimax_m2", BF16, PIPELINE_2, SEQUENCE),
    "norms around blocks, tensor 2 -> pipeline 2": Trip("gemma3_text", BF16, TENSOR_2, PIPELINE_2),
    "stacked experts, expert 2 -> pipeline 2": Trip("gpt_oss", BF16, EXPERT_2, PIPELINE_2),
    "stacked experts, tensor 2 and expert 2 -> one rank": Trip("gpt_oss", F32, SEQUENCE_EXPERT_2, {}),
    "experts stacked as published, expert 2 -> tensor 2 and expert 2": Trip(
        "qwen3_5_moe_text", BF16, EXPERT_2, SEQUENCE_EXPERT_2
    ),
    "experts stacked, tensor 2 -> expert 2": Trip("qwen3_moe, stacked", BF16, SEQUENCE, EXPERT_2),
    "a head that the config calls tied, tensor 2 -> pipeline 2": Trip(
        "llama, untied", BF16, TENSOR_2, PIPELINE_2
    ),
    "a tied head that is stored, pipeline 2 -> tensor 2": Trip("llama, stored", BF16, PIPELINE_2, TENSOR_2),
    "indexer, expert 2 -> tensor 2 and expert 2": Trip("deepseek_v32", BF16, EXPERT_2, SEQUENCE_EXPERT_2),
}


FIRST = "tied, tensor 2 -> pipeline 2"
"""What other tests read as well."""
_first_of = {trip.model: name for name, trip in reversed(TRIPS.items())}
KEPT = {FIRST, *_first_of.values()}
"""A trip of each model."""


def write_model(folder: Path, hf: dict[str, Any], dtype: torch.dtype) -> Path:
    """An HF checkpoint of random bits, some of them NaN: nothing is computed."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf))
    spec = spec_of(hf, folder, plugins.resolved(FAMILIES))
    save_file(random_tensors(spec, dtype, seed=len(folder.name)), folder / "model.safetensors")
    return folder


def in_form(folder: Path, form: str) -> None:
    """Store a model of random bits in another form."""
    if form == "stacked":
        stack_experts(folder)
    elif form:
        tensors = load_file(folder / "model.safetensors")
        words = tensors["model.embed_tokens.weight"]
        head = words.clone() if form == "stored" else words.flip(0).contiguous()
        save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")


def assert_same(found: Path, expected: Path) -> None:
    found, expected = tensors_of(found), tensors_of(expected)
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not same_bits(found[name], expected[name])]


# ---- everything that two ranks do, in the same two processes: to start them takes longer than all of it


@dataclass(frozen=True)
class Step:
    do: str
    """The function of this module that does it."""
    parallel: dict[str, Any]
    args: tuple[Any, ...]


def all_steps(rank: RankSpec, steps: dict[str, tuple[int, Step]]) -> dict[str, Any]:
    """Each on as many ranks as it is for, with a port of its own."""
    found = {}
    for name, (port, step) in steps.items():
        parallel = ParallelConfig.model_validate(step.parallel)
        if rank.rank < parallel.world_size:
            here = replace(rank, world_size=parallel.world_size, port=port)
            found[name] = globals()[step.do](here, parallel, *step.args)
    return found


def write(rank: RankSpec, parallel: ParallelConfig, model: Path, dtype: str, folder: Path) -> None:
    conversion.write_megatron(rank, model, parallel, dtype, folder, FAMILIES)


def read(rank: RankSpec, parallel: ParallelConfig, folder: Path, model: Path, out: Path) -> list[str]:
    return conversion.write_huggingface(rank, folder, model, parallel, out, FAMILIES)


def read_plainly(rank: RankSpec, parallel: ParallelConfig, folder: Path, file: Path) -> None:
    """With nothing of ours but the groups."""
    with conversion._joined(rank, parallel):
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load_plain_tensors(str(folder))
        save_file({name: value for name, value in loaded.items() if torch.is_tensor(value)}, file)


def strip(rank: RankSpec, parallel: ParallelConfig, folder: Path, stripped: Path) -> None:
    """A copy without what only we write, as it would be of Megatron-LM."""
    shutil.copytree(folder, stripped)
    torch.save({}, stripped / "common.pt")


def train_a_step(rank: RankSpec, parallel: ParallelConfig, case: Case, folder: Path, hf: Path) -> None:
    config = case.config(folder)
    with trainer_of(rank, config) as trainer:
        train(trainer, 1)
        trainer.begin_checkpoint(hf.parent / "checkpoints" / "v00000001.partial")
        trainer.finish_checkpoint()
        trainer.export_hf(hf)


@dataclass(frozen=True)
class Done:
    folder: Path
    found: list[dict[str, Any]]
    """Of each rank, by the name of the step."""


TRAINED = {
    "all-weights": Case({"pipeline": 2}, dtype="bfloat16", distributed=True),
    "adapters": Case({"tensor": 2}, lora=True),
}


@pytest.fixture(scope="module")
def done(request, tmp_path_factory) -> Done:
    folder = tmp_path_factory.mktemp("conversions")
    steps: dict[str, Step] = {}
    for name in {FIRST: None} | dict.fromkeys(chosen(request, "name")):
        trip = TRIPS[name]
        model = folder / "models" / f"{trip.model}-{trip.dtype}".replace("torch.", "")
        if not model.exists():
            family, _, form = trip.model.partition(", ")
            write_model(model, CONFIG | MODELS[family], trip.dtype)
            in_form(model, form)
        at = folder / name.replace(" ", "-")
        (at / "megatron").mkdir(parents=True)
        (at / "model").symlink_to(model)
        args = (model, str(trip.dtype).removeprefix("torch."), at / "megatron")
        steps[f"write {name}"] = Step("write", trip.written, args)
        steps[f"read {name}"] = Step("read", trip.read, (at / "megatron", model, at / "hf"))
    source = folder / FIRST.replace(" ", "-") / "megatron"
    steps["plain"] = Step("read_plainly", {}, (source, folder / "plain.safetensors"))
    other = write_model(folder / "models" / "other", CONFIG | MODELS["qwen3"] | {"vocab_size": 103}, F32)
    deeper = CONFIG | MODELS["qwen3"] | {"num_hidden_layers": 6, "tie_word_embeddings": False}
    deeper = write_model(folder / "models" / "deeper", deeper, F32)
    steps["other vocabulary"] = Step("read", {"pipeline": 2}, (source, other, folder / "never"))
    steps["deeper"] = Step("read", {"pipeline": 2}, (source, deeper, folder / "never"))
    silent = folder / "silent"
    steps["strip"] = Step("strip", {}, (source, silent))
    same = folder / "models" / "qwen3-float32"
    steps["silent"] = Step("read", {"pipeline": 2}, (silent, same, folder / "from-silent"))
    steps["silent, deeper"] = Step("read", {"pipeline": 2}, (silent, deeper, folder / "never"))
    make_checkpoint(folder / "models" / "tied", tied=True)
    runs = {name: CheckpointFolder(folder / name / "checkpoints", keep_last=1) for name in TRAINED}
    for name, case in TRAINED.items():
        runs[name].begin(1)
        args = (case, folder / "models", folder / name / "exported")
        steps[f"train {name}"] = Step("train_a_step", case.parallel, args)
    ports = {name: (held_port(), step) for name, step in steps.items()}
    found = run_ranks(2, all_steps, ports)
    for run in runs.values():
        run.commit(CheckpointRecord(version=1, step=1, epoch=1, data_position=0, counts={}))
    return Done(folder, found)


@pytest.mark.parametrize("name", shortened(TRIPS, KEPT))
def test_what_was_written_in_one_layout_and_read_in_another_has_the_same_bits(name: str, done: Done):
    at = done.folder / name.replace(" ", "-")
    assert_same(at / "hf", at / "model")


def test_megatron_itself_reads_a_converted_checkpoint(done: Done):
    plain = load_file(done.folder / "plain.safetensors")
    hf = tensors_of(done.folder / "models" / "qwen3-float32")
    assert same_bits(plain["embedding.word_embeddings.weight"][:101], hf["model.embed_tokens.weight"])
    assert same_bits(plain["decoder.final_layernorm.weight"], hf["model.norm.weight"])
    for layer in range(4):
        stacked = plain["decoder.layers.mlp.linear_fc2.weight"][layer]
        assert same_bits(stacked, hf[f"model.layers.{layer}.mlp.down_proj.weight"])


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(done: Done):
    for rank in done.found:
        assert rank["other vocabulary"] == ["vocab is 101 there and 103 here"]
        assert "n_layers is 4 there and 6 here" in rank["deeper"]
    assert not (done.folder / "never").exists()


def test_a_checkpoint_that_says_nothing_of_itself_is_compared_by_names_and_shapes(done: Done):
    assert_same(done.folder / "from-silent", done.folder / "models" / "qwen3-float32")
    for rank in done.found:
        assert rank["silent"] == []
        assert "output_layer.weight: missing" in rank["silent, deeper"]
        shapes = "shape (4, 64, 96) there, (6, 64, 96) here"
        assert f"decoder.layers.mlp.linear_fc2.weight: {shapes}" in rank["silent, deeper"]


# ---- the command


def slipstream(*args: object, cwd: Path = ROOT, **options: Any) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "slipstream.backend.cli", "convert", *map(str, args)],
        cwd=cwd,
        env=environment(NO_COLOR="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    said, wrong = process.communicate(timeout=240)
    return process.returncode, said, wrong


def assert_converted(run: Path) -> None:
    assert_same(run / "converted" / "out", run / "exported")
    assert [path.name for path in (run / "converted").iterdir()] == ["out"]


def test_the_command_makes_of_a_runs_checkpoints_what_the_run_would_export(done: Done):
    run = done.folder / "all-weights"
    model, out = done.folder / "models" / "tied", run / "converted" / "out"
    out.parent.mkdir()
    command = slipstream("megatron-to-hf", run / "checkpoints", out, "--model", model)
    code, said, wrong = ended(command)
    assert (code, wrong) == (0, "")
    assert "v00000001" in said
    assert_converted(run)


@pytest.mark.slow  # the conversions above have such a family, the test above has the command
def test_the_command_converts_a_family_of_the_users_in_both_directions(tmp_path):
    """Its ranks are processes of their own, which must find the module as the command does."""
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(ROOT / "examples/family/dots1.py", package / "my_dots.py")
    model = write_model(tmp_path / "model", CONFIG | DOTS, F32)
    family, megatron = ("--family", "dots1=my_package.my_dots"), tmp_path / "megatron"
    code, said, wrong = ended(
        slipstream("hf-to-megatron", model, megatron, "--tensor", 2, *family, cwd=tmp_path)
    )
    assert (code, wrong) == (0, ""), wrong
    assert "dots1" in said
    out = tmp_path / "hf"
    code, _, wrong = ended(
        slipstream("megatron-to-hf", megatron, out, "--model", model, *family, cwd=tmp_path)
    )
    assert (code, wrong) == (0, ""), wrong
    assert_same(out, model)


def test_checkpoints_with_adapters_become_what_the_run_would_export(done: Done):
    run = done.folder / "adapters"
    model, out = done.folder / "models" / "tied", run / "converted" / "out"
    out.parent.mkdir()
    one_rank = LayoutOptions(1, 1, 1, 1, None, None)
    assert "v00000001" in megatron_to_hf(run / "checkpoints", out, model, one_rank)
    assert_converted(run)


def test_the_adapter_of_a_checkpoint_becomes_what_the_run_would_export_for_peft(done: Done, tmp_path):
    run, model, out = done.folder / "adapters", done.folder / "models" / "tied", tmp_path / "out"
    pipeline_2 = LayoutOptions(1, 2, 1, 1, None, None)
    said = megatron_to_hf(run / "checkpoints", out, model, pipeline_2, adapter_alone=True)
    assert "the adapter of" in said and "2 ranks" in said
    assert_same(out, run / "exported-peft")
    configs = [
        json.loads((each / "adapter_config.json").read_text()) for each in (out, run / "exported-peft")
    ]
    assert configs[0] == configs[1]


def test_a_checkpoint_without_an_adapter_is_refused_with_the_reason(done: Done, tmp_path):
    run, model = done.folder / "all-weights", done.folder / "models" / "tied"
    one_rank = LayoutOptions(1, 1, 1, 1, None, None)
    with pytest.raises(WrongInput, match=r"actor\.lora: missing; expected a checkpoint of a run that trains"):
        megatron_to_hf(run / "checkpoints", tmp_path / "out", model, one_rank, adapter_alone=True)
    assert not list(tmp_path.iterdir())


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def ranks_of(command: int) -> list[int]:
    """What was forked by its process that has imported Megatron."""
    for child in children(command):
        with suppress(OSError):
            if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes():
                return children(child)
    return []


@dataclass(frozen=True)
class CutShort:
    """A conversion that got a signal, and how it ended."""

    folder: Path
    signal: signal.Signals
    started: list[int]
    """Its processes at the time of the signal."""
    code: int
    said: str
    wrong: str


def cut(folder: Path, to: str) -> CutShort:
    """Kill a rank of a conversion with two ranks, or end the command itself."""
    model = write_model(folder / "model", CONFIG | MODELS["qwen3"], F32)
    command = slipstream("hf-to-megatron", model, folder / "out", "--tensor", 2)
    deadline = time.monotonic() + 180
    while len(ranks := ranks_of(command.pid)) < 2:
        assert time.monotonic() < deadline
        assert command.poll() is None
        time.sleep(0.02)
    started = [*children(command.pid), *ranks]
    number = signal.SIGKILL if to == "rank" else signal.SIGTERM
    os.kill(ranks[1] if to == "rank" else command.pid, number)
    return CutShort(folder, number, started, *ended(command))


@pytest.fixture(scope="module")
def cut_short(tmp_path_factory) -> dict[str, CutShort]:
    """By what got the signal. Both run side by side: each keeps one core busy."""
    folders = {to: tmp_path_factory.mktemp(to) for to in ("rank", "command")}
    with ThreadPoolExecutor() as pool:
        return dict(zip(folders, pool.map(cut, folders.values(), folders), strict=True))


@pytest.mark.parametrize(
    ("number", "to", "message"),
    [
        (signal.SIGKILL, "rank", "failed: rank 1 was killed by SIGKILL"),
        (signal.SIGTERM, "command", "stopped"),
    ],
)
def test_a_conversion_that_is_cut_short_leaves_neither_output_nor_processes(
    cut_short: dict[str, CutShort], number: signal.Signals, to: str, message: str
):
    conversion = cut_short[to]
    assert (conversion.signal, conversion.code, conversion.said) == (number, 1, "")
    assert message in conversion.wrong and f"there is no {conversion.folder / 'out'}" in conversion.wrong
    assert "Traceback" not in conversion.wrong
    assert [path.name for path in conversion.folder.iterdir()] == ["model"]
    deadline = time.monotonic() + 60  # what ranks are forked from ends when it sees that the command has
    while any(Path(f"/proc/{pid}").exists() for pid in conversion.started):
        assert time.monotonic() < deadline
        time.sleep(0.02)
