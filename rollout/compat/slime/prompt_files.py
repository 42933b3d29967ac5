"""The prompts of a recipe, for code of slime's that reads them by the path in its arguments."""

from pathlib import Path

from slipstream.configs.schema import ColumnsConfig, PromptFile
from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.prompts import StoredPrompts, checked_prompts


def recipe_prompts(args: SlimeArguments, path: str) -> StoredPrompts:
    """Return the prompts of a file, read as the recipe says. Raises PromptError and OSError."""
    columns = ColumnsConfig(**args.prompt_columns)
    return StoredPrompts(checked_prompts(PromptFile(Path(path), columns, args.prompt_template)))
