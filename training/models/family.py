"""What a class of models is made of, found by one traced forward: layers, what comes before and after them, the head.

The class's own forward runs on every rank, so scales, masks, rotary kinds and biases need no code here. Pipelines pass
through the layers of other stages, the loss takes the head's input, and tensor parallelism follows the class's plan.
Only STYLES names types of models: those whose matrices transformers has no plan for.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.data.batch import IGNORED
from training.models import hugging_face
from training.planner.precision import FP8_MULTIPLE, NOT_IN_FP8

TOKENS = (3, 4, 3)  # what the traced forward reads
FIT = 1e-3  # relative error of a tail that counts as found

# Styles of modules that a class's own tensor-parallel plan leaves out, in transformers' words. `packed_colwise 3`:
# three matrices in one. `divided`: a number by which the class splits a rank's results.
STYLES: dict[str, dict[str, str]] = {
    "gpt2": {
        "transformer.h.*.attn.c_attn": "packed_colwise 3",
        "transformer.h.*.attn.split_size": "divided",
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    },
    "bert": {
        "bert.encoder.layer.*.attention.self.query": "colwise",
        "bert.encoder.layer.*.attention.self.key": "colwise",
        "bert.encoder.layer.*.attention.self.value": "colwise",
        "bert.encoder.layer.*.attention.output.dense": "rowwise",
        "bert.encoder.layer.*.intermediate.dense": "colwise",
        "bert.encoder.layer.*.output.dense": "rowwise",
    },
    "apertus": {"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
    **{
        name: {
            "model.layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
            "model.layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
        }
        for name in ("glm4_moe", "sarvam_moe")
    },
    "apertus1p5_text": {"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
}
# How many blocks a matrix consists of, of which each is cut: gate and up, or q, k and v.
BLOCKS = {"packed_colwise": 2, "packed_rowwise": 2, "packed_colwise 3": 3}


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


@dataclass(frozen=True)
class Tail:
    """A class's step from its head's results to its logits.

    It is cap * tanh(scale * results / cap), without a cap scale * results.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def apply_(self, logits: Tensor) -> Tensor | float | None:
        """Do the same in place; return the slope, by which gradients are multiplied; None: it is 1 everywhere."""
        if self.cap is None:
            if self.scale == 1.0:
                return None
            logits.mul_(self.scale)
            return self.scale
        logits.mul_(self.scale / self.cap).tanh_()
        slope = (1 - logits.square()).mul_(self.scale)
        logits.mul_(self.cap)
        return slope


PLAIN = Tail()


@dataclass(frozen=True)
class Family:
    """A class of models whose layers form a chain and whose logits are its head's, up to the tail.

    Names are relative to the Hugging Face model. `widths`: the last dimension of the results of `before`. `carried`:
    the shape of what a layer passes to the next, without batch and tokens.
    """

    layers: str  # the ModuleList
    before: tuple[str, ...]  # modules with parameters that run before the layers
    after: tuple[str, ...]  # … and after them; the head is the last
    embedding: str  # the token embedding, [vocab, width]
    head: str  # the module that makes logits
    widths: Mapping[str, int]
    carried: tuple[int, ...]
    tail: Tail
    in_pairs: bool  # whether a layer returns its hidden states with something else
    styles: Mapping[str, str]  # of parameters and modules, for tensor parallelism; empty: it has no plan
    arguments: frozenset[str]  # of the class's forward

    @property
    def before_head(self) -> list[str]:
        """Modules between the layers and the head, without those that contain the head."""
        return [name for name in self.after if not f"{self.head}.".startswith(f"{name}.")]


def family_of(hf: Any) -> Family:
    """Return what a model is made of. Raises ValueError, with the cause, if it runs whole.

    Runs the class's forward on three tokens, without its layers: that touches few of its weights.
    """
    head, embedding, name = hf.get_output_embeddings(), hf.get_input_embeddings(), layers_name(hf)
    if head is None or embedding is None or name is None or not hasattr(head, "weight"):
        raise ValueError("it has no list of layers between an embedding and a head")
    try:
        found = _trace(hf, name, head, in_pairs=False)
    except Exception as alone:
        try:
            found = _trace(hf, name, head, in_pairs=True)
        except Exception as in_pairs:
            whys = dict.fromkeys(str(error) or type(error).__name__ for error in (alone, in_pairs))
            raise ValueError("; ".join(whys)) from in_pairs
    names = {id(module): path for path, module in hf.named_modules()}
    return Family(
        layers=name,
        before=tuple(found.before),
        after=tuple(found.after),
        embedding=names[id(embedding)],
        head=names[id(head)],
        widths=found.before,
        carried=found.carried,
        tail=found.tail,
        in_pairs=found.in_pairs,
        styles=styles_of(hf),
        arguments=frozenset(inspect.signature(type(hf).forward).parameters),
    )


