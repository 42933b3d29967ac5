"""The commands of each part of the plan, as data: nothing is started here.

    a  engine and trainer take turns: FlashAttention 3, Triton, weights through files
    b  engine and trainer at one time, with each transport that one GPU allows
    c  log-probs of the trainer against the engine's: layers and attention of each kind, bfloat16
    d  a model of Qwen3-0.6B's shape: asynchronous, synchronous, by turns
    e  the same with an engine in fp8, and in bfloat16 beside it
    f  MFU of a training step of Qwen3-1.7B's shape

A dry run has the same commands with the settings of ``on_cpus``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

Settings = Mapping[str, object]
"""Settings of a recipe by their paths, as ``slipstream train`` takes them after the recipe."""

PARTS = {
    "a": "engine and trainer take turns",
    "b": "engine and trainer at one time",
    "c": "log-probs, trainer against engine",
    "d": "Qwen3-0.6B's shape",
    "e": "engine in fp8",
    "f": "MFU of a training step",
}

ON_THE_GPU: Settings = {
    "model.dtype": "bfloat16",
    "cluster.type": "local",
    "cluster.device": "gpu",
    # FlashInfer, SGLang's default, compiles its sampling kernels at the first request.
    "rollout.engine.args.sampling_backend": "pytorch",
}
TURNS: Settings = {
    "rollout.engine.colocated": True,
    "rollout.engine.args.mem_fraction_static": 0.6,
    "weights.transport.type": "tensor",
}
SHARED: Settings = {"rollout.engine.colocated": True, "rollout.engine.gpu_share": 0.5}
LARGE: Settings = {
    "rollout.sampling.max_new_tokens": 1024,
    "rollout.batch_size": 16,
    "rollout.max_concurrent": 256,
    "rollout.engine.args.max_running_requests": 256,
    "rollout.engine.args.max_total_tokens": 400_000,
    "actor.minibatches": 1,
    "actor.microbatch_tokens": 16_384,
    "eval": None,
}

WITHOUT_DEEP_GEMM = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
"""Environment of engines in fp8 here: they would first compile DeepGEMM's kernels, for minutes."""

GPU_ALONE = (
    "rollout.engine.gpu_share",
    "rollout.engine.quantization",
    "rollout.engine.args.attention_backend",
    "rollout.engine.args.sampling_backend",
    "rollout.engine.args.mem_fraction_static",
    "actor.layer_spec",
)
"""Settings that a run without a GPU refuses, or that mean nothing there."""

SMALL: Settings = {
    "cluster.device": "cpu",
    "model.dtype": "float32",
    "rollout.batch_size": 4,
    "rollout.n_samples_per_prompt": 4,
    "rollout.max_concurrent": 16,
    "rollout.sampling.max_new_tokens": 24,
    "rollout.engine.args.max_running_requests": 16,
    "rollout.engine.args.max_total_tokens": 4096,
    "actor.minibatches": 1,
    "actor.microbatch_tokens": 1024,
}
DRY_STEPS = 3
DRY_PROMPTS = 16
"""Held-out prompts of an evaluation in a dry run."""


@dataclass(frozen=True)
class Inputs:
    """What the runs start from."""

    policy: Path
    """The quickstart's policy."""
    train: Path
    held_out: Path
    large: Path
    """A random model of Qwen3-0.6B's shape, with the quickstart's tokenizer."""

    @classmethod
    def below(cls, folder: Path) -> "Inputs":
        """Return the paths in a folder. Nothing is made."""
        return cls(folder / "policy", folder / "train.jsonl", folder / "heldout.jsonl", folder / "qwen3-0.6b")

    def of_the_policy(self) -> Settings:
        return {
            "model.path": str(self.policy),
            "data.path": str(self.train),
            "eval.path": str(self.held_out),
        }

    def of_the_large_model(self) -> Settings:
        return {"model.path": str(self.large), "data.path": str(self.train), "prepare": None}


@dataclass(frozen=True)
class Training:
    """A run of ``slipstream train quickstart`` with other settings."""

    name: str
    settings: Settings
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def arguments(self, root: Path) -> list[str]:
        """Return the arguments of ``python -m`` for the run with its folder below ``root``."""
        settings = {"run.name": self.name, "run.root": str(root), **self.settings}
        return ["slipstream.backend.cli", "train", "quickstart", *overrides(settings)]


@dataclass(frozen=True)
class Step:
    """A call of ``benchmarks.mfu``."""

    name: str
    options: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def arguments(self, root: Path) -> list[str]:
        """Return the arguments of ``python -m``."""
        return ["benchmarks.mfu", *self.options]


