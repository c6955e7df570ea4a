"""--dropout: the same share everywhere in a model, kept by the run, refused where there is none to set."""

import json

import pytest
import torch

from loopwright import api
from loopwright.errors import ConfigError, InputError
from loopwright.models import create
from loopwright.tasks.adapters import set_dropout
from tasks.conftest import FLAGS

SMALL = {
    "bert": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
    "distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
}


@pytest.mark.parametrize("kind", list(SMALL))
def test_a_model_without_dropout_trains_as_it_is_evaluated_and_one_with_much_does_not(kind):
    from transformers import AutoConfig, AutoModel

    model = AutoModel.from_config(AutoConfig.for_model(kind, vocab_size=50, **SMALL[kind]))
    ids = torch.arange(3, 13)[None]

    def states():
        return model(input_ids=ids, **({"decoder_input_ids": ids} if kind == "t5" else {})).last_hidden_state

    model.train()
    assert not torch.equal(states(), states())
    set_dropout(model, 0.0)
    trained = states()
    assert torch.equal(trained, states())
    model.eval()
    torch.testing.assert_close(trained, states())
    set_dropout(model.train(), 0.5)
    assert not torch.equal(states(), states())


def test_layerdrop_drop_path_and_the_config_attribute_of_a_users_module_stay_unchanged():
    from transformers import BartConfig, BartModel

    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = BartModel(BartConfig(vocab_size=50, encoder_layerdrop=0.25, **sizes, **heads))
    set_dropout(model, 0.125)
    assert model.encoder.layerdrop == model.config.encoder_layerdrop == 0.25
    assert model.config.dropout == model.encoder.dropout == model.config.attention_dropout == 0.125
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1))
    module.config = {"dropout": 0.1}
    set_dropout(module, 0.5)
    assert module[1].p == 0.5 and module.config == {"dropout": 0.1}


def test_a_resumed_run_keeps_its_dropout(reviews, tmp_path):
    folder = tmp_path / "run"
    run = api.train("text-classification", data=reviews, output_dir=folder, **{**FLAGS, "epochs": 1, "dropout": 0.25})
    for num_epochs in (1, 2):
        assert "dropout: 0.25" in (folder / "config.yaml").read_text(encoding="utf-8")
        saved = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
        assert saved["classifier_dropout"] == saved["mlp_dropout"] == saved["attention_dropout"] == 0.25
        if num_epochs == 1:
            run = api.resume(run.path, epochs=2)


def test_an_invalid_dropout_and_a_model_without_dropout_are_refused(reviews):
    with pytest.raises(ConfigError, match="at least 0 and below 1, got 1"):
        api.train("text-classification", data=reviews, dropout=1.0, **FLAGS)
    with pytest.raises(InputError, match="the model has no dropout"):
        set_dropout(create("conv_net", num_labels=2), 0.1)
