"""Loss gradients of decode steps: one token at a time, behind a KV cache, under the graded product.

AlignQuant's decode phase: a prefix fills the cache, then the text's own tokens are fed one by one, and some of the steps are
differentiated. The products of these steps are graded, as a server computes them; the backward pass goes straight through to
the original weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vllm_tilequant.calibrate.capture import (
    Batch,
    hooked,
    layer_calls,
    layers_passed,
    observing_gradients,
    records,
    token_loss,
)
from vllm_tilequant.calibrate.placing import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Tokens at the end of a record that are decoded one by one, where the record is at least twice as long.
DECODE_TOKENS = 32
_SHORTEST = 3  # tokens of a record: one of prefix, one step, its target


class _StraightThrough(torch.autograd.Function):
    """The value of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, differentiated: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


@contextmanager
def replaced_products(modules: dict[str, nn.Linear], product: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Inside, each module's output is `product(name, x [M, K]) -> [M, N]`; its gradient is still that of the module's weight.

    The hooks go before those already there, so that observers see the replaced output.
    """

    def on_output(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            x = args[0].detach()
            with torch.no_grad():
                value = product(name, x.reshape(-1, x.shape[-1])).view(output.shape).to(output.dtype)
            return _StraightThrough.apply(output, value)

        return hook

    with hooked(m.register_forward_hook(on_output(n), prepend=True) for n, m in modules.items()):
        yield


def decode_steps(length: int, scored: int) -> tuple[int, list[int]]:
    """Tokens of the prefix, and positions of the tokens whose step is scored: `scored` of the decoded ones, evenly spaced.

    The last `DECODE_TOKENS` tokens that have a successor are decoded; shorter records decode their second half. Raises
    `ValueError` when a record is too short to have a prefix and a target.
    """
    if length < _SHORTEST:
        raise ValueError(f"decode scores need records of at least {_SHORTEST} tokens, got one of {length}")
    window = min(DECODE_TOKENS, length // 2)
    scored = min(scored, window)
    first = length - 1 - window  # the last token is only a target
    return first, [first + (i + 1) * window // scored - 1 for i in range(scored)]


def watch_decode(
    model: PreTrainedModel,
    modules: dict[str, nn.Linear],
    batches: Iterable[Batch],
    product: Callable[[str, Tensor], Tensor],
    use: Callable[[str, Tensor, Tensor], None],
    *,
    scored: int,
    layers: Sequence[nn.Module] = (),
) -> int:
    """Teacher-forced decode steps of every record; `use` gets (name, input [1, K], output gradient [1, N]) of scored ones.

    product: (name, x [M, K]) -> [M, N], the graded product. The prefix runs with the model's own weights (prompts are served
    at stored precision, which is close to them), all later tokens with `product`; the keys and values of earlier steps are
    constants. Records are taken out of their batch without padding. layers: the decoder layers, in order, where the weights of
    all of them do not fit the device at once (a graph holds every weight that it was built with): each then runs twice, and its
    backward pass follows at once. Returns how many steps were scored.
    """
    device = input_device(model)
    steps = 0
    with observing_gradients(model, modules, use):
        for batch in batches:
            for ids in records(batch):
                record = ids.to(device)
                done, positions = decode_steps(record.shape[1], scored)
                with torch.no_grad():
                    cache = model.base_model(input_ids=record[:, :done], use_cache=True).past_key_values
                with replaced_products(modules, product):
                    for at in positions:
                        if at > done:  # steps between: each row of a graded product has its own levels, so one call serves
                            with torch.no_grad():
                                model.base_model(input_ids=record[:, done:at], past_key_values=cache, use_cache=True)
                        _differentiate(model, record[:, at : at + 1], record[:, at + 1], cache, layers)
                        _detach(cache)
                        done = at + 1
                        steps += 1
    return steps


def _differentiate(model: PreTrainedModel, token: Tensor, target: Tensor, cache: Any, layers: Sequence[nn.Module]) -> None:
    """One step and its backward pass; the cache then holds it. token: [1, 1]; target: [1]."""
    inputs = {"input_ids": token, "past_key_values": cache, "use_cache": True}
    before = _state(cache)
    calls = layer_calls(model, layers, inputs)
    after = _state(cache)
    _restore(cache, before)
    with layers_passed(calls):
        logits = model(**inputs).logits
    token_loss(logits[:, -1], target).backward()
    for call in reversed(calls):
        _restore(cache, before)  # a layer that runs again must not find its own key there
        call.backward()
    if calls:
        _restore(cache, after)


def _state(cache: Any) -> list[dict[str, Any]]:
    """What every layer's cache keeps. The tensors are never changed, only replaced by longer ones."""
    return [dict(vars(layer)) for layer in cache.layers]


def _restore(cache: Any, state: list[dict[str, Any]]) -> None:
    for layer, kept in zip(cache.layers, state, strict=True):
        vars(layer).clear()
        vars(layer).update(kept)


def _detach(cache: Any) -> None:
    """Make keys and values (and whatever else a layer's cache keeps) constants of the next step."""
    for layer in cache.layers:
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and value.requires_grad:
                setattr(layer, name, value.detach())
