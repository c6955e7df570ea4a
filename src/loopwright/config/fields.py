"""The fields of `TrainingArguments`, in the order, with the names and the defaults of transformers.

Each field is one of three kinds, stored in its metadata: `honoured` (the same effect as in transformers), `accepted`
(no effect, and the text says why that is right), `refused` (any value but the default raises ConfigError with an
alternative).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from loopwright.config.choices import IntervalStrategy, SaveStrategy, SchedulerType
from loopwright.config.old_names import TrainingOldNames

T = TypeVar("T")

DEFAULT_OUTPUT_DIR = "trainer_output"
LOG_LEVELS = ("debug", "info", "warning", "error", "critical", "passive")
SAMPLING_STRATEGIES = ("random", "sequential", "group_by_length")
STEP_MODES = ("auto", "eager", "compile", "graph")
NAN_POLICIES = ("stop", "skip")
BAD_SAMPLE_POLICIES = ("raise", "skip")
REDUCTIONS = ("fast", "exact")

_HUB = "uploading is not done here; save with trainer.save_model() and upload the folder with huggingface_hub"
_SHARDING = 'fsdp="full_shard" splits weights, gradients and the state of the optimizer over the processes'
_LIGER = "apply liger-kernel's own patch to the model before it is given to the Trainer"
_TRACKIO = "read by transformers' trackio callback, which is given these arguments"


def honoured(default: T, help_text: str, **metadata: Any) -> T:
    """Declare a field that has its effect here."""
    return field(default=default, metadata={"kind": "honoured", "help": help_text, **metadata})


def honoured_list(help_text: str) -> list[str]:
    """Declare an honoured field that is a list, empty by default."""
    metadata = {"kind": "honoured", "help": help_text}
    return field(default_factory=list, metadata=metadata)


def accepted(default: T, why: str) -> T:
    """Declare a field without effect here, for a reason that the user would agree with."""
    return field(default=default, metadata={"kind": "accepted", "help": why})


def refused(default: T, instead: str, *also_fine: Any) -> T:
    """Declare a field that accepts only the default, or a value that means the same."""
    metadata = {"kind": "refused", "help": instead, "is_hidden": True, "also_fine": also_fine}
    return field(default=default, metadata=metadata)


@dataclass(repr=False)
class TrainingFields(TrainingOldNames):
    """The fields alone; `TrainingArguments` checks them and offers what is derived from them."""

    output_dir: str = honoured(DEFAULT_OUTPUT_DIR, "Folder of the checkpoints; ~ is your home.")
    per_device_train_batch_size: int = honoured(8, "Samples of one training micro-batch on one device.")
    num_train_epochs: float = honoured(3.0, "Epochs; a fraction ends inside one.")
    max_steps: int = honoured(-1, "Updates in all, instead of num_train_epochs; -1 leaves it to the epochs.")

    # Optimizer and schedule
    learning_rate: float = honoured(5e-5, "Peak learning rate.")
    lr_scheduler_type: SchedulerType | str = honoured("linear", "Learning rate schedule.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = honoured(None, "Arguments of the schedule, as JSON.")
    warmup_steps: float = honoured(0, "Updates in which the learning rate rises; below 1 a fraction of all updates.")
    optim: str = honoured("adamw_torch_fused", "Optimizer, by transformers' name or that of a torch.optim class.")
    optim_args: str | None = honoured(None, 'Arguments of the optimizer, as "key=value,key=value".')
    weight_decay: float = honoured(0.0, "Weight decay; biases and norm layers have none.")
    adam_beta1: float = honoured(0.9, "Beta 1 of Adam.")
    adam_beta2: float = honoured(0.999, "Beta 2 of Adam.")
    adam_epsilon: float = honoured(1e-8, "Epsilon of Adam.")
    optim_target_modules: str | list[str] | None = refused(
        None, "low-rank optimizers are not built in; give the Trainer optimizer_cls_and_kwargs= or optimizers="
    )
    gradient_accumulation_steps: int = honoured(1, "Micro-batches of one update on one device.")
    average_tokens_across_devices: bool = refused(
        True, "the loss is always the mean over the tokens of all processes; leave it True"
    )
    max_grad_norm: float = honoured(1.0, "Largest norm of the gradient; 0 does not clip.")
    label_smoothing_factor: float = honoured(0.0, "Label smoothing, 0 is none.")

    # Precision, memory and speed
    bf16: bool = honoured(False, "Train in bfloat16 autocast.")
    fp16: bool = honoured(False, "Train in float16 autocast, with a gradient scaler.")
    bf16_full_eval: bool = refused(False, "bf16=True evaluates in bfloat16 too, and model.to(torch.bfloat16) casts it")
    fp16_full_eval: bool = refused(False, "fp16=True evaluates in float16 too, and model.half() casts it")
    tf32: bool | None = honoured(None, "TF32 in matrix products of NVIDIA GPUs; unset leaves torch's setting.")
    gradient_checkpointing: bool = honoured(False, "Compute activations again in the backward pass: less memory.")
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = honoured(
        None, "Arguments of the model's gradient_checkpointing_enable, as JSON."
    )
    torch_compile: bool = honoured(False, "Compile the model with torch.compile.")
    torch_compile_backend: str | None = honoured(None, "Backend of torch.compile; setting it compiles.")
    torch_compile_mode: str | None = honoured(None, "Mode of torch.compile; setting it compiles.")
    use_liger_kernel: bool = refused(False, _LIGER)
    liger_kernel_config: dict[str, bool] | None = refused(None, _LIGER)
    use_cache: bool = honoured(False, "The model's config.use_cache.")
    neftune_noise_alpha: float | None = refused(
        None, "add the noise with a forward hook on model.get_input_embeddings()"
    )
    torch_empty_cache_steps: int | None = refused(
        None, "call torch.cuda.empty_cache() in a callback's on_step_end, or set PYTORCH_CUDA_ALLOC_CONF"
    )
    auto_find_batch_size: bool = honoured(
        False, "When memory runs out, run the update again in smaller micro-batches; its loss and gradient stay."
    )

    # Logging
    logging_strategy: IntervalStrategy | str = honoured("steps", "When to log: no, steps, epoch.")
    logging_steps: float = honoured(500, "Updates between two logs; below 1 a fraction of all updates.")
    logging_first_step: bool = honoured(False, "Log the first update too.")
    log_on_each_node: bool = honoured(True, "Log on the first process of each node, not of the first node only.")
    logging_nan_inf_filter: bool = refused(
        False, 'it would hide a loss that is not finite; nan="stop" ends such a run and nan="skip" leaves the batch out'
    )
    include_num_input_tokens_seen: str | bool = refused(
        "no", "count the tokens in the data collator or in a callback, where it costs no exchange per update", False
    )
    log_level: str = honoured("passive", "Log level of the main process.", choices=LOG_LEVELS)
    log_level_replica: str = honoured("warning", "Log level of the other processes.", choices=LOG_LEVELS)
    disable_tqdm: bool | None = honoured(None, "Show no progress bar.")
    report_to: list[str] | str | None = honoured("none", "Trackers to report to: tensorboard, wandb, ..., all, none.")
    run_name: str | None = accepted(None, "Name of the run, for trackers.")
    project: str = accepted("huggingface", "Name of the project, for trackers.")
    trackio_space_id: str | None = accepted(None, _TRACKIO)
    trackio_bucket_id: str | None = accepted(None, _TRACKIO)
    trackio_static_space_id: str | bool | None = accepted(None, _TRACKIO)

    # Evaluation
    eval_strategy: IntervalStrategy | str = honoured("no", "When to evaluate: no, steps, epoch.")
    eval_steps: float | None = honoured(
        None, "Updates between two evaluations; below 1 a fraction of all updates; unset is logging_steps."
    )
    eval_delay: float = honoured(0, "Epochs or updates (as eval_strategy counts) before the first evaluation.")
    per_device_eval_batch_size: int = honoured(8, "Samples of one evaluation batch on one device.")
    prediction_loss_only: bool = honoured(False, "Evaluate the loss alone.")
    eval_on_start: bool = honoured(False, "Evaluate once before the first update.")
    eval_do_concat_batches: bool = honoured(True, "Join the predictions of all batches; otherwise a list of them.")
    eval_use_gather_object: bool = refused(
        False, "make the labels tensors in the data collator, which are gathered from all processes without it"
    )
    eval_accumulation_steps: int | None = accepted(None, "Predictions go to the CPU after every batch.")
    include_for_metrics: list[str] = honoured_list("What else compute_metrics is given: inputs, loss.")
    batch_eval_metrics: bool = honoured(False, "Call compute_metrics per batch, with compute_result=.")

    # Saving
    save_only_model: bool = refused(
        False, 'a checkpoint that cannot be resumed is none; set save_strategy="no" and call trainer.save_model()'
    )
    save_strategy: SaveStrategy | str = honoured("steps", "When to save: no, steps, epoch, best.")
    save_steps: float = honoured(500, "Updates between two checkpoints; below 1 a fraction of all updates.")
    save_on_each_node: bool = refused(
        False, "checkpoints are written once, by the main process; put output_dir on storage that all nodes see"
    )
    save_total_limit: int | None = honoured(None, "Checkpoints to keep beside the best one; unset keeps all.")
    enable_jit_checkpoint: bool = accepted(False, "A run that is told to end by SIGTERM always saves first.")
    push_to_hub: bool = refused(False, _HUB)
    hub_token: str | None = refused(None, _HUB)
    hub_private_repo: bool | None = refused(None, _HUB)
    hub_model_id: str | None = refused(None, _HUB)
    hub_strategy: str = refused("every_save", _HUB)
    hub_always_push: bool = refused(False, _HUB)
    hub_revision: str | None = refused(None, _HUB)
    load_best_model_at_end: bool = honoured(False, "Leave the best model in the trainer, not the last one.")
    metric_for_best_model: str | None = honoured(None, "Metric that says which model is best; unset is the loss.")
    greater_is_better: bool | None = honoured(None, "Whether more is better; unset: unless the metric ends in loss.")
    ignore_data_skip: bool = refused(
        False, "a resumed run goes to its place in the data at once, so there is nothing to skip; leave it False"
    )
    restore_callback_states_from_checkpoint: bool = accepted(False, "A resumed run always restores its callbacks.")

    # Reproducing
    full_determinism: bool = honoured(False, "Use deterministic algorithms only.")
    seed: int = honoured(42, "Seed of everything random.")
    data_seed: int | None = honoured(None, "Seed of the order of the data; unset is seed.")

    # Devices
    use_cpu: bool = honoured(False, "Train on the CPU even where there is a GPU.")
    accelerator_config: dict[str, Any] | str | None = refused(
        None, "data and losses are not accelerate's business here"
    )
    parallelism_config: Any = refused(None, _SHARDING)

    # Data
    dataloader_drop_last: bool = honoured(False, "Leave out the last batch where it is not full.")
    dataloader_num_workers: int = honoured(0, "Processes that load data; 0 loads in the main one.")
    dataloader_pin_memory: bool = honoured(True, "Use pinned memory, for faster copies to a GPU.")
    dataloader_persistent_workers: bool = honoured(False, "Keep the workers from one epoch to the next.")
    dataloader_prefetch_factor: int | None = honoured(None, "Batches that each worker loads ahead.")
    dataloader_multiprocessing_context: str | None = honoured(
        None, "How workers are started.", choices=("fork", "spawn", "forkserver")
    )
    dataloader_in_order: bool = refused(True, "the order of the data follows from the seed alone; leave it True")
    remove_unused_columns: bool = honoured(True, "Drop the dataset's columns that nothing can use.")
    label_names: list[str] | None = honoured(None, "Keys of the batch that are labels.")
    train_sampling_strategy: str = honoured("random", "Order of the training data.", choices=SAMPLING_STRATEGIES)
    length_column_name: str = honoured("length", "Column with the length of each sample, for group_by_length.")

    # Several processes
    ddp_find_unused_parameters: bool | None = honoured(
        None, "On several processes: the model has parameters that an update may not use; unset is False."
    )
    ddp_bucket_cap_mb: int | None = honoured(
        None, "On several processes: megabytes of gradients that are sent at once."
    )
    ddp_broadcast_buffers: bool | None = honoured(
        None, "On several processes: send the first one's buffers in each forward pass; unset is True."
    )
    ddp_static_graph: bool | None = honoured(
        None, "On several processes: the parameters that are used are the same in every update; unset is False."
    )
    ddp_backend: str | None = refused(None, "NCCL is used on GPUs and gloo on the CPU; leave it out")
    ddp_timeout: int = refused(
        1800, "set the environment variable LOOPWRIGHT_TIMEOUT_SECONDS, the longest wait for another process"
    )
    fsdp: str | list[str] | bool | None = honoured(
        None, "Split the model over the processes (FSDP2): full_shard, or shard_grad_op, which gathers it less often."
    )
    fsdp_config: dict[str, Any] | str | None = honoured(
        None, "More about fsdp: transformer_layer_cls_to_wrap, min_num_params, reshard_after_forward."
    )
    deepspeed: dict[str, Any] | str | None = refused(None, _SHARDING)

    # Debugging, and flags that scripts read
    debug: str | list[str] = refused("", 'nan="stop" names the update and the samples that were not finite', [], None)
    skip_memory_metrics: bool = refused(True, "read torch.cuda.max_memory_allocated() or psutil in a callback")
    do_train: bool = accepted(False, "For your script: whether to train.")
    do_eval: bool = accepted(False, "For your script: whether to evaluate; set where eval_strategy is not no.")
    do_predict: bool = accepted(False, "For your script: whether to predict.")
    resume_from_checkpoint: str | None = accepted(None, "For your script, to hand to trainer.train().")
    local_rank: int = accepted(-1, "Passed by old launchers; the processes are read from the environment.")

    # Not in transformers 5
    logging_dir: str | None = honoured(None, "Folder of TensorBoard's files; unset is one in output_dir.")
    overwrite_output_dir: bool = accepted(False, "For your script: whether a folder that has files may be used.")
    step_mode: str = honoured("auto", "How an update is run.", choices=STEP_MODES)
    length_buckets: list[str] | str = honoured(
        "auto",
        "Lengths that training batches are padded to: auto (where updates may be CUDA graphs), off, or numbers.",
    )
    nan: str = honoured("stop", "What a loss that is not finite does to the run.", choices=NAN_POLICIES)
    bad_samples: str = honoured("raise", "What a sample that cannot be loaded does.", choices=BAD_SAMPLE_POLICIES)
    reduction: str = honoured(
        "fast", "How gradients are summed; exact gives the same bits on any number of processes.", choices=REDUCTIONS
    )
