"""Rules between settings: each names its setting, and declares what it reads."""

import json
import os
import re
import subprocess
import sys

import pytest

from slipstream.configs.installed import parsers
from slipstream.configs.installed.parsers import parser_names
from slipstream.configs.load import load_recipe
from slipstream.configs.rules import RULES, check_rules, trainer
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.base import Section
from slipstream.configs.schema.paths import schema_paths
from slipstream.configs.violations import RecipeError

PREPARE = "slipstream.backend.simulate.only_simulated"
FP8 = "rollout.engine.quantization=fp8"


@pytest.fixture
def base(tmp_path):
    """A recipe whose inputs all exist: 4 layers, 4 heads, 2 key-value heads, a context of 128."""
    (tmp_path / "model").mkdir()
    shape = {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    (tmp_path / "model/config.json").write_text(json.dumps(shape))
    for name in ("train.jsonl", "heldout.parquet"):
        (tmp_path / name).write_text("")
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"run: {{name: base, steps: 2, root: {tmp_path / 'runs'}}}\n"
        f"model: {{path: {tmp_path / 'model'}}}\n"
        f"data: {{path: {tmp_path / 'train.jsonl'}}}\n"
        f"eval: {{path: {tmp_path / 'heldout.parquet'}}}\n"
        "rollout:\n"
        "  {max_head_offpolicyness: 4, batch_size: 2, n_samples_per_prompt: 2,\n"
        "   reward: slipstream.rollout.reward.FinalAnswer, sampling: {max_new_tokens: 64}}\n"
    )
    return file


DISK = ("weights.transport={type: disk}",)
TWO_NODES = ("cluster={type: slurm}", "rollout.engine.tensor_parallel=2", "rollout.engine.nodes=2")
BALANCED = "moe_router_load_balancing_type: aux_loss"
RECOMPUTED = "actor.megatron.recompute_num_layers"
TOOLS = "{path: slipstream.rollout.workflow.ToolUse, args: {tools: [a.b], parser: %s}}"


def violations(file, *overrides: str) -> dict[str, str]:
    """The reason of each violation, by its path."""
    try:
        load_recipe(file, overrides)
    except RecipeError as error:
        return {violation.path: violation.reason for violation in error.violations}
    return {}


def test_what_may_not_be_read_is_no_missing_file(base, tmp_path, monkeypatch):
    closed, look = tmp_path / "closed", os.stat

    def stat(path, *args, **kwargs):
        if str(path).startswith(str(closed)):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, *args, **kwargs)

    monkeypatch.setattr("os.stat", stat)
    paths = ("run.root", "model.path", "data.path")
    found = violations(base, *(f"{path}={closed}/{path}.jsonl" for path in paths))
    assert set(found) == set(paths)
    assert all(reason.startswith("it cannot be read: Permission denied") for reason in found.values())


