"""The whole recipe and its small sections."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from slipstream.configs.schema.actor import ActorConfig
from slipstream.configs.schema.base import Section
from slipstream.configs.schema.checkpoint import CheckpointConfig
from slipstream.configs.schema.models import CriticConfig
from slipstream.configs.schema.plugin import Plugin
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.configs.schema.simulate import SimulateConfig
from slipstream.configs.schema.weights import WeightsConfig


class RunSection(Section):
    """What this run is called, how long it goes on and where its folder is."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run folder.")
    root: Path = Field(Path("runs"), description="Where run folders are made.")
    steps: int = Field(ge=1, description="Training steps, each of which publishes one policy version.")
    seed: int = Field(0, ge=0)
    step_timeout_s: float = Field(1800, gt=0, description="Longest training step before the run fails.")
    batch_timeout_s: float = Field(3600, gt=0, description="Longest wait for a batch before the run fails.")

    @property
    def folder(self) -> Path:
        return self.root / self.name


class ModelConfig(Section):
    path: Path = Field(description="HF checkpoint directory: config.json, safetensors, tokenizer.")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Compute type of trainer and engines."
    )


class DataConfig(Section):
    path: Path = Field(description="Prompts: .jsonl or .parquet with the columns `prompt` and `label`.")
    shuffle: bool = True


class EvalConfig(Section):
    """Greedy accuracy on held-out prompts, before the first step, during the run and at its end."""

    path: Path = Field(description="Held-out prompts, same format as data.path.")
    every: int = Field(0, ge=0, description="Evaluate after every this many steps; 0: only before and after.")
    max_prompts: int | None = Field(None, ge=1)
    max_new_tokens: int | None = Field(None, ge=1, description="Default: rollout.sampling.max_new_tokens.")


class LocalCluster(Section):
    """A Ray of its own on this machine, ended with the run."""

    type: Literal["local"] = "local"
    device: Literal["auto", "cpu", "gpu"] = Field("auto", description="auto: GPUs when the machine has them.")


class SlurmCluster(Section):
    """The Ray that slurm/train.sbatch started in this job; its address comes from RAY_ADDRESS."""

    type: Literal["slurm"] = "slurm"
    trainer_nodes: int | None = Field(
        None,
        ge=1,
        description="Nodes of the trainer; the engines get the others. null: 1, or with "
        "`rollout.engine.colocated` all of them for both.",
    )
    device: Literal["auto", "cpu", "gpu"] = "auto"


Cluster = Annotated[LocalCluster | SlurmCluster, Field(discriminator="type")]


class RunConfig(Section):
    """A recipe."""

    run: RunSection
    model: ModelConfig
    data: DataConfig
    eval: EvalConfig | None = None
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig | None = Field(None, description="Of `actor.advantage: gae`; null: no such model.")
    rollout: RolloutConfig
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: Cluster = LocalCluster()
    simulate: SimulateConfig | None = Field(
        None, description="Cost model of `slipstream simulate`; null: the defaults."
    )
    prepare: Plugin | None = Field(
        None,
        description="Makes model.path, data.path and eval.path before the run when one of them is not there.",
    )
