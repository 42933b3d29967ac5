"""The whole recipe and its small sections."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from slipstream.configs.schema.actor import ActorConfig
from slipstream.configs.schema.base import ModelSetting, PathSetting, Section
from slipstream.configs.schema.checkpoint import RunCheckpointConfig
from slipstream.configs.schema.cluster import Cluster, LocalCluster
from slipstream.configs.schema.data import DataConfig, EvalConfig, PromptFile, data_files, eval_files
from slipstream.configs.schema.gateway import GatewayConfig
from slipstream.configs.schema.judge import CodeJudge, Judge
from slipstream.configs.schema.live import LiveConfig
from slipstream.configs.schema.log import LogConfig
from slipstream.configs.schema.models import CriticConfig
from slipstream.configs.schema.plugin import ImportPath, Plugin
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.configs.schema.simulate import SimulateConfig
from slipstream.configs.schema.weights import WeightsConfig


class RunSection(Section):
    """Name, length and folder of the run. The run folder is `run.root`/`run.name`.

    A run has either `run.steps` or `run.epochs`. The steps of epochs are counted when the data is read:
    epochs * prompts / `rollout.batch_size`. Prompts that `data.max_prompt_tokens` leaves out and places of
    live users do not count, and with weights in `data.sources` a pass is as many prompts as all sources hold
    together. The number of steps is printed at the start and written as `run.steps` into `recipe.yaml` of the
    run folder. Progress, the time left and the end of the decay of the learning rate follow it. A group that
    a filter rejects is replaced by the next prompt, so a run with filters goes on into the next pass. A
    resumed run counts its steps from the beginning. A data source of your own has no length and needs
    `run.steps`.
    """

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run and of its folder: letters, digits, `.`, `_` and `-`.",
    )
    root: PathSetting = Field(default=Path("runs"), description="Directory in which run folders are created.")
    steps: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="Number of training steps, each of which publishes one policy version; null: as many "
        "as `run.epochs` gives.",
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        description="Number of passes over the data, in place of `run.steps`. The steps that they fill are "
        "rounded up. null: the run has `run.steps`.",
    )
    seed: int = Field(default=0, ge=0, description="Random seed of the run and of its engines.")
    step_timeout_s: float = Field(
        default=1800, gt=0, description="Seconds that a training step may take before the run fails."
    )
    batch_timeout_s: float = Field(
        default=3600, gt=0, description="Seconds to wait for a batch before the run fails."
    )
    max_skipped_updates: int = Field(
        default=10,
        ge=0,
        description="Number of optimizer updates that one process of the run may skip because a loss or a "
        "gradient is not finite. One more skipped update ends the run.",
    )
    trainer_restarts: int = Field(
        default=10,
        ge=0,
        description="Number of times within `run.restart_window_s` that a failed trainer is started again "
        "from the newest checkpoint, while the engines go on serving. One more failure ends the run, and so "
        "does a trainer that fails twice in the same way without a training step in between. "
        "`slipstream sft` never restarts its trainer.",
    )
    restart_window_s: float = Field(
        default=86400,
        gt=0,
        description="Seconds within which restarts are counted: of the trainer (`run.trainer_restarts`), of "
        "each engine (`rollout.engine.restarts`) and of each collector (`rollout.collector_restarts`).",
    )

    mode: str = Field(
        default="0700",
        pattern=r"^0?7[0-7][0145]$",
        description="Permissions of the run folder, in octal and in quotes. Files of the run never have "
        "more. `'0750'` lets your group read them. Nobody outside your group can get write permission.",
    )

    @property
    def umask(self) -> int:
        """Permissions that new files and folders of the run do not get."""
        return 0o777 & ~int(self.mode, 8)

    lease_s: float = Field(
        default=30,
        ge=1,
        description="Seconds without a sign of life after which another machine may take over the run "
        "folder. A driver whose writes to the folder fail for this long stops.",
    )

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.root / self.name

    @property
    def total_steps(self) -> int:
        """Number of training steps. Raises ValueError while ``epochs`` are not turned into steps, for which
        the data has to be counted.
        """
        if self.steps is None:
            raise ValueError(f"the number of steps of run.epochs = {self.epochs} is not known yet")
        return self.steps


_OF_SLIPSTREAM = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tools",
    "truncation",
)
"""Parameters of ``apply_chat_template`` that Slipstream sets itself."""


def _are_variables(args: dict[str, object]) -> dict[str, object]:
    if taken := [name for name in args if name in _OF_SLIPSTREAM]:
        raise ValueError(f"expected variables of the chat template; Slipstream sets {', '.join(taken)}")
    return args


class ModelConfig(Section):
    """The initial policy."""

    path: ModelSetting = Field(
        description="Hugging Face checkpoint directory with config.json, safetensors and tokenizer, or a "
        "model of the Hugging Face Hub, `hf://ORG/NAME` or `hf://ORG/NAME@REVISION`, which is downloaded "
        "when the run starts. Every other path of a model or an adapter may name one too."
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16",
        description="Data type of weights, activations and gradients between layers, "
        "in trainer and engines. With `bfloat16`, Adam updates float32 main weights, of which the bfloat16 "
        "weights are a rounded copy, and gradients are summed over micro-batches and ranks in float32.",
    )
    families: dict[str, ImportPath] = Field(
        default={},
        description="Model families of your own: a mapping from the `model_type` of a `config.json` to the "
        "import path of a module or object with the functions of `slipstream.bridge.families.Family`.",
    )
    template_args: Annotated[dict[str, object], AfterValidator(_are_variables)] = Field(
        default={},
        description="Variables of the chat template, such as `enable_thinking: false`, for all prompts of "
        "the policy.",
    )


class RunConfig(Section):
    """A recipe."""

    run: RunSection
    model: ModelConfig
    data: DataConfig | None = Field(
        default=None, description="Without the section there are no prompts, as for `slipstream serve`."
    )
    eval: EvalConfig | None = Field(default=None, description="Without the section nothing is evaluated.")
    actor: ActorConfig = Field(default=ActorConfig())
    critic: CriticConfig | None = Field(
        default=None,
        description="Without the section no critic is loaded. It is needed for `estimator: gae` in "
        "`actor.advantage`, and refused with any other estimator.",
    )
    rollout: RolloutConfig
    gateway: GatewayConfig | None = Field(
        default=None, description="Without the section no user reaches an engine."
    )
    live: LiveConfig | None = Field(
        default=None, description="Without the section no turn of a user is trained."
    )
    judge: Judge = Field(
        default=CodeJudge(),
        description="Who says what turns of live users and, if a reward asks, whole "
        "episodes are worth (docs/judges.md). A turn that cannot be judged waits in the ledger: a failure "
        "or an outage never becomes a score.",
    )
    weights: WeightsConfig = Field(default=WeightsConfig())
    checkpoint: RunCheckpointConfig = Field(default=RunCheckpointConfig())
    log: LogConfig = Field(default=LogConfig())
    cluster: Cluster = Field(default=LocalCluster(), description="The machines that the run uses.")
    simulate: SimulateConfig | None = Field(
        default=None, description="Without the section, its defaults are simulated."
    )
    prepare: Plugin | None = Field(
        default=None,
        description="Import path of a function that creates the inputs of the run. It is called before the "
        "run if `model.path` or a prompt file does not exist, which must lie in a hidden folder, such as "
        "`runs/.inputs`: any other path is taken for a mistake. It gets the paths that the run reads: "
        "`model_path`; `data_path` and `eval_path` if the run has such prompts, or mappings `data_paths` "
        "and `eval_paths` from names to paths if there are several files (docs/customization.md#prepare).",
    )

    @property
    def has_prompts(self) -> bool:
        """True if episodes are run on prompts to train on, those of a file or of a data source."""
        return self.data is not None or self.rollout.data_source is not None

    @property
    def training_files(self) -> list[PromptFile]:
        """The prompt files to train on."""
        return data_files(self.data)

    @property
    def held_out_files(self) -> list[PromptFile]:
        """The prompt files to evaluate on."""
        return eval_files(self.eval, self.data)
