"""The terminal output of a run: start block, status line, evaluation table, end; and its events as JSON."""
