"""The methods of `Trainer` that upload to the Hugging Face Hub.

Uploads run one by one in a thread of huggingface_hub. They read files that nothing rewrites, and report their failures.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from loopwright.checkpoint.store import MANIFEST
from loopwright.config.safe_text import inert, visible
from loopwright.config.secrets import HIDDEN, without_secrets
from loopwright.engine.processes import world_process_zero_only
from loopwright.errors import ConfigError, StopTrainingError
from loopwright.hf.files import WEIGHTS, is_adapter
from loopwright.hf.state import STATE_FILE

if TYPE_CHECKING:
    from loopwright.hf.trainer import Trainer

_logger = logging.getLogger("loopwright.hf")

_LONGEST_WAIT_SECONDS = 600.0
_OF_STATE = (MANIFEST, STATE_FILE, "state.*", "shard*")  # files of a checkpoint that are not of the model
# Files of the run in output_dir, and of checkpoints: some libraries copy them there.
_OF_RUN = (".*", "_*", "checkpoint-*", "status.json", "metrics.jsonl", "best.json", "lengths.bin", MANIFEST, "state.*")
_create_stage = partial(TemporaryDirectory[str], prefix=".hub-", ignore_cleanup_errors=True)


@cache
def client() -> Any:
    """Return the client of huggingface_hub; its one thread keeps uploads in order."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ConfigError("push_to_hub needs huggingface_hub, not installed: pip install huggingface_hub") from error
    return HfApi(library_name="loopwright")


class PushInProgress(list[Future[Any]]):
    """Uploads in the background."""

    def is_done(self) -> bool:
        """Whether none is running."""
        return all(job.done() for job in self)


