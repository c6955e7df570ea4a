"""sentence-embedding end to end: pairs with scores, pairs without, vectors, pools, resuming, bad settings."""

import random
from functools import partial

import numpy as np
import pytest
import torch

from loopwright import api, cli
from loopwright.errors import ConfigError
from loopwright.tasks import get_task
from loopwright.tasks.text.embedding import _is_no_rival, _targets
from loopwright.tasks.text.pools import PoolScorer
from sample_data import SAMPLES
from tasks.conftest import FLAGS
from tasks.dirty_inputs import assert_aligned
from tasks.intervals import assert_loss_has_interval
from tasks.recomputed import assert_recomputed
from tasks.reviews import read_lines, write_csv, write_jsonl
from tasks.runs import check_resume, refusal, train_in
from tasks.texts import save_bert, small_tokenizer

STSB = SAMPLES / "STS-B"


def words(letters, seed):
    chosen = random.Random(seed)
    return ["".join(chosen.choices(letters, k=4)) for _ in range(24)]


# No letter is in words of both kinds: a model that has learnt nothing has nothing to go by.
FIRST, SECOND = words("abcdefghijklm", 1), words("nopqrstuvwxyz", 2)


def first(*numbers):
    return " ".join(FIRST[number] for number in numbers)


def second(*numbers):
    return " ".join(SECOND[number] for number in numbers)


ONE, RIGHT, OTHERS = first(1, 2), second(1, 2), (second(7, 8), second(3, 9))


def pairs(count=140, seed=0):
    """Return pairs of different words, of which each word has one that belongs to it."""
    chosen, made = random.Random(seed), {}
    while len(made) < count:
        numbers = tuple(chosen.sample(range(24), 2))
        made[numbers] = {"anchor": first(*numbers), "positive": second(*numbers)}
    return list(made.values())


def scored(count=60):
    """Return pairs with scores from 0 to 5: how many words they share."""
    chosen, made = random.Random(3), []
    for number in range(count):
        taken = chosen.sample([f"w{each}" for each in range(20)], 10)
        shared = number % 6
        both = taken[:5], taken[:shared] + taken[5 : 10 - shared]
        made.append({"sentence1": " ".join(both[0]), "sentence2": " ".join(both[1]), "score": float(shared)})
    return made


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    data = write_csv(folder / "pairs.csv", pairs())
    return train_in(folder, "sentence-embedding", data=data, **{**FLAGS, "epochs": 5})


def test_partners_are_found_among_all_of_the_validation(learnt):
    assert set(learnt.metrics) == {"mrr", "recall@1", "recall@5", "recall@10", "ndcg@10", "pool_loss", "loss"}
    assert learnt.metrics["mrr"] >= 0.9
    assert learnt.result["baselines"]["word-overlap"]["mrr"] < 0.2
    low, high = learnt.result["intervals"]["mrr"]
    assert low <= learnt.metrics["mrr"] <= high
    assert learnt.result["no_intervals"]["pool_loss"].startswith("at least 50 samples are needed, there are ")
    assert "loss" not in learnt.result["intervals"]  # it depends on which pairs share a batch
    assert learnt.result["metric"] == "mrr"
    assert learnt.evaluate() == learnt.metrics


@pytest.mark.parametrize("is_trained", [False, True], ids=["untrained", "wrong partners"])
def test_unlearnable_partners_are_found_by_chance(tmp_path, is_trained):
    made = pairs()
    if is_trained:
        partners = [row["positive"] for row in made]
        random.Random(5).shuffle(partners)
        made = [{**row, "positive": partner} for row, partner in zip(made, partners, strict=True)]
    flags = {**FLAGS, "epochs": 2 if is_trained else 1, "lr": 2e-3 if is_trained else 0.0}
    run = api.train("sentence-embedding", data=write_csv(tmp_path / "pairs.csv", made), **flags)
    assert run.metrics["mrr"] < 0.3  # by chance 0.13
    assert_recomputed(run)


def test_predictions_have_ranks_and_no_vectors(learnt):
    written = read_lines(learnt.path / "eval" / "predictions.jsonl")
    scores = {"rank", "similarity", "loss", "batch_loss", "nearest_other"}
    assert set(written[0]) == {"position", *scores, "text", "text_pair"}
    assert all((each["nearest_other"] < each["similarity"]) == (each["rank"] == 1) for each in written)
    assert_recomputed(learnt)
    worst = [each["loss"] for each in read_lines(learnt.path / "eval" / "worst.jsonl")]
    assert worst == sorted(worst, reverse=True)


