"""token-classification end to end: training, scoring in whole entities, predicting, tokenizers, bad input."""

import json
import random
from functools import partial
from pathlib import Path

import pytest
import torch

from loopwright import api
from loopwright.errors import InputError
from loopwright.report.panels.sample import is_right
from loopwright.tasks.arguments import TaskTrainingArguments
from loopwright.tasks.base import Origin
from loopwright.tasks.data import RunData
from loopwright.tasks.text.token_classification import Collator, Encoder, TokenClassification, entities
from sample_data import SAMPLES
from tasks.conftest import FLAGS
from tasks.dirty_inputs import assert_aligned
from tasks.intervals import assert_loss_has_interval
from tasks.recomputed import assert_recomputed
from tasks.reviews import read_lines, write_jsonl
from tasks.runs import check_resume, refusal, train_in
from tasks.texts import save_bert, small_tokenizer

TASK = TokenClassification()
TASK_NAME = "token-classification"
FIRST = ("Ada", "Alan", "Grace", "Edsger", "Barbara")
LAST = ("Lovelace", "Turing", "Hopper", "Dijkstra", "Liskov")
PLACES = ("Paris", "London", "Berlin", "Tokyo")
OTHER = ("went", "to", "the", "of", "city", "today", "with", "saw", "and", "quickly")
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}


def sentences(count: int = 96, seed: int = 0) -> list[dict]:
    """Return sentences with persons of two words and places of one, and their tags; no two are alike."""
    chosen = random.Random(seed)
    made = []
    for number in range(count):
        words, tags = [], []
        for _ in range(3):
            filler = chosen.choices(OTHER, k=chosen.randint(1, 2))
            words += filler
            tags += ["O"] * len(filler)
            if chosen.random() < 0.5:
                words += [chosen.choice(FIRST), chosen.choice(LAST)]
                tags += ["B-PER", "I-PER"]
            else:
                words.append(chosen.choice(PLACES))
                tags.append("B-LOC")
        made.append({"words": [*words, str(number)], "ner": [*tags, "O"]})
    return made


def tiny_tagger(folder, names, **options):
    """Write a BERT tagger of a few thousand weights with a tokenizer, and return its folder."""
    labels = dict(enumerate(names))
    tokenizer = small_tokenizer(" ".join(row["words"]) for row in sentences())
    numbers = {name: number for number, name in labels.items()}
    return save_bert(folder, "BertForTokenClassification", tokenizer, id2label=labels, label2id=numbers, **options)


def build(path, data, *, is_run=False, **flags):
    """Return the job of a model folder, or of one made from the data, as a run would make it."""
    args = TASK.arguments(task=TASK_NAME, data=str(data), **flags)
    training = TaskTrainingArguments(output_dir="unused", use_cpu=True)
    origin = Origin(None if path is None else str(path), is_run=is_run)
    return TASK.build(RunData(TASK.preflight(args)), args, training, origin)


@pytest.fixture
def data(tmp_path) -> Path:
    return write_jsonl(tmp_path / "names.jsonl", sentences())


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> api.Run:
    folder = tmp_path_factory.mktemp("names")
    file = write_jsonl(folder / "names.jsonl", sentences())
    return train_in(folder, TASK_NAME, data=file, **{**FLAGS, "epochs": 4})


def test_a_small_model_learns_names_and_beats_the_baselines(run):
    assert set(run.metrics) == {"precision", "recall", "f1", "accuracy", "ece", "loss"}
    assert run.result["metric"] == "f1" and run.metrics["f1"] >= 0.9
    assert run.result["baselines"]["majority"]["f1"] == 0 < run.result["baselines"]["majority"]["accuracy"] < 1
    assert set(run.result["baselines"]) == {"majority", "always B-LOC", "usual-tag"}
    assert run.result["baselines"]["always B-LOC"]["f1"] > 0
    low, high = run.result["intervals"]["f1"]
    assert low <= run.metrics["f1"] <= high
    assert_loss_has_interval(run)


