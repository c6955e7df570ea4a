"""Model folders from strangers: no code, no pickles, and an error with the name of each damaged file."""

import ast
import importlib
import json
import pickle
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, EncoderDecoderConfig, NllbMoeConfig, NllbMoeModel

import loopwright
from cli.streams import run
from loopwright import models
from loopwright.cli.exit_codes import words_for_resuming
from loopwright.config import model_limits
from loopwright.config.model_limits import limited
from loopwright.errors import CheckpointError, InputError
from loopwright.runs.settings import settle
from loopwright.tasks import get_task, pretrained
from loopwright.tasks.base import Origin
from loopwright.tasks.text.models import load_model
from source_trees import nodes
from tasks.texts import tiny_bert, tiny_gpt2

CODE = """
from pathlib import Path
Path("{marker}").touch()
from transformers import BertConfig, BertForSequenceClassification
class OddConfig(BertConfig):
    model_type = "odd"
class OddModel(BertForSequenceClassification):
    config_class = OddConfig
"""
AUTO_MAP = {"AutoConfig": "odd.OddConfig", "AutoModelForSequenceClassification": "odd.OddModel"}


@pytest.fixture
def folder(tmp_path):
    return tiny_bert(tmp_path / "model")


@pytest.fixture
def train(capsys, reviews):
    """Return a function that trains one update on a model, and returns the exit code and what was printed as errors."""

    def start(model, *flags, task="text-classification", data=reviews):
        words = ["train", task, "--data", data, "--model", model, "--max_steps", 1, "--threads", 1, "--no_rehearsal"]
        capsys.readouterr()
        code, _, err = run(capsys, *words, "--quiet", *flags)
        return code, err

    return start


def edit(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def put_code(folder, **changes):
    """Add Python code to a model folder, as its config asks for, and return the file that it would leave."""
    marker = folder.parent / "code-was-run"
    (folder / "odd.py").write_text(CODE.format(marker=marker))
    edit(folder / "config.json", auto_map=AUTO_MAP, **changes)
    return marker


def test_an_unknown_model_type_is_refused_without_a_question_until_its_code_is_trusted(
    train, folder, monkeypatch, capsys
):
    marker = put_code(folder, model_type="odd")
    monkeypatch.setattr("builtins.input", lambda *question: "y")
    code, err = train(folder)
    assert code == 2 and "error[model.code]" in err and "'odd'" in err and not marker.exists()
    Path("s.yaml").write_text("trust_remote_code: true\n")
    code, err = train(folder, "--config", "s.yaml")
    assert code == 2 and "only a flag of the call itself" in err and not marker.exists()
    assert train(folder, "--trust_remote_code", "--out", "kept") == (0, "") and marker.exists()
    marker.unlink()
    assert "trust_remote_code" not in Path("kept/config.yaml").read_text()
    for words in (["predict", "kept", "a text"], ["evaluate", "kept"], ["export", "kept", "--to", "x"]):
        code, _, err = run(capsys, *words)
        assert code == 2 and "error[model.code]" in err and not marker.exists()
    assert run(capsys, "predict", "kept", "a text", "--trust_remote_code")[0] == 0
    assert loopwright.api.Run.find("kept").export("x", trust_remote_code=True).is_dir()


def test_a_supervised_run_is_resumed_with_the_consents_of_its_start():
    for given in (["--trust-remote-code"], ["--trust_remote_code=true"], ["--trust_remote_code", "yes"]):
        settings = settle(get_task("causal-lm"), words_for_resuming(["train", "x", "--allow_pickle", "no", *given]))
        assert settings.args.trust_remote_code and settings.args.trust_run and not settings.args.allow_pickle
    assert words_for_resuming(["--quiet", "--lr", "1"]) == ["--allow_code", "--trust_run", "--quiet"]


def test_code_beside_a_known_model_type_is_ignored(train, folder, text_file):
    marker = put_code(folder)
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["odd.OddTokenizer", None]})
    assert train(folder) == (0, "") and not marker.exists()
    gpt2 = tiny_gpt2(folder.parent / "gpt2")
    (gpt2 / "custom_generate").mkdir()
    (gpt2 / "custom_generate" / "generate.py").write_text(CODE.format(marker=marker))
    assert train(gpt2, task="causal-lm", data=text_file)[0] == 0 and not marker.exists()
    edit(folder / "config.json", attn_implementation="someone/kernel")
    code, err = train(folder)
    assert code == 2 and "error[model.code]" in err and "someone/kernel" in err


