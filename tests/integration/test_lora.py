"""Adapters against transformers with adapters by hand, at every layout that two processes can run."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.peft_config import peft_folder
from slipstream.bridge.model.layout import Layout, Shard
from slipstream.bridge.model.mapping import Columns, Rows, Runs, Split, Whole
from slipstream.bridge.shards.plan import Entry, entries, entries_of
from slipstream.configs.schema import LoraConfig, ParallelConfig, RunConfig
from tests.integration.test_megatron_parity import LAYOUTS, check, config_for, make_batch, reference_loss
from tests.integration.test_trainer_checkpoint import trainer_of
from tests.models import make_checkpoint, reference_logprobs, reference_model
from tests.ranks import Job, run_jobs
from tests.selection import chosen, shortened

RANK, ALPHA = 3, 12.0
"""Odd, so that no layout can split it."""
SEED = 7
VOCAB = 101
STEPS = 2
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Case:
    model: str
    layout: str = "one rank"
    targets: tuple[str, ...] | None = None
    actor: dict[str, Any] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        """The rule of linear attention in transformers takes differences of sums of decays: with these large
        adapters its gradients are 1.3e-4 from those in double precision, and ours 3e-5."""
        return 3e-4 if self.model == "qwen3_5_text" else 1e-4

    @property
    def ranks(self) -> int:
        return ParallelConfig.model_validate(LAYOUTS[self.layout]).world_size

    def config(self, models: dict[str, Path]) -> RunConfig:
        lora = {"rank": RANK, "alpha": ALPHA, "targets": self.targets and list(self.targets)}
        optimizer = {"lr": 1e-2, "clip_grad": 0.3, "eps": 1e-3, **self.actor.get("optimizer", {})}
        actor = {**self.actor, "lora": lora, "optimizer": optimizer}
        return config_for(models[self.model], LAYOUTS[self.layout], **actor)


SOME = ("linear_proj", "linear_kv_down_proj", "linear_q_up_proj")
CASES = {
    "one rank": Case("qwen3, tied"),
    "tensor 2": Case("qwen3, tied", "tensor 2"),
    "tensor 2 + sequence": Case("qwen3, tied", "tensor 2 + sequence"),
    "pipeline 2, recompute": Case("qwen3, tied", "pipeline 2", actor={"recompute": "full"}),
    "virtual pipeline 2": Case("qwen3, tied", "virtual pipeline 2"),
    "data 2 distributed": Case("qwen3, tied", "data 2", actor={"optimizer": {"distributed": True}}),
    "experts": Case("deepseek_v3"),
    "experts, pipeline 2": Case("deepseek_v3", "pipeline 2"),
    "experts, expert 2": Case("deepseek_v3", "expert 2"),
    "experts, expert 2, tensor 2": Case("deepseek_v3", "expert 2, tensor 2"),
    "experts, whole, tensor 2": Case("deepseek_v3", "tensor 2, whole experts"),
    "experts, tensor 2 + sequence": Case("deepseek_v3", "tensor 2 + sequence"),
    "attention of experts": Case("deepseek_v3", "expert 2", SOME),
    "latent attention, tensor 2": Case("latent", "tensor 2"),
    "linear attention": Case("qwen3_5_text"),
    "linear attention, tensor 2 + sequence": Case("qwen3_5_text", "tensor 2 + sequence"),
    "norms around blocks": Case("gemma3_text", "tensor 2 + sequence", ("linear_proj", "linear_fc2")),
    "sparse attention": Case("deepseek_v32", "expert 2, tensor 2"),
}
SAME = {
    "one rank": (
        "tensor 2",
        "tensor 2 + sequence",
        "pipeline 2, recompute",
        "virtual pipeline 2",
        "data 2 distributed",
    ),
    "experts": (
        "experts, pipeline 2",
        "experts, expert 2",
        "experts, expert 2, tensor 2",
        "experts, whole, tensor 2",
        "experts, tensor 2 + sequence",
    ),
    "linear attention": ("linear attention, tensor 2 + sequence",),
}
"""The same run in other layouts."""
PAIRS = [(one, other) for one, others in SAME.items() for other in others]
KEPT = (
    "one rank",
    "tensor 2 + sequence",
    "experts, expert 2",
    "latent attention, tensor 2",
)
KEPT_PAIRS = [("one rank", "tensor 2 + sequence")]


# ---- the two factors of each adapted layer, by HF's names of what it holds


def is_adapted(entry: Entry, targets: Sequence[str] | None) -> bool:
    *_, layer, kind = entry.parameter.split(".")
    linear = layer.startswith("linear_") or layer in ("in_proj", "out_proj")
    return kind == "weight" and linear and (targets is None or layer in targets)


def factors(entry: Entry) -> tuple[tuple[list[str], Split], tuple[list[str], Split]]:
    """Names and split of A, which fused layers share, and of B."""
    rows = tuple(rows for rows, _ in entry.hf_shapes)
    inputs = entry.hf_shapes[0][1]
    split: Split = entry.split
    a = Columns(RANK, inputs) if isinstance(split, Columns) else Whole((RANK, inputs))
    b: Split = Whole((*rows, RANK))
    if isinstance(split, Rows):
        b = replace(split, columns=RANK)
    if isinstance(split, Runs):
        b = replace(split, hf_shapes=tuple((count, RANK) for count in rows))
    return ([f"{entry.hf_names[0]} A"], a), ([f"{name} B" for name in entry.hf_names], b)


def by_hand(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return 0.2 * torch.randn(shape, generator=generator)


Held = list[tuple[list[str], Split, Shard, Tensor]]


def held(trainer: Any) -> Held:
    """This rank's part of every factor."""
    found: Held = []
    config = trainer._config
    layout = Layout.of(config.actor.parallel)
    for entry, shard in entries_of(trainer._spec, layout, torch.distributed.get_rank()):
        if is_adapted(entry, config.actor.lora.targets):
            part = trainer._policy.parts[entry.chunk].module
            module = part.get_submodule(entry.parameter.removesuffix(".weight"))
            for (names, split), own in zip(factors(entry), (module.lora_a, module.lora_b), strict=True):
                found.append((names, split, shard, own))
    return found