@pytest.mark.parametrize(
    ("overrides", "path", "part"),
    [
        (["gateway={admin_port: 30000}"], "gateway.admin_port", "other than gateway.port"),
        (
            ["gateway={}", "rollout.engine.colocated=true", "weights.transport={type: tensor}"],
            "rollout.engine.colocated",
            "gateway.allow_gaps",
        ),
        (
            [
                "gateway={allow_gaps: true}",
                "rollout.engine.colocated=true",
                "weights.transport={type: tensor}",
            ],
            None,
            "",
        ),
        (["checkpoint.local_dir=/scratch"], None, ""),
        (["checkpoint.local_dir=scratch"], "checkpoint.local_dir", "expected an absolute path"),
        (["checkpoint={local_dir: /scratch, every: 0}"], "checkpoint.local_dir", "checkpoint.every above 0"),
        (["actor.recompute_logprobs=false"], "actor.recompute_logprobs", "use_decoupled_loss to false"),
        (["actor.recompute_logprobs=false", "actor.interpolate_logprobs=true"], None, ""),
        (["actor.interpolate_logprobs=true"], "actor.interpolate_logprobs", "recompute_logprobs to false"),
        (["actor.routing_replay=recompute"], "actor.routing_replay", "set actor.minibatches to 2 or more"),
        (["actor.routing_replay=recompute", "actor.minibatches=2"], "actor.routing_replay", "no experts"),
        (["actor.routing_replay=off"], None, ""),
        (["actor.routing_replay=rollout"], "actor.routing_replay", "no experts"),
        (["actor.share_prefixes=auto"], None, ""),
        (["actor.share_prefixes=off", "actor.megatron={moe_z_loss_coeff: 0.1}"], None, ""),
        (
            ["actor.share_prefixes=auto", "actor.megatron={moe_z_loss_coeff: 0.1}"],
            "actor.share_prefixes",
            "leave actor.megatron.moe_z_loss_coeff out; or set this to off",
        ),
        (
            ["actor.share_prefixes=auto", "rollout.hooks={custom_loss_function: a.b}"],
            "actor.share_prefixes",
            "leave rollout.hooks.custom_loss_function out",
        ),
        (
            ["actor.routing_replay=rollout", "rollout.hooks={custom_model_provider: a.b}"],
            "actor.routing_replay",
            "the routers of another model are not known to take routes",
        ),
        (
            [
                "actor.routing_replay=recompute",
                "actor.minibatches=2",
                "actor.megatron={moe_router_fusion: true}",
                "actor.untested=[moe_router_fusion]",
            ],
            "actor.routing_replay",
            "the fused router takes no routes",
        ),
        (
            [
                "actor.interpolate_logprobs=true",
                "actor.recompute_logprobs=false",
                "actor.use_decoupled_loss=false",
            ],
            "actor.interpolate_logprobs",
            "use_decoupled_loss to true",
        ),
        *(
            (
                [f"actor.objective={{type: {type_}}}"],
                "actor.use_decoupled_loss",
                "corrected twice; set this to false, or choose ppo",
            )
            for type_ in ("m2po", "dppo", "aipo", "topr")
        ),
        (["actor.objective={type: sapo}"], "actor.use_decoupled_loss", "its own gate"),
        *(
            ([f"actor.objective={{type: {type_}}}", "actor.use_decoupled_loss=false"], None, "")
            for type_ in ("m2po", "dppo", "aipo", "topr")
        ),
        *(
            (
                [f"actor.objective={{type: {type_}}}", "actor.use_decoupled_loss=false", *more],
                "actor.recompute_logprobs",
                part,
            )
            for type_ in ("ppo", "dual_clip", "decayed_clip", "gspo", "cispo", "sapo")
            for more, part in (
                ([], "with actor.minibatches: 1 that is the only one"),
                (["actor.minibatches=2"], "with actor.minibatches: 2 that is one of 2"),
            )
        ),
        *(
            (
                [f"actor.objective={{type: {type_}}}", "actor.use_decoupled_loss=false", way_out],
                None,
                "",
            )
            for type_ in ("ppo", "cispo", "sapo")
            for way_out in (
                "actor.recompute_logprobs=false",
                "actor.correction.token={type: mask}",
                "actor.correction.sequence={type: geometric}",
                "rollout.max_head_offpolicyness=0",
            )
        ),
        (
            ["actor.objective={type: sapo}", "actor.use_decoupled_loss=false"],
            "actor.recompute_logprobs",
            "that is the only one; set this to false for a ratio to the behaviour policy",
        ),
        *(
            (
                ["actor.correction.token={type: raw}", *more],
                "actor.correction.token",
                "nothing bounds the importance weight",
            )
            for more in ([], ["actor.minibatches=2"], ["actor.correction.sequence={type: geometric}"])
        ),
        (["actor.correction.token={type: raw}", "rollout.max_head_offpolicyness=0"], None, ""),
        (["actor.correction.token={type: cap, cap: 100}"], None, ""),
        *(
            ([f"actor.objective={{type: {type_}}}"], None, "")
            for type_ in ("dual_clip", "decayed_clip", "gspo", "cispo", "reinforce")
        ),
        (
            ["actor.objective={type: reinforce}", "actor.use_decoupled_loss=false"],
            "actor.objective.type",
            "4 versions old",
        ),
        (
            ["actor.objective={type: reinforce}", "actor.correction.token={type: raw}"],
            "actor.correction.token",
            "rollout.max_head_offpolicyness to 0",
        ),
        (
            [
                "actor.objective={type: reinforce}",
                "actor.use_decoupled_loss=false",
                "actor.correction.negative={}",
            ],
            "actor.objective.type",
            "nothing bounds",
        ),
        *(
            (["actor.objective={type: reinforce}", "actor.use_decoupled_loss=false", way_out], None, "")
            for way_out in (
                "rollout.max_head_offpolicyness=0",
                "actor.correction.token={type: mask}",
                "actor.correction.sequence={type: kl}",
            )
        ),
        *(
            (
                [
                    "actor.use_decoupled_loss=false",
                    "actor.recompute_logprobs=false",
                    f"actor.correction.token={{type: {type_}}}",
                ],
                "actor.correction.token",
                "only the decoupled loss has",
            )
            for type_ in ("cap", "raw")
        ),
        *(
            (
                [
                    "actor.use_decoupled_loss=false",
                    "actor.recompute_logprobs=false",
                    f"actor.correction.{mask}",
                ],
                f"actor.correction.{mask.partition('=')[0]}",
                "no proximal log-probs",
            )
            for mask in ("token={type: mask}", "sequence={type: geometric}")
        ),
        (
            [
                "actor.use_decoupled_loss=false",
                "actor.recompute_logprobs=false",
                "actor.correction.negative={errors: null}",
            ],
            None,
            "",
        ),
        (
            [
                "actor.use_decoupled_loss=false",
                "actor.recompute_logprobs=false",
                "actor.correction.negative={}",
            ],
            "actor.correction.negative.errors",
            "measured by recomputed log-probs",
        ),
        (["actor.drift={}"], None, ""),
        (["actor.drift={kl: null}"], "actor.drift", "set a limit in kl or ess"),
        (
            ["actor.use_decoupled_loss=false", "actor.recompute_logprobs=false", "actor.drift={}"],
            "actor.drift",
            "measured by recomputed log-probs",
        ),
        (
            ["actor.advantage=[{type: reward, shift: 0.1, estimator: gae}]", "critic={}"],
            "actor.advantage.shift",
            "choose another estimator",
        ),
        (
            ["actor.objective={type: gspo}", "actor.correction.token={type: mask}"],
            "actor.correction.token",
            "actor.correction.sequence",
        ),
        (["actor.objective={type: gspo}", "actor.correction.sequence={type: product}"], None, ""),
        (["run.steps=null"], "run.steps", "or of passes in run.epochs"),
        (["run.steps=null", "run.epochs=1.5"], None, ""),
        (["run.epochs=1"], "run.epochs", "leave one of them out"),
        (
            ["run.steps=null", "run.epochs=1", "data=null", "rollout.data_source=base64.b64encode"],
            "run.epochs",
            "the order of rollout.data_source is endless, and has no length to pass over",
        ),
        (
            ["run.steps=null", "run.epochs=1", "rollout.hooks={data_source: base64.b64encode}"],
            "run.epochs",
            "gives as many prompts as it is asked for",
        ),
        (
            ["run.steps=null", "run.epochs=1", "data=null", "gateway={}", "live={share: 1}"],
            "run.epochs",
            "there are no prompts to train on",
        ),
        (
            ["run.steps=null", "run.epochs=1", "gateway={}", "live={share: 1}"],
            "run.epochs",
            "all places of a batch are those of live users",
        ),
        (["actor.averaging=constant"], "actor.averaging_length", "rollout.sampling.max_new_tokens"),
        (["actor.averaging_length=64"], "actor.averaging_length", "actor.averaging is token"),
        (["actor.averaging=constant", "actor.averaging_length=64"], None, ""),
        (["actor.advantage_norm={}"], None, ""),
        (
            ["actor.advantage_norm={mean: false, deviation: false}"],
            "actor.advantage_norm",
            "set one of them to true",
        ),
        *(
            (
                [f"actor.advantage=[{{type: reward, estimator: {estimator}}}]", "actor.advantage_norm={}"],
                "actor.advantage_norm",
                f"estimator: {estimator} normalizes over the tokens of the batch already",
            )
            for estimator in ("reinforce_pp", "reinforce_pp_baseline")
        ),
        (
            [
                "actor.advantage=[{type: reward, estimator: reinforce_pp}]",
                "actor.turns={}",
                "actor.advantage_norm={}",
            ],
            None,
            "",
        ),
        (
            ["actor.advantage=[{type: reward, estimator: gae}]", "critic={}", "actor.advantage_norm={}"],
            "actor.advantage_norm",
            "estimator: gae normalizes",
        ),
        (
            [
                "actor.advantage=[{type: reward, estimator: reinforce_pp}, {type: teacher}]",
                "actor.advantage_norm={}",
            ],
            None,
            "",
        ),
        (
            ["actor.advantage=[{type: reward, shift: 0.1}]", "actor.advantage_norm={}"],
            "actor.advantage_norm.mean",
            "actor.advantage.shift",
        ),
        (
            ["actor.advantage=[{type: reward, shift: 0.1}]", "actor.advantage_norm={mean: false}"],
            None,
            "",
        ),
        (
            ["rollout.hooks={custom_advantage_function: base64.b64encode}", "actor.advantage_norm={}"],
            "actor.advantage_norm",
            "let the function normalize them",
        ),
        (["actor.overlong={start: 50, end: 50}"], "actor.overlong.end", "more than actor.overlong.start"),
        (["actor.overlong={start: 40, end: 50}"], None, ""),
        (["actor.layer_spec=local", "actor.lora={rank: 8, alpha: 16}"], None, ""),
        (
            ["actor.layer_spec=transformer_engine", "cluster={type: local, device: cpu}"],
            "actor.layer_spec",
            "cluster.device to gpu, or set this to auto or local",
        ),
        (
            ["actor.layer_spec=transformer_engine", "actor.lora={rank: 8, alpha: 16}"],
            "actor.layer_spec",
            "leave actor.lora out",
        ),
        (["actor.parallel.context=2"], "actor.parallel.context", "actor.layer_spec to transformer_engine"),
        (["actor.recompute=full"], None, ""),
        (["actor.recompute=full", "actor.megatron.recompute_method=block"], None, ""),
        (["actor.recompute=selective", "actor.megatron.recompute_modules=[core_attn]"], None, ""),
        (
            ["actor.recompute=full", "actor.megatron.recompute_modules=[core_attn]"],
            "actor.megatron.recompute_modules",
            "only actor.recompute: selective uses it, and actor.recompute is full",
        ),
        (
            ["actor.megatron.recompute_num_layers=1"],
            "actor.megatron.recompute_num_layers",
            "only actor.recompute: full uses it",
        ),
        *(
            (
                ["actor.recompute=full", f"actor.megatron={{{fields}}}", *layout],
                RECOMPUTED if part else None,
                part,
            )
            for fields, layout, part in (
                ("recompute_num_layers: 2", [], ""),
                ("recompute_num_layers: 3", [], "expected a divisor of 4, the layers of a part of the model"),
                ("recompute_num_layers: 4", ["actor.parallel.pipeline=2"], "expected a divisor of 2"),
                (
                    "recompute_num_layers: 2",
                    ["actor.parallel.pipeline=2", "actor.parallel.layers=[1, 3]"],
                    "expected a divisor of 1",
                ),
                ("recompute_num_layers: 0", [], "expected 1 or more layers"),
                ("recompute_method: block, recompute_num_layers: 3", [], ""),
                ("recompute_method: block, recompute_num_layers: 5", [], "expected at most 4"),
            )
        ),
        *(
            ([f"actor.megatron={{{fields}}}"], f"actor.megatron.{name}" if name else None, part)
            for fields, name, part in (
                ("moe_aux_loss_coeff: 0.1", "moe_aux_loss_coeff", "only with moe_router_load_balancing_type"),
                ("moe_router_load_balancing_type: aux_loss, moe_aux_loss_coeff: 0.1", None, ""),
                (
                    "moe_router_load_balancing_type: aux_loss, moe_aux_loss_coeff: -1",
                    "moe_aux_loss_coeff",
                    "0 or",
                ),
                ("moe_z_loss_coeff: .nan", "moe_z_loss_coeff", "expected one number, 0 or more"),
            )
        ),
        *(
            ([f"rollout.engine.args={{{name}: {value}}}"], f"rollout.engine.args.{name}", part)
            for name, value, part in (
                ("max_running_requests", 0, "expected 1 or more"),
                ("context_length", -1, "expected 1 or more"),
                ("mem_fraction_static", 7.5, "between 0 and 1"),
                ("chunked_prefill_size", -7, "or -1 for prompts in one piece"),
            )
        ),
        (["actor.optimizer.overlap_grad_reduce=true"], None, ""),
        (
            ["actor.optimizer={overlap_param_gather: true, overlap_grad_reduce: true}"],
            "actor.optimizer.overlap_param_gather",
            "actor.optimizer.distributed to true",
        ),
        (
            ["actor.optimizer={overlap_param_gather: true, distributed: true}"],
            "actor.optimizer.overlap_param_gather",
            "actor.optimizer.overlap_grad_reduce to true",
        ),
        (
            [
                "actor.optimizer={overlap_param_gather: true, overlap_grad_reduce: true, distributed: true}",
            ],
            "actor.optimizer.overlap_param_gather",
            "actor.minibatches to at least 2",
        ),
        (
            [
                "actor.optimizer={overlap_param_gather: true, overlap_grad_reduce: true, distributed: true}",
                "actor.minibatches=2",
            ],
            None,
            "",
        ),
        (["actor.optimizer.decay=cosine"], None, ""),
        (["actor.optimizer.decay={type: linear, steps: 2}", "actor.optimizer.warmup_steps=1"], None, ""),
        (
            ["actor.optimizer.decay={type: cosine, min_lr: 1e-6}", "actor.optimizer.lr=1e-6"],
            "actor.optimizer.decay.min_lr",
            "less than actor.optimizer.lr (1e-06)",
        ),
        (
            ["actor.optimizer.decay={type: linear, steps: 5}", "actor.optimizer.warmup_steps=5"],
            "actor.optimizer.decay.steps",
            "more than actor.optimizer.warmup_steps (5)",
        ),
        (["actor.optimizer.decay={type: constant, steps: 5}"], "actor.optimizer.decay.steps", "another type"),
        (
            [
                "actor.advantage=[{type: reward, estimator: reinforce_pp}]",
                "rollout.n_samples_per_prompt=1",
                "rollout.batch_size=4",
            ],
            None,
            "",
        ),
        (
            [
                "actor.advantage=[{type: reward, estimator: rloo}]",
                "rollout.n_samples_per_prompt=1",
                "rollout.batch_size=4",
            ],
            "rollout.n_samples_per_prompt",
            "the estimator rloo",
        ),
        (["rollout.max_head_offpolicyness=17"], "rollout.max_head_offpolicyness", "allow_extreme_offpol"),
        (
            ["rollout.admission.type=volume", "rollout.consumption.type=fifo"],
            "rollout.consumption.type",
            "ready_first",
        ),
        (
            [
                "rollout.admission.type=volume",
                "rollout.consumption.type=ready_first",
                "rollout.over_sampling=2",
            ],
            "rollout.over_sampling",
            "no surplus",
        ),
        (["rollout.n_samples_per_prompt=1"], "rollout.n_samples_per_prompt", "at least 2"),
        (["actor.minibatches=5"], "rollout.batch_size", "4 trajectories"),
        (["actor.minibatches=3", "actor.parallel.data=2"], "rollout.batch_size", "at least 6"),
        (["actor.parallel.sequence=true"], "actor.parallel.sequence", "actor.parallel.tensor"),
        (["rollout.sampling.top_p=0.9"], "rollout.sampling.top_p", "truncated"),
        (["rollout.sampling.top_k=20"], "rollout.sampling.top_k", "truncated"),
        (["rollout.sampling.top_k=0"], "rollout.sampling.top_k", "expected -1"),
        (["rollout.sampling.top_k=-2"], "rollout.sampling.top_k", "expected -1"),
        (["run.name=" + "x" * 256], "run.name", "at most 255"),
        (["run.root=/dev/null"], "run.root", "a directory"),
        (["run.root=/dev", "run.name=null-device"], None, ""),
        (["data.path=train.csv"], "data.path", "ends in .jsonl or .parquet"),
        (["data.path=nowhere.jsonl"], "data.path", "no such file"),
        (["eval.path=nowhere.parquet"], "eval.path", "no such file"),
        (["model.path=nowhere"], "model.path", "no config.json"),
        (
            ["model.path=nowhere", "data.path=x.jsonl", "prepare=slipstream.backend.simulate.only_simulated"],
            None,
            "",
        ),
        (["rollout.reward=nosuchpackage.Reward"], "rollout.reward", "no Python package 'nosuchpackage'"),
        (["rollout.workflow=nosuchpackage.Flow"], "rollout.workflow", "PYTHONPATH"),
        (["rollout.sampling.max_new_tokens=128"], "rollout.sampling.max_new_tokens", "less than 128"),
        (["eval.sampling.max_new_tokens=128"], "eval.sampling.max_new_tokens", "less than 128"),
        (
            ["eval.n_samples_per_prompt=4"],
            "eval.n_samples_per_prompt",
            "all completions of a prompt would be",
        ),
        (["actor.parallel.tensor=3"], "actor.parallel.tensor", "divisor of 4"),
        (["actor.parallel.tensor=4"], "actor.parallel.tensor", "divisor of 2"),
        (["rollout.engine.tensor_parallel=4"], None, ""),
        (["rollout.engine.tensor_parallel=8"], "rollout.engine.tensor_parallel", "divisor of 4"),
        (["rollout.engine.tensor_parallel=4", "rollout.engine.data_parallel=2"], None, ""),
        (
            ["rollout.engine.tensor_parallel=16", "rollout.engine.data_parallel=2"],
            "rollout.engine.tensor_parallel",
            "heads over 8 ranks (tensor_parallel / data_parallel); expected a divisor of 4",
        ),
        (
            ["rollout.engine.tensor_parallel=4", "rollout.engine.data_parallel=3"],
            "rollout.engine.data_parallel",
            "divisor of 4",
        ),
        (["rollout.engine.pipeline_parallel=5", *DISK], "rollout.engine.pipeline_parallel", "at most 4"),
        (["rollout.engine.pipeline_parallel=4", *DISK], None, ""),
        (["rollout.engine.pipeline_parallel=2"], "weights.transport.type", "expected 'disk' or 'delta'"),
        (
            ["rollout.engine.tensor_parallel=4", "rollout.engine.expert_parallel=2"],
            "rollout.engine.expert_parallel",
            "no experts",
        ),
        (["rollout.engine.tensor_parallel=2", "rollout.engine.nodes=2"], "rollout.engine.nodes", "slurm"),
        (
            [*TWO_NODES, "actor.lora={rank: 2, alpha: 4, serve: adapter}", "weights.interrupt=abort"],
            "actor.lora.serve",
            "not been verified in SGLang with rollout.engine.nodes above 1",
        ),
        (
            [
                "rollout.engine.tensor_parallel=2",
                "rollout.engine.expert_parallel=2",
                "cluster={type: local, device: cpu}",
            ],
            "rollout.engine.expert_parallel",
            "on GPUs only",
        ),
        (["rollout.engine={min_count: 1, count: 2, max_count: 3}"], None, ""),
        (["rollout.engine={min_count: 3, count: 2}"], "rollout.engine.min_count", "at most 2, which is rol"),
        (["rollout.engine={max_count: 1, count: 2}"], "rollout.engine.max_count", "at least 2, which is"),
        (
            ["rollout.engine={max_count: 2, colocated: true}", *DISK],
            "rollout.engine.max_count",
            "expected null: with rollout.engine.colocated",
        ),
        ([*TWO_NODES, *DISK], None, ""),
        (TWO_NODES, None, ""),
        ([*TWO_NODES, "rollout.engine.tensor_parallel=1"], "rollout.engine.nodes", "divisor of 1"),
        (
            [*TWO_NODES, "rollout.engine.pipeline_parallel=3", *DISK],
            "rollout.engine.nodes",
            "divisor or a multiple of 3",
        ),
        (
            [*TWO_NODES, "weights.transport={type: delta}"],
            "weights.transport.type",
            "on the first node alone",
        ),
        (["actor.parallel.pipeline=3"], "actor.parallel.pipeline", "divisor of 4"),
        (["actor.parallel.pipeline=3", "actor.parallel.layers=[1,2,1]"], None, ""),
        (["actor.parallel.pipeline=2", "actor.parallel.layers=[1,2]"], "actor.parallel.layers", "sum to 4"),
        (["actor.parallel.layers=[2,2]"], "actor.parallel.layers", "expected 1 numbers"),
        (["actor.parallel.virtual_pipeline=2"], "actor.parallel.virtual_pipeline", "pipeline > 1"),
        (["actor.parallel.pipeline=2", "actor.parallel.virtual_pipeline=2"], None, ""),
        (
            ["actor.parallel.pipeline=2", "actor.parallel.virtual_pipeline=4"],
            "actor.parallel.virtual_pipeline",
            "divisor of 4 for pipeline",
        ),
        (
            ["actor.parallel.pipeline=2", "actor.parallel.virtual_pipeline=2", "actor.minibatches=3"],
            "rollout.batch_size",
            "per pipeline stage",
        ),
        (["actor.parallel.data=2", "actor.parallel.expert=2"], "actor.parallel.expert", "has no experts"),
        (
            ["actor.lora={rank: 8, alpha: 16, targets: [linear_q_proj, linear_fc1]}"],
            "actor.lora.targets",
            "has no linear_q_proj; its linear layers are linear_fc1, linear_fc2, linear_proj, linear_qkv",
        ),
        (["actor.lora={rank: 8, alpha: 16, targets: [linear_qkv]}"], None, ""),
        (
            ["actor.lora={rank: 8, alpha: 16, serve: adapter}"],
            "weights.interrupt",
            "cut off and continued with the next (abort), or end before (drain)",
        ),
        (["actor.lora={rank: 8, alpha: 16, serve: adapter}", "weights.interrupt=abort"], None, ""),
        (["actor.lora={rank: 8, alpha: 16, serve: adapter}", "weights.interrupt=drain"], None, ""),
        (
            [
                "actor.lora={rank: 8, alpha: 16, serve: adapter}",
                "weights={interrupt: abort, transport: {type: tensor}}",
                "rollout.engine.colocated=true",
            ],
            "actor.lora.serve",
            "expected 'merged', or set rollout.engine.colocated to false",
        ),
        (["actor.lora={rank: 8, alpha: 16}"], None, ""),
        (["rollout.max_head_offpolicyness=17", "rollout.allow_extreme_offpolicyness=true"], None, ""),
        (["actor.recompute_logprobs=false", "actor.use_decoupled_loss=false"], None, ""),
        (
            ["weights.transport={type: tensor}", "cluster={type: slurm}"],
            "weights.transport.type",
            "share no memory",
        ),
        (["weights.transport={type: delta}", "cluster={type: slurm}"], None, ""),
        (["weights.transport={type: tensor}"], None, ""),
        ([FP8, "weights.transport={type: delta}", "cluster={type: local, device: gpu}"], None, ""),
        ([FP8, "weights.transport={type: disk}"], None, ""),
        ([FP8], "weights.transport.type", "get their versions from files"),
        (
            [FP8, "actor.lora={rank: 8, alpha: 16, serve: adapter}", "weights.interrupt=abort"],
            "rollout.engine.quantization",
            "not verified",
        ),
        ([FP8, "weights.transport={type: delta}", "model.dtype=float32"], "model.dtype", "expected bfloat16"),
        (
            [FP8, "weights.transport={type: delta}", "cluster={type: local, device: cpu}"],
            "rollout.engine.quantization",
            "only through AMX kernels",
        ),
        (["rollout.engine.colocated=true"], "weights.transport.type", "two processes on one GPU"),
        (["rollout.engine.colocated=true", "weights.transport={type: tensor}"], None, ""),
        (
            ["rollout.engine.colocated=true", "weights.transport={type: tensor}", "cluster={type: slurm}"],
            None,
            "",
        ),
        *(
            (
                [
                    f"rollout.engine.colocated={shares}",
                    "weights.transport={type: tensor}",
                    f"rollout.engine.args.cuda_graph_backend_prefill={backend}",
                    "rollout.engine.untested=[cuda_graph_backend_prefill]",
                ],
                at,
                part,
            )
            for shares, backend, at, part in (
                ("true", "full", "rollout.engine.args.cuda_graph_backend_prefill", "expected 'disabled'"),
                ("true", "disabled", None, ""),
                ("false", "full", None, ""),
            )
        ),
        (
            [
                "rollout.engine.colocated=true",
                "weights.transport={type: disk}",
                "cluster={type: slurm, trainer_nodes: 2}",
            ],
            "cluster.trainer_nodes",
            "on all nodes of the trainer",
        ),
        (
            [
                "rollout.engine.colocated=true",
                "weights.transport={type: delta}",
                "weights.interrupt=in_place",
            ],
            "weights.interrupt",
            "expected 'retract', 'abort' or 'drain'",
        ),
        *(
            ([*overrides, "weights.transport={type: tensor}"], at, part)
            for overrides, at, part in (
                (
                    ["rollout.engine={colocated: true, gpu_share: 0.4}", "weights.interrupt=in_place"],
                    None,
                    "",
                ),
                (["rollout.engine={colocated: true, gpu_share: 0.4}", "gateway={}"], None, ""),
                (["rollout.engine={gpu_share: 0.4}"], "rollout.engine.gpu_share", "GPUs of their own"),
                (
                    ["rollout.engine={colocated: true, gpu_share: 1.0}"],
                    "rollout.engine.gpu_share",
                    "less than",
                ),
                (
                    [
                        "rollout.engine={colocated: true, gpu_share: 0.4}",
                        "cluster={type: local, device: cpu}",
                    ],
                    "rollout.engine.gpu_share",
                    "expected null with cluster.device: cpu",
                ),
                (
                    ["rollout.engine={colocated: true, gpu_share: 0.4, args: {mem_fraction_static: 0.5}}"],
                    "rollout.engine.args.mem_fraction_static",
                    "leave this out",
                ),
                (
                    [
                        "rollout.engine={colocated: true, gpu_share: 0.4}",
                        "rollout.engine.args.cuda_graph_backend_prefill=full",
                        "rollout.engine.untested=[cuda_graph_backend_prefill]",
                    ],
                    None,
                    "",
                ),
            )
        ),
        (["rollout.engine={colocated: true, gpu_share: 0.4}"], "weights.transport.type", "two processes on"),
        (["actor.turns={}"], None, ""),
        (
            ["actor.advantage=[{type: reward, estimator: gae}]", "critic={}", "actor.turns={}"],
            "actor.turns.baseline",
            "set this to none",
        ),
        (
            [
                "actor.advantage=[{type: reward, estimator: gae}]",
                "critic={}",
                "actor.turns={baseline: none, discount: 0.5}",
            ],
            "actor.turns.discount",
            "set critic.discount",
        ),
        (["live={}"], None, ""),
        (["live={train: false, share: 0.9}"], None, ""),
        (["live={share: 0.9}"], "live.share", "leaves no group"),
        (["live={share: 1}", "rollout.n_samples_per_prompt=1"], None, ""),
        (
            ["live={}", "actor.advantage=[{type: reward, estimator: gae}]", "critic={}"],
            "actor.advantage",
            "live.baseline",
        ),
        (
            ["live={}", "rollout.admission={type: volume}"],
            "rollout.admission.type",
            "expected 'slots'",
        ),
        (["rollout.endpoint={tool_parser: qwen25, reasoning_parser: qwen3}"], None, ""),
        (["rollout.endpoint={tool_parser: null, reasoning_parser: auto}"], None, ""),
        (
            ["rollout.endpoint={tool_parser: qwen2}"],
            "rollout.endpoint.tool_parser",
            "nearest: qwen25, qwen",
        ),
        (["gateway={reasoning_parser: deepseek}"], "gateway.reasoning_parser", "nearest: deepseek-"),
        ([f"rollout.workflow={TOOLS % 'llama3'}"], None, ""),
        (
            [f"rollout.workflow={TOOLS % 'lama3'}"],
            "rollout.workflow.args.parser",
            "expected a parser of tool calls that SGLang has; nearest: llama3",
        ),
        ([f"rollout.workflow={TOOLS % '[llama3]'}"], "rollout.workflow.args.parser", "expected a parser"),
        (["eval=null"], None, ""),
        ([], None, ""),
    ],
)
def test_a_rule_reports_its_own_setting_and_only_that(base, overrides, path, part):
    reasons = violations(base, *overrides)
    assert list(reasons) == ([path] if path else [])
    assert part in reasons.get(path, "")


