"""``weights``: how a new policy version reaches the engines, and how they are verified to hold it."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from slipstream.configs.schema.base import PathSetting, Section


class _Bucketed(Section):
    bucket_mb: int = Field(
        default=256,
        ge=1,
        description="Size of a bucket in MiB. A larger tensor has a bucket of its own.",
    )


class ShardsTransportConfig(Section):
    """From the shards of the trainer's ranks into the engines' parameters, in place (NCCL on GPUs, gloo on
    CPUs)."""

    type: Literal["shards"] = "shards"
    packed_mb: int = Field(
        default=8,
        ge=1,
        description="Largest message in MiB into which small or scattered parts are packed. A rank has up to "
        "eight of them in flight.",
    )


class TensorTransportConfig(_Bucketed):
    """Through memory of the trainer's first rank, of its GPU or of the host. All engines must be on its
    node."""

    type: Literal["tensor"] = "tensor"


class DiskTransportConfig(_Bucketed):
    """As a checkpoint of the newest version, in a folder that trainer and engines share."""

    type: Literal["disk"] = "disk"
    path: PathSetting | None = Field(
        default=None,
        description="Folder of the versions, for this run alone; null: `weights` in the run folder.",
    )


class DeltaTransportConfig(_Bucketed):
    """As the changed weights alone, over HTTP, to a copy that each engine keeps on its node."""

    type: Literal["delta"] = "delta"
    memory: PathSetting = Field(
        default=Path("/dev/shm"),
        description="Folder of the copies on the engines' nodes. A memory file system is fastest.",
    )


TransportConfig = Annotated[
    ShardsTransportConfig | TensorTransportConfig | DiskTransportConfig | DeltaTransportConfig,
    Field(discriminator="type"),
]


class _Verifying(Section):
    tolerance: float | None = Field(
        default=None,
        gt=0,
        description="Largest mean absolute difference between the log-probs of an engine and of the trainer; "
        "null: 0.001 in float32, 0.1 in bfloat16, 0.3 with engines in fp8.",
    )
    tokens: int = Field(
        default=256, ge=8, description="Number of prompt tokens whose log-probs are compared."
    )


class VerifyAlways(_Verifying):
    """Every version is verified, and every engine before it serves."""

    type: Literal["always"] = "always"


class VerifyEveryN(_Verifying):
    """Every n-th version is verified, and every engine before it serves."""

    type: Literal["every_n"] = "every_n"
    n: int = Field(default=10, ge=1, description="Number of versions from one verified version to the next.")


class VerifyDigests(_Verifying):
    """As `always`, and every engine parameter is read back and compared with the sent one."""

    type: Literal["digests"] = "digests"


class VerifyOff(Section):
    """No version is verified: an engine's own report of its version is trusted."""

    type: Literal["off"] = "off"


Verify = Annotated[
    Annotated[VerifyAlways | VerifyEveryN | VerifyDigests | VerifyOff, Field(discriminator="type")],
    BeforeValidator(lambda value: {"type": value} if isinstance(value, str) else value),
]
"""``always``, ``every_n``, ``digests`` or ``off``; or ``{type: every_n, n: 5}``."""


class WeightsConfig(Section):
    """How a new policy version reaches the engines, and how they are verified to hold it
    (docs/publishing.md)."""

    transport: TransportConfig = Field(
        default=ShardsTransportConfig(), description="Way of the weights from the trainer to the engines."
    )
    fall_back: bool = Field(
        default=True,
        description="If the first publication of a run fails by `weights.transport`, or takes ten times as "
        "long as planned, go on with the next of `shards`, `tensor` and `disk` that the layout allows. "
        "false: it is a failure of the engines.",
    )
    interrupt: Literal["retract", "in_place", "abort", "drain"] = Field(
        default="retract",
        description="Effect of an update on running requests. `retract`: they continue, and their KV cache "
        "is computed again. `in_place`: they continue with the KV cache that they have. `abort`: they are "
        "cut off and continued. `drain`: they end before the update, for at most `weights.timeout_s`, "
        "while new requests wait.",
    )
    verify: Verify = Field(
        default=VerifyAlways(),
        description="Versions for which the engines are compared with the trainer. Nothing that an engine "
        "samples from such a version is used before the engine has passed. `weights.verify: off` is short "
        "for a type with its defaults.",
    )
    timeout_s: float = Field(
        default=300,
        gt=0,
        description="Seconds for a step of publishing that moves weights or connects engines to the trainer.",
    )
    answer_timeout_s: float = Field(
        default=30,
        gt=0,
        description="Seconds for an engine to answer in any other step of publishing. An engine that does "
        "not answer misses the version and is started again.",
    )