def copied(found: Held, what=lambda own: own) -> list:
    return [(names, split, shard, what(own).detach().numpy().copy()) for names, split, shard, own in found]


def whole(by_rank: list[list]) -> dict[str, np.ndarray]:
    """Of all ranks together, which agree where they hold the same."""
    found: dict[str, Tensor] = {}
    for names, split, shard, own in (one for rank in by_rank for one in rank):
        for piece in split.pieces(shard):
            name, shape = names[piece.hf], split.hf_shapes[piece.hf]
            place = piece.in_hf(found.setdefault(name, torch.full(shape, torch.nan)))
            mine, known = piece.in_shard(torch.from_numpy(own)), ~place.isnan()
            torch.testing.assert_close(mine[known], place[known], rtol=1e-5, atol=1e-7, msg=name)
            place.copy_(mine)
    return {name: tensor.numpy() for name, tensor in found.items()}


# ---- what a rank does in each case


def frozen(trainer: Any) -> dict[str, Tensor]:
    return {
        f"{chunk}.{name}": parameter.detach().clone()
        for chunk, part in enumerate(trainer._policy.parts)
        for name, parameter in part.module.named_parameters()
        if not name.endswith(("lora_a", "lora_b"))
    }


def logprobs(trainer: Any, batch: TrainBatch) -> dict[tuple, np.ndarray]:
    [microbatches], _ = trainer.microbatches(batch)
    values = trainer._policy.log_probs(microbatches, TEMPERATURE)
    return {
        tuple(micro.target_M): logp.numpy()
        for micro, logp in zip(microbatches, values, strict=True)
        if logp is not None
    }


