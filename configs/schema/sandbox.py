"""``sandbox``: where programs run that a policy has written. Workflows and rewards have it in ``args``."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from slipstream.configs.schema.base import Section
from slipstream.configs.schema.plugin import ImportPath


class SandboxLimits(Section):
    """The limits of each command, and of the files of a sandbox."""

    wall_s: float = Field(default=10, gt=0, le=86_400, description="Seconds that a command may take.")
    cpu_s: float = Field(
        default=10,
        gt=0,
        le=86_400,
        description="Seconds of processor time that a command and all that it starts may use together.",
    )
    memory_mb: int = Field(
        default=512,
        ge=16,
        description="Largest memory of a command and all that it starts together, in MB. Files count for "
        "`disk_mb`.",
    )
    processes: int = Field(
        default=64,
        ge=1,
        le=30_000,
        description="Largest number of processes and threads that a command may have at a time.",
    )
    open_files: int = Field(default=256, ge=16, description="Largest number of open files of each process.")
    file_mb: int = Field(
        default=64,
        ge=1,
        description="Largest file that a command may write, in MB, and largest file that can be uploaded or "
        "downloaded.",
    )
    disk_mb: int = Field(
        default=256,
        ge=1,
        description="Largest size of all files of a sandbox together, in MB. With namespaces they are in "
        "memory.",
    )
    output_kb: int = Field(
        default=64,
        ge=1,
        le=65_536,
        description="Text that a command may print on its standard output, and as much on its standard "
        "error, in KB. More ends it.",
    )


class LocalSandboxConfig(SandboxLimits):
    """Processes on the machine of the collector or judge."""

    type: Literal["local"] = "local"
    readable: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Folders of the machine that commands may read, beyond those of the system and of the "
        "Python that runs Slipstream. They have the same path in the sandbox.",
    )
    require_isolation: bool = Field(
        default=False,
        description="Refuse to run anything where the kernel does not allow namespaces. Otherwise a warning "
        "says so.",
    )


class RemoteSandboxConfig(SandboxLimits):
    """Processes on another machine, where `python -m slipstream.rollout.sandbox.serve` runs."""

    type: Literal["remote"] = "remote"
    url: str = Field(
        pattern=r"^https?://[^/\s]+(/[^\s?#]*)?$",
        description="Address of the server, such as `http://sandboxes.internal:8700`.",
    )
    key_variable: str = Field(
        default="SLIPSTREAM_SANDBOX_KEY",
        pattern=r"^[A-Za-z_]\w*$",
        description="Environment variable with the key of the server.",
    )
    create_timeout_s: float = Field(
        default=120,
        gt=0,
        description="Seconds that a sandbox may take to exist. In this time a full or restarting server is "
        "asked again.",
    )
    answer_timeout_s: float = Field(
        default=30,
        gt=0,
        description="Seconds that the server may take to answer, beyond those of the command.",
    )
    idle_s: float = Field(
        default=600,
        gt=0,
        le=86_400,
        description="Seconds without a request after which the server closes a sandbox, because its owner "
        "may have ended.",
    )
    require_isolation: bool = Field(
        default=False, description="Refuse a server whose machine does not allow namespaces."
    )


class CustomSandboxConfig(Section):
    """A `Sandbox` of your own."""

    type: Literal["path"] = "path"
    path: ImportPath = Field(
        description="Import path of a class with the methods of `Sandbox`, or of a function that returns an "
        "object with them."
    )
    args: dict[str, object] = Field(default={}, description="Keyword arguments of the class or function.")


SandboxConfig = Annotated[
    LocalSandboxConfig | RemoteSandboxConfig | CustomSandboxConfig, Field(discriminator="type")
]

SANDBOX: "TypeAdapter[SandboxConfig]" = TypeAdapter(SandboxConfig)
"""Reads a section ``sandbox``. Raises pydantic's ValidationError, with all violations."""