@pytest.mark.parametrize(
    ("overrides", "path", "part"),
    [
        (["actor.parallel.tensor=2"], "actor.parallel.tensor", "divisor of 3, the number of key heads"),
        (["rollout.engine.tensor_parallel=2"], "rollout.engine.tensor_parallel", "divisor of 3"),
        (["actor.parallel.context=2"], "actor.parallel.context", "has linear attention"),
        (
            ["actor.lora={rank: 8, alpha: 16, targets: [in_proj, linear_q_proj]}"],
            "actor.lora.targets",
            "has no linear_q_proj; its linear layers are in_proj, .*, out_proj",
        ),
        (["actor.lora={rank: 8, alpha: 16, targets: [in_proj, out_proj, linear_qkv]}"], None, ""),
    ],
)
def test_a_model_with_linear_attention_is_split_by_its_key_heads(base, overrides, path, part):
    file = base.parent / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"linear_num_key_heads": 3}))
    reasons = violations(base, *overrides)
    assert (path in reasons) == (path is not None) and not (path is None and reasons)
    assert path is None or re.search(part, reasons[path])


def test_a_model_whose_engine_cannot_tell_the_experts_of_tokens_is_refused(base):
    file = base.parent / "model/config.json"
    stated = {"model_type": "mixtral", "num_local_experts": 8}
    file.write_text(json.dumps(json.loads(file.read_text()) | stated))
    reasons = violations(base, "actor.routing_replay=rollout")
    assert "SGLang's mixtral does not tell" in reasons["actor.routing_replay"]
    assert "actor.routing_replay" not in violations(base)


