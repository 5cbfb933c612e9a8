"""What a rank says of itself in RUN/tables/r<rank>.json, typed; what a damaged file says otherwise counts as missing.

>>> RankTables.of({"loops": {"0": 1}, "groups": "none", "device_type": "cuda"})
RankTables(device_type='cuda', groups={}, loops={0: 1}, memory={}, threads=0, bad_losses=[], losses=[], ddp=(), \
compute=None, matmuls=None)

`ComputeFacts` is how the script computes: settings that decide what a step could cost, as they were at its start.

>>> facts = ComputeFacts(optimizers=(OptimizerFacts("AdamW", num_tensors=8, num_elements=4096, device_type="cpu"),))
>>> facts.words()
'AdamW, neither fused nor foreach'
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import InputError
from headway.core.files.safe_files import converted, read_json

PROFILED = 0.25
"""Share of the looks from which on a profiler runs in all steps: it is off while it starts, and while it ends."""


class ModelFacts(msgspec.Struct, frozen=True):
    """A model with trainable parameters, as it was after its first call."""

    name: str = ""
    """Its class."""
    num_elements: int = 0
    """Numbers in its parameters."""
    parameter_dtypes: dict[str, int] = {}
    """dtype -> numbers of it in the parameters."""
    input_dtypes: tuple[str, ...] = ()
    """dtypes of the tensors among the arguments of the call, in order."""
    batch_size: int | None = None
    """Length of the first of them; None without one."""
    autocast: str | None = None
    """dtype of autocast around the call; None without it."""
    is_compiled: bool = False
    num_convolution_weights: int = 0
    """Parameters with four dimensions."""
    num_channels_last: int = 0
    """Those of them that lie in memory with their channels last."""
    acts: bool = False
    """Whether it acts in an environment, as policies do: reinforcement learning."""
    num_dense_rows: int = 0
    """Rows of embeddings whose gradients have all of them, used by nothing else."""
    num_dense_elements: int = 0
    """Numbers in these rows."""
    num_lookups: int = 0
    """Whole numbers among the arguments of the call: rows that it looks up, at most."""


class OptimizerFacts(msgspec.Struct, frozen=True):
    """An optimizer, as it was at its first step."""

    name: str = ""
    """Its class; with its module where that is not torch's."""
    num_tensors: int = 0
    """Tensors that it updates."""
    num_elements: int = 0
    """Numbers in them."""
    device_type: str = ""
    """Where they lie; '' where they do not lie together."""
    is_fused: bool | None = None
    """What all its groups say of `fused`; None: it is left to torch."""
    is_foreach: bool | None = None
    """The same of `foreach`."""
    has_momentum: bool = False
    is_plain: bool = True
    """Whether all it updates is dense and real, lies as its gradient does, and nothing is differentiated through it:
    what fused forms can do. Torch's on a CPU add a gradient that lies in another order to the wrong numbers."""


class Rehearsed(msgspec.Struct, frozen=True):
    """A model's step on a CPU as it is and behind edits, timed in a forked child on examples of the script's batch."""

    examples: int = 0
    """Examples of the timed step."""
    batch: int = 0
    """Those of the script's: where it has more, the edits may win more or less of it."""
    step_s: float | None = None
    """CPU time of forward and backward of the script's batch on one thread; None where that would take long."""
    edits: dict[str, tuple[float, float, float]] = {}
    """Edit -> time of a step with it / without: lowest, middle, highest of a few rounds. 'bfloat16', 'channels_last',
    'float32' (of float64 parameters), 'straight' (without checkpoints), 'unchecked' (without anomaly detection),
    'batch' (per example, four times as many), 'frozen' (without gradients of the parameters that no optimizer has; of
    all where there are several optimizers), 'given' (without gradients of any parameter, with those of its inputs)."""


