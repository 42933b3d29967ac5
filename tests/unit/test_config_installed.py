"""Megatron and SGLang fields are read from source, in every layout those packages have had."""

import importlib.util
import re
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

from slipstream.configs import installed
from slipstream.configs.installed import (
    EVAL_SAMPLING,
    JUDGES_SGLANG,
    MEGATRON,
    SAMPLING,
    SGLANG,
    Library,
    check_passthrough,
    untested_fields,
)
from slipstream.configs.installed.environment import FOLDER as ENVIRONMENT
from slipstream.configs.installed.fields import allowed, refused, table
from slipstream.configs.installed.served import can
from slipstream.configs.installed.source import read_megatron, read_sglang
from slipstream.configs.schema import ActorConfig, EngineConfig, RunConfig
from tests.environment import ROOT

CONFIG = RunConfig.model_validate(
    {
        "run": {"name": "x", "steps": 1},
        "model": {"path": "m"},
        "data": {"path": "d.jsonl"},
        "rollout": {
            "max_head_offpolicyness": 0,
            "batch_size": 1,
            "n_samples_per_prompt": 2,
            "reward": "a.B",
        },
    }
)


def check(
    megatron: dict | None = None, sglang: dict | None = None, listed: list[str] | None = None
) -> dict[str, str]:
    rollout = CONFIG.rollout.model_copy(update={"engine": EngineConfig(args=sglang or {})})
    actor = ActorConfig(megatron=megatron or {}, untested=listed or [])
    config = CONFIG.model_copy(update={"actor": actor, "rollout": rollout})
    return {violation.path: violation.reason for violation in check_passthrough(config)}


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        file = root.joinpath(*name.split("__")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return root


@pytest.fixture
def megatron(tmp_path):
    return write(
        tmp_path / "megatron/core",
        model_parallel_config="""
            import torch
            @dataclass
            class ModelParallelConfig:
                bf16: bool = False
                inherited: Optional[Literal['nccl', 'ucc']] = None
                _private: int = 0
                shared: int = 0
            """,
        transformer__transformer_config="""
            @dataclass
            class TransformerConfig(ModelParallelConfig):
                eps: float = field(default=1e-5, metadata={"argparse_meta": {}})
                layers: "Optional[int]" = None
                either: int | str = 0
                many: Union[int, List[int]] = 1
                hook: Optional[Callable[[torch.Tensor], None]] = None
                dtype: torch.dtype = torch.float32
                constant: ClassVar[int] = 3
                shared: str = ""
                def method(self): ...
            class MLATransformerConfig(TransformerConfig):
                latent: int = 0
            """,
        optimizer__optimizer_config="""
            class ParamKey:
                name: str
            class OptimizerConfig:
                optimizer_only: bool = True
                shared: float = 0.0
            """,
    )


@pytest.fixture
def sglang_structs(tmp_path):
    return write(
        tmp_path / "sglang",
        srt__arg_groups__choices="""
            BACKENDS = ["triton", "fa3"]
            GRAMMARS = {"xgrammar"}
            LATER = []
            """,
        srt__arg_groups__fields__model="""
            import msgspec
            from sglang.srt.arg_groups.arg_utils import A, Arg, Derived
            from sglang.srt.arg_groups.choices import BACKENDS, GRAMMARS
            from sglang.srt.elsewhere import ENUM
            class Model(msgspec.Struct):
                _NS_PATH = "model"
                model_path: A[str, Arg(help="x")] = None
                backend: A[Optional[str], Arg(help="x", choices=BACKENDS)] = None
                more: A[str, Arg(choices=BACKENDS + ["own"])] = "own"
                grammar: A[str, Arg(choices=GRAMMARS)] = "xgrammar"
                dynamic: A[str, Arg(choices=ENUM.ALL)] = "a"
                unresolved: A[str, Arg(choices=ENUM)] = "a"
                width: A[int, Arg(choices=[16, 32])] = 16
                fraction: A[Optional[float], "help"] = None
                _explicitly_set: A[bool, Arg(no_cli=True)] = False
                rank = Derived(doc="x")
            class Helper:
                not_a_field: int = 0
            """,
        srt__arg_groups__fields____init__="",
    )


@pytest.fixture
def sglang_dataclass(tmp_path):
    return write(
        tmp_path / "sglang",
        srt__server_args="""
            @dataclasses.dataclass
            class ServerArgs:
                model_path: str
                mem_fraction_static: Optional[float] = None
                tp_size: int = 1
            @dataclasses.dataclass
            class PortArgs:
                other: int
            """,
    )


def test_megatron_fields_come_from_all_four_classes(megatron):
    fields = read_megatron(megatron)
    assert set(fields) == {
        *(
            "bf16",
            "inherited",
            "shared",
            "eps",
            "layers",
            "either",
            "many",
            "hook",
            "dtype",
            "optimizer_only",
            "latent",
        ),
    }
    assert "text" in fields["shared"] and 3 not in fields["shared"]


@pytest.mark.parametrize(
    ("field", "right", "wrong"),
    [
        ("bf16", [True, False], [1, "true", None]),
        ("inherited", ["nccl", None], ["gloo", True]),
        ("eps", [1e-5, 1], [True, "1", None]),
        ("layers", [3, None], [3.5, True, "3"]),
        ("either", [3, "3"], [3.5, None]),
        ("many", [3, [1, 2]], ["anything", [1, "x"], [[1]], None]),
        ("hook", [None], ["torch.relu", 1]),
        ("dtype", [], ["bfloat16", None]),
    ],
)
def test_values_are_checked_against_simple_annotations(megatron, field, right, wrong):
    accepts = read_megatron(megatron)[field]
    assert [value in accepts for value in right] == [True] * len(right)
    assert [value in accepts for value in wrong] == [False] * len(wrong)


def test_sglang_choices_are_followed_to_where_they_are_declared(sglang_structs):
    fields = read_sglang(sglang_structs)
    assert set(fields) == {
        *("model_path", "backend", "more", "grammar", "dynamic", "unresolved", "width", "fraction"),
    }
    assert str(fields["backend"]) == "'triton', 'fa3' or null"
    assert "own" in fields["more"] and "fa3" in fields["more"] and None not in fields["more"]
    assert "xgrammar" in fields["grammar"] and "x" not in fields["grammar"]
    assert (
        "any text" in fields["dynamic"] and "any text" in fields["unresolved"] and 3 not in fields["dynamic"]
    )
    assert 16 in fields["width"] and 17 not in fields["width"]


def test_sglang_before_the_structs_is_one_dataclass(sglang_dataclass):
    assert set(read_sglang(sglang_dataclass)) == {"model_path", "mem_fraction_static", "tp_size"}


def test_a_package_that_is_not_installed_is_reported_only_when_it_is_used(monkeypatch):
    missing = Library("rollout.engine.args", "nosuchpackage", "nosuchpackage", "ServerArgs", {}, read_sglang)
    monkeypatch.setattr(installed, "SGLANG", missing)
    assert check() == {}
    assert check(sglang={"a": 1, "b": 2}) == {
        "rollout.engine.args": "a, b cannot be checked: nosuchpackage is not installed"
    }


def test_a_package_laid_out_in_another_way_is_reported(monkeypatch, tmp_path):
    write(tmp_path / "sglang", srt__config="class Renamed: ...")
    monkeypatch.setattr(installed, "package_folder", lambda name: tmp_path / "sglang")
    assert "does not declare ServerArgs" in check(sglang={"a": 1})["rollout.engine.args"]


@pytest.mark.parametrize(
    ("field", "setting"),
    [
        ("tensor_model_parallel_size", "actor.parallel.tensor"),
        ("lr", "actor.optimizer.lr"),
        ("min_lr", "actor.optimizer.decay.min_lr"),
        ("recompute_granularity", "actor.recompute"),
        ("moe_grouped_gemm", "actor.layer_spec"),
        ("overlap_param_gather", "actor.optimizer.overlap_param_gather"),
        ("decoupled_lr", "one learning rate"),
        ("params_dtype", "model.dtype"),
        ("num_layers", "config.json"),
        ("calculate_per_token_loss", "Slipstream sets this field"),
    ],
)
def test_megatron_fields_that_slipstream_sets_are_refused(field, setting):
    assert setting in check(megatron={field: 1})[f"actor.megatron.{field}"]


@pytest.mark.parametrize(
    ("field", "setting"),
    [
        ("model_path", "model.path"),
        ("port", "chooses their addresses"),
        ("device", "cluster.device"),
        ("tp_size", "rollout.engine.tensor_parallel"),
        ("tp", "rollout.engine.tensor_parallel"),
        ("dp", "rollout.engine.data_parallel"),
        ("enable_dp_attention", "rollout.engine.data_parallel"),
        ("ep_size", "rollout.engine.expert_parallel"),
        ("pp_size", "rollout.engine.pipeline_parallel"),
        ("nnodes", "rollout.engine.nodes"),
        ("random_seed", "run.seed"),
        ("weight_version", "policy version"),
        ("quantization", "rollout.engine.quantization"),
    ],
)
def test_sglang_fields_that_slipstream_sets_are_refused(field, setting):
    assert setting in check(sglang={field: 1})[f"rollout.engine.args.{field}"]


needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="no megatron-core")
needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="no sglang")


