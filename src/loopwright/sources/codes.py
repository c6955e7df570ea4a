"""The codes of all errors about what the user gave, each with the sentence that `lw explain errors` prints.

A code stands as a literal where its `InputError` is raised. Layers above this one add theirs here. Tests go through the
sources and assert that each code is listed, that none is listed in vain, and that each is triggered by a test.
"""

from __future__ import annotations

CODES: dict[str, str] = {
    "args.metric": "The metric that is to decide which model is best is not one of the task's.",
    "args.task": "There is no task of this name, or none was named.",
    "args.unknown": "A flag, a setting or a verb has a name that is not known.",
    "args.value": "A value was given that this option does not take, or two options that exclude each other.",
    "checkpoint.none": "A run has no checkpoint, or none that can be trusted.",
    "checkpoint.write": "A checkpoint could not be written or is not what was saved.",
    "data.answers": "An answer does not stand in its context at the place that is stated, or has no usable form.",
    "data.changed": "A data file was changed, cut or replaced while it was being read.",
    "data.column": "A column could not be found, or could not be guessed without doubt.",
    "data.duplicate_column": "Two columns of one file have the same name, so neither can be asked for.",
    "data.empty": "A file holds no bytes, or nothing but blanks.",
    "data.encoding": "A file is not written in UTF-8.",
    "data.ending": "The ending of a file name says nothing that can be read.",
    "data.file": "A file or folder does not exist, or may not be read.",
    "data.folder": "A folder holds no data files, or several for the same split.",
    "data.gzip": "A gz file is damaged, or too large to be read without unpacking it.",
    "data.hub": "A dataset of the Hub could not be loaded.",
    "data.json": "A JSON file is damaged, or holds something other than rows.",
    "data.label_type": "The labels of one column are of several kinds, such as numbers and words.",
    "data.labels": "The labels of one split do not fit those of the training split, or there are too many of them.",
    "data.long_row": "A row is longer than 10 MB, which is nearly always a damaged file.",
    "data.missing": "Rows lack a value that the task needs.",
    "data.no_rows": "A file has a header, or brackets, but no row.",
    "data.nul": "A text file holds NUL bytes, so it is damaged or no text.",
    "data.one_class": "All labels are the same, so there is nothing to learn.",
    "data.quote": "A quote is opened in a csv file and never closed.",
    "data.ragged": "Rows have more or fewer fields than the file has columns.",
    "data.split": "There are too few rows to hold some back for validation, or a split is left without rows.",
    "data.tags": "A sentence has another number of tags than of tokens.",
    "data.value": "A value is not of the kind that its role needs.",
    "disk.write": "The disk refused to take a file.",
    "install.extra": "A package that is needed for this is not installed.",
    "loss.nan": "The loss was not a finite number, so the run was stopped.",
    "memory.train": "The model and its batch need more memory than there is.",
    "model.folder": "The folder of a model does not exist, or holds nothing that can be opened.",
    "model.length": "More tokens are asked for than the model has positions for.",
    "model.mask_token": "The tokenizer has no mask token, which masked-lm needs.",
    "model.offline": "A model is neither a folder nor in the Hub's cache, and the Hub gave no answer.",
    "model.pad_token": "The tokenizer has no token to fill up short rows with.",
    "model.task": "The model was made for another task, or is of a kind that cannot do this one.",
    "model.tokenizer": "The tokenizer of a model cannot be opened.",
    "resume.data": "A data file is no longer what it was when the run started.",
    "run.exists": "The folder for a new run is in use.",
    "run.unknown": "There is no run of this name.",
}
