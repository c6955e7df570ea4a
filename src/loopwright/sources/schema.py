"""The roles of a task's rows, and the usual names of their columns; each task declares its own.

The column of a role is found by name, then by elimination. `columns={"text": "review"}` (`--text_column review`) sets
it explicitly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

PICTURE_KINDS = ("image", "mask", "objects")
ROLE_KINDS = (
    *("text", "texts", "tokens", "answers", "label", "class", "multi", "float", "position", "tags"),
    *("chat", "prompt", "pair"),
    *PICTURE_KINDS,
)


@dataclass(frozen=True)
class Role:
    """A required or optional value of a row.

    Attributes:
        name: Its name in the task; the option is `--NAME_column`.
        kind: text: a text. texts: a list of texts, or one column for each. tokens: a list of words. answers: SQuAD's
            answers. chat: a conversation, in one column or several. prompt: the same without its last answer. pair: a
            prompt, a chosen and a rejected answer, each in a column. label: a
            class, several classes or a number, depending on the values. class, multi, float: one of these only.
            position: which of the `texts` is right, from 0. tags: one label per token. image: a file or its bytes.
            mask: the same, with a class id in each pixel. objects: boxes, classes and outlines, or a mask of class and
            instance ids.
        names: Usual names of such a column, the most certain first. One that ends in * is a pattern for several columns
            ("ending*" for ending0, ending1, ...), for roles of kind texts.
        is_required: Whether a file without it is refused.
        is_input: Whether the model reads it: these roles define duplicates.
        may_be_empty: Whether a row may lack a value.
        has_outlines: Whether each object needs an outline besides its box.
        has_language: Whether `--NAME_lang` names a language, whose column it is.
    """

    name: str
    kind: str = "text"
    names: tuple[str, ...] = ()
    is_required: bool = True
    is_input: bool = True
    may_be_empty: bool = False
    has_outlines: bool = False
    has_language: bool = False

    def __post_init__(self) -> None:
        assert self.kind in ROLE_KINDS, self.kind

    @property
    def is_label(self) -> bool:
        """Whether its values are labels. A schema has at most one such role."""
        return self.kind in ("label", "class", "multi", "float", "position", "tags")

    @property
    def flag(self) -> str:
        return f"--{self.name}_column"


GROUP = Role("group", is_required=False, is_input=False)  # of every task: rows of one value stay in one split


@dataclass(frozen=True)
class Schema:
    """The roles of a task. `split_by`: the roles whose content splits rows; all inputs if empty."""

    task: str
    roles: tuple[Role, ...]
    split_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert sum(role.is_label for role in self.roles) <= 1, "a row has one kind of label"

    @property
    def label_role(self) -> Role | None:
        return next((role for role in self.roles if role.is_label), None)

    @property
    def has_images(self) -> bool:
        """Whether rows are images, so that folders of them are data too."""
        return any(role.kind == "image" for role in self.roles)

    @property
    def scene_role(self) -> Role | None:
        """The role that locates things in an image, a mask or objects, if there is one."""
        return next((role for role in self.roles if role.kind in ("mask", "objects")), None)

    def for_prediction(self) -> Schema:
        """Return the schema of rows without labels: the model's inputs only."""
        inputs = (replace(role, kind="prompt") if role.kind == "chat" else role for role in self.roles if role.is_input)
        return replace(self, roles=tuple(inputs))

    def with_names(self, names: Mapping[str, tuple[str, ...]]) -> Schema:
        """Return the schema with other names to guess from, by role: for a task that knows its columns."""
        roles = (replace(role, names=names.get(role.name, role.names)) for role in self.roles)
        return replace(self, roles=tuple(roles))
