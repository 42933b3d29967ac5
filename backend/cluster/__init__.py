"""Where processes run: placement on nodes, Ray, the actors, local ranks, and the guard that ends them all."""
