"""The bounds of each part, and whether its figures keep them. Pure: figures in, verdicts out.

A bound on a figure of a GPU (rates, distances in bfloat16, pauses) is not judged in a dry run: the verdict is
None then. Whether a command ends well, its audit is clean and its lag is within the bound is judged anywhere.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.one_gpu.figures import Ended, Figures

MAX_STALL_S = 1.0
MAX_STALL_LARGE_S = 2.0
"""For 1.2 GB of weights."""
MAX_DISTANCE = 0.01
"""Mean distance of the log-probs, bfloat16 against bfloat16."""
MAX_DISTANCE_RATIO = 1.5
"""Of Transformer Engine's layers and plain ones, either way."""
MIN_SPEED_UP = 1.1
"""Asynchronous over synchronous. One GPU is shared, so twice the rate cannot be asked. Tokens and time are
those of whole runs of as many steps: a rate over some of an asynchronous run's steps would count tokens
that were sampled before them, or none at the end, when nothing is left to sample."""
MAX_FP8_RATIO = 5.0
"""Distance of an engine in fp8 over that of one in bfloat16."""
MIN_MFU = {"f-32k": 0.390, "f-8k": 0.395}
"""MFU that one H100 had (docs/benchmarks.md)."""


@dataclass(frozen=True)
class Verdict:
    """A bound, and whether it is kept."""

    bound: str
    """In words, with the value that was found."""
    kept: bool | None
    """None: not judged."""


def verdicts(part: str, ended: Mapping[str, Ended], *, dry: bool = False) -> list[Verdict]:
    """Return a verdict for each bound of a part. ``ended``: its commands, by name."""
    figures = {name: command.figures for name, command in ended.items()}
    found = [Verdict(f"{name} ends well", not command.failed) for name, command in ended.items()]
    if part != "f":
        found += [verdict for name in ended for verdict in _sound(name, figures[name])]
    measured = list(OF_PART[part](figures))
    return found + ([Verdict(verdict.bound, None) for verdict in measured] if dry else measured)


def passed(found: Sequence[Verdict]) -> bool:
    """True if no bound is broken."""
    return all(verdict.kept is not False for verdict in found)


def _sound(name: str, figures: Figures) -> Iterator[Verdict]:
    yield _at_most(f"{name}: discrepancies of the audit", figures.get("discrepancies"), 0)
    if "lag_bound" in figures:
        yield _at_most(f"{name}: largest lag", figures.get("lag"), figures["lag_bound"])


def _by_turns(figures: Mapping[str, Figures]) -> Iterator[Verdict]:
    first = figures["a-turns"]
    before, after = first.get("accuracy_before"), first.get("accuracy_after")
    if before is None or after is None:
        yield Verdict("a-turns: the accuracy rises: not measured", False)
    else:
        yield Verdict(f"a-turns: the accuracy rises: {before:.1%} -> {after:.1%}", after > before)
    for name in figures:
        yield _at_most(f"{name}: pause for a version, s", figures[name].get("stall_s"), MAX_STALL_S)


def _at_one_time(figures: Mapping[str, Figures]) -> Iterator[Verdict]:
    yield from ()  # the audit and the lag, which are judged for every run


def _distances(figures: Mapping[str, Figures]) -> Iterator[Verdict]:
    for name in figures:
        yield _at_most(f"{name}: mean distance", figures[name].get("distance_mean"), MAX_DISTANCE)
    for name in figures:
        if name.startswith("c-transformer_engine-"):
            other = name.replace("transformer_engine", "local")
            ratio = _ratio(figures[name], figures[other], "distance_mean")
            either_way = None if ratio is None else max(ratio, 1 / ratio)
            yield _at_most(f"{name} and {other}: ratio of distances", either_way, MAX_DISTANCE_RATIO)


def _large(figures: Mapping[str, Figures]) -> Iterator[Verdict]:
    speed_up = _ratio(figures["d-async"], figures["d-sync"], "run_tokens_per_s")
    yield _at_least("asynchronous over synchronous tokens/s", speed_up, MIN_SPEED_UP)
    for name in figures:
        yield _at_most(f"{name}: pause for a version, s", figures[name].get("stall_s"), MAX_STALL_LARGE_S)


def _fp8(figures: Mapping[str, Figures]) -> Iterator[Verdict]:
    ratio = _ratio(figures["e-fp8"], figures["e-bf16"], "distance_mean")
    yield _at_most("distance in fp8 over bfloat16", ratio, MAX_FP8_RATIO)


def _mfu(figures: Mapping[str, Figures]) -> Iterator[Verdict]:
    for name, least in MIN_MFU.items():
        yield _at_least(f"{name}: MFU", figures[name].get("mfu"), least)


OF_PART: dict[str, Callable[[Mapping[str, Figures]], Iterator[Verdict]]] = {
    "a": _by_turns,
    "b": _at_one_time,
    "c": _distances,
    "d": _large,
    "e": _fp8,
    "f": _mfu,
}


def _ratio(over: Figures, under: Figures, name: str) -> float | None:
    if not over.get(name) or not under.get(name):
        return None
    return over[name] / under[name]


def _at_most(what: str, value: float | None, most: float) -> Verdict:
    if value is None:
        return Verdict(f"{what}: not measured (at most {most:g})", False)
    return Verdict(f"{what}: {value:.3g} (at most {most:g})", value <= most)


def _at_least(what: str, value: float | None, least: float) -> Verdict:
    if value is None:
        return Verdict(f"{what}: not measured (at least {least:g})", False)
    return Verdict(f"{what}: {value:.3g} (at least {least:g})", value >= least)
