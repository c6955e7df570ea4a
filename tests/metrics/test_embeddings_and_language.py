"""Retrieval, cosines against scores, and language models."""

import math

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
from tests.metrics.samples import columns_of

from loopwright import metrics
from loopwright.errors import DataError


def test_ranks_by_hand_and_of_similarities_that_are_not_numbers():
    similarities = [[0.9, 0.1, 0.5], [0.9, 0.1, 0.5], [0.9, 0.1, 0.5], [0.2, 0.2, 0.2]]
    metric = metrics.load("retrieval", ks=[1, 2])
    # The ranks are 1, 3, 2, and 3 where all are equal.
    assert metric.compute(predictions=similarities, references=[0, 1, 2, 0]) == {
        "recall@1": 1 / 4,
        "recall@2": 2 / 4,
        "mrr": pytest.approx((1 + 1 / 3 + 1 / 2 + 1 / 3) / 4, rel=1e-15),
        "ndcg@2": pytest.approx((1 + 1 / math.log2(3)) / 4, rel=1e-15),
    }
    assert metrics.load("retrieval", ks=3).compute(predictions=similarities, references=[0, 1, 2, 0])["recall@3"] == 1.0
    rows = np.full((2, 4), np.nan)
    assert metrics.load("retrieval", ks=(1, 3)).compute(predictions=rows, references=[0, 1]) == {
        "recall@1": 0.0,
        "recall@3": 0.0,
        "mrr": 0.25,
        "ndcg@3": 0.0,
    }
    with pytest.raises(DataError, match="queries have 2 dimensions, but items of the pool 3"):
        next(metrics.similarity_rows([[1.0, 2.0]], [[1.0, 2.0, 3.0]]))


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_a_pool_is_searched_in_chunks_of_queries(chunk_size):
    draw = np.random.default_rng(0)
    pool = draw.normal(size=(50, 8)).astype(np.float32)
    right = draw.permutation(50)[:20]
    queries = 3 * pool[right] + draw.normal(size=(20, 8)).astype(np.float32) * 2
    metric = metrics.load("retrieval", ks=(1, 5))
    most = 0
    for start, rows in metrics.similarity_rows(torch.tensor(queries), pool, chunk_size=chunk_size):
        metric.add_batch(predictions=rows, references=right[start : start + len(rows)])
        most = max(most, len(rows))
    assert most == min(chunk_size, 20) and metric.num_samples == 20
    cosines = torch.nn.functional.cosine_similarity(torch.tensor(queries)[:, None], torch.tensor(pool)[None], dim=-1)
    ranks = [1 + int((row > row[place]).sum()) for row, place in zip(cosines, right, strict=True)]
    assert metric.compute() == {
        "recall@1": sum(rank <= 1 for rank in ranks) / 20,
        "recall@5": sum(rank <= 5 for rank in ranks) / 20,
        "mrr": pytest.approx(sum(1 / rank for rank in ranks) / 20),
        "ndcg@5": pytest.approx(sklearn.metrics.ndcg_score(np.eye(50)[right], cosines.numpy(), k=5)),
    }
    assert 1 < max(ranks) < 50


def test_the_correlation_of_cosines_matches_scipy():
    columns = columns_of("cosine_spearman", 100)
    cosines = torch.nn.functional.cosine_similarity(*(torch.tensor(columns[side]) for side in ("first", "second")))
    expected = scipy.stats.spearmanr(cosines.numpy(), columns["scores"]).statistic
    assert metrics.load("cosine_spearman").compute(**columns) == {"spearmanr": pytest.approx(expected, rel=1e-12)}
    zeros = metrics.load("cosine_spearman")
    zeros.add_batch(first=[[0.0, 0.0], [1.0, 0.0]], second=[[1.0, 0.0], [1.0, 0.0]], scores=[0.0, 1.0])
    assert zeros.compute() == {"spearmanr": 1.0}


def test_bits_per_byte_come_with_loss_and_perplexity():
    metric = metrics.load("bits_per_byte")
    metric.add_batch(sums=[12.5, 40.25], counts=[5, 16], num_bytes=[21, 70])
    assert metric.compute() == {
        "loss": 52.75 / 21,
        "perplexity": math.exp(52.75 / 21),
        "bits_per_byte": 52.75 / 91 / math.log(2),
    }
    # A model that finds all 256 bytes equally likely needs 8 bits for each.
    uniform = metric.compute(sums=[100 * math.log(256)], counts=[100], num_bytes=[100])
    assert uniform["bits_per_byte"] == pytest.approx(8.0, rel=1e-15)


def test_the_batch_size_does_not_change_a_perplexity_of_real_logits():
    logits, labels = torch.randn(6, 9, 11), torch.randint(0, 11, (6, 9))
    labels[torch.rand(6, 9) < 0.3] = -100
    losses = torch.nn.functional.cross_entropy(
        logits.double().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none"
    ).view(6, 9)
    counts = (labels != -100).sum(1)
    whole = metrics.load("perplexity").compute(sums=losses.sum(1), counts=counts)
    expected = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert whole["loss"] == pytest.approx(float(expected), rel=1e-14)
    single = metrics.load("perplexity")
    for loss, count in zip(losses.sum(1), counts, strict=True):
        single.add(sum=loss, count=count)
    assert single.compute() == whole
