"""Tags in order: what is inside an entity comes after its beginning, in the data and in what is predicted."""

from itertools import product

import numpy as np
import pytest
import torch

from loopwright.tasks.text.tag_order import is_in_order, likeliest, may_follow
from tasks.reviews import write_jsonl
from tasks.test_token_classification import TASK, build

NAMES = ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]


def write_tags(folder, tags: list[str]):
    rows = [{"tokens": [f"word{number}", *"bcdefg"[: len(tags) - 1]], "ner_tags": tags} for number in range(20)]
    return write_jsonl(folder / "tags.jsonl", rows)


def test_a_tag_inside_an_entity_follows_its_beginning_and_others_follow_anything():
    assert all(may_follow(before, tag) for before in ("", *NAMES) for tag in ("O", "B-PER", "S-PER", "U-PER", "NOUN"))
    assert all(may_follow(f"{letter}-PER", tag) for letter in "BIM" for tag in ("I-PER", "E-PER", "L-PER", "M-PER"))
    assert not any(may_follow(before, "I-PER") for before in ("", "O", "B-LOC", "I-LOC", "E-PER", "S-PER", "PER"))


def test_iob2_and_bilou_are_in_order_and_iob1_is_not():
    assert is_in_order([["O", "B-PER", "I-PER"], [], ["B-PER", "B-PER"], ["O", "B-LOC", "I-LOC", "L-LOC", "U-PER"]])
    assert not is_in_order([["O", "I-PER", "I-PER"]])
    assert not is_in_order([["B-PER"], ["I-PER"]])  # at the start of a row
    assert not is_in_order([["B-PER", "I-LOC"]])


def test_the_predicted_tags_are_the_likeliest_valid_sequence():
    draws = np.random.default_rng(0)
    num_other = 0
    for _ in range(60):
        scores = np.log(draws.dirichlet(np.full(len(NAMES), 0.5), size=4))
        ordered = (
            path
            for path in product(range(len(NAMES)), repeat=4)
            if all(may_follow(NAMES[before], NAMES[tag]) for before, tag in zip(path, path[1:], strict=False))
        )
        expected = max(ordered, key=lambda path: scores[range(4), path].sum())
        assert likeliest(scores, NAMES) == list(expected)
        num_other += list(expected) != scores.argmax(1).tolist()
    assert num_other >= 20  # so many were not simply the likeliest of each word
    assert likeliest(np.zeros((0, len(NAMES))), NAMES) == []


@pytest.mark.parametrize(
    ("tags", "is_ordered"), [(["O", "B-PER", "I-PER"], True), (["O", "I-PER", "I-PER"], False), (["N", "V"], False)]
)
def test_the_training_data_says_whether_tags_are_in_order(tmp_path, tags, is_ordered):
    data = write_tags(tmp_path, tags)
    assert build(None, data).args.ordered_tags is is_ordered
    assert build(None, data, ordered_tags=not is_ordered).args.ordered_tags is not is_ordered


def test_a_lone_inside_tag_is_neither_scored_nor_predicted_where_tags_are_in_order(tmp_path):
    job = build(None, write_tags(tmp_path, ["O", "B-PER", "I-PER"]))
    assert job.plan.labels.names == ("B-PER", "I-PER", "O")
    dataset = TASK.create_dataset(job, job.data.rows("train"), is_labelled=True)
    batch = job.collate_fn([dataset[0]])
    first, second, third = (batch["words"][0] >= 0).nonzero().flatten().tolist()
    logits = torch.zeros(1, batch["words"].shape[1], 3)
    logits[0, first] = torch.tensor([0.0, 0.0, 4.0])
    logits[0, second] = torch.tensor([1.0, 2.0, 0.0])
    logits[0, third] = torch.tensor([0.0, 3.0, 0.0])

    class Tagger:
        def __call__(self, **inputs):
            self.logits = logits
            return self

    (scored,) = TASK.score_batch(job, batch, Tagger()())
    (predicted,) = TASK.predict_batch(job, Tagger(), batch)
    assert scored["prediction"] == predicted["tags"] == ["O", "B-PER", "I-PER"]
    shares = logits[0, [first, second, third], [2, 0, 1]] - logits[0, [first, second, third]].logsumexp(-1)
    assert predicted["scores"] == pytest.approx(shares.exp().tolist(), rel=1e-5)
    job.args.ordered_tags = None
    (scored,) = TASK.score_batch(job, batch, Tagger()())
    assert scored["prediction"] == ["O", "I-PER", "I-PER"]


def test_a_run_without_ordered_tags_predicts_each_word_separately(tmp_path):
    data = write_tags(tmp_path, ["O", "B-PER", "I-PER"])
    made = build(None, data)
    made.model.save_pretrained(tmp_path / "model")
    made.processor.save_pretrained(tmp_path / "model")
    assert not build(tmp_path / "model", data, is_run=True, max_length=16).args.ordered_tags
    assert build(tmp_path / "model", data, is_run=True, max_length=16, ordered_tags=True).args.ordered_tags
