"""Finds where a class's own forward takes the outputs of a linear layer apart: queries, keys and values; gate and up.

A copy of the model on the meta device reads a few tokens, one layer of each kind. The features of each linear layer's
result are numbered, and the numbers follow through views, permutations and depthwise convolutions to the place where
the features are divided. A class that cannot run on the meta device shows nothing.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from training.models import hugging_face
from training.models.family import Ended, Passed, is_linear, layers_name, layers_run

TOKENS = 4
# Functions that move features, and those that leave each in its place.
MOVES = re.compile(
    r"(un)?(flatten|squeeze|bind)|view|reshape|transpose|permute|chunk|(tensor_)?split(_with_sizes)?|__getitem__|"
    r"contiguous|swapaxes|movedim|narrow|select|unsqueeze"
)
KEEPS = re.compile(r"to|float|type|type_as|silu|mul|__r?mul__")


class Split(NamedTuple):
    """How outputs lie side by side: `repeats` times so many of each part (`sizes`) in turn."""

    sizes: tuple[int, ...]
    repeats: int = 1


def split_outputs(hf: Any) -> dict[str, Split]:
    """Return how the outputs of linear layers in the list of layers are divided, by the layers' names.

    `hf` may hold weights, which are not read.
    """
    found: dict[Any, Split] = {}
    for in_pairs in (False, True):
        with torch.device("meta"):
            template: Any = type(hf)(copy.deepcopy(hf.config)).eval()
        template.config.use_cache = False
        name = str(layers_name(template))
        layers, marks = template.get_submodule(name), _Marks()
        passed = [Passed(layer, in_pairs=in_pairs) for layer in layers]
        kinds = [_kind(layer) for layer in layers]
        unlike = {kinds.index(kind) for kind in kinds}
        own = {number: _guarded(layers[number]) for number in unlike}
        for path, module in template.named_modules():
            if is_linear(module) or isinstance(module, nn.Linear):
                module.register_forward_hook(_marker(marks, path))
        with torch.no_grad(), hugging_face.unmasked(template), layers_run(template, name, own, passed):
            ended = _run(template, marks)
        for path, parts in marks.parts.items():
            if split := _split(parts):
                found.setdefault(_place(template, path), split)
        if ended:
            break
    names = [path for path, module in hf.named_modules() if is_linear(module) or isinstance(module, nn.Linear)]
    return {path: found[_place(hf, path)] for path in names if _place(hf, path) in found}


def _run(template: Any, marks: _Marks) -> bool:
    """Return whether all layers ran that are unlike; what has run until an error is known all the same."""
    try:
        with marks:
            template(input_ids=torch.zeros(1, TOKENS, dtype=torch.long, device="meta"))
    except Ended:
        return True
    except Exception:
        return False
    return True


def _kind(layer: nn.Module) -> Any:
    plain = {key: value for key, value in vars(layer).items() if isinstance(value, (str, bool))}
    return type(layer), sorted(plain.items()), [(name, p.shape) for name, p in layer.named_parameters()]


def _place(hf: Any, path: str) -> Any:
    """Return what linear layers have in common whose class divides their outputs alike."""
    around, _, leaf = path.rpartition(".")
    return type(hf.get_submodule(around)).__name__, leaf, hf.get_submodule(path).weight.shape


def _guarded(layer: nn.Module) -> nn.Module:
    """Return a layer whose parts pass their input on where they fail on the meta device, as experts always do."""
    for module in layer.modules():
        if any(p.dim() == 3 for p in module.parameters(recurse=False)) and not isinstance(
            module, nn.modules.conv._ConvNd
        ):
            module.forward = _first
    for module in (*layer.children(), layer):
        module.forward = _or_first(module.forward)
    return layer


def _first(*args: Any, **named: Any) -> Any:
    return args[0] if args else named["hidden_states"]


def _or_first(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        try:
            return forward(*args, **named)
        except Exception:
            return _first(*args, **named)

    return call


def _marker(marks: _Marks, path: str) -> Callable[..., None]:
    def mark(module: nn.Module, args: Any, result: Any) -> None:
        marks.follow(path, result, torch.arange(result.shape[-1], device="cpu").expand(result.shape))

    return mark


class _Marks(TorchFunctionMode):
    """Follows the numbered features of marked tensors, and notes the parts that they are divided into."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, set[tuple[int, ...]]] = {}
        self.marked: dict[int, tuple[Tensor, str, Tensor, bool]] = {}  # the tensors too: an ID is not used again

    def follow(self, path: str, tensor: Tensor, numbers: Tensor, *, is_part: bool = False) -> None:
        self.marked[id(tensor)] = (tensor, path, numbers, is_part)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        if args and id(args[0]) in self.marked:
            _, path, numbers, is_part = self.marked[id(args[0])]
            name = getattr(func, "__name__", "")
            if MOVES.fullmatch(name):
                self._divide(path, numbers, is_part, result, func(numbers, *args[1:], **named))
            elif KEEPS.fullmatch(name) and result.shape == args[0].shape:
                self.follow(path, result, numbers, is_part=is_part)
            elif name == "conv1d" and named.get("groups", args[-1]) == numbers.shape[1]:  # each feature by itself
                self.follow(path, result, numbers[..., :1].expand(result.shape))
        return result

    def _divide(self, path: str, numbers: Tensor, is_part: bool, results: Any, moved: Any) -> None:
        pairs = [(results, moved)] if isinstance(results, Tensor) else zip(results, moved, strict=True)
        for result, own in pairs:
            features = [] if is_part else _features(own)
            if divided := 0 < len(features) < len(_features(numbers)):
                self.parts.setdefault(path, set()).add(tuple(features))
            self.follow(path, result, own, is_part=is_part or divided)


def _features(numbers: Tensor) -> list[int]:
    """Return the numbers that occur, in order."""
    occurs = torch.zeros(int(numbers.max()) + 1 if numbers.numel() else 0, dtype=torch.bool)
    occurs[numbers.flatten()] = True
    return occurs.nonzero().flatten().tolist()


def _split(parts: set[tuple[int, ...]]) -> Split | None:
    """Return how parts lie side by side; None if they overlap or do not repeat regularly."""
    wholes = {part: frozenset(part) for part in parts}
    smallest = sorted(part for part in parts if not any(other < wholes[part] for other in wholes.values()))
    runs = [(_runs(part)) for part in smallest]
    repeats, sizes = len(runs[0]), tuple(each[0][1] for each in runs)
    period = sum(sizes)
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    regular = [
        [(begin + turn * period, size) for turn in range(repeats)] for begin, size in zip(begins, sizes, strict=True)
    ]
    return Split(sizes, repeats) if runs == regular else None


def _runs(numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the beginnings and lengths of runs of following numbers."""
    begins = [place for place, each in enumerate(numbers) if place == 0 or each != numbers[place - 1] + 1]
    return [(numbers[a], b - a) for a, b in zip(begins, [*begins[1:], len(numbers)], strict=True)]
