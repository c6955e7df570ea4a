"""Bad input is refused before anything is touched, by an error that says what was given, what is needed, and a fix."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import toys
from loopwright import Trainer
from loopwright.callbacks import EarlyStoppingCallback, SaveBestModelCallback, TrainerCallback
from loopwright.checkpoint import Checkpointing
from loopwright.errors import BatchLossError, CheckpointError, ConfigError, ConfigTypeError, DataError
from loopwright.schedulers import CosineLrScheduler
from toys import Stream, pairs, plain


class Started(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_training_run_start(self, trainer, **kwargs):
        self.events.append("training")

    def on_evaluation_run_start(self, trainer, **kwargs):
        self.events.append("evaluation")


def trainer_of(model=None, cls=Trainer, **kwargs):
    return toys.trainer_of([Started()], nn.Linear(4, 1) if model is None else model, 0.1, cls=cls, **kwargs)


def trained(**kwargs):
    """A trainer that has already trained, so that there is something to lose."""
    trainer = trainer_of()
    trainer.train(pairs(), **{"num_epochs": 1, **kwargs})
    return trainer


def snapshot(trainer) -> dict:
    """Everything of a trainer that a refused call must leave alone."""
    return {
        "weights": plain(trainer.model.state_dict()),
        "optimizer": plain(trainer.optimizer.state_dict()),
        "mode": trainer.model.training,
        "history": trainer.run_history.state_dict(),
        "progress": trainer.progress.state_dict(),
        "seed": trainer.seed,
        "objects": [id(vars(trainer)[name]) for name in sorted(vars(trainer)) if name != "callback_handler"],
        "events": list(trainer.callback_handler.callbacks[0].events),
        "random": plain(torch.get_rng_state()),
    }


def assert_refused(error: type[Exception], texts, trainer, call) -> None:
    """The call raises exactly this error, with these texts in it, and changes nothing."""
    before = snapshot(trainer)
    with pytest.raises(error) as caught:
        call(trainer)
    assert type(caught.value) is error
    for text in texts:
        assert text in str(caught.value), str(caught.value)
    assert snapshot(trainer) == before


STEP_LR = torch.optim.lr_scheduler.StepLR
WHOLE = "must be a whole number of at least 1"


class Empty(Dataset):
    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError(index)


@pytest.mark.parametrize(
    ("kwargs", "error", "texts"),
    [
        ({"train_dataset": Empty()}, DataError, ["train_dataset is empty", "no samples"]),
        ({"train_dataset": []}, DataError, ["train_dataset is empty"]),
        ({"train_dataset": pairs(0)}, DataError, ["train_dataset is empty"]),
        ({"train_dataset": DataLoader(pairs(3), batch_size=4, drop_last=True)}, DataError, ["without a batch"]),
        ({"eval_dataset": []}, DataError, ["eval_dataset is empty"]),
        (
            {"train_dataset": pairs(7), "per_device_batch_size": 8, "train_dataloader_kwargs": {"drop_last": True}},
            DataError,
            ["7 samples", "one batch of 8", "drop_last=True", "Lower the batch size or pass drop_last=False"],
        ),
        (
            {"train_dataloader_kwargs": {"drop_last": True, "batch_size": 100}},
            DataError,
            ["8 samples", "one batch of 100"],
        ),
        (
            {"eval_dataset": pairs(3), "eval_dataloader_kwargs": {"drop_last": True}},
            DataError,
            ["eval_dataset has 3 samples", "one batch of 4"],
        ),
        ({"num_epochs": 0}, ConfigError, ["num_epochs", WHOLE, "got 0"]),
        ({"num_epochs": -3}, ConfigError, ["num_epochs", WHOLE, "got -3"]),
        ({"num_epochs": 1.5}, ConfigError, ["num_epochs", WHOLE, "got 1.5"]),
        ({"num_epochs": "2"}, ConfigError, ["num_epochs", WHOLE, "got '2'"]),
        ({"num_epochs": True}, ConfigError, ["num_epochs", WHOLE, "got True"]),
        ({"num_epochs": None}, ConfigError, ["num_epochs", WHOLE, "got None"]),
        ({"per_device_batch_size": 0}, ConfigError, ["per_device_batch_size", WHOLE, "got 0"]),
        ({"per_device_batch_size": None}, ConfigError, ["per_device_batch_size", WHOLE, "got None"]),
        ({"gradient_accumulation_steps": 0}, ConfigError, ["gradient_accumulation_steps", WHOLE, "got 0"]),
        ({"gradient_accumulation_steps": -1}, ConfigError, ["gradient_accumulation_steps", WHOLE, "got -1"]),
        ({"gradient_accumulation_steps": None}, ConfigError, ["gradient_accumulation_steps", WHOLE, "got None"]),
        ({"max_num_train_steps": 0}, ConfigError, ["max_num_train_steps", WHOLE, "got 0"]),
        ({"log_every": 0}, ConfigError, ["log_every", WHOLE, "got 0"]),
        ({"step_mode": "turbo"}, ConfigError, ["step_mode", "auto", "eager", "compile", "got 'turbo'"]),
        ({"mixed_precision": "fp12"}, ConfigError, ["mixed_precision", '"no", "fp16", "bf16" or "fp8"', "got 'fp12'"]),
        ({"evaluate_every": 0}, ConfigError, ["evaluate_every", "number of updates", '"N epochs"', "got 0"]),
        ({"evaluate_every": -5}, ConfigError, ["evaluate_every", "got -5"]),
        ({"evaluate_every": 2.5}, ConfigError, ["evaluate_every", "got 2.5"]),
        ({"evaluate_every": "sometimes"}, ConfigError, ["evaluate_every", "got 'sometimes'"]),
        ({"evaluate_every": "2 hours"}, ConfigError, ["evaluate_every", "got '2 hours'"]),
        ({"evaluate_every": "epochs"}, ConfigError, ["evaluate_every", "got 'epochs'"]),
        ({"resume_from": "no/such/folder"}, ConfigError, ["resume_from='no/such/folder'", "not a folder", '"auto"']),
        ({"resume_from": "auto"}, ConfigError, ['resume_from="auto"', "checkpoints=Checkpointing("]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_an_argument_that_cannot_work_is_refused(kwargs, error, texts):
    arguments = {"train_dataset": pairs(), "num_epochs": 1, "per_device_batch_size": 4, **kwargs}
    trainer = trained(num_epochs=2, per_device_batch_size=4, seed=1)
    assert_refused(error, texts, trainer, lambda trainer: trainer.train(**arguments))


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    texts = [str(tmp_path), "holds no checkpoint"]
    assert_refused(ConfigError, texts, trained(), lambda trainer: trainer.train(pairs(), 1, resume_from=tmp_path))


def test_auto_starts_over_where_there_is_nothing_yet(tmp_path):
    checkpoints = Checkpointing(tmp_path / "none yet")
    assert trainer_of().train(pairs(), 1, checkpoints=checkpoints, resume_from="auto").updates == 1


@pytest.mark.parametrize("name", ["every_updates", "every_epochs", "keep_last"])
def test_checkpoint_intervals_below_one_are_refused(name, tmp_path):
    with pytest.raises(ConfigError, match=f"{name} must be a whole number of at least 1, got 0"):
        Checkpointing(tmp_path, **{name: 0})


def test_errors_about_arguments_are_value_errors_so_that_old_handlers_catch_them():
    assert all(issubclass(error, ValueError) for error in (ConfigError, DataError, BatchLossError))
    assert issubclass(ConfigTypeError, ConfigError) and issubclass(ConfigTypeError, TypeError)
    assert not issubclass(CheckpointError, ValueError)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (partial(STEP_LR, step_size=1), "StepLR"),
        (torch.optim.lr_scheduler.ReduceLROnPlateau, "ReduceLROnPlateau"),
        (partial(CosineLrScheduler, total_num_epochs=1, num_update_steps_per_epoch=1), "CosineLrScheduler"),
    ],
)
def test_a_scheduler_instead_of_a_factory_is_refused_and_told_how_to_make_one(make, name):
    trainer = trained()
    scheduler = make(trainer.optimizer)
    texts = [f"got a {name}", "already created", f"functools.partial({name}, ...)"]
    call = partial(Trainer.train, train_dataset=pairs(), num_epochs=1, create_scheduler_fn=scheduler)
    assert_refused(ConfigTypeError, texts, trainer, call)
    with pytest.raises(TypeError):
        call(trainer)


def test_a_factory_that_cannot_be_called_is_refused():
    texts = ["create_scheduler_fn", "not callable", "'cosine'"]
    call = partial(Trainer.train, train_dataset=pairs(), num_epochs=1, create_scheduler_fn="cosine")
    assert_refused(ConfigTypeError, texts, trained(), call)


def test_a_model_without_parameters_is_refused():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    trainer = trainer_of(nn.ReLU(), optimizer=optimizer)
    assert_refused(ConfigError, ["ReLU has no parameters", "nothing to train"], trainer, train_once)


def test_a_model_without_trainable_parameters_is_refused_but_may_be_evaluated():
    model = nn.Linear(4, 1)
    trainer = trainer_of(model)
    model.requires_grad_(False)
    texts = ["Linear has no trainable parameters", "all 2", "Unfreeze some, or use evaluate()"]
    assert_refused(ConfigError, texts, trainer, train_once)
    assert trainer.evaluate(pairs()).metrics["evaluation_loss"] > 0


def test_an_optimizer_of_none_of_the_models_parameters_is_refused_and_one_of_some_is_fine():
    stranger = torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1)
    texts = ["the optimizer holds none of the parameters of Linear", "another model", "model.parameters()"]
    assert_refused(ConfigError, texts, trainer_of(optimizer=stranger), train_once)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    assert trainer_of(model, optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1)).train(pairs(), 1).updates == 1


def train_once(trainer, dataset=None):
    return trainer.train(pairs() if dataset is None else dataset, 1, train_dataloader_kwargs={"num_workers": 0})


def assert_refused_at_the_first_batch(error: type[Exception], texts, trainer, call=train_once) -> None:
    """The run begins, and ends at its first batch: the weights are as before."""
    weights = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(error) as caught:
        call(trainer)
    for text in texts:
        assert text in str(caught.value), str(caught.value)
    torch.testing.assert_close(trainer.model.state_dict(), weights, rtol=0, atol=0)
    assert trainer.progress.update == 0
    assert trainer.run_history.get_metric_names() == set()


def returning(make_output):
    """A trainer whose batch loss is what the function makes of the right one."""

    class Returning(Trainer):
        def calculate_train_batch_loss(self, batch):
            return make_output(super().calculate_train_batch_loss(batch))

        def calculate_eval_batch_loss(self, batch):
            return make_output(super().calculate_eval_batch_loss(batch))

    return trainer_of(cls=Returning)


def without(*names):
    return lambda output: {name: value for name, value in output.items() if name not in names}


def with_loss(change):
    return lambda output: {**output, "loss": change(output["loss"])}


METHOD = "calculate_train_batch_loss returned"


@pytest.mark.parametrize(
    ("make_output", "texts"),
    [
        (lambda output: output["loss"], [f"{METHOD} a Tensor", "must return a dict", "loss, model_outputs"]),
        (lambda output: None, [f"{METHOD} a NoneType", "must return a dict"]),
        (lambda output: (output["loss"], 4), [f"{METHOD} a tuple", "must return a dict"]),
        (without("loss"), ["a dict without loss;", "it must have loss", "has model_outputs, batch_size"]),
        (without("batch_size"), ["a dict without batch_size;", "has loss, model_outputs"]),
        (without("loss", "batch_size"), ["without loss, batch_size", "has model_outputs"]),
        (lambda output: {}, ["without loss, batch_size", "no keys"]),
        (with_loss(lambda loss: loss.repeat(4)), ["a loss of shape (4,)", "must be a scalar", "reduction='mean'"]),
        (with_loss(lambda loss: loss.item()), ["a loss of type float", "must be a scalar tensor"]),
        (with_loss(lambda loss: loss.detach()), ["a loss without a gradient", "nothing can be trained", "detach()"]),
    ],
)
def test_a_batch_loss_that_cannot_be_used_is_refused_at_the_first_batch(make_output, texts):
    assert_refused_at_the_first_batch(BatchLossError, texts, returning(make_output))


def test_a_loss_function_without_reduction_is_refused():
    trainer = trainer_of(loss_func=nn.MSELoss(reduction="none"))
    assert_refused_at_the_first_batch(BatchLossError, ["shape (8, 1)", "reduction='mean'"], trainer)


@pytest.mark.parametrize(
    ("make_output", "texts"),
    [
        (lambda output: None, ["calculate_eval_batch_loss returned a NoneType"]),
        (without("loss"), ["calculate_eval_batch_loss returned a dict without loss"]),
        (with_loss(lambda loss: loss.item()), ["calculate_eval_batch_loss returned a loss of type float"]),
    ],
)
def test_an_evaluation_batch_loss_that_cannot_be_used_is_refused(make_output, texts):
    evaluate = partial(Trainer.evaluate, dataset=pairs())
    assert_refused_at_the_first_batch(BatchLossError, texts, returning(make_output), evaluate)


def test_a_loss_of_one_element_and_a_missing_model_output_are_fine():
    trainer = returning(lambda output: {"loss": output["loss"].reshape(1), "batch_size": output["batch_size"]})
    assert train_once(trainer).updates == 1


class Rows(Dataset):
    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}


X, Y = pairs().tensors


class Named(nn.Linear):
    def forward(self, x):
        return super().forward(x)


def test_a_mapping_batch_without_labels_is_refused_where_a_loss_function_needs_them():
    texts = ["needs labels for the loss_func", "got x, target", "Rename the target to labels", "override"]
    train = partial(train_once, dataset=Rows(x=X, target=Y))
    assert_refused_at_the_first_batch(BatchLossError, texts, trainer_of(Named(4, 1)), train)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, left, right):
        if right is None:
            raise TypeError("an error of the model's own")
        return self.layer(left + right)


class TwoInputsInTraining(Trainer):
    def calculate_train_batch_loss(self, batch):
        outputs = self.model(batch[0], batch[1])
        return {"loss": self.loss_func(outputs, batch[2]), "model_outputs": outputs, "batch_size": len(batch[0])}


def test_a_tuple_batch_for_a_model_of_two_inputs_is_refused_with_what_to_do():
    said = [
        "forward takes left, right",
        "only the first entry",
        "a dict with the argument names of the forward",
        "override",
    ]
    dataset = TensorDataset(X, X, Y)
    trainer = toys.trainer_of((), TwoInputs(), cls=Trainer)
    for run in (lambda: trainer.train(dataset, 1), lambda: trainer.evaluate(dataset), lambda: trainer.predict(dataset)):
        with pytest.raises(BatchLossError) as caught:
            run()
        assert all(part in str(caught.value) for part in said)
    trainer = TwoInputsInTraining(trainer.model, nn.MSELoss(), trainer.optimizer, callbacks=[])
    with pytest.raises(BatchLossError, match="calculate_eval_batch_loss"):
        trainer.train(dataset, 1, dataset)
    rows = Rows(left=X, right=X, labels=Y)
    Trainer(trainer.model, nn.MSELoss(), trainer.optimizer, callbacks=[]).train(rows, 1, rows)


def test_a_mapping_batch_with_other_names_than_the_model_takes_is_refused_with_both():
    with pytest.raises(BatchLossError, match="forward takes left, right, but the batch has left, other, which"):
        trainer_of(TwoInputs()).train(Rows(left=X, other=X, labels=Y), 1)


class Around(nn.Module):
    """A model of the user's own that has another one in an attribute of the name that wrappers use."""

    def __init__(self):
        super().__init__()
        self.module = TwoInputs()

    def forward(self, both):
        return self.module(both, None)


