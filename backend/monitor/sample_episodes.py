"""Trained episodes of the newest step as markdown, for TensorBoard's page of texts, from the episode log."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slipstream.rollout.ledger.episode_log.files import COLLECTORS, episode_files

TAIL_BYTES = 256 * 1024
"""Bytes that are read from the end of each writer's newest file."""

LONGEST_TEXT = 2000
"""Characters of a prompt or a response. The middle of a longer one is left out."""

EVERY_S = 60.0
"""Seconds between two texts: TensorBoard keeps few of them, and the event file all."""

Row = Mapping[str, Any]


class EpisodeSamples:
    """Used from one thread."""

    def __init__(self, run: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._shown_step = 0
        self._shown_s = -EVERY_S

    def metrics(self) -> dict[str, str]:
        """Return a text if there is a newer step than in the last one, and that was some time ago."""
        if self._clock() - self._shown_s < EVERY_S:
            return {}
        rows = list(_newest_rows(self._run))
        step = max((row["step"] for row in rows), default=0)
        if step <= self._shown_step:
            return {}
        self._shown_step, self._shown_s = step, self._clock()
        return {"run/episodes": episodes_text(step, [row for row in rows if row["step"] == step])}


def _newest_rows(run: Path) -> Iterator[Row]:
    """Yield the last rows of each rank."""
    of_ranks = (path for path in episode_files(run) if not path.name.startswith(COLLECTORS))
    newest = {path.name.partition("-")[0]: path for path in of_ranks if path.suffix == ".jsonl"}
    for path in newest.values():
        try:
            with path.open("rb") as file:
                start = max(0, file.seek(0, 2) - TAIL_BYTES)
                file.seek(start)
                lines = file.read().split(b"\n")
        except FileNotFoundError:  # it has just become one of parquet, or was the oldest
            continue
        # The first line may lack its beginning, and the last one its end.
        for line in lines[bool(start) : -1]:
            row = json.loads(line)
            if row.get("reward") is not None:
                yield row


def episodes_text(step: int, rows: list[Row]) -> str:
    """Return the worst, the best and the stalest of the episodes of a step as markdown."""
    worst = min(rows, key=lambda row: row["reward"])
    best = max(rows, key=lambda row: row["reward"])
    # Of equally stale ones, an episode that is not shown yet.
    stalest = max(rows, key=lambda row: (row.get("head_lag") or 0, row is not worst and row is not best))
    titles: dict[int, str] = {}
    for title, row in (("lowest reward", worst), ("highest reward", best), ("largest lag", stalest)):
        titles[id(row)] = f"{titles[id(row)]}, {title}" if id(row) in titles else title
    shown = [_shown(titles[id(row)], row) for row in rows if id(row) in titles]
    return "\n\n".join([f"**Step {step}**", *shown])


def _shown(title: str, row: Row) -> str:
    lag = row.get("head_lag")
    facts = [
        f"reward {row['reward']:g}",
        f"lag {'-' if lag is None else lag}",
        f"{row['response_tokens']} tokens",
        str(row["finish"]),
        f"group {row['group']}, episode {row['episode']}",
    ]
    return f"**{title}**: {', '.join(facts)}\n\n{_block(row['prompt'])}\n\n{_block(row['response'])}"


def _block(text: str) -> str:
    """Return a text as a block of code, whatever backticks are in it."""
    if len(text) > LONGEST_TEXT:
        half = LONGEST_TEXT // 2
        text = f"{text[:half]}\n[... {len(text) - LONGEST_TEXT:,} characters ...]\n{text[-half:]}"
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
