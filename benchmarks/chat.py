"""Tuning a decoder on conversations on a GPU: loopwright beside transformers.Trainer and trl's SFTTrainer.

    python benchmarks/chat.py                                    full tuning and LoRA, to results/chat.md
    python benchmarks/chat.py --settings full --sides trl loopwright-eager
    python benchmarks/chat.py --tiny --output /tmp/tiny.md       whether every side runs

A 0.6 B decoder (the config of Qwen3-0.6B) with random weights, on generated conversations whose lengths are spread as
in real data: log-normal, with a median of some 400 tokens and a maximum of 4096. All sides train on the same tokens,
with the loss on the assistant's turns. `full` has weights in fp32, `lora` a bf16 base with r = 16 on every linear layer
and adapters in fp32; both run with bf16 autocast, fused AdamW and no gradient checkpointing. Tokens per second count
real tokens, without padding.

loopwright is what `lw train chat` runs. It and trl pack conversations into rows of 4096 tokens, one row per micro-batch
and four per update, or four at once (`-flat`). trl puts them into one flat row; sdpa gets a mask that keeps
conversations apart, as transformers builds it from the positions, and the mask grows with the square of the flat row.
trl recommends flash attention, which is a package of its own; `trl-flex` has flex attention instead.
transformers.Trainer pads batches of 4 conversations: with 8, the full logits of the longest would not fit.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from decoders import IS_HALF, Clock, decoder, run_sides

SETTINGS = {"full": "0.6 B decoder, full tuning", "lora": "0.6 B decoder, LoRA r = 16"}
WARM_UP = 6
PACKED_ROWS, PADDED_ROWS = 4, 4  # of an update
WORDS, VOCABULARY, PAD = 400, 4_096, "<|pad|>"


class Counting:
    """A collate function that counts the real tokens of each batch."""

    def __init__(self, collate: Callable[..., Any], pad_id: int, counts: list[int]) -> None:
        self._collate, self._pad_id, self._counts = collate, pad_id, counts

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        self._counts.append(int((batch["input_ids"] != self._pad_id).sum()))
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collate, name)


def prepare(name: str, is_tiny: bool, folder: str) -> dict[str, Any]:
    """Write conversations, their encoded samples, and a model with its tokenizer, for all sides of a setting."""
    from loopwright.data.chats import ChatDataset

    place, width = Path(folder), width_of(is_tiny)
    if not (place / "chats.jsonl").exists():
        rows = generated_chats(150 if is_tiny else 900, width)
        (place / "chats.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in rows))
        tokenizer = create_tokenizer(rows)
        tokenizer.save_pretrained(place / "tokenizer")
        samples = [*ChatDataset([{"messages": turns} for turns in rows], tokenizer, max_length=width)]
        (place / "samples.json").write_text(json.dumps(samples))
    torch.manual_seed(0)
    model = decoder(is_tiny, VOCABULARY if is_tiny else 151_936)
    (model.bfloat16() if name == "lora" else model).save_pretrained(place / name)
    shutil.copytree(place / "tokenizer", place / name, dirs_exist_ok=True)
    return {}


def width_of(is_tiny: bool) -> int:
    return 256 if is_tiny else 4096


@dataclass
class Work:
    """What a side trains: the files that `prepare` wrote."""

    name: str
    is_tiny: bool
    folder: Path
    clock: Clock = field(init=False)
    counts: list[int] = field(default_factory=list)  # real tokens of each micro-batch
    accumulated: int = 1

    def __post_init__(self) -> None:
        self.width = width_of(self.is_tiny)
        self.clock = Clock(WARM_UP, 4 if self.is_tiny else 16)
        self.chats, self.model_folder = self.folder / "chats.jsonl", self.folder / self.name

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model_folder)

    @cached_property
    def samples(self) -> list[dict[str, list[int]]]:
        """The conversations as every side but `lw train chat` gets them: ids, and labels of the assistant's tokens."""
        found: list[dict[str, list[int]]] = json.loads((self.folder / "samples.json").read_text())
        return found

    def load_model(self, attention: str = "sdpa") -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.model_folder, attn_implementation=attention)
        return model.to("cuda" if IS_HALF else "cpu")

    def begin(self, model: Any) -> None:
        lengths = [len(sample["input_ids"]) for sample in self.samples]
        self.clock.begin(model, sum(length**2 for length in lengths) / sum(lengths))

    def figures(self) -> dict[str, Any]:
        start, end = (each * self.accumulated for each in (self.clock.warm_up, self.clock.num_updates))
        return self.clock.figures(sum(self.counts[start:end]) / self.clock.timed)


