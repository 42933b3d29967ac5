"""``weights``: how a new policy version reaches the engines, and how it is known to be the right one."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from slipstream.configs.schema.base import Section


class _Bucketed(Section):
    bucket_mb: int = Field(
        256,
        ge=1,
        description="Weights that leave the trainer at one time, in MiB; a larger tensor goes alone.",
    )


class DistributedTransportConfig(_Bucketed):
    """Broadcast from the trainer into the engines over a process group (NCCL on GPUs, gloo on CPUs)."""

    type: Literal["distributed"] = "distributed"


class TensorTransportConfig(_Bucketed):
    """Through shared memory of the one node on which the trainer's first rank and all engines are."""

    type: Literal["tensor"] = "tensor"


class DiskTransportConfig(_Bucketed):
    """A checkpoint for each version, in a folder that trainer and engines see."""

    type: Literal["disk"] = "disk"
    path: Path | None = Field(None, description="Folder of the versions; null: `weights` in the run folder.")


class DeltaTransportConfig(_Bucketed):
    """Only what has changed, to a copy that each engine keeps on its node; over HTTP."""

    type: Literal["delta"] = "delta"
    memory: Path = Field(
        Path("/dev/shm"), description="Folder on the engines' nodes for the copies; one of memory is fastest."
    )


TransportConfig = Annotated[
    DistributedTransportConfig | TensorTransportConfig | DiskTransportConfig | DeltaTransportConfig,
    Field(discriminator="type"),
]


class _Verifying(Section):
    tolerance: float | None = Field(
        None,
        gt=0,
        description="Largest mean difference between the log-probs of engine and trainer; "
        "null: 0.001 in float32, 0.1 in bfloat16.",
    )
    tokens: int = Field(256, ge=8, description="Length of the text, from the prompts, that they are about.")


class VerifyAlways(_Verifying):
    """Every version, and every engine before it serves."""

    type: Literal["always"] = "always"


class VerifyEveryN(_Verifying):
    """Every n-th version, and every engine before it serves."""

    type: Literal["every_n"] = "every_n"
    n: int = Field(10, ge=1)


class VerifyOff(Section):
    """Whatever an engine says that it has loaded is believed."""

    type: Literal["off"] = "off"


def _from_string(value: Any) -> Any:
    # YAML reads a bare `off` as false.
    if value is False:
        value = "off"
    return {"type": value} if isinstance(value, str) else value


Verify = Annotated[
    Annotated[VerifyAlways | VerifyEveryN | VerifyOff, Field(discriminator="type")],
    BeforeValidator(_from_string),
]
"""``always``, ``every_n`` or ``off``; or ``{type: every_n, n: 5}``."""


class WeightsConfig(Section):
    """How a new policy version reaches the engines."""

    transport: TransportConfig = DistributedTransportConfig()
    interrupt: Literal["retract", "in_place", "abort", "drain"] = Field(
        "retract",
        description="Running requests go on with their KV recomputed (retract) or kept (in_place), are cut "
        "off and continued (abort), or end before, while new ones wait (drain; timeout_s at most).",
    )
    verify: Verify = Field(
        VerifyAlways(),
        description="Which versions are compared with the trainer's before anything that an engine has "
        "sampled from them is used.",
    )
    timeout_s: float = Field(
        300,
        gt=0,
        description="Longest step of publishing a version that moves weights, or connects engines for that.",
    )
    answer_timeout_s: float = Field(
        30,
        gt=0,
        description="Longest time for an engine to say yes to a step while the others stand still; behind it "
        "the engine is given up for this version and started again.",
    )