def test_entities_are_predicted_with_their_text(run):
    text = "today Ada Lovelace saw London"
    (found,) = run.predict([text])
    assert found["tags"] == ["O", "B-PER", "I-PER", "O", "B-LOC"]
    assert [(each["label"], each["text"], each["start"], each["end"]) for each in found["entities"]] == [
        ("PER", "Ada Lovelace", 1, 3),
        ("LOC", "London", 4, 5),
    ]
    assert all(0.3 < each["score"] <= 1 for each in found["entities"])
    assert run.predict([{"words": text.split()}]) == run.predict([{"text": text}]) == [found]
    assert_aligned(run, [text], {"": "data.missing"})
    rows = [{"words": ["a", None]}, {"words": text.split()}, {"words": 5}, {"words": []}]
    codes = [each.get("error", "").partition(":")[0] for each in run.predict(rows)]
    assert codes == ["data.value", "", "data.value", "data.missing"]


def test_a_text_longer_than_the_model_was_trained_on_is_tagged_in_pieces(run):
    words = ["went", "to", *FIRST[:1], *LAST[:1], "and"] * 30
    (found,) = run.predict([" ".join(words)])
    assert len(found["tags"]) == 150 and found["tokens"] == words
    assert sum(each["text"] == "Ada Lovelace" for each in found["entities"]) >= 27


def test_rows_without_words_are_refused(run):
    with pytest.raises(InputError, match="no row to predict has tokens") as caught:
        run.predict([{"sentence": "Ada"}])
    assert caught.value.code == "data.column"


def test_the_predictions_in_the_run_folder_give_the_metrics_verdicts_and_words_of_entities(run):
    told = read_lines(run.path / "eval" / "predictions.jsonl")
    assert_recomputed(run)
    assert all(len(each["tokens"]) == len(each["prediction"]) == len(each["reference"]) for each in told)
    worst = [each["loss"] for each in read_lines(run.path / "eval" / "worst.jsonl")]
    assert worst == sorted(worst, reverse=True)
    verdicts = [is_right(sample) for sample in told]
    assert verdicts and set(verdicts) <= {True, False}
    shown = [(each, entity) for each in told for entity in each["entities"] + each["expected"]]
    assert len(shown) >= 10
    assert all(entity["text"] == " ".join(each["tokens"][entity["start"] : entity["end"]]) for each, entity in shown)


def test_evaluating_again_gives_the_same_metrics_and_other_data_has_its_own(run, tmp_path):
    assert run.evaluate() == run.metrics
    assert run.evaluate(write_jsonl(tmp_path / "more.jsonl", sentences(20, seed=4)))["f1"] >= 0.8


def test_transformers_opens_the_model_folder(run, tmp_path):
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    folder = run.export(tmp_path / "exported")
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    encoded = AutoTokenizer.from_pretrained(folder)(["Ada", "Lovelace", "saw", "London"], is_split_into_words=True)
    with torch.no_grad():
        best = model(input_ids=torch.tensor([encoded["input_ids"]])).logits[0].argmax(-1).tolist()
    firsts = [encoded.word_ids().index(number) for number in range(4)]
    assert [model.config.id2label[best[place]] for place in firsts] == ["B-PER", "I-PER", "O", "B-LOC"]


def test_a_moved_and_resumed_run_on_conll_equals_an_uninterrupted_one(tmp_path):
    data = tmp_path / "names.conll"
    blocks = ["\n".join(map("{} - {}".format, row["words"], row["ner"])) for row in sentences()]
    data.write_text("-DOCSTART- -X- O\n\n" + "\n\n".join(blocks) + "\n")
    model = tiny_tagger(tmp_path / "bert", ["A", "B"], hidden_dropout_prob=0.1)
    flags = {**FLAGS, "data": data, "model": model, "label_all_tokens": True, "rehearsal": False}
    _, resumed, longer = check_resume(TASK_NAME, tmp_path, {"epochs": 1}, {"epochs": 2}, "model/config.json", **flags)
    assert resumed.predict(["Ada saw London"]) == longer.predict(["Ada saw London"])


