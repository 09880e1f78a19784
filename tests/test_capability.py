"""What can run is answered without raising; what cannot is refused before any launch, in one message."""

from __future__ import annotations

import json

import pytest
import torch

from cases import TRANSFORMS, make_case
from vllm_tilequant.kernels import capability, tuning
from vllm_tilequant.kernels.capability import DecodeSpec, choose_path, unsupported_reason
from vllm_tilequant.kernels.decode_bitplane import decode_linear, prepare
from vllm_tilequant.kernels.decode_weight import factor_hadamard
from vllm_tilequant.kernels.layout import aligned_codes, hadamard_matrix
from vllm_tilequant.kernels.tuning import (
    DecodeConfig,
    DenseGeometry,
    Multiprocessors,
    StreamConfig,
    cuda_geometry,
    default_config,
    dense_geometry,
    divisor,
    dump,
    gpu_key,
    stream_geometry,
    tuned,
)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"out_features": 100}, "multiple of 64"),
        ({"in_features": 0}, "multiple of 64"),
        ({"dtype": torch.float64}, "float64"),
        ({"rows": 9}, "9 rows"),
        ({"capability": None}, "no CUDA GPU"),
        ({"capability": (7, 5)}, "7.5"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_reasons_name_what_is_wrong(changed, words):
    spec = DecodeSpec(
        **{"out_features": 128, "in_features": 64, "dtype": torch.bfloat16, "capability": (9, 0), "rows": 8} | changed
    )
    assert words in unsupported_reason(spec)


def test_paths_by_capability(monkeypatch):
    monkeypatch.setattr(capability, "find_spec", lambda name: object())
    spec = DecodeSpec(128, 64, torch.bfloat16, (8, 0))
    assert unsupported_reason(spec) is None and "9.0" in unsupported_reason(spec, "cuda")
    assert choose_path((8, 0)) == "triton" and choose_path((7, 5)) is None and choose_path(None) is None
    monkeypatch.setattr(capability, "find_spec", lambda name: None)
    assert "triton" in unsupported_reason(spec)


def small():
    case = make_case(128, 128)
    return torch.zeros(1, 128, dtype=torch.bfloat16), prepare(case.weight, TRANSFORMS), torch.zeros(4)


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (TypeError, lambda x, w, t: (x.double(), w, None, t)),
        (ValueError, lambda x, w, t: (x[:, :64], w, None, t)),
        (ValueError, lambda x, w, t: (x[0], w, None, t)),
        (ValueError, lambda x, w, t: (x.expand(9, 128).contiguous(), w, None, t)),
        (ValueError, lambda x, w, t: (torch.zeros(128, 2, dtype=x.dtype).T, w, None, t)),
        (ValueError, lambda x, w, t: (torch.zeros(1, 129, dtype=x.dtype)[:, 1:], w, None, t)),
        (TypeError, lambda x, w, t: (x, w, None, t.double())),
        (ValueError, lambda x, w, t: (x, w, None, t[:3])),
        (TypeError, lambda x, w, t: (x, w, torch.zeros(128, dtype=torch.int32), t)),
        (ValueError, lambda x, w, t: (x, w, torch.zeros(64), t)),
        (ValueError, lambda x, w, t: (x.to("meta"), w, None, t)),
    ],
)
def test_bad_input_is_refused(error, change):
    with pytest.raises(error, match="wanted|move"):
        decode_linear(*change(*small()))


def test_no_kernel_on_a_cpu():
    x, w, thresholds = small()
    with pytest.raises(NotImplementedError, match="no CUDA GPU"):
        decode_linear(x, w, None, thresholds)
    with pytest.raises(ValueError, match="path"):
        decode_linear(x, w, None, thresholds, path="fastest")


def test_transform_must_be_a_hadamard():
    with pytest.raises(NotImplementedError, match="Hadamard"):
        factor_hadamard(torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64))[0])


def test_factored_transforms_give_the_matrix_back():
    for matrix in TRANSFORMS[1:]:
        code = factor_hadamard(matrix).long()
        sign = 1 - 2 * (code >> 6 & 1), 1 - 2 * (code >> 7 & 1)
        assert torch.allclose(sign[0][:, None] * hadamard_matrix()[code & 63] * sign[1], matrix)