def life_of(rank: RankSpec, config: RunConfig, folder: Path, batch: TrainBatch) -> dict[str, Any]:
    """Return the adapters as drawn; log-probs and gradients of factors made by hand; and what two steps make
    of them. Write the trained model as an HF checkpoint."""
    run = config.run.model_copy(update={"seed": SEED})
    config = config.model_copy(update={"run": run})
    with trainer_of(rank, config) as trainer:
        own, base = held(trainer), frozen(trainer)
        life: dict[str, Any] = {"drawn": copied(own)}
        with torch.no_grad():
            for names, split, shard, factor in own:
                for piece in split.pieces(shard):
                    value = by_hand(names[piece.hf], split.hf_shapes[piece.hf])
                    piece.in_shard(factor).copy_(piece.in_hf(value))
        trainer._trained.optimizer.reload_model_params()
        life["logps"] = logprobs(trainer, batch)
        # Leaves the gradient where it can be read.
        trainer._trained.optimizer.step = lambda: (True, 0.0, 0)
        trainer.train(batch)
        del trainer._trained.optimizer.step
        life["gradients"] = copied(own, lambda factor: factor.main_grad)
        life["metrics"] = {}
        for step in range(STEPS):
            life["metrics"] = trainer.train(make_batch(VOCAB, n=4, seed=step, version=trainer.step)) or {}
        life["trained"] = copied(own)
        now = frozen(trainer)
        life["base is as it was"] = all(torch.equal(now[name], base[name]) for name in base)
        life["trainable"] = sum(factor.numel() for *_, factor in own)
        life["buffered"] = sum(
            parameter.numel()
            for part in trainer._policy.parts
            for buffer in part.buffers + part.expert_parallel_buffers
            for parameter in buffer.params
        )
        life["gradients of the base"] = [
            name
            for part in trainer._policy.parts
            for name, parameter in part.module.named_parameters()
            if (hasattr(parameter, "main_grad") or parameter.grad is not None)
            and not name.endswith(("lora_a", "lora_b"))
        ]
        life["logps after training"] = logprobs(trainer, batch)
        trainer.export_hf(folder)
        return life


def begin_with(rank: RankSpec, config: RunConfig, adapter: Path, folder: Path) -> list:
    """Return the factors of a trainer that begins with an adapter, and write them again beside ``folder``."""
    lora = config.actor.lora.model_copy(update={"path": adapter})
    config = config.model_copy(update={"actor": config.actor.model_copy(update={"lora": lora})})
    with trainer_of(rank, config) as trainer:
        trainer.export_hf(folder)
        return copied(held(trainer))


# ---- the reference


def with_adapters(model: torch.nn.Module, weights: dict[str, Tensor]) -> Any:
    """transformers' model with other weights, by the names of a checkpoint."""
    parameters = {}
    for name, _ in model.named_parameters():
        layer, _, which = name.partition(".experts.")
        if which in ("gate_up_proj", "down_proj"):
            parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else (which,)
            count = sum(key.startswith(f"{layer}.experts.") for key in weights) // 3
            of_each = [
                torch.cat([weights[f"{layer}.experts.{i}.{part}.weight"] for part in parts])
                for i in range(count)
            ]
            parameters[name] = torch.stack(of_each)
        elif name in weights:
            parameters[name] = weights[name]
    return lambda ids: SimpleNamespace(
        logits=torch.func.functional_call(model, parameters, (ids,), tie_weights=False).logits
    )


@cache
def reference(folder: Path, targets: tuple[str, ...] | None):
    """Log-probs and gradients of the factors made by hand, by autograd through W + alpha / rank * B A."""
    from safetensors.torch import load_file

    base = load_file(folder / "model.safetensors")
    leaves, weights = {}, dict(base)
    for entry in entries(model_spec(folder), Layout()):
        if is_adapted(entry, targets):
            (a_names, a_split), (b_names, b_split) = factors(entry)
            for names, split in ((a_names, a_split), (b_names, b_split)):
                for name, shape in zip(names, split.hf_shapes, strict=True):
                    leaves[name] = by_hand(name, shape).requires_grad_()
            for name in entry.hf_names:
                weights[name] = base[name] + ALPHA / RANK * leaves[f"{name} B"] @ leaves[a_names[0]]
    model = with_adapters(reference_model(folder), weights)
    logps, loss = reference_loss(model, make_batch(VOCAB), TEMPERATURE)
    loss.backward()
    return logps, {name: leaf.grad.numpy() for name, leaf in leaves.items()}


# ---- tests


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {
        name: make_checkpoint(folder / name, name.partition(",")[0], tied="tied" in name)
        for name in ("qwen3, tied", "deepseek_v3", "qwen3_5_text", "gemma3_text", "deepseek_v32")
    }
    made["experts alone"] = make_checkpoint(folder / "experts", "qwen3_moe", tied=False, mlp_only_layers=[])
    made["latent"] = make_checkpoint(folder / "latent", "deepseek_v3", tied=False, first_k_dense_replace=4)
    return made


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp("exported") / "hf" for name in CASES}