def test_neither_accumulation_nor_the_evaluation_batch_changes_a_loss(data, tmp_path):
    from safetensors.torch import load_file

    model = tiny_tagger(tmp_path / "bert", ["A", "B"], hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    flags = {**FLAGS, "data": data, "model": model, "epochs": 1, "optim": "sgd", "lr": 0.1, "rehearsal": False}
    whole = api.train(TASK_NAME, **{**flags, "output_dir": "whole", "batch": 16})
    parts = {"batch": 4, "gradient_accumulation_steps": 4, "per_device_eval_batch_size": 3}
    split = api.train(TASK_NAME, **{**flags, "output_dir": "split", **parts})
    first, second = (load_file(run.path / "model" / "model.safetensors") for run in (whole, split))
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-4, atol=1e-5)
    assert whole.metrics["loss"] == pytest.approx(split.metrics["loss"], rel=1e-4)


def test_adapters_leave_the_head_out_and_are_merged_in_the_end(data, tmp_path):
    pytest.importorskip("peft")
    run = api.train(TASK_NAME, data=data, output_dir=tmp_path / "run", lora=True, **FLAGS)
    assert 0.0 <= run.metrics["f1"] <= 1.0
    assert not [name for name in run.model.state_dict() if "lora" in name]


def test_parts_of_speech_are_scored_by_word(tmp_path):
    kinds = {"Ada": "NOUN", "saw": "VERB", "the": "DET", "city": "NOUN"}
    chosen = random.Random(0)
    made = []
    for number in range(48):
        words = chosen.choices(list(kinds), k=5)
        tags = " ".join([*(kinds[word] for word in words), "NUM"])
        made.append({"tokens": " ".join([*words, str(number)]), "pos_tags": tags})
    run = api.train(TASK_NAME, data=write_jsonl(tmp_path / "pos.jsonl", made), **{**FLAGS, "rehearsal": False})
    assert set(run.metrics) == {"token_accuracy", "ece", "loss"} and run.metrics["token_accuracy"] > 0.5
    baselines = run.result["baselines"]
    assert baselines["usual-tag"]["token_accuracy"] > baselines["majority"]["token_accuracy"]
    assert_recomputed(run)
    (found,) = run.predict(["Ada saw"])
    assert len(found["tags"]) == len(found["scores"]) == 2 and "entities" not in found


def test_tags_that_the_model_confidently_contradicts_are_listed(tmp_path):
    checked = sentences(24, seed=9)
    checked[0]["ner"] = ["O"] * len(checked[0]["ner"])
    run = api.train(
        TASK_NAME,
        train_file=write_jsonl(tmp_path / "train.jsonl", sentences(160)),
        validation_file=write_jsonl(tmp_path / "validation.jsonl", checked),
        **{**FLAGS, "epochs": 4, "rehearsal": False},
    )
    (suspect,) = (run.path / "eval" / "suspects.csv").read_text().splitlines()[1:2]
    assert suspect.startswith("0,")
    assert run.result["num_suspects"] < 8


def test_the_conll_sample_is_trained_moved_and_resumed(tmp_path):
    file = SAMPLES / "conll" / "sample.json"
    run = api.train(TASK_NAME, train_file=file, validation_file=file, keep_duplicates=True, **FLAGS)
    assert 0 <= run.metrics["f1"] <= 1 and run.metrics["accuracy"] > 0.3
    assert_recomputed(run)
    moved = run.path.rename(tmp_path / "moved")
    resumed = api.resume(moved, epochs=3, quiet=True)
    assert resumed.status == "done" and len(resumed.predict(["Bill Clinton went to Chicago"])) == 1


def test_only_the_first_token_of_a_word_has_a_label_unless_all_are_asked_for(data):
    job = build(None, data)
    names = list(job.plan.labels.names)
    row = {"tokens": ["Unheard", "Lovelace"], "tags": [names.index("B-PER"), names.index("O")]}
    first = TASK.create_dataset(job, [row], is_labelled=True)[0]
    numbers = job.processor(row["tokens"], is_split_into_words=True).word_ids()
    assert numbers.count(0) > 1
    assert [label for label in first["labels"] if label != -100] == row["tags"]
    job.args.label_all_tokens = True
    every = TASK.create_dataset(job, [row], is_labelled=True)[0]
    of_first_word = [label for label, number in zip(every["labels"], numbers, strict=True) if number == 0]
    assert [names[label] for label in of_first_word] == ["B-PER", *["I-PER"] * (len(of_first_word) - 1)]
    assert every["words"] == first["words"]
    assert [label == -100 for label in every["labels"]] == [number is None for number in numbers]


