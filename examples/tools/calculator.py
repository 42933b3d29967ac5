"""A tool: an `async` function whose name, parameters and docstring the policy is shown."""

from slipstream.rollout.workflow.environment import ToolError


async def add(a: int, b: int) -> int:
    """Return the sum of two whole numbers."""
    if max(abs(a), abs(b)) > 10**12:
        raise ToolError("expected numbers of at most twelve digits")
    return a + b
