"""The image tasks, one file each, and their shared code: `base`, `models`, `pictures`, `detection`."""
