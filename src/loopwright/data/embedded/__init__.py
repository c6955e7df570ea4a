"""Demo data that needs no network and no download, for the nine text tasks.

    from loopwright.data.embedded import TASKS, find_minilm, load_demo, write_demo

    demo = load_demo("question-answering")      # demo.train, demo.validation: lists of dicts; demo.fingerprint
    paths = write_demo("translation", "dates")  # paths of "train", "validation" (csv here) and "notes" (demo.json)
    minilm = find_minilm()                      # minilm.folder for from_pretrained, or None and minilm.problem

Columns and files, by task:

    text-classification    text, label                                   csv
    token-classification   tokens, ner_tags (IOB2: PARAM, EXC, VALUE)    jsonl
    question-answering     id, question, context, answers (as SQuAD)     jsonl
    causal-lm, masked-lm   text                                          jsonl
    multiple-choice        sent1, sent2, ending0 to ending3, label       csv
    summarization          document, summary                             jsonl
    sentence-embedding     anchor, positive                              csv
    translation            source, target                                csv

The texts are the docstrings of the running Python's own standard library (`stdlib_docs`) and generated dates (`dates`);
`dates.written_dates` gives more of these, without end. Training and validation share no function name (language
modelling: no module; areas: no paragraph; dates: no day). Nothing here imports torch.
"""

from __future__ import annotations

from loopwright.data.embedded.demo_data import DemoData
from loopwright.data.embedded.minilm import MiniLM, find_minilm
from loopwright.data.embedded.writing import TASKS, load_demo, write_demo

__all__ = ["TASKS", "DemoData", "MiniLM", "find_minilm", "load_demo", "write_demo"]