@contextmanager
def reporting_failures(trainer: Trainer, raises: bool = False) -> Iterator[None]:
    """Report a failed upload, and continue unless it `raises`."""
    try:
        yield
    except (ConfigError, StopTrainingError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".replace(trainer.args.hub_token or HIDDEN, HIDDEN)
        reason = visible(" ".join(without_secrets(reason).split())).rstrip(".")
        text = (
            "uploading to the Hub failed, and training is not affected: %s. Fix it and run trainer.push_to_hub() again"
        )
        if trainer.is_world_process_zero():
            _logger.warning(text, reason)
        if raises:
            raise


def init_hf_repo(trainer: Trainer, token: str | None = None) -> None:
    """Create the repository unless it exists, and set `hub_model_id`; called at construction or before an upload."""
    args, api = trainer.args, client()
    from huggingface_hub.errors import HFValidationError

    name, options = args.hub_model_id or _name_of(args), {"private": args.hub_private_repo, "exist_ok": True}
    try:
        if trainer.is_world_process_zero():
            trainer.hub_model_id = api.create_repo(name, token=token or args.hub_token, **options).repo_id
    except HFValidationError as error:
        raise ConfigError(f"hub_model_id={name!r} cannot name a repository: {error}", flag="hub_model_id") from error


def push_to_hub(
    trainer: Trainer,
    commit_message: str | None = "End of training",
    blocking: bool = True,
    token: str | None = None,
    revision: str | None = None,
    **kwargs: Any,
) -> Any:
    """Save the model, and upload `output_dir` with a model card; a failure raises.

    Args:
        blocking: return the commit; otherwise the future of one that is made in the background.
        kwargs: arguments of `create_model_card`.
    """
    trainer.call_event("on_push_begin")
    trainer.save_model(_internal_call=True)

    @world_process_zero_only
    def push() -> Any:
        output, stage = Path(trainer.args.output_dir), None
        trainer.create_model_card(**{"model_name": _name_of(trainer.args), **kwargs})
        if not blocking:
            stage = _create_stage(dir=output)
            output = shutil.copytree(output, Path(stage.name, "files"), ignore=shutil.ignore_patterns(*_OF_RUN))
        options = {"commit_message": commit_message, "token": token, "revision": revision}
        job = _start(trainer, output, {"": _OF_RUN}, stage, **options)
        return job.result() if blocking else job

    return push()


def push_from_checkpoint(trainer: Trainer, checkpoint_folder: str) -> None:
    """Upload the model of a complete checkpoint in the background, or all of it; called after every save."""
    args, push, checkpoint = trainer.args, trainer.push_in_progress, Path(checkpoint_folder)
    is_busy = push is not None and not push.is_done() and not args.hub_always_push
    if not trainer.is_world_process_zero() or args.hub_strategy == "end" or is_busy:
        return
    trainer.call_event("on_push_begin")
    for old in checkpoint.parent.glob(".hub-*") if push is None else ():  # of a run that was killed
        shutil.rmtree(old, ignore_errors=True)
    stage = _create_stage(dir=checkpoint.parent)
    folder = shutil.copytree(checkpoint, Path(stage.name, "files"), copy_function=_link)
    card = Path(args.output_dir, "README.md")
    if card.exists() and not (folder / card.name).exists():
        shutil.copy(card, folder)
    # The weights of an adapter have the names of the whole model there, not those that peft reads.
    parts: dict[str, tuple[str, ...]] = {"": (*_OF_STATE, *([WEIGHTS] if is_adapter(trainer.model) else []))}
    if args.hub_strategy != "every_save":
        parts["last-checkpoint" if args.hub_strategy == "checkpoint" else checkpoint.name] = ()
    message = f"Training in progress, step {trainer.state.global_step}"
    _start(trainer, folder, parts, stage, commit_message=message)


def finish_current_push(trainer: Trainer) -> None:
    """Wait for the uploads in the background, but not forever; called at the end of `train`."""
    push = trainer.push_in_progress
    if push is None or push.is_done():
        return
    trainer.core.notify("hub.waiting", f"Waiting for the upload to {trainer.hub_model_id or 'the Hub'}")
    if wait(push, _LONGEST_WAIT_SECONDS).not_done:
        text = "the upload to the Hub still runs after %g s: it continues in the background, until the process ends"
        _logger.warning(text, _LONGEST_WAIT_SECONDS)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _start(
    trainer: Trainer, folder: Path, parts: dict[str, tuple[str, ...]], stage: Any, **options: Any
) -> Future[Any]:
    """Start to upload a folder to each place in the repository, without some files; nobody waits for a `stage`."""
    options["token"] = options.get("token") or trainer.args.hub_token
    revision = options["revision"] = options.get("revision") or trainer.args.hub_revision
    secret = () if trainer.args.hub_token is None else ("*training_args.bin",)  # pickled by some libraries

    def upload() -> Any:
        if trainer.hub_model_id is None:
            trainer.init_hf_repo(token=options["token"])
        name = trainer.hub_model_id
        if revision is not None and not revision.startswith("refs/"):
            client().create_branch(name, branch=revision, token=options["token"], exist_ok=True)
        for place, ignored in parts.items():
            options.update(folder_path=folder, path_in_repo=place, ignore_patterns=[*ignored, *secret])
            commit = client().upload_folder(repo_id=name, **options)
        return commit

    def upload_stage() -> Any:
        with stage, reporting_failures(trainer, raises=True):
            return upload()

    job: Future[Any] = client().run_as_future(upload if stage is None else upload_stage)
    if stage is not None:
        trainer.push_in_progress = PushInProgress([*(trainer.push_in_progress or ()), job])
    return job


def create_model_card(trainer: Trainer, **details: Any) -> None:
    """Write a README.md with metadata and the metrics of the run to `output_dir`; called by `push_to_hub`.

    Args:
        details: language, license, tags, model_name, finetuned_from, tasks, dataset_tags, dataset, dataset_args.
    """
    from huggingface_hub import ModelCardData

    model, state, folder = trainer.model, trainer.state, Path(trainer.args.output_dir)
    if not trainer.is_world_process_zero():
        return
    name = details.pop("model_name", None) or _name_of(trainer.args)
    evaluations = [entry for entry in state.log_history if any(key.startswith("eval_") for key in entry)]
    last = [entry for entry in evaluations if entry["step"] == evaluations[-1]["step"]]  # one per dataset of a dict
    shown = dict(pair for entry in (details, *last) for pair in entry.items() if pair[1] is not None)
    tags = [*_listed(details.get("tags")), *_listed(getattr(model, "model_tags", None))]
    base = details.get("finetuned_from") or getattr(getattr(model, "config", None), "name_or_path", None)
    metadata = ModelCardData(
        model_name=name,
        **{key: details.get(key) for key in ("language", "license")},
        library_name="peft" if is_adapter(model) else "transformers" if hasattr(model, "save_pretrained") else None,
        base_model=None if not base or os.path.exists(base) else base,  # a path means nothing to others
        datasets=_listed(details.get("dataset_tags")) or None,
        pipeline_tag=next(iter(_listed(details.get("tasks"))), None),
        tags=list(dict.fromkeys([*tags, "generated_from_trainer"])),
    )
    title = f"A {type(model).__name__}, trained for {state.global_step} updates with loopwright."
    lines = ["---", metadata.to_yaml(), "---", "", f"# {inert(name)}", "", title, ""]
    lines += [f"- {inert(key)}: {inert(value)}" for key, value in shown.items()]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _name_of(args: Any) -> str:
    return str(args.hub_model_id or Path(args.output_dir).absolute()).rpartition("/")[2]


def _listed(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())
