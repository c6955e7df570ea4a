"""The text tasks, one file each, and their shared code: `models`, `samples`, `language_model`, `seq2seq`."""