@pytest.mark.parametrize(("backend", "is_refused"), [("triton_kernel", True), ("triton", False)])
def test_an_engine_that_would_not_tell_the_experts_of_tokens_is_refused(base, backend, is_refused):
    file, name = base.parent / "model/config.json", "moe_runner_backend"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_experts": 8}))
    given = (f"rollout.engine.args.{name}={backend}", f"rollout.engine.untested=[{name}]")
    reasons = violations(base, *given, "actor.routing_replay=rollout")
    assert set(reasons) == ({f"rollout.engine.args.{name}"} if is_refused else set())
    assert not violations(base, *given)


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["actor.kl={where: reward}"], "actor.kl.where"),
        (["actor.overlong={start: 1, end: 2}"], "actor.overlong"),
        (["actor.turns={}"], "actor.turns"),
    ],
)
@pytest.mark.parametrize("teacher", ["{type: teacher}", "{type: teacher_topk}"])
def test_rewards_that_would_not_count_beside_a_teacher_are_refused(base, overrides, path, teacher):
    reasons = violations(base, *overrides, f"actor.advantage=[{teacher}]")
    assert list(reasons) == [path]
    assert "no term of the type reward" in reasons[path]
    assert not violations(base, *overrides, f"actor.advantage=[{teacher}, {{type: reward}}]")