ALL = (MEGATRON, SGLANG, JUDGES_SGLANG, SAMPLING, EVAL_SAMPLING)
VERSION = {
    library.distribution: metadata.version(library.distribution)
    for library in (MEGATRON, SGLANG)
    if importlib.util.find_spec(library.package.partition(".")[0])
}


@pytest.mark.parametrize("library", ALL, ids=lambda library: library.section)
def test_every_field_of_the_installed_version_has_one_verdict(library: Library):
    version = VERSION.get(library.distribution)
    if version not in PINNED[library.distribution]:
        pytest.skip(f"{library.distribution} {version} is not pinned")
    fields = installed._fields(library)
    listed = {name for name, verdict in library.table.items() if verdict.version in (None, version)}
    assert fields is not None
    assert sorted(fields.keys() - listed) == [], "fields that no table lists"
    assert sorted(listed - fields.keys()) == [], "listed fields that the version lacks"
    assert set(library.aliases.values()) <= listed and not library.aliases.keys() & listed


PINNED = {"megatron-core": ("0.16.1", "0.19.2"), "sglang": ("0.5.21",)}


def test_the_tables_are_of_the_versions_that_are_installed():
    text = (ENVIRONMENT / "constraints.txt").read_text() + (ENVIRONMENT / "sglang-cpu.txt").read_text()
    for name, versions in PINNED.items():
        assert set(re.findall(rf"^{name}==([0-9.]+)", text, re.MULTILINE)) == set(versions)
    assert {each.version for each in MEGATRON.table.values()} == {None, *PINNED["megatron-core"]}


