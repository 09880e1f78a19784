"""Quality of a finished calibration on held-out text, for its report: the model in memory before and after.

A first look with little text. `tilequant evaluate` judges the packed checkpoint, with every profile and as much text as wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vllm_tilequant import evaluate as ev
from vllm_tilequant.calibrate.capture import Batch, model_inputs, replaced_forward, token_mask
from vllm_tilequant.calibrate.placing import device_of, input_device
from vllm_tilequant.calibrate.search import graded_candidates
from vllm_tilequant.kernels import layout
from vllm_tilequant.kernels.portable import prepare

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from vllm_tilequant.calibrate.result import Result

#: Held-out tokens that are judged: the source's logits are kept for them, 4 bytes for each word of the vocabulary.
TOKENS = 1024


class Judge:
    """Made while the model has its source's weights; asked when it has the dequantized ones."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, held_out: Sequence[Batch]):
        self.model = model
        self.batches = list(_first(held_out))
        self.wanted = [self._logits(b).cpu() for b in self.batches]

    @torch.no_grad()
    def rows(self, linears: dict[str, nn.Linear], result: Result, profiles: Sequence[str], graded: str) -> list[dict[str, Any]]:
        """Quality at stored precision with the model's own activations, and graded at every position with INT8 ones.

        graded: the profile, where it is one of `profiles` (rows of the thresholds)
        """
        rows = [self._row("off", "static", "none")]
        if graded in profiles:
            with replaced_forward({linears[n]: _forward(linears[n], result, n, profiles.index(graded)) for n in linears}):
                rows.append(self._row(graded, "graded", "group64"))
        return rows

    def _row(self, profile: str, phase: str, activation: str) -> dict[str, Any]:
        kl, same, tokens, predicted, nll, source_nll = [], 0, 0, 0, 0.0, 0.0
        for batch, p in zip(self.batches, self.wanted, strict=True):
            q, p = self._logits(batch), p.to(input_device(self.model))
            q = q.to(p.device)
            each, agree = ev.compare(p, q)
            kl.append(each.cpu())
            same, tokens = same + int(agree.sum()), tokens + len(agree)
            ids = batch["input_ids"][:, token_mask(batch)[0]].to(p.device)
            nll += float(ev.negative_log_likelihood(q[None], ids))
            source_nll += float(ev.negative_log_likelihood(p[None], ids))
            predicted += ids.shape[1] - 1
        return (
            {"profile": profile, "phase": phase, "activation": activation}
            | ev.statistics(torch.cat(kl))
            | {"top1": same / tokens, "tokens": tokens}
            | {"ppl": math.exp(nll / predicted), "ppl_reference": math.exp(source_nll / predicted)}
        )

    def _logits(self, batch: Batch) -> Tensor:
        """[T, V] float32 of one record, without padding."""
        logits = self.model(**model_inputs(batch, input_device(self.model)), use_cache=False).logits[0]
        return logits[token_mask(batch)[0].to(logits.device)].float()


def _first(held_out: Sequence[Batch]) -> Iterator[Batch]:
    """Records of one row each, as many tokens of them as are judged."""
    left = TOKENS
    for batch in held_out:
        for i in range(len(batch["input_ids"])):
            one = {k: v[i : i + 1, :left] for k, v in batch.items()}
            if int(token_mask(one).sum()) > 1:
                yield one
                left -= one["input_ids"].shape[1]
            if left < 2:
                return


def _forward(linear: nn.Linear, result: Result, name: str, row: int) -> Callable[[Tensor], Tensor]:
    """What a linear computes graded with the thresholds of one profile. Codes are unpacked anew each time."""
    packed, table = result.weights[name], result.weights[name].input_rotation
    transforms = layout.transform_stack(result.transforms)
    thresholds = result.thresholds[result.group_of[name]][row]

    def forward(x: Tensor) -> Tensor:
        weight = prepare(layout.to_device(replace(packed, input_rotation=None), device_of(linear)), transforms)
        rows = x.reshape(-1, x.shape[-1])
        seen = rows if table is None else layout.rotate_inputs(rows, table.to(x.device))
        y = graded_candidates(seen[None], weight, linear.bias, thresholds.to(x.device)[None])[0]
        return y.view(*x.shape[:-1], -1).to(x.dtype)

    return forward
