"""What things are: models, clusters, layouts. Frozen data and arithmetic on it; standard library only."""