def test_every_call_that_could_run_code_says_that_it_may_not():
    needed = {"from_pretrained": "trust_remote_code", "from_config": "trust_remote_code"}
    needed |= {"load_dataset": "trust_remote_code", "torch.load": "weights_only"}
    needed |= {f"{pillow}.open": "formats" for pillow in ("pillow()", "pillow", "image_module")}
    seen = 0
    for place, node in nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            keyword = needed.get(node.func.attr, needed.get(ast.unparse(node.func)))
            assert keyword is None or keyword in {each.arg for each in node.keywords}, place
            seen += keyword is not None
    assert seen >= 11


@pytest.mark.parametrize("form", ["one", "sharded", "index"])
def test_pickled_weights_are_refused_with_a_command_that_converts_them(train, folder, form):
    weights = load_file(folder / "model.safetensors")
    first, second = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
    if form == "one":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        halves = {first: dict(list(weights.items())[:9]), second: dict(list(weights.items())[9:])}
        for name, half in halves.items():
            torch.save(half, folder / name)
        index = {"metadata": {}, "weight_map": {key: name for name, half in halves.items() for key in half}}
        kind = "model.safetensors" if form == "index" else "pytorch_model.bin"
        (folder / f"{kind}.index.json").write_text(json.dumps(index))
    assert form == "index" or train(folder) == (0, "")  # there are safetensors as well, and they are used
    (folder / "model.safetensors").unlink()
    code, err = train(folder)
    if form == "index":  # an index of safetensors files that names pickles
        assert code == 2 and "error[model.folder]" in err and "model.safetensors.index.json" in err
        return
    assert code == 2 and "error[model.pickle]" in err
    assert train(folder, "--allow_pickle") == (0, "")
    command = shlex.split(err.partition("fix: ")[2].partition("   or   ")[0])
    assert command[:2] == [sys.executable, "-c"]
    exec(command[2])
    assert train(folder) == (0, "")
    assert all(torch.equal(value, weights[name]) for name, value in load_file(folder / "model.safetensors").items())


