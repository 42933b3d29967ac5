"""Live users: an endpoint for their clients, and the turns of their conversations as training data."""
