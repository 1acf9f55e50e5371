"""Environment variables of EFA's software: which are needed, and what is said of those present."""

import re

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from megatron.efa.errors import EfaError
from megatron.efa.fabric.environment import CPU, LEVELS, PATH, needed, reasons, verdicts

DATA = yaml.safe_load(PATH.read_text())


def level(plugin=None, **environ):
    """The level of the one verdict on `environ`, or None."""
    found = verdicts(environ, plugin)
    assert len(found) <= 1
    return found[0].level if found else None


def test_a_plugin_that_does_not_load_ends_a_job_instead_of_slowing_it():
    for plugin in ("1.4.0", "1.12.1-aws", "1.21.1", None):
        assert needed(plugin, "H100")["NCCL_NET"] == "AWS Libfabric"


def test_old_plugins_are_told_what_newer_ones_know():
    old, new = needed("1.5.0-aws", "A100-40GB"), needed("v1.21.1", "H200")
    for name in ("FI_PROVIDER", "NCCL_PROTO", "FI_EFA_USE_DEVICE_RDMA"):
        assert name in old
        assert name not in new
    assert "NCCL_NET_PLUGIN" not in needed("1.14.2", "H100")  # its file had another name
    assert new["NCCL_NET_PLUGIN"] == "ofi"


def test_an_unknown_plugin_counts_as_the_newest():
    assert needed(None, "H100") == needed(DATA["newest"], "H100")
    assert level(FI_PROVIDER="efa") == level(DATA["newest"], FI_PROVIDER="efa") == "info"


def test_jobs_on_cpus_need_nothing():
    assert needed(None, CPU) == {}


@pytest.mark.parametrize("plugin", ["1.0.0", "1.5.0", "1.6.0", "1.13.2", "1.15.0", "1.22.0", None])
def test_what_is_needed_is_never_blamed(plugin):
    assert verdicts(needed(plugin, "H100"), plugin) == []
    assert set(reasons(plugin)) == set(needed(plugin, "H100"))


def test_each_way_to_lose_efa_is_a_failure():
    assert level(NCCL_NET_PLUGIN="spcx") == "fail"
    assert level(NCCL_NET="Socket") == "fail"
    assert level(NCCL_NET="IB") == "fail"
    assert level(NCCL_NET="OFI") == "fail"
    assert level(FI_PROVIDER="tcp") == "fail"
    assert level("1.12.1", NCCL_NET="Libfabric") == "fail"
    assert level("1.13.0", NCCL_NET="Libfabric") is None
    assert level(NCCL_NET="AWS Libfabric") is None


def test_what_undoes_the_plugins_tuning_is_a_warning():
    assert level(NCCL_BUFFSIZE="2097152") == "warn"
    assert level(NCCL_BUFFSIZE="8388608") == "info"
    assert level(NCCL_PROTO="simple") == "warn"
    assert level("1.5.0", NCCL_PROTO="simple") is None
    assert level("1.19.2", NCCL_ALGO="Ring") == "warn"
    assert level("1.20.0", NCCL_ALGO="Ring") == "info"
    assert level(NCCL_MAX_NCHANNELS="8") == "warn"
    assert level(NCCL_MAX_NCHANNELS="16") == "info"


def test_what_hides_a_hang_is_a_warning():
    assert level(TORCH_NCCL_ASYNC_ERROR_HANDLING="1") == "warn"
    assert level(TORCH_NCCL_ASYNC_ERROR_HANDLING="3") is None


def test_the_worst_comes_first_and_other_variables_are_left_alone():
    environ = {
        "FI_EFA_FORK_SAFE": "1",
        "HOME": "/root",
        "NCCL_BUFFSIZE": "1",
        "NCCL_DEBUG": "INFO",
        "NCCL_NET": "Socket",
        "RDMAV_FORK_SAFE": "1",
    }
    found = verdicts(environ, None)
    assert [verdict.level for verdict in found] == ["fail", "warn", "warn", "info"]
    assert [v.name for v in found if v.level == "warn"] == ["NCCL_BUFFSIZE", "RDMAV_FORK_SAFE"]
    assert str(found[0]).startswith("NCCL_NET=Socket: ")


def test_what_is_no_version_is_told():
    with pytest.raises(EfaError, match="'latest' is no version"):
        needed("latest", "H100")
    with pytest.raises(EfaError, match="'' is no version"):
        verdicts({}, "")


def test_every_entry_is_whole_and_has_a_source():
    used = set()
    for entry in [*DATA["needed"], *DATA["verdicts"]]:
        used.add(entry["source"])
        assert entry["why"] and not entry["why"].endswith(".")
        SpecifierSet(entry.get("plugin", ""))
    for entry in DATA["verdicts"]:
        assert entry["level"] in LEVELS
        assert entry["remedy"]
        re.compile(entry.get("value", ""))
    for entry in DATA["needed"]:
        assert isinstance(entry["value"], str)
    assert used == set(DATA["sources"])
