"""The admission test: which types of models, of all that transformers can build, train right under every mesh.

    python -m tests.support.families [TYPE …] [--write]

Each type is built tiny, in training mode, and its loss and every gradient are compared with those of the class's own
forward and cross-entropy: as stages of a pipeline (unequal and interleaved, in one process), on two tp ranks, with
both, with both under fsdp on four ranks, with sequence and context parallelism, with several documents in a sequence,
and compiled. Its tiny configs have every kind of layer that its class can make, and a run of it is planned, or refused
by its name: a type that cannot be planned is admitted to nothing. It prints a table and, as its last line, one JSON
object. `--write`: write their rows of
training/facts/families.json, from which plans refuse what failed; by default what the file admits is compared with
what was found.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import inspect
import json
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tasks.workspace.processes import free_port
from tests.support import configs
from tests.support.tiny_configs import (
    LAYERS,
    POSITIONS,
    VOCAB,
    all_types,
    has_heads,
    has_plan,
    is_masked,
    missing_kinds,
    tiny_config,
    tiny_configs,
    tiny_model,
)
from training.facts.families import TABLE, Ability, can
from training.facts.model_config import read_settings
from training.models import document_attention, hugging_face
from training.models.document_attention import attend_by_document
from training.models.init_weights import FreshWeights
from training.models.language_model import LanguageModel
from training.models.sizes import count_model
from training.models.state import state_of
from training.planner.plan import make_plan
from training.strategies.activation_checkpointing import compile_layers
from training.strategies.pipeline import Stage, keep_stages
from training.strategies.tensor import shard_matrices

ROWS, CONTEXT = 2, 16
TOLERANCE = 2e-4  # of a gradient's largest number: fp32 sums are taken in another order
SMALLEST = 1e-6  # … and of this share of the largest of all: a key's bias has no effect, its gradient is rounding
TIMEOUT_S, COMPILED_IN_S = 60, 300
ALL, PAIR = range(4), range(2)
CHECKS = {  # the ranks of each check: those that need one rank run beside each other
    **dict.fromkeys(("alone", "documents"), ALL),
    **dict.fromkeys(("pp", "tp", "pp_tp", "sp", "cp"), PAIR),
    "fresh": range(2, 3),
    "compile": range(3, 4),
    "fsdp_tp_pp": ALL,
}
NEEDED = {"pp_tp": ("pp", "tp"), "sp": ("tp",), "fsdp_tp_pp": ("pp", "tp", "pp_tp")}
ABILITIES: tuple[Ability, ...] = get_args(Ability)
UNLIKE = (  # a dozen that have little in common, for CI
    "llama",
    "gpt2",
    "bert",
    "gemma3_text",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "cohere2",
    "granite",
    "nemotron_h",
    "phi3",
    "modernbert",
)


class Whole:
    """The class's own loss and gradients, and the data they are of."""

    def __init__(self, model_type: str, config: Any) -> None:
        self.hf, self.own_attention = tiny_model(model_type, config), False
        self.ids, self.targets = torch.randint(3, VOCAB - 6, (2, ROWS, CONTEXT))
        self.documents = torch.tensor([[0] * 6 + [1] * 10, [0] * 11 + [1] * 2 + [2] * 3])
        self.loss, self.grads = self._compute([(slice(0, CONTEXT), row) for row in (slice(0, ROWS),)])
        self.tied = self.hf.get_input_embeddings().weight is self.hf.get_output_embeddings().weight

    def of_documents(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and gradients of documents read one by one."""
        spans = []
        for row, numbers in enumerate(self.documents.tolist()):
            ends = [
                place for place in range(1, CONTEXT + 1) if place == CONTEXT or numbers[place] != numbers[place - 1]
            ]
            spans += [(slice(a, b), slice(row, row + 1)) for a, b in zip([0, *ends], ends, strict=False)]
        return self._compute(spans)

    def _compute(self, spans: list[tuple[slice, slice]]) -> tuple[Tensor, dict[str, Tensor]]:
        hf = copy.deepcopy(self.hf)
        total = torch.zeros(())
        for tokens, rows in spans:
            logits = hf(input_ids=self.ids[rows, tokens]).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), self.targets[rows, tokens].flatten(), reduction="sum")
            loss.backward()
            total += loss.detach()
        return total, {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}

    def model(self, *, own_attention: bool | None = None) -> LanguageModel:
        own_attention = self.own_attention if own_attention is None else own_attention
        model = LanguageModel(copy.deepcopy(self.hf), precision="fp32")
        if model.by_document and not own_attention:
            hugging_face.set_attention(model.hf, "eager")
        model.by_document = own_attention
        if own_attention:
            attend_by_document(model.hf)
        return model


def differs(
    loss: Tensor, grads: dict[str, Tensor], wanted: tuple[Tensor, dict[str, Tensor]], cuts: Any = None, mesh: Any = None
) -> str | None:
    """Return how a loss and gradients differ from those of the whole model; None if they do not."""
    if not torch.isclose(loss.detach(), wanted[0], rtol=1e-5, atol=0):
        return f"its loss is {loss.item():.4f} instead of {wanted[0].item():.4f}"
    largest = max(grad.abs().max().item() for grad in wanted[1].values())
    for name, whole in wanted[1].items():
        own = grads.get(name)
        piece = cuts[name].take(whole, mesh) if cuts and name in cuts else whole
        if own is None or own.shape != piece.shape:
            return f"{name} has no such gradient"
        if (own - piece).abs().max().item() > TOLERANCE * whole.abs().max().item() + SMALLEST * largest:
            return f"the gradient of {name} differs"
    return None


def grads_of(model: LanguageModel) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.hf.named_parameters() if p.grad is not None}


def in_stages(
    whole: Whole, prepare: Callable[[LanguageModel], None], rows: slice = slice(ROWS), fsdp: DeviceMesh | None = None
) -> Any:
    """Return loss, gradients and cuts of three stages on two ranks: the first rank has the first and the last.

    Under fsdp they are of these rows, and gradients of all ranks' rows.
    """
    models = [whole.model(), whole.model()]
    numbers = {0: range(1), 1: range(1, LAYERS - 1), 2: range(LAYERS - 1, LAYERS)}
    stages: dict[int, Stage] = {}
    for model, own in zip(models, ((0, 2), (1,)), strict=True):
        prepare(model)
        keep_stages(model, {stage: numbers[stage] for stage in own}, last=2)
        stages |= {stage: Stage(model, stage, last=stage == 2, dtype=torch.float32) for stage in own}
    for stage in stages.values() if fsdp else ():
        stage.shard(mesh=fsdp)
    ids, sent, received = whole.ids[rows], list[Tensor](), list[Tensor]()
    hidden = ids
    for number in range(3):
        hidden = stages[number](hidden, ids)
        if number < 2:
            sent.append(hidden)
            hidden = hidden.detach().requires_grad_()
            received.append(hidden)
    loss = models[0].loss_from(hidden, whole.targets[rows])
    (loss * (fsdp.size() if fsdp else 1)).backward()  # fsdp takes the mean over ranks
    for out, back in zip(reversed(sent), reversed(received), strict=True):
        out.backward(back.grad)
    grads = {name: whole_of(grad) for model in reversed(models) for name, grad in grads_of(model).items()}
    if whole.tied and fsdp:  # each stage has its own copy of the matrix
        family = models[0].known_family()
        grads[f"{family.embedding}.weight"] += grads[f"{family.head}.weight"]
    return loss.detach(), grads, models[0].cuts | models[1].cuts


def whole_of(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def sum_partial(model: LanguageModel, group: Any, *, all_whole: bool = False) -> dict[str, Tensor]:
    grads = grads_of(model)
    for name, grad in grads.items():
        if name not in model.cuts and (all_whole or name in model.partial):
            dist.all_reduce(grad, group=group)
    return grads


class Admission:
    """The checks, each a method that returns why a type fails, or None."""

    def __init__(self, model_type: str, config: Any, mesh: DeviceMesh) -> None:
        self.fsdp, self.mesh, self.group = mesh["fsdp"], mesh["tp"], mesh["tp"].get_group()
        self.whole = Whole(model_type, config)
        self.wanted = self.whole.loss, self.whole.grads
        self.family = self.whole.model().family

    def alone(self) -> str | None:
        if self.family is None:
            return "its layers are no chain, or its logits are not its head's: it runs whole"
        model = self.whole.model()
        loss = model(self.whole.ids, self.whole.targets)
        loss.backward()
        return differs(loss, grads_of(model), self.wanted)

    def pp(self) -> str | None:
        assert self.family is not None
        stages = tuple(f"{name}." for name in (self.family.layers, *self.family.before, *self.family.after))
        if outside := [name for name, _ in self.whole.hf.named_parameters() if not name.startswith(stages)]:
            return f"its {outside[0]} belongs to no stage"
        loss, grads, _ = in_stages(self.whole, lambda model: None)
        return differs(loss, grads, self.wanted)

    def tp(self) -> str | None:
        return self._tp()

    def sp(self) -> str | None:
        return self._tp(sequence_parallel=True)

    def _tp(self, *, sequence_parallel: bool = False) -> str | None:
        assert self.family is not None
        if not self.family.styles:
            return "transformers has no tensor-parallel plan for it"
        model = self.whole.model()
        shard_matrices(model, self.mesh, sequence_parallel=sequence_parallel)
        loss = model(self.whole.ids, self.whole.targets)
        loss.backward()
        grads = sum_partial(model, self.group, all_whole=sequence_parallel)
        return differs(loss, grads, self.wanted, model.cuts, self.mesh)

    def pp_tp(self) -> str | None:
        return self._pp_tp()

    def fsdp_tp_pp(self) -> str | None:
        row = self.fsdp.get_local_rank()
        return self._pp_tp(slice(row, row + 1), self.fsdp)

    def _pp_tp(self, rows: slice = slice(ROWS), fsdp: DeviceMesh | None = None) -> str | None:
        names: set[str] = set()

        def prepare(model: LanguageModel) -> None:
            shard_matrices(model, self.mesh)
            names.update(model.partial)

        loss, grads, cuts = in_stages(self.whole, prepare, rows, fsdp)
        if fsdp:
            dist.all_reduce(loss, group=fsdp.get_group())
        for name in sorted(names & grads.keys()):
            dist.all_reduce(grads[name], group=self.group)
        return differs(loss, grads, self.wanted, cuts, self.mesh)

    def documents(self) -> str | None:
        wanted, shortest = self.whole.of_documents(), document_attention.CPU_CONTEXT
        places = torch.arange(CONTEXT)
        numbers = self.whole.documents
        begins = torch.stack([torch.stack([(row == n).nonzero()[0, 0] for n in row]) for row in numbers])
        try:
            for document_attention.CPU_CONTEXT in (0, CONTEXT + 1):  # document by document, then with a dense mask
                model = self.whole.model(own_attention=True)
                assert model.family is not None
                if "position_ids" not in model.family.arguments:
                    return "its forward takes no positions"
                loss = model(self.whole.ids, self.whole.targets, places - begins, numbers)
                loss.backward()
                if why := differs(loss, grads_of(model), wanted):
                    return why
        finally:
            document_attention.CPU_CONTEXT = shortest
        self.whole.own_attention = True  # as in training
        return None

    def cp(self) -> str | None:
        for documents in (None, self.whole.documents):
            wanted = self.wanted if documents is None else self.whole.of_documents()
            positions = None
            if documents is not None:
                firsts = torch.stack([torch.stack([(row == n).nonzero()[0, 0] for n in row]) for row in documents])
                positions = torch.arange(CONTEXT) - firsts
            model = self.whole.model(own_attention=True)
            assert model.family is not None
            if "position_ids" not in model.family.arguments:
                return "its forward takes no positions"
            model.share_context(self.group)
            loss = model(self.whole.ids, self.whole.targets, positions, documents)
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total, group=self.group)
            if why := differs(total, sum_partial(model, self.group, all_whole=True), wanted):
                return why
        return None

    @torch.no_grad()
    def fresh(self) -> str | None:
        """Whether initial weights can be made layer by layer, and models without initialization have right buffers."""
        config, kind = copy.deepcopy(self.whole.hf.config), type(self.whole.hf)
        with torch.device("meta"):
            template = kind(config)
        with _nan_memory():
            weights = FreshWeights(template, seed=1)
            for name, whole in state_of(self.whole.hf).items():
                if name not in weights or not weights[name].isfinite().all():
                    return f"its {name} is not made by its class's _init_weights"
                if weights[name].shape != whole.shape:
                    return f"its {name} has another shape"
            initialized = kind(config)
            with hugging_face.without_weights():
                bare = kind(config)
        saved = state_of(bare)
        for (name, one), (_, other) in zip(bare.named_buffers(), initialized.named_buffers(), strict=True):
            if name not in saved and not torch.equal(one, other):
                return f"its {name} is set only when weights are initialized"
        return None

    def compile(self) -> str | None:
        """Whether each layer becomes one graph, and a second step needs no other; torch's compiler writes no kernels,
        which would take it minutes."""
        torch._dynamo.reset()
        model = self.whole.model()
        compile_layers(model, one_shape=True, device_kind="cpu", backend="aot_eager")
        for torch._dynamo.config.error_on_recompile in (False, True):
            try:
                loss = model(self.whole.ids, self.whole.targets)
                loss.backward()
                why = differs(loss, grads_of(model), self.wanted)
            finally:
                torch._dynamo.config.error_on_recompile = False
            if why:
                return why
            model.zero_grad()
        return None


@contextmanager
def _nan_memory() -> Iterator[None]:
    """Fill new tensors with NaN, so that what nobody initializes is seen."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def examined(model_type: str, mesh: DeviceMesh) -> dict[str, str]:
    """Return why a type fails, by check: in one of its tiny configs, which have every kind of layer together.

    All ranks call this; ranks that share a check fail together.
    """
    try:
        found = [_examined(model_type, config, mesh) for config in tiny_configs(model_type)]
        whys = {check: why for one in reversed(found) for check, why in one.items()}
        if "alone" not in whys and (missing := missing_kinds(model_type)):
            whys = {"alone": f"its tiny configs lack a kind of layer: {missing[0]}"}
    except Exception as error:
        return {"alone": f"it cannot be built tiny ({_words(error)})"}
    return whys


def _examined(model_type: str, config: Any, mesh: DeviceMesh) -> dict[str, str]:
    admission = Admission(model_type, config, mesh)
    found: dict[str, str] = {}
    for check, ranks in CHECKS.items():
        if check == "fsdp_tp_pp":
            found = _of_all_ranks(found)
        if dist.get_rank() not in ranks or "alone" in found or any(needed in found for needed in NEEDED.get(check, ())):
            continue
        try:
            why = getattr(admission, check)()
        except Exception as error:
            why = _words(error)
        failed = torch.tensor([float(why is not None)])
        if len(ranks) > 1:
            dist.all_reduce(failed, group=admission.group if ranks == PAIR else None)
        if failed:
            admission.whole.own_attention &= check != "documents"
            found[check] = why or "it fails on another rank"
    return found


def _of_all_ranks(found: dict[str, str]) -> dict[str, str]:
    every = [found] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return {check: why for one in reversed(every) for check, why in one.items()}  # the first rank's words count


def _words(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:100]}"


