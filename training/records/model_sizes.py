"""The parameters of a model, as they were counted: of its layers, and of what comes before and after them."""

from __future__ import annotations

from typing import Self

from training.records.record import Record

NOT_COUNTED = "not counted"


class Part(Record):
    """The parameters of a part of a model."""

    parameters: int = 0
    """Number of all parameters of the part."""
    used: int = 0
    """Parameters that one token uses: all but those of the experts that it is not sent to."""
    cut: int = 0
    """Parameters that tensor parallelism divides by the family's plan; each tp rank has all the others."""
    per_word: int = 0
    """Parameters that one more word of the vocabulary adds."""

    def of_rank(self, tp: int) -> float:
        """Return the parameters of one of `tp` ranks."""
        return self.parameters - self.cut + self.cut / tp

    def with_words(self, more: int) -> Self:
        """Return the part with so many more words in the vocabulary."""
        added = more * self.per_word
        grown = {name: getattr(self, name) + added for name in ("parameters", "used", "cut")}
        return self.model_copy(update=grown)


class LayersAlike(Part):
    """Neighbouring layers with the same numbers, which are those of one layer."""

    count: int
    """Number of neighbouring layers that are alike."""
    multiplied: int
    """Parameters in the matrices of one layer, as far as a token uses them."""
    attention: int
    """Parameters among `multiplied` that belong to attention; 0 for a layer without attention scores."""
    for_fp8: int = 0
    """Parameters among `multiplied` that are in linear layers which fp8 can compute."""


class ModelSizes(Record):
    """The parameters of a model, by part."""

    counted: str = NOT_COUNTED
    """Where the numbers are from, as words; NOT_COUNTED: they are zeros."""
    before: Part = Part()
    """What comes before the layers, such as the embedding; a tied matrix counts here, once."""
    layers: tuple[LayersAlike, ...] = ()
    """The layers in order, neighbours with the same numbers together."""
    after: Part = Part()
    """What comes after the layers, such as the last norm and the head."""
    looked_up: int = 0
    """Parameters of `before` from which a token takes rows, and which it is never multiplied with."""
    buffers: int = 0
    """Numbers in persistent buffers, which are saved but not trained."""
    why_not_muon: str = ""
    """Why Muon cannot train the model; empty: it can."""
    tied: bool = False
    """Whether the output layer uses the embedding's matrix."""

    @property
    def is_counted(self) -> bool:
        return self.counted != NOT_COUNTED

    @property
    def num_layers(self) -> int:
        return sum(layer.count for layer in self.layers)

    @property
    def parameters(self) -> int:
        return self.outside.parameters + sum(layer.count * layer.parameters for layer in self.layers)

    @property
    def used(self) -> int:
        """The parameters that one token uses."""
        return self.outside.used + sum(layer.count * layer.used for layer in self.layers)

    @property
    def cut(self) -> int:
        return self.outside.cut + sum(layer.count * layer.cut for layer in self.layers)

    @property
    def outside(self) -> Part:
        """The part before and the part after the layers, together."""
        return _sum(self.before, self.after)

    @property
    def attention_layers(self) -> int:
        return sum(layer.count for layer in self.layers if layer.attention)

    @property
    def fp8_share(self) -> float:
        """The share of what a token is multiplied with in the layers that fp8 can compute."""
        multiplied = sum(layer.count * layer.multiplied for layer in self.layers)
        return sum(layer.count * layer.for_fp8 for layer in self.layers) / max(1, multiplied)

    def of_layers(self, numbers: range) -> Part:
        """Return the parameters of the layers of these numbers together."""
        begin, parameters, cut = 0, 0, 0
        for layer in self.layers:
            end = begin + layer.count
            here = max(0, min(numbers.stop, end) - max(numbers.start, begin))
            parameters, cut, begin = parameters + here * layer.parameters, cut + here * layer.cut, end
        return Part(parameters=parameters, cut=cut)

    def with_words(self, more: int) -> ModelSizes:
        """Return the sizes of the same model with so many more words in its vocabulary."""
        looked_up = 0 if self.tied else more * self.before.per_word
        return self.model_copy(
            update={
                "before": self.before.with_words(more),
                "after": self.after.with_words(more),
                "looked_up": self.looked_up + looked_up,
            }
        )


def _sum(*parts: Part) -> Part:
    names = ("parameters", "used", "cut", "per_word")
    return Part(**{name: sum(getattr(part, name) for part in parts) for name in names})