def test_the_decode_form_holds_every_code():
    case = make_case(640, 192, "mixed2468")
    w = prepare(case.weight, TRANSFORMS)
    wanted = aligned_codes(case.weight).view(3, 64, 10, 64)
    shifts = torch.arange(0, 32, 2)
    for nt, kt in ((0, 0), (3, 2), (7, 1), (8, 0), (9, 2)):
        block, tile, masks = nt // 8, nt % 8, int(w.meta[nt // 8, kt, 1])
        got = torch.zeros(64, 64, dtype=torch.long)
        for p in range(4):
            mask = 255 if p < 2 else masks >> (8 * (p - 2)) & 255
            if not mask >> tile & 1:
                continue
            rank, width = bin(mask & ((1 << tile) - 1)).count("1"), bin(mask).count("1")
            start = (block * 3 + kt) * 1024 + p * 512 if p < 2 else int(w.meta[block, kt, 0])
            start += 64 * bin(masks & 255).count("1") if p == 3 else 0
            words = w.codes[start + torch.arange(64) * width + rank].long()  # [64 channels, 4 words]
            got |= (words[..., None] >> shifts & 3).reshape(64, 64) << (6 - 2 * p)
        # bits 8t + 2j of a word are output 4t + j, and the shifts above run over them in that order
        assert torch.equal(got, wanted[kt, :, nt].long()), (nt, kt)


H200 = Multiprocessors(132, 233472, 232448)


