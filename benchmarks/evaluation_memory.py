"""Memory of an evaluation as the data grows: a causal language model with a vocabulary of 50,000.

    python benchmarks/evaluation_memory.py

Kept logits would take length x 50,000 x 4 bytes per text: 25.6 MB for 128 tokens. Each size is evaluated in a process
of its own; the table has the memory that it took at most (resident set), and how much more than for the fewest texts.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

THIS_FILE = Path(__file__).resolve()
SOURCE = THIS_FILE.parents[1] / "src"
RESULTS = THIS_FILE.parent / "results" / "evaluation_memory.md"
WORDS, LENGTH = 50_000, 128


def make_model(folder: Path) -> None:
    """Write a small GPT-2 with a large vocabulary, and a tokenizer with a token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(WORDS - 1)} | {"<end>": WORDS - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    config = GPT2Config(
        vocab_size=WORDS,
        bos_token_id=WORDS - 1,
        eos_token_id=WORDS - 1,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=1,
        n_head=2,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)


def write_texts(path: Path, rows: int) -> None:
    """Write texts of `LENGTH` words, one per line."""
    lines = (" ".join(f"w{(row * 31 + place * 7) % (WORDS - 1)}" for place in range(LENGTH)) for row in range(rows))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def child(model: str, run: str, texts: str) -> None:
    """Evaluate, and print the memory taken at most."""
    import loopwright

    if not Path(run).exists():
        loopwright.train(
            "causal-lm", data=texts, model=model, output_dir=run, max_steps=1, batch=2, per_device_eval_batch_size=4,
            quiet=True, rehearsal=False, use_cpu=True,
        )  # fmt: skip
        return
    result = loopwright.evaluate(run, texts)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write("\n" + json.dumps({"peak": peak, "loss": result["loss"]}) + "\n")


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[50, 200, 800])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        figures = []
        for rows in (options.rows[0], *options.rows):
            texts = folder / f"{rows}.txt"
            write_texts(texts, rows)
            command = [
                sys.executable,
                str(THIS_FILE),
                "--child",
                str(folder / "model"),
                str(folder / "run"),
                str(texts),
            ]
            environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr)
            if done.stdout.strip().startswith("{") or "\n{" in done.stdout:
                figures.append((rows, json.loads(done.stdout.strip().splitlines()[-1])))
    first = figures[0][1]["peak"]
    lines = [
        f"`python benchmarks/evaluation_memory.py`: vocabulary {WORDS:,}, {LENGTH} tokens per text, batch 4, CPU, "
        f"Python {platform.python_version()}.",
        "",
        "| texts | logits of all of them | peak memory of the process | more than for the fewest |",
        "|--:|--:|--:|--:|",
    ]
    for rows, figure in figures:
        kept = rows * LENGTH * WORDS * 4 / 1e6
        more = (figure["peak"] - first) / 1e6
        lines.append(f"| {rows:,} | {kept:,.0f} MB | {figure['peak'] / 1e6:,.0f} MB | {more:+,.1f} MB |")
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