@pytest.mark.parametrize("library", [MEGATRON, SGLANG, SAMPLING], ids=lambda library: library.section)
def test_every_verdict_says_why_and_every_test_that_it_names_sets_the_field(library: Library):
    for name, verdict in library.table.items():
        assert verdict.why and "\n" not in verdict.why, name
        if verdict.why.startswith("tests/"):
            assert re.search(rf"\b{name}\b", (ROOT / verdict.why).read_text()), (name, verdict.why)


def test_a_table_has_no_field_twice():
    with pytest.raises(ValueError, match="more than once: b"):
        table(allowed("a b", "why"), refused("b c", "why"))
    with pytest.raises(ValueError, match="more than once: a"):
        refused("a b a", "why")


@needs_megatron
def test_installed_megatron_is_understood():
    good = {"recompute_method": "uniform", "recompute_num_layers": 1, "deterministic_mode": True}
    assert check(megatron=good) == {}


@needs_megatron
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("moe_expert_capacity_factor", 0.5, "drops no tokens"),
        ("moe_input_jitter_eps", 0.1, "changes what the model computes"),
        ("activation_func_clamp_value", 0.05, "config.json"),
        ("moe_router_load_balancing_type", "sinkhorn", "expected none or aux_loss"),
        ("moe_router_load_balancing_type", ["aux_loss"], "expected none or aux_loss"),
        ("moe_router_force_load_balancing", True, "changes what the model computes"),
        ("mtp_num_layers", 1, "multi-token prediction"),
        ("test_mode", True, "leave it out"),
        ("use_precision_aware_optimizer", True, "float32"),
        ("optimizer_cpu_offload", True, "checkpoints"),
        ("fp8", "hybrid", "does not train in fp8"),
        ("cpu_offloading", True, "host's memory"),
        ("recompute_modules", ["layernorm"], "a list of: core_attn, mlp, moe or shared_experts"),
        ("recompute_modules", "core_attn", "expects a list of: text"),
        ("moe_token_dispatcher_type", "allgather", "expected alltoall"),
        ("q_lora_rank", 8, "config.json"),
        ("attention_backend", "local", "expected auto, flash, fused or unfused"),
        ("init_method_std", 1.0, "config.json"),
        ("moe_enable_routing_replay", True, "actor.routing_replay"),
    ],
)
def test_megatron_fields_that_cannot_be_right_are_refused(field, value, says):
    assert says in check(megatron={field: value})[f"actor.megatron.{field}"]