def clusters(n: int, k: int, config: DecodeConfig) -> None:
    """A launch that the GPU can hold, and every input tile once."""
    for rows in (1, 2):
        cut = cuda_geometry(rows, n // 64, k // 64, config)
        assert cut.grid % config.splits == 0 and cut.per_warp <= 32 and cut.shared_bytes <= H200.cta_bytes, (n, k, cut)
        assert cut.per_warp * config.splits * config.warps_k * 64 >= k and cut.warps <= 16
    for rows in range(3, 9):
        dense = many_rows(rows, n, k, config)
        if config.many:
            stretches(n, k, config, dense)
            continue
        assert dense.cluster * config.parts == config.splits and dense.grid == -(-n // 512) * dense.cluster
        assert dense.most_items * dense.cluster * 64 >= k


def stretches(n: int, k: int, config: DecodeConfig, dense: DenseGeometry) -> None:
    """Every chain once, and of each part all chains before its end: by the rules of the kernel's `Addends`."""
    in_part, chains, at = config.warps_k, -(-n // 512) * config.splits * config.warps_k, 0
    assert dense.items == chains and dense.cluster == 1 and dense.room == dense.grid * dense.places * dense.rows * 512
    for cta in range(dense.grid):
        begin, end = cta * chains // dense.grid, (cta + 1) * chains // dense.grid
        assert at == begin < end and (end - begin) * (dense.most_items // -(-chains // dense.grid)) <= dense.most_items
        alone, sums = min(end, -(-begin // in_part) * in_part), 0
        while at < end:
            behind = at + 1 if at < alone else min(end, at - at % in_part + in_part)
            number = at - begin if at <= alone else alone - begin + -(-(at - alone) // in_part)
            assert number == sums and (behind - 1) // in_part == at // in_part
            at, sums = behind, sums + 1
        assert sums <= dense.places
    assert at == chains


def many_rows(rows: int, n: int, k: int, config: DecodeConfig | StreamConfig) -> DenseGeometry:
    dense = dense_geometry(rows, n // 64, k // 64, config, H200)
    assert dense.shared_bytes <= H200.cta_bytes and dense.ring % 1024 == 0 and dense.rows >= rows
    assert dense.ring >= 32 * 1024
    return dense


def divide_by(n: int, by: int) -> int:
    """As the CUDA sources do it."""
    return n * by >> 32 if by else n


def test_quotients_without_a_division():
    for d in (1, 2, 3, 7, 11, 22, 64, 80, 132, 264, 1000, 65535):
        most = (2**32 - 1) // d
        for n in {0, 1, d - 1, d, most, most - 1, *(most // d * d - i for i in range(3)), *range(most // 3, most // 3 + 50)}:
            assert divide_by(n, divisor(d)) == n // d, (n, d)


def streams(n: int, k: int, config: StreamConfig) -> None:
    """Every item once, every CTA as many as its neighbours, and a launch that the GPU can hold."""
    items = -(-n // 512) * (k // 64)
    for rows in range(1, 9):
        cut = stream_geometry(rows, n // 64, k // 64, config, H200)
        assert cut.items == items and cut.shared_bytes <= H200.cta_bytes
        assert cut.few or rows > 1
        if not cut.few:
            assert many_rows(rows, n, k, config).most_items == cut.most_items
        borders = [divide_by(i * items, divisor(cut.grid)) for i in range(cut.grid + 1)]
        assert borders == [i * items // cut.grid for i in range(cut.grid + 1)]
        lengths = {b - a for a, b in zip(borders, borders[1:], strict=False)}
        assert max(lengths) == cut.most_items and min(lengths) >= cut.most_items - 1 >= 0
        for first, end in zip(borders, borders[1:], strict=False):
            assert (end - 1) // (k // 64) - first // (k // 64) < cut.places
        # the kernel's formulas for the CTAs that have parts of a block
        for block in range(items // (k // 64)):
            of, to = ((block * (k // 64) + 1) * cut.grid - 1) // items, ((block + 1) * (k // 64) * cut.grid - 1) // items
            assert (
                borders[of] <= block * (k // 64) < borders[of + 1] and borders[to] < (block + 1) * (k // 64) <= borders[to + 1]
            )


def test_streams_cut_a_weight_evenly():
    for n, k, config in (
        (64, 64, StreamConfig(1)),
        (4096, 14336, StreamConfig(132, 14)),
        (35840, 5120, StreamConfig(264, 11)),
        (35840, 5120, StreamConfig(264, 11, parts=2)),
        (28672, 4096, StreamConfig(264, 14)),
        (10304, 128, StreamConfig(3, 5)),
    ):
        streams(n, k, config)
    # 22 warps with sums of two rows do not fit a multiprocessor, 14 do
    assert not stream_geometry(2, 35840 // 64, 5120 // 64, StreamConfig(264, 11), H200).few
    assert stream_geometry(2, 4096 // 64, 14336 // 64, StreamConfig(132, 14), H200).few
    with pytest.raises(NotImplementedError, match="more CTAs"):
        stream_geometry(1, 64 * 8, 64, StreamConfig(1, 4), H200)
    with pytest.raises(ValueError, match="two parts"):
        StreamConfig(7, 4, parts=2)
    with pytest.raises(ValueError, match="chains"):
        StreamConfig(132, 3)


def test_a_tuning_file_tells_streams_from_clusters(monkeypatch):
    written = dump("some", {(64, 64): StreamConfig(7, 5, 4), (128, 64): DecodeConfig(1, 1)}, {})
    monkeypatch.setattr(tuning, "_read", lambda gpu: json.loads(written))
    assert tuned.__wrapped__("some") == {(64, 64): StreamConfig(7, 5, 4), (128, 64): DecodeConfig(1, 1)}


def test_configurations():
    assert gpu_key("NVIDIA H200") == "h200" and gpu_key("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb"
    for n, k in ((64, 64), (4096, 14336), (28672, 4096), (8192, 28672), (2048, 64 * 300)):
        clusters(n, k, default_config(n, k, H200))
    for n, k, many in (
        (64, 64, 1),
        (1088, 1536, 7),
        (4096, 4096, 128),
        (6144, 4096, 132),
        (28672, 4096, 264),
        (576, 1536, 10**4),
    ):
        clusters(n, k, DecodeConfig(8, 4, stages=3, many=many))
    with pytest.raises(NotImplementedError, match="shared memory"):
        default_config(4096, 64 * 4000, H200)
    for (n, k), config in tuned("h200").items():
        if isinstance(config, DecodeConfig):
            clusters(n, k, config)
        else:
            streams(n, k, config)
    with pytest.raises(ValueError, match="divide"):
        DecodeConfig(8, 1, parts=3)
    with pytest.raises(NotImplementedError, match="fewer parts"):
        many_rows(8, 512, 64 * 256, DecodeConfig(4, 2, parts=2))
    with pytest.raises(ValueError, match="splits"):
        DecodeConfig(32, 1)
    assert '"n": 64' in dump("h200", {(64, 64): DecodeConfig(1, 1)}, {})
