"""The input diagonal: channels scaled by powers of two, folded into what produces them, before anything is measured.

x' = x d and W' = W diag(1/d), with d_i near the size of column i of the linears that read x: |x'_i| then says how much channel
i moves the outputs, not only how large it is. d goes into the norm before q/k/v and gate/up, into the rows of up_proj before
down_proj, and into those of v_proj before o_proj (one d for all heads that share a key-value head). As d is a power of two, all
of that is exact, and the model computes what it did before. An adapter trained on the original weights does not fit any more:
the checkpoint says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vllm_tilequant.calibrate.capture import Batch, Group, hooked, model_inputs
from vllm_tilequant.calibrate.placing import input_device, write_parameter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: log2 of d stays within this distance of its mean: beyond, a half-precision model could overflow.
_MOST = 3
#: Tokens of the pass that finds what produces an input; the model is compared on them before and after.
_TOKENS = 16
#: Of the logits afterwards, relative. There should be no error at all, but for numbers too small to be scaled exactly.
_MOST_ERROR = 1e-3


@torch.no_grad()
def fold(model: PreTrainedModel, linears: dict[str, nn.Linear], groups: Sequence[Group], batch: Batch) -> list[Group]:
    """Scale the inputs of every group where something before it can take the factors; returns these groups.

    Raises `ValueError` naming norms that are not proportional to their weight (Gemma's 1 + w: the sum would round), or when the
    model computes something else afterwards.
    """
    norms, before = _look(model, linears, groups, batch)
    if offset := sorted(name for name, norm in norms.values() if not _proportional(norm)):
        raise ValueError(
            f"input_diagonal folded: {offset} multiply by something else than their weight (as Gemma's norms by 1 + weight), "
            "so that no factor can be folded in exactly: use input_diagonal off"
        )
    folded = set()
    # Rows first: they belong to linears whose columns are scaled next, by what these are then.
    for group in sorted(groups, key=lambda g: g.name in norms):
        squares = torch.stack([linears[n].weight.float().square().sum(0) for n in group.members]).sum(0)
        if group.name in norms:
            d = power_of_two(squares)
            _scale(norms[group.name][1], d)
        elif (producer := _producer(model, group, len(squares))) is not None:
            linear, head, copies = producer
            rows = power_of_two(squares.view(-1, copies, head).sum(1).flatten())  # [K / copies]
            d = rows.view(-1, 1, head).expand(-1, copies, -1).flatten()
            _scale(linear, rows[:, None])
        else:
            continue
        for name in group.members:
            _scale(linears[name], 1 / d)
        folded.add(group.name)
    if not folded:
        raise ValueError("input_diagonal folded: no norm, up_proj or v_proj was found that could take it: use off")
    after = _look(model, linears, groups, batch)[1]
    error = float((after - before).norm() / before.norm())
    if not error <= _MOST_ERROR:
        raise ValueError(
            f"input_diagonal folded: the model computes something else afterwards (relative error {error:.1e} of its logits): "
            "its linears are not connected as was thought, use input_diagonal off"
        )
    return [g for g in groups if g.name in folded]


def power_of_two(squares: Tensor) -> Tensor:
    """d: the power of two nearest to the size of every column, in relation to their mean on a logarithmic scale.

    squares: [K] sums of squares; silent columns get 1 -> [K] float32
    """
    used = squares > 0
    log = squares.double().clamp_min(1e-300).log2() / 2
    log = (log - log[used].mean() if bool(used.any()) else log).where(used, 0.0)
    return torch.exp2(log.round().clamp(-_MOST, _MOST)).float()


def _look(
    model: PreTrainedModel, linears: dict[str, nn.Linear], groups: Sequence[Group], batch: Batch
) -> tuple[dict[str, tuple[str, nn.Module]], Tensor]:
    """One short pass: group -> (name, module) of the norm whose output only this group's linears read; and the logits."""
    made: dict[int, tuple[str, nn.Module]] = {}  # by the identity of the output
    read: dict[int, set[str]] = {}
    alive: list[Any] = []  # an identity may be reused once its tensor is freed

    def wrote(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            alive.append(output)
            made[id(output)] = name, module

        return hook

    def reads(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple) -> None:
            alive.append(args[0])
            read.setdefault(id(args[0]), set()).add(name)

        return hook

    modules = dict(model.named_modules())
    hooks = [m.register_forward_hook(wrote(n)) for n, m in modules.items() if _is_norm(m)]
    hooks += [m.register_forward_pre_hook(reads(n)) for n, m in modules.items() if isinstance(m, nn.Linear)]
    short = {k: v[:1, :_TOKENS] for k, v in model_inputs(batch, input_device(model)).items()}
    with hooked(hooks):
        logits = model(**short, use_cache=False).logits.float()
    found = {}
    for key, names in read.items():
        for group in groups:
            if names == set(group.members) and key in made:
                found[group.name] = made[key]
    return found, logits


def _is_norm(module: nn.Module) -> bool:
    """Has a weight that is a vector, and nothing else."""
    return list(module._parameters) == ["weight"] and module.weight.dim() == 1 and not list(module.children())  # type: ignore[operator]


def _proportional(norm: nn.Module) -> bool:
    """Whether twice the weight makes twice the output."""
    if getattr(norm, "is_permanent", True) is False:  # llm-compressor's stand-in: weights become 1 + w again when saved
        return False
    weight = norm.weight
    x = torch.linspace(-1, 2, 2 * len(weight), device=weight.device).view(2, -1).to(weight.dtype)  # type: ignore[arg-type]
    once = norm(x)
    _scale(norm, torch.full((), 2.0))
    twice = norm(x)
    _scale(norm, torch.full((), 0.5))
    return torch.equal(twice, 2 * once)


def _producer(model: PreTrainedModel, group: Group, width: int) -> tuple[nn.Linear, int, int] | None:
    """The linear whose rows become the inputs of down_proj or o_proj, features of a head, and how often a row is an input."""
    parent, _, last = group.name.rpartition(".")
    name = {"down_proj": "up_proj", "o_proj": "v_proj"}.get(last)
    block = model.get_submodule(parent) if parent else model
    linear = getattr(block, name, None) if name else None
    if not isinstance(linear, nn.Linear) or len(group.members) > 1 or width % linear.out_features:
        return None
    copies = width // linear.out_features
    head = getattr(block, "head_dim", None) if copies > 1 else linear.out_features
    return None if not isinstance(head, int) or linear.out_features % head else (linear, head, copies)


def _scale(module: nn.Module, factor: Tensor) -> None:
    """Multiply the weight of a norm or linear; a column of factors is of a linear's rows, and of its bias."""
    names = ["weight", "bias"] if factor.dim() == 2 and getattr(module, "bias", None) is not None else ["weight"]
    for name in names:
        old = getattr(module, name).detach()
        by = factor.to(old.device, old.dtype)
        write_parameter(module, name, old * (by.flatten() if name == "bias" else by))