def _rank(rank: int, port: int, types: list[str], write: bool) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "4"}
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=COMPILED_IN_S))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for axis in ("fsdp", "tp"):
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT_S), mesh[axis].get_group())
    found: dict[str, dict[str, str]] = {}
    unplanned: dict[str, str] = {}
    for model_type in types:
        start = time.monotonic()
        found[model_type] = examined(model_type, mesh)
        if rank == 0:
            if why := why_not_planned(model_type):
                unplanned[model_type] = why
                found[model_type] = {"alone": f"no run of it is planned: {why}"} | found[model_type]
            failed = "; ".join(f"{check}: {why}" for check, why in found[model_type].items()) or "equal"
            planned = "refused" if why else "planned"
            print(f"{model_type:24} {time.monotonic() - start:5.1f} s  {planned}; {failed}", flush=True)
    if rank == 0:
        report(found, unplanned, write=write)
    dist.destroy_process_group()


def refusals(found: dict[str, str]) -> dict[str, str]:
    """Return why a type is refused, by ability, from what its checks found."""
    if alone := found.get("alone"):
        return dict.fromkeys(ABILITIES, alone)
    given = {"sp": found["tp"]} | found if "tp" in found else found
    return {ability: _in_its_test(given[ability]) for ability in ABILITIES if ability in given}