@pytest.fixture(scope="module")
def found(models, exported, request) -> dict[str, list[dict[str, Any]]]:
    """By case: the lives of its ranks."""
    batch = make_batch(VOCAB)
    jobs = {
        name: Job(case.ranks, life_of, (case.config(models), exported[name], batch))
        for name, case in CASES.items()
        if name
        in {*chosen(request, "name"), *chain.from_iterable(chosen(request, "one", "other")), "one rank"}
    }
    return run_jobs(jobs)


@pytest.mark.parametrize("name", shortened([name for name in CASES if "distributed" not in name], KEPT))
def test_logprobs_and_gradients_equal_those_of_transformers_with_adapters(name, models, found):
    case = CASES[name]
    logps, gradients = reference(models[case.model], case.targets)
    gathered = whole([rank["gradients"] for rank in found[name]])
    results = [(rank["logps"], gathered) for rank in found[name]]
    check(name, make_batch(VOCAB), results, logps, gradients, tolerance=case.tolerance)


@pytest.mark.parametrize("name", shortened(CASES, KEPT))
def test_only_adapters_are_trained(name, found):
    for rank in found[name]:
        assert rank["base is as it was"]
        assert not rank["gradients of the base"]
        assert rank["buffered"] == rank["trainable"]
    before, after = (whole([rank[when] for rank in found[name]]) for when in ("drawn", "trained"))
    for factor, value in after.items():
        assert not np.array_equal(value, before[factor]), factor


@pytest.mark.parametrize(("one", "other"), shortened(PAIRS, KEPT_PAIRS))
def test_every_layout_draws_and_trains_the_same_adapters(one, other, found):
    for when, tolerance in (("drawn", 0), ("trained", 2e-4)):
        expected, values = (whole([rank[when] for rank in found[name]]) for name in (one, other))
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(values[name], value, rtol=0, atol=tolerance, err_msg=name)
    [expected], [metrics] = ([r["metrics"] for r in found[name] if r["metrics"]] for name in (one, other))
    for metric in ("train/loss", "train/grad_norm"):
        assert metrics[metric] == pytest.approx(expected[metric], rel=1e-3), metric


def test_adapters_begin_as_those_of_peft_do(found):
    drawn = whole([rank["drawn"] for rank in found["one rank"]])
    for name, value in drawn.items():
        if name.endswith("B"):
            assert not value.any()
        else:
            bound = 1 / np.sqrt(value.shape[1])
            assert bound * 0.9 < np.abs(value).max() <= bound
    assert len({value.tobytes() for name, value in drawn.items() if name.endswith("A")}) == 16


@pytest.mark.parametrize("name", shortened(CASES, KEPT))
def test_an_exported_model_is_the_trained_one_with_its_adapters(name, found, exported):
    batch, model = make_batch(VOCAB), reference_model(exported[name])
    with torch.no_grad():
        logps = [
            reference_logprobs(model, t.tokens_T, TEMPERATURE)[torch.from_numpy(t.loss_mask_T[1:])].numpy()
            for t in batch.trajectories
        ]
    results = [(rank["logps after training"], {}) for rank in found[name]]
    check(name, batch, results, logps, {}, tolerance=CASES[name].tolerance)


def by_peft_name(factors: dict[str, np.ndarray], folder: Path, targets) -> dict[str, np.ndarray]:
    """The factors of all layers, by the names that PEFT gives them: modules that are fused share A."""
    tensors = {}
    for entry in entries(model_spec(folder), Layout()):
        if is_adapted(entry, targets):
            for name in entry.hf_names:
                module = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{module}.lora_A.weight"] = factors[f"{entry.hf_names[0]} A"]
                tensors[f"{module}.lora_B.weight"] = factors[f"{name} B"]
    return tensors