def layers_of(hf: nn.Module) -> list[nn.Module]:
    """Return this rank's transformer layers, for any class: the units that are sharded, compiled and checkpointed.

    A pipeline stage has `Passed` in place of other stages' layers.
    """
    name = layers_name(hf)
    layers: list[nn.Module] = [] if name is None else list(hf.get_submodule(name).children())
    return [layer for layer in layers if not isinstance(layer, Passed)]


def is_for_fp8(name: str, module: Any) -> bool:
    """Return whether fp8 computes a layer's module `name`: a linear layer, or a tp rank's piece of one (_scaled_mm).

    Its sizes are multiples of 16. Routers need exact scores, and experts get any number of tokens.
    """
    is_product = is_linear(module) or vars(module).get("linear") is F.linear
    return is_product and not NOT_IN_FP8.search(name) and not any(size % FP8_MULTIPLE for size in module.weight.shape)


class Passed(nn.Module):
    """Stands for a layer of another stage: returns its input, or what the stage before made of it (`received`).

    The one behind a stage's last layer `ends` the class's forward.
    """

    def __init__(self, layer: nn.Module, *, in_pairs: bool) -> None:
        super().__init__()
        keep_attributes(self, layer)
        self.in_pairs, self.ends = in_pairs, False
        self.received: Tensor | None = None

    def forward(self, *args: Any, **named: Any) -> Any:
        hidden = args[0] if args else named["hidden_states"]
        if self.ends:
            raise Ended(hidden)
        hidden = hidden if self.received is None else self.received
        return (hidden, None) if self.in_pairs else hidden


def keep_attributes(stand_in: nn.Module, whole: nn.Module) -> None:
    """Copy what is neither a tensor nor a module: forwards ask layers for their attention_type, block_type, …"""
    own = {key: value for key, value in vars(whole).items() if key not in {"forward", "training"}}
    of_class = {key: value for key, value in vars(type(whole)).items() if isinstance(value, (str, bool, int))}
    vars(stand_in).update({key: value for key, value in (of_class | own).items() if not key.startswith("_")})


class Ended(Exception):
    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Zeros(nn.Module):
    """Stands for a module before the layers on a stage that has none of them: zeros of its result's shape."""

    def __init__(self, whole: nn.Module, width: int) -> None:
        super().__init__()
        keep_attributes(self, whole)
        weight = next(whole.parameters())
        self.width, self.dtype = width, weight.dtype
        vars(self)["weight"] = torch.empty(0, dtype=weight.dtype, device=weight.device)

    def forward(self, x: Tensor | None = None, *args: Any, **named: Any) -> Tensor:
        x = next(value for value in (x, *args, *named.values()) if isinstance(value, Tensor))
        shape = x.shape[:-1] if x.is_floating_point() else x.shape
        return torch.zeros(*shape, self.width, dtype=self.dtype, device=x.device)


@contextmanager
def layers_run(
    hf: nn.Module, name: str, own: Mapping[int, nn.Module], passed: list[Passed], received: Tensor | None = None
) -> Iterator[None]:
    """Run only the layers `own` of the ModuleList `name`, by number: from `received` on, if they are not the first.

    The class's forward ends behind them with `Ended`, unless they include the last layer.
    """
    modules = hf.get_submodule(name)._modules
    before, first, end = dict(modules), min(own, default=0), max(own, default=len(passed)) + 1
    modules.update({str(number): own.get(number, each) for number, each in enumerate(passed)})
    try:
        if first > 0:
            passed[first - 1].received = received
        if end < len(passed):
            passed[end].ends = True
        yield
    finally:
        modules.update(before)
        for each in passed:
            each.received, each.ends = None, False


