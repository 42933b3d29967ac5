"""Makes sandboxes from settings."""

from collections.abc import Mapping
from typing import cast

from slipstream.configs.schema.sandbox import (
    SANDBOX,
    CustomSandboxConfig,
    LocalSandboxConfig,
    RemoteSandboxConfig,
    SandboxConfig,
    SandboxLimits,
)
from slipstream.rollout.sandbox.interface import Sandbox
from slipstream.rollout.sandbox.local import LocalSandbox
from slipstream.rollout.sandbox.wire import Limits
from slipstream.rollout.system import plugins


def sandbox_settings(section: Mapping[str, object] | None) -> SandboxConfig:
    """Return the settings of a section ``sandbox``; None: a local sandbox with the defaults.

    Raises pydantic's ValidationError, with all violations.
    """
    return SANDBOX.validate_python({"type": "local"} if section is None else dict(section))


def make_sandbox(settings: SandboxConfig) -> Sandbox:
    """Return a new sandbox, which its caller creates and closes. Raises PluginError."""
    match settings:
        case LocalSandboxConfig():
            return LocalSandbox(limits_of(settings), settings.readable, settings.require_isolation)
        case RemoteSandboxConfig():
            from slipstream.rollout.sandbox.remote import RemoteSandbox  # aiohttp takes a while to import

            return RemoteSandbox(settings)
        case CustomSandboxConfig():
            return cast(Sandbox, plugins.construct(settings.path, settings.args))


def limits_of(settings: SandboxLimits) -> Limits:
    """Return the limits that settings say, in bytes and seconds."""
    return Limits(
        wall_s=settings.wall_s,
        cpu_s=settings.cpu_s,
        memory=settings.memory_mb << 20,
        processes=settings.processes,
        open_files=settings.open_files,
        file_size=settings.file_mb << 20,
        disk=settings.disk_mb << 20,
        output=settings.output_kb << 10,
    )
