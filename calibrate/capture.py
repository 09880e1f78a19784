"""Watching a model: which linears share an input, their input statistics, their loss gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_tilequant.calibrate.placing import as_kept, input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Group:
    """Linears that read one and the same input, in model order. Named after the first member."""

    name: str
    members: tuple[str, ...]


def model_inputs(batch: Batch, device: torch.device) -> Batch:
    """What the model is called with: token ids and mask of one calibration batch, on its device."""
    return {k: batch[k].to(device) for k in ("input_ids", "attention_mask") if k in batch}


def token_mask(batch: Batch) -> Tensor:
    """[rows, length] bool, False at padding."""
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask is None else mask.bool()


def records(batch: Batch) -> Iterator[Tensor]:
    """The token ids of each record of a batch without padding: [1, length]."""
    for ids, valid in zip(batch["input_ids"], token_mask(batch), strict=True):
        yield ids[valid][None]


def merged(batches: Iterable[Batch], tokens: int) -> list[Batch]:
    """Neighbours of one length in batches of at most so many tokens: few large passes instead of many small ones."""
    out: list[list[Batch]] = []
    for batch in batches:
        whole = {"input_ids": batch["input_ids"], "attention_mask": token_mask(batch).long()}
        last = out[-1] if out else []
        rows = sum(len(b["input_ids"]) for b in last) + len(whole["input_ids"])
        length = whole["input_ids"].shape[1]
        if last and last[0]["input_ids"].shape[1] == length and rows * length <= tokens:
            last.append(whole)
        else:
            out.append([whole])
    return [{k: torch.cat([b[k] for b in part]) for k in part[0]} for part in out]


@contextmanager
def hooked(hooks: Iterable[torch.utils.hooks.RemovableHandle]) -> Iterator[None]:
    """Remove hooks when the block ends, however it ends."""
    handles = list(hooks)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_model(model: PreTrainedModel, modules: Iterable[nn.Module], inputs: Batch) -> None:
    """One pass that reaches all of the modules: without the output head, where it is none of them."""
    whole = any(m is model.get_output_embeddings() for m in modules)
    (model if whole else model.base_model)(**inputs, use_cache=False)


@torch.no_grad()
def find_groups(model: PreTrainedModel, linears: dict[str, nn.Linear], batch: Batch) -> list[Group]:
    """Which linears receive the very same tensor, seen in one short forward pass.

    Raises `ValueError` naming linears that the pass never called.
    """
    seen: dict[str, Tensor] = {}  # the tensors themselves: an id may be reused once its tensor is freed

    def note(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple) -> None:
            seen.setdefault(name, args[0])

        return hook

    device = input_device(model)
    short = {k: v[:1, :8] for k, v in model_inputs(batch, device).items()}
    with hooked(m.register_forward_pre_hook(note(n)) for n, m in linears.items()):
        run_model(model, linears.values(), short)
    if missing := [n for n in linears if n not in seen]:
        raise ValueError(f"the calibration text never reached {missing}: ignore these modules or give more text")
    groups: dict[tuple[int, str], list[str]] = {}
    for name in linears:
        parent = name.rpartition(".")[0]
        groups.setdefault((id(seen[name]), parent), []).append(name)
    return [Group(members[0], tuple(members)) for members in groups.values()]


@torch.no_grad()
def watch_inputs(
    model: PreTrainedModel,
    modules: dict[str, nn.Linear],
    batches: Iterable[Batch],
    use: Callable[[str, Tensor], None],
) -> None:
    """Run the model and hand `use` the input rows of each watched linear: (name, [M, K]), padding left out."""
    device = input_device(model)
    mask: Tensor | None = None

    def note(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple) -> None:
            rows = args[0].reshape(-1, args[0].shape[-1])
            use(name, rows if mask is None else rows[mask.to(rows.device)])

        return hook

    with hooked(m.register_forward_pre_hook(note(n)) for n, m in modules.items()):
        for batch in batches:
            valid = token_mask(batch).flatten()
            mask = None if bool(valid.all()) else valid.to(device)
            run_model(model, modules.values(), model_inputs(batch, device))


@contextmanager
def observing_gradients(
    model: PreTrainedModel, modules: dict[str, nn.Linear], use: Callable[[str, Tensor, Tensor], None]
) -> Iterator[None]:
    """Inside, every backward pass hands `use` (name, inputs [M, K], output gradients [M, N]) of each module.

    No weight gradient is ever made: all parameters are frozen, the graph starts at the embeddings. Raises `ValueError` when a
    gradient is not finite, with the module's name.
    """
    with as_kept(model):
        frozen = [(p, p.requires_grad) for p in model.parameters()]

    def on_output(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Tensor) -> None:
            if not output.requires_grad:  # a pass without gradients in between
                return
            x = args[0].detach()

            def on_gradient(g: Tensor) -> None:
                if not bool(g.isfinite().all()):
                    raise ValueError(f"the loss gradient at {name} is not finite: check the model's dtype and the text")
                use(name, x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1]))

            output.register_hook(on_gradient)

        return hook

    hooks = [m.register_forward_hook(on_output(n)) for n, m in modules.items()]
    embedding = model.get_input_embeddings()
    hooks.append(embedding.register_forward_hook(lambda module, args, output: output.requires_grad_(True)))
    try:
        for p, _ in frozen:
            p.requires_grad_(False)
        with hooked(hooks), torch.enable_grad():
            yield
    finally:
        for p, wanted in frozen:
            p.requires_grad_(wanted)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross entropy in float32. logits: [..., V]; labels: [...] int64, -100 where there is no target.

    Raises `ValueError` when it is not finite.
    """
    loss = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten().to(logits.device), reduction="sum")
    if not bool(loss.isfinite()):
        raise ValueError("the calibration loss is not finite: check the model's dtype and the text")
    return loss


