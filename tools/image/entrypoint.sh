#!/usr/bin/env bash
# At start: the plugin that NCCL will open is the one of the build, and CUDA's compatibility library is found only if
# the host's driver is older than it. ROOT is for tests. Then the command, or the base's own entry point with it.
set -euo pipefail
root=${ROOT:-}

die() { echo "megatron-efa image: $*" >&2; exit 78; }

if [ "${MEGATRON_EFA_PLUGIN_CHECK:-on}" != off ]; then
    built=$(cat "$root/etc/megatron-efa/plugin")
    now=$(readlink -e "$root${NCCL_NET_PLUGIN:-/unset}") ||
        die "NCCL_NET_PLUGIN=${NCCL_NET_PLUGIN:-} leads to no file: unset it in the job, or give $built; NCCL would use TCP"
    [ "$now" = "$built" ] ||
        die "NCCL would open $now, not $built: see what sets NCCL_NET_PLUGIN, or MEGATRON_EFA_PLUGIN_CHECK=off to allow it"
fi

numbers() { grep -oE '[0-9]+\.[0-9]+(\.[0-9]+)*' | head -n 1; }

version=$root/proc/driver/nvidia/version
if [ -r "$version" ] && [ -d "$root/opt/cuda-compat" ]; then
    driver=$(numbers <"$version")
    compat=$(find "$root/opt/cuda-compat" -name 'libcuda.so.*.*' | sort -V | tail -n 1)
    library=$(basename "$compat" | numbers)
    newest=$(printf '%s\n' "$driver" "$library" | sort -V | tail -n 1)
    if [ "$newest" != "$driver" ]; then
        LD_LIBRARY_PATH="$(dirname "$compat"):${LD_LIBRARY_PATH:-}"
        export LD_LIBRARY_PATH
    fi
fi

base=$root/opt/nvidia/nvidia_entrypoint.sh
[ -x "$base" ] && exec "$base" "$@"
exec "$@"
