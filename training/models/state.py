"""What of a model is saved and loaded: parameters and persistent buffers, as in `state_dict()`."""

from __future__ import annotations

from torch import Tensor, nn


def state_of(hf: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and persistent buffers by name; tied ones once, by their first name."""
    state = hf.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    return {name: tensor for name, tensor in state.items() if first[id(tensor)] == name}