def test_a_critic_beside_a_teacher_alone_and_two_terms_of_a_type_are_refused(base):
    reasons = violations(base, "critic={}", "actor.advantage=[{type: teacher}]")
    assert "never used" in reasons["actor.advantage"]
    reasons = violations(base, "actor.advantage=[{type: teacher}, {type: reward}, {type: teacher}]")
    assert "two terms are of the type teacher" in reasons["actor.advantage"]


def test_a_name_taken_by_a_file_is_refused(base):
    runs = base.parent / "runs"
    runs.mkdir()
    (runs / "base").write_text("")
    assert list(violations(base)) == ["run.name"]


def test_a_model_config_that_is_no_json_object_is_reported(base):
    for text in ("[1]", "{", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")):
        (base.parent / "model/config.json").write_text(text, encoding="latin-1", errors="replace")
        assert list(violations(base)) == ["model.path"]


def test_a_rule_is_skipped_when_a_setting_that_it_reads_is_wrong(base):
    overrides = ["actor.recompute_logprobs=false", "actor.use_decoupled_loss=perhaps", "actor.minibatches=5"]
    assert set(violations(base, *overrides)) == {"actor.use_decoupled_loss", "rollout.batch_size"}


class Recorder:
    """Stands in for a config and notes the path of every setting that is read."""

    def __init__(self, section: Section, path: str, reads: set[str]) -> None:
        self._section, self._path, self._reads = section, path, reads

    def __getattr__(self, name: str):
        attribute = getattr(type(self._section), name, None)
        if isinstance(attribute, property):
            return attribute.fget(self)
        value = getattr(self._section, name)
        path = f"{self._path}.{name}".lstrip(".")
        if isinstance(value, Section):
            return Recorder(value, path, self._reads)
        self._reads.add(path)
        return value


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.reads[-1]}")
@pytest.mark.parametrize("overrides", [(), ("eval=null",), (f"prepare={PREPARE}",)])
def test_a_rule_declares_every_setting_that_it_reads(base, rule, overrides):
    reads: set[str] = set()
    list(rule.check(Recorder(load_recipe(base, overrides), "", reads)))
    for read in reads:
        assert any(
            read == declared or read.startswith(f"{declared}.") or declared.startswith(f"{read}.")
            for declared in rule.reads
        ), f"{read} is read but not declared"


