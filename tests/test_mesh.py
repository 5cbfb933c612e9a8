"""Mesh: ranks and coordinates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import UnknownNameError
from headway.core.mesh import AXES, Mesh
from tests.refusals import refused

meshes = st.dictionaries(st.sampled_from(sorted(AXES)), st.integers(1, 4)).map(Mesh)


@given(meshes)
def test_rank_and_coordinates_are_inverse(mesh: Mesh) -> None:
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]

    assert [mesh.rank(**place) for place in places] == list(range(mesh.world_size))
    assert len({tuple(place.values()) for place in places}) == mesh.world_size


@given(meshes, st.data())
def test_groups_hold_every_rank_once_and_differ_along_their_axes_only(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(sorted(mesh.sizes)), unique=True)) if mesh.sizes else []
    groups = mesh.groups(*axes)

    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    for group in groups:
        first = mesh.coordinates(group[0])
        assert all(first[axis] == mesh.coordinates(r)[axis] for r in group for axis in mesh.sizes if axis not in axes)
        assert all(mesh.group_of(rank, *axes) == group for rank in group)


@given(meshes, st.integers(1, 4))
def test_filling_gives_the_rest_to_one_axis(mesh: Mesh, rest: int) -> None:
    degrees = {axis: size for axis, size in mesh.sizes.items() if axis != "dp"}
    world = Mesh(degrees).world_size * rest

    assert Mesh.fill(world, **degrees).size("dp") == rest
    assert Mesh.fill(world, **degrees).world_size == world


def test_megatron_s_default_order_puts_tensor_neighbours_together_and_pipeline_stages_apart() -> None:
    mesh = Mesh.fill(16, tp=2, pp=4)

    # The example in Megatron-LM's parallel_state: tp 2, pp 4, 16 ranks.
    assert mesh.groups("tp") == [[2 * i, 2 * i + 1] for i in range(8)]
    assert mesh.groups("pp") == [[i, i + 4, i + 8, i + 12] for i in range(4)]
    assert mesh.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]


def test_another_order_places_ranks_otherwise() -> None:
    assert Mesh.fill(8, order=("tp", "pp", "dp"), tp=2, pp=2).groups("pp") == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_meshes_are_equal_when_every_rank_lies_in_the_same_place() -> None:
    meshes = {Mesh({"tp": 2, "dp": 2}), Mesh({"dp": 2, "tp": 2}), Mesh.fill(4, order=("tp", "dp"), tp=2)}

    assert len(meshes) == 2


test_impossible_meshes_print_the_whole_product = refused(
    (lambda: Mesh({"tp": 2, "dp": 3}, world_size=8), r"tp\(2\) \* dp\(3\) = 6 is not the world size 8. Change"),
    (lambda: Mesh.fill(8, tp=3), r"tp\(3\) \* cp\(1\).* = 3 does not divide the world size 8.*Change a degree"),
    (lambda: Mesh.fill(8, tp=2, dp=2), r"= 4 is not the world size 8"),
    (lambda: Mesh({"tp": 0}), r"axis tp has size 0; give every axis a whole number >= 1"),
    (lambda: Mesh({"tp": 2.0}), r"axis tp has size 2.0"),
    (lambda: Mesh({"tp": 2}).coordinates(2), r"rank 2 is not in tp\(2\) = 2; use 0\.\.1"),
    (lambda: Mesh({"tp": 2}).rank(tp=2), r"tp=2 is outside tp\(2\); use 0\.\.1"),
    (lambda: Mesh.fill(8, order=("tp", "tp", "dp")), r"tp-tp-dp names an axis twice; name each once"),
)


def test_an_unknown_axis_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown axis 'ddp'. Did you mean 'dp'"):
        Mesh({"tp": 2, "dp": 2}).groups("ddp")
    with pytest.raises(UnknownNameError, match=r"unknown axis 'tpp'. Did you mean 'tp'"):
        Mesh.fill(8, tpp=2)
