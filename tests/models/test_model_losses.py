"""Losses of images: against torch and plain loops; means with counts that add up to the mean of the whole."""

import math

import pytest
import torch
from torch.nn import functional as F

from loopwright.errors import ConfigError
from loopwright.models import LOSS_NAMES, create_loss, sample_losses
from loopwright.models.losses import sigmoid_focal

IGNORED = 255


@pytest.fixture
def pixels():
    labels = torch.randint(0, 4, (6, 5, 7))
    labels[torch.rand(labels.shape) < 0.2] = IGNORED
    labels[2] = IGNORED
    return torch.randn(6, 4, 5, 7), labels


def by_hand(name, logits, labels):
    """Return for each image the sum over its pixels of "ce" or "focal", their number, and its dice; plain loops."""
    rows = []
    for image, truth in zip(logits.double(), labels, strict=True):
        kept = [(image[:, y, x].softmax(0), int(truth[y, x])) for y in range(5) for x in range(7) if truth[y, x] != 255]
        chances = [float(each[label]) for each, label in kept]
        total = sum(-math.log(p) * ((1 - p) ** 2 if name == "focal" else 1) for p in chances)
        overlaps = []
        for label in {label for _, label in kept}:
            both = sum(float(each[label]) for each, true in kept if true == label)
            sizes = sum(float(each[label]) for each, _ in kept) + sum(true == label for _, true in kept)
            overlaps.append(1 - 2 * both / sizes)
        rows.append((total, len(kept), sum(overlaps) / len(overlaps) if overlaps else 0.0))
    return rows


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_a_loss_matches_a_plain_loop(pixels, name):
    parts = name.split("+")
    rows = by_hand(parts[0], *pixels)
    with_labels = [row for row in rows if row[1]]
    if name in ("ce", "focal"):
        expected, num_items = sum(row[0] for row in rows) / sum(row[1] for row in rows), sum(row[1] for row in rows)
    else:
        of_images = [(row[0] / row[1] if len(parts) > 1 else 0.0) + row[2] for row in with_labels]
        expected, num_items = sum(of_images) / 5, 5
    found = create_loss(name, IGNORED)(*pixels)
    assert float(found.loss) == pytest.approx(expected, rel=1e-5) and int(found.num_items) == num_items


@pytest.mark.parametrize("weights", [None, [0.1, 1.0, 2.0, 3.0]], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_parts_weighted_by_their_items_make_the_whole(pixels, name, weights):
    logits, labels = pixels
    loss = create_loss(name, IGNORED, weights)
    whole = loss(logits, labels)
    parts = [loss(logits[piece], labels[piece]) for piece in (slice(0, 1), slice(1, 4), slice(4, 6))]
    assert sum(float(part.num_items) for part in parts) == pytest.approx(float(whole.num_items))
    total = sum(float(part.loss * part.num_items) for part in parts)
    assert total / float(whole.num_items) == pytest.approx(float(whole.loss), rel=1e-5)
    of_samples = sample_losses(name, logits, labels, IGNORED, weights)
    for index, (own, num_items) in enumerate(zip(*of_samples, strict=True)):
        alone = loss(logits[index : index + 1], labels[index : index + 1])
        assert (float(own), float(num_items)) == pytest.approx((float(alone.loss), float(alone.num_items)), rel=1e-5)
    mean = (of_samples.loss * of_samples.num_items).sum() / of_samples.num_items.sum()
    assert float(mean) == pytest.approx(float(whole.loss), rel=1e-6)


def test_cross_entropy_matches_torch_with_and_without_weights(pixels):
    logits, labels = pixels
    weights = torch.tensor([0.5, 1.0, 2.0, 4.0])
    for weight in (None, weights):
        expected = F.cross_entropy(logits, labels, weight=weight, ignore_index=IGNORED).item()
        loss = create_loss("ce", IGNORED, None if weight is None else weight.tolist())
        assert loss(logits, labels).loss == pytest.approx(expected, rel=1e-6)
    scores, classes = torch.randn(9, 4), torch.randint(0, 4, (9,))
    found = create_loss("ce")(scores, classes)
    assert found.loss == pytest.approx(F.cross_entropy(scores, classes).item(), rel=1e-6) and found.num_items == 9


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_without_items_a_loss_is_0_and_so_is_its_gradient(name):
    logits = torch.randn(2, 3, 4, 4, requires_grad=True)
    loss, num_items = create_loss(name, IGNORED)(logits, torch.full((2, 4, 4), IGNORED))
    loss.backward()
    assert loss == 0 and num_items == 0 and not logits.grad.any()


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_a_loss_falls_with_the_score_of_the_right_class(name):
    labels = torch.randint(0, 3, (2, 4, 4))
    right = F.one_hot(labels, 3).movedim(-1, 1).float()
    values = [float(create_loss(name)(sureness * right, labels).loss) for sureness in (-5.0, 0.0, 5.0, 50.0)]
    assert values == sorted(values, reverse=True) and values[-1] == pytest.approx(0.0, abs=1e-6)


def test_focal_loss_of_decisions_matches_a_plain_loop():
    logits, targets = torch.randn(3, 2, 4), torch.rand(3, 2, 4)
    targets[0, 0, 1] = targets[0, 1, 2] = targets[1, 0, 0] = 1.0
    expected = []
    for scores, wanted in zip(logits, targets, strict=True):
        total, hits = 0.0, 0
        for score, want in zip(scores.flatten().tolist(), wanted.flatten().tolist(), strict=True):
            chance = 1 / (1 + math.exp(-score))
            hits += want == 1
            if want == 1:
                total -= (1 - chance) ** 2 * math.log(chance)
            else:
                total -= (1 - want) ** 4 * chance**2 * math.log(1 - chance)
        expected.append(total / max(hits, 1))
    assert sigmoid_focal(logits, targets).tolist() == pytest.approx(expected, rel=1e-5)


def test_an_unknown_loss_is_refused():
    with pytest.raises(ConfigError, match="there is no loss 'cse': use ce, focal, dice, ce\\+dice, focal\\+dice"):
        create_loss("cse")
