"""Data in every script: small tokenizers, and all text tasks on Chinese and Arabic data."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cli.streams import run
from loopwright.run_folder import read_json
from loopwright.tasks.text.models import train_byte_pairs
from tasks.every_script import LANGUAGES, TASKS
from tasks.reviews import write_jsonl
from tasks.texts import lines

PIECES = {
    "我喜欢猫。Hello 世界": ["我", "喜", "欢", "猫", "。", "Hello", " ", "世", "界"],
    "カタカナー ありがとう": [*"カタカナー", " ", *"ありがとう"],
    "ไม่ดี ດີ": ["ไ", "ม่", "ดี", " ", "ດີ"],
    "ខ្មែរ မြန်မာ": ["ខ្", "មែ", "រ", " ", "မြ", "န်", "မာ"],
    "안녕하세요 세계": ["안녕하세요", " 세계"],
    "مُرْحَبًا بالعالم ۱۲": ["مُرْحَبًا", " بالعالم", " ۱۲"],
    "नमस्ते दुनिया": ["नमस्ते", " दुनिया"],
    "Привет, мир": ["Привет", ",", " мир"],
    "cafe\u0301 naïve": ["cafe\u0301", " naïve"],
    "ok👩‍👩‍👧👍🏽👍🏽🇨🇳 ❤️!": ["ok", "👩‍👩‍👧", "👍🏽", "👍🏽", "🇨🇳", " ", "❤️", "!"],
}


@pytest.mark.parametrize("text", PIECES, ids=lambda text: text.split()[-1])
@pytest.mark.parametrize("prefix_space", [True, False])
def test_words_of_every_script_are_kept_whole_and_scripts_without_spaces_are_split(text, prefix_space):
    tokenizer = train_byte_pairs([text] * 3, 600, ["[PAD]"], prefix_space=prefix_space)
    encoded = tokenizer.encode(text)
    assert [text[start:end] for start, end in encoded.offsets] == PIECES[text]
    assert tokenizer.decode(encoded.ids).removeprefix(" ") == text


@pytest.mark.parametrize("prefix_space", [True, False])
def test_latin_texts_have_the_tokens_of_the_byte_level_tokenizer_of_gpt2(prefix_space):
    texts = [line.encode("ascii", "ignore").decode() for line in lines()] + [" it's 42!\n\n  Yes", "", "\tno "]
    theirs = Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    theirs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    theirs.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    ours = train_byte_pairs(texts, 400, [], prefix_space=prefix_space)
    for text in texts:
        one, other = ours.encode(text), theirs.encode(text)
        assert (one.tokens, one.offsets) == (other.tokens, other.offsets)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("task", TASKS)
def test_every_text_task_trains_and_predicts_in_every_script(tmp_path, monkeypatch, capsys, task, language):
    monkeypatch.chdir(tmp_path)
    words, (create, roles) = LANGUAGES[language], TASKS[task]
    rows = create(words)
    data, out = write_jsonl(tmp_path / f"{words.name}.jsonl", rows).name, f"runs/{words.name}"
    columns = [each for role, place in roles.items() for each in (f"--{role}_column", words.columns[place])]
    number = 24 if task == "text-classification" else 3
    flags = {"max_steps": number, "lr": 3e-3, "batch": 8, "threads": 1, "rehearsal": "false", "save_strategy": "no"}
    flags = [each for name, value in flags.items() for each in (f"--{name}", value)]
    code, printed, error = run(capsys, "train", task, "--data", data, *columns, "--out", out, *flags)
    assert code == 0, error
    result = read_json(tmp_path / out / "result.json")
    if task == "text-classification":
        assert result["metrics"]["accuracy"] == result["baselines"]["word-count"]["accuracy"] == 1.0
        page = (tmp_path / out / "report.html").read_text(encoding="utf-8")
        assert f'<th dir="auto" title="{words.labels[0]}">{words.labels[0]}</th>' in page
        assert words.labels[1] in printed
        code, printed, _ = run(capsys, "runs")
        assert code == 0 and words.name in printed
    if task == "masked-lm":
        rows = [{words.columns[0]: f"{words.people[0]}[MASK]{words.places[0]}"}] * 5
    new = write_jsonl(tmp_path / f"{words.labels[1]}.jsonl", rows[:5]).name
    code, printed, error = run(capsys, "predict", out, new)
    assert code == 0 and len(printed.splitlines()) == 5, error
