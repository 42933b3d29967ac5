"""The machines of a run, and the settings of a site that all recipes share."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from slipstream.configs.schema.base import Section


def _matching(pattern: str, expected: str) -> AfterValidator:
    """Return a check of a text, or of each item of a list. ``expected``: what the user is told."""

    def check(value: str | list[str]) -> str | list[str]:
        wrong = [
            item for item in ([value] if isinstance(value, str) else value) if not re.fullmatch(pattern, item)
        ]
        if wrong:
            found = "" if isinstance(value, str) else f", and found {', '.join(map(repr, wrong))}"
            raise ValueError(f"expected {expected}{found}")
        return value

    return AfterValidator(check)


_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*"

SlurmName = Annotated[str, _matching(_NAME, "one name, of letters, digits and `_.@+-`")]
SlurmNames = Annotated[str, _matching(rf"{_NAME}(,{_NAME})*", "a name, or several with commas and no spaces")]
GresName = Annotated[
    str,
    _matching(
        r"[A-Za-z_]\w*(:(\d*[A-Za-z][A-Za-z0-9_.-]*|\d{3,}))?",  # gpu:h100, gpu:1g.10gb, gpu:3090
        "a name such as `gpu` or `gpu:h100`, without a number, which the recipe gives",
    ),
]
Modules = Annotated[
    list[str], _matching(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]*", "names of modules, such as `cuda/12.8`")
]
Interfaces = Annotated[
    str,
    _matching(
        r"[A-Za-z0-9_.-]{1,15}(,[A-Za-z0-9_.-]{1,15})*",
        "the name of an interface as `ip link` shows it, or several with commas and no spaces",
    ),
]
NodeFolder = Annotated[
    str,
    _matching(
        r"/[A-Za-z0-9_./-]{0,13}",
        "an absolute path of at most 14 characters, letters, digits and `_.-/`, such as `/scratch`",
    ),
]


class _Hardware(Section):
    gpu_memory_gib: float | None = Field(
        default=None,
        gt=0,
        description="Memory of each GPU in GiB, as `nvidia-smi` reports it: 79 for an H100 of 80 GB. "
        "`slipstream plan` compares its estimate with this number, and `slipstream check` refuses a recipe "
        "that cannot fit. null: neither.",
    )
    file_system_bytes_per_s: float = Field(
        default=5e9,
        gt=0,
        description="Bytes per second that all nodes together write to the file system of `run.root`. The "
        "default is an assumption: give the rate of yours. Only `slipstream plan`, `check` and `simulate` "
        "read it, to estimate the time of checkpoints, and of versions with `weights.transport.type: disk`.",
    )


class _Machines(_Hardware):
    device: Literal["auto", "cpu", "gpu"] = Field(
        default="auto", description="Device of trainer and engines. `auto`: GPUs if the machine has any."
    )


class LocalCluster(_Machines):
    """A Ray cluster on this machine, which starts and ends with the run."""

    type: Literal["local"] = "local"


class ContainerConfig(Section):
    """The container image in which every process of a Slurm job runs. `slipstream submit` starts it, and
    docs/install.md says how such an image is made."""

    runtime: Literal["apptainer", "pyxis"] = Field(
        description="Program that runs the image: `apptainer`, also under its name `singularity`, or Slurm's "
        "plugin `pyxis` with enroot."
    )
    image: str = Field(
        min_length=1,
        description="Image as every node sees it: a .sif file for `apptainer`, a .sqsh file for `pyxis`.",
    )
    mounts: list[str] = Field(
        default=[],
        description="Further folders that the container shows: `SOURCE`, or `SOURCE:TARGET`. The folder of "
        "submission and the folders that the recipe names are always shown.",
    )


class SiteConfig(_Hardware):
    """What a Slurm site wants of every job.

    `slipstream submit` reads it from the file that `SLIPSTREAM_SITE` names, or else from
    `~/.config/slipstream/site.yaml`; `plan` and `check` read what they estimate with. The same settings in
    `cluster` of a recipe replace the site's.
    """

    account: SlurmName | None = Field(
        default=None, description="Account that the job is charged to (`sbatch --account`)."
    )
    partition: SlurmNames | None = Field(
        default=None, description="Partition, or several with commas (`sbatch --partition`)."
    )
    qos: SlurmName | None = Field(default=None, description="Quality of service (`sbatch --qos`).")
    gpus_per_node: int = Field(default=8, ge=1, description="Number of GPUs that a node has.")
    gres: GresName | None = Field(
        default=None,
        description="Name under which the site counts GPUs, such as `gpu` or `gpu:h100`, with no number. The "
        "job then asks for `--gres=NAME:NUMBER`. `none`: Slurm counts no GPUs here, and the job asks for "
        "none and uses those of its nodes. null: it asks for `--gpus-per-node=NUMBER`.",
    )
    container: ContainerConfig | None = Field(
        default=None,
        description="Without the section, the job uses an environment on the nodes' file system.",
    )
    modules: Modules = Field(
        default=[],
        description="Modules that every node loads before anything else (`module load`), in order.",
    )
    network_interface: Interfaces | None = Field(
        default=None,
        description="Network interface of the nodes, or several with commas, for the sockets of NCCL and "
        "gloo (`NCCL_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME`). null: that of each node's address in Ray.",
    )
    node_disk: NodeFolder | None = Field(
        default=None,
        description="Folder on a local disk of every node for Ray's sockets, logs and spilled objects, of at "
        "most 14 characters, since Linux allows no long path for sockets below it. null: `/tmp`.",
    )
    restarts: int = Field(
        default=5,
        ge=0,
        description="Number of times in a row that Slurm may start the job again without a new checkpoint of "
        "the run. One more restart ends the job, with what has ended each start.",
    )


class _Nodes(_Machines):
    trainer_nodes: int | None = Field(
        default=None,
        ge=1,
        description="Number of nodes for the trainer; the engines get the other nodes. null: both share the "
        "node of a cluster of one node, and all nodes with `rollout.engine.colocated`; otherwise 1.",
    )


class SlurmCluster(SiteConfig, _Nodes):
    """The Ray cluster that slurm/train.sbatch has started in this job. RAY_ADDRESS holds its address."""

    type: Literal["slurm"] = "slurm"


class RayCluster(_Nodes):
    """A Ray cluster that others have started, and that goes on when the run ends. RAY_ADDRESS holds its
    address. GPUs that are in use when the run starts are left alone."""

    type: Literal["ray"] = "ray"


Cluster = Annotated[LocalCluster | SlurmCluster | RayCluster, Field(discriminator="type")]
