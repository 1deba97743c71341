# SPDX-License-Identifier: Apache-2.0
"""AbstractMesh: ranks, coordinates and groups of any rank order, and what it refuses."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core import AbstractMesh, nested_ranks
from hyper_parallel.core.mesh import nest_ranks
from hyper_parallel.errors import HyperParallelError, LayoutError


@st.composite
def grids(draw):
    """Draw an integer array of different ranks, in any order, with gaps."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    count = int(np.prod(sizes))
    return np.array(draw(st.permutations(range(count + 3)))[:count]).reshape(sizes)


def mesh_of(grid, **names):
    return AbstractMesh("cpu", grid.shape, ranks=grid.ravel().tolist(), **names)


@given(grids())
def test_coordinate_is_the_place_in_the_grid(grid):
    mesh = mesh_of(grid)
    for coordinate, rank in np.ndenumerate(grid):
        assert mesh.coordinate(int(rank)) == coordinate
        assert mesh.rank_at(coordinate) == rank
    assert mesh.size() == grid.size
    assert mesh.coordinate(99) is None


@given(grids())
def test_group_ranks_follow_the_coordinate_not_the_rank(grid):
    mesh = mesh_of(grid)
    for coordinate, rank in np.ndenumerate(grid):
        for axis in range(grid.ndim):
            line = list(coordinate)
            line[axis] = slice(None)
            assert mesh.group_ranks(axis, rank=int(rank)) == tuple(grid[tuple(line)])
            assert mesh.group_ranks(axis - grid.ndim, rank=int(rank)) == tuple(grid[tuple(line)])
    assert mesh.group_ranks(0, rank=99) == ()


@given(grids(), st.data())
def test_submesh_ranks_are_row_major_over_the_given_axes(grid, data):
    mesh = mesh_of(grid)
    axes = data.draw(st.permutations(range(grid.ndim)))[: data.draw(st.integers(0, grid.ndim))]
    for coordinate, rank in np.ndenumerate(grid):
        index = tuple(slice(None) if i in axes else c for i, c in enumerate(coordinate))
        part = grid[index]
        part = part.transpose([sorted(axes).index(axis) for axis in axes])
        assert mesh.submesh_ranks(axes, rank=int(rank)) == tuple(part.ravel())


def test_submesh_ranks_of_a_rank_outside_are_those_of_coordinate_0():
    mesh = mesh_of(np.array([[4, 1], [0, 2]]))
    assert mesh.submesh_ranks((0,), rank=9) == (4, 0)


def test_axis_index_by_name_and_by_position():
    mesh = AbstractMesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    assert [mesh.axis_index(axis) for axis in ("dp", "tp", 0, 1, -1)] == [0, 1, 0, 1, 1]
    assert mesh.size(1) == mesh.size(-1) == 3
    assert mesh.axis_names == ("dp", "tp")
    assert AbstractMesh("cpu", (2, 3)).axis_names == ("axis0", "axis1")


def test_repr_shows_axes_and_an_unusual_rank_order():
    assert repr(AbstractMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))) == (
        "AbstractMesh('cpu', dp=2, tp=2)"
    )
    assert repr(AbstractMesh("cpu", (2,), ranks=(1, 0))) == (
        "AbstractMesh('cpu', axis0=2, ranks=[1, 0])"
    )


def test_meshes_are_equal_by_value():
    mesh = AbstractMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    same = AbstractMesh("cpu", [2, 2], ranks=range(4), mesh_dim_names=["dp", "tp"])
    assert mesh == same and hash(mesh) == hash(same)
    others = [
        AbstractMesh("cuda", (2, 2), mesh_dim_names=("dp", "tp")),
        AbstractMesh("cpu", (4, 1), mesh_dim_names=("dp", "tp")),
        AbstractMesh("cpu", (2, 2), ranks=(0, 2, 1, 3), mesh_dim_names=("dp", "tp")),
        AbstractMesh("cpu", (2, 2), mesh_dim_names=("tp", "dp")),
        AbstractMesh("cpu", (2, 2)),
    ]
    assert all(mesh != other for other in [*others, "mesh"])


def test_a_mesh_never_equals_one_of_a_kind_that_hashes_otherwise():
    class Attached(AbstractMesh):
        __hash__ = object.__hash__

        def __eq__(self, other):
            return super().__eq__(other) if isinstance(other, Attached) else NotImplemented

    mesh, attached = AbstractMesh("cpu", (2,)), Attached("cpu", (2,))
    assert mesh != attached and attached != mesh
    assert attached == Attached("cpu", (2,))