def _in_its_test(why: str) -> str:
    what_differs = why.startswith(("its loss is", "the gradient of", "with our cache"))
    if what_differs:
        return f"in its test {why}"
    return f"its test ended in {why}" if re.match(r"\w+: ", why) else why


def why_not_planned(model_type: str) -> str | None:
    """Return why a run of a type's tiny config is not planned; None if it is. A plan's own refusals are ValueErrors."""
    objective, architecture = ("masked", "bert") if is_masked(model_type) else ("causal", "path")
    try:
        with tempfile.TemporaryDirectory() as folder:
            tiny_config(model_type).save_pretrained(folder)
            fields = json.loads((Path(folder) / "config.json").read_bytes())
            shape = count_model(read_settings(Path(folder)), objective=objective)
            config = configs.tiny_config(model__path=folder, model__architecture=architecture, model__dropout=0.0)
            make_plan(config, configs.inventory(1), run_id=model_type, hf_config=fields, hf_shape=shape)
    except ValueError as error:
        return str(error)
    except Exception as error:
        return _words(error)
    return None


def counts_from_pad(model_type: str) -> bool:
    """Whether a type counts positions from its pad token's ID + 1 on, so that its table has fewer than it says."""
    try:
        hf = tiny_model(model_type)
        hf(input_ids=torch.full((1, POSITIONS - 1), 7))
    except Exception:
        return False
    try:
        hf(input_ids=torch.full((1, POSITIONS), 7))
    except (IndexError, RuntimeError) as error:
        return "out of" in str(error)
    return False