NAMES_OF_PARSERS = """
import sys
from slipstream.configs.installed.parsers import parser_names
read = [list(parser_names(kind)) for kind in ("tool_parser", "reasoning_parser")]
assert "sglang" not in sys.modules and "torch" not in sys.modules
from slipstream.rollout.engine.server_process import importing_sglang
with importing_sglang():
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser
for names, known in zip(read, (FunctionCallParser.ToolCallParserEnum, ReasoningParser.DetectorMap)):
    print(names == sorted(known) != [])
"""


def test_names_of_parsers_are_read_without_importing_sglang():
    ended = subprocess.run(
        [sys.executable, "-c", NAMES_OF_PARSERS], capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines()[-2:] == ["True", "True"]


def test_parsers_are_not_checked_where_they_cannot_be_read(base, monkeypatch, tmp_path):
    parser_names.cache_clear()
    monkeypatch.setattr(parsers, "package_folder", lambda name: tmp_path)
    try:
        assert not violations(base, "rollout.endpoint={tool_parser: anything}")
    finally:
        parser_names.cache_clear()


def test_declared_reads_are_settings_of_the_schema():
    assert {read for rule in RULES for read in rule.reads} <= set(schema_paths())


def test_every_rule_is_skipped_when_everything_is_unsure(base):
    assert isinstance(load_recipe(base), RunConfig)
    every = set(RunConfig.model_fields)
    assert not list(check_rules(None, every))


def test_the_experts_of_a_model_divide_over_the_groups_of_an_engine(base):
    config = base.parent / "model/config.json"
    experts = {"n_routed_experts": 6, "moe_intermediate_size": 30}
    config.write_text(json.dumps(json.loads(config.read_text()) | experts))

    def reasons(tensor: int, expert: int) -> str:
        split = (f"rollout.engine.tensor_parallel={tensor}", f"rollout.engine.expert_parallel={expert}")
        return violations(base, *split).get("rollout.engine.expert_parallel", "")

    assert not reasons(2, 2)
    assert "divisor of 2, which is rollout.engine.tensor_parallel" in reasons(2, 3)
    assert "divisor of 6, the number of experts" in reasons(4, 4)
    assert not reasons(4, 2)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"moe_intermediate_size": 31}))
    assert "leaves 2 ranks for an expert" in reasons(4, 2)


