"""Recipes that this machine cannot hold, and commands that start something else than a run."""

import os
import socket

from tests.wrong_inputs.case import WrongInput

CORES = len(os.sched_getaffinity(0))
TAKEN = socket.create_server(("127.0.0.1", 0))
"""Somebody else's server."""
PORT = TAKEN.getsockname()[1]

CASES = (
    WrongInput(
        "far more engines than cores",
        ("rollout.engine.count", f"{32 * CORES} (rollout.engine", f"at most {8 * CORES}", "use fewer"),
        overrides=(f"rollout.engine.count={32 * CORES}",),
    ),
    WrongInput(
        "far more trainer ranks than cores",
        ("actor.parallel", f"trainer ranks {32 * CORES}", f"{CORES} CPU cores of this machine"),
        overrides=(f"actor.parallel.data={32 * CORES}", f"rollout.batch_size={32 * CORES}"),
    ),
    WrongInput(
        "more engines than memory, at the start of a run",
        ("rollout.engine.count: engine processes 5000", "GiB of memory, and this machine has"),
        arguments=("train", "FOLDER/recipe.yaml"),
        overrides=("rollout.engine.count=5000",),
    ),
    WrongInput(
        "GPUs on a machine without any",
        ("cluster.device is gpu, but no node of the cluster has one",),
        arguments=("train", "FOLDER/recipe.yaml"),
        overrides=("cluster={type: local, device: gpu}",),
    ),
    WrongInput(
        "a port in use",
        ("gateway.port", f"port {PORT} of 127.0.0.1 is in use", "set gateway.port to another port"),
        arguments=("serve", "FOLDER/recipe.yaml"),
        overrides=(f"gateway={{port: {PORT}}}",),
    ),
    WrongInput(
        "an address of another machine",
        ("gateway.port: nobody can listen on 203.0.113.7", "expected an address of this machine"),
        arguments=("serve", "FOLDER/recipe.yaml"),
        overrides=("gateway={host: 203.0.113.7}",),
    ),
    WrongInput(
        "keys of users that cannot be read",
        ("gateway.keys", "FOLDER/my.keys.json"),
        arguments=("serve", "FOLDER/recipe.yaml"),
        overrides=("gateway={keys: FOLDER/my.keys.json}",),
        files={"my.keys.json": "{"},
    ),
    WrongInput(
        "nodes without GPUs for a recipe that needs them",
        ("--gpus-per-node: 0 found", "cluster.device is gpu"),
        arguments=("submit", "FOLDER/recipe.yaml", "--gpus-per-node", "0", "--print"),
        overrides=("cluster.device=gpu",),
    ),
    WrongInput(
        "an engine that no node can hold",
        ("rollout.engine.tensor_parallel", "4 GPUs", "node of 2 (--gpus-per-node)"),
        arguments=("submit", "FOLDER/recipe.yaml", "--gpus-per-node", "2"),
        overrides=("rollout.engine.tensor_parallel=4",),
    ),
    WrongInput(
        "a time limit that is none",
        ("--time", "soon"),
        arguments=("submit", "FOLDER/recipe.yaml", "--time", "soon", "--print"),
    ),
    WrongInput(
        "a container of an unknown program",
        ("cluster.container.runtime = 'docker'", "expected 'apptainer' or 'pyxis'"),
        arguments=("submit", "FOLDER/recipe.yaml", "--print"),
        overrides=("cluster.container={runtime: docker, image: FOLDER/no.sif}",),
    ),
    WrongInput(
        "an option that has no meaning",
        ("--accept-changed-inputs has no meaning without --resume",),
        arguments=("train", "FOLDER/recipe.yaml", "--accept-changed-inputs"),
    ),
    WrongInput(
        "a run of Slurm outside of a job",
        ("cluster.type", "slurm", "slipstream submit"),
        arguments=("train", "FOLDER/recipe.yaml"),
        overrides=("cluster={type: slurm}",),
    ),
    WrongInput(
        "a cluster of others without its address",
        ("cluster.type", "ray", "RAY_ADDRESS"),
        arguments=("train", "FOLDER/recipe.yaml"),
        overrides=("cluster={type: ray}",),
    ),
)
