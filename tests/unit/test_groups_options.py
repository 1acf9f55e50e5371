"""NCCL options of groups and parts come from upstream's communicator config, which takes more."""

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron.core import parallel_state
from megatron.efa.errors import EfaError
from megatron.efa.groups import options

nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="this PyTorch has no NCCL")


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    options.remember({})


def of(**wanted):
    """What the patched `get_nccl_options` makes of an entry of the config."""
    return parallel_state.get_nccl_options("ep", {"ep": wanted})


@nccl
@pytest.mark.parametrize("name", ["AWS Libfabric", "FasTrak"])
def test_the_name_of_a_network_plugin_is_taken(name):
    made = of(net_name=name, max_ctas=8, is_high_priority_stream=True)
    assert made.config.net_name == name
    assert (made.config.max_ctas, made.is_high_priority_stream) == (8, True)


@nccl
@pytest.mark.parametrize("name", ["IB", "socket"])
def test_the_networks_that_upstream_knows_are_left_to_it(name):
    assert of(net_name=name).config.net_name == name


@nccl
@pytest.mark.parametrize("key", options.OURS)
def test_options_that_upstream_ignores_are_set(key):
    unset = getattr(dist.ProcessGroupNCCL.Options().config, key)
    assert unset != 1
    assert getattr(of(**{key: 1}).config, key) == 1


@nccl
def test_an_option_of_another_type_is_a_sentence():
    with pytest.raises(EfaError, match="NCCL option traffic_class cannot be 'high'"):
        of(traffic_class="high")


@nccl
def test_an_option_that_this_pytorch_lacks_is_a_sentence(monkeypatch):
    monkeypatch.setattr(options, "OURS", ("graph_usage_mode_of_tomorrow",))
    with pytest.raises(EfaError, match="this PyTorch has no NCCL option graph_usage_mode_of_tomo"):
        of(graph_usage_mode_of_tomorrow=1)


def test_upstream_knows_the_options_that_it_is_said_to_know():
    import inspect
    import re

    source = inspect.getsource(parallel_state.get_nccl_options)
    read = set(re.findall(r"nccl_comm_cfgs\[pg_name\](?:\.get\(|\[)\"(\w+)\"", source))
    assert read == set(options.UPSTREAMS)


@nccl
def test_a_part_has_the_options_of_its_axis_then_its_own():
    options.remember(
        {
            "ep": {"max_ctas": 16, "min_ctas": 2, "traffic_class": 1},
            "ep_rail": {"max_ctas": 4, "is_high_priority_stream": True},
            "dispatch_rail": {"traffic_class": 3},
            "ep_intra": {"max_ctas": 32},
        }
    )
    rail = options.of_part("ep", "dispatch", "rail")
    assert (rail.config.max_ctas, rail.config.min_ctas, rail.config.traffic_class) == (4, 2, 3)
    assert rail.is_high_priority_stream
    intra = options.of_part("ep", "dispatch", "intra")
    assert (intra.config.max_ctas, intra.config.traffic_class) == (32, 1)
    assert not intra.is_high_priority_stream


def test_a_part_without_options_has_none():
    options.remember({"dp_cp": {"max_ctas": 4}})
    assert options.of_part("ep", "dispatch", "rail") is None


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "nccl.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("intra_dpcp: {max_ctas: 8}", "there is no group 'intra_dpcp'; did you mean intra_dp_cp?"),
        ("dispatch_rial: {}", "there is no group 'dispatch_rial'; did you mean dispatch_rail?"),
        ("ep: {max_cta: 8}", "ep: there is no NCCL option 'max_cta'; did you mean max_ctas?"),
        ("ep: 8", "ep must be NCCL options, as in"),
        ("[ep]", "expected groups, each with NCCL options"),
        ("", "expected groups, each with NCCL options"),
        ("ep: {", "cannot read the communicator config"),
    ],
)
def test_a_config_that_nothing_would_read_is_refused(config, text, sentence):
    with pytest.raises(EfaError) as caught:
        options.check(config(text), ["dispatch"])
    assert sentence in str(caught.value)
    assert "nccl.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(EfaError, match=r"cannot read the communicator config .*none\.yaml"):
        options.check(str(tmp_path / "none.yaml"), [])


@given(
    group=st.sampled_from(["ep", "ep_rail", "dispatch_intra", "intra_ep_dp_rail", "hcp"]),
    keys=st.sets(st.sampled_from(options.UPSTREAMS + options.OURS)),
)
def test_what_exists_is_accepted(group, keys, tmp_path_factory):
    import yaml

    path = tmp_path_factory.mktemp("config") / "nccl.yaml"
    path.write_text(yaml.safe_dump({group: dict.fromkeys(keys, 1)}))
    options.check(str(path), ["dispatch"])