def test_all_that_an_engine_cannot_be_is_said_at_once(base):
    config = base.parent / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["LlamaForCausalLM"]}))
    found = violations(
        base,
        "cluster={type: slurm}",
        "rollout.engine={tensor_parallel: 4, data_parallel: 2, expert_parallel: 3, nodes: 3}",
        "weights.transport={type: tensor}",
    )
    said = {
        "rollout.engine.data_parallel": "SGLang's LlamaForCausalLM has no data-parallel attention",
        "rollout.engine.expert_parallel": "the model has no experts",
        "rollout.engine.nodes": "divisor of 4, the ranks",
        "weights.transport.type": "shares no memory",
    }
    assert found.keys() == said.keys()
    assert all(part in found[path] for path, part in said.items()), found


@pytest.mark.parametrize(
    ("overrides", "path", "part"),
    [
        (["actor.parallel.data=2", "actor.parallel.expert=2"], None, ""),
        (["actor.parallel.data=4", "actor.parallel.expert=2", "actor.parallel.expert_tensor=2"], None, ""),
        (["actor.parallel.expert=2"], "actor.parallel.expert", "divisor of 1, the ranks of a pipeline stage"),
        (["actor.parallel.data=3", "actor.parallel.expert=3"], "actor.parallel.expert", "divisor of 8"),
        (
            ["actor.parallel.data=3", "actor.parallel.expert_tensor=3"],
            "actor.parallel.expert_tensor",
            "divisor of 32",
        ),
        (["actor.parallel.tensor=2"], "actor.parallel.sequence", "with sequence parallelism only"),
        (["actor.parallel.tensor=2", "actor.parallel.sequence=true"], None, ""),
    ],
)
def test_experts_have_to_fit_on_the_ranks(base, overrides, path, part):
    config = base.parent / "model/config.json"
    experts = {"n_routed_experts": 8, "moe_intermediate_size": 32}
    config.write_text(json.dumps(json.loads(config.read_text()) | experts))
    reasons = violations(base, *overrides, "rollout.batch_size=8")
    assert reasons.keys() == ({path} if path else set())
    assert part in reasons.get(path, "")


