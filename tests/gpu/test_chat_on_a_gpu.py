"""chat on a real device: packed rows as CUDA graphs through the flash kernel, killed and resumed to the same bits."""

from pathlib import Path

import pytest

from tasks.dialogues import tiny_decoder, write_dialogues
from tasks.reviews import read_lines
from tasks.runs import check_kill

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("way", ["full", "lora", "lora with added tokens"])
@pytest.mark.parametrize("mode", ["auto", "eager"])
def test_a_killed_run_resumes_to_the_same_bits(way: str, mode: str, tmp_path: Path) -> None:
    if way != "full":
        pytest.importorskip("peft")
    is_added = way == "lora with added tokens"
    model = tiny_decoder(tmp_path / "model", template=None if is_added else "chatml", **SIZES)
    words = ["train", "chat", "--data", write_dialogues(tmp_path, 120), "--model", model, "--max_steps", 12]
    words += ["--batch", 4, "--lr", 1e-2, "--packing", "--max_length", 128, "--bf16", "--step_mode", mode]
    words += ["--save_strategy", "steps", "--save_steps", 2, "--eval_strategy", "steps", "--eval_steps", 3]
    words += ["--temperature", 0.8, "--max_new_tokens", 4, "--exact_match_rows", 3, "--no_rehearsal"]
    words += [
        "--loss_chunk",
        100,
        "--logging_steps",
        1,
        "--full_determinism",
    ]  # the flash kernel adds in any order else
    words += [] if way == "full" else ["--lora", *(["--chat_template", "chatml"] if is_added else [])]
    whole = check_kill(tmp_path, words, 5, "eval/samples.jsonl", "samples/train_batch0.txt")
    log = (whole / "log.txt").read_text()
    assert "kept apart by a mask" not in log and "without its kernel" not in log
    graphed = sum(line.get("graphed_updates", 0) for line in read_lines(whole / "metrics.jsonl"))
    assert graphed >= 8 if mode == "auto" else graphed == 0
