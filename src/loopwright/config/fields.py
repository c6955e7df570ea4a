"""The fields of `TrainingArguments`, in the order, with the names and the defaults of transformers.

Each field is one of three kinds, stored with its help text: `honoured` (the same effect as in transformers),
`accepted` (no effect, and the text says why that is right), `refused` (any value but the default raises ConfigError
with an alternative).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from loopwright.config.choices import IntervalStrategy, SaveStrategy, SchedulerType
from loopwright.config.old_names import TrainingOldNames

T = TypeVar("T")

DEFAULT_OUTPUT_DIR = "trainer_output"
LOG_LEVELS = ("debug", "info", "warning", "error", "critical", "passive")
SAMPLING_STRATEGIES = ("random", "sequential", "group_by_length")
STEP_MODES = ("auto", "eager", "compile", "graph")
PADDINGS = ("auto", "free", "bucket", "longest")
NAN_POLICIES = ("stop", "skip")
BAD_SAMPLE_POLICIES = ("raise", "skip")
REDUCTIONS = ("fast", "exact")
HUB_STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")
COUNTED_TOKENS = ("no", "all", "non_padding", False, True)

_SHARDING = 'fsdp="full_shard" shards weights, gradients and optimizer state over the processes'
_TRACKIO = "read by transformers' trackio callback"


class _FieldHelp(str):
    """A help text with the kind of its field: transformers' parser passes all other metadata to argparse."""

    def __new__(cls, text: str, kind: str = "honoured", *also_fine: Any) -> _FieldHelp:
        help_text: Any = super().__new__(cls, text)
        help_text.kind, help_text.also_fine = kind, also_fine
        return help_text  # type: ignore[no-any-return]


def is_hidden(each: Any) -> bool:
    """Whether a field is left out of the help of our parser."""
    return bool(each.metadata.get("is_hidden")) or getattr(each.metadata.get("help"), "kind", "") == "refused"


def honoured(default: T, help_text: str, **metadata: Any) -> T:
    """Declare a field that has its effect here."""
    return field(default=default, metadata={"help": _FieldHelp(help_text), **metadata})


def accepted(default: T, why: str) -> T:
    """Declare a field without effect here, for a reason that the user would agree with."""
    return field(default=default, metadata={"help": _FieldHelp(why, "accepted")})


def refused(default: T, instead: str, *also_fine: Any) -> T:
    """Declare a field that accepts only the default, or a value that means the same."""
    return field(default=default, metadata={"help": _FieldHelp(instead, "refused", *also_fine)})