def generated_chats(number: int, width: int) -> list[list[dict[str, str]]]:
    """Return conversations of one to five questions and answers; an answer is some three times as long."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(WORDS)]
    found = []
    for _ in range(number):
        size = min(draw.lognormvariate(0, 0.8) * 0.1 * width, 0.9 * width - 80)  # in words, of a token each
        pairs = draw.randint(1, 5)
        turns = []
        for _ in range(pairs):
            for role, share in (("user", 0.25), ("assistant", 0.75)):
                count = max(1, round(size * share / pairs))
                turns.append({"role": role, "content": " ".join(draw.choices(words, k=count))})
        found.append(turns)
    return found


def create_tokenizer(rows: list[list[dict[str, str]]]) -> Any:
    from transformers import PreTrainedTokenizerFast

    from loopwright.data.chats import resolve_template
    from loopwright.tasks.text.models import train_byte_pairs

    special = ["<|endoftext|>", PAD, "<|im_start|>", "<|im_end|>"]
    texts = (turn["content"] for turns in rows for turn in turns)
    pairs = train_byte_pairs(texts, VOCABULARY, special, prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token="<|im_end|>", pad_token=PAD)
    tokenizer.chat_template = resolve_template(tokenizer, "chatml").default
    return tokenizer


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def arguments_of(kind: Any, work: Work, rows: int, accumulated: int = 1, **more: Any) -> Any:
    work.accumulated = accumulated
    return kind(
        "output", max_steps=work.clock.num_updates, per_device_train_batch_size=rows, bf16=IS_HALF, report_to="none",
        gradient_accumulation_steps=accumulated, save_strategy="no", logging_steps=50, max_grad_norm=0.0,
        disable_tqdm=True, gradient_checkpointing=False, use_cpu=not IS_HALF, **more,
    )  # fmt: skip


def run_transformers(work: Work) -> None:
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    model = work.load_model()
    if work.name == "lora":
        from peft import get_peft_model

        model = get_peft_model(model, lora())
    if not work.is_tiny:
        work.clock.timed = 40  # batches of so few conversations differ
    pad = Counting(DataCollatorForSeq2Seq(work.tokenizer), work.tokenizer.pad_token_id, work.counts)
    arguments = arguments_of(TrainingArguments, work, PADDED_ROWS)
    trainer = Trainer(model, arguments, data_collator=pad, train_dataset=work.samples, callbacks=[ticks(work)])
    work.begin(model)
    trainer.train()


def ticks(work: Work) -> Any:
    from transformers import TrainerCallback

    class Ticks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            work.clock.tick()

    return Ticks()


def run_trl(work: Work, *, rows: int, attention: str = "sdpa") -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    more = {"packing": True, "max_length": work.width, "dataset_kwargs": None}
    arguments = arguments_of(SFTConfig, work, rows, PACKED_ROWS // rows, **more)
    trainer = SFTTrainer(
        work.load_model(attention), arguments, train_dataset=Dataset.from_list(work.samples), callbacks=[ticks(work)],
        processing_class=work.tokenizer, peft_config=lora() if work.name == "lora" else None,
    )  # fmt: skip
    trainer.data_collator = Counting(trainer.data_collator, work.tokenizer.pad_token_id, work.counts)
    work.begin(trainer.model)
    trainer.train()


def run_loopwright(work: Work, mode: str, rows: int = 1) -> None:
    """Train what `lw train chat` trains, without its evaluations and files."""
    from loopwright.callbacks import TrainerCallback
    from loopwright.runs.job import build_job, given_origin, load_data, make_optimizer, prepare_torch
    from loopwright.runs.settings import settle
    from loopwright.runs.trainer import TaskTrainer
    from loopwright.tasks import get_task
    from loopwright.tasks.data import RunData

    class Ticks(TrainerCallback):
        def on_update_end(self, trainer: Any, **kwargs: Any) -> None:
            work.clock.tick()

    task = get_task("chat")
    words = ["--data", str(work.chats), "--model", str(work.model_folder), "--packing"]
    words += ["--max_length", str(work.width), "--batch", str(rows), "--step_mode", mode]
    words += ["--bf16"] if IS_HALF else []
    words += ["--lora", "r=16,alpha=32"] if work.name == "lora" else []
    settings = settle(task, words, None)
    prepare_torch(settings)
    job = build_job(task, RunData(task.preflight(settings.args)), settings, given_origin(task, settings))
    load_data(job)
    trainer = TaskTrainer(job, make_optimizer(job), [Ticks])
    work.accumulated = PACKED_ROWS // rows
    work.begin(job.model)
    trainer.train(
        job.train_dataset, num_epochs=10, max_num_train_steps=work.clock.num_updates, step_mode=mode,
        per_device_batch_size=rows, gradient_accumulation_steps=work.accumulated,
        train_dataloader_kwargs={"num_workers": 0, "drop_last": True},
        collate_fn=Counting(job.collate_fn, job.processor.pad_token_id, work.counts),
        mixed_precision="bf16" if IS_HALF else "no",
    )  # fmt: skip
    work.clock.graphed = trainer.num_graphed_updates / trainer.progress.update


SIDES: dict[str, tuple[str, str, Callable[[Work], None]]] = {
    "loopwright-auto": ("loopwright, auto", "loopwright", lambda work: run_loopwright(work, "auto")),
    "trl": ("trl SFTTrainer, packed", "trl", lambda work: run_trl(work, rows=1)),
    "loopwright-flat": (
        "loopwright, auto, 4 rows at once",
        "loopwright",
        lambda work: run_loopwright(work, "auto", rows=PACKED_ROWS),
    ),
    "loopwright-compile": ("loopwright, compile", "loopwright", lambda work: run_loopwright(work, "compile")),
    "loopwright-compile-flat": (
        "loopwright, compile, 4 rows at once",
        "loopwright",
        lambda work: run_loopwright(work, "compile", rows=PACKED_ROWS),
    ),
    "transformers": ("transformers.Trainer, padded", "transformers", run_transformers),
    "trl-flat": ("trl SFTTrainer, packed, 4 rows at once", "trl", lambda work: run_trl(work, rows=PACKED_ROWS)),
    "trl-flex": (
        "trl SFTTrainer, packed, flex attention",
        "trl",
        lambda work: run_trl(work, rows=1, attention="flex_attention"),
    ),
    "loopwright-eager": ("loopwright, eager", "loopwright", lambda work: run_loopwright(work, "eager")),
}


def child(name: str, side: str, is_tiny: bool, folder: str) -> dict[str, Any]:
    """Measure one side; called in a process of its own."""
    work = Work(name, is_tiny, Path(folder))
    SIDES[side][2](work)
    return work.figures()


if __name__ == "__main__":
    run_sides(
        Path(__file__).resolve(),
        "Tuning a decoder on conversations",
        [(__doc__ or "").split("\n\n")[2].replace("\n", " "), (__doc__ or "").split("\n\n")[3].replace("\n", " ")],
        SETTINGS,
        {name: (title, package) for name, (title, package, _) in SIDES.items()},
        child,
        "trl",
        prepare,
    )
