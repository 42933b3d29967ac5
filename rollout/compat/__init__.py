"""Code of other projects that Slipstream runs unchanged: a room for each."""
