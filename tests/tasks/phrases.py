"""Small made-up phrases and articles for the tests of summarization and translation, and tiny encoder-decoders."""

import random
from pathlib import Path

COLOURS = {
    "red": "rot",
    "blue": "blau",
    "green": "grün",
    "black": "schwarz",
    "white": "weiß",
    "brown": "braun",
    "grey": "grau",
    "pink": "rosa",
}
THINGS = {
    "house": "Haus",
    "tree": "Baum",
    "boat": "Boot",
    "horse": "Pferd",
    "table": "Tisch",
    "cloud": "Wolke",
    "stone": "Stein",
    "bridge": "Brücke",
}


def pairs(seed: int = 0) -> list[dict[str, str]]:
    """Return phrases of one or two words in two languages, in a random order; no two are alike."""
    made = [
        {"source": f"the {colour} {thing}", "target": f"{COLOURS[colour]} {THINGS[thing]}"}
        for colour in COLOURS
        for thing in THINGS
    ]
    made += [{"source": f"the {thing}", "target": THINGS[thing]} for thing in THINGS]
    random.Random(seed).shuffle(made)
    return made


def articles(count: int = 60, seed: int = 0) -> list[dict[str, str]]:
    """Return documents of three sentences, and a summary that says what the second is about."""
    chosen = random.Random(seed)
    made = []
    for number in range(count):
        thing = chosen.choice(list(THINGS))
        document = f"It was day {number} of the year. Somebody saw a {thing} there. Nothing else came to pass."
        made.append({"document": document, "summary": f"News about a {thing}."})
    return made


def tiny_t5(folder: Path, texts: list[str], generation: dict | None = None, **options) -> Path:
    """Write a T5 of a few thousand weights with a tokenizer, and return its folder."""
    from transformers import T5Config, T5ForConditionalGeneration

    from loopwright.tasks.text.seq2seq import train_tokenizer

    tokenizer = train_tokenizer(texts, "subwords", 400)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **sizes, **options)
    model = T5ForConditionalGeneration(config)
    model.generation_config.update(**(generation or {}))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
