# The image of Prefect, MLflow and the worker in compose.yaml: Shardline with all that a head node needs, and what
# training on this machine's CPUs needs. `docker compose build` makes it; the versions are constraints.txt's.
ARG BASE_IMAGE=python:3.11.13-slim-bookworm

FROM ${BASE_IMAGE} AS install
ARG PIP_INDEX_URL
# torch for CPUs: 0.7 GB instead of 5. For the worker's own GPUs: --build-arg TORCH_INDEX_URL=
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /opt/shardline/src
RUN python3 -m venv /opt/shardline/venv
ENV PATH=/opt/shardline/venv/bin:${PATH}
# The dependencies come before the code, so that after a change of code a build takes seconds.
COPY pyproject.toml constraints.txt README.md ./
RUN mkdir flows tasks infra training training/strategies \
 && pip install --no-cache-dir ${TORCH_INDEX_URL:+--extra-index-url ${TORCH_INDEX_URL}} \
        --constraint constraints.txt --editable '.[train,orchestrate]'
COPY prefect.yaml ./
COPY flows ./flows
COPY tasks ./tasks
COPY infra ./infra
COPY training ./training
# A read-only container cannot keep .pyc files.
RUN python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/shardline || true

FROM ${BASE_IMAGE}
COPY --from=install /opt/shardline /opt/shardline
RUN groupadd --gid 10001 shardline && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp shardline
ENV PATH=/opt/shardline/venv/bin:${PATH} HOME=/tmp USER=shardline PYTHONUNBUFFERED=1 MPLCONFIGDIR=/tmp
ENV SHARDLINE_HOME=/tmp/shardline
WORKDIR /opt/shardline/src
USER 10001:10001