@pytest.mark.parametrize(
    ("model", "dataset", "collate_fn"),
    [
        (TwoInputs(), Rows(left=X, labels=Y), lambda rows: {**default_collate(rows), "right": None}),
        (Around(), TensorDataset(X, Y), None),
    ],
)
def test_a_type_error_of_the_model_itself_stays_as_it_is(model, dataset, collate_fn):
    with pytest.raises(TypeError, match="an error of the model's own"):
        trainer_of(model).train(dataset, 1, collate_fn=collate_fn)


def test_a_class_in_place_of_an_object_is_refused_with_how_to_make_one():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for given, told in (
        ((nn.Linear, nn.MSELoss(), optimizer), r"model is the class Linear itself. Pass an instance: Linear\("),
        ((model, nn.MSELoss, optimizer), r"loss_func is the class MSELoss itself. Pass an instance: MSELoss\("),
        ((model, nn.MSELoss(), torch.optim.SGD), r"optimizer is the class SGD .* SGD\(model.parameters\(\), ...\)"),
    ):
        with pytest.raises(ConfigTypeError, match=told):
            Trainer(*given, callbacks=[]).train(pairs(), 1)


def test_a_single_callback_in_place_of_a_list_is_refused():
    for given in (Started(), Started):
        with pytest.raises(ConfigTypeError, match=r"must be a list of callbacks, got Started. Pass \[Started\(...\)\]"):
            Trainer(nn.Linear(4, 1), nn.MSELoss(), None, callbacks=given)


