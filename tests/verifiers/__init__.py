"""Episodes of environments of verifiers, which need a Python with that library: `make test-verifiers`."""
