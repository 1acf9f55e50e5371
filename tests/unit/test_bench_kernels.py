"""The row work that `bench kernels` times is that of a real dispatch; what it refuses."""

import pytest
import torch

from megatron.efa.bench import kernels
from megatron.efa.bench.expert_rows import Layer, work_of_rank_0


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 1), (1, 4), (4, 1), (2, 4)])
def test_rank_0_has_the_rows_of_its_routing(nodes, ranks_per_node):
    layer = Layer(40, 8, 16, 3, nodes, ranks_per_node)
    work = work_of_rank_0(layer, "cpu", seed=5)
    assert (work.chosen.sum(1) == 3).all()
    on_nodes = work.chosen.view(40, nodes, -1).any(2).sum(0)
    assert work.sum_nodes.counts.tolist() == on_nodes.tolist()
    assert work.pack.counts.tolist() == on_nodes[1:].tolist()
    # Every copy that rank 0 forwards to itself or gets from its node is one row to expand.
    assert work.expand.rows >= work.forward.counts[0]
    assert (work.expand.rows == work.forward.counts[0]) == (ranks_per_node == 1)
    assert work.expand.copies == work.received.sum()
    assert work.expand.counts.tolist() == work.received.sum(0).tolist()
    if nodes * ranks_per_node == 1:
        assert work.expand.copies == 40 * 3


def test_bytes_are_each_row_once_and_each_copy_once():
    work = work_of_rank_0(Layer(40, 8, 16, 3, 2, 2), "cpu", seed=5)
    lists = work.expand
    only_lists = lists.bytes_moved(0, 0)
    assert only_lists == lists.offsets.nbytes + lists.index.nbytes
    assert lists.bytes_moved(32, 16) - only_lists == lists.rows * 32 + lists.copies * 16


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--experts", "30"], "30 cannot be dealt to 4 x 8 ranks evenly"),
        (["--topk", "0"], "--topk 0 is not between 1 and --experts 256"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(words, sentence, capsys):
    assert kernels.main(words) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_a_gpu_it_says_so(capsys):
    assert kernels.main([]) == 2
    assert "this machine lacks one" in capsys.readouterr().err