@contextmanager
def head_input(hf: nn.Module, name: str) -> Iterator[list[Tensor]]:
    """Let the head return its input, which is yielded when it runs, so that the class's forward makes no logits."""
    seen: list[Tensor] = []

    def keep(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return hidden

    try:
        head = hf.get_submodule(name)
    except AttributeError:  # a stage without the head
        yield seen
        return
    with _replaced_forward(head, keep):
        yield seen


@contextmanager
def _replaced_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


@dataclass
class _Found:
    before: dict[str, int]
    after: list[str]
    carried: tuple[int, ...]
    tail: Tail
    in_pairs: bool


@torch.no_grad()
def _trace(hf: Any, name: str, head: Any, *, in_pairs: bool) -> _Found:
    layers, arguments = hf.get_submodule(name), inspect.signature(type(hf).forward).parameters
    passed = [Passed(layer, in_pairs=in_pairs) for layer in layers]
    inside = {id(module) for module in layers.modules()}
    called: list[tuple[str | Passed, Any]] = []
    handles = [each.register_forward_pre_hook(_shape_hook(called, each), with_kwargs=True) for each in passed]
    for path, module in hf.named_modules():
        if id(module) not in inside and any(True for _ in module.parameters(recurse=False)):
            handles.append(module.register_forward_hook(_result_hook(called, path)))
            handles.append(module.register_forward_pre_hook(_result_hook(called, path)))
    training, given = hf.training, torch.tensor([TOKENS], device=head.weight.device) % len(head.weight)
    computes = "cpu" if given.is_meta else given.device
    reaches = (torch.linspace(-reach, reach, len(head.weight), device=computes) for reach in (1e-3, 1.0, 100.0))
    ramp = torch.stack([*reaches])[None].to(head.weight.dtype).float()  # stays equal if the class casts it back
    off = {key: False for key in ("use_cache", "output_router_logits") if key in arguments}
    labels = {"labels": given} if "labels" in arguments and not given.is_meta else {}
    hf.eval()
    try:
        with (
            layers_run(hf, name, {}, passed),
            _replaced_forward(head, lambda hidden: ramp),
            hugging_face.unmasked(hf),
        ):
            result = hf(input_ids=given, **labels, **off)
    finally:
        hf.train(training)
        for handle in handles:
            handle.remove()
    order = [place for place, (each, _) in enumerate(called) if isinstance(each, Passed)]
    shapes, tail = {called[place][1] for place in order}, _fit(ramp, result.logits)
    shape, *others = shapes or [()]
    if [called[place][0] for place in order] != passed or others or shape[:2] != (1, len(TOKENS)):
        raise ValueError("its layers are no chain")
    if tail is None:
        raise ValueError("its logits are not its head's")
    if labels and not is_cross_entropy(result.loss, result.logits, given):
        raise ValueError("its loss is not the cross-entropy of its logits")
    before = {path: width for path, width in called[: order[0]] if isinstance(path, str) and width}
    after = list(dict.fromkeys(path for path, _ in called[order[-1] + 1 :] if isinstance(path, str)))
    return _Found(before, after, shape[2:], tail, in_pairs)


def _shape_hook(called: list[tuple[Any, Any]], passed: Passed) -> Callable[..., None]:
    def note(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        called.append((passed, tuple((args[0] if args else named["hidden_states"]).shape)))

    return note


def _result_hook(called: list[tuple[Any, Any]], path: str) -> Callable[..., None]:
    def note(module: nn.Module, args: Any, *result: Any) -> None:
        called.append((path, result[0].shape[-1] if result and isinstance(result[0], Tensor) else 0))

    return note


def is_cross_entropy(loss: Tensor, logits: Tensor, targets: Tensor) -> bool:
    """Whether a loss is the mean cross-entropy of `targets`, or of the targets one place further on."""
    logits = logits.detach().float()
    pairs = ((logits, targets), (logits[:, :-1], targets[:, 1:]))
    means = [F.cross_entropy(each.flatten(0, 1), words.flatten(), ignore_index=IGNORED) for each, words in pairs]
    return any(torch.allclose(loss.detach().float(), mean, rtol=1e-2, equal_nan=True) for mean in means)


def _fit(ramp: Tensor, logits: Tensor) -> Tail | None:
    """Return what made `logits` of `ramp`, [1, 3, words], each row of larger numbers; None: no tail is known to."""
    if logits.shape != ramp.shape:
        return None
    fit = max(FIT, 4 * torch.finfo(logits.dtype).eps)
    ramp, logits = ramp.double(), logits.double()
    scale = float(logits[0, 0, -1] / ramp[0, 0, -1])
    rounded = float(f"{scale:.6g}")
    for tail in (PLAIN, Tail(rounded), Tail(rounded, _cap(float(scale * ramp[0, 2, -1]), float(logits[0, 2, -1])))):
        if tail.cap != 0 and torch.allclose(tail(ramp), logits, rtol=fit, atol=1e-9):
            return tail
    return None


def _cap(x: float, y: float) -> float:
    """Return the cap, to four digits, for which cap * tanh(x / cap) = y; 0: there is none."""
    if not 0 < y < x:
        return 0.0
    low, high = y, 1e9
    for _ in range(200):
        cap = math.sqrt(low * high)
        low, high = (cap, high) if cap * math.tanh(x / cap) < y else (low, cap)
    return float(f"{low:.4g}")


def layers_name(hf: Any) -> str | None:
    """Return the ModuleList of layers: the one that the class's pipeline plan names, else the one with most weights."""
    base = hf.base_model
    lists = {
        path: module
        for path, module in base.named_modules()
        if isinstance(module, nn.ModuleList) and not any(part.isdigit() for part in path.split("."))
    }
    if not lists:
        return None
    planned = "layers" in hugging_face.pipeline_plan(hf) and "layers" in lists

    def size(path: str) -> tuple[bool, int]:
        modules = list(lists[path])
        return any(isinstance(each, Passed) for each in modules), sum(p.numel() for p in lists[path].parameters())

    name = "layers" if planned else max(lists, key=size)
    prefix = next(path for path, module in hf.named_modules() if module is base)
    return f"{prefix}.{name}" if prefix else name


def styles_of(hf: Any) -> dict[str, str]:
    """Return how tensor parallelism cuts each parameter or module, in transformers' words."""
    return hugging_face.expanded_plan(hf, STYLES.get(hf.config.model_type, {}))
