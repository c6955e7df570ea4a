"""token-classification: a tag for each word of a sentence, such as the names of persons and places."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Any

from loopwright.baselines import CopyInput, MostFrequentTags
from loopwright.metrics import Metric
from loopwright.metrics import load as load_metric
from loopwright.metrics.spans import OUTSIDE, as_iob2
from loopwright.sources import DataPlan, Role
from loopwright.tasks import scoring
from loopwright.tasks.arguments import ShortName, TaskArguments, TaskTrainingArguments, flag, flag_list
from loopwright.tasks.base import COMMON_DEFAULTS, Job, Origin, Rows, Task
from loopwright.tasks.class_options import weighed, weighted_loss
from loopwright.tasks.data import RowDataset, RunData
from loopwright.tasks.text import models as text
from loopwright.tasks.text.samples import tokens_of
from loopwright.tasks.text.tag_order import is_in_order, likeliest

AUTO_CLASS = "AutoModelForTokenClassification"
_SURE = 0.9  # confidence above which a contradicted tag is suspected
_NO_WORD = -1
_ORDER_ROWS = 10_000  # rows inspected for the order of their tags
_LETTERS = ("B-", "I-", "E-", "S-", "L-", "U-", "M-")


@dataclass
class TokenClassificationArguments(TaskArguments):
    tokens_column: str | None = flag(None, "Column of the words; inferred if unset.")
    tags_column: str | None = flag(None, "Column of the tags, one for each word.")
    label_all_tokens: bool = flag(
        False, "Train on all tokens of a word, not only on its first; those after B-X become I-X."
    )
    ordered_tags: bool | None = flag(
        None, "Predict I-X only after B-X or I-X; if unset, when the training data has no other I-X."
    )
    class_weights: list[str] = flag_list(
        "Weight of each class in the training loss: balanced, which favours rare classes, or A=2,B=0.5 (others: 1)."
    )
    max_length: int | None = flag(None, "Maximum number of tokens of a sentence; chosen from the data if unset.")

    text_column_name = ShortName("tokens_column", str)
    label_column_name = ShortName("tags_column", str)
    max_seq_length = ShortName("max_length", int)


class TokenClassification(Task):
    name = "token-classification"
    summary = "a tag for each word of a sentence, such as names or parts of speech"
    roles = (
        Role("tokens", "tokens", names=("tokens", "words")),
        Role("tags", "tags", names=("ner_tags", "tags", "ner", "labels", "pos_tags", "chunk_tags"), is_input=False),
    )
    explanation = {
        "data": "json, jsonl or parquet with a column of lists of words and a column of lists of tags; csv with "
        "spaces between words and between tags; conll or iob2 with a word and its tag per line.",
        "tags": "O, B-PER, I-PER, ... in IOB2, IOB1, BIOES or BILOU. Others, such as NOUN, are tags of single words.",
        "columns": "--tokens_column and --tags_column; inferred if they are clear.",
        "numbers": "--label_map 0=O 1=B-PER 2=I-PER names tags that are written as numbers.",
        "metric": "F1, precision and recall of entities, which must match in type and both ends, and the accuracy of "
        "tags; token_accuracy if the tags are not entities. The expected calibration error (ECE) of tags.",
    }
    example = "lw train token-classification --data ner.jsonl --model ./minilm --epochs 3 --batch 16 --lr 5e-5"
    pretrained, pretrained_megabytes = "distilbert/distilbert-base-cased", 263
    predicted = ("tags", "tokens")
    repeated = ("tokens",)
    arguments = TokenClassificationArguments
    defaults = {**COMMON_DEFAULTS, "learning_rate": 5e-5, "per_device_train_batch_size": 16}
    adapter_kind = "TOKEN_CLS"
    kept_flags = ("ordered_tags", "label_all_tokens")
    weighs_classes = True
    counts_labels = True
    not_inputs = ("position", "num_items", "words", "tags", "labels")
    demo = {"freeze": "3", "epochs": 2, "batch": 4, "lr": 4e-4, "warmup_steps": 0.1, "threads": 1}
    demo_model = "minilm"
    demo_rows = ("tag_rows", "tag_rows", "jsonl")
    demo_note = "which words of a docstring are parameters, exceptions, values: F1 0.72 (usual tag 0.49), 115 s"

    def preflight(self, args: Any, say: Callable[[Any], None] | None = None) -> DataPlan:
        plan = super().preflight(args, say)
        _create_metric(plan.label_names)
        return plan

    def baselines(self, job: Job) -> Mapping[str, Mapping[str, float]]:
        names, blind = job.label_names, {"majority": MostFrequentTags()}
        create = partial(_create_metric, names)

        def tags(row: Mapping[str, Any]) -> list[str]:
            return [names[number] for number in row["tags"]]

        scores = scoring.score_baselines(job.data, blind, lambda row: [""] * len(row["tokens"]), tags, create)
        if best := _best_tag(_tag_rows(job.data, names), names):
            constant = {f"always {best}": CopyInput()}
            scores |= scoring.score_baselines(job.data, constant, lambda row: [best] * len(row["tokens"]), tags, create)
        return scores | scoring.score_baselines(job.data, {"usual-tag": MostFrequentTags()}, "tokens", tags, create)

    def build(self, data: RunData, args: Any, training: TaskTrainingArguments, origin: Origin) -> Job:
        names = list(data.plan.label_names)
        changes = text.label_config(names)
        notes = []
        if origin.path is None:
            sentences = (" ".join(row["tokens"]) for row in data.each_row("train"))
            tokenizer = text.train_tokenizer(sentences, lowercase=False)
            loaded = text.small_encoder(AUTO_CLASS, tokenizer, **changes)
        else:
            tokenizer = text.load_tokenizer(origin.path)
            text.check_fast(tokenizer, origin.path)
            if _lacks_blanks(tokenizer):  # put a space before words, as in running text
                tokenizer = text.load_tokenizer(origin.path, add_prefix_space=True)
            before = text.load_config(origin.path)
            loaded = text.load_model(origin, AUTO_CLASS, **changes)
            if not origin.is_run:
                notes += _match_head(loaded.model, before, names)
        text.match_pad_token(loaded.model, tokenizer)
        if not origin.is_run:
            encode = Encoder(tokenizer, None, None)
            loaded.processor = tokenizer
            with text.quiet():
                rows = data.rows("train")
                notes.append(text.settle_length(args, loaded, rows, lambda row: len(encode(row)["input_ids"])))
            if args.ordered_tags is None:
                args.ordered_tags = _has_entities(names) and is_in_order(islice(_tag_rows(data, names), _ORDER_ROWS))
            if all(name.isdecimal() for name in names):
                notes.append("tags are numbers, so entities are unknown: name them with --label_map 0=O 1=B-PER ...")
        collator = Collator(tokenizer, text.padding_multiple(training))
        return Job(self, data, args, training, loaded.model, tokenizer, collator, notes, loaded.new)

    def create_dataset(self, job: Job, rows: Rows, *, is_labelled: bool, is_training: bool = False) -> Any:
        names, inner = job.label_names, None
        if is_labelled:
            inner = _inner_labels(names) if job.args.label_all_tokens else [text.IGNORED] * len(names)
        return RowDataset(rows, weighed(job, Encoder(job.processor, job.args.max_length, inner), is_training))

    def compute_loss(self, job: Job, model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        outputs = model(**self.model_inputs(batch))
        weighted = weighted_loss(job, batch, outputs.logits.transpose(1, 2))
        if weighted is not None:
            return weighted, outputs
        is_counted = batch["labels"] != text.IGNORED
        return text.token_losses(outputs.logits, batch["labels"]).sum() / is_counted.sum().clamp(min=1), outputs

    def create_scorer(self, job: Job) -> scoring.Scorer:
        names = job.label_names
        results = ("f1", "precision", "recall", "accuracy") if _has_entities(names) else ("token_accuracy",)
        scorer = scoring.MetricScorer(lambda: _create_metric(names), dict.fromkeys(results, True))
        return scoring.JointScorer([scorer, scoring.CalibrationScorer(), scoring.LossInterval()])

    def score_batch(self, job: Job, batch: Mapping[str, Any], outputs: Any) -> list[dict[str, Any]]:
        """Words beyond `max_length`, which the model has not seen, count as if nothing was found there."""
        names = job.label_names
        labels = batch["labels"]
        num_tokens = (labels != text.IGNORED).sum(-1)
        losses = text.token_losses(outputs.logits, labels).sum(-1) / num_tokens.clamp(min=1)
        given = [[names[tag] for tag in row if tag != text.IGNORED] for row in batch["tags"].tolist()]
        counts = [len(row) for row in given]
        found = _tags_of_words(outputs.logits, batch["words"], counts, names, is_ordered=bool(job.args.ordered_tags))
        samples = []
        columns = (batch["position"].tolist(), losses.tolist(), num_tokens.tolist(), given, found)
        for position, loss, number, tags, (predicted, shares) in zip(*columns, strict=True):
            sample = {"position": position, "prediction": predicted, "reference": tags, "loss": loss}
            sample |= {"num_target_tokens": number, "confidences": shares}
            wrong = [index for index, tag in enumerate(tags) if predicted[index] != tag and shares[index] >= _SURE]
            if wrong:
                surest = max(wrong, key=lambda index: shares[index])
                sample |= {"sure": shares[surest], "word": surest, "tag": tags[surest], "better": predicted[surest]}
            samples.append(sample)
        return samples

    def readable(self, job: Job, sample: Mapping[str, Any], row: Mapping[str, Any] | None) -> dict[str, Any]:
        if not _has_entities(job.label_names):
            return dict(sample)
        words = [] if row is None else row["tokens"]
        columns = {"entities": "prediction", "expected": "reference"}
        return {**sample, **{name: _spans(words, sample[column]) for name, column in columns.items()}}

    def describe_sample(self, job: Job, batch: Mapping[str, Any], index: int) -> list[tuple[str, str]]:
        names = job.label_names
        pieces: dict[int, tuple[list[int], int]] = {}
        columns = (batch[name][index].tolist() for name in ("input_ids", "words", "labels"))
        for token, word, label in zip(*columns, strict=True):
            if word != _NO_WORD:
                entry = pieces.setdefault(word, ([], label))
                entry[0].append(token)
        tagged = [
            f"{job.processor.decode(tokens).strip()}/{names[label]}"
            for tokens, label in pieces.values()
            if label != text.IGNORED and names[label] != OUTSIDE
        ]
        return [("text", tokens_of(job, batch, index)), ("tags", "  ".join(tagged) or "none")]

    def predict_batch(self, job: Job, model: Any, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        counts = [max(row) + 1 for row in batch["words"].tolist()]
        logits, is_ordered = model(**self.model_inputs(batch)).logits, bool(job.args.ordered_tags)
        found = _tags_of_words(logits, batch["words"], counts, job.label_names, is_ordered=is_ordered)
        return [{"tags": tags, "scores": shares} for tags, shares in found]

    def predict_rows(self, job: Job, rows: Rows) -> Iterator[dict[str, Any]]:
        """Yield the entities and the tags of each row; long rows are tagged in pieces, cut between words."""
        size, names = job.training.eval_batch_size, job.label_names
        encode = Encoder(job.processor, None, None)
        num_tokens = job.args.max_length - job.processor.num_special_tokens_to_add()
        for start in range(0, len(rows), size):
            sentences = [rows[index]["tokens"] for index in range(start, min(start + size, len(rows)))]
            pieces = [
                (number, piece)
                for number, words in enumerate(sentences)
                for piece in _pieces(words, encode, num_tokens)
            ]
            found: list[tuple[list[str], list[float]]] = [([], []) for _ in sentences]
            tagged = super().predict_rows(job, [{"tokens": piece} for _, piece in pieces])
            for (number, piece), part in zip(pieces, tagged, strict=True):
                # Trailing words without a token are missing from the answer.
                missing = len(piece) - len(part["tags"])
                found[number][0].extend([*part["tags"], *[_nothing(names)] * missing])
                found[number][1].extend([*part["scores"], *[0.0] * missing])
            for words, (tags, shares) in zip(sentences, found, strict=True):
                if not _has_entities(names):
                    yield {"tags": tags, "scores": [round(share, 6) for share in shares], "tokens": words}
                    continue
                spans = _spans(words, tags)
                for span in spans:
                    start, end = span["start"], span["end"]
                    span["score"] = round(sum(shares[start:end]) / (end - start), 6)
                yield {"entities": spans, "tags": tags, "tokens": words}


class Encoder:
    """Encodes a row in loader workers; `inner` is for each label that of a word's further tokens, None without labels.

    Features have "words": for the first token of each word its index, and -1 for all other tokens.
    """

    def __init__(self, tokenizer: Any, max_length: int | None, inner: Sequence[int] | None) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._inner = inner
        self._blank = " " if _lacks_blanks(tokenizer) else ""

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        encoded = self._tokenize(row["tokens"], truncation=self._max_length is not None, max_length=self._max_length)
        steps = list(pairwise([None, *encoded.word_ids()]))  # the word of the token before, and of each token
        is_first = [number is not None and number != before for before, number in steps]
        words = [number if is_start else _NO_WORD for (_, number), is_start in zip(steps, is_first, strict=True)]
        features = {**encoded, "words": words}
        if self._inner is not None:
            tags = features["tags"] = row["tags"]
            features["labels"] = [
                text.IGNORED if number is None else tags[number] if is_start else self._inner[tags[number]]
                for (_, number), is_start in zip(steps, is_first, strict=True)
            ]
        return features

    def count_tokens(self, words: Sequence[str]) -> list[int]:
        with text.quiet():
            counts = Counter(self._tokenize(words, add_special_tokens=False).word_ids())
        return [counts[number] for number in range(len(words))]

    def _tokenize(self, words: Sequence[str], **options: Any) -> Any:
        return self._tokenizer([f"{self._blank}{word}" for word in words], is_split_into_words=True, **options)


class Collator(text.PadsToBuckets):
    """Pads tokens and labels on the tokenizer's side, word indices with -1, and the tags of words with -100."""

    def __init__(self, tokenizer: Any, multiple: int | None) -> None:
        from loopwright.data.collators import DataCollatorForTokenClassification

        self._tokenizer = tokenizer
        self._pad = DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=multiple)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        import torch

        from loopwright.data.columns import pad_lists, padding_side

        ours = ("words", "tags")
        plain = [{name: value for name, value in row.items() if name not in ours} for row in features]
        batch = dict(self._pad(plain))
        width, side = batch["input_ids"].shape[1], padding_side(self._tokenizer)
        batch["words"] = torch.tensor(pad_lists([row["words"] for row in features], width, _NO_WORD, side))
        if "tags" in features[0]:
            longest = max(len(row["tags"]) for row in features)
            longest = longest if self.bucket_lengths is None else max(longest, width)  # few shapes here too
            batch["tags"] = torch.tensor(pad_lists([row["tags"] for row in features], longest, text.IGNORED, "right"))
        return batch