def test_a_resume_from_that_is_not_a_path_is_refused_with_what_it_may_be(tmp_path):
    with pytest.raises(ConfigTypeError, match='or "auto" for the newest of `checkpoints`, got True'):
        trainer_of().train(pairs(), 1, checkpoints=Checkpointing(tmp_path), resume_from=True)


@pytest.mark.parametrize("kind", [EarlyStoppingCallback, SaveBestModelCallback])
def test_watching_the_evaluation_of_a_run_without_one_is_refused_before_the_first_update(kind, tmp_path):
    trainer = trainer_of()
    trainer.callback_handler.add_callback(kind)
    with pytest.raises(ConfigError, match=f"{kind.__name__} watches eval_loss_epoch, and the run has no evaluation"):
        trainer.train(pairs(), 1)
    assert trainer.progress.update == 0


def test_a_best_checkpoint_by_a_metric_that_no_evaluation_records_is_reported_once(tmp_path, capsys):
    policy = Checkpointing(tmp_path, keep_best=("acuracy", "max"))
    trainer_of().train(pairs(), 3, pairs(), checkpoints=policy)
    told = "keep_best: the evaluation recorded no acuracy, so no checkpoint is kept as the best one; there are "
    assert capsys.readouterr().out.count(f"{told}eval_loss_epoch, train_loss_epoch\n") == 1