class CallFlops(msgspec.Struct, frozen=True):
    """The operations of a call of a model in training, counted once by shapes: RUN/flops/r<rank>-m<model>.json."""

    model: int = -1
    """Its number in the events: `corr` of rows named 'forward'."""
    name: str = ""
    """Its class."""
    flops: int | None = None
    """Floating-point operations of one forward and backward; None where they could not be counted."""
    reason: str = "the child that counts them ended before it had"
    """Why not; '' with a count."""
    dtype: str = ""
    """What products are computed in: the dtype of autocast around the call, or of most of the parameters."""
    autocast: str | None = None
    """dtype of autocast inside the forward; None without it."""
    has_convolutions: bool = False
    device: str = "cpu"
    """Where it computes, by the name that the driver gives."""
    in_tf32: bool = False
    """Whether products of float32 numbers may use TF32: by matmuls' precision, or cuDNN's for convolutions."""
    recomputed_flops: int = 0
    """Operations of forwards that the backward calls again (checkpointing); no part of `flops`."""
    recomputed_bytes: int = 0
    """Bytes of all that these forwards make, in float32."""
    scores: int = 0
    """Elements of the scores of attention that is written by hand: of softmaxes over matrices."""
    masked: int = 0
    """Those of them that lie in matrices of which a part was masked."""
    longest: int = 0
    """Longest row of scores."""
    repeats: int = 0
    """How often the forward calls the layer with parameters that it calls most often."""
    attentions: int = 0
    """Calls of `nn.MultiheadAttention` in its forward."""
    loops: dict[str, int] = {}
    """Line in a loop of its forward -> operators that it calls."""
    frozen_elements: int = 0
    """Numbers in its parameters that no optimizer had at its first call; all where there are several optimizers."""
    frozen_flops: int | None = None
    """Operations without the gradients of these; None where they were not counted."""
    padded: float = 0.0
    """Share of the whole numbers of its batch, [examples, positions], that fills rows up: padding."""
    rehearsed: Rehearsed | None = None
    """How long its step takes behind edits; None where that was not timed."""
    ended_ns: int | None = None
    """When the child had counted, by the clock of the rows: steps before it shared the cores with it."""


class GradientUse(msgspec.Struct, frozen=True):
    """The parameters of a model that one optimizer updates, or none, in the backwards that were watched."""

    model: int = -1
    optimizer: int = -1
    """-1: none."""
    elements: int = 0
    """Numbers in them."""
    calls: int = 0
    """Calls of the model behind which they got gradients."""
    unused: int = 0
    """Those of them whose gradients no update has used, though the same backward fed one of other parameters."""
    given: int = 0
    """Those of these whose inputs needed gradients."""


ONE_BATCH = 0.9
"""Share of a model's calls with gradients on the same tensors from which on these are all the data that it learns."""


class Repeats(msgspec.Struct, frozen=True):
    """Calls of models with what their last gradients came of, from which nothing learns; of the same backwards."""

    calls: int = 0
    """Of all models, with and without gradients."""
    repeated: int = 0
    repeated_ns: int = 0
    learning: int = 0
    """Of the calls, those with gradients."""
    same: int = 0
    """Of these, those on the very tensors that the call before was given."""
    watched_ns: int = 0
    """From the first of the backwards to the last."""


class FrozenCalls(msgspec.Struct, frozen=True):
    """Calls of a module in evaluation mode, without trainable parameters, on tensors of batches; same backwards."""

    name: str = ""
    calls: int = 0
    ns: int = 0


class ComputeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one rank; run.json holds them as `compute`, of the lowest rank that trained."""

    models: tuple[ModelFacts, ...] = ()
    """In the order of their first calls."""
    optimizers: tuple[OptimizerFacts, ...] = ()
    """In the order of their first steps."""
    matmul_precision: str | None = None
    """`torch.get_float32_matmul_precision()`; None where torch would not say."""
    cudnn_benchmark: bool | None = None
    """`torch.backends.cudnn.benchmark`."""
    detects_anomalies: bool = False
    """`torch.is_anomaly_enabled()` behind the first step."""
    profiled: float = 0.0
    """Share of the looks at the training thread at which a profiler of torch's was on, be it headway's."""
    cudnn_tf32: bool | None = None
    """`torch.backends.cudnn.allow_tf32`: convolutions of float32 numbers in TF32."""
    calls: tuple[CallFlops, ...] = ()
    """One for each model that was called in training."""
    gradient_uses: tuple[GradientUse, ...] = ()
    repeats: Repeats = Repeats()
    padding: tuple[float, ...] = ()
    """Share of padding in each of the first calls of models that are watched, with gradients."""
    frozen: tuple[FrozenCalls, ...] = ()
    """Those whose parameters stayed what they were."""

    @property
    def has_larger_batches(self) -> bool:
        """Say whether a batch may take more examples: not one that acts, nor one that is all the data of the job."""
        is_one = self.repeats.same > ONE_BATCH * self.repeats.learning
        return not (is_one or any(model.acts for model in self.models))

    def words(self) -> str:
        """Return the facts in a sentence without an end, '' without any."""
        parts = []
        for model in self.models[:1]:
            dtypes = " and ".join(model.parameter_dtypes)
            parts.append(f"{model.name} of {model.num_elements:,} {dtypes} parameters")
            parts.append(f"autocast to {model.autocast}" if model.autocast else "no autocast")
            parts.append("compiled" if model.is_compiled else "eager")
            if model.num_convolution_weights:
                last = model.num_channels_last == model.num_convolution_weights
                parts.append("channels last" if last else "channels first")
        for optimizer in self.optimizers[:1]:
            form = "fused" if optimizer.is_fused else "foreach" if optimizer.is_foreach else "neither fused nor foreach"
            if optimizer.device_type == "cuda" and optimizer.is_fused is optimizer.is_foreach is None:
                form = "foreach by torch's default"
            parts.append(f"{optimizer.name}, {form}")
        parts += ["anomaly detection on"] if self.detects_anomalies else []
        parts += ["a profiler of torch's on"] if self.profiled > PROFILED else []
        return "; ".join(parts)


class DdpModel(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a DistributedDataParallel model: see `headway.runtime.recorder.ddp_facts`."""

    parameter_bytes: list[int]
    parameter_types: list[str]
    parameter_names: list[str] = []
    order: list[int]
    """Indices of parameters in the order in which their gradients become ready; [] = not known."""
    first_bucket_bytes: int
    bucket_bytes: int
    default: bool = True
    """Whether the limit of buckets is torch's own."""
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    can_set_static_graph: bool = False
    unused_bytes: int | None = None
    """Of parameters that a step did not use, as DDP logged them last; None = not logged."""


class MatmulsSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Linears whose rows are gathered before them or scattered after them (tensor parallelism)."""

    ranks: int
    """Ranks of their mesh."""
    shapes: dict[str, int]
    """Shape as `headway.cost.collectives.read_shape` takes it -> linears that have it."""


class RankTables(msgspec.Struct, frozen=True, kw_only=True):
    """The tables that headway computes with; others are copied into the trace as they are."""

    device_type: str = "cpu"
    groups: dict[int, dict[str, Any]] = {}
    """Process groups that the rank met: {'name', 'ranks'} each."""
    loops: dict[int, int] = {}
    """Optimizer -> depth of the loop that steps it."""
    memory: dict[str, Any] = {}
    threads: int = 0
    """Threads of one operator (torch's intra-op pool) at the first step; 0 = not known."""
    bad_losses: list[Any] = []
    losses: list[tuple[int, float]] = []
    """(step, loss) as far as they were recorded."""
    ddp: tuple[DdpModel, ...] = ()
    compute: ComputeFacts | None = None
    matmuls: MatmulsSeen | None = None

    @classmethod
    def of(cls, tables: Mapping[str, Any]) -> RankTables:
        """Return what can be read of the content of such a file."""
        return converted(tables, cls)[0]


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, {} where it holds something else or cannot be read."""
    try:
        found = read_json(path)
    except (OSError, InputError):
        return {}
    return found if isinstance(found, dict) else {}


def rank_tables(run: Path) -> dict[int, RankTables]:
    """Return rank -> its tables, in the order of the files."""
    files = sorted((run / "tables").glob("r*.json"))
    return {int(file.stem[1:]): RankTables.of(json_object(file)) for file in files if file.stem[1:].isdecimal()}


def counted_calls(run: Path) -> tuple[CallFlops, ...]:
    """Return the operations of models' calls that children of the recording have counted, in the order of models."""
    calls = []
    for path in sorted((run / "flops").glob("r*-m*.json")):
        model = path.stem.rpartition("-m")[2]
        if model.isdecimal():
            calls.append(converted({**json_object(path), "model": int(model)}, CallFlops)[0])
    return tuple(calls)
