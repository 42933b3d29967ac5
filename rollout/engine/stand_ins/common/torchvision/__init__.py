"""Import-only torchvision: text serving calls no function of it."""

import enum

__version__ = "0.0.0+cpu"


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def unavailable(module):
    """Return a module-level ``__getattr__``: every name exists, and raises when called."""

    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            raise NotImplementedError(f"{module}.{name} needs the real torchvision")

        return call

    return __getattr__