class Payload:
    """Leaves a file where it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return (open, (self.marker, "w"))


def test_a_hostile_pickle_runs_nothing_even_where_pickles_are_allowed(train, folder):
    marker = folder.parent / "unpickled"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Payload(marker)}))
    for flags in ([], ["--allow_pickle"]):
        code, err = train(folder, *flags)
        assert code == 2 and "error[model." in err and not marker.exists()


DAMAGE = {
    "config.json": [b"[]", b"null", b"", b"\x80\x04.", b'{"a":' * 9999, b'{"hidden_size": ' + b"9" * 5000 + b"}"],
    "tokenizer.json": [b"[]", b"{}", b"", b"\x80\x04.", b'{"version": "1.0"'],
    "tokenizer_config.json": [b"[]", b"nonsense", b'{"model_max_length": "x"}'],
    "model.safetensors": [b"", b"\xff" * 64, b"\x80\x04.", None],
}
VALUES = [
    *({"hidden_size": 10**9}, {"num_hidden_layers": 10**9}, {"vocab_size": 10**13}, {"num_attention_heads": -1}),
    *({"hidden_act": "x"}, {"architectures": 3}, {"hidden_dropout_prob": 7}, {"num_attention_heads": "two"}),
]


def test_a_damaged_model_folder_is_the_user_s_error_and_names_the_file(train, folder, monkeypatch):
    cases = [(file, content) for file, contents in DAMAGE.items() for content in contents]
    cases += [("config.json", values) for values in VALUES]
    (folder / "labels.json").write_text('["a", "b"]')  # of somebody else, and sound
    for file, content in cases:
        path = folder / file
        before = path.read_bytes()
        if isinstance(content, dict):
            edit(path, **content)
        else:
            path.write_bytes(before[:-9] if content is None else content)
        code, err = train(folder)
        assert code == 2 and "error[model." in err and file in err, (file, content, err)
        path.write_bytes(before)
    edit(folder / "tokenizer_config.json", pad_token="[NEW]")
    code, err = train(folder)
    assert code == 2 and "error[model.tokenizer]" in err and "pad_token" in err


@pytest.mark.parametrize("content", [b"[]", b"null", b'{"a":' * 9999, b'{"image_mean": "x", "size": 8}'])
@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json"])
def test_a_damaged_folder_of_a_vision_model_names_the_file(squares, tmp_path, file, content):
    from transformers import ViTConfig, ViTForImageClassification

    model, sizes = tmp_path / "vit", {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes)).save_pretrained(model)
    (model / file).write_bytes(content)
    with pytest.raises(InputError, match=file):
        loopwright.train("image-classification", data=squares, model=str(model), max_steps=1, quiet=True)


def test_the_damaged_weights_of_a_run_are_named(copied):
    (copied.path / "model" / "SHA256SUMS").unlink()
    weights = copied.path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(InputError, match=r"model\.safetensors"):
        copied.predict(["a text"])


LARGE = {"albert": {"inner_group_num": 10**8}, "xlm": {"n_layers": 10**8}, "masked_vit": {"num_layers": 10**8}}
LARGE |= {"qwen2": {"num_hidden_layers": 10**8, "layer_types": None}}


@pytest.mark.parametrize("kind", LARGE)
def test_a_model_that_takes_too_long_to_build_is_refused_whatever_its_entry_is_called(tmp_path, kind):
    is_ours = kind == "masked_vit"
    (models.create(kind, width=8, num_heads=1) if is_ours else CONFIG_MAPPING[kind]()).save_pretrained(tmp_path)
    edit(tmp_path / "config.json", **LARGE[kind])
    begun = time.process_time()
    with pytest.raises((InputError, CheckpointError), match="which is the limit"):
        models.load(tmp_path) if is_ours else load_model(Origin(str(tmp_path), is_run=True), "AutoModel")
    assert time.process_time() - begun < 5  # with the import of its code


def test_default_configs_are_accepted_and_kernels_are_found_at_any_depth():
    for kind in ("doge", "phi4_multimodal", "llava", "nllb-moe"):
        pretrained.check_config("x", CONFIG_MAPPING[kind]())
    with limited(), torch.device("meta"):
        NllbMoeModel(NllbMoeConfig())  # the one with most modules
    nested = EncoderDecoderConfig(encoder={"model_type": "clip"}, decoder={"model_type": "bert"})
    nested.encoder.text_config._attn_implementation = "a/b"
    with pytest.raises(InputError, match="a/b"):
        pretrained.check_config("x", nested)


def test_python_is_as_fast_after_a_model_was_built_and_can_be_profiled():
    script = """
import cProfile
from loopwright.config import model_limits
from loopwright.config.model_limits import limited
with limited():
    pass
assert cProfile.Profile().runcall(sum, map(abs, range(9))) == 36
print(cProfile.Profile().runcall(lambda: [str(each) for each in range(3)]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['0', '1', '2']"


def test_the_time_of_an_import_is_not_that_of_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr(model_limits, "_MOST_SECONDS", 0.3)
    monkeypatch.syspath_prepend(tmp_path)
    work = "import time\nend = time.thread_time() + 1.0\nwhile time.thread_time() < end:\n    pass\n"
    (tmp_path / "slow_to_import.py").write_text(work)
    with model_limits.limited():
        importlib.import_module("slow_to_import")
    with pytest.raises(model_limits.BuildLimitError), model_limits.limited():
        exec(compile(work, "model", "exec"), {})


def test_a_build_that_ends_as_its_time_is_up_raises_nothing_later(monkeypatch):
    monkeypatch.setattr(model_limits, "_MOST_SECONDS", -1)
    for _ in range(10):
        with suppress(model_limits.BuildLimitError), limited():
            time.sleep(0.1)  # the watcher looks every 0.1 s
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        pass
    assert time.monotonic() >= end
