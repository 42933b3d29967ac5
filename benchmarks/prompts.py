"""A large prompt set: seconds and memory of checking it, of reading it at a start, and of looking prompts up.

    python -m benchmarks.prompts

Each measurement has a process of its own, whose memory is that beyond the imports and the tokenizer. The
length filter counts the tokens of every eighth prompt, which is long enough to be beyond the limit of 350.
"""

import json
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet

from benchmarks.harness import parser, peak_mb, reset_peak
from slipstream.backend.commands.prompt_survey import Survey
from slipstream.backend.driver.start.inputs import data_problems, named_files, read_source
from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.configs.load import load_recipe
from slipstream.configs.schema import DataConfig, RunConfig
from slipstream.rollout.prompts import PromptSet, PromptStream
from slipstream.rollout.tokens.tokenizer import load_tokenizer

CONTEXT = 4096
MOST_TOKENS = 350
LOOKED_UP = 10_000


@dataclass(frozen=True)
class Measured:
    """One row of the table."""

    what: str
    file: str
    cpu_s: float
    memory_mb: float


def rows(count: int) -> Iterator[dict[str, object]]:
    """Yield prompts of 100 to 280 characters, every eighth of them longer, as verl writes them."""
    draw = random.Random(0)
    for number in range(count):
        digits = "".join(draw.choices("0123456789+", k=draw.randint(100, 280) * (1 + 3 * (number % 8 == 0))))
        yield {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": digits}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"split": "train", "index": number},
        }


def write(folder: Path, count: int) -> list[Path]:
    """Write the set in both formats."""
    lines, table = folder / "train.jsonl", folder / "train.parquet"
    with lines.open("w") as file:
        for row in rows(count):
            file.write(json.dumps(row) + "\n")
    writer, batch = None, list[dict[str, object]]()
    for number, row in enumerate(rows(count), 1):
        batch.append(row)
        if len(batch) == 20_000 or number == count:
            chunk = pyarrow.Table.from_pylist(batch)
            writer = writer or pyarrow.parquet.ParquetWriter(table, chunk.schema)
            writer.write_table(chunk)
            batch.clear()
    assert writer is not None
    writer.close()
    return [lines, table]


def recipe_of(path: Path, most: int | None) -> RunConfig:
    """Return the quickstart with other prompts."""
    config = load_recipe(Path("quickstart"))
    columns = {"label": "reward_model.ground_truth"}
    data = {"path": str(path), "columns": columns, "max_prompt_tokens": most}
    return config.model_copy(update={"data": DataConfig.model_validate(data), "eval": None})


def check(path: Path, model: Path, most: int | None) -> int:
    """Do what ``slipstream check`` does with the set."""
    [named] = named_files(recipe_of(path, most))
    tokenizer = load_tokenizer(model)
    survey = Survey(named.file.setting, tokenizer, None)
    problems, _ = data_problems(named, tokenizer, CONTEXT, survey.see)
    assert not problems, problems[:3]
    return 0


def start(path: Path, model: Path, most: int | None) -> PromptStream:
    """Do what a start does with the set, and look up the first prompt."""
    [named] = named_files(recipe_of(path, most))
    source = read_source(named, load_tokenizer(model), CONTEXT, 0)
    stream = PromptStream(PromptSet([source]), shuffle=True, seed=0)
    stream.at(0)
    return stream


def look_up(path: Path, model: Path, most: int | None) -> Callable[[], object]:
    """Return what looks prompts up in a set that was read."""
    stream = start(path, model, most)
    return lambda: [stream.at(position) for position in range(LOOKED_UP)]


def measure(what: str, path: Path, model: Path, most: int | None) -> Measured:
    """Measure in this process."""
    load_tokenizer(model)  # with its imports
    if what == "look up 10,000":
        act = look_up(path, model, most)
    else:
        act = partial(check if what.startswith("check") else start, path, model, most)
    before, began = reset_peak(), _cpu_s()
    act()
    return Measured(what, path.suffix, round(_cpu_s() - began, 1), round(peak_mb() - before))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, default=1_000_000)
    count = options.parse_args().prompts
    began, measured = time.monotonic(), list[Measured]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_tokenizer().save_pretrained(folder)
        for path in write(folder, count):
            for what, most in (
                ("check", None),
                ("check, with the length filter", MOST_TOKENS),
                ("start", None),
                ("start, with the length filter", MOST_TOKENS),
                ("look up 10,000", None),
            ):
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    row = pool.apply(measure, (what, path, folder, most))
                measured.append(replace(row, file=f"{row.file}, {path.stat().st_size >> 20} MB"))
                print(
                    f"{row.what:<32} {row.file:<10} {row.cpu_s:6.1f} s of CPU {row.memory_mb:6.0f} MB",
                    flush=True,
                )
    seconds = round(time.monotonic() - began)
    print(json.dumps({"prompts": count, "seconds": seconds, "rows": [asdict(row) for row in measured]}))


if __name__ == "__main__":
    main()
