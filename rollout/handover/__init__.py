"""The way of live turns from gateways to the driver, and of routing records back."""
