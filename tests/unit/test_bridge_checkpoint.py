"""HF checkpoints: loading refuses files that do not fit, and an export equals the checkpoint it came from."""

import json
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import slipstream.bridge.shards.export
from slipstream.bridge.families import FAMILIES, model_spec, spec_of
from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.hf.files import write_hf
from slipstream.bridge.hf.index import HfCheckpointError
from slipstream.bridge.hf.kept import Kept
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.publish.publication import NoRoom
from slipstream.bridge.shards.export import export
from slipstream.bridge.shards.load_hf import load_hf
from slipstream.bridge.shards.plan import make_plan
from slipstream.bridge.transport.disk import DiskTransport
from tests.bridge_cases import LAYOUTS, empty_parameters, hf_configs, random_tensors, same_bits
from tests.models import make_checkpoint, stack_experts
from tests.ranks import run_ranks


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def reshard(folder: Path, parts: int = 3) -> None:
    """Split the checkpoint into several files with an index."""
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"part-{i % parts}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name, place in weight_map.items() if place == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def change(folder: Path, **changed: torch.Tensor | None) -> None:
    tensors = tensors_of(folder) | changed
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


def load(folder: Path) -> dict[str, torch.Tensor]:
    spec = model_spec(folder)
    [parameters] = loaded = empty_parameters(spec, Layout(), 0)
    load_hf(spec, Layout(), 0, loaded)
    return parameters


# ---- loading


def test_a_checkpoint_in_many_files_loads_like_one_in_a_single_file(tmp_path):
    folder = make_checkpoint(tmp_path / "model")
    single = load(folder)
    reshard(folder)
    sharded = load(folder)
    assert single.keys() == sharded.keys()
    assert all(torch.equal(single[name], sharded[name]) for name in single)
    assert not any(tensor.isnan().any() for tensor in single.values())


def test_every_tensor_that_does_not_fit_is_named_in_one_error(tmp_path):
    folder = make_checkpoint(tmp_path)
    change(
        folder,
        **{
            "model.norm.weight": None,
            "model.layers.1.mlp.up_proj.weight": None,
            "model.layers.0.self_attn.sinks": torch.zeros(4),
            "model.layers.9.mlp.up_proj.weight": torch.zeros(1),
            "model.embed_tokens.weight": torch.zeros(100, 64),
            "model.layers.2.self_attn.k_proj.weight": torch.zeros(7, 7),
        },
    )
    with pytest.raises(HfCheckpointError) as raised:
        load(folder)
    message = str(raised.value)
    for line in (
        "missing: model.norm.weight",
        "missing: model.layers.1.mlp.up_proj.weight",
        "not mapped: model.layers.0.self_attn.sinks",
        "not mapped: model.layers.9.mlp.up_proj.weight",
        "model.embed_tokens.weight has shape (100, 64), config.json implies (101, 64)",
        "model.layers.2.self_attn.k_proj.weight has shape (7, 7), config.json implies (48, 64)",
    ):
        assert line in message
    assert len(message.splitlines()) == 7


def test_buffers_are_ignored(tmp_path):
    folder = make_checkpoint(tmp_path, tied=True)
    change(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(12)})
    parameters = load(folder)
    assert torch.equal(
        parameters["embedding.word_embeddings.weight"], tensors_of(folder)["model.embed_tokens.weight"]
    )


def test_layers_for_multi_token_prediction_beside_the_decoder_are_ignored(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3_next", tied=False)
    change(
        folder, **{"mtp.fc.weight": torch.zeros(64, 128), "mtp.layers.0.mlp.gate.weight": torch.zeros(8, 64)}
    )
    assert "decoder.final_layernorm.weight" in load(folder)
    change(folder, **{"mtq.fc.weight": torch.zeros(64, 128)})
    with pytest.raises(HfCheckpointError, match=r"not mapped: mtq\.fc\.weight"):
        load(folder)


def test_an_untied_checkpoint_without_a_head_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path, tied=False)
    change(folder, **{"lm_head.weight": None})
    with pytest.raises(HfCheckpointError, match=r"missing: lm_head\.weight"):
        load(folder)


