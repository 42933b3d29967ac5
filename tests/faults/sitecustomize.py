"""Put on the PYTHONPATH of a run, this does harm to what its trainer sends: ``SLIPSTREAM_FAULT``.

    corrupt:5     the fifth version after the start arrives with noise in it, in every engine of that time
    hold:5:PATH   the fifth or a later version is sent to engine-0 once there is no file PATH any more;
                  the file is made when its turn comes
    break:1       the first version is not sent to any engine: each rank raises in its place
    abort:1       each rank ends its process in its place, as NCCL's watchdog does
    exhaust:1     rank 1 asks for more memory than there is in each training step

Several, separated by commas.

Python imports a module of this name in every process, before anything else.
"""

import importlib.abc
import importlib.util
import os
import sys
import time

SENDER = "slipstream.bridge.transport.sender"
RANK = "slipstream.backend.trainer.rank"


def harmful(send):
    corrupt, broken, aborted, hold = set(), set(), set(), {}
    for fault in os.environ["SLIPSTREAM_FAULT"].split(","):
        what, number, *path = fault.split(":")
        if what == "corrupt":
            corrupt.add(int(number))
        elif what == "break":
            broken.add(int(number))
        elif what == "abort":
            aborted.add(int(number))
        elif what == "hold":
            hold[int(number)] = path[0]
    versions = {}

    def replacement(self, engine, command):
        name = command.engine
        versions[name] = number = versions.get(name, 0) + 1
        is_first = list(versions).index(name) < 2
        if number in corrupt and is_first:
            give = engine.peers.send

            def spoiled(messages):
                give([(member, flat * -1) for member, flat in messages[:1]] + list(messages[1:]))

            engine.peers.send = spoiled
        if number in broken:
            raise RuntimeError("NCCL error: unhandled system error")
        if number in aborted:
            os.abort()
        # A restarted engine counts anew.
        total = max(versions.values()) if is_first else sum(versions.values()) // 2
        if name.startswith("engine-0/"):
            for path in [hold.pop(due) for due in sorted(hold) if due <= total]:
                if os.path.exists(f"{path}.once"):
                    continue  # a trainer that was started again
                open(f"{path}.once", "w").close()
                open(path, "w").close()
                while os.path.exists(path):
                    time.sleep(0.01)
        try:
            return send(self, engine, command)
        finally:
            vars(engine.peers).pop("send", None)

    return replacement


def exhausting(train):
    ranks = [each.split(":")[1] for each in os.environ["SLIPSTREAM_FAULT"].split(",") if "exhaust" in each]

    def replacement(self, *arguments):
        import torch

        if str(torch.distributed.get_rank()) in ranks:
            torch.empty(1 << 50)
        return train(self, *arguments)

    return replacement


class _Loader(importlib.abc.Loader):
    def __init__(self, loader) -> None:
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module) -> None:
        self._loader.exec_module(module)
        if module.__name__ == SENDER:
            module.ShardSender._send = harmful(module.ShardSender._send)
        else:
            module.TrainerRank._train = exhausting(module.TrainerRank._train)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._targets = {SENDER, RANK}

    def find_spec(self, name, path, target=None):
        if name not in self._targets:
            return None
        self._targets.remove(name)
        spec = importlib.util.find_spec(name)
        spec.loader = _Loader(spec.loader)
        return spec


if "SLIPSTREAM_FAULT" in os.environ:
    sys.meta_path.insert(0, _Finder())
