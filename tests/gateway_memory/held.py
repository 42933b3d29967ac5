"""What the code of a process holds: its objects by class, and the lengths of the containers in them."""

import gc
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator

PACKAGE = "slipstream."
CONTAINERS = (dict, list, set, deque, OrderedDict, Counter)


def held() -> Counter[str]:
    """Return the number of living objects of each class of the product, and of things in their containers."""
    gc.collect()
    counts: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        module = getattr(kind, "__module__", None)
        if not isinstance(module, str) or not module.startswith(PACKAGE):
            continue
        name = f"{module.removeprefix(PACKAGE)}.{kind.__qualname__}"
        counts[name] += 1
        for attribute, value in _attributes(thing):
            if isinstance(value, CONTAINERS):
                counts[f"{name}.{attribute}"] += len(value)
    return counts


def _attributes(thing: object) -> Iterator[tuple[str, object]]:
    yield from getattr(thing, "__dict__", {}).items()
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if hasattr(thing, name):
                yield name, getattr(thing, name)
