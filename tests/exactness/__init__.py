"""Random conversations through everything from the endpoint to the batch, against the engines' records."""
