"""The durable account of every prompt instance: nothing is lost, and nothing is trained twice."""
