"""How often Python looks for garbage in a process with many living objects.

Python looks at its young objects whenever 700 more of them have been made than freed, and every tenth time at
older ones. A collector has dozens of objects for each of its thousands of episodes, nearly all of which end
by reference counting. Looking at them took up to half of its time.
"""

import gc

THRESHOLDS = (50_000, 10, 10)
"""Objects that are made, less those that are freed, before Python looks at the young ones; the other two are
Python's own: times that it does so before it looks at the middle-aged ones, and they at all."""


def look_seldom_for_garbage() -> None:
    """Look less often, and never again at what exists now. Call it when all modules are imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
