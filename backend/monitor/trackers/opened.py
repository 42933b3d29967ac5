"""The trackers that a recipe names."""

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.backend.monitor.metrics import MetricsRecord
from slipstream.backend.monitor.tensorboard import HistogramBucket
from slipstream.backend.monitor.trackers.queued import QueuedTracker, tracked_id
from slipstream.configs.schema import LogConfig, RunConfig
from slipstream.configs.schema.log import MlflowConfig, WandbConfig

VERSION = "version"
"""The x-axis of every metric. W&B's own counter would refuse an evaluation that ends after a later step."""


class WandbTracker:
    """A run on Weights & Biases. A run that is resumed goes on with its own."""

    setting = "log.wandb"

    def __init__(self, settings: WandbConfig, run: str, folder: Path, recipe: Mapping[str, object]) -> None:
        """``run``: name of the run. ``recipe``: shown as its configuration."""
        self._settings, self._name, self._folder, self._recipe = settings, run, folder, recipe
        self._wandb: Any = None
        self._run: Any = None

    def start(self) -> None:
        wandb: Any = import_module("wandb")
        settings, self._wandb = self._settings, wandb
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name or self._name,
            group=settings.group,
            dir=str(self._folder),
            id=tracked_id(self._folder, "wandb", lambda: uuid.uuid4().hex),
            resume="allow",
            config=dict(self._recipe),
            mode=settings.mode,
            settings=wandb.Settings(
                silent=True,
                console="off",  # the terminal is the progress display's
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,  # process/ has these
                init_timeout=settings.timeout_s,
                login_timeout=settings.timeout_s,
                finish_timeout=settings.timeout_s,
            ),
        )
        self._run.define_metric(VERSION)
        self._run.define_metric("*", step_metric=VERSION)

    def log(self, record: MetricsRecord) -> None:
        values: dict[str, object] = {VERSION: record.step, **record.scalars}
        for name, buckets in record.histograms.items():
            if buckets:
                values[name] = self._wandb.Histogram(np_histogram=counts_and_edges(buckets))
        self._run.log(values)

    def finish(self) -> None:
        self._run.finish()


def counts_and_edges(buckets: Sequence[HistogramBucket]) -> tuple[np.ndarray, np.ndarray]:
    """Return buckets of integers as ``numpy.histogram`` does; the bucket of k spans k-1/2 to k+1/2."""
    edges = [buckets[0].first - 0.5, *(bucket.last + 0.5 for bucket in buckets)]
    return np.array([bucket.count for bucket in buckets]), np.array(edges)


MOST_IN_BATCH = 1000
"""Metrics that MLflow takes in one request."""


class MlflowTracker:
    """A run on MLflow. A run that is resumed goes on with its own."""

    setting = "log.mlflow"

    def __init__(self, settings: MlflowConfig, run: str, folder: Path, recipe: str) -> None:
        """``run``: name of the run. ``recipe``: YAML."""
        self._settings, self._name, self._folder, self._recipe = settings, run, folder, recipe
        self._client: Any = None
        self._metric: Any = None
        self._id = ""

    def start(self) -> None:
        # Its own retries take a quarter of an hour; this tracker has some of its own.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(max(1, round(self._settings.timeout_s))))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        entities: Any = import_module("mlflow.entities")
        tracking: Any = import_module("mlflow.tracking")
        self._metric, self._client = entities.Metric, tracking.MlflowClient(self._settings.tracking_uri)
        self._id = tracked_id(self._folder, "mlflow", self._new_run)
        self._client.update_run(self._id, status="RUNNING")

    def _new_run(self) -> str:
        settings = self._settings
        experiment: Any = self._client.get_experiment_by_name(settings.experiment)
        experiment_id = (
            self._client.create_experiment(settings.experiment)
            if experiment is None
            else experiment.experiment_id
        )
        run: Any = self._client.create_run(experiment_id, run_name=settings.name or self._name)
        self._client.log_text(run.info.run_id, self._recipe, "recipe.yaml")
        return run.info.run_id

    def log(self, record: MetricsRecord) -> None:
        milliseconds = round(record.time * 1000)
        metrics = [
            self._metric(mlflow_name(name), float(value), milliseconds, record.step)
            for name, value in record.scalars.items()
        ]
        for start in range(0, len(metrics), MOST_IN_BATCH):
            self._client.log_batch(self._id, metrics=metrics[start : start + MOST_IN_BATCH])

    def finish(self) -> None:
        self._client.set_terminated(self._id)


def mlflow_name(tag: str) -> str:
    """Return the name of a tag: `episode/calls/min` becomes `episode/calls min`.

    MLflow may keep a metric as a file: `episode/calls` cannot be a file and a folder.
    """
    section, slash, name = tag.partition("/")
    return section + slash + name.replace("/", " ")


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
