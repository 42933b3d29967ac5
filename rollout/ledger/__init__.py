"""The durable account of every group: no prompt is lost, and none is trained twice."""
