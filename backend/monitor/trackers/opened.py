"""The trackers that a recipe names."""

from collections.abc import Callable
from importlib.util import find_spec

from slipstream.backend.monitor.trackers.mlflow import MlflowTracker
from slipstream.backend.monitor.trackers.queued import QueuedTracker
from slipstream.backend.monitor.trackers.wandb import WandbTracker
from slipstream.configs.schema import LogConfig, RunConfig


def open_trackers(config: RunConfig, recipe: str, note: Callable[[str], None]) -> list[QueuedTracker]:
    """Start the trackers of a recipe. ``recipe``: its text. ``note``: tells the user something."""
    run, folder, log = config.run.name, config.run.folder, config.log
    trackers: list[QueuedTracker] = []
    if log.wandb is not None:
        tracker = WandbTracker(log.wandb, run, folder, config.model_dump(mode="json"))
        trackers.append(QueuedTracker(tracker, note, timeout_s=log.wandb.timeout_s))
    if log.mlflow is not None:
        tracker = MlflowTracker(log.mlflow, run, folder, recipe)
        trackers.append(QueuedTracker(tracker, note, timeout_s=log.mlflow.timeout_s))
    return trackers


def missing_packages(log: LogConfig) -> list[str]:
    """Return what a recipe's trackers lack in this environment, for people."""
    problems: list[str] = []
    for name in ("wandb", "mlflow"):
        if getattr(log, name) is not None and find_spec(name) is None:
            package = "mlflow-skinny" if name == "mlflow" else name
            problems.append(
                f"log.{name}: the package {name} is not installed in this environment, expected for the "
                f"section: `pip install {package}`, or remove the section"
            )
    return problems