@dataclass(repr=False)
class TrainingFields(TrainingOldNames):
    """The fields alone; `TrainingArguments` checks them and offers what is derived from them."""

    # Of a union of three types, transformers' parser reads a flag as the second.
    # Fields that may be a dict as JSON text; a derived class may add its own.
    _VALID_DICT_FIELDS: ClassVar = [
        *("accelerator_config", "fsdp_config", "deepspeed", "gradient_checkpointing_kwargs", "lr_scheduler_kwargs")
    ]

    output_dir: str = honoured(DEFAULT_OUTPUT_DIR, "Output folder for checkpoints; ~ expands to your home directory.")
    per_device_train_batch_size: int = honoured(8, "Training batch size per device (one micro-batch).")
    num_train_epochs: float = honoured(3.0, "Number of training epochs; may be fractional.")
    max_steps: int = honoured(-1, "Total number of updates; overrides num_train_epochs. -1: use the epochs.")

    # Optimizer and schedule
    learning_rate: float = honoured(5e-5, "Peak learning rate.")
    lr_scheduler_type: SchedulerType | str = honoured("linear", "Learning rate schedule.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = honoured(None, "Extra arguments of the schedule, as JSON.")
    warmup_steps: float = honoured(0, "Warmup updates; a value below 1 is a fraction of all updates.")
    optim: str = honoured("adamw_torch_fused", "Optimizer: a transformers name or a torch.optim class name.")
    optim_args: str | None = honoured(None, 'Extra optimizer arguments, as "key=value,key=value".')
    weight_decay: float = honoured(0.0, "Weight decay; not applied to biases and norm layers.")
    adam_beta1: float = honoured(0.9, "Adam's beta 1.")
    adam_beta2: float = honoured(0.999, "Adam's beta 2.")
    adam_epsilon: float = honoured(1e-8, "Adam's epsilon.")
    optim_target_modules: None | str | list[str] = honoured(
        None, 'Linear layers that "apollo_adamw" projects: "all-linear", a pattern, or names.'
    )
    gradient_accumulation_steps: int = honoured(1, "Micro-batches per update and device.")
    average_tokens_across_devices: bool = refused(
        True, "the loss is always the mean over the tokens of all processes; leave it True"
    )
    max_grad_norm: float = honoured(1.0, "Clip the gradient to this norm; 0 disables clipping.")
    label_smoothing_factor: float = honoured(0.0, "Label smoothing factor; 0 disables it.")

    # Precision, memory and speed
    bf16: bool = honoured(False, "Train in bfloat16 autocast.")
    fp16: bool = honoured(False, "Train in float16 autocast, with a gradient scaler.")
    bf16_full_eval: bool = honoured(False, "Cast the weights to bfloat16 for evaluations outside training.")
    fp16_full_eval: bool = honoured(False, "Cast the weights to float16 for evaluations outside training.")
    tf32: bool | None = honoured(None, "Allow TF32 in matrix multiplications; unset keeps torch's setting.")
    gradient_checkpointing: bool = honoured(False, "Recompute activations in the backward pass to save memory.")
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = honoured(
        None, "Arguments of the model's gradient_checkpointing_enable, as JSON."
    )
    torch_compile: bool = honoured(False, "Compile the model with torch.compile.")
    torch_compile_backend: str | None = honoured(None, "torch.compile backend; implies torch_compile.")
    torch_compile_mode: str | None = honoured(None, "torch.compile mode; implies torch_compile.")
    use_liger_kernel: bool = honoured(False, "Run a transformers model with the kernels of the package liger-kernel.")
    liger_kernel_config: dict[str, Any] | str | None = honoured(None, "Which of these kernels, as JSON.")
    use_cache: bool = honoured(False, "Sets the model's config.use_cache.")
    neftune_noise_alpha: float | None = honoured(None, "NEFTune: noise on the input embeddings in training.")
    torch_empty_cache_steps: int | None = honoured(None, "Updates between releases of the device's cached memory.")
    auto_find_batch_size: bool = honoured(
        False, "When memory runs out, retry the update in smaller micro-batches, with the same loss and gradient."
    )

    # Logging
    logging_strategy: IntervalStrategy | str = honoured("steps", "When to log: no, steps, epoch.")
    logging_steps: float = honoured(500, "Updates between logs; a value below 1 is a fraction of all updates.")
    logging_first_step: bool = honoured(False, "Also log the first update.")
    log_on_each_node: bool = honoured(True, "Log on the first process of every node, not only of the first.")
    logging_nan_inf_filter: bool = refused(
        False, 'it would hide non-finite losses; nan="stop" ends such a run, nan="skip" skips the batch'
    )
    include_num_input_tokens_seen: str | bool = honoured(
        "no", "Count and log the input tokens.", choices=COUNTED_TOKENS
    )
    log_level: str = honoured("passive", "Log level of the main process.", choices=LOG_LEVELS)
    log_level_replica: str = honoured("warning", "Log level of the other processes.", choices=LOG_LEVELS)
    disable_tqdm: bool | None = honoured(None, "Disable the progress bar.")
    report_to: list[str] | str | None = honoured("none", "Trackers to report to: tensorboard, wandb, ..., all, none.")
    run_name: str | None = accepted(None, "Run name for trackers.")
    project: str = accepted("huggingface", "Project name for trackers.")
    trackio_space_id: str | None = accepted(None, _TRACKIO)
    trackio_bucket_id: str | None = accepted(None, _TRACKIO)
    trackio_static_space_id: str | None | Literal[False] = accepted(None, _TRACKIO)

    # Evaluation
    eval_strategy: IntervalStrategy | str = honoured("no", "When to evaluate: no, steps, epoch.")
    eval_steps: float | None = honoured(
        None, "Updates between evaluations; below 1: a fraction of all updates; default: logging_steps."
    )
    eval_delay: float = honoured(0, "Epochs or updates (in units of eval_strategy) before the first evaluation.")
    per_device_eval_batch_size: int = honoured(8, "Evaluation batch size per device.")
    prediction_loss_only: bool = honoured(False, "Evaluate only the loss.")
    eval_on_start: bool = honoured(False, "Evaluate once before the first update.")
    eval_do_concat_batches: bool = honoured(True, "Concatenate predictions of all batches; else return a list.")
    eval_use_gather_object: bool = honoured(False, "Gather lists of predictions and labels as Python objects.")
    eval_accumulation_steps: int | None = accepted(None, "Predictions always move to the CPU after every batch.")
    include_for_metrics: list[str] = field(
        default_factory=list, metadata={"help": _FieldHelp("Also pass these to compute_metrics: inputs, loss.")}
    )
    batch_eval_metrics: bool = honoured(False, "Call compute_metrics for each batch, with compute_result=.")

    # Saving
    save_only_model: bool = honoured(False, "Save checkpoints of the model alone, which cannot be resumed.")
    save_strategy: SaveStrategy | str = honoured("steps", "When to save: no, steps, epoch, best.")
    save_steps: float = honoured(500, "Updates between checkpoints; a value below 1 is a fraction of all updates.")
    save_on_each_node: bool = refused(
        False, "the main process writes each checkpoint once; put output_dir on shared storage"
    )
    save_total_limit: int | None = honoured(None, "Checkpoints to keep besides the best one; unset or 0 keeps all.")
    enable_jit_checkpoint: bool = accepted(False, "A run stopped by SIGTERM always saves first.")
    push_to_hub: bool = honoured(False, "Upload the model to the Hugging Face Hub: save_model does, and every save.")
    hub_token: str | None = honoured(None, "Token for the Hub, never written; default: that of `hf auth login`.")
    hub_private_repo: bool | None = honoured(None, "Create a private repository; default: the owner's setting.")
    hub_model_id: str | None = honoured(None, "Repository on the Hub; default: the name of output_dir.")
    hub_strategy: str = honoured(
        "every_save",
        "Uploads besides save_model: none (end), the model at every save, with the last checkpoint, or with all.",
        choices=HUB_STRATEGIES,
    )
    hub_always_push: bool = honoured(False, "Queue an upload if the last one is still running; otherwise skip it.")
    hub_revision: str | None = honoured(None, "Branch on the Hub, created if missing; default: main.")
    load_best_model_at_end: bool = honoured(False, "Load the best model at the end of training.")
    metric_for_best_model: str | None = honoured(None, "Metric that selects the best model; default: the loss.")
    greater_is_better: bool | None = honoured(
        None, "Whether higher is better; default: yes unless the metric ends in loss."
    )
    ignore_data_skip: bool = honoured(False, "A resumed run begins the data of its epoch again (tier T3).")
    restore_callback_states_from_checkpoint: bool = honoured(
        False, "A resumed run restores its callbacks; this also restores their constructor arguments."
    )

    # Reproducing
    full_determinism: bool = honoured(False, "Use only deterministic algorithms.")
    seed: int = honoured(42, "Random seed.")
    data_seed: int | None = honoured(None, "Seed of the data order; default: seed.")

    # Devices
    use_cpu: bool = honoured(False, "Train on the CPU even if there is a GPU.")
    accelerator_config: dict[str, Any] | str | None = honoured(
        None, "Settings of accelerate, as JSON or a JSON or YAML file: split_batches, gradient_accumulation_kwargs, ..."
    )
    parallelism_config: None | str | Any = refused(None, _SHARDING)

    # Data
    dataloader_drop_last: bool = honoured(False, "Drop the last incomplete batch.")
    dataloader_num_workers: int = honoured(0, "Data loading workers; 0 loads in the main process.")
    dataloader_pin_memory: bool = honoured(True, "Use pinned memory for faster copies to the GPU.")
    dataloader_persistent_workers: bool = honoured(False, "Keep workers alive between epochs.")
    dataloader_prefetch_factor: int | None = honoured(None, "Batches that each worker prefetches.")
    dataloader_multiprocessing_context: str | None = honoured(
        None, "Start method of workers.", choices=("fork", "spawn", "forkserver")
    )
    dataloader_in_order: bool = accepted(True, "The order of the data depends on the seed alone, not on workers.")
    remove_unused_columns: bool = honoured(True, "Drop dataset columns that the model does not use.")
    label_names: list[str] | None = honoured(None, "Batch keys that are labels.")
    train_sampling_strategy: str = honoured("random", "Order of the training data.", choices=SAMPLING_STRATEGIES)
    length_column_name: str = honoured("length", "Column with the length of each sample, for group_by_length.")

    # Several processes
    ddp_find_unused_parameters: bool | None = honoured(
        None, "DDP: look for parameters that an update does not use; default: no."
    )
    ddp_bucket_cap_mb: int | None = honoured(None, "DDP: bucket size in MB.")
    ddp_broadcast_buffers: bool | None = honoured(
        None, "DDP: broadcast the buffers of rank 0 before each forward pass; default: yes."
    )
    ddp_static_graph: bool | None = honoured(None, "DDP: the same parameters are used in every update; default: no.")
    ddp_backend: str | None = refused(None, "NCCL is used on GPUs, gloo on CPUs; leave it out")
    ddp_timeout: int = refused(1800, "set the environment variable LOOPWRIGHT_TIMEOUT_SECONDS")
    fsdp: None | str | list[str] | Literal[True, False] = honoured(
        None, "Shard the model over the processes (FSDP2): full_shard or shard_grad_op."
    )
    fsdp_config: dict[str, Any] | str | None = honoured(
        None, "FSDP options: transformer_layer_cls_to_wrap, min_num_params, reshard_after_forward."
    )
    deepspeed: dict[str, Any] | str | None = refused(None, _SHARDING)

    # Debugging, and flags that scripts read
    debug: str | list[str] = refused("", 'nan="stop" reports the update and samples with non-finite losses', [], None)
    skip_memory_metrics: bool = refused(True, "read torch.cuda.max_memory_allocated() or psutil in a callback")
    do_train: bool = accepted(False, "For your script: whether to train.")
    do_eval: bool = accepted(False, "For your script: whether to evaluate; set if eval_strategy is not no.")
    do_predict: bool = accepted(False, "For your script: whether to predict.")
    resume_from_checkpoint: str | None = accepted(None, "For your script, to pass to trainer.train().")
    local_rank: int = accepted(-1, "Passed by old launchers; ranks are read from the environment.")

    # Not in transformers 5
    logging_dir: str | None = honoured(None, "Folder for TensorBoard files; default: inside output_dir.")
    overwrite_output_dir: bool = accepted(False, "For your script: whether a non-empty folder may be used.")
    step_mode: str = honoured("auto", "How updates run.", choices=STEP_MODES)
    length_buckets: list[str] | str = honoured(
        "auto", "Lengths to pad training batches to: auto (if updates may be CUDA graphs), off, or numbers."
    )
    padding: str = honoured(
        "auto",
        "Padding of training batches: longest (row), bucket (length_buckets), free (none within CUDA graphs), or auto.",
        choices=PADDINGS,
    )
    nan: str = honoured("stop", "What to do if a loss is not finite.", choices=NAN_POLICIES)
    bad_samples: str = honoured("raise", "What to do if a sample cannot be loaded.", choices=BAD_SAMPLE_POLICIES)
    reduction: str = honoured(
        "fast", "How gradients are summed; exact gives the same bits for any world size.", choices=REDUCTIONS
    )
