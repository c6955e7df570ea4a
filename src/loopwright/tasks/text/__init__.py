"""The tasks with texts, a file each, and what they share: `models`, `samples`, `language_model`, `seq2seq`."""
