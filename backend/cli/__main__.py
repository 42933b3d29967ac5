"""Runs the command line as ``python -m slipstream.backend.cli``."""

from slipstream.backend.cli import main

if __name__ == "__main__":
    main()
