"""Formulas of the memory estimate that no allocation on one rank can show."""

from dataclasses import replace
from math import prod

import pytest

from slipstream.backend.batch.prefixes import MASK_PAIRS
from slipstream.backend.cluster.actors import MOST_STATIC, static_fraction
from slipstream.backend.megatron.tree_attention import BLOCK
from slipstream.backend.memory import trainer_memory
from slipstream.backend.memory.activations import Sharing, layer_bytes, route_bytes
from slipstream.backend.memory.engine_memory import (
    EngineMemory,
    engine_memory,
    kv_bytes,
    stage_sizes,
)
from slipstream.backend.memory.parameters import buffer_of, stage_parameters
from slipstream.backend.memory.trainer_memory import StageMemory, buckets_at_once, parts_in_flight
from slipstream.backend.memory.verdict import CheckpointPlan, checkpoint_bytes, misfits
from slipstream.backend.objective import logprob
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.index import stored_tensors
from slipstream.bridge.model.geometry import LatentAttention
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.plan import entries_of, make_plan
from slipstream.configs.published import MODELS
from slipstream.configs.schema import (
    ActorConfig,
    AverageReference,
    CheckpointConfig,
    CriticConfig,
    DiskTransportConfig,
    KLConfig,
    ParallelConfig,
    RunConfig,
    ShardsTransportConfig,
    TensorTransportConfig,
)
from slipstream.configs.schema.actor import LoraConfig
from tests.integration.test_megatron_parity import config_for
from tests.models import make_checkpoint
from tests.unit.test_rollout_gpu_environment import VALID

LAYOUTS = {
    "Qwen3-1.7B": Layout(pipeline=2, data=2),
    "Qwen3-30B-A3B": Layout(tensor=2, pipeline=4, data=4, expert=8, expert_tensor=1),
    "DeepSeek-V3": Layout(tensor=4, pipeline=4, layers=(16, 15, 15, 15), data=4, expert=8, expert_tensor=2),
    "Llama-3.1-70B-Instruct": Layout(tensor=8, pipeline=2, chunks=4, data=2),
}


