"""Services that show the metrics of runs. Each has a queue and a thread of its own.

metrics log ──► queue of MOST_RECORDS ──► thread ──► Weights & Biases, MLflow

Their packages are optional, and imported in the thread. A service never disturbs the run: the run's loop
waits for nothing, an outage is reported once, and records that do not fit into the queue meanwhile are
missing there.
"""
