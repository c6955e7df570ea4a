"""Settings found by trial: batch size, learning rate, number of updates that fit into a time."""