@pytest.mark.parametrize("model", LAYOUTS)
def test_every_rank_holds_the_parameters_that_the_trainers_plan_gives_it(model):
    layout, spec = LAYOUTS[model], model_spec(MODELS / model)
    stages = stage_parameters(spec, layout)
    per_stage = layout.tensor * layout.data
    for rank in (*range(0, layout.world_size, per_stage), layout.world_size - 1):
        held = [
            prod(entry.split.shard_shape(shard.size))
            for entry, shard in entries_of(spec, layout, rank)
            if not (entry.mapping.float32 and entry.mapping.frozen)
        ]
        assert stages[rank // per_stage].total == sum(held)


def test_a_schedule_holds_what_megatron_runs_before_the_first_backward_pass():
    assert [parts_in_flight(stage, 4, 1) for stage in range(4)] == [[4], [3], [2], [1]]
    assert [sum(parts_in_flight(stage, 2, 2)) for stage in range(2)] == [5, 3]
    assert parts_in_flight(0, 1, 1) == [1]


def test_the_shares_of_a_buffer_add_up_and_padding_belongs_to_nobody():
    whole = buffer_of((100, 30, 7), 1, distributed=True, buckets=False)
    assert (whole.elements, whole.largest_share) == (256, 137)
    plain = buffer_of((100, 30, 7), 4, distributed=False, buckets=False)
    assert (plain.elements, plain.largest_share) == (137, 137)
    shared = buffer_of((1000, 1000), 2, distributed=True, buckets=False)
    assert shared.elements % 128 == 0
    assert 1000 <= shared.largest_share <= shared.elements // 2


@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-30B-A3B", "DeepSeek-V3"])
def test_tensor_and_sequence_parallelism_divide_all_activations(model):
    """Expert tokens too: with one rank per expert, a rank has its share of them."""
    geometry = model_spec(MODELS / model).geometry
    layer = geometry.n_layers - 1
    alone = layer_bytes(geometry, layer, Sharing())
    shared = layer_bytes(geometry, layer, Sharing(tensor=4, sequence=True, expert=4))
    assert alone.input / shared.input == 4
    assert alone.kept / shared.kept == pytest.approx(4, rel=1e-6)


def test_without_sequence_parallelism_the_residual_stream_stays_whole():
    geometry = model_spec(MODELS / "Qwen3-8B").geometry
    split = layer_bytes(geometry, 0, Sharing(tensor=4))
    assert split.input == layer_bytes(geometry, 0, Sharing()).input


def test_replayed_experts_and_shared_prefixes_take_memory_for_every_token():
    spec, layout = model_spec(MODELS / "Qwen3-30B-A3B"), Layout(pipeline=2, layer_spec="local")
    export, tokens = make_plan(spec, layout, 2**30, 2), 1000
    [plain, _], [routed, _], [shared, _] = (
        trainer_memory.trainer_memory(ActorConfig.model_validate(settings), None, "bfloat16", export, tokens)
        for settings in ({}, {"routing_replay": "rollout"}, {"share_prefixes": "auto"})
    )
    assert routed.activations - plain.activations == pytest.approx(2 * 48 * 8 * 2 * tokens, abs=1)
    assert trainer_memory.MASK_BLOCK == BLOCK and shared.work - plain.work == 4 * 4 * 8**2
    [plain, _], [shared, _] = (
        trainer_memory.trainer_memory(
            ActorConfig.model_validate(settings), None, "bfloat16", export, tokens, "plain"
        )
        for settings in ({}, {"share_prefixes": "auto"})
    )
    mask = 3 * tokens**2
    assert tokens**2 < trainer_memory.MASK_PAIRS == MASK_PAIRS
    assert shared.work - plain.work == pytest.approx(2 * 2 * 4 * 128 * 2 * tokens + mask, abs=1)
    assert route_bytes(spec.geometry) == 48 * 8
    many = replace(spec.geometry, experts=replace(spec.geometry.experts, count=257))
    assert route_bytes(many) == 2 * 48 * 8
    assert route_bytes(model_spec(MODELS / "Qwen3-1.7B").geometry) == 0


def test_the_kv_cache_of_a_token_has_its_published_size():
    """Llama-3.1-70B: 80 layers * 2 * 8 heads * 128 * 2 bytes. DeepSeek-V3: 61 layers * 576 * 2 bytes."""
    llama = model_spec(MODELS / "Llama-3.1-70B-Instruct").geometry
    assert kv_bytes(llama, 1, 2) == 327_680
    assert kv_bytes(llama, 16, 2) == 327_680 // 8, "heads are repeated, not split further"
    assert kv_bytes(llama, 1, 2, 4) == 327_680 // 4, "a stage holds the cache of its layers"
    assert kv_bytes(model_spec(MODELS / "DeepSeek-V3").geometry, 8, 2) == 70_272


def memory(config: RunConfig, spec: ModelSpec, gpu: int | None = None) -> EngineMemory:
    return engine_memory(config.rollout.engine, config.weights.transport, config.model.dtype, spec, gpu)


def engine_of(**split: int) -> EngineMemory:
    """DeepSeek-V3's engine on GPUs of 79 GiB."""
    spec = model_spec(MODELS / "DeepSeek-V3")
    config = RunConfig.model_validate(VALID | {"rollout": {**VALID["rollout"], "engine": split}})
    return memory(config, spec, 79 * 2**30)


def test_engines_and_trainer_that_share_a_gpu_have_a_part_of_its_memory_each():
    gpu, spec = 80 * 2**30, model_spec(MODELS / "Qwen3-8B")

    def told(share: float) -> list[str]:
        engine = {"colocated": True, "gpu_share": share}
        config = RunConfig.model_validate(VALID | {"rollout": {**VALID["rollout"], "engine": engine}})
        found = memory(config, spec, gpu)
        assert found.weights + (found.pool or 0) == pytest.approx(share * gpu, rel=1e-6)
        stage = StageMemory(0, 0, 30 * 2**30, 0, 0, 0, 0, 0, 0, 0, runtime=0)
        return misfits([stage], found, config.rollout.engine, gpu)

    assert told(0.5) == []
    [trainer] = told(0.7)
    assert "take 30.0 GiB" in trainer and "24.0 of them for the trainer (rollout.engine.gpu_share)" in trainer
    [engine] = told(0.1)
    assert engine.startswith("rollout.engine.tensor_parallel: the weights take 15.")


@pytest.mark.parametrize(
    ("free", "fraction"),
    [
        (80, 0.4),  # nobody else is there
        (64, 0.5),  # 32 of 80 GiB are 0.5 of 64
        (36, MOST_STATIC),  # the engine needs memory to work in
        (None, 0.4),  # on CPUs
    ],
)
def test_the_share_of_a_gpu_is_of_all_of_it_and_not_of_what_the_trainer_leaves(free, fraction: float):
    left = [] if free is None else [(free * 2**30, 80 * 2**30)]
    assert static_fraction(0.4, left) == pytest.approx(fraction)
    assert static_fraction(0.9, left) >= 0.9
    if left:  # the ranks of an engine have one fraction
        assert static_fraction(0.4, [*left, (80 * 2**30, 80 * 2**30)]) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("parallel", "engines", "groups"),
    [
        ({}, 0, 0),
        ({"tensor": 8}, 0, 2),  # all ranks, tensor
        ({"tensor": 8, "pipeline": 2, "data": 2}, 0, 4),
        ({"tensor": 2, "context": 2, "data": 2}, 0, 4),  # data with context, and context alone
        ({"tensor": 4, "data": 4, "expert": 16, "expert_tensor": 1}, 0, 4),  # of experts only `expert`
        ({"tensor": 4, "data": 4, "expert": 4, "expert_tensor": 1}, 0, 5),  # and the copies of experts
        ({"data": 4}, 8, 2 + 2),  # four copies serve eight engines in turns
        ({"tensor": 4, "data": 4, "expert": 16, "expert_tensor": 1}, 8, 4 + 8),  # one copy serves them all
    ],
)
def test_every_nccl_group_of_a_rank_takes_memory(parallel: dict, engines: int, groups: int):
    runtime = trainer_memory.runtime_of(ParallelConfig(**parallel), engines)
    assert runtime == trainer_memory.CONTEXT + groups * trainer_memory.GROUP


