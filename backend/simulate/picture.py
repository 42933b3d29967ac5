"""The timeline of a simulated run as a PNG: the whole run above, a few steps of it below."""

from slipstream.backend.monitor.figure import Chart, Figure, Lane, Span, draw_timeline
from slipstream.backend.monitor.units import clock_face
from slipstream.backend.simulate.timeline import Timeline

TRAINING, WAITING, PUBLISHING = (38, 84, 160), (233, 236, 239), (240, 140, 0)
IDLE, SOME, FULL = (241, 243, 245), (150, 222, 209), (9, 120, 105)
ENGINE_SCALE = {0.0: IDLE, 0.05: SOME, 1.0: FULL}
"""Colours by the share of an engine's places that are taken: from 5 % on it visibly works."""

WIDTH, LEFT, RIGHT = 2400, 250, 70
TRAINER_HEIGHT, GAP = 58, 8
ENGINES_HEIGHT, ENGINE_HEIGHT = 420, 56
"""Largest height of all engine lanes together, and of one lane."""
HEAD, ABOVE, BELOW, FOOT = 150, 90, 90, 70
"""Space for the title, for the heading of a part, for its clock, and for the legend."""

NAMED_VERSIONS = 16
"""Largest number of versions whose names fit above the trainer."""

ZOOMED_STEPS = 4
"""Number of steps that the lower part shows."""


def draw(timeline: Timeline, title: str, subtitle: str, max_running: int) -> bytes:
    """Return a PNG. An engine that runs ``max_running`` requests is drawn as full."""
    lane_height = min(ENGINE_HEIGHT, ENGINES_HEIGHT / len(timeline.rows))
    lanes_height = TRAINER_HEIGHT + GAP + lane_height * len(timeline.rows)
    part_height = ABOVE + lanes_height + BELOW
    figure = Figure(WIDTH, round(HEAD + 2 * part_height + FOOT), title, subtitle)
    trainer = Lane(
        "trainer",
        TRAINER_HEIGHT,
        {WAITING: [(0.0, timeline.end_s)], PUBLISHING: timeline.pauses, TRAINING: timeline.training},
    )
    for number, (heading, (begin_s, end_s)) in enumerate(_parts(timeline).items()):
        top = HEAD + number * part_height
        figure.text((LEFT, top + 6), heading, size=30)
        frame = Chart(figure, LEFT, top + ABOVE, WIDTH - RIGHT, top + ABOVE + lanes_height, (begin_s, end_s))
        running = timeline.running(begin_s, end_s, WIDTH - LEFT - RIGHT) / max_running
        engines = [
            Lane(name, lane_height, {PUBLISHING: timeline.pauses}, levels)
            for name, levels in zip(timeline.rows, running, strict=True)
        ]
        versions = {
            resumed_s: f"v{version}"
            for version, (_, resumed_s) in enumerate(timeline.pauses, start=1)
            if begin_s <= resumed_s <= end_s
        }
        marks = versions if len(versions) <= NAMED_VERSIONS else dict.fromkeys(versions, "")
        draw_timeline(frame, [trainer, Lane("", GAP), *engines], ENGINE_SCALE, marks)
    figure.legend(
        (LEFT, HEAD + 2 * part_height),
        (
            ("box", TRAINING, "training"),
            ("box", WAITING, "trainer waits for a batch"),
            ("box", PUBLISHING, "publishing: engines paused"),
            ("box", IDLE, "engine idle"),
            ("box", SOME, "few requests"),
            ("box", FULL, f"{max_running} requests run"),
        ),
    )
    return figure.png()


def _parts(timeline: Timeline) -> dict[str, Span]:
    """Return the whole run, and some steps from its middle, from publication to publication."""
    ends = [end_s for _, end_s in timeline.pauses]
    first = max(len(ends) // 2 - ZOOMED_STEPS // 2, 0)
    last = min(first + ZOOMED_STEPS, len(ends) - 1)
    begin_s, begin_version = (ends[first], first + 1) if last > first else (0.0, 0)
    return {
        f"the whole run: {len(ends)} steps in {clock_face(timeline.end_s)}": (0.0, timeline.end_s),
        f"from version {begin_version} to version {last + 1}": (begin_s, ends[last]),
    }
