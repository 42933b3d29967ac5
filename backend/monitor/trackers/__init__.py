"""Services that show the metrics of runs, each behind a queue and a thread of its own.

metrics log ──► queue of MOST_RECORDS ──► thread ──► Weights & Biases, MLflow

Their packages are optional, and imported in the thread. What the service does never reaches the run: its loop
waits for nothing, an outage is told once, and what does not fit the queue meanwhile is left out there.
"""
