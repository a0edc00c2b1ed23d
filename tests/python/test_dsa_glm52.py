"""GLM-5.2 as it is, 78 layers in 21 selection groups with NVFP4 latents, on every manager."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
import dsa_cases as cases  # noqa: E402
from sparse_kvcm.dsa import (  # noqa: E402
    DsaCacheConfig,
    DSACacheManager,
    DSACacheManagerV2,
    OffloadSizes,
)
from sparse_kvcm.models import load_geometry  # noqa: E402
from sparse_kvcm.step import StepRequest  # noqa: E402

PROMPT, WIDTH = 66, 576


def values(layer: int, n: int, width: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * layer + width)
    return torch.randn(n, width, generator=generator)


@pytest.mark.parametrize(
    ("kv_dtype", "latent", "index_dtype", "key"),
    [("nvfp4", 288 + 36, "fp8", 132), ("nvfp4_ds_mla", 352, "mxfp4", 68)],
)
def test_all_managers_agree(kv_dtype: Any, latent: int, index_dtype: Any, key: int) -> None:
    fields: dict[str, Any] = {
        "geometry": load_geometry("glm-5.2"),
        "max_batch_size": 1,
        "max_seq_len": 128,
        "gpu_quota": 32 * cases.MIB,
        "kv_dtype": kv_dtype,
        "index_dtype": index_dtype,
    }
    sizes = OffloadSizes(cached_slots=2048, host_pages=2)
    managers: list[Any] = [
        DSACacheManager(DsaCacheConfig(**fields)),
        DSACacheManagerV2(DsaCacheConfig(**fields)),
        DSACacheManagerV2(DsaCacheConfig(**fields, offload=sizes)),
    ]
    model = fields["geometry"]
    selection = torch.full((1, 2048), -1, dtype=torch.int32)
    selection[0, 100 : 100 + PROMPT + 1] = torch.arange(PROMPT + 1, dtype=torch.int32)
    seen = []
    for manager in managers:
        assert manager.bytes_per_token() == 78 * latent + 21 * key
        manager.add_request(5, 100)
        manager.import_history(
            5,
            {layer: values(layer, PROMPT, WIDTH) for layer in model.history_layers},
            {group[0]: values(group[0], PROMPT, 128) for group in model.groups},
        )
        manager.prepare_step([StepRequest(5, PROMPT)])
        rows = []
        for group in model.groups:
            manager.write_index_keys(group[0], values(group[0], 1, 128))
            slots = manager.select(group[0], selection)
            for layer in group:
                manager.write_latents(layer, values(layer, 1, WIDTH))
                rows.append(manager.gather_latents(layer, slots)[0, 100 : 101 + PROMPT])
        manager.end_step()
        seen.append(torch.stack(rows))
    assert seen[0].shape == (78, PROMPT + 1, WIDTH)
    assert bool(seen[0].flatten(1).abs().sum(1).gt(0).all())
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
