"""Metrics on MLflow: numbers, and the recipe as a file. MLflow has no histograms."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from slipstream.backend.monitor.metrics import MetricsRecord
from slipstream.backend.monitor.trackers.queued import tracked_id
from slipstream.configs.schema.log import MlflowConfig

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
