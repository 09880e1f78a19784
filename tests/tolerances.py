"""Every tolerance of the tests, with its reason. Packing, levels and integer sums have none: they are exact."""

import torch

#: RMS(error) / RMS(float64 reference) of a float32 product: some hundred roundings of 2^-24 each.
FLOAT32_RMS = 2.0**-19
#: The same for bf16 and fp16 outputs: the rounding of the output itself, 2^-9 and 2^-12 at most, twice for safety.
OUTPUT_RMS = {"float32": FLOAT32_RMS, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def relative_rms(got, wanted) -> float:
    """RMS(got - wanted) / RMS(wanted) in float64; NaN anywhere in `got` gives NaN, which no bound accepts."""
    error = (got.double() - wanted.double()).square().mean().sqrt()
    return float(error / wanted.double().square().mean().sqrt())


def poison_allocator(device) -> None:
    """Leave NaN in the memory that torch's allocator hands out next."""
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 22):
        torch.full((size,), float("nan"), device=device)
