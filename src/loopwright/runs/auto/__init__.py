"""Settings that are found by trying: batch size, learning rate, updates that fit into a time."""