@pytest.mark.parametrize("name", shortened(CASES, KEPT))
def test_every_layout_exports_its_adapter_in_the_format_of_peft(name, models, found, exported):
    from safetensors.torch import load_file

    trained = whole([rank["trained"] for rank in found[name]])
    expected = by_peft_name(trained, models[CASES[name].model], CASES[name].targets)
    written = load_file(peft_folder(exported[name]) / "adapter_model.safetensors")
    assert written.keys() == expected.keys()
    for tensor, value in expected.items():
        np.testing.assert_array_equal(written[tensor].numpy(), value, err_msg=tensor)
    config = json.loads((peft_folder(exported[name]) / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
    assert config["base_model_name_or_path"] == str(models[CASES[name].model])


OF_PEFT = {
    "one rank": Case("qwen3, tied"),
    "tensor 2 + sequence": Case("qwen3, tied", "tensor 2 + sequence"),
    "experts, expert 2": Case("experts alone", "expert 2"),
    "attention of experts": CASES["attention of experts"],
}
"""PEFT 0.21 has no adapters on dense layers and shared experts of a model that has experts, too."""


def train_and_export(rank: RankSpec, config: RunConfig, folder: Path, texts: list[list[int]]) -> list:
    with trainer_of(rank, config) as trainer:
        for step in range(STEPS):
            trainer.train(make_batch(VOCAB, n=4, seed=step, version=trainer.step))
        trainer.export_hf(folder)
        return [trainer.logprobs(text) for text in texts]


@pytest.mark.parametrize("name", shortened(OF_PEFT, ("tensor 2 + sequence", "experts, expert 2")))
def test_peft_loads_an_exported_adapter_and_computes_our_log_probs(name, models, tmp_path):
    from peft import PeftModel

    case, texts = OF_PEFT[name], [t.tokens_T.tolist() for t in make_batch(VOCAB).trajectories]
    arguments = (case.config(models), tmp_path / "hf", texts)
    [ours, *_] = [
        logps
        for logps in run_jobs({name: Job(case.ranks, train_and_export, arguments)})[name]
        if logps[0] is not None
    ]
    base, merged = reference_model(models[case.model]), reference_model(tmp_path / "hf")
    with torch.no_grad():
        untrained = [reference_logprobs(base, text) for text in texts]
        model = PeftModel.from_pretrained(base, peft_folder(tmp_path / "hf"))
        for text, logps, before in zip(texts, ours, untrained, strict=True):
            by_peft = reference_logprobs(model, text)
            torch.testing.assert_close(by_peft, reference_logprobs(merged, text), rtol=0, atol=1e-5)
            torch.testing.assert_close(by_peft, torch.tensor(logps), rtol=0, atol=1e-5)
            assert (by_peft - before).abs().max() > 1e-2, "the adapter matters"


ROUND_TRIPS = [("one rank", "tensor 2 + sequence"), ("experts, expert 2", "experts"), *PAIRS[:2]]


@pytest.mark.parametrize(("one", "other"), shortened(ROUND_TRIPS, ROUND_TRIPS[:2]))
def test_training_begins_with_an_adapter_bit_for_bit_in_any_layout(
    one, other, models, found, exported, tmp_path
):
    adapter, case = peft_folder(exported[one]), CASES[other]
    arguments = (case.config(models), adapter, tmp_path / "again-hf")
    ranks = run_jobs({other: Job(case.ranks, begin_with, arguments)})[other]
    trained, begun = whole([rank["trained"] for rank in found[one]]), whole(ranks)
    assert begun.keys() == trained.keys()
    for name, value in trained.items():
        np.testing.assert_array_equal(begun[name], value, err_msg=name)
    file = "adapter_model.safetensors"
    assert (tmp_path / "again-peft" / file).read_bytes() == (adapter / file).read_bytes()


def test_a_merged_weight_is_rounded_once():
    from slipstream.backend.megatron.lora import _Adapted

    weight, a, b = (torch.randn(shape).bfloat16() for shape in ((200, 100), (8, 100), (200, 8)))
    merged = _Adapted.merged(SimpleNamespace(weight=weight, lora_a=a, lora_b=b, lora_scale=0.3))
    exact = weight.double() + 0.3 * b.double() @ a.double()
    assert merged.dtype is torch.bfloat16
    assert ((merged.double() - exact).abs() <= 2**-8 * 1.001 * exact.abs() + 1e-6).all()


def test_a_target_that_the_model_does_not_have_is_refused(models):
    from slipstream.backend.megatron.lora import adapt

    lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=["linear_proj", "linear_q_proj"])
    has = "linear_fc1, linear_fc2, linear_proj, linear_qkv"
    with pytest.raises(ValueError, match=f"actor.lora.targets has linear_q_proj; .* are {has}$"):
        adapt([], model_spec(models["qwen3, tied"]), Layout(), 0, lora, seed=0)