Command = Training | Step


def overrides(settings: Settings) -> list[str]:
    """Return settings as arguments of ``slipstream train``.

    >>> overrides({"eval": None, "rollout.engine.colocated": True, "run.name": "c-local-fa3"})
    ['eval=null', 'rollout.engine.colocated=true', 'run.name=c-local-fa3']
    """
    return [f"{path}={_as_yaml(value)}" for path, value in settings.items()]


def _as_yaml(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


def commands(part: str, inputs: Inputs, *, attention: str = "fa3", dry: bool = False) -> list[Command]:
    """Return the commands of a part, in their order.

    ``attention``: SGLang's backend in all runs but those that name Triton.
    """
    if part == "f":
        return list(_steps(dry=dry))
    small, large = inputs.of_the_policy(), {**inputs.of_the_large_model(), **LARGE}
    runs: dict[str, Sequence[tuple[str, Settings]]] = {
        "a": (
            ("a-turns", {**small, **TURNS, "run.steps": 20}),
            ("a-triton", {**small, **TURNS, "run.steps": 6, **_attention("triton")}),
            ("a-disk", {**small, **TURNS, "run.steps": 6, "weights.transport.type": "disk"}),
        ),
        "b": [
            (f"b-{transport}", {**small, **SHARED, "run.steps": 8, "weights.transport.type": transport})
            for transport in ("tensor", "disk", "delta")
        ],
        "c": [
            (f"c-{layers}-{backend}", {**small, **TURNS, **_synchronous(layers), **_attention(backend)})
            for layers in ("transformer_engine", "local")
            for backend in dict.fromkeys((attention, "triton"))
        ],
        "d": (
            (
                "d-async",
                {**large, **SHARED, **_bound(2), "run.steps": 10, "weights.transport.type": "tensor"},
            ),
            ("d-sync", {**large, **SHARED, **_bound(0), "run.steps": 10, "weights.transport.type": "tensor"}),
            ("d-turns", {**large, **TURNS, "run.steps": 6}),
        ),
        "e": [
            (
                f"e-{name}",
                {**large, **SHARED, **_bound(0), **more, "run.steps": 6, "weights.transport.type": "disk"},
            )
            for name, more in (("bf16", {}), ("fp8", {"rollout.engine.quantization": "fp8"}))
        ],
    }
    return [
        Training(
            name,
            _of_machine({**ON_THE_GPU, **_attention(attention), **settings}, dry=dry),
            WITHOUT_DEEP_GEMM if part == "e" else {},
        )
        for name, settings in runs[part]
    ]


def _attention(backend: str) -> Settings:
    return {"rollout.engine.args.attention_backend": backend}


def _bound(eta: int) -> Settings:
    """With 0 every token has lag 0, and the distance of the log-probs is that of all tokens."""
    return {"rollout.max_head_offpolicyness": eta}


def _synchronous(layers: str) -> Settings:
    return {**_bound(0), "run.steps": 3, "actor.layer_spec": layers, "eval": None}


def _of_machine(settings: Settings, *, dry: bool) -> Settings:
    return on_cpus(settings) if dry else settings


def on_cpus(settings: Settings) -> Settings:
    """Return the settings of a run without a GPU: few steps of a small batch.

    Engines that would share the GPU at one time have cores of their own. No engine is in fp8, which SGLang
    lacks on CPUs.
    """
    left = {path: value for path, value in settings.items() if path not in GPU_ALONE}
    if "rollout.engine.gpu_share" in settings:
        del left["rollout.engine.colocated"]
    steps = settings["run.steps"]
    assert isinstance(steps, int)
    few: dict[str, object] = {"run.steps": min(steps, DRY_STEPS)}
    if "eval" not in left:
        few["eval.max_prompts"] = DRY_PROMPTS
    return {**left, **SMALL, **few}


def _steps(*, dry: bool) -> list[Step]:
    sizes = {
        "32k": ("--recompute", "full", "--budget", "32768", "--trajectories", "256", "--segments", "64"),
        "8k": ("--budget", "8192", "--trajectories", "64", "--segments", "8"),
    }
    optimizers: dict[str, tuple[str, ...]] = {
        "": (),
        "-distributed": ("--actor", '{"optimizer": {"distributed": true}}'),
    }
    small = ("--layers", "1", "--hidden", "256", "--vocab", "1000", "--trajectories", "8", "--budget", "256")
    return [
        Step(f"f-{size}{name}", ("--steps", "2", *options, *optimizer, *(small if dry else ())))
        for size, options in sizes.items()
        for name, optimizer in optimizers.items()
    ]
