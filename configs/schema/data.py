"""``data`` and ``eval``: prompt files, how their rows become prompts, and in which shares they are taken."""

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from slipstream.configs.schema.base import PathSetting, Section
from slipstream.configs.schema.sampling import EvalSamplingConfig

PROMPT_SUFFIXES = (".jsonl", ".parquet")


def template_parts(template: str) -> Iterator[tuple[str, str | None]]:
    """Yield each text of a prompt template with the name of the column that follows; None: no column follows.

    Raises ValueError for a template that cannot be filled in.
    """
    for text, name, form, conversion in string.Formatter().parse(template):
        if name is not None and (form or conversion or not re.fullmatch(r"[^\[\]{}]+", name)):
            raise ValueError(f"{{{name}}} is no column")
        yield text, name


def _can_be_filled_in(template: str) -> str:
    try:
        if any(name is not None for _, name in template_parts(template)):
            return template
        reason = "it names no column, so that all prompts would be equal"
    except ValueError as error:
        reason = str(error)
    raise ValueError(
        f"{reason}; expected columns in braces, such as {{question}}; {{{{ is a brace of the text"
    )


PromptTemplate = Annotated[str, AfterValidator(_can_be_filled_in)]


class ColumnsConfig(Section):
    """The columns of a prompt file. A name that is not a column leads into objects by its dots:
    `reward_model.ground_truth`."""

    prompt: str = Field(
        default="prompt",
        min_length=1,
        description="Column with the prompt: a text, or a list of chat messages.",
    )
    label: str | None = Field(
        default="label",
        min_length=1,
        description="Column with the label that the reward compares with. Rows may lack the column "
        "`label`, but no column of another name. null: there is no label.",
    )
    metadata: str | None = Field(
        default=None,
        min_length=1,
        description="Column with an object that becomes the prompt's metadata; null: all other columns.",
    )


class SourceConfig(Section):
    """One of several prompt files."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the source in metrics and messages."
    )
    path: PathSetting = Field(description="As `data.path`.")
    columns: ColumnsConfig | None = Field(
        default=None, description="Without the section, the source has the columns of the section around it."
    )
    prompt_template: PromptTemplate | None = Field(
        default=None, description="Template of this source; null: the template of the section around it."
    )


class WeightedSourceConfig(SourceConfig):
    """One of several prompt files to train on."""

    weight: float | None = Field(
        default=None,
        gt=0,
        description="Share of the prompts that come from this source, relative to the other weights. Give "
        "a weight to every source or to none. null: the source's number of prompts, so that all prompts "
        "come equally often.",
    )


class PromptsConfig(Section):
    """Prompt files: one `path`, or several named ones."""

    path: PathSetting | None = Field(
        default=None,
        description="Prompt file (.jsonl or .parquet), several of them (`part-*.parquet`), or a data set "
        "of the Hugging Face Hub (`hf://datasets/OWNER/NAME/FOLDER`).",
    )
    max_prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Largest number of tokens of a prompt, as the chat template writes it. Longer prompts "
        "are left out and counted. null: none is left out, and a prompt without room for a completion is "
        "an error.",
    )


class DataConfig(PromptsConfig):
    """The prompts to train on: `path` or `sources`. docs/data.md shows files, columns, mixtures and
    templates, with examples."""

    sources: list[WeightedSourceConfig] = Field(
        default=[],
        description="A list, in place of `data.path`: `sources: [{name: math, path: "
        "math.jsonl, weight: 3}, ...]`. The order of prompts follows from the weights and the seed of the "
        "run alone, and metrics count each source.",
    )
    columns: ColumnsConfig = Field(default=ColumnsConfig())
    prompt_template: PromptTemplate | None = Field(
        default=None,
        description="Text of the prompt with columns in braces, in place of `columns.prompt`: `Solve: "
        "{question}`. null: the column is the prompt.",
    )
    shuffle: bool = Field(
        default=True, description="Take the prompts in random order instead of the order of the file."
    )


class EvalConfig(PromptsConfig):
    """Mean reward of completions of held-out prompts, before, during and after training. Give `path` or
    `sets`."""

    sets: list[SourceConfig] = Field(
        default=[],
        description="A list, in place of `eval.path`: `sets: [{name: gsm8k, path: gsm8k.parquet}, ...]`. "
        "Each set has a mean reward of its own: `eval/reward_NAME`.",
    )
    columns: ColumnsConfig | None = Field(
        default=None, description="Without the section, held-out prompts have the columns of `data.columns`."
    )
    prompt_template: PromptTemplate | None = Field(
        default=None, description="As `data.prompt_template`; null: the template of `data`."
    )
    every: int = Field(
        default=0,
        ge=0,
        description="Number of training steps between two evaluations; 0: no evaluation during training.",
    )
    before_training: bool = Field(
        default=True,
        description="Evaluate the initial policy before the first training step. A resumed run does so "
        "only if no earlier start has evaluated it.",
    )
    max_prompts: int | None = Field(
        default=None, ge=1, description="Largest number of prompts of each file to evaluate on; null: all."
    )
    n_samples_per_prompt: int = Field(
        default=1,
        ge=1,
        description="Number of completions of each prompt. More than one needs `eval.sampling.temperature` "
        "above 0, and adds the metrics `eval/avg_at_N` and `eval/pass_at_K`.",
    )
    sampling: EvalSamplingConfig = Field(default=EvalSamplingConfig())


@dataclass(frozen=True)
class PromptFile:
    """A prompt file with everything that says how it is read."""

    path: Path
    """Several files if it has a ``*``; files on the hub if ``is_on_hub``."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    template: str | None = None
    name: str = ""
    """Name of the source. Empty: there are no others."""
    setting: str = ""
    """The setting that names the file, for messages."""
    weight: float | None = None


def data_files(data: DataConfig | None) -> list[PromptFile]:
    """Return the files to train on: none, one, or one for each source."""
    if data is None:
        return []
    if not data.sources:
        path = [] if data.path is None else [data.path]
        return [PromptFile(each, data.columns, data.prompt_template, "", "data.path") for each in path]
    return [
        PromptFile(
            each.path,
            each.columns or data.columns,
            each.prompt_template or (None if each.columns else data.prompt_template),
            each.name,
            f"data.sources.{place}.path",
            each.weight,
        )
        for place, each in enumerate(data.sources)
    ]


def how_held_out(evaluation: EvalConfig | None, data: DataConfig | None) -> tuple[ColumnsConfig, str | None]:
    """Return the columns and the template of held-out prompts: their own, or else those of ``data``."""
    template = evaluation.prompt_template if evaluation is not None else None
    if evaluation is not None and evaluation.columns is not None:
        return evaluation.columns, template
    if data is None:
        return ColumnsConfig(), template
    return data.columns, template or data.prompt_template


def eval_files(evaluation: EvalConfig | None, data: DataConfig | None) -> list[PromptFile]:
    """Return the files to evaluate on. ``data``: says how they are read where ``evaluation`` does not."""
    if evaluation is None:
        return []
    columns, template = how_held_out(evaluation, data)
    if not evaluation.sets:
        path = [] if evaluation.path is None else [evaluation.path]
        return [PromptFile(each, columns, template, "", "eval.path") for each in path]
    return [
        PromptFile(
            each.path,
            each.columns or columns,
            each.prompt_template or (None if each.columns else template),
            each.name,
            f"eval.sets.{place}.path",
        )
        for place, each in enumerate(evaluation.sets)
    ]
