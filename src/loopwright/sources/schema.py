"""The roles of a task's rows, the usual names of their columns, and the tasks.

The column of a role is found by name, then by elimination. `columns={"text": "review"}` (`--text_column review`) sets
it explicitly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

PICTURE_KINDS = ("image", "mask", "objects")
ROLE_KINDS = (
    *("text", "texts", "tokens", "answers", "label", "class", "multi", "float", "position", "tags"),
    *PICTURE_KINDS,
)


@dataclass(frozen=True)
class Role:
    """A required or optional value of a row.

    Attributes:
        name: Its name in the task; the option is `--NAME_column`.
        kind: text: a text. texts: a list of texts, or one column for each. tokens: a list of words. answers: SQuAD's
            answers. label: a class, several classes or a number, depending on the values. class, multi, float: one of
            these only. position: which of the `texts` is right, from 0. tags: one label per token. image: a file or its
            bytes. mask: the same, with a class id in each pixel. objects: boxes, classes and outlines, or a mask of
            class and instance ids.
        names: Usual names of such a column, the most certain first. One that ends in * is a pattern for several columns
            ("ending*" for ending0, ending1, ...), for roles of kind texts.
        is_required: Whether a file without it is refused.
        is_input: Whether the model reads it: these roles define duplicates.
        may_be_empty: Whether a row may lack a value.
        has_outlines: Whether each object needs an outline besides its box.
    """

    name: str
    kind: str = "text"
    names: tuple[str, ...] = ()
    is_required: bool = True
    is_input: bool = True
    may_be_empty: bool = False
    has_outlines: bool = False

    def __post_init__(self) -> None:
        assert self.kind in ROLE_KINDS, self.kind

    @property
    def is_label(self) -> bool:
        """Whether its values are labels. A schema has at most one such role."""
        return self.kind in ("label", "class", "multi", "float", "position", "tags")

    @property
    def flag(self) -> str:
        """The option that names its column."""
        return f"--{self.name}_column"


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
        """The role whose values are labels, if there is one."""
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
        return replace(self, roles=tuple(role for role in self.roles if role.is_input))

    def with_names(self, names: Mapping[str, tuple[str, ...]]) -> Schema:
        """Return the schema with other names to guess from, by role: for a task that knows its columns."""
        return replace(
            self,
            roles=tuple(replace(role, names=names[role.name]) if role.name in names else role for role in self.roles),
        )


_TEXT_NAMES = (
    "text",
    "sentence",
    "sentence1",
    "review",
    "content",
    "premise",
    "question1",
    "body",
    "comment",
    "tweet",
    "message",
    "document",
    "description",
)
_TEXT_PAIR_NAMES = ("text_pair", "sentence2", "hypothesis", "question2", "text2")
_LABEL_NAMES = ("label", "labels", "class", "category", "target", "stars", "rating", "sentiment", "score", "topic", "y")
_SCORE_NAMES = ("score", "similarity", "similarity_score", "label", "labels", "rating")

_IMAGE = Role(
    "image",
    "image",
    names=("image", "image_path", "file_name", "filename", "img", "path", "file", "image_file", "pixel_values"),
)
_IMAGE_ID = Role("image_id", names=("image_id",), is_required=False, is_input=False, may_be_empty=True)

_LANGUAGE_MODEL = (Role("text", names=(*_TEXT_NAMES, "article", "story", "docstring", "code"), may_be_empty=True),)

SCHEMAS: dict[str, Schema] = {
    schema.task: schema
    for schema in (
        Schema(
            "text-classification",
            (
                Role("text", names=_TEXT_NAMES),
                Role("text_pair", names=_TEXT_PAIR_NAMES, is_required=False),
                Role("label", "label", names=_LABEL_NAMES, is_input=False),
            ),
        ),
        Schema(
            "token-classification",
            (
                Role("tokens", "tokens", names=("tokens", "words")),
                Role(
                    "tags",
                    "tags",
                    names=("ner_tags", "tags", "ner", "labels", "pos_tags", "chunk_tags"),
                    is_input=False,
                ),
            ),
        ),
        Schema(
            "question-answering",
            (
                Role("question", names=("question", "query")),
                Role("context", names=("context", "passage", "paragraph")),
                Role("answers", "answers", names=("answers", "answer"), is_input=False, may_be_empty=True),
                Role("id", names=("id", "question_id", "qid"), is_required=False, is_input=False, may_be_empty=True),
            ),
            split_by=("context",),
        ),
        Schema("causal-lm", _LANGUAGE_MODEL),
        Schema("masked-lm", _LANGUAGE_MODEL),
        Schema(
            "multiple-choice",
            (
                Role("context", names=("sent1", "context", "question", "startphrase", "prompt")),
                Role("start", names=("sent2",), is_required=False, may_be_empty=True),
                Role("choices", "texts", names=("ending*", "choice*", "option*", "choices", "endings", "options")),
                Role("label", "position", names=("label", "answer", "gold", "correct"), is_input=False),
            ),
        ),
        Schema(
            "summarization",
            (
                Role("source", names=("document", "article", "text", "dialogue", "source", "content", "body")),
                Role(
                    "target", names=("summary", "highlights", "target", "title", "abstract", "headline"), is_input=False
                ),
            ),
        ),
        Schema(
            "translation",
            (
                Role("source", names=("source", "src", "source_text")),
                Role("target", names=("target", "tgt", "target_text"), is_input=False),
            ),
        ),
        Schema(
            "sentence-embedding",
            (
                Role("text", names=("text", "sentence1", "query", "anchor", "question", "text1", "premise")),
                Role("text_pair", names=(*_TEXT_PAIR_NAMES, "positive", "answer", "document", "passage")),
                Role("score", "float", names=_SCORE_NAMES, is_required=False, is_input=False),
            ),
        ),
        Schema(
            "image-classification",
            (
                _IMAGE,
                Role("label", "class", names=("label", "labels", "class", "category", "target"), is_input=False),
            ),
        ),
        Schema(
            "semantic-segmentation",
            (
                _IMAGE,
                Role(
                    "mask",
                    "mask",
                    names=("mask", "annotation", "label", "labels", "segmentation", "mask_path", "segmentation_mask"),
                    is_input=False,
                ),
            ),
        ),
        Schema(
            "object-detection",
            (
                _IMAGE,
                Role("objects", "objects", names=("objects", "annotations"), is_input=False, may_be_empty=True),
                _IMAGE_ID,
            ),
        ),
        Schema(
            "instance-segmentation",
            (
                _IMAGE,
                Role(
                    "objects",
                    "objects",
                    names=("objects", "annotations", "annotation", "mask"),
                    is_input=False,
                    may_be_empty=True,
                    has_outlines=True,
                ),
                _IMAGE_ID,
            ),
        ),
        Schema("masked-image-modeling", (_IMAGE,)),
    )
}