@needs_sglang
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("speculative_algorithm", "EAGLE", "no speculative decoding"),
        ("speculative_num_steps", 3, "no speculative decoding"),
        ("disaggregation_mode", "prefill", "prefill, decode and encode servers"),
        ("enable_return_routed_experts", True, "actor.routing_replay"),
        ("cpu_offload_gb", 8, "GPU memory"),
        ("json_model_override_args", '{"num_hidden_layers": 1}', "another model"),
        ("load_format", "dummy", "weights.transport"),
        ("enable_eplb", True, "would not get the trainer's weights"),
        ("enable_hierarchical_cache", True, "would outlive the weights"),
        ("custom_weight_loader", ["a.b"], "use weights.transport instead"),
        ("cuda_graph_bs_decode", ["a"], "a list of: a whole number"),
        ("incremental_streaming_output", False, "token ids"),
    ],
)
def test_sglang_fields_that_cannot_be_right_are_refused(field, value, says):
    assert says in check(sglang={field: value})[f"rollout.engine.args.{field}"]


@needs_megatron
@needs_sglang
def test_an_untested_field_passes_if_it_is_listed_and_a_refused_one_does_not():
    untested = {"tp_comm_overlap": True}
    assert (
        "list it: actor.untested: [tp_comm_overlap]"
        in check(megatron=untested)["actor.megatron.tp_comm_overlap"]
    )
    assert check(megatron=untested, listed=["tp_comm_overlap"]) == {}
    for fields, name, says in (
        ({"test_mode": True}, "test_mode", "cannot be set, tested or not"),
        ({"lr": 1.0}, "lr", "cannot be set, tested or not"),
        ({"recompute_num_layers": 1}, "recompute_num_layers", "is tested"),
        ({}, "tp_comm_overlap", "expected a field that actor.megatron sets"),
        ({}, "nothing", "expected a field that actor.megatron sets"),
    ):
        assert says in check(megatron=fields, listed=[name])["actor.untested"]
    kernel = {"moe_runner_backend": "triton"}
    assert "rollout.engine.untested: [moe_runner_backend]" in str(check(sglang=kernel))
    rollout = CONFIG.rollout.model_copy(
        update={"engine": EngineConfig(args=kernel, untested=["moe_runner_backend"])}
    )
    config = CONFIG.model_copy(update={"rollout": rollout})
    assert list(check_passthrough(config)) == []
    assert untested_fields(config) == ["rollout.engine.args.moe_runner_backend"]
    assert untested_fields(CONFIG) == []


@needs_megatron
def test_mistakes_in_megatron_fields_are_explained():
    reasons = check(
        megatron={
            "recompute_method": "unifrom",
            "tensor_parallel_size": 2,
            "deterministic_mode": 1,
            "mem_fraction_static": 0.3,
        }
    )
    assert "'uniform', 'block' or null; did you mean uniform?" in reasons["actor.megatron.recompute_method"]
    assert "use actor.parallel.tensor" in reasons["actor.megatron.tensor_parallel_size"]
    assert "expects true or false" in reasons["actor.megatron.deterministic_mode"]
    assert "no such field" in reasons["actor.megatron.mem_fraction_static"]


@needs_sglang
def test_installed_sglang_is_understood():
    assert check(sglang={"mem_fraction_static": 0.5, "max_running_requests": 8, "log_level": "info"}) == {}
    assert check(sglang={"mem_fraction_static": "half", "attention_backend": None}).keys() == {
        "rollout.engine.args.mem_fraction_static"
    }


@needs_sglang
@pytest.mark.parametrize(
    ("architecture", "data", "pipeline"),
    [
        ("Qwen3MoeForCausalLM", True, True),
        ("DeepseekV3ForCausalLM", True, True),
        ("LlamaForCausalLM", False, True),
        ("MistralForCausalLM", False, True),
        ("Olmo2ForCausalLM", False, False),
        ("NobodysForCausalLM", None, None),
    ],
)
def test_what_sglang_can_do_with_a_model_is_read_from_its_source(architecture, data, pipeline):
    assert can(architecture, "data_parallel") is data
    assert can(architecture, "pipeline_parallel") is pipeline


@needs_sglang
@needs_megatron
def test_a_field_of_the_other_library_is_sent_there():
    reasons = check(megatron={"mem_fraction_static": 0.3}, sglang={"recompute_method": "block"})
    assert (
        "did you mean rollout.engine.args.mem_fraction_static?"
        in reasons["actor.megatron.mem_fraction_static"]
    )
    assert "did you mean actor.megatron.recompute_method?" in reasons["rollout.engine.args.recompute_method"]
