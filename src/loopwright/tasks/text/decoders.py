"""What chat and preference do with a decoder and its tokenizer: the template, added tokens, how a generation ends."""

from __future__ import annotations

import shlex
from typing import Any

from loopwright.errors import InputError, near_names
from loopwright.tasks.arguments import flag_list
from loopwright.tasks.base import Job, Task
from loopwright.tasks.text import causal_lm, models


def check_decoder(task: Task, path: str, loaded: models.Loaded) -> None:
    """Refuse a model whose output layer is in no file, or that sees the tokens it is to predict."""
    head = loaded.model.get_output_embeddings()
    own = {name for name, weight in loaded.model.named_parameters() if head is not None and weight is head.weight}
    if head is None or own & set(loaded.new):
        what = f"{path} is a base model without the lm_head that {task.name} needs: its weights are in no file"
        saw = [f"it was saved as {', '.join(loaded.model.config.architectures or ['no known class'])}"]
        saw += [f"missing: {name}" for name in sorted(own)]
        fix = f"save it as a {type(loaded.model).__name__}   or   --model {task.pretrained}"
        raise InputError("model.task", what, saw=saw, fix=fix)
    causal_lm.check_causal(task, path, loaded.model)


def set_template(tokenizer: Any, given: str | None) -> list[str]:
    """Give the tokenizer another chat template and the control tokens that it lacks, and return these."""
    from loopwright.data.chats import Renderer, resolve_template

    template = resolve_template(tokenizer, given)
    Renderer(tokenizer, template)  # which is an error for a template that is not valid
    if given is None:
        return []
    known = tokenizer.get_vocab()
    added = [token for token in template.tokens if token not in known]
    tokenizer.add_tokens(added, special_tokens=True)
    tokenizer.chat_template = template.default
    return added


def trained_tokens_flag() -> Any:
    return flag_list("With --lora: tokens whose embeddings are trained, beside those that a template adds.")


def choose_trained_tokens(args: Any, tokenizer: Any, added: list[str]) -> None:
    """Add the tokens of a template to those that are trained; refuse a token that does not exist."""
    given, known = args.trained_tokens, tokenizer.get_vocab()
    flag, what = "--trained_tokens", ""
    if given and not args.lora:
        what, better, saw = f"{flag} is for --lora: without it, all embeddings are trained", [], []
    elif unknown := [token for token in given if token not in known]:
        what, near = f"{flag}: the tokenizer has no token {unknown[0]!r}", near_names(unknown[0], known)
        better, saw = (
            [*(token for token in given if token in known), *near[:1]],
            [f"nearest: {', '.join(near) or 'none'}"],
        )
    if what:
        fix = f"{flag} {shlex.join(better)}" if better else f"leave out {flag}"
        raise InputError("args.value", what, saw=saw, fix=fix, flag=flag)
    args.trained_tokens = [*dict.fromkeys([*given, *added])] if args.lora else []


def train_tokens(job: Job) -> None:
    """Train the embeddings of added tokens beside adapters, and no others: the gradients of other rows are 0."""
    import torch

    if not job.args.trained_tokens:
        return
    ids = job.processor.convert_tokens_to_ids(list(job.args.trained_tokens))
    for weight in _embeddings_of(job.model):
        is_own = torch.zeros(len(weight), 1)
        is_own[ids] = 1
        weight.requires_grad_(True)
        weight.register_hook(_OnlyRows(is_own))


class _OnlyRows:
    """Keeps the gradients of some rows; the mask is moved once, since a CUDA graph cannot copy from the host."""

    def __init__(self, mask: Any) -> None:
        self._mask = mask

    def __call__(self, gradient: Any) -> Any:
        self._mask = self._mask.to(gradient)
        return gradient * self._mask


def without_decay(job: Job, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of parameters with embeddings exempt: weight decay would change all of them, not just added."""
    decayed, others = groups
    is_whole = {id(weight): bool(job.args.lora) for weight in _embeddings_of(job.model)}
    others["params"] = [*others["params"], *(each for each in decayed["params"] if is_whole.get(id(each)))]
    decayed["params"] = [each for each in decayed["params"] if not is_whole.get(id(each))]
    return [decayed, others]


def _embeddings_of(model: Any) -> list[Any]:
    """Return the weights of the input and output embeddings, once if they are tied."""
    heads = (model.get_input_embeddings(), model.get_output_embeddings())
    return list({id(each.weight): each.weight for each in heads if each is not None}.values())


def end_generation(model: Any, tokenizer: Any, end_of_turn: int | None) -> None:
    """Make the end of a turn end a generation, wherever the model is opened."""
    settings = model.generation_config
    known = settings.eos_token_id if settings.eos_token_id is not None else tokenizer.eos_token_id
    ends = [end_of_turn, *(known if isinstance(known, list) else [known])]
    settings.eos_token_id = list(dict.fromkeys(end for end in ends if end is not None)) or None