def watch_gradients(
    model: PreTrainedModel,
    modules: dict[str, nn.Linear],
    batches: Iterable[Batch],
    use: Callable[[str, Tensor, Tensor], None],
    layers: Sequence[nn.Module] = (),
) -> None:
    """Forward and backward of the summed next-token loss; `use` as in `observing_gradients`.

    Padding is neither target nor row. layers: the decoder layers, in order: only one's activations are then held at a time, and
    each runs twice. Where they do not feed one another directly, the whole graph is held.
    """
    device = input_device(model)
    mask: Tensor | None = None

    def rows(name: str, x: Tensor, gradient: Tensor) -> None:
        use(name, *((x, gradient) if mask is None else (x[mask.to(x.device)], gradient[mask.to(x.device)])))

    with observing_gradients(model, modules, rows):
        for batch in batches:
            valid = token_mask(batch).to(device)
            mask = None if bool(valid.all()) else valid.flatten()
            inputs = model_inputs(batch, device)
            labels = inputs["input_ids"].masked_fill(~valid, -100)
            calls = layer_calls(model, layers, inputs | {"use_cache": False})
            with layers_passed(calls):
                logits = model(**inputs, use_cache=False).logits
            token_loss(logits[:, :-1], labels[:, 1:]).backward()
            for call in reversed(calls):
                call.backward()


@dataclass
class LayerCall:
    """One decoder layer in one pass: what it was called with and returned. `leaf` stands for its output behind it."""

    layer: nn.Module
    hidden: Tensor
    args: tuple
    kwargs: dict[str, Any]
    output: Tensor
    in_tuple: bool
    leaf: Tensor
    after: LayerCall | None = None

    def backward(self) -> None:
        """Run the layer again with a graph, and its backward pass from the gradient behind it."""
        gradient = self.leaf.grad if self.after is None else self.after.hidden.grad
        self.hidden = self.hidden.detach().requires_grad_()
        output = self.layer(self.hidden, *self.args, **self.kwargs)
        (output[0] if self.in_tuple else output).backward(gradient)
        self.after, self.leaf = None, self.hidden  # what is no longer needed may go


@torch.no_grad()
def layer_calls(model: PreTrainedModel, layers: Sequence[nn.Module], inputs: Mapping[str, Any]) -> list[LayerCall]:
    """A pass without a graph, as the calls of its layers; none where these do not feed one another. inputs: of the model."""
    calls: list[LayerCall] = []

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        rest = {k: v for k, v in kwargs.items() if k != "hidden_states"}
        y = output[0] if isinstance(output, tuple) else output
        calls.append(LayerCall(module, hidden.detach(), args[1:], rest, y, isinstance(output, tuple), y))

    if not layers:
        return []
    with hooked(layer.register_forward_hook(note, with_kwargs=True) for layer in layers):
        model.base_model(**inputs)
    feeds = [a.output.shape == b.hidden.shape and torch.equal(a.output, b.hidden) for a, b in pairwise(calls)]
    if [c.layer for c in calls] != list(layers) or not all(feeds):
        return []
    for call, following in pairwise(calls):
        call.after = following
    return calls


@contextmanager
def layers_passed(calls: list[LayerCall]) -> Iterator[None]:
    """Inside, layers hand on what they get, and the last one a leaf with the value it had returned: what follows can be run."""
    if not calls:
        yield
        return
    calls[-1].leaf = calls[-1].output.detach().requires_grad_()

    def forward(call: LayerCall) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            y = call.leaf if call is calls[-1] else (args[0] if args else kwargs["hidden_states"])
            return (y,) if call.in_tuple else y

        return run

    with replaced_forward({call.layer: forward(call) for call in calls}):
        yield


@contextmanager
def replaced_forward(functions: Mapping[nn.Module, Callable]) -> Iterator[None]:
    """Inside, modules compute what the given functions do; their hooks still run."""
    before = {module: vars(module).get("forward") for module in functions}
    try:
        for module, function in functions.items():
            module.forward = function  # type: ignore[method-assign]
        yield
    finally:
        for module, old in before.items():
            if old is None:
                del module.forward  # the class's own shows again
            else:
                module.forward = old  # type: ignore[method-assign]
