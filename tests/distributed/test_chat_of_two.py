"""chat on two processes: packed rows of an update, however many processes share them, train to the same bits."""

import json
import os

from distributed.launcher import run
from tasks.dialogues import tiny_decoder, write_dialogues


def train_chat(results) -> None:
    from loopwright.cli import main

    words = ["train", "chat", "--data", "chats.jsonl", "--model", "model", "--packing", "--max_length", "128"]
    words += ["--tokens_per_update", "512", "--batch", "2", "--max_steps", "5", "--lr", "1e-2", "--reduction", "exact"]
    words += ["--threads", "1", "--no_rehearsal", "--exact_match_rows", "4", "--max_new_tokens", "4"]
    results["code"] = main([*words, "--out", os.environ["RUN"]])


def test_two_processes_train_and_score_chats_as_one_does(tmp_path):
    write_dialogues(tmp_path)
    tiny_decoder(tmp_path / "model")
    for name, num_processes in (("one", 1), ("two", 2)):
        ranks = run(train_chat, tmp_path, num_processes, 100, RUN=name)
        assert [rank["code"] for rank in ranks] == [0] * num_processes, ranks[0].output[-4000:]
    assert "2 × accum 1 × 2 devices = 4" in ranks[0].output
    one, two = (tmp_path / name for name in ("one", "two"))
    for name in ("model/model.safetensors", "eval/samples.jsonl"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    metrics = [json.loads((folder / "result.json").read_text())["metrics"] for folder in (one, two)]
    assert metrics[0] == metrics[1] and {"exact_match", "conversation_perplexity"} <= set(metrics[0])
