"""The processes that the driver starts and keeps alive: engines, collectors, gateways."""
