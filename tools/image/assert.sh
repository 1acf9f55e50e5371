#!/usr/bin/env bash
# At build: the plugin that NCCL will open is the release's, loads, and is written down. ROOT is for tests.
set -euo pipefail
root=${ROOT:-}
plugin_version=$1 libfabric_version=$2

die() { echo "image: $*" >&2; exit 1; }

real=$(readlink -e "$root$NCCL_NET_PLUGIN") || die "NCCL_NET_PLUGIN=$NCCL_NET_PLUGIN is not there"
grep -qa "NET/OFI" "$real" || die "$real is not the plugin for EFA"
grep -qaF "$plugin_version" "$real" || die "$real is not release $plugin_version"
fi_info --version | grep -qF "$libfabric_version" || die "libfabric is not $libfabric_version"
fi_info -l | grep -q '^efa:' || die "libfabric has no efa provider (rdma-core was left out?)"
python3 -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$real" || die "$real does not load"
python3 -c 'import torch' || die "PyTorch no longer loads"

mkdir -p "$root/etc/megatron-efa"
echo "$real" >"$root/etc/megatron-efa/plugin"
printf '%s=%s\n' LD_LIBRARY_PATH "$LD_LIBRARY_PATH" NCCL_NET_PLUGIN "$NCCL_NET_PLUGIN" \
    >"$root/etc/megatron-efa/environment"