def test_no_loss_function_is_refused_for_tuple_batches():
    texts = ["loss_func is None", "mapping batch", "got a batch of type list", "Pass a loss_func"]
    assert_refused_at_the_first_batch(BatchLossError, texts, trainer_of(loss_func=None))


@pytest.mark.parametrize("outputs", [lambda y: y, lambda y: {"logits": y}, lambda y: {"loss": None, "logits": y}])
def test_no_loss_function_is_refused_for_a_model_without_a_loss(outputs):
    class Model(Named):
        def forward(self, x):
            return outputs(super().forward(x))

    trainer = trainer_of(Model(4, 1), loss_func=None)
    texts = ["outputs have no loss", "a batch with x", "when the batch has labels", "Pass a loss_func"]
    assert_refused_at_the_first_batch(BatchLossError, texts, trainer, partial(train_once, dataset=Rows(x=X)))


def test_an_evaluation_of_nothing_is_refused():
    texts = ["nothing to evaluate", "pass a dataset"]
    assert_refused(ConfigError, texts, trained(), lambda trainer: trainer.evaluate())


@pytest.mark.parametrize(
    ("kwargs", "error", "texts"),
    [
        ({"dataset": []}, DataError, ["dataset is empty"]),
        ({"dataset": pairs(3), "dataloader_kwargs": {"drop_last": True}}, DataError, ["3 samples", "one batch of 8"]),
        ({"dataset": pairs(), "per_device_batch_size": 0}, ConfigError, ["per_device_batch_size", WHOLE, "got 0"]),
    ],
)
def test_an_evaluation_that_cannot_work_is_refused(kwargs, error, texts):
    assert_refused(error, texts, trained(), lambda trainer: trainer.evaluate(**kwargs))


