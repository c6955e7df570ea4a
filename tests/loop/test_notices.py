"""`Trainer.notify`: everything that a trainer reports has a stable kind, a text, and its values."""

import ast
import pickle
import re
from pathlib import Path

import pytest

import loopwright
import toys
from loopwright import Checkpointing, Trainer
from loopwright.checkpoint.fingerprint import Change
from loopwright.errors import StopTrainingError
from loopwright.progress import StopKind, StopReason

SOURCE = Path(loopwright.__file__).parent
CORE = ("training", "stepping", "callbacks", "hf", "tasks")


class Noting(Trainer):
    def __init__(self, *args, **kwargs):
        self.notices = []
        super().__init__(*args, **kwargs)

    def notify(self, kind, text, **fields):
        self.notices.append((kind, text, fields))

    def fields(self, kind):
        return [fields for each, _, fields in self.notices if each == kind]


def test_a_trainer_reports_values_and_prints_nothing_when_notify_is_overridden(tmp_path, capsys):
    policy = Checkpointing(tmp_path, every_updates=1)
    first = toys.trainer_of([toys.stop_at(2)], cls=Noting)
    assert toys.fit(first, toys.data(16), checkpoints=policy).stop_reason == "enough"
    (stop,) = first.fields("stop")
    assert stop["reason"].kind is StopKind.REQUEST
    assert first.fields("resume.guarantee")[0]["tier"] == "T0"

    second = toys.trained(cls=Noting, checkpoints=policy, resume_from="auto", gradient_clip_norm=1.0)
    assert second.fields("resume.changes") == [{"change": Change("gradient_clip_norm", None, 1.0)}]
    assert second.fields("resume.done")[0]["path"].parent == tmp_path
    assert capsys.readouterr().out == ""


def test_the_text_is_printed_by_default(capsys):
    toys.trainer_of(cls=Trainer).notify("any.kind", "a text", value=1)
    assert capsys.readouterr().out == "a text\n"


@pytest.mark.parametrize(
    ("raised", "kind"),
    [("a text", StopKind.REQUEST), (StopReason("a text", StopKind.NOT_FINITE), StopKind.NOT_FINITE)],
)
def test_a_reason_to_stop_is_a_text_with_a_kind(raised, kind):
    def stop(trainer, **kwargs):
        raise StopTrainingError(raised)

    trainer = toys.trainer_of([toys.callback(on_update_end=stop)], cls=Noting)
    reason = toys.fit(trainer, toys.data(16)).stop_reason
    assert reason == "a text" and reason.kind is kind
    copied = pickle.loads(pickle.dumps(reason))
    assert copied == reason and copied.kind is kind


def test_messages_go_through_notify_with_a_constant_kind():
    kinds, printing = [], []
    for path in sorted(path for folder in CORE for path in (SOURCE / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr == "notify":
                    kinds.append(getattr(node.args[0], "value", None))
                elif node.func.attr == "print":
                    printing.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert printing == []
    assert len(kinds) >= 40
    assert [kind for kind in kinds if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)?", str(kind))] == []
