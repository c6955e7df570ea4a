"""The chunked loss through its kernel equals the full one, and is recorded in a CUDA graph."""

import pytest
import torch
from torch.nn import functional

from loopwright.tasks.text import chunked_loss

pytestmark = pytest.mark.gpu
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest value; in 16 bits, slopes are rounded


def inputs(dtype: torch.dtype, vocabulary: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"device": "cuda", "generator": generator}
    hidden, weight = torch.randn(300, 64, **options), torch.randn(vocabulary, 64, **options) / 4
    labels = torch.randint(vocabulary, (300,), **options).masked_fill(torch.rand(300, **options) < 0.4, -100)
    return [hidden.to(dtype), weight.to(dtype), torch.randn(vocabulary, **options).to(dtype), labels]


@pytest.mark.parametrize("vocabulary", [101, 50_257, 151_936])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_loss_and_gradients_equal_the_full_ones(dtype: torch.dtype, vocabulary: int) -> None:
    assert chunked_loss._kernel() is not None
    *given, labels = inputs(dtype, vocabulary)
    found = []
    for is_chunked in (False, True):
        own = [each.clone().requires_grad_() for each in given]
        if is_chunked:
            loss = chunked_loss.LinearCrossEntropy.apply(*own, labels, 128, -100)
        else:
            exact = functional.linear(*(each.float() for each in own))
            loss = functional.cross_entropy(exact, labels, ignore_index=-100, reduction="sum")
        (loss / 7).backward()
        found.append([loss.detach(), *(each.grad.float() for each in own)])
    for full, chunked in zip(*found, strict=True):
        assert (full - chunked).abs().max() <= TOLERANCES[dtype] * full.abs().max()


def test_a_graph_replays_the_loss_of_other_labels() -> None:
    hidden, weight, bias, labels = inputs(torch.bfloat16, 1_000)
    hidden.requires_grad_()

    def loss() -> torch.Tensor:
        found: torch.Tensor = chunked_loss.LinearCrossEntropy.apply(hidden, weight, bias, labels, 128, -100)
        return found

    expected = [loss().item()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = loss()
    graph.replay()
    replayed = [recorded.item()]
    labels.copy_(labels.flip(0))
    expected.append(loss().item())
    graph.replay()
    replayed.append(recorded.item())
    assert replayed == expected and expected[0] != expected[1]
