# The training image: a base with its own torch, and Shardline beside it. `shardline image build` makes it.
#
# NVIDIA's PyTorch image by default: torch, CUDA, NCCL, cuDNN and Nsight Systems that were built and tested together,
# 26.06 with torch 2.13, the version in constraints.txt. Any Linux image with Python 3.11 or newer, venv and useradd
# will do; without a torch of its own it gets one from the package index.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.06-py3

# Installed in a stage of its own: CA files, wheels and caches stay out of the image. No RUN --mount, which the
# Docker API's builder does not know, and no syntax line, which would be pulled from a registry.
FROM ${BASE_IMAGE} AS install
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /build
# A virtual environment that sees the base's packages: what is there is used and stays as it is. The dependencies
# come before the code, so that after a change of code a build takes seconds. extra*: wheels and ca.pem, if given.
COPY pyproject.toml infra/install_train.py extra* ./
RUN python3 install_train.py dependencies
COPY README.md ./
COPY flows ./flows
COPY tasks ./tasks
COPY infra ./infra
COPY training ./training
RUN python3 install_train.py project

FROM ${BASE_IMAGE}
# With its .pyc files: a read-only container without them compiles all modules at each start (33 s a job, not 18).
COPY --from=install /opt/shardline /opt/shardline
# A name for the uid, as torch's compiler and getpass ask for it; launch.user may be any other.
RUN groupadd --gid 10001 shardline && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp shardline
ARG REVISION=""
LABEL org.opencontainers.image.title="shardline train" org.opencontainers.image.revision="${REVISION}"
# /tmp is a tmpfs in our containers, and all else read-only: caches go there.
ENV PATH=/opt/shardline/bin:${PATH} HOME=/tmp USER=shardline PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
WORKDIR /tmp
ENTRYPOINT []
USER 10001:10001
