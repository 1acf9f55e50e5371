# Megatron-EFA on NGC's PyTorch (Transformer Engine, Apex and GDRCopy are the base's), with Amazon's EFA software.
# docs/image.md says why each step is there. Versions are megatron/efa/fabric/versions.yaml's; a test holds them to it.

ARG BASE=nvcr.io/nvidia/pytorch:26.02-py3
FROM ${BASE}

ARG EFA_INSTALLER=1.50.0
ARG EFA_LIBFABRIC=2.6.0amzn1.0
ARG EFA_PLUGIN=1.21.1
# Of aws-efa-installer-${EFA_INSTALLER}.tar.gz; not checked where empty.
ARG EFA_SHA256=""

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# The base's verbs libraries, MPI and UCX stand in the way of the installer's; its own plugin for EFA, of another
# release, must not be found; CUDA's compatibility library goes where only the entry point finds it.
RUN dpkg-query -W -f '${Package}\n' \
        | { grep -E '^(ibverbs-|libibverbs|libmlx5|librdmacm|rdma-core|libnccl-ofi|aws-ofi-nccl)' || true; } \
        | xargs -r apt-get purge -y --allow-change-held-packages \
    && rm -rf /opt/hpcx/ompi /usr/local/mpi /usr/local/ucx /opt/amazon/aws-ofi-nccl /var/lib/apt/lists/* \
    && { grep -lrE 'ofi-nccl|/compat' /etc/ld.so.conf.d || true; } | xargs -r rm -f \
    && if [ -d /usr/local/cuda/compat ]; then mv "$(readlink -f /usr/local/cuda/compat)" /opt/cuda-compat; fi \
    && ldconfig

# --disable-build-ngc: else the installer takes the base for one that has rdma-core and a plugin, and leaves both out.
RUN apt-get update \
    && curl -fsSL "https://efa-installer.amazonaws.com/aws-efa-installer-${EFA_INSTALLER}.tar.gz" -o /tmp/efa.tar.gz \
    && if [ -n "${EFA_SHA256}" ]; then echo "${EFA_SHA256}  /tmp/efa.tar.gz" | sha256sum -c -; fi \
    && tar -xzf /tmp/efa.tar.gz -C /tmp \
    && env -C /tmp/aws-efa-installer ./efa_installer.sh -y -g -d --skip-kmod --skip-limit-conf --no-verify --disable-build-ngc \
    && rm -rf /tmp/efa.tar.gz /tmp/aws-efa-installer /var/lib/apt/lists/* \
    && ldconfig

ENV PATH=/opt/amazon/efa/bin:${PATH} \
    LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib:${LD_LIBRARY_PATH} \
    NCCL_NET_PLUGIN=/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so \
    NCCL_SOCKET_IFNAME=^lo,docker,veth

# What the doctor and the entry point compare a running container with. Fails unless plugin and libfabric are those
# of the release, the plugin loads, and PyTorch still does.
COPY tools/image/ /opt/megatron-efa-image/
RUN /opt/megatron-efa-image/assert.sh "${EFA_PLUGIN}" "${EFA_LIBFABRIC}"

# The base keeps its PyTorch: no extra that names torch. The patched upstream is laid out, and is what the series says.
COPY . /opt/megatron-efa
WORKDIR /opt/megatron-efa
RUN pip install --no-cache-dir -e ".[aws]" \
    && python3 -m megatron.efa fork sync \
    && python3 -m megatron.efa fork verify \
    && ls megatron/core/datasets/helpers_cpp*.so

ENTRYPOINT ["/opt/megatron-efa-image/entrypoint.sh"]
CMD ["bash"]