def test_a_pickled_mesh_hashes_as_a_new_one():
    mesh = AbstractMesh("cpu", (2,), ranks=(3, 1), mesh_dim_names=("tp",))
    expected = hash(mesh)
    mesh._hash = 0  # as if another process, with another hash seed, had made it
    copy = pickle.loads(pickle.dumps(mesh))
    assert copy.ranks == (3, 1) and copy.mesh_dim_names == ("tp",)
    assert hash(copy) == expected


@given(grids())
def test_nested_ranks_reads_arrays_and_lists(grid):
    expected = (grid.shape, tuple(grid.ravel().tolist()))
    assert nested_ranks(grid) == nested_ranks(grid.tolist()) == expected
    assert nest_ranks(expected[1], grid.shape) == grid.tolist()


def test_nested_ranks_reads_one_rank():
    assert nested_ranks(np.array(3)) == nested_ranks(3) == ((), (3,))


def refuse(text):
    return pytest.raises(LayoutError, match=text)


@pytest.mark.parametrize("ranks", [(0, 0), (0, -1), (0,), (0, 1, 2)], ids=str)
def test_mesh_refuses_repeated_negative_or_miscounted_ranks(ranks):
    with refuse(r"DeviceMesh: ranks must be 2 different non-negative ints, but got ranks=\(0"):
        AbstractMesh("cpu", (2,), ranks=ranks)


@pytest.mark.parametrize("shape", [(), (0,), (2, -1)], ids=str)
def test_mesh_refuses_a_shape_without_ranks(shape):
    with refuse(r"shape must have at least one axis, each of size at least 1, but got shape=\("):
        AbstractMesh("cpu", shape)


@pytest.mark.parametrize("names", [("tp",), ("tp", "tp"), ("a", "b", "c")], ids=str)
def test_mesh_refuses_names_that_do_not_fit(names):
    with refuse(r"mesh_dim_names must be 2 different names, but got mesh_dim_names=\('"):
        AbstractMesh("cpu", (1, 2), mesh_dim_names=names)


@pytest.mark.parametrize("mesh", [[[0, 1], [2]], [0, [1]], [[[0]], [[1, 2]]]], ids=str)
def test_nested_ranks_refuses_a_ragged_mesh(mesh):
    with refuse("DeviceMesh: mesh must be rectangular, but got mesh="):
        nested_ranks(mesh)


@pytest.mark.parametrize("mesh", [[], [[]], [0.5], "01", None, [["a"]]], ids=repr)
def test_nested_ranks_refuses_what_is_no_array_of_ints(mesh):
    with refuse("DeviceMesh: mesh must be a non-empty array of ints, but got mesh="):
        nested_ranks(mesh)


def test_axis_index_names_the_nearest_axis():
    mesh = AbstractMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with refuse(
        r"axis must be one of \('dp', 'tp'\), but got axis='tpp'. Did you mean 'tp'\? Name an axis"
    ):
        mesh.axis_index("tpp")
    with refuse(r"but got axis='xyz'. Name an axis of this mesh\."):
        mesh.group_ranks("xyz", rank=0)


def test_axis_index_says_that_a_mesh_has_no_names():
    with refuse("axis must be one of the names of a mesh that was given mesh_dim_names"):
        AbstractMesh("cpu", (2,)).axis_index("tp")


@pytest.mark.parametrize("axis", [2, -3])
def test_axis_index_refuses_a_position_out_of_range(axis):
    with refuse(rf"axis must be in \[-2, 2\), but got axis={axis}"):
        AbstractMesh("cpu", (2, 2)).axis_index(axis)


def test_submesh_ranks_refuses_a_repeated_axis():
    mesh = AbstractMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with refuse(r"axes must not repeat, but got axes=\('tp', 1\)"):
        mesh.submesh_ranks(("tp", 1), rank=0)


@pytest.mark.parametrize("coordinate", [(0, 2), (2, 0), (-1, 0), (0,), (0, 0, 0)], ids=str)
def test_rank_at_refuses_a_coordinate_outside_the_shape(coordinate):
    with refuse(r"coordinate must be inside the shape \(2, 2\), but got coordinate="):
        AbstractMesh("cpu", (2, 2)).rank_at(coordinate)


def test_layout_errors_are_value_errors_and_ours():
    assert issubclass(LayoutError, ValueError)
    assert issubclass(LayoutError, HyperParallelError)


@pytest.mark.parametrize("name", ["device_type", "shape", "ranks", "mesh_dim_names"])
def test_what_a_mesh_is_cannot_be_changed(name):
    mesh = AbstractMesh("cpu", (2, 2))
    with pytest.raises(AttributeError, match=f"AbstractMesh.{name} cannot be changed"):
        setattr(mesh, name, None)
