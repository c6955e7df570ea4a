"""Names, errors and restored callbacks that transformers' own tests of its Trainer ask for."""

import pytest
import torch
from torch import nn

from loopwright import hf
from loopwright.hf import (
    CallbackHandler,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    ExportableState,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from .tiny import Classifier, assert_refused, fit, folders, logged, made, on, rows, same, t5

EVERY_STEP = {
    **{"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1},
    **{"eval_dataset": rows(8), "metric_for_best_model": "loss", "num_train_epochs": 2},
}


class Named(TrainerCallback, ExportableState):
    """A callback with a constructor value."""

    def __init__(self, name="unnamed"):
        self.name = name

    def state(self):
        return {"args": {"name": self.name}, "attributes": {}}


def names(trainer):
    return [each.name for each in trainer.callback_handler.callbacks if isinstance(each, Named)]


def test_constructor_values_of_callbacks_are_restored_on_request(tmp_path):
    # No loss improves by 10, so the run ends when its patience is exhausted.
    whole = fit(tmp_path / "whole", Named("a"), EarlyStoppingCallback(3, 10.0), Named("b"), **EVERY_STEP)
    assert whole.state.global_step == 4
    given = {"resume": tmp_path / "whole" / "checkpoint-2", **EVERY_STEP}
    restored = {"restore_callback_states_from_checkpoint": True}
    again = fit(tmp_path / "again", Named(), EarlyStoppingCallback(), Named(), **given, **restored)
    assert same(again, whole) and again.state.global_step == 4 and names(again) == ["a", "b"]
    again = fit(tmp_path / "other", Named(), EarlyStoppingCallback(2, 10.0), Named(), **given)
    assert again.state.global_step == 3 and names(again) == ["unnamed", "unnamed"]  # the saved counter was 1


def test_the_control_is_restored_and_missing_and_repeated_callbacks_are_reported(tmp_path, caplog):
    fit(tmp_path, Named("a"), save_strategy="epoch")
    trainer = made(tmp_path, restore_callback_states_from_checkpoint=True)
    assert caplog.records == []
    trainer.state = TrainerState.load_from_json(tmp_path / "checkpoint-5" / "trainer_state.json")
    trainer._load_callback_state()
    assert trainer.control.should_training_stop and "this run does not have: ['Named']" in caplog.text
    CallbackHandler([DefaultFlowCallback, Named, Named("b")])
    assert "there already is a callback of class Named" in caplog.text and "no DefaultFlowCallback" not in caplog.text
    CallbackHandler([Named])
    assert "there is no DefaultFlowCallback" in caplog.text


def test_a_subclass_of_early_stopping_decides_what_an_improvement_is(tmp_path):
    class Impatient(EarlyStoppingCallback):
        def check_metric_value(self, args, state, control, metric_value):
            self.early_stopping_patience_counter += metric_value > 0

    assert fit(tmp_path, Impatient(2), **EVERY_STEP).state.global_step == 2


def test_a_state_takes_callbacks_and_a_control_resets_its_flags(tmp_path):
    state = TrainerState(stateful_callbacks=[Named("a"), TrainerControl()])
    assert state.stateful_callbacks["Named"] == {"args": {"name": "a"}, "attributes": {}}
    state.init_training_references(made(tmp_path), 7, 2, None)
    assert (state.max_steps, state.num_train_epochs, state.is_world_process_zero) == (7, 2, True)
    control = TrainerControl(True, True, True, True, True)
    control._new_training()
    control._new_epoch()
    control._new_step()
    assert control == TrainerControl()


def test_the_greedy_schedule_of_transformers_steps_after_evaluations_and_resumes(tmp_path):
    greedy = pytest.importorskip("transformers.optimization").GreedyLR
    options = {"patience": 0, "factor": 0.5, "min_lr": 1e-6}

    def run(folder, **more):
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return fit(folder, model=model, optimizers=(optimizer, greedy(optimizer, **options)), **{**EVERY_STEP, **more})

    torch.manual_seed(0)
    whole = run(tmp_path / "whole")
    assert len(set(logged(whole, "learning_rate"))) > 2 and whole._get_learning_rate() == whole.get_learning_rates()[0]
    torch.manual_seed(0)
    resumed = run(tmp_path / "resumed", resume=tmp_path / "whole" / "checkpoint-4")
    assert same(resumed, whole) and logged(resumed, "learning_rate") == logged(whole, "learning_rate")


def test_a_best_checkpoint_that_was_saved_before_its_evaluation_is_recorded(tmp_path):
    values = iter([0.5, 0.9])

    class Patched(Trainer):
        def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler=False):
            return {"eval_accuracy": -next(values)}

    options = {**EVERY_STEP, "eval_strategy": "epoch", "metric_for_best_model": "accuracy", "compute_metrics": len}
    trainer = fit(tmp_path, kind=Patched, **options)
    assert trainer.state.best_global_step == 5 and len(folders(tmp_path)) == 10
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-5")


def raised(case, library, folder):
    with pytest.raises(Exception) as caught:
        case(library, library.TrainingArguments(str(folder)))
    return type(caught.value)


def test_errors_are_of_the_kinds_that_transformers_raises(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = Classifier()
    pair = (torch.optim.SGD(model.parameters(), lr=1.0), None)
    quantized = Classifier()
    quantized.is_quantized = True
    cases = [
        lambda lib, args: lib.Trainer(args=args),
        lambda lib, args: lib.Trainer(model, args, model_init=Classifier),
        lambda lib, args: lib.Trainer(args=args, model_init=Classifier, optimizers=pair),
        lambda lib, args: lib.Trainer(args=args, model_init=lambda: None),
        lambda lib, args: lib.Trainer(model, args, optimizers=pair, optimizer_cls_and_kwargs=(torch.optim.SGD, {})),
        lambda lib, args: lib.Trainer(quantized, args, train_dataset=rows(4)),
        lambda lib, args: lib.Trainer(model, args).train(),
        lambda lib, args: lib.Trainer(model, args).evaluate(),
        lambda lib, args: lib.Trainer(model, args).get_learning_rates(),
        lambda lib, args: lib.Trainer(model, args, train_dataset=rows(4)).train(resume_from_checkpoint=True),
    ]
    for case in cases:
        theirs = raised(case, transformers, tmp_path)
        assert theirs in (RuntimeError, ValueError) and issubclass(raised(case, hf, tmp_path), theirs)


def test_loaders_and_the_trainer_give_the_size_of_a_batch(tmp_path):
    trainer = made(tmp_path, gradient_accumulation_steps=3, per_device_eval_batch_size=2, eval_dataset=rows(4))
    assert trainer.get_train_dataloader().total_batch_size == 4 and trainer.get_eval_dataloader().total_batch_size == 2
    assert trainer.get_total_train_batch_size(trainer.args) == 12
    assert trainer.get_tp_size() == trainer.get_cp_size() == trainer.get_sp_size() == 1
    trainer.accelerator.prepare = nn.Identity()
    assert trainer.accelerator.prepare(5) == 5


def test_a_generation_config_that_cannot_be_saved_is_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    wrong = transformers.GenerationConfig(do_sample=False, top_p=0.9)
    args = Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, generation_config=wrong)
    assert_refused("generation_config: .*cannot be saved", Seq2SeqTrainer, t5(), args)


def test_overriding_a_method_that_is_never_called_is_reported(tmp_path, caplog):
    kind = type("Longer", (Trainer,), {"set_initial_training_values": lambda self, *given: None})
    made(tmp_path, on(), kind=kind)
    assert "never calls Longer.set_initial_training_values; its job is done by max_steps" in caplog.text
