"""What cannot be served is refused before an engine starts, each time with what could be."""

import pytest
import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from toy import write_toy
from vllm_tilequant import register

pytestmark = pytest.mark.serve


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("refusals") / "toy")


def quantization(folder, dtype=torch.bfloat16):
    register()
    model = ModelConfig(model=str(folder), quantization="tilequant", dtype="bfloat16")
    model.dtype = dtype
    return VllmConfig.get_quantization_config(model, LoadConfig())


@pytest.mark.parametrize("found, served", [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_that_is_too_old(monkeypatch, folder, found, served):
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, **__: DeviceCapability(*found))
    if served:
        assert quantization(folder).get_name() == "tilequant"
        return
    with pytest.raises(ValueError, match=r"tilequant is not supported for the current GPU\. Minimum capability: 80\. .*: 75"):
        quantization(folder)


def test_a_dtype_that_no_product_takes(folder):
    with pytest.raises(ValueError, match=r"torch\.float64 is not supported .* tilequant\. .*bfloat16.*float16.*float32"):
        quantization(folder, torch.float64)
