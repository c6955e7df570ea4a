"""How an update is run: eagerly or as CUDA graphs, and in smaller parts when memory runs out."""
