"""The run itself: what it is built from, its four loops, and how it ends."""
