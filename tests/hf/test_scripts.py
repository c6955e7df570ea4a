"""A script in the shape of transformers' examples does the same after one import line is changed."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

pytest.importorskip("transformers")
pytest.importorskip("datasets")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

CHANGED = "from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments"
LIBRARIES = ("transformers", "loopwright.hf")
# docs/migrating/hf.md lists them.
DIFFERENT_FILES = {"training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.json", ".lock"}
DIFFERENT_FILES |= {"state.json", "state.safetensors", "MANIFEST.json", "metrics.jsonl", "status.json", "best.json"}

FLAGS = """--do_train --do_eval --do_predict --num_train_epochs 2 --logging_steps 1 --learning_rate 1e-3 --use_cpu
--per_device_train_batch_size 4 --per-device-eval-batch-size 8 --train_sampling_strategy sequential --report_to none
--eval_strategy epoch --save_strategy epoch --save_total_limit 2 --disable_tqdm true"""
T5 = """--model_type t5 --predict_with_generate --learning_rate 0.05 --config_overrides
{"d_model":16,"d_kv":8,"d_ff":16,"num_layers":1,"num_heads":2,"decoder_start_token_id":0,"eos_token_id":3}"""
TASKS = {
    "SequenceClassification": '--model_type bert --lr_scheduler_type polynomial --lr_scheduler_kwargs {"power":2}',
    "TokenClassification": "--model_type bert --warmup_steps 0.1 --weight_decay 0.1",
    "CausalLM": '--model_type llama --gradient_checkpointing --gradient_checkpointing_kwargs {"use_reentrant":false}',
    "MaskedLM": "--model_type bert --max_grad_norm 0.5 --logging_first_step",
    "QuestionAnswering": "--model_type bert --bf16 --load_best_model_at_end --metric_for_best_model accuracy",
    "Seq2SeqLM": f"{T5} --generation_max_length 8 --generation_num_beams 2",
    "Seq2SeqAnswering": f"{T5} --val_max_target_length 8",
    "MultipleChoice": "--model_type bert --optim adafactor --no_dataloader_pin_memory --save_total_limit 1",
    "ImageClassification": '--model_type vit --config_overrides {"image_size":8,"patch_size":4} --label_names labels'
    " --remove_unused_columns False --gradient_accumulation_steps 2 --logging_steps 0.25",
}
# The evaluation loss is a mean over items here, and over batches there, which have different numbers of items.
UNEQUAL_BATCHES = ("TokenClassification", "MaskedLM")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """Return the `main` of the script for each library."""
    text, mains = (Path(__file__).parent / "scripts" / "run_task.py").read_text(encoding="utf-8"), {}
    assert text.count(CHANGED) == 1
    for library in LIBRARIES:
        path = tmp_path_factory.mktemp("script") / "run_task.py"
        path.write_text(text.replace(CHANGED, CHANGED.replace("transformers", library)), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(f"run_task_{library.partition('.')[0]}", path)
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        mains[library] = module.main
    return mains


def entries(trainers, name):
    return [[entry[name] for entry in trainer.state.log_history if name in entry] for trainer in trainers]


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name not in DIFFERENT_FILES}


def results(folder):
    found = json.loads((folder / "all_results.json").read_text())
    found.pop("total_flos", None)  # transformers' PrinterCallback removes it from what train() returns
    return {name: 0 if name.endswith(("_runtime", "_per_second")) else value for name, value in found.items()}


@pytest.mark.parametrize("task", TASKS)
def test_a_script_has_the_losses_files_and_predictions_of_transformers(task, tmp_path, scripts):
    line = f"--task {task} {FLAGS} {TASKS[task]} --output_dir {tmp_path}/"
    trainers, outputs = zip(*(scripts[name](f"{line}{name}".split()) for name in LIBRARIES), strict=True)
    tolerance = 0.02 if task in UNEQUAL_BATCHES else 1e-5
    assert np.allclose(*entries(trainers, "loss"), rtol=0, atol=1e-6) and len(entries(trainers, "loss")[1]) >= 3
    for name in ("grad_norm", "learning_rate", "epoch", "eval_loss", "eval_accuracy"):
        assert np.allclose(*entries(trainers, name), rtol=0, atol=tolerance)
    folders = [tmp_path / name for name in LIBRARIES]
    found = [files(folder) for folder in folders]
    assert found[0] == found[1] and {"model.safetensors", "README.md", "trainer_state.json"} < found[1]
    there, here = (load_file(folder / "model.safetensors") for folder in folders)
    assert there.keys() == here.keys() and all(np.allclose(there[name], here[name], atol=1e-6) for name in there)
    assert results(folders[0]) == pytest.approx(results(folders[1]), rel=tolerance, abs=tolerance)
    there, here = (output.predictions for output in outputs)
    if task == "Seq2SeqLM":  # there padded to the longest that may be generated
        there, padding = np.split(there.clip(0), [here.shape[1]], axis=1)
        assert not padding.any()
    assert there == here if isinstance(there, list) else np.allclose(there, here, rtol=0, atol=1e-5)
    assert len(np.unique(here)) > 2


def test_a_script_takes_a_json_file_and_a_second_call_resumes_from_the_last_checkpoint(tmp_path, scripts):
    values = {"task": "SequenceClassification", "model_type": "bert", "do_train": True, "lr_scheduler_type": "constant"}
    values |= {"train_sampling_strategy": "sequential", "report_to": "none", "logging_steps": 1, "use_cpu": True}
    for max_steps in (3, 8):
        trainers = []
        for name in LIBRARIES:
            given = {**values, "max_steps": max_steps, "save_steps": 3, "output_dir": str(tmp_path / name)}
            (tmp_path / "args.json").write_text(json.dumps(given))
            trainers.append(scripts[name]([str(tmp_path / "args.json")])[0])
    assert np.allclose(*entries(trainers, "loss"), rtol=0, atol=1e-6) and len(entries(trainers, "loss")[1]) == 8
    assert files(tmp_path / LIBRARIES[0]) == files(tmp_path / LIBRARIES[1])
