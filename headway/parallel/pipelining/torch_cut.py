"""A model cut into stages: a Sequential by its modules, stages as they are given, any other model by torch's tracer.

Every rank cuts the whole model alike and keeps its own stages. Names of
parameters and buffers stay those of the whole model.

    Sequential          p runs of modules, equal in number
    list of stages      modules, or (module, its predecessors): a graph with one last stage
    another module      `torch.distributed.pipelining.pipeline`, cut near equal shares of the parameters, there
                        where the fewest values cross

The tracer copies a parameter that two stages use (GPT-2's embedding and its
output layer) and forgets that they were one. Ties are found by storage before
it runs, and kept: the copies add up their gradients, and stay equal.

>>> chain = cut(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.zeros(1, 2), 2)
>>> [sorted(stage.module.state_dict()) for stage in chain.stages]
[['0.bias', '0.weight'], ['2.bias', '2.weight']]
"""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn
from torch.distributed.pipelining import pipeline as trace

from headway.core.errors import InputError
from headway.sim.pipeline.actions import StageGraph

Tensors = tuple[torch.Tensor, ...]
"""Arguments or outputs of a stage."""

ModelLike = nn.Module | Sequence[nn.Module | tuple[nn.Module, Sequence[int]]]
"""A model, or its stages."""


@dataclass(frozen=True, slots=True)
class ArgumentSource:
    """Where one argument of a stage comes from."""

    stage: int
    """The stage that makes it; -1: an input of the model."""

    index: int | None
    """Which of its outputs, or of the inputs; None: all of them, one argument each."""


@dataclass(frozen=True, slots=True)
class ModelStage:
    """One stage of a model."""

    module: nn.Module
    """What it runs."""

    sources: tuple[ArgumentSource, ...]
    """Where its arguments come from, in order."""

    prefix: str = ""
    """What stands before its names in the whole model."""

    names: frozenset[str] | None = None
    """Names of its state that the whole model has too; None: all."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers by their names in the whole model; the tensors are the module's own."""
        state = {f"{self.prefix}{name}": value for name, value in self.module.state_dict(keep_vars=True).items()}
        return {name: value for name, value in state.items() if self.names is None or name in self.names}


@dataclass(frozen=True, slots=True)
class CutModel:
    """All stages of a model."""

    stages: tuple[ModelStage, ...]
    """[stages]"""

    graph: StageGraph
    """Which stages feed which."""

    ties: tuple[tuple[tuple[int, str], ...], ...] = ()
    """Parameters that are one in the model and lie on several stages: (stage, name in its module) of each copy."""


def cut(model: ModelLike, example: torch.Tensor | Tensors, num_stages: int) -> CutModel:
    """Cut a model into `num_stages`; `example` is the input of one micro-batch, which the tracer runs.

    Raises `InputError` where there are too few modules, a stage is given twice, the graph of the stages is none, or
    stages that were given share a parameter.
    """
    if not isinstance(model, nn.Module):
        return _given(model, num_stages)
    if num_stages == 1:
        return CutModel((ModelStage(model, (ArgumentSource(-1, None),)),), StageGraph.chain(1))
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return _sequential(model, num_stages)
    return _traced(model, example if isinstance(example, tuple) else (example,), num_stages)