def _inner_labels(names: Sequence[str]) -> list[int]:
    """Return for each label the label of a word's further tokens: I-X for B-X if I-X exists."""
    places = {name: number for number, name in enumerate(names)}
    return [places.get(f"I-{name[2:]}" if name.startswith("B-") else name, places[name]) for name in names]


def _lacks_blanks(tokenizer: Any) -> bool:
    """Whether a tokenizer reads a single word as the rest of the previous one: BPE without an added space."""
    splitter, normalizer = tokenizer.backend_tokenizer.pre_tokenizer, tokenizer.backend_tokenizer.normalizer
    if splitter is None or (normalizer is not None and b'"Prepend"' in normalizer.__getstate__()):
        return False
    state = json.loads(splitter.__getstate__())
    parts = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    return any(part["type"] == "ByteLevel" and not part["add_prefix_space"] for part in parts)


def _match_head(model: Any, config: Any, names: list[str]) -> list[str]:
    """Reorder the outputs of a model trained on the same tags; return a note about the match."""
    import torch

    old = [config.id2label[number] for number in sorted(config.id2label)]
    is_tagger = any(kind.endswith("ForTokenClassification") for kind in config.architectures or ())
    if not is_tagger or old == names:
        return []
    if sorted(old) != sorted(names):
        return [f"the model was trained on other tags ({', '.join(old[:5])}, ...): its head starts from them"]
    backbone = {id(parameter) for parameter in model.base_model.parameters()}
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    head = [layer for layer in layers if id(layer.weight) not in backbone][-1]
    order = [old.index(name) for name in names]
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter[order].clone())
    return ["the model was trained on the same tags: its head is kept, in our order"]


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return the label, the first word and the word after the last of each entity, as the metric reads tags."""
    found: list[tuple[str, int, int]] = []
    for place, tag in enumerate(as_iob2(tags)):
        if tag == OUTSIDE:
            continue
        letter, _, label = tag.partition("-")
        if letter == "I" and found and found[-1][2] == place and found[-1][0] == label:
            found[-1] = (label, found[-1][1], place + 1)
        else:
            found.append((label, place, place + 1))
    return found


def _tag_rows(data: RunData, names: Sequence[str]) -> Iterator[list[str]]:
    return ([names[number] for number in row["tags"]] for row in data.each_row("train"))


def _best_tag(rows: Iterable[Sequence[str]], names: Sequence[str]) -> str | None:
    """Return the tag with the best F1 if every word has it: it makes entities of the commonest type of one word."""
    types = Counter(label for tags in rows for label, start, end in entities(tags) if end == start + 1)
    tags = (f"{letter}{label}" for label, _ in types.most_common(1) for letter in _LETTERS)
    alone = (tag for tag in tags if tag in names and [end - start for _, start, end in entities([tag] * 2)] == [1, 1])
    return next(alone, None) if _has_entities(names) else None


def _has_entities(names: Sequence[str]) -> bool:
    """Whether tags mark entities, rather than describe single words, such as their part of speech."""
    return OUTSIDE in names or any(name.startswith(_LETTERS) for name in names)


def _nothing(names: Sequence[str]) -> str:
    return OUTSIDE if _has_entities(names) else ""


def _create_metric(names: Sequence[str]) -> Metric:
    return load_metric("entities" if _has_entities(names) else "token_accuracy")


def _tags_of_words(
    logits: Any, words: Any, counts: Sequence[int], names: Sequence[str], *, is_ordered: bool
) -> list[tuple[list[str], list[float]]]:
    """Return tags and confidences of each row's words; `words` has the word that each token begins, or -1."""
    shares, scores = (each.cpu().numpy() for each in (logits.float().softmax(-1), logits.float().log_softmax(-1)))
    found = []
    for count, numbers, row, logarithms in zip(counts, words.cpu().numpy(), shares, scores, strict=True):
        row_tags, row_shares = [_nothing(names)] * count, [0.0] * count
        places = (numbers != _NO_WORD).nonzero()[0]
        tags = likeliest(logarithms[places], names) if is_ordered else row[places].argmax(-1).tolist()
        for place, tag in zip(places, tags, strict=True):
            row_tags[numbers[place]], row_shares[numbers[place]] = names[tag], float(row[place, tag])
        found.append((row_tags, row_shares))
    return found


def _pieces(words: list[str], encode: Encoder, num_tokens: int) -> Iterator[list[str]]:
    """Yield the words in pieces of at most `num_tokens`; a longer word is a separate piece."""
    piece: list[str] = []
    num_used = 0
    for word, count in zip(words, encode.count_tokens(words), strict=True):
        if piece and num_used + count > num_tokens:
            yield piece
            piece, num_used = [], 0
        piece.append(word)
        num_used += count
    if piece:
        yield piece


def _spans(words: Sequence[str], tags: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"label": label, "text": " ".join(words[start:end]), "start": start, "end": end}
        for label, start, end in entities(tags)
    ]
