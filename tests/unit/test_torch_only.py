"""The optimizer and the norm that stand in for Transformer Engine's and Apex's."""

import copy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.efa.errors import EfaError
from megatron.efa.torch_only import Adam, norm_under_sequence_parallelism

SHAPES = [(3, 4), (5,), ()]


def parameters(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def train(optimizer, params, seed, steps):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [param.detach().clone() for param in params]


hyper = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-6, 1.0),
        "betas": st.tuples(st.floats(0.0, 0.999), st.floats(0.0, 0.9999)),
        "eps": st.floats(1e-10, 1e-3),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.3]),
    }
)


@settings(max_examples=40, deadline=None)
@given(hyper=hyper, decoupled=st.booleans(), seed=st.integers(0, 99), steps=st.integers(1, 6))
def test_adam_equals_torchs_to_the_bit(hyper, decoupled, seed, steps):
    real = torch.optim.AdamW if decoupled else torch.optim.Adam
    ours, theirs = parameters(seed), parameters(seed)
    mine = train(Adam(ours, adam_w_mode=decoupled, **hyper), ours, seed, steps)
    reference = train(real(theirs, **hyper), theirs, seed, steps)
    assert all(torch.equal(a, b) for a, b in zip(mine, reference, strict=True))


@settings(max_examples=20, deadline=None)
@given(steps=st.integers(0, 4), more=st.integers(1, 4), seed=st.integers(0, 99))
def test_adam_goes_on_from_its_state_dict(steps, more, seed):
    params = parameters(seed)
    optimizer = Adam(params, weight_decay=0.1)
    train(optimizer, params, seed, steps)
    again = [torch.nn.Parameter(param.detach().clone()) for param in params]
    resumed = Adam(again, weight_decay=0.1)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected = train(optimizer, params, seed + 1, more)
    found = train(resumed, again, seed + 1, more)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_step_lies_in_the_group_and_in_no_parameters_state():
    params = parameters(0)
    optimizer = Adam([{"params": params[:2]}, {"params": params[2:]}])
    train(optimizer, params, 0, 3)
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in optimizer.state.values())


def test_a_captured_step_is_refused():
    with pytest.raises(EfaError, match="--optimizer-cuda-graph"):
        Adam(parameters(0), capturable=True)


def test_the_norms_weights_are_marked_and_the_config_is_left_alone():
    class Refusing:
        def __new__(cls, config, hidden_size, eps):
            assert not config.sequence_parallel
            return torch.nn.RMSNorm(hidden_size, eps=eps)

    config = SimpleNamespace(sequence_parallel=True)
    norm = norm_under_sequence_parallelism(Refusing, config, 8, 1e-3)
    assert norm.weight.sequence_parallel is True
    assert norm.eps == 1e-3
    assert config.sequence_parallel is True
