"""From settings to a finished run folder: `settings`, `start`, `job`, `finish`. It knows tasks only through `Task`."""