def test_the_ranks_of_an_engine_over_nodes_hold_a_share_of_the_model_each():
    whole = engine_of(tensor_parallel=8)
    spread = engine_of(tensor_parallel=32)
    assert whole.tokens == 0 and whole.weights > 2 * spread.weights
    assert spread.weights == pytest.approx(whole.weights / 4, rel=0.05)
    assert spread.tokens


def test_groups_of_data_parallel_attention_repeat_its_weights_and_have_caches_of_their_own():
    alone, groups = engine_of(tensor_parallel=32), engine_of(tensor_parallel=32, data_parallel=4)
    geometry = model_spec(MODELS / "DeepSeek-V3").geometry
    attention = geometry.attention
    assert isinstance(attention, LatentAttention) and attention.query_rank is not None
    heads = attention.heads * (
        attention.query_rank * (attention.plain_dim + attention.rotated_dim)
        + attention.kv_rank * (attention.plain_dim + attention.value_dim)
        + attention.value_dim * geometry.hidden
    )
    split = geometry.n_layers * heads + geometry.vocab * geometry.hidden
    assert groups.parameters - alone.parameters == split // 8 - split // 32
    assert groups.token == alone.token
    assert groups.tokens == 4 * (groups.pool // groups.token)


def test_pipeline_stages_divide_the_layers_and_the_last_ones_have_one_more():
    assert stage_sizes(61, 4) == (15, 15, 15, 16)
    stages = engine_of(tensor_parallel=8, pipeline_parallel=4)
    assert stages.token == 70_272 * 16 // 61
    whole = engine_of(tensor_parallel=8)
    assert 0.25 * whole.weights < stages.weights < 0.29 * whole.weights


def test_weights_of_engines_in_fp8_take_a_byte_and_their_scales():
    spec = model_spec(MODELS / "DeepSeek-V3")

    def weights(**engine: object) -> int:
        rollout = {"max_head_offpolicyness": 0, "batch_size": 1, "n_samples_per_prompt": 2, "reward": "a.B"}
        config = RunConfig.model_validate(
            {
                "run": {"name": "test", "steps": 1},
                "model": {"path": str(spec.path)},
                "data": {"path": "train.jsonl"},
                "rollout": {**rollout, "engine": engine},
            }
        )
        return memory(config, spec).weights

    plain, quantized = weights(), weights(quantization="fp8")
    assert plain == pytest.approx(671.03e9 * 2, rel=1e-3)
    unquantized = 2 * 129_280 * 7168 + 58 * 256 * 7168  # embedding and head, routers
    assert quantized == pytest.approx(671.03e9 * (1 + 4 / 128**2) + unquantized, rel=1e-4)


def test_the_head_is_counted_with_the_slices_that_it_uses():
    slices = {"cpu": trainer_memory.HEAD_SLICE["plain"], "cuda": trainer_memory.HEAD_SLICE["fused"]}
    assert slices == logprob.SLICE_ELEMENTS
    assert (trainer_memory.HEAD_MIN_COLUMNS, trainer_memory.HEAD_KEPT) == (
        logprob.MIN_COLUMNS,
        logprob.KEPT_BYTES,
    )


def test_engines_hold_the_parts_that_are_not_of_the_language_model(tmp_path):
    spec = model_spec(make_checkpoint(tmp_path / "model", "qwen3_vl", tied=False))
    config = config_for(spec.path, {})
    alone = replace(spec, mappings=replace(spec.mappings, passed_through=()))
    stored = stored_tensors(spec.path)
    tower = sum(prod(tensor.shape) for name, tensor in stored.items() if name.startswith("model.visual."))
    assert tower > 0
    assert memory(config, spec).weights - memory(config, alone).weights == 4 * tower


@pytest.mark.parametrize(("dtype", "bytes_each"), [("bfloat16", 2 + 4 + 8), ("float32", 4 + 8)])
def test_a_checkpoint_has_weights_main_weights_and_moments_of_every_parameter(dtype, bytes_each):
    parameters = 671_026_404_352
    found = checkpoint_bytes(ActorConfig(), None, dtype, model_spec(MODELS / "DeepSeek-V3"))
    biases = 58 * 256 * 4
    assert found == parameters * bytes_each + biases, "biases that choose experts are not trained by Adam"


def test_a_checkpoint_has_the_critic_the_average_and_the_adapters_too():
    spec = model_spec(MODELS / "Qwen3-8B")
    plain = checkpoint_bytes(ActorConfig(), None, "bfloat16", spec)
    head = 4096 * (151936 - 1)
    assert plain == 14 * 8_190_735_360
    with_critic = checkpoint_bytes(ActorConfig(), CriticConfig(), "bfloat16", spec)
    assert with_critic == 2 * plain - 14 * head, "the critic has one value in place of the vocabulary"
    averaged = ActorConfig(kl=KLConfig(reference=AverageReference()))
    assert checkpoint_bytes(averaged, None, "bfloat16", spec) == plain + 4 * 8_190_735_360
    adapted = ActorConfig(lora=LoraConfig(rank=8, alpha=16, targets=["linear_proj"]))
    adapters = 36 * 8 * (4096 + 4096)
    found = checkpoint_bytes(adapted, None, "bfloat16", spec)
    assert found == 2 * 8_190_735_360 + 14 * adapters, "frozen weights are in it, without moments"


def test_a_checkpoint_is_late_by_its_bytes_and_the_rate_of_the_file_system():
    plan = CheckpointPlan(9_400_000_000_000, 5e9, CheckpointConfig())
    assert plan.seconds == 1880
    assert not plan.in_time
    assert plan.steps(100.0) == 19
    assert replace(plan, settings=CheckpointConfig(timeout_s=3600)).in_time
    assert replace(plan, bytes_per_s=20e9).in_time
    assert replace(plan, settings=CheckpointConfig(every=0)).in_time, "none is written"


@pytest.mark.parametrize(
    ("transport", "quantizes", "on_gpus", "buckets"),
    [
        (ShardsTransportConfig(), False, True, 2),
        (TensorTransportConfig(), False, True, 3),
        (TensorTransportConfig(), False, False, 2),
        (DiskTransportConfig(), False, True, 2),
        (DiskTransportConfig(), True, True, 4),
    ],
)
def test_the_sender_holds_one_bucket_more_where_engines_read_its_gpu(transport, quantizes, on_gpus, buckets):
    assert buckets_at_once(transport, quantizes=quantizes, on_gpus=on_gpus) == buckets
