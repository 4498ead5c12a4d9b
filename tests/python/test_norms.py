"""clip_grad_norm on arrays of one's own."""

from __future__ import annotations

import math

import numpy as np
import polyreme as pr
import pytest
from helpers import refused
from polyreme.testing import run_ranks


def on_ranks(size, function):
    return run_ranks(size, lambda world: function(pr.Mesh(world)["dp"]))


def test_alone_as_pytorch_does():
    a, b = np.float32([3, 0]), np.float32([[4.0]])
    assert pr.clip_grad_norm({"a": a, "b": b}, 1.0) == 5.0
    np.testing.assert_allclose([a[0], b[0, 0]], [0.6, 0.8], rtol=1e-6)
    assert pr.clip_grad_norm([a, None, b], 1.5) == pytest.approx(1.0)
    np.testing.assert_allclose([a[0], b[0, 0]], [0.6, 0.8], rtol=1e-6)
    assert pr.clip_grad_norm([a, b], 0) == pytest.approx(1.0)
    assert pr.clip_grad_norm([], 1.0) == 0.0


@pytest.mark.parametrize("order", [1, 1.5, 2, 3, math.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_against_float64_on_any_strides(order, dtype):
    array = np.random.default_rng(1).normal(size=(70, 90)).astype(dtype)
    turned = array.T[::2]
    before = array.astype(np.float64)
    expected = np.linalg.norm(before.T[::2].ravel(), order)
    assert pr.clip_grad_norm([turned], expected / 2, norm_type=order) == pytest.approx(expected, rel=1e-12)
    tolerance = 1e-6 if dtype == np.float32 else 1e-3
    np.testing.assert_allclose(turned, before.T[::2] / 2, rtol=tolerance, atol=1e-7)
    assert np.array_equal(array.T[1::2], before.T[1::2].astype(dtype))


def test_o_cl_01_a_parameter_that_is_sharded():
    def body(group):
        grads = np.float32([[1, 2], [3, 4]][group.rank])
        norm = pr.clip_grad_norm([grads], 1.0, group, sharded=True)
        return norm, grads.tolist()

    for rank, (norm, grads) in enumerate(on_ranks(2, body)):
        assert norm == math.sqrt(30)
        np.testing.assert_allclose(grads, np.float32([[1, 2], [3, 4]][rank]) / math.sqrt(30), rtol=1e-6)


@pytest.mark.parametrize("chunks", [[[3], [4]], [[1, 2], [2, 4]]])
def test_o_cl_02_one_norm_over_all_stages(chunks):
    def body(group):
        grads = [np.float32([norm]) for norm in chunks[group.rank]]
        return pr.clip_grad_norm(grads, 1.0, group, sharded=True), [float(g[0]) for g in grads]

    for rank, (norm, clipped) in enumerate(on_ranks(2, body)):
        assert norm == 5.0
        assert clipped == pytest.approx([c / 5 for c in chunks[rank]], rel=1e-6)


def test_o_cl_03_what_ranks_hold_alike_is_counted_once():
    def body(group):
        tied = group.all_reduce(np.float32([[3], [1]][group.rank]))
        other = np.float32([3]) if group.rank == 0 else None
        return pr.clip_grad_norm([tied, other], 0, group, sharded=[False, True]), float(tied[0])

    assert on_ranks(2, body) == [(5.0, 4.0)] * 2


def test_what_is_not_finite_changes_nothing():
    def body(group):
        grads = np.float32([2.0, math.inf if group.rank == 1 else 1.0])
        norm = pr.clip_grad_norm([grads], 1.0, group, sharded=True)
        return norm, float(grads[0])

    assert on_ranks(2, body) == [(math.inf, 2.0)] * 2
    assert math.isnan(pr.clip_grad_norm([np.float32([math.nan])], 1.0, norm_type=math.inf))


@pytest.mark.torch
def test_torch_parameters_and_bf16():
    torch = pytest.importorskip("torch")
    grads = [torch.full((3,), 2.0, dtype=torch.bfloat16), torch.nn.Parameter(torch.full((4, 2), 2.0)).t()]
    assert pr.clip_grad_norm(grads, math.sqrt(11)) == math.sqrt(44)
    assert torch.all(grads[0] == 1)
    assert torch.allclose(grads[1], torch.ones(2, 4))


def test_refusals():
    one = np.ones(1, np.float32)
    for words, call in [
        (["norm_type=0.5"], lambda: pr.clip_grad_norm([one], 1.0, norm_type=0.5)),
        (["max_norm=-1"], lambda: pr.clip_grad_norm([one], -1)),
        (["need the group"], lambda: pr.clip_grad_norm([one], 1.0, sharded=True)),
        (["2 entries for 1"], lambda: pr.clip_grad_norm([one], 1.0, sharded=[False, False])),
        (["array 1", "int64"], lambda: pr.clip_grad_norm([one, np.ones(1, np.int64)], 1.0)),
    ]:
        refused(pr.InvalidArgument, words, call)
    assert one[0] == 1
