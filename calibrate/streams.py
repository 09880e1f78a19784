"""Two streams through the decoder layers: the source model's, and that of the model as far as it is quantized.

GPTQ on the source model's inputs repairs a layer as if all layers before it were exact. Here a layer's linears meet what the
quantized ones before them really hand on, beside what they should have got, so that their codes can make up for part of the
difference (quantization error propagation: Arai and Ichikawa 2025, arXiv 2504.09629; GPTAQ: Li et al. 2025, arXiv 2504.02692).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vllm_tilequant.calibrate.capture import Batch, Group, hooked, merged, model_inputs, replaced_forward, token_mask
from vllm_tilequant.calibrate.placing import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Product = Callable[[Tensor], Tensor]
#: Tokens of one pass.
BATCH_TOKENS = 8192
#: A layer's output is its input plus what some linears write, up to the rounding of sums, for this share of all numbers.
_ADDITIVE_SHARE = 0.95


@dataclass(frozen=True)
class Block:
    """One decoder layer and its groups, in the order in which they run."""

    name: str
    module: nn.Module
    groups: list[Group]


class _Reached(Exception):
    """Ends a pass where nothing further is needed."""


def find_blocks(model: nn.Module, groups: Sequence[Group]) -> tuple[list[Block], list[Group]]:
    """The decoder layers that hold groups, in order, and the groups outside of them (an output head)."""
    inside: dict[str, list[Group]] = {}
    outside = []
    for group in groups:
        found = re.match(r"(.*?)\.\d+(?=\.)", group.name)
        if found and isinstance(model.get_submodule(found[1]), nn.ModuleList):
            inside.setdefault(found[0], []).append(group)
        else:
            outside.append(group)
    return [Block(name, model.get_submodule(name), own) for name, own in inside.items()], outside


class Streams:
    """The hidden states of every batch before one block, in both streams; blocks are entered and left in order.

    follow: whether the quantized stream is computed at all; without it, both are the source's
    """

    def __init__(
        self, model: PreTrainedModel, linears: dict[str, nn.Linear], blocks: list[Block], batches: list[Batch], follow: bool
    ):
        self.linears, self.blocks, self.follow = linears, blocks, follow
        self.device = input_device(model)
        batches = merged(batches, BATCH_TOKENS)
        self.masks = [token_mask(b).flatten().to(self.device) for b in batches]
        self.source: list[Tensor] = []
        self.calls: dict[str, list[tuple[tuple, dict[str, Any]]]] = {b.name: [] for b in blocks}
        self._products: dict[str, Product] = {}
        self._inputs: dict[str, list[Tensor]] = {}
        self._written: dict[str, list[Tensor]] = {}
        self._after: list[Tensor] = []
        self._begin(model, batches)
        self.quantized = list(self.source)

    @torch.no_grad()
    def _begin(self, model: PreTrainedModel, batches: list[Batch]) -> None:
        """One pass as far as the last block: what every block is called with beside the hidden states."""
        last = self.blocks[-1].name
        arrived: dict[str, Tensor] = {}

        def note(name: str) -> Callable:
            def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
                hidden = args[0] if args else kwargs["hidden_states"]
                self.calls[name].append((args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"}))
                if name == self.blocks[0].name:
                    self.source.append(hidden)
                arrived[name] = hidden[:1]
                if name == last:
                    raise _Reached

            return hook

        with hooked(b.module.register_forward_pre_hook(note(b.name), with_kwargs=True) for b in self.blocks):
            for i, batch in enumerate(batches):
                with suppress(_Reached):
                    model.base_model(**model_inputs(batch, self.device), use_cache=False)
                if i == 0:  # a copy: of one record, where the view would keep all of the batch
                    self._expected = {name: hidden.clone() for name, hidden in arrived.items()}

    @torch.no_grad()
    def enter(self, block: Block, keep: bool = True) -> None:
        """The source model's pass over a block. keep: hold what its groups read and write, for `rows`.

        Raises `ValueError` when the block does not receive what the one before it returned.
        """
        expected = self._expected.pop(block.name)
        if not torch.equal(expected, self.source[0][:1].to(expected.device)):
            raise ValueError(
                f"{block.name} does not receive what the layer before it returns: its codes cannot be made layer by layer in "
                "this architecture; use codes: rtn"
            )
        self._inputs = {g.name: [] for g in block.groups if keep}
        self._written = {g.name: [] for g in self._writers(block) if keep}
        self._products, self._after = {}, []

        def read(name: str) -> Callable:
            return lambda module, args: self._inputs[name].append(args[0])

        def wrote(name: str) -> Callable:
            return lambda module, args, output: self._written[name].append(output)

        hooks = [self.linears[n].register_forward_pre_hook(read(n)) for n in self._inputs]
        hooks += [self.linears[n].register_forward_hook(wrote(n)) for n in self._written]
        with hooked(hooks):
            self._after = [self._run(block, i, hidden) for i, hidden in enumerate(self.source)]
        if keep and not self._additive(self.source[0], self._after[0], [w[0] for w in self._written.values()]):
            self._written = {}

    def install(self, name: str, product: Product) -> None:
        """From now on the quantized stream computes a linear of the block as `product`: [M, K] -> [M, N], bias included."""
        self._products[name] = product

    @torch.no_grad()
    def rows(self, group: Group, block: Block) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Per batch: what the group's linears should receive [M, K], what they do receive [M, K], and what the hidden states
        lack at their outputs [M, N] where these are added to them (else None). Padding is left out.
        """
        for i, mask in enumerate(self.masks):
            x = self._inputs[group.name][i]
            mask = mask.to(x.device)
            source = x.reshape(-1, x.shape[-1])[mask]
            if not self.follow:
                yield source, source, None
                continue
            seen: dict[str, Tensor] = {}
            before = list(self._written)
            writes = group.name in self._written
            before = before[: before.index(group.name)] if writes else []

            def reached(module: nn.Module, args: tuple, seen: dict[str, Tensor] = seen) -> None:
                seen["x"] = args[0]
                raise _Reached

            def wrote(name: str, seen: dict[str, Tensor] = seen) -> Callable:
                return lambda module, args, output: seen.__setitem__(name, output)

            hooks = [self.linears[n].register_forward_hook(wrote(n)) for n in before]
            hooks.append(self.linears[group.name].register_forward_pre_hook(reached))
            with hooked(hooks), self._replaced(), suppress(_Reached):
                self._run(block, i, self.quantized[i])
            lacking = None
            if writes:
                lacking = (self.source[i].float() - self.quantized[i].float()).to(x.device)
                for name in before:  # all of them have run: blocks list their groups in model order
                    lacking += self._written[name][i].float() - seen[name].float()
                lacking = lacking.reshape(-1, lacking.shape[-1])[mask]
            yield source, seen["x"].reshape(-1, x.shape[-1])[mask], lacking

    @torch.no_grad()
    def leave(self, block: Block) -> None:
        """Both streams step over the block; all its groups must be installed where the quantized one is followed."""
        if self.follow:
            with self._replaced():
                self.quantized = [self._run(block, i, hidden) for i, hidden in enumerate(self.quantized)]
        self.source = self._after
        self._inputs, self._written, self._after = {}, {}, []
        del self.calls[block.name]

    def _run(self, block: Block, i: int, hidden: Tensor) -> Tensor:
        args, kwargs = self.calls[block.name][i]
        output = block.module(hidden, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    def _writers(self, block: Block) -> list[Group]:
        """Groups whose one output may be added to the hidden states: it has their width."""
        width = self.source[0].shape[-1]
        return [g for g in block.groups if len(g.members) == 1 and self.linears[g.name].out_features == width]

    @staticmethod
    def _additive(before: Tensor, after: Tensor, written: list[Tensor]) -> bool:
        """Whether a block's output is its input plus what was written: not where norms or factors come in between."""
        change = after.float() - before.to(after.device).float()
        error = (change - sum(w.float() for w in written)).abs()
        return float((error <= 0.05 * change.abs() + 2**-7 * after.float().abs()).float().mean()) >= _ADDITIVE_SHARE

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """Inside, the installed products stand for their linears' own."""

        def forward(product: Product) -> Callable:
            def call(x: Tensor) -> Tensor:
                y = product(x.reshape(-1, x.shape[-1]))
                return y.view(*x.shape[:-1], y.shape[-1]).to(x.dtype)

            return call

        with replaced_forward({self.linears[name]: forward(product) for name, product in self._products.items()}):
            yield