@pytest.mark.parametrize("installed", [True, False])
def test_transformer_engine_has_to_be_installed_where_it_is_asked_for(base, monkeypatch, installed):
    monkeypatch.setattr(trainer, "transformer_engine_is_installed", lambda: installed)
    reasons = violations(base, "actor.layer_spec=transformer_engine")
    assert list(reasons) == ([] if installed else ["actor.layer_spec"])
    if not installed:
        assert "`pip install .[gpu]`" in reasons["actor.layer_spec"]
        assert "set this to auto or local" in reasons["actor.layer_spec"]


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe", "deepseek_v3", "seed_oss", "of_mine"])
def test_an_adapter_that_sglang_is_not_known_to_serve_is_refused_with_the_way_out(base, kind):
    config = base.parent / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": kind}))
    lora = "actor.lora={rank: 8, alpha: 16, serve: %s}"
    reasons = violations(base, lora % "adapter", "weights.interrupt=abort")
    assert list(reasons) == ([] if kind in ("qwen3", "llama") else ["actor.lora.serve"])
    if reasons:
        assert f"of the type {kind}" in reasons["actor.lora.serve"]
        assert "expected 'merged'" in reasons["actor.lora.serve"]
    assert not violations(base, lora % "merged", "weights.interrupt=abort")
