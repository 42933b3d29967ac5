"""The tool of the task: a calculator that runs in a sandbox of its own for each call."""

from slipstream.configs.schema.sandbox import LocalSandboxConfig
from slipstream.rollout.sandbox.open import make_sandbox
from slipstream.rollout.workflow.environment import ToolError

LIMITS = LocalSandboxConfig(wall_s=5, cpu_s=2, memory_mb=64, processes=4, disk_mb=1, file_mb=1)


async def calc(e: str) -> str:
    """Return the value of an arithmetic expression of whole numbers."""
    sandbox = make_sandbox(LIMITS)
    await sandbox.create()
    try:
        result = await sandbox.exec(["sh", "-c", 'echo "$(($1))"', "calc", e])
    finally:
        await sandbox.close()
    if result.failed:
        raise ToolError("no value")
    return result.stdout.strip()
