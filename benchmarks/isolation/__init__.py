"""Isolation: no loop of a run waits for another. Each is disturbed in turn, and the others are watched."""
