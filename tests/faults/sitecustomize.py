"""Put on the PYTHONPATH of a run, this does harm to weight buckets of its trainer: ``SLIPSTREAM_FAULT``.

    corrupt:5     the fifth bucket that is broadcast arrives with noise in it
    hold:5:PATH   it is sent once there is no file PATH any more, which is made when its turn comes; a bucket
                  that goes to a single engine is passed over

Several, separated by commas.

Python imports a module of this name in every process, before anything else.
"""

import importlib.abc
import importlib.util
import itertools
import os
import sys
import time

TARGET = "slipstream.bridge.transport.rendezvous"


def harmful(send):
    corrupt, hold = set(), {}
    for fault in os.environ["SLIPSTREAM_FAULT"].split(","):
        what, number, *path = fault.split(":")
        if what == "corrupt":
            corrupt.add(int(number))
        else:
            hold[int(number)] = path[0]
    numbers = itertools.count(1)

    def replacement(self, flat):
        number = next(numbers)
        if number in corrupt:
            flat = flat.clone()
            flat[: len(flat) // 50] *= -1
        if self._rendezvous.world_size > 2:
            for path in [hold.pop(due) for due in sorted(hold) if due <= number]:
                open(path, "w").close()
                while os.path.exists(path):
                    time.sleep(0.01)
        send(self, flat)

    return replacement


class _Loader(importlib.abc.Loader):
    def __init__(self, loader) -> None:
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module) -> None:
        self._loader.exec_module(module)
        module.BroadcastGroup.send = harmful(module.BroadcastGroup.send)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        spec.loader = _Loader(spec.loader)
        return spec


if "SLIPSTREAM_FAULT" in os.environ:
    sys.meta_path.insert(0, _Finder())