def write_table(table: dict[str, dict[str, str]]) -> None:
    """Write the rows of these types into the table; rows of another release go."""
    known = json.loads(TABLE.read_text())
    rows = known["types"] | table if known["transformers"] == transformers.__version__ else table
    masked = [model_type for model_type in rows if is_masked(model_type)]
    whole = {
        "transformers": transformers.__version__,
        "masked": sorted(masked),
        "counts_from_pad": sorted(model_type for model_type in masked if counts_from_pad(model_type)),
        "without_heads": sorted(model_type for model_type in rows if not has_heads(model_type)),
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in whole.items()]
    types = [f"  {json.dumps(name)}: {json.dumps(_in_short(row))}" for name, row in sorted(rows.items())]
    TABLE.write_text("{\n" + ",\n".join([*lines, ' "types": {\n' + ",\n".join(types) + "\n }"]) + "\n}\n")


def _in_short(refused: dict[str, str]) -> dict[str, str]:
    """Return one entry in place of all abilities' if these are refused for one reason."""
    reasons = set(refused.values())
    return {"*": reasons.pop()} if len(refused) == len(ABILITIES) and len(reasons) == 1 else refused


def report(found: dict[str, dict[str, str]], unplanned: dict[str, str], *, write: bool) -> None:
    table = {model_type: refusals(checks) for model_type, checks in found.items()}
    wrong = [
        f"{model_type} {ability}"
        for model_type, refused in table.items()
        for ability in ABILITIES
        if not write and can(model_type, ability) and ability in refused
    ]
    wrong += [f"{model_type} plan ({why})" for model_type, why in unplanned.items() if model_type not in why]
    if write:
        write_table(table)
    if wrong:
        print("admitted by the table, and not equal: " + ", ".join(wrong), file=sys.stderr)
    counts = counted(table, lambda model_type, ability: ability not in table[model_type])
    every = {"examined": len(found), "planned": len(found) - len(unplanned)}
    every["admitted"] = sum(len(refused) < len(ABILITIES) for refused in table.values())
    print(json.dumps(counts | every | {"silently_wrong": len(wrong)}))


