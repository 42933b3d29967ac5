"""The ledger of a running run: events go in on the event loop, and one thread writes them."""
