"""The tasks with images, a file each, and what they share: `base`, `models`, `pictures`, `detection`."""
