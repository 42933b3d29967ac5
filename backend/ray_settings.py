"""Ray's settings for a cluster of this run's own. Ray reads them when it is imported: import this first.

In a Slurm job (RAY_ADDRESS is set) they belong to slurm/train.sbatch.
"""

import os
import secrets

if "RAY_ADDRESS" not in os.environ:
    # A secret of this run's own. Without one, Ray keeps a token in the user's home folder.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# An engine's server cleans up behind itself when its actor is gone (rollout/engine/launch.py); Ray would
# kill it before it could.
os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "false")
