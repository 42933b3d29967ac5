"""Metrics on Weights & Biases. Names stay as they are: W&B groups by the part before the first slash."""

import uuid
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.backend.monitor.metrics import MetricsRecord
from slipstream.backend.monitor.tensorboard import HistogramBucket
from slipstream.backend.monitor.trackers.queued import tracked_id
from slipstream.configs.schema.log import WandbConfig

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
