"""Random training steps with everything that can make them awkward."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from benchmarks._hops import Network
from benchmarks._step_blocks import Block, profile_of
from benchmarks._step_model import StepProfile, TrainingStep, fuse_ops, fusible
from headway.cost.specs import LinkSpec

WIRE = LinkSpec("wire", bytes_per_s=1e9, latency_s=1e-6, source="made up")
FASTER = LinkSpec("faster", bytes_per_s=3e9, latency_s=2e-6, source="made up")

few = settings(max_examples=30)
"""A step takes long to draw: fewer examples than the profile's hundred."""

times = st.integers(0, 5000)
sizes = st.sampled_from([0, 1, 37, 4000, 20_001])


@st.composite
def networks(draw: st.DrawFn, *, ranks: st.SearchStrategy[int] | None = None) -> Network:
    """Rings, parameter servers, and trees of 2^d - 1 ranks (for which symmetry is exact)."""
    algorithm = draw(st.sampled_from(["ring", "tree", "parameter_server"]))
    wanted = st.integers(1, 6) if ranks is None else ranks
    count = draw(st.sampled_from([1, 3, 7]) if algorithm == "tree" else wanted)
    servers = draw(st.integers(1, 5)) if algorithm == "parameter_server" else 0
    pull = FASTER if servers and draw(st.booleans()) else None
    return Network(algorithm, count, WIRE, num_servers=servers, pull_link=pull, recv_ns=draw(st.sampled_from([0, 150])))


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """A block of one to three backward operations, of which some complete a gradient."""
    backward = draw(st.lists(times, min_size=1, max_size=3))
    return Block(
        tuple(draw(st.lists(times, min_size=1, max_size=2))),
        tuple(backward),
        tuple(draw(st.lists(sizes, max_size=len(backward)))),
        fixed_ns=draw(st.sampled_from([0, 40])),
        half_fraction=draw(st.sampled_from([0.5, 1.0])),
        activation_bytes=draw(st.integers(0, 10**6)),
        input_bytes=draw(st.integers(0, 10**3)),
        kind=draw(st.integers(0, 2)),
    )


@st.composite
def profiles(draw: st.DrawFn) -> StepProfile:
    """One to five blocks."""
    return profile_of(
        draw(st.lists(blocks(), min_size=1, max_size=5)), update_ns=draw(times), output_ns=draw(times),
        state_bytes=draw(st.integers(0, 10**6)), copy_ns_per_byte=draw(st.sampled_from([0.0, 0.01])),
        most_microbatches=4,
    )  # fmt: skip


@st.composite
def steps(draw: st.DrawFn, *, network: st.SearchStrategy[Network] | None = None) -> TrainingStep:
    """A profile with random choices."""
    profile = draw(profiles())
    plain = TrainingStep.of(profile, draw(networks() if network is None else network))
    tensors, count = profile.tensor_bytes.size, profile.num_blocks
    flags = st.booleans()
    joined = np.array([*draw(st.lists(flags, min_size=max(0, tensors - 1), max_size=max(0, tensors - 1))), False])
    chosen = TrainingStep(
        profile,
        plain.network,
        fused=plain.fused,
        joined=joined[:tensors],
        parts=np.array(draw(st.lists(st.integers(1, 4), min_size=tensors, max_size=tensors)), np.int64),
        half=np.array(draw(st.lists(flags, min_size=count, max_size=count))),
        recomputed=np.array(draw(st.lists(flags, min_size=count, max_size=count))),
        microbatches=draw(st.integers(1, 4)),
        gradient_view=draw(flags),
    )
    able = np.flatnonzero(fusible(chosen)).tolist()
    return fuse_ops(chosen, draw(st.lists(st.sampled_from(able), unique=True)) if able else [])
