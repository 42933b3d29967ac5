"""Memory of a gateway and of the driver's live users over many turns: ``python -m tests.gateway_memory``."""