def counted(types: Iterable[str], may: Callable[[str, Ability], bool]) -> dict[str, int]:
    """Count those of these types that have a tp plan, by what they can do."""
    planned = [model_type for model_type in types if has_plan(model_type)]

    def equal(*abilities: Ability) -> int:
        return sum(all(may(model_type, ability) for ability in abilities) for model_type in planned)

    return {
        "types": len(planned),
        "equal_pp": equal("pp"),
        "equal_tp": equal("tp"),
        "equal_pp_tp": equal("pp", "tp", "pp_tp"),
        "equal_fsdp_tp_pp": equal("pp", "tp", "pp_tp", "fsdp_tp_pp"),
        "equal_sp": equal("sp"),
        "equal_cp": equal("cp"),
        "equal_documents": equal("documents"),
        "refused": len(planned) - equal("pp", "tp", "pp_tp", "cp", "documents"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=inspect.getdoc(sys.modules[__name__]))
    parser.add_argument("types", nargs="*", help="types of models; by default all that transformers has")
    parser.add_argument("--write", action="store_true", help="write the table that plans read")
    given = parser.parse_args()
    arguments = free_port(), given.types or all_types(), given.write
    torch.multiprocessing.start_processes(_rank, arguments, nprocs=len(ALL), start_method="fork")  # imports are done


if __name__ == "__main__":
    main()
