"""Ray, with the settings of a run. Ray reads them when it is imported, so import it from here only.

    from slipstream.backend.cluster.configured_ray import ray

In a Slurm job (RAY_ADDRESS is set) the cluster's own settings come from slurm/train.sbatch.
"""

import os
import secrets

if "RAY_ADDRESS" not in os.environ:
    # A secret of this run's own. Without one, Ray keeps a token in the user's home folder.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # By this Ray has a node of its own on loopback, as on a Mac. Told the address 127.0.0.1 alone, Ray
    # replaces it by the machine's and listens on every interface.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # No port: Ray's autoscaler would tell everybody who asks how busy the cluster is.
    os.environ["AUTOSCALER_METRIC_PORT"] = "-1"
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# An engine's server cleans up when its actor is gone (rollout/engine/launch.py). Ray would kill the server
# before it could.
os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "false")

import ray
import ray.exceptions
import ray.util.scheduling_strategies

if "RAY_ADDRESS" not in os.environ:
    from ray._private.node import Node

    # Three programs that a cluster of one run has no use for, and that ray.init cannot leave out: the server
    # of the dashboard, which starts without a dashboard too, what sends workers' output to the driver, and
    # the autoscaler. Each takes most of a second of a core, and ray.init waits for the first.
    Node.start_api_server = Node.start_log_monitor = Node.start_monitor = lambda self, **_: None

__all__ = ["ray"]
