"""Attention within segments through the flash kernel, beside the masked one in fp32; and packed chats that train."""

import pytest
import torch

from loopwright.engine import segments

pytestmark = pytest.mark.gpu
transformers = pytest.importorskip("transformers")

BOUNDS = [[0, 5, 40, 41, 128, 128], [0, 64, 64, 100, 120, 128], [0, 1, 2, 3, 4, 128]]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("heads_of_keys", [1, 2, 8])
@pytest.mark.parametrize(("is_causal", "window"), [(True, None), (False, None), (True, 16), (False, 16)])
def test_outputs_and_gradients_are_those_of_the_masked_attention(
    rows: int, heads_of_keys: int, is_causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(rows, 8, 128, 64), *[(rows, heads_of_keys, 128, 64)] * 2, (rows, 128, 8, 64)]
    *parts, slope = (torch.randn(shape, device="cuda", generator=generator) for shape in shapes)
    bounds = segments.segment_bounds(torch.tensor(BOUNDS[:rows], device="cuda"), 128)
    module = torch.nn.Linear(1, 1)
    module.num_key_value_groups, module.is_causal = 8 // heads_of_keys, is_causal  # type: ignore[assignment]
    sdpa = transformers.AttentionInterface()["sdpa"]
    kernel, calls = segments._flash_kernel(), []
    monkeypatch.setattr(segments, "_flash_kernel", lambda: calls.append(1) or kernel)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        given = [each.detach().to(dtype).requires_grad_() for each in parts]
        output, _ = segments.attention(sdpa, module, *given, bounds, scaling=0.2, sliding_window=window)
        output.backward(slope.to(dtype))
        found.append([output, *(each.grad for each in given)])
    assert len(calls) == 1
    for exact, own in zip(*found, strict=True):
        assert (exact - own.float()).abs().max() <= 3e-2 * exact.abs().max()


def test_autocast_takes_the_kernel_where_norms_and_positions_are_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen3Config(**sizes, head_dim=16, intermediate_size=64, vocab_size=50)
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).cuda().eval()
    ids = torch.randint(50, (2, 128), device="cuda")
    sizes_of_rows = [torch.tensor(row).diff().tolist() for row in BOUNDS[:2]]
    places = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in sizes_of_rows]).cuda()
    bounds = segments.segment_bounds(torch.tensor(BOUNDS[:2], device="cuda"), 128)
    segments.use_segments(model)
    kernel, calls = segments._flash_kernel(), []
    monkeypatch.setattr(segments, "_flash_kernel", lambda: calls.append(1) or kernel)
    outputs = []
    for is_half in (False, True):
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=is_half):
            given = {"position_ids": places, "attention_mask": bounds, "use_cache": False}
            outputs.append(model(ids, **given).logits.float())
    assert len(calls) == 2  # in each layer
    assert (outputs[0] - outputs[1]).abs().max() <= 5e-2 * outputs[0].abs().max()
