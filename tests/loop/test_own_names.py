"""Private names of a subclass: everyday ones are free, and taking one of ours is warned of."""

import warnings

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import toys
from hf.tiny import HF_CONTRACT
from loopwright import Trainer, hf
from loopwright.collisions import CORE_CONTRACT, private_names
from loopwright.training.run import TrainingRun, run_of
from toys import pairs

# Names that people give to their own attributes and methods; all of them were taken once.
# fmt: off
EVERYDAY = [
    "_about", "_accumulate", "_agree", "_apply", "_apply_gradients", "_batch", "_begin_run", "_best",
    "_buffers", "_cache", "_callbacks", "_capture", "_clip", "_collate", "_config", "_count", "_counts_items",
    "_create_capturer", "_data", "_device", "_end_run", "_engine", "_epoch", "_eval", "_evaluate", "_finish",
    "_flow", "_graphs", "_has_graphs", "_history", "_is_complete", "_is_over", "_items", "_last", "_load",
    "_log", "_logger", "_logs", "_losses", "_lr", "_made", "_measure", "_metrics", "_model", "_num_steps",
    "_optimizer", "_parts", "_planned", "_prepare", "_progress", "_read", "_record", "_release", "_replay",
    "_reset", "_restore", "_resume", "_rng", "_run", "_run_micro_batches", "_save_state", "_saver", "_scaler",
    "_scheduler", "_seed", "_serve_requests", "_settings", "_signals", "_start", "_start_run", "_state",
    "_step", "_stop", "_tell_speed", "_throughput", "_timer", "_tracker", "_trainer", "_update", "_wandb",
    "_windows", "_write_metrics",
]
# fmt: on


# The same data as mappings, for `hf.Trainer`.
ROWS = [{"inputs": inputs, "labels": labels} for inputs, labels in pairs(24)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> object:
        outputs = self.layers(inputs)
        return outputs if labels is None else {"loss": nn.functional.mse_loss(outputs, labels), "logits": outputs}


def core_result(kind: type[Trainer], folder) -> tuple[dict, dict]:
    options = {"gradient_clip_norm": 1.0, "gradient_accumulation_steps": 2, "eval_dataset": pairs(8)}
    trainer = toys.trained((), pairs(24), 2, model=Net(), cls=kind, **options)
    trainer.save_training_state(folder / "state")
    trainer.evaluate(pairs(8))
    return trainer.result.metrics, toys.plain(toys.state_of(trainer))


def hf_result(kind: type[hf.Trainer], folder) -> tuple[list, dict]:
    model = Net()
    args = hf.TrainingArguments(str(folder), num_train_epochs=2, logging_steps=2, report_to=[], disable_tqdm=True)
    trainer = kind(model, args, train_dataset=ROWS, eval_dataset=ROWS)
    trainer.train()
    trainer.evaluate()
    logged = [{key: value for key, value in entry.items() if "second" not in key and "runtime" not in key}
              for entry in trainer.state.log_history]  # fmt: skip
    return logged, toys.plain(toys.state_of(model))


RESULTS = {"core": (Trainer, core_result), "hf": (hf.Trainer, hf_result)}


def with_attributes(base: type, names: list[str], before: bool) -> type:
    """A subclass that assigns these names in its constructor, before or after ours."""

    def __init__(self, *args, **kwargs):
        values = {name: {"mine": name} for name in names}
        if before:
            vars(self).update(values)
            for name, value in values.items():
                setattr(self, name, value)
        base.__init__(self, *args, **kwargs)
        if not before:
            for name, value in values.items():
                setattr(self, name, value)

    return type("Own", (base,), {"__init__": __init__})


def with_methods(base: type, names: list[str]) -> type:
    """A subclass with methods of these names, which nobody of ours may call."""

    def refuse(self, *args, **kwargs):
        raise AssertionError("called by the training loop")

    return type("Own", (base,), dict.fromkeys(names, refuse))


@pytest.fixture(scope="module", params=RESULTS)
def plain(request, tmp_path_factory):
    base, result = RESULTS[request.param]
    return base, result, result(base, tmp_path_factory.mktemp("plain"))


SOME = ["_run", "_losses", "_log", "_buffers", "_prepare", "_engine", "_settings"]


@pytest.mark.parametrize("names", [*([name] for name in SOME), EVERYDAY], ids=[*SOME, "all together"])
@pytest.mark.parametrize("way", ["attribute", "attribute before", "method"])
def test_everyday_names_of_a_subclass_change_no_bit(plain, names, way, tmp_path):
    base, result, expected = plain
    assert len(EVERYDAY) >= 80 and set(SOME) < set(EVERYDAY)
    kind = with_methods(base, names) if way == "method" else with_attributes(base, names, way != "attribute")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert result(kind, tmp_path) == expected


def test_few_private_names_are_ours():
    assert private_names(Trainer, CORE_CONTRACT) == {"_current_run", "_run_update"}
    assert private_names(hf.Trainer, HF_CONTRACT) == set()
    assert private_names(hf.Seq2SeqTrainer, HF_CONTRACT) == set()


def trainer_of(kind: type[Trainer]) -> Trainer:
    return toys.trainer_of((), Net(), cls=kind)


def test_a_method_that_takes_a_private_name_of_ours_is_warned_of():
    class Own(Trainer):
        def _run_update(self, window):
            super()._run_update(window)

    with pytest.warns(UserWarning, match=r"Own\._run_update has the name of a private part"):
        trainer = trainer_of(Own)
    with pytest.warns(UserWarning, match=r"Own\._run_update has the name of a private part"):
        assert trainer.train(pairs(24), 1).updates == 3


@pytest.mark.parametrize("before", [False, True])
def test_an_attribute_that_takes_our_one_private_attribute_is_warned_of_and_the_run_is_made(before, tmp_path, plain):
    kind = with_attributes(Trainer, ["_current_run"], before)
    with pytest.warns(UserWarning, match=r"Own\(\)\._current_run has the name of a private part"):
        trainer = trainer_of(kind)
        assert trainer.train(pairs(24), 1).updates == 3
    assert isinstance(run_of(trainer), TrainingRun)


def test_an_instance_attribute_over_one_of_our_methods_is_warned_of_before_the_first_update():
    trainer = trainer_of(Trainer)
    trainer._run_update = trainer._run_update
    with pytest.warns(UserWarning, match=r"Trainer\(\)\._run_update"):
        trainer.train(pairs(24), 1)


def test_names_of_the_contract_may_be_assigned_before_our_constructor():
    class Early(Trainer):
        def __init__(self, *args, **kwargs):
            self._accelerator = Accelerator(cpu=True)
            self._train_dataloader = self._eval_dataloader = None
            self.seed = 5
            super().__init__(*args, **kwargs)

        def _clip_gradients(self):
            self.gradient_norm = torch.tensor(2.0)

    trainer = trainer_of(Early)
    trainer._accelerator = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer._accelerator = Accelerator(cpu=True)
        assert trainer.train(pairs(24), 1, gradient_clip_norm=1.0).updates == 3
    assert float(trainer.gradient_norm) == 2.0
