# An image with the project and its .venv in /opt/horovod_train:
#
#   docker build --tag horovod_train .                     (podman, buildah: the same)
#   docker run --rm horovod_train doctor
#   docker run --rm --volume "$PWD:/work" horovod_train prepare digits --out data/digits
#   docker run --rm --volume "$PWD:/work" --entrypoint horovodrun horovod_train \
#       --gloo -np 2 horovod-train --config /opt/horovod_train/configs/digits_convnet.yaml --output-dir runs/digits
#
# BASE is any image of Debian 12, Ubuntu 22.04 or later. For GPUs one with nvcc, and (not tried):
#   --build-arg BASE=…-devel --build-arg TENSORFLOW='tensorflow[and-cuda]' --build-arg HOROVOD_GPU_OPERATIONS=NCCL
# With an sshd that runs as the user `mpi` (1000), for the workers of an MPIJob (not tried):
#   --build-arg SSHD=1
ARG BASE=docker.io/library/debian:12-slim
FROM ${BASE}
ARG TENSORFLOW=tensorflow
ARG HOROVOD_GPU_OPERATIONS=
ARG SSHD=
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ make openssh-client ${SSHD:+openssh-server} python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/horovod_train
COPY . .
# The compiled Horovod and pip's downloads stay in the builder's cache, not in the image.
RUN --mount=type=cache,target=/root/.cache make install && rm install.log
# The MPI operator mounts a key in ~/.ssh, which is host key and user's key at once. Port 2222 needs no root.
RUN [ -z "$SSHD" ] || { useradd --create-home --uid 1000 --shell /bin/bash mpi \
 && printf '%s\n' 'Port 2222' 'HostKey ~/.ssh/id_rsa' 'PidFile none' 'AuthorizedKeysFile .ssh/authorized_keys' \
        'StrictModes no' 'PasswordAuthentication no' | sed 's|~|/home/mpi|' > /home/mpi/.sshd_config \
 && printf '%s\n' 'Host *' '  Port 2222' '  StrictHostKeyChecking no' '  UserKnownHostsFile /dev/null' \
        '  LogLevel ERROR' >> /etc/ssh/ssh_config; }
# Open MPI refuses root unless it is told twice that root is meant; in a container there is only root.
ENV PATH=/opt/horovod_train/.venv/bin:$PATH OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
WORKDIR /work
ENTRYPOINT ["horovod-train"]