def test_the_last_stage_gets_its_own_copy_of_a_tied_embedding(tmp_path):
    folder = make_checkpoint(tmp_path, tied=True)
    spec, layout = model_spec(folder), Layout(tensor=1, pipeline=2)
    [parameters] = loaded = empty_parameters(spec, layout, 1)
    load_hf(spec, layout, 1, loaded)
    assert torch.equal(parameters["output_layer.weight"], tensors_of(folder)["model.embed_tokens.weight"])


def test_a_file_that_the_index_names_and_that_is_not_there_is_an_error(tmp_path):
    folder = make_checkpoint(tmp_path)
    reshard(folder)
    (folder / "part-0.safetensors").unlink()
    (folder / "part-2.safetensors").unlink()
    with pytest.raises(HfCheckpointError, match=r"part-0\.safetensors, part-2\.safetensors"):
        load(folder)


def test_a_file_that_is_cut_off_is_an_error(tmp_path):
    folder = make_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(HfCheckpointError, match=r"model\.safetensors cannot be read"):
        load(folder)


def test_a_header_without_the_dtype_of_a_tensor_is_an_error(tmp_path):
    folder = make_checkpoint(tmp_path)
    header = json.dumps({"w": {"shape": [1], "data_offsets": [0, 4]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(HfCheckpointError, match=r"model\.safetensors cannot be read.*`dtype`"):
        load(folder)


def test_a_folder_without_weights_is_an_error(tmp_path):
    folder = make_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(HfCheckpointError, match="holds neither"):
        load(folder)


def test_a_megatron_model_with_other_parameters_is_an_error(tmp_path):
    folder = make_checkpoint(tmp_path)
    spec = model_spec(folder)
    [whole] = empty_parameters(spec, Layout(), 0)
    with pytest.raises(HfCheckpointError, match=r"no HF tensor is mapped to: a\.bias, b\.bias"):
        load_hf(spec, Layout(), 0, [whole | {"b.bias": torch.zeros(1), "a.bias": torch.zeros(1)}])
    with pytest.raises(HfCheckpointError, match=r"no parameter 'decoder\.final_layernorm\.weight'"):
        load_hf(spec, Layout(), 0, [{k: v for k, v in whole.items() if "final" not in k}])
    with pytest.raises(HfCheckpointError, match=r"final_layernorm.*\(64,\) expected, Megatron has \(65,\)"):
        load_hf(spec, Layout(), 0, [whole | {"decoder.final_layernorm.weight": torch.zeros(65)}])


def test_more_tensor_ranks_than_key_value_heads_are_refused_with_the_parameter_and_the_numbers(tmp_path):
    spec, layout = model_spec(make_checkpoint(tmp_path)), Layout(tensor=4)
    with pytest.raises(HfCheckpointError, match=r"layers\.0.*linear_qkv.*2 key-value heads.*4 tensor"):
        load_hf(spec, layout, 0, empty_parameters(spec, layout, 0))


# ---- export


Job = tuple[Path, Path, Layout, int, torch.dtype]
"""Source, target, layout, bytes of a bucket, dtype."""


def export_and_write(rank, jobs: list[Job]) -> int:
    """Load each source's shards on four ranks and write the export. Returns this rank's number of buckets."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://{rank.address}:{rank.port}", rank=rank.rank, world_size=4
    )
    count = 0
    for source, target, layout, bucket_bytes, dtype in jobs:
        slipstream.bridge.shards.export.SMALL_BYTES = (
            bucket_bytes // 100
        )  # so that some parts travel alone and others together
        spec = model_spec(source)
        if rank.rank >= layout.world_size:
            continue
        parameters = empty_parameters(spec, layout, rank.rank, dtype)
        load_hf(spec, layout, rank.rank, parameters)
        buckets = export(make_plan(spec, layout, bucket_bytes, dtype.itemsize), parameters, rank.rank)
        seen = []
        noted = (seen.append(bucket and bucket.last) or bucket for bucket in buckets)
        write_hf(noted, source, target, kept=spec.kept)
        count += sum(last is not None for last in seen)
        if seen[-1] is not None:
            assert seen == [False] * (len(seen) - 1) + [True]
    dist.barrier()  # see slipstream.backend.megatron.parallel.leave
    dist.destroy_process_group()
    return count


def write_source(folder: Path, hf: dict, dtype: torch.dtype, seed: int) -> Path:
    """Write a checkpoint of random bits."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(random_tensors(spec_of(hf, folder), dtype, seed), folder / "model.safetensors")
    return folder


Case = tuple[str, str, torch.dtype]
"""Family, layout, dtype."""
EVERY: list[Case] = [
    (family, layout, dtype)
    for family in sorted(FAMILIES)
    for layout in sorted(LAYOUTS)
    for dtype in (torch.float32, torch.bfloat16)
]
FEW = EVERY[:: 2 * len(LAYOUTS) // 4 + 1]
"""Some of them: each family in three or four layouts, in both dtypes, and each layout."""


def check_round_trips(folder: Path, cases: list[Case], data: st.DataObject) -> None:
    """Each case has a random config."""
    jobs: list[Job] = []
    for number, (family, layout, dtype) in enumerate(cases):
        hf, size = data.draw(hf_configs(family)), data.draw(st.integers(100, 20_000))
        source = write_source(folder / f"source-{number}", hf, dtype, seed=number)
        if number % 2:
            stack_experts(source)
        jobs.append((source, folder / f"target-{number}", LAYOUTS[layout], size, dtype))
    counts = run_ranks(4, export_and_write, jobs)
    assert counts[0] > len(jobs)
    assert counts[1:] == [0, 0, 0]
    for source, target, *_ in jobs:
        expected, exported = tensors_of(source), tensors_of(target)
        assert exported.keys() == expected.keys()
        assert all(same_bits(exported[name], expected[name]) for name in expected)
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == expected.keys()
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())


def test_the_few_cases_have_every_family_and_every_layout():
    families, layouts, dtypes = (set(column) for column in zip(*FEW, strict=True))
    assert (families, layouts, len(dtypes)) == (set(FAMILIES), set(LAYOUTS), 2)


# A single example of many cases, because starting ranks is slow.
ONCE = settings(
    max_examples=1, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow  # test_convert.py has exports of what was written in other layouts
@ONCE
@given(st.data())
def test_the_export_of_four_ranks_equals_what_they_loaded_bit_for_bit(tmp_path_factory, data):
    check_round_trips(tmp_path_factory.mktemp("round-trips"), FEW, data)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
@ONCE
@given(data=st.data())
def test_every_layout_of_a_family_exports_what_it_has_loaded(tmp_path_factory, family, data):
    cases = [case for case in EVERY if case[0] == family]
    check_round_trips(tmp_path_factory.mktemp("round-trips"), cases, data)


def small_bucket(dtype=torch.float32) -> FlatBucket:
    return FlatBucket(("a", "b"), ((2, 3), (4,)), torch.arange(10).to(dtype), last=True)


def source_folder(tmp_path: Path, **config) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_text("not to be copied")
    return folder


def test_a_flat_bucket_gives_its_tensors_back_as_views():
    bucket = small_bucket()
    tensors = dict(bucket.tensors())
    assert tensors["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["b"].tolist() == [6, 7, 8, 9]
    assert tensors["b"].untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()


def test_a_written_checkpoint_replaces_an_older_one_and_the_remains_of_a_crash(tmp_path):
    source, folder, rest = source_folder(tmp_path), tmp_path / "out", tmp_path / ".out.partial"
    for old in (folder, rest):
        old.mkdir()
        (old / "model-00009.safetensors").write_text("old")
    write_hf(iter([small_bucket()]), source, folder)
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "model-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert not rest.exists()


@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype"])
def test_the_written_config_states_the_dtype_of_the_written_weights(tmp_path, spelling):
    source, folder = source_folder(tmp_path, **{spelling: "float32"}), tmp_path / "out"
    write_hf(iter([small_bucket(torch.bfloat16)]), source, folder)
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "qwen3", spelling: "bfloat16"}


def test_a_published_version_has_the_tensors_that_are_passed_through_and_the_dtype_of_the_weights(tmp_path):
    source, written = source_folder(tmp_path, text_config={"dtype": "float32"}), []
    tower = {"visual.a": torch.arange(4).half(), "visual.b": torch.tensor(1.5)}
    save_file(tower | {"b": torch.zeros(4)}, source / "model.safetensors")
    transport = DiskTransport(tmp_path / "versions", source, written.append, kept=Kept(("visual.",)))
    transport._write(iter([small_bucket(torch.bfloat16)]), version=3)
    [folder] = (tmp_path / "versions").iterdir()
    tensors = tensors_of(folder)
    assert tensors.keys() == {"a", "b", *tower}
    assert all(same_bits(tensors[name].view(-1), tower[name].view(-1)) for name in tower)
    assert tensors["b"].tolist() == [6, 7, 8, 9]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert json.loads((folder / "config.json").read_text())["text_config"] == {"dtype": "bfloat16"}


def test_there_is_one_version_at_a_time_and_none_of_an_older_run(tmp_path):
    versions = tmp_path / "versions"
    for old in ("version-00000002", ".version-00000007.partial", "notes"):
        (versions / old).mkdir(parents=True)
    transport = DiskTransport(versions, source_folder(tmp_path))
    for version in (3, 4):
        transport._write(iter([small_bucket()]), version)
        assert {path.name for path in versions.iterdir()} == {"notes", f"version-{version:08d}"}


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: Disk quota exceeded (os error 122)"),
    ],
)
def test_a_full_disk_is_told_with_folder_and_setting_and_leaves_nothing(tmp_path, monkeypatch, error):
    def full(tensors, file, metadata):
        file.write_bytes(b"the beginning")
        raise error

    versions = tmp_path / "versions"
    transport = DiskTransport(versions, source_folder(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr("slipstream.bridge.hf.files.save_file", full)
        with pytest.raises(NoRoom, match=rf"make room in {versions} \(weights.transport.path\)"):
            transport._write(iter([small_bucket()]), 3)
    assert list(versions.iterdir()) == []
    transport._write(iter([small_bucket()]), 3)
    assert [path.name for path in versions.iterdir()] == ["version-00000003"]


def test_another_error_of_a_write_is_no_lack_of_room(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("slipstream.bridge.hf.files.save_file", refused)
    with pytest.raises(PermissionError):
        DiskTransport(tmp_path / "versions", source_folder(tmp_path))._write(iter([small_bucket()]), 3)


def test_an_export_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    source, folder = source_folder(tmp_path), tmp_path / "out"
    fsync, rename, synced = os.fsync, Path.rename, set[str]()

    def recording_fsync(descriptor: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def checking_rename(path: Path, target: Path) -> Path:
        assert synced >= {file.name for file in path.iterdir()} | {path.name}
        synced.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "rename", checking_rename)
    write_hf(iter([small_bucket()]), source, folder)
    assert synced == {tmp_path.name}
    assert (folder / "config.json").exists()


def test_an_export_has_all_files_of_its_source_but_its_weights(tmp_path):
    source, folder = source_folder(tmp_path), tmp_path / "out"
    kept = ("tekken.json", "README.md", "tokenizer/tokenizer.json", "assets/more/template.jinja")
    left = (
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "onnx/model.onnx",
        "adapter_config.json",
        ".git/HEAD",
    )
    for name in (*kept, *left):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    (source / "missing").symlink_to(source / "nowhere")
    (source / "loop").symlink_to(source)
    write_hf(iter([small_bucket()]), source, folder)
    written = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert written == {
        *kept,
        *("config.json", "model-00001.safetensors", "model.safetensors.index.json", "tokenizer.json"),
    }
    assert all((folder / name).read_text() == name for name in kept)


def test_a_rank_that_is_not_the_sender_writes_nothing(tmp_path):
    write_hf(iter([None, None]), source_folder(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def export_with_a_silent_rank(rank) -> str:
    """Return the sender's error when rank 1 never sends."""
    # Both have come when the store is there, so that little time is needed to meet.
    store = dist.TCPStore(rank.address, rank.port, 2, rank.rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=2, timeout=timedelta(seconds=4))
    hf = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8}
    hf |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 9,
        "max_position_embeddings": 8,
    }
    spec, layout = spec_of(hf, Path()), Layout(pipeline=2)
    parameters = empty_parameters(spec, layout, rank.rank)
    if rank.rank == 1:
        return ""  # its process goes on: an end of it would be another failure
    try:
        list(export(make_plan(spec, layout, 10**6, 4), parameters, 0))
    except slipstream.bridge.shards.export.ExportError as error:
        return str(error)
    return "no error"


def test_the_sender_names_the_rank_that_does_not_send():
    message, _ = run_ranks(2, export_with_a_silent_rank)
    assert message.startswith("rank 1 did not respond in the export of model.embed_tokens.weight")
