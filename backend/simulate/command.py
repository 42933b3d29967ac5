"""``slipstream simulate``: simulates, and writes tables, JSON and pictures."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from slipstream.backend.monitor.tables import table_console
from slipstream.backend.simulate.clock import Deadlock
from slipstream.backend.simulate.compare import compare
from slipstream.backend.simulate.gpu_split import model_of
from slipstream.backend.simulate.inputs import Derive, Options, read
from slipstream.backend.simulate.report import Report, as_json, print_report
from slipstream.backend.simulate.world import SimulationStalled

JSON_FILE, PICTURE = "simulation.json", "timeline.png"


class SimulationFailed(RuntimeError):
    """The simulated run does not get through. The message says which coroutines wait for what."""


def run(options: Options, derive: Derive) -> None:
    """Print tables or JSON to standard output, and write files into ``options.out``.

    ``derive``: gives the costs of a recipe by the split of the GPUs.
    Raises RecipeError with every problem of the input, and SimulationFailed.
    """
    works, fitted = read(options, derive)
    try:
        with Console(stderr=True, highlight=False).status("simulating") as status:
            comparisons = tuple(compare(work, lambda text: status.update(Text(text))) for work in works)
    except (SimulationStalled, Deadlock) as error:
        raise SimulationFailed(str(error)) from None
    report = Report(works[0], fitted, comparisons)
    if options.out is not None:
        _write(report, options.out)
    if options.as_json:
        print(as_json(report), end="")
    else:
        print_report(report, table_console())


def _write(report: Report, folder: Path) -> None:
    """Write the JSON document, and a picture for each size of the cluster."""
    from slipstream.backend.simulate.picture import draw  # matplotlib takes a second to load

    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON_FILE).write_text(as_json(report), encoding="utf-8")
    config, rollout = report.work.config, report.work.config.rollout
    for comparison in report.comparisons:
        outcome, layout = comparison.outcome, comparison.layout
        subtitle = (
            f"simulated: eta {rollout.max_head_offpolicyness}, {rollout.consumption.type}, "
            f"{config.weights.interrupt}; {outcome.tokens_per_s:,.0f} trained tokens/s, "
            f"trainer idle {outcome.trainer_idle:.0%}, engines idle {outcome.engine_idle:.0%}"
        )
        full = min(model_of(config).engine.max_running, -(-rollout.max_concurrent // layout.engines))
        picture = draw(comparison.timeline, f"{config.run.name} on {layout}", subtitle, full)
        name = f"timeline-{layout.gpus}-gpus.png" if len(report.comparisons) > 1 else PICTURE
        (folder / name).write_bytes(picture)