def test_a_text_has_a_vector_two_a_cosine_and_more_a_nearest(learnt):
    one, two, more = learnt.predict([ONE, f"{ONE}\t{RIGHT}", f"{ONE}\t{OTHERS[0]}\t{RIGHT}\t{OTHERS[1]}"])
    assert np.linalg.norm(one["embedding"]) == pytest.approx(1, abs=1e-5)
    assert (more["nearest"], more["place"]) == (RIGHT, 1)
    assert more["similarity"] == two["similarity"] == max(more["similarities"])
    assert learnt.predict([{"text": ONE, "candidates": [OTHERS[0], RIGHT, OTHERS[1]]}]) == [more]
    assert learnt.predict([{"anchor": ONE, "positive": RIGHT}]) == [two]
    assert_aligned(learnt, [f"{ONE}\t{RIGHT}"], {"": "data.missing", f"\t{RIGHT}": "data.missing"})


def test_files_are_predicted_with_partners_with_candidates_or_alone(learnt, tmp_path):
    alone = learnt.predict(write_csv(tmp_path / "alone.csv", [{"anchor": first(1, 2)}, {"anchor": first(3, 4)}]))
    assert [set(each) for each in alone] == [{"embedding"}, {"embedding"}]
    paired = learnt.predict(write_csv(tmp_path / "paired.csv", pairs(4)))
    assert [set(each) for each in paired] == [{"similarity"}] * 4
    rows = [{"anchor": ONE, "candidates": [OTHERS[0], RIGHT]}]
    (found,) = learnt.predict(write_jsonl(tmp_path / "candidates.jsonl", rows))
    assert found["nearest"] == RIGHT