def test_words_beyond_the_limit_count_as_not_found(data):
    job = build(None, data, max_length=8)
    names = list(job.plan.labels.names)
    row = {"tokens": ["Ada", "Lovelace", "went", "to", "Paris"] * 3, "tags": [0, 1, 2, 2, 0] * 3}
    batch = Collator(job.processor, None)([TASK.create_dataset(job, [row], is_labelled=True)[0]])
    assert batch["input_ids"].shape[1] == 8
    logits = torch.zeros(1, 8, len(names))
    logits[..., names.index("B-LOC")] = 5.0
    outputs = type("Outputs", (), {"logits": logits})()
    (sample,) = TASK.score_batch(job, batch, outputs)
    assert sample["reference"] == [names[tag] for tag in row["tags"]]
    num_seen = sum(number >= 0 for number in batch["words"][0].tolist())
    assert sample["prediction"] == ["B-LOC"] * num_seen + ["O"] * (15 - num_seen)


def test_the_loss_is_a_mean_over_labelled_tokens_and_scores_are_alike_on_whichever_side_is_padded(data):
    job = build(None, data)
    dataset = TASK.create_dataset(job, job.data.rows("train"), is_labelled=True)
    batch = Collator(job.processor, None)([dataset[0], dataset[1]])
    model = job.model.eval()
    with torch.no_grad():
        loss, _ = TASK.compute_loss(job, model, batch)
        assert loss.item() == pytest.approx(
            model(**TASK.model_inputs(batch), labels=batch["labels"]).loss.item(), rel=1e-5
        )
        batch["labels"].fill_(-100)
        assert TASK.compute_loss(job, model, batch)[0].item() == 0 == TASK.count_items(batch)
    features = [dataset[index] for index in range(6)]
    torch.manual_seed(0)
    of_token = torch.randn(len(job.processor), len(job.plan.labels.names))
    told = []
    for side in ("right", "left"):
        job.processor.padding_side = side
        batch = Collator(job.processor, 8)(features)
        assert batch["input_ids"].shape[1] % 8 == 0
        outputs = type("Outputs", (), {"logits": of_token[batch["input_ids"]]})()
        told.append(TASK.score_batch(job, batch, outputs))
        assert TASK.count_items(batch) == sum(len(sample["reference"]) for sample in told[-1])
    for one, other in zip(*told, strict=True):
        assert one.pop("loss") == pytest.approx(other.pop("loss"), rel=1e-6)
        assert one == other


def test_tokenizers_of_bytes_see_a_blank_before_each_word(data, tmp_path):
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaForTokenClassification, RobertaTokenizerFast

    from loopwright.tasks.text.models import train_tokenizer

    trained = train_tokenizer([" ".join(row["words"]) for row in sentences()], 400, lowercase=False)
    content = json.loads(trained.backend_tokenizer.to_str())["model"]
    special = ("<s>", "</s>", "<pad>", "<unk>", "<mask>")
    vocabulary = {**content["vocab"], **{token: 400 + number for number, token in enumerate(special)}}
    merges = [tuple(pair) for pair in content["merges"]]
    roberta = RobertaTokenizerFast(vocab=vocabulary, merges=merges)
    generic = PreTrainedTokenizerFast(tokenizer_object=trained.backend_tokenizer, pad_token="[PAD]")
    generic.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for name, tokenizer in (("roberta", roberta), ("generic", generic)):
        config = RobertaConfig(vocab_size=500, pad_token_id=1, intermediate_size=16, **TINY)
        RobertaForTokenClassification(config).save_pretrained(name)
        tokenizer.save_pretrained(name)
        job = build(name, data)
        ids = Encoder(job.processor, None, None)({"tokens": ["saw", "saw"]})["input_ids"]
        words = [token for token in job.processor.convert_ids_to_tokens(ids) if "saw" in token]
        assert words == ["Ġsaw", "Ġsaw"], name


