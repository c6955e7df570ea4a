"""A GPU whose memory really runs out: updates in parts, graphs given up, evaluations in parts; skipped elsewhere."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from loopwright import Trainer
from loopwright.errors import MemoryLimitError
from loopwright.training.run import run_of
from toys import weights

pytestmark = pytest.mark.gpu

WIDTH, ROWS = 64, 64
LARGE = 2**20  # values per row that the model keeps: 4 MB


class Hungry(nn.Module):
    """Keeps 4 MB per row between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, inputs):
        hidden = self.linear(inputs)
        wide = hidden.repeat(1, LARGE // WIDTH)
        return self.head(hidden) + wide.sin().square().mean(dim=1, keepdim=True)


@pytest.fixture
def limited():
    """Return a function that leaves so many more bytes to torch than it uses now."""

    def set_limit(num_bytes: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)

    yield set_limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def fit(**options) -> Trainer:
    torch.manual_seed(0)
    model = Hungry()
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    data = TensorDataset(torch.randn(4 * ROWS, WIDTH), torch.randint(3, (4 * ROWS,)))
    settings = {"num_epochs": 1, "per_device_batch_size": ROWS, "seed": 1, "eval_dataset": data, **options}
    trainer.result = trainer.train(data, **settings)
    return trainer


@pytest.mark.parametrize("step_mode", ["eager", "auto"])
def test_a_gpu_that_is_full_trains_in_parts(limited, step_mode, capsys):
    whole = fit(step_mode="eager")
    limited(450 * 2**20)
    split = fit(oom="split", step_mode=step_mode)
    assert split.num_parts in (2, 4) and run_of(split).stepper.num_graphs == 0
    assert torch.allclose(weights(split), weights(whole), rtol=0, atol=1e-6)
    assert split.result.metrics["eval_loss_epoch"] == pytest.approx(whole.result.metrics["eval_loss_epoch"], abs=1e-5)
    assert "run again in 2 parts of up to 32" in capsys.readouterr().out


def test_a_full_gpu_ends_the_run_with_what_would_help(limited):
    limited(450 * 2**20)
    with pytest.raises(MemoryLimitError) as caught:
        fit(step_mode="eager")
    assert "per_device_batch_size=32" in caught.value.fix and "out of memory" in caught.value.saw[0]
    needed = caught.value.saw[2]
    assert needed.startswith("the activations of a micro-batch need about 5")  # 64 rows of 2 * 4 MB and a little more
