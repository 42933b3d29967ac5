"""Ways for a flat bucket of weights to reach the engines."""