def _sequential(model: nn.Sequential, num_stages: int) -> CutModel:
    children = list(model.named_children())
    if len(children) < num_stages:
        raise InputError(
            f"the Sequential has {len(children)} modules for {num_stages} stages. Give at least one module per stage, "
            "or fewer ranks."
        )
    bounds = [len(children) * stage // num_stages for stage in range(num_stages + 1)]
    modules = [nn.Sequential(OrderedDict(children[low:high])) for low, high in itertools.pairwise(bounds)]
    stages = tuple(ModelStage(module, (ArgumentSource(index - 1, None),)) for index, module in enumerate(modules))
    _refuse_ties(stages)
    return CutModel(stages, StageGraph.chain(num_stages))


def _given(model: Sequence[nn.Module | tuple[nn.Module, Sequence[int]]], num_stages: int) -> CutModel:
    """Take the stages as they are: a module follows the one before it, a pair says what it follows."""
    if len(model) != num_stages:
        raise InputError(f"{len(model)} stages are given, the ranks run {num_stages}. Give one per rank and place.")
    stages, preds = [], []
    for index, entry in enumerate(model):
        module, before = (
            (entry, (index - 1,) if index else ()) if isinstance(entry, nn.Module) else (entry[0], entry[1])
        )
        preds.append(tuple(int(stage) for stage in before))
        stages.append(ModelStage(module, tuple(ArgumentSource(stage, None) for stage in preds[-1]), prefix=f"{index}."))
    graph = StageGraph(tuple(preds))
    # Of several first stages each gets its own of the inputs, unless there is one for all.
    first = [index for index, before in enumerate(preds) if not before]
    for number, index in enumerate(first):
        source = ArgumentSource(-1, number if len(first) > 1 else None)
        stages[index] = replace(stages[index], sources=(source,))
    _refuse_ties(tuple(stages))
    return CutModel(tuple(stages), graph)


def _refuse_ties(stages: tuple[ModelStage, ...]) -> None:
    """Raise `InputError` where two stages share a parameter."""
    owner: dict[int, tuple[int, str]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.module.named_parameters():
            first = owner.setdefault(parameter.data_ptr() or id(parameter), (index, stage.prefix + name))
            if first[0] != index:
                raise InputError(
                    f"stages {first[0]} and {index} share a parameter: {first[1]} is tied to {stage.prefix + name}. "
                    "Cut so that both are in one stage, untie them, or give one nn.Module, whose ties are kept."
                )


# Models of any form, by torch's tracer.


def _traced(model: nn.Module, example: Tensors, num_stages: int) -> CutModel:
    tied: dict[int, str] = {}
    first_name = {  # name -> the first name of the same memory
        name: tied.setdefault(parameter.data_ptr(), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    state_names = frozenset(model.state_dict())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of its own older names
            pipe = trace(model, example, split_policy=lambda traced: _split(traced, num_stages))
    except InputError:
        raise
    except Exception as cause:
        raise InputError(
            f"the model cannot be traced into stages ({type(cause).__name__}: {str(cause)[:300]}). Give an "
            "nn.Sequential, or a list of stages."
        ) from cause
    calls = [entry for entry in pipe.split_gm.graph.nodes if entry.op == "call_module"]
    order = {call.name: index for index, call in enumerate(calls)}
    inputs = [entry.name for entry in pipe.split_gm.graph.nodes if entry.op == "placeholder"]
    stages, copies = [], dict[str, list[tuple[int, str]]]()
    for index, call in enumerate(calls):
        module = pipe.split_gm.get_submodule(str(call.target))
        for name in dict(module.named_parameters(remove_duplicate=False)):
            copies.setdefault(first_name.get(name, name), []).append((index, name))
        stages.append(
            ModelStage(module, tuple(_source(value, order, inputs) for value in call.args), names=state_names)
        )
    for members in copies.values():
        _tie(stages, members)
    preds = tuple(tuple(sorted({source.stage for source in stage.sources if source.stage >= 0})) for stage in stages)
    ties = tuple(tuple(members) for members in copies.values() if len({index for index, _ in members}) > 1)
    return CutModel(tuple(stages), StageGraph(preds), ties)


def _source(value: object, order: dict[str, int], inputs: list[str]) -> ArgumentSource:
    """Return where an argument in the graph of stages comes from."""
    assert isinstance(value, fx.Node)
    if value.op == "placeholder":
        return ArgumentSource(-1, inputs.index(value.name))
    if value.op == "call_function":  # operator.getitem of a stage with several outputs
        maker, index = value.args
        assert isinstance(maker, fx.Node)
        assert isinstance(index, int)
        return ArgumentSource(order[maker.name], index)
    return ArgumentSource(order[value.name], 0)


def _tie(stages: list[ModelStage], members: list[tuple[int, str]]) -> None:
    """Make the names of one parameter within a stage one parameter again."""
    first: dict[int, nn.Parameter] = {}
    for index, name in members:
        path, _, leaf = name.rpartition(".")
        owner = stages[index].module.get_submodule(path)
        setattr(owner, leaf, first.setdefault(index, getattr(owner, leaf)))


def _split(traced: fx.GraphModule, num_stages: int) -> fx.GraphModule:
    """Mark the cuts in a traced model: where the fewest values cross, parameters balanced.

    crossing(i) counts the values that are made before operation i and used at it or behind it; parameters and inputs
    are not counted, because every stage has them.
    """
    operations = [entry for entry in traced.graph.nodes if entry.op not in ("placeholder", "get_attr", "output")]
    position = {entry: index for index, entry in enumerate(operations)}
    change, weight, used = [0] * (len(operations) + 1), [0.0] * len(operations), set[str]()
    for index, entry in enumerate(operations):
        last = max((position.get(user, len(operations) - 1) for user in entry.users), default=index)
        change[min(index + 1, last)] += last > index
        change[last + 1] -= last > index
        for value in entry.all_input_nodes:
            if value.op == "get_attr" and value.target not in used:
                used.add(str(value.target))
                weight[index] += float(getattr(value.meta.get("val"), "numel", lambda: 0)()) or _size(traced, value)
    crossing, before = list(itertools.accumulate(change)), [0.0, *itertools.accumulate(weight)]
    if len(operations) < num_stages:
        raise InputError(f"the model has {len(operations)} operations for {num_stages} stages. Give fewer ranks.")
    chosen: list[int] = []
    for number in range(1, num_stages):
        # Near its share of the parameters a cut goes where the fewest values cross, of those to the nearest place.
        share = before[-1] / num_stages
        room = range((chosen[-1] if chosen else 0) + 1, len(operations) - (num_stages - 1 - number))
        off = {index: abs(before[index] - share * number) for index in room}
        near = [index for index in room if off[index] <= share / 2] or [min(room, key=lambda index: off[index])]
        chosen.append(min(near, key=lambda index: (crossing[index], off[index])))
    for index in chosen:
        with traced.graph.inserting_before(operations[index]):
            traced.graph.call_function(torch.ops.pippy._pipe_split.default)
    traced.recompile()
    return traced


def _size(traced: fx.GraphModule, attribute: fx.Node) -> float:
    """Return the elements of a parameter."""
    value: object = traced
    for segment in str(attribute.target).split("."):
        value = getattr(value, segment)
    return float(value.numel()) if isinstance(value, torch.Tensor) else 0.0
