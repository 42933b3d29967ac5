"""A hook of a trainer's rank that notes the files of each version, for the test that reads them."""

import json
import os
from pathlib import Path


def note(args, version_dir, rollout_engines):
    """Note what is in the folder of a version before an engine reads it, and whom it is for."""
    files = {path.name: path.stat().st_size for path in Path(version_dir).iterdir()}
    seen = {
        "folder": Path(version_dir).name,
        "files": files,
        "engines": [str(each) for each in rollout_engines],
    }
    with Path(os.environ["SLIME_VERSIONS_SEEN"]).open("a") as file:
        file.write(json.dumps(seen) + "\n")