def test_states_cannot_be_saved_or_loaded_before_a_run(tmp_path):
    trainer = trainer_of()
    for call in (trainer.save_training_state, trainer.load_training_state):
        with pytest.raises(ConfigError, match=r"needs a trainer that has been prepared by train\(\)"):
            call(tmp_path)


def test_an_empty_loader_of_the_users_own_is_tolerated():
    class Own(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return []

        def create_eval_dataloader(self, batch_size, eval_dl_kwargs=None):
            return []

    result = trainer_of(cls=Own).train([], 2, [])
    assert (result.updates, result.epochs) == (0, 2)
    metrics = {name: str(value) for name, value in result.metrics.items()}
    assert metrics == {"train_loss_epoch": "nan", "eval_loss_epoch": "nan"}


def test_an_empty_stream_is_only_known_to_be_empty_when_it_is_read():
    assert trainer_of().train(Stream([]), 1).updates == 0


def test_a_run_after_a_refused_call_goes_as_if_it_had_not_been_made():
    def weights(refused_calls: int) -> torch.Tensor:
        torch.manual_seed(0)
        trainer = trainer_of()
        for _ in range(refused_calls):
            with pytest.raises(ConfigError):
                trainer.train(pairs(), 0)
        trainer.train(pairs(), 2, per_device_batch_size=2)
        return trainer.model.weight.detach().clone()

    assert torch.equal(weights(0), weights(3))