def test_a_tagger_of_the_same_tags_keeps_its_head_in_the_order_of_the_data(data, tmp_path):
    old = ["O", "I-PER", "B-PER", "B-LOC"]
    folder = tiny_tagger(tmp_path / "tagger", old)
    from safetensors.torch import load_file

    saved = load_file(folder / "model.safetensors")["classifier.weight"]
    job = build(folder, data)
    names = [job.model.config.id2label[number] for number in range(4)]
    assert names == ["B-LOC", "B-PER", "I-PER", "O"] and "in our order" in job.notes[0]
    assert torch.equal(job.model.classifier.weight, saved[[old.index(name) for name in names]])


def test_entities_are_read_as_the_metric_reads_them():
    import nervaluate

    from loopwright.metrics.spans import as_iob2

    tags = ["O", "B-A", "I-A", "I-B", "E-A", "S-B", "L-A", "U-A", "A", "B"]
    chosen = random.Random(0)
    for _ in range(300):
        row = chosen.choices(tags, k=chosen.randint(0, 9))
        theirs = nervaluate.collect_named_entities(as_iob2(row))
        assert entities(row) == [(each["label"], each["start"], each["end"] + 1) for each in theirs]


refused = partial(refusal, TASK_NAME, FLAGS)


def test_a_sentence_with_a_tag_too_few_and_several_columns_of_tags_are_refused(tmp_path):
    made = sentences(20)
    made[7]["ner"].pop()
    assert "line 8" in refused("data.tags", data=write_jsonl(tmp_path / "short.jsonl", made))
    made = [{"tokens": row["words"], "ner": row["ner"], "pos_tags": row["ner"]} for row in sentences(20)]
    file = write_jsonl(tmp_path / "both.jsonl", made)
    assert "--tags_column ner" in refused("data.column", data=file)
    assert TASK.preflight(TASK.arguments(data=str(file), label_column_name="pos_tags")).columns["tags"] == "pos_tags"


def test_a_slow_tokenizer_and_more_tokens_than_positions_are_refused(data, tmp_path):
    from transformers import CanineConfig, CanineForTokenClassification, CanineTokenizer

    folder = tmp_path / "canine"
    CanineForTokenClassification(CanineConfig(intermediate_size=16, num_hash_buckets=8, **TINY)).save_pretrained(folder)
    CanineTokenizer().save_pretrained(folder)
    assert "cannot map its tokens" in refused("model.tokenizer", data=data, model=folder)
    short = tiny_tagger(tmp_path / "bert", ["A", "B"])
    assert "--max_length 64" in refused("model.length", data=data, model=short, max_length=65)


def test_tags_that_are_numbers_are_named_by_a_map(tmp_path):
    numbers = {"O": 0, "B-PER": 1, "I-PER": 2, "B-LOC": 3}
    made = [{"tokens": row["words"], "ner_tags": [numbers[tag] for tag in row["ner"]]} for row in sentences(30)]
    file = write_jsonl(tmp_path / "numbers.jsonl", made)
    assert "--label_map" in " ".join(build(None, file).notes)
    job = build(None, file, label_map=[f"{number}={name}" for name, number in numbers.items()])
    assert set(job.plan.labels.names) == set(numbers)
    assert next(iter(TASK.create_scorer(job).directions)) == "f1"


def test_files_in_other_forms_than_the_training_data_are_tagged_alike(run, tmp_path):
    made = sentences()[:6]
    expected = run.predict([{"tokens": row["words"]} for row in made])
    (tmp_path / "lines.txt").write_text("".join(f"{' '.join(row['words'])}\n" for row in made), encoding="utf-8")
    blocks = ["".join(f"{word}\t{tag}\n" for word, tag in zip(*row.values(), strict=True)) for row in made]
    (tmp_path / "lines.conll").write_text("\n".join(blocks), encoding="utf-8")
    write_jsonl(tmp_path / "odd.jsonl", [{"text": row["words"]} for row in made])
    for name in ("lines.txt", "lines.conll", "odd.jsonl"):
        assert run.predict(tmp_path / name) == expected
    assert run.evaluate(tmp_path / "lines.conll")["f1"] == 1.0