def test_transformers_opens_the_encoder_and_makes_the_same_vectors(learnt):
    from transformers import AutoModel, AutoTokenizer

    folder = learnt.path / "model"
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer([first(1), ONE], padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    means = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    for text, vector in zip((first(1), ONE), means.tolist(), strict=True):
        assert learnt.predict([text])[0]["embedding"] == pytest.approx(vector, abs=1e-5)  # padding changes nothing


def test_metrics_do_not_depend_on_the_batch(learnt):
    from loopwright.runs.finish import evaluate

    found = []
    for size in (3, 32):
        job = api.load_run(learnt.folder)
        job.training.per_device_eval_batch_size = size
        rows = [{"text": row["anchor"], "text_pair": row["positive"]} for row in pairs(20, seed=8)]
        dataset = job.task.create_dataset(job, rows, is_labelled=True)
        found.append(evaluate(job, dataset, None, print)[0])
    assert [found[0][name] for name in ("mrr", "recall@1")] == [found[1][name] for name in ("mrr", "recall@1")]
    assert found[0]["pool_loss"] == pytest.approx(found[1]["pool_loss"], rel=1e-5)


def test_scores_are_learnt_resumed_exactly_and_evaluated_elsewhere(tmp_path):
    data = write_csv(tmp_path / "scores.csv", scored())
    flags = {**FLAGS, "data": data}
    _, resumed, longer = check_resume("sentence-embedding", tmp_path, {"epochs": 1}, {"epochs": 2}, **flags)
    assert set(longer.metrics) == {"spearmanr", "pearsonr", "loss"}
    assert_recomputed(longer)
    assert longer.result["baselines"]["word-overlap"]["spearmanr"] > 0.8
    assert_loss_has_interval(longer)
    assert resumed.metrics == resumed.evaluate()
    # The range of scores is that of the run, not of the file.
    job = api.load_run(resumed.folder)
    assert (job.args.objective, job.args.lowest_score, job.args.highest_score) == ("scores", 0.0, 5.0)
    other = write_csv(tmp_path / "other.csv", [row for row in scored(30) if row["score"] < 3])
    assert set(resumed.evaluate(other)) == set(longer.metrics)


def test_scores_of_texts_without_a_common_word_are_learnt(tmp_path):
    chosen, made = random.Random(3), []
    for number in range(160):
        taken, shared = chosen.sample(range(24), 6), number % 4
        others = taken[:shared] + taken[3 : 6 - shared]
        made.append({"sentence1": first(*taken[:3]), "sentence2": second(*others), "score": float(shared)})
    data = write_csv(tmp_path / "scores.csv", made)
    trained = api.train("sentence-embedding", data=data, **{**FLAGS, "epochs": 5})
    untrained = api.train("sentence-embedding", data=data, **{**FLAGS, "epochs": 1, "lr": 0.0})
    assert trained.metrics["spearmanr"] >= 0.7
    assert untrained.metrics["spearmanr"] <= 0.5


def test_scores_are_read_as_cosines():
    for low, high, lowest_cosine in ((-1.0, 1.0, -1.0), (0.0, 5.0, 0.0)):
        args = get_task("sentence-embedding").arguments(lowest_score=low, highest_score=high)
        scores = torch.tensor([low, (low + high) / 2, high])
        assert _targets(args, scores).tolist() == [lowest_cosine, (lowest_cosine + 1) / 2, 1.0]


def test_a_given_model_is_scored_before_training_and_its_unused_pooler_stays(tmp_path):
    from safetensors.torch import load_file

    tokenizer = small_tokenizer((" ".join(row.values()) for row in pairs(40)), 300)
    folder = save_bert(tmp_path / "classifier", "BertForSequenceClassification", tokenizer)  # its head is left out
    data = write_csv(tmp_path / "pairs.csv", pairs(40))
    run = api.train("sentence-embedding", data=data, model=folder, **{**FLAGS, "lr": 0.0, "epochs": 1})
    untrained = run.result["baselines"]["untrained"]
    assert untrained == {name: pytest.approx(run.metrics[name], abs=1e-12) for name in untrained}
    adapted = api.train("sentence-embedding", data=data, model=folder, lora=True, **{**FLAGS, "epochs": 1})
    before, after = load_file(folder / "model.safetensors"), load_file(adapted.path / "model" / "model.safetensors")
    assert not [name for name in after if "lora" in name or "classifier" in name]
    name = "pooler.dense.weight"
    run = api.train("sentence-embedding", data=data, model=folder, **{**FLAGS, "epochs": 1, "weight_decay": 0.1})
    after = load_file(run.path / "model" / "model.safetensors")
    assert torch.equal(after[name], before[f"bert.{name}"])
    changed = "encoder.layer.0.output.dense.weight"
    assert not torch.equal(after[changed], before[f"bert.{changed}"])


def samples(count, seed=0):
    """Return samples with random vectors that are a little like those of their partners."""
    numbers = np.random.default_rng(seed)
    left = numbers.normal(size=(count, 8))
    right = left + numbers.normal(size=(count, 8))
    vectors = enumerate(zip(left, right, strict=True))
    return [{"position": n, "first": one, "second": two, "keys": [n, 1000 + n]} for n, (one, two) in vectors]


def scores_of(made, pool_size=7, batch=4):
    """Return the metrics and the complete samples of a scorer that gets samples in batches."""
    scorer = PoolScorer(pool_size, 0.05)
    complete = [each for start in range(0, len(made), batch) for each in scorer.add(made[start : start + batch])]
    complete += scorer.finish()
    return scorer.compute(), sorted(complete, key=lambda sample: sample["position"])


def test_the_order_and_the_size_of_batches_change_nothing_and_a_full_pool_is_scored_at_once():
    made = samples(25)
    assert scores_of(made) == scores_of(made[::-1], batch=3) == scores_of(made, batch=25)
    assert scores_of(made)[0] != scores_of(made, pool_size=25)[0]
    scorer = PoolScorer(7, 0.05)
    assert [len(scorer.add([sample])) for sample in made] == [7 * (place % 7 == 6) for place in range(25)]
    assert len(scorer.finish()) == 4


def test_processes_share_the_pools_that_they_have_parts_of():
    made = samples(25)
    parts = [made[rank::2] for rank in range(2)]
    scorers = [PoolScorer(7, 0.05, lambda waiting: parts, rank) for rank in range(2)]
    complete = []
    for scorer, part in zip(scorers, parts, strict=True):
        complete += [*scorer.add(part), *scorer.finish()]
    whole = PoolScorer(7, 0.05)
    for scorer in scorers:
        whole.merge_state(scorer.state_dict())
    metrics, alone = scores_of(made)
    assert whole.compute() == metrics
    assert sorted(complete, key=lambda sample: sample["position"]) == alone


def test_the_same_text_is_not_its_own_rival_nor_one_in_the_loss():
    made = samples(2)
    made[1] |= {"second": made[0]["second"], "keys": [1, 1000]}
    assert [sample["rank"] for sample in scores_of(made)[1]] == [1, 1]
    made[1]["keys"] = [1, 1001]
    assert [sample["rank"] for sample in scores_of(made)[1]] == [2, 2]  # as near as the right one is not found
    ids = torch.tensor([[[1, 2], [3, 0]], [[4, 5], [3, 9]], [[6, 7], [3, 3]]])
    mask = torch.tensor([[[1, 1], [1, 0]], [[1, 1], [1, 0]], [[1, 1], [1, 1]]])
    assert _is_no_rival(ids, mask).tolist() == [[False, True, False], [True, False, False], [False, False, False]]


refused = partial(refusal, "sentence-embedding", FLAGS)


def test_settings_that_leave_nothing_to_learn_and_an_encoder_decoder_are_refused(tmp_path):
    from transformers import T5Config

    data = write_csv(tmp_path / "pairs.csv", pairs(20))
    assert "fix: --batch 32" in refused("args.value", data=data, batch=1)
    refused("data.column", data=data, objective="scores")
    alike = write_csv(tmp_path / "alike.csv", [{**row, "score": 1.0} for row in pairs(20)])
    assert "--objective negatives" in refused("data.one_class", data=alike)
    several = write_csv(tmp_path / "several.csv", scored(20))
    assert "--lowest_score 0 --highest_score 5" in refused("args.value", data=several, lowest_score=6, highest_score=5)
    flags = {"objective": "negatives", "quiet": True, "rehearsal": False}
    assert api.check("sentence-embedding", data=alike, **flags).labels is None
    for name, value in (("temperature", 0), ("pool_size", 1)):
        with pytest.raises(ConfigError, match=name):
            api.train("sentence-embedding", data=data, **{name: value}, **FLAGS)
    T5Config(d_model=8, num_layers=1, num_heads=1, d_ff=8, vocab_size=40).save_pretrained(tmp_path / "t5")
    assert "not an encoder" in refused("model.task", data=data, model=tmp_path / "t5")


def test_the_sample_of_stsb_is_trained_resumed_and_predicted_by_command(tmp_path, capsys):
    files = ["--train_file", STSB / "train.tsv", "--validation_file", STSB / "dev.tsv", "--epochs", "1", "--batch", "4"]
    out = ["--threads", "1", "--out", tmp_path / "run"]
    code = cli.main(["train", "sentence-embedding", *map(str, [*files, *out])])
    moved = str((tmp_path / "run").rename(tmp_path / "moved"))
    assert code == cli.main(["resume", moved, "--epochs", "2"]) == cli.main(["evaluate", moved]) == 0
    assert "spearmanr" in capsys.readouterr().out
    assert cli.main(["predict", moved, str(STSB / "dev.tsv")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 9


def test_the_nearest_texts_of_a_file_are_found(learnt, tmp_path, capsys):
    made = pairs()[:8]
    texts = [row["positive"] for row in made]
    (tmp_path / "texts.txt").write_text("".join(f"{each}\n" for each in texts), encoding="utf-8")
    write_csv(tmp_path / "texts.csv", [{"text": each, "number": str(place)} for place, each in enumerate(texts)])
    found = learnt.predict([row["anchor"] for row in made], candidates=tmp_path / "texts.txt")
    assert [each["place"] for each in found] == list(range(8)) and [each["nearest"] for each in found] == texts
    assert all(len(each["next"]) == 4 and each["next"][0]["similarity"] <= each["similarity"] for each in found)
    (alone,) = learnt.predict([{"text": made[2]["anchor"], "candidates": texts}])
    assert alone["place"] == 2 and alone["similarity"] == pytest.approx(found[2]["similarity"], abs=1e-5)
    assert cli.main(["predict", str(learnt.path), made[3]["anchor"], "--candidates", "texts.csv"]) == 0
    assert '"place": 3' in capsys.readouterr().out
    (tmp_path / "blank.csv").write_text("text,number\n ,1\n", encoding="utf-8")
    for name, code in (("absent.txt", "data.file"), ("blank.csv", "data.empty")):
        assert cli.main(["predict", str(learnt.path), "a", "--candidates", name]) == 2
        assert f"error[{code}]: --candidates {name}" in capsys.readouterr().err


def test_the_model_before_training_is_scored_without_changing_it(tmp_path):
    data = write_csv(tmp_path / "pairs.csv", pairs())
    begun = api.train("sentence-embedding", data=data, output_dir=tmp_path / "begun", **{**FLAGS, "epochs": 1})
    flags = {**FLAGS, "epochs": 1, "lr": 0.0, "model": begun.path}
    run = api.train("sentence-embedding", data=data, **flags)
    assert run.result["baselines"]["untrained"]["mrr"] == pytest.approx(run.metrics["mrr"], abs=1e-6)
    assert set(begun.result["baselines"]) == {"word-overlap"}
