"""HfArgumentParser: flags, files and both, by the types of dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwright.config import HfArg, HfArgumentParser, OldNameWarning, Seq2SeqTrainingArguments, TrainingArguments

from .tiny import assert_refused


class Colour(Enum):
    RED = "red"
    BLUE = "blue"
    SEVEN = 7


@dataclass
class Typed:
    number: int = 1
    ratio: float = 0.5
    text: str = "word"
    folder: Path = Path("here")
    is_on: bool = False
    is_kept: bool = True
    maybe: Optional[bool] = None  # noqa: UP045 - both spellings are in use.
    limit: Optional[int] = 5  # noqa: UP045
    name: str | None = None
    colour: Colour = Colour.RED
    named: Colour = "blue"
    other: Optional[Colour] = None  # noqa: UP045
    mode: Literal["fast", "slow", 3] = "fast"
    depth: Literal[1, True, "all"] = "all"
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    words: list[str] | None = None
    pair: tuple[int, float] = (1, 2.0)
    options: dict[str, Any] = field(default_factory=dict)
    options_or_file: Union[dict, str, None] = None  # noqa: UP007
    size_or_name: int | str = 0
    computed: int = field(default=0, init=False)


@dataclass
class Required:
    model: str
    layers: list[int]
    is_deep: bool


@dataclass
class ModelArguments:
    model_name: str = field(metadata={"help": "Which model.", "aliases": ["-m"]})
    width: int = HfArg(default=8, aliases="--hidden", help="How wide.")
    kind: str = field(default="mlp", metadata={"choices": ["mlp", "cnn"]})
    cache: dict = HfArg(default_factory=dict)


def parse(kind, line):
    (parsed,) = HfArgumentParser(kind).parse_args_into_dataclasses(line)
    return parsed


def given_by(parser, source):
    return {name for name, found in parser.sources.items() if found == source}


@pytest.fixture
def refusal(capsys):
    """Return a function for the message of a parser that ends the program with code 2."""

    def of(kind, *line):
        with pytest.raises(SystemExit) as caught:
            HfArgumentParser(kind).parse_args_into_dataclasses([*line])
        assert caught.value.code == 2
        return capsys.readouterr().err

    return of


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--number 7", "number", 7),
        ("--number -7", "number", -7),
        ("--num 7", "number", 7),
        ("--no-is-k", "is_kept", False),
        ("--size-or=big", "size_or_name", "big"),
        ("--number 1e3", "number", 1000),
        ("--ratio 3e-4", "ratio", 3e-4),
        ("--ratio -3e-4", "ratio", -3e-4),
        ("--ratio -.5E+2", "ratio", -50.0),
        ("--text no", "text", "no"),
        ("--text=--x", "text", "--x"),
        ("--folder /tmp/x", "folder", Path("/tmp/x")),
        ("--is_on", "is_on", True),
        ("--is-on", "is_on", True),
        ("--is_on true", "is_on", True),
        ("--is_on No", "is_on", False),
        ("--is_on=1", "is_on", True),
        ("--is_kept false", "is_kept", False),
        ("--no_is_kept", "is_kept", False),
        ("--no-is-kept", "is_kept", False),
        ("--maybe", "maybe", True),
        ("--maybe f", "maybe", False),
        ("--maybe none", "maybe", None),
        ("--limit 9", "limit", 9),
        ("--limit none", "limit", None),
        ("--name none", "name", "none"),
        ("--colour blue", "colour", Colour.BLUE),
        ("--colour 7", "colour", Colour.SEVEN),
        ("--mode slow", "mode", "slow"),
        ("--mode 3", "mode", 3),
        ("--depth 1", "depth", 1),
        ("--depth True", "depth", True),
        ("--sizes 3", "sizes", [3]),
        ("--sizes 3 4 5", "sizes", [3, 4, 5]),
        ("--words a b", "words", ["a", "b"]),
        ("--pair 3 4", "pair", (3, 4.0)),
        ('--options {"a":[1,{"b":null}]}', "options", {"a": [1, {"b": None}]}),
        ('--options_or_file {"a":1}', "options_or_file", {"a": 1}),
        ("--options_or_file a.json", "options_or_file", "a.json"),
        ("--size_or_name 4", "size_or_name", 4),
        ("--size_or_name big", "size_or_name", "big"),
    ],
)
def test_a_flag_is_parsed_by_the_type_of_its_field(line, name, value):
    parsed = parse(Typed, line.split())
    assert parsed == dataclasses.replace(Typed(), **{name: value})
    assert type(getattr(parsed, name)) is type(value)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--number many", "argument --number: expected a number, got 'many'"),
        ("--number 1.5", "argument --number: expected a whole number, got '1.5'"),
        ("--number none", "argument --number: expected a number, got 'none'"),
        ("--is_on maybe", "argument --is_on: expected true or false, got 'maybe'"),
        ("--colour gree", "argument --colour: expected one of red, blue, 7, got 'gree'"),
        ("--mode slo", "argument --mode: expected one of fast, slow, 3, got 'slo': did you mean slow?"),
        ("--sizes 1 x", "argument --sizes: expected a number, got 'x'"),
        ("--pair 1", "argument --pair: expected 2 values, got ['1']"),
        ("--options a=1", 'argument --options: expected JSON such as {"name": 1}'),
        ("--options [1]", 'argument --options: expected JSON such as {"name": 1}'),
        ("--nmber 1", "unknown flag --nmber: did you mean --number?"),
        ("--is-onn", "unknown flag --is-onn: did you mean --is_on?"),
        ("--zzz=1", "unknown flag --zzz"),
        ("--is 1", "ambiguous option: --is could match --is_on, --is_kept"),
        ("--size 1", "ambiguous option: --size could match --sizes, --size_or_name"),
        ("--number 1 2", "unexpected value '2'"),
        ("--computed 1", "unknown flag --computed"),
    ],
)
def test_a_bad_flag_ends_the_program_with_code_2_and_a_reason(line, text, refusal):
    assert text in refusal(Typed, *line.split())


def test_without_flags_the_defaults_apply_nothing_is_shared_and_required_fields_are_required(refusal):
    parser = HfArgumentParser(Typed)
    (first,), (second,) = parser.parse_args_into_dataclasses([]), parser.parse_args_into_dataclasses([])
    assert first == second == Typed() and first.sizes is not second.sizes
    assert set(parser.sources.values()) == {"default"}
    assert parse(Required, ["--model", "m", "--layers", "1", "2"]) == Required("m", [1, 2], is_deep=False)
    assert "required: --model, --layers" in refusal(Required)
    # A misspelt one is reported first.
    assert "unknown flag --modle: did you mean --model?" in refusal(Required, "--modle", "m", "--layers", "1")
    text = "Required needs a value of layers, which has no default"
    assert_refused(text, HfArgumentParser(Required).parse_dict, {"model": "m"})


@settings(max_examples=40)
@given(
    values=st.fixed_dictionaries(
        {},
        optional={
            "number": st.integers(-(10**20), 10**20),
            "ratio": st.floats(allow_nan=False),
            "is_on": st.booleans(),
            "mode": st.sampled_from(["fast", "slow", 3]),
            "colour": st.sampled_from(Colour),
            "sizes": st.lists(st.integers(-9, 9), min_size=1, max_size=4),
            "options": st.dictionaries(st.text(), st.integers() | st.text() | st.none() | st.booleans(), max_size=3),
            "limit": st.none() | st.integers(0, 9),
            "text": st.text().filter(lambda text: not text.startswith("-")),
        },
    )
)
def test_values_survive_a_round_trip_through_flags(values):
    line = []
    for name, value in values.items():
        if isinstance(value, list):
            line += [f"--{name}", *map(str, value)]
        else:
            line.append(f"--{name}={json.dumps(value) if name == 'options' else getattr(value, 'value', value)}")
    parser = HfArgumentParser(Typed)
    (parsed,) = parser.parse_args_into_dataclasses(line)
    assert parsed == Typed(**values)
    assert given_by(parser, "flag") == set(values)


def test_several_dataclasses_and_arguments_added_by_hand_come_back_in_order():
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    parser.add_argument("--note", default="none given")
    line = ["-m", "bert", "--hidden", "16", "--learning_rate", "1e-4", "--note", "first"]
    model, training, own = parser.parse_args_into_dataclasses(line)
    assert model == ModelArguments("bert", width=16)
    assert training == TrainingArguments(learning_rate=1e-4)
    assert own == argparse.Namespace(note="first")
    assert given_by(parser, "flag") == {"model_name", "width", "learning_rate"}


def test_it_is_an_argparse_parser_that_may_return_the_remaining_strings():
    line = ["--model_name", "m", "--other", "1"]
    model, rest = HfArgumentParser(ModelArguments).parse_args_into_dataclasses(line, return_remaining_strings=True)
    assert (model.model_name, rest) == ("m", ["--other", "1"])
    parser = HfArgumentParser(ModelArguments, description="about it")
    parser.set_defaults(width=32)
    namespace, rest = parser.parse_known_args(["--model-name", "m", "x"])
    assert (namespace.model_name, namespace.width, namespace.kind, rest) == ("m", 32, "mlp", ["x"])
    assert parser.parse_args(["-m", "m", "--kind", "cnn"]).kind == "cnn"
    (model,) = parser.parse_args_into_dataclasses(["-m", "m"])
    assert model.width == 32 and parser.sources["width"] == "default"
    with pytest.raises(SystemExit):
        parser.parse_args(["-m", "m", "--kind", "rnn"])


def test_help_shows_types_texts_defaults_groups_and_the_config_flag(capsys):
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    with pytest.raises(SystemExit) as caught:
        parser.parse_args_into_dataclasses(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert "--learning_rate FLOAT Peak learning rate. (default: 5e-05)" in text
    assert "--width INT, --hidden INT How wide. (default: 8)" in text or "--width, --hidden INT How wide." in text
    assert "--eval_strategy {no,steps,epoch}" in text
    assert "--no_remove_unused_columns the same as --remove_unused_columns false" in text
    assert "--config FILE" in text
    assert "--deepspeed" not in text and "--warmup_ratio" not in text

    @dataclass
    class Grouped:
        _argument_group_name = "about the data"
        depth: int = 1

    assert "about the data" in HfArgumentParser(Grouped).format_help()


def test_duplicate_names_and_unknown_types_are_refused():
    class Inside:
        pass

    @dataclass
    class Local:
        depth: Inside | None = None

    text = "TrainingArguments and Seq2SeqTrainingArguments both have a field 'output_dir'"
    assert_refused(text, HfArgumentParser, (TrainingArguments, Seq2SeqTrainingArguments))
    assert_refused("the types of Local cannot be read: .*Inside.* top level of a module", HfArgumentParser, Local)


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model_name: bert\nlearning_rate: 3e-4\nseed: 7\nsave-strategy: no\nbf16: true\nwidth: 64\n")
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    line = ["--config", str(path), "--seed", "42", "--bf16", "false", "--width", "8"]
    model, training = parser.parse_args_into_dataclasses(line)
    # 42 and 8 are also the defaults: the flag must still override the file.
    assert model == ModelArguments("bert", width=8)
    assert training == TrainingArguments(learning_rate=3e-4, save_strategy="no", seed=42)
    assert given_by(parser, "file") == {"model_name", "learning_rate", "save_strategy"}
    assert given_by(parser, "flag") == {"seed", "bf16", "width"}
    assert len(parser.sources) == len(dataclasses.fields(ModelArguments)) + len(dataclasses.fields(TrainingArguments))


def test_files_may_hold_required_flags_and_arguments_added_by_hand_and_the_last_one_wins(tmp_path, refusal):
    (tmp_path / "run.json").write_text(json.dumps({"model_name": "bert"}))
    assert parse(ModelArguments, [f"--config={tmp_path / 'run.json'}"]).model_name == "bert"
    assert parse(ModelArguments, ["--conf", str(tmp_path / "run.json"), "--wid", "4"]).width == 4
    assert "required: --model_name" in refusal(ModelArguments)
    (tmp_path / "a.yaml").write_text("seed: 1\nlearning_rate: 0.1\nnote: from file\n")
    (tmp_path / "b.json").write_text('{"seed": 2, "lr_scheduler_kwargs": {"num_cycles": 2}}')
    parser = HfArgumentParser(TrainingArguments)
    parser.add_argument("--note")
    line = ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.json")]
    training, own = parser.parse_args_into_dataclasses(line)
    assert (training.seed, training.learning_rate, own.note) == (2, 0.1, "from file")
    assert training.lr_scheduler_kwargs == {"num_cycles": 2}


def test_your_own_config_field_or_flag_is_used():
    own = dataclasses.make_dataclass("Own", [("config", "str", "small")])
    assert parse(own, ["--config", "large"]).config == "large"
    parser = HfArgumentParser(TrainingArguments)
    parser.add_argument("--config")
    _, own = parser.parse_args_into_dataclasses(["--config", "x.toml"])
    assert own.config == "x.toml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learnig_rate: 1", "unknown name 'learnig_rate': did you mean learning_rate?"),
        ("max_steps: many", "max_steps: expected a number, got 'many'"),
        ("[1, 2]", "must hold names and values, not a list"),
        ("a: b: c", "is not YAML"),
        ("evaluation_strategy: steps\neval_strategy: epoch", "give only eval_strategy"),
        (None, "cannot read the configuration file {path}: No such file or directory"),
    ],
    ids=["key", "value", "list", "syntax", "names", "missing"],
)
def test_a_bad_file_ends_the_program_with_code_2_and_is_named(tmp_path, text, message, refusal):
    path = tmp_path / "run.yaml"
    if text:
        path.write_text(text)
    printed = refusal(TrainingArguments, "--config", str(path))
    assert message.format(path=path) in printed
    assert "give only" in message or str(path) in printed


def test_dicts_and_files_fill_the_dataclasses(tmp_path):
    values = {"model_name": "m", "learning_rate": "3e-4", "label_names": ["a"], "cache": {"a": 1}}
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    expected = (ModelArguments("m", cache={"a": 1}), TrainingArguments(learning_rate=3e-4, label_names=["a"]))
    (tmp_path / "args.json").write_text(json.dumps(values))
    (tmp_path / "args.yml").write_text("model_name: m\nlearning_rate: 3e-4\nlabel_names: [a]\ncache: {a: 1}\n")
    assert parser.parse_dict(values) == expected
    assert parser.sources["learning_rate"] == "file" and parser.sources["seed"] == "default"
    assert parser.parse_json_file(tmp_path / "args.json") == expected
    assert parser.parse_yaml_file(str(tmp_path / "args.yml")) == expected
    text = "unknown name 'modle_name': did you mean model_name?"
    assert_refused(text, parser.parse_dict, {**values, "modle_name": "x"}, error=ValueError)
    assert parser.parse_dict({**values, "modle_name": "x"}, allow_extra_keys=True) == expected


def test_files_of_flags_come_before_the_flags_of_the_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "script.args").write_text("--seed 1 --max_steps 5 --run_name 'two words' # a comment\n")
    (tmp_path / "more.args").write_text("--seed 2")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "script.py"), "--max_steps", "6"])
    parser = HfArgumentParser(TrainingArguments)
    (args,) = parser.parse_args_into_dataclasses()
    assert (args.seed, args.max_steps, args.run_name) == (1, 6, "two words")
    (args,) = parser.parse_args_into_dataclasses(look_for_args_file=False)
    assert (args.seed, args.max_steps) == (42, 6)
    (args,) = parser.parse_args_into_dataclasses(args_filename=tmp_path / "more.args")
    assert (args.seed, args.max_steps) == (2, 6)
    line = ["--flags", str(tmp_path / "more.args"), "--max_steps", "7"]
    (args,) = parser.parse_args_into_dataclasses(line, args_file_flag="--flags")
    assert (args.seed, args.max_steps, args.run_name) == (2, 7, "two words")
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(args_filename=tmp_path / "none.args")
    assert "cannot read flags from" in capsys.readouterr().err


def test_old_names_work_as_flags_and_in_files_and_flags_override_files(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("evaluation_strategy: steps\nwarmup_ratio: 1e-1\nper_gpu_train_batch_size: 4\n")
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    line = ["-m", "m", "--config", str(path), "--eval_strategy", "epoch", "--no_cuda", "--group-by-length"]
    with pytest.warns(OldNameWarning):
        _, args = parser.parse_args_into_dataclasses(line)
    from_file = {"warmup_steps": 0.1, "per_device_train_batch_size": 4}
    from_flags = {"eval_strategy": "epoch", "use_cpu": True, "train_sampling_strategy": "group_by_length"}
    assert args == TrainingArguments(**from_file, **from_flags)
    assert given_by(parser, "file") == set(from_file) and given_by(parser, "flag") == {"model_name", *from_flags}


@dataclass
class OwnWarmup:
    warmup_ratio: float = 0.3


def test_a_field_with_an_old_name_keeps_its_flag_and_a_refused_flag_raises_with_the_alternative():
    parser = HfArgumentParser((OwnWarmup, TrainingArguments))
    own, training = parser.parse_args_into_dataclasses(["--warmup_ratio", "0.7"])
    assert (own.warmup_ratio, training.warmup_steps) == (0.7, 0)
    own, training = parser.parse_dict({"warmup_ratio": 0.8})
    assert (own.warmup_ratio, training.warmup_steps) == (0.8, 0)
    assert_refused("deepspeed", parse, TrainingArguments, ["--deepspeed", "zero.json"])
    line = "--report_to tensorboard wandb --label_names a b --predict_with_generate"
    args = parse(Seq2SeqTrainingArguments, line.split())
    assert args.report_to == ["tensorboard", "wandb"] and args.label_names == ["a", "b"] and args.predict_with_generate


@pytest.mark.parametrize(
    "line",
    [
        "--output_dir out --do_train --do_eval --learning_rate 2e-5 --num_train_epochs 3 --max_steps 10",
        "--output-dir=out --per-device-train-batch-size=4 --eval_strategy steps --eval_steps 0.1 --bf16 False",
        "--output_dir out --no_remove_unused_columns --save_total_limit 2 --label_names a b --lr_scheduler_type cosine",
        "--output_dir out --gradient_checkpointing true --dataloader_pin_memory no --warmup_steps 0.1",
        "--optim adamw_torch --report_to tensorboard --logging_steps 0.1 --save_strategy best --eval_strategy epoch",
        '--lr_scheduler_kwargs {"num_cycles":2} --gradient_checkpointing_kwargs {"use_reentrant":false} --seed 7',
        "--load_best_model_at_end --metric_for_best_model f1 --greater_is_better False --eval_str epoch"
        " --save_str epoch --include_for_metrics inputs loss --torch_compile",
    ],
)
def test_common_lines_are_parsed_as_in_transformers_and_by_its_parser(line):
    transformers = pytest.importorskip("transformers")
    (theirs,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_args_into_dataclasses(line.split())
    expected = dataclasses.replace(TrainingArguments.from_transformers(theirs), disable_tqdm=None)
    assert parse(TrainingArguments, line.split()) == expected
    assert transformers.HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(line.split()) == (expected,)


@dataclass
class OwnArguments(Seq2SeqTrainingArguments):
    _VALID_DICT_FIELDS = [*Seq2SeqTrainingArguments._VALID_DICT_FIELDS, "loss_kwargs"]
    loss_kwargs: Union[dict, str, None] = field(default=None, metadata={"help": "Of our loss."})  # noqa: UP007


@pytest.mark.parametrize(
    "line",
    [
        "--output_dir out",
        "--fp16 --fsdp full_shard --logging_dir logs --nan skip --length_buckets 32 64 --tf32 true",
        "--predict_with_generate --generation_max_length 8 --generation_num_beams 2 --generation_config folder",
        '--loss_kwargs {"beta":1} --fsdp_config {"min_num_params":5} --no_dataloader_pin_memory',
    ],
)
@pytest.mark.filterwarnings("ignore::loopwright.config.OldNameWarning")
def test_the_parser_of_transformers_reads_a_class_derived_from_ours_as_our_parser_does(line, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours, theirs = (kind(OwnArguments) for kind in (HfArgumentParser, transformers.HfArgumentParser))
    (parsed,) = theirs.parse_args_into_dataclasses(line.split())
    assert (parsed,) == ours.parse_args_into_dataclasses(line.split()) and "Of our loss." in theirs.format_help()
    values = {name: getattr(parsed, name) for name in given_by(ours, "flag")}
    (tmp_path / "args").write_text(json.dumps(values))
    for parser in (ours, theirs):
        files = (read(tmp_path / "args") for read in (parser.parse_json_file, parser.parse_yaml_file))
        assert [*files, parser.parse_dict(values)] == [(parsed,)] * 3
    # Their parser replaces the types of our fields; the values are still checked.
    assert_refused("fp16 must be True or False", TrainingArguments, fp16="yes", error=TypeError)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--colour 7 --named red --other blue --mode 3 --depth 1 --sizes 3 --words a b --limit 4 --name 5",
        "--colour blue --other 7 --mode slow --depth True --is_on --no_is_kept --maybe False --is_kept False",
    ],
)
def test_parse_args_returns_the_namespace_of_transformers(line):
    transformers = pytest.importorskip("transformers")
    ours, theirs = (
        vars(kind(Typed).parse_args(line.split())) for kind in (HfArgumentParser, transformers.HfArgumentParser)
    )
    assert ours == theirs and {name: type(ours[name]) for name in ours} == {name: type(theirs[name]) for name in ours}
