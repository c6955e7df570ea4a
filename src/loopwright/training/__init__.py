"""A run, as objects: `run.TrainingRun` holds the parts, and each part owns one thing.

`boundary` serves requests between two updates, `logbook` writes logs, `checkpoints` and `resume` save and restore,
`evaluation` evaluates, `losses` turns batch losses into updates, `prepare` checks the arguments and prepares a run.
"""
