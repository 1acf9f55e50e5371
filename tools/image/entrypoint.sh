#!/usr/bin/env bash
# At start: the plugin that NCCL will open is the one of the build, and CUDA's compatibility library is found only if
# the host's driver is older than it. ROOT is for tests. Then the command, or the base's own entry point with it.
set -euo pipefail
root=${ROOT:-}

die() { echo "megatron-efa image: $*" >&2; exit 78; }

# The file that NCCL opens: a path, or X for libnccl-net-X.so, which the loader looks for.
opened() {
    case $1 in
    */*) readlink -e "$root$1" ;;
    *)
        local name=$1 folder folders
        case $name in *.so) ;; *) name=libnccl-net-$name.so ;; esac
        IFS=: read -ra folders <<<"${LD_LIBRARY_PATH:-}"
        for folder in "${folders[@]}"; do
            [ ! -e "$root$folder/$name" ] || { readlink -e "$root$folder/$name" && return; }
        done
        return 1
        ;;
    esac
}

if [ "${MEGATRON_EFA_PLUGIN_CHECK:-on}" != off ]; then
    built=$(cat "$root/etc/megatron-efa/plugin")
    now=$(opened "${NCCL_NET_PLUGIN:-unset}") ||
        die "NCCL_NET_PLUGIN=${NCCL_NET_PLUGIN:-} leads to no file, and NCCL would use TCP: unset it in the job, or give $built"
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
