"""How much of its model's context a server serves."""

from collections.abc import Mapping

RESERVED = 6
"""SGLang 0.5.21 refuses an input that reaches into the last tokens of the context. A completion that is
interrupted there could not go on, so none may get that far."""


class InvalidRequest(ValueError):
    """A request that must not be sent: it would stop the server, or could not be completed."""

    def __init__(self, message: str, *, room: int | None = None) -> None:
        super().__init__(message)
        self.room = room
        """Number of new tokens that the context has room for after the prompt, where more were asked for;
        None: the request is wrong for another reason."""


def served_length(positions: int, args: Mapping[str, object]) -> int:
    """Return the most tokens of a prompt and its completion together; a prompt alone has at least one less.

    ``positions``: those of the model. ``args``: ServerArgs of the recipe, which may give engines a shorter
    context or a smaller KV cache.
    """
    limits = [args.get("context_length"), args.get("max_total_tokens")]
    return min([positions, *(limit for limit in limits if isinstance(limit, int))]) - RESERVED
